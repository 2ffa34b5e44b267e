//! Tests policies against the reference and against each other; `rounding` tests their rounding
//! points.

mod options;
mod rounding;

use super::*;
use crate::kernels::fixture::{Counter, Fixture, SMALL_TILES, with_threads};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED};
use crate::kernels::reference;
use crate::kernels::tiles::{NoProgress, Tiles};

/// All results of a step, as bits.
#[derive(Debug, PartialEq, Eq)]
struct Bits {
    lse: Vec<u64>,
    label_logits: Vec<u64>,
    dq: Vec<u64>,
    dk: Vec<u64>,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// Forward and backward of the emulation; dk blocks put together as
/// `[dk, dk_lse, dk_label]`.
fn emulated(
    policy: &Policy,
    fixture: &Fixture,
    inputs: &HeadInputs,
    tiles: Tiles,
) -> (PolicyForward, DqParts, [Vec<f64>; 3]) {
    let result = forward(policy, inputs, tiles, &NoProgress);
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let smooth = vec![0.0; g_lse.len()];
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    let mut dk = [const { Vec::new() }; 3];
    let mut next = 0;
    let mut collect = |block: DkParts| {
        assert_eq!(block.rows.start, next);
        next = block.rows.end;
        for (all, part) in dk.iter_mut().zip([block.dk, block.dk_lse, block.dk_label]) {
            all.extend_from_slice(part);
        }
    };
    let dq = backward(policy, inputs, &result.lse, &cotangents, tiles, &NoProgress, &mut collect);
    assert_eq!(next, fixture.vocab);
    (result, dq, dk)
}

fn emulated_bits(policy: &Policy, fixture: &Fixture, tiles: Tiles) -> Bits {
    let (forward, dq, [dk, ..]) = emulated(policy, fixture, &fixture.inputs(), tiles);
    let (lse, label_logits) = (bits(&forward.lse), bits(&forward.label_logits));
    Bits { lse, label_logits, dq: bits(&dq.dq), dk: bits(&dk) }
}

/// Runs one whole step. The outputs are filled with garbage first, which a correct step overwrites.
fn stepped(policy: &Policy, fixture: &Fixture, tiles: Tiles, workspace: &mut Workspace) -> Bits {
    let (tokens, depth) = (fixture.tokens, fixture.depth);
    let (mut lse, mut label_logits) = (vec![f32::NAN; tokens], vec![f32::NAN; tokens]);
    let (mut dq, mut dk) = (vec![f32::NAN; tokens * depth], vec![f32::NAN; fixture.vocab * depth]);
    let (inputs, smooth) = (fixture.inputs(), vec![0.0; tokens]);
    let cotangents = &Cotangents { lse: &fixture.g_lse, label: &fixture.g_label, smooth: &smooth };
    let counter = Counter::default();
    let outputs =
        StepOutputs { lse: &mut lse, label_logits: &mut label_logits, dq: &mut dq, dk: &mut dk };
    match policy.path {
        Path::Plain => plain_step(policy, &inputs, cotangents, workspace, &counter, outputs),
        Path::Fused => {
            fused_step(policy, &inputs, cotangents, tiles, workspace, &counter, outputs);
        }
        Path::Chunked => unreachable!("no step runs the chunked path"),
    }
    assert_eq!(counter.total(), step_work(&inputs));
    let bits_of = |values: &[f32]| bits(&widened(values));
    Bits {
        lse: bits_of(&lse),
        label_logits: bits_of(&label_logits),
        dq: bits_of(&dq),
        dk: bits_of(&dk),
    }
}

/// The named policies, both paths with every rounding point set, and scatters in shards.
fn policies() -> [Policy; 8] {
    let half = Precision::Bf16;
    let all = |path| Policy {
        path,
        input: Precision::F16,
        logits: half,
        dlogits: half,
        label_grad: half,
        parts: Precision::F16,
        output: half,
        sums: Sums { label_scatter: Sum::of(half), ..Sums::all(Sum::NATIVE) },
        ..Policy::fused_f32()
    };
    [
        Policy::plain_f32(),
        Policy::plain_bf16(),
        all(Path::Plain),
        Policy::fused_f32(),
        Policy::fused_bf16(),
        all(Path::Fused),
        Policy { scatter_shards: 3, scatter_join: half, ..all(Path::Fused) },
        Policy { scatter_shards: 4, scatter_join: Precision::F32, ..all(Path::Fused) },
    ]
}

/// `policies`, and those that only the emulation runs: chunked, and some of the emulator's.
fn all_policies() -> Vec<Policy> {
    let half = Precision::Bf16;
    let sums = |order| Sums::all(Sum { precision: half, order });
    let others = [
        Policy::chunked_f32(),
        Policy { chunk_add: half, product: Precision::F32, ..Policy::chunked_bf16() },
        Policy::plain_f64(),
        Policy::fused_f64(),
        Policy { sums: sums(Order::Pairwise), ..Policy::plain_bf16() },
        Policy { sums: sums(Order::Blocked(4)), tile_add: half, ..Policy::fused_bf16() },
        Policy { product: Precision::Tf32, p: half, ..Policy::chunked_f32() },
    ];
    policies().into_iter().chain(others).collect()
}

/// A bound for f32 policies, worst case: a logit errs by (D + 1) u sum|q||k|, lse by the
/// largest such error plus (V + 8) u for its sum, plus u |lse|; both are relative errors
/// of p, and exp, g p and the subtraction add a few u. A sum of n terms then adds n u.
/// All relative to the sum of the magnitudes added, which `sqrt(n sum of squares)` bounds.
fn assert_within_rounding(policy: &Policy, fixture: &Fixture) {
    let u = Precision::F32.unit_roundoff();
    let inputs = fixture.inputs();
    let exact = reference::forward(&inputs, SMALL_TILES, &NoProgress);
    let (forward, dq, [dk, ..]) = emulated(policy, fixture, &inputs, SMALL_TILES);
    let pairs = (0..fixture.tokens).flat_map(|t| (0..fixture.valid).map(move |v| (t, v)));
    let dot = pairs.map(|(t, v)| fixture.dot_magnitude(t, v)).fold(0.0, f64::max);
    let lse_size = exact.lse.iter().fold(0.0f64, |max, lse| max.max(lse.abs()));
    let logit = (fixture.depth + 1) as f64 * u * dot;
    let lse = logit + (fixture.valid + 8) as f64 * u + 2.0 * u * (lse_size + dot);
    for t in 0..fixture.tokens {
        assert!((forward.lse[t] - exact.lse[t]).abs() <= lse, "lse[{t}]");
        let label = forward.label_logits[t] - exact.label_logits[t];
        assert!(label.abs() <= logit, "label_logits[{t}]");
    }
    let n = fixture.valid.max(fixture.tokens) as f64;
    let relative = logit + lse + 2.0 * u * (lse_size + dot) + (n + 8.0) * u;
    let close = |what: &str, got: &[f64], offset: usize, wanted: &[f64], size: &[f64]| {
        for (index, &wanted) in wanted.iter().enumerate() {
            let got = got[offset + index];
            let bound = 1.1 * relative * (n * size[index]).sqrt();
            let error = (got - wanted).abs();
            assert!(error <= bound, "{what}[{index}]: {got} is not {wanted} within {bound}");
        }
    };
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
    let depth = fixture.depth;
    let on_dk = &mut |block: reference::DkBlock| {
        let (wanted, size) =
            (sum(&block.dk_lse, &block.dk_label), sum(&block.dk_lse_sq, &block.dk_label_sq));
        close("dk", &dk, block.rows.start * depth, &wanted, &size);
    };
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let noise = reference::TermNoise::default();
    let smooth = vec![0.0; g_lse.len()];
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    let exact_dq = reference::backward(
        &inputs,
        &exact.lse,
        &cotangents,
        &noise,
        (SMALL_TILES, reference::Keep::Both, &NoProgress),
        on_dk,
    );
    let label_sq: Vec<f64> = exact_dq.dq_label.iter().map(|x| x * x).collect();
    let wanted = sum(&exact_dq.dq_lse, &exact_dq.dq_label);
    close("dq", &dq.dq, 0, &wanted, &sum(&exact_dq.dq_lse_sq, &label_sq));
}

#[test]
fn f32_policies_are_the_reference_within_worst_case_rounding() {
    for sizes in [(22, 13, 61, 57), (1, 5, 40, 40), (7, 1, 33, 1), (40, 300, 131, 120)] {
        let fixture = Fixture::new(sizes.0, sizes.1, sizes.2, sizes.3);
        for policy in [Policy::plain_f32(), Policy::fused_f32()] {
            assert_within_rounding(&policy, &fixture);
        }
    }
}

#[test]
fn a_step_that_keeps_recomputes_or_emulates_gives_the_same_bits() {
    for (tokens, depth, vocab, valid) in [(22, 13, 61, 57), (1, 5, 40, 40), (150, 1030, 90, 90)] {
        let fixture = Fixture::new(tokens, depth, vocab, valid);
        for policy in policies() {
            // The plain step materialises the logits: it equals the emulation with one tile.
            let tiles = match policy.path {
                Path::Plain => Tiles { tokens, vocab: valid },
                Path::Fused | Path::Chunked => SMALL_TILES,
            };
            let wanted = emulated_bits(&policy, &fixture, tiles);
            let mut keeping = Workspace::default();
            let first = stepped(&policy, &fixture, tiles, &mut keeping);
            assert!(first == wanted, "kept {policy:?}");
            let again = stepped(&policy, &fixture, tiles, &mut keeping);
            assert!(again == wanted, "a used workspace {policy:?}");
            let recomputed = stepped(&policy, &fixture, tiles, &mut Workspace::new(0));
            assert!(recomputed == wanted, "recomputed {policy:?}");
        }
    }
}

#[test]
fn the_thread_count_changes_no_bit() {
    let fixture = Fixture::new(300, 70, 290, 281);
    let tiles = Tiles { tokens: 150, vocab: 140 };
    for policy in policies() {
        let all = |threads| {
            with_threads(threads, || {
                let step = stepped(&policy, &fixture, tiles, &mut Workspace::default());
                (emulated_bits(&policy, &fixture, tiles), step)
            })
        };
        let on_one_thread = all(1);
        assert!(on_one_thread == all(2) && on_one_thread == all(3), "{policy:?}");
    }
}

#[test]
fn the_padded_vocabulary_is_never_read_and_gets_zero_gradients() {
    for policy in all_policies() {
        let mut fixture = Fixture::usual();
        let clean = emulated_bits(&policy, &fixture, SMALL_TILES);
        fixture.k[fixture.valid * fixture.depth..].fill(f32::NAN);
        let poisoned = emulated_bits(&policy, &fixture, SMALL_TILES);
        assert!(clean == poisoned, "{policy:?}");
        assert!(poisoned.dk[fixture.valid * fixture.depth..].iter().all(|&bits| bits == 0));
    }
}

#[test]
fn ignored_tokens_get_no_gradient() {
    let fixture = Fixture::usual();
    let ignored = fixture.labels.iter().position(|&label| label == IGNORED).unwrap();
    let row = ignored * fixture.depth..(ignored + 1) * fixture.depth;
    for policy in all_policies() {
        let (forward, dq, _) = emulated(&policy, &fixture, &fixture.inputs(), SMALL_TILES);
        assert!(dq.dq[row.clone()].iter().all(|&x| x == 0.0), "{policy:?}");
        assert_eq!(forward.label_logits[ignored], 0.0);
    }
}

#[test]
fn nan_and_infinity_propagate_and_empty_heads_do_not_panic() {
    let mut fixture = Fixture::usual();
    fixture.q[0] = f32::NAN;
    fixture.q[fixture.depth] = f32::INFINITY;
    for policy in all_policies() {
        let (forward, dq, [dk, ..]) = emulated(&policy, &fixture, &fixture.inputs(), SMALL_TILES);
        assert!(forward.lse[0].is_nan());
        assert_eq!(forward.lse[1], f64::INFINITY);
        assert!(forward.lse[2..].iter().all(|lse| lse.is_finite()));
        assert!(dq.dq[..2 * fixture.depth].iter().all(|x| x.is_nan()));
        assert!(dq.dq[2 * fixture.depth..].iter().all(|x| x.is_finite()));
        assert!(dk[..fixture.valid * fixture.depth].iter().all(|x| x.is_nan()));
    }
    let mut no_vocabulary = Fixture::usual();
    no_vocabulary.valid = 0;
    no_vocabulary.labels.fill(IGNORED);
    let no_tokens = Fixture::new(0, 13, 61, 57);
    let no_depth = Fixture::new(22, 0, 61, 57);
    for fixture in [no_vocabulary, no_tokens, no_depth] {
        for policy in all_policies() {
            let wanted = emulated_bits(&policy, &fixture, SMALL_TILES);
            assert!(wanted.dq.iter().chain(&wanted.dk).all(|&bits| bits == 0), "{policy:?}");
        }
        for policy in policies() {
            let wanted = emulated_bits(&policy, &fixture, SMALL_TILES);
            let step = stepped(&policy, &fixture, SMALL_TILES, &mut Workspace::default());
            assert!(step.dq == wanted.dq && step.dk == wanted.dk && step.lse == wanted.lse);
        }
    }
}

/// A first tile with only -inf, then logits so far from 0 that exp overflows.
#[test]
fn a_tile_without_any_finite_logit_leaves_the_sum_as_it_was() {
    let mut fixture = Fixture::new(1, 1, 40, 40);
    fixture.q[0] = 1.0;
    fixture.k.fill(-800.0);
    fixture.k[..16].fill(f32::NEG_INFINITY);
    let lse = forward(&Policy::fused_f32(), &fixture.inputs(), SMALL_TILES, &NoProgress).lse[0];
    assert!((lse - (24f64.ln() - 800.0)).abs() < 1e-4);
}

#[test]
fn the_work_reported_is_the_work_announced() {
    let fixture = Fixture::usual();
    let inputs = fixture.inputs();
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let smooth = vec![0.0; g_lse.len()];
    let cotangents = &Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    for policy in all_policies() {
        let counter = Counter::default();
        let lse = forward(&policy, &inputs, SMALL_TILES, &counter).lse;
        assert_eq!(counter.total(), forward_work(&inputs), "{policy:?}");
        let counter = Counter::default();
        backward(&policy, &inputs, &lse, cotangents, SMALL_TILES, &counter, &mut |_| {});
        assert_eq!(counter.total(), backward_work(&inputs), "{policy:?}");
        let counter = Counter::default();
        plane(&policy, &inputs, &lse, cotangents, SMALL_TILES, &counter, &mut |_| {});
        assert_eq!(counter.total(), plane_work(&inputs), "{policy:?}");
    }
}
