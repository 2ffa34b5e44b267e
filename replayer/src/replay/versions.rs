//! The replays of one step as each group of ranks holds it, brought together: what ranks that
//! hold another k computed is judged by their own k.
//!
//! What one group's tokens alone went into is that group's comparison. What has one version and
//! was made of all tokens is right when it is right from any group's versions: which of them it
//! was made of is not known. What has several versions itself is judged in each.

use backtape::identity::Rank;
use backtape::shard::TensorKey;

use super::comparison::Comparison;
use super::outcome::{Outcome, StageOutcome, Status};
use crate::dump::versions::HeldBy;
use crate::head::HeadStep;

/// What was found of all versions, as one outcome.
pub(crate) fn joined(
    judged: &[(HeadStep<'_>, Outcome)],
    holders: &[HeldBy],
    disputed: &[TensorKey],
) -> Option<Outcome> {
    let mut all = judged.iter().zip(holders);
    let mut whole = all.next()?.0.1.clone();
    all.for_each(|((_, outcome), version)| whole.join(outcome.clone(), &version.ranks, disputed));
    Some(whole)
}

impl Outcome {
    /// Adds what was found of the step as `ranks` hold it; `disputed` are the tensors of which
    /// there are several versions.
    pub fn join(&mut self, other: Outcome, ranks: &[Rank], disputed: &[TensorKey]) {
        let disputed: Vec<String> = disputed.iter().map(TensorKey::to_string).collect();
        for (stage, other) in self.stages.iter_mut().zip(other.stages) {
            stage.join(other, ranks, &disputed);
        }
        self.cover_too(other.coverage);
        for item in other.not_checked {
            if !self.not_checked.contains(&item) {
                self.not_checked.push(item);
            }
        }
    }
}

impl StageOutcome {
    fn join(&mut self, other: StageOutcome, ranks: &[Rank], disputed: &[String]) {
        for comparison in other.comparisons {
            let same = |own: &&mut Comparison| {
                (own.microbatch, own.rank) == (comparison.microbatch, comparison.rank)
            };
            match self.comparisons.iter_mut().find(same) {
                Some(_) if disputed.contains(&comparison.source) => {
                    let rank = ranks.first().copied().or(comparison.rank);
                    self.comparisons.push(Comparison { rank, ..comparison });
                }
                Some(present) if present.excess.is_some() && comparison.excess.is_none() => {
                    *present = comparison
                }
                Some(_) => {}
                None => self.comparisons.push(comparison),
            }
        }
        if self.comparisons.is_empty() {
            if other.status == Status::Fail {
                (self.status, self.reason) = (other.status, other.reason);
            }
            return;
        }
        self.settle();
    }
}
