//! The stand-in of NVIDIA's libraries: how a test has it.
//!
//! It is no GPU. It has the names and the documented behaviour of the functions of libcuda,
//! libnvrtc, libcublas and libnccl that the product calls, is strict about what they are given, and
//! runs on the CPU what it is told to run (`*.c` beside this). What runs on it shows that our calls
//! are as documented; of a GPU's arithmetic, speed and moods it shows nothing.
//!
//! Libraries are looked for when a process begins, so what is to find these is a process of its own.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Library, its sources, and the name that programs find it by.
const LIBRARIES: [(&str, &[&str]); 4] = [
    (
        "libcuda.so.1",
        &["calls.c", "streams.c", "memory.c", "driver.c", "copies.c", "events.c", "modules.c"],
    ),
    ("libnvrtc.so", &["nvrtc.c"]),
    ("libcublas.so", &["cublas.c"]),
    ("libnccl.so", &["nccl.c"]),
];

/// The folder of the libraries, which are compiled where they have not been yet.
fn folder() -> &'static Path {
    // Once for all threads of a process; processes take turns below.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(built)
}

fn built() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let here = here.map(|root| root.join("tests/standin")).find(|here| here.is_dir());
    let here = here.expect("the stand-in's sources");
    let mut hasher = DefaultHasher::new();
    let files = LIBRARIES.iter().flat_map(|(_, files)| files.iter()).chain(&["standin.h"]);
    for file in files {
        hasher.write(&std::fs::read(here.join(file)).expect("a source of the stand-in"));
    }
    let beside = std::env::current_exe().expect("the path of this test");
    let beside = beside.parent().expect("it lies in a folder");
    let folder = beside.join(format!("standin-{:016x}", hasher.finish()));
    if !folder.is_dir() {
        let new = beside.join(format!("standin-{}", std::process::id()));
        std::fs::create_dir_all(&new).expect("a folder for the stand-in");
        for (library, files) in LIBRARIES {
            compile(&here, files, &new, library);
        }
        std::os::unix::fs::symlink("libcuda.so.1", new.join("libcuda.so")).expect("a link");
        // Another test may have been faster.
        let _ = std::fs::rename(&new, &folder);
    }
    folder
}

fn compile(here: &Path, files: &[&str], to: &Path, library: &str) {
    let mut compiler = Command::new("cc");
    compiler.args([
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
    ]);
    compiler.args(files.iter().map(|file| here.join(file)));
    // The others are found beside whoever needs them, under the name that the driver has.
    match library {
        "libcuda.so.1" => compiler.args(["-Wl,-soname,libcuda.so.1", "-ldl"]),
        _ => compiler.arg(to.join("libcuda.so.1")).arg("-Wl,-rpath,$ORIGIN"),
    };
    let status = compiler.arg("-o").arg(to.join(library)).status().expect("cc runs");
    assert!(status.success(), "cc compiles the stand-in's {library}");
}

/// A process that finds the stand-in where it looks for NVIDIA's libraries.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", folder());
    for name in ["ORDER", "LATE", "DEVICES", "POOLS", "BYTES", "OLD", "CAPTURING"] {
        command.env_remove(format!("BACKTAPE_STANDIN_{name}"));
    }
    command
}
