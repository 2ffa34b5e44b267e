//! The reference dk of the whole step, kept while its units are walked: the sum over them, what
//! each is, and what is allowed of the sum where the job recorded no addends of it.

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use rayon::prelude::*;

use super::Slice;
use super::allowed::rounded;
use super::backward::{Problem, sum};
use super::dk::scale;
use super::judge::Judge;
use super::outcome::Outcome;
use super::plan::Plan;
use super::slab::Slab;
use super::sums_alone::SumsAlone;
use super::world::{At, Expectation};
use crate::compare::Allowed;
use crate::head::{Stage, Unit};

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
    own: f32,
    row: f32,
    shared: f32,
    certain: f32,
    /// Of what was summed: of each rank's part of each unit, as far as that is known.
    parts: f32,
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
fn add(sum: &mut [f64], values: &[f64]) {
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
    fn add(&mut self, from: usize, values: &[f64]) {
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
    fn add(&mut self, allowed: &Allowed, squares: f64) {
        let root = |a: f32, b: f64| (f64::from(a).powi(2) + b).sqrt() as f32;
        self.own = root(self.own, allowed.own);
        self.row += allowed.row.sqrt() as f32;
        self.shared += allowed.shared.sqrt() as f32;
        self.certain += allowed.certain as f32;
        self.parts = root(self.parts, squares);
    }
}

impl Plan<'_> {
    /// Whether the reference dk of so many elements is kept.
    fn keeps(&self, elements: usize) -> bool {
        let wanted = self.wants(Stage::Reduce) || self.wants(Stage::Accumulate);
        wanted && elements * 8 <= KEPT_BYTES
    }

    /// The sums that were recorded alone, where what is allowed of their elements is kept: it is
    /// told from the sums of each slab.
    pub(super) fn kept_alone(&self, elements: usize) -> Option<&SumsAlone> {
        let alone = self.sums_alone.as_ref().filter(|_| self.keeps(elements));
        alone.filter(|alone| alone.bytes(elements) <= KEPT_BYTES)
    }
}

impl Judge<'_> {
    /// Adds one unit's slab of reference dk.
    pub(super) fn keep_reference(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        (slice, unit): (&Slice, &Unit),
        outcome: &mut Outcome,
    ) {
        let (d, elements) = (problem.head.q.cols, problem.head.k.len());
        if !self.plan.keeps(elements) {
            return;
        }
        let alone = self.plan.kept_alone(elements);
        let sum = |ranks: Vec<Rank>| KeptSum {
            ranks,
            total: vec![0.0; elements],
            allowed: vec![Kept::default(); if alone.is_some() { elements } else { 0 }],
        };
        let kept = outcome.reference_dk.get_or_insert_with(|| ReferenceDk {
            sums: alone.map_or(vec![Vec::new()], SumsAlone::groups).into_iter().map(sum).collect(),
            emulated: match self.plan.step.microbatches.len() == 1 && slice.units.len() == 1 {
                true => Emulated::Squares(0.0),
                false => Emulated::Sum(vec![0.0; elements]),
            },
            addends: Vec::new(),
            classes: slab.classes.clone(),
            averaged: 1.0,
        });
        let from = slab.range.start * d;
        let (values, weight) = self.addend_in_world(problem, slab);
        let held = |sum: &KeptSum| unit.ranks.iter().any(|rank| sum.ranks.contains(rank));
        let group = kept.sums.iter().position(held).unwrap_or(0);
        let sum = &mut kept.sums[group];
        let at = from..from + values.len();
        add(&mut sum.total[at.clone()], &values);
        kept.emulated.add(from, &slab.emulated);
        if alone.is_some() {
            let of_one = unit.ranks.len() == 1;
            self.keep_allowed(problem, slab, (of_one, weight), &mut sum.allowed[at]);
        }
        let others = size_of::<(f64, f64)>() * elements + alone.map_or(0, |of| of.bytes(elements));
        let fits = (kept.addends.len() + 1) * elements * 8 + others <= KEPT_BYTES;
        let same =
            |of: &&mut Addend| of.microbatch == slice.inputs.microbatch && of.ranks == unit.ranks;
        if let Some(addend) = kept.addends.iter_mut().find(same) {
            addend.reference.extend_from_slice(&values);
        } else if fits && from == 0 {
            let (microbatch, ranks) = (slice.inputs.microbatch, unit.ranks.clone());
            kept.addends.push(Addend { microbatch, ranks, reference: values });
        }
    }

    /// What is allowed of a unit's dk that nobody recorded. Each rank may have rounded its part of
    /// it to the gradients' format before the parts were added. Of a unit over several ranks
    /// the size of a rank's part is not known: where parts are large and their sum is small, it
    /// is the softmax's part and the label's part that cancel. So the squares of both are counted
    /// there, and the squares of the single tokens' terms.
    fn keep_allowed(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        (of_one, weight): (bool, f64),
        kept: &mut [Kept],
    ) {
        let d = problem.head.q.cols.max(1);
        let allowances = self.of_dk(problem, slab, Stage::Dk);
        kept.par_iter_mut().enumerate().for_each(|(at, kept)| {
            let sums = slab.sums(&problem.head, at);
            let mut allowed = allowances.of(at / d, at % d, &sums);
            let parts = match of_one {
                true => (sums.x + sums.y).powi(2),
                false => sums.x * sums.x + sums.y * sums.y + sums.squares + sums.label_alike,
            };
            allowed.own += rounded(self.plan.roundings.widest.output, parts.sqrt());
            allowed.certain += slab.lost(Stage::Dk, at);
            kept.add(&allowed.times(weight), parts * weight * weight);
        });
    }

    /// The same in a trial, for a sum without addends.
    pub(super) fn keep_sum_alone(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        of: (&Slice, &Unit),
        outcome: &mut Outcome,
    ) {
        if self.plan.sums_alone.is_some() {
            self.keep_reference(problem, slab, of, outcome);
        }
    }

    /// A unit's dk as the world has it in the sum, and how often it is in it.
    fn addend_in_world(&self, problem: &Problem<'_>, slab: &Slab) -> (Vec<f64>, f64) {
        let (microbatch, rank) = (problem.microbatch, problem.rank);
        let at = At { stage: Stage::Dk, microbatch, rank };
        let emulated = slab.instead.iter().find(|(of, _)| *of == Stage::Dk);
        let mut values = sum(&slab.lse, &slab.label);
        let range: Vec<usize> = slab.range.clone().collect();
        let rows = slab.classes.as_deref().unwrap_or(&range);
        if let Some((_, emulated)) = emulated {
            self.put_emulated((at, rows), emulated, &mut values);
        }
        let (factor, columns) = (self.world.scale(at), values.len() / rows.len().max(1));
        scale(&mut values, factor);
        self.world.expected(&mut Expectation { at, rows, columns, values: &mut values });
        let weight = self.world.weight(self.plan.summed_stage(), microbatch, rank);
        scale(&mut values, weight);
        (values, factor * weight)
    }
}

impl Plan<'_> {
    /// The stage in which units are summed that were recorded summed alone.
    fn summed_stage(&self) -> Stage {
        match self.step.find_reduced(Role::Dk, false) {
            Some(_) => Stage::Accumulate,
            None => Stage::Reduce,
        }
    }
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
