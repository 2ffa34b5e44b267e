//! Which steps are recorded: `0`, `0,100-110`, `every:1000`, several of them, or `none`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{SelectionError, range, spelled, terms};

const KIND: (&str, &str) = ("steps", "0 or 0,100-110 or every:1000");

/// Most steps that [`StepSelection::within`] tests one by one: a rank that is further behind counts
/// as absent.
const MAX_SCANNED: usize = 100_000;

/// A set of steps, as `BACKTAPE_STEPS` spells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StepSelection {
    terms: Vec<Term>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Term {
    /// These steps, both ends included.
    Range(u64, u64),
    /// Every step that this number divides.
    Every(u64),
}

impl StepSelection {
    /// No step at all.
    pub fn none() -> StepSelection {
        StepSelection { terms: Vec::new() }
    }

    /// These steps, both ends included.
    pub fn range(first: u64, last: u64) -> StepSelection {
        StepSelection { terms: vec![Term::Range(first, last)] }
    }

    /// The first `most` selected steps of a range.
    pub fn within(&self, first: u64, last: u64, most: usize) -> Vec<u64> {
        (first..=last).take(MAX_SCANNED).filter(|&step| self.contains(step)).take(most).collect()
    }

    /// True when this step is to be recorded.
    pub fn contains(&self, step: u64) -> bool {
        self.terms.iter().any(|term| match *term {
            Term::Range(first, last) => (first..=last).contains(&step),
            Term::Every(stride) => step.is_multiple_of(stride),
        })
    }
}

/// Step 0: the first place to look when two runs should agree.
impl Default for StepSelection {
    fn default() -> StepSelection {
        StepSelection { terms: vec![Term::Range(0, 0)] }
    }
}

impl FromStr for StepSelection {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<StepSelection, SelectionError> {
        if text.trim() == "none" {
            return Ok(StepSelection::none());
        }
        let terms = terms(KIND, text)?.map(|term| {
            parse_term(term).map_err(|problem| SelectionError::new(KIND, text, term, problem))
        });
        Ok(StepSelection { terms: terms.collect::<Result<_, _>>()? })
    }
}

impl std::fmt::Display for StepSelection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("none");
        }
        for (index, term) in self.terms.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match term {
                Term::Range(first, last) if first == last => write!(f, "{first}")?,
                Term::Range(first, last) => write!(f, "{first}-{last}")?,
                Term::Every(stride) => write!(f, "every:{stride}")?,
            }
        }
        Ok(())
    }
}

fn parse_term(term: &str) -> Result<Term, &'static str> {
    let rule = "a step is a whole number";
    let Some(stride) = term.strip_prefix("every:") else {
        return range(term, rule).map(|(first, last)| Term::Range(first, last));
    };
    match range(stride.trim(), rule)? {
        (0, 0) => Err("every:0 names no step"),
        (first, last) if first == last => Ok(Term::Every(first)),
        _ => Err(rule),
    }
}

spelled!(StepSelection);

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(text: &str) -> Vec<u64> {
        let selection: StepSelection = text.parse().unwrap();
        (0..=120).filter(|&step| selection.contains(step)).collect()
    }

    #[test]
    fn single_steps_ranges_and_strides_combine() {
        assert_eq!(chosen("0"), [0]);
        assert_eq!(chosen("7, 100-103"), [7, 100, 101, 102, 103]);
        assert_eq!(chosen("every:50,3"), [0, 3, 50, 100]);
    }

    #[test]
    fn what_cannot_be_read_is_named_with_an_example_of_what_can() {
        for wrong in
            ["", "x", "1,,2", "5-3", "every:0", "every:", "-1", "+1", "1.5", "99999999999999999999"]
        {
            let error = wrong.parse::<StepSelection>().unwrap_err().to_string();
            assert!(error.contains("every:1000"), "{wrong:?}: {error}");
        }
    }

    #[test]
    fn a_selection_prints_as_it_is_written() {
        for text in ["0", "0,100-110", "every:1000", "none"] {
            assert_eq!(text.parse::<StepSelection>().unwrap().to_string(), text);
        }
    }
}
