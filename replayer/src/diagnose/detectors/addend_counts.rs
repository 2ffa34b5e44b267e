//! Gradients in which some summands, rows or columns count more or less often than once.
//!
//! dk is a sum of one product per token, dq of one per class. The sum is solved for the weight of
//! each product ([`super::least_squares`]): of the whole products, of their softmax part alone, or
//! in the failing rows alone; rows and columns likewise. The one thing that is found by trying all
//! values is the window of tokens within which one of a label overwrites the others.

use std::collections::BTreeSet;
use std::ops::Range;

use super::dlogits_plane::Rows;
use super::gradient::{Gradient, OverwrittenLabels};
use super::least_squares::{is_sure, runs, whole_factors, whole_weights};
use super::single_tokens::{distance, energy};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 0.1;

/// The report lists up to this many runs one by one; for more it looks for a rule.
const FEW: usize = 2;

/// What may count more or less often than once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// Products of a sum: tokens for dk, classes for dq.
    Addends,
    /// The softmax part of products, where the label's part was added separately.
    OfSoftmax,
    /// Products in the failing rows only: a tile of tokens and classes.
    Tile,
    /// The softmax part of products in the failing rows only.
    TileOfSoftmax,
    /// The label's part of dk, where of the tokens with one label only the last, or only the first,
    /// is left.
    OneOfLabel,
    /// Rows of the gradient.
    Rows,
    /// Rows of dk, each divided by the number of tokens with that label.
    OverHits,
    /// Columns of the gradient.
    Columns,
}

/// Everything that is tried.
pub const ALL: [What; 8] = [
    What::Addends,
    What::OfSoftmax,
    What::Tile,
    What::TileOfSoftmax,
    What::OneOfLabel,
    What::Rows,
    What::OverHits,
    What::Columns,
];

/// Which of `whats` explain every failing gradient of a stage, with the weights.
pub fn counted(evidence: &Evidence<'_>, stage: Stage, whats: &[What]) -> Vec<(What, Counted)> {
    let keys: Vec<Key> = evidence.failing_of(&[stage]).map(|(key, _)| key).collect();
    if keys.is_empty() {
        return Vec::new();
    }
    let mut explaining: Vec<(What, Counted)> =
        whats.iter().map(|&what| (what, Counted::default())).collect();
    for key in keys {
        let Some(gradient) = Gradient::of(evidence, key) else { return Vec::new() };
        explaining.retain_mut(|(what, counted)| counts(evidence, &gradient, *what, counted));
        if explaining.is_empty() {
            return Vec::new();
        }
    }
    explaining
}

/// Adds the weights of one gradient; false where they do not explain it.
fn counts(evidence: &Evidence<'_>, gradient: &Gradient, what: What, counted: &mut Counted) -> bool {
    let Some(weighed) = weighed(evidence, gradient, what) else { return false };
    let off = |other: &Rows| distance(&gradient.captured.values, &other.values);
    if !(off(&weighed.changed) <= LEFT * off(&gradient.reference)) {
        return false;
    }
    if let Some(rule) = weighed.rule {
        if counted.rule.as_ref().is_some_and(|other| *other != rule) {
            return false;
        }
        counted.rule = Some(rule);
    }
    for said in weighed.said {
        if !counted.said.contains(&said) {
            counted.said.push(said);
        }
    }
    let rows =
        (0..weighed.changed.count()).map(|at| (gradient.row(at), weighed.changed.row(at).to_vec()));
    counted.world = std::mem::take(&mut counted.world).rows(gradient.key, rows);
    true
}

/// A gradient with other weights, and what they are in words.
struct Weighed {
    changed: Rows,
    said: Vec<String>,
    rule: Option<String>,
}

fn weighed(evidence: &Evidence<'_>, gradient: &Gradient, what: What) -> Option<Weighed> {
    match what {
        What::Addends | What::OfSoftmax => {
            let entries = gradient.entries(what == What::OfSoftmax)?;
            let all = 0..gradient.reference.count();
            of_addends(evidence, gradient, (&entries, &[all]), false)
        }
        What::Tile | What::TileOfSoftmax => {
            let failing = gradient.failing_rows()?;
            let entries = gradient.entries(what == What::TileOfSoftmax)?;
            of_addends(evidence, gradient, (&entries, &failing), true)
        }
        What::OneOfLabel => {
            let kept = OverwrittenLabels::of(gradient, &|work| evidence.spend(work))?;
            let (changed, rule) = (kept.sum(gradient), Some(kept.words()));
            Some(Weighed { changed, said: Vec::new(), rule })
        }
        What::Rows | What::Columns => {
            let turned = |rows: &Rows| match what {
                What::Columns => rows.transposed(),
                _ => Rows { cols: rows.cols, values: rows.values.clone() },
            };
            let reference = turned(&gradient.reference);
            let weights =
                whole_factors(&turned(&gradient.captured), &reference).filter(|w| differ(w))?;
            // Rows of dq that are zero were not written, which is a cause of its own.
            let unwritten = weights.iter().all(|&x| x == 1.0 || x == 0.0);
            if what == What::Rows && !gradient.is_of_k() && unwritten {
                return None;
            }
            let place = |at: usize| if what == What::Rows { gradient.row(at) } else { at };
            let (said, changed) =
                (in_words(&weights, &place), turned(&scaled(&reference, &weights)));
            Some(Weighed { changed, said, rule: None })
        }
        What::OverHits => {
            let weights = gradient.over_hits().filter(|w| differ(w))?;
            let rule = "each is divided by how often it is a label".to_string();
            let changed = scaled(&gradient.reference, &weights);
            Some(Weighed { changed, said: Vec::new(), rule: Some(rule) })
        }
    }
}

/// Whether the weights differ; if not, they are one factor on the whole gradient.
fn differ(weights: &[f64]) -> bool {
    weights.iter().any(|x| *x != weights[0])
}

/// Solves a gradient for the weights of its products in some regions of rows.
fn of_addends(
    evidence: &Evidence<'_>,
    gradient: &Gradient,
    (entries, regions): (&Rows, &[Range<usize>]),
    told: bool,
) -> Option<Weighed> {
    let (error, even) = (gradient.error(), gradient.evening());
    let mut more = Rows { cols: entries.cols, values: vec![0.0; entries.values.len()] };
    let mut said = Vec::new();
    for rows in regions {
        // Scales rows so that those with larger rounding errors count less.
        let even = &even[rows.clone()];
        let part = times_columns(&columns(entries, rows), even);
        let cols = error.cols;
        let values = error.values[rows.start * cols..rows.end * cols].to_vec();
        let rounding = gradient.rounding * values.len() as f64 / error.values.len().max(1) as f64;
        let error = (&scaled(&Rows { cols, values }, even), rounding);
        let spend = |work| evidence.spend(work);
        let weights =
            whole_weights((&part, gradient.other()), error, &spend).filter(|w| differ(w))?;
        let sequences = of_sequences(evidence, gradient, &weights);
        let regular = if sequences.is_none() { spaced(gradient, &part, &weights) } else { None };
        let weights = regular.as_ref().map_or(weights, |regular| regular.weights.clone());
        for (i, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 1.0) {
            for row in rows.clone() {
                more.values[i * entries.cols + row] =
                    (weight - 1.0) * entries.values[i * entries.cols + row];
            }
        }
        let words = sequences
            .or_else(|| regular.map(|regular| vec![regular.words]))
            .unwrap_or_else(|| in_words(&weights, &|at| gradient.addend(at)));
        let of_rows =
            format!("in rows {}: ", between(gradient.row(rows.start), gradient.row(rows.end - 1)));
        let place = if told { of_rows } else { String::new() };
        said.extend(words.into_iter().map(|words| place.clone() + &words));
    }
    Some(Weighed { changed: gradient.with(&more), said, rule: None })
}

/// The positions in a sequence at which tokens count more or less than once, in words, where they
/// are the same in every sequence and the runs are too many to list.
fn of_sequences(
    evidence: &Evidence<'_>,
    gradient: &Gradient,
    weights: &[f64],
) -> Option<Vec<String>> {
    let length = evidence.inputs_of(gradient.key.microbatch)?.sequence;
    let several = length >= 2 && weights.len() > length;
    if !gradient.is_of_k() || !several || runs(weights).len() <= FEW {
        return None;
    }
    let mut places: Vec<Option<f64>> = vec![None; length];
    for (index, &weight) in weights.iter().enumerate() {
        let place = &mut places[gradient.addend(index) % length];
        if place.is_some_and(|other| other != weight) {
            return None;
        }
        *place = Some(weight);
    }
    let all: Vec<f64> = places.into_iter().map(|place| place.unwrap_or(1.0)).collect();
    let words = in_words(&all, &|at| at).into_iter();
    Some(words.map(|words| format!("{words} of every sequence")).collect())
}

/// Weights that repeat at a regular distance.
struct Spaced {
    weights: Vec<f64>,
    words: String,
}

/// The rule of weights that repeat at a regular distance, for example the first token of every
/// chunk. Products too small to show their weight are taken to follow the rule. `None` where there
/// are few runs, or irregular ones.
fn spaced(gradient: &Gradient, entries: &Rows, weights: &[f64]) -> Option<Spaced> {
    let noise = gradient.rounding / gradient.captured.values.len().max(1) as f64;
    let shows =
        |at: &usize| is_sure(energy(entries.row(*at)) * energy(gradient.other().row(*at)), noise);
    let shown: Vec<(usize, f64)> =
        (0..weights.len()).filter(shows).map(|at| (gradient.addend(at), weights[at])).collect();
    let mut odd: Vec<Range<usize>> = Vec::new();
    for &(place, _) in shown.iter().filter(|(_, weight)| *weight != 1.0) {
        match odd.last_mut() {
            Some(run) if run.end == place => run.end += 1,
            _ => odd.push(place..place + 1),
        }
    }
    let times = shown.iter().find(|(_, weight)| *weight != 1.0)?.1;
    let first = odd.first().filter(|_| odd.len() > FEW)?.start;
    let longest = odd.iter().map(ExactSizeIterator::len).max()?;
    let steps: BTreeSet<usize> = odd.windows(2).map(|two| two[1].start - two[0].start).collect();
    let rule = |step: usize, place: usize| {
        let inside = place >= first && (place - first) % step < longest;
        if inside { times } else { 1.0 }
    };
    let fits = |&step: &usize| {
        step > longest && shown.iter().all(|&(place, weight)| weight == rule(step, place))
    };
    let step = steps.into_iter().find(fits)?;
    let run = between(first, first + longest - 1);
    let words = format!("{run}, and so every {step} from there on, {}", often(times));
    let weights = (0..weights.len()).map(|at| rule(step, gradient.addend(at))).collect();
    Some(Spaced { weights, words })
}

/// Some columns of a matrix.
fn columns(rows: &Rows, which: &Range<usize>) -> Rows {
    let row = |row: &[f64]| row[which.clone()].to_vec();
    Rows { cols: which.len(), values: rows.values.chunks(rows.cols.max(1)).flat_map(row).collect() }
}

/// Multiplies each column by a number.
fn times_columns(plane: &Rows, factors: &[f64]) -> Rows {
    let rows = plane.values.chunks(plane.cols.max(1));
    let values = rows.flat_map(|row| row.iter().zip(factors).map(|(x, by)| x * by)).collect();
    Rows { cols: plane.cols, values }
}

fn between(first: usize, last: usize) -> String {
    if first == last { first.to_string() } else { format!("{first} to {last}") }
}

fn often(times: f64) -> String {
    match times {
        0.0 => "left out".to_string(),
        2.0 => "twice".to_string(),
        times => format!("{times} times"),
    }
}

/// Runs of weights that are not 1, in words; `place` gives the number to print for an index.
pub(super) fn in_words(weights: &[f64], place: &dyn Fn(usize) -> usize) -> Vec<String> {
    let words_of = |(run, times): (Range<usize>, f64)| {
        format!("{} {}", between(place(run.start), place(run.end - 1)), often(times))
    };
    runs(weights).into_iter().map(words_of).collect()
}

fn scaled(rows: &Rows, factors: &[f64]) -> Rows {
    let product = |(at, x): (usize, &f64)| x * factors[at / rows.cols.max(1)];
    Rows { cols: rows.cols, values: rows.values.iter().enumerate().map(product).collect() }
}

/// The gradients of a stage with other weights than 1.
#[derive(Default)]
pub struct Counted {
    /// The world in which the gradients have these weights.
    pub world: ReplacedValues,
    /// The weights in words, each sentence once.
    pub said: Vec<String>,
    /// The rule that the weights follow, where there is one.
    pub rule: Option<String>,
}
