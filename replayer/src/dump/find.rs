//! Finds the tensor of a step by the name that a user typed.

use backtape::identity::{Microbatch, Name, NameError};
use backtape::shard::{TensorKey, When};

use super::StepDump;
use crate::spelling::hint;

/// Most tensors that a sentence names; the others are only counted.
const NAMED: usize = 24;

/// Why a name does not identify one tensor of the step.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FindError {
    #[error("{name:?} is no name of a tensor")]
    Name { name: String, source: NameError },
    #[error("no {name}{}{}; the step holds: {}", of(*microbatch), meant(name, recorded), some(recorded))]
    Absent { name: String, microbatch: Option<u32>, recorded: Vec<TensorKey> },
    #[error("{name} was captured for microbatches {}: choose one, as in --microbatch {}", numbers(microbatches), microbatches[0])]
    Microbatch { name: String, microbatches: Vec<u32> },
    #[error("{name} was captured at several moments: choose {}", moments(found))]
    Moment { name: String, found: Vec<TensorKey> },
}

impl StepDump {
    /// The tensor of this name. The microbatch may be left out if there is only one. If several
    /// tensors match (by microbatch or moment of capture) the error lists them. A tensor that
    /// activation checkpointing recomputed is only found by its moment.
    pub fn find(
        &self,
        name: &str,
        microbatch: Option<u32>,
        when: Option<When>,
    ) -> Result<TensorKey, FindError> {
        let tensor =
            Name::new(name).map_err(|source| FindError::Name { name: name.into(), source })?;
        let moment = |key: &TensorKey| match when {
            None => key.when != Some(When::Recompute),
            Some(_) => key.when == when,
        };
        let of_name: Vec<&TensorKey> =
            self.tensors().keys().filter(|key| key.tensor == tensor && moment(key)).collect();
        let wanted = microbatch.map(Microbatch);
        let matches: Vec<&TensorKey> =
            of_name.iter().filter(|key| key.microbatch == wanted).copied().collect();
        let name = name.to_string();
        match matches.as_slice() {
            [key] => Ok((*key).clone()),
            // With a single microbatch there is nothing to choose.
            [] if microbatch.is_none() && of_name.len() == 1 => Ok(of_name[0].clone()),
            [] => {
                let mut microbatches: Vec<u32> =
                    of_name.iter().filter_map(|key| Some(key.microbatch?.0)).collect();
                microbatches.dedup();
                match microbatch {
                    None if !microbatches.is_empty() => {
                        Err(FindError::Microbatch { name, microbatches })
                    }
                    _ => {
                        let keys = self.tensors().keys().cloned().collect();
                        Err(FindError::Absent { name, microbatch, recorded: keys })
                    }
                }
            }
            several => {
                let matches = several.iter().map(|key| (*key).clone()).collect();
                Err(FindError::Moment { name, found: matches })
            }
        }
    }
}

fn of(microbatch: Option<u32>) -> String {
    microbatch.map(|number| format!(" of microbatch {number}")).unwrap_or_default()
}

fn meant(name: &str, keys: &[TensorKey]) -> String {
    hint(name, keys.iter().map(|key| key.tensor.as_str()))
}

fn some(keys: &[TensorKey]) -> String {
    let mut shown: Vec<String> = keys.iter().take(NAMED).map(TensorKey::to_string).collect();
    if keys.len() > NAMED {
        shown.push(format!("and {} more", keys.len() - NAMED));
    }
    shown.join(", ")
}

fn numbers(microbatches: &[u32]) -> String {
    let shown: Vec<String> = microbatches.iter().map(u32::to_string).collect();
    shown.join(", ")
}

/// The choices of moments, in the words of `--when` and of Python's `when=`.
fn moments(keys: &[TensorKey]) -> String {
    let word = |key: &TensorKey| {
        let json = key.when.and_then(|when| serde_json::to_value(when).ok());
        json.and_then(|word| Some(format!("when {}", word.as_str()?)))
    };
    let words: Vec<String> =
        keys.iter().map(|key| word(key).unwrap_or_else(|| "no moment".into())).collect();
    words.join(" or ")
}
