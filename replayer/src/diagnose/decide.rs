//! Which of the tried hypotheses is the cause, which are tied, and when nothing is.
//!
//! A hypothesis is accepted when every comparison that it is to explain passes the test
//! that the declaration failed. Among those accepted one cause wins when it leaves
//! [`CLEAR`] times less energy than the next, or needs fewer fitted numbers for no more
//! energy; otherwise they are tied.

use std::collections::BTreeSet;

use super::evidence::Key;
use super::search::Tried;

/// How many times less energy than the next the winner leaves.
pub const CLEAR: f64 = 10.0;

/// One more fitted number must leave this many times less energy to be believed.
const OCCAM: f64 = 2.0;

/// The accepted hypotheses of one set of comparisons, the best first.
pub struct Decision {
    /// Indices into the tried hypotheses: one is named, several are tied.
    pub winners: Vec<usize>,
    /// The best of the other causes and its energy over the winner's.
    pub next: Option<(usize, f64)>,
}

/// Decides over one set of failing comparisons; `None` when nothing explains all of it.
pub fn decide(tried: &[Tried<'_>], keys: &BTreeSet<Key>) -> Option<Decision> {
    let accepted: Vec<usize> =
        (0..tried.len()).filter(|&at| tried[at].explains.is_superset(keys)).collect();
    let left: Vec<f64> = tried.iter().map(|one| one.left_of(keys)).collect();
    let mut best = best_of_causes(tried, &accepted, &left);
    best.sort_by(|&a, &b| order(tried, &left, a, b));
    let &first = best.first()?;
    let mut winners = vec![first];
    winners.extend(best[1..].iter().copied().filter(|&at| is_tied(tried, &left, first, at)));
    let ids: Vec<&str> = winners.iter().map(|&at| tried[at].cause.id()).collect();
    let others = (0..tried.len()).filter(|&at| !ids.contains(&tried[at].cause.id()));
    let next = others.min_by(|&a, &b| left[a].total_cmp(&left[b]));
    let next = next.map(|at| (at, ratio(left[at], left[first])));
    Some(Decision { winners, next })
}

/// The best accepted hypothesis of each cause.
fn best_of_causes(tried: &[Tried<'_>], accepted: &[usize], left: &[f64]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    for &at in accepted {
        let id = tried[at].cause.id();
        match best.iter_mut().find(|of| tried[**of].cause.id() == id) {
            Some(of) if order(tried, left, at, *of).is_lt() => *of = at,
            Some(_) => {}
            None => best.push(at),
        }
    }
    best
}

/// Energy with a penalty for each fitted number.
fn penalized(tried: &[Tried<'_>], left: &[f64], at: usize) -> f64 {
    left[at] * OCCAM.powi(tried[at].hypothesis.fitted as i32)
}

fn order(tried: &[Tried<'_>], left: &[f64], a: usize, b: usize) -> std::cmp::Ordering {
    let fitted = |at: usize| tried[at].hypothesis.fitted;
    let of = |at| penalized(tried, left, at);
    of(a).total_cmp(&of(b)).then(fitted(a).cmp(&fitted(b)))
}

/// Whether the evidence cannot tell two accepted causes apart.
fn is_tied(tried: &[Tried<'_>], left: &[f64], first: usize, other: usize) -> bool {
    let fitted = |at: usize| tried[at].hypothesis.fitted;
    if fitted(other) > fitted(first) {
        return false; // It buys its fit with numbers that the first does not need.
    }
    ratio(left[other], left[first]) < CLEAR
}

/// How many times more energy one leaves than the other.
fn ratio(one: f64, other: f64) -> f64 {
    match (one, other) {
        (0.0, 0.0) => 1.0,
        (one, other) => one / other,
    }
}

/// Few hypotheses that explain all together what none explains alone: the one that
/// explains most first, then what is left. Each must explain something of its own.
pub fn cover(tried: &[Tried<'_>], keys: &BTreeSet<Key>) -> Option<Vec<(BTreeSet<Key>, Decision)>> {
    let mut left = keys.clone();
    let mut found = Vec::new();
    while !left.is_empty() {
        let gain = |one: &Tried<'_>| one.explains.intersection(&left).count();
        let most = tried.iter().map(gain).max().filter(|&most| most > 0)?;
        // Of equal gain, the set that the least energy is left of.
        let of = |one: &&Tried<'_>| gain(one) == most;
        let best = tried.iter().filter(of).min_by(|a, b| {
            let share =
                |one: &Tried<'_>| one.left_of(&one.explains.intersection(&left).copied().collect());
            share(a).total_cmp(&share(b))
        })?;
        let part: BTreeSet<Key> = best.explains.intersection(&left).copied().collect();
        let decision = decide(tried, &part)?;
        left.retain(|key| !part.contains(key));
        found.push((part, decision));
        if found.len() > MOST {
            return None;
        }
    }
    Some(found)
}

/// Causes that one step is believed to have at once.
const MOST: usize = 3;
