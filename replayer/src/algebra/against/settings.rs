//! What two runs declare of the same parameter, where it is not the same: the optimizer and its
//! hyper-parameters, the step that its state counts, the clipping. How a job is split over ranks and
//! microbatches is no such difference; what a factor may be is read from it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::align::Pair;
use super::outcome::At;
use super::side::Side;
use crate::algebra::counters::counter;
use crate::algebra::declaration::{Hyper, Norm, Optimizer, ReduceOp};
use crate::algebra::names::pattern;
use crate::algebra::rules::Rule;
use crate::number::plural;

/// A setting that is another in the two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Its name.
    pub name: String,
    /// In this run.
    pub this: String,
    /// In the other run.
    pub other: String,
    /// Of which parameters.
    pub what: String,
    /// The stage in which it acts.
    pub at: At,
}

/// A setting of one pair: its name, both values, and where it acts.
pub(super) type Found = (String, String, String, At);

/// The settings of a pair that differ.
pub(super) fn of_pair(pair: &Pair, ours: &Side<'_>, theirs: &Side<'_>) -> Vec<Found> {
    let (a, b) = (pair.ours.names()[0], pair.theirs.names()[0]);
    let mut found = Vec::new();
    let mut tell = |name: &str, this: String, other: String, at| {
        if this != other {
            found.push((name.to_string(), this, other, at));
        }
    };
    if let (Some(x), Some(y)) = (optimizer(ours, a), optimizer(theirs, b)) {
        hyper(x, y, &mut tell);
    }
    // Of an optimizer that is sharded one rank alone has the state of a parameter.
    let count = |side: &Side<'_>, name: &str| {
        side.inventory.declared.values().find_map(|own| {
            let declared = own.parameters.get(name)?;
            declared.scalar_before(counter(declared)?)
        })
    };
    // A first step has no state, and counts nothing before it.
    let (x, y) = (count(ours, a).unwrap_or(0.0), count(theirs, b).unwrap_or(0.0));
    tell("step of the optimizer before", x.to_string(), y.to_string(), At::StateBefore);
    let skipped = |side: &Side<'_>| side.inventory.declared.values().any(|own| own.skipped);
    let step = |is_skipped| if is_skipped { "left out" } else { "taken" }.to_string();
    tell("the optimizer's step", step(skipped(ours)), step(skipped(theirs)), At::After);
    clipping((ours, a), (theirs, b), &mut tell);
    found
}

/// The settings of all pairs that differ, each with the parameters that it is of.
pub(super) fn grouped(found: &[(String, Vec<Found>)]) -> Vec<Setting> {
    let mut groups: BTreeMap<(At, &str, &str, &str), BTreeSet<&str>> = BTreeMap::new();
    for (pair, settings) in found {
        for (name, this, other, at) in settings {
            groups.entry((*at, name, this, other)).or_default().insert(pair);
        }
    }
    let all: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    let setting = |((at, name, this, other), of): ((At, &str, &str, &str), BTreeSet<&str>)| {
        let what = pattern(&of.into_iter().collect::<Vec<_>>(), &all);
        let (name, this, other) = (name.to_string(), this.to_string(), other.to_string());
        Setting { name, this, other, what, at }
    };
    groups.into_iter().map(setting).collect()
}

fn optimizer<'a>(side: &Side<'a>, name: &str) -> Option<(&'a Optimizer, &'a Hyper)> {
    side.inventory.declared.values().find_map(|own| own.optimizer_of(name))
}

/// Two numbers that are the same in f32, in which jobs keep them, are told as one.
fn number(value: f64) -> String {
    if value.is_nan() { "not declared".into() } else { format!("{}", value as f32) }
}

fn hyper(
    (x, x_hyper): (&Optimizer, &Hyper),
    (y, y_hyper): (&Optimizer, &Hyper),
    tell: &mut dyn FnMut(&str, String, String, At),
) {
    let name = |of: &Optimizer| of.name.clone().unwrap_or_else(|| "not declared".into());
    if x.rule != y.rule {
        let said = |of: &Optimizer| match &of.rule {
            None => "that of its name".to_string(),
            Some(Value::String(class)) => format!("that of {class}"),
            Some(_) => "a formula".to_string(),
        };
        let (this, other) = (said(x), said(y));
        let other = if this == other { format!("another {}", &other[2..]) } else { other };
        tell("declared rule", this, other, At::State);
    }
    let rules = (Rule::of(x, x_hyper, 1.0), Rule::of(y, y_hyper, 1.0));
    let (Some(a), Some(b)) = rules else {
        tell("optimizer", name(x), name(y), At::State);
        let shared = x_hyper.0.keys().filter(|key| y_hyper.0.contains_key(*key));
        for key in shared {
            let value = |hyper: &Hyper| match hyper.number(key) {
                Some(value) => number(value),
                None => hyper.0[key].to_string(),
            };
            tell(key, value(x_hyper), value(y_hyper), At::State);
        }
        return;
    };
    let (names, others) = (a.names(), b.names());
    if !std::ptr::eq(names, others) {
        tell("optimizer", name(x), name(y), At::State);
        return;
    }
    for (key, ..) in names.hyper {
        let at = if ["lr", "weight_decay"].contains(key) { At::After } else { At::State };
        tell(key, number(names.number(x_hyper, key)), number(names.number(y_hyper, key)), at);
    }
    if a != b {
        let told = |of: &Optimizer, rule: &Rule| format!("{}, {rule:?}", name(of));
        tell("optimizer's switches", told(x, &a), told(y, &b), At::State);
    }
}

fn clipping(
    (ours, a): (&Side<'_>, &str),
    (theirs, b): (&Side<'_>, &str),
    tell: &mut dyn FnMut(&str, String, String, At),
) {
    let norm = |side: &Side<'_>, name: &str| -> Option<Norm> {
        let of = |norm: &&Norm| norm.parameters.iter().any(|own| own == name);
        let clips = |norm: &&Norm| norm.max_norm.is_some() && of(norm);
        side.inventory.declared.values().find_map(|own| own.norms.iter().rfind(clips).cloned())
    };
    let none = || "none".to_string();
    let (x, y) = (norm(ours, a), norm(theirs, b));
    let most = |norm: &Option<Norm>| {
        norm.as_ref().and_then(|norm| norm.max_norm).map_or_else(none, number)
    };
    tell("max_norm of the clipping", most(&x), most(&y), At::Clip);
    if let (Some(x), Some(y)) = (&x, &y) {
        let power = |norm: &Norm| norm.power().map_or_else(none, number);
        tell("kind of the norm", power(x), power(y), At::Clip);
    }
    let value = |side: &Side<'_>, name: &str| {
        let declared = side.inventory.declared.values();
        declared.into_iter().find_map(|own| own.clip_value_of(name)).map_or_else(none, number)
    };
    tell("value that is clipped to", value(ours, a), value(theirs, b), At::Clip);
}

/// Sizes of a run: its microbatches, and the ranks of each axis over which gradients are reduced.
pub(super) fn sizes(side: &Side<'_>) -> BTreeMap<String, f64> {
    let mut sizes = BTreeMap::new();
    let declared = side.inventory.declared.values();
    if let Some(most) = declared.clone().filter_map(|own| own.microbatches).max() {
        sizes.insert("microbatches".to_string(), f64::from(most));
    }
    sizes.insert("ranks".into(), f64::from(side.inventory.dump.manifest.world_size.max(1)));
    sizes.insert("loss scale".into(), side.loss_scale());
    for reduce in declared.flat_map(|own| own.parameters.values()).flat_map(|own| &own.reduce) {
        sizes.insert(format!("|{}|", reduce.axis), reduce.size() as f64);
    }
    sizes
}

/// How a run is split, in words: `2 ranks, 2 microbatches, mean over data (2)`.
pub(super) fn split(side: &Side<'_>) -> String {
    let sizes = sizes(side);
    let ranks = plural(sizes["ranks"] as u64, "rank");
    let microbatches = sizes.get("microbatches");
    let microbatches = microbatches.map(|n| format!(", {}", plural(*n as u64, "microbatch")));
    let declared = side.inventory.declared.values();
    let all = declared.flat_map(|own| own.parameters.values()).flat_map(|own| &own.reduce);
    let word = |op| if op == ReduceOp::Mean { "mean" } else { "sum" };
    let axes: BTreeSet<String> = all
        .map(|reduce| format!(", {} over {} of {}", word(reduce.op), reduce.axis, reduce.size()))
        .collect();
    let axes: String = axes.into_iter().collect();
    format!("{ranks}{}{axes}", microbatches.unwrap_or_default())
}

/// Every product of sizes that a factor between the runs is, in words, the simplest first.
pub(super) fn read_factor(
    factor: f64,
    ours: &BTreeMap<String, f64>,
    theirs: &BTreeMap<String, f64>,
) -> Vec<String> {
    let (mut readings, mut told) = (Vec::new(), Vec::new());
    let is = |number: f64| number != 1.0 && (factor / number - 1.0).abs() < 1e-4;
    for (name, a) in ours {
        let Some(b) = theirs.get(name) else { continue };
        let both = format!("{name} here, {a}, and there, {b}");
        if is(a / b) {
            readings.push(format!("the ratio of {both}"));
            told.push(name);
        } else if is(b / a) {
            readings.push(format!("the inverse ratio of {both}"));
            told.push(name);
        }
    }
    for (sizes, whose) in [(ours, "this run"), (theirs, "the other run")] {
        for (name, size) in sizes.iter().filter(|(name, _)| !told.contains(name)) {
            if is(*size) {
                readings.push(format!("{name} of {whose} = {size}"));
            } else if is(1.0 / size) {
                readings.push(format!("1 over {name} of {whose} = {size}"));
            }
        }
    }
    readings.truncate(4);
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_told_by_the_sizes_of_both_runs_that_it_is_and_by_no_other() {
        let sizes = |all: &[(&str, f64)]| -> BTreeMap<String, f64> {
            all.iter().map(|(name, size)| (name.to_string(), *size)).collect()
        };
        let ours = sizes(&[("microbatches", 4.0), ("ranks", 8.0), ("|data|", 8.0)]);
        let theirs = sizes(&[("microbatches", 2.0), ("ranks", 8.0), ("|tensor|", 2.0)]);
        assert_eq!(
            read_factor(2.00001, &ours, &theirs),
            ["the ratio of microbatches here, 4, and there, 2", "|tensor| of the other run = 2"]
        );
        assert_eq!(read_factor(0.125, &ours, &theirs)[0], "1 over ranks of this run = 8");
        assert!(read_factor(3.0, &ours, &theirs).is_empty());
        assert!(read_factor(1.0, &ours, &theirs).is_empty());
    }

    #[test]
    fn numbers_that_are_one_in_f32_are_told_as_one() {
        assert_eq!(number(0.001), number(f64::from(0.001f32)));
        assert_ne!(number(0.001), number(0.001_000_1));
    }
}
