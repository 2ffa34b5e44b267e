//! What of a step was not judged, by reason: parameters with one reason together, and ranks of
//! which the same is to be said.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;

use super::names::pattern;
use super::outcome::{Judged, Outcome, Stage};
use super::summary::Unchecked;
use crate::dump::name_ranks;

/// How a reason goes on behind the rank that it begins with, of one rank and of several.
const VERBS: [(&str, &str); 3] =
    [("declares ", "declare "), ("did not record ", "did not record "), ("recorded ", "recorded ")];

/// Parameters of a stage with one reason.
struct Reason<'a> {
    stage: Stage,
    parameters: BTreeSet<&'a str>,
    /// The ranks that the reason begins with, and what is said of them.
    ranks: BTreeSet<Rank>,
    why: &'a str,
}

/// What was not judged, the earliest stage first.
pub(super) fn unchecked(judged: &[Judged], names: &[&str]) -> Vec<Unchecked> {
    let mut reasons: BTreeMap<(Stage, &str), BTreeSet<&str>> = BTreeMap::new();
    for one in judged {
        let Outcome::Unchecked { why, .. } = &one.result else { continue };
        let name = if one.parameter.is_empty() { &one.tensor } else { &one.parameter };
        reasons.entry((one.stage, why)).or_default().insert(name);
    }
    let mut together: Vec<Reason<'_>> = Vec::new();
    for ((stage, why), parameters) in reasons {
        let (rank, why) = rank_of(why).map_or((None, why), |(rank, why)| (Some(rank), why));
        let is_same = |own: &&mut Reason<'_>| {
            let is_of_ranks = rank.is_some() && !own.ranks.is_empty();
            is_of_ranks && own.stage == stage && own.why == why && own.parameters == parameters
        };
        match together.iter_mut().find(is_same) {
            Some(own) => own.ranks.extend(rank),
            None => {
                together.push(Reason { stage, parameters, ranks: rank.into_iter().collect(), why });
            }
        }
    }
    let told = |own: Reason<'_>| {
        let parameters: Vec<&str> = own.parameters.iter().copied().collect();
        Unchecked { stage: own.stage, what: pattern(&parameters, names), why: own.told() }
    };
    together.into_iter().map(told).collect()
}

/// The rank that a reason begins with, and the rest; `None` where it begins in another way.
fn rank_of(why: &str) -> Option<(Rank, &str)> {
    let (rank, rest) = why.strip_prefix("rank ")?.split_once(' ')?;
    let is_known = VERBS.iter().any(|(verb, _)| rest.starts_with(verb));
    Some((Rank(rank.parse().ok().filter(|_| is_known)?), rest))
}

impl Reason<'_> {
    fn told(&self) -> String {
        let ranks: Vec<Rank> = self.ranks.iter().copied().collect();
        let of_several = |(one, several): &(&str, &str)| {
            let rest = self.why.strip_prefix(one)?;
            Some(format!("{} {several}{rest}", name_ranks(&ranks)))
        };
        match ranks.len() {
            0 => self.why.to_string(),
            1 => format!("{} {}", name_ranks(&ranks), self.why),
            _ => VERBS.iter().find_map(of_several).unwrap_or_else(|| self.why.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use backtape::index_box::IndexBox;

    use super::*;

    fn left(parameter: &str, rank: u32, why: &str) -> Judged {
        Judged {
            stage: Stage::Accumulate,
            parameter: parameter.into(),
            tensor: format!("step.accumulated:{parameter}"),
            ranks: vec![Rank(rank)],
            place: IndexBox(vec![(0, 4)]),
            energies: None,
            result: Outcome::unchecked(why.into()),
        }
    }

    fn told(all: &[Judged]) -> Vec<(String, String)> {
        let told = unchecked(all, &["a", "b", "c"]);
        told.into_iter().map(|own| (own.what, own.why)).collect()
    }

    /// Goal: a reason is said once, and of no rank that it is not of. Method: three ranks with one
    /// reason for the same parameters, one of which has another reason too, and one with the reason
    /// for fewer parameters.
    #[test]
    fn ranks_with_one_reason_for_the_same_parameters_are_told_together() {
        let lost = |rank: u32| format!("rank {rank} did not record the gradient: it is freed");
        let both = |rank: u32| ["a", "b"].map(|name| left(name, rank, &lost(rank)));
        let mut all: Vec<Judged> = [10, 2, 0].into_iter().flat_map(both).collect();
        all.push(left("a", 3, &lost(3)));
        all.push(left("c", 0, "rank 0 declares no loss scale"));
        all.push(left("c", 1, "rank 1 declares no loss scale"));
        let one = |what: &str, why: &str| (what.to_string(), why.to_string());
        assert_eq!(
            told(&all),
            [
                one("c", "ranks 0 and 1 declare no loss scale"),
                one(
                    "all 2 parameters but c",
                    "ranks 0, 2 and 10 did not record the gradient: it is freed"
                ),
                one("a", "rank 3 did not record the gradient: it is freed"),
            ]
        );
    }

    #[test]
    fn other_reasons_stay_as_they_are() {
        let words = ["rank 0 has wheels", "rank and file", "the bytes of x of rank 0 are damaged"];
        let all: Vec<Judged> = words.iter().map(|why| left("a", 0, why)).collect();
        let mut said: Vec<String> = told(&all).into_iter().map(|(_, why)| why).collect();
        said.sort();
        assert_eq!(
            said,
            ["rank 0 has wheels", "rank and file", "the bytes of x of rank 0 are damaged"]
        );
    }
}
