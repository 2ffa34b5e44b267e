//! The loss head by loops over scalars: the oracle's oracle.

use super::{Dk, NOISE};
use crate::kernels::fixture::Fixture;
use crate::kernels::matrix::IGNORED;
use crate::kernels::reference::{Backward, Forward};

/// Logits, lse and everything the backward pass gives, by loops over scalars.
pub(super) fn naive(fixture: &Fixture) -> (Forward, Vec<Vec<f64>>) {
    let mut forward =
        Forward { lse: vec![], label_logits: vec![], row_max: vec![], logit_sum: vec![] };
    let mut logits = Vec::new();
    for token in 0..fixture.tokens {
        let dot = |row: usize| -> f64 {
            let terms = fixture.q(token).iter().zip(fixture.k(row));
            terms.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum()
        };
        let row: Vec<f64> = (0..fixture.valid).map(dot).collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        forward.lse.push(max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln());
        let label = fixture.labels[token];
        forward.label_logits.push(if label == IGNORED { 0.0 } else { row[label as usize] });
        forward.row_max.push(max);
        forward.logit_sum.push(row.iter().sum());
        logits.push(row);
    }
    (forward, logits)
}

pub(super) fn naive_backward(
    fixture: &Fixture,
    lse: &[f64],
    logits: &[Vec<f64>],
) -> (Backward, Dk) {
    let (tokens, depth) = (fixture.tokens, fixture.depth);
    let q0 = || vec![0.0; tokens * depth];
    let k0 = || vec![0.0; fixture.vocab * depth];
    let mut dq = Backward {
        dq_lse: q0(),
        dq_label: q0(),
        dq_lse_var: q0(),
        dq_lse_sq: q0(),
        ..Backward::default()
    };
    let mut dk = Dk {
        lse: k0(),
        label: k0(),
        lse_var: k0(),
        lse_sq: k0(),
        label_sq: k0(),
        hits: vec![0; fixture.vocab],
    };
    let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    for t in 0..tokens {
        for (v, &x) in logits[t].iter().enumerate() {
            let w = f64::from(fixture.g_lse[t]) * (x - lse[t]).exp();
            let noise = NOISE.p_rel_var
                + NOISE.logit_rel_var * x * x
                + NOISE.dot_rel_var * norm(fixture.q(t)) * norm(fixture.k(v));
            let is_label = fixture.labels[t] == v as u32;
            dk.hits[v] += u32::from(is_label);
            for d in 0..depth {
                let (q, k) = (f64::from(fixture.q(t)[d]), f64::from(fixture.k(v)[d]));
                let (i, j) = (t * depth + d, v * depth + d);
                dq.dq_lse[i] += w * k;
                dq.dq_lse_sq[i] += w * w * k * k;
                dq.dq_lse_var[i] += w * w * noise * k * k;
                dk.lse[j] += w * q;
                dk.lse_sq[j] += w * w * q * q;
                dk.lse_var[j] += w * w * noise * q * q;
                if is_label {
                    let g = f64::from(fixture.g_label[t]);
                    dq.dq_label[i] += g * k;
                    dk.label[j] += g * q;
                    dk.label_sq[j] += g * q * g * q;
                }
            }
        }
    }
    (dq, dk)
}
