//! Classes that count in the softmax more often than once, or not at all, for example because a
//! tile of the vocabulary was moved back over its neighbour.
//!
//! A row of dk minus the label's part is the softmax part of its class, times how often the class
//! counts, with each token's term divided by the token's sum of exponentials. These sums depend on
//! the counts in turn, so both are computed alternately until they stop changing. The counts
//! determine lse, the loss and dq as well, which had no part in the fit and so test it.

use backtape::nan::larger;

use super::addend_counts::in_words;
use super::dlogits_plane::{Plane, Rows};
use super::implied_lse::median;
use super::least_squares::is_sure;
use super::single_tokens::{energy, multiple};
use crate::diagnose::data_worlds::{OtherLse, ReplacedValues};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Pass, World};

/// How near to a whole number a class's count must be.
const WHOLE: f64 = 0.25;
/// The largest count that is accepted.
const LARGEST: f64 = 4.5;
/// The largest number of iterations, and the change of a count in one below which they have
/// converged.
const ROUNDS: usize = 40;
const STILL: f64 = 0.05;
/// If in any iteration more than this share of the counts are no whole numbers, the fault is
/// another one.
const MIXED: f64 = 0.25;
/// Classes that count more or less often than once.
pub struct CountedClasses {
    gradients: ReplacedValues,
    lse: OtherLse,
    /// Each run of such classes in words, with its count.
    pub said: Vec<String>,
}

impl CountedClasses {
    /// `None` where lse was captured and agrees, where the loss has terms beside the cross-entropy,
    /// or where the rows of dk give no whole numbers.
    pub fn of(evidence: &Evidence<'_>) -> Option<CountedClasses> {
        let declared = &evidence.step.options.declared;
        let plain = declared.label_smoothing == 0.0 && declared.z_loss == 0.0;
        if !plain || evidence.agrees(Stage::Lse) {
            return None;
        }
        let (key, _) = evidence.failing_of(&[Stage::Dk]).next()?;
        let counts = counts(evidence, key)?;
        let mut lse = evidence.reference().forward_lse.clone();
        for unit in evidence.units() {
            let plane = evidence.plane_of(unit.microbatch, unit.rank)?;
            let lse_of_microbatch = lse.get_mut(&unit.microbatch)?;
            for (index, &t) in plane.rows.iter().enumerate() {
                lse_of_microbatch[t] = plane.lse[index] + sum(&plane, index, &counts).ln();
            }
        }
        let mut gradients = ReplacedValues::default();
        let is_made = |key: &&Key| matches!(key.stage, Stage::Dq | Stage::Dk | Stage::Dbias);
        for &key in evidence.residuals.keys().filter(is_made) {
            let plane = evidence.plane_of(key.microbatch, key.rank)?;
            let entries = entries(&plane, &counts);
            let (made, rows) = match key.stage {
                Stage::Dq => (entries.times(&plane.k), plane.rows.clone()),
                Stage::Dk => (entries.transposed_times(&plane.q), (0..counts.len()).collect()),
                _ => {
                    let ones = Rows { cols: 1, values: vec![1.0; entries.count()] };
                    (entries.transposed_times(&ones), (0..counts.len()).collect())
                }
            };
            let rows = rows.into_iter().enumerate().map(|(at, row)| (row, made.row(at).to_vec()));
            gradients = gradients.rows(key, rows);
        }
        let lse = OtherLse { lse, captured: Vec::new() };
        Some(CountedClasses { gradients, lse, said: in_words(&counts, &|at| at) })
    }
}

impl World for CountedClasses {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        self.lse.lse(pass, inputs, lse);
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.gradients.expected(expectation);
    }
}

/// How often each class counts, from the rows of a dk; `None` where all count once, or the counts
/// are no whole numbers.
fn counts(evidence: &Evidence<'_>, key: Key) -> Option<Vec<f64>> {
    let plane = evidence.plane(key)?;
    let mut rest = plane.dk(&*evidence.captured(key)?);
    let labels = plane.of_labels().transposed_times(&plane.q);
    rest.values.iter_mut().zip(&labels.values).for_each(|(x, label)| *x -= label);
    let noise = evidence.residuals.get(&key)?.floor / rest.count().max(1) as f64;
    let mut counts = vec![1.0; plane.dense.cols];
    for round in 0..ROUNDS {
        // Divides each token's row by the sum of exponentials that these counts give.
        let mut divided = Rows { cols: plane.dense.cols, values: plane.dense.values.clone() };
        for (index, row) in divided.values.chunks_mut(counts.len().max(1)).enumerate() {
            let over = sum(&plane, index, &counts);
            row.iter_mut().for_each(|x| *x /= over);
        }
        if evidence.spend(plane.work()) {
            return None;
        }
        let next_counts = times(&rest, &divided.transposed_times(&plane.q), noise);
        let near =
            |value: &f64| (value - value.round()).abs() <= WHOLE && (0.0..=LARGEST).contains(value);
        let others = next_counts.iter().filter(|value| !near(value)).count();
        let moved = next_counts.iter().zip(&counts).map(|(a, b)| (a - b).abs()).fold(0.0, larger);
        counts = next_counts;
        if !moved.is_finite() || others as f64 > MIXED * counts.len() as f64 {
            return None;
        }
        if round > 0 && others == 0 && moved <= STILL {
            let whole: Vec<f64> = counts.iter().map(|value| value.round()).collect();
            return whole.iter().any(|&value| value != 1.0).then_some(whole);
        }
    }
    None
}

/// The factor of each row, relative to the median factor, as most classes count once. A row too
/// small to show its factor takes that of the row before. `noise`: the energy that rounding causes
/// in a row.
fn times(rows: &Rows, reference: &Rows, noise: f64) -> Vec<f64> {
    let sizes: Vec<f64> = (0..reference.count()).map(|v| energy(reference.row(v))).collect();
    let tells = |v: usize| v < rows.count() && is_sure(sizes[v], noise);
    let of_class = |v: usize| tells(v).then(|| multiple(rows.row(v), reference.row(v)).times);
    let all: Vec<Option<f64>> = (0..sizes.len()).map(of_class).collect();
    let once = median(all.iter().flatten().copied().collect());
    let mut last = 1.0;
    let mut each = Vec::with_capacity(all.len());
    for reference in all {
        last = reference.map_or(last, |reference| reference / once);
        each.push(last);
    }
    each
}

/// A token's sum of exponentials with these counts, over the declared one.
fn sum(plane: &Plane, index: usize, counts: &[f64]) -> f64 {
    plane.p.row(index).iter().zip(counts).map(|(p, times)| p * times).sum()
}

/// Entries of dlogits with these counts, `[n, V]`.
fn entries(plane: &Plane, counts: &[f64]) -> Rows {
    let mut entries = plane.of_labels();
    let rows = entries.values.chunks_mut(counts.len().max(1)).enumerate();
    for (index, row) in rows {
        let over = sum(plane, index, counts);
        for ((to, dense), times) in row.iter_mut().zip(plane.dense.row(index)).zip(counts) {
            *to += times * dense / over;
        }
    }
    entries
}
