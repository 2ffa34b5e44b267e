//! Flags NaN and infinities: which scalar, on which rank, from which step.
//!
//! One case is healthy: with an f16 loss scaler gradients overflow, and the scaler skips the step
//! and halves its scale. So a gradient norm that is finite again after at most [`MOST_SKIPS`]
//! steps, while the loss stays finite, is a note.

use super::finding::{FlagResults, Place};
use super::read::RankScalars;
use super::{Series, View};

/// Most steps that a loss scaler skips in a row: from the largest initial scale in use, 2³², it
/// reaches 1 after 32 halvings, and this is twice that.
const MOST_SKIPS: usize = 64;

/// Most scalars that are named; the others are only counted.
const NAMED: usize = 3;

/// A scalar of one rank with values that are not finite.
struct Hit<'a> {
    step: u64,
    rank: u32,
    name: &'a str,
    value: f64,
    count: usize,
    total: usize,
}

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let (mut hits, mut skipped) = (Vec::new(), Vec::new());
    for rank in &view.trajectory.ranks {
        for (name, series) in &rank.series {
            results.looked();
            let Some(hit) = first(rank, name, series) else { continue };
            match name.starts_with("grad_norm") && recovers(rank, series) {
                true => skipped.push(hit),
                false => hits.push(hit),
            }
        }
    }
    let order = |hit: &Hit<'_>| (hit.step, hit.name != "loss", hit.name.to_string(), hit.rank);
    hits.sort_by_key(order);
    skipped.sort_by_key(order);
    if let Some(hit) = hits.first() {
        let named: Vec<String> = names(&hits);
        let threshold = "none: a number is what the scalar has to be".into();
        results.raise(place(hit, &hits), named.join("; then "), threshold);
    }
    if let Some(hit) = skipped.first() {
        let evidence = format!(
            "{}; it came back each time and the loss stayed a number, as where a loss scaler \
             skips a step",
            names(&skipped).join("; then ")
        );
        let threshold =
            format!("at most {MOST_SKIPS} steps in a row: twice what a scaler halves from 2^32");
        results.note(place(hit, &skipped), evidence, threshold);
    }
}

fn first<'a>(rank: &RankScalars, name: &'a str, series: &Series) -> Option<Hit<'a>> {
    let index = series.values().iter().position(|value| !value.is_finite())?;
    let count = series.values().iter().filter(|value| !value.is_finite()).count();
    let (step, value) = (series.steps()[index], series.values()[index]);
    Some(Hit { step, rank: rank.rank, name, value, count, total: series.len() })
}

/// Whether every stretch of values that are not finite is short and ends, while the loss stays
/// finite. A single such value at the very end may be a skipped step.
fn recovers(rank: &RankScalars, series: &Series) -> bool {
    let loss = rank.series.get("loss");
    if loss.is_some_and(|loss| loss.values().iter().any(|value| !value.is_finite())) {
        return false;
    }
    let (mut run, mut longest) = (0, 0);
    for value in series.values() {
        run = if value.is_finite() { 0 } else { run + 1 };
        longest = longest.max(run);
    }
    longest <= MOST_SKIPS && (run == 0 || (run == 1 && series.len() > 1))
}

/// A clause for the first hit of each scalar, with the ranks that have it at the same step.
fn names(hits: &[Hit<'_>]) -> Vec<String> {
    let mut named: Vec<&str> = Vec::new();
    let mut sentences = Vec::new();
    for hit in hits {
        if named.contains(&hit.name) {
            continue;
        }
        named.push(hit.name);
        if sentences.len() < NAMED {
            let same = |other: &&Hit<'_>| other.name == hit.name && other.step == hit.step;
            let ranks: Vec<u32> = hits.iter().filter(same).map(|other| other.rank).collect();
            sentences.push(format!(
                "{} is {} on {} from step {} on ({} of {} steps)",
                hit.name,
                hit.value,
                super::ranks::name_ranks(&ranks),
                hit.step,
                hit.count,
                hit.total
            ));
        }
    }
    if named.len() > NAMED {
        sentences.push(format!("{} more scalars", named.len() - NAMED));
    }
    sentences
}

fn place<'a>(hit: &Hit<'a>, hits: &[Hit<'_>]) -> Place<'a> {
    let same = hits.iter().filter(|other| other.name == hit.name && other.step == hit.step);
    Place { step: Some(hit.step), ranks: same.map(|hit| hit.rank).collect(), scalar: hit.name }
}
