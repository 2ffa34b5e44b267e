//! What `--compare` asks for: roles of the loss head, and patterns of tensor
//! names (`layers.*`, `layers.?.out`, `layers.[0-3].*`), in any mixture.

use backtape::role::Role;
use backtape::shard::TensorKey;
use glob::Pattern;

use crate::algebra;

/// Roles and patterns; empty asks for everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// Roles of the head.
    pub roles: Vec<Role>,
    /// Patterns of tensor names that are no role.
    pub patterns: Vec<Named>,
    /// The step: what became of every parameter's gradient.
    pub step: bool,
}

/// One pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    text: String,
    pattern: Pattern,
}

/// A word of `--compare` that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "{word:?} is no pattern of tensor names: {why} at character {position}; `*`, `?` and `[...]` are known"
)]
pub struct PatternError {
    word: String,
    why: &'static str,
    position: usize,
}

impl Asked {
    /// Reads the words of `--compare`.
    pub fn parse(words: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Asked, PatternError> {
        let mut asked = Asked::default();
        for word in words {
            asked.add(word.as_ref())?;
        }
        Ok(asked)
    }

    fn add(&mut self, word: &str) -> Result<(), PatternError> {
        if word == algebra::WORD {
            self.step = true;
            return Ok(());
        }
        if let Some(role) = Role::from_name(word) {
            self.roles.push(role);
            return Ok(());
        }
        let wrong = |error: glob::PatternError| PatternError {
            word: word.into(),
            why: error.msg,
            position: error.pos + 1,
        };
        let pattern = Pattern::new(word).map_err(wrong)?;
        self.patterns.push(Named { text: word.into(), pattern });
        Ok(())
    }

    /// True when nothing in particular was asked for.
    pub fn everything(&self) -> bool {
        self.roles.is_empty() && self.patterns.is_empty() && !self.step
    }

    /// True when the step is to be judged.
    pub fn wants_step(&self) -> bool {
        self.step || self.everything()
    }

    /// True when the head is to be replayed.
    pub fn wants_head(&self) -> bool {
        !self.step || !self.roles.is_empty()
    }

    /// True when a pattern names this tensor.
    pub fn names(&self, key: &TensorKey) -> bool {
        self.patterns.iter().any(|named| named.matches(key))
    }
}

impl Named {
    /// A name may itself hold brackets: `layers[0]` names the tensor of that
    /// name before it is a pattern.
    pub fn matches(&self, key: &TensorKey) -> bool {
        self.text == key.tensor.as_str() || self.pattern.matches(key.tensor.as_str())
    }

    /// True when it may be a name that was misspelt: it has no wildcard.
    pub fn is_plain(&self) -> bool {
        !self.text.contains(['*', '?', '['])
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<&[Role]> for Asked {
    fn from(roles: &[Role]) -> Asked {
        Asked { roles: roles.to_vec(), patterns: Vec::new(), step: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::fixture::key;

    #[test]
    fn roles_and_patterns_mix_and_a_name_with_brackets_names_itself() {
        let asked = Asked::parse(["layers.*", "dq", "x[1]", "b?.[0-2]"]).unwrap();
        assert_eq!((asked.roles.as_slice(), asked.patterns.len()), (&[Role::Dq][..], 3));
        for (name, named) in [
            ("layers.0.out", true),
            ("layer.0", false),
            ("x[1]", true),
            ("x1", true),
            ("b7.2", true),
            ("b7.3", false),
            ("dq", false),
        ] {
            assert_eq!(asked.names(&key(name)), named, "{name}");
        }
    }

    #[test]
    fn a_broken_pattern_is_refused_in_one_sentence_that_says_where() {
        let error = Asked::parse(["layers.[0"]).unwrap_err().to_string();
        assert!(error.contains("layers.[0") && error.contains("character 8"), "{error}");
    }
}
