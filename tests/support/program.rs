//! The real binaries, built once, run as a user would.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What a program printed and how it ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `replay` to its end.
pub(crate) fn replay<A: AsRef<OsStr>>(arguments: &[A]) -> Ended {
    ended(Command::new(replay_binary()).args(arguments))
}

/// The same with more in its environment.
pub(crate) fn replay_with(arguments: &[&str], environment: Vec<(&str, String)>) -> Ended {
    ended(Command::new(replay_binary()).args(arguments).envs(environment))
}

/// The same with the stand-in in the place of NVIDIA's libraries.
pub(crate) fn replay_on_standin(arguments: &[&str], environment: &[(&str, &str)]) -> Ended {
    ended(
        crate::standin::command(replay_binary()).args(arguments).envs(environment.iter().copied()),
    )
}

/// Asks with `coordinator` to its end.
pub(crate) fn coordinator(arguments: &[&str]) -> Ended {
    ended(Command::new(env!("CARGO_BIN_EXE_coordinator")).args(arguments))
}

fn ended(command: &mut Command) -> Ended {
    let output = command.output().unwrap();
    Ended {
        code: output.status.code().expect("it was killed"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// `replay` belongs to another package than this test, so cargo does not build it for us; asking
/// cargo keeps it from being a stale one. Asked for all that `cargo test` builds too, it finds
/// its libraries made: with other features for one package alone it would make them again.
fn replay_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let coordinator = Path::new(env!("CARGO_BIN_EXE_coordinator"));
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--bins", "--tests"]);
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        // What `cargo test` tells this test of its package: build scripts that ask for it (ring's)
        // would run again, and all that TLS is in would be compiled again, for minutes.
        let told =
            |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        let told = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(told));
        for (name, _) in told {
            build.env_remove(name);
        }
        if coordinator.parent().is_some_and(|folder| folder.ends_with("release")) {
            build.arg("--release");
        }
        let target = coordinator.parent().and_then(Path::parent).unwrap();
        assert!(build.env("CARGO_TARGET_DIR", target).status().unwrap().success());
        coordinator.with_file_name("replay")
    })
}
