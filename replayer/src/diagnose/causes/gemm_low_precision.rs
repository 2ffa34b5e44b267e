//! `gemm-low-precision`: the matrix unit takes its operands in fewer bits than the f32 that
//! was recorded and declared.
//!
//! Real: marin 8368, and every TF32 default: `allow_tf32`, `jax_default_matmul_precision`,
//! a TPU's single bf16 pass.
//!
//! Detectors: q and k are f32, no narrower format is declared for the GEMMs' inputs, and logits, dq
//! or dk are off by as much as such a format would cause. Emulation: q, k and dlogits are rounded
//! before they are multiplied, in all products or only in the backward's; and with autocast the
//! results of the products are rounded to the same format.

use super::emulated::{Emulated, Forward, forward, has_products, whole};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;

/// The catalogue's entry.
pub struct GemmLowPrecision;

impl Cause for GemmLowPrecision {
    fn id(&self) -> &'static str {
        "gemm-low-precision"
    }

    fn about(&self) -> &'static str {
        "matrix products take their operands in fewer bits than was recorded and declared"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["marin 8368"]
    }

    fn advice(&self) -> &'static str {
        "ask for full precision in the products (jax_default_matmul_precision=highest, allow_tf32=False), or declare dtypes={\"input\": ...}"
    }

    fn may_be_right(&self) -> bool {
        true
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let fails = evidence.fails_any(&Stage::FORWARD) || evidence.fails_any(&Stage::GRADIENTS);
        if !fails || !has_products(evidence) {
            return Vec::new();
        }
        let declared = roundings.widest.input.unit_roundoff();
        let mut hypotheses = Vec::new();
        for precision in [Precision::Tf32, Precision::Bf16, Precision::F16] {
            if precision.unit_roundoff() > declared {
                hypotheses.extend(of(evidence, &roundings, precision));
            }
        }
        hypotheses
    }
}

fn of(evidence: &Evidence<'_>, roundings: &Roundings, precision: Precision) -> Vec<Hypothesis> {
    let narrowest = roundings.narrowest.path;
    // The dump of a fused head does not show whether its kernel computes the label's part
    // separately.
    let paths = [narrowest, whole(narrowest)]
        .into_iter()
        .take(1 + usize::from(whole(narrowest) != narrowest));
    paths.flat_map(|path| on_path(evidence, roundings, (precision, path))).collect()
}

fn on_path(
    evidence: &Evidence<'_>,
    roundings: &Roundings,
    (precision, path): (Precision, Path),
) -> Vec<Hypothesis> {
    let narrowest = Policy { path, ..roundings.narrowest };
    let base = Policy { input: precision, ..narrowest };
    let last = Policy { operand: precision, ..narrowest };
    let mut hypotheses = Vec::new();
    let mut offer = |products: &str, base: &Policy, forward: Forward, dlogits: Precision| {
        let parameters = vec![
            ("operands rounded to", precision.name().to_string()),
            ("products", products.to_string()),
            ("dlogits rounded to", dlogits.name().to_string()),
        ];
        let policy = Some((Policy { dlogits, ..*base }, roundings.tiles));
        hypotheses.push(Hypothesis::new(Emulated { policy, forward }, parameters));
    };
    // dlogits are an operand too; where a kernel computes them inside, they may not be rounded.
    let entries = [precision, narrowest.dlogits];
    if evidence.fails_any(&Stage::GRADIENTS) {
        for dlogits in entries {
            offer("the backward's", &base, Forward::new(), dlogits);
            // The logits were kept, or computed in full precision; only the operands of the
            // products with dlogits are rounded.
            offer("of dlogits", &last, Forward::new(), dlogits);
        }
        offer("of dlogits, which alone are rounded", &narrowest, Forward::new(), precision);
    }
    if evidence.fails_any(&[Stage::Lse, Stage::LabelLogits, Stage::Loss])
        || evidence.fails_any(&Stage::GRADIENTS)
    {
        // A fused head computes the label's logit separately.
        let apart = base.path == Path::Fused;
        for label in [true, false].into_iter().filter(|&label| label || apart) {
            let all = if label { "all" } else { "all but the label's" };
            offer(all, &base, forward(evidence, &base, label), precision);
        }
        // Under autocast the result of a product has the format of its operands.
        if precision != Precision::Tf32 {
            let autocast = Policy { logits: precision, output: precision, ..base };
            let words = "all, which give numbers of the same format";
            offer(words, &autocast, forward(evidence, &autocast, true), precision);
        }
    }
    hypotheses
}
