//! What two runs' steps come to: the places one by one, the parameters at which a difference comes
//! in, told as groups, and in sentences which run is wrong, or where the two part.

use std::collections::{BTreeMap, BTreeSet};

use super::outcome::{At, Compared, GroupApart, Row, Status};
use super::settings::{Setting, read_factor, sizes};
use super::side::Side;
use crate::algebra::names::pattern;
use crate::algebra::outcome::{Divergence, Reading};
use crate::algebra::summary::Group;
use crate::number::{error, plural};

/// What a divergence is, in one clause, with its cause.
pub(super) fn words(divergence: &Divergence) -> String {
    clause(divergence.reading.as_ref(), divergence.factor, &divergence.reason)
}

fn clause(reading: Option<&Reading>, factor: Option<f64>, reason: &str) -> String {
    match (reading, factor) {
        (Some(reading), _) => format!("{} ({})", reading.words, reading.cause),
        (None, Some(factor)) => format!("captured = {factor:.4} x reference"),
        (None, None) => reason.to_string(),
    }
}

/// The places one by one, each parameter by the gravest of its tensors there.
pub(super) fn rows(compared: &[Compared]) -> Vec<Row> {
    let row = |at: At| {
        let own = || compared.iter().filter(move |one| one.at == at);
        let mut gravest: BTreeMap<&str, Status> = BTreeMap::new();
        for one in own() {
            let known = gravest.entry(&one.parameter).or_insert(one.status);
            *known = (*known).max(one.status);
        }
        let count =
            |is: &dyn Fn(Status) -> bool| gravest.values().filter(|status| is(**status)).count();
        let larger = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
        let floors = own().map(|one| one.floor).fold(0.0, f64::max);
        Row {
            at,
            equal: count(&|status| status == Status::Equal),
            explained: count(&|status| [Status::Rounding, Status::Carried].contains(&status)),
            differ: count(&Status::enters),
            largest: own().map(|one| one.difference).fold(0.0, larger),
            floor: (at <= At::Grad).then_some(floors),
        }
    };
    let rows = At::ALL.map(row).into_iter();
    rows.filter(|row| row.equal + row.explained + row.differ > 0).collect()
}

/// The parameters at which a difference comes in, those with one reason and one factor together.
pub(super) fn groups(
    compared: &[Compared],
    (ours, theirs): (&Side<'_>, &Side<'_>),
) -> Vec<GroupApart> {
    let all: BTreeSet<&str> = compared.iter().map(|one| one.parameter.as_str()).collect();
    let all: Vec<&str> = all.into_iter().collect();
    let mut groups: BTreeMap<(At, Status, Option<&str>, String), Vec<&Compared>> = BTreeMap::new();
    for one in compared.iter().filter(|one| one.status.enters()) {
        let factor = one.factor.map_or(String::new(), |factor| format!("{factor:.4}"));
        // Where a run is wrong its cause tells parameters apart; of weights a factor says little.
        let is_gradient = (At::Grad..=At::Clip).contains(&one.at) && one.cause.is_none();
        let apart = if is_gradient { factor } else { String::new() };
        groups.entry((one.at, one.status, one.cause.as_deref(), apart)).or_default().push(one);
    }
    let (a, b) = (sizes(ours), sizes(theirs));
    let group =
        |((at, status, cause, _), own): ((At, Status, Option<&str>, String), Vec<&Compared>)| {
            let names: BTreeSet<&str> = own.iter().map(|one| one.parameter.as_str()).collect();
            let names: Vec<&str> = names.into_iter().collect();
            let size = |one: &&&Compared| {
                if one.difference.is_nan() { f64::INFINITY } else { one.difference }
            };
            let furthest =
                own.iter().max_by(|x, y| size(x).total_cmp(&size(y))).expect("not empty");
            let factors: Vec<f64> = own.iter().filter_map(|one| one.factor).collect();
            let is_one = factors.len() == own.len()
                && factors.iter().all(|factor| (factor / factors[0] - 1.0).abs() < 1e-4);
            let factor = is_one.then(|| factors[0]);
            GroupApart {
                at,
                status,
                what: pattern(&names, &all),
                parameters: names.iter().map(|name| name.to_string()).collect(),
                factor,
                readings: match (factor, cause) {
                    (Some(factor), None) => read_factor(factor, &a, &b),
                    _ => Vec::new(),
                },
                difference: furthest.difference,
                floor: furthest.floor,
                worst: furthest.worst.clone().map(|worst| (furthest.parameter.clone(), worst)),
                cause: cause.map(str::to_string),
            }
        };
    groups.into_iter().map(group).collect()
}

/// How far a group is apart, in one clause.
pub(crate) fn distance(group: &GroupApart) -> String {
    let sizes = match group.readings.is_empty() {
        true => String::new(),
        false => format!(", which is {}", group.readings.join(", or ")),
    };
    match group.factor {
        Some(factor) => format!("this run has {factor:.7} x the other's{sizes}"),
        None if group.difference.is_nan() => "a value is no number in one of them".into(),
        None => format!("they are apart by {} of their norm", error(group.difference)),
    }
}

/// Which run is wrong, or where the two part; and in what they differ though neither is wrong.
pub(super) fn conclusion(
    (ours, theirs): (&Side<'_>, &Side<'_>),
    groups: &[GroupApart],
    settings: &[Setting],
    rows: &[Row],
) -> (Vec<String>, Vec<String>) {
    let mut said = wrong(ours.report.first(), theirs.report.first());
    let is_right = said.is_empty();
    let unjudged = groups.iter().filter(|group| group.status == Status::Differs);
    let mut differs: Vec<String> = unjudged.take(2).map(|group| parted(group, is_right)).collect();
    if !settings.is_empty() {
        let one = |own: &Setting| format!("{} {} here and {} there", own.name, own.this, own.other);
        let all: Vec<String> = settings.iter().map(one).collect();
        differs.push(format!("the runs declare other settings: {}", all.join("; ")));
    }
    said.extend(differs.clone());
    if said.is_empty() {
        said.push(agreed(rows));
    }
    (said, differs)
}

/// What each run's own judgement says.
fn wrong(ours: Option<&Group>, theirs: Option<&Group>) -> Vec<String> {
    let clause = |group: &Group| {
        let words = clause(group.reading.as_ref(), group.factor, &group.reason);
        format!("{}: {}: {words}", group.stage.name(), group.what)
    };
    let right = "is right at every stage that was judged";
    match (ours, theirs) {
        (None, None) => Vec::new(),
        (Some(own), None) => {
            vec![format!("this run is wrong at {}; the other run {right}", clause(own))]
        }
        (None, Some(own)) => {
            vec![format!("the other run is wrong at {}; this run {right}", clause(own))]
        }
        (Some(a), Some(b)) if clause(a) == clause(b) => {
            vec![format!("both runs are wrong in the same way at {}", clause(a))]
        }
        (Some(a), Some(b)) => vec![
            format!("this run is wrong at {}", clause(a)),
            format!("the other run is wrong at {}", clause(b)),
        ],
    }
}

/// Where two runs part that neither run's own judgement blames.
fn parted(group: &GroupApart, is_right: bool) -> String {
    let (what, distance) = (&group.what, distance(group));
    match group.at {
        At::Before => format!(
            "the runs begin the step with other weights: {what}: {distance}; look at seeds, \
             checkpoints and the steps before, as what follows differs with them"
        ),
        At::StateBefore => format!(
            "the runs begin the step with another state of the optimizer: {what}: {distance}; look \
             at checkpoints and the steps before"
        ),
        At::Grad => {
            let rest = match is_right {
                true => {
                    "; both runs bring them together, clip and step as they declare, so look \
                         at the forward, the backward, the data and what the loss is divided by"
                }
                false => "",
            };
            format!("the gradients differ as they were computed: {what}: {distance}{rest}")
        }
        at => format!(
            "the runs part at {}, which was not judged in both: {what}: {distance}",
            at.name()
        ),
    }
}

fn agreed(rows: &[Row]) -> String {
    let pairs = rows.iter().map(|row| row.equal + row.explained).max().unwrap_or(0);
    let grad = rows.iter().find(|row| row.at == At::Grad);
    let apart = match grad {
        Some(row) if row.largest > 0.0 => format!(
            ": gradients are apart by {} at most, and roundings of the forward and the backward \
             come to {} by chance",
            error(row.largest),
            error(row.floor.unwrap_or(0.0))
        ),
        _ => String::new(),
    };
    format!("both runs take the same step of {}{apart}", plural(pairs as u64, "parameter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(parameter: &str, at: At, status: Status, difference: f64) -> Compared {
        Compared {
            parameter: parameter.into(),
            other: None,
            at,
            part: at.name().into(),
            status,
            difference,
            floor: 1e-6,
            factor: None,
            unequal: 1,
            worst: None,
            cause: None,
        }
    }

    #[test]
    fn a_parameter_counts_by_the_gravest_of_its_tensors_and_no_number_is_the_largest_difference() {
        let all = [
            compared("a", At::State, Status::Equal, 0.0),
            compared("a", At::State, Status::Differs, 0.5),
            compared("b", At::State, Status::Rounding, 1e-7),
            compared("a", At::Grad, Status::Differs, f64::NAN),
            compared("b", At::Grad, Status::Rounding, 1e-7),
        ];
        let told = rows(&all);
        assert_eq!(told.len(), 2);
        assert_eq!((told[1].equal, told[1].explained, told[1].differ), (0, 1, 1));
        assert!(told[0].largest.is_nan() && told[0].floor == Some(1e-6) && told[1].floor.is_none());
    }
}
