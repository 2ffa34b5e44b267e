//! `zero-times-inf`: the vocabulary's padding is masked by -inf, and something multiplies it
//! by 0: NaN for every token, or in the rows of the padding.
//!
//! Detectors: the declared mask is -inf and there is padding; the NaNs are those of every token
//! that counts, or lie in the padding alone. Emulation: NaN there, and the reference elsewhere.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::nan::{NanWhere, Nans, nans};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct ZeroTimesInf;

impl Cause for ZeroTimesInf {
    fn id(&self) -> &str {
        "zero-times-inf"
    }

    fn about(&self) -> &str {
        "the -inf of the masked vocabulary is multiplied by 0: NaN"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["MLLM-JAX 2aa7661"]
    }

    fn advice(&self) -> &str {
        "gather the label's logit instead of multiplying by a one-hot, or mask by a large finite number"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let declared = &evidence.step.options.declared;
        let infinite = declared.mask_value.is_none_or(|mask| mask == f64::NEG_INFINITY);
        let padded = |inputs: &MicrobatchInputs| {
            inputs.head(evidence.step).is_some_and(|head| head.valid_vocab < head.k.rows)
        };
        if !infinite || !evidence.inputs.iter().all(padded) {
            return Vec::new();
        }
        let Some(nans_found) = nans(evidence) else { return Vec::new() };
        if !nans_found.masks.keys().all(|&key| is_everywhere(evidence, &nans_found, key)) {
            return Vec::new();
        }
        let parameters = vec![
            ("mask", "-inf".to_string()),
            ("first stage", nans_found.first.stage.name().to_string()),
        ];
        let hypothesis_of = |distrusts: Vec<Stage>| {
            let world = NanWhere { masks: nans_found.masks.clone(), distrusts };
            Hypothesis::new(world, parameters.clone()).fitted(1)
        };
        vec![hypothesis_of(Vec::new()), hypothesis_of(vec![nans_found.first.stage])]
    }
}

/// Whether a comparison's NaNs are the rows of every token that counts, or exactly the rows of the
/// padding, or all its values.
fn is_everywhere(evidence: &Evidence<'_>, nans: &Nans, key: Key) -> bool {
    let mask = &nans.masks[&key].1;
    if mask.iter().all(|&bad| bad) {
        return true;
    }
    let Some(inputs) = evidence.inputs_of(key.microbatch) else { return false };
    let bad = nans.rows(key, true);
    if bad.len() != nans.rows(key, false).len() {
        return false;
    }
    if key.stage >= Stage::DkLse {
        let rows = mask.len() / nans.masks[&key].0.max(1);
        return bad == (inputs.valid_vocab..rows).collect::<Vec<usize>>();
    }
    let counts = |t: usize| inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0;
    let all = (0..inputs.tokens()).filter(|&t| counts(t));
    all.count() > 1 && (0..inputs.tokens()).all(|t| !counts(t) || bad.binary_search(&t).is_ok())
}
