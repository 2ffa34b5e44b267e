//! What was not recorded, and why, as a list of bounded length: a full disk must not fill the
//! memory with explanations, and the step's close must fit into one message.

use backtape::identity::Microbatch;
use backtape::manifest::{EVERYTHING, Omission};

use crate::Rank;

/// Most omissions of a step that are named one by one; the rest are counted. With [`MAX_REASON`]
/// they stay far below the coordinator's limit for a message.
const MAX_NAMED: usize = 4096;

/// Bytes of a reason or of a tensor's name that are kept.
const MAX_REASON: usize = 500;

/// What one rank gave up on in one step.
#[derive(Default)]
pub(crate) struct Omissions {
    named: Vec<(String, Option<u32>, String)>,
    unnamed: u64,
}

impl Omissions {
    pub(crate) fn add(&mut self, tensor: &str, microbatch: Option<u32>, reason: &str) {
        if self.named.len() < MAX_NAMED {
            self.named.push((clip(tensor), microbatch, clip(reason)));
        } else {
            self.unnamed += 1;
        }
    }

    pub(crate) fn append(&mut self, other: Omissions) {
        self.unnamed += other.unnamed;
        for (tensor, microbatch, reason) in other.named {
            self.add(&tensor, microbatch, &reason);
        }
    }

    /// True where this rank stopped recording before the step's end.
    pub(crate) fn of_everything(&self) -> bool {
        self.named.iter().any(|(tensor, ..)| tensor == EVERYTHING)
    }

    /// The omissions of this rank as the coordinator keeps them.
    pub(crate) fn records(&self, rank: u32) -> Vec<Omission> {
        let omission_of = |(tensor, microbatch, reason): &(String, Option<u32>, String)| Omission {
            rank: Rank(rank),
            tensor: tensor.clone(),
            microbatch: microbatch.map(Microbatch),
            reason: reason.clone(),
        };
        let mut records: Vec<_> = self.named.iter().map(omission_of).collect();
        if self.unnamed > 0 {
            let reason =
                format!("{} further captures were omitted and are not named", self.unnamed);
            records.push(omission_of(&(EVERYTHING.into(), None, reason)));
        }
        records
    }
}

/// An omission as one line of the summary.
pub(crate) fn sentence(step: u64, tensor: &str, microbatch: Option<u32>, reason: &str) -> String {
    let part = microbatch.map_or(String::new(), |mb| format!(" microbatch {mb}"));
    format!("{}{part} of step {step}: {}", clip(tensor), clip(reason))
}

fn clip(text: &str) -> String {
    match text.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}
