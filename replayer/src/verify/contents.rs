//! The two checks of each shard: its bytes have the recorded hash, and the recorded fingerprint at
//! the box that the record claims.

use std::collections::BTreeMap;

use backtape::fingerprint::Fingerprint;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::finding::{FindingKind, VerifyFinding};
use crate::assemble::pieces;
use crate::dump::{ShardRef, StepDump, TensorInfo};

/// Most other boxes that a misplaced shard is tried at, to find where it belongs.
const OTHER_PLACES: usize = 256;

/// What was found of one shard.
#[derive(Clone, Copy)]
pub(super) struct Checked {
    /// The bytes are there and have the right hash.
    pub(super) intact: bool,
    /// The fingerprint of the bytes at the recorded box, if they are intact.
    pub(super) fingerprint: Option<Fingerprint>,
}

/// Every shard of the step, with the result of its checks.
pub(super) type Contents = BTreeMap<ShardRef, Checked>;

/// Hashes and fingerprints every shard, each on one thread or on several.
pub(super) fn check(dump: &StepDump, progress: &(dyn Fn(u64) + Sync)) -> Contents {
    let shards = dump.tensors().values().flat_map(|info| &info.shards);
    let shards: Vec<ShardRef> = shards.copied().collect();
    let check_shard = |shard: &ShardRef| {
        let fingerprint = dump.intact_bytes(shard).map(|bytes| fingerprint(dump, shard, bytes));
        progress(dump.record(shard).length);
        let intact = fingerprint.is_some();
        (*shard, Checked { intact, fingerprint })
    };
    let checked: Vec<_> = shards.par_iter().map(check_shard).collect();
    checked.into_iter().collect()
}

/// The fingerprint of a shard. It is a sum over elements, so the pieces of a large shard are added
/// up on all threads.
fn fingerprint(dump: &StepDump, shard: &ShardRef, bytes: &[u8]) -> Fingerprint {
    let record = dump.written(shard);
    if bytes.is_empty() {
        return Fingerprint::default();
    }
    let width = record.dtype.width();
    let mut rest = bytes;
    let mut parts = Vec::new();
    for piece in pieces(&record.place, width) {
        let elements: u64 = piece.0.iter().map(|(lo, hi)| hi - lo).product();
        let (bytes_of_piece, after) = rest.split_at(elements as usize * width);
        rest = after;
        parts.push((piece, bytes_of_piece));
    }
    parts
        .par_iter()
        .map(|(piece, own)| Fingerprint::of(record.dtype, piece, own))
        .reduce(Fingerprint::default, Fingerprint::plus)
}

/// The findings of the two checks for the shards of one tensor.
pub(super) fn findings(
    dump: &StepDump,
    key: &TensorKey,
    info: &TensorInfo,
    contents: &Contents,
) -> Vec<VerifyFinding> {
    let mut findings = Vec::new();
    for shard in &info.shards {
        let record = dump.record(shard);
        let file = dump.file_of(shard);
        let finding = match contents[shard].fingerprint {
            // The fault of its file already names the tensor.
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
                    where_it_belongs(dump, info, shard, fingerprint)
                );
                VerifyFinding::fault(FindingKind::OutOfPlace, sentence)
            }
            Some(_) => continue,
        };
        findings.push(finding.of(key).at(&record.place).by([record.rank]).within(file.path()));
    }
    findings
}

/// A clause that names the box of the same extent at which the bytes have the recorded fingerprint.
fn where_it_belongs(
    dump: &StepDump,
    info: &TensorInfo,
    shard: &ShardRef,
    fingerprint: Fingerprint,
) -> String {
    let record = dump.record(shard);
    let wanted = record.fingerprint;
    let extent = record.place.extent();
    let mut others: Vec<_> = info.shards.iter().map(|shard| &dump.record(shard).place).collect();
    others.retain(|place| place.extent() == extent && **place != record.place);
    others.sort();
    others.dedup();
    let bytes = dump.intact_bytes(shard).unwrap_or_default();
    let fits = |place: &&&_| Fingerprint::of(record.dtype, place, bytes) == wanted;
    match others.iter().take(OTHER_PLACES).find(fits) {
        Some(place) => format!("they belong in {place}"),
        None => format!("fingerprint {fingerprint}, the job computed {wanted}"),
    }
}
