//! The stages of a gradient: the sum over microbatches, the reduction over ranks, and the loss scale; the
//! clipping is in `clip`.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::declaration::{Declaration, ReduceOp};
use super::domain::{Addend, Domain};
use super::factor::{Factor, NEAR, unscaling};
use super::inventory::Piece;
use super::judge::{Judge, Operand, arithmetic};
use super::outcome::{Divergence, Energies, Judged, Outcome, Reading, Stage};
use super::sums::SumOf;
use crate::compare::{Bound, Tally};
use crate::kernels::round::Precision;
use crate::ops::table::op;

/// A gradient times a number.
pub(super) struct Scaled;

op! {
    Scaled = "scaled";
    inputs {
        gradient: Plane, "the gradient before";
        factor: Rows, "what it is multiplied by";
    }
    stages {
        scaled: Plane Forward Each |_op, gradient, factor| gradient.scaled(factor),
            "the gradient times the factor";
    }
}

impl Judge<'_> {
    /// The stages of the gradient of a parameter. A loss scale is meant to grow until a gradient
    /// overflows, and the step is then left out: in such a step what is not finite is right where
    /// its reference is not finite either.
    pub(crate) fn gradient(&self, parameter: &str) -> Vec<Judged> {
        let judge = Judge { nan_is_meant: self.inventory.is_left_out(), ..*self };
        let mut judged = judge.accumulated(parameter);
        judged.extend(judge.lost(parameter));
        judged.extend(judge.accumulated_by_devices(parameter));
        judged.extend(judge.reduced(parameter));
        judged.extend(judge.unscaled(parameter));
        let clipped = judge.clipped(parameter);
        let is_late = |own: &Reading| own.cause == causes::CLIP_BEFORE_UNSCALE.name;
        let mut readings = clipped.iter().filter_map(|one| one.result.divergence());
        // A scale that was taken out after the clipping is not left in.
        if !readings.any(|own| own.readings.iter().any(is_late)) {
            judged.extend(judge.scale_kept(parameter));
        }
        judged.extend(clipped);
        let whole = judge.scaled_squares(parameter, &judged);
        judged.extend(whole);
        judged
    }

    /// The sums over microbatches that one tensor holds of several devices, side by side.
    fn accumulated_by_devices(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let tensors = &inventory.parameters[parameter].tensors;
        let mut judged = Vec::new();
        for ((part, _), key) in tensors {
            let Part::AccumulatedBy(axis) = part else { continue };
            let by = Part::GradBy(axis.clone());
            for piece in inventory.pieces(key, &|rank| rank) {
                let rank = piece.ranks[0];
                let own = tensors.iter().filter(|((part, _), _)| *part == by);
                let addends = own.map(|((_, at), key)| Addend::new(rank, *at, key.clone()));
                let addends: Vec<Addend> = addends.collect();
                let at = (parameter, key, &piece);
                let sum = match addends.is_empty() {
                    true => Err(format!("rank {rank} recorded no gradient of a microbatch of it")),
                    false => self.sum_of_addends(at, &addends, &Domain::alone(rank)),
                };
                let result = sum.map(|(outcome, _)| outcome);
                judged.push(self.judged(Stage::Accumulate, parameter, (key, &piece), result));
            }
        }
        judged
    }

    /// Each rank's sum over its microbatches.
    fn accumulated(&self, parameter: &str) -> Vec<Judged> {
        let Some(key) = self.inventory.key(parameter, &Part::Accumulated) else {
            return Vec::new();
        };
        let by_rank = self.inventory.pieces(key, &|rank| rank);
        let judge = |piece: &Piece| {
            let rank = piece.ranks[0];
            let addends = match self.inventory.why_no_sum(rank, parameter) {
                Some(why) => Err(why.to_string()),
                None => self.inventory.grads_of(rank, parameter),
            };
            let result = addends.and_then(|addends| {
                // Where nothing after it was recorded, as of one that the optimizer itself reduces, it
                // is what the job's code has made of it.
                let is_last = self.inventory.key(parameter, &Part::Reduced).is_none();
                let factor = self.inventory.multiplied_by(rank, parameter).filter(|_| is_last);
                let domain = Domain { scale: factor.unwrap_or(1.0), ..Domain::alone(rank) };
                let weights = vec![domain.scale; addends.len()];
                let (key, place) = (key, &piece.place);
                let of =
                    SumOf { key, rank, place, addends: &addends, weights: &weights, sent: None };
                self.judged_sum(&of, parameter, &domain)
            });
            self.judged_as_sum(Stage::Accumulate, parameter, (key, piece), result)
        };
        by_rank.iter().map(judge).collect()
    }

    /// The gradient after communication.
    fn reduced(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        if let Some(why) = inventory.withdrawn.get(parameter) {
            let grads = inventory.parameters[parameter].tensors.iter();
            let grad =
                grads.filter(|((part, _), _)| *part == Part::Grad).map(|(_, key)| key).next();
            let pieces = grad.map(|key| (key, inventory.pieces(key, &|_| ())));
            let (key, pieces) = pieces.unzip();
            let piece = pieces.and_then(|pieces| pieces.into_iter().next());
            let told = |(key, piece)| {
                self.judged(Stage::Reduce, parameter, (key, &piece), Err(why.clone()))
            };
            return key.zip(piece).map(told).into_iter().collect();
        }
        let Some(key) = inventory.key(parameter, &Part::Reduced) else {
            return self.reduced_and_unscaled(parameter);
        };
        let mut domains: BTreeMap<Rank, Domain> = BTreeMap::new();
        for rank in inventory.holders(key) {
            domains.insert(rank, Domain::of(inventory, rank, parameter));
        }
        let judge = |piece: &Piece| {
            let rank = piece.ranks[0];
            if inventory.grads_are_reduced(parameter) {
                let addends = inventory.grads_of(rank, parameter);
                let (at, alone) = ((parameter, key, piece), Domain::alone(rank));
                let result = addends.and_then(|addends| self.sum_of_addends(at, &addends, &alone));
                return self.judged_as_sum(Stage::Accumulate, parameter, (key, piece), result);
            }
            let domain = &domains[&rank];
            let is_alone = domain.axes.iter().all(|axis| axis.size < 2);
            let stage = if is_alone { Stage::Accumulate } else { Stage::Reduce };
            let addends = inventory.addends(domain, parameter);
            let at = (parameter, key, piece);
            let result = addends.and_then(|addends| {
                let found = self.sum_of_addends(at, &addends, domain)?;
                let is_agreed = found.0.divergence().is_none();
                Ok(self.with_earlier(at, &addends, domain).filter(|_| !is_agreed).unwrap_or(found))
            });
            self.judged_as_sum(stage, parameter, (key, piece), result)
        };
        let pieces = inventory.pieces(key, &|rank| domains[&rank].ranks.clone());
        pieces.iter().map(judge).collect()
    }

    /// The sum or the mean over microbatches of what a domain brings together. Where the job has
    /// not said which, either is right.
    pub(super) fn sum_of_addends(
        &self,
        (parameter, key, piece): (&str, &TensorKey, &Piece),
        addends: &[Addend],
        domain: &Domain,
    ) -> Result<(Outcome, Energies), String> {
        let (rank, place, sent) = (piece.ranks[0], &piece.place, domain.sent);
        let mut diverged = Vec::new();
        for accumulation in self.accumulations(rank, parameter, addends) {
            let scale = domain.scale * accumulation;
            let (domain, weights) =
                (Domain { scale, ..domain.clone() }, vec![scale; addends.len()]);
            let of = SumOf { key, rank, place, addends, weights: &weights, sent };
            let mut sum = self.judged_sum(&of, parameter, &domain)?;
            if let Some(factor) = self.near_own(rank, parameter, &sum.0) {
                let domain = Domain { scale: scale * factor, ..domain };
                let weights = vec![domain.scale; addends.len()];
                let of = SumOf { weights: &weights, ..of };
                let near = self.judged_sum(&of, parameter, &domain)?;
                sum = if near.0.divergence().is_none() { near } else { sum };
            }
            if sum.0.divergence().is_none() {
                return Ok(sum);
            }
            diverged.push(sum);
        }
        // What has a known cause by one of the two is told by that one.
        let is_known = |sum: &(Outcome, Energies)| {
            let readings = sum.0.divergence().map(|own| own.readings.iter());
            readings.is_some_and(|mut own| own.any(|one| one.cause != causes::UNKNOWN.name))
        };
        let known = diverged.iter().position(is_known).unwrap_or(0);
        diverged.into_iter().nth(known).ok_or_else(|| "it has no addends".into())
    }

    /// By how much a sum is off that code of the job's own has multiplied, where it is as near to its number
    /// as the sample from which that is known.
    fn near_own(&self, rank: Rank, parameter: &str, outcome: &Outcome) -> Option<f64> {
        self.inventory.multiplied_by(rank, parameter)?;
        let own = self.inventory.own_scaling.as_ref()?;
        let factor = outcome.divergence()?.factor?;
        ((factor - 1.0).abs() <= own.tolerance).then_some(factor)
    }

    /// What the sum over a rank's microbatches may be multiplied by: in torch gradients are summed;
    /// a function of jax may average them. What code of the job's own was seen to multiply it by is
    /// all of that.
    pub(super) fn accumulations(
        &self,
        rank: Rank,
        parameter: &str,
        addends: &[Addend],
    ) -> Vec<f64> {
        if let Some(factor) = self.inventory.multiplied_by(rank, parameter) {
            return vec![factor];
        }
        let microbatches: BTreeSet<_> = addends.iter().map(|addend| addend.microbatch).collect();
        let mean = 1.0 / microbatches.len().max(1) as f64;
        let declared = self.inventory.declared.get(&rank);
        let is_jax = declared.is_some_and(|own| own.framework.starts_with("jax"));
        let mut all = match declared.and_then(|own| own.accumulation) {
            Some(ReduceOp::Mean) => vec![mean],
            None if is_jax && mean < 1.0 => vec![mean, 1.0],
            _ => vec![1.0],
        };
        // A job may take the scale of its loss out by itself, before anybody looks.
        let scale = declared.and_then(|own| own.scaled_loss);
        all.extend(scale.map(|scale| all[0] / scale));
        all
    }

    /// The gradient after the loss scale was taken out.
    fn unscaled(&self, parameter: &str) -> Vec<Judged> {
        let (inventory, before) = (self.inventory, Part::Reduced);
        let (Some(key), Some(before)) =
            (inventory.key(parameter, &Part::Unscaled), inventory.key(parameter, &before))
        else {
            return Vec::new();
        };
        let judge = |piece: &Piece| {
            let rank = piece.ranks[0];
            let declared = inventory.declared.get(&rank);
            let scale = declared.and_then(|declared| declared.scale_of(parameter));
            let scale = scale.ok_or_else(|| format!("rank {rank} declares no loss scale"));
            let limit = declared.and_then(|declared| declared.limit_with_scale(parameter));
            let result = scale.and_then(|scale| {
                let tally = self.scaled((before, key), piece, 1.0 / scale)?;
                let others = declared.map(Declaration::loss_scales).unwrap_or_default();
                let read = |factor| unscaling(factor, scale, limit, &others);
                Ok(self.outcome(&tally, &piece.place, read))
            });
            self.judged(Stage::Unscale, parameter, (key, piece), result)
        };
        let pieces = inventory.pieces(key, &|rank| inventory.hashes(before, rank));
        pieces.iter().map(judge).collect()
    }

    pub(super) fn scaled(
        &self,
        (before, key): (&TensorKey, &TensorKey),
        piece: &Piece,
        factor: f64,
    ) -> Result<Tally, String> {
        let (inventory, rank) = (self.inventory, piece.ranks[0]);
        let stored = inventory.precision(key);
        // 1 over a loss scale may be no number of f32.
        let rounded = (f64::from(factor as f32) != factor).then_some(Precision::F32);
        let operands = |part: &IndexBox| {
            Ok(vec![
                Operand::part("gradient", inventory.elements(before, rank, part)?, None),
                Operand::row("factor", vec![factor], rounded),
                Operand::part("scaled", inventory.elements(key, rank, part)?, stored),
            ])
        };
        only(self.compare(&Scaled, &arithmetic(stored, None), &piece.place, &operands)?)
    }

    /// How a comparison came out; `read` explains a factor that is one number for all elements.
    pub(crate) fn outcome(
        &self,
        tally: &Tally,
        place: &IndexBox,
        read: impl Fn(Factor) -> Option<Reading>,
    ) -> Outcome {
        let bound = self.bound(place);
        match self.divergence(tally, place, &bound) {
            None => Outcome::agreed(tally, &bound),
            Some(mut divergence) => {
                let tolerance = (4.0 * tally.expected()).max(NEAR);
                let factor = divergence.factor.map(|value| Factor { value, tolerance });
                divergence.readings = factor.and_then(read).into_iter().collect();
                Outcome::Diverged(Box::new(divergence))
            }
        }
    }

    /// How far a comparison is from agreeing; `None` where it agrees.
    pub(crate) fn divergence(
        &self,
        tally: &Tally,
        place: &IndexBox,
        bound: &Bound,
    ) -> Option<Divergence> {
        let mut reason = tally.excess(bound)?;
        // What is made of numbers that are not finite is wrong before.
        let is_made_of_none =
            tally.first_nonfinite.as_ref().is_some_and(|at| !at.reference.is_finite());
        if is_made_of_none {
            reason += ", and neither is what they are made of";
        }
        let worst = tally.first_nonfinite.as_ref().filter(|_| !is_made_of_none);
        let worst = worst.or(tally.worst.as_ref());
        let factor = 1.0 + tally.slope();
        // What a common factor leaves of the error.
        let left = tally.error_energy - tally.slope().powi(2) * tally.reference_energy;
        // A value that was multiplied once more was rounded once more.
        let rounding = 4.0 * tally.budget.expected() * factor.powi(2).max(1.0);
        let most = 2.0 * tally.budget.energy(bound.stage) + rounding;
        let is_one = tally.nonfinite == 0 && left <= most;
        Some(Divergence {
            reason,
            factor: is_one.then_some(factor),
            error: tally.error(),
            floor: tally.expected(),
            worst: worst.map(|at| (self.index(place, at.index), at.captured, at.reference)),
            reading: None,
            readings: Vec::new(),
        })
    }

    /// The same of a sum of gradients.
    fn judged_as_sum(
        &self,
        stage: Stage,
        parameter: &str,
        at: (&TensorKey, &Piece),
        result: Result<(Outcome, Energies), String>,
    ) -> Judged {
        let (result, energies) = match result {
            Ok((outcome, energies)) => (Ok(outcome), Some(energies)),
            Err(why) => (Err(why), None),
        };
        Judged { energies, ..self.judged(stage, parameter, at, result) }
    }

    /// What was found of a stage of a parameter on some ranks.
    pub(crate) fn judged(
        &self,
        stage: Stage,
        parameter: &str,
        (key, piece): (&TensorKey, &Piece),
        result: Result<Outcome, String>,
    ) -> Judged {
        Judged {
            stage,
            parameter: parameter.into(),
            tensor: key.to_string(),
            ranks: piece.ranks.clone(),
            place: piece.place.clone(),
            energies: None,
            result: result.unwrap_or_else(Outcome::unchecked),
        }
    }
}

/// The tally of an op of one stage.
pub(super) fn only(compared: Vec<super::judge::Compared>) -> Result<Tally, String> {
    compared.into_iter().next().ok_or("it has no elements")?.1
}
