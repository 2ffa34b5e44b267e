//! How often rows of the vocabulary are labels.

use super::microbatch::HeadMicrobatch;
use crate::kernels::matrix::IGNORED;

/// For each token, how many tokens have its label.
pub(super) fn tokens_of_label(labels: &[u32]) -> Vec<f64> {
    let mut counts = std::collections::HashMap::new();
    labels.iter().for_each(|label| *counts.entry(label).or_insert(0.0) += 1.0);
    labels.iter().map(|label| counts[label]).collect()
}

/// Label hits of every row of k, over all microbatches.
pub(super) fn hits(microbatches: &[HeadMicrobatch], rows: usize) -> Vec<u32> {
    let mut hits = vec![0; rows];
    for &label in microbatches.iter().flat_map(|microbatch| &microbatch.inputs.labels) {
        if label != IGNORED && (label as usize) < rows {
            hits[label as usize] += 1;
        }
    }
    hits
}
