//! `duplicate-batch`: a microbatch's or a rank's gradients are those of another one's data,
//! or one microbatch is in the sum twice and another is not.
//!
//! Detectors: the captured rows of one microbatch, or of one rank's tokens, equal those of another,
//! or of the same rank in another microbatch; or the sum over microbatches is solved for their
//! weights. Emulation: the other's inputs; or the sum with those weights.

use std::collections::BTreeMap;
use std::rc::Rc;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::{MovedTokens, ReadFromElsewhere};
use crate::diagnose::detectors::addends::{Solved, Weighted, solved};
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::single_tokens::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::dump::name_ranks;
use crate::head::{MicrobatchInputs, Stage, Unit};

/// The catalogue's entry.
pub struct DuplicateBatch;

impl Cause for DuplicateBatch {
    fn id(&self) -> &str {
        "duplicate-batch"
    }

    fn about(&self) -> &str {
        "the gradients are of another microbatch's or rank's data: one was used twice"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["datasets 5360"]
    }

    fn advice(&self) -> &str {
        "draw every microbatch and every rank its own data: advance the iterator once each, seed or shard it by rank"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut hypotheses: Vec<Hypothesis> = of_microbatches(evidence).into_iter().collect();
        hypotheses.extend(of_ranks_data(evidence));
        hypotheses.extend(of_ranks_microbatches(evidence));
        hypotheses.extend(of_sums(evidence));
        hypotheses
    }
}

/// A part is right if its squared error is at most this many times what rounding is expected to
/// cause.
const ROUNDED: f64 = 16.0;
/// Stages with one row per token, in the order in which they are computed.
const OF_TOKENS: [Stage; 6] =
    [Stage::Lse, Stage::LabelLogits, Stage::Logprobs, Stage::DqLse, Stage::DqLabel, Stage::Dq];

/// Whether two captured tensors are equal up to rounding.
fn same(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && energy(a) > 0.0 && distance(a, b) <= 1e-6 * energy(a)
}

/// The hypothesis that a microbatch used another one's inputs: its failing tensor equals that of
/// another microbatch, which passes.
fn of_microbatches(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut from = BTreeMap::new();
    for inputs in evidence.inputs.iter().filter(|inputs| inputs.microbatch.is_some()) {
        let is_of_microbatch =
            |key: &&Key| key.microbatch == inputs.microbatch && key.stage != Stage::Loss;
        let Some(&key) = evidence.failing.iter().find(is_of_microbatch) else { continue };
        let Some(captured) = evidence.captured(key) else { continue };
        let is_other = |other: &&MicrobatchInputs| {
            let other_key = Key { microbatch: other.microbatch, ..key };
            let passes = evidence.residuals.get(&other_key).is_some_and(|residual| residual.passes);
            passes
                && other.tokens() == inputs.tokens()
                && evidence
                    .captured(other_key)
                    .is_some_and(|values| same(&captured.values, &values.values))
        };
        if let Some(other) = evidence.inputs.iter().find(is_other) {
            from.insert(inputs.microbatch, (other.microbatch, None));
        }
    }
    let word = |mb: &Option<Microbatch>| mb.map_or("the step".into(), |mb| mb.to_string());
    let pair = |(to, (from, _)): (&_, &(_, _))| format!("{} has that of {}", word(to), word(from));
    let pairs: Vec<String> = from.iter().map(pair).collect();
    let parameters = vec![("microbatch", pairs.join(", "))];
    (!from.is_empty()).then(|| Hypothesis::new(ReadFromElsewhere { from }, parameters))
}

/// A captured stage of a microbatch, by the ranks that hold its tokens.
struct ByRank {
    /// The ranks in words, and their tokens.
    ranks: Vec<(String, Vec<usize>)>,
    captured: Rc<Values>,
    /// Whether each rank's rows are right, as far as the sample shows.
    right: Vec<bool>,
}

impl ByRank {
    fn of(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, stage: Stage) -> Option<ByRank> {
        let place = (stage, inputs.microbatch);
        let in_place = |key: &&Key| (key.stage, key.microbatch) == place;
        let keys: Vec<&Key> = evidence.residuals.keys().filter(in_place).collect();
        let captured = evidence.captured(**keys.first()?)?;
        let rows = evidence.reference().rows_of(place);
        let all = keys.iter().map(|key| &evidence.residuals[*key]);
        let (floor, n) = all
            .fold((0.0, 0), |(floor, n), residual| (floor + residual.floor, n + residual.elements));
        let right = |tokens: &Vec<usize>| {
            let looked: Vec<_> = tokens.iter().filter_map(|t| rows.get_key_value(t)).collect();
            let off: f64 = looked.iter().map(|(t, row)| distance(captured.row(**t), row)).sum();
            off <= ROUNDED * floor / n as f64 * (looked.len() * captured.columns) as f64
        };
        let named = |unit: Unit| (name_ranks(&unit.ranks), unit.rows);
        let ranks: Vec<_> = evidence.step.rank_rows(inputs).ok()?.into_iter().map(named).collect();
        let right = ranks.iter().map(|(_, tokens)| right(tokens)).collect();
        Some(ByRank { ranks, captured, right })
    }

    fn wrong(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&at| !self.right[at])
    }

    fn values(&self, rank: usize) -> Vec<f64> {
        self.ranks[rank].1.iter().flat_map(|&t| self.captured.row(t)).copied().collect()
    }
}

/// The hypothesis that one rank's tokens are another rank's: its rows of a gradient equal those of
/// the other.
fn of_ranks_data(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut all: BTreeMap<Option<Microbatch>, Vec<usize>> = BTreeMap::new();
    let mut pairs: Vec<String> = Vec::new();
    for inputs in evidence.inputs {
        let mut keys = evidence.failing_of(&Stage::GRADIENTS[..4]);
        let Some((key, _)) = keys.find(|(key, _)| key.microbatch == inputs.microbatch) else {
            continue;
        };
        let Some(by_rank) = ByRank::of(evidence, inputs, key.stage) else { continue };
        let mut from: Vec<usize> = (0..inputs.tokens()).collect();
        for to in by_rank.wrong() {
            let values = by_rank.values(to);
            let is_other = |&of: &usize| by_rank.right[of] && same(&values, &by_rank.values(of));
            if let Some(other) = (0..by_rank.ranks.len()).find(is_other) {
                let (to, other) = (&by_rank.ranks[to], &by_rank.ranks[other]);
                to.1.iter().zip(&other.1).for_each(|(&t, &other)| from[t] = other);
                pairs.push(format!("{} has those of {}", to.0, other.0));
            }
        }
        if from.iter().enumerate().any(|(t, &from)| t != from) {
            all.insert(inputs.microbatch, from);
        }
    }
    pairs.dedup();
    let parameters = vec![("tokens", pairs.join(", "))];
    (!all.is_empty()).then(|| Hypothesis::new(MovedTokens { from: all }, parameters))
}

/// The hypothesis that one rank used its inputs of another microbatch.
fn of_ranks_microbatches(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut from = BTreeMap::new();
    let mut pairs: Vec<String> = Vec::new();
    // Each stage of a microbatch is read once, however many others are compared with it.
    let mut read: BTreeMap<(Stage, Option<Microbatch>), Option<Rc<ByRank>>> = BTreeMap::new();
    let mut by_rank = |inputs: &MicrobatchInputs, stage: Stage| {
        let read_by_rank = || ByRank::of(evidence, inputs, stage).map(Rc::new);
        read.entry((stage, inputs.microbatch)).or_insert_with(read_by_rank).clone()
    };
    for inputs in evidence.inputs {
        let fails = |stage: Stage| {
            let is_of_stage = |key: &Key| key.stage == stage && key.microbatch == inputs.microbatch;
            evidence.failing.iter().any(is_of_stage)
        };
        let Some(stage) = OF_TOKENS.into_iter().find(|&stage| fails(stage)) else { continue };
        let Some(ranks_here) = by_rank(inputs, stage) else { continue };
        for to in ranks_here.wrong() {
            let values = ranks_here.values(to);
            let is_other = |other: &&MicrobatchInputs| {
                by_rank(other, stage).is_some_and(|other_ranks| {
                    other_ranks.ranks == ranks_here.ranks
                        && other_ranks.right[to]
                        && same(&values, &other_ranks.values(to))
                })
            };
            let mut others =
                evidence.inputs.iter().filter(|one| one.microbatch != inputs.microbatch);
            let Some(other) = others.find(is_other) else { continue };
            let place = from.entry(inputs.microbatch);
            let (microbatch, tokens) = place.or_insert((other.microbatch, Some(Vec::new())));
            if *microbatch != other.microbatch {
                return None; // The ranks read different microbatches, so it is no single stale buffer.
            }
            tokens.iter_mut().for_each(|tokens| tokens.extend(&ranks_here.ranks[to].1));
            let word = |mb: Option<Microbatch>| mb.map_or("all".into(), |mb| mb.to_string());
            let (rank, mb, other) =
                (&ranks_here.ranks[to].0, word(inputs.microbatch), word(other.microbatch));
            pairs.push(format!("{rank} in microbatch {mb} has those of microbatch {other}"));
        }
    }
    let parameters = vec![("tokens", pairs.join(", "))];
    (!from.is_empty()).then(|| Hypothesis::new(ReadFromElsewhere { from }, parameters))
}

/// The hypothesis that sums contain one microbatch twice and another not at all.
fn of_sums(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let twice = |solved: &Solved| {
        let weights: Vec<f64> = solved.addends.iter().map(|addend| addend.weight).collect();
        let total: f64 = weights.iter().sum();
        weights.contains(&2.0) && weights.contains(&0.0) && total == weights.len() as f64
    };
    let sums: Vec<Solved> = solved(evidence).into_iter().filter(twice).collect();
    let Some(first) = sums.first() else { return Vec::new() };
    let named = |weight: f64| {
        let all = first.addends.iter().filter(|addend| addend.weight == weight);
        let name_of = |addend: &crate::diagnose::detectors::addends::Addend| match (
            addend.microbatch,
            addend.rank,
        ) {
            (Some(mb), Some(rank)) => format!("{mb} of rank {rank}"),
            (Some(mb), None) => mb.to_string(),
            (None, rank) => rank.map_or("all".into(), |rank| format!("rank {rank}")),
        };
        all.map(name_of).collect::<Vec<String>>().join(", ")
    };
    let parameters = vec![("twice", named(2.0)), ("left out", named(0.0))];
    vec![Hypothesis::new(Weighted { sums }, parameters)]
}
