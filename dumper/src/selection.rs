//! Which steps are recorded: `0`, `0,100-110`, `every:1000`, or several of them.

use std::str::FromStr;

/// A set of steps, as `BACKTAPE_STEPS` spells it.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Why a selection cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the steps {text:?} cannot be read at {term:?}: {problem}; write for example 0 or 0,100-110 or every:1000"
)]
pub struct SelectionError {
    text: String,
    term: String,
    problem: &'static str,
}

impl StepSelection {
    /// No step at all.
    pub fn none() -> StepSelection {
        StepSelection { terms: Vec::new() }
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
        let terms = text.split(',').map(|term| {
            parse_term(term.trim()).map_err(|problem| SelectionError {
                text: text.chars().take(200).collect(),
                term: term.trim().chars().take(80).collect(),
                problem,
            })
        });
        let terms = terms.collect::<Result<_, _>>()?;
        Ok(StepSelection { terms })
    }
}

impl std::fmt::Display for StepSelection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    let number = |text: &str| {
        let digits = text.trim();
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let parsed = plain.then(|| digits.parse::<u64>().ok()).flatten();
        parsed.ok_or("a step is a whole number")
    };
    if term.is_empty() {
        return Err("nothing stands there");
    }
    if let Some(stride) = term.strip_prefix("every:") {
        return match number(stride)? {
            0 => Err("every:0 names no step"),
            stride => Ok(Term::Every(stride)),
        };
    }
    match term.split_once('-') {
        None => number(term).map(|step| Term::Range(step, step)),
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err("the range ends before it starts");
            }
            Ok(Term::Range(first, last))
        }
    }
}

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
        for text in ["0", "0,100-110", "every:1000"] {
            assert_eq!(text.parse::<StepSelection>().unwrap().to_string(), text);
        }
    }
}
