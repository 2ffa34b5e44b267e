//! grad_norm: recomputed from the dumped gradients, held against what the job
//! reported, and its gap shared out.
//!
//! The gap between two norms over gradients `c` and `r` is
//! `‖c‖ - ‖r‖ = Σ (c² - r²) / (‖c‖ + ‖r‖)`: a sum over elements, so every way to cut
//! the elements (tensors, rows, tiles) shares it out exactly. Addends `c = Σ c_j`,
//! `r = Σ r_j` share it out exactly too, since `c² - r² = Σ_j (c_j - r_j)(c + r)`.

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use rayon::prelude::*;

use super::addends::Sum;
use super::label_counts::hits;
use super::microbatch::HeadMicrobatch;
use super::norm_shares::{Cut, GradNorm, Share, gradients, reported};
use super::outcome::{NotChecked, Outcome};
use super::plan::Plan;
use super::reference_dk::{Addend, ReferenceDk, squares};
use crate::head::Stage;
use crate::head::step::{StepError, matrix, numbers};
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

impl Plan<'_> {
    /// grad_norm as reported, recomputed, and as it would be with the reference dk.
    pub(super) fn norm(
        &self,
        microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let mut norm = GradNorm { captured: reported(self.step)?, ..GradNorm::default() };
        let gradients = gradients(self.step);
        let mut squares = SumsOfSquares::default();
        for key in &gradients {
            let tensor = self.step.assemble(key)?;
            matrix(&tensor).iter().for_each(|matrix| squares.add(matrix, norm.captured.is_some()));
        }
        if !gradients.is_empty() {
            norm.recomputed = Some(squares.exact.sqrt());
            norm.gradients = gradients.iter().map(|key| key.to_string()).collect();
            norm.reported_as = norm.captured.map(|reported| squares.says(reported));
        }
        let told = microbatches.iter().all(|microbatch| microbatch.blocked.is_none());
        let whole = told && self.step.lacking.is_nothing();
        let reduced = self.step.find_reduced(Role::Dk, true).filter(|_| whole);
        let reference = outcome.reference_dk.take();
        let divisor =
            self.divisor(microbatches).map(|divisor| divisor * self.ranks_averaged(microbatches));
        if let (Some(key), Some(reference), Ok(divisor)) = (reduced, reference, divisor) {
            let tensor = self.step.oriented(key, None)?;
            let captured = matrix(&tensor).filter(|m| m.len() == reference.sums[0].total.len());
            if let Some(captured) = captured {
                let divisor = divisor * reference.averaged;
                self.gap(&mut norm, microbatches, captured, (reference, divisor))?;
            }
        }
        if self.wants(Stage::GradNorm) && norm.captured.is_some() {
            let why = "other gradients than the head's have no reference";
            outcome.skip(Stage::GradNorm, why);
            let what = "grad_norm beyond dk".into();
            outcome.not_checked.push(NotChecked { what, why: why.into() });
        }
        outcome.grad_norm = norm;
        Ok(())
    }

    pub(super) fn gap(
        &self,
        norm: &mut GradNorm,
        microbatches: &[HeadMicrobatch],
        captured: Matrix<'_>,
        (mut reference, divisor): (ReferenceDk, f64),
    ) -> Result<(), StepError> {
        let mut exact = reference.take_total();
        exact.par_iter_mut().for_each(|x| *x /= divisor);
        let (ours, theirs) = (captured.energy(), squares(&exact));
        (norm.dk_captured, norm.dk_reference) = (Some(ours.sqrt()), Some(theirs.sqrt()));
        // Without a reported norm the gap is that of dk alone.
        let whole = norm.captured.unwrap_or(ours.sqrt());
        let with_reference = (whole * whole - ours + theirs).max(0.0).sqrt();
        norm.reference = norm.captured.map(|_| with_reference);
        let gap = whole - with_reference;
        let emulated = reference.emulated.squares() / (divisor * divisor);
        norm.floor = Some((whole * whole - ours + emulated).max(0.0).sqrt() - with_reference);
        norm.gap = Some(gap);
        let cut = Cut { ours: captured, theirs: &exact, norms: whole + with_reference, gap };
        norm.shares = cut.by_place(&hits(microbatches, captured.rows), self.roundings.tiles.vocab);
        norm.shares.extend(self.by_addend(&cut, microbatches, reference.addends, divisor)?);
        Ok(())
    }

    /// Shares of ranks and of microbatches: each addend's error along `c + r`.
    fn by_addend(
        &self,
        cut: &Cut<'_>,
        head_microbatches: &[HeadMicrobatch],
        addends: Vec<Addend>,
        divisor: f64,
    ) -> Result<Vec<Share>, StepError> {
        let units: usize = head_microbatches.iter().map(|microbatch| microbatch.units.len()).sum();
        if addends.len() != units || units < 2 {
            return Ok(Vec::new());
        }
        let mut gaps: Vec<(Option<Microbatch>, Vec<Rank>, f64)> = Vec::new();
        for addend in addends {
            let Some(key) = self.step.find(Role::Dk, addend.microbatch) else {
                return Ok(Vec::new());
            };
            let ranks = (!addend.ranks.is_empty()).then_some(&addend.ranks[..]);
            let captured = match (ranks, self.step.tensors[key].partial) {
                (None, Some(_)) => {
                    Some(Sum::of_partial(self.step, key)?.oriented(self.step, key).total)
                }
                _ => numbers(&self.step.oriented(key, ranks)?),
            };
            let captured = captured.filter(|values| values.len() == cut.ours.len());
            let Some(captured) = captured else { return Ok(Vec::new()) };
            let along = captured.iter().zip(&addend.reference).zip(cut.both());
            let along: f64 =
                along.map(|((c, r), (ours, theirs))| (c - r) / divisor * (ours + theirs)).sum();
            gaps.push((addend.microbatch, addend.ranks, along / cut.norms));
        }
        let mut shares = Vec::new();
        let ranks = gaps.iter().map(|(_, ranks, gap)| (name_of_ranks(ranks), *gap));
        shares.extend(cut.grouped("rank", ranks));
        let microbatches =
            gaps.iter().filter_map(|(mb, _, gap)| Some((mb.as_ref()?.to_string(), *gap)));
        shares.extend(cut.grouped("microbatch", microbatches));
        Ok(shares)
    }
}

fn name_of_ranks(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// Sums of squares as a job may take them.
#[derive(Default)]
struct SumsOfSquares {
    exact: f64,
    f32: f32,
    bf16: f32,
    elements: u64,
}

impl SumsOfSquares {
    /// Adds a gradient; one after the other in few bits only where that is asked for.
    fn add(&mut self, values: &Matrix<'_>, in_few_bits: bool) {
        self.exact += values.energy();
        for element in 0..if in_few_bits { values.len() } else { 0 } {
            let x = values.get_f64(element) as f32;
            self.f32 += x * x;
            self.bf16 = Precision::Bf16.round(self.bf16 + Precision::Bf16.round(x * x));
        }
        self.elements += values.len() as u64;
    }

    /// What the reported norm is, as far as the dumped gradients say.
    fn says(&self, reported: f64) -> String {
        let exact = self.exact.sqrt();
        // The square root halves the relative error of a sum of n squares, each of
        // which is rounded: sequential f32 summation is the worst.
        let n = self.elements as f64;
        let u = Precision::F32.unit_roundoff();
        let reach = 8.0 * u * (n / 3.0).sqrt().max(1.0) + 4.0 * u;
        let near = |value: f64| (reported - value).abs() <= reach * exact;
        let naive = f64::from(self.f32).sqrt();
        if near(exact) {
            return format!("the norm over the dumped gradients ({exact:.8}), before clipping");
        }
        if near(f64::from(self.bf16).sqrt()) {
            return format!(
                "the norm over the dumped gradients with the squares summed in bf16: in f64 it is {exact:.8}"
            );
        }
        if (reported - naive).abs() <= 4.0 * u * exact {
            return format!(
                "the norm over the dumped gradients with the squares summed one by one in f32: in f64 it is {exact:.8}"
            );
        }
        if reported < exact {
            return format!(
                "smaller than the norm over the dumped gradients alone ({exact:.8}): taken after clipping, or over gradients of another scale"
            );
        }
        let rest = (reported * reported - self.exact).max(0.0).sqrt();
        format!(
            "larger than the norm over the tapped gradients ({exact:.8}): those of the other parameters have the norm {rest:.8}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::Values;

    #[test]
    fn every_kind_of_share_adds_up_to_the_gap() {
        let ours: Vec<f64> = (0..60).map(|i| f64::from(i).sin()).collect();
        let theirs: Vec<f64> = ours.iter().map(|x| x * 0.9 + 0.01).collect();
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let gap = norm(&ours) - norm(&theirs);
        let norms = norm(&ours) + norm(&theirs);
        let ours = Matrix { rows: 20, cols: 3, values: Values::F64(&ours) };
        let cut = Cut { ours, theirs: &theirs, norms, gap };
        let hits: Vec<u32> = (0..20).map(|row| row * row).collect();
        let shares = cut.by_place(&hits, 7);
        for kind in ["rows", "row", "vocabulary"] {
            let total: f64 = shares.iter().filter(|s| s.kind == kind).map(|s| s.gap).sum();
            assert!((total - gap).abs() <= 1e-14 * norms, "{kind}: {total} of {gap}");
        }
    }

    #[test]
    fn a_reported_norm_says_how_it_was_taken() {
        let mut squares = SumsOfSquares::default();
        let values = vec![0.25; 40_000];
        squares.add(&Matrix { rows: 200, cols: 200, values: Values::F64(&values) }, true);
        for (reported, words) in [
            (50.0, "before clipping"),
            (f64::from(squares.bf16).sqrt(), "summed in bf16"),
            (1.0, "after clipping"),
            (70.0, "other parameters"),
        ] {
            assert!(
                squares.says(reported).contains(words),
                "{reported}: {}",
                squares.says(reported)
            );
        }
    }
}
