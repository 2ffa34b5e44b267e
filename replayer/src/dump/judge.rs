//! Checks whether a file is the one that was recorded: its length, its header, and whether manifest
//! and header agree. No byte of a shard is read.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use backtape::identity::Name;
use backtape::manifest::{FileRecord, Manifest};
use backtape::shard::ShardRecord;
use backtape::store::{ShardFile, ShardFileError};

use super::FaultKind;

/// The file name that each header hash belongs to, by which exchanged files are told from changed
/// ones.
pub(super) type NamesByHeader = BTreeMap<[u8; 32], Name>;

pub(super) fn names_by_header(manifest: &Manifest) -> NamesByHeader {
    let named = manifest.files.iter();
    named.map(|file| (file.header_hash.0, file.name.clone())).collect()
}

/// A fault, before it is known which tensors it affects.
pub(super) type UnplacedFault = (FaultKind, String);

/// Whether each record is consistent in itself. Even a committed manifest may have been written by
/// a faulty program.
pub(super) fn believe(record: &FileRecord, manifest: &Manifest) -> (Vec<bool>, Vec<UnplacedFault>) {
    let mut faults = Vec::new();
    let mut is_believed = |shard: &ShardRecord| {
        let wrong = match shard.check() {
            Err(error) => Some(error.to_string()),
            Ok(()) if shard.rank != record.rank => Some(format!(
                "{} claims rank {}, the file is rank {}'s",
                shard.key, shard.rank, record.rank
            )),
            Ok(()) if shard.attempt != manifest.attempt => Some(format!(
                "{} claims attempt {}, the step is of attempt {}",
                shard.key, shard.attempt, manifest.attempt
            )),
            Ok(()) => None,
        };
        let believed = wrong.is_none();
        let sentence = |wrong| format!("the record of {} contradicts itself: {wrong}", record.name);
        faults.extend(wrong.map(|wrong| (FaultKind::Disagrees, sentence(wrong))));
        believed
    };
    let believed = record.shards.iter().map(&mut is_believed).collect();
    (believed, faults)
}

/// The file, if it is exactly the one that was recorded, else what is wrong with it.
pub(super) fn judge(
    path: &Path,
    record: &FileRecord,
    manifest: &Manifest,
    others: &NamesByHeader,
) -> Result<ShardFile, Vec<UnplacedFault>> {
    let name = &record.name;
    let length = match std::fs::metadata(path) {
        Ok(meta) if meta.is_file() => meta.len(),
        Ok(_) => {
            return Err(vec![(FaultKind::Unreadable, format!("{name} is not a file"))]);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let sentence = format!("{name} of rank {} is missing", record.rank);
            return Err(vec![(FaultKind::Missing, sentence)]);
        }
        Err(error) => return Err(vec![(FaultKind::Unreadable, format!("{name}: {error}"))]),
    };
    let mut faults = Vec::new();
    if length != record.length {
        let (kind, verb) = match length < record.length {
            true => (FaultKind::Truncated, "truncated"),
            false => (FaultKind::Extended, "extended"),
        };
        let wanted = record.length;
        faults.push((kind, format!("{name} was {verb}: {length} bytes, {wanted} were written")));
    }
    match ShardFile::open(path) {
        Ok(file) if file.header_hash() != record.header_hash => {
            faults.push(altered(&file, record, others));
        }
        Ok(file) => {
            faults.extend(disagreements(&file, record, manifest));
            if faults.is_empty() {
                return Ok(file);
            }
        }
        // The wrong length was already reported.
        Err(ShardFileError::Truncated { .. }) if !faults.is_empty() => {}
        Err(ShardFileError::Contradiction { .. }) if !faults.is_empty() => {}
        Err(error @ ShardFileError::Read { .. }) => {
            faults
                .push((FaultKind::Unreadable, format!("{name} cannot be read: {}", chain(&error))));
        }
        Err(error) => {
            let sentence = format!("the header of {name} was altered: {}", chain(&error));
            faults.push((FaultKind::AlteredHeader, sentence));
        }
    }
    Err(faults)
}

fn altered(file: &ShardFile, record: &FileRecord, others: &NamesByHeader) -> UnplacedFault {
    let name = &record.name;
    match others.get(&file.header_hash().0) {
        Some(other) => (
            FaultKind::Misplaced,
            format!("{name} holds what belongs in {other}: the files were exchanged"),
        ),
        None => {
            let about = file.about();
            let whose = format!("rank {} step {} of run {}", about.rank, about.step, about.run);
            let sentence =
                format!("the header of {name} is not the one that was committed: it says {whose}");
            (FaultKind::AlteredHeader, sentence)
        }
    }
}

/// Where the manifest and the file's own header disagree.
fn disagreements(file: &ShardFile, record: &FileRecord, manifest: &Manifest) -> Vec<UnplacedFault> {
    let (about, name) = (file.about(), &record.name);
    let mut faults = Vec::new();
    let mut differ = |what: &str, listed: String, declared: String| {
        if listed != declared {
            let sentence = format!(
                "the manifest and the header of {name} disagree on {what}: {listed} in the manifest, {declared} in the header"
            );
            faults.push((FaultKind::Disagrees, sentence));
        }
    };
    differ("the run", manifest.run.to_string(), about.run.to_string());
    differ("the attempt", manifest.attempt.to_string(), about.attempt.to_string());
    differ("the step", manifest.step.to_string(), about.step.to_string());
    differ("the rank", record.rank.to_string(), about.rank.to_string());
    differ("the number of shards", record.shards.len().to_string(), about.shards.len().to_string());
    for (listed, declared) in record.shards.iter().zip(&about.shards) {
        if listed == declared {
            continue;
        }
        // Field by field, so that a new field of the record cannot be forgotten.
        let (a, b) = (fields(listed), fields(declared));
        for (field, value) in &a {
            let what = format!("the {field} of {}", listed.key);
            let other = b.get(field).map(ToString::to_string);
            differ(&what, value.to_string(), other.unwrap_or_default());
        }
    }
    faults
}

fn fields(record: &ShardRecord) -> serde_json::Map<String, serde_json::Value> {
    match serde_json::to_value(record) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    }
}

/// An error with its causes, on one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
