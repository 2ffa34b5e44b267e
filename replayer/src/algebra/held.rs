//! Which optimizer holds a parameter, and on which ranks it took its step.

use std::collections::BTreeSet;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes::{self, Cause};
use super::declaration::Declaration;
use super::inventory::Piece;
use super::judge::{Judge, ranks};
use super::outcome::{Divergence, Judged, Outcome, Stage};

impl Judge<'_> {
    /// A parameter that no optimizer holds, or whose step some ranks alone took.
    pub(super) fn held(&self, parameter: &str) -> Vec<Judged> {
        self.skipped_by_some(parameter).or_else(|| self.not_held(parameter)).into_iter().collect()
    }

    /// Ranks that left out the step that others took of the same parameter.
    fn skipped_by_some(&self, parameter: &str) -> Option<Judged> {
        let mut skipped = BTreeSet::new();
        let mut stepped = BTreeSet::new();
        for (rank, declared) in &self.inventory.declared {
            match is_skipped(declared, parameter) {
                Some(true) => skipped.insert(*rank),
                Some(false) if self.is_changed(*rank, parameter) == Some(true) => {
                    stepped.insert(*rank)
                }
                _ => false,
            };
        }
        let is_left = |rank: &Rank| self.is_changed(*rank, parameter) != Some(true);
        let is_split = !stepped.is_empty() && !skipped.is_empty() && skipped.iter().all(is_left);
        let [skipped, stepped] = [skipped, stepped].map(|own| own.into_iter().collect::<Vec<_>>());
        let key = self.inventory.key(parameter, &Part::After).filter(|_| is_split)?;
        let words = format!(
            "{} left the optimizer's step out, and {} took it",
            ranks(&skipped),
            ranks(&stepped)
        );
        Some(self.without_step(parameter, (key, &skipped), words, causes::INF_SKIPPED))
    }

    /// A parameter with a gradient that is in no optimizer, where one holds a tensor of its shape
    /// which is no parameter and gets no gradient. That an optimizer leaves parameters out is no
    /// fault by itself.
    fn not_held(&self, parameter: &str) -> Option<Judged> {
        let inventory = self.inventory;
        let key = inventory.key(parameter, &Part::Reduced)?;
        let shape = &inventory.dump.tensors()[key].shape;
        let is_dead = |declared: &&Declaration| {
            let mut foreign = declared.optimizers.iter().flat_map(|own| &own.foreign);
            foreign.any(|tensor| !tensor.grad && tensor.shape == *shape)
        };
        let is_lost = |rank: &Rank| {
            let declared = inventory.declared.get(rank).filter(is_dead);
            let own = declared.and_then(|declared| declared.parameters.get(parameter));
            own.is_some_and(|own| own.optimizer.is_none() && own.trainable == Some(true))
                && self.is_changed(*rank, parameter) == Some(false)
        };
        let lost: Vec<Rank> = inventory.holders(key).into_iter().filter(is_lost).collect();
        (!lost.is_empty()).then(|| {
            let words = "no optimizer holds it, and it did not change; an optimizer holds a tensor \
                         of its shape that is no parameter of the models and has no gradient";
            self.without_step(parameter, (key, &lost), words.into(), causes::NOT_HELD)
        })
    }

    /// Whether a rank's part of the parameter is another after the step; `None` where it recorded
    /// no value before and after it.
    fn is_changed(&self, rank: Rank, parameter: &str) -> Option<bool> {
        let hashes = |part: &Part| {
            let key = self.inventory.key(parameter, part)?;
            Some(self.inventory.hashes(key, rank)).filter(|hashes| !hashes.is_empty())
        };
        Some(hashes(&Part::Before)? != hashes(&Part::After)?)
    }

    /// A parameter to which nothing of its step came on some ranks.
    fn without_step(
        &self,
        parameter: &str,
        (key, ranks): (&TensorKey, &[Rank]),
        words: String,
        cause: Cause,
    ) -> Judged {
        let divergence = Divergence {
            reason: words.clone(),
            factor: Some(0.0),
            error: 1.0,
            floor: 0.0,
            worst: None,
            reading: None,
            readings: vec![cause.reads(words)],
        };
        let result = Ok(Outcome::Diverged(Box::new(divergence)));
        self.judged(Stage::Update, parameter, (key, &self.whole(key, ranks)), result)
    }

    /// All of a tensor, as ranks hold it together.
    fn whole(&self, key: &TensorKey, ranks: &[Rank]) -> Piece {
        let shape = self.inventory.dump.tensors()[key].shape.iter();
        let place = shape.map(|extent| (0, *extent)).collect();
        Piece { ranks: ranks.to_vec(), place: IndexBox(place) }
    }
}

/// Whether the optimizer of a parameter left its step out; `None` where none holds it.
fn is_skipped(declared: &Declaration, parameter: &str) -> Option<bool> {
    let (optimizer, _) = declared.optimizer_of(parameter)?;
    Some(optimizer.skipped || (declared.skipped && declared.optimizers.len() == 1))
}
