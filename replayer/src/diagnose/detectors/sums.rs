//! Some elements of a captured gradient with the addends that they are sums of: what is known
//! of such a sum is read off a few rows.

use crate::diagnose::detectors::units::UnitState;
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::matrix;
use crate::kernels::matrix::{IGNORED, Matrix};
use crate::kernels::policy::Policy;
use crate::kernels::round::Precision;
use crate::replay::comparison::Comparison;

/// Rows and columns of a gradient that sizes are tried on.
const SIZES: [usize; 2] = [24, 16];
/// The same for what is left out: that may be in few rows, and shows in any column.
const FILTERS: [usize; 2] = [96, 4];
/// A sum over `n` addends that was captured, some of its rows and columns.
pub struct Sums {
    pub(super) n: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[n, rows]`: entries of dlogits.
    pub(super) entries: Vec<f32>,
    /// `[n, cols]`: what they multiply.
    pub(super) others: Vec<f32>,
    /// `[rows, cols]`: what is added to the sum afterwards.
    pub(super) rest: Vec<f64>,
    /// `[rows, cols]`.
    pub(super) captured: Vec<f64>,
    pub(super) stored: Option<Precision>,
    /// Which class or token each row is.
    pub(super) places: Vec<usize>,
}

impl Sums {
    /// Rows of a unit's dk, or of dk_lse: sums over its tokens. `whole`: whether the
    /// label's part lies in the sum or is added afterwards.
    pub fn of_dk(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        stage: Stage,
        policy: &Policy,
        whole: bool,
    ) -> Option<Sums> {
        Sums::of_rows(evidence, (unit, stage), policy, whole, SIZES)
    }

    /// More rows of a unit's dk, fewer columns: to see what is left out of some of them.
    pub fn of_many_dk(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        policy: &Policy,
        whole: bool,
    ) -> Option<Sums> {
        Sums::of_rows(evidence, (unit, Stage::Dk), policy, whole, FILTERS)
    }

    fn of_rows(
        evidence: &Evidence<'_>,
        (unit, stage): (&UnitState, Stage),
        policy: &Policy,
        whole: bool,
        [rows, columns]: [usize; 2],
    ) -> Option<Sums> {
        let inputs = unit.inputs(evidence)?;
        let head = inputs.head(evidence.step)?;
        let captured = unit.captured(evidence.step, stage)?;
        let (values, stored) = (matrix(&captured)?, precision_of(captured.dtype));
        let valid = head.valid_vocab;
        let classes = classes(evidence, (unit, stage), &inputs.labels, valid, rows);
        let tokens: Vec<usize> = (0..unit.rows.len()).collect();
        let columns = spread(head.q.cols, columns);
        let part = unit.part(evidence, &tokens, &classes, whole)?;
        let entries = part.entries(policy);
        let others = chosen(&head.q, &unit.rows, &columns);
        let mut rest = vec![0.0; classes.len() * columns.len()];
        if !whole && stage == Stage::Dk {
            let labels = unit.part(evidence, &tokens, &classes, true)?;
            let labelled = labels.entries(policy);
            for (t, (both, dense)) in
                labelled.chunks(classes.len()).zip(entries.chunks(classes.len())).enumerate()
            {
                for (row, (x, y)) in both.iter().zip(dense).enumerate().filter(|(_, (x, y))| x != y)
                {
                    for column in 0..columns.len() {
                        let addend = (x - y) * f64::from(others[t * columns.len() + column]);
                        rest[row * columns.len() + column] += policy.label_grad.round64(addend);
                    }
                }
            }
        }
        let captured = wide(&chosen(&values, &classes, &columns));
        Some(Sums {
            n: tokens.len(),
            rows: classes.len(),
            cols: columns.len(),
            entries: entries.iter().map(|&x| x as f32).collect(),
            others,
            rest,
            captured,
            stored,
            places: classes,
        })
    }

    /// Rows of a unit's dq, or of dq_lse: sums over the vocabulary. `whole` as of dk.
    pub fn of_dq(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        stage: Stage,
        policy: &Policy,
        whole: bool,
    ) -> Option<Sums> {
        let inputs = unit.inputs(evidence)?;
        let head = inputs.head(evidence.step)?;
        let captured = unit.captured(evidence.step, stage)?;
        let (values, stored) = (matrix(&captured)?, precision_of(captured.dtype));
        let counted: Vec<usize> = (0..unit.rows.len()).filter(|&t| unit.g[t] != 0.0).collect();
        let tokens: Vec<usize> =
            spread(counted.len(), SIZES[0]).into_iter().map(|at| counted[at]).collect();
        let classes: Vec<usize> = (0..head.valid_vocab).collect();
        let columns = spread(head.k.cols, SIZES[1]);
        let part = unit.part(evidence, &tokens, &classes, whole)?;
        let by_token = part.entries(policy);
        let (n, rows) = (classes.len(), tokens.len());
        let mut entries = vec![0.0f32; n * rows];
        for (t, row) in by_token.chunks(n.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(v, &x)| entries[v * rows + t] = x as f32);
        }
        let global: Vec<usize> = tokens.iter().map(|&t| unit.rows[t]).collect();
        let mut rest = vec![0.0; rows * columns.len()];
        if stage == Stage::Dq && !whole {
            for (row, (&t, &at)) in tokens.iter().zip(&global).enumerate() {
                let label = inputs.labels[at];
                for (column, &d) in columns.iter().enumerate().filter(|_| label != IGNORED) {
                    let k = head.k.get_f64(label as usize * head.k.cols + d);
                    let slope = evidence.step.options.transform.scale;
                    let addend = unit.cotangents[1][t] * slope * k;
                    rest[row * columns.len() + column] = policy.label_grad.round64(addend);
                }
            }
        }
        Some(Sums {
            n,
            rows,
            cols: columns.len(),
            entries,
            others: chosen(&head.k, &classes, &columns),
            rest,
            captured: wide(&chosen(&values, &global, &columns)),
            stored,
            places: global,
        })
    }

    /// Squared distance from the sum of all entries.
    pub(super) fn misfit(&self) -> f64 {
        self.misfits_without(1, &|_, _| 1)[0]
    }

    /// Squared distances from the sums of what each of some sets leaves, where every set leaves
    /// out what those before it do, and more: given an addend and a class, `first` is the first
    /// set that leaves the entry out, `sets` where none does.
    pub(super) fn misfits_without(
        &self,
        sets: usize,
        first: &dyn Fn(usize, usize) -> usize,
    ) -> Vec<f64> {
        let Sums { rows, cols, entries, others, .. } = self;
        let mut left_out_from = vec![0.0; (sets + 1) * rows * cols];
        for (i, other) in others.chunks(*cols).enumerate() {
            for (row, &entry) in entries[i * rows..(i + 1) * rows].iter().enumerate() {
                let at = (first(i, self.places[row]) * rows + row) * cols;
                let total = &mut left_out_from[at..at + cols];
                let addends = other.iter().map(|&x| f64::from(entry) * f64::from(x));
                total.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
            }
        }
        let mut left = self.rest.clone();
        let mut found = vec![0.0; sets];
        // The last set leaves what none leaves out; each before it leaves more.
        for (set, addends) in left_out_from.chunks(rows * cols).enumerate().skip(1).rev() {
            left.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
            found[set - 1] = self.distance(&left);
        }
        found
    }

    /// Squared distance of what was captured from `[rows, cols]` sums.
    fn distance(&self, total: &[f64]) -> f64 {
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        let error = |(&sum, captured): (&f64, &f64)| (stored(sum) - captured).powi(2);
        if self.stored.is_some_and(|precision| !precision.keeps_f32()) {
            // Little may be left out, in a few elements: those that it brings to another
            // stored value count, and not how far.
            let others = total.iter().zip(&self.captured).filter(|(sum, x)| stored(**sum) != **x);
            return others.count() as f64;
        }
        // Rows count alike: what is left out of a row is little beside a frequent label's.
        let rows = total.chunks(self.cols).zip(self.captured.chunks(self.cols));
        let relative = rows.map(|(total, captured)| {
            let size: f64 = captured.iter().map(|x| x * x).sum();
            let error: f64 = total.iter().zip(captured).map(error).sum();
            error / (size + error).max(f64::MIN_POSITIVE)
        });
        relative.sum()
    }
}

/// Classes to look at: those that are worst, labels that are frequent, and others that lie
/// evenly; ascending.
fn classes(
    evidence: &Evidence<'_>,
    (unit, stage): (&UnitState, Stage),
    labels: &[u32],
    valid: usize,
    rows: usize,
) -> Vec<usize> {
    let mut hits = vec![0u32; valid];
    let own = unit.rows.iter().map(|&row| labels[row]).filter(|&label| label != IGNORED);
    own.for_each(|label| hits[label as usize] += 1);
    let mut found: Vec<usize> = (0..valid).collect();
    found.sort_by_key(|&class| std::cmp::Reverse(hits[class]));
    found.truncate(rows / 3);
    let of_unit = |one: &&Comparison| one.microbatch == unit.microbatch && one.rank == unit.rank;
    let comparisons = evidence.outcome.stage(stage).comparisons.iter().filter(of_unit);
    let worst = comparisons.flat_map(|one| &one.tally.worst_rows).take(rows / 3);
    found.extend(worst.map(|row| row.row as usize).filter(|&row| row < valid));
    found.extend(spread(valid, rows - found.len()));
    found.sort_unstable();
    found.dedup();
    found
}

/// At most `most` of `n` indices, evenly.
fn spread(n: usize, most: usize) -> Vec<usize> {
    let count = n.min(most);
    (0..count).map(|i| i * n / count.max(1)).collect()
}

fn chosen(values: &Matrix<'_>, rows: &[usize], columns: &[usize]) -> Vec<f32> {
    let at = |row: usize, column: usize| values.get_f64(row * values.cols + column) as f32;
    rows.iter().flat_map(|&row| columns.iter().map(move |&column| at(row, column))).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
