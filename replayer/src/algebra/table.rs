//! Every parameter of a step on a line: of all its tensors and ranks the gravest outcome of each
//! stage.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use backtape::part::Part;
use serde::Serialize;

use super::inventory::Inventory;
use super::outcome::{Judged, Outcome, Stage};

/// A parameter or a norm, and how it fares at each stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its name; of a norm `norm 0`, as the job declared them one after the other.
    pub name: String,
    /// Its shape; empty for a norm.
    pub shape: Vec<u64>,
    /// How many elements that are; 0 for a norm, which is of other parameters' elements.
    pub elements: u64,
    /// The optimizer that holds it, where one is declared.
    pub optimizer: Option<usize>,
    /// Which of that optimizer's groups.
    pub group: Option<usize>,
    /// Every stage that was judged or could not be, in order. One that is not here was not recorded.
    pub stages: Vec<Fate>,
}

/// How one stage of a parameter came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fate {
    /// The stage.
    pub stage: Stage,
    /// The gravest of all tensors and ranks.
    pub status: Status,
    /// The ranks on which it is that.
    pub ranks: Vec<u32>,
    /// The tensor that is furthest off.
    pub tensor: String,
    /// Captured over reference, where it diverges by one number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// Its relative error, in the Frobenius norm; NaN (null in JSON) where a value is no number.
    pub error: Option<f64>,
    /// The relative error that rounding explains.
    pub floor: Option<f64>,
    /// Where it agrees, the smallest factor, as its distance from 1, that would have been seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_from: Option<f64>,
    /// Where it diverges, the cause that reproduces it; absent where none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<&'static str>,
    /// Why it diverges, or why nothing can be said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How a stage came out, the gravest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It is what the stage before it gives.
    Agreed,
    /// Nothing can be said.
    Unchecked,
    /// It is something else.
    Diverged,
}

impl Status {
    fn of(outcome: &Outcome) -> Status {
        match outcome {
            Outcome::Agreed { .. } => Status::Agreed,
            Outcome::Unchecked { .. } => Status::Unchecked,
            Outcome::Diverged(_) => Status::Diverged,
        }
    }
}

impl Fate {
    /// Error over what rounding explains; 0 where nothing errs, infinite where rounding explains
    /// nothing of it, `None` where there is no error to tell.
    pub fn over(&self) -> Option<f64> {
        match (self.error?, self.floor?) {
            (0.0, _) => Some(0.0),
            (error, floor) => Some(error / floor),
        }
    }

    /// How far off it is; what is no number is furthest, and what has no error to tell least.
    pub fn off(&self) -> f64 {
        self.over().map_or(-1.0, |over| if over.is_nan() { f64::INFINITY } else { over })
    }

    /// Whether it is graver than another, and where it is as grave, further off.
    pub fn compare(&self, other: &Fate) -> Ordering {
        self.status.cmp(&other.status).then(self.off().total_cmp(&other.off()))
    }
}

impl Row {
    /// The gravest of its stages.
    pub fn status(&self) -> Option<Status> {
        self.stages.iter().map(|fate| fate.status).max()
    }

    /// How a stage came out.
    pub fn fate(&self, stage: Stage) -> Option<&Fate> {
        self.stages.iter().find(|fate| fate.stage == stage)
    }
}

/// What was judged of each parameter and norm, in the order in which ranks declare parameters; those
/// that none declares follow.
pub(super) fn table(inventory: &Inventory<'_>, judged: &[Judged]) -> Vec<Row> {
    let mut of: BTreeMap<&str, BTreeMap<Stage, Vec<&Judged>>> = BTreeMap::new();
    let mut norms: BTreeSet<&str> = BTreeSet::new();
    for one in judged {
        let name: &str = if one.parameter.is_empty() { &one.tensor } else { &one.parameter };
        of.entry(name).or_default().entry(one.stage).or_default().push(one);
        norms.extend(one.parameter.is_empty().then_some(name));
    }
    let declared = inventory.declared.values().flat_map(|own| &own.order).map(String::as_str);
    let recorded = inventory.parameters.keys().map(String::as_str);
    let mut told = BTreeSet::new();
    let recorded_too = |name: &&str| inventory.parameters.contains_key(*name);
    let all = declared.filter(recorded_too).chain(recorded);
    let names: Vec<&str> = all.filter(|name| told.insert(name.to_string())).collect();
    let row = |name: &str| {
        let stages = of.get(name).into_iter().flatten();
        let stages = stages.map(|(stage, all)| fate(*stage, all)).collect();
        let (shape, is_norm) = (shape(inventory, name), norms.contains(name));
        let elements = if is_norm { 0 } else { shape.iter().product() };
        let mut declared = inventory.declared.values().filter_map(|own| own.parameters.get(name));
        let place = declared.find_map(|own| Some((own.optimizer?, own.group?)));
        let (optimizer, group) = (place.map(|place| place.0), place.map(|place| place.1));
        Row { name: name.into(), shape, elements, optimizer, group, stages }
    };
    names.into_iter().chain(norms.iter().copied()).map(row).collect()
}

/// The shape of a parameter, of whichever part of it was recorded.
fn shape(inventory: &Inventory<'_>, parameter: &str) -> Vec<u64> {
    let values = [Part::Before, Part::Reduced, Part::After];
    let key = values.iter().find_map(|part| inventory.key(parameter, part));
    key.map(|key| inventory.dump.tensors()[key].shape.clone()).unwrap_or_default()
}

/// The gravest of what was judged of one stage, and of several as grave the one furthest off.
fn fate(stage: Stage, all: &[&Judged]) -> Fate {
    let status = all.iter().map(|one| Status::of(&one.result)).max().unwrap_or(Status::Agreed);
    let gravest = all.iter().filter(|one| Status::of(&one.result) == status);
    let ranks: BTreeSet<u32> =
        gravest.clone().flat_map(|one| one.ranks.iter().map(|rank| rank.0)).collect();
    let told = gravest.map(|one| told(one));
    let worst = told.max_by(Fate::compare);
    Fate { stage, ranks: ranks.into_iter().collect(), ..worst.expect("a stage was judged") }
}

fn told(one: &Judged) -> Fate {
    let mut fate = Fate {
        stage: one.stage,
        status: Status::of(&one.result),
        ranks: Vec::new(),
        tensor: one.tensor.clone(),
        factor: None,
        error: None,
        floor: None,
        seen_from: None,
        cause: None,
        why: None,
    };
    match &one.result {
        Outcome::Agreed { seen_from, error, floor } => {
            (fate.error, fate.floor, fate.seen_from) = (Some(*error), Some(*floor), *seen_from);
        }
        Outcome::Diverged(divergence) => {
            (fate.error, fate.floor) = (Some(divergence.error), Some(divergence.floor));
            fate.factor = divergence.factor;
            fate.cause = divergence.reading.as_ref().map(|reading| reading.cause);
            fate.why = Some(divergence.reason.clone());
        }
        Outcome::Unchecked { why, .. } => fate.why = Some(why.clone()),
    }
    fate
}

#[cfg(test)]
mod tests {
    use backtape::identity::Rank;
    use backtape::index_box::IndexBox;

    use super::*;
    use crate::algebra::outcome::Divergence;

    fn judged(rank: u32, result: Outcome) -> Judged {
        Judged {
            stage: Stage::Reduce,
            parameter: "w".into(),
            tensor: "step.reduced:w".into(),
            ranks: vec![Rank(rank)],
            place: IndexBox(vec![(0, 4)]),
            energies: None,
            result,
        }
    }

    fn diverged(error: f64) -> Outcome {
        Outcome::Diverged(Box::new(Divergence {
            reason: "elements are off".into(),
            factor: None,
            error,
            floor: 1e-7,
            worst: None,
            reading: None,
            readings: Vec::new(),
        }))
    }

    /// Goal: no rank's fault is hidden by another rank's agreement, nor by a smaller fault. Method:
    /// four ranks with an outcome each, the one that is no number among them.
    #[test]
    fn the_line_of_a_parameter_tells_the_gravest_of_its_ranks() {
        let agreed = Outcome::Agreed { seen_from: Some(1e-6), error: 5e-8, floor: 1e-7 };
        let unchecked = Outcome::unchecked("not recorded".into());
        let all = [
            judged(0, agreed),
            judged(1, diverged(1.0)),
            judged(2, unchecked),
            judged(3, diverged(f64::NAN)),
        ];
        let of = |some: &[usize]| {
            fate(Stage::Reduce, &some.iter().map(|at| &all[*at]).collect::<Vec<_>>())
        };
        assert_eq!((of(&[0]).status, of(&[0]).over()), (Status::Agreed, Some(0.5)));
        assert_eq!((of(&[0, 2]).status, of(&[0, 2]).ranks), (Status::Unchecked, vec![2]));
        assert_eq!(of(&[0, 2]).why.as_deref(), Some("not recorded"));
        let worst = of(&[0, 1, 2, 3]);
        assert_eq!((worst.status, worst.ranks), (Status::Diverged, vec![1, 3]));
        assert!(worst.error.is_some_and(f64::is_nan), "{:?}", worst.error);
    }
}
