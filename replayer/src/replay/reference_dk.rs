//! The reference dk of the whole step, kept while its units are walked: the sum over them, what
//! each is, and what is allowed of the sum where the job recorded no addends of it.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use rayon::prelude::*;

use super::microbatch::HeadMicrobatch;
use crate::compare::Allowed;
use crate::head::{HeadStep, Roundings, Stage};

/// Bytes of reference gradients that are kept.
pub(super) const KEPT_BYTES: usize = 1 << 30;
/// Elements that one thread takes at a time.
const PIECE: usize = 1 << 14;

/// Reference dk while it is needed: the sums, and what each unit is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReferenceDk {
    /// The sum of each group of ranks whose sums are judged apart; else one over all.
    pub(super) sums: Vec<KeptSum>,
    /// The dk of the policy that rounds most, over all units: its norm is wanted.
    pub(super) emulated: Emulated,
    pub(super) addends: Vec<Addend>,
    /// The classes that the rows are; all of them in order where there are none.
    pub(super) classes: Option<Vec<usize>>,
    /// Of a sum that was captured without its addends: over how many ranks it turned out to be a
    /// mean; 1 where it is none.
    pub(super) averaged: f64,
}

/// An emulated dk, of which the norm is wanted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Emulated {
    /// The sum over several units.
    Sum(Vec<f64>),
    /// The sum of the squares of the only unit's.
    Squares(f64),
}

impl Default for Emulated {
    fn default() -> Self {
        Emulated::Squares(0.0)
    }
}

/// The sum of some units.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KeptSum {
    /// Whose units; none where it is the sum of all.
    pub(super) ranks: Vec<Rank>,
    pub(super) total: Vec<f64>,
    /// An element each; empty where the addends themselves are judged.
    pub(super) allowed: Vec<Kept>,
}

/// What is known of an element of the sum, as amplitudes: the square of a small one is 0 in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Kept {
    pub(super) own: f32,
    row: f32,
    shared: f32,
    pub(super) certain: f32,
    /// Of what was summed: of each rank's part of each unit, as far as that is known.
    pub(super) parts: f32,
}

/// One unit's captured dk minus its reference, `[V, D]`; the reference alone until
/// the captured one is known.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Addend {
    pub(super) microbatch: Option<Microbatch>,
    pub(super) ranks: Vec<Rank>,
    pub(super) reference: Vec<f64>,
}

/// Adds element by element.
pub(super) fn add(sum: &mut [f64], values: &[f64]) {
    sum.par_iter_mut().zip(values).with_min_len(PIECE).for_each(|(sum, x)| *sum += x);
}

impl ReferenceDk {
    /// The sum over all units, which is taken out.
    pub(super) fn take_total(&mut self) -> Vec<f64> {
        let mut sums = self.sums.iter_mut().map(|sum| std::mem::take(&mut sum.total));
        let mut total = sums.next().unwrap_or_default();
        sums.for_each(|sum| add(&mut total, &sum));
        total
    }
}

impl Emulated {
    /// Adds a unit's elements from one of them on.
    pub(super) fn add(&mut self, from: usize, values: &[f64]) {
        match self {
            Emulated::Sum(sum) => add(&mut sum[from..from + values.len()], values),
            Emulated::Squares(sum) => *sum += squares(values),
        }
    }

    /// The sum of its squares.
    pub(super) fn squares(&self) -> f64 {
        match self {
            Emulated::Sum(sum) => squares(sum),
            Emulated::Squares(sum) => *sum,
        }
    }
}

/// The sum of the squares, by pieces of one length, whoever adds them.
pub(super) fn squares(values: &[f64]) -> f64 {
    let pieces = values.par_chunks(PIECE).map(|piece| piece.iter().map(|x| x * x).sum());
    pieces.collect::<Vec<f64>>().iter().sum()
}

impl Kept {
    /// What is allowed of the element.
    pub(super) fn allowed(&self) -> Allowed {
        let [own, row, shared] = [self.own, self.row, self.shared].map(|x| f64::from(x).powi(2));
        Allowed { own, row, shared, certain: f64::from(self.certain), ..Allowed::default() }
    }

    /// Sum of the squares of what was summed.
    pub(super) fn squares(&self) -> f64 {
        f64::from(self.parts).powi(2)
    }

    /// Adds a unit: errors of their own are independent of those of other units, what all
    /// elements or a row share may be one error.
    pub(super) fn add(&mut self, allowed: &Allowed, squares: f64) {
        let root = |a: f32, b: f64| (f64::from(a).powi(2) + b).sqrt() as f32;
        self.own = root(self.own, allowed.own);
        self.row += allowed.row.sqrt() as f32;
        self.shared += allowed.shared.sqrt() as f32;
        self.certain += allowed.certain as f32;
        self.parts = root(self.parts, squares);
    }
}

/// Whose sums are judged apart, where dk was recorded in sums alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SumsWithoutAddends {
    /// The ranks that hold tokens together; none where the sum is that of all ranks.
    groups: Vec<Vec<Rank>>,
}

impl SumsWithoutAddends {
    /// `None` where dk of every microbatch was recorded, or no sum of it is among what is
    /// `compared`. What an accumulator of few bits loses is known of recorded addends only.
    pub(super) fn of(
        step: &HeadStep<'_>,
        microbatches: &[HeadMicrobatch],
        compared: &BTreeSet<Stage>,
        roundings: &Roundings,
    ) -> Option<SumsWithoutAddends> {
        let asked = Stage::SUMS.iter().any(|stage| compared.contains(stage));
        let several = step.microbatches.iter().any(Option::is_some);
        let lacks = |microbatch: &Option<_>| step.find(Role::Dk, *microbatch).is_none();
        let alone = several && step.microbatches.iter().any(lacks);
        let local = step.find_reduced(Role::Dk, false);
        if !asked || !alone || roundings.swamps() {
            return None;
        }
        let sum = local.or_else(|| step.find_reduced(Role::Dk, true))?;
        let by_rank = local.is_some() && step.tensors[sum].partial.is_some();
        let groups = if by_rank { together(microbatches) } else { Vec::new() };
        let elements = step.tensors[sum].shape.iter().product::<u64>() as usize;
        let sums = SumsWithoutAddends { groups };
        // Where not each rank's sum can be kept, the sum of all is judged.
        Some(if sums.bytes(elements) <= KEPT_BYTES { sums } else { SumsWithoutAddends::default() })
    }

    /// The ranks of each sum; a sum of all ranks names none.
    pub(super) fn groups(&self) -> Vec<Vec<Rank>> {
        match &self.groups[..] {
            [] => vec![Vec::new()],
            groups => groups.to_vec(),
        }
    }

    /// Memory that the sums take, of a dk of so many elements.
    pub(super) fn bytes(&self, elements: usize) -> usize {
        let sums = self.groups.len().max(1);
        elements * (sums * size_of::<(Kept, f64)>() + size_of::<f64>())
    }
}

/// The ranks that hold the same tokens in some microbatch; none where a unit names no ranks.
fn together(microbatches: &[HeadMicrobatch]) -> Vec<Vec<Rank>> {
    let mut groups: Vec<BTreeSet<Rank>> = Vec::new();
    for unit in microbatches.iter().flat_map(|microbatch| &microbatch.units) {
        if unit.ranks.is_empty() {
            return Vec::new();
        }
        let mut ranks: BTreeSet<Rank> = unit.ranks.iter().copied().collect();
        groups.retain_mut(|group| {
            let apart = group.is_disjoint(&ranks);
            if !apart {
                ranks.append(group);
            }
            apart
        });
        groups.push(ranks);
    }
    groups.sort();
    groups.into_iter().map(|group| group.into_iter().collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::Emulated;

    #[test]
    fn the_squares_of_one_unit_are_those_of_its_sum() {
        let values: Vec<f64> = (0..100).map(|at| f64::from(at) / 8.0).collect();
        let both = [Emulated::Squares(0.0), Emulated::Sum(vec![0.0; 100])].map(|mut emulated| {
            values.chunks(30).enumerate().for_each(|(nth, some)| emulated.add(30 * nth, some));
            emulated.squares()
        });
        assert_eq!(both[0], both[1]);
        assert_eq!(both[0], values.iter().map(|x| x * x).sum::<f64>());
    }
}
