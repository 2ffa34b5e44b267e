//! `other-labels`: the backward, or all of the loss, takes other labels than the recorded ones,
//! which are no shift of them: those of another rank, or one off where the vocabulary is cut.
//!
//! Detectors: what is left of a token's row of dq without its softmax part is a multiple of one
//! row of k, whose class is sought among all.
//! Emulation: the labels that were read so.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::direct::energy;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::rearranged::Relabelled;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct OtherLabels;

/// Share of what its own label leaves that another may, to be the one that a token shows.
const SHOWN: f64 = 0.1;
/// Share of the error that labels may leave to be worth a trial.
const LEFT: f64 = 0.02;

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
        let Some(labels) = read(evidence) else { return Vec::new() };
        let g = Some(evidence.reference().g.clone());
        let words = told(evidence, &labels);
        let (words, follows_a_rule) = words;
        let found = Hypothesis::new(Relabelled { labels, g }, vec![("labels", words)]);
        vec![if follows_a_rule { found.fitted(1) } else { found.of_both() }]
    }
}

type Labels = BTreeMap<Option<Microbatch>, Vec<u32>>;

/// The labels that rows of dq show; none where they are no other labels, or not only that.
fn read(evidence: &Evidence<'_>) -> Option<Labels> {
    let mut found: Labels =
        evidence.inputs.iter().map(|one| (one.microbatch, one.labels.clone())).collect();
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let plane = evidence.plane(key)?;
        let captured = plane.dq(&*evidence.captured(key)?);
        let mut rest = plane.dense.times(&plane.k);
        rest.values.iter_mut().zip(&captured.values).for_each(|(x, c)| *x = c - *x);
        let towards = rest.times(&plane.k.transposed());
        let norms: Vec<f64> = (0..plane.k.count()).map(|v| energy(plane.k.row(v))).collect();
        for (at, label) in plane.labels.iter().enumerate() {
            let Some((own, entry)) = *label else { continue };
            // What a label leaves, less what nothing leaves: its slope is taken for its own's.
            let of = |v: usize| entry * (entry * norms[v] - 2.0 * towards.row(at)[v]);
            let best = (0..norms.len()).min_by(|&a, &b| of(a).total_cmp(&of(b)))?;
            let nothing = energy(rest.row(at));
            let (as_declared, at_best) = (nothing + of(own), (nothing + of(best)).max(0.0));
            before += as_declared;
            // What hardly counts shows no label.
            let read = if at_best <= SHOWN * as_declared { best } else { own };
            left += if read == best { at_best } else { as_declared };
            found.get_mut(&key.microbatch)?[plane.rows[at]] = read as u32;
        }
    }
    let changed = evidence.inputs.iter().any(|one| found[&one.microbatch] != one.labels);
    (changed && left <= LEFT * before).then_some(found)
}

/// What the labels are, and whether they follow a rule.
fn told(evidence: &Evidence<'_>, labels: &Labels) -> (String, bool) {
    let mut changed: Vec<(&MicrobatchInputs, usize, u32)> = Vec::new();
    for one in evidence.inputs {
        let of = labels[&one.microbatch].iter().enumerate();
        changed.extend(of.filter(|(t, l)| one.labels[*t] != **l).map(|(t, &l)| (one, t, l)));
    }
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
