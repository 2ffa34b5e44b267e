//! The labels that rows of dq show, where they differ from the recorded ones.
//!
//! A token's row of dq minus its softmax part is a multiple of one row of k: that of its label. The
//! row is looked for among all classes.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::single_tokens::energy;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// Another label is taken for the one that a token shows if it leaves at most this share of the
/// squared error that the recorded label leaves.
const SHOWN: f64 = 0.1;
/// The labels together may leave at most this share of the squared error to be worth a trial.
const LEFT: f64 = 0.02;

/// With fewer changed labels at ends of runs than this, nothing is concluded where no label before
/// a run is known.
const ENDS: usize = 4;

/// Each microbatch's labels; [`NONE`] for a token whose row lacks the label's part.
pub type Labels = BTreeMap<Option<Microbatch>, Vec<u32>>;

/// The label of a token that counts in the loss, but whose label lies in no rank's shard of the
/// vocabulary.
pub const NONE: u32 = IGNORED - 1;

/// The labels that rows of dq show; none where no label differs, or other labels do not explain the
/// error.
pub fn read(evidence: &Evidence<'_>) -> Option<Labels> {
    let mut labels: Labels =
        evidence.inputs.iter().map(|inputs| (inputs.microbatch, inputs.labels.clone())).collect();
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let plane = evidence.plane(key)?;
        let captured = plane.dq(&*evidence.captured(key)?);
        let mut rest = plane.dense.times(&plane.k);
        rest.values.iter_mut().zip(&captured.values).for_each(|(x, c)| *x = c - *x);
        let towards = rest.times(&plane.k.transposed());
        let norms: Vec<f64> = (0..plane.k.count()).map(|v| energy(plane.k.row(v))).collect();
        for (index, label) in plane.labels.iter().enumerate() {
            let Some((declared_label, entry)) = label.filter(|(_, entry)| *entry != 0.0) else {
                continue;
            };
            // The squared error with label v minus that without a label's part; the recorded
            // label's derivative of the logit is used for all.
            let left_by = |v: usize| entry * (entry * norms[v] - 2.0 * towards.row(index)[v]);
            let best = (0..norms.len()).min_by(|&a, &b| left_by(a).total_cmp(&left_by(b)))?;
            let nothing = energy(rest.row(index));
            let (as_declared, at_best) =
                (nothing + left_by(declared_label), (nothing + left_by(best)).max(0.0));
            before += as_declared;
            // A label is shown only if it leaves much less than the recorded one.
            let shows = |left: f64| left <= SHOWN * as_declared;
            let (read, least) = match (shows(nothing), shows(at_best)) {
                (true, _) if nothing <= at_best => (NONE, nothing),
                (_, true) => (best as u32, at_best),
                _ => (declared_label as u32, as_declared),
            };
            left += least;
            labels.get_mut(&key.microbatch)?[plane.rows[index]] = read;
        }
    }
    let other = evidence
        .inputs
        .iter()
        .flat_map(|inputs| labels[&inputs.microbatch].iter().zip(&inputs.labels));
    // Where labels' parts are only missing, another cause applies.
    let changed = other.clone().any(|(read, own)| read != own && *read != NONE);
    (changed && left <= LEFT * before).then_some(labels)
}

/// The tokens that show another label than recorded: their microbatch, their place in it and that
/// label.
pub fn changed<'a>(
    evidence: &'a Evidence<'_>,
    labels: &Labels,
) -> Vec<(&'a MicrobatchInputs, usize, u32)> {
    let changed_in = |inputs: &'a MicrobatchInputs| {
        let read = labels[&inputs.microbatch].iter().enumerate();
        let other = read.filter(|(t, label)| inputs.labels[*t] != **label);
        other.map(|(t, &label)| (inputs, t, label)).collect::<Vec<_>>()
    };
    evidence.inputs.iter().flat_map(changed_in).collect()
}

/// The length of the runs at whose last tokens alone labels differ, each being the label just
/// before its run. This happens where labels are the token ids shifted by one inside runs, and the
/// last token of a run takes the first id of the same run. The label before the first run of a
/// sequence is not recorded; where no such label is known, nearly all last tokens must differ, and
/// at least `ENDS`.
pub fn length_of_runs(evidence: &Evidence<'_>, labels: &Labels) -> Option<usize> {
    let changed = changed(evidence, labels);
    let common = changed.iter().fold(0, |all, (_, t, _)| common_divisor(all, t + 1));
    let wraps = |length: usize| {
        // A token without weight has no gradient, so its recorded label proves nothing.
        let before = |&&(inputs, t, read): &&(&MicrobatchInputs, usize, u32)| {
            let token = t.checked_sub(length)?;
            let is_known = |label: u32| inputs.weights[token] != 0.0 || label == read;
            Some(inputs.labels[token]).filter(|&label| label != IGNORED && is_known(label))
        };
        let known = changed.iter().filter(|of| before(of).is_some()).count();
        let wrapped = changed.iter().filter(|of| before(of) == Some(of.2)).count();
        let ends = evidence.inputs.iter().flat_map(|inputs| {
            let ends = (length - 1..inputs.tokens()).step_by(length);
            ends.filter(|&t| inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0)
        });
        let ends = ends.count();
        // A single match is chance. Most ends must differ.
        let all_are_known = wrapped >= 2 && wrapped * 2 >= changed.len();
        // A few ends need not differ: the first id of a run may happen to be the right label.
        let none_is_known = known == 0 && changed.len() >= ENDS && changed.len() * 4 >= ends * 3;
        (all_are_known && changed.len() * 2 > ends) || none_is_known
    };
    (2..=common).rev().find(|&length| common % length == 0 && wraps(length))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
