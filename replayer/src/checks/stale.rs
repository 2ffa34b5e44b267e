//! Gradients that are another buffer: equal bit for bit to what they were computed from,
//! or to what the buffer held a microbatch before.
//!
//! An element that is not zero equals an unrelated one of its dtype with probability 2⁻ᵇ
//! at most, b the bits of the fraction. A run of r equal elements in one place of two
//! tensors of n, none a repeat of the one before it, is reported when `n 2^(-r b)` is
//! below [`FALSE_ALARM`], over the pairs of a step. Rows of two microbatches are compared
//! whole, as many bits as their columns tell (`columns.rs`), and only where their labels
//! differ, and with dq the rows of k that these name: dq depends on nothing else that equal
//! hidden states leave open. A row of dk may be made by tokens of one hidden state alone, so
//! where the microbatches share any it is a warning.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};

use backtape::dtype::Dtype;
use backtape::hash::ContentHash;
use backtape::head::KLayout;
use backtape::identity::Rank;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::columns::Columns;
use super::facts::{Facts, facts};
use super::pieces::{Piece, pieces};
use super::{Found, Place, Severity, Subject};
use crate::assemble::{assemble, extract, pieces as cut};
use crate::bits::{Kind, bits, kind, random_bits};
use crate::compare::bound::FALSE_ALARM;
use crate::dump::{TensorInfo, name_ranks};
use crate::number::plural;

/// What must not equal what, in one microbatch.
const PAIRS: [(Role, Role); 5] = [
    (Role::Dlogits, Role::Logits),
    (Role::Dq, Role::Q),
    (Role::DqLse, Role::Q),
    (Role::Dk, Role::K),
    (Role::DkLse, Role::K),
];
/// Gradients that two microbatches with other labels cannot share.
const FRESH: [Role; 4] = [Role::Dlogits, Role::Dq, Role::Dk, Role::DkLse];

pub(super) fn run(subjects: &[Subject<'_>], found: &mut Found) {
    for subject in subjects {
        for (gradient, source) in PAIRS {
            for (key, info) in subject.of_role(gradient) {
                against(subject, (key, info), source, found);
            }
        }
    }
    for role in FRESH {
        earlier(subjects, role, found);
    }
    if found.looked_at == 0 {
        found.skip("buffers", "no gradient was recorded beside what it could be mistaken for");
    }
}

/// Bits of a row of a piece that chance does not make equal.
fn bits_needed(dtype: Dtype, bytes: &[u8]) -> f64 {
    let elements = bytes.len() / dtype.width();
    let tries = elements.max(1) as f64 * (PAIRS.len() + FRESH.len()) as f64;
    (tries / FALSE_ALARM).log2()
}

/// Bits of the fraction that some element has: numbers that were narrower before they were stored
/// leave the last ones 0, and are equal by chance as often as those of the narrower format.
fn bits_in_use(dtype: Dtype, bytes: &[u8]) -> u32 {
    let (mut used, all) = (0u64, random_bits(dtype));
    for index in 0..bytes.len() / dtype.width() {
        used |= bits(bytes, dtype.width(), index);
        if used & 1 == 1 {
            return all;
        }
    }
    all.saturating_sub(used.trailing_zeros()).max(1)
}

type Named<'a> = (&'a TensorKey, &'a TensorInfo);

fn against(subject: &Subject<'_>, (key, info): Named<'_>, source: Role, found: &mut Found) {
    let same = |(other, of): &Named<'_>| {
        of.dtype == info.dtype
            && of.shape == info.shape
            && (other.microbatch == key.microbatch || other.microbatch.is_none())
    };
    let Some((other, of)) = subject.of_role(source).find(same) else {
        return;
    };
    found.looked();
    let ((held, _), (sources, _)) = (pieces(subject.dump, info), pieces(subject.dump, of));
    for piece in &held {
        let Some((rows, equal)) = equal_runs(info, piece, &sources) else { continue };
        let evidence = format!(
            "{key} {} of {}: {} in {} equal {other} bit for bit, from row {} on",
            piece.place(),
            name_ranks(&piece.ranks),
            plural(equal, "element"),
            plural(rows.len() as u64, "row"),
            rows[0],
        );
        let place = Place::of(subject).tensor(key).ranks(&piece.ranks).rows(&rows);
        let advice = format!(
            "{} still holds {}: the op left its output unwritten, or its buffer was shared",
            key.tensor, other.tensor
        );
        found.add(Severity::Fail, Some("uninitialised-output"), place, evidence, advice);
    }
}

/// Rows of a piece with long runs equal to the same place of another tensor, and how
/// many elements they make.
fn equal_runs(
    info: &TensorInfo,
    piece: &Piece<'_>,
    sources: &[Piece<'_>],
) -> Option<(Vec<u64>, u64)> {
    let width = info.dtype.width();
    let used = f64::from(bits_in_use(info.dtype, piece.bytes));
    let needed = (bits_needed(info.dtype, piece.bytes) / used).ceil() as usize;
    let (mut rows, mut equal) = (Vec::new(), 0u64);
    // Most often both are cut alike.
    let alike = sources.binary_search_by(|other| other.place().cmp(piece.place()));
    let alike = alike.ok().map(|at| &sources[at]);
    for part in cut(piece.place(), width) {
        let inside = |other: &&Piece<'_>| other.place().intersection(&part).as_ref() == Some(&part);
        let Some(other) = alike.or_else(|| sources.iter().find(inside)) else { continue };
        let own = extract(&part, piece.place(), piece.bytes, width);
        let theirs = extract(&part, other.place(), other.bytes, width);
        let columns = part.0.last().map_or(1, |(from, to)| (to - from) as usize).max(1);
        let (mut run, mut last) = (0usize, 0u64);
        for i in 0..own.len() / width {
            let (a, b) = (bits(&own, width, i), bits(&theirs, width, i));
            if a != b || kind(info.dtype, a) != Kind::Finite {
                (run, last) = (0, 0);
                continue;
            }
            run += usize::from(a != last);
            last = a;
            if run >= needed {
                equal += if run == needed { needed as u64 } else { 1 };
                let row = global_row(&part, info, i / columns);
                if rows.last() != Some(&row) {
                    rows.push(row);
                }
            }
        }
    }
    rows.dedup();
    (!rows.is_empty()).then_some((rows, equal))
}

fn global_row(part: &backtape::index_box::IndexBox, info: &TensorInfo, row: usize) -> u64 {
    let leading = part.0.len().saturating_sub(1);
    let (mut rest, mut flat, mut stride) = (row as u64, 0, 1);
    for (&(from, to), &size) in part.0[..leading].iter().zip(&info.shape).rev() {
        let extent = (to - from).max(1);
        flat += (from + rest % extent) * stride;
        rest /= extent;
        stride *= size;
    }
    flat
}

/// Compares a gradient with itself one microbatch (or dumped step) before.
fn earlier(subjects: &[Subject<'_>], role: Role, found: &mut Found) {
    let mut before: Option<(&Subject<'_>, Named<'_>, Facts)> = None;
    for subject in subjects {
        for facts in facts(subject).into_iter().flatten() {
            let of = subject.of_role(role).find(|(key, _)| {
                key.microbatch == facts.microbatch && key.when != Some(When::PostReduce)
            });
            let Some(now) = of else { continue };
            if let Some((past, then, labels)) = &before
                && then.1.shape == now.1.shape
                && then.1.dtype == now.1.dtype
            {
                found.looked();
                repeats((past, *then, labels), (subject, now, &facts), found);
            }
            before = Some((subject, now, facts));
        }
    }
}

type At<'a> = (&'a Subject<'a>, Named<'a>, &'a Facts);

fn repeats(past: At<'_>, now: At<'_>, found: &mut Found) {
    let (subject, (key, info), facts) = now;
    let ((held, _), (old, _)) = (pieces(subject.dump, info), pieces(past.0.dump, past.1.1));
    let of_tokens = matches!(info.role, Some(Role::Dq | Role::Dlogits));
    if of_tokens && past.2.targets.len() != facts.targets.len() {
        return;
    }
    let each = |piece| {
        let piece: &Piece<'_> = piece;
        piece.ranks.iter().map(move |rank| ((piece.place(), rank), piece))
    };
    let by_place: BTreeMap<_, _> = old.iter().flat_map(each).collect();
    for piece in &held {
        let same = piece.ranks.iter().find_map(|rank| by_place.get(&(piece.place(), rank)));
        let Some(other) = same else { continue };
        if !of_tokens && same_labels(past.2, facts, &piece.ranks) {
            continue;
        }
        let needed = bits_needed(info.dtype, piece.bytes);
        let columns =
            LazyCell::new(|| Columns::new(info.dtype, piece, bits_in_use(info.dtype, piece.bytes)));
        let fresh = |row: usize| {
            let token = piece.global_row(row) as usize;
            !of_tokens || past.2.targets.get(token) != facts.targets.get(token)
        };
        let stale = |row: usize| {
            piece.row_bytes(row) == other.row_bytes(row)
                && fresh(row)
                && columns.told(piece.row_bytes(row)) >= needed
        };
        let rows = (0..piece.rows()).filter(|&row| stale(row));
        let mut rows: Vec<u64> = rows.map(|row| piece.global_row(row)).collect();
        if info.role == Some(Role::Dq) && !rows.is_empty() {
            let of_k = rows_of_k(subject);
            rows.retain(|&token| !one_row(&of_k, past.2, facts, token as usize));
        }
        let Some(first) = rows.first() else { continue };
        let severity = match of_tokens || !shared_states(past, now) {
            true => Severity::Fail,
            false => Severity::Warn,
        };
        let evidence = format!(
            "{key} of step {} and {} of step {} are equal bit for bit in {} of {}, from row {first} on, though their tokens differ",
            subject.dump.step,
            past.1.0,
            past.0.dump.step,
            plural(rows.len() as u64, "row"),
            name_ranks(&piece.ranks),
        );
        let place = Place::of(subject).tensor(key).ranks(&piece.ranks).rows(&rows);
        let advice = format!(
            "{} still holds what was there before: the op did not write these rows",
            key.tensor
        );
        found.add(severity, Some("uninitialised-output"), place, evidence, advice);
    }
}

/// Whether a token of one microbatch has the hidden state of one of the other (the first of
/// every sequence often has), or that is not known: what such tokens alone add to is alike.
fn shared_states(past: At<'_>, now: At<'_>) -> bool {
    let states = |(subject, _, facts): At<'_>| -> Option<BTreeSet<u128>> {
        let same =
            |(key, info): &Named<'_>| key.microbatch == facts.microbatch && info.shape.len() > 1;
        let (_, info) = subject.of_role(Role::Q).find(same)?;
        let (held, _) = pieces(subject.dump, info);
        let rows = held.iter().flat_map(|piece| (0..piece.rows()).map(|row| piece.row_bytes(row)));
        Some(rows.map(|row| ContentHash::of(row).0).collect())
    };
    match (states(past), states(now)) {
        (Some(past), Some(now)) => !past.is_disjoint(&now),
        _ => true,
    }
}

/// Whether a token's labels in two microbatches name one and the same row of k.
fn one_row(of_k: &[u128], past: &Facts, now: &Facts, token: usize) -> bool {
    let row = |facts: &Facts| {
        let class = usize::try_from((*facts.targets.get(token)?)?).ok()?;
        of_k.get(class)
    };
    row(past).is_some() && row(past) == row(now)
}

/// What tells the rows of k apart, by class; nothing where k cannot be had.
fn rows_of_k(subject: &Subject<'_>) -> Vec<u128> {
    let whole = |(key, info): Named<'_>| {
        let tensor = assemble(subject.dump, key).ok()?;
        let transposed = subject.head().is_some_and(|head| head.k_layout == KLayout::Dv);
        let tensor = if transposed { tensor.transposed().ok()? } else { tensor };
        let row = tensor.bytes().len() / (tensor.shape.first().copied()? as usize).max(1);
        let hashes = tensor.bytes().chunks_exact(row.max(1));
        (info.shape.len() == 2).then(|| hashes.map(|row| ContentHash::of(row).0).collect())
    };
    let named = subject.of_role(Role::K).find(|(_, info)| info.shape.len() == 2);
    named.and_then(whole).unwrap_or_default()
}

/// Whether these ranks predict the same classes in both microbatches.
fn same_labels(one: &Facts, other: &Facts, ranks: &[Rank]) -> bool {
    let of = |facts: &Facts| -> Vec<Option<i64>> {
        let own = |group: &usize| facts.holders[*group].iter().any(|rank| ranks.contains(rank));
        let groups = (0..facts.holders.len()).filter(own);
        groups.flat_map(|group| &facts.held[group]).map(|&t| facts.targets[t]).collect()
    };
    of(one) == of(other)
}
