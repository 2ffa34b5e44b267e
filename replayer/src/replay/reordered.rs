//! Sums in few bits in an order that nobody listed, which their bits show: whether a bound would
//! let them pass or not.

use backtape::identity::Rank;
use backtape::role::Role;

use super::addends::Sum;
use super::chained::{Votes, Whole};
use super::reductions::{Summed, divisors};
use super::{Replay, Slice};
use crate::head::Stage;
use crate::head::step::StepError;
use crate::kernels::round::Precision;

/// Elements that one rounding of the sum does not give, from which on other orders are looked for.
const MANY: usize = 64;
/// How many times more elements another order gives than one rounding of the sum.
const CLEAR: u64 = 20;
/// Elements of all addends that are held for it.
const MOST: usize = 1 << 26;

impl Replay<'_> {
    /// The same of sums in another order, which must make nearly every element where one rounding
    /// of the sum does not: many orders are tried.
    pub(super) fn in_another_order(
        &self,
        slices: &[Slice],
        of: &Whole<'_>,
        precision: Precision,
    ) -> Result<Option<String>, StepError> {
        let all = of.captured.len();
        let once = |at: &usize| of.captured.get_f64(*at) == precision.round64(of.wide[*at]);
        let others = all - (0..all).filter(once).count();
        if others < MANY {
            return Ok(None);
        }
        let Some(addends) = self.addends_of(slices, of)? else { return Ok(None) };
        if addends.len() * all > MOST {
            return Ok(None);
        }
        let captured: Vec<f64> = (0..all).map(|at| of.captured.get_f64(at)).collect();
        let declared = self.divisor(slices).unwrap_or(1.0);
        let divisors = divisors(declared, addends.len());
        let ring = of.stage == Stage::Reduce;
        let wide = of.wide;
        let sums =
            Summed { captured: &captured, addends: &addends, wide, divisors: &divisors, ring };
        let Some(found) = sums.in_few_bits() else { return Ok(None) };
        let votes = Votes::of(&of.captured, of.wide, &found.values, precision);
        let clear = votes.chained >= MANY as u64 && votes.rounded_once * CLEAR <= votes.chained;
        Ok(clear.then(|| {
            format!(
                "{} elements are what partial sums in {} give ({}) and {} what one rounding of the sum gives, where the two differ",
                votes.chained, found.steps.format(), found.order, votes.rounded_once
            )
        }))
    }

    /// What adds up to a sum: of the reduction each rank's part, else each microbatch's.
    fn addends_of(
        &self,
        slices: &[Slice],
        of: &Whole<'_>,
    ) -> Result<Option<Vec<Vec<f64>>>, StepError> {
        let mut found = Vec::new();
        if of.stage == Stage::Accumulate {
            let Ok(divisor) = self.divisor(slices) else { return Ok(None) };
            for slice in slices {
                let Some(key) = self.step.find(Role::Dk, slice.inputs.microbatch) else {
                    return Ok(None);
                };
                match self.addend_of(key, of.rank, of.shape)? {
                    Some(addend) => found.push(addend.iter().map(|x| x / divisor).collect()),
                    None => return Ok(None),
                }
            }
            return Ok(Some(found));
        }
        let local = self.step.find_reduced(Role::Dk, false);
        let each = |slice: &Slice| self.step.find(Role::Dk, slice.inputs.microbatch);
        let keys: Option<Vec<_>> = match local {
            Some(local) => Some(vec![local]),
            None => slices.iter().map(each).collect(),
        };
        let Some(keys) = keys.filter(|keys| !keys.is_empty()) else { return Ok(None) };
        let divisor = match local {
            Some(_) => 1.0,
            None => self.divisor(slices).unwrap_or(1.0),
        };
        for rank in self.holders(keys[0]) {
            let mut sum = Sum::new(of.shape);
            for key in &keys {
                let only = |of: Option<Rank>| f64::from(u8::from(of == rank));
                sum.add_weighted(self.step, key, &only)?;
            }
            found.push(sum.total.iter().map(|x| x / divisor).collect());
        }
        Ok(Some(found))
    }
}
