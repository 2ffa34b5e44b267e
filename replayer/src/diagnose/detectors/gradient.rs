//! A failing gradient as a sum of products: one per token for dk, one per class for dq.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::dlogits_plane::{Plane, Rows};
use super::single_tokens::energy;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{Share, Stage};

/// A row fails if its squared error is more than this many times its share of the floor.
const ERRS: f64 = 32.0;
/// A row whose squared error is below this share of the largest row's counts as agreeing.
const SMALL: f64 = 1e-6;
/// Rounding of a row is taken to be at least that of a row with this share of the mean squared
/// norm, as it is not known how small rows were summed.
const LEAST: f64 = 1e-2;
/// Up to this many agreeing rows between failing ones are counted as part of their run.
const GAP: usize = 4;
/// A tile fails in at most this many runs of rows, and in less than this share of all rows.
const RUNS: usize = 6;
const PART: f64 = 0.8;

/// A failing gradient and its reference.
pub struct Gradient {
    /// Which gradient.
    pub key: Key,
    /// The entries of dlogits of its unit.
    pub plane: Rc<Plane>,
    /// Captured values `[rows, D]`; rows are the unit's tokens for dq, and the valid classes for
    /// dk.
    pub captured: Rows,
    /// The reference, `[rows, D]`.
    pub reference: Rows,
    /// The squared error that rounding is expected to cause.
    pub rounding: f64,
    /// What the entries of dlogits are multiplied with, `[addends, D]`: q for dk, k for dq, 1 for
    /// the bias.
    other: Rows,
}

impl Gradient {
    /// The gradient of q, k or the bias that failed; `None` where its unit is too large to be
    /// solved.
    pub fn of(evidence: &Evidence<'_>, key: Key) -> Option<Gradient> {
        let plane = evidence.plane(key)?;
        let values = evidence.captured(key)?;
        let of_k = key.stage.is_of_k();
        let entries = entries(&plane, key.stage);
        let copied = |rows: &Rows| Rows { cols: rows.cols, values: rows.values.clone() };
        let other = match (key.stage, of_k) {
            (Stage::Dbias, _) => Rows { cols: 1, values: vec![1.0; plane.q.count()] },
            (_, true) => copied(&plane.q),
            (_, false) => copied(&plane.k),
        };
        let (captured, reference) = match of_k {
            false => (plane.dq(&values), entries.times(&other)),
            true => (plane.dk(&values), entries.transposed_times(&other)),
        };
        let rounding = evidence.residuals.get(&key)?.floor;
        let same = captured.values.len() == reference.values.len();
        same.then_some(Gradient { key, plane, captured, reference, rounding, other })
    }

    /// Whether its rows are classes.
    pub fn is_of_k(&self) -> bool {
        self.key.stage.is_of_k()
    }

    /// Captured minus reference.
    pub fn error(&self) -> Rows {
        let pairs = self.captured.values.iter().zip(&self.reference.values);
        Rows { cols: self.captured.cols, values: pairs.map(|(c, r)| c - r).collect() }
    }

    /// A factor for each row with which the rounding errors of all rows become equally large.
    /// Values, and the summands that they are sums of, round in proportion to their size.
    pub fn evening(&self) -> Vec<f64> {
        let rows = self.captured.count();
        let size = |at: usize| energy(self.captured.row(at)) + energy(self.reference.row(at));
        let sizes: Vec<f64> = (0..rows).map(size).collect();
        let mean = sizes.iter().sum::<f64>() / rows.max(1) as f64;
        let even = |size: &f64| match (size + LEAST * mean) / ((1.0 + LEAST) * mean) {
            share if share > 0.0 => 1.0 / share.sqrt(),
            _ => 1.0,
        };
        sizes.iter().map(even).collect()
    }

    /// The entries of dlogits, `[addends, rows]`. With `softmax` those of the softmax part alone;
    /// then `None` for a gradient that is a part itself.
    pub fn entries(&self, softmax: bool) -> Option<Rows> {
        let whole = matches!(self.key.stage, Stage::Dq | Stage::Dk | Stage::Dbias);
        if softmax && !whole {
            return None;
        }
        let stage = match (softmax, self.is_of_k()) {
            (false, _) => self.key.stage,
            (true, true) => Stage::DkLse,
            (true, false) => Stage::DqLse,
        };
        let entries = entries(&self.plane, stage);
        Some(if self.is_of_k() { entries } else { entries.transposed() })
    }

    /// What the entries are multiplied with, `[addends, D]`.
    pub fn other(&self) -> &Rows {
        &self.other
    }

    /// The reference with more of some entries: `more`, `[addends, rows]`, is added to the entries.
    pub fn with(&self, more: &Rows) -> Rows {
        let mut changed = more.transposed_times(&self.other);
        changed.values.iter_mut().zip(&self.reference.values).for_each(|(x, r)| *x += r);
        changed
    }

    /// A row's class, or its token among those of the microbatch.
    pub fn row(&self, index: usize) -> usize {
        if self.is_of_k() { index } else { self.plane.rows[index] }
    }

    /// An addend's token among those of the microbatch, or its class.
    pub fn addend(&self, index: usize) -> usize {
        if self.is_of_k() { self.plane.rows[index] } else { index }
    }

    /// Runs of the failing rows; `None` where there are more than a few runs, or nearly all rows
    /// fail.
    pub fn failing_rows(&self) -> Option<Vec<Range<usize>>> {
        let error = self.error();
        let rows = error.count();
        let off: Vec<f64> = (0..rows).map(|at| energy(error.row(at))).collect();
        let sizes: Vec<f64> = (0..rows).map(|at| energy(self.reference.row(at))).collect();
        let mean = sizes.iter().sum::<f64>() / rows.max(1) as f64;
        let most = off.iter().copied().fold(0.0, f64::max);
        let share = self.rounding / (2.0 * mean * rows as f64).max(f64::MIN_POSITIVE);
        let fails = |index: usize| {
            let allowed = ERRS * share * (sizes[index] + mean);
            !(off[index] <= allowed.max(SMALL * most))
        };
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in (0..rows).filter(|&row| fails(row)) {
            match runs.last_mut() {
                Some(run) if row - run.end <= GAP => run.end = row + 1,
                _ => runs.push(row..row + 1),
            }
        }
        let all: usize = runs.iter().map(ExactSizeIterator::len).sum();
        let few = !runs.is_empty() && runs.len() <= RUNS && (all as f64) < PART * rows as f64;
        few.then_some(runs)
    }

    /// For each row of k, 1 over how many tokens have it as their label.
    pub fn over_hits(&self) -> Option<Vec<f64>> {
        if !self.is_of_k() {
            return None;
        }
        let mut hits = vec![0.0f64; self.reference.count()];
        self.plane.labels.iter().flatten().for_each(|(class, _)| hits[*class] += 1.0);
        Some(hits.iter().map(|n| 1.0 / n.max(1.0)).collect())
    }
}

/// The entries of dlogits that a gradient is computed from, `[n, V]`.
fn entries(plane: &Plane, stage: Stage) -> Rows {
    match stage.share() {
        Share::Softmax => Rows { cols: plane.dense.cols, values: plane.dense.values.clone() },
        Share::Label => plane.of_labels(),
        Share::Whole => plane.entries(),
    }
}

/// A dk in which the label's products of tokens with the same label overwrote each other: in each
/// window of tokens only one of each label is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverwrittenLabels {
    /// How many tokens a window has.
    window: usize,
    /// True where the last token of a label is left, false where the first is.
    last: bool,
    /// How many tokens there are.
    tokens: usize,
}

impl OverwrittenLabels {
    /// The window that explains most of the error; `None` where none reduces it. `spend` counts the
    /// work, and returns true when no more may be done.
    pub fn of(gradient: &Gradient, spend: &dyn Fn(usize) -> bool) -> Option<OverwrittenLabels> {
        let with_labels = matches!(gradient.key.stage, Stage::Dk | Stage::DkLabel);
        let (tokens, d) = (gradient.plane.labels.len(), gradient.plane.q.cols);
        if !with_labels || spend(2 * tokens * tokens * d) {
            return None;
        }
        let error = gradient.error();
        let with_window = |window: usize, last: bool| OverwrittenLabels { window, last, tokens };
        let all =
            (2..=tokens).flat_map(|window| [with_window(window, true), with_window(window, false)]);
        let left = |kept: &OverwrittenLabels| -> f64 {
            let change_of_class = |(class, more): (usize, Vec<f64>)| -> f64 {
                let pairs = error.row(class).iter().zip(more);
                pairs.map(|(e, x)| (e - x).powi(2) - e * e).sum()
            };
            kept.more(gradient).into_iter().map(change_of_class).sum()
        };
        let best = all.map(|kept| (left(&kept), kept)).min_by(|(a, labels), (b, other)| {
            // Of windows that leave equally much, the widest: they drop the same tokens.
            a.total_cmp(b).then(other.window.cmp(&labels.window))
        })?;
        (best.0 < 0.0).then_some(best.1)
    }

    /// What this changes in rows of dk: minus the dropped products.
    fn more(&self, gradient: &Gradient) -> BTreeMap<usize, Vec<f64>> {
        let mut kept: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let labels = &gradient.plane.labels;
        for (token, label) in labels.iter().enumerate() {
            let Some((class, _)) = label else { continue };
            let place = kept.entry((token / self.window, *class)).or_insert(token);
            if self.last {
                *place = token;
            }
        }
        let mut more: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for (token, label) in labels.iter().enumerate() {
            let Some((class, entry)) = label else { continue };
            if kept[&(token / self.window, *class)] != token {
                let q = gradient.plane.q.row(token);
                let row = more.entry(*class).or_insert_with(|| vec![0.0; q.len()]);
                row.iter_mut().zip(q).for_each(|(x, q)| *x -= entry * q);
            }
        }
        more
    }

    /// The gradient with this fault.
    pub fn sum(&self, gradient: &Gradient) -> Rows {
        let cols = gradient.reference.cols;
        let mut values = gradient.reference.values.clone();
        for (class, more) in self.more(gradient) {
            let row = &mut values[class * cols..(class + 1) * cols];
            row.iter_mut().zip(more).for_each(|(x, more)| *x += more);
        }
        Rows { cols, values }
    }

    /// The fault in words.
    pub fn words(&self) -> String {
        let which = if self.last { "last" } else { "first" };
        let alone = format!("of tokens of one label the {which} one's alone is there");
        match self.window < self.tokens {
            true => format!("within each {} tokens, {alone}", self.window),
            false => alone,
        }
    }
}
