//! Norms that clip nothing: those of no gradient, those that come after the optimizer's step, and
//! those that are no number.

use backtape::shard::TensorKey;

use super::causes;
use super::declaration::{Declaration, Limit, Norm};
use super::inventory::Piece;
use super::judge::Judge;
use super::outcome::{Divergence, Judged, Outcome, Stage};

impl Judge<'_> {
    /// Whether every rank gave no gradient at all to any function that computes a norm. One of several
    /// norms may be of a group that has no gradients in this step.
    pub(super) fn is_of_nothing(&self) -> bool {
        let mut norms = self.inventory.declared.values().flat_map(|own| &own.norms);
        norms.all(|norm| norm.of_nothing) && self.inventory.has_gradients()
    }

    /// A gradient that the job does not clip, where it clips others of the same optimizer.
    pub(super) fn left_unclipped(&self, parameter: &str, key: &TensorKey) -> Option<Judged> {
        let piece = self.inventory.pieces(key, &|_| ()).into_iter().next()?;
        let declared = self.inventory.declared.get(&piece.ranks[0])?;
        let own = declared.parameters.get(parameter)?;
        let is_of_same = |other: &String| {
            declared.parameters.get(other).is_some_and(|of| of.optimizer == own.optimizer)
        };
        let mut limits = declared.norms.iter().filter(|norm| norm.limit().is_some());
        let by_norm = limits.any(|norm| norm.parameters.iter().any(is_of_same));
        let mut others = declared.parameters.iter().filter(|(_, other)| other.clip_value.is_some());
        let by_value = others.any(|(name, _)| is_of_same(name));
        let is_in = declared.norms.iter().any(|norm| norm.is_of(parameter));
        let is_left = (by_norm || by_value)
            && !is_in
            && own.optimizer.is_some()
            && !own.absent.contains_key("clipped")
            && (declared.clip_value.is_none() || by_value);
        let why = match by_norm {
            true => {
                "the job clips gradients of the same optimizer by a norm that leaves this one out"
            }
            false => {
                "the job clips gradients of the same optimizer by value and leaves this one out"
            }
        };
        is_left.then(|| {
            let outcome = Ok(Outcome::not_done(why.into()));
            self.judged(Stage::Clip, parameter, (key, &piece), outcome)
        })
    }

    /// A gradient that the job clips after its optimizer has taken it.
    pub(super) fn clipped_late(&self, parameter: &str, key: &TensorKey) -> Option<Judged> {
        let late = |declared: &Declaration| {
            let own = declared.norms.iter().filter(|norm| norm.after_step && norm.is_of(parameter));
            let mut limits = own.filter_map(Norm::limit);
            limits.find(|limit| limit.coefficient() < 1.0)
        };
        let declared = self.inventory.declared.iter();
        let mut of = declared.filter_map(|(rank, own)| Some((*rank, late(own)?)));
        let (rank, limit) = of.next()?;
        let coefficient = limit.coefficient();
        let words = format!(
            "the job clips it after the optimizer took its step, which took the gradient unclipped: \
             the coefficient would be {coefficient:.6}"
        );
        let factor = 1.0 / coefficient;
        let reading = causes::NOT_CLIPPED.reads(words);
        let divergence = Divergence::told(reading, Some(factor), factor - 1.0);
        let pieces = self.inventory.pieces(key, &|_| ());
        let piece = pieces.into_iter().find(|piece| piece.ranks.contains(&rank))?;
        let result = Ok(Outcome::Diverged(Box::new(divergence)));
        Some(self.judged(Stage::Clip, parameter, (key, &piece), result))
    }

    /// A gradient, in a step that is left out for what is not finite, that was multiplied by a
    /// coefficient which is NaN. Code that asks whether the coefficient is below 1 leaves such a
    /// gradient as it is; torch takes the smaller of it and 1, which is NaN, and then nothing of the
    /// gradient is a number, whatever was finite before. `None` where something of it still is.
    pub(super) fn clipped_by_nan(
        &self,
        parameter: &str,
        keys: (&TensorKey, &TensorKey),
        piece: &Piece,
    ) -> Option<Outcome> {
        let declared = self.inventory.declared.get(&piece.ranks[0])?;
        let is_nan = |limit: &Limit| limit.coefficient().is_nan();
        if !self.nan_is_meant || !declared.limits_of(parameter).iter().any(is_nan) {
            return None;
        }
        let tally = self.scaled(keys, piece, f64::NAN).ok()?;
        let outcome = self.outcome(&tally, &piece.place, |_| None);
        outcome.divergence().is_none().then_some(outcome)
    }
}

/// What a norm of no gradient is.
pub(super) fn of_nothing(norm: &Norm) -> Divergence {
    let words = "no parameter with a gradient was given to the function that computes it: an \
                 iterator that was used up gives none, and parameters that the model had before are none";
    let factor = norm.value.filter(|value| *value == 0.0);
    Divergence::told(causes::NORM_MISSES.reads(words), factor, 1.0)
}
