//! One file of a step: what is wrong with it, and where the bytes of its shards are.
//!
//! A faulty file is not discarded: its record says where each shard is, and a shard whose bytes
//! still have the right hash is what the job held.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::manifest::{FileRecord, Manifest};
use backtape::shard::{ShardRecord, TensorKey};
use backtape::store::layout::MANIFEST;
use backtape::store::{ShardFile, StepDir};
use memmap2::Mmap;

use super::judge::{NamesByHeader, believe, judge};
use super::{FaultKind, FileFault, OpenError};

/// One file of a step, as it was found.
pub struct DumpFile {
    path: PathBuf,
    bytes: Bytes,
    believed: Vec<bool>,
    intact: Vec<OnceLock<bool>>,
    faulty: bool,
}

enum Bytes {
    /// The file is the one that was recorded.
    Whole(ShardFile),
    /// It is not the recorded file; byte ranges where its shards should be, as far as the file is
    /// long enough.
    Torn(Mmap, Vec<Option<(usize, usize)>>),
    Gone,
}

impl DumpFile {
    /// The path where it is, or should be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True when it has a fault. Some of its shards may be intact all the same.
    pub fn faulty(&self) -> bool {
        self.faulty
    }

    pub(super) fn believed(&self, index: usize) -> bool {
        self.believed[index]
    }

    pub(super) fn bytes(&self, index: usize) -> Option<&[u8]> {
        match &self.bytes {
            Bytes::Whole(file) => Some(file.bytes(index)),
            Bytes::Torn(map, spans) => {
                let (start, end) = (*spans.get(index)?)?;
                map.get(start..end)
            }
            Bytes::Gone => None,
        }
    }

    pub(super) fn intact_bytes(&self, index: usize, record: &ShardRecord) -> Option<&[u8]> {
        let bytes = self.bytes(index)?;
        let right = || self.believed[index] && ContentHash::of(bytes) == record.hash;
        self.intact[index].get_or_init(right).then_some(bytes)
    }
}

/// Opens a file, and lists what is wrong with it.
pub(super) fn open(
    directory: &Path,
    record: &FileRecord,
    manifest: &Manifest,
    others: &NamesByHeader,
) -> (DumpFile, Vec<FileFault>) {
    let path = directory.join(record.name.as_str());
    let (believed, mut all_faults) = believe(record, manifest);
    let bytes = match judge(&path, record, manifest, others) {
        Ok(file) => Bytes::Whole(file),
        Err(faults) => {
            all_faults.extend(faults);
            torn(&path, record)
        }
    };
    let file = DumpFile {
        path,
        bytes,
        believed,
        intact: record.shards.iter().map(|_| OnceLock::new()).collect(),
        faulty: !all_faults.is_empty(),
    };
    let tensors = if all_faults.is_empty() { Vec::new() } else { hit(&file, record) };
    let name = |(kind, sentence)| FileFault {
        kind,
        file: file.path.clone(),
        rank: Some(record.rank),
        tensors: tensors.clone(),
        sentence,
    };
    let faults = all_faults.into_iter().map(name).collect();
    (file, faults)
}

/// The byte ranges where a faulty file's shards should be, by its record.
fn torn(path: &Path, record: &FileRecord) -> Bytes {
    let Some(map) = map(path) else {
        return Bytes::Gone;
    };
    let total = record.shards.iter().try_fold(0u64, |n, s| n.checked_add(s.length));
    let Some(mut offset) = total.and_then(|total| record.length.checked_sub(total)) else {
        return Bytes::Gone;
    };
    let mut span = |shard: &ShardRecord| {
        let (start, end) = (offset, offset + shard.length);
        offset = end;
        (end <= map.len() as u64).then_some((start as usize, end as usize))
    };
    let spans = record.shards.iter().map(&mut span).collect();
    Bytes::Torn(map, spans)
}

fn map(path: &Path) -> Option<Mmap> {
    // A pipe or a device would block or never end.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    // SAFETY: a shard file is never changed under its own name, as in
    // `ShardFile::open`; this one is damaged, but no longer being written.
    unsafe { Mmap::map(&file) }.ok()
}

/// Tensors with a shard in the file whose bytes are not those that were recorded.
fn hit(file: &DumpFile, record: &FileRecord) -> Vec<TensorKey> {
    let shards = record.shards.iter().enumerate();
    let lost = shards.filter(|(index, shard)| file.intact_bytes(*index, shard).is_none());
    let mut keys: Vec<TensorKey> = lost.map(|(_, shard)| shard.key.clone()).collect();
    keys.sort();
    keys.dedup();
    keys
}

/// Files that the manifest does not list. Temporary files of a writer that was killed are not
/// reported once the step is committed.
pub(super) fn strays(step: &StepDir, manifest: &Manifest) -> Result<Vec<FileFault>, OpenError> {
    let listed: std::collections::BTreeSet<&str> =
        manifest.files.iter().map(|file| file.name.as_str()).collect();
    let names = super::listing(step)?;
    let stray = |name: &String| {
        !listed.contains(name.as_str()) && name != MANIFEST && !name.starts_with('.')
    };
    let fault = |name: String| stray_fault(step, &name, "the manifest does not list it: not used");
    Ok(names.into_iter().filter(stray).map(fault).collect())
}

pub(super) fn stray_fault(step: &StepDir, name: &str, why: &str) -> FileFault {
    FileFault {
        kind: FaultKind::Stray,
        file: step.path.join(name),
        rank: rank_in(name),
        tensors: Vec::new(),
        sentence: format!("{name} is a stray file: {why}"),
    }
}

/// The rank in `rank-00003-mb-0001.safetensors`.
pub(super) fn rank_in(name: &str) -> Option<Rank> {
    let digits = name.strip_prefix("rank-")?.split(['-', '.']).next()?;
    digits.parse().ok().map(Rank)
}
