//! Who and when: run, attempt, step, microbatch, rank, and names from outside.
//!
//! A name that comes from outside (run, tensor, host) becomes part of a path or
//! of a report only after [`Name::new`] has looked at it.

use serde::{Deserialize, Serialize};

/// Longest name accepted from outside. File systems allow 255 bytes a
/// component; the rest is room for our own prefixes and suffixes.
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
    /// Nothing there.
    #[error("a name is empty: give it at least one character")]
    Empty,
    /// Longer than [`MAX_NAME`].
    #[error("the name starting `{0}` is longer than {MAX_NAME} bytes: shorten it")]
    TooLong(String),
    /// Holds a character that could leave its directory or its line.
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
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+=@:[],".contains(c);
        match name.chars().find(|c| !allowed(*c)).or((first == '.').then_some('.')) {
            Some(c) => Err(NameError::Character(name.chars().take(80).collect(), c)),
            None => Ok(Name(name)),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
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

#[cfg(test)]
mod tests {
    use super::*;

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
        }
        assert!(Name::new("x".repeat(MAX_NAME + 1)).is_err());
        for plain in ["q", "layers.0.attn.q_proj", "run-a", "dk_label", "opt.mu[3]"] {
            assert!(Name::new(plain).is_ok(), "{plain:?} was refused");
        }
    }
}
