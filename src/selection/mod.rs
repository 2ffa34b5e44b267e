//! The selection: which steps, tensors, ranks and microbatches are recorded, and how many bytes at
//! most.
//!
//! The job sets it (environment variables, arguments), a plan of the coordinator may replace parts
//! of it while the job runs, and the manifest contains it, so that a tensor that was not selected
//! is not mistaken for a lost one.

mod bytes;
mod indices;
mod order;
mod steps;
mod tensors;

use serde::{Deserialize, Serialize};

pub use bytes::ByteLimit;
pub use indices::IndexSelection;
pub use order::{Changes, Planned, Trigger};
pub use steps::StepSelection;
pub use tensors::TensorSelection;

/// Most bytes of the text of one part of a selection: limits the cost of parsing a hostile plan.
pub const MAX_TEXT_BYTES: usize = 16 << 10;

/// Most terms of one part: a longer list should use a range or a glob.
pub const MAX_TERMS: usize = 1024;

/// What is to be recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Selection {
    /// Which steps.
    pub steps: StepSelection,
    /// Which tensors, by their names.
    pub tensors: TensorSelection,
    /// Which ranks; the other ranks close their part of the step without files.
    pub ranks: IndexSelection,
    /// Which microbatches; a tensor without a microbatch is always selected.
    pub microbatches: IndexSelection,
    /// Larger tensors are not recorded. The size of the global tensor counts, so that every rank
    /// leaves out the same ones.
    pub max_tensor_bytes: Option<ByteLimit>,
    /// Most bytes of a step, as the sum of the sizes of its global tensors.
    pub max_step_bytes: Option<ByteLimit>,
}

/// What a text is meant to be, with an example.
type Kind = (&'static str, &'static str);

/// Why a selection cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the {what} {text:?} cannot be read at {term:?}: {problem}; write for example {example}",
    what = kind.0,
    example = kind.1
)]
pub struct SelectionError {
    /// What the text is meant to be, with an example.
    kind: Kind,
    text: String,
    term: String,
    problem: String,
}

impl SelectionError {
    fn new(kind: Kind, text: &str, term: &str, problem: impl Into<String>) -> SelectionError {
        let clipped = |text: &str, length| text.chars().take(length).collect();
        let (text, term) = (clipped(text, 200), clipped(term.trim(), 80));
        SelectionError { kind, text, term, problem: problem.into() }
    }
}

impl Selection {
    /// True when a selected rank records this tensor of this microbatch.
    pub fn wants(&self, tensor: &str, microbatch: Option<u32>) -> bool {
        let slice = microbatch.is_none_or(|index| self.microbatches.contains(index));
        slice && self.tensors.contains(tensor)
    }

    /// True when every tensor of the selected steps is recorded: then the manifest need not contain
    /// the selection.
    pub fn is_whole(&self) -> bool {
        Selection { steps: StepSelection::default(), ..self.clone() } == Selection::default()
    }

    /// The parts that leave something out, in words: `tensors q,k; ranks 0-3`.
    pub fn restrictions(&self) -> String {
        let mut parts = Vec::new();
        if !self.tensors.is_all() {
            parts.push(format!("tensors {}", self.tensors));
        }
        if !self.ranks.is_all() {
            parts.push(format!("ranks {}", self.ranks));
        }
        if !self.microbatches.is_all() {
            parts.push(format!("microbatches {}", self.microbatches));
        }
        if let Some(limit) = self.max_tensor_bytes {
            parts.push(format!("tensors of at most {limit}"));
        }
        if let Some(limit) = self.max_step_bytes {
            parts.push(format!("steps of at most {limit}"));
        }
        parts.join("; ")
    }

    /// This selection with the parts that a plan names replaced.
    pub fn with(&self, changes: &Changes) -> Selection {
        let current = self.clone();
        Selection {
            steps: changes.steps.clone().unwrap_or(current.steps),
            tensors: changes.tensors.clone().unwrap_or(current.tensors),
            ranks: changes.ranks.clone().unwrap_or(current.ranks),
            microbatches: changes.microbatches.clone().unwrap_or(current.microbatches),
            max_tensor_bytes: changes.max_tensor_bytes.or(current.max_tensor_bytes),
            max_step_bytes: changes.max_step_bytes.or(current.max_step_bytes),
        }
    }
}

/// Splits a comma-separated list into its terms; refuses a list that is too long.
fn terms(kind: Kind, text: &str) -> Result<impl Iterator<Item = &str> + use<'_>, SelectionError> {
    if text.len() > MAX_TEXT_BYTES {
        let problem = format!("it is longer than {MAX_TEXT_BYTES} bytes");
        return Err(SelectionError::new(kind, text, text, problem));
    }
    if text.split(',').count() > MAX_TERMS {
        let problem = format!("it has more than {MAX_TERMS} terms");
        return Err(SelectionError::new(kind, text, text, problem));
    }
    Ok(text.split(',').map(str::trim))
}

/// A whole number, or a range with both ends included.
fn range(term: &str, rule: &'static str) -> Result<(u64, u64), &'static str> {
    let number = |text: &str| {
        let digits = text.trim();
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse::<u64>().ok()).flatten().ok_or(rule)
    };
    if term.is_empty() {
        return Err("nothing stands there");
    }
    let (first, last) = match term.split_once('-') {
        None => number(term).map(|n| (n, n))?,
        Some((first, last)) => (number(first)?, number(last)?),
    };
    if first > last {
        return Err("the range ends before it starts");
    }
    Ok((first, last))
}

/// Has a type written in JSON as the text that `FromStr` reads and `Display` prints.
macro_rules! spelled {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = $crate::selection::SelectionError;
            fn try_from(text: String) -> Result<$name, Self::Error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }
    };
}
use spelled;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_survives_json_and_missing_parts_are_whole() {
        let text = r#"{"steps":"0,every:100","tensors":"q,!*_label","max_step_bytes":"2GiB"}"#;
        let read: Selection = serde_json::from_str(text).unwrap();
        assert!(read.wants("q", Some(3)) && !read.wants("k", None) && !read.is_whole());
        let again: Selection =
            serde_json::from_str(&serde_json::to_string(&read).unwrap()).unwrap();
        assert_eq!(again, read);
        assert_eq!(read.restrictions(), "tensors q,!*_label; steps of at most 2GiB");
        assert!(serde_json::from_str::<Selection>("{}").unwrap().is_whole());
    }

    #[test]
    fn a_plan_replaces_the_parts_that_it_names_and_no_others() {
        let selection = Selection {
            steps: "0".parse().unwrap(),
            ranks: "0-3".parse().unwrap(),
            ..Selection::default()
        };
        let changes = Changes { steps: Some("7".parse().unwrap()), ..Changes::default() };
        let planned = selection.with(&changes);
        assert!(planned.steps.contains(7) && !planned.steps.contains(0));
        assert_eq!(planned.ranks, selection.ranks);
    }
}
