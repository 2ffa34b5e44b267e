//! A dk that was made with rows of q that other microbatches have in the same places.
//!
//! dk is `Eᵀ q`, E the entries of dlogits: where E is right and has more classes than tokens, q is
//! solved for, and each row of it held against the rows that the step has.

use backtape::identity::Microbatch;

use super::direct::{Direct, distance, energy};
use super::gradient::Gradient;
use super::plane::Rows;
use super::solve::{factors, runs_of};
use crate::assemble::Row;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// Share of what a row of q is off by that another row may leave, to be the one that was read.
const SHOWN: f64 = 0.1;
/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;
/// Runs of tokens that are told in words.
const TOLD: usize = 4;

/// Such gradients as they would be, and in words which q they were made with; `None` where one that
/// fails is not made so.
pub fn of_other_q(evidence: &Evidence<'_>) -> Option<(Instead, Vec<String>)> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dk]).map(|(key, _)| key).collect();
    if keys.is_empty() || evidence.fails_any(&[Stage::Dq, Stage::Dlogits, Stage::Dbias]) {
        return None;
    }
    let (mut world, mut said) = (Instead::default(), Vec::new());
    for key in keys {
        let of = Gradient::of(evidence, key)?;
        let (changed, words) = made(evidence, &of)?;
        let rows = (0..changed.count()).map(|at| (at, changed.row(at).to_vec()));
        world = world.rows(key, rows);
        said.push(words);
    }
    said.dedup();
    Some((world, said))
}

/// A gradient with the rows of q that it was made with.
fn made(evidence: &Evidence<'_>, of: &Gradient) -> Option<(Rows, String)> {
    let entries = of.entries(false)?;
    let read = factors(&entries, &of.captured, &|work| evidence.spend(work))?;
    let counts: Vec<bool> = (0..read.count()).map(|at| energy(entries.row(at)) > 0.0).collect();
    let others = evidence.inputs.iter().filter(|one| one.microbatch != of.key.microbatch);
    let one = |inputs| {
        let direct = Direct::new(evidence, inputs)?;
        let (mut q, mut tokens) = (of.other().clone(), Vec::new());
        for (at, &token) in of.plane.rows.iter().enumerate().filter(|(at, _)| counts[*at]) {
            let own = distance(read.row(at), of.other().row(at));
            if token >= inputs.tokens() {
                return None;
            }
            let other = direct.q(Row::From(token));
            if other.len() == q.cols && distance(read.row(at), &other) <= SHOWN * own {
                q.values[at * q.cols..(at + 1) * q.cols].copy_from_slice(&other);
                tokens.push(token);
            }
        }
        let changed = entries.transposed_times(&q);
        let left = distance(&of.captured.values, &changed.values);
        Some((left, changed, inputs.microbatch, tokens))
    };
    let best = others.filter_map(one).min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, changed, other, tokens) = best
        .filter(|(left, ..)| *left <= LEFT * distance(&of.captured.values, &of.reference.values))?;
    let all = tokens.len() == counts.iter().filter(|counts| **counts).count();
    let runs = runs_of(&tokens);
    let told = runs.iter().take(TOLD).map(|run| format!("{} to {}", run.start, run.end - 1));
    let told = told.collect::<Vec<_>>().join(", ");
    let which = if all { String::new() } else { format!(" in tokens {told}") };
    let name = |mb: Option<Microbatch>| mb.map_or("none".to_string(), |mb| mb.to_string());
    let words = format!(
        "dk of microbatch {} is made with q of microbatch {}{which}",
        name(of.key.microbatch),
        name(other)
    );
    Some((changed, words))
}
