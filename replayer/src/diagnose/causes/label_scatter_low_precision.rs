//! `label-scatter-low-precision`: the label part of dk is added up in few bits, because
//! the rows of k were gathered in few bits and the transpose of a gather is a scatter-add
//! in the dtype of the gather.
//!
//! Real: baremetal-gpt fc9f8c7. Where the tokens are sharded each shard scatters by itself
//! and the shards' sums are added; the parts may be rounded before they are added.
//!
//! Detectors: D4, dk or dk_label fails while dq is right, and there are labels that repeat.
//! Emulation: `acc = round(acc + round(g q))` over a row's tokens, for every plausible
//! format, with and without rounding of the product, from either end, in shards.

use super::emulated::{Emulated, likely_formats};
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::matrix::IGNORED;
use crate::kernels::policy::{Order, Path, Policy, Sum, Walk};
use crate::kernels::round::Precision;

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
        let stages = [Stage::DkLabel, Stage::Dk];
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let several = evidence.inputs.iter().any(|one| repeats(&one.labels));
        if !evidence.fails_any(&stages) || !several {
            return Vec::new();
        }
        // Parts that were captured show by themselves what they were rounded to.
        let apart = evidence.residuals.keys().any(|key| key.stage == Stage::DkLabel);
        let mut found = Vec::new();
        for precision in likely_formats(&roundings) {
            for product in [precision, Precision::F32] {
                for parts in [precision, Precision::F32].into_iter().skip(usize::from(apart)) {
                    for shards in shards(evidence) {
                        for order in [Walk::Ascending, Walk::Descending] {
                            let of = Scatter { precision, product, parts, shards, order };
                            found.push(of.hypothesis(&roundings));
                        }
                    }
                }
            }
        }
        found
    }
}

/// Whether some label is that of several tokens.
fn repeats(labels: &[u32]) -> bool {
    let mut sorted: Vec<u32> = labels.iter().copied().filter(|&label| label != IGNORED).collect();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0] == pair[1])
}

/// How many shards a unit's tokens may have been scattered in: one, or one a rank where dk
/// was captured over the tokens of all ranks.
fn shards(evidence: &Evidence<'_>) -> Vec<usize> {
    let stages = [Stage::DkLabel, Stage::Dk];
    let whole = evidence.failing_of(&stages).any(|(key, _)| key.rank.is_none());
    match evidence.ranks() {
        ranks if whole && ranks > 1 => vec![1, ranks],
        _ => vec![1],
    }
}

struct Scatter {
    precision: Precision,
    product: Precision,
    parts: Precision,
    shards: usize,
    order: Walk,
}

impl Scatter {
    fn hypothesis(&self, roundings: &Roundings) -> Hypothesis {
        let Scatter { precision, product, parts, shards, order } = *self;
        let mut policy = Policy { path: Path::Fused, ..roundings.narrowest };
        policy.sums.label_scatter = Sum { precision, order: Order::Native };
        (policy.label_grad, policy.parts) = (product, parts);
        (policy.scatter_shards, policy.scatter_order) = (shards, order);
        let end = if order == Walk::Ascending { "the first" } else { "the last" };
        let parameters = vec![
            ("accumulator", precision.name().to_string()),
            ("g q rounded to", product.name().to_string()),
            ("parts rounded to", parts.name().to_string()),
            ("shards", shards.to_string()),
            ("starts at", format!("{end} token")),
        ];
        Hypothesis::new(Emulated::backward(policy, roundings.tiles), parameters)
    }
}
