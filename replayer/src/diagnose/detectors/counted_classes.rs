//! Classes that are in the softmax more often than once, or not at all: a tile of the vocabulary that
//! is moved back over its neighbour, for one.
//!
//! A row of dk less the label's part is the softmax part of its class, as often as the class counts
//! and divided by its tokens' sums of exponentials, which follow from these numbers. They are solved
//! for in turn, from one sum for all tokens on. lse, and with it the loss and dq, follow, and the
//! numbers were not solved from them.

use backtape::nan::larger;

use super::counted::in_words;
use super::dense::median;
use super::direct::{energy, multiple};
use super::plane::{Plane, Rows};
use super::solve::is_sure;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::{Instead, OtherLse};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Pass, World};

/// How near a whole number a class's count must be.
const WHOLE: f64 = 0.25;
/// The largest that is looked for.
const LARGEST: f64 = 4.5;
/// Turns at most, and how little counts move in one when they are found.
const ROUNDS: usize = 40;
const STILL: f64 = 0.05;
/// Share of the classes whose counts are no whole numbers, in any turn, beyond which it is another
/// fault.
const MIXED: f64 = 0.25;
/// Classes that count otherwise than once.
pub struct CountedClasses {
    gradients: Instead,
    lse: OtherLse,
    /// Each run of classes that counts otherwise, in words.
    pub said: Vec<String>,
}

impl CountedClasses {
    /// `None` where lse was captured and agrees, the loss has terms beside the softmax's, or the rows
    /// of dk tell no whole numbers.
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
            let own = lse.get_mut(&unit.microbatch)?;
            for (at, &t) in plane.rows.iter().enumerate() {
                own[t] = plane.lse[at] + sum(&plane, at, &counts).ln();
            }
        }
        let mut gradients = Instead::default();
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

    fn expected(&self, of: &mut Expectation<'_>) {
        self.gradients.expected(of);
    }
}

/// How often each class counts, by the rows of a dk; `None` where all count once, or rows are no
/// whole numbers of what they should be.
fn counts(evidence: &Evidence<'_>, key: Key) -> Option<Vec<f64>> {
    let plane = evidence.plane(key)?;
    let mut rest = plane.dk(&*evidence.captured(key)?);
    let labels = plane.of_labels().transposed_times(&plane.q);
    rest.values.iter_mut().zip(&labels.values).for_each(|(x, label)| *x -= label);
    let noise = evidence.residuals.get(&key)?.floor / rest.count().max(1) as f64;
    let mut counts = vec![1.0; plane.dense.cols];
    for round in 0..ROUNDS {
        // The sums of exponentials that these counts make divide the rows.
        let mut divided = Rows { cols: plane.dense.cols, values: plane.dense.values.clone() };
        for (at, row) in divided.values.chunks_mut(counts.len().max(1)).enumerate() {
            let over = sum(&plane, at, &counts);
            row.iter_mut().for_each(|x| *x /= over);
        }
        if evidence.spend(plane.work()) {
            return None;
        }
        let found = times(&rest, &divided.transposed_times(&plane.q), noise);
        let near = |of: &f64| (of - of.round()).abs() <= WHOLE && (0.0..=LARGEST).contains(of);
        let others = found.iter().filter(|of| !near(of)).count();
        let moved = found.iter().zip(&counts).map(|(a, b)| (a - b).abs()).fold(0.0, larger);
        counts = found;
        if !moved.is_finite() || others as f64 > MIXED * counts.len() as f64 {
            return None;
        }
        if round > 0 && others == 0 && moved <= STILL {
            let whole: Vec<f64> = counts.iter().map(|of| of.round()).collect();
            return whole.iter().any(|&of| of != 1.0).then_some(whole);
        }
    }
    None
}

/// How often each row holds what it should, where most rows hold it once; what does not tell is as its
/// neighbour. `noise`: the energy that rounding gives a row.
fn times(found: &Rows, of: &Rows, noise: f64) -> Vec<f64> {
    let sizes: Vec<f64> = (0..of.count()).map(|v| energy(of.row(v))).collect();
    let tells = |v: usize| v < found.count() && is_sure(sizes[v], noise);
    let one = |v: usize| tells(v).then(|| multiple(found.row(v), of.row(v)).times);
    let all: Vec<Option<f64>> = (0..sizes.len()).map(one).collect();
    let once = median(all.iter().flatten().copied().collect());
    let mut last = 1.0;
    let mut each = Vec::with_capacity(all.len());
    for of in all {
        last = of.map_or(last, |of| of / once);
        each.push(last);
    }
    each
}

/// How much of its sum of exponentials a token has.
fn sum(plane: &Plane, at: usize, counts: &[f64]) -> f64 {
    plane.p.row(at).iter().zip(counts).map(|(p, times)| p * times).sum()
}

/// Entries of dlogits, `[n, V]`.
fn entries(plane: &Plane, counts: &[f64]) -> Rows {
    let mut found = plane.of_labels();
    let rows = found.values.chunks_mut(counts.len().max(1)).enumerate();
    for (at, row) in rows {
        let over = sum(plane, at, counts);
        for ((to, dense), times) in row.iter_mut().zip(plane.dense.row(at)).zip(counts) {
            *to += times * dense / over;
        }
    }
    found
}
