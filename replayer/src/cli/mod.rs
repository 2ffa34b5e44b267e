//! The command line of `replay`: arguments in, an exit code out.
//!
//! A thin shell over `postmortem`: arguments, the progress bar, colours and exit codes are here,
//! and nothing below this touches the terminal.

mod args;
mod cluster;
mod device;
mod error;
mod kernel;
mod look;
mod manual;
mod paint;
mod progress;
mod readings;
mod run;
mod written;

use std::ffi::OsString;
use std::io::Write;

use clap::Parser;

use self::error::CommandError;
use crate::postmortem::{RunError, caught};
use crate::report::text;

pub use cluster::Connect;

/// Exit codes of replay.
pub mod exit {
    use crate::dump::StepDump;
    use crate::report::schema::Verdict;

    /// Everything compared agreed.
    pub const AGREED: i32 = 0;
    /// Something diverged.
    pub const DIVERGED: i32 = 1;
    /// Wrong usage or environment.
    pub const USAGE: i32 = 2;
    /// The dump is incomplete or corrupt: no verdict on what depends on it.
    pub const INCOMPLETE: i32 = 3;
    /// The two runs differ, and nothing recorded says how much they may.
    pub const DIFFERS: i32 = 4;

    /// What a look at a step ends with.
    pub(super) fn of_step(dump: &StepDump) -> i32 {
        if dump.committed() { AGREED } else { INCOMPLETE }
    }

    /// What a verdict ends with.
    pub fn of(verdict: Verdict) -> i32 {
        match verdict {
            Verdict::Agreed => AGREED,
            Verdict::Diverged | Verdict::Misdeclared => DIVERGED,
            Verdict::Incomplete => INCOMPLETE,
            Verdict::Differs => DIFFERS,
        }
    }
}

/// Runs `replay` with these arguments, the program's name first.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    main_with(arguments, None)
}

/// The same where `connect` reaches a cluster.
pub fn main_with(
    arguments: impl IntoIterator<Item = OsString>,
    connect: Option<&Connect<'_>>,
) -> i32 {
    let parsed = match args::Arguments::try_parse_from(arguments) {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { exit::USAGE } else { exit::AGREED };
        }
    };
    let ended = caught(|| run::run(&parsed, connect));
    match ended.unwrap_or_else(|panicked| Err(RunError::from(panicked).into())) {
        Ok((text, code)) => {
            written::write_out(&text);
            code
        }
        Err(error) => {
            let code = error.exit_code();
            if let CommandError::Run(RunError::Panicked { found: Some(report), .. }) = &error {
                let before = paint::paint(&text::render(report));
                let _ = anstream::stdout().write_all(before.as_bytes());
            }
            let mut stderr = anstream::stderr();
            let _ = writeln!(stderr, "replay: {:#}", anyhow::Error::new(error));
            code
        }
    }
}
