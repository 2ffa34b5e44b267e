//! A plane that lies on a device is compared as the CPU compares the same values, bit for bit, and
//! the errors of policies are summed there as they are here.

use super::{KeptPlane, PlaneComparison, plane};
use crate::compare::allowance::Rounding;
use crate::compare::plane::{OfToken, PlaneAllowance, PlaneStage};
use crate::compare::row::PIECE;
use crate::device::compare::tests::{assert_same, sized};
use crate::device::machine::Machine;
use crate::device::plan::{Plan, Sizes};
use crate::device::policy::{self, tests::policies};
use crate::device::tests::{Little, NOISE, Owned, cuda, heads, host, on_every_machine};
use crate::device::user_kernel::launch::Launches;
use crate::draw::Draw;
use crate::kernels::fixture::{Counter, Fixture};
use crate::kernels::policy::{Policy, forward_work};
use crate::kernels::round::Precision;
use crate::kernels::{Matrix, NoProgress, Progress, Values};

on_every_machine! {
    entries_are_compared_as_on_the_cpu_piece_by_piece,
    squared_errors_of_policies_are_those_of_their_planes,
    what_a_device_does_not_emulate_is_said,
}

const STAGES: [PlaneStage; 3] = [PlaneStage::Logits, PlaneStage::Logprobs, PlaneStage::Dlogits];

fn rounding(draw: &mut Draw) -> Rounding {
    let mut size = |value: f64| sized(draw, value);
    Rounding { square: size(1e-6), constant: size(1e-9), unit: size(1e-3), half: size(1e-5) }
}

fn allowance(draw: &mut Draw, stage: PlaneStage) -> PlaneAllowance {
    let [entry, subtracted, stored] = [(); 3].map(|()| rounding(draw));
    let mut size = |value: f64| sized(draw, value);
    PlaneAllowance {
        stage: stage as i64,
        entry,
        subtracted,
        stored,
        filter: size(1e-3),
        factor: size(1.0),
        shared: size(1e-7),
        transformed: size(1e-7),
    }
}

/// Numbers of a token, none of them 0.
fn token(draw: &mut Draw, label: u32) -> OfToken {
    let mut size = |value: f64| sized(draw, value);
    OfToken {
        lse: size(3.0),
        upstream: -size(0.3),
        label_upstream: -size(0.3),
        scale: size(1e-6),
        spread: size(1.0),
        alike: size(0.1),
        label: label.into(),
    }
}

/// Captured values beside those of a plane, some of them no numbers.
fn captured(draw: &mut Draw, values: &[f64]) -> Vec<f32> {
    let mut all: Vec<f32> = values
        .iter()
        .map(|x| (x * (1.0 + 1e-2 * (2.0 * draw.unit() - 1.0)) + 1e-3 * draw.unit()) as f32)
        .collect();
    let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX, 1e-45];
    for (index, value) in wrong.into_iter().enumerate() {
        let place = index * all.len() / wrong.len() + 3;
        all[place] = value;
    }
    all
}

fn entries_are_compared_as_on_the_cpu_piece_by_piece<M: Launches>(machine: &M) {
    let wide = Fixture::new(4, 3, 2 * PIECE + 100, 2 * PIECE + 90).with_smoothing();
    let (mut beyond, mut within) = (0, 0);
    for (seed, fixture) in [wide, Fixture::usual(), Fixture::usual().with_bias()].iter().enumerate()
    {
        let (inputs, owned) = (fixture.inputs(), Owned::of(fixture));
        let upstream = owned.upstream(&inputs, &NOISE);
        for stage in STAGES {
            let mut draw = Draw::new(seed as u64 + 1);
            let stage_and_progress = (stage, &NoProgress as &dyn Progress);
            let mut kept = plane(machine, &inputs, upstream, stage_and_progress).unwrap();
            let (values, variances) = (kept.values().unwrap(), kept.variances().unwrap());
            let captured = captured(&mut draw, &values);
            let stage_of = allowance(&mut draw, stage);
            let tokens: Vec<OfToken> =
                inputs.labels.iter().map(|&label| token(&mut draw, label)).collect();
            let dlogits = stage == PlaneStage::Dlogits;
            let (rows, cols) = (inputs.q.rows, inputs.k.rows);
            let comparison = PlaneComparison {
                captured: Matrix { rows, cols, values: Values::F32(&captured) },
                columns: if dlogits { cols } else { inputs.valid_vocab },
                stage: &stage_of,
                tokens: &tokens,
                bound: 20.0,
            };
            let here = comparison.here(&values, &variances);
            assert_same(&format!("{stage:?}"), &kept.compare(&comparison).unwrap(), &here);
            beyond += here.iter().map(|row| row.exceeding).sum::<u64>();
            within += here.iter().map(|row| row.scores[1]).sum::<u32>();
            assert!(here.iter().map(|row| row.nonfinite).sum::<u64>() > 1);
        }
    }
    assert!(beyond > 100 && within > 100, "{beyond} beyond their bound, {within} within");
}

/// Of entries that the device itself gives, in the same tiles: products of other shapes are summed in
/// other orders, and of a policy in f32 these roundings are all there is. So nothing but the order of
/// the last sum is free.
fn squared_errors_of_policies_are_those_of_their_planes<M: Launches>(machine: &M) {
    let mut all: Vec<_> = heads().into_iter().collect();
    all.push(("large", Fixture::new(150, 5, 600, 570)));
    let formats = [None, Some(Precision::Bf16), Some(Precision::F16), Some(Precision::F32)];
    for (what, fixture) in &all {
        let (inputs, owned) = (fixture.inputs(), Owned::of(fixture));
        let upstream = owned.upstream(&inputs, &NOISE);
        for stage in [PlaneStage::Logits, PlaneStage::Dlogits] {
            let little = Little(machine);
            let stage_and_progress = (stage, &NoProgress as &dyn Progress);
            let mut kept = plane(&little, &inputs, upstream, stage_and_progress).unwrap();
            let exact = kept.values().unwrap();
            let given = (upstream.lse, &upstream.cotangents);
            for ((name, policy), format) in policies().into_iter().zip(formats.iter().cycle()) {
                let (mut energy, counter) = (0.0, Counter::default());
                let sizes =
                    Sizes { tokens: inputs.q.rows, rows: 0, depth: inputs.q.cols, terms: 1 };
                let tiles = Plan::of(little.free().unwrap(), sizes).tiles;
                let tiles = (tiles, &NoProgress as &dyn Progress);
                policy::plane(&little, &policy, &inputs, given, tiles, &mut |tile| {
                    let values = match stage {
                        PlaneStage::Dlogits => tile.dlogits,
                        _ => tile.logits,
                    };
                    for (index, &x) in values.iter().enumerate() {
                        let row = tile.tokens.start + index / tile.cols.len();
                        let column = tile.cols.start + index % tile.cols.len();
                        if column < inputs.valid_vocab {
                            let x = format.map_or(x, |format| format.round64(x));
                            energy += (x - exact[row * inputs.k.rows + column]).powi(2);
                        }
                    }
                })
                .unwrap();
                let stored = (*format, &counter as &dyn Progress);
                let got = kept.energy(&policy, &inputs, given, stored).unwrap().unwrap();
                let terms = (inputs.q.rows * inputs.k.rows) as f64;
                let close = terms * f64::EPSILON * energy;
                let same = (got - energy).abs() <= close || got.to_bits() == energy.to_bits();
                assert!(same || !energy.is_finite(), "{what}, {name}: {got:e}, not {energy:e}");
                assert_eq!(counter.total(), forward_work(&inputs), "{what}");
            }
        }
    }
}

fn what_a_device_does_not_emulate_is_said<M: Launches>(machine: &M) {
    let fixture = Fixture::usual();
    let (inputs, owned) = (fixture.inputs(), Owned::of(&fixture));
    let upstream = owned.upstream(&inputs, &NOISE);
    let stage_and_progress = (PlaneStage::Dlogits, &NoProgress as &dyn Progress);
    let mut kept = plane(machine, &inputs, upstream, stage_and_progress).unwrap();
    let given = (upstream.lse, &upstream.cotangents);
    let mut energy = |policy: &Policy, stored| {
        kept.energy(policy, &inputs, given, (stored, &NoProgress)).unwrap()
    };
    let mut slow = Policy::plain_f32();
    slow.sums.dq.precision = Precision::F64;
    assert!(!slow.is_fast());
    assert_eq!(energy(&slow, None), None);
    assert_eq!(energy(&Policy::plain_f32(), Some(Precision::F8E4m3)), None);
    assert!(energy(&Policy::plain_f32(), Some(Precision::F64)).is_some());
}
