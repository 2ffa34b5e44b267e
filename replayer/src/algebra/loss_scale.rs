//! A loss scale that the stages themselves do not show: one that nothing took out, and one that was
//! taken out before the ranks' gradients were brought together.

use backtape::part::Part;

use super::causes;
use super::domain::Domain;
use super::factor::is_near;
use super::inventory::Piece;
use super::judge::Judge;
use super::outcome::{Divergence, Judged, Outcome, Stage};
use super::sums::SumOf;
use crate::number::short;

impl Judge<'_> {
    /// A gradient that the optimizer took with the loss scale in it: a GradScaler or the job multiplied
    /// the loss, and neither divided what came of it.
    pub(super) fn scale_kept(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let Some(key) = inventory.key(parameter, &Part::Reduced) else { return Vec::new() };
        if inventory.key(parameter, &Part::Unscaled).is_some() {
            return Vec::new();
        }
        let kept = |piece: Piece| {
            let rank = piece.ranks[0];
            let declared = inventory.declared.get(&rank)?;
            let scale = declared.scaled_loss.filter(|scale| *scale != 1.0)?;
            let (optimizer, _) = declared.optimizer_of(parameter)?;
            let domain = Domain::of(inventory, rank, parameter);
            let addends = inventory.addends(&domain, parameter).ok()?;
            let place = &piece.place;
            let is_times = |factor: f64| {
                let (weights, addends) = (vec![factor; addends.len()], &addends[..]);
                let of = SumOf { key, rank, place, addends, weights: &weights, sent: domain.sent };
                Some(self.sum(&of).ok()?.excess(&self.bound(place)).is_none())
            };
            // A gradient of zeros is both.
            let is_kept = is_times(domain.scale)? && !is_times(domain.scale / scale)?;
            (is_kept && optimizer.has_stepped()).then(|| {
                let words = format!(
                    "the loss was multiplied by {scale}, and the optimizer took the gradient with \
                     that scale in it"
                );
                let reading = causes::SCALE_LEFT.reads(words);
                let divergence = Divergence::told(reading, Some(scale), scale - 1.0);
                let result = Outcome::Diverged(Box::new(divergence));
                self.judged(Stage::Unscale, parameter, (key, &piece), Ok(result))
            })
        };
        inventory.pieces(key, &|rank| rank).into_iter().filter_map(kept).collect()
    }

    /// A gradient of which no sum with the loss scale in it was recorded: jobs that divide each
    /// rank's gradient before they bring them together have none.
    pub(super) fn reduced_and_unscaled(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let Some(key) = inventory.key(parameter, &Part::Unscaled) else { return Vec::new() };
        let judge = |piece: &Piece| {
            let rank = piece.ranks[0];
            let mut domain = Domain::of(inventory, rank, parameter);
            let scale = inventory.declared.get(&rank).and_then(|own| own.scale_of(parameter));
            let addends = inventory.addends(&domain, parameter);
            let scaled = scale.ok_or_else(|| format!("rank {rank} declares no loss scale"));
            let result = scaled.and_then(|scale| {
                domain.scale /= scale;
                self.sum_of_addends((parameter, key, piece), &addends?, &domain)
            });
            let result = result.map(|(outcome, _)| told_as_unscaling(outcome, scale));
            self.judged(Stage::Unscale, parameter, (key, piece), result)
        };
        inventory.pieces(key, &|rank| rank).iter().map(judge).collect()
    }
}

/// A factor of a sum that was reduced and divided by the loss scale is that of either of the two.
fn told_as_unscaling(outcome: Outcome, scale: Option<f64>) -> Outcome {
    let (Outcome::Diverged(mut divergence), Some(scale)) = (outcome.clone(), scale) else {
        return outcome;
    };
    let Some(factor) = divergence.factor else { return outcome };
    let words = format!(
        "captured = {} x the sum of the gradients over the loss scale {scale}",
        short(factor)
    );
    let cause = match () {
        () if is_near(factor, scale) => causes::SCALE_LEFT,
        () if is_near(factor, 1.0 / scale) => causes::SCALE_TWICE,
        () => causes::UNKNOWN,
    };
    divergence.readings = vec![cause.reads(words)];
    Outcome::Diverged(divergence)
}
