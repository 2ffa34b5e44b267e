//! Finds equal batches and equal sequences among ranks, microbatches and dumped steps.
//!
//! A batch is what one rank held of a microbatch; a sequence is a row of a `[B, S]`
//! tensor, or the whole of a `[T]` one. Shards of one box are replicas, not repeats.
//!
//! Two sequences may be equal by chance, so equality alone is no evidence. Each symbol x of a
//! sequence gets the probability P with which the *other* distinct sequences and the sequence's own
//! beginning predict it (`surprisal.rs`). -Σ log2 P is the surprisal of the sequence; it is small
//! for padding, constants, few classes, cycles and frequent phrases. A repeat is reported when
//! chance would produce one among N(N-1)/2 pairs with a probability below [`FALSE_ALARM`], divided
//! by the number of tests of the check. Only sequences that a batch holds once count as evidence
//! that it equals another: one that it holds several times is repeated in the data.
//!
//! Where one backward pass comes from several losses of one batch, as with two passes through a
//! model with dropout, each of these losses is a microbatch. Their equal batches count once.

use std::collections::{BTreeMap, BTreeSet};

use backtape::hash::ContentHash;
use backtape::head::Loss;
use backtape::identity::Microbatch;
use backtape::role::Role;

use super::surprisal::Stock;
use super::tokens::{Batch, batches, is_input, is_labels, rows_of_q};
use super::{CheckResults, Place, Severity, Subject};
use crate::compare::bound::FALSE_ALARM;
use crate::dump::name_ranks;
use crate::number::plural;

/// Most repeats that are named one by one.
const NAMED: usize = 6;

/// A batch, and the step and microbatch in which it was held.
struct RecordedBatch<'a> {
    step: u64,
    microbatch: Option<Microbatch>,
    /// The batch that the loss is of, where the dump says it.
    loss_of: Option<u32>,
    batch: Batch<'a>,
}

/// What identifies a sequence: the hash of its content, its first column, its length.
type Sequence = (u128, u64, usize);

/// Where a sequence is: which batch, and which row of it.
#[derive(Clone, Copy)]
struct Row {
    batch: usize,
    row: usize,
}

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    let mut named: BTreeMap<&str, Vec<RecordedBatch<'_>>> = BTreeMap::new();
    let mut of_q: BTreeMap<&str, Vec<RecordedBatch<'_>>> = BTreeMap::new();
    for subject in subjects {
        for (key, info) in subject.dump.tensors() {
            let into = match info.role {
                _ if is_labels(info) || is_input(key, info) => &mut named,
                Some(Role::Q) => &mut of_q,
                _ => continue,
            };
            let batches = match info.role {
                Some(Role::Q) => rows_of_q(subject, info),
                _ => batches(subject, info),
            };
            let (step, microbatch) = (subject.dump.step.0, key.microbatch);
            let batches_of_losses = subject.head().map_or(&[][..], |head| &head.batches);
            // What else a job records has microbatches of its own.
            let is_of_head = is_labels(info) || key.tensor.as_str() == OF_HEAD;
            let loss_of = microbatch
                .filter(|_| is_of_head)
                .and_then(|at| batches_of_losses.get(at.0 as usize).copied());
            let of = |batch| RecordedBatch { step, microbatch, loss_of, batch };
            let recorded = batches.into_iter().map(of);
            into.entry(key.tensor.as_str()).or_default().extend(recorded);
        }
    }
    if named.is_empty() {
        results.skip("token ids", "neither labels nor integer inputs were recorded");
        named = of_q;
    }
    // Two tests, of batches and of sequences, for every tensor.
    let tests = 2 * named.len().max(1);
    let policy = subjects.iter().filter_map(Subject::head).any(|head| head.loss == Loss::Grpo);
    for (name, batches) in &mut named {
        let losses = without_other_losses(batches);
        if losses > 0 {
            results.looked();
            report_losses(name, batches, losses, results);
        }
        if batches.len() > 1 || batches.iter().any(|batch| symbols(&batch.batch).0 > 1) {
            results.looked();
            tensor(name, batches, tests, policy, results);
        }
    }
    if results.looked_at == 0 {
        results.skip("equal batches", "only one sequence was recorded");
    }
}

/// The ids that `attach` records beside the labels of each loss.
const OF_HEAD: &str = "input_tokens";

/// Leaves one of the equal batches that a rank held for several losses of one batch, and returns how
/// many were left out.
fn without_other_losses(batches: &mut Vec<RecordedBatch<'_>>) -> usize {
    let mut seen = BTreeMap::new();
    let before = batches.len();
    batches.retain(|of| {
        let Some(batch) = of.loss_of else { return true };
        let rows = 0..symbols(&of.batch).0;
        let keys: Vec<Sequence> = rows.map(|row| row_key(&of.batch, row)).collect();
        let place = (of.step, of.batch.ranks().to_vec(), keys);
        *seen.entry((batch, place)).or_insert(of.microbatch) == of.microbatch
    });
    before - batches.len()
}

/// The number of rows of a batch, and of symbols in a row.
fn symbols(batch: &Batch<'_>) -> (usize, usize) {
    let piece = &batch.piece;
    let count = match piece.record.role {
        Some(Role::Q) => piece.rows(),
        _ => piece.bytes.len() / piece.record.dtype.width(),
    };
    (count / batch.length, batch.length)
}

/// The symbols of a row as numbers: the ids, or the hash of each token's row of q.
fn row_symbols(batch: &Batch<'_>, row: usize) -> Vec<i64> {
    let (from, length) = (row * batch.length, batch.length);
    match batch.piece.record.role {
        Some(Role::Q) => (from..from + length)
            .map(|t| ContentHash::of(batch.piece.row_bytes(t)).0 as i64)
            .collect(),
        _ => batch.ids().skip(from).take(length).collect(),
    }
}

fn row_key(batch: &Batch<'_>, row: usize) -> Sequence {
    let (rows, length) = symbols(batch);
    let width = batch.piece.bytes.len() / rows.max(1);
    let bytes = &batch.piece.bytes[row * width..(row + 1) * width];
    // A vector is one sequence whatever its box. Parts of sequences that were cut along their
    // length are only compared with the same part of others.
    let dims = batch.piece.place().0.len() - usize::from(batch.piece.record.role == Some(Role::Q));
    let start = if dims > 1 { batch.piece.place().0[dims - 1].0 } else { 0 };
    (ContentHash::of(bytes).0, start, length)
}

fn tensor(
    name: &str,
    batches: &[RecordedBatch<'_>],
    tests: usize,
    policy: bool,
    results: &mut CheckResults,
) {
    let keys: Vec<Vec<Sequence>> = batches
        .iter()
        .map(|batch| (0..symbols(&batch.batch).0).map(|row| row_key(&batch.batch, row)).collect())
        .collect();
    let mut classes: BTreeMap<Sequence, Vec<Row>> = BTreeMap::new();
    for (batch, keys) in keys.iter().enumerate() {
        for (row, key) in keys.iter().enumerate() {
            classes.entry(*key).or_default().push(Row { batch, row });
        }
    }
    if classes.values().all(|rows| rows.len() < 2) {
        return;
    }
    let bits = surprisals_of(batches, &classes);
    let sequences: usize = keys.iter().map(Vec::len).sum();
    let whole = equal_batches(&keys, &bits, needed(batches.len(), tests));
    report_batches(name, batches, &whole, policy, results);
    let again: BTreeSet<usize> =
        whole.iter().flat_map(|(class, _)| class.iter().skip(1)).copied().collect();
    let enough = needed(sequences, tests);
    let mut repeats: Vec<(Vec<Row>, f64)> = Vec::new();
    for (key, rows) in &classes {
        let other: Vec<Row> =
            rows.iter().filter(|row| !again.contains(&row.batch)).copied().collect();
        let surprisal = bits.get(key).copied().unwrap_or(0.0);
        if other.len() > 1 && surprisal >= enough {
            repeats.push((other, surprisal));
        }
    }
    // Sorted by place, so that the order does not depend on hashes.
    repeats.sort_by_key(|(rows, _)| (rows[0].batch, rows[0].row));
    report_rows(name, batches, &repeats, sequences, policy, results);
}

/// Surprisal in bits above which sequences among so many are not equal by chance.
fn needed(count: usize, tests: usize) -> f64 {
    let pairs = count as f64 * (count as f64 - 1.0) / 2.0;
    (pairs.max(1.0) * tests as f64 / FALSE_ALARM).log2()
}

/// Surprisal in bits of every sequence that occurs more than once.
fn surprisals_of(
    batches: &[RecordedBatch<'_>],
    classes: &BTreeMap<Sequence, Vec<Row>>,
) -> BTreeMap<Sequence, f64> {
    let distinct =
        classes.values().map(|rows| row_symbols(&batches[rows[0].batch].batch, rows[0].row));
    let distinct: Vec<Vec<i64>> = distinct.collect();
    let stock = Stock::new(&distinct);
    let each = classes.iter().zip(&distinct).filter(|((_, rows), _)| rows.len() > 1);
    each.map(|((key, _), symbols)| (*key, stock.surprisal(symbols))).collect()
}

/// Groups of batches that hold the same sequences, in any order, with the surprisal of one such
/// batch. A sequence that a batch holds more than once is repeated in the data, and is no evidence
/// about whole batches.
fn equal_batches(
    keys: &[Vec<Sequence>],
    bits: &BTreeMap<Sequence, f64>,
    needed: f64,
) -> Vec<(Vec<usize>, f64)> {
    let mut classes: BTreeMap<Vec<Sequence>, Vec<usize>> = BTreeMap::new();
    for (index, keys) in keys.iter().enumerate() {
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        classes.entry(sorted).or_default().push(index);
    }
    // The keys are sorted, so that equal ones are neighbours.
    let surprisal = |keys: &[Sequence]| -> f64 {
        let once = keys.chunk_by(|a, b| a == b).filter(|same| same.len() == 1);
        once.map(|same| bits.get(&same[0]).copied().unwrap_or(0.0)).sum()
    };
    let repeated = classes.into_iter().filter(|(_, indices)| indices.len() > 1);
    let mut groups: Vec<(Vec<usize>, f64)> =
        repeated.map(|(keys, indices)| (indices, surprisal(&keys))).collect();
    groups.retain(|(_, bits)| *bits >= needed);
    groups.sort_by_key(|(indices, _)| indices[0]);
    groups
}

fn report_losses(
    name: &str,
    batches: &[RecordedBatch<'_>],
    losses: usize,
    results: &mut CheckResults,
) {
    let evidence = format!(
        "{name}: {} of the same labels as another loss of its backward pass",
        plural(losses as u64, "loss"),
    );
    let advice = "Right where a step has several losses of one batch, as with two passes \
                  through a model with dropout";
    let place = common_place(name, batches, batches.iter());
    results.add(Severity::Note, None, place, evidence, advice);
}

fn report_batches(
    name: &str,
    batches: &[RecordedBatch<'_>],
    whole: &[(Vec<usize>, f64)],
    policy: bool,
    results: &mut CheckResults,
) {
    let repeats: usize = whole.iter().map(|(class, _)| class.len() - 1).sum();
    let Some(least) = whole.iter().map(|(_, bits)| *bits).reduce(f64::min) else {
        return;
    };
    let names_of_class = |(class, _): &(Vec<usize>, f64)| {
        let names: Vec<String> = class.iter().take(NAMED).map(|&at| place(&batches[at])).collect();
        let more = class.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" = {more} more") } else { String::new() };
        names.join(" = ") + &more
    };
    let mut shown: Vec<String> = whole.iter().take(NAMED).map(names_of_class).collect();
    if whole.len() > NAMED {
        shown.push(format!("{} more", whole.len() - NAMED));
    }
    let evidence = format!(
        "{name}: {repeats} of {} repeat another: {}; a batch has at least {least:.0} bits that its peers do not foretell",
        plural(batches.len() as u64, "batch"),
        shown.join("; "),
    );
    let again = whole.iter().flat_map(|(class, _)| class.iter().skip(1));
    let severity = if policy { Severity::Note } else { Severity::Fail };
    let advice = match policy {
        true => "Right where a policy is updated several times on the batch it sampled",
        false => {
            "Give each rank, microbatch and step its own part of the data: check the sampler's rank, world size, seed and epoch, and whether an iterator was restarted"
        }
    };
    let place = common_place(name, batches, again.map(|&at| &batches[at]));
    results.add(severity, Some("duplicate-batch"), place, evidence, advice);
}

fn report_rows(
    name: &str,
    batches: &[RecordedBatch<'_>],
    repeats: &[(Vec<Row>, f64)],
    sequences: usize,
    policy: bool,
    results: &mut CheckResults,
) {
    let again: usize = repeats.iter().map(|(rows, _)| rows.len() - 1).sum();
    let Some(least) = repeats.iter().map(|(_, bits)| *bits).reduce(f64::min) else {
        return;
    };
    let sequence = |row: &Row| {
        let batch = &batches[row.batch];
        let first = batch.batch.piece.place().0.first().map_or(0, |range| range.0);
        format!("{} row {}", place(batch), first + row.row as u64)
    };
    let names_of_class = |(rows, _): &(Vec<Row>, f64)| {
        let names: Vec<String> = rows.iter().take(NAMED).map(sequence).collect();
        let more = rows.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" = {more} more") } else { String::new() };
        names.join(" = ") + &more
    };
    let mut shown: Vec<String> = repeats.iter().take(NAMED).map(names_of_class).collect();
    if repeats.len() > NAMED {
        shown.push(format!("{} more", repeats.len() - NAMED));
    }
    let evidence = format!(
        "{name}: {again} of {} repeat another ({:.2} %): {}; each has at least {least:.0} bits that the others do not foretell",
        plural(sequences as u64, "sequence"),
        100.0 * again as f64 / sequences as f64,
        shown.join("; "),
    );
    let severity = if policy { Severity::Note } else { Severity::Warn };
    let all = repeats.iter().flat_map(|(rows, _)| rows.iter().skip(1));
    let place = common_place(name, batches, all.map(|row| &batches[row.batch]));
    let advice = "Look whether the data hold these documents more than once, or a shard of them is read twice";
    results.add(severity, Some("duplicate-batch"), place, evidence, advice);
}

/// The place of a finding: all ranks, and the step and microbatch if they are the same for all.
fn common_place<'a, 'b: 'a>(
    name: &str,
    batches: &[RecordedBatch<'b>],
    all: impl Iterator<Item = &'a RecordedBatch<'b>>,
) -> Place {
    let all: Vec<&RecordedBatch<'_>> = all.collect();
    let first = all.first().copied().unwrap_or(&batches[0]);
    let ranks: Vec<_> = all.iter().flat_map(|batch| batch.batch.ranks()).copied().collect();
    let step = all.iter().all(|batch| batch.step == first.step).then_some(first.step);
    let same = all.iter().all(|batch| batch.microbatch == first.microbatch);
    let place = Place { step, tensor: Some(name.into()), ..Place::default() };
    place.ranks(&ranks).microbatch(first.microbatch.filter(|_| same))
}

/// `step 0 microbatch 1 rank 3`.
fn place(batch: &RecordedBatch<'_>) -> String {
    let microbatch = batch.microbatch.map(|mb| format!(" microbatch {mb}")).unwrap_or_default();
    format!("step {}{microbatch} {}", batch.step, name_ranks(batch.batch.ranks()))
}
