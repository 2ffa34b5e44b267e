//! Sums of gradients: over the microbatches of a rank, and over the ranks of a domain.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::domain::{Addend, fewer_bits};
use super::elements::Elements;
use super::judge::{Judge, Operand, arithmetic};
use crate::compare::Tally;
use crate::kernels::number::Number;
use crate::kernels::round::Precision;
use crate::ops::table::op;

/// A sum of weighted addends, element by element.
pub(crate) struct WeightedSum {
    /// What the sum is multiplied by in the end.
    scale: f64,
    /// In which groups addends may be summed first.
    groups: Vec<Vec<usize>>,
}

impl WeightedSum {
    /// A sum, and the weights of its addends: those that all have in common multiply the sum.
    fn of(weights: &[f64]) -> (WeightedSum, Vec<f64>) {
        let scale = weights.first().copied().unwrap_or(1.0);
        match scale != 0.0 && weights.iter().all(|weight| *weight == scale) {
            true => (WeightedSum { scale, groups: Vec::new() }, vec![1.0; weights.len()]),
            false => (WeightedSum { scale: 1.0, groups: Vec::new() }, weights.to_vec()),
        }
    }

    /// The same, whose addends are known. A job may reduce each microbatch by itself, or sum those of a
    /// rank first; both are sums in the format that is declared.
    fn grouped(self, addends: &[Addend]) -> WeightedSum {
        let microbatches = addends.iter().map(|own| own.microbatch).collect::<Vec<_>>();
        let ranks = addends.iter().map(|own| (own.rank, own.index)).collect::<Vec<_>>();
        let groups = vec![numbered(&microbatches), numbered(&ranks)];
        let is_some = |way: &Vec<usize>| {
            let last = way.iter().max().copied().unwrap_or(0);
            last > 0 && last + 1 < way.len()
        };
        WeightedSum { groups: groups.into_iter().filter(is_some).collect(), ..self }
    }

    /// The sum times its scale. A scale that is no power of two is rounded, alike for all elements.
    fn scaled<N: Number>(&self, sum: N) -> N {
        if self.scale.log2().fract() == 0.0 {
            return sum.times(self.scale);
        }
        let scale = sum.constant(self.scale).times(1.0);
        sum.scaled(scale)
    }
}

op! {
    WeightedSum = "weighted_sum";
    inputs {
        addends: Plane, "one addend a row";
        weights: Rows, "what each addend is multiplied by";
    }
    stages {
        total: Columns Forward OverRows |_op, addends, weights| addends * weights,
            then |op, sum, _count| op.scaled(sum),
            "the sum of the weighted addends";
    }
    groups |op| &op.groups;
}

/// Which of the distinct ones each is, from 0.
fn numbered<T: Copy + Ord>(all: &[T]) -> Vec<usize> {
    let distinct: BTreeSet<T> = all.iter().copied().collect();
    let numbers: BTreeMap<T, usize> = distinct.into_iter().zip(0..).collect();
    all.iter().map(|own| numbers[own]).collect()
}

/// A recorded sum, and what it should be the sum of.
pub(crate) struct SumOf<'a> {
    /// The tensor that holds the sum.
    pub key: &'a TensorKey,
    /// The rank that holds it, and the box that is compared.
    pub rank: Rank,
    /// The box.
    pub place: &'a IndexBox,
    /// What is summed.
    pub addends: &'a [Addend],
    /// What each is multiplied by.
    pub weights: &'a [f64],
    /// The format of fewest bits that an addend or a partial sum was sent in.
    pub sent: Option<Precision>,
}

impl Judge<'_> {
    /// Compares a recorded sum with the sum of its weighted addends. What is sent in few bits may have
    /// been divided before, where small addends lose more; either is right.
    pub(crate) fn sum(&self, of: &SumOf<'_>) -> Result<Tally, String> {
        let tally = self.sum_by(of, false)?;
        let is_narrow = of.sent.is_some_and(|sent| !sent.keeps_f32());
        let is_divided = of.weights.first().is_some_and(|weight| weight.abs() < 1.0);
        let bound = self.bound(of.place);
        if !is_narrow || !is_divided || tally.nonfinite > 0 || tally.excess(&bound).is_none() {
            return Ok(tally);
        }
        let divided = self.sum_by(of, true)?;
        Ok(if divided.excess(&bound).is_none() { divided } else { tally })
    }

    /// The same, of addends that were divided before they were sent or after they were summed.
    fn sum_by(&self, of: &SumOf<'_>, is_divided_first: bool) -> Result<Tally, String> {
        let inventory = self.inventory;
        let stored = inventory.precision(of.key);
        let addend = of.addends.first().and_then(|addend| inventory.precision(&addend.key));
        // What is sent in fewer bits than it was recorded in is rounded once before it is summed.
        let rounded = of.sent.filter(|_| fewer_bits(of.sent, addend) != addend);
        let declared = arithmetic(Some(Precision::F32), fewer_bits(of.sent, stored));
        let (op, weights) = match is_divided_first {
            true => (WeightedSum { scale: 1.0, groups: Vec::new() }, vec![1.0; of.weights.len()]),
            false => WeightedSum::of(of.weights),
        };
        let op = op.grouped(of.addends);
        let rounded = if is_divided_first { of.sent } else { rounded };
        let operands = |part: &IndexBox| {
            let addends = of.addends.iter().map(|addend| inventory.addend(addend, part));
            let addends = Elements::joined(addends.collect::<Result<Vec<_>, _>>()?);
            let rows = of.addends.len();
            let total = inventory.elements(of.key, of.rank, part)?;
            let addends = match self.nan_is_meant {
                true => {
                    let recorded = inventory.read_box(of.key, of.rank, part)?;
                    let mut addends = addends.widened();
                    overflow(&mut addends, &recorded, declared.sum.precision);
                    Elements::of(addends)
                }
                false => addends,
            };
            let addends = match is_divided_first {
                true => weighted(addends, of.weights),
                false => addends,
            };
            let weights = Operand { rows, ..Operand::row("weights", weights.clone(), None) };
            // Elements that are all alike are rounded alike: one of them says as much as all.
            let (addends, total) = match is_alike(&addends, rows) && is_alike(&total, 1) {
                true => (addends.firsts(rows), total.firsts(1)),
                false => (addends, total),
            };
            let addends = Operand { rows, ..Operand::part("addends", addends, rounded) };
            Ok(vec![addends, weights, Operand::part("total", total, stored)])
        };
        let compared = self.compare(&op, &declared, of.place, &operands)?;
        let (_, tally) = compared.into_iter().next().ok_or("it has no elements")?;
        tally
    }
}

/// Addends, one a row, times their weights.
fn weighted<'e>(addends: Elements<'e>, weights: &[f64]) -> Elements<'e> {
    let mut addends = addends.widened();
    let columns = addends.len() / weights.len().max(1);
    for (row, weight) in addends.chunks_mut(columns.max(1)).zip(weights) {
        row.iter_mut().for_each(|x| *x *= weight);
    }
    Elements::of(addends)
}

/// Whether every row has equal elements, and more than one.
fn is_alike(values: &Elements<'_>, rows: usize) -> bool {
    let columns = values.len() / rows.max(1);
    let matrix = values.matrix(rows, columns);
    let is_first = |row: usize| {
        let first = matrix.get_f64(row * columns);
        (1..columns).all(|column| matrix.get_f64(row * columns + column) == first)
    };
    columns > 1 && (0..rows).all(is_first)
}

/// Lets addends be infinite where the recorded sum is not finite and some order of adding them, in
/// the format of the sum, may have overflown on the way.
fn overflow(addends: &mut [f64], total: &[f64], format: Precision) {
    let columns = total.len();
    for (column, sum) in total.iter().enumerate().filter(|(_, sum)| !sum.is_finite()) {
        let own = addends.iter().skip(column).step_by(columns);
        if own.map(|x| x.abs()).sum::<f64>() > format.largest_finite() {
            addends[column] = *sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Bound;
    use crate::draw::Draw;
    use crate::ops::{Span, Tensors, tallies, tallies_by_numbers};

    /// Goal: the mean over three ranks is right however a job rounds its third. Method: f32 sums of
    /// so many elements that a factor of 1e-8 would be seen, times the rounded third, and divided.
    #[test]
    fn a_mean_whose_scale_is_rounded_agrees_and_one_that_is_a_little_off_does_not() {
        let (mut draw, count) = (Draw::new(31), 100_000);
        let addends: Vec<f64> = (0..3 * count).map(|_| f64::from(draw.normal() as f32)).collect();
        let sum = |at: usize| (0..3).fold(0f32, |sum, row| sum + addends[row * count + at] as f32);
        let diverges = |finish: &dyn Fn(f32) -> f32| {
            let total: Vec<f64> = (0..count).map(|at| f64::from(finish(sum(at)))).collect();
            let (op, weights) = WeightedSum::of(&[1.0 / 3.0; 3]);
            let operands = [
                Operand { rows: 3, ..Operand::row("addends", addends.clone(), None) },
                Operand { rows: 3, ..Operand::row("weights", weights, None) },
                Operand::row("total", total, Some(Precision::F32)),
            ];
            let tensors: Tensors<'_> = operands.iter().map(|own| own.recorded(count)).collect();
            let bound = Bound::new(1, 1, count);
            let declared = arithmetic(Some(Precision::F32), None);
            let compared = tallies(&op, &tensors, &declared, Span { bound, first_row: 0 });
            compared[0].1.as_ref().unwrap().excess(&bound).is_some()
        };
        assert!(!diverges(&|sum| sum / 3.0));
        assert!(!diverges(&|sum| sum * (1f32 / 3.0)));
        assert!(diverges(&|sum| sum / 3.000_002));
    }

    /// Compares a sum of one addend a row with what a job made of it.
    fn compared(
        addends: &[Vec<f64>],
        total: Vec<f64>,
        (stored, sum): (Precision, Option<Precision>),
    ) -> Option<String> {
        let (rows, count) = (addends.len(), total.len());
        let (op, weights) = WeightedSum::of(&vec![1.0; rows]);
        let operands = [
            Operand { rows, ..Operand::row("addends", addends.concat(), sum) },
            Operand { rows, ..Operand::row("weights", weights, None) },
            Operand::row("total", total, Some(stored)),
        ];
        let tensors: Tensors<'_> = operands.iter().map(|own| own.recorded(count)).collect();
        let bound = Bound::new(10, 1, count);
        let span = Span { bound, first_row: 0 };
        let compared = tallies(&op, &tensors, &arithmetic(Some(stored), sum), span);
        compared[0].1.as_ref().unwrap().excess(&bound)
    }

    /// Goal: ranks with equal gradients, as those of a batch that all of them have, err by one error
    /// again and again, and a rank that is left out is seen beside it. Method: 24 equal addends in
    /// bf16, added one after the other in bf16.
    #[test]
    fn a_sum_of_copies_in_few_bits_errs_more_than_one_of_other_numbers() {
        let (mut draw, bf16) = (Draw::new(43), Precision::Bf16);
        let sum = |addends: &[Vec<f64>]| -> Vec<f64> {
            let add = |sum: f64, of: &Vec<f64>, at: usize| bf16.round64(sum + bf16.round64(of[at]));
            let of = |at: usize| addends.iter().fold(0.0, |sum, of| add(sum, of, at));
            (0..476).map(of).collect()
        };
        let formats = (Precision::F32, Some(bf16));
        let mut alarms = Vec::new();
        for _ in 0..20 {
            let own: Vec<f64> = (0..476).map(|_| f64::from(draw.normal() as f32)).collect();
            let copies = vec![own; 24];
            alarms.extend(compared(&copies, sum(&copies), formats));
            assert!(compared(&copies, sum(&copies[1..]), formats).is_some());
        }
        assert_eq!(alarms, Vec::<String>::new());
    }

    /// Goal: microbatches that cancel after each was reduced by itself err as their own sums do, and a
    /// factor is seen beside it. Method: eight addends of 1 and eight of -1 nearly, each eight summed in
    /// bf16, against addends that are in no groups.
    #[test]
    fn sums_that_cancel_err_as_each_of_them_does() {
        let (mut draw, bf16, count) = (Draw::new(53), Precision::Bf16, 400);
        let addends: Vec<Vec<f64>> = (0..16)
            .map(|row| {
                let sign = if row % 2 == 0 { 1.0 } else { -1.0 };
                (0..count).map(|_| bf16.round64(sign + 0.05 * draw.normal())).collect()
            })
            .collect();
        let sum = |first: usize, at: usize| {
            let own = addends.iter().skip(first).step_by(2);
            own.fold(0.0, |sum, of| bf16.round64(sum + of[at]))
        };
        let total = |by: f64| (0..count).map(|at| by * (sum(0, at) + sum(1, at))).collect();
        let compare = |groups: &[Vec<usize>], total: Vec<f64>| {
            let (op, weights) = WeightedSum::of(&[1.0; 16]);
            let op = WeightedSum { groups: groups.to_vec(), ..op };
            let rows = 16;
            let operands = [
                Operand { rows, ..Operand::row("addends", addends.concat(), Some(bf16)) },
                Operand { rows, ..Operand::row("weights", weights, None) },
                Operand::row("total", total, Some(Precision::F32)),
            ];
            let tensors: Tensors<'_> = operands.iter().map(|own| own.recorded(count)).collect();
            let bound = Bound::new(10, 1, count);
            let declared = arithmetic(Some(Precision::F32), Some(bf16));
            let compared = tallies(&op, &tensors, &declared, Span { bound, first_row: 0 });
            compared[0].1.as_ref().unwrap().excess(&bound)
        };
        let by_microbatch: Vec<usize> = (0..16).map(|row| row % 2).collect();
        let groups = [by_microbatch];
        assert!(compare(&[], total(1.0)).is_some(), "no order of single addends errs so");
        assert_eq!(compare(&groups, total(1.0)), None);
        assert!(compare(&groups, total(1.5)).is_some());
    }

    /// Goal: errors whose squares are no numbers of f64 are no finding, and larger ones are. Method:
    /// sums in f64 that are off by a spacing or two, of several sizes.
    #[test]
    fn what_is_too_small_to_be_squared_in_f64_is_no_finding() {
        let (mut draw, f64s) = (Draw::new(47), (Precision::F64, None));
        for size in [1e-191, 1e-160, 1e-150, 1e-140, 1.0] {
            let addends: Vec<Vec<f64>> =
                (0..2).map(|_| (0..600).map(|_| size * draw.normal()).collect()).collect();
            let total = |off: f64| {
                let off = |at: usize| if at.is_multiple_of(2) { off } else { -off };
                let of = |at: usize| (addends[0][at] + addends[1][at]) * (1.0 + off(at));
                (0..600).map(of).collect::<Vec<f64>>()
            };
            assert_eq!(compared(&addends, total(f64::EPSILON), f64s), None, "{size:e}");
            let is_seen = compared(&addends, total(1e-9), f64s).is_some();
            assert_eq!(is_seen, size > 1e-145, "{size:e}");
        }
    }

    /// Goal: a sum by columns is the sum by elements. Method: sums and bounds of both, over formats
    /// and scales, with some elements off and some that are no numbers.
    #[test]
    fn a_sum_is_judged_alike_by_columns_and_by_elements() {
        let (mut draw, rows, count) = (Draw::new(37), 5, 1001);
        for (stored, sum) in [(Precision::F32, None), (Precision::Bf16, Some(Precision::Bf16))] {
            for scale in [1.0, 0.5, 1.0 / 3.0] {
                for (rounded, faults) in [(None, 0), (Some(Precision::Bf16), 2)] {
                    let drawn = || stored.round64(f64::from(draw.normal() as f32));
                    let addends: Vec<f64> =
                        std::iter::repeat_with(drawn).take(rows * count).collect();
                    let of_column =
                        |at: usize| (0..rows).map(|row| addends[row * count + at]).sum::<f64>();
                    let total = (0..count).map(|at| stored.round64(scale * of_column(at)));
                    let mut total: Vec<f64> = total.collect();
                    for at in 0..faults {
                        total[100 * at] = f64::NAN;
                        total[100 * at + 7] += 1.0;
                    }
                    let (op, weights) = WeightedSum::of(&vec![scale; rows]);
                    let operands = [
                        Operand { rows, ..Operand::row("addends", addends.clone(), rounded) },
                        Operand { rows, ..Operand::row("weights", weights, None) },
                        Operand::row("total", total, Some(stored)),
                    ];
                    let tensors: Tensors<'_> =
                        operands.iter().map(|own| own.recorded(count)).collect();
                    let span = Span { bound: Bound::new(9, 1, count), first_row: 0 };
                    let declared = arithmetic(Some(stored), sum);
                    let by_columns = tallies(&op, &tensors, &declared, span).remove(0).1.unwrap();
                    let by_elements = tallies_by_numbers(&op, &tensors, &declared, span);
                    let by_elements = by_elements.into_iter().next().unwrap().1.unwrap();
                    let counts = |of: &Tally| (of.nonfinite, of.exceeding, of.exceeding_rows);
                    assert_eq!(counts(&by_columns), counts(&by_elements));
                    assert_eq!(by_columns.exceeding, faults as u64);
                    let numbers = |of: &Tally| {
                        let energies = [of.error_energy, of.reference_energy, of.captured_energy];
                        let bounds = [of.expected(), of.allowed_slope(&span.bound), of.slope()];
                        [energies, bounds].concat()
                    };
                    // Some addends of few bits are equal by chance, which elements alone know.
                    let near = if stored.keeps_f32() { 1e-4 } else { 1e-2 };
                    for (x, y) in numbers(&by_columns).into_iter().zip(numbers(&by_elements)) {
                        assert!((x - y).abs() <= near * y.abs() + 1e-12, "{x:e}, not {y:e}");
                    }
                }
            }
        }
    }
}
