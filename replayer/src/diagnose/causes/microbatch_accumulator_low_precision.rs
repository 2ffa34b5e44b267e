//! `microbatch-accumulator-low-precision`: gradients of microbatches (or of ranks) are
//! added in few bits: 256 + 1 stays 256 in bf16.
//!
//! Real: ISEEKYAN/Megatron-LM 149; gradient buffers in the parameters' dtype.
//!
//! Detectors: `accumulate` or `reduce` fails; or its elements equal partial sums in few bits
//! wherever those differ from the sum rounded once. Emulation: `acc = round(acc + round(dk))` over
//! microbatches, over ranks, or both, from either end, divided before or after; other orders
//! (trees, groups, rings) and truncation in the place of rounding are recognised by the bits of the
//! sum.

use backtape::head::MicrobatchReduction;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::addends::{Part, Summed};
use crate::diagnose::detectors::single_tokens::distance;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::kernels::round::Precision;
use crate::replay::summation_search;
use crate::replay::summation_search::{FewBitSum, divisors};
use crate::replay::world::{Chain, World};

/// The catalogue's entry.
pub struct MicrobatchAccumulatorLowPrecision;

impl Cause for MicrobatchAccumulatorLowPrecision {
    fn id(&self) -> &'static str {
        "microbatch-accumulator-low-precision"
    }

    fn about(&self) -> &'static str {
        "gradients of microbatches or ranks are added up in a format of few bits"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ISEEKYAN/Megatron-LM 149"]
    }

    fn advice(&self) -> &'static str {
        "accumulate gradients over microbatches and ranks in f32 (Megatron: accumulate_allreduce_grads_in_fp32), or declare `reduce` in dtypes where few bits are meant"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let (accumulate, ranks) =
            (evidence.fails(Stage::Accumulate), evidence.fails(Stage::Reduce));
        if !accumulate && !ranks {
            return Vec::new();
        }
        let options = &evidence.step.options;
        let mean = options.microbatch_reduction == MicrobatchReduction::Mean;
        let several = evidence.microbatches() > 1;
        let mut hypotheses: Vec<Hypothesis> = sent(evidence).into_iter().collect();
        let all = [Over::Microbatches, Over::Ranks, Over::Both];
        hypotheses.extend(all.into_iter().filter_map(|over| ordered(evidence, over)));
        for precision in [Precision::Bf16, Precision::F16] {
            for descending in [false, true] {
                for divides_first in [false, true].into_iter().filter(|&first| mean || !first) {
                    let chain =
                        Chain { precision, descending, divides_first, rounds_addends: true };
                    let chains = [chain, Chain { rounds_addends: false, ..chain }];
                    for over in [Over::Microbatches, Over::Ranks, Over::Both] {
                        let possible = match over {
                            Over::Microbatches => several,
                            Over::Ranks => ranks && evidence.ranks() > 1,
                            Over::Both => ranks && several && evidence.ranks() > 1,
                        };
                        if possible {
                            hypotheses.extend(chains.map(|chain| hypothesis(chain, over)));
                        }
                    }
                }
            }
        }
        hypotheses
    }
}

/// The hypothesis of sums in few bits, in an order that is recognised by their bits.
fn ordered(evidence: &Evidence<'_>, over: Over) -> Option<Hypothesis> {
    let (mut world, mut parameters, mut fitted) = (ReplacedValues::default(), Vec::new(), 0);
    for (key, _) in evidence.failing_of(&Stage::SUMS) {
        if key.stage == Stage::Accumulate && over != Over::Microbatches {
            return None;
        }
        let (order, words, columns) = ordered_sum(evidence, key, over)?;
        if !parameters.is_empty() && parameters != words {
            return None;
        }
        (parameters, fitted) = (words, order.pieces);
        let rows = order.values.chunks(columns).map(<[f64]>::to_vec).enumerate();
        world = world.rows(key, rows);
    }
    (!world.rows_of_key.is_empty()).then(|| Hypothesis::new(world, parameters).fitted(fitted))
}

/// A sum, words for how it was taken, and the number of columns.
type Ordered = (FewBitSum, Vec<(&'static str, String)>, usize);

fn ordered_sum(evidence: &Evidence<'_>, key: Key, over: Over) -> Option<Ordered> {
    let ring = over == Over::Ranks;
    let sum = Summed::of(evidence, key, ring)?;
    let captured = &sum.captured.values[..];
    if evidence.spend(SOME * sum.parts.len() * captured.len()) {
        return None;
    }
    let addends: Vec<Vec<f64>> = match ring {
        true => sum.by(|addend| addend.rank).into_values().collect(),
        // In the sum over all ranks, the order of microbatches within one rank does not show.
        false if sum.parts.iter().any(|(addend, _)| addend.rank != sum.parts[0].0.rank) => {
            return None;
        }
        false => sum.parts.iter().map(|(_, values)| values.clone()).collect(),
    };
    let (wide, divisors) = (sum.total(), divisors(sum.divisor, addends.len()));
    let summed = summation_search::Summed {
        captured,
        addends: &addends,
        wide: &wide,
        divisors: &divisors,
        ring,
    };
    let order = summed.in_few_bits()?;
    let mut words = order.steps.words();
    words.extend([("over", over.words().to_string()), ("order", order.order.clone())]);
    Some((order, words, sum.captured.columns.max(1)))
}

/// The work of looking for an order, as multiply-adds per element and addend.
const SOME: usize = 8;

/// The hypothesis that addends are rounded to few bits before they are sent, as a compressing
/// communication hook does, and added in enough bits.
fn sent(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    [Precision::Bf16, Precision::F16].into_iter().find_map(|precision| {
        let mut world = ReplacedValues::default();
        for (key, _) in evidence.failing_of(&Stage::SUMS) {
            let sum = Summed::of(evidence, key, true)?;
            let captured = &sum.captured;
            let wide = sum.total();
            let rounded = |index: usize| {
                let sent_addend = |(_, x): &Part| {
                    precision.round64(Precision::F32.round64(x[index] * sum.divisor))
                };
                sum.parts.iter().map(sent_addend).sum::<f64>() / sum.divisor
            };
            let sent: Vec<f64> = (0..wide.len()).map(rounded).collect();
            let off = |values: &[f64]| distance(&captured.values, values);
            if !(off(&sent) <= HELPS * off(&wide)) {
                return None;
            }
            let rows = sent.chunks(captured.columns.max(1)).map(<[f64]>::to_vec).enumerate();
            world = world.rows(key, rows);
        }
        let parameters = vec![
            ("addends rounded to", precision.name().to_string()),
            ("accumulator", "f32".to_string()),
        ];
        (!world.rows_of_key.is_empty()).then(|| Hypothesis::new(world, parameters))
    })
}

/// Share of the squared error that rounded addends may leave to be worth a trial: the rest may be
/// the rounding of the sum itself.
const HELPS: f64 = 0.5;

/// Which sums are taken in few bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Microbatches,
    Ranks,
    Both,
}

impl Over {
    fn words(self) -> &'static str {
        match self {
            Over::Microbatches => "microbatches",
            Over::Ranks => "ranks",
            Over::Both => "microbatches, then ranks",
        }
    }
}

fn hypothesis(chain: Chain, over: Over) -> Hypothesis {
    let order = if chain.descending { "descending" } else { "ascending" };
    let words = over.words();
    let parameters = vec![
        ("accumulator", chain.precision.name().to_string()),
        ("over", words.to_string()),
        ("order", order.to_string()),
        ("divided before the sum", chain.divides_first.to_string()),
        ("addends rounded first", chain.rounds_addends.to_string()),
    ];
    Hypothesis::new(Chained { chain, over }, parameters)
}

struct Chained {
    chain: Chain,
    over: Over,
}

impl World for Chained {
    fn chain(&self, stage: Stage) -> Option<Chain> {
        let here = match stage {
            Stage::Accumulate => self.over != Over::Ranks,
            Stage::Reduce => self.over != Over::Microbatches,
            _ => false,
        };
        here.then_some(self.chain)
    }
}
