//! `other-labels`: the backward, or all of the loss, takes other labels than the recorded ones,
//! which are no shift of them: those of another rank, or one off where the vocabulary is cut.
//!
//! Detectors: what is left of a token's row of dq without its softmax part is a multiple of one
//! row of k, whose class is sought among all.
//! Emulation: the labels that were read so.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::relabelled::{Labels, changed, length_of_runs};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::rearranged::Relabelled;
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct OtherLabels;

impl Cause for OtherLabels {
    fn id(&self) -> &str {
        "other-labels"
    }

    fn about(&self) -> &str {
        "the loss or its backward takes other labels than the recorded ones"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "a rank that reads another rank's labels",
            "a vocabulary-parallel label offset that is one off on one rank",
        ]
    }

    fn advice(&self) -> &str {
        "print the labels that the loss is called with on the named rank, and how they are mapped to the rows that it holds"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(labels) = evidence.labels_of_rows() else { return Vec::new() };
        if length_of_runs(evidence, labels).is_some() {
            // `label-shift` says how they are.
            return Vec::new();
        }
        let g = Some(evidence.reference().g.clone());
        let words = told(evidence, labels);
        let (words, follows_a_rule) = words;
        let found =
            Hypothesis::new(Relabelled { labels: labels.clone(), g }, vec![("labels", words)]);
        vec![if follows_a_rule { found.fitted(1) } else { found.of_both() }]
    }
}

/// What the labels are, and whether they follow a rule.
fn told(evidence: &Evidence<'_>, labels: &Labels) -> (String, bool) {
    let changed = changed(evidence, labels);
    let Some(&(first, t, label)) = changed.first() else { return (String::new(), false) };
    let n = changed.len();
    let by = i64::from(label) - i64::from(first.labels[t]);
    if changed.iter().all(|(one, t, l)| i64::from(*l) - i64::from(one.labels[*t]) == by) {
        let own = changed.iter().map(|(one, t, _)| one.labels[*t]);
        let (from, to) = (own.clone().min().unwrap_or(0), own.max().unwrap_or(0));
        return (format!("{by:+} for {n} tokens whose labels are {from} to {to}"), true);
    }
    let apart = (1..first.tokens()).find(|apart| {
        changed
            .iter()
            .all(|(one, t, l)| t.checked_sub(*apart).is_some_and(|at| one.labels[at] == *l))
    });
    if let Some(apart) = apart {
        let to = changed.iter().map(|(_, t, _)| *t).max().unwrap_or(t);
        return (format!("tokens {t} to {to} have those of the tokens {apart} before them"), true);
    }
    let was = first.labels[t];
    let was = if was == IGNORED { "none".to_string() } else { was.to_string() };
    (format!("other ones for {n} tokens, the first token {t}: {label} for {was}"), false)
}
