//! `label-scatter-low-precision`: the label part of dk is added up in few bits, because
//! the rows of k were gathered in few bits and the transpose of a gather is a scatter-add
//! in the dtype of the gather.
//!
//! Detectors: D4, dk or dk_label fails while dq is right, and there are labels that repeat.
//! Emulation: `acc = round(acc + round(g q))` over a row's tokens, for every plausible
//! format, with and without rounding of the product, forwards and backwards.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::policy::{Order, Path, Policy, Sum};
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct LabelScatterLowPrecision;

impl Cause for LabelScatterLowPrecision {
    fn id(&self) -> &str {
        "label-scatter-low-precision"
    }

    fn about(&self) -> &str {
        "the label part of dk is accumulated in a format of few bits: rows of frequent labels lose addends"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["baremetal-gpt fc9f8c7"]
    }

    fn advice(&self) -> &str {
        "gather the label rows of k in f32 (cast k before the gather), so that their transpose scatters in f32"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&[Stage::DkLabel, Stage::Dk]) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for precision in [Precision::Bf16, Precision::F16] {
            for product in [precision, Precision::F32] {
                for parts in [precision, Precision::F32] {
                    let parameters = vec![
                        ("accumulator", precision.name().to_string()),
                        ("g q rounded to", product.name().to_string()),
                        ("parts rounded to", parts.name().to_string()),
                    ];
                    found.push(Hypothesis::new(Scatter { precision, product, parts }, parameters));
                }
            }
        }
        found
    }
}

struct Scatter {
    precision: Precision,
    product: Precision,
    parts: Precision,
}

impl World for Scatter {
    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        let mut policy = Policy { path: Path::Fused, ..declared.narrowest };
        policy.sums.label_scatter = Sum { precision: self.precision, order: Order::Native };
        (policy.label_grad, policy.parts) = (self.product, self.parts);
        Some((policy, declared.tiles))
    }
}
