//! Rows that a device looked at have the bits of those that the CPU looked at, from the same sums.

use super::super::Device;
use super::super::machine::Machine;
use super::super::room::Room;
use super::super::tests::{
    Little, NOISE, Named, Owned, cuda, flat, heads, host, on, on_every_machine,
};
use super::super::user_kernel::launch::Launches;
use super::{Comparison, Rooms};
use crate::compare::RowTally;
use crate::compare::allowance::{
    Allowance, DENSE, Dense, Joined, LABEL, Label, OfColumn, OfRow, Rounding,
};
use crate::draw::Draw;
use crate::kernels::fixture::Fixture;
use crate::kernels::reference::{Backward, TermNoise};
use crate::kernels::{Matrix, NoProgress, Progress, Tiles, Values};

on_every_machine! {
    what_a_walk_keeps_is_compared_as_what_it_would_have_fetched,
    a_device_with_little_memory_does_not_compare_dq,
    rows_of_a_vocabulary_are_those_of_the_cpu,
    rows_of_tokens_are_those_of_the_cpu,
    what_is_no_number_is_counted_as_on_the_cpu,
    every_format_is_rounded_and_measured_as_on_the_cpu,
}

const ROWS: usize = 37;
const COLUMNS: usize = 19;

/// Which rows are a label, in a case.
fn is_label(row: usize) -> bool {
    row.is_multiple_of(3)
}

/// Random sums and numbers, none of them 0 where the formulas tell something apart by it.
struct Case {
    shape: (usize, usize),
    dense: [Vec<f64>; 5],
    label: [Vec<f64>; 5],
    captured: Vec<f32>,
    side: Vec<f32>,
    storage: Vec<f64>,
    stage: Allowance,
    rows: Vec<OfRow>,
    columns: Vec<OfColumn>,
}

/// A number of about this size.
pub(in crate::device) fn sized(draw: &mut Draw, about: f64) -> f64 {
    about * 10f64.powf(2.0 * draw.unit() - 1.0)
}

/// What is allowed of a case's elements.
fn stage(draw: &mut Draw, seed: u64, parts: i64) -> Allowance {
    let mut size = |value: f64| sized(draw, value);
    let rounding = |size: &mut dyn FnMut(f64) -> f64| Rounding {
        square: size(1e-6),
        constant: size(1e-9),
        unit: size(1e-3),
        half: size(1e-5),
    };
    Allowance {
        parts,
        dense: Dense {
            total: size(1e-6),
            squares: size(1e-6),
            shared_total: size(1e-7),
            shared_squares: size(1e-7),
            shared_whole: size(1e-7),
            shared_confident: size(1e-7),
            bias: size(1e-6),
            whole: (seed % 2) as i64,
        },
        label: Label {
            carried: size(1e-7),
            row_variance: (seed / 2 % 2) as i64,
            row_alike: size(1e-7),
            shared_total: size(1e-7),
            shared_whole: size(1e-7),
            shared_alike: size(1e-7),
            bias: size(1e-6),
            few_alike: size(1e-6),
            few_root: size(1e-4),
            few: rounding(&mut size),
            copies: (seed / 4 % 2) as i64,
        },
        joined: Joined { part: rounding(&mut size), sum: rounding(&mut size), apart: size(1e-5) },
        stored: rounding(&mut size),
    }
}

impl Case {
    fn new(seed: u64, parts: i64) -> Case {
        Case::of((ROWS, COLUMNS), seed, parts)
    }

    fn of(shape: (usize, usize), seed: u64, parts: i64) -> Case {
        let (rows, columns) = shape;
        let mut draw = Draw::new(seed);
        let mut size = |value: f64| sized(&mut draw, value);
        let all = rows * columns;
        let mut list = |value: f64| (0..all).map(|_| size(value)).collect::<Vec<f64>>();
        let dense = [list(1.0), list(0.5), list(1e-4), list(1e-5), list(0.1)];
        let mut label = [list(1.0), list(0.3), list(1e-4), list(0.4), list(1.0)];
        let (side, storage) = (list(1.0).iter().map(|&x| x as f32).collect(), list(1e-5));
        for values in &mut label {
            let rows = values.chunks_mut(columns).enumerate();
            rows.filter(|(row, _)| !is_label(*row)).for_each(|(_, row)| row.fill(0.0));
        }
        let noise = list(5e-3);
        let captured = (0..all).map(|index| {
            let (x, y) = (dense[0][index], label[0][index]);
            let right = [x, y, x + y][parts as usize - 1];
            (right * (1.0 + noise[index] * [1.0, -1.0][index % 2])) as f32
        });
        let captured = captured.collect();
        let stage = stage(&mut draw, seed, parts);
        let mut size = |value: f64| sized(&mut draw, value);
        let mut of_row = |row: usize| OfRow {
            side: size(1e-6),
            total: size(1e-7),
            copies: 1.0 + (row % 4) as f64,
            hits: if is_label(row) { 1.0 + (row % 5) as f64 } else { 0.0 },
            label_total: size(1e-7),
            label_squares: size(1e-7),
            label_row: size(1e-7),
            label_shared: size(1e-7),
            few: size(1e-7),
            most: size(1e-5),
            copied: size(1e-5),
        };
        let rows = (0..rows).map(&mut of_row).collect();
        let of_column = |_| OfColumn { own: size(1e-8), row: size(1e-8), shared: size(1e-8) };
        let columns = (0..columns).map(of_column).collect();
        Case { shape, dense, label, captured, side, storage, stage, rows, columns }
    }

    fn comparison<'a>(&'a self, captured: Values<'a>, summed: bool) -> Comparison<'a> {
        let (rows, cols) = self.shape;
        let matrix = |values| Matrix { rows, cols, values };
        Comparison {
            captured: matrix(captured),
            stage: &self.stage,
            rows: &self.rows,
            columns: &self.columns,
            label: self.label.each_ref().map(|values| &values[..]),
            side: matrix(Values::F32(&self.side)),
            storage: if summed { &self.storage } else { &[] },
            bound: 20.0,
        }
    }

    fn here(&self, comparison: &Comparison) -> Vec<RowTally> {
        comparison.here(self.dense.each_ref().map(|values| &values[..]))
    }

    fn there<M: Machine>(
        &self,
        machine: &M,
        comparison: &Comparison,
        vocabulary: bool,
    ) -> Vec<RowTally> {
        let mut rooms: [Room<M>; 5] = [(); 5].map(|()| Room::default());
        let mut dense = [0; 5];
        for ((address, room), values) in dense.iter_mut().zip(&mut rooms).zip(&self.dense) {
            if !values.is_empty() {
                *address = room.put(machine, values).unwrap();
            }
        }
        Rooms::default().compare(machine, comparison, (dense, vocabulary)).unwrap()
    }
}

/// Words of a row; every NaN is the same.
fn words(rows: &[RowTally]) -> Vec<Vec<u64>> {
    let word = |&bytes: &[u8; 8]| match u64::from_ne_bytes(bytes) {
        word if f64::from_bits(word).is_nan() => u64::MAX,
        word => word,
    };
    let row_words =
        |row: &RowTally| bytemuck::bytes_of(row).as_chunks().0.iter().map(word).collect();
    rows.iter().map(row_words).collect()
}

pub(in crate::device) fn assert_same(what: &str, there: &[RowTally], here: &[RowTally]) {
    assert_eq!(there.len(), here.len());
    for (row, (got, wanted)) in words(there).iter().zip(words(here)).enumerate() {
        assert_eq!(*got, wanted, "{what}, row {row}: {:?}, not {:?}", there[row], here[row]);
    }
}

/// Holds what a device keeps of a walk to what it would have fetched, for random numbers.
pub(in crate::device) fn assert_kept(device: &dyn Device, what: &str, fixture: &Fixture) {
    let noise = TermNoise { filter: 0.02, whole: true, ..NOISE };
    let fetched = on(device, fixture, &noise, None);
    let list = |all: &Named, name: &str| -> Vec<f64> {
        all.iter().find(|(of, _)| *of == name).expect("it is there").1.clone()
    };
    let inputs = fixture.inputs();
    let owned = Owned::of(fixture);
    let (mut dq, mut walk) = (
        Backward::zeros(&inputs, &noise),
        device.backward(&inputs, inputs.k.rows, &noise).unwrap(),
    );
    let upstream = owned.upstream(&inputs, &noise);
    let tiles = (Tiles { tokens: 6, vocab: 16 }, &NoProgress as &dyn Progress);
    let (sums, mut kept) = walk.slab_to_compare(&inputs, upstream, tiles, &mut dq).unwrap();
    let labels = flat(&dq, sums, &inputs, &noise);
    for parts in [DENSE, LABEL, DENSE | LABEL] {
        let mut case = Case::of((inputs.k.rows, inputs.q.cols), 5, parts);
        case.dense = ["dk_lse", "dk_lse_sq", "dk_lse_var", "dk_dropped", "dk_confident"]
            .map(|name| list(&fetched, name));
        case.label =
            ["dk_label", "dk_label_sq", "dk_label_var", "dk_label_alike", "dk_label_whole"]
                .map(|name| list(&labels, name));
        let hits = list(&labels, "hits");
        case.rows.iter_mut().zip(&hits).for_each(|(row, hits)| row.hits = *hits);
        let comparison = case.comparison(Values::F32(&case.captured), false);
        assert_same(
            &format!("{what}: dk"),
            &kept.compare(&comparison).unwrap(),
            &case.here(&comparison),
        );
    }
    drop(kept);
    let mut case = Case::of((inputs.q.rows, inputs.q.cols), 6, DENSE | LABEL);
    case.dense = ["dq_lse", "dq_lse_sq", "dq_lse_var", "dq_dropped", "dq_confident"]
        .map(|name| list(&fetched, name));
    case.label = [dq.dq_label.clone(), Vec::new(), dq.dq_label_var.clone(), Vec::new(), Vec::new()];
    let comparison = case.comparison(Values::F32(&case.captured), false);
    let mut kept = walk.dq_to_compare().expect("all of dq lies there");
    assert_same(
        &format!("{what}: dq"),
        &kept.compare(&comparison).unwrap(),
        &case.here(&comparison),
    );
}

fn what_a_walk_keeps_is_compared_as_what_it_would_have_fetched<M: Launches>(machine: &M) {
    for (what, fixture) in heads() {
        if fixture.inputs().given.is_none() {
            assert_kept(machine, what, &fixture);
        }
    }
}

/// In bands no more than some tokens' sums lie there: they are compared by this process.
fn a_device_with_little_memory_does_not_compare_dq<M: Launches>(machine: &M) {
    let fixture = Fixture::new(300, 5, 200, 190);
    let inputs = fixture.inputs();
    let little = Little(machine);
    let mut walk = Device::backward(&little, &inputs, inputs.k.rows, &NOISE).unwrap();
    let (owned, mut dq) = (Owned::of(&fixture), Backward::zeros(&inputs, &NOISE));
    let tiles = (Tiles { tokens: 6, vocab: 16 }, &NoProgress as &dyn Progress);
    let upstream = owned.upstream(&inputs, &NOISE);
    walk.slab_to_compare(&inputs, upstream, tiles, &mut dq).map(drop).unwrap();
    assert!(walk.dq_to_compare().is_none());
}

fn rows_of_a_vocabulary_are_those_of_the_cpu<M: Launches>(machine: &M) {
    let (mut beyond, mut within) = (0, 0);
    for seed in 0..16 {
        for parts in [DENSE, LABEL, DENSE | LABEL] {
            let case = Case::new(seed, parts);
            let wide: Vec<f64> = case.captured.iter().map(|&x| f64::from(x)).collect();
            for (captured, summed) in
                [(Values::F32(&case.captured), false), (Values::F64(&wide), true)]
            {
                let comparison = case.comparison(captured, summed);
                let (there, here) =
                    (case.there(machine, &comparison, true), case.here(&comparison));
                assert_same(&format!("seed {seed}, parts {parts}"), &there, &here);
                beyond += here.iter().map(|row| row.exceeding).sum::<u64>();
                within += here.iter().map(|row| row.scores[1]).sum::<u32>();
            }
        }
    }
    assert!(beyond > 100 && within > 100, "{beyond} beyond their bound, {within} within");
}

/// Without sums of a filter, of confident entries, or of labels but two, as dq may have them.
fn rows_of_tokens_are_those_of_the_cpu<M: Launches>(machine: &M) {
    for seed in 0..8 {
        let mut case = Case::new(seed, DENSE | LABEL);
        case.rows.iter_mut().for_each(|row| row.hits = 0.0);
        let [y, _, variance, ..] = case.label.clone();
        case.label = [y, Vec::new(), variance, Vec::new(), Vec::new()];
        (case.dense[3], case.dense[4]) = (Vec::new(), Vec::new());
        let comparison = case.comparison(Values::F32(&case.captured), false);
        assert_same("tokens", &case.there(machine, &comparison, false), &case.here(&comparison));
        let part = comparison.part(5..9);
        let mut some = Case { dense: case.dense.clone(), ..Case::new(seed, DENSE | LABEL) };
        for values in some.dense.iter_mut().filter(|values| !values.is_empty()) {
            *values = values[5 * COLUMNS..9 * COLUMNS].to_vec();
        }
        assert_same("some", &some.there(machine, &part, false), &case.here(&comparison)[5..9]);
    }
}

fn what_is_no_number_is_counted_as_on_the_cpu<M: Launches>(machine: &M) {
    let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, f32::MAX, 1e-45];
    for seed in 0..8 {
        let mut case = Case::new(seed, DENSE | LABEL);
        for (index, value) in wrong.iter().enumerate() {
            case.captured[index * 11 + 1] = *value;
            case.dense[0][index * 13 + 2] = f64::from(*value);
            case.dense[2][index * 17 + 3] = f64::from(*value);
            let labelled = index * 3 * COLUMNS + index;
            case.label[0][labelled] = -case.dense[0][labelled];
            case.label[1][labelled + 1] = 0.0;
            // The first of two largest differences is the one that is kept.
            for twin in [index * COLUMNS + 7, index * COLUMNS + 9] {
                (case.captured[twin], case.dense[0][twin], case.label[0][twin]) = (1e6, 1.0, 0.0);
            }
        }
        case.captured[40..60].fill(0.0);
        case.dense[0][50..70].fill(0.0);
        case.label[0][50..70].fill(0.0);
        let comparison = case.comparison(Values::F32(&case.captured), false);
        let here = case.here(&comparison);
        assert!(here.iter().map(|row| row.nonfinite).sum::<u64>() > 4);
        assert_same("no numbers", &case.there(machine, &comparison, true), &here);
    }
}

/// Captured values of every bit pattern that 16 bits have, and references at and beside the ties.
fn every_format_is_rounded_and_measured_as_on_the_cpu<M: Launches>(machine: &M) {
    let mut case = Case::new(3, DENSE);
    for first in (0..1u32 << 16).step_by(ROWS * COLUMNS) {
        let bits: Vec<u16> = (0..ROWS * COLUMNS).map(|at| (first as usize + at) as u16).collect();
        for values in [Values::Bf16(&bits), Values::F16(&bits)] {
            let matrix = Matrix { rows: ROWS, cols: COLUMNS, values };
            let steps = |at: usize| [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 3.0, -2.0, 4000.0][at % 9];
            let near = |index: usize| {
                let x = matrix.get_f64(index);
                let spacing = x.abs()
                    * f64::exp2(if matches!(values, Values::Bf16(_)) { -8.0 } else { -10.0 });
                x + steps(index) * spacing
            };
            case.dense[0] = (0..ROWS * COLUMNS).map(near).collect();
            let comparison = case.comparison(values, false);
            assert_same(
                "formats",
                &case.there(machine, &comparison, true),
                &case.here(&comparison),
            );
        }
    }
}
