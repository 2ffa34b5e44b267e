//! Tokens that have their neighbours' weights: a mask that was shifted once too often, or not at
//! all.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::token_runs::known;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// By how many positions weights may be shifted.
const MOVES: [isize; 4] = [1, -1, 2, -2];

/// Other weights in the loss and in all gradients, `[T]` by microbatch.
struct ShiftedWeights {
    weights: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for ShiftedWeights {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if let Some(weights) = self.weights.get(&inputs.microbatch) {
            inputs.weights.clone_from(weights);
        }
    }
}

/// One hypothesis for each shift, inside sequences, ranks' tokens and the batch. Only where weights
/// differ, and the failing rows of dq, if there are any, are nonzero exactly where the shifted
/// weights are.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let differ = |inputs: &MicrobatchInputs| inputs.weights.iter().any(|x| *x != inputs.weights[0]);
    let fails = evidence.fails_any(&[&Stage::GRADIENTS[..], &[Stage::Loss]].concat());
    if !fails || !evidence.inputs.iter().any(differ) {
        return Vec::new();
    }
    let kinds = evidence.inputs.first().map_or(0, |inputs| known(evidence.step, inputs).len());
    let mut hypotheses = Vec::new();
    for kind in 0..kinds {
        for by in MOVES {
            for around in [false, true] {
                hypotheses.extend(moved(evidence, (kind, by, around)));
            }
        }
    }
    hypotheses
}

fn moved(evidence: &Evidence<'_>, (kind, by, around): (usize, isize, bool)) -> Option<Hypothesis> {
    let (mut weights, mut name) = (BTreeMap::new(), String::new());
    for inputs in evidence.inputs {
        let (n, extent) = (inputs.tokens(), known(evidence.step, inputs).into_iter().nth(kind)?);
        let moved: Vec<f64> = match around {
            true => extent.rolled(n, by).into_iter().map(|from| inputs.weights[from]).collect(),
            false => {
                let from = extent.shifted(n, by).into_iter();
                from.map(|from| from.map_or(0.0, |from| inputs.weights[from])).collect()
            }
        };
        if !shows(evidence, inputs, &moved) {
            return None;
        }
        weights.insert(inputs.microbatch, moved);
        name = extent.name;
    }
    let (distance, ends) = (
        if by > 0 { format!("{by} after") } else { format!("{} before", -by) },
        if around { "around the end" } else { "none beyond the end" },
    );
    let words = format!("with the weight of the token {distance} it in {name}, {ends}");
    Some(Hypothesis::new(ShiftedWeights { weights }, vec![("each token counts", words)]))
}

/// Whether the failing rows of dq are nonzero exactly where these weights are.
fn shows(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, weights: &[f64]) -> bool {
    let is_dq = |key: &&Key| key.stage == Stage::Dq && key.microbatch == inputs.microbatch;
    let all: Vec<_> = evidence.failing.iter().filter(is_dq).collect();
    all.into_iter().all(|key| {
        let Some(captured) = evidence.captured(*key) else { return true };
        let Some(table) = evidence.reference().stages.get(key) else { return true };
        let fits = |&t: &usize| {
            let holds = captured.row(t).iter().any(|x| *x != 0.0);
            inputs.labels[t] == IGNORED || holds == (weights[t] != 0.0)
        };
        table.keys().all(fits)
    })
}
