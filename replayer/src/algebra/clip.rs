//! The clipping of a gradient: by a norm, by two of them, by the size of each element.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::declaration::{Limit, Norm};
use super::factor::{Factor, Scales, clipped_by, clipping};
use super::gradient::{Scaled, only};
use super::inventory::Piece;
use super::judge::{Judge, Operand, arithmetic};
use super::outcome::{Judged, Outcome, Stage};
use crate::kernels::round::Precision;
use crate::number::short;
use crate::ops::table::op;

/// How far apart two norms of the same gradients may be that were added up in other orders in f32.
const NORMS_APART: f64 = 4e-6;

/// The gradient divided by `(norm + ε) / largest norm` where that is above 1.
struct ClippedToNorm;

op! {
    ClippedToNorm = "clipped";
    inputs {
        gradient: Plane, "the gradient before";
        norm: Rows, "the norm that the job computed";
        epsilon: Rows, "what is added to the norm";
        max_norm: Rows, "the norm that is allowed";
    }
    stages {
        clipped: Plane Forward Each
            |_op, gradient, norm, epsilon, max_norm| {
                // Jobs that divide by the norm first lose what is too small for the format then.
                let clipped = gradient.scaled(max_norm.clone() / (norm + epsilon));
                clipped.vanishing(max_norm)
            },
            "the gradient times the coefficient";
    }
}

/// The same by two norms, one after the other.
struct ClippedTwice;

op! {
    ClippedTwice = "clipped_twice";
    inputs {
        gradient: Plane, "the gradient before";
        first: Rows, "the first coefficient";
        second: Rows, "the second coefficient";
    }
    stages {
        clipped: Plane Forward Each
            |_op, gradient, first, second| (gradient.scaled(first) * second.scalar()).step(),
            "the gradient times both coefficients";
    }
}

impl Judge<'_> {
    /// The gradient that the optimizer takes, after clipping.
    pub(super) fn clipped(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let before = [Part::Unscaled, Part::Reduced];
        let before = before.iter().find_map(|part| inventory.key(parameter, part));
        let (Some(key), Some(before)) = (inventory.key(parameter, &Part::Clipped), before) else {
            let late = before.and_then(|key| self.clipped_late(parameter, key));
            let left = || before.and_then(|key| self.left_unclipped(parameter, key));
            return late.or_else(left).into_iter().collect();
        };
        let judge = |piece: &Piece| {
            let result = self.clipping(parameter, (before, key), piece);
            let is_agreed = result.as_ref().is_ok_and(|own| own.divergence().is_none());
            let by_nan = || self.clipped_by_nan(parameter, (before, key), piece);
            let by_nan = if is_agreed { None } else { by_nan() };
            self.judged(Stage::Clip, parameter, (key, piece), by_nan.map_or(result, Ok))
        };
        let norms = |rank: Rank| {
            let declared = inventory.declared.get(&rank);
            let norms = declared.map(|declared| declared.norms.iter());
            let bits = |norm: &Norm| norm.value.map(f64::to_bits);
            norms.into_iter().flatten().map(bits).collect::<Vec<_>>()
        };
        let origin = |rank: Rank| (inventory.hashes(before, rank), norms(rank));
        inventory.pieces(key, &origin).iter().map(judge).collect()
    }

    fn clipping(
        &self,
        parameter: &str,
        (before, key): (&TensorKey, &TensorKey),
        piece: &Piece,
    ) -> Result<Outcome, String> {
        let (inventory, rank) = (self.inventory, piece.ranks[0]);
        let declared = inventory.declared.get(&rank);
        let value = declared.and_then(|declared| declared.clip_value_of(parameter));
        let together = inventory.taken_out_by_clipping(rank, parameter);
        let scales = Scales {
            own: declared.and_then(|declared| declared.scale_of(parameter)),
            late: self.late_scale(rank, parameter).filter(|_| together.is_none()),
            together,
        };
        let mut limits = declared.map(|own| own.limits_of(parameter)).unwrap_or_default();
        if limits.is_empty() && value.is_none() {
            return Err(format!("rank {rank} declares neither a norm nor a value to clip to"));
        }
        // What was clipped with the loss scale in it is not clipped once more.
        let is_before = declared.and_then(|own| own.limit_with_scale(parameter)).is_some()
            && inventory.key(parameter, &Part::Unscaled) == Some(before);
        limits.retain(|limit| limit.coefficient() < 1.0 && !is_before);
        let limit = match (&limits[..], value) {
            ([], Some(value)) => return self.clipped_by_value((before, key), piece, value),
            ([], None) => {
                let limit = declared.and_then(|own| own.limit_of(parameter));
                let limit = limit.filter(|_| !is_before);
                let scaled = together.map_or(1.0, |scale| 1.0 / scale);
                let tally = self.scaled((before, key), piece, scaled)?;
                let read = |factor: Factor| clipping(factor, limit, scales);
                return Ok(self.outcome(&tally, &piece.place, read));
            }
            ([limit], _) => *limit,
            ([first, second], None) if together.is_none() => {
                return self.clipped_twice((before, key), piece, ([*first, *second], scales));
            }
            _ => {
                return Err(format!(
                    "it is clipped to {} norms, one after the other",
                    limits.len()
                ));
            }
        };
        self.clipped_to_norm((before, key), piece, (limit, value, scales))
    }

    /// A gradient that one norm clips, and perhaps a limit for each value besides.
    fn clipped_to_norm(
        &self,
        (before, key): (&TensorKey, &TensorKey),
        piece: &Piece,
        (limit, value, scales): (Limit, Option<f64>, Scales),
    ) -> Result<Outcome, String> {
        let (inventory, rank) = (self.inventory, piece.ranks[0]);
        let read = |factor: Factor| clipping(factor, Some(limit), scales);
        let stored = inventory.precision(key);
        // The value is a number of the gradient's format, and bounds what is clipped before or after.
        let rounded = |value: f64| stored.map_or(value, |stored| stored.round64(value));
        let bound = value.map(|value| match limit.of_clipped {
            true => rounded(value),
            false => rounded(value) / limit.coefficient(),
        });
        let by_norm = |norm: f64, format: Option<Precision>| {
            let declared = arithmetic(format, None);
            let used = Some(format.unwrap_or(declared.compute));
            let operands = |part: &IndexBox| {
                let number = |name, value| Operand::row(name, vec![value], used);
                let mut gradient = inventory.read_box(before, rank, part)?;
                if let Some(scale) = scales.together {
                    gradient.iter_mut().for_each(|x| *x /= scale);
                }
                if let Some(bound) = bound {
                    gradient.iter_mut().for_each(|x| *x = within(*x, bound));
                }
                Ok(vec![
                    Operand::row("gradient", gradient, None),
                    number("norm", norm),
                    number("epsilon", limit.epsilon),
                    number("max_norm", limit.max_norm),
                    Operand::part("clipped", inventory.elements(key, rank, part)?, stored),
                ])
            };
            let compared = self.compare(&ClippedToNorm, &declared, &piece.place, &operands)?;
            Ok::<_, String>(self.outcome(&only(compared)?, &piece.place, read))
        };
        let mut outcome = by_norm(limit.norm, stored)?;
        // A gradient of few bits may be divided and multiplied in as few, whatever it is kept in then.
        let narrow = inventory.precision(before).filter(|own| !own.keeps_f32());
        if outcome.divergence().is_some() && narrow.is_some() && narrow != stored {
            let other = by_norm(limit.norm, narrow)?;
            outcome = if other.divergence().is_none() { other } else { outcome };
        }
        // A norm that is computed once more to be declared is rounded otherwise than that which clips.
        let factor = outcome.divergence().and_then(|own| own.factor);
        let near = factor.filter(|factor| (factor - 1.0).abs() <= NORMS_APART);
        let again = near.map(|factor| by_norm(limit.norm / factor, stored)).transpose()?;
        Ok(again.filter(|again| again.divergence().is_none()).unwrap_or(outcome))
    }

    /// What the loss was multiplied by, where nothing took that out before the clipping.
    fn late_scale(&self, rank: Rank, parameter: &str) -> Option<f64> {
        let is_unscaled = self.inventory.key(parameter, &Part::Unscaled).is_some();
        let declared = self.inventory.declared.get(&rank).filter(|_| !is_unscaled)?;
        declared.scaled_loss.or(declared.scale_of(parameter))
    }

    /// A gradient that two norms clip, one after the other.
    fn clipped_twice(
        &self,
        (before, key): (&TensorKey, &TensorKey),
        piece: &Piece,
        (limits, scales): ([Limit; 2], Scales),
    ) -> Result<Outcome, String> {
        let (inventory, rank) = (self.inventory, piece.ranks[0]);
        let stored = inventory.precision(key);
        let declared = arithmetic(stored, None);
        let used = Some(stored.unwrap_or(declared.compute));
        let [first, second] = limits.map(|limit| limit.coefficient());
        let operands = |part: &IndexBox| {
            Ok(vec![
                Operand::part("gradient", inventory.elements(before, rank, part)?, None),
                Operand::row("first", vec![first], used),
                Operand::row("second", vec![second], used),
                Operand::part("clipped", inventory.elements(key, rank, part)?, stored),
            ])
        };
        let compared = self.compare(&ClippedTwice, &declared, &piece.place, &operands)?;
        let scales = Scales { late: None, ..scales };
        let read = |factor: Factor| clipped_by(factor, first * second, scales);
        Ok(self.outcome(&only(compared)?, &piece.place, read))
    }

    /// A clamped element is exact: it is the element or the limit.
    fn clipped_by_value(
        &self,
        (before, key): (&TensorKey, &TensorKey),
        piece: &Piece,
        limit: f64,
    ) -> Result<Outcome, String> {
        let inventory = self.inventory;
        let (rank, stored) = (piece.ranks[0], inventory.precision(key));
        let operands = |part: &IndexBox| {
            let mut gradient = inventory.read_box(before, rank, part)?;
            gradient.iter_mut().for_each(|x| *x = within(*x, limit));
            Ok(vec![
                Operand::row("gradient", gradient, None),
                Operand::row("factor", vec![1.0], None),
                Operand::part("scaled", inventory.elements(key, rank, part)?, stored),
            ])
        };
        let compared = self.compare(&Scaled, &arithmetic(stored, None), &piece.place, &operands)?;
        let mut outcome = self.outcome(&only(compared)?, &piece.place, |_| None);
        let Outcome::Diverged(divergence) = &mut outcome else { return Ok(outcome) };
        let unclipped = self.scaled((before, key), piece, 1.0)?;
        if unclipped.excess(&self.bound(&piece.place)).is_none() {
            let words =
                format!("the gradient is not clipped: it has elements beyond {}", short(limit));
            divergence.readings = vec![causes::NOT_CLIPPED.reads(words)];
        }
        Ok(outcome)
    }
}

/// A number clamped to a bound of either sign. Where one of the two is NaN it is NaN.
fn within(x: f64, bound: f64) -> f64 {
    if x.abs() <= bound.abs() { x } else { x.signum() * bound.abs() }
}
