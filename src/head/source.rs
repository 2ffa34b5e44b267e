//! Where the items of a head's declaration are from, and what was declared by hand beside what was
//! found.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{HeadDeclaration, written};

/// Where an item of a declaration is from, the surest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// An argument of the job's call, or what its graph or module has.
    Seen,
    /// Numbers or dtypes that flowed.
    Measured,
    /// Somebody wrote it.
    Declared,
    /// Nothing says it: its default, or what jobs usually have.
    Assumed,
}

/// The option of the dtypes; each of its points is an item of its own, as `dtypes.logits`.
pub const DTYPES: &str = "dtypes";

impl HeadDeclaration {
    /// Whether another declaration has the same options, wherever they are from.
    pub fn has_same_options(&self, other: &HeadDeclaration) -> bool {
        self.options_alone() == other.options_alone()
    }

    /// Its options, without what is said of them.
    pub(crate) fn options_alone(&self) -> HeadDeclaration {
        let (sources, by_hand, batches) = Default::default();
        HeadDeclaration { sources, by_hand, batches, ..self.clone() }
    }

    /// Where an item is from, the name of an option or a point of the dtypes; `None` in a dump that
    /// does not say it of any.
    pub fn source(&self, item: &str) -> Option<Source> {
        (!self.sources.is_empty())
            .then(|| self.sources.get(item).copied().unwrap_or(Source::Assumed))
    }

    /// Whether the job's call was seen and leaves an option at its default.
    pub fn is_seen_off(&self, option: &str) -> bool {
        self.source(option) == Some(Source::Seen)
            && written(self, option) == written(&HeadDeclaration::default(), option)
    }

    /// These options with what was declared by hand in their place; `None` where nothing was, or
    /// where it is not of the options' types.
    pub fn as_by_hand(&self) -> Option<HeadDeclaration> {
        if self.by_hand.is_empty() {
            return None;
        }
        let Value::Object(mut all) = serde_json::to_value(self.options_alone()).ok()? else {
            return None;
        };
        for (name, value) in &self.by_hand {
            match (all.get_mut(name), value) {
                (Some(Value::Object(points)), Value::Object(own)) if name == DTYPES => {
                    points.extend(own.clone());
                }
                _ => {
                    all.insert(name.clone(), value.clone());
                }
            }
        }
        serde_json::from_value(Value::Object(all)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> HeadDeclaration {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_dump_that_says_nothing_of_sources_is_read_and_written_as_before() {
        let head = read(r#"{"z_loss": 0.5}"#);
        assert_eq!((head.source("z_loss"), head.as_by_hand()), (None, None));
        let written = serde_json::to_string(&head).unwrap();
        assert!(!written.contains("sources") && !written.contains("by_hand"), "{written}");
    }

    #[test]
    fn what_no_source_is_given_of_is_assumed() {
        let head = read(r#"{"sources": {"z_loss": "seen", "dtypes.logits": "measured"}}"#);
        let of = ["z_loss", "dtypes.logits", "temperature"].map(|item| head.source(item).unwrap());
        assert_eq!(of, [Source::Seen, Source::Measured, Source::Assumed]);
    }

    #[test]
    fn what_was_declared_by_hand_takes_the_place_of_what_was_found_point_by_point() {
        let head = read(
            r#"{"ignore_label": -100, "dtypes": {"logits": "bf16", "output": "bf16"},
                "by_hand": {"ignore_label": 0, "dtypes": {"logits": "f32"}}}"#,
        );
        let by_hand = head.as_by_hand().unwrap();
        assert_eq!(by_hand.ignore_label, Some(0));
        assert_eq!((&by_hand.dtypes["logits"][..], &by_hand.dtypes["output"][..]), ("f32", "bf16"));
        let other = HeadDeclaration { z_loss: 1.0, ..head.clone() };
        let without = HeadDeclaration { by_hand: Default::default(), ..head.clone() };
        assert!(head.has_same_options(&without) && !head.has_same_options(&other));
    }
}
