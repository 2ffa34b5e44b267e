//! `softcap-mismatch`: the softcap of the logits is missing, another one, or without its
//! derivative, in the forward, in the backward, or in both.
//!
//! Detectors: a missing derivative makes columns of dlogits add up to zero; another cap is fitted
//! to the captured lse and label logits, or to rows of dq. Emulation: the other cap; where only the
//! backward has it, it starts from the lse of the declared forward. The derivative may be missing
//! in both parts, in the softmax part, or in the label's part alone.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::fitted_numbers::{least, readings, shown};
use crate::diagnose::detectors::raw_logits::RawLogits;
use crate::diagnose::detectors::single_tokens::Direct;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{
    BackwardStarts, ChangedOptions, DeclaredLse, FORWARD_ONLY, ForwardOnly,
};
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::kernels::transform::Transform;
use crate::replay::world::{UnitTokens, World};

/// The catalogue's entry.
pub struct SoftcapMismatch;

/// The range of caps that is searched: below it all logits would be nearly equal, above it none
/// would be capped.
const CAPS: (f64, f64) = (0.5, 2000.0);

impl Cause for SoftcapMismatch {
    fn id(&self) -> &'static str {
        "softcap-mismatch"
    }

    fn options(&self) -> &'static [&'static str] {
        &["softcap"]
    }

    fn about(&self) -> &'static str {
        "the softcap of the logits is not the declared one, or its derivative is left out"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy 48", "unsloth-zoo 593"]
    }

    fn advice(&self) -> &'static str {
        "apply the same softcap in the forward and where the backward recomputes logits, and multiply dlogits by 1 - tanh²"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let forward = evidence.fails_any(&Stage::FORWARD);
        if !forward && !evidence.fails_any(&Stage::GRADIENTS) {
            return Vec::new();
        }
        let cap = evidence.step.options.transform.softcap;
        let mut hypotheses = Vec::new();
        if let Some(cap) = cap {
            let change = |options: &mut HeadOptions| options.transform.uncapped = true;
            let world = ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 };
            let parameters =
                vec![("softcap", cap.to_string()), ("left out", "its derivative".to_string())];
            hypotheses.push(Hypothesis::new(world, parameters));
            hypotheses.extend(of_one_part(evidence, cap));
            hypotheses.extend(capped(evidence, None, 0));
        }
        for other in fitted(evidence) {
            if Some(other) != cap {
                hypotheses.extend(capped(evidence, Some(other), 1));
            }
        }
        hypotheses
    }
}

/// The hypotheses that the derivative is left out of the label's part alone, or of the softmax part
/// alone.
fn of_one_part(evidence: &Evidence<'_>, cap: f64) -> Vec<Hypothesis> {
    let bend = |inputs: &MicrobatchInputs| {
        let (direct, scale) =
            (Direct::new(evidence, inputs)?, evidence.step.options.transform.scale);
        let bend_of = |t: usize| match inputs.labels[t] as usize {
            label if label < direct.head.valid_vocab => {
                direct.logit_of(&direct.q(Row::From(t)), label).1 / scale
            }
            _ => 1.0,
        };
        Some((inputs.microbatch, (0..inputs.tokens()).map(bend_of).collect()))
    };
    let bends: BTreeMap<Option<Microbatch>, Vec<f64>> =
        evidence.inputs.iter().filter_map(bend).collect();
    let hypothesis_of = |of_label: bool| {
        let part = if of_label { "the label's part" } else { "the softmax part" };
        let parameters = vec![
            ("softcap", cap.to_string()),
            ("left out", "its derivative".to_string()),
            ("of", part.to_string()),
        ];
        Hypothesis::new(OfOnePart { of_label, bends: bends.clone() }, parameters)
    };
    [true, false].map(hypothesis_of).into()
}

struct OfOnePart {
    of_label: bool,
    /// `1 - tanh²` in the label's column, `[T]` by microbatch.
    bends: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for OfOnePart {
    fn options(&self, options: &mut HeadOptions) {
        options.transform.uncapped = !self.of_label;
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        let Some(bends) = self.bends.get(&tokens.inputs.microbatch) else { return };
        for (label, &row) in label.iter_mut().zip(tokens.rows) {
            *label = if self.of_label { *label / bends[row] } else { *label * bends[row] };
        }
    }
}

/// Caps that fit the captured values of some tokens much better than the declared one: the fitted
/// number, and the round one that it may stand for.
pub fn fitted(evidence: &Evidence<'_>) -> Vec<f64> {
    let transform = evidence.step.options.transform;
    let tokens = RawLogits::of(evidence);
    let error = |cap: f64| tokens.error(Transform { softcap: Some(cap), ..transform });
    let cap_found = least(&error, CAPS).filter(|&cap_found| tokens.believes(cap_found, &error));
    cap_found.map_or(Vec::new(), |cap_found| readings(cap_found, u64::MAX))
}

/// Another cap in the forward and the backward, and in either alone.
fn capped(evidence: &Evidence<'_>, cap: Option<f64>, fitted: usize) -> Vec<Hypothesis> {
    let change = move |options: &mut HeadOptions| options.transform.softcap = cap;
    let declared = evidence.step.options.transform.softcap;
    let words = |cap: Option<f64>| cap.map_or("none".to_string(), shown);
    let parameters = |place: &str| {
        vec![("declared", words(declared)), ("softcap", words(cap)), ("in", place.to_string())]
    };
    let with_lse = |(lse, place): (DeclaredLse, &'static str)| {
        let world = ChangedOptions { change, lse, factor: 1.0 };
        Hypothesis::new(world, parameters(place)).fitted(fitted)
    };
    let mut hypotheses: Vec<Hypothesis> =
        BackwardStarts::of(evidence, &change, 1.0).each().into_iter().map(with_lse).collect();
    if let Some(world) = ForwardOnly::of(evidence, &change, 1.0) {
        let parameters = parameters(FORWARD_ONLY);
        hypotheses.push(Hypothesis::new(world, parameters).fitted(fitted));
    }
    hypotheses
}
