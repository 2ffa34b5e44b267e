//! Policies on every machine against the same policies on the CPU: bit for bit wherever the sums
//! leave no choice of order, within rounding where they do.

use super::*;
use crate::device::Device;
use crate::device::tests::{Little, cuda, heads, host, on_every_machine, runs};
use crate::device::user_kernel::launch::Launches;
use crate::kernels::fixture::{Counter, Fixture};
use crate::kernels::policy::{self, DkParts, DqParts, LogitRounding, PolicyForward, Walk};
use crate::kernels::{Cotangents, Matrix, NoProgress, Transform, Values};

const TILES: Tiles = Tiles { tokens: 6, vocab: 16 };
/// Every sum is then of one term after the other, whoever takes it.
const SINGLE: Tiles = Tiles { tokens: 1, vocab: 1 };

on_every_machine! {
    elements_have_the_bits_of_the_cpu_in_every_format,
    logits_that_are_given_have_the_forward_sums_of_the_cpu_bit_for_bit,
    products_without_a_choice_of_order_have_the_bits_of_the_cpu,
    tiles_give_the_gradients_of_the_cpu_within_the_rounding_of_their_sums,
    a_device_with_little_memory_gives_the_same_gradients,
    sums_of_another_kind_are_the_cpus,
    every_run_of_a_policy_gives_the_same_bits,
}

pub(in crate::device) fn policies() -> Vec<(&'static str, Policy)> {
    use Precision::{Bf16, F8E4m3, F16, F32, Tf32};
    let fused = Policy::fused_bf16();
    vec![
        ("plain f32", Policy::plain_f32()),
        ("plain bf16", Policy::plain_bf16()),
        ("chunked", Policy::chunked_bf16()),
        ("chunked, rounded", Policy { addend: Bf16, chunk_add: F16, ..Policy::chunked_f32() }),
        ("fused f32", Policy::fused_f32()),
        ("fused bf16", fused),
        ("p", Policy { p: Bf16, dlogits: F32, logits: Bf16, ..fused }),
        ("sums", Policy { addend: Bf16, tile_add: Bf16, ..fused }),
        ("tf32", Policy { input: F32, operand: Tf32, dlogits: Tf32, ..fused }),
        ("f16", Policy { input: F16, dlogits: F16, p: F16, logits: F16, ..fused }),
        ("f8", Policy { input: Bf16, operand: F8E4m3, dlogits: F8E4m3, ..fused }),
        ("end", Policy { logits: Bf16, logits_when: LogitRounding::End, ..fused }),
        ("back", Policy { tile_order: Walk::Descending, chunk_order: Walk::Descending, ..fused }),
    ]
}

/// Heads whose logits are sums of small multiples of 1/256, exact in any order; not all of their
/// numbers are of 8 bits.
fn dyadic() -> Vec<(&'static str, Fixture)> {
    let round = |values: &mut Vec<f32>| {
        values.iter_mut().for_each(|x| *x = (x.clamp(-2.0, 2.0) * 16.0).round() / 16.0);
    };
    let mut all = heads();
    for (_, fixture) in &mut all {
        round(&mut fixture.q);
        round(&mut fixture.k);
    }
    all
}

struct Upstream {
    lse: Vec<f64>,
    cotangents: [Vec<f64>; 3],
}

impl Upstream {
    fn of(fixture: &Fixture, policy: &Policy) -> Upstream {
        let lse = policy::forward(policy, &fixture.inputs(), TILES, &NoProgress).lse;
        let cotangents = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
        Upstream { lse, cotangents }
    }

    fn cotangents(&self) -> Cotangents<'_, f64> {
        let [lse, label, smooth] = &self.cotangents;
        Cotangents { lse, label, smooth }
    }
}

/// NaN with NaN.
fn bits(values: &[f64]) -> Vec<u64> {
    let bits_of = |x: &f64| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() };
    values.iter().map(bits_of).collect()
}

/// dq, then dk, each with its parts, then dbias; what a path does not tell apart is empty.
fn flat(dq: DqParts, blocks: Vec<[Vec<f64>; 4]>) -> [Vec<f64>; 7] {
    let part = |nth: usize| blocks.iter().flat_map(|block| block[nth].clone()).collect();
    [dq.dq_lse, dq.dq_label, dq.dq, part(0), part(1), part(2), part(3)]
}

const NAMES: [&str; 7] = ["dq_lse", "dq_label", "dq", "dk_lse", "dk_label", "dk", "dbias"];

fn on_device(
    device: &dyn Device,
    policy: &Policy,
    fixture: &Fixture,
    tiles: Tiles,
) -> [Vec<f64>; 7] {
    let upstream = Upstream::of(fixture, policy);
    let (inputs, counter) = (fixture.inputs(), Counter::default());
    let mut blocks = Vec::new();
    let take = &mut |block: DkParts<'_>| blocks.push(owned(&block));
    let given = (&upstream.lse[..], &upstream.cotangents());
    let dq = device.policy_backward(policy, &inputs, given, (tiles, &counter), take).unwrap();
    assert_eq!(counter.total(), policy::backward_work(&inputs));
    flat(dq, blocks)
}

fn on_cpu(policy: &Policy, fixture: &Fixture, tiles: Tiles) -> [Vec<f64>; 7] {
    let upstream = Upstream::of(fixture, policy);
    let mut blocks = Vec::new();
    let take = &mut |block: DkParts<'_>| blocks.push(owned(&block));
    let (inputs, cotangents) = (fixture.inputs(), upstream.cotangents());
    let dq =
        policy::backward(policy, &inputs, &upstream.lse, &cotangents, tiles, &NoProgress, take);
    flat(dq, blocks)
}

fn owned(block: &DkParts<'_>) -> [Vec<f64>; 4] {
    [block.dk_lse, block.dk_label, block.dk, block.dbias].map(<[f64]>::to_vec)
}

#[test]
fn every_kernel_in_the_source_is_loaded_and_no_other() {
    let source = include_str!("../kernels/policy.cu");
    let named: Vec<_> = source.lines().filter_map(|line| line.strip_prefix("KERNEL(")).collect();
    assert_eq!(named.len(), KERNELS.len(), "{named:?}");
    for (kernel, line) in KERNELS.iter().zip(named) {
        assert!(line.starts_with(&format!("{kernel},")), "{kernel}: {line}");
    }
}

#[test]
fn a_policys_products_are_in_the_narrowest_type_that_holds_its_operands() {
    let products: Vec<_> =
        policies().iter().map(|(name, policy)| (*name, Products::of(policy))).collect();
    for (name, logits, gradients) in [
        ("plain f32", Compute::F32, Compute::F32),
        ("plain bf16", Compute::Bf16, Compute::Bf16),
        ("p", Compute::Bf16, Compute::F32),
        ("tf32", Compute::F32, Compute::Tf32),
        ("f16", Compute::F16, Compute::F16),
        ("f8", Compute::Bf16, Compute::Tf32),
    ] {
        assert!(products.contains(&(name, Products { logits, gradients })), "{name}: {products:?}");
    }
}

/// exp by dlogits at lse 0 and g 1, tanh by a softcap, every format by what they are rounded to:
/// each exponent, with random bits behind it, and every bit pattern of the 16-bit formats.
fn elements_have_the_bits_of_the_cpu_in_every_format<M: Launches>(machine: &M) {
    let singles: Vec<f32> = (0..=u16::MAX)
        .map(|high| {
            let low = u32::from(high).wrapping_mul(2_654_435_769) >> 16;
            f32::from_bits(u32::from(high) << 16 | low)
        })
        .collect();
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let formats = [
        Precision::F32,
        Precision::Tf32,
        Precision::Bf16,
        Precision::F16,
        Precision::F8E4m3,
        Precision::F8E5m2,
    ];
    let capped = Transform { scale: 0.75, softcap: Some(30.0), uncapped: false };
    for values in [Values::F32(&singles), Values::F16(&every), Values::Bf16(&every)] {
        for (format, transform) in
            formats.into_iter().flat_map(|format| [(format, Transform::NONE), (format, capped)])
        {
            let rounded_policy =
                Policy { logits: format, p: format, dlogits: format, ..Policy::plain_f32() };
            assert_plane(
                machine,
                &rounded_policy,
                Matrix { rows: 256, cols: 256, values },
                transform,
            );
        }
    }
}

fn assert_plane<M: Launches>(machine: &M, policy: &Policy, given: Matrix, transform: Transform) {
    let none = Matrix { rows: 256, cols: 0, values: Values::F32(&[]) };
    let labels = vec![7; 256];
    let plain = HeadInputs::plain(none, none, &labels, 256);
    let inputs = HeadInputs { given: Some(given), transform, ..plain };
    let (zeros, ones) = (vec![0.0; 256], vec![1.0; 256]);
    let cotangents = Cotangents { lse: &ones, label: &ones, smooth: &zeros };
    let tiles = (Tiles { tokens: 100, vocab: 100 }, &NoProgress as &dyn crate::kernels::Progress);
    let (mut got, mut wanted) = (Vec::new(), Vec::new());
    let keep = |to: &mut Vec<Vec<u64>>, tile: policy::PlaneTile<'_>| {
        to.extend([bits(tile.logits), bits(tile.dlogits)]);
    };
    let upstream = (&zeros[..], &cotangents);
    Device::policy_plane(machine, policy, &inputs, upstream, tiles, &mut |tile| {
        keep(&mut got, tile)
    })
    .unwrap();
    policy::plane(policy, &inputs, &zeros, &cotangents, tiles.0, tiles.1, &mut |tile| {
        keep(&mut wanted, tile);
    });
    for (tile, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        for (index, (x, y)) in got.iter().zip(wanted).enumerate() {
            let [x, y] = [*x, *y].map(f64::from_bits);
            assert!(
                x.to_bits() == y.to_bits(),
                "{policy:?} tile {tile} at {index}: {x:e}, not {y:e}"
            );
        }
    }
    assert_eq!(got.len(), wanted.len());
}

fn assert_forward(got: &PolicyForward, wanted: &PolicyForward, what: &str) {
    for (name, got, wanted) in [
        ("lse", &got.lse, &wanted.lse),
        ("label logits", &got.label_logits, &wanted.label_logits),
        ("sum", &got.logit_sum, &wanted.logit_sum),
    ] {
        assert_eq!(bits(got), bits(wanted), "{what}: {name}: {got:?}, not {wanted:?}");
    }
}

/// The device's tiles are its own but on the fused path: one tile has the whole vocabulary there.
fn logits_that_are_given_have_the_forward_sums_of_the_cpu_bit_for_bit<M: Launches>(machine: &M) {
    for (what, mut fixture) in dyadic() {
        for (name, policy) in policies() {
            for poison in [None, Some(f64::NEG_INFINITY), Some(f64::INFINITY), Some(f64::NAN)] {
                match (&mut fixture.given, poison) {
                    (Some(given), Some(poison)) => given[3] = poison,
                    (None, Some(_)) => continue,
                    _ => {}
                }
                let inputs = fixture.inputs();
                let whole = Tiles { tokens: 6, vocab: 4096 };
                let tiles = if policy.path == Path::Fused { TILES } else { whole };
                let given = (tiles, &NoProgress as &dyn crate::kernels::Progress);
                let got = Device::policy_forward(machine, &policy, &inputs, given).unwrap();
                let wanted = policy::forward(&policy, &inputs, tiles, &NoProgress);
                assert_forward(&got, &wanted, &format!("{what}, {name}, {poison:?}"));
            }
        }
    }
}

/// Products of two numbers of a half are exact in f32, so that it does not show who fuses them
/// with their addition. A sum that begins with 0 and one that begins with its first term differ in
/// the sign of 0, which cuBLAS does not promise.
fn products_without_a_choice_of_order_have_the_bits_of_the_cpu<M: Launches>(machine: &M) {
    let exact = |policy: &Policy| Products::of(policy).gradients != Compute::F32;
    for (name, policy) in policies() {
        if policy.path != Path::Fused || !exact(&policy) {
            continue;
        }
        for (what, fixture) in dyadic() {
            let got = on_device(machine, &policy, &fixture, SINGLE);
            let wanted = on_cpu(&policy, &fixture, SINGLE);
            let unsigned = |values: &[f64]| values.iter().map(|x| x + 0.0).collect::<Vec<_>>();
            for (part, (got, wanted)) in NAMES.iter().zip(got.iter().zip(&wanted)) {
                let (got, wanted) = (unsigned(got), unsigned(wanted));
                assert_eq!(bits(&got), bits(&wanted), "{what}, {name}: {part}");
            }
        }
    }
}

/// Sums of n terms in two orders lie within 2 gamma_n of the sum of magnitudes of each other
/// (Higham 2002, 4.2); so do a sum's parts, and rounding both may part them by a spacing.
fn tiles_give_the_gradients_of_the_cpu_within_the_rounding_of_their_sums<M: Launches>(machine: &M) {
    for (name, policy) in policies() {
        if policy
            .between()
            .into_iter()
            .flatten()
            .any(|(part, total)| !part.keeps_f32() || !total.keeps_f32())
        {
            continue; // bit for bit above
        }
        for (what, fixture) in dyadic() {
            let got = on_device(machine, &policy, &fixture, TILES);
            let wanted = on_cpu(&policy, &fixture, TILES);
            let magnitudes = magnitudes(&fixture);
            for (nth, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                let narrow = if nth % 3 == 2 { policy.output } else { policy.parts };
                let spacing = 2.0 * narrow.unit_roundoff().max(policy.output.unit_roundoff());
                assert_eq!(got.len(), wanted.len());
                for (index, (x, y)) in got.iter().zip(wanted).enumerate() {
                    let terms = (fixture.tokens.max(fixture.vocab) + 4) as f64;
                    let sums = 4.0 * terms * f64::powi(2.0, -24) * magnitudes[nth][index];
                    let allowed = sums + if narrow.keeps_f32() { 0.0 } else { spacing * y.abs() };
                    let close = (x - y).abs() <= allowed;
                    assert!(close, "{what}, {name}: {} at {index}: {x:e}, not {y:e}", NAMES[nth]);
                }
            }
        }
    }
}

/// Sums of the terms' magnitudes for each of [`NAMES`], by the plane of an f64 policy.
fn magnitudes(fixture: &Fixture) -> [Vec<f64>; 7] {
    let (t, v, d) = (fixture.tokens, fixture.vocab, fixture.depth);
    let upstream = Upstream::of(fixture, &Policy::plain_f32());
    let (mut dq, mut dk, mut dbias) = (vec![0.0; t * d], vec![0.0; v * d], vec![0.0; v]);
    let largest = |values: &[f32]| values.iter().fold(1.0f64, |most, &x| most.max(x.abs().into()));
    let (q, k) = (largest(&fixture.q), largest(&fixture.k));
    policy::plane(
        &Policy::plain_f32(),
        &fixture.inputs(),
        &upstream.lse,
        &upstream.cotangents(),
        TILES,
        &NoProgress,
        &mut |tile| {
            let width = tile.cols.len();
            for (index, g) in tile.dlogits.iter().enumerate() {
                let (row, col) =
                    (tile.tokens.start + index / width, tile.cols.start + index % width);
                // The label's part may cancel in an entry, and stands alone on the fused path.
                let g = g.abs() + 2.0 * f64::from(fixture.g_label[row].abs());
                dq[row * d..(row + 1) * d].iter_mut().for_each(|sum| *sum += g * k);
                dk[col * d..(col + 1) * d].iter_mut().for_each(|sum| *sum += g * q);
                dbias[col] += g;
            }
        },
    );
    [dq.clone(), dq.clone(), dq, dk.clone(), dk.clone(), dk, dbias]
}

/// dq goes back and forth, q is loaded for each tile: on the fused path the tiles are the same.
fn a_device_with_little_memory_gives_the_same_gradients<M: Launches>(machine: &M) {
    let policy = Policy { addend: Precision::Bf16, ..Policy::fused_bf16() };
    for (what, fixture) in dyadic() {
        let wanted = on_device(machine, &policy, &fixture, TILES);
        let got = on_device(&Little(machine), &policy, &fixture, TILES);
        for (part, (got, wanted)) in NAMES.iter().zip(got.iter().zip(&wanted)) {
            assert_eq!(bits(got), bits(wanted), "{what}: {part}");
        }
    }
}

fn sums_of_another_kind_are_the_cpus<M: Launches>(machine: &M) {
    let fixture = Fixture::usual().with_bias();
    let policy = Policy::fused_f64();
    assert!(!policy.is_fast());
    let (got, wanted) = (
        on_device(machine, &policy, &fixture, TILES).map(|part| bits(&part)),
        on_cpu(&policy, &fixture, TILES).map(|part| bits(&part)),
    );
    assert_eq!(got, wanted);
}

fn every_run_of_a_policy_gives_the_same_bits<M: Launches>(machine: &M) {
    let fixture = Fixture::new(300, 40, 900, 890).with_bias();
    let tiles = Tiles { tokens: 64, vocab: 256 };
    for policy in [Policy::fused_bf16(), Policy::plain_bf16(), Policy::plain_f32()] {
        let run = || on_device(machine, &policy, &fixture, tiles).map(|part| bits(&part));
        let first = run();
        for number in 1..runs(machine) {
            assert!(run() == first, "{policy:?} run {number}");
        }
    }
}
