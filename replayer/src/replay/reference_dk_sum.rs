//! The reference dk of the units, added up while they are walked.

use backtape::identity::Rank;
use backtape::role::Role;
use rayon::prelude::*;

use super::elementwise::{scale, sum};
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::problem::Problem;
use super::reference_dk::{
    Addend, Emulated, KEPT_BYTES, Kept, KeptSum, ReferenceDk, SumsWithoutAddends, add,
};
use super::rounding_variance::rounded;
use super::slab::Slab;
use super::world::{Expectation, StagePlace};
use crate::head::{Stage, Unit};

impl Plan<'_> {
    /// Whether the reference dk of so many elements is kept.
    fn keeps(&self, elements: usize) -> bool {
        let wanted = self.wants(Stage::Reduce) || self.wants(Stage::Accumulate);
        wanted && elements * 8 <= KEPT_BYTES
    }

    /// The sums that were recorded alone, where what is allowed of their elements is kept: it is
    /// told from the sums of each slab.
    pub(super) fn kept_without_addends(&self, elements: usize) -> Option<&SumsWithoutAddends> {
        let alone = self.sums_without_addends.as_ref().filter(|_| self.keeps(elements));
        alone.filter(|alone| alone.bytes(elements) <= KEPT_BYTES)
    }
}

impl Judge<'_> {
    /// Adds one unit's slab of reference dk.
    pub(super) fn keep_reference(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        (head_microbatch, unit): (&HeadMicrobatch, &Unit),
        outcome: &mut Outcome,
    ) {
        let (d, elements) = (problem.head.q.cols, problem.head.k.len());
        if !self.plan.keeps(elements) {
            return;
        }
        let alone = self.plan.kept_without_addends(elements);
        let sum = |ranks: Vec<Rank>| KeptSum {
            ranks,
            total: vec![0.0; elements],
            allowed: vec![Kept::default(); if alone.is_some() { elements } else { 0 }],
        };
        let kept = outcome.reference_dk.get_or_insert_with(|| ReferenceDk {
            sums: alone
                .map_or(vec![Vec::new()], SumsWithoutAddends::groups)
                .into_iter()
                .map(sum)
                .collect(),
            emulated: match self.plan.step.microbatches.len() == 1
                && head_microbatch.units.len() == 1
            {
                true => Emulated::Squares(0.0),
                false => Emulated::Sum(vec![0.0; elements]),
            },
            addends: Vec::new(),
            classes: slab.classes.clone(),
            averaged: 1.0,
        });
        let from = slab.range.start * d;
        let (values, weight) = self.addend_in_world(problem, slab);
        let is_of_ranks = |sum: &KeptSum| unit.ranks.iter().any(|rank| sum.ranks.contains(rank));
        let group = kept.sums.iter().position(is_of_ranks).unwrap_or(0);
        let sum = &mut kept.sums[group];
        let span = from..from + values.len();
        add(&mut sum.total[span.clone()], &values);
        kept.emulated.add(from, &slab.emulated);
        if alone.is_some() {
            let of_one = unit.ranks.len() == 1;
            self.keep_allowed(problem, slab, (of_one, weight), &mut sum.allowed[span]);
        }
        let others =
            size_of::<(f64, f64)>() * elements + alone.map_or(0, |sums| sums.bytes(elements));
        let fits = (kept.addends.len() + 1) * elements * 8 + others <= KEPT_BYTES;
        let same = |addend: &&mut Addend| {
            addend.microbatch == head_microbatch.inputs.microbatch && addend.ranks == unit.ranks
        };
        if let Some(addend) = kept.addends.iter_mut().find(same) {
            addend.reference.extend_from_slice(&values);
        } else if fits && from == 0 {
            let (microbatch, ranks) = (head_microbatch.inputs.microbatch, unit.ranks.clone());
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
        kept.par_iter_mut().enumerate().for_each(|(element, kept)| {
            let sums = slab.sums(&problem.head, element);
            let mut allowed = allowances.of(element / d, element % d, &sums);
            let parts = match of_one {
                true => (sums.x + sums.y).powi(2),
                false => sums.x * sums.x + sums.y * sums.y + sums.squares + sums.label_alike,
            };
            allowed.own += rounded(self.plan.roundings.widest.output, parts.sqrt());
            allowed.certain += slab.lost(Stage::Dk, element);
            kept.add(&allowed.times(weight), parts * weight * weight);
        });
    }

    /// The same in a trial, for a sum without addends.
    pub(super) fn keep_sum_without_addends(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        microbatch_unit: (&HeadMicrobatch, &Unit),
        outcome: &mut Outcome,
    ) {
        if self.plan.sums_without_addends.is_some() {
            self.keep_reference(problem, slab, microbatch_unit, outcome);
        }
    }

    /// A unit's dk as the world has it in the sum, and how often it is in it.
    fn addend_in_world(&self, problem: &Problem<'_>, slab: &Slab) -> (Vec<f64>, f64) {
        let (microbatch, rank) = (problem.microbatch, problem.rank);
        let place = StagePlace { stage: Stage::Dk, microbatch, rank };
        let emulated = slab.instead.iter().find(|(stage, _)| *stage == Stage::Dk);
        let mut values = sum(&slab.lse, &slab.label);
        let range: Vec<usize> = slab.range.clone().collect();
        let rows = slab.classes.as_deref().unwrap_or(&range);
        if let Some((_, emulated)) = emulated {
            self.put_emulated((place, rows), emulated, &mut values);
        }
        let (factor, columns) = (self.world.scale(place), values.len() / rows.len().max(1));
        scale(&mut values, factor);
        self.world.expected(&mut Expectation { place, rows, columns, values: &mut values });
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
