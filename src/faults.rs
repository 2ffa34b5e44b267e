//! Faults on purpose, for the campaigns of `tests/soak`: named points where a test kills the
//! process or has the I/O call fail, and faults that are seeded into the product to see whether
//! a harness notices.
//!
//! ```text
//! BACKTAPE_FAULTS="journal.sync=kill@3"            SIGKILL at the third pass
//! BACKTAPE_FAULTS="durable.link=ENOSPC@2+"         every link from the second on fails
//! BACKTAPE_FAULTS="*=EIO@17,seeded:no-fencing"     the 17th I/O call fails; and that fault
//! BACKTAPE_FAULTS="log:/tmp/points"                the name of each point passed
//! ```
//!
//! Only with the test-only feature `faults`: without it every call here is a constant that
//! the compiler removes, and no build for users can turn it on by accident.

#[cfg(not(feature = "faults"))]
mod absent {
    use std::io::{self, Write};

    /// Whether this build has its faults.
    pub const ACTIVE: bool = false;

    /// Where an I/O call may be made to fail, or the process to die.
    #[inline(always)]
    pub const fn point(_name: &'static str) -> io::Result<()> {
        Ok(())
    }

    /// Where the process may be made to die.
    #[inline(always)]
    pub const fn pass(_name: &'static str) {}

    /// Writes; may be made to fail, or to die, with half of it written.
    #[inline(always)]
    pub fn write_all(_name: &'static str, file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    /// Whether a fault was seeded here.
    #[inline(always)]
    pub const fn seeded(_name: &'static str) -> bool {
        false
    }
}

#[cfg(not(feature = "faults"))]
pub use absent::*;
#[cfg(feature = "faults")]
pub use present::*;

#[cfg(all(feature = "faults", not(debug_assertions)))]
compile_error!("the feature `faults` is for tests: it is not built with the release profile");

#[cfg(feature = "faults")]
mod present {
    use std::fs::File;
    use std::io::{self, Write};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::io::Errno;
    use rustix::process::{Signal, getpid, kill_process};

    /// Whether this build has its faults.
    pub const ACTIVE: bool = true;

    /// The variable that chooses them.
    pub const VARIABLE: &str = "BACKTAPE_FAULTS";

    /// What happens at a point.
    #[derive(Clone, Copy)]
    enum Action {
        Kill,
        Panic,
        Fail(Errno),
    }

    /// One chosen fault.
    struct Rule {
        /// `*`: any point.
        point: String,
        action: Action,
        /// Counted from 1, and whether every later pass is meant too.
        at: u64,
        onwards: bool,
        passed: AtomicU64,
    }

    #[derive(Default)]
    struct Plan {
        rules: Vec<Rule>,
        seeded: Vec<String>,
        log: Option<File>,
    }

    fn plan() -> &'static Plan {
        static PLAN: OnceLock<Plan> = OnceLock::new();
        PLAN.get_or_init(|| parse(&std::env::var(VARIABLE).unwrap_or_default()))
    }

    /// A plan that cannot be read must not pass for a run without faults: it panics.
    fn parse(text: &str) -> Plan {
        let mut plan = Plan::default();
        for term in text.split(',').filter(|term| !term.is_empty()) {
            if let Some(name) = term.strip_prefix("seeded:") {
                plan.seeded.push(name.into());
            } else if let Some(path) = term.strip_prefix("log:") {
                let opened = File::options().append(true).create(true).open(path);
                plan.log = Some(opened.expect("the log of the points can be opened"));
            } else {
                plan.rules.push(rule(term).expect("a fault is POINT=ACTION@N or POINT=ACTION@N+"));
            }
        }
        plan
    }

    fn rule(term: &str) -> Option<Rule> {
        let (point, rest) = term.split_once('=')?;
        let (action, count) = rest.split_once('@')?;
        let action = match action {
            "kill" => Action::Kill,
            "panic" => Action::Panic,
            "EIO" => Action::Fail(Errno::IO),
            "ENOSPC" => Action::Fail(Errno::NOSPC),
            "EDQUOT" => Action::Fail(Errno::DQUOT),
            "EINTR" => Action::Fail(Errno::INTR),
            _ => return None,
        };
        let at = count.trim_end_matches('+').parse().ok()?;
        let onwards = count.ends_with('+');
        Some(Rule { point: point.into(), action, at, onwards, passed: AtomicU64::new(0) })
    }

    /// What was chosen for this pass of a point, if anything.
    fn chosen(name: &'static str) -> Option<Action> {
        let plan = plan();
        if let Some(mut log) = plan.log.as_ref() {
            let _ = log.write_all(format!("{name}\n").as_bytes());
        }
        let mut found = None;
        for rule in plan.rules.iter().filter(|rule| rule.point == "*" || rule.point == name) {
            let pass = rule.passed.fetch_add(1, Ordering::SeqCst) + 1;
            if pass == rule.at || (rule.onwards && pass > rule.at) {
                found = Some(rule.action);
            }
        }
        found
    }

    fn act(action: Action, name: &'static str) -> io::Result<()> {
        match action {
            // SIGKILL: no destructor runs, no buffer is flushed. Delivered before the call returns.
            Action::Kill => loop {
                let _ = kill_process(getpid(), Signal::KILL);
            },
            Action::Panic => panic!("a panic on purpose at {name}"),
            Action::Fail(errno) => Err(errno.into()),
        }
    }

    /// Where an I/O call may be made to fail, or the process to die.
    pub fn point(name: &'static str) -> io::Result<()> {
        chosen(name).map_or(Ok(()), |action| act(action, name))
    }

    /// Where the process may be made to die.
    pub fn pass(name: &'static str) {
        let _ = point(name);
    }

    /// Writes; may be made to fail, or to die, with half of it written.
    pub fn write_all(name: &'static str, file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        match chosen(name) {
            None => file.write_all(bytes),
            Some(action) => {
                file.write_all(&bytes[..bytes.len() / 2])?;
                act(action, name)
            }
        }
    }

    /// Whether a fault was seeded here.
    pub fn seeded(name: &'static str) -> bool {
        plan().seeded.iter().any(|chosen| chosen == name)
    }
}
