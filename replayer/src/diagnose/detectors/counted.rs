//! Gradients in which some addends, rows or columns count more or less often than once.
//!
//! dk is the sum of a product a token, dq of one a class: the sum is solved for how often it holds
//! each (`solve`), of the whole entries, of their softmax part alone, or in the rows that fail
//! alone; rows and columns likewise. Nothing is enumerated but the window of tokens in which the
//! last one of a label overwrites the others.

use std::collections::BTreeSet;
use std::ops::Range;

use super::direct::{distance, energy};
use super::gradient::{Gradient, Kept};
use super::plane::Rows;
use super::solve::{is_sure, runs, whole_factors, whole_weights};
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;

/// Runs of tokens that are told one by one.
const FEW: usize = 2;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// Addends of a sum: tokens of dk, classes of dq.
    Addends,
    /// The same of the softmax part alone: the label's was added apart.
    OfSoftmax,
    /// The same in the rows that fail alone: a tile of tokens and classes.
    Tile,
    /// Of the softmax part in such rows.
    TileOfSoftmax,
    /// The label's addends of dk alone: of tokens of one label only the last is there.
    LastOfLabel,
    /// Rows of the gradient.
    Rows,
    /// Rows of dk are divided by how often they are a label.
    OverHits,
    /// Columns of the gradient.
    Columns,
}

/// All of them.
pub const ALL: [What; 8] = [
    What::Addends,
    What::OfSoftmax,
    What::Tile,
    What::TileOfSoftmax,
    What::LastOfLabel,
    What::Rows,
    What::OverHits,
    What::Columns,
];

/// What counts otherwise in all gradients of a stage that fail.
pub fn counted(evidence: &Evidence<'_>, stage: Stage, whats: &[What]) -> Vec<(What, Counted)> {
    let keys: Vec<Key> = evidence.failing_of(&[stage]).map(|(key, _)| key).collect();
    if keys.is_empty() {
        return Vec::new();
    }
    let mut found: Vec<(What, Counted)> =
        whats.iter().map(|&what| (what, Counted::default())).collect();
    for key in keys {
        let Some(of) = Gradient::of(evidence, key) else { return Vec::new() };
        found.retain_mut(|(what, counted)| counts(evidence, &of, *what, counted));
        if found.is_empty() {
            return Vec::new();
        }
    }
    found
}

/// Adds what this gradient holds; false where it is none of whole numbers.
fn counts(evidence: &Evidence<'_>, of: &Gradient, what: What, to: &mut Counted) -> bool {
    let Some(found) = weighed(evidence, of, what) else { return false };
    let off = |other: &Rows| distance(&of.captured.values, &other.values);
    if !(off(&found.changed) <= LEFT * off(&of.reference)) {
        return false;
    }
    if let Some(rule) = found.rule {
        if to.rule.as_ref().is_some_and(|other| *other != rule) {
            return false;
        }
        to.rule = Some(rule);
    }
    for said in found.said {
        if !to.said.contains(&said) {
            to.said.push(said);
        }
    }
    let rows = (0..found.changed.count()).map(|at| (of.row(at), found.changed.row(at).to_vec()));
    to.world = std::mem::take(&mut to.world).rows(of.key, rows);
    true
}

/// A gradient as it would be, and in words what counts otherwise.
struct Weighed {
    changed: Rows,
    said: Vec<String>,
    rule: Option<String>,
}

fn weighed(evidence: &Evidence<'_>, of: &Gradient, what: What) -> Option<Weighed> {
    match what {
        What::Addends | What::OfSoftmax => {
            let entries = of.entries(what == What::OfSoftmax)?;
            let all = 0..of.reference.count();
            of_addends(evidence, of, (&entries, &[all]), false)
        }
        What::Tile | What::TileOfSoftmax => {
            let failing = of.failing_rows()?;
            let entries = of.entries(what == What::TileOfSoftmax)?;
            of_addends(evidence, of, (&entries, &failing), true)
        }
        What::LastOfLabel => {
            let kept = Kept::of(of, &|work| evidence.spend(work))?;
            let (changed, rule) = (kept.sum(of), Some(kept.words()));
            Some(Weighed { changed, said: Vec::new(), rule })
        }
        What::Rows | What::Columns => {
            let turned = |rows: &Rows| match what {
                What::Columns => rows.transposed(),
                _ => Rows { cols: rows.cols, values: rows.values.clone() },
            };
            let reference = turned(&of.reference);
            let weights = whole_factors(&turned(&of.captured), &reference).filter(|w| differ(w))?;
            // Rows of dq that hold nothing were not written, and that has a name.
            let unwritten = weights.iter().all(|&x| x == 1.0 || x == 0.0);
            if what == What::Rows && !of.is_of_k() && unwritten {
                return None;
            }
            let place = |at: usize| if what == What::Rows { of.row(at) } else { at };
            let (said, changed) =
                (in_words(&weights, &place), turned(&scaled(&reference, &weights)));
            Some(Weighed { changed, said, rule: None })
        }
        What::OverHits => {
            let weights = of.over_hits().filter(|w| differ(w))?;
            let rule = "each is divided by how often it is a label".to_string();
            let changed = scaled(&of.reference, &weights);
            Some(Weighed { changed, said: Vec::new(), rule: Some(rule) })
        }
    }
}

/// All alike are a factor of the whole.
fn differ(weights: &[f64]) -> bool {
    weights.iter().any(|x| *x != weights[0])
}

/// A sum that holds its addends otherwise in some rows.
fn of_addends(
    evidence: &Evidence<'_>,
    of: &Gradient,
    (entries, regions): (&Rows, &[Range<usize>]),
    told: bool,
) -> Option<Weighed> {
    let (error, even) = (of.error(), of.evening());
    let mut more = Rows { cols: entries.cols, values: vec![0.0; entries.values.len()] };
    let mut said = Vec::new();
    for rows in regions {
        // Rows in which rounding errs more say less.
        let even = &even[rows.clone()];
        let part = times_columns(&columns(entries, rows), even);
        let cols = error.cols;
        let values = error.values[rows.start * cols..rows.end * cols].to_vec();
        let rounding = of.rounding * values.len() as f64 / error.values.len().max(1) as f64;
        let error = (&scaled(&Rows { cols, values }, even), rounding);
        let spend = |work| evidence.spend(work);
        let weights = whole_weights((&part, of.other()), error, &spend).filter(|w| differ(w))?;
        let sequences = of_sequences(evidence, of, &weights);
        let regular = if sequences.is_none() { spaced(of, &part, &weights) } else { None };
        let weights = regular.as_ref().map_or(weights, |regular| regular.weights.clone());
        for (i, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 1.0) {
            for row in rows.clone() {
                more.values[i * entries.cols + row] =
                    (weight - 1.0) * entries.values[i * entries.cols + row];
            }
        }
        let words = sequences
            .or_else(|| regular.map(|regular| vec![regular.words]))
            .unwrap_or_else(|| in_words(&weights, &|at| of.addend(at)));
        let of_rows = format!("in rows {}: ", between(of.row(rows.start), of.row(rows.end - 1)));
        let place = if told { of_rows } else { String::new() };
        said.extend(words.into_iter().map(|words| place.clone() + &words));
    }
    Some(Weighed { changed: of.with(&more), said, rule: None })
}

/// The places in a sequence of which the tokens count otherwise, where they do so in every sequence
/// and in more runs than can be told.
fn of_sequences(evidence: &Evidence<'_>, of: &Gradient, weights: &[f64]) -> Option<Vec<String>> {
    let length = evidence.inputs_of(of.key.microbatch)?.sequence;
    let several = length >= 2 && weights.len() > length;
    if !of.is_of_k() || !several || runs(weights).len() <= FEW {
        return None;
    }
    let mut places: Vec<Option<f64>> = vec![None; length];
    for (at, &weight) in weights.iter().enumerate() {
        let place = &mut places[of.addend(at) % length];
        if place.is_some_and(|other| other != weight) {
            return None;
        }
        *place = Some(weight);
    }
    let all: Vec<f64> = places.into_iter().map(|place| place.unwrap_or(1.0)).collect();
    let words = in_words(&all, &|at| at).into_iter();
    Some(words.map(|words| format!("{words} of every sequence")).collect())
}

/// What counts otherwise at regular distances.
struct Spaced {
    weights: Vec<f64>,
    words: String,
}

/// The rule by which the first of every chunk, for one, counts otherwise. Addends whose weight does
/// not show follow it, too. `None` where it is in few runs, or in irregular ones.
fn spaced(of: &Gradient, entries: &Rows, weights: &[f64]) -> Option<Spaced> {
    let noise = of.rounding / of.captured.values.len().max(1) as f64;
    let shows = |at: &usize| is_sure(energy(entries.row(*at)) * energy(of.other().row(*at)), noise);
    let held: Vec<(usize, f64)> =
        (0..weights.len()).filter(shows).map(|at| (of.addend(at), weights[at])).collect();
    let mut odd: Vec<Range<usize>> = Vec::new();
    for &(place, _) in held.iter().filter(|(_, weight)| *weight != 1.0) {
        match odd.last_mut() {
            Some(run) if run.end == place => run.end += 1,
            _ => odd.push(place..place + 1),
        }
    }
    let times = held.iter().find(|(_, weight)| *weight != 1.0)?.1;
    let first = odd.first().filter(|_| odd.len() > FEW)?.start;
    let longest = odd.iter().map(ExactSizeIterator::len).max()?;
    let steps: BTreeSet<usize> = odd.windows(2).map(|two| two[1].start - two[0].start).collect();
    let rule = |step: usize, place: usize| {
        let inside = place >= first && (place - first) % step < longest;
        if inside { times } else { 1.0 }
    };
    let fits = |&step: &usize| {
        step > longest && held.iter().all(|&(place, weight)| weight == rule(step, place))
    };
    let step = steps.into_iter().find(fits)?;
    let run = between(first, first + longest - 1);
    let words = format!("{run}, and so every {step} from there on, {}", often(times));
    let weights = (0..weights.len()).map(|at| rule(step, of.addend(at))).collect();
    Some(Spaced { weights, words })
}

/// Some columns of rows.
fn columns(of: &Rows, which: &Range<usize>) -> Rows {
    let row = |row: &[f64]| row[which.clone()].to_vec();
    Rows { cols: which.len(), values: of.values.chunks(of.cols.max(1)).flat_map(row).collect() }
}

/// Each column times a number.
fn times_columns(of: &Rows, factors: &[f64]) -> Rows {
    let rows = of.values.chunks(of.cols.max(1));
    let values = rows.flat_map(|row| row.iter().zip(factors).map(|(x, by)| x * by)).collect();
    Rows { cols: of.cols, values }
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

/// Runs of what counts otherwise than once, by the numbers that `place` gives.
pub(super) fn in_words(weights: &[f64], place: &dyn Fn(usize) -> usize) -> Vec<String> {
    let one = |(run, times): (Range<usize>, f64)| {
        format!("{} {}", between(place(run.start), place(run.end - 1)), often(times))
    };
    runs(weights).into_iter().map(one).collect()
}

fn scaled(rows: &Rows, factors: &[f64]) -> Rows {
    let of = |(at, x): (usize, &f64)| x * factors[at / rows.cols.max(1)];
    Rows { cols: rows.cols, values: rows.values.iter().enumerate().map(of).collect() }
}

/// Gradients in which something counts more or less often.
#[derive(Default)]
pub struct Counted {
    /// With what counts otherwise in its place.
    pub world: Instead,
    /// What is different of all gradients, in words: once where it is the same in several.
    pub said: Vec<String>,
    /// The rule by which it is, where there is one.
    pub rule: Option<String>,
}
