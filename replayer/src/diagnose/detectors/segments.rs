//! Segments of a sum over ranks whose addends have other weights than in the rest: a bucket that
//! was not reduced, was reduced twice, or was averaged where the others were summed. Where the
//! addends are the ranks' own sums over microbatches, a segment may also lack some microbatches;
//! their gradients were not recorded one by one, so the reference's are used.

use std::ops::Range;

use backtape::nan::larger;

use super::addends::{Addend, Part, Summed, fitted, reference_parts};
use super::least_squares::multiples;
use super::single_tokens::{distance, dot, energy};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::world::{Expectation, StagePlace, World};

/// An element is wrong if it is off by more than this many times its rounding error.
const ROUNDINGS: f64 = 4.0;
/// Relative rounding error of a sum in f32, of the sum of its addends' magnitudes.
const SUMMED: f64 = 1e-6;
/// Up to this many rows that agree by chance between wrong elements are counted as part of the
/// segment.
const GAP: usize = 2;
/// The largest number of segments.
const PIECES: usize = 6;
/// At least one in this many nonzero elements must lie outside the segments; otherwise the whole
/// sum is wrong.
const REST: usize = 50;
/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 0.01;
/// How far a weight may be from a whole number.
const WHOLE: f64 = 0.05;
/// How many times the mean variance of a rank's sum the rounding of one element may be.
const MARGIN: f64 = 4.0;

/// A sum with segments in which the addends have other weights.
pub struct Segments {
    /// The segments, as ranges of elements in ascending order, with the weights of their addends
    /// and the common scale of these weights.
    pub segments: Vec<(Range<usize>, Vec<Addend>, f64)>,
    /// Which sum.
    pub key: Key,
    columns: usize,
    values: Vec<f64>,
    /// Extra variance of each element in a segment whose addends come from the reference instead of
    /// the dump; 0 where they were recorded.
    noise: f64,
}

/// Every failing sum over ranks whose error lies in some segments that new weights of the addends
/// explain.
pub fn segments(evidence: &Evidence<'_>) -> Vec<Segments> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Reduce]).map(|(key, _)| key).collect();
    keys.into_iter().filter_map(|key| of_sum(evidence, key)).collect()
}

fn of_sum(evidence: &Evidence<'_>, key: Key) -> Option<Segments> {
    let sum = Summed::of(evidence, key, true)?;
    let (captured, parts, right_sum) = (&sum.captured, &sum.parts, sum.total());
    let elements = captured.values.len();
    if evidence.spend(parts.len() * elements) {
        return None;
    }
    let u = captured.stored().map_or(SUMMED, |precision| precision.unit_roundoff());
    let is_off = |index: usize| {
        let size = parts.iter().map(|(_, x)| x[index].abs()).sum::<f64>();
        let allowed = ROUNDINGS * u * right_sum[index].abs() + SUMMED * size;
        !((captured.values[index] - right_sum[index]).abs() <= allowed)
    };
    let gap = GAP * captured.columns.max(1);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for element in (0..elements).filter(|&element| is_off(element)) {
        match runs.last_mut() {
            Some(run) if element - run.end <= gap => run.end = element + 1,
            _ => runs.push(element..element + 1),
        }
    }
    // Where a missing addend is nearly zero, its absence does not show, so many runs may belong to
    // one segment.
    if let (true, Some(first), Some(last)) = (runs.len() > PIECES, runs.first(), runs.last()) {
        runs = std::iter::once(first.start..last.end).collect();
    }
    // Rows of zeros, such as padding, do not count as agreeing.
    let filled = (0..elements).filter(|&at| right_sum[at] != 0.0).count();
    let inside = |at: usize| runs.iter().any(|run| run.contains(&at));
    let rest = (0..elements).filter(|&at| right_sum[at] != 0.0 && !inside(at)).count();
    if runs.is_empty() || rest * REST < filled {
        return None;
    }
    let mut values = right_sum.clone();
    let (mut segments, mut noise, mut finer) = (Vec::new(), 0.0, None);
    for run in runs {
        let parts_of_run: Vec<Part> =
            parts.iter().map(|(addend, x)| (addend.clone(), x[run.clone()].to_vec())).collect();
        let here = &captured.values[run.clone()];
        let weighed = fitted(evidence, &parts_of_run, here).and_then(|(addends, scale)| {
            let element = |i: usize| {
                let weighed =
                    addends.iter().zip(&parts_of_run).map(|(addend, (_, x))| addend.weight * x[i]);
                scale * weighed.sum::<f64>()
            };
            let weighed: Vec<f64> = (0..here.len()).map(element).collect();
            let explains =
                distance(here, &weighed) <= LEFT * distance(here, &right_sum[run.clone()]);
            explains.then_some((addends, scale, weighed))
        });
        if let Some((addends, scale, weighed)) = weighed {
            values[run.clone()].copy_from_slice(&weighed);
            segments.push((run, addends, scale));
            continue;
        }
        let finer = finer.get_or_insert_with(|| Finer::of(evidence, &sum)).as_ref()?;
        let (addends, more) = finer.fitted(&run, &captured.values, &right_sum)?;
        run.clone().zip(more).for_each(|(at, more)| values[at] = right_sum[at] + more);
        noise = finer.noise;
        segments.push((run, addends, 1.0));
    }
    let off = |values: &[f64]| distance(&captured.values, values);
    let explains = off(&values) <= LEFT * off(&right_sum);
    explains.then_some(Segments { segments, key, columns: captured.columns, values, noise })
}

/// The reference gradient of each microbatch on each rank, for a sum whose recorded addends are the
/// ranks' sums over microbatches.
struct Finer {
    parts: Vec<Part>,
    /// Variance of an element of a rank's sum.
    noise: f64,
}

impl Finer {
    fn of(evidence: &Evidence<'_>, sum: &Summed) -> Option<Finer> {
        let summed = sum.parts.iter().all(|(addend, _)| addend.microbatch.is_none());
        let parts = reference_parts(evidence).filter(|_| summed && evidence.microbatches() > 1);
        let mut parts = parts?;
        // The sum over ranks may be a mean: the gradients are scaled so that together they give the
        // sum of the recorded addends.
        let wide = sum.total();
        let all = |at: usize| parts.iter().map(|(_, x)| x.get(at).copied().unwrap_or(0.0)).sum();
        let all: Vec<f64> = (0..wide.len()).map(all).collect();
        let scale = dot(&wide, &all) / energy(&all);
        parts.iter_mut().for_each(|(_, x)| x.iter_mut().for_each(|x| *x *= scale));
        let all = evidence.residuals.iter().filter(|(key, _)| key.stage == Stage::Accumulate);
        let noise = all
            .map(|(_, residual)| residual.floor / (residual.elements as f64).max(1.0))
            .fold(0.0, larger);
        let same = parts.iter().all(|(_, x)| x.len() == sum.captured.values.len());
        (same && !evidence.spend(parts.len().pow(2) * sum.captured.values.len()))
            .then_some(Finer { parts, noise: noise * MARGIN })
    }

    /// The weight of each of these gradients in a segment, and by how much the segment then differs
    /// from the right sum, element by element.
    fn fitted(
        &self,
        run: &Range<usize>,
        captured: &[f64],
        wide: &[f64],
    ) -> Option<(Vec<Addend>, Vec<f64>)> {
        let more: Vec<f64> = run.clone().map(|at| captured[at] - wide[at]).collect();
        let parts_of_run: Vec<&[f64]> = self.parts.iter().map(|(_, x)| &x[run.clone()]).collect();
        let weights = multiples(&parts_of_run, &more)?;
        let whole = |x: &f64| (x - x.round()).abs() < WHOLE && x.round().abs() <= 1.0;
        if !weights.iter().all(whole) || weights.iter().all(|x| x.round() == 0.0) {
            return None;
        }
        let weighted = |(weight, (addend, _)): (&f64, &Part)| Addend {
            weight: 1.0 + weight.round(),
            ..addend.clone()
        };
        let addends = weights.iter().zip(&self.parts).map(weighted).collect();
        let rounded_sum =
            |i: usize| weights.iter().zip(&parts_of_run).map(|(w, x)| w.round() * x[i]).sum();
        Some((addends, (0..more.len()).map(rounded_sum).collect()))
    }
}

/// A world in which segments of a sum hold other addends. Where those come from the reference, rows
/// of the segments get extra variance.
struct WithSegments {
    instead: ReplacedValues,
    key: Key,
    rows: Vec<Range<usize>>,
    noise: f64,
}

impl World for WithSegments {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.instead.expected(expectation);
    }

    fn noise(&self, place: StagePlace, row: usize, _column: usize) -> f64 {
        let is_noisy =
            place.stage == self.key.stage && self.rows.iter().any(|rows| rows.contains(&row));
        if is_noisy { self.noise } else { 0.0 }
    }
}

impl Segments {
    /// The one weight of all addends in all segments, where there is one.
    pub fn factor(&self) -> Option<f64> {
        let mut all = self.segments.iter().flat_map(|(_, addends, scale)| {
            addends.iter().map(move |addend| addend.weight * scale)
        });
        let first = all.next()?;
        all.all(|x| x == first).then_some(first)
    }

    /// Where the segments lie, in words.
    pub fn places(&self) -> String {
        let columns = self.columns.max(1);
        let words_of = |(run, ..): &(Range<usize>, Vec<Addend>, f64)| {
            let (first, last) = (run.start / columns, (run.end - 1) / columns);
            format!("rows {first} to {last}")
        };
        self.segments.iter().map(words_of).collect::<Vec<_>>().join(", ")
    }

    /// The weights of the addends in the first segment, in words.
    pub fn holds(&self) -> String {
        let Some((_, addends, scale)) = self.segments.first() else { return String::new() };
        let of_addend = |addend: &Addend| {
            let whose = addend.rank.map_or("all ranks".to_string(), |rank| format!("rank {rank}"));
            let which = addend.microbatch.map_or(String::new(), |mb| format!(" microbatch {mb}"));
            format!("{whose}{which} {} times", addend.weight * scale)
        };
        let counted = addends.iter().filter(|addend| addend.weight != 0.0);
        counted.map(of_addend).collect::<Vec<_>>().join(", ")
    }

    /// The world in which the sum has these segments.
    pub fn world(&self) -> impl World + 'static {
        let columns = self.columns.max(1);
        let rows = self.values.chunks(columns).map(<[f64]>::to_vec).enumerate();
        let instead = ReplacedValues::default().rows(self.key, rows);
        let rows = |(run, ..): &(Range<usize>, Vec<Addend>, f64)| {
            run.start / columns..run.end.div_ceil(columns)
        };
        let rows = self.segments.iter().map(rows).collect();
        WithSegments { instead, key: self.key, rows, noise: self.noise }
    }
}
