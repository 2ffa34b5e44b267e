//! Finds values that are not finite, and in which stage, microbatch, rank and row they appear
//! first.
//!
//! Every element of every float tensor is classified by its bits. Values that are infinite on
//! purpose are not counted: a mask of minus infinity on logits, on a bias and on tensors outside
//! the head, and the log-probability of a masked class. A tensor outside the head may hold NaN on
//! purpose, and a kernel need not write the rows of ignored tokens: both are warnings. If the first
//! such tensor has finite numbers in some blocks only, the places of these blocks may show the
//! fault (`blocks.rs`).

use backtape::identity::{Microbatch, Rank};
use backtape::manifest::Omission;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};
use rayon::prelude::*;

use super::blocks::indexed_twice;
use super::facts::{Facts, facts, vector};
use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::{Kind, all_finite, bits, format, kind};
use crate::dump::{TensorInfo, name_ranks};
use crate::head::Stage;
use crate::number::plural;

/// Most later tensors that are named one by one.
const NAMED: usize = 12;
const CHUNK: usize = 1 << 16;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        step(subject, results);
    }
}

/// The values of a tensor that are not finite.
#[derive(Clone, Default)]
struct Count {
    nan: u64,
    infinite: u64,
    elements: u64,
    /// The first of them: its row, and the ranks of its piece.
    first: Option<(u64, Vec<Rank>)>,
    rows: Vec<u64>,
}

/// A tensor with values that are not finite.
struct Hit<'a> {
    key: &'a TensorKey,
    role: Option<Role>,
    count: Count,
}

fn step(subject: &Subject<'_>, results: &mut CheckResults) {
    let mut hits: Vec<Hit<'_>> = Vec::new();
    for (key, info) in subject.dump.tensors() {
        if format(info.dtype).is_none() {
            continue;
        }
        let (recorded, lost) = pieces(subject.dump, info);
        if lost > 0 {
            let why = format!("{} of it cannot be read", plural(lost as u64, "shard"));
            results.skip(format!("step {}: {key}", subject.dump.step), why);
        }
        if recorded.is_empty() {
            continue;
        }
        results.looked();
        let count = count(subject, info, &recorded);
        if count.nan + count.infinite > 0 {
            hits.push(Hit { key, role: info.role, count });
        }
    }
    hits.sort_by_key(|hit| order(hit.key, hit.role));
    let all_facts: Vec<Facts> = match hits.is_empty() {
        true => Vec::new(),
        false => facts(subject).into_iter().flatten().collect(),
    };
    // A GradScaler leaves a step out because of these very values.
    let is_left = |omission: &Omission| omission.reason.starts_with("GradScaler left the step out");
    let is_left = subject.dump.manifest.omissions.iter().any(is_left);
    let meant = |hit: &Hit<'_>| {
        let only_ignored =
            |role| only_ignored_tokens(subject, hit.key, (role, &hit.count), &all_facts);
        is_left || hit.role.is_none_or(only_ignored)
    };
    // Report the first tensor whose values are a fault, if there is one, else the first of all.
    let (index, severity) = match hits.iter().position(|hit| !meant(hit)) {
        Some(at) => (at, Severity::Fail),
        None if hits.is_empty() => return,
        None => (0, Severity::Warn),
    };
    let first = hits.remove(index);
    origin(subject, results, severity, &first, &hits);
}

/// Whether the tensor is of the forward pass and all its values that are not finite are in rows of
/// ignored tokens.
fn only_ignored_tokens(
    subject: &Subject<'_>,
    key: &TensorKey,
    (role, count): (Role, &Count),
    known: &[Facts],
) -> bool {
    let Some(facts) = known.iter().find(|facts| facts.microbatch == key.microbatch) else {
        return false;
    };
    let rests = |t: usize| facts.weights.get(t) == Some(&0.0);
    match role {
        Role::Q | Role::Logits => count.rows.iter().all(|&row| rests(row as usize)),
        Role::Lse | Role::LabelLogits | Role::Logprobs => {
            let values = vector(subject, role, key.microbatch, facts.tokens());
            values.is_some_and(|(values, _)| {
                values.iter().enumerate().all(|(t, value)| value.is_finite() || rests(t))
            })
        }
        _ => false,
    }
}

/// The order in which tensors are computed in a step: first parameters, then one microbatch after
/// another with its stages in order, then sums over microbatches. Tensors outside the head come
/// last, since their place is not known.
fn order(key: &TensorKey, role: Option<Role>) -> (u8, Option<Microbatch>, Option<Stage>, bool) {
    let stage = role.and_then(Stage::of_role);
    let group = match (stage, key.microbatch) {
        (None, _) => 3,
        (Some(stage), None) if stage.is_input() => 0,
        (Some(_), Some(_)) => 1,
        (Some(_), None) => 2,
    };
    (group, key.microbatch, stage, key.when == Some(When::PostReduce))
}

fn count(subject: &Subject<'_>, info: &TensorInfo, recorded: &[Piece<'_>]) -> Count {
    let mut total = Count::default();
    for piece in recorded {
        let in_piece = piece_count(subject, info, piece);
        total.nan += in_piece.nan;
        total.infinite += in_piece.infinite;
        total.elements += in_piece.elements;
        total.rows.extend(&in_piece.rows);
        match (&total.first, in_piece.first) {
            (Some((row, _)), Some((other, _))) if *row <= other => {}
            (_, Some(first)) => total.first = Some(first),
            (_, None) => {}
        }
    }
    total.rows.sort_unstable();
    total.rows.dedup();
    total
}

fn piece_count(subject: &Subject<'_>, info: &TensorInfo, piece: &Piece<'_>) -> Count {
    let (dtype, width) = (info.dtype, info.dtype.width());
    let masks = masked_from(subject, info);
    let (columns, start) = (piece.columns(), piece.column_range().0);
    let elements = piece.bytes.len() / width;
    let chunk = |at: usize| {
        let (from, to) = (at * CHUNK, elements.min((at + 1) * CHUNK));
        let mut count = Count { elements: (to - from) as u64, ..Count::default() };
        if all_finite(dtype, &piece.bytes[from * width..to * width]) {
            return count;
        }
        for i in from..to {
            let (nan, infinite) = match kind(dtype, bits(piece.bytes, width, i)) {
                Kind::Nan => (1, 0),
                Kind::Infinite(negative) => {
                    let column = start + (i % columns) as u64;
                    (0, u64::from(!negative || masks.is_none_or(|from| column < from)))
                }
                _ => continue,
            };
            count.nan += nan;
            count.infinite += infinite;
            if nan + infinite > 0 && count.rows.last() != Some(&((i / columns) as u64)) {
                count.rows.push((i / columns) as u64);
            }
        }
        count
    };
    let parts: Vec<Count> = (0..elements.div_ceil(CHUNK)).into_par_iter().map(chunk).collect();
    let mut count = Count::default();
    for part in parts {
        count.nan += part.nan;
        count.infinite += part.infinite;
        count.elements += part.elements;
        count.rows.extend(part.rows.iter().map(|&row| piece.global_row(row as usize)));
    }
    count.rows.dedup();
    count.first = count.rows.first().map(|&row| (row, piece.ranks.clone()));
    count
}

/// The first column in which minus infinity is a mask; `None` where it never is one.
fn masked_from(subject: &Subject<'_>, info: &TensorInfo) -> Option<u64> {
    match info.role {
        Some(Role::Bias) | None => Some(0),
        Some(Role::Logits | Role::Logprobs) if info.shape.len() > 1 => {
            let valid = subject.head().and_then(|head| head.valid_vocab);
            // Without a declared `valid_vocab` a job may mask any class.
            Some(valid.unwrap_or(0))
        }
        _ => None,
    }
}

fn origin(
    subject: &Subject<'_>,
    results: &mut CheckResults,
    severity: Severity,
    first: &Hit<'_>,
    later: &[Hit<'_>],
) {
    let Hit { key, role, count } = first;
    let (row, ranks) = count.first.clone().unwrap_or_default();
    let before = match role.and_then(Stage::of_role) {
        Some(stage) => clean_before(subject, key, stage),
        None => String::new(),
    };
    let evidence = format!(
        "{key} is the first tensor of the step with non-finite values: {} in {}, the first in row {row} on {}{before}{}",
        amounts(count),
        plural(count.rows.len() as u64, "row"),
        name_ranks(&ranks),
        also(later),
    );
    let place = Place::of(subject).tensor(key).ranks(&ranks).rows(&count.rows);
    if let Some(blocks) = indexed_twice(subject, key).filter(|_| severity == Severity::Fail) {
        let advice = format!(
            "Look at the index maps of the kernel that made {}: they return offsets where the grid wants indices of blocks",
            key.tensor
        );
        let evidence = format!("{evidence}; {blocks}");
        results.add(severity, Some("block-index-times-block"), place, evidence, advice);
        return note_later(subject, results, later);
    }
    let advice = match role.and_then(Stage::of_role) {
        Some(stage) if stage.is_input() => format!(
            "Look for the op that made {} on {}: what the head was given is not finite already",
            key.tensor,
            name_ranks(&ranks)
        ),
        Some(_) => format!(
            "Look at row {row} of {}: overflow, 0/0, and 0 times infinity in a masked class are usual",
            key.tensor
        ),
        None => format!("Look for the op that made {} on {}", key.tensor, name_ranks(&ranks)),
    };
    results.add(severity, Some("nan-origin"), place, evidence, advice);
    note_later(subject, results, later);
}

/// Adds a note for each later tensor with values that are not finite.
fn note_later(subject: &Subject<'_>, results: &mut CheckResults, later: &[Hit<'_>]) {
    for Hit { key, count, .. } in later {
        let ranks = count.first.as_ref().map(|(_, ranks)| ranks.as_slice()).unwrap_or_default();
        let place = Place::of(subject).tensor(key).ranks(ranks).rows(&count.rows);
        let evidence = format!(
            "{key} holds {} of {} in {}",
            amounts(count),
            plural(count.elements, "element"),
            plural(count.rows.len() as u64, "row")
        );
        results.add(Severity::Note, None, place, evidence, "Cure the first one, then look again");
    }
}

fn amounts(count: &Count) -> String {
    match (count.nan, count.infinite) {
        (nan, 0) => format!("{} NaN", crate::number::count(nan)),
        (0, infinite) => format!("{} infinite", crate::number::count(infinite)),
        (nan, infinite) => format!("{nan} NaN and {infinite} infinite"),
    }
}

/// Names the earlier stages that were recorded, which are finite since this tensor is the first.
fn clean_before(subject: &Subject<'_>, key: &TensorKey, stage: Stage) -> String {
    let earlier = |other: &Stage| *other < stage && stage.depends_on(*other);
    let recorded = |other: &Stage| {
        let keys = subject.dump.tensors().iter();
        let mut recorded_keys = keys.filter(|(recorded_keys, info)| {
            info.role.is_some()
                && info.role == other.role()
                && (recorded_keys.microbatch == key.microbatch
                    || recorded_keys.microbatch.is_none())
        });
        recorded_keys.any(|(_, info)| format(info.dtype).is_some())
    };
    let stages = Stage::ALL.iter().filter(|other| earlier(other) && recorded(other));
    let names: Vec<&str> = stages.map(|other| other.name()).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!("; finite before it: {}", names.join(", ")),
    }
}

fn also(later: &[Hit<'_>]) -> String {
    let mut names: Vec<String> = later.iter().take(NAMED).map(|hit| hit.key.to_string()).collect();
    if later.len() > NAMED {
        names.push(format!("{} more", later.len() - NAMED));
    }
    match names.is_empty() {
        true => String::new(),
        false => format!("; after it also in {}", names.join(", ")),
    }
}
