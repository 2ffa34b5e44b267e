//! Finds gradients whose buffer was not written: they equal, bit for bit, an input that they were
//! computed from, or the same gradient one microbatch before.
//!
//! A nonzero element equals an unrelated one of its dtype with probability 2⁻ᵇ at most, where b is
//! the number of fraction bits. A run of r equal elements at the same place of two tensors of n
//! elements, none of them equal to the one before it, is reported when `n 2^(-r b)` is below
//! [`FALSE_ALARM`], divided by the pairs of a step. Rows of two microbatches are compared as a
//! whole, and count as many bits as their columns have (`columns.rs`). They are only compared where
//! the labels of the two microbatches differ, and for dq also the rows of k that the labels name,
//! since tokens with equal hidden states have equal dq otherwise. Of a dq that ranks hold addends of,
//! each by its own classes, the label's term is in one of them alone: rows of equal hidden states are
//! left out. A row of dk may be summed over tokens that all have the same hidden state, so the
//! finding is a warning where the microbatches share a hidden state.

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
use super::{CheckResults, Place, Severity, Subject};
use crate::assemble::{assemble, extract, pieces as cut};
use crate::bits::{Kind, bits, kind, random_bits};
use crate::compare::bound::FALSE_ALARM;
use crate::dump::{TensorInfo, name_ranks};
use crate::number::plural;

/// Gradients, and the inputs that they must not equal within a microbatch.
const PAIRS: [(Role, Role); 5] = [
    (Role::Dlogits, Role::Logits),
    (Role::Dq, Role::Q),
    (Role::DqLse, Role::Q),
    (Role::Dk, Role::K),
    (Role::DkLse, Role::K),
];
/// Gradients that must differ between two microbatches with different labels.
const FRESH: [Role; 4] = [Role::Dlogits, Role::Dq, Role::Dk, Role::DkLse];

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        for (gradient, source) in PAIRS {
            for (key, info) in subject.of_role(gradient) {
                against(subject, (key, info), source, results);
            }
        }
    }
    for role in FRESH {
        earlier(subjects, role, results);
    }
    if results.looked_at == 0 {
        results.skip("buffers", "no gradient was recorded beside what it could be mistaken for");
    }
}

/// How many equal bits in a piece are not explained by chance.
fn bits_needed(dtype: Dtype, bytes: &[u8]) -> f64 {
    let elements = bytes.len() / dtype.width();
    let tries = elements.max(1) as f64 * (PAIRS.len() + FRESH.len()) as f64;
    (tries / FALSE_ALARM).log2()
}

/// Fraction bits that are set in at least one element. Numbers that were computed in fewer bits
/// have zeros in the last ones, and are equal by chance as often as numbers of that narrower
/// format.
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

fn against(
    subject: &Subject<'_>,
    (key, info): Named<'_>,
    source: Role,
    results: &mut CheckResults,
) {
    let same = |(other, source_info): &Named<'_>| {
        source_info.dtype == info.dtype
            && source_info.shape == info.shape
            && (other.microbatch == key.microbatch || other.microbatch.is_none())
    };
    let Some((other, source_info)) = subject.of_role(source).find(same) else {
        return;
    };
    results.looked();
    let ((recorded, _), (sources, _)) =
        (pieces(subject.dump, info), pieces(subject.dump, source_info));
    for piece in &recorded {
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
        results.add(Severity::Fail, Some("uninitialised-output"), place, evidence, advice);
    }
}

/// Rows of a piece with long runs of elements that equal those at the same place of another tensor,
/// and how many elements the runs have.
fn equal_runs(
    info: &TensorInfo,
    piece: &Piece<'_>,
    sources: &[Piece<'_>],
) -> Option<(Vec<u64>, u64)> {
    let width = info.dtype.width();
    let used = f64::from(bits_in_use(info.dtype, piece.bytes));
    let needed = (bits_needed(info.dtype, piece.bytes) / used).ceil() as usize;
    let (mut rows, mut equal) = (Vec::new(), 0u64);
    // Both tensors are usually sharded in the same way.
    let alike = sources.binary_search_by(|other| other.place().cmp(piece.place()));
    let alike = alike.ok().map(|at| &sources[at]);
    for part in cut(piece.place(), width) {
        let inside = |other: &&Piece<'_>| other.place().intersection(&part).as_ref() == Some(&part);
        let Some(other) = alike.or_else(|| sources.iter().find(inside)) else { continue };
        let part_bytes = extract(&part, piece.place(), piece.bytes, width);
        let theirs = extract(&part, other.place(), other.bytes, width);
        let columns = part.0.last().map_or(1, |(from, to)| (to - from) as usize).max(1);
        let (mut run, mut last) = (0usize, 0u64);
        for i in 0..part_bytes.len() / width {
            let (a, b) = (bits(&part_bytes, width, i), bits(&theirs, width, i));
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

/// Compares a gradient with the same gradient one microbatch (or dumped step) before.
fn earlier(subjects: &[Subject<'_>], role: Role, results: &mut CheckResults) {
    let mut before: Option<(&Subject<'_>, Named<'_>, Facts)> = None;
    for subject in subjects {
        for facts in facts(subject).into_iter().flatten() {
            let current = subject.of_role(role).find(|(key, _)| {
                key.microbatch == facts.microbatch && key.when != Some(When::PostReduce)
            });
            let Some(now) = current else { continue };
            if let Some((past, then, labels)) = &before
                && then.1.shape == now.1.shape
                && then.1.dtype == now.1.dtype
            {
                results.looked();
                repeats((past, *then, labels), (subject, now, &facts), results);
            }
            before = Some((subject, now, facts));
        }
    }
}

type StepTensor<'a> = (&'a Subject<'a>, Named<'a>, &'a Facts);

fn repeats(past: StepTensor<'_>, now: StepTensor<'_>, results: &mut CheckResults) {
    let (subject, (key, info), facts) = now;
    let ((recorded, _), (old, _)) = (pieces(subject.dump, info), pieces(past.0.dump, past.1.1));
    let of_tokens = matches!(info.role, Some(Role::Dq | Role::Dlogits));
    if of_tokens && past.2.targets.len() != facts.targets.len() {
        return;
    }
    let each = |piece| {
        let piece: &Piece<'_> = piece;
        piece.ranks.iter().map(move |rank| ((piece.place(), rank), piece))
    };
    let by_place: BTreeMap<_, _> = old.iter().flat_map(each).collect();
    for piece in &recorded {
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
                && columns.evidence(piece.row_bytes(row)) >= needed
        };
        let rows = (0..piece.rows()).filter(|&row| stale(row));
        let mut rows: Vec<u64> = rows.map(|row| piece.global_row(row)).collect();
        if info.role == Some(Role::Dq) && !rows.is_empty() {
            let of_k = rows_of_k(subject);
            rows.retain(|&token| !one_row(&of_k, past.2, facts, token as usize));
        }
        if info.role == Some(Role::Dq) && info.partial.is_some() && !rows.is_empty() {
            let (before, after) = (states(past), states(now));
            rows.retain(|token| before.get(token) != after.get(token));
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
        results.add(severity, Some("uninitialised-output"), place, evidence, advice);
    }
}

/// Whether two microbatches share the hidden state of some token (as the first tokens of sequences
/// often do), or this is not known: rows of dk that only such tokens add to are equal.
fn shared_states(past: StepTensor<'_>, now: StepTensor<'_>) -> bool {
    let all = |of| states(of).into_values().collect::<BTreeSet<u128>>();
    let (past, now) = (all(past), all(now));
    past.is_empty() || now.is_empty() || !past.is_disjoint(&now)
}

/// The hash of the hidden state of each token of a microbatch; empty where none was recorded.
fn states((subject, _, facts): StepTensor<'_>) -> BTreeMap<u64, u128> {
    let same = |(key, info): &Named<'_>| key.microbatch == facts.microbatch && info.shape.len() > 1;
    let Some((_, info)) = subject.of_role(Role::Q).find(same) else { return BTreeMap::new() };
    let (recorded, _) = pieces(subject.dump, info);
    let rows = recorded.iter().flat_map(|piece| {
        (0..piece.rows())
            .map(|row| (piece.global_row(row), ContentHash::of(piece.row_bytes(row)).0))
    });
    rows.collect()
}

/// Whether a token's labels in two microbatches name equal rows of k.
fn one_row(of_k: &[u128], past: &Facts, now: &Facts, token: usize) -> bool {
    let row = |facts: &Facts| {
        let class = usize::try_from((*facts.targets.get(token)?)?).ok()?;
        of_k.get(class)
    };
    row(past).is_some() && row(past) == row(now)
}

/// The hash of each row of k, by class; empty where k cannot be assembled.
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
fn same_labels(these: &Facts, other: &Facts, ranks: &[Rank]) -> bool {
    let targets = |facts: &Facts| -> Vec<Option<i64>> {
        let is_of_ranks =
            |group: &usize| facts.holders[*group].iter().any(|rank| ranks.contains(rank));
        let groups = (0..facts.holders.len()).filter(is_of_ranks);
        groups.flat_map(|group| &facts.held_tokens[group]).map(|&t| facts.targets[t]).collect()
    };
    targets(these) == targets(other)
}
