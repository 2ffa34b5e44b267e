//! Compares labels with the ids that the model read: by how many positions they are shifted, and
//! what the labels at the ends of sequences are.
//!
//! For each shift s in -2..=2 the check computes the share of counted positions t at which
//! `labels[t] = inputs[t + s]` inside a sequence. A shift holds when that share is above a half and
//! chance does not explain it: with c = Σ P(input = x) P(label = x), a share of r or more of n
//! positions matches by chance with a probability of at most `exp(-n KL(r, c))` (Chernoff). Only
//! positions where the found and the declared shift name different ids are evidence of a wrong
//! shift, so text that repeats itself is none.

use std::collections::HashMap;

use backtape::shard::TensorKey;

use super::facts::{Facts, facts, integers};
use super::tokens::is_input;
use super::{CheckResults, Place, Severity, Subject};
use crate::assemble::assemble;
use crate::compare::bound::FALSE_ALARM;

const SHIFTS: std::ops::RangeInclusive<i64> = -2..=2;
const CAUSE: &str = "label-shift";

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let inputs: Vec<&TensorKey> = subject
            .dump
            .tensors()
            .iter()
            .filter(|(key, info)| is_input(key, info))
            .map(|(key, _)| key)
            .collect();
        if inputs.is_empty() {
            let why = "no integer inputs were recorded: tape.record(\"tokens\", ...) would have them compared";
            results.skip(format!("step {}: labels against inputs", subject.dump.step), why);
            continue;
        }
        for facts in facts(subject).into_iter().flatten() {
            let same = inputs.iter().find(|key| key.microbatch == facts.microbatch);
            match same.or_else(|| inputs.iter().find(|key| key.microbatch.is_none())) {
                Some(key) => pair(subject, key, &facts, results),
                None => results.skip(facts.key.to_string(), "no inputs of this microbatch"),
            }
        }
    }
}

/// The inputs and the labels of a microbatch.
struct Pair<'a> {
    inputs: &'a [i64],
    labels: &'a [i64],
    counted: Vec<bool>,
    sequence: usize,
    /// Probability that two unrelated ids are equal.
    chance: f64,
}

fn pair(subject: &Subject<'_>, key: &TensorKey, facts: &Facts, results: &mut CheckResults) {
    let tensor = match assemble(subject.dump, key) {
        Ok(tensor) => tensor,
        Err(error) => return results.skip(key.to_string(), error.to_string()),
    };
    let labels_shape = &subject.dump.tensors()[&facts.key].shape;
    let inputs = integers(&tensor).filter(|ids| ids.len() == facts.recorded.len());
    let (Some(inputs), true) = (inputs, tensor.shape == *labels_shape || labels_shape.len() < 2)
    else {
        let why =
            format!("its shape {:?} is not that of the labels, {labels_shape:?}", tensor.shape);
        return results.skip(key.to_string(), why);
    };
    results.looked();
    let head = subject.head();
    let sequence = tensor.shape.last().map_or(inputs.len(), |&n| n as usize).max(1);
    // A weight belongs to the position that predicts, which is the one before an unshifted label. A
    // masked language model has weights only for the tokens that it hides.
    let predicts = |t: usize| match head.is_some_and(|head| !head.labels_shifted) {
        true => (!t.is_multiple_of(sequence)).then(|| t - 1),
        false => Some(t),
    };
    let counts = |t: usize| {
        let label = !super::facts::ignored(head, facts.recorded[t]);
        label && predicts(t).is_none_or(|t| facts.weights[t] != 0.0)
    };
    let counted: Vec<bool> = (0..inputs.len()).map(counts).collect();
    let chance = chance(&inputs, &facts.recorded, &counted);
    let pair = Pair { inputs: &inputs, labels: &facts.recorded, counted, sequence, chance };
    let expected = head.map(|head| i64::from(head.labels_shifted));
    judge(subject, key, facts, &pair, expected, results);
}

/// Σ P(input = x) P(label = x) over counted labels.
fn chance(inputs: &[i64], labels: &[i64], counted: &[bool]) -> f64 {
    let mut shares: HashMap<i64, u64> = HashMap::new();
    inputs.iter().for_each(|&x| *shares.entry(x).or_default() += 1);
    let counted = labels.iter().zip(counted).filter(|(_, here)| **here);
    let (mut sum, mut n) = (0u64, 0u64);
    for (label, _) in counted {
        sum += shares.get(label).copied().unwrap_or(0);
        n += 1;
    }
    sum as f64 / (n.max(1) as f64 * inputs.len().max(1) as f64)
}

impl Pair<'_> {
    /// The input id at a position plus a shift; `None` outside the sequence.
    fn named(&self, t: usize, shift: i64) -> Option<i64> {
        let within = (t % self.sequence) as i64 + shift;
        let inside = (0..self.sequence as i64).contains(&within);
        inside.then(|| self.inputs[(t as i64 + shift) as usize])
    }

    /// How many labels match at a shift, and how many were counted; positions at which the shift
    /// `unlike` names the same id are left out.
    fn matches(&self, shift: i64, unlike: Option<i64>) -> (u64, u64) {
        let (mut matches, mut n) = (0, 0);
        for t in (0..self.labels.len()).filter(|&t| self.counted[t]) {
            let Some(id) = self.named(t, shift) else { continue };
            if unlike.is_some_and(|other| self.named(t, other) == Some(id)) {
                continue;
            }
            n += 1;
            matches += u64::from(id == self.labels[t]);
        }
        (matches, n)
    }

    /// Whether so many matches are more than half, and more than chance explains.
    fn holds(&self, (matches, n): (u64, u64)) -> bool {
        let share = matches as f64 / n.max(1) as f64;
        let tests = SHIFTS.count() as f64 + 2.0;
        share > 0.5 && n as f64 * divergence(share, self.chance) > (tests / FALSE_ALARM).ln()
    }
}

/// The Kullback-Leibler divergence of two coins of probabilities r and c, for r above c; 0
/// otherwise.
fn divergence(r: f64, c: f64) -> f64 {
    if !(r > c) || c <= 0.0 {
        return if r > c { f64::INFINITY } else { 0.0 };
    }
    let tail = if r < 1.0 { (1.0 - r) * ((1.0 - r) / (1.0 - c)).ln() } else { 0.0 };
    r * (r / c).ln() + tail
}

fn judge(
    subject: &Subject<'_>,
    key: &TensorKey,
    facts: &Facts,
    pair: &Pair<'_>,
    expected: Option<i64>,
    results: &mut CheckResults,
) {
    let share = |shift| {
        let (matches, n) = pair.matches(shift, None);
        matches as f64 / n.max(1) as f64
    };
    let best = SHIFTS.max_by(|&a, &b| share(a).total_cmp(&share(b))).unwrap_or(0);
    let place = Place::of(subject).tensor(&facts.key);
    let relation = |shift: i64| format!("labels[t] = {}[t{shift:+}]", key.tensor);
    if !pair.holds(pair.matches(best, None)) {
        let why = "no shift from -2 to 2 holds: the labels are not the next ids, or too few tell";
        return results.skip(format!("step {}: {}", subject.dump.step, facts.key), why);
    }
    let shares =
        format!("{} at {:.1} % of the counted positions", relation(best), 100.0 * share(best));
    match expected {
        Some(expected) if expected != best => {
            if !pair.holds(pair.matches(best, Some(expected))) {
                return;
            }
            let evidence = format!(
                "{shares}, where labels_shifted={} makes it {} ({:.1} %){}",
                if expected == 1 { "True" } else { "False" },
                relation(expected),
                100.0 * share(expected),
                if best == 0 { ": the model copies its input" } else { "" },
            );
            let advice = format!(
                "Shift once: labels[t] = {}[t+1] with labels_shifted=True, or unshifted labels with labels_shifted=False",
                key.tensor
            );
            let severity = severity(expected, best, pair.matches(best, None));
            results.add(severity, Some(CAUSE), place, evidence, advice);
        }
        None => {
            let odd = !(0..=1).contains(&best);
            let severity = if odd { Severity::Warn } else { Severity::Note };
            let cause = odd.then_some(CAUSE);
            let advice = "Right if the loss takes them so: shifted labels as they are, unshifted ones with a shift of its own";
            results.add(severity, cause, place, shares, advice);
        }
        Some(_) => {}
    }
    if best == 1 {
        ends(subject, key, facts, pair, results);
    }
}

/// A shift that contradicts the declaration, or with which every position reads its own label,
/// fails; one that a job may want is a warning.
fn severity(expected: i64, best: i64, (matches, n): (u64, u64)) -> Severity {
    match (expected, best) {
        // The labels were declared to be the unshifted ids, and they were shifted before.
        (0, _) => Severity::Fail,
        // Multi-token prediction has labels further ahead.
        (_, 2..) => Severity::Warn,
        // A denoising model hides some of its input, so that not all positions match.
        _ if matches < n => Severity::Warn,
        _ => Severity::Fail,
    }
}

/// Looks at the labels of the last positions: if they are the row's own first id, the labels were
/// rolled along the sequence.
fn ends(
    subject: &Subject<'_>,
    key: &TensorKey,
    facts: &Facts,
    pair: &Pair<'_>,
    results: &mut CheckResults,
) {
    let rows = pair.inputs.len() / pair.sequence;
    let first = |row: usize| pair.inputs[(row % rows) * pair.sequence];
    let (mut own_first, mut next, mut n) = (0u64, 0u64, 0u64);
    for row in 0..rows {
        let last = (row + 1) * pair.sequence - 1;
        // Where both rows begin with the same id the two cases look the same.
        if !pair.counted[last] || first(row) == first(row + 1) {
            continue;
        }
        n += 1;
        own_first += u64::from(pair.labels[last] == first(row));
        next += u64::from(pair.labels[last] == first(row + 1));
    }
    let place = Place::of(subject).tensor(&facts.key);
    if pair.holds((own_first, n)) {
        let evidence = format!(
            "the label of a row's last position is the row's own first id, in {own_first} of {n} rows of {}: a roll along the sequence",
            key.tensor
        );
        let advice = "Ignore the last position of each row, or give it the id that really follows";
        results.add(Severity::Warn, Some(CAUSE), place, evidence, advice);
    } else if pair.holds((next, n)) {
        let evidence = format!(
            "the label of a row's last position is the first id of the next row, in {next} of {n} rows of {}: labels run across the ends of rows",
            key.tensor
        );
        let advice = "Right where rows are consecutive pieces of one stream; wrong where each row is a document of its own";
        results.add(Severity::Note, None, place, evidence, advice);
    }
}
