//! Sums of gradients in few bits: every partial sum rounded, in the order in which a job
//! meets the addends. What such a sum is told from is the same sum in enough bits, rounded
//! once: where the two differ, a captured sum is one or the other.

use backtape::identity::Rank;
use backtape::role::Role;

use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::plan::Plan;
use super::summation_votes::{Votes, Whole};
use super::world::Chain;
use crate::compare::Bound;
use crate::head::Stage;
use crate::head::step::{StepError, matrix};
use crate::kernels::round::Precision;

/// Formats that gradients are accumulated in where f32 was meant.
const NARROW: [Precision; 2] = [Precision::Bf16, Precision::F16];

impl Judge<'_> {
    /// The chains of the world, if it has one that bears on a stage.
    fn supposed_chains(&self, stage: Stage) -> Option<[Option<Chain>; 2]> {
        let [microbatches, ranks] = Stage::SUMS.map(|stage| self.world.chain(stage));
        let bears = if stage == Stage::Reduce {
            microbatches.is_some() || ranks.is_some()
        } else {
            microbatches.is_some()
        };
        bears.then_some([microbatches, ranks])
    }

    /// What the world's chains make of a sum; `None` where it has none, or where the
    /// addends are not whole tensors.
    pub(super) fn chained(
        &self,
        microbatches: &[HeadMicrobatch],
        whole: &Whole<'_>,
    ) -> Result<Option<Vec<f64>>, StepError> {
        match self.supposed_chains(whole.stage) {
            Some(chains) => self.plan.chain(microbatches, whole, chains),
            None => Ok(None),
        }
    }

    /// Why a captured sum cannot have been taken in enough bits; in a world with chains,
    /// why it is not theirs.
    pub(super) fn chain_excess(
        &self,
        microbatches: &[HeadMicrobatch],
        whole: &Whole<'_>,
        bound: &Bound,
    ) -> Result<Option<String>, StepError> {
        if self.plan.roundings.reduce.unit_roundoff() > crate::head::roundings::F32 {
            return Ok(None); // It declares as much.
        }
        let lies = |precision: Precision| {
            let value = |i: usize| whole.captured.get_f64(i);
            (0..whole.captured.len())
                .all(|i| !value(i).is_finite() || precision.round64(value(i)) == value(i))
        };
        let narrow = |chain: Option<Chain>| chain.map(|chain| chain.precision);
        if let Some(chains) = self.supposed_chains(whole.stage) {
            let precision = chains.into_iter().find_map(narrow).unwrap_or(Precision::F32);
            let Some(chained) = self.plan.chain(microbatches, whole, chains)? else {
                return Ok(None);
            };
            let votes = Votes::of(&whole.captured, whole.wide, &chained, precision);
            let why = "the sum is not that of partial sums in few bits";
            return Ok((!votes.is_chained(bound)).then(|| why.into()));
        }
        // Numbers of bf16 are mostly numbers of f16 too, and not the other way round.
        let narrowest = NARROW.into_iter().find(|&precision| lies(precision));
        if let Some(precision) = narrowest {
            for chains in likely(whole.stage, precision) {
                let Some(chained) = self.plan.chain(microbatches, whole, chains)? else { continue };
                let votes = Votes::of(&whole.captured, whole.wide, &chained, precision);
                if votes.is_chained(bound) {
                    let Votes { chained, rounded_once } = votes;
                    return Ok(Some(format!(
                        "{chained} elements are what partial sums in {} give and {rounded_once} what one rounding of the sum gives, where the two differ",
                        precision.name()
                    )));
                }
            }
        }
        Ok(narrowest
            .and_then(|precision| self.plan.in_another_order(microbatches, whole, precision)))
    }
}

impl Plan<'_> {
    /// The sum with its partial sums rounded: each rank's over microbatches, then the
    /// ranks'.
    fn chain(
        &self,
        head_microbatches: &[HeadMicrobatch],
        whole: &Whole<'_>,
        [microbatches, ranks]: [Option<Chain>; 2],
    ) -> Result<Option<Vec<f64>>, StepError> {
        if whole.stage == Stage::Accumulate {
            return self.over_microbatches(
                head_microbatches,
                whole.rank,
                whole.shape,
                microbatches,
            );
        }
        let local = self.step.find_reduced(Role::Dk, false);
        let first = head_microbatches
            .first()
            .and_then(|microbatch| self.step.find(Role::Dk, microbatch.inputs.microbatch));
        let Some(key) = local.or(first) else { return Ok(None) };
        let mut sum = Running::new(ranks, 1.0);
        let mut holders = self.holders(key);
        sum.order(&mut holders);
        for rank in holders {
            let addend = match local {
                Some(local) => self.addend_of(local, rank, whole.shape)?,
                None => {
                    self.over_microbatches(head_microbatches, rank, whole.shape, microbatches)?
                }
            };
            match addend {
                Some(addend) => sum.add(addend),
                None => return Ok(None),
            }
        }
        Ok(Some(sum.finish()))
    }

    /// One rank's sum over microbatches, divided as declared.
    fn over_microbatches(
        &self,
        microbatches: &[HeadMicrobatch],
        rank: Option<Rank>,
        shape: &[u64],
        chain: Option<Chain>,
    ) -> Result<Option<Vec<f64>>, StepError> {
        let Ok(divisor) = self.divisor(microbatches) else { return Ok(None) };
        let mut sum = Running::new(chain, divisor);
        let mut microbatches: Vec<&HeadMicrobatch> = microbatches.iter().collect();
        sum.order(&mut microbatches);
        for microbatch in microbatches {
            let Some(key) = self.step.find(Role::Dk, microbatch.inputs.microbatch) else {
                return Ok(None);
            };
            match self.addend_of(key, rank, shape)? {
                Some(addend) => sum.add(addend),
                None => return Ok(None),
            }
        }
        Ok(Some(sum.finish()))
    }

    fn addend_of(
        &self,
        key: &backtape::shard::TensorKey,
        rank: Option<Rank>,
        shape: &[u64],
    ) -> Result<Option<Vec<f64>>, StepError> {
        let tensor = self.held_by(key, rank)?;
        let values = matrix(&tensor).filter(|_| tensor.shape == shape);
        Ok(values.map(|values| values.to_f64()))
    }
}

/// What jobs do that sum in few bits: over microbatches, over ranks, over both.
fn likely(stage: Stage, precision: Precision) -> Vec<[Option<Chain>; 2]> {
    let chains = |rounds_addends: bool| {
        let chain =
            Some(Chain { precision, descending: false, divides_first: false, rounds_addends });
        match stage {
            Stage::Accumulate => vec![[chain, None]],
            _ => vec![[chain, None], [None, chain], [chain, chain]],
        }
    };
    [chains(true), chains(false)].concat()
}

/// A sum of addends over a divisor; without a chain in f64.
struct Running {
    chain: Option<Chain>,
    divisor: f64,
    sum: Vec<f64>,
}

impl Running {
    fn new(chain: Option<Chain>, divisor: f64) -> Running {
        Running { chain, divisor, sum: Vec::new() }
    }

    /// Brings what is to be added into the order of the chain.
    fn order<T>(&self, addends: &mut [T]) {
        if self.chain.is_some_and(|chain| chain.descending) {
            addends.reverse();
        }
    }

    fn add(&mut self, addend: Vec<f64>) {
        self.sum.resize(addend.len(), 0.0);
        let pairs = self.sum.iter_mut().zip(addend);
        let Some(Chain { precision, divides_first, rounds_addends, .. }) = self.chain else {
            return pairs.for_each(|(sum, x)| *sum += x);
        };
        let before = if divides_first { self.divisor } else { 1.0 };
        let addend = |x: f64| if rounds_addends { precision.round64(x) } else { x };
        // Additions are made in f32, whatever their sum is rounded to: with an addend that is no
        // number of the format the two roundings are not one.
        let add = |sum: f64, x: f64| precision.round64(Precision::F32.round64(sum + x));
        pairs.for_each(|(sum, x)| *sum = add(*sum, addend(x / before)));
    }

    fn finish(mut self) -> Vec<f64> {
        let (sums, divisor) = (self.sum.iter_mut(), self.divisor);
        match self.chain {
            None => sums.for_each(|sum| *sum /= divisor),
            Some(chain) if !chain.divides_first && divisor != 1.0 => {
                sums.for_each(|sum| *sum = chain.precision.round64(*sum / divisor));
            }
            Some(_) => {}
        }
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::{Matrix, Values};

    fn chain(descending: bool, divides_first: bool) -> Option<Chain> {
        let rounds_addends = true;
        Some(Chain { precision: Precision::Bf16, descending, divides_first, rounds_addends })
    }

    fn added(mut each: Vec<Vec<f64>>, chain: Option<Chain>, divisor: f64) -> Vec<f64> {
        let mut sum = Running::new(chain, divisor);
        sum.order(&mut each);
        each.into_iter().for_each(|values| sum.add(values));
        sum.finish()
    }

    #[test]
    fn equal_sums_have_one_vote() {
        let chained: Vec<f64> = (0..900).map(|at| 256.0 + f64::from(at % 3) * 2.0).collect();
        let wide: Vec<f64> = chained.iter().map(|x| x + 2.0).collect();
        let captured = Matrix { rows: 900, cols: 1, values: Values::F64(&chained) };
        let votes = Votes::of(&captured, &wide, &chained, Precision::Bf16);
        assert_eq!(votes, Votes { chained: 3, rounded_once: 0 });
    }

    #[test]
    fn two_hundred_and_fifty_six_and_one_stays_what_it_was() {
        let each = || vec![vec![256.0], vec![1.0], vec![1.0]];
        assert_eq!(added(each(), None, 1.0), [258.0]);
        assert_eq!(added(each(), chain(false, false), 1.0), [256.0]);
        assert_eq!(added(each(), chain(true, false), 1.0), [258.0]);
    }

    #[test]
    fn addends_are_divided_before_or_the_sum_after() {
        let each = || vec![vec![1.0], vec![1.0], vec![1.0]];
        let third = Precision::Bf16.round64(1.0 / 3.0);
        assert_eq!(added(each(), chain(false, false), 3.0), [1.0]);
        let thrice = Precision::Bf16.round64(Precision::Bf16.round64(2.0 * third) + third);
        assert_eq!(added(each(), chain(false, true), 3.0), [thrice]);
    }

    #[test]
    fn an_addition_is_made_in_f32_before_its_sum_is_rounded_to_few_bits() {
        // Half a step of bf16 above 1, and something that f32 loses beside 1: a tie, to even.
        let each = vec![vec![1.0], vec![2f64.powi(-8) + 2f64.powi(-40)]];
        let chain = chain(false, false).map(|chain| Chain { rounds_addends: false, ..chain });
        assert_eq!(added(each, chain, 1.0), [1.0]);
    }

    /// Goal: a sum in f32, whatever its addends lost when they were stored, is never taken
    /// for one in bf16; a sum in bf16 is. Method: sums of five random addends.
    #[test]
    fn only_sums_in_few_bits_vote_for_few_bits() {
        let mut state = 9u64;
        let mut normal = || {
            let mut unit = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 11) as f64 / (1u64 << 53) as f64
            };
            (0..12).map(|_| unit()).sum::<f64>() - 6.0
        };
        let n = 4000;
        let exact: Vec<Vec<f64>> = (0..5).map(|_| (0..n).map(|_| normal()).collect()).collect();
        let half = |x: &f64| Precision::Bf16.round64(*x);
        let stored: Vec<Vec<f64>> =
            exact.iter().map(|values| values.iter().map(half).collect()).collect();
        let wide = added(stored.clone(), None, 1.0);
        let narrow = added(stored, chain(false, false), 1.0);
        let bound = Bound::new(20, 100, n);
        let votes = |captured: &[f64]| {
            let captured = Matrix { rows: n, cols: 1, values: Values::F64(captured) };
            Votes::of(&captured, &wide, &narrow, Precision::Bf16)
        };
        let unrounded: Vec<f64> = added(exact, None, 1.0).iter().map(half).collect();
        assert!(!votes(&unrounded).is_chained(&bound), "{:?}", votes(&unrounded));
        let rounded: Vec<f64> = wide.iter().map(half).collect();
        assert!(!votes(&rounded).is_chained(&bound), "{:?}", votes(&rounded));
        assert!(votes(&narrow).is_chained(&bound), "{:?}", votes(&narrow));
    }
}
