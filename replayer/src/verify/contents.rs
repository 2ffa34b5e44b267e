//! The two proofs, shard by shard: the bytes hash right, and they fingerprint
//! right at the box that the record claims.

use std::collections::BTreeMap;

use backtape::fingerprint::Fingerprint;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::finding::{FindingKind, VerifyFinding};
use crate::assemble::pieces;
use crate::dump::{ShardRef, StepDump, TensorInfo};

/// A shard out of place is tried at this many other places, to say where it
/// belongs: enough for any layout people read by eye.
const OTHER_PLACES: usize = 256;

/// What was found of one shard.
#[derive(Clone, Copy)]
pub(super) struct Checked {
    /// The bytes are there and hash right.
    pub(super) intact: bool,
    /// The fingerprint of intact bytes at the recorded box.
    pub(super) fingerprint: Option<Fingerprint>,
}

/// Every shard of the step with what was found of it.
pub(super) type Contents = BTreeMap<ShardRef, Checked>;

/// Hashes and fingerprints every shard, each on one thread or on several.
pub(super) fn check(dump: &StepDump, progress: &(dyn Fn(u64) + Sync)) -> Contents {
    let shards = dump.tensors().values().flat_map(|info| &info.shards);
    let shards: Vec<ShardRef> = shards.copied().collect();
    let one = |at: &ShardRef| {
        let fingerprint = dump.intact_bytes(at).map(|bytes| fingerprint(dump, at, bytes));
        progress(dump.record(at).length);
        let intact = fingerprint.is_some();
        (*at, Checked { intact, fingerprint })
    };
    let checked: Vec<_> = shards.par_iter().map(one).collect();
    checked.into_iter().collect()
}

/// A sum, so that a large shard's pieces can be summed on all threads.
fn fingerprint(dump: &StepDump, at: &ShardRef, bytes: &[u8]) -> Fingerprint {
    let record = dump.written(at);
    if bytes.is_empty() {
        return Fingerprint::default();
    }
    let width = record.dtype.width();
    let mut rest = bytes;
    let mut parts = Vec::new();
    for piece in pieces(&record.place, width) {
        let elements: u64 = piece.0.iter().map(|(lo, hi)| hi - lo).product();
        let (own, after) = rest.split_at(elements as usize * width);
        rest = after;
        parts.push((piece, own));
    }
    parts
        .par_iter()
        .map(|(piece, own)| Fingerprint::of(record.dtype, piece, own))
        .reduce(Fingerprint::default, Fingerprint::plus)
}

/// What the two proofs say against the shards of one tensor.
pub(super) fn findings(
    dump: &StepDump,
    key: &TensorKey,
    info: &TensorInfo,
    contents: &Contents,
) -> Vec<VerifyFinding> {
    let mut found = Vec::new();
    for at in &info.shards {
        let record = dump.record(at);
        let file = dump.file_of(at);
        let finding = match contents[at].fingerprint {
            // The fault of its file names the tensor already.
            None if file.faulty() => continue,
            None => {
                let sentence = format!(
                    "{key} {} of rank {}: the bytes on disk do not hash to what the training process hashed",
                    record.place, record.rank
                );
                VerifyFinding::fault(FindingKind::BytesAltered, sentence)
            }
            Some(fingerprint) if fingerprint != record.fingerprint => {
                let sentence = format!(
                    "{key} {} of rank {}: the bytes are the job's own, but they do not belong in this box: {}",
                    record.place,
                    record.rank,
                    where_it_belongs(dump, info, at, fingerprint)
                );
                VerifyFinding::fault(FindingKind::OutOfPlace, sentence)
            }
            Some(_) => continue,
        };
        found.push(finding.of(key).at(&record.place).by([record.rank]).within(file.path()));
    }
    found
}

/// The box of the same extent at which the bytes give the recorded fingerprint.
fn where_it_belongs(
    dump: &StepDump,
    info: &TensorInfo,
    at: &ShardRef,
    found: Fingerprint,
) -> String {
    let record = dump.record(at);
    let wanted = record.fingerprint;
    let extent = record.place.extent();
    let mut others: Vec<_> = info.shards.iter().map(|at| &dump.record(at).place).collect();
    others.retain(|place| place.extent() == extent && **place != record.place);
    others.sort();
    others.dedup();
    let bytes = dump.intact_bytes(at).unwrap_or_default();
    let fits = |place: &&&_| Fingerprint::of(record.dtype, place, bytes) == wanted;
    match others.iter().take(OTHER_PLACES).find(fits) {
        Some(place) => format!("they belong in {place}"),
        None => format!("fingerprint {found}, the job computed {wanted}"),
    }
}
