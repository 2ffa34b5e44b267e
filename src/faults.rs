//! Fault injection for the soak tests in `tests/soak`: named points at which a test kills the
//! process or makes an I/O call fail, and seeded bugs, which show whether the tests detect them.
//!
//! ```text
//! BACKTAPE_FAULTS="journal.sync=kill@3"            SIGKILL at the third pass
//! BACKTAPE_FAULTS="durable.link=ENOSPC@2+"         every link from the second on fails
//! BACKTAPE_FAULTS="*=EIO@17,seeded:no-fencing"     the 17th I/O call fails; and that fault
//! BACKTAPE_FAULTS="log:/tmp/points"                the name of each point passed
//! ```
//!
//! All of it is compiled only with the feature `faults`, which only tests enable. Without it every
//! call here returns a constant and the compiler removes it.

#[cfg(not(feature = "faults"))]
mod absent {
    use std::io::{self, Write};

    /// Whether this build can inject faults.
    pub const ACTIVE: bool = false;

    /// A point before an I/O call: a test can return an error here or kill the process.
    #[inline(always)]
    pub const fn point(_name: &'static str) -> io::Result<()> {
        Ok(())
    }

    /// A point where a test can kill the process.
    #[inline(always)]
    pub const fn pass(_name: &'static str) {}

    /// Writes the bytes; a test can stop it with half of them written.
    #[inline(always)]
    pub fn write_all(_name: &'static str, file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    /// Whether the test seeded the bug of this name.
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

    /// Whether this build can inject faults.
    pub const ACTIVE: bool = true;

    /// The environment variable that chooses the faults.
    pub const VARIABLE: &str = "BACKTAPE_FAULTS";

    /// What is done at a point.
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
        /// The number of the pass, from 1; `onwards`: every later pass too.
        pass: u64,
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

    /// Reads the plan; panics if it cannot be read, so that it is not mistaken for a run without
    /// faults.
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
        let pass = count.trim_end_matches('+').parse().ok()?;
        let onwards = count.ends_with('+');
        Some(Rule { point: point.into(), action, pass, onwards, passed: AtomicU64::new(0) })
    }

    /// The action of the rule that matches this pass of a point, if there is one.
    fn chosen(name: &'static str) -> Option<Action> {
        let plan = plan();
        if let Some(mut log) = plan.log.as_ref() {
            let _ = log.write_all(format!("{name}\n").as_bytes());
        }
        let mut action = None;
        for rule in plan.rules.iter().filter(|rule| rule.point == "*" || rule.point == name) {
            let pass = rule.passed.fetch_add(1, Ordering::SeqCst) + 1;
            if pass == rule.pass || (rule.onwards && pass > rule.pass) {
                action = Some(rule.action);
            }
        }
        action
    }

    fn act(action: Action, name: &'static str) -> io::Result<()> {
        match action {
            // SIGKILL: no destructor runs and no buffer is flushed. It takes effect before the call
            // returns.
            Action::Kill => loop {
                let _ = kill_process(getpid(), Signal::KILL);
            },
            Action::Panic => panic!("a panic on purpose at {name}"),
            Action::Fail(errno) => Err(errno.into()),
        }
    }

    /// A point before an I/O call: a test can return an error here or kill the process.
    pub fn point(name: &'static str) -> io::Result<()> {
        chosen(name).map_or(Ok(()), |action| act(action, name))
    }

    /// A point where a test can kill the process.
    pub fn pass(name: &'static str) {
        let _ = point(name);
    }

    /// Writes the bytes; a test can stop it with half of them written.
    pub fn write_all(name: &'static str, file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        match chosen(name) {
            None => file.write_all(bytes),
            Some(action) => {
                file.write_all(&bytes[..bytes.len() / 2])?;
                act(action, name)
            }
        }
    }

    /// Whether the test seeded the bug of this name.
    pub fn seeded(name: &'static str) -> bool {
        plan().seeded.iter().any(|chosen| chosen == name)
    }
}
