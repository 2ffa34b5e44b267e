//! Worlds that are another policy: what most causes of the arithmetic's family share.

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

/// The backward in another policy, and where it is given the forward as well.
pub(super) struct Emulated {
    /// The policy and its tiles; `None` leaves the backward as declared.
    pub(super) policy: Option<(Policy, Tiles)>,
    /// lse and label logits of each microbatch, where the forward is another one.
    pub(super) forward: Forward,
}

/// lse and label logits of the microbatches that have others than declared.
pub(super) type Forward = BTreeMap<Option<Microbatch>, ForwardValues>;

/// What a forward pass gives, all `[T]`.
pub(super) struct ForwardValues {
    lse: Vec<f64>,
    label: Option<Vec<f64>>,
    /// How far each may be off where values lie near ties.
    ties: [Vec<f64>; 2],
}

impl Emulated {
    /// Only the backward.
    pub(super) fn backward(policy: Policy, tiles: Tiles) -> Emulated {
        Emulated { policy: Some((policy, tiles)), forward: Forward::new() }
    }
}

impl World for Emulated {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.policy
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let Some(of) = self.forward.get(&inputs.microbatch).filter(|_| pass == Pass::Forward) {
            lse.copy_from_slice(&of.lse);
        }
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        let here = self.forward.get(&of.at.microbatch);
        if let Some(label) = here.and_then(|here| here.label.as_ref())
            && of.at.stage == Stage::LabelLogits
        {
            of.values.copy_from_slice(label);
        }
    }

    fn ties(&self, stage: Stage, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        let of = self.forward.get(&inputs.microbatch)?;
        match stage {
            Stage::Lse => Some(of.ties[0].clone()),
            Stage::LabelLogits if of.label.is_some() => Some(of.ties[1].clone()),
            _ => None,
        }
    }
}

/// The forward pass of every microbatch in a policy. `label`: whether the label's logit is
/// one of its logits, or computed by itself.
pub(super) fn forward(evidence: &Evidence<'_>, of: &Policy, label: bool) -> Forward {
    let one = |inputs: &MicrobatchInputs| {
        let head = inputs.head(evidence.step)?;
        let roundings = evidence.roundings()?;
        let run = |head: &crate::kernels::matrix::HeadInputs<'_>| {
            policy::forward(of, head, roundings.tiles, evidence.progress())
        };
        let middle = run(&head);
        let both = near_ties(roundings.compute(), &head, &middle.lse);
        let [a, b] = both.map(|end| run(&end.head));
        let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
        let ties = [apart(&a.lse, &b.lse), apart(&a.label_logits, &b.label_logits)];
        let label = label.then_some(middle.label_logits);
        Some((inputs.microbatch, ForwardValues { lse: middle.lse, label, ties }))
    };
    evidence.inputs.iter().filter_map(one).collect()
}

/// Whether the head forms its logits from q and k.
pub(super) fn has_products(evidence: &Evidence<'_>) -> bool {
    let product = |one: &MicrobatchInputs| matches!(one.scores, Scores::Product { .. });
    evidence.inputs.iter().all(product)
}

/// Whether some token has a label.
pub(super) fn has_labels(evidence: &Evidence<'_>) -> bool {
    evidence.inputs.iter().flat_map(|one| &one.labels).any(|&label| label != IGNORED)
}

/// Path of a head whose dlogits are whole: the declared one, or the plain one for a fused
/// head, which never tells what its kernel does inside.
pub(super) fn whole(path: Path) -> Path {
    match path {
        Path::Fused => Path::Plain,
        other => other,
    }
}

/// Policies that a job may have had beside its fault: what it leaves open rounded or not.
/// The entries of dlogits are what most of them round.
pub(super) fn bases(roundings: &Roundings) -> Vec<Policy> {
    let (wide, narrow) = (roundings.widest, roundings.narrowest);
    let mut found = vec![narrow];
    if wide.dlogits != narrow.dlogits {
        found.push(Policy { dlogits: wide.dlogits, ..narrow });
    }
    found
}

/// Formats that a job of this input falls into: its own, or either where that is wide.
pub(super) fn likely_formats(roundings: &Roundings) -> Vec<Precision> {
    match roundings.widest.input {
        own @ (Precision::Bf16 | Precision::F16) => vec![own],
        _ => vec![Precision::Bf16, Precision::F16],
    }
}

/// Those of fewer bits than a sum is declared in. What is declared is no fault, nor is a sum
/// in more bits: a job that declares its accumulators in bf16 may scatter in f32, and for a
/// row of few addends f16 is as good.
pub(super) fn formats_below(declared: Precision, roundings: &Roundings) -> Vec<Precision> {
    let mut found = likely_formats(roundings);
    found.retain(|of| of.unit_roundoff() > declared.unit_roundoff());
    found
}
