//! Tests each rounding point of a policy, against loops over scalars or by itself.

use super::*;
use crate::kernels::matrix::Values;

/// 300 tokens share a label; with q = 1 and g = -1 a bf16 accumulator stops at -256.
#[test]
fn a_bf16_label_scatter_is_a_rounded_sum_in_token_order() {
    let mut fixture = Fixture::new(300, 5, 20, 20);
    fixture.labels.fill(3);
    fixture.g_label.fill(-1.0);
    for token in 0..fixture.tokens {
        fixture.q[token * 5] = 1.0;
    }
    let full = Policy::fused_f32();
    for label_grad in [Precision::F32, Precision::Bf16] {
        let policy = Policy {
            sums: Sums { label_scatter: Sum::of(Precision::Bf16), ..full.sums },
            label_grad,
            ..full
        };
        let (_, _, [_, _, dk_label]) = emulated(&policy, &fixture, &fixture.inputs(), SMALL_TILES);
        let mut wanted = vec![0.0f32; fixture.vocab * 5];
        for token in 0..fixture.tokens {
            for d in 0..5 {
                let addend = label_grad.round(fixture.g_label[token] * fixture.q(token)[d]);
                let sum = &mut wanted[3 * 5 + d];
                *sum = half::bf16::from_f32(*sum + addend).to_f32();
            }
        }
        assert_eq!(dk_label, widened(&wanted));
        assert_eq!(dk_label[15], -256.0, "a bf16 accumulator swamps at 256");
    }
}

/// Each rounding point alone: if it is set all its results must be bf16 numbers, and if not, some
/// must not be.
#[test]
fn every_rounding_point_rounds_where_it_says() {
    let fixture = Fixture::usual();
    let is_bf16 =
        |values: &[f64]| values.iter().all(|&x| f64::from(Precision::Bf16.round(x as f32)) == x);
    let full = Policy::fused_f32();
    let half = Precision::Bf16;
    let run = |policy: Policy| emulated(&policy, &fixture, &fixture.inputs(), SMALL_TILES);
    let (_, plain, _) = run(full);
    assert!(!is_bf16(&plain.dq) && !is_bf16(&plain.dq_lse) && !is_bf16(&plain.dq_label));

    let (_, dq, [dk, lse, label]) = run(Policy { output: half, ..full });
    assert!(is_bf16(&dq.dq) && is_bf16(&dk) && !is_bf16(&lse) && !is_bf16(&label));
    let (_, dq, [dk, lse, label]) = run(Policy { parts: half, ..full });
    assert!(is_bf16(&dq.dq_lse) && is_bf16(&dq.dq_label) && is_bf16(&lse) && is_bf16(&label));
    assert!(
        !is_bf16(&dk)
            && dk.iter().zip(&lse).zip(&label).all(|((s, a), b)| *s as f32 == (a + b) as f32)
    );
    let (_, dq, [_, lse, _]) = run(Policy { tile_add: half, ..full });
    assert!(is_bf16(&dq.dq_lse) && is_bf16(&lse) && !is_bf16(&dq.dq_label));
    // One token of q = 1 and g = 1: the softmax part of dk is p.
    let mut single = Fixture::new(1, 3, 20, 20);
    (single.q, single.g_lse) = (vec![1.0; 3], vec![1.0]);
    let p = |policy| emulated(&policy, &single, &single.inputs(), SMALL_TILES).2[1].clone();
    assert!(is_bf16(&p(Policy { p: half, ..full })) && !is_bf16(&p(full)));
    let log_is_bf16 = |p: Vec<f64>| {
        p.iter().all(|&p| {
            let kept = half.round64(libm::log(p));
            (libm::exp(kept) - p).abs() <= 4.0 * Precision::F32.unit_roundoff() * p
        })
    };
    assert!(log_is_bf16(p(Policy { log_p: half, ..full })) && !log_is_bf16(p(full)));
    let (_, dq, _) = run(Policy { label_grad: half, ..full });
    assert!(is_bf16(&dq.dq_label) && dq.dq_lse == plain.dq_lse);
    let (forward, ..) = run(Policy { logits: half, ..full });
    assert!(is_bf16(&forward.label_logits) && !is_bf16(&forward.lse));
    let (_, plain_dq, _) = run(Policy { output: half, ..Policy::plain_f32() });
    assert!(is_bf16(&plain_dq.dq) && plain_dq.dq_lse.is_empty());
}

/// Rounding the inputs is the same as giving bf16 inputs, and dk of one token with q = 1
/// is that token's dlogits.
#[test]
fn inputs_and_dlogits_are_rounded_before_their_gemms() {
    let fixture = Fixture::usual();
    let (full, half) = (Policy::fused_f32(), Precision::Bf16);
    let bits: Vec<u16> = fixture.k.iter().map(|&k| half::bf16::from_f32(k).to_bits()).collect();
    let mut narrow = fixture.clone();
    narrow.q.iter_mut().for_each(|q| *q = half.round(*q));
    let mut inputs = narrow.inputs();
    inputs.k.values = Values::Bf16(&bits);
    let rounded =
        emulated(&Policy { input: half, ..full }, &fixture, &fixture.inputs(), SMALL_TILES);
    assert!(rounded == emulated(&full, &narrow, &inputs, SMALL_TILES));
    let mut single = Fixture::new(1, 3, 20, 20);
    single.q.fill(1.0);
    for path in [Path::Plain, Path::Fused] {
        let policy = Policy { path, dlogits: half, ..full };
        let (_, _, [dk, lse, _]) = emulated(&policy, &single, &single.inputs(), SMALL_TILES);
        assert!(
            if path == Path::Plain { &dk } else { &lse }
                .iter()
                .all(|&x| f64::from(half.round(x as f32)) == x),
            "{path:?}"
        );
    }
}
