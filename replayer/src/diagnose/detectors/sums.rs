//! In how many pieces a sum was taken whose partial sums are rounded: the size of a chunk
//! or a tile is declared by few jobs, and shows in the roundings.
//!
//! A few rows of a captured gradient are summed again for every size that jobs use. Of the
//! right size the roundings are those of the job; of any other they are as far off as no
//! rounding at all.

use crate::diagnose::detectors::units::UnitState;
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::matrix;
use crate::kernels::matrix::{IGNORED, Matrix};
use crate::kernels::policy::{Policy, Walk};
use crate::kernels::round::Precision;
use crate::replay::outcome::Comparison;

/// Rows and columns of a gradient that sizes are tried on.
const SIZES: [usize; 2] = [24, 16];
/// The same for what is left out: that may be in few rows, and shows in any column.
const FILTERS: [usize; 2] = [96, 4];
/// A size counts as seen when it leaves less than this share of what one sum in f32 leaves.
const SEEN: f64 = 0.5;
/// Sizes that are offered.
const OFFERED: usize = 3;

/// How partial sums are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pieces {
    /// Addends of a piece.
    pub size: usize,
    /// What the running sum is rounded to after a piece was added.
    pub total: Precision,
    /// What a piece's own sum is rounded to before.
    pub addend: Precision,
    /// Which end comes first.
    pub walk: Walk,
}

/// A sum over `n` addends that was captured, some of its rows and columns.
pub struct Sums {
    n: usize,
    rows: usize,
    cols: usize,
    /// `[n, rows]`: entries of dlogits.
    entries: Vec<f32>,
    /// `[n, cols]`: what they multiply.
    others: Vec<f32>,
    /// `[rows, cols]`: what is added to the sum afterwards.
    rest: Vec<f64>,
    /// `[rows, cols]`.
    captured: Vec<f64>,
    stored: Option<Precision>,
    /// Which class or token each row is.
    places: Vec<usize>,
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
                        rest[row * columns.len() + column] +=
                            (x - y) * f64::from(others[t * columns.len() + column]);
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

    /// Rows of a unit's dq, or of dq_lse: sums over the vocabulary.
    pub fn of_dq(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        stage: Stage,
        policy: &Policy,
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
        let part = unit.part(evidence, &tokens, &classes, false)?;
        let by_token = part.entries(policy);
        let (n, rows) = (classes.len(), tokens.len());
        let mut entries = vec![0.0f32; n * rows];
        for (t, row) in by_token.chunks(n.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(v, &x)| entries[v * rows + t] = x as f32);
        }
        let global: Vec<usize> = tokens.iter().map(|&t| unit.rows[t]).collect();
        let mut rest = vec![0.0; rows * columns.len()];
        if stage == Stage::Dq {
            for (row, (&t, &at)) in tokens.iter().zip(&global).enumerate() {
                let label = inputs.labels[at];
                for (column, &d) in columns.iter().enumerate().filter(|_| label != IGNORED) {
                    let k = head.k.get_f64(label as usize * head.k.cols + d);
                    let slope = evidence.step.options.transform.scale;
                    rest[row * columns.len() + column] = unit.cotangents[1][t] * slope * k;
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

    /// Squared distance of the captured values from the sum taken so.
    fn misfit(&self, pieces: &Pieces) -> f64 {
        let Sums { n, rows, cols, entries, others, .. } = self;
        let size = pieces.size.clamp(1, *n.max(&1));
        let mut starts: Vec<usize> = (0..*n).step_by(size).collect();
        if pieces.walk == Walk::Descending {
            starts.reverse();
        }
        let mut total = vec![0.0f32; rows * cols];
        let mut own = vec![0.0f32; rows * cols];
        for start in starts {
            own.fill(0.0);
            for i in start..(start + size).min(*n) {
                let other = &others[i * cols..(i + 1) * cols];
                for (row, &entry) in entries[i * rows..(i + 1) * rows].iter().enumerate() {
                    let own = &mut own[row * cols..(row + 1) * cols];
                    own.iter_mut().zip(other).for_each(|(sum, x)| *sum += entry * x);
                }
            }
            pieces.addend.round_slice(&mut own);
            total.iter_mut().zip(&own).for_each(|(sum, x)| *sum += x);
            pieces.total.round_slice(&mut total);
        }
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        let error = |((&sum, rest), captured): ((&f32, &f64), &f64)| {
            (stored(f64::from(sum) + rest) - captured).powi(2)
        };
        total.iter().zip(&self.rest).zip(&self.captured).map(error).sum()
    }

    /// Squared distance from the sum of all entries but those that are left out, given by
    /// addend and class.
    pub(super) fn misfit_without(&self, left_out: &dyn Fn(usize, usize) -> bool) -> f64 {
        let Sums { n, rows, cols, entries, others, .. } = self;
        let mut total = self.rest.clone();
        for i in 0..*n {
            let other = &others[i * cols..(i + 1) * cols];
            for row in (0..*rows).filter(|&row| !left_out(i, self.places[row])) {
                let entry = f64::from(entries[i * rows + row]);
                let total = &mut total[row * cols..(row + 1) * cols];
                total.iter_mut().zip(other).for_each(|(sum, &x)| *sum += entry * f64::from(x));
            }
        }
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        let error = |(&sum, captured): (&f64, &f64)| (stored(sum) - captured).powi(2);
        if self.stored.is_some_and(|precision| !precision.keeps_f32()) {
            // Little may be left out, in a few elements: those that it brings to another
            // stored value count, and not how far.
            let others = total.iter().zip(&self.captured).filter(|(sum, x)| stored(**sum) != **x);
            return others.count() as f64;
        }
        // Rows count alike: what is left out of a row is little beside a frequent label's.
        let rows = total.chunks(*cols).zip(self.captured.chunks(*cols));
        let relative = rows.map(|(total, captured)| {
            let size: f64 = captured.iter().map(|x| x * x).sum();
            let error: f64 = total.iter().zip(captured).map(error).sum();
            error / (size + error).max(f64::MIN_POSITIVE)
        });
        relative.sum()
    }

    /// The sizes that fit, the best first, where one of them fits much better than a sum in
    /// f32 does.
    pub fn search(&self, precision: Precision, declared: Option<usize>) -> Vec<Pieces> {
        let f32 = Precision::F32;
        let whole = |size| Pieces { size, total: f32, addend: f32, walk: Walk::Ascending };
        let unrounded = self.misfit(&whole(self.n));
        let mut found: Vec<(f64, Pieces)> = Vec::new();
        for size in sizes(self.n, declared) {
            for (addend, walk) in [
                (precision, Walk::Ascending),
                (f32, Walk::Ascending),
                (precision, Walk::Descending),
            ] {
                let pieces = Pieces { size, total: precision, addend, walk };
                found.push((self.misfit(&pieces), pieces));
            }
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let seen = found.iter().filter(|(misfit, _)| *misfit < SEEN * unrounded);
        seen.map(|&(_, pieces)| pieces).take(OFFERED).collect()
    }
}

/// Sizes that a sum over `n` addends is cut into: the declared one, powers of two and half
/// as much again, tens, and equal parts.
fn sizes(n: usize, declared: Option<usize>) -> Vec<usize> {
    let powers = (0..).map(|i| 1usize << i).take_while(|&size| size < n);
    let mut found: Vec<usize> = powers.flat_map(|size| [size, size + size / 2]).collect();
    found.extend((1..=20).map(|i| 10 * i));
    found.extend((2..=64).map(|parts| n.div_ceil(parts)));
    found.extend((2..=64).filter(|&parts| n.is_multiple_of(parts)).map(|parts| n / parts));
    found.extend((1..=32).map(|i| 8 * i));
    found.extend(declared);
    found.retain(|&size| size > 0 && size < n);
    found.sort_unstable();
    found.dedup();
    found
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

#[cfg(test)]
mod tests {
    use super::*;

    fn made(n: usize, pieces: &Pieces) -> Sums {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.3
        };
        let (rows, cols) = (6, 5);
        let entries = (0..n * rows).map(|_| uniform()).collect();
        let others = (0..n * cols).map(|_| uniform()).collect();
        let zeros = vec![0.0; rows * cols];
        let sums = Sums {
            n,
            rows,
            cols,
            entries,
            others,
            rest: zeros.clone(),
            captured: zeros,
            stored: None,
            places: (0..rows).collect(),
        };
        // The captured values are what is left when nothing is taken away.
        let captured = taken(&sums, pieces);
        Sums { captured, ..sums }
    }

    /// The sum taken in pieces, by distance from zero and from one: no second copy of it.
    fn taken(sums: &Sums, pieces: &Pieces) -> Vec<f64> {
        let cells = sums.rows * sums.cols;
        let mut found = vec![0.0; cells];
        for at in 0..cells {
            let of = |target: f64| {
                let mut captured = vec![0.0; cells];
                captured[at] = target;
                let one = Sums {
                    captured,
                    entries: sums.entries.clone(),
                    others: sums.others.clone(),
                    rest: sums.rest.clone(),
                    places: sums.places.clone(),
                    ..*sums
                };
                one.misfit(pieces)
            };
            // (x - 0)² - (x - 1)² = 2x - 1
            found[at] = (of(0.0) - of(1.0) + 1.0) / 2.0;
        }
        found.iter().map(|&x| pieces.total.round64(x)).collect()
    }

    #[test]
    fn the_size_of_the_pieces_is_read_off_their_roundings() {
        let half = Precision::Bf16;
        for (n, size) in [(301, 16), (500, 125), (257, 50), (90, 7)] {
            let pieces = Pieces { size, total: half, addend: half, walk: Walk::Ascending };
            let found = made(n, &pieces).search(half, Some(size));
            assert_eq!(found.first().map(|found| found.size), Some(size), "{n}: {found:?}");
        }
    }

    #[test]
    fn a_sum_in_one_piece_has_no_size() {
        let one = Pieces {
            size: 400,
            total: Precision::F32,
            addend: Precision::F32,
            walk: Walk::Ascending,
        };
        assert_eq!(made(400, &one).search(Precision::Bf16, None), []);
    }

    #[test]
    fn sizes_hold_equal_parts_and_what_is_declared() {
        let found = sizes(1000, Some(333));
        for size in [1, 64, 100, 125, 143, 250, 333, 500] {
            assert!(found.contains(&size), "{size}");
        }
        assert!(!found.contains(&1000) && !found.contains(&0));
    }
}
