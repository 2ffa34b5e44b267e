//! A world in which the head rounds otherwise (another rounding policy), and helpers that the
//! causes of low precision share.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Roundings, Scores, Stage};
use crate::kernels::Tiles;
use crate::kernels::matrix::IGNORED;
use crate::kernels::policy::{self, Path, Policy};
use crate::kernels::round::Precision;
use crate::replay::rounding_ties::near_ties;
use crate::replay::world::{Expectation, Pass, World};

/// The backward in another rounding policy, and where given also another forward.
pub(super) struct Emulated {
    /// The policy and its tiles; `None` leaves the backward as declared.
    pub(super) policy: Option<(Policy, Tiles)>,
    /// lse and label logits of the microbatches whose forward is another one.
    pub(super) forward: Forward,
}

/// lse and label logits of another forward, by microbatch.
pub(super) type Forward = BTreeMap<Option<Microbatch>, ForwardValues>;

/// The results of a forward pass, all `[T]`.
pub(super) struct ForwardValues {
    lse: Vec<f64>,
    label: Option<Vec<f64>>,
    /// How far lse and label logits may be off where rounded values lie near ties.
    ties: [Vec<f64>; 2],
}

impl Emulated {
    /// Only the backward is another one.
    pub(super) fn backward(policy: Policy, tiles: Tiles) -> Emulated {
        Emulated { policy: Some((policy, tiles)), forward: Forward::new() }
    }
}

impl World for Emulated {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.policy
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let Some(forward) =
            self.forward.get(&inputs.microbatch).filter(|_| pass == Pass::Forward)
        {
            lse.copy_from_slice(&forward.lse);
        }
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let here = self.forward.get(&expectation.place.microbatch);
        if let Some(label) = here.and_then(|here| here.label.as_ref())
            && expectation.place.stage == Stage::LabelLogits
        {
            expectation.values.copy_from_slice(label);
        }
    }

    fn ties(&self, stage: Stage, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        let values = self.forward.get(&inputs.microbatch)?;
        match stage {
            Stage::Lse => Some(values.ties[0].clone()),
            Stage::LabelLogits if values.label.is_some() => Some(values.ties[1].clone()),
            _ => None,
        }
    }
}

/// The forward pass of every microbatch in a rounding policy. `label`: whether the label's logit
/// comes from this pass; if not, it is as declared, because the job computes it separately.
pub(super) fn forward(evidence: &Evidence<'_>, policy: &Policy, label: bool) -> Forward {
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let head = inputs.head(evidence.step)?;
        let roundings = evidence.roundings()?;
        let run = |head: &crate::kernels::matrix::HeadInputs<'_>| {
            policy::forward(policy, head, roundings.tiles, evidence.progress())
        };
        let middle = run(&head);
        let both = near_ties(roundings.compute(), &head, &middle.lse);
        let [a, b] = both.map(|end| run(&end.head));
        let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
        let ties = [apart(&a.lse, &b.lse), apart(&a.label_logits, &b.label_logits)];
        let label = label.then_some(middle.label_logits);
        Some((inputs.microbatch, ForwardValues { lse: middle.lse, label, ties }))
    };
    evidence.inputs.iter().filter_map(of_microbatch).collect()
}

/// Whether the logits are computed from q and k, not recorded.
pub(super) fn has_products(evidence: &Evidence<'_>) -> bool {
    let product = |inputs: &MicrobatchInputs| matches!(inputs.scores, Scores::Product { .. });
    evidence.inputs.iter().all(product)
}

/// Whether some token has a label.
pub(super) fn has_labels(evidence: &Evidence<'_>) -> bool {
    evidence.inputs.iter().flat_map(|inputs| &inputs.labels).any(|&label| label != IGNORED)
}

/// The path of a head that computes whole entries of dlogits: the declared one, or the plain one
/// for a fused head, whose dump does not show what its kernel does inside.
pub(super) fn whole(path: Path) -> Path {
    match path {
        Path::Fused => Path::Plain,
        other => other,
    }
}

/// Rounding policies that a job may have apart from its fault: the narrowest that it declares and,
/// where dlogits may also be wider, the same with those unrounded.
pub(super) fn bases(roundings: &Roundings) -> Vec<Policy> {
    let (wide, narrow) = (roundings.widest, roundings.narrowest);
    let mut policies = vec![narrow];
    if wide.dlogits != narrow.dlogits {
        policies.push(Policy { dlogits: wide.dlogits, ..narrow });
    }
    policies
}

/// The formats of few bits that a job is likely to use: that of its inputs, or both bf16 and f16
/// where its inputs are wide.
pub(super) fn likely_formats(roundings: &Roundings) -> Vec<Precision> {
    match roundings.widest.input {
        format @ (Precision::Bf16 | Precision::F16) => vec![format],
        _ => vec![Precision::Bf16, Precision::F16],
    }
}

/// Those of the likely formats that are coarser than the declared format of a sum. A sum in the
/// declared format is no fault, nor is one in more bits: a job that declares its accumulators in
/// bf16 may scatter in f32.
pub(super) fn formats_below(declared: Precision, roundings: &Roundings) -> Vec<Precision> {
    let mut formats = likely_formats(roundings);
    formats.retain(|precision| precision.unit_roundoff() > declared.unit_roundoff());
    formats
}
