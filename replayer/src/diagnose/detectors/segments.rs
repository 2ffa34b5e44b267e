//! Pieces of a sum over ranks that hold other addends than the rest: a bucket that was not
//! reduced, was reduced twice, or was averaged where the others were summed.

use std::ops::Range;

use super::addends::{Addend, Part, Summed, fitted};
use super::direct::distance;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// An element is another when it is off by so many of its roundings.
const ROUNDINGS: f64 = 4.0;
/// Relative rounding of a sum in f32, of its addends' sizes.
const SUMMED: f64 = 1e-6;
/// Elements that agree by chance between others that do not, rows of them at most.
const GAP: usize = 2;
/// Pieces at most.
const PIECES: usize = 6;
/// One of so many elements that hold something must agree, or it is no piece.
const REST: usize = 50;
/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.01;

/// A sum of which pieces hold their addends otherwise.
pub struct Segments {
    /// Pieces of the sum's elements, in the order in which they lie, and what each holds.
    pub of: Vec<(Range<usize>, Vec<Addend>, f64)>,
    /// Which sum.
    pub key: Key,
    columns: usize,
    values: Vec<f64>,
}

/// Every failing sum over ranks of which some pieces, but not all of it, are solved.
pub fn segments(evidence: &Evidence<'_>) -> Vec<Segments> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Reduce]).map(|(key, _)| key).collect();
    keys.into_iter().filter_map(|key| of_sum(evidence, key)).collect()
}

fn of_sum(evidence: &Evidence<'_>, key: Key) -> Option<Segments> {
    let sum = Summed::of(evidence, key, true)?;
    let (captured, parts, wide) = (&sum.captured, &sum.parts, sum.total());
    let elements = captured.values.len();
    if evidence.spend(parts.len() * elements) {
        return None;
    }
    let u = captured.stored().map_or(SUMMED, |precision| precision.unit_roundoff());
    let is_off = |at: usize| {
        let size = parts.iter().map(|(_, x)| x[at].abs()).sum::<f64>();
        let allowed = ROUNDINGS * u * wide[at].abs() + SUMMED * size;
        !((captured.values[at] - wide[at]).abs() <= allowed)
    };
    let gap = GAP * captured.columns.max(1);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for at in (0..elements).filter(|&at| is_off(at)) {
        match runs.last_mut() {
            Some(run) if at - run.end <= gap => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
        if runs.len() > PIECES {
            return None;
        }
    }
    // Rows that hold nothing, as those of padding, are no rest that agrees.
    let filled = (0..elements).filter(|&at| wide[at] != 0.0).count();
    let inside = |at: usize| runs.iter().any(|run| run.contains(&at));
    let rest = (0..elements).filter(|&at| wide[at] != 0.0 && !inside(at)).count();
    if runs.is_empty() || rest * REST < filled {
        return None;
    }
    let mut values = wide.clone();
    let mut of = Vec::new();
    for run in runs {
        let own: Vec<Part> =
            parts.iter().map(|(of, x)| (of.clone(), x[run.clone()].to_vec())).collect();
        let (addends, scale) = fitted(evidence, &own, &captured.values[run.clone()])?;
        for (i, at) in run.clone().enumerate() {
            let held = addends.iter().zip(&own).map(|(addend, (_, x))| addend.weight * x[i]);
            values[at] = scale * held.sum::<f64>();
        }
        of.push((run, addends, scale));
    }
    let off = |of: &[f64]| distance(&captured.values, of);
    let explains = off(&values) <= LEFT * off(&wide);
    explains.then_some(Segments { of, key, columns: captured.columns, values })
}

impl Segments {
    /// The factor of all addends in every piece, where they have one.
    pub fn factor(&self) -> Option<f64> {
        let mut all = self.of.iter().flat_map(|(_, addends, scale)| {
            addends.iter().map(move |addend| addend.weight * scale)
        });
        let first = all.next()?;
        all.all(|x| x == first).then_some(first)
    }

    /// Where the pieces lie, in words.
    pub fn places(&self) -> String {
        let columns = self.columns.max(1);
        let one = |(run, ..): &(Range<usize>, Vec<Addend>, f64)| {
            let (first, last) = (run.start / columns, (run.end - 1) / columns);
            format!("rows {first} to {last}")
        };
        self.of.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// What the first piece holds, in words.
    pub fn holds(&self) -> String {
        let Some((_, addends, scale)) = self.of.first() else { return String::new() };
        let one = |addend: &Addend| {
            let whose = addend.rank.map_or("all ranks".to_string(), |rank| format!("rank {rank}"));
            let which = addend.microbatch.map_or(String::new(), |mb| format!(" microbatch {mb}"));
            format!("{whose}{which} {} times", addend.weight * scale)
        };
        let held = addends.iter().filter(|addend| addend.weight != 0.0);
        held.map(one).collect::<Vec<_>>().join(", ")
    }

    /// The sum with them.
    pub fn world(&self) -> Instead {
        let rows = self.values.chunks(self.columns.max(1)).map(<[f64]>::to_vec).enumerate();
        Instead::default().rows(self.key, rows)
    }
}
