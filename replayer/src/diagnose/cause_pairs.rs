//! Pairs of causes that together explain what no single cause explains.

use std::collections::BTreeSet;

use super::cause::Cause;
use super::decision::{CLEAR, decide};
use super::evidence::{Evidence, Key};
use super::findings::{self, CauseReport, Standing};
use super::search::{self, Search, Tried};
use crate::replay::world::World;

/// How many hypotheses are each tried together with every other cause, of those that remove most of
/// the error.
const PARTNERS: usize = 6;
/// The same, of those that explain some comparisons and make others worse.
const EXPLAINING: usize = 2;
/// The first cause of a pair must remove at least this share of the energy above the floor.
const PARTIAL: f64 = 0.2;

/// Pairs of causes in the same comparisons: the second explains the error that remains in the world
/// of the first.
pub(super) fn pairs_of_causes<'a>(
    search: &'a Search<'a>,
    catalogue: &[&dyn Cause],
    tried: &'a [Tried<'_>],
    evidence: &Evidence<'a>,
) -> Option<Vec<CauseReport>> {
    let partners = partners(tried, evidence);
    let mut pairs: Vec<Pair<'_>> = Vec::new();
    for first in partners {
        let world: &dyn World = &*first.hypothesis.world;
        let mut inner = Evidence::new(
            evidence.step,
            evidence.outcome,
            evidence.inputs,
            first.residuals.clone(),
            vec![world],
        )
        .searched_by(search);
        // Comparisons that pass as declared may fail in the world of the first cause; the second
        // does not have to explain those.
        inner.failing.retain(|key| evidence.failing.contains(key));
        let second = search.all(catalogue, &inner);
        let other =
            |trial: &Tried<'_>| trial.cause.id() != first.cause.id() && !trial.hypothesis.per_token;
        let second: Vec<Tried<'_>> = second.into_iter().filter(other).collect();
        let Some(decision) = decide(&second, &inner.failing) else { continue };
        // Little error remains for the second cause, and many causes explain little, so it must
        // leave far less than any other.
        if decision.next.is_some_and(|(_, by)| by < CLEAR) {
            continue;
        }
        let said = findings::of_decision(&second, &decision, &inner.failing, &inner);
        for (&index, said) in decision.winners.iter().zip(said) {
            let winner = &second[index];
            let mut ids = [first.cause.id(), winner.cause.id()];
            ids.sort_unstable();
            let worlds = [world, &*winner.hypothesis.world];
            let known = pairs.iter().any(|pair| pair.ids == ids && pair.sure);
            // Skips a pair that is already known in the other order, and one that passes on the
            // sample but not on all rows.
            if known || search.rows.is_some() && !search.holds(&worlds, &inner.failing) {
                continue;
            }
            // The second cause may concern one gradient alone: of the comparisons that the first
            // explains, the energy that the first leaves counts.
            let done: BTreeSet<Key> =
                evidence.failing.difference(&inner.failing).copied().collect();
            let left = winner.left_of(&inner.failing) + first.left_of(&done);
            let causes = vec![findings::partner(first, left, evidence), said];
            pairs.push(Pair { ids, left, causes, sure: decision.winners.len() == 1 });
        }
    }
    // When the budget ran out, an untried pair might explain as much, so none is reported.
    if search.meter.is_spent() { None } else { best_pairs(pairs) }
}

/// The candidates for the first cause of a pair: those that remove most of the energy, and those
/// that explain most comparisons although they make others worse.
fn partners<'a, 'c>(tried: &'a [Tried<'c>], evidence: &Evidence<'_>) -> Vec<&'a Tried<'c>> {
    let before = search::left_of(&evidence.residuals, &evidence.failing);
    let floor = evidence.failing.len() as f64;
    let tried = || tried.iter().filter(|trial| !trial.hypothesis.per_token);
    let removes = |trial: &&Tried<'_>| before - trial.left > PARTIAL * (before - floor).max(0.0);
    let mut partners: Vec<&Tried<'_>> = tried().filter(removes).collect();
    partners.sort_by(|a, b| a.left.total_cmp(&b.left));
    partners.truncate(PARTNERS);
    let explains = |trial: &&Tried<'_>| !removes(trial) && !trial.explains.is_empty();
    let mut explaining: Vec<&Tried<'_>> = tried().filter(explains).collect();
    explaining.sort_by_key(|trial| std::cmp::Reverse(trial.explains.len()));
    partners.extend(explaining.into_iter().take(EXPLAINING));
    partners
}

/// Two causes that together explain everything.
struct Pair<'a> {
    ids: [&'a str; 2],
    left: f64,
    causes: Vec<CauseReport>,
    /// True when no other second cause explains as much together with the first.
    sure: bool,
}

/// The causes of the pair that leaves least energy. Where several pairs leave nearly as little, the
/// causes that are in all of these pairs are named, and the others are tied.
fn best_pairs(mut pairs: Vec<Pair<'_>>) -> Option<Vec<CauseReport>> {
    pairs.sort_by(|a, b| a.left.total_cmp(&b.left));
    let least = pairs.iter().find(|pair| pair.sure)?.left;
    pairs.retain(|pair| !(pair.left >= CLEAR * least.max(f64::MIN_POSITIVE)));
    let common = |id: &str| pairs.iter().all(|pair| pair.ids.contains(&id));
    let mut all: Vec<CauseReport> = Vec::new();
    for finding in pairs.iter().flat_map(|pair| &pair.causes) {
        if all.iter().all(|known| known.id != finding.id) {
            let standing = if common(&finding.id) { finding.standing } else { Standing::Tied };
            all.push(CauseReport { standing, ..finding.clone() });
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn cause_of_id(id: &str) -> CauseReport {
        CauseReport {
            id: id.into(),
            standing: Standing::Named,
            explained: 1.0,
            norm_gap_explained: None,
            beats_next_by: None,
            next: None,
            bit_equal: false,
            parameters: BTreeMap::new(),
            stages: Vec::new(),
            residuals: Vec::new(),
            evidence: String::new(),
            advice: String::new(),
        }
    }

    fn pair<'a>(ids: [&'a str; 2], left: f64, sure: bool) -> Pair<'a> {
        Pair { ids, left, causes: ids.map(cause_of_id).into(), sure }
    }

    fn standings(pairs: Vec<Pair<'_>>) -> Vec<(String, Standing)> {
        let all = best_pairs(pairs).unwrap_or_default();
        all.into_iter().map(|cause| (cause.id, cause.standing)).collect()
    }

    #[test]
    fn what_not_every_pair_holds_is_tied_and_what_all_hold_is_named() {
        let all = vec![pair(["a", "b"], 1.0, true), pair(["a", "c"], 3.0, false)];
        let wanted = [("a", Standing::Named), ("b", Standing::Tied), ("c", Standing::Tied)];
        assert_eq!(standings(all), wanted.map(|(id, standing)| (id.to_string(), standing)));
    }

    #[test]
    fn a_pair_that_leaves_ten_times_more_ties_with_nothing() {
        let all = vec![pair(["a", "c"], 10.0, true), pair(["a", "b"], 1.0, true)];
        assert!(standings(all).iter().all(|(_, standing)| *standing == Standing::Named));
    }

    #[test]
    fn pairs_of_which_none_is_sure_are_not_believed() {
        assert_eq!(standings(vec![pair(["a", "b"], 1.0, false), pair(["a", "c"], 1.0, false)]), []);
    }
}
