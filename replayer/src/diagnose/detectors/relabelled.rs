//! The labels that rows of dq show, where they are others than the recorded ones.
//!
//! What is left of a token's row of dq without its softmax part is a multiple of one row of k,
//! whose class is sought among all.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::direct::energy;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// Share of what its own label leaves that another may, to be the one that a token shows.
const SHOWN: f64 = 0.1;
/// Share of the error that labels may leave to be worth a trial.
const LEFT: f64 = 0.02;

/// Ends of runs that must all be others, where nothing says what they should have become.
const ENDS: usize = 4;

/// Each microbatch's labels; [`NONE`] of a token whose label's part is missing.
pub type Labels = BTreeMap<Option<Microbatch>, Vec<u32>>;

/// No class at all, of a token that counts: a label that no rank takes for one of its own.
pub const NONE: u32 = IGNORED - 1;

/// The labels that rows of dq show; none where they are no other labels, or not only that.
pub fn read(evidence: &Evidence<'_>) -> Option<Labels> {
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
            let Some((own, entry)) = label.filter(|(_, entry)| *entry != 0.0) else { continue };
            // What a label leaves, less what nothing leaves: its slope is taken for its own's.
            let of = |v: usize| entry * (entry * norms[v] - 2.0 * towards.row(at)[v]);
            let best = (0..norms.len()).min_by(|&a, &b| of(a).total_cmp(&of(b)))?;
            let nothing = energy(rest.row(at));
            let (as_declared, at_best) = (nothing + of(own), (nothing + of(best)).max(0.0));
            before += as_declared;
            // What hardly counts shows no label.
            let shows = |left: f64| left <= SHOWN * as_declared;
            let (read, least) = match (shows(nothing), shows(at_best)) {
                (true, _) if nothing <= at_best => (NONE, nothing),
                (_, true) => (best as u32, at_best),
                _ => (own as u32, as_declared),
            };
            left += least;
            found.get_mut(&key.microbatch)?[plane.rows[at]] = read;
        }
    }
    let other =
        evidence.inputs.iter().flat_map(|one| found[&one.microbatch].iter().zip(&one.labels));
    // Labels that are missing alone are another fault's.
    let changed = other.clone().any(|(read, own)| read != own && *read != NONE);
    (changed && left <= LEFT * before).then_some(found)
}

/// The tokens that another label was read for: their microbatch, place and that label.
pub fn changed<'a>(
    evidence: &'a Evidence<'_>,
    labels: &Labels,
) -> Vec<(&'a MicrobatchInputs, usize, u32)> {
    let of = |one: &'a MicrobatchInputs| {
        let read = labels[&one.microbatch].iter().enumerate();
        let other = read.filter(|(t, label)| one.labels[*t] != **label);
        other.map(|(t, &label)| (one, t, label)).collect::<Vec<_>>()
    };
    evidence.inputs.iter().flat_map(of).collect()
}

/// How long the runs are at whose ends alone labels are others, each the label that stands just
/// before its run: what is left where labels are shifted inside runs, and each run's last token
/// takes the run's first id. The label before the first run of a sequence is not recorded: where
/// none is, nearly all of the ends are to be others, and some of them.
pub fn length_of_runs(evidence: &Evidence<'_>, labels: &Labels) -> Option<usize> {
    let changed = changed(evidence, labels);
    let common = changed.iter().fold(0, |all, (_, t, _)| common_divisor(all, t + 1));
    let wraps = |length: usize| {
        // A token without weight may have been given any label.
        let before = |&&(one, t, read): &&(&MicrobatchInputs, usize, u32)| {
            let at = t.checked_sub(length)?;
            let is_known = |label: u32| one.weights[at] != 0.0 || label == read;
            Some(one.labels[at]).filter(|&label| label != IGNORED && is_known(label))
        };
        let known = changed.iter().filter(|of| before(of).is_some()).count();
        let wrapped = changed.iter().filter(|of| before(of) == Some(of.2)).count();
        let ends = evidence.inputs.iter().flat_map(|one| {
            let ends = (length - 1..one.tokens()).step_by(length);
            ends.filter(|&t| one.labels[t] != IGNORED && one.weights[t] != 0.0)
        });
        let ends = ends.count();
        // One label that stands where it would is chance; most ends have to be others.
        let all_are_known = wrapped >= 2 && wrapped * 2 >= changed.len();
        // A run's first id may be the right label by chance.
        let none_is_known = known == 0 && changed.len() >= ENDS && changed.len() * 4 >= ends * 3;
        (all_are_known && changed.len() * 2 > ends) || none_is_known
    };
    (2..=common).rev().find(|&length| common % length == 0 && wraps(length))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
