//! Tests heads whose results are known in closed form.
//!
//! Bounds: logits are exact or a rounding away, so lse errs by the n + 4 roundings of its
//! sum and log, and an entry by that and the few of its own.

use super::*;
use crate::kernels::matrix::{HeadInputs, Matrix, Values};

const U: f64 = 1.1102230246251565e-16;

/// A head of given logits, row-major, with the same cotangents for all tokens.
struct Head {
    logits: Vec<f64>,
    labels: Vec<u32>,
    vocab: usize,
    valid: usize,
    bias: Option<Vec<f64>>,
    transform: Transform,
    mask: Option<f64>,
}

impl Head {
    fn new(labels: &[u32], logits: &[f64]) -> Self {
        let vocab = logits.len() / labels.len();
        Head {
            logits: logits.to_vec(),
            labels: labels.to_vec(),
            vocab,
            valid: vocab,
            bias: None,
            transform: Transform::NONE,
            mask: None,
        }
    }

    fn inputs(&self) -> HeadInputs<'_> {
        let tokens = self.labels.len();
        let matrix = |rows, cols, values| Matrix { rows, cols, values: Values::F64(values) };
        let empty = |rows| matrix(rows, 0, &[]);
        HeadInputs {
            bias: self.bias.as_deref(),
            given: Some(matrix(tokens, self.vocab, &self.logits)),
            transform: self.transform,
            mask: self.mask,
            ..HeadInputs::plain(empty(tokens), empty(self.vocab), &self.labels, self.valid)
        }
    }

    fn forward(&self) -> Forward {
        forward(&self.inputs(), SMALL_TILES, &NoProgress)
    }

    /// dlogits `[T, V]` with the cotangents `[lse, label, smooth]` of every token.
    fn dlogits(&self, cotangents: [f64; 3]) -> Vec<f64> {
        let tokens = self.labels.len();
        let lse = self.forward().lse;
        let [dense, label, smooth] = cotangents.map(|c| vec![c; tokens]);
        let cotangents = Cotangents { lse: &dense, label: &label, smooth: &smooth };
        let wide = Tiles { tokens, vocab: self.vocab };
        let mut dlogits = Vec::new();
        let mut collect = |tile: PlaneTile| dlogits.extend_from_slice(tile.dlogits);
        plane(&self.inputs(), &lse, &cotangents, &NOISE, wide, &NoProgress, &mut collect);
        dlogits
    }
}

fn assert_near(what: &str, got: f64, wanted: f64, allowed: f64) {
    assert!((got - wanted).abs() <= allowed, "{what}: {got} is not {wanted} within {allowed}");
}

#[test]
fn uniform_logits_give_log_k_and_one_over_k_less_the_label() {
    let (vocab, logit, g) = (37, -2.5, 0.3);
    let head = Head::new(&[5, 36], &vec![logit; 2 * vocab]);
    let n = vocab as f64;
    let bound = (n + 8.0) * U;
    let result = head.forward();
    for t in 0..2 {
        assert_near("lse", result.lse[t], logit + n.ln(), 4.0 * bound);
        assert_near("logit_sum", result.logit_sum[t], n * logit, bound * n * 2.5);
        assert_eq!((result.row_max[t], result.label_logits[t]), (logit, logit));
    }
    for (i, dlogit) in head.dlogits([g, -g, 0.0]).into_iter().enumerate() {
        let label = head.labels[i / vocab] as usize == i % vocab;
        let wanted = g * (1.0 / n - f64::from(u8::from(label)));
        assert_near("dlogits", dlogit, wanted, 8.0 * bound * g);
    }
}

#[test]
fn a_softmax_of_two_classes_is_a_sigmoid() {
    for x in [-30.0, -3.0, -0.1, 0.0, 0.7, 5.0, 40.0f64] {
        let head = Head::new(&[1], &[0.0, x]);
        let sigmoid = 1.0 / (1.0 + (-x).exp());
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let bound = (16.0 + x.abs()) * U;
        assert_near("lse", head.forward().lse[0], softplus, bound);
        let dlogits = head.dlogits([1.0, -1.0, 0.0]);
        assert_near("label", dlogits[1], sigmoid - 1.0, 4.0 * bound);
        assert_near("other", dlogits[0], 1.0 / (1.0 + x.exp()), 4.0 * bound);
    }
}

#[test]
fn a_bias_alike_for_all_columns_moves_lse_and_no_gradient() {
    let (vocab, shift) = (23, 11.0);
    let logits: Vec<f64> = (0..3 * vocab).map(|i| (i as f64).sin() * 4.0).collect();
    let plain = Head::new(&[0, 7, 22], &logits);
    let moved = Head { bias: Some(vec![shift; vocab]), ..Head::new(&[0, 7, 22], &logits) };
    let bound = (vocab as f64 + 4.0 * shift + 16.0) * U;
    for (lse, base) in moved.forward().lse.iter().zip(plain.forward().lse) {
        assert_near("lse", *lse, base + shift, bound);
    }
    for (a, b) in moved.dlogits([0.8, -0.5, 0.1]).iter().zip(plain.dlogits([0.8, -0.5, 0.1])) {
        assert_near("dlogits", *a, b, 4.0 * bound);
    }
}

/// Without z-loss and softcap a token's upstream `c.lse p + c.label + c.smooth` sums to
/// 0 where the cotangents do; smoothing's K terms take the place of a part of the label.
#[test]
fn every_row_of_dlogits_sums_to_zero_without_z_loss_and_softcap() {
    let (vocab, smoothing, g) = (41, 0.1, 0.7);
    let logits: Vec<f64> = (0..4 * vocab).map(|i| (i as f64 * 1.3).sin() * 6.0).collect();
    let mut head = Head::new(&[3, 0, 40, 12], &logits);
    head.transform.scale = 0.4;
    let cotangents = [g, -g * (1.0 - smoothing), -g * smoothing / vocab as f64];
    let dlogits = head.dlogits(cotangents);
    for row in dlogits.chunks(vocab) {
        let size: f64 = row.iter().map(|x| x.abs()).sum();
        assert_near("sum", row.iter().sum(), 0.0, (2.0 * vocab as f64 + 40.0) * U * (size + g));
    }
    // But not if a finite mask leaves masked columns a part of the probability.
    head.valid = 41 - 2;
    head.labels = vec![3, 0, 38, 12];
    head.mask = Some(1.0);
    let cotangents = [g, -g, 0.0];
    let row_sum = |row: &[f64]| row.iter().sum::<f64>();
    let masked: Vec<f64> = head.dlogits(cotangents).chunks(vocab).map(row_sum).collect();
    for (sum, lse) in masked.iter().zip(head.forward().lse) {
        let taken = 2.0 * (1.0 - lse).exp();
        assert_near("taken", *sum, -0.4 * g * taken, 200.0 * U);
    }
}

/// `λ lse²` has the gradient `2 λ lse p`: at uniform logits `2 λ (a + log K) / K`.
#[test]
fn z_loss_has_the_gradient_two_lambda_lse_p() {
    let (vocab, a, lambda) = (29, 1.5, 1e-2);
    let head = Head::new(&[4], &vec![a; vocab]);
    let n = vocab as f64;
    let lse = head.forward().lse[0];
    let wanted = 2.0 * lambda * (a + n.ln()) / n;
    for dlogit in head.dlogits([2.0 * lambda * lse, 0.0, 0.0]) {
        assert_near("dlogits", dlogit, wanted, (4.0 * n + 40.0) * U * wanted);
    }
}

/// A smoothed loss is smallest if the softmax equals the smoothed target; it is then the target's
/// entropy.
#[test]
fn label_smoothing_is_least_at_the_smoothed_target() {
    let (vocab, smoothing) = (17, 0.1);
    let n = vocab as f64;
    let off = smoothing / n;
    let on = 1.0 - smoothing + off;
    let target = |v: usize| if v == 6 { on } else { off };
    let logits: Vec<f64> = (0..vocab).map(|v| target(v).ln()).collect();
    let head = Head::new(&[6], &logits);
    let result = head.forward();
    let bound = (n + 16.0) * U * -off.ln();
    assert_near("lse", result.lse[0], 0.0, bound);
    for dlogit in head.dlogits([1.0, smoothing - 1.0, -off]) {
        assert_near("dlogits", dlogit, 0.0, 4.0 * bound);
    }
    let loss =
        result.lse[0] - (1.0 - smoothing) * result.label_logits[0] - off * result.logit_sum[0];
    let entropy: f64 = (0..vocab).map(|v| -target(v) * target(v).ln()).sum();
    assert_near("loss", loss, entropy, 4.0 * bound);
}

/// `tanh(atanh 1/2) = 1/2`: half the cap, and `1 - tanh² = 3/4`.
#[test]
fn a_softcap_halves_at_atanh_of_one_half_and_bends_the_gradient_by_three_quarters() {
    let (cap, scale) = (5.0, 0.5);
    let raw = cap * 0.5f64.atanh() / scale;
    let mut head = Head::new(&[0], &[raw, -raw]);
    head.transform = Transform { scale, softcap: Some(cap), ..Transform::NONE };
    let result = head.forward();
    assert_near("label", result.label_logits[0], cap / 2.0, 8.0 * U * cap);
    let sigmoid = 1.0 / (1.0 + (-cap).exp());
    let dlogits = head.dlogits([1.0, -1.0, 0.0]);
    // sigmoid - 1 cancels: the rounding is that of the logits and of p near 1.
    assert_near("dlogits", dlogits[0], scale * 0.75 * (sigmoid - 1.0), 16.0 * U * cap);
    assert_near("dlogits", dlogits[1], scale * 0.75 * (1.0 - sigmoid), 16.0 * U * cap);
}

/// Where tanh is 1 in every dtype the gradient is 0, and its error is not.
#[test]
fn a_saturated_softcap_leaves_no_gradient_and_an_absolute_variance() {
    for sign in [1.0, -1.0] {
        let mut fixture = Fixture::new(1, 2, 5, 5);
        fixture.q.copy_from_slice(&[1.0, 0.0]);
        fixture.k.fill(0.0);
        (fixture.labels[0], fixture.k[4], fixture.k[5]) = (2, sign * 1e4, 3.0);
        fixture.transform = Transform { scale: 2.0, softcap: Some(10.0), ..Transform::NONE };
        let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
        let (dq, dk) = run(&fixture, &lse, SMALL_TILES);
        assert_eq!((dq.dq_label[0], dk.label[4]), (0.0, 0.0));
        let c = f64::from(fixture.g_label[0]);
        let entry_var = c * c * (2.0 * 2.0 * 4.0 * NOISE.cap_rel_var);
        assert_near("dq", dq.dq_label_var[1], entry_var * 9.0, 8.0 * U * entry_var * 9.0);
        assert_near("dk", dk.label_var[4], entry_var, 8.0 * U * entry_var);
        assert_eq!(dq.dq_label_rel_var[0] * dq.dq_label[0], 0.0, "no 0 times infinity");
    }
}

#[test]
fn a_finite_mask_counts_in_the_softmax_and_minus_infinity_does_not() {
    let (vocab, valid) = (30, 20);
    let mut logits = vec![0.0; vocab];
    logits[valid..].fill(f64::NAN);
    let head = |mask| Head { valid, mask, ..Head::new(&[3], &logits) };
    let n = |count: usize| count as f64;
    let bound = (n(vocab) + 8.0) * U;
    let counted = head(Some(0.0));
    assert_near("lse", counted.forward().lse[0], n(vocab).ln(), 4.0 * bound);
    assert_eq!(counted.forward().logit_sum, [0.0]);
    assert_near("dlogits", counted.dlogits([1.0, 0.0, 0.0])[0], 1.0 / n(vocab), bound);
    let without = head(None).forward();
    assert_near("lse", without.lse[0], n(valid).ln(), 4.0 * bound);
    // finfo.min of f32 is finite, and so far down that it adds nothing.
    for mask in [f64::NEG_INFINITY, f64::from(f32::MIN)] {
        assert_eq!(head(Some(mask)).forward(), without, "{mask}");
    }
    let high = head(Some(7.0)).forward();
    assert_eq!((high.row_max[0], high.label_logits[0]), (7.0, 0.0));
    let wanted = 7.0 + (n(vocab - valid) + n(valid) * (-7.0f64).exp()).ln();
    assert_near("lse", high.lse[0], wanted, 8.0 * bound);
}

/// Without valid columns, and with logits of -inf, which a job has masked itself.
#[test]
fn logits_of_minus_infinity_have_no_part_and_no_variance() {
    let logits = [1.0, f64::NEG_INFINITY, 2.0, f64::NEG_INFINITY];
    let head = Head::new(&[2], &logits);
    let few = Head::new(&[1], &[1.0, 2.0]);
    assert_eq!(head.forward().lse, few.forward().lse);
    let lse = head.forward().lse;
    let cotangents = Cotangents { lse: &[1.0], label: &[-1.0], smooth: &[0.0] };
    let mut seen = 0;
    let mut look = |tile: PlaneTile| {
        seen += 1;
        assert_eq!((tile.logits[1], tile.logits_var[1]), (f64::NEG_INFINITY, 0.0));
        assert_eq!((tile.dlogits[1], tile.dlogits_var[1]), (0.0, 0.0));
        assert!(tile.dlogits_var[0] > 0.0);
    };
    plane(&head.inputs(), &lse, &cotangents, &NOISE, SMALL_TILES, &NoProgress, &mut look);
    assert_eq!(seen, 1);
    let mut masked = Head::new(&[IGNORED], &[f64::NAN; 4]);
    (masked.valid, masked.mask) = (0, Some(0.5));
    assert_near("lse", masked.forward().lse[0], 0.5 + 4f64.ln(), 8.0 * U);
    assert_eq!(masked.dlogits([1.0, 0.0, 0.0]), [0.0; 4]);
}

/// Two confident tokens and one with equal logits: the filter removes entries with small
/// probabilities, and labels whose own probability is nearly 1.
#[test]
fn a_gradient_filter_may_drop_what_lies_below_it_and_nothing_else() {
    let mut fixture = Fixture::new(2, 1, 3, 3);
    fixture.q.copy_from_slice(&[20.0, 0.0]);
    fixture.k.copy_from_slice(&[1.0, -1.0, -1.5]);
    fixture.labels.copy_from_slice(&[0, 1]);
    (fixture.g_lse, fixture.g_label) = (vec![1.0; 2], vec![-1.0; 2]);
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let noise = TermNoise { filter: 1e-6, ..NOISE };
    let (dq, dk) = run_with(&fixture, &lse, &noise, SMALL_TILES, &NoProgress);
    let p = [(-40.0f64).exp(), (-50.0f64).exp()];
    // The label's entry is p - 1, which is only rounding error here.
    assert_near("dq", dq.dq_dropped[0], p[0] + 1.5 * p[1], 4.0 * U);
    assert_eq!(dq.dq_dropped[1], 0.0);
    assert_near("dk", dk.dropped[1], 20.0 * p[0], 20.0 * p[0] * 128.0 * U);
    let (none, _) = run(&fixture, &lse, SMALL_TILES);
    assert!(none.dq_dropped.is_empty());
}
