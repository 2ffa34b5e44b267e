//! Decides which of the tried hypotheses is the cause, which are tied, and when the cause is
//! unknown.
//!
//! A hypothesis is accepted when every comparison that it is to explain passes, in its world, the
//! test that failed as declared. Among the accepted ones a cause wins when it leaves [`CLEAR`]
//! times less energy than the next, or when the next costs more (fitted numbers and
//! counterevidence) and leaves no less after a penalty for that; otherwise they are tied.

use std::collections::BTreeSet;

use super::evidence::Key;
use super::search::Tried;

/// The winner leaves at least this many times less energy than the next cause.
pub const CLEAR: f64 = 10.0;

/// A hypothesis with one more fitted number is preferred only if it leaves this many times less
/// energy.
const OCCAM: f64 = 2.0;

/// The accepted hypotheses for one set of comparisons, the best first.
pub struct Decision {
    /// Indices into the tried hypotheses: one is named, several are tied.
    pub winners: Vec<usize>,
    /// The best of the other causes, and how many times as much energy as the winner it leaves.
    pub next: Option<(usize, f64)>,
}

/// Decides over one set of failing comparisons; `None` when nothing explains all of it.
pub fn decide(tried: &[Tried<'_>], keys: &BTreeSet<Key>) -> Option<Decision> {
    let accepted: Vec<usize> =
        (0..tried.len()).filter(|&at| tried[at].explains.is_superset(keys)).collect();
    let left: Vec<f64> = tried.iter().map(|trial| trial.left_of(keys)).collect();
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

/// The best accepted hypothesis of each cause. One with a number for every token leaves less energy
/// than any rule with a few parameters, because it also follows the rounding of each row. It
/// therefore counts only where none of its cause with few parameters is accepted.
fn best_of_causes(tried: &[Tried<'_>], accepted: &[usize], left: &[f64]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    let is_per_token = |at: usize| tried[at].hypothesis.per_token;
    let before = |a: usize, b: usize| match (is_per_token(a), is_per_token(b)) {
        (false, true) => true,
        (true, false) => false,
        _ => order(tried, left, a, b).is_lt(),
    };
    for &index in accepted {
        let id = tried[index].cause.id();
        match best.iter_mut().find(|of| tried[**of].cause.id() == id) {
            Some(of) if before(index, *of) => *of = index,
            Some(_) => {}
            None => best.push(index),
        }
    }
    best
}

/// Energy left, times a penalty for each fitted number.
fn penalized(tried: &[Tried<'_>], left: &[f64], index: usize) -> f64 {
    left[index] * OCCAM.powf(tried[index].cost())
}

fn order(tried: &[Tried<'_>], left: &[f64], a: usize, b: usize) -> std::cmp::Ordering {
    let cost = |at: usize| tried[at].cost();
    let penalized_energy = |at| penalized(tried, left, at);
    penalized_energy(a).total_cmp(&penalized_energy(b)).then(cost(a).total_cmp(&cost(b)))
}

/// Whether the evidence cannot tell two accepted causes apart.
fn is_tied(tried: &[Tried<'_>], left: &[f64], first: usize, other: usize) -> bool {
    if tried[other].cost() > tried[first].cost() {
        return false; // It buys its fit with numbers, or needs exceptions, that the first does not.
    }
    ratio(left[other], left[first]) < CLEAR
}

/// How many times as much energy one leaves as the other.
fn ratio(energy: f64, other: f64) -> f64 {
    match (energy, other) {
        (0.0, 0.0) => 1.0,
        (value, other) => value / other,
    }
}

/// A few hypotheses that together explain what none explains alone, chosen greedily: first the one
/// that explains most comparisons, then the one that explains most of the rest, and so on. None
/// where that takes more than `MOST`.
pub fn cover(tried: &[Tried<'_>], keys: &BTreeSet<Key>) -> Option<Vec<(BTreeSet<Key>, Decision)>> {
    let mut left = keys.clone();
    let mut parts = Vec::new();
    while !left.is_empty() {
        let gain = |trial: &Tried<'_>| trial.explains.intersection(&left).count();
        let most = tried.iter().map(gain).max().filter(|&most| most > 0)?;
        // Of those that explain equally many, the one that leaves least energy in them.
        let gains_most = |trial: &&Tried<'_>| gain(trial) == most;
        let best = tried.iter().filter(gains_most).min_by(|a, b| {
            let share = |trial: &Tried<'_>| {
                trial.left_of(&trial.explains.intersection(&left).copied().collect())
            };
            share(a).total_cmp(&share(b))
        })?;
        let part: BTreeSet<Key> = best.explains.intersection(&left).copied().collect();
        let decision = decide(tried, &part)?;
        left.retain(|key| !part.contains(key));
        parts.push((part, decision));
        if parts.len() > MOST {
            return None;
        }
    }
    Some(parts)
}

/// A step is not believed to have more causes than this at once.
const MOST: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::cause::{Cause, Hypothesis};
    use crate::diagnose::counterevidence::{Counterevidence, Part};
    use crate::diagnose::evidence::{Evidence, Residual, Residuals};
    use crate::head::Stage;
    use crate::replay::world::Declared;

    struct Named(&'static str);

    impl Cause for Named {
        fn id(&self) -> &str {
            self.0
        }
        fn about(&self) -> &str {
            "about"
        }
        fn cases(&self) -> &'static [&'static str] {
            &[]
        }
        fn advice(&self) -> &str {
            "advice"
        }
        fn hypotheses(&self, _: &Evidence<'_>) -> Vec<Hypothesis> {
            Vec::new()
        }
    }

    const ONE: Named = Named("one");
    const TWO: Named = Named("two");

    fn key(stage: Stage) -> Key {
        Key { stage, microbatch: None, rank: None }
    }

    /// A hypothesis that leaves energies of `dq` and `dk` times the floor; a comparison passes up
    /// to 1.5.
    fn tried<'c>(cause: &'c dyn Cause, dq: f64, dk: f64, fitted: usize) -> Tried<'c> {
        let residual = |energy: f64| Residual {
            energy,
            floor: 1.0,
            reference: 100.0,
            captured: 100.0,
            factor: 1.0,
            elements: 100,
            rows: 10.0,
            nonfinite: 0,
            passes: energy <= 1.5,
            overshoot: energy / 1.5,
        };
        let residuals: Residuals =
            [(key(Stage::Dq), residual(dq)), (key(Stage::Dk), residual(dk))].into_iter().collect();
        let explains =
            residuals.iter().filter(|(_, residual)| residual.passes).map(|(&key, _)| key).collect();
        let hypothesis = Hypothesis::new(Declared, Vec::new()).fitted(fitted);
        let against = Counterevidence::default();
        Tried { cause, hypothesis, residuals, explains, left: dq + dk, full: true, against }
    }

    fn both() -> BTreeSet<Key> {
        BTreeSet::from([key(Stage::Dq), key(Stage::Dk)])
    }

    fn winners(all: &[Tried<'_>]) -> Option<Vec<usize>> {
        decide(all, &both()).map(|decision| decision.winners)
    }

    #[test]
    fn what_no_hypothesis_explains_whole_is_not_decided() {
        assert!(winners(&[tried(&ONE, 0.5, 9.0, 0), tried(&TWO, 9.0, 0.5, 0)]).is_none());
        assert!(winners(&[]).is_none());
    }

    #[test]
    fn of_two_that_pass_the_clearly_nearer_is_named_and_else_they_are_tied() {
        let near = || tried(&ONE, 0.01, 0.01, 0);
        assert_eq!(winners(&[tried(&TWO, 1.0, 1.0, 0), near()]), Some(vec![1]));
        assert_eq!(winners(&[near(), tried(&TWO, 0.02, 0.02, 0)]).unwrap().len(), 2);
    }

    #[test]
    fn parameters_of_one_cause_do_not_tie_with_each_other() {
        let all = [tried(&ONE, 1.0, 1.0, 0), tried(&ONE, 0.9, 0.9, 0)];
        assert_eq!(winners(&all), Some(vec![1]));
    }

    #[test]
    fn a_fitted_number_does_not_beat_one_that_the_dump_declares() {
        let all = [tried(&ONE, 0.9, 0.9, 1), tried(&TWO, 1.0, 1.0, 0)];
        assert_eq!(winners(&all), Some(vec![1]));
        // Where it leaves clearly less, it is believed.
        let all = [tried(&ONE, 0.01, 0.01, 1), tried(&TWO, 1.0, 1.0, 0)];
        assert_eq!(winners(&all), Some(vec![0]));
    }

    #[test]
    fn what_a_part_that_agrees_speaks_against_does_not_tie() {
        let mut other = tried(&TWO, 1.0, 1.0, 0);
        other.against.parts.insert(Part::Forward);
        assert_eq!(winners(&[other, tried(&ONE, 1.0, 1.0, 0)]), Some(vec![1]));
    }

    #[test]
    fn nan_is_never_explained_by_what_leaves_it() {
        assert!(winners(&[tried(&ONE, f64::NAN, 0.1, 0)]).is_none());
    }

    #[test]
    fn bit_equality_beats_what_is_only_within_rounding() {
        assert_eq!(winners(&[tried(&TWO, 0.4, 0.4, 0), tried(&ONE, 0.0, 0.0, 0)]), Some(vec![1]));
    }

    #[test]
    fn two_causes_that_explain_one_stage_each_cover_both() {
        let all = [tried(&ONE, 0.5, 9.0, 0), tried(&TWO, 9.0, 0.5, 0)];
        let parts = cover(&all, &both()).unwrap();
        let winners: BTreeSet<usize> = parts.iter().map(|(_, d)| d.winners[0]).collect();
        assert_eq!((parts.len(), winners), (2, BTreeSet::from([0, 1])));
        assert!(cover(&all[..1], &both()).is_none());
    }
}
