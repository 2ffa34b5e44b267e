//! Identifiers: run, attempt, step, microbatch, rank, and checked names.
//!
//! A name that the job or the environment gives (of a run, tensor or host) becomes part of a path
//! or of a report only after [`Name::new`] has checked it.

use serde::{Deserialize, Serialize};

/// Most bytes of a [`Name`]. File systems allow 255 bytes per path component; the rest is room for
/// prefixes and suffixes that backtape adds.
pub const MAX_NAME: usize = 200;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Index of a process in the job.
    Rank(u32)
}
number! {
    /// How many times this run was started before: 0 for the first launch.
    Attempt(u32)
}
number! {
    /// One optimizer step.
    Step(u64)
}
number! {
    /// Index of a gradient-accumulation slice inside a step.
    Microbatch(u32)
}

/// A checked name of a run or of a tensor: safe as one path component and as
/// one line of a report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Why a name from outside was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NameError {
    /// The name is empty.
    #[error("a name is empty: give it at least one character")]
    Empty,
    /// Longer than [`MAX_NAME`].
    #[error("the name starting `{0}` is longer than {MAX_NAME} bytes: shorten it")]
    TooLong(String),
    /// It contains a character with which it could leave its directory (`/`) or its line of a
    /// report (a newline).
    #[error(
        "the name {0:?} holds {1:?}: use letters, digits and . _ - + = @ : [ ] , only, not starting with a dot"
    )]
    Character(String, char),
}

impl Name {
    /// Accepts ASCII letters, digits and a few joiners, not starting with a
    /// dot, so that no name can be `..`, absolute, hidden or hold a NUL.
    pub fn new(name: impl Into<String>) -> Result<Name, NameError> {
        let name = name.into();
        let Some(first) = name.chars().next() else {
            return Err(NameError::Empty);
        };
        if name.len() > MAX_NAME {
            return Err(NameError::TooLong(name.chars().take(40).collect()));
        }
        match name.chars().find(|c| !is_plain(*c)).or((first == '.').then_some('.')) {
            Some(c) => Err(NameError::Character(name.chars().take(80).collect(), c)),
            None => Ok(Name(name)),
        }
    }

    /// Makes a name of any text: each character that [`Name::new`] refuses is replaced by its bytes
    /// in hexadecimal, `/` by `=2F`.
    pub fn escaped(text: &str) -> Name {
        let mut name = String::new();
        for c in text.chars() {
            let written = match is_plain(c) && !(name.is_empty() && c == '.') {
                true => c.to_string(),
                false => c.to_string().bytes().map(|byte| format!("={byte:02X}")).collect(),
            };
            if name.len() + written.len() > MAX_NAME {
                break;
            }
            name += &written;
        }
        if name.is_empty() { Name("=".into()) } else { Name(name) }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-+=@:[],".contains(c)
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;
    fn try_from(name: String) -> Result<Name, NameError> {
        Name::new(name)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

/// The launcher's identifier of one launch of a job, the same on all its ranks: `job-17`, or
/// `job-17/2` if the launcher also counts the restarts of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LaunchName {
    /// The part that stays the same when the job is restarted.
    pub name: Name,
    /// How often the job was restarted under this name, if the launcher counts that.
    pub restart: Option<u32>,
}

impl LaunchName {
    /// Reads `NAME` or `NAME/RESTART`.
    pub fn new(text: &str) -> Result<LaunchName, NameError> {
        let counted = text.rsplit_once('/').and_then(|(name, n)| Some((name, n.parse().ok()?)));
        match counted {
            Some((name, restart)) => {
                Ok(LaunchName { name: Name::new(name)?, restart: Some(restart) })
            }
            None => Ok(LaunchName { name: Name::new(text)?, restart: None }),
        }
    }

    /// True when both launches have the same name and this one has the lower restart count.
    pub fn precedes(&self, other: &LaunchName) -> bool {
        let counted = self.restart.zip(other.restart);
        self.name == other.name && counted.is_some_and(|(own, others)| own < others)
    }
}

impl std::fmt::Display for LaunchName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.restart {
            Some(restart) => write!(f, "{}/{restart}", self.name),
            None => self.name.fmt(f),
        }
    }
}

impl TryFrom<String> for LaunchName {
    type Error = NameError;
    fn try_from(text: String) -> Result<LaunchName, NameError> {
        LaunchName::new(&text)
    }
}

impl From<LaunchName> for String {
    fn from(name: LaunchName) -> String {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_precedes_those_that_the_same_launcher_counts_after_it() {
        let launch = |text| LaunchName::new(text).unwrap();
        assert!(launch("job/1").precedes(&launch("job/2")));
        for (first, other) in [("job/2", "job/2"), ("job/3", "job/2"), ("job/1", "other/2")] {
            assert!(!launch(first).precedes(&launch(other)), "{first} {other}");
        }
        assert!(!launch("job").precedes(&launch("job/1")), "who does not count says nothing");
        assert_eq!(launch("job/7").to_string(), "job/7");
        for hostile in ["", "/3", "a/b", "../x/1", "job/-1", "a\nb"] {
            assert!(LaunchName::new(hostile).is_err(), "{hostile:?} was accepted");
        }
    }

    #[test]
    fn no_name_can_leave_its_directory_or_its_line() {
        for hostile in [
            "",
            ".",
            "..",
            "../x",
            "/etc/passwd",
            "a/b",
            "a\0b",
            "a\nb",
            ".hidden",
            "a\\b",
            "é",
            "a b",
        ] {
            assert!(Name::new(hostile).is_err(), "{hostile:?} was accepted");
            let escaped = Name::escaped(hostile);
            assert!(Name::new(escaped.as_str()).is_ok(), "{hostile:?} became {escaped}");
        }
        assert_eq!(Name::escaped("../x\u{1b}").as_str(), "=2E.=2Fx=1B");
        assert!(Name::new(Name::escaped(&"\n".repeat(MAX_NAME)).as_str()).is_ok());
        assert!(Name::new("x".repeat(MAX_NAME + 1)).is_err());
        for plain in ["q", "layers.0.attn.q_proj", "run-a", "dk_label", "opt.mu[3]"] {
            assert_eq!(Name::escaped(plain), Name::new(plain).expect("it is plain"));
        }
    }
}
