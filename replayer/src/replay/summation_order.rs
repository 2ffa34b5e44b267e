//! Sums in few bits in an order that nobody listed, which their bits show: whether a bound would
//! let them pass or not.

use std::collections::BTreeMap;

use super::addends;
use super::microbatch::HeadMicrobatch;
use super::plan::Plan;
use super::summation_search::{Summed, divisors};
use super::summation_votes::{Votes, Whole};
use crate::head::Stage;
use crate::kernels::round::Precision;

/// Elements that one rounding of the sum does not give, from which on other orders are looked for.
const MANY: usize = 64;
/// How many times more elements another order gives than one rounding of the sum.
const CLEAR: u64 = 20;
/// Elements of all addends that are held for it.
const MOST: usize = 1 << 26;

impl Plan<'_> {
    /// The same of sums in another order, which must make nearly every element where one rounding
    /// of the sum does not: many orders are tried.
    pub(super) fn in_another_order(
        &self,
        microbatches: &[HeadMicrobatch],
        whole: &Whole<'_>,
        precision: Precision,
    ) -> Option<String> {
        let all = whole.captured.len();
        let once = |at: &usize| whole.captured.get_f64(*at) == precision.round64(whole.wide[*at]);
        let others = all - (0..all).filter(once).count();
        if others < MANY {
            return None;
        }
        let declared = self.divisor(microbatches).unwrap_or(1.0);
        let addends = self.addends_of(microbatches, whole, declared)?;
        let captured: Vec<f64> = (0..all).map(|at| whole.captured.get_f64(at)).collect();
        let divisors = divisors(declared, addends.len());
        let ring = whole.stage == Stage::Reduce;
        let wide = whole.wide;
        let sums =
            Summed { captured: &captured, addends: &addends, wide, divisors: &divisors, ring };
        let sum = sums.in_few_bits()?;
        let votes = Votes::of(&whole.captured, whole.wide, &sum.values, precision);
        let clear = votes.chained >= MANY as u64 && votes.rounded_once * CLEAR <= votes.chained;
        clear.then(|| {
            format!(
                "{} elements are what partial sums in {} give ({}) and {} what one rounding of the sum gives, where the two differ",
                votes.chained, sum.steps.format(), sum.order, votes.rounded_once
            )
        })
    }

    /// What adds up to a sum: of the reduction each rank's part, else each microbatch's. `None`
    /// where it is more than is held.
    fn addends_of(
        &self,
        head_microbatches: &[HeadMicrobatch],
        whole: &Whole<'_>,
        declared: f64,
    ) -> Option<Vec<Vec<f64>>> {
        let microbatches: Vec<_> =
            head_microbatches.iter().map(|microbatch| microbatch.inputs.microbatch).collect();
        let ranks = self.step.dump.manifest.world_size as usize;
        if microbatches.len() * ranks * whole.captured.len() > MOST {
            return None;
        }
        let all = addends::read(self.step, &microbatches, (whole.stage, whole.rank), true)?;
        let summed = all.iter().all(|(microbatch, ..)| microbatch.is_none());
        let divisor = if summed { 1.0 } else { declared };
        let mut sums: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for (microbatch, rank, values) in all {
            let whose = match whole.stage {
                Stage::Accumulate => (microbatch, None),
                _ => (None, rank),
            };
            let sum = sums.entry(whose).or_insert_with(|| vec![0.0; values.len()]);
            sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x / divisor);
        }
        Some(sums.into_values().collect())
    }
}
