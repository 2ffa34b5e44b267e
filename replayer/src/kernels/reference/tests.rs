//! The reference against a triple loop and against finite differences.

mod naive;

use super::*;
use crate::kernels::fixture::{Counter, Fixture, SMALL_TILES, with_threads};
use crate::kernels::matrix::{Cotangents, IGNORED, Values};
use crate::kernels::tiles::NoProgress;
use naive::{naive, naive_backward};

const NOISE: TermNoise = TermNoise {
    p_rel_var: 0.25,
    logit_rel_var: 0.5,
    dot_rel_var: 2.0,
    cap_rel_var: 0.125,
    filter: 0.0,
};

/// All the dk blocks put together.
#[derive(Debug, Default, PartialEq)]
struct Dk {
    lse: Vec<f64>,
    label: Vec<f64>,
    lse_var: Vec<f64>,
    lse_sq: Vec<f64>,
    label_sq: Vec<f64>,
    hits: Vec<u32>,
}

fn run(fixture: &Fixture, lse: &[f64], tiles: Tiles) -> (Backward, Dk) {
    let mut dk = Dk::default();
    let mut next = 0;
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let mut collect = |block: DkBlock| {
        assert_eq!(block.rows.start, next);
        next = block.rows.end;
        dk.lse.extend_from_slice(block.dk_lse);
        dk.label.extend_from_slice(block.dk_label);
        dk.lse_var.extend_from_slice(block.dk_lse_var);
        dk.lse_sq.extend_from_slice(block.dk_lse_sq);
        dk.label_sq.extend_from_slice(block.dk_label_sq);
        dk.hits.extend_from_slice(block.hits);
    };
    let inputs = fixture.inputs();
    let smooth = vec![0.0; fixture.tokens];
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    let dq = backward(&inputs, lse, &cotangents, &NOISE, tiles, &NoProgress, &mut collect);
    assert_eq!(next, fixture.vocab);
    (dq, dk)
}

/// Both sides err by at most this, relative to the sum of the magnitudes they add:
/// (D + 1) u max sum|q||k| through the logit, twice (logit and lse), then n u for the
/// sums over at most `n` terms, a few u for exp and the products.
fn relative_bound(fixture: &Fixture) -> f64 {
    let u = f64::powi(2.0, -53);
    let magnitudes = (0..fixture.tokens)
        .flat_map(|t| (0..fixture.valid).map(move |v| fixture.dot_magnitude(t, v)));
    let dot = magnitudes.fold(0.0, f64::max);
    let n = fixture.valid.max(fixture.tokens) as f64;
    2.0 * u * (2.0 * (fixture.depth + 1) as f64 * dot + 4.0 * dot + 2.0 * n + 16.0)
}

fn assert_close(
    what: &str,
    got: &[f64],
    wanted: &[f64],
    magnitude: impl Fn(usize) -> f64,
    bound: f64,
) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (index, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let allowed = bound * magnitude(index);
        assert!(
            (got - wanted).abs() <= allowed,
            "{what}[{index}]: {got} is not {wanted} within {allowed}"
        );
    }
}

#[test]
fn the_reference_is_what_loops_over_scalars_give() {
    // The wide tiles make GEMMs of several row blocks.
    let wide = Tiles { tokens: 140, vocab: 131 };
    let sizes = [
        (22, 13, 61, 57, SMALL_TILES),
        (1, 5, 40, 40, SMALL_TILES),
        (7, 1, 33, 1, SMALL_TILES),
        (150, 6, 301, 290, wide),
    ];
    for (tokens, depth, vocab, valid, tiles) in sizes {
        let fixture = Fixture::new(tokens, depth, vocab, valid);
        let (wanted, logits) = naive(&fixture);
        let got = forward(&fixture.inputs(), tiles, &NoProgress);
        let bound = relative_bound(&fixture);
        let scale = |t: usize| 1.0 + wanted.lse[t].abs() + wanted.row_max[t].abs();
        assert_close("lse", &got.lse, &wanted.lse, scale, bound);
        assert_close("label_logits", &got.label_logits, &wanted.label_logits, |_| 1.0, bound);
        assert_close("row_max", &got.row_max, &wanted.row_max, |_| 1.0, bound);

        let (dq, dk) = run(&fixture, &wanted.lse, tiles);
        let (dq_wanted, dk_wanted) = naive_backward(&fixture, &wanted.lse, &logits);
        // sqrt(n sum of squares) bounds the sum of magnitudes (Cauchy-Schwarz).
        let n = valid.max(tokens) as f64;
        let dq_size = |i: usize| (n * dq_wanted.dq_lse_sq[i]).sqrt();
        let dk_size = |i: usize| (n * dk_wanted.lse_sq[i]).sqrt();
        assert_close("dq_lse", &dq.dq_lse, &dq_wanted.dq_lse, dq_size, bound);
        assert_close("dk_lse", &dk.lse, &dk_wanted.lse, dk_size, bound);
        let dk_label_size = |i: usize| (n * dk_wanted.label_sq[i]).sqrt();
        assert_close("dk_label", &dk.label, &dk_wanted.label, dk_label_size, bound);
        assert_close("dq_label", &dq.dq_label, &dq_wanted.dq_label, |_| 0.0, bound);
        // Sums of positive terms: relative to themselves, p twice.
        for (what, got, wanted) in [
            ("dq_lse_sq", &dq.dq_lse_sq, &dq_wanted.dq_lse_sq),
            ("dq_lse_var", &dq.dq_lse_var, &dq_wanted.dq_lse_var),
            ("dk_lse_sq", &dk.lse_sq, &dk_wanted.lse_sq),
            ("dk_lse_var", &dk.lse_var, &dk_wanted.lse_var),
            ("dk_label_sq", &dk.label_sq, &dk_wanted.label_sq),
        ] {
            assert_close(what, got, wanted, |i| wanted[i], 4.0 * bound);
        }
        assert_eq!(dk.hits, dk_wanted.hits);
    }
}

/// The loss whose gradient the backward pass claims to give.
fn loss(fixture: &Fixture, q: &[f64], k: &[f64]) -> f64 {
    let mut inputs = fixture.inputs();
    inputs.q.values = Values::F64(q);
    inputs.k.values = Values::F64(k);
    let result = forward(&inputs, SMALL_TILES, &NoProgress);
    let term = |t: usize| {
        f64::from(fixture.g_lse[t]) * result.lse[t]
            + f64::from(fixture.g_label[t]) * result.label_logits[t]
    };
    (0..fixture.tokens).map(term).sum()
}

#[test]
fn gradients_are_central_differences_of_the_loss() {
    let fixture = Fixture::usual();
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let (dq, dk) = run(&fixture, &lse, SMALL_TILES);
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (q, k) = (wide(&fixture.q), wide(&fixture.k));
    let step = 1e-4;
    // Third derivatives of lse are third cumulants, at most (range of k, or of q)^3;
    // beside them the rounding of two losses divided by the step.
    let g: f64 = fixture.g_lse_f64().iter().sum();
    let range = 2.0 * q.iter().chain(&k).fold(0.0f64, |max, x| max.max(x.abs()));
    let bound =
        g * range.powi(3) * step * step / 6.0 + relative_bound(&fixture) * g * range * 20.0 / step;
    let difference = |in_q: bool, index: usize| {
        let at = |offset: f64| {
            let (mut q, mut k) = (q.clone(), k.clone());
            if in_q {
                q[index] += offset
            } else {
                k[index] += offset
            }
            loss(&fixture, &q, &k)
        };
        (at(step) - at(-step)) / (2.0 * step)
    };
    for index in 0..q.len() {
        let gradient = dq.dq_lse[index] + dq.dq_label[index];
        assert!((gradient - difference(true, index)).abs() <= bound, "dq[{index}]");
    }
    for index in 0..k.len() {
        let gradient = dk.lse[index] + dk.label[index];
        assert!((gradient - difference(false, index)).abs() <= bound, "dk[{index}]");
    }
    let largest = dk.lse.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    assert!(largest > 100.0 * bound, "the bound is far below the gradient it checks");
}

#[test]
fn the_thread_count_changes_no_bit() {
    let fixture = Fixture::new(300, 70, 290, 281);
    let tiles = Tiles { tokens: 150, vocab: 140 };
    let all = |threads| {
        with_threads(threads, || {
            let result = forward(&fixture.inputs(), tiles, &NoProgress);
            let gradients = run(&fixture, &result.lse, tiles);
            (result, gradients)
        })
    };
    let one = all(1);
    assert!(one == all(2) && one == all(3));
}

/// From a depth of 1024 on gemm sums a lone row differently: without padding this
/// fails.
#[test]
fn a_token_has_the_same_bits_alone_as_among_others() {
    let fixture = Fixture::new(3, 2048, 300, 300);
    let tiled = |tokens| {
        let tiles = Tiles { tokens, vocab: 300 };
        forward(&fixture.inputs(), tiles, &NoProgress)
    };
    assert!(tiled(1) == tiled(3));
}

#[test]
fn the_padded_vocabulary_is_never_read_and_gets_zero_gradients() {
    let mut fixture = Fixture::usual();
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let clean = run(&fixture, &lse, SMALL_TILES);
    fixture.k[fixture.valid * fixture.depth..].fill(f32::NAN);
    assert_eq!(forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse, lse);
    let poisoned = run(&fixture, &lse, SMALL_TILES);
    assert!(clean == poisoned);
    assert!(poisoned.1.lse[fixture.valid * fixture.depth..].iter().all(|&x| x == 0.0));
}

#[test]
fn ignored_tokens_give_nothing_and_get_nothing() {
    let fixture = Fixture::usual();
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let (dq, _) = run(&fixture, &lse, SMALL_TILES);
    let ignored = fixture.labels.iter().position(|&label| label == IGNORED).unwrap();
    let row = ignored * fixture.depth..(ignored + 1) * fixture.depth;
    assert!(dq.dq_lse[row.clone()].iter().chain(&dq.dq_label[row]).all(|&x| x == 0.0));
}

/// A captured lse that is 200 too high: (g p)^2 is about e^-413, below every f32.
#[test]
fn squares_of_tiny_terms_keep_every_addend() {
    let fixture = Fixture::usual();
    let (exact, logits) = naive(&fixture);
    let high: Vec<f64> = exact.lse.iter().map(|lse| lse + 200.0).collect();
    let (dq, dk) = run(&fixture, &high, SMALL_TILES);
    let (dq_wanted, dk_wanted) = naive_backward(&fixture, &high, &logits);
    let pairs = [(&dq.dq_lse_sq, &dq_wanted.dq_lse_sq), (&dk.lse_sq, &dk_wanted.lse_sq)];
    for (got, wanted) in pairs {
        assert!(wanted.iter().any(|&x| x > 0.0 && x < 1e-100));
        assert_close("squares", got, wanted, |i| wanted[i], 1e-9);
    }
}

#[test]
fn nan_and_infinity_propagate_and_an_empty_vocabulary_is_no_panic() {
    let mut fixture = Fixture::usual();
    fixture.q[0] = f32::NAN;
    fixture.q[fixture.depth] = f32::INFINITY;
    let result = forward(&fixture.inputs(), SMALL_TILES, &NoProgress);
    assert!(result.lse[0].is_nan());
    assert_eq!(result.lse[1], f64::INFINITY);
    assert!(result.lse[2].is_finite());
    let (dq, dk) = run(&fixture, &result.lse, SMALL_TILES);
    assert!(dq.dq_lse[..2 * fixture.depth].iter().all(|x| x.is_nan()));
    assert!(dq.dq_lse[2 * fixture.depth..].iter().all(|x| x.is_finite()));
    assert!(dk.lse[..fixture.valid * fixture.depth].iter().all(|x| x.is_nan()));

    let mut empty = Fixture::usual();
    empty.valid = 0;
    empty.labels.fill(IGNORED);
    let result = forward(&empty.inputs(), SMALL_TILES, &NoProgress);
    assert!(result.lse.iter().all(|&lse| lse == f64::NEG_INFINITY));
    let (dq, _) = run(&empty, &result.lse, SMALL_TILES);
    assert!(dq.dq_lse.iter().all(|&x| x == 0.0));
}

/// A first tile of -inf alone, then logits whose distance from 0 overflows exp.
#[test]
fn a_tile_without_any_finite_logit_leaves_the_sum_as_it_was() {
    let mut fixture = Fixture::new(1, 1, 40, 40);
    fixture.q[0] = 1.0;
    fixture.k.fill(-800.0);
    fixture.k[..16].fill(f32::NEG_INFINITY);
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse[0];
    assert!((lse - (24f64.ln() - 800.0)).abs() < 1e-12);
}

#[test]
fn the_work_reported_is_the_work_announced() {
    let fixture = Fixture::usual();
    let inputs = fixture.inputs();
    let counter = Counter::default();
    let lse = forward(&inputs, SMALL_TILES, &counter).lse;
    assert_eq!(counter.total(), forward_work(&inputs));
    let counter = Counter::default();
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let smooth = vec![0.0; fixture.tokens];
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    backward(&inputs, &lse, &cotangents, &NOISE, SMALL_TILES, &counter, &mut |_| {});
    assert_eq!(counter.total(), backward_work(&inputs));
}
