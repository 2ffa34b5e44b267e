//! A dk that was made with rows of q that other microbatches have in the same places.
//!
//! dk is `Eᵀ q`, E the entries of dlogits: where E is right and has more classes than tokens, q is
//! solved for, and each row of it held against the rows that the step has. A sum of dk without its
//! addends is solved for which microbatch's entries it multiplies with which microbatch's q.

use backtape::identity::Microbatch;

use super::addends::{adds_to, divisor};
use super::direct::{Direct, distance, energy};
use super::gradient::Gradient;
use super::plane::Rows;
use super::solve::{factors, multiples, runs_of};
use super::units::UnitState;
use crate::assemble::Row;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// Share of what a row of q is off by that another row may leave, to be the one that was read.
const SHOWN: f64 = 0.1;
/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;
/// Products that a sum is solved for, at most.
const PAIRS: usize = 64;
/// How far the weight of a product may be from a whole number.
const WHOLE: f64 = 0.05;
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

/// Sums of dk over microbatches that multiply some entries with another microbatch's q; `None`
/// where one that fails is not such a sum, or the step has too many microbatches.
pub fn of_other_q_in_sums(evidence: &Evidence<'_>) -> Option<(Instead, Vec<String>)> {
    let keys: Vec<Key> =
        evidence.failing.iter().filter(|key| key.stage.is_sum()).copied().collect();
    if keys.is_empty() || !evidence.has_sums_alone() || keys.len() < evidence.failing.len() {
        return None;
    }
    let (mut world, mut said) = (Instead::default(), Vec::new());
    for key in keys {
        let (changed, words) = sum_of_pairs(evidence, key)?;
        let rows = (0..changed.count()).map(|at| (at, changed.row(at).to_vec()));
        world = world.rows(key, rows);
        said.extend(words);
    }
    said.sort();
    said.dedup();
    (!said.is_empty()).then_some((world, said))
}

/// A sum as products of one unit's entries with the q of one of its rank's units, each entry once.
fn sum_of_pairs(evidence: &Evidence<'_>, key: Key) -> Option<(Rows, Vec<String>)> {
    let units = evidence.units().iter().filter(|unit| adds_to(key, unit.rank));
    let plane = |unit: &'_ UnitState| {
        let plane = evidence.plane_of(unit.microbatch, unit.rank)?;
        Some((unit.microbatch, unit.rank, plane))
    };
    let planes: Vec<_> = units.map(plane).collect::<Option<_>>()?;
    let (_, _, first) = planes.first()?;
    let (classes, width) = (first.k.count(), first.q.cols);
    let pairs = || {
        let of = |a: usize| (0..planes.len()).map(move |b| (a, b));
        let same = |&(a, b): &(usize, usize)| {
            planes[a].1 == planes[b].1 && planes[a].2.q.count() == planes[b].2.q.count()
        };
        (0..planes.len()).flat_map(of).filter(same)
    };
    let count = pairs().count();
    if count <= planes.len() || count > PAIRS {
        return None;
    }
    let divisor = divisor(evidence, key);
    let product = |(a, b): (usize, usize)| {
        let mut made = planes[a].2.entries().transposed_times(&planes[b].2.q);
        made.values.iter_mut().for_each(|x| *x /= divisor);
        made.values
    };
    let work: usize = pairs().map(|(a, _)| planes[a].2.p.values.len() * width).sum();
    if evidence.spend(work + count * count * classes * width) {
        return None;
    }
    let captured = evidence.captured(key).filter(|of| of.columns == width)?;
    let captured = captured.values.get(..classes * width)?;
    let products: Vec<Vec<f64>> = pairs().map(product).collect();
    let all: Vec<&[f64]> = products.iter().map(Vec::as_slice).collect();
    let weights = multiples(&all, captured)?;
    let (mut values, mut as_declared) = (vec![0.0; captured.len()], vec![0.0; captured.len()]);
    let (mut words, mut taken) = (Vec::new(), vec![0; planes.len()]);
    for (((a, b), weight), product) in pairs().zip(weights).zip(&products) {
        let add = |to: &mut [f64]| to.iter_mut().zip(product).for_each(|(to, x)| *to += x);
        if a == b {
            add(&mut as_declared);
        }
        if weight.abs() < WHOLE {
            continue;
        }
        if (weight - 1.0).abs() >= WHOLE {
            return None;
        }
        add(&mut values);
        taken[a] += 1;
        if a != b {
            let name = |at: usize| named(planes[at].0);
            words.push(format!(
                "dk multiplies dlogits of microbatch {} with q of microbatch {}",
                name(a),
                name(b)
            ));
        }
    }
    let told = taken.iter().all(|&times| times == 1)
        && distance(captured, &values) <= LEFT * distance(captured, &as_declared);
    told.then_some((Rows { cols: width, values }, words))
}

fn named(microbatch: Option<Microbatch>) -> String {
    microbatch.map_or("none".to_string(), |mb| mb.to_string())
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
    let words = format!(
        "dk of microbatch {} is made with q of microbatch {}{which}",
        named(of.key.microbatch),
        named(other)
    );
    Some((changed, words))
}
