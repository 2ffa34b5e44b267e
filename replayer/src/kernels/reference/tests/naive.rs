//! The loss head as loops over scalars, with which the reference is tested.
//!
//! Beside every result it gives the sum of the magnitudes that the result is made of:
//! what rounding errors are relative to.

use super::Dk;
use crate::kernels::fixture::Fixture;
use crate::kernels::matrix::IGNORED;
use crate::kernels::reference::{Backward, Forward, TermNoise};

/// What makes up one entry of the plane.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    pub(super) logit: f64,
    pub(super) var: f64,
    slope: f64,
    slope_var: f64,
    /// At least the magnitude of every result on the way to the logit.
    pub(super) size: f64,
    /// `var` and `slope_var` of magnitudes.
    pub(super) var_size: f64,
    slope_var_size: f64,
}

/// The raw logit, and the sum of the magnitudes it is made of.
fn product(fixture: &Fixture, t: usize, v: usize) -> (f64, f64) {
    if let Some(given) = &fixture.given {
        let given = given[t * fixture.vocab + v];
        return (given, given.abs());
    }
    let terms = fixture.q(t).iter().zip(fixture.k(v));
    (terms.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum(), fixture.dot_magnitude(t, v))
}

/// One logit, each operation written out with the derivative of all that follows it.
pub(super) fn cell(fixture: &Fixture, noise: &TermNoise, t: usize, v: usize) -> Cell {
    let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    let norms = norm(fixture.q(t)) * norm(fixture.k(v));
    let (scale, cap) = (fixture.transform.scale, fixture.transform.softcap);
    let (dot, size) = product(fixture, t, v);
    let bias = fixture.bias.as_ref().map(|bias| bias[v]);
    let biased = dot + bias.unwrap_or(0.0);
    let scaled = scale * biased;
    // Results before the softcap, with their derivatives up to it.
    let mut results = Vec::new();
    if fixture.given.is_none() {
        results.push((dot, scale));
    }
    if bias.is_some() {
        results.push((biased, scale));
    }
    if scale != 1.0 {
        results.push((scaled, 1.0));
    }
    let variance = |results: &[(f64, f64)]| -> f64 {
        results.iter().map(|(result, then)| (result * then).powi(2)).sum::<f64>()
            * noise.logit_rel_var
    };
    let sums = noise.dot_rel_var * norms * scale * scale;
    let scaled_var = variance(&results) + sums;
    let size = scale * (size + bias.unwrap_or(0.0).abs());
    let var_size = 4.0 * noise.logit_rel_var * size * size + sums;
    match cap {
        None => {
            if results.is_empty() {
                results.push((scaled, 1.0));
            }
            let var = variance(&results) + sums + noise.logit_floor;
            let var_size = var_size + noise.logit_floor;
            let (slope_var, slope_var_size) = (0.0, 0.0);
            Cell { logit: scaled, var, slope: scale, slope_var, size, var_size, slope_var_size }
        }
        Some(cap) => {
            let (tanh, cosh) = ((scaled / cap).tanh(), (scaled / cap).cosh());
            let derivative = 1.0 / (cosh * cosh);
            let carried = (2.0 * tanh * derivative / cap).powi(2) * scaled_var;
            let slope_var = scale.powi(2) * (4.0 * tanh.powi(4) * noise.cap_rel_var + carried);
            let logit = cap * tanh;
            let three = [(logit, 1.0); 3];
            let floor = noise.logit_floor * (1.0 + 2.0 * cap * cap);
            let var = scaled_var * derivative.powi(2) + variance(&three) + floor;
            let var_size = var_size + 2.0 * (variance(&three) + floor);
            let slope_var_size =
                scale.powi(2) * (4.0 * noise.cap_rel_var + (2.0 / cap).powi(2) * var_size);
            let slope = scale * derivative;
            Cell { logit, var, slope, slope_var, size, var_size, slope_var_size }
        }
    }
}

/// Forward pass and final logits `[T][valid]`.
pub(super) fn naive(fixture: &Fixture) -> (Forward, Vec<Vec<f64>>) {
    let mut forward = Forward {
        lse: vec![],
        label_logits: vec![],
        row_max: vec![],
        logit_sum: vec![],
        logit_squares: vec![],
    };
    let mut logits = Vec::new();
    for t in 0..fixture.tokens {
        let logit = |v: usize| cell(fixture, &TermNoise::default(), t, v).logit;
        let row: Vec<f64> = (0..fixture.valid).map(logit).collect();
        let masked = (fixture.valid..fixture.vocab).filter_map(|_| fixture.mask);
        let all: Vec<f64> = row.iter().copied().chain(masked).collect();
        let max = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        forward.lse.push(max + all.iter().map(|x| (x - max).exp()).sum::<f64>().ln());
        let label = fixture.labels[t];
        forward.label_logits.push(if label == IGNORED { 0.0 } else { row[label as usize] });
        forward.row_max.push(max);
        forward.logit_sum.push(row.iter().sum());
        forward.logit_squares.push(row.iter().map(|x| x * x).sum());
        logits.push(row);
    }
    (forward, logits)
}

/// An entry of dlogits, and its parts that are summed.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    dense: f64,
    dense_sq: f64,
    dense_var: f64,
    dropped: f64,
    label: f64,
    label_sq: f64,
    label_var: f64,
    label_rel_var: f64,
    confident: f64,
    /// The number whose rounding the label's part has.
    label_whole: f64,
    /// Of dense and label part together.
    pub(super) total: f64,
    pub(super) total_var: f64,
}

/// An entry, and the same with the magnitudes of its terms.
pub(super) fn entries(
    fixture: &Fixture,
    noise: &TermNoise,
    lse: &[f64],
    t: usize,
    v: usize,
) -> [Entry; 2] {
    let cell = cell(fixture, noise, t, v);
    let is_label = fixture.labels[t] == v as u32;
    let p = (cell.logit - lse[t]).exp();
    let softmax = f64::from(fixture.g_lse[t]) * p;
    let smooth = f64::from(fixture.smooth[t]);
    let c = if is_label { f64::from(fixture.g_label[t]) } else { 0.0 };
    let f = cell.slope;
    let log_p = noise.log_p_rel_var * (cell.logit - lse[t]).powi(2);
    let entry = |[softmax, smooth, c]: [f64; 3], var: f64, slope_var: f64| {
        let var = var + log_p;
        let by_logit = softmax + smooth;
        let rounded = (f * softmax).powi(2) * (noise.p_rel_var + var)
            + (f * smooth).powi(2) * noise.p_rel_var;
        let whole = noise.whole && is_label;
        let exp = f * f * softmax * softmax * (noise.exp_rel_var + var);
        let entry_var = f * f * (by_logit + c).powi(2) * noise.p_rel_var + exp;
        let confident = noise.confident > 0.0 && p >= noise.confident && !whole;
        let dropped = match () {
            () if p < noise.filter => (f * by_logit).abs(),
            () if is_label && 1.0 - p < noise.filter => (f * (by_logit + c)).abs(),
            () => 0.0,
        };
        Entry {
            dense: f * by_logit,
            dense_sq: (f * by_logit).powi(2),
            dense_var: if whole { entry_var } else { rounded } + by_logit.powi(2) * slope_var,
            dropped,
            label: f * c,
            label_sq: (f * c).powi(2),
            label_var: c * c * slope_var,
            label_rel_var: if is_label { slope_var / (f * f) } else { 0.0 },
            confident: if confident { f * by_logit } else { 0.0 },
            label_whole: f * if whole { by_logit + c } else { c },
            total: f * (by_logit + c),
            total_var: if whole { entry_var } else { rounded + (f * c).powi(2) * noise.p_rel_var }
                + (by_logit + c).powi(2) * slope_var,
        }
    };
    [
        entry([softmax, smooth, c], cell.var, cell.slope_var),
        entry([softmax, smooth, c].map(f64::abs), cell.var_size, cell.slope_var_size),
    ]
}

/// The results of the backward pass, and the same with the magnitudes of their terms.
pub(super) fn naive_backward(
    fixture: &Fixture,
    noise: &TermNoise,
    lse: &[f64],
) -> [(Backward, Dk); 2] {
    let mut results = [zeros(fixture, noise), zeros(fixture, noise)];
    for t in 0..fixture.tokens {
        for v in 0..fixture.valid {
            let [entry, size] = entries(fixture, noise, lse, t, v);
            add(&mut results[0], fixture, (t, v), &entry, |x| x);
            add(&mut results[1], fixture, (t, v), &size, f64::abs);
        }
    }
    results
}

fn zeros(fixture: &Fixture, noise: &TermNoise) -> (Backward, Dk) {
    let (tokens, depth, vocab) = (fixture.tokens, fixture.depth, fixture.vocab);
    let when = |present: bool, size: usize| vec![0.0; if present { size } else { 0 }];
    let (q0, k0) = (|| vec![0.0; tokens * depth], || vec![0.0; vocab * depth]);
    let v0 = || vec![0.0; vocab];
    let dq = Backward {
        dq_lse: q0(),
        dq_label: q0(),
        dq_lse_var: q0(),
        dq_lse_sq: q0(),
        dq_label_rel_var: vec![0.0; tokens],
        dq_label_var: when(fixture.transform.softcap.is_some(), tokens * depth),
        dq_dropped: when(noise.filter > 0.0, tokens * depth),
        dq_confident: when(noise.confident > 0.0, tokens * depth),
        dq_label_share: vec![1.0; tokens],
    };
    let dk = Dk {
        lse: k0(),
        label: k0(),
        lse_var: k0(),
        lse_sq: k0(),
        label_sq: k0(),
        label_var: k0(),
        dropped: when(noise.filter > 0.0, vocab * depth),
        confident: when(noise.confident > 0.0, vocab * depth),
        label_whole: k0(),
        hits: vec![0; vocab],
        bias_lse: v0(),
        bias_label: v0(),
        bias_var: v0(),
        bias_sq: v0(),
    };
    (dq, dk)
}

fn add(
    (dq, dk): &mut (Backward, Dk),
    fixture: &Fixture,
    (t, v): (usize, usize),
    entry: &Entry,
    sign: impl Fn(f64) -> f64,
) {
    let depth = fixture.depth;
    dk.hits[v] += u32::from(fixture.labels[t] == v as u32);
    dq.dq_label_rel_var[t] += entry.label_rel_var;
    if entry.label != 0.0 {
        dq.dq_label_share[t] = (entry.label_whole / entry.label).powi(2);
    }
    if fixture.bias.is_some() {
        dk.bias_lse[v] += entry.dense;
        dk.bias_label[v] += entry.label;
        dk.bias_var[v] += entry.dense_var + entry.label_var;
        dk.bias_sq[v] += entry.dense_sq + entry.label_sq;
    }
    for d in 0..depth {
        let (q, k) = (sign(fixture.q(t)[d].into()), sign(fixture.k(v)[d].into()));
        let (i, j) = (t * depth + d, v * depth + d);
        dq.dq_lse[i] += entry.dense * k;
        dq.dq_label[i] += entry.label * k;
        dq.dq_lse_sq[i] += entry.dense_sq * k * k;
        dq.dq_lse_var[i] += entry.dense_var * k * k;
        dk.lse[j] += entry.dense * q;
        dk.label[j] += entry.label * q;
        dk.lse_sq[j] += entry.dense_sq * q * q;
        dk.lse_var[j] += entry.dense_var * q * q;
        dk.label_sq[j] += entry.label_sq * q * q;
        dk.label_var[j] += entry.label_var * q * q;
        dk.label_whole[j] += entry.label_whole * q;
        if let Some(confident) = dq.dq_confident.get_mut(i) {
            *confident += entry.confident * k;
            dk.confident[j] += entry.confident * q;
        }
        if let Some(var) = dq.dq_label_var.get_mut(i) {
            *var += entry.label_var * k * k;
        }
        if let Some(dropped) = dq.dq_dropped.get_mut(i) {
            *dropped += entry.dropped * k.abs();
            dk.dropped[j] += entry.dropped * q.abs();
        }
    }
}
