//! Flags scalars that should be equal on all ranks and are not.
//!
//! learning_rate and the norms of the whole gradient must be equal by their meaning, other scalars
//! by declaration, or because they were equal bit for bit on all ranks at the start. A loss that
//! differs between ranks from the first step on is not compared.

use backtape::identity::Rank;

use super::View;
use super::chance::{NORM_ROUNDING, spacing};
use super::finding::{FlagResults, Place};
use super::read::RankScalars;
use crate::dump::name_ranks as of_ranks;
use crate::number::short;

/// How many steps at the start must be equal bit for bit for a scalar to count as shared.
const START: usize = 10;

/// Fewest distinct values among these: with fewer, a coarse format may have made them equal.
const DISTINCT: usize = 8;

/// Most names that are listed where nothing can be compared.
const NAMED: usize = 4;

pub(super) fn name_ranks(ranks: &[u32]) -> String {
    let ranks: Vec<Rank> = ranks.iter().map(|&rank| Rank(rank)).collect();
    of_ranks(&ranks)
}

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let ranks = &view.trajectory.ranks;
    if ranks.len() < 2 {
        return results.skip("whether ranks agree", "only one rank recorded scalars");
    }
    stopped(ranks, results);
    let mut unshared = Vec::new();
    for name in view.names() {
        let holders: Vec<&RankScalars> =
            ranks.iter().filter(|rank| rank.series.contains_key(name)).collect();
        if holders.len() < 2 {
            continue;
        }
        match !view.is_local(name) && (view.is_shared(name) || starts_equal(&holders, name)) {
            true => compare(name, &holders, view.is_shared(name), results),
            false => unshared.push(name),
        }
    }
    if !unshared.is_empty() {
        let more = unshared.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown: Vec<&str> = unshared.into_iter().take(NAMED).collect();
        let why = "each rank has its own: declare it with --shared where ranks must agree";
        results.skip(format!("{}{more}", shown.join(", ")), why);
    }
}

/// The steps that all of these ranks recorded.
fn common<'a>(holders: &'a [&RankScalars], name: &'a str) -> impl Iterator<Item = u64> + 'a {
    let steps = holders[0].series[name].steps().iter().copied();
    steps.filter(move |&step| holders.iter().all(|rank| rank.series[name].at(step).is_some()))
}

fn values(holders: &[&RankScalars], name: &str, step: u64) -> Vec<f64> {
    holders.iter().filter_map(|rank| rank.series[name].at(step)).collect()
}

fn starts_equal(holders: &[&RankScalars], name: &str) -> bool {
    let start: Vec<u64> = common(holders, name).take(START).collect();
    let mut distinct = Vec::new();
    let equal = start.iter().all(|&step| {
        let values = values(holders, name, step);
        distinct.push(values[0].to_bits());
        values.iter().all(|value| value.to_bits() == values[0].to_bits())
    });
    distinct.sort_unstable();
    distinct.dedup();
    equal && start.len() == START && distinct.len() >= DISTINCT
}

/// Finds the first step at which the ranks differ by more than rounding, and which ranks differ
/// from the majority.
fn compare(name: &str, holders: &[&RankScalars], by_name: bool, results: &mut FlagResults) {
    results.looked();
    let all = holders.iter().flat_map(|rank| rank.series[name].values().iter().copied());
    // The rounding of the sum, plus one rounding to the format that the scalar is kept in.
    let allowed = NORM_ROUNDING + spacing(all.collect::<Vec<_>>().iter().copied());
    let (mut first, mut apart, mut steps) = (None, 0, 0);
    for step in common(holders, name) {
        let values = values(holders, name, step);
        steps += 1;
        if groups(&values, allowed).len() > 1 {
            apart += 1;
            first.get_or_insert((step, values));
        }
    }
    let Some((step, values)) = first else { return };
    let groups = groups(&values, allowed);
    let rank = |&index: &usize| holders[index].rank;
    let majority =
        groups.iter().max_by_key(|group| group.len()).filter(|g| 2 * g.len() > values.len());
    let (odd, who) = match majority {
        Some(most) => {
            let odd: Vec<usize> = (0..values.len()).filter(|i| !most.contains(i)).collect();
            let ranks: Vec<u32> = odd.iter().map(rank).collect();
            let text = format!(
                "{} of {} leaves the other {} at step {step}: {} against {}",
                name,
                name_ranks(&ranks),
                of_count(most.len()),
                short(values[odd[0]]),
                short(values[most[0]]),
            );
            (ranks, text)
        }
        None => {
            let (low, high) = (
                values.iter().copied().fold(f64::INFINITY, f64::min),
                values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            );
            let text = format!(
                "{name} has {} different values on {} ranks at step {step}, from {} to {}",
                groups.len(),
                values.len(),
                short(low),
                short(high),
            );
            (Vec::new(), text)
        }
    };
    let advice = match by_name {
        true => format!(
            "gradients, replicas or settings differ; --local {name} says that it is each rank's own"
        ),
        false => "the ranks agreed bit for bit on the first steps".into(),
    };
    let evidence = format!("{who}; so on {apart} of {steps} steps ({advice})");
    let threshold = format!(
        "a relative difference of {allowed:.1e}: 64 roundings of f32 in the sum and one to the \
         format of the values"
    );
    results.raise(Place { step: Some(step), ranks: odd, scalar: name }, evidence, threshold);
}

fn of_count(ranks: usize) -> String {
    if ranks == 1 { "rank".into() } else { format!("{ranks} ranks") }
}

/// Groups the indices of values that are equal within rounding, in ascending order of the values: a
/// value joins the group of smaller values if it is close to the group's first one.
fn groups(values: &[f64], allowed: f64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for index in order {
        let value = values[index];
        let close = |group: &Vec<usize>| {
            let start = values[group[0]];
            let same = start.to_bits() == value.to_bits() || (start.is_nan() && value.is_nan());
            same || (start - value).abs() <= allowed * start.abs().max(value.abs())
        };
        match groups.last_mut().filter(|group| close(group)) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
}

/// Notes ranks whose record ends before the others', because they died or write slowly. It is only
/// a note, since a running job looks the same.
fn stopped(ranks: &[RankScalars], results: &mut FlagResults) {
    let last: Vec<u64> = ranks.iter().filter_map(RankScalars::last_step).collect();
    let Some(&end) = last.iter().max() else { return };
    let early = |rank: &&RankScalars| rank.last_step().is_some_and(|step| step < end);
    let early: Vec<&RankScalars> = ranks.iter().filter(early).collect();
    let Some(first) = early.iter().min_by_key(|rank| rank.last_step()) else { return };
    let names: Vec<u32> = early.iter().map(|rank| rank.rank).collect();
    let step = first.last_step().unwrap_or(0);
    let evidence = format!(
        "the record of {} ends before step {end}, that of rank {} at step {step}",
        name_ranks(&names),
        first.rank
    );
    let place = Place { step: Some(step), ranks: names, scalar: "step" };
    results.note(place, evidence, "the last step of any rank".into());
}
