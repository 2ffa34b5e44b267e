//! Tests the reference against loops over scalars, and its edge cases.

mod closed_forms;
mod differences;
mod handed;
mod naive;
mod options;
mod policy_loss;

use super::*;
use crate::kernels::fixture::{Counter, Fixture, SMALL_TILES, with_threads};
use crate::kernels::matrix::{Cotangents, IGNORED};
use crate::kernels::tiles::{NoProgress, Progress, Tiles};
use crate::kernels::transform::Transform;
use naive::{naive, naive_backward};

const NOISE: TermNoise = TermNoise {
    p_rel_var: 0.25,
    logit_rel_var: 0.5,
    dot_rel_var: 2.0,
    logit_floor: 0.03125,
    cap_rel_var: 0.125,
    label_step: 0.0,
    filter: 0.0,
    whole: false,
    exp_rel_var: 0.0625,
    confident: 0.05,
    log_p_rel_var: 0.01,
};

/// The label's part is rounded with its entry.
const WHOLE: TermNoise = TermNoise { whole: true, ..NOISE };

/// All the dk blocks put together.
#[derive(Debug, Default, PartialEq)]
struct Dk {
    lse: Vec<f64>,
    label: Vec<f64>,
    lse_var: Vec<f64>,
    lse_sq: Vec<f64>,
    label_sq: Vec<f64>,
    label_var: Vec<f64>,
    dropped: Vec<f64>,
    confident: Vec<f64>,
    label_whole: Vec<f64>,
    hits: Vec<u32>,
    bias_lse: Vec<f64>,
    bias_label: Vec<f64>,
    bias_var: Vec<f64>,
    bias_sq: Vec<f64>,
}

/// The values of the plane, put together to `[T, V]` each.
#[derive(Debug, Default, PartialEq)]
struct Plane {
    logits: Vec<f64>,
    logits_var: Vec<f64>,
    dlogits: Vec<f64>,
    dlogits_var: Vec<f64>,
}

fn run(fixture: &Fixture, lse: &[f64], tiles: Tiles) -> (Backward, Dk) {
    run_with(fixture, lse, &NOISE, tiles, &NoProgress)
}

fn run_with(
    fixture: &Fixture,
    lse: &[f64],
    noise: &TermNoise,
    tiles: Tiles,
    progress: &dyn Progress,
) -> (Backward, Dk) {
    run_on(&fixture.inputs(), fixture, (lse, noise), (tiles, progress))
}

/// The backward of a head that has the cotangents of a fixture.
fn run_on(
    inputs: &HeadInputs,
    fixture: &Fixture,
    (lse, noise): (&[f64], &TermNoise),
    (tiles, progress): (Tiles, &dyn Progress),
) -> (Backward, Dk) {
    let mut dk = Dk::default();
    let mut next = 0;
    let owned = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
    let cotangents = Cotangents { lse: &owned[0], label: &owned[1], smooth: &owned[2] };
    let mut collect = |block: DkBlock| {
        assert_eq!(block.rows.start, next);
        next = block.rows.end;
        for (all, part) in [
            (&mut dk.lse, block.dk_lse),
            (&mut dk.label, block.dk_label),
            (&mut dk.lse_var, block.dk_lse_var),
            (&mut dk.lse_sq, block.dk_lse_sq),
            (&mut dk.label_sq, block.dk_label_sq),
            (&mut dk.label_var, block.dk_label_var),
            (&mut dk.dropped, block.dk_dropped),
            (&mut dk.confident, block.dk_confident),
            (&mut dk.label_whole, block.dk_label_whole),
            (&mut dk.bias_lse, block.dbias_lse),
            (&mut dk.bias_label, block.dbias_label),
            (&mut dk.bias_var, block.dbias_var),
            (&mut dk.bias_sq, block.dbias_sq),
        ] {
            all.extend(part);
        }
        dk.hits.extend(block.hits);
    };
    let walking = (tiles, Keep::Both, progress);
    let dq = backward(inputs, lse, &cotangents, noise, walking, &mut collect);
    assert_eq!(next, fixture.vocab);
    (dq, dk)
}

fn run_plane(fixture: &Fixture, lse: &[f64], tiles: Tiles, progress: &dyn Progress) -> Plane {
    let size = fixture.tokens * fixture.vocab;
    let unseen = || vec![f64::NAN; size];
    let mut all =
        Plane { logits: unseen(), logits_var: unseen(), dlogits: unseen(), dlogits_var: unseen() };
    let owned = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
    let cotangents = Cotangents { lse: &owned[0], label: &owned[1], smooth: &owned[2] };
    let mut seen = 0;
    let mut collect = |tile: PlaneTile| {
        let width = tile.cols.len();
        for (target, part) in [
            (&mut all.logits, tile.logits),
            (&mut all.logits_var, tile.logits_var),
            (&mut all.dlogits, tile.dlogits),
            (&mut all.dlogits_var, tile.dlogits_var),
        ] {
            assert_eq!(part.len(), tile.tokens.len() * width);
            for (t, row) in tile.tokens.clone().zip(part.chunks(width)) {
                let first = t * fixture.vocab + tile.cols.start;
                target[first..first + width].copy_from_slice(row);
            }
        }
        seen += tile.logits.len();
    };
    plane(&fixture.inputs(), lse, &cotangents, &NOISE, tiles, progress, &mut collect);
    assert_eq!(seen, size, "every place of the plane is lent once");
    all
}

/// The largest sum of magnitudes of one logit, or the mask if that is larger.
fn logit_size(fixture: &Fixture) -> f64 {
    let pairs = (0..fixture.tokens).flat_map(|t| (0..fixture.valid).map(move |v| (t, v)));
    let sizes = pairs.map(|(t, v)| naive::cell(fixture, &NOISE, t, v).size);
    sizes
        .chain(fixture.mask.filter(|mask| mask.is_finite()))
        .fold(0.0, |max, size| max.max(size.abs()))
}

/// Both sides err by at most this, relative to the sum of the magnitudes they add.
///
/// A logit errs by `(D + 8) u S`, S the sum of its magnitudes: D products and sums, then
/// bias, scale, and tanh and its argument, each within 2 u. lse errs by that, by n u for
/// its sum and by u |lse|; both errors are relative ones of p. `1 - tanh²` has the
/// relative derivative `2 tanh / softcap`. A sum of n terms adds n u, and exp, log,
/// cosh and the products 16 u.
fn relative_bound(fixture: &Fixture) -> f64 {
    let u = f64::powi(2.0, -53);
    let size = logit_size(fixture);
    let n = fixture.vocab.max(fixture.tokens) as f64;
    let logit = (fixture.depth + 8) as f64 * u * size;
    let lse = logit + (n + size + n.ln() + 4.0) * u;
    let slope = 2.0 * logit / fixture.transform.softcap.unwrap_or(f64::INFINITY);
    2.0 * (logit + lse + slope + (n + 16.0) * u)
}

/// What sums of squares err by, relatively, where they are multiplied in f32: both factors are
/// rounded, and so is a sum without signs.
fn squares_bound(fixture: &Fixture) -> f64 {
    if fixture.depth < WIDE {
        return 0.0;
    }
    let n = fixture.vocab.max(fixture.tokens) as f64;
    (n + 4.0) * f64::powi(2.0, -24)
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

/// Compares all results of the reference with the loops.
fn assert_is_naive(fixture: &Fixture, noise: &TermNoise, tiles: Tiles) {
    let (wanted, _) = naive(fixture);
    let got = forward(&fixture.inputs(), tiles, &NoProgress);
    let bound = relative_bound(fixture);
    let size = 1.0 + logit_size(fixture);
    assert_close("lse", &got.lse, &wanted.lse, |_| size, bound);
    assert_close("label_logits", &got.label_logits, &wanted.label_logits, |_| size, bound);
    assert_close("row_max", &got.row_max, &wanted.row_max, |_| size, bound);
    let sum = fixture.valid as f64 * size;
    assert_close("logit_sum", &got.logit_sum, &wanted.logit_sum, |_| sum, bound);
    let squares = (&got.logit_squares, &wanted.logit_squares);
    assert_close("logit_squares", squares.0, squares.1, |_| sum * size, 2.0 * bound);

    let (dq, dk) = run_with(fixture, &wanted.lse, noise, tiles, &NoProgress);
    let [(wanted_dq, wanted_dk), (dq_size, dk_size)] = naive_backward(fixture, noise, &wanted.lse);
    for (what, got, wanted, size) in [
        ("dq_lse", &dq.dq_lse, &wanted_dq.dq_lse, &dq_size.dq_lse),
        ("dq_label", &dq.dq_label, &wanted_dq.dq_label, &dq_size.dq_label),
        ("dq_dropped", &dq.dq_dropped, &wanted_dq.dq_dropped, &dq_size.dq_dropped),
        ("dq_confident", &dq.dq_confident, &wanted_dq.dq_confident, &dq_size.dq_confident),
        ("dk_confident", &dk.confident, &wanted_dk.confident, &dk_size.confident),
        ("dk_label_whole", &dk.label_whole, &wanted_dk.label_whole, &dk_size.label_whole),
        ("dk_lse", &dk.lse, &wanted_dk.lse, &dk_size.lse),
        ("dk_label", &dk.label, &wanted_dk.label, &dk_size.label),
        ("dk_dropped", &dk.dropped, &wanted_dk.dropped, &dk_size.dropped),
        ("dbias_lse", &dk.bias_lse, &wanted_dk.bias_lse, &dk_size.bias_lse),
        ("dbias_label", &dk.bias_label, &wanted_dk.bias_label, &dk_size.bias_label),
    ] {
        assert_close(what, got, wanted, |i| size[i], bound);
    }
    // The squares are products of up to four such factors, among them tanh⁴.
    let squares = 4.0 * bound + squares_bound(fixture);
    for (what, got, wanted, size) in [
        ("dq_lse_sq", &dq.dq_lse_sq, &wanted_dq.dq_lse_sq, &dq_size.dq_lse_sq),
        ("dq_lse_var", &dq.dq_lse_var, &wanted_dq.dq_lse_var, &dq_size.dq_lse_var),
        ("dk_lse_sq", &dk.lse_sq, &wanted_dk.lse_sq, &dk_size.lse_sq),
        ("dk_lse_var", &dk.lse_var, &wanted_dk.lse_var, &dk_size.lse_var),
    ] {
        assert_close(what, got, wanted, |i| size[i], squares);
    }
    for (what, got, wanted, size) in [
        ("dq_label_var", &dq.dq_label_var, &wanted_dq.dq_label_var, &dq_size.dq_label_var),
        (
            "dq_label_rel_var",
            &dq.dq_label_rel_var,
            &wanted_dq.dq_label_rel_var,
            &dq_size.dq_label_rel_var,
        ),
        ("dk_label_sq", &dk.label_sq, &wanted_dk.label_sq, &dk_size.label_sq),
        ("dk_label_var", &dk.label_var, &wanted_dk.label_var, &dk_size.label_var),
        ("dbias_sq", &dk.bias_sq, &wanted_dk.bias_sq, &dk_size.bias_sq),
        ("dbias_var", &dk.bias_var, &wanted_dk.bias_var, &dk_size.bias_var),
    ] {
        assert_close(what, got, wanted, |i| size[i], 4.0 * bound);
    }
    assert_eq!(dk.hits, wanted_dk.hits);
    // 1 - p of a confident token cancels: its error is relative to 1 and p, not to their
    // difference.
    let share = |t: usize| 1.0 + wanted_dq.dq_label_share[t] + dq_size.dq_label_share[t];
    let (got, wanted) = (&dq.dq_label_share, &wanted_dq.dq_label_share);
    assert_close("dq_label_share", got, wanted, share, 8.0 * bound);
}

/// Compares the plane with the loops.
fn assert_plane_is_naive(fixture: &Fixture, lse: &[f64], tiles: Tiles) {
    let got = run_plane(fixture, lse, tiles, &NoProgress);
    let bound = relative_bound(fixture);
    let close = |what: &str, got: f64, wanted: f64, allowed: f64| {
        assert!((got - wanted).abs() <= allowed, "{what}: {got} is not {wanted} within {allowed}");
    };
    for i in 0..fixture.tokens * fixture.vocab {
        let (t, v) = (i / fixture.vocab, i % fixture.vocab);
        if v >= fixture.valid {
            assert_eq!(got.logits[i], fixture.mask.unwrap_or(f64::NEG_INFINITY));
            assert_eq!([got.logits_var[i], got.dlogits[i], got.dlogits_var[i]], [0.0; 3]);
            continue;
        }
        let cell = naive::cell(fixture, &NOISE, t, v);
        let [entry, size] = naive::entries(fixture, &NOISE, lse, t, v);
        close("logits", got.logits[i], cell.logit, bound * cell.size);
        close("logits_var", got.logits_var[i], cell.var, 4.0 * bound * cell.var_size);
        close("dlogits", got.dlogits[i], entry.total, bound * size.total);
        close("dlogits_var", got.dlogits_var[i], entry.total_var, 4.0 * bound * size.total_var);
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
        (22, WIDE, 61, 57, SMALL_TILES),
        (1, WIDE, 33, 1, SMALL_TILES),
        (150, WIDE + 3, 301, 290, wide),
    ];
    for (tokens, depth, vocab, valid, tiles) in sizes {
        let fixture = Fixture::new(tokens, depth, vocab, valid);
        assert_is_naive(&fixture, &NOISE, tiles);
        assert_is_naive(&fixture, &WHOLE, tiles);
    }
}

/// Every option at once, softcap last.
fn with_options(mut fixture: Fixture) -> Fixture {
    fixture.transform = Transform { scale: 0.7, softcap: Some(2.5), ..Transform::NONE };
    fixture.mask = Some(-0.4);
    fixture.with_bias().with_smoothing()
}

#[test]
fn the_thread_count_changes_no_bit() {
    let plain = Fixture::new(300, 70, 290, 281);
    let tiles = Tiles { tokens: 150, vocab: 140 };
    let noise = TermNoise { filter: 1e-3, ..NOISE };
    for fixture in [&plain, &with_options(plain.clone()), &with_options(plain.clone()).with_given()]
    {
        let all = |threads| {
            with_threads(threads, || {
                let result = forward(&fixture.inputs(), tiles, &NoProgress);
                let gradients = run_with(fixture, &result.lse, &noise, tiles, &NoProgress);
                let plane = run_plane(fixture, &result.lse, tiles, &NoProgress);
                (result, gradients, plane)
            })
        };
        let on_one_thread = all(1);
        assert!(on_one_thread == all(2) && on_one_thread == all(3));
    }
}

/// From a depth of 1024 on gemm sums a single row in another order: without padding this test
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
    let plain = Fixture::usual();
    for mut fixture in [plain.clone(), with_options(plain)] {
        let result = forward(&fixture.inputs(), SMALL_TILES, &NoProgress);
        let clean = run(&fixture, &result.lse, SMALL_TILES);
        let plane = run_plane(&fixture, &result.lse, SMALL_TILES, &NoProgress);
        fixture.k[fixture.valid * fixture.depth..].fill(f32::NAN);
        assert_eq!(forward(&fixture.inputs(), SMALL_TILES, &NoProgress), result);
        let poisoned = run(&fixture, &result.lse, SMALL_TILES);
        assert!(clean == poisoned);
        assert!(plane == run_plane(&fixture, &result.lse, SMALL_TILES, &NoProgress));
        assert!(poisoned.1.lse[fixture.valid * fixture.depth..].iter().all(|&x| x == 0.0));
        assert!(poisoned.1.bias_lse[fixture.valid..].iter().all(|&x| x == 0.0));
    }
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

/// Goal: a token that stands for many counts them in the variances and squares that dk is judged
/// by, since errors of equal tokens are equal, and in no sum of the gradients.
#[test]
fn copies_of_a_token_weigh_its_squares_and_leave_the_gradients() {
    let fixture = Fixture::usual().with_bias();
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let owned = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
    let cotangents = Cotangents { lse: &owned[0], label: &owned[1], smooth: &owned[2] };
    let all = |copies: Option<&[f64]>| {
        let inputs = HeadInputs { copies, ..fixture.inputs() };
        let (mut sums, mut weighed) = (Vec::new(), Vec::new());
        let mut on_dk = |block: DkBlock| {
            sums.extend([block.dk_lse, block.dk_label, block.dbias_lse].concat());
            weighed.extend([block.dk_lse_sq, block.dk_lse_var].concat());
            weighed.extend([block.dbias_sq, block.dbias_var].concat());
        };
        let walking = (SMALL_TILES, Keep::Both, &NoProgress as &dyn Progress);
        let dq = backward(&inputs, &lse, &cotangents, &NOISE, walking, &mut on_dk);
        sums.extend([dq.dq_lse, dq.dq_label].concat());
        weighed.extend([dq.dq_lse_sq, dq.dq_lse_var].concat());
        (sums, weighed)
    };
    // A power of two multiplies exactly.
    let (single, four) = (all(None), all(Some(&vec![4.0; fixture.tokens])));
    assert_eq!(single.0, four.0);
    assert_eq!(single.1.iter().map(|x| 4.0 * x).collect::<Vec<f64>>(), four.1);
    assert!(single.1.iter().any(|&x| x > 0.0));
}

/// A captured lse that is 200 too high: (g p)^2 is about e^-413, below every f32.
#[test]
fn squares_of_tiny_terms_keep_every_addend() {
    for fixture in [Fixture::usual(), Fixture::new(22, WIDE, 61, 57)] {
        let (exact, _) = naive(&fixture);
        let high: Vec<f64> = exact.lse.iter().map(|lse| lse + 200.0).collect();
        let (dq, dk) = run(&fixture, &high, SMALL_TILES);
        let [(dq_wanted, dk_wanted), _] = naive_backward(&fixture, &NOISE, &high);
        // The argument of exp is 200 larger, and so is its rounding.
        let bound = 4.0 * (relative_bound(&fixture) + 400.0 * f64::powi(2.0, -53));
        let pairs = [(&dq.dq_lse_sq, &dq_wanted.dq_lse_sq), (&dk.lse_sq, &dk_wanted.lse_sq)];
        for (got, wanted) in pairs {
            assert!(wanted.iter().any(|&x| x > 0.0 && x < 1e-100));
            assert_close("squares", got, wanted, |i| wanted[i], bound + squares_bound(&fixture));
        }
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

/// A first tile with only -inf, then logits so far from 0 that exp overflows.
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
    for fixture in [Fixture::usual(), with_options(Fixture::usual()).with_given()] {
        let inputs = fixture.inputs();
        let counter = Counter::default();
        let lse = forward(&inputs, SMALL_TILES, &counter).lse;
        assert!(counter.total() > 0);
        assert_eq!(counter.total(), forward_work(&inputs));
        let counter = Counter::default();
        run_with(&fixture, &lse, &NOISE, SMALL_TILES, &counter);
        assert_eq!(counter.total(), backward_work(&inputs));
        let counter = Counter::default();
        run_plane(&fixture, &lse, SMALL_TILES, &counter);
        assert_eq!(counter.total(), forward_work(&inputs));
    }
}
