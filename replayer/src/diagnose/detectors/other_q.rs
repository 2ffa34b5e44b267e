//! dk that was computed with another microbatch's q in the places of its own.
//!
//! dk is `Eᵀ q`, where E are the entries of dlogits. Where E is right and has more classes than
//! tokens, q is solved for by least squares, and each of its rows is compared with those of the
//! other microbatches. Where only a sum of dk was recorded, it is solved for the weights of all
//! products of one microbatch's entries with one microbatch's q.

use backtape::identity::Microbatch;

use super::addends::{adds_to, divisor};
use super::dlogits_plane::Rows;
use super::gradient::Gradient;
use super::least_squares::{factors, multiples, runs_of};
use super::single_tokens::{Direct, distance, energy};
use super::unit_states::UnitState;
use crate::assemble::Row;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// Another microbatch's row is taken for the one that was read if it leaves at most this share of
/// the squared error of the solved row.
const SHOWN: f64 = 0.1;
/// Share of the squared error of dk that may be left to be worth a trial.
const LEFT: f64 = 0.1;
/// A sum is solved for the weights of at most this many products.
const PAIRS: usize = 64;
/// How far the weight of a product may be from a whole number.
const WHOLE: f64 = 0.05;
/// The report lists at most this many runs of tokens.
const TOLD: usize = 4;

/// A world with dk computed from the solved q, and in words which q that is; `None` where this does
/// not explain every failing dk.
pub fn of_other_q(evidence: &Evidence<'_>) -> Option<(ReplacedValues, Vec<String>)> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dk]).map(|(key, _)| key).collect();
    if keys.is_empty() || evidence.fails_any(&[Stage::Dq, Stage::Dlogits, Stage::Dbias]) {
        return None;
    }
    let (mut world, mut said) = (ReplacedValues::default(), Vec::new());
    for key in keys {
        let gradient = Gradient::of(evidence, key)?;
        let (changed, words) = made(evidence, &gradient)?;
        let rows = (0..changed.count()).map(|at| (at, changed.row(at).to_vec()));
        world = world.rows(key, rows);
        said.push(words);
    }
    said.dedup();
    Some((world, said))
}

/// The same where only sums of dk over microbatches were recorded; `None` where this does not
/// explain every failing sum, or there are too many microbatches.
pub fn of_other_q_in_sums(evidence: &Evidence<'_>) -> Option<(ReplacedValues, Vec<String>)> {
    let keys: Vec<Key> =
        evidence.failing.iter().filter(|key| key.stage.is_sum()).copied().collect();
    if keys.is_empty() || !evidence.has_sums_alone() || keys.len() < evidence.failing.len() {
        return None;
    }
    let (mut world, mut said) = (ReplacedValues::default(), Vec::new());
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

/// Solves a sum for products of one unit's entries with the q of a unit of the same rank, in which
/// each unit's entries occur once.
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
        let pairs_of = |a: usize| (0..planes.len()).map(move |b| (a, b));
        let same = |&(a, b): &(usize, usize)| {
            planes[a].1 == planes[b].1 && planes[a].2.q.count() == planes[b].2.q.count()
        };
        (0..planes.len()).flat_map(pairs_of).filter(same)
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
    let captured = evidence.captured(key).filter(|values| values.columns == width)?;
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

/// Solves one dk for the rows of q that it was computed with; returns dk with those of the other
/// microbatch that fits best, and words for the report.
fn made(evidence: &Evidence<'_>, gradient: &Gradient) -> Option<(Rows, String)> {
    let entries = gradient.entries(false)?;
    let solved_q = factors(&entries, &gradient.captured, &|work| evidence.spend(work))?;
    let counts: Vec<bool> = (0..solved_q.count()).map(|at| energy(entries.row(at)) > 0.0).collect();
    let others =
        evidence.inputs.iter().filter(|inputs| inputs.microbatch != gradient.key.microbatch);
    let solved_from = |inputs| {
        let direct = Direct::new(evidence, inputs)?;
        let (mut q, mut tokens) = (gradient.other().clone(), Vec::new());
        for (index, &token) in
            gradient.plane.rows.iter().enumerate().filter(|(index, _)| counts[*index])
        {
            let own_distance = distance(solved_q.row(index), gradient.other().row(index));
            if token >= inputs.tokens() {
                return None;
            }
            let other = direct.q(Row::From(token));
            if other.len() == q.cols
                && distance(solved_q.row(index), &other) <= SHOWN * own_distance
            {
                q.values[index * q.cols..(index + 1) * q.cols].copy_from_slice(&other);
                tokens.push(token);
            }
        }
        let changed = entries.transposed_times(&q);
        let left = distance(&gradient.captured.values, &changed.values);
        Some((left, changed, inputs.microbatch, tokens))
    };
    let best = others.filter_map(solved_from).min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, changed, other, tokens) = best.filter(|(left, ..)| {
        *left <= LEFT * distance(&gradient.captured.values, &gradient.reference.values)
    })?;
    let all = tokens.len() == counts.iter().filter(|counts| **counts).count();
    let runs = runs_of(&tokens);
    let told = runs.iter().take(TOLD).map(|run| format!("{} to {}", run.start, run.end - 1));
    let told = told.collect::<Vec<_>>().join(", ");
    let which = if all { String::new() } else { format!(" in tokens {told}") };
    let words = format!(
        "dk of microbatch {} is made with q of microbatch {}{which}",
        named(gradient.key.microbatch),
        named(other)
    );
    Some((changed, words))
}
