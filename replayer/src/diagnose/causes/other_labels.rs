//! `other-labels`: the backward, or all of the loss, takes other labels than the recorded ones,
//! which are no shift of them: those of another rank, or one off where the vocabulary is cut.
//!
//! Detectors: a token's row of dq minus its softmax part is a multiple of one row of k: the class
//! of that row is searched among all. Emulation: the labels that were found.

use std::collections::BTreeMap;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::Relabelled;
use crate::diagnose::detectors::shown_labels::{Labels, NONE, changed, length_of_runs};
use crate::diagnose::evidence::Evidence;
use crate::kernels::matrix::IGNORED;

/// The report gives the labels by ranges of classes if there are at most this many ranges, and each
/// has on average at least [`CLASSES`] classes.
const PARTS: usize = 16;
const CLASSES: usize = 3;

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
            // `label-shift` explains these labels.
            return Vec::new();
        }
        let g = Some(evidence.reference().g.clone());
        let words = labels_in_words(evidence, labels);
        let (words, follows_a_rule) = words;
        let world = Relabelled { labels: labels.clone(), g, ..Relabelled::default() };
        let hypothesis = Hypothesis::new(world, vec![("labels", words)]);
        vec![if follows_a_rule { hypothesis.fitted(1) } else { hypothesis.with_number_per_token() }]
    }
}

/// The labels in words, and whether they follow a rule.
fn labels_in_words(evidence: &Evidence<'_>, labels: &Labels) -> (String, bool) {
    let (missing, changed): (Vec<_>, Vec<_>) =
        changed(evidence, labels).into_iter().partition(|(.., label)| *label == NONE);
    let Some(&(first, t, label)) = changed.first() else { return (String::new(), false) };
    let none = match missing.len() {
        0 => String::new(),
        n => format!("; none for {n} tokens"),
    };
    if let Some(words) = by_classes(evidence, labels) {
        return (words + &none, true);
    }
    let apart = (1..first.tokens()).find(|apart| {
        changed
            .iter()
            .all(|(inputs, t, l)| t.checked_sub(*apart).is_some_and(|at| inputs.labels[at] == *l))
    });
    if let Some(apart) = apart {
        let to = changed.iter().map(|(_, t, _)| *t).max().unwrap_or(t);
        let words = format!("tokens {t} to {to} have those of the tokens {apart} before them");
        return (words + &none, true);
    }
    let (n, was) = (changed.len(), first.labels[t]);
    let was = if was == IGNORED { "none".to_string() } else { was.to_string() };
    let words = format!("other ones for {n} tokens, the first token {t}: {label} for {was}");
    (words + &none, false)
}

/// In words: labels in each range of classes are off by one number, as where a vocabulary is cut
/// into shards and a shard begins at another class than assumed. `None` where that is not so.
fn by_classes(evidence: &Evidence<'_>, labels: &Labels) -> Option<String> {
    let mut off: BTreeMap<u32, i64> = BTreeMap::new();
    for inputs in evidence.inputs {
        for (&declared, &read) in inputs.labels.iter().zip(&labels[&inputs.microbatch]) {
            if [declared, read].iter().any(|label| [IGNORED, NONE].contains(label)) {
                continue;
            }
            let by = i64::from(read) - i64::from(declared);
            if *off.entry(declared).or_insert(by) != by {
                return None;
            }
        }
    }
    let mut runs: Vec<(u32, u32, i64)> = Vec::new();
    for (&class, &by) in &off {
        match runs.last_mut() {
            Some((_, to, same)) if *same == by => *to = class,
            _ => runs.push((class, class, by)),
        }
    }
    let told = runs.len() <= PARTS && runs.len() * CLASSES <= off.len();
    let all: Vec<String> = runs
        .iter()
        .filter(|(.., by)| *by != 0)
        .map(|(from, to, by)| format!("{by:+} for labels {from} to {to}"))
        .collect();
    told.then(|| all.join(", "))
}
