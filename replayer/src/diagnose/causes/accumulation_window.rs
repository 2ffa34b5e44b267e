//! `accumulation-window`: the sum over microbatches does not contain each of them once: it has only
//! some, only the last, or earlier ones doubled each time another is added.
//!
//! Detectors: the captured sum is solved for the weights of the captured addends, by least squares;
//! they must be whole numbers, times a common factor that counts explain. A microbatch's gradient
//! that contains another's too, because a buffer was not cleared, is solved for likewise. Where
//! only sums were recorded, they are solved for the weight of each token: all tokens of a rank's
//! microbatch must have one. Emulation: the sum with these weights; or the gradient plus the other
//! microbatch's captured tensor.

use std::collections::BTreeMap;
use std::rc::Rc;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::TensorKey;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{divisor, unrecorded};
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::fitted_numbers::rounded;
use crate::diagnose::detectors::least_squares::multiples;
use crate::diagnose::detectors::sum_counts::{CountedSums, GradientPart};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::head::step::numbers;
use crate::replay::addends::Sum;
use crate::replay::world::{Expectation, World};

/// The catalogue's entry.
pub struct AccumulationWindow;

/// The weights are solved from at most this many evenly spaced elements of dk.
const ELEMENTS: usize = 1 << 17;
/// The weights of more microbatches than this are not solved: the system grows with their square.
const MOST: usize = 256;
/// How far from a whole number a weight may lie.
const NEAR: f64 = 0.02;
/// The largest whole number that a weight may be: 2^16 is a window of 16 doublings.
const LARGEST: f64 = 65536.0;

impl Cause for AccumulationWindow {
    fn id(&self) -> &'static str {
        "accumulation-window"
    }

    fn about(&self) -> &'static str {
        "the sum over microbatches does not hold each of them once"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["transformers 39659", "burn 5695", "Megatron-LM 7186", "Megatron-LM 6660"]
    }

    fn advice(&self) -> &'static str {
        "clear the accumulated gradient once before the first microbatch of a step and add every microbatch to it once"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut hypotheses = windows(evidence);
        hypotheses.extend(uncleared(evidence));
        hypotheses.extend(of_parts(evidence));
        hypotheses
    }
}

/// The hypothesis of sums that contain some ranks' microbatches more or less often than once, from
/// the weights of their tokens, as ranks that share tokens have no addend of their own.
fn of_parts(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let sums = CountedSums::of(evidence, GradientPart::Whole)?;
    if !sums.of_parts || sums.parts.is_empty() {
        return None;
    }
    let often = |(words, often): &(String, f64)| format!("{words} {often} times");
    let words = sums.parts.iter().map(often).collect::<Vec<_>>().join(", ");
    let fitted = sums.parts.len();
    Some(Hypothesis::new(sums, vec![("holds", words)]).fitted(fitted))
}

/// Hypotheses of sums over microbatches with other weights than 1.
fn windows(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let count = evidence.microbatches();
    if !(2..=MOST).contains(&count) {
        return Vec::new();
    }
    let stages = Stage::SUMS;
    let keys: Vec<Key> = evidence.failing_of(&stages).map(|(key, _)| key).collect();
    let (mut weights, mut fitted) = (BTreeMap::new(), 0);
    for key in keys {
        let Some(solution) = solved(evidence, key) else { continue };
        let (positions, multiples): (Vec<usize>, Vec<f64>) = solution.into_iter().unzip();
        let divisor = divisor(evidence, key);
        let whole = whole(&multiples, divisor);
        // Weights that are no whole numbers count as fitted, one for each microbatch.
        fitted = if whole.is_some() { fitted } else { positions.len() };
        let Some(solved) = whole.or_else(|| raw(&multiples, divisor)) else { continue };
        let mut of_microbatches = vec![1.0; count];
        positions.into_iter().zip(solved).for_each(|(at, weight)| of_microbatches[at] = weight);
        weights.insert((key.stage, key.rank), of_microbatches);
    }
    let Some((&(_, rank), first)) = weights.iter().next() else { return Vec::new() };
    let words: Vec<String> = first.iter().map(|x| short(*x)).collect();
    let ids: Vec<Option<Microbatch>> =
        evidence.inputs.iter().map(|inputs| inputs.microbatch).collect();
    let mut parameters = vec![("weights of the microbatches", words.join(", "))];
    parameters.extend(rank.map(|rank| ("rank", rank.to_string())));
    if weights.len() > 1 {
        let alike = weights.values().all(|values| values == first);
        let others = if alike { "other ranks likewise" } else { "other ranks have other weights" };
        parameters.push(("beside it", others.to_string()));
    }
    vec![Hypothesis::new(Window { ids, weights }, parameters).fitted(fitted)]
}

/// The hypothesis that gradients of microbatches contain those of other microbatches too, because
/// the buffer that they were recorded from was not cleared.
fn uncleared(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut world = Uncleared { gradients: BTreeMap::new() };
    let mut words = Vec::new();
    let stages: Vec<Stage> =
        Stage::GRADIENTS.into_iter().filter(|stage| *stage != Stage::Dlogits).collect();
    for (key, _) in evidence.failing_of(&stages) {
        let (captured, table) = (evidence.captured(key)?, evidence.reference().stages.get(&key)?);
        let others: Vec<(Key, Rc<Values>)> = evidence
            .inputs
            .iter()
            .filter(|inputs| inputs.microbatch != key.microbatch)
            .filter_map(|inputs| {
                let other_key = Key { microbatch: inputs.microbatch, ..key };
                Some((other_key, evidence.captured(other_key)?))
            })
            .filter(|(_, values)| values.values.len() == captured.values.len())
            .collect();
        let rows = |values: &Values| -> Vec<f64> {
            table.keys().flat_map(|&row| values.row(row).to_vec()).collect()
        };
        let own_values: Vec<f64> = table.values().flatten().copied().collect();
        let seen: Vec<Vec<f64>> = others.iter().map(|(_, values)| rows(values)).collect();
        if evidence.spend((others.len() + 1).pow(2) * own_values.len()) {
            return None;
        }
        let all: Vec<&[f64]> = std::iter::once(&own_values).chain(&seen).map(|x| &x[..]).collect();
        let weights = multiples(&all, &rows(&captured))?;
        let near = |x: f64| (x - x.round()).abs() <= 2.0 * NEAR && x.round() <= 2.0;
        if weights.len() < 2 || weights[0].round() != 1.0 || !weights.iter().all(|&x| near(x)) {
            return None;
        }
        let held_microbatches = others.iter().zip(&weights[1..]).filter(|(_, x)| x.round() > 0.0);
        let held_microbatches: Vec<(f64, Key, Rc<Values>)> =
            held_microbatches.map(|((key, values), x)| (x.round(), *key, values.clone())).collect();
        if held_microbatches.is_empty() {
            return None;
        }
        let microbatch_name = |(_, key, _): &(f64, Key, Rc<Values>)| {
            key.microbatch.map_or("another".to_string(), |mb| mb.to_string())
        };
        let names: Vec<String> = held_microbatches.iter().map(microbatch_name).collect();
        let of_own_microbatch =
            key.microbatch.map_or(String::new(), |mb| format!(" of microbatch {mb}"));
        let said = format!(
            "{}{of_own_microbatch} holds what microbatch {} holds",
            key.stage,
            names.join(", ")
        );
        if !words.contains(&said) {
            words.push(said);
        }
        let addends = held_microbatches
            .into_iter()
            .map(|(times, _, values)| (times, values.columns, values.values.clone()));
        world.gradients.insert(key, addends.collect());
    }
    words.truncate(TOLD);
    let parameters = vec![("which", words.join("; "))];
    let fitted = words.len();
    (!world.gradients.is_empty()).then(|| Hypothesis::new(world, parameters).fitted(fitted))
}

/// The report lists at most this many gradients.
const TOLD: usize = 4;

/// Captured gradients of other microbatches that are added to a gradient: how often, the number of
/// columns, and the values.
struct Uncleared {
    gradients: BTreeMap<Key, Vec<(f64, usize, Vec<f64>)>>,
}

impl World for Uncleared {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        for (times, columns, addend) in self.gradients.get(&key).into_iter().flatten() {
            for (row, values) in expectation
                .rows
                .iter()
                .zip(expectation.values.chunks_mut(expectation.columns.max(1)))
            {
                let addend_row = &addend[row * columns..(row + 1) * columns];
                values.iter_mut().zip(addend_row).for_each(|(x, more)| *x += times * more);
            }
        }
    }
}

fn short(x: f64) -> String {
    // Plus 0: -0 is 0.
    format!("{}", (x * 1e4).round() / 1e4 + 0.0)
}

/// The weight in a captured sum of each microbatch whose addend is not zero, with the microbatch's
/// index; none where they cannot be solved for.
fn solved(evidence: &Evidence<'_>, key: Key) -> Option<Vec<(usize, f64)>> {
    let step = evidence.step;
    let reduced = key.stage == Stage::Reduce;
    if reduced && step.find_reduced(Role::Dk, false).is_some() {
        return None; // The addends are ranks' captured sums over microbatches.
    }
    let sum_key = step.find_reduced(Role::Dk, reduced)?;
    let total = values_of(evidence, sum_key, key.rank.filter(|_| !reduced))?;
    let stride = total.len().div_ceil(ELEMENTS).max(1);
    let chosen = |all: Vec<f64>| all.into_iter().step_by(stride).collect::<Vec<f64>>();
    let size = total.len();
    let total = chosen(total);
    let part = |inputs: &crate::head::MicrobatchInputs| {
        let key_of_addend = step.find(Role::Dk, inputs.microbatch)?;
        let whole = values_of(evidence, key_of_addend, key.rank.filter(|_| !reduced))?;
        Some(whole).filter(|whole| whole.len() == size).map(chosen)
    };
    let recorded = evidence.inputs.iter().map(part).collect::<Option<Vec<Vec<f64>>>>();
    let parts = recorded.or_else(|| {
        let all =
            unrecorded(evidence, key).filter(|all| all.iter().all(|of| of.2.len() == size))?;
        let sum_over_ranks = |inputs: &crate::head::MicrobatchInputs| {
            let mut sum = vec![0.0; size];
            for (_, _, values) in all.iter().filter(|of| of.0 == inputs.microbatch) {
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
            chosen(sum)
        };
        Some(evidence.inputs.iter().map(sum_over_ranks).collect())
    })?;
    // A rank without tokens in a microbatch adds zeros, of which no weight can be solved.
    let nonzero: Vec<usize> =
        (0..parts.len()).filter(|&at| parts[at].iter().any(|&x| x != 0.0)).collect();
    let all: Vec<&[f64]> = nonzero.iter().map(|&at| &parts[at][..]).collect();
    let solution =
        multiples(&all, &total).filter(|solution| solution.iter().all(|x| x.is_finite()))?;
    Some(nonzero.into_iter().zip(solution).collect())
}

/// One rank's addend of a tensor, at its place in the whole tensor, or the sum of all addends.
fn values_of(evidence: &Evidence<'_>, key: &TensorKey, rank: Option<Rank>) -> Option<Vec<f64>> {
    let step = evidence.step;
    if step.tensors[key].partial.is_none() {
        return numbers(&step.assemble(key).ok()?);
    }
    let mut sum = Sum::new(&step.tensors[key].shape);
    let counts = |of: Option<Rank>| f64::from(u8::from(rank.is_none() || of == rank));
    sum.add_weighted(step, key, &counts).ok()?;
    Some(sum.total)
}

/// The weights relative to the declared ones, as solved; none where all are equal, which is one
/// factor on the sum.
fn raw(multiples: &[f64], divisor: f64) -> Option<Vec<f64>> {
    let all: Vec<f64> = multiples.iter().map(|x| rounded(x * divisor, 3)).collect();
    let differs = |x: &f64| (x - all[0]).abs() > NEAR * all[0].abs();
    all.iter().any(differs).then_some(all)
}

/// The weights relative to the declared ones, as whole numbers times one factor that counts
/// explain; none where they are not, or all are equal, which is one factor on the sum.
fn whole(solved: &[f64], divisor: f64) -> Option<Vec<f64>> {
    let count = solved.len() as f64;
    let weights: Vec<f64> = solved.iter().map(|x| x * divisor).collect();
    let counted = weights.iter().filter(|x| x.abs() > NEAR).count() as f64;
    // The sum may be divided by the number of microbatches in it, by that of all, or not at all.
    let factors = [1.0, 1.0 / count, count, 1.0 / counted, count / counted];
    let nearest = |factor: f64| {
        let nearest_multiple = |x: &f64| {
            let n = (x / factor).round();
            let near = (x / factor - n).abs() <= NEAR * n.max(1.0);
            (near && (0.0..=LARGEST).contains(&n)).then_some(n * factor)
        };
        weights.iter().map(nearest_multiple).collect::<Option<Vec<f64>>>()
    };
    let solved = factors.into_iter().find_map(nearest)?;
    solved.iter().any(|x| *x != solved[0]).then_some(solved)
}

/// Weights of each microbatch in a sum, by stage and rank.
struct Window {
    ids: Vec<Option<Microbatch>>,
    weights: BTreeMap<(Stage, Option<Rank>), Vec<f64>>,
}

impl World for Window {
    fn weight(&self, stage: Stage, microbatch: Option<Microbatch>, rank: Option<Rank>) -> f64 {
        // The sum over ranks is one sum, from whichever rank an addend comes.
        let rank = rank.filter(|_| stage == Stage::Accumulate);
        let position = self.ids.iter().position(|id| *id == microbatch && id.is_some());
        let weights = self.weights.get(&(stage, rank));
        weights.zip(position).map_or(1.0, |(weights, at)| weights[at])
    }
}
