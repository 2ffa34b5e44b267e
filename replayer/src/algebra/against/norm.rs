//! The difference of two runs' norms of the gradients, shared out exactly: `‖a‖² - ‖b‖²` is what the
//! gradients as computed bring, what each run's own reduction adds to its own, what is in one run
//! alone, and what each job's norm is beside that of its gradients.

use std::collections::BTreeMap;

use backtape::part::Part;
use serde::Serialize;

use super::align::Aligned;
use super::outcome::{At, GroupApart};
use super::pair::Tensors;
use super::side::Side;
use super::view::View;

/// The norms of two runs' gradients, and where their difference comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GapOfRuns {
    /// Of this run: as the job reports it, else of what was captured.
    pub this: f64,
    /// Of the other.
    pub other: f64,
    /// The shares of the difference of the squares, which add up to 1; empty where roundings
    /// explain it.
    pub shares: Vec<GapShare>,
}

/// One share of the difference of the squares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GapShare {
    /// The stage that brings it: `grad`, `reduce`, `norm`, or `several` for small shares together.
    pub at: &'static str,
    /// Whose stage it is: `both`, `this run`, `the other run`.
    pub run: &'static str,
    /// The parameters.
    pub what: String,
    /// Its share.
    pub share: f64,
}

/// Shares below this are told together.
const TOLD: f64 = 1e-3;

/// What a share is told by: stage, run, parameters.
type Key = (&'static str, &'static str, String);

/// The gap of two runs; `None` where the gradients that were normed are not known of all
/// parameters. `floor` is what roundings may come to, as a share of a norm.
pub(super) fn gap(
    (ours, theirs): (&Side<'_>, &Side<'_>),
    aligned: &Aligned,
    tensors: &[Tensors],
    (groups, floor): (&[GroupApart], f64),
) -> Option<GapOfRuns> {
    let mut parts: BTreeMap<Key, f64> = BTreeMap::new();
    let mut whole = [0.0; 2];
    let label = |at: &[At], name: &str| {
        let of = |group: &&GroupApart| {
            at.contains(&group.at) && group.parameters.iter().any(|own| own == name)
        };
        let is_any = groups.iter().any(|group| at.contains(&group.at));
        let others = if is_any { "other parameters" } else { "all parameters" };
        groups.iter().find(of).map_or_else(|| others.to_string(), |group| group.what.clone())
    };
    for (pair, own) in aligned.pairs.iter().zip(tensors) {
        let normed = own.at(At::Unscale).or_else(|| own.at(At::Reduce))?;
        let [a, b] = [normed.apart.ours, normed.apart.theirs];
        let made = own.at(At::Grad).map_or([a, b], |raw| [raw.apart.ours, raw.apart.theirs]);
        let name = pair.name();
        let mut add = |key: Key, part: f64| *parts.entry(key).or_default() += part;
        let brought = label(&[At::Reduce, At::Unscale], &name);
        add(("grad", "both", label(&[At::Grad], &name)), made[0] - made[1]);
        add(("reduce", THIS, brought.clone()), a - made[0]);
        add(("reduce", OTHER, brought), made[1] - b);
        whole[0] += a;
        whole[1] += b;
    }
    let sides = [(ours, &aligned.only_ours, THIS), (theirs, &aligned.only_theirs, OTHER)];
    for (at, (side, only, run)) in sides.into_iter().enumerate() {
        let sign = if at == 0 { 1.0 } else { -1.0 };
        for name in only {
            let square = square(side, name)?;
            whole[at] += square;
            let what = format!("parameters that only {run} has");
            *parts.entry(("grad", run, what)).or_default() += sign * square;
        }
    }
    let reported = [reported(ours), reported(theirs)];
    let [x, y] = match reported {
        [Some(x), Some(y)] => {
            let gradients = || "what the norm is of".to_string();
            *parts.entry(("norm", THIS, gradients())).or_default() += x * x - whole[0];
            *parts.entry(("norm", OTHER, gradients())).or_default() += whole[1] - y * y;
            [x, y]
        }
        _ => whole.map(f64::sqrt),
    };
    Some(GapOfRuns {
        this: x,
        other: y,
        shares: shares(parts, x * x - y * y, floor * x.max(y).powi(2)),
    })
}

const THIS: &str = "this run";
const OTHER: &str = "the other run";
const REST: &str = "the rest";

/// The shares of a difference; those that are small are told as one.
fn shares(parts: BTreeMap<Key, f64>, gap: f64, floor: f64) -> Vec<GapShare> {
    // A norm errs by half of what its square does.
    if !(gap.abs() > 4.0 * floor) {
        return Vec::new();
    }
    let (mut shares, mut rest) = (Vec::new(), 0.0);
    for ((at, run, what), part) in parts {
        let share = part / gap;
        match share.abs() < TOLD {
            true => rest += share,
            false => shares.push(GapShare { at, run, what, share }),
        }
    }
    shares.sort_by(|a, b| b.share.abs().total_cmp(&a.share.abs()));
    if rest != 0.0 {
        shares.push(GapShare { at: "several", run: "both", what: REST.into(), share: rest });
    }
    shares
}

/// The norm of all gradients that a job reports.
fn reported(side: &Side<'_>) -> Option<f64> {
    let all = side.inventory.parameters.len();
    let mut norms = side.inventory.declared.values().flat_map(|own| &own.norms);
    let is_whole = |norm: &&crate::algebra::declaration::Norm| {
        norm.power() == Some(2.0) && norm.parameters.len() == all && norm.others == 0
    };
    let norm = norms.find(is_whole)?;
    let scale = match norm.of.as_deref() {
        Some("clipped") => return None,
        Some("unscaled") => 1.0,
        _ => side.loss_scale(),
    };
    norm.value.map(|value| value / scale).filter(|value| value.is_finite())
}

/// The square of the norm of a parameter's gradient.
fn square(side: &Side<'_>, name: &str) -> Option<f64> {
    let view = View::Whole(name.to_string());
    let (part, scale) = match side.has(&view, &Part::Unscaled) {
        true => (Part::Unscaled, 1.0),
        false => (Part::Reduced, side.loss_scale()),
    };
    let values = side.values(&view, &part).ok()?;
    Some(values.of.iter().map(|x| (x / scale).powi(2)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_a_gap_add_up_to_one_and_small_ones_are_told_together() {
        let key = |run, what: &str| ("grad", run, what.to_string());
        let parts = [
            (key("both", "w"), 3.0),
            (key(THIS, "b"), -1.0),
            (key(OTHER, "c"), 1e-4),
            (key(OTHER, "d"), 1e-4),
        ];
        let told = shares(BTreeMap::from(parts.clone()), 2.0002, 1e-9);
        let what: Vec<&str> = told.iter().map(|share| share.what.as_str()).collect();
        assert_eq!(what, ["w", "b", REST]);
        assert!((told.iter().map(|share| share.share).sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(shares(BTreeMap::from(parts), 2.0002, 1.0).is_empty());
    }
}
