//! A few elements of a captured gradient, with the products that each of them is the sum of. How
//! such a sum was rounded, or what was left out of it, shows in these few.

use crate::diagnose::detectors::unit_states::UnitState;
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::matrix;
use crate::kernels::matrix::{IGNORED, Matrix};
use crate::kernels::policy::Policy;
use crate::kernels::round::Precision;
use crate::replay::comparison::Comparison;

/// How many rows and columns are sampled when sizes of pieces are looked for.
const SIZES: [usize; 2] = [24, 16];
/// The same when left-out entries are looked for: those may be in few rows, but show in any column.
const FILTERS: [usize; 2] = [96, 4];
/// Some rows and columns of a captured sum over `n` products.
pub struct SampledSums {
    pub(super) n: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Entries of dlogits, `[n, rows]`.
    pub(super) entries: Vec<f32>,
    /// The other factor of each product, `[n, cols]`: q for dk, k for dq.
    pub(super) others: Vec<f32>,
    /// What is added after the sum was taken, `[rows, cols]`: the label's part, where it is not in
    /// the sum.
    pub(super) rest: Vec<f64>,
    /// The captured values, `[rows, cols]`.
    pub(super) captured: Vec<f64>,
    pub(super) stored: Option<Precision>,
    /// The class or token of each row.
    pub(super) places: Vec<usize>,
}

impl SampledSums {
    /// Rows of a unit's dk, or of dk_lse: sums over its tokens. `whole`: whether the label's part
    /// is in the sum; otherwise it is added afterwards.
    pub fn of_dk(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        stage: Stage,
        policy: &Policy,
        whole: bool,
    ) -> Option<SampledSums> {
        SampledSums::of_rows(evidence, (unit, stage), policy, whole, SIZES)
    }

    /// More rows of a unit's dk and fewer columns, to see what is left out of some rows.
    pub fn of_many_dk(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        policy: &Policy,
        whole: bool,
    ) -> Option<SampledSums> {
        SampledSums::of_rows(evidence, (unit, Stage::Dk), policy, whole, FILTERS)
    }

    fn of_rows(
        evidence: &Evidence<'_>,
        (unit, stage): (&UnitState, Stage),
        policy: &Policy,
        whole: bool,
        [rows, columns]: [usize; 2],
    ) -> Option<SampledSums> {
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
        Some(SampledSums {
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

    /// Rows of a unit's dq, or of dq_lse: sums over the vocabulary. `whole` as for dk.
    pub fn of_dq(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        stage: Stage,
        policy: &Policy,
        whole: bool,
    ) -> Option<SampledSums> {
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
            for (row, (&t, &global_row)) in tokens.iter().zip(&global).enumerate() {
                let label = inputs.labels[global_row];
                for (column, &d) in columns.iter().enumerate().filter(|_| label != IGNORED) {
                    let k = head.k.get_f64(label as usize * head.k.cols + d);
                    let slope = evidence.step.options.transform.scale;
                    let addend = unit.cotangents[1][t] * slope * k;
                    rest[row * columns.len() + column] = policy.label_grad.round64(addend);
                }
            }
        }
        Some(SampledSums {
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

    /// Squared distance of the captured values from the sum of all products.
    pub(super) fn misfit(&self) -> f64 {
        self.misfits_without(1, &|_, _| 1)[0]
    }

    /// Squared distances from the sums that nested sets of left-out entries give: set i leaves out
    /// all that set i - 1 does, and more. `first(addend, class)` is the first set that leaves this
    /// entry out, or `sets` where none does.
    pub(super) fn misfits_without(
        &self,
        sets: usize,
        first: &dyn Fn(usize, usize) -> usize,
    ) -> Vec<f64> {
        let SampledSums { rows, cols, entries, others, .. } = self;
        let mut left_out_from = vec![0.0; (sets + 1) * rows * cols];
        for (i, other) in others.chunks(*cols).enumerate() {
            for (row, &entry) in entries[i * rows..(i + 1) * rows].iter().enumerate() {
                let offset = (first(i, self.places[row]) * rows + row) * cols;
                let total = &mut left_out_from[offset..offset + cols];
                let addends = other.iter().map(|&x| f64::from(entry) * f64::from(x));
                total.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
            }
        }
        let mut sums = self.rest.clone();
        let mut misfits = vec![0.0; sets];
        // The last set leaves out most, so sums are built from the last to the first by adding
        // entries.
        for (set, addends) in left_out_from.chunks(rows * cols).enumerate().skip(1).rev() {
            sums.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
            misfits[set - 1] = self.distance(&sums);
        }
        misfits
    }

    /// Distance of the captured values from these sums, `[rows, cols]`.
    fn distance(&self, total: &[f64]) -> f64 {
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        let error = |(&sum, captured): (&f64, &f64)| (stored(sum) - captured).powi(2);
        if self.stored.is_some_and(|precision| !precision.keeps_f32()) {
            // In few bits most small changes do not show, so elements that become another stored
            // value are counted, and not how far they are.
            let others = total.iter().zip(&self.captured).filter(|(sum, x)| stored(**sum) != **x);
            return others.count() as f64;
        }
        // Errors are taken relative to each row, as the rows of frequent labels are much larger.
        let rows = total.chunks(self.cols).zip(self.captured.chunks(self.cols));
        let relative = rows.map(|(total, captured)| {
            let size: f64 = captured.iter().map(|x| x * x).sum();
            let error: f64 = total.iter().zip(captured).map(error).sum();
            error / (size + error).max(f64::MIN_POSITIVE)
        });
        relative.sum()
    }
}

/// The sampled classes: the most frequent labels, those with the largest errors, and evenly spaced
/// others; ascending.
fn classes(
    evidence: &Evidence<'_>,
    (unit, stage): (&UnitState, Stage),
    labels: &[u32],
    valid: usize,
    rows: usize,
) -> Vec<usize> {
    let mut hits = vec![0u32; valid];
    let labels_of_unit = unit.rows.iter().map(|&row| labels[row]).filter(|&label| label != IGNORED);
    labels_of_unit.for_each(|label| hits[label as usize] += 1);
    let mut classes: Vec<usize> = (0..valid).collect();
    classes.sort_by_key(|&class| std::cmp::Reverse(hits[class]));
    classes.truncate(rows / 3);
    let of_unit = |comparison: &&Comparison| {
        comparison.microbatch == unit.microbatch && comparison.rank == unit.rank
    };
    let comparisons = evidence.outcome.stage(stage).comparisons.iter().filter(of_unit);
    let worst = comparisons.flat_map(|comparison| &comparison.tally.worst_rows).take(rows / 3);
    classes.extend(worst.map(|row| row.row as usize).filter(|&row| row < valid));
    classes.extend(spread(valid, rows - classes.len()));
    classes.sort_unstable();
    classes.dedup();
    classes
}

/// At most `most` of `n` indices, evenly spaced.
fn spread(n: usize, most: usize) -> Vec<usize> {
    let count = n.min(most);
    (0..count).map(|i| i * n / count.max(1)).collect()
}

fn chosen(values: &Matrix<'_>, rows: &[usize], columns: &[usize]) -> Vec<f32> {
    let value = |row: usize, column: usize| values.get_f64(row * values.cols + column) as f32;
    rows.iter().flat_map(|&row| columns.iter().map(move |&column| value(row, column))).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
