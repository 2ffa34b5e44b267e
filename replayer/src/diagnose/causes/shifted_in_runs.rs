//! Labels that the job shifted inside other runs of tokens than sequences. Either across the ends
//! of sequences, because rows were flattened before the shift and the last token of a sequence
//! takes the first label of the next one; or only inside the part of a sequence that a rank holds.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::{RecordedCounts, Relabelled};
use crate::diagnose::detectors::shown_labels::Labels;
use crate::diagnose::detectors::token_runs::{TokenRuns, known, of_ranks};
use crate::diagnose::evidence::Evidence;
use crate::head::MicrobatchInputs;
use crate::kernels::matrix::IGNORED;

/// The hypotheses, where the head declares that it shifts labels inside each sequence: the job
/// shifted labels and their weights inside other runs.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let kinds = evidence.inputs.first().map_or(0, |inputs| runs(evidence, inputs).len());
    if evidence.step.options.declared.labels_shifted {
        return Vec::new();
    }
    let mut hypotheses = Vec::new();
    for (kind, wraps) in (0..kinds).flat_map(|kind| [(kind, false), (kind, true)]) {
        let Some(Shifted { labels, weights, name }) = shifted(evidence, kind, wraps) else {
            continue;
        };
        let ends = if wraps { "wrapped around" } else { "ignored" };
        for (keeps, count) in [(false, "of the shifted labels"), (true, "as declared")] {
            let counts = keeps.then(|| RecordedCounts::new(evidence));
            let parameters = vec![
                ("shift", "1".to_string()),
                ("over", format!("{name}, where it should be inside each sequence")),
                ("ends", ends.to_string()),
                ("count", count.to_string()),
            ];
            let (labels, weights) = (labels.clone(), weights.clone());
            let world = Relabelled { labels, counts, weights, ..Relabelled::default() };
            hypotheses.push(Hypothesis::new(world, parameters));
        }
    }
    hypotheses
}

/// The divisions into runs, other than sequences, inside which labels may have been shifted.
fn runs(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<TokenRuns> {
    let mut divisions = known(evidence.step, inputs);
    let sequences = divisions.remove(0);
    let length = inputs.sequence.max(1);
    let mut parts = Vec::new();
    for run in of_ranks(evidence.step, inputs) {
        let same = |a: &usize, b: &usize| a / length == b / length;
        parts.extend(run.chunk_by(same).map(<[usize]>::to_vec));
    }
    let cut = parts.len() > sequences.runs.len();
    let name = "each rank's part of each sequence".to_string();
    divisions.extend(cut.then_some(TokenRuns { name, runs: parts }));
    divisions
}

/// Labels and weights of every microbatch after a shift by one inside the runs of one division.
struct Shifted {
    labels: Labels,
    weights: BTreeMap<Option<Microbatch>, Vec<f64>>,
    name: String,
}

fn shifted(evidence: &Evidence<'_>, kind: usize, wraps: bool) -> Option<Shifted> {
    let mut shifted =
        Shifted { labels: Labels::new(), weights: BTreeMap::new(), name: String::new() };
    for inputs in evidence.inputs {
        let (n, runs_of_tokens) = (inputs.tokens(), runs(evidence, inputs).into_iter().nth(kind)?);
        let from: Vec<Option<usize>> = match wraps {
            true => runs_of_tokens.rolled(n, 1).into_iter().map(Some).collect(),
            false => runs_of_tokens.shifted(n, 1),
        };
        let labels = evidence.step.recorded_labels(inputs)?;
        let labels = from.iter().map(|from| from.map_or(IGNORED, |from| labels[from]));
        shifted.labels.insert(inputs.microbatch, labels.collect());
        let weights = evidence.step.recorded_weights(inputs)?;
        let weights = from.iter().map(|from| from.map_or(0.0, |from| weights[from]));
        shifted.weights.insert(inputs.microbatch, weights.collect());
        shifted.name = runs_of_tokens.name;
    }
    Some(shifted)
}
