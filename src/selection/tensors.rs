//! Which tensors, by name: `q,k,dq*,!d*_label`.
//!
//! `*` stands for any characters, `?` for one, `[abc]` for one of a set. A name is selected if at
//! least one term without `!` matches it (or the list has none), and no term with `!` matches it.
//! The order of the terms does not matter.

use std::str::FromStr;

use glob::Pattern;
use serde::{Deserialize, Serialize};

use super::{SelectionError, spelled, terms};
use crate::identity::MAX_NAME;

const KIND: (&str, &str) = ("tensors", "q,k,dq*,!*_label");

/// A set of tensor names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TensorSelection {
    wanted: Vec<Pattern>,
    unwanted: Vec<Pattern>,
}

impl TensorSelection {
    /// True when no name is left out.
    pub fn is_all(&self) -> bool {
        self.wanted.is_empty() && self.unwanted.is_empty()
    }

    /// True when a tensor of this name is to be recorded.
    pub fn contains(&self, name: &str) -> bool {
        let wanted = self.wanted.is_empty() || self.wanted.iter().any(|p| p.matches(name));
        wanted && !self.unwanted.iter().any(|p| p.matches(name))
    }
}

impl FromStr for TensorSelection {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<TensorSelection, SelectionError> {
        let mut selection = TensorSelection::default();
        if text.trim() == "all" {
            return Ok(selection);
        }
        for term in terms(KIND, text)? {
            let wrong = |problem: String| SelectionError::new(KIND, text, term, problem);
            let (glob, list) = match term.strip_prefix('!') {
                Some(glob) => (glob.trim(), &mut selection.unwanted),
                None => (term, &mut selection.wanted),
            };
            if glob.is_empty() {
                return Err(wrong("nothing stands there".into()));
            }
            // Names are not longer than this, and the limit keeps matching cheap.
            if glob.len() > MAX_NAME {
                return Err(wrong(format!("a glob has at most {MAX_NAME} bytes")));
            }
            let pattern = Pattern::new(glob).map_err(|error| wrong(error.msg.into()))?;
            list.push(pattern);
        }
        Ok(selection)
    }
}

impl std::fmt::Display for TensorSelection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_all() {
            return f.write_str("all");
        }
        let wanted = self.wanted.iter().map(|p| p.as_str().to_string());
        let unwanted = self.unwanted.iter().map(|p| format!("!{p}"));
        f.write_str(&wanted.chain(unwanted).collect::<Vec<_>>().join(","))
    }
}

spelled!(TensorSelection);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Matches a glob letter by letter, without the `glob` crate.
    fn matches(glob: &[char], name: &[char]) -> bool {
        match glob.split_first() {
            None => name.is_empty(),
            Some(('*', rest)) => (0..=name.len()).any(|skip| matches(rest, &name[skip..])),
            Some(('?', rest)) => !name.is_empty() && matches(rest, &name[1..]),
            Some((letter, rest)) => name.first() == Some(letter) && matches(rest, &name[1..]),
        }
    }

    fn naive(text: &str, name: &str) -> bool {
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        let hit = |glob: &str| matches(&letters(glob), &letters(name));
        let terms: Vec<&str> = text.split(',').collect();
        let wanted: Vec<&&str> = terms.iter().filter(|term| !term.starts_with('!')).collect();
        (wanted.is_empty() || wanted.iter().any(|term| hit(term)))
            && !terms.iter().any(|term| term.strip_prefix('!').is_some_and(hit))
    }

    proptest! {
        /// Goal: a selection selects what the module's documentation says. Method: random short
        /// globs over few letters, so that some match and some do not, against [`matches`].
        #[test]
        fn a_selection_matches_what_the_naive_definition_matches(
            terms in proptest::collection::vec("!?[dk_.?]{0,2}[*dk]?[dk_?]{0,2}[*d]", 1..5),
            names in proptest::collection::vec("[dk_.]{1,6}", 1..20),
        ) {
            let text = terms.join(",");
            // The `glob` crate gives `**` a special meaning for paths, and names are not paths.
            prop_assume!(!text.contains("**"));
            let selection: TensorSelection = text.parse().unwrap();
            for name in &names {
                prop_assert_eq!(selection.contains(name), naive(&text, name), "{} {}", text, name);
            }
            let again: TensorSelection = selection.to_string().parse().unwrap();
            prop_assert_eq!(again, selection);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<TensorSelection>();
        }
    }

    #[test]
    fn names_are_chosen_by_glob_and_left_out_by_exclamation_mark() {
        let selection: TensorSelection = "q, k,dq*,!d*_label".parse().unwrap();
        let chosen = ["q", "k", "dq", "dq_lse", "dq_label", "dk", "lse"];
        let chosen: Vec<_> = chosen.into_iter().filter(|name| selection.contains(name)).collect();
        assert_eq!(chosen, ["q", "k", "dq", "dq_lse"]);
        let without: TensorSelection = "!logits".parse().unwrap();
        assert!(without.contains("q") && !without.contains("logits"));
    }

    #[test]
    fn what_cannot_be_read_is_named_with_an_example_of_what_can() {
        let long = "x".repeat(300);
        let many = vec!["q"; 2000].join(",");
        for wrong in ["", "q,,k", "!", "[", "a**b", &long, &many] {
            let error = wrong.parse::<TensorSelection>().unwrap_err().to_string();
            assert!(error.contains("dq*") && error.len() < 600, "{wrong:?}: {error}");
        }
    }

    #[test]
    fn a_glob_that_was_made_to_be_slow_is_not() {
        let glob = "*a".repeat(99) + "b";
        let selection: TensorSelection = glob.parse().unwrap();
        assert!(!selection.contains(&"a".repeat(MAX_NAME)));
    }
}
