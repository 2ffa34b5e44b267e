//! Gradients that were computed and are not there when the optimizer steps.

use backtape::identity::Rank;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::declaration::Declaration;
use super::inventory::Inventory;
use super::judge::Judge;
use super::outcome::{Divergence, Judged, Outcome, Stage};

/// What became of such a gradient, in words.
pub(super) const LOST: &str =
    "backward passes gave it a gradient, and `.grad` was empty when the optimizer stepped";

impl Judge<'_> {
    /// A parameter whose gradient was lost, where that of every parameter was. One that has none
    /// may be meant, as where a job empties `.grad` to leave a layer out.
    pub(super) fn lost(&self, parameter: &str) -> Option<Judged> {
        if self.inventory.has_gradients() {
            return None;
        }
        let (key, rank) = self.inventory.lost(parameter)?;
        let pieces = self.inventory.pieces(key, &|_| ());
        let piece = pieces.into_iter().find(|piece| piece.ranks.contains(&rank))?;
        let divergence = Divergence::told(causes::ACCUMULATE_WINDOW.reads(LOST), Some(0.0), 1.0);
        let result = Ok(Outcome::Diverged(Box::new(divergence)));
        Some(self.judged(Stage::Accumulate, parameter, (key, &piece), result))
    }
}

impl Inventory<'_> {
    /// A gradient of a microbatch, and whose it is, where the optimizer of the parameter stepped
    /// without one: nothing of a sum or a reduction was recorded on any rank.
    pub(super) fn lost(&self, parameter: &str) -> Option<(&TensorKey, Rank)> {
        let summed = [Part::Reduced, Part::Accumulated, Part::Clipped, Part::Unscaled];
        let is_there = summed.iter().any(|part| self.key(parameter, part).is_some());
        if is_there || self.withdrawn.contains_key(parameter) {
            return None;
        }
        // A gradient that could not be recorded, as one that is sparse, was there all the same.
        let was_empty = |declared: &Declaration| {
            let own = declared.parameters.get(parameter);
            own.is_some_and(|own| own.absent.contains_key("reduced"))
        };
        let has_stepped = |rank: Rank| {
            let declared = self.declared.get(&rank).filter(|own| was_empty(own));
            let of = declared.and_then(|own| own.optimizer_of(parameter));
            of.is_some_and(|(optimizer, _)| optimizer.has_stepped())
        };
        let grads = self.parameters.get(parameter)?.tensors.iter();
        let mut grads = grads.filter(|((part, _), _)| *part == Part::Grad);
        grads.find_map(|(_, key)| {
            let is_some = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
            let mut shards = self.dump.tensors()[key].shards.iter();
            let shard = shards.find(|shard| {
                has_stepped(self.dump.record(shard).rank)
                    && self.dump.intact_bytes(shard).is_some_and(is_some)
            })?;
            Some((key, self.dump.record(shard).rank))
        })
    }
}
