//! The header of a shard file: a safetensors header with backtape's records in `__metadata__`.
//!
//! It has one metadata key only: writers that use a hash map write several keys in random order
//! (safetensors issue 584), so that equal dumps would differ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::FORMAT_VERSION;
use crate::identity::{Attempt, Name, Rank, Step};
use crate::manifest::Omission;
use crate::shard::ShardRecord;

/// The one metadata key.
pub const METADATA_KEY: &str = "backtape";

/// Longest header that is read: limits how much memory a hostile length prefix can make the reader
/// allocate. 20,000 shards take about 12 MiB.
pub const MAX_HEADER: usize = 64 << 20;

/// Alignment of the first data byte. With it the tensors in a memory map of a file are aligned if
/// they have one dtype, and the file system can enlarge the header's room without copying the data,
/// as it inserts only whole blocks.
pub const DATA_ALIGNMENT: usize = 4096;

/// What a shard file's header contains: enough to salvage a step that has no manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileSelf {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// The run.
    pub run: Name,
    /// The launch of the run.
    pub attempt: Attempt,
    /// The step.
    pub step: Step,
    /// The rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub world_size: u32,
    /// The shards, in the order of their bytes.
    pub shards: Vec<ShardRecord>,
    /// What this rank should have recorded in this file and did not.
    pub omissions: Vec<Omission>,
}

impl FileSelf {
    /// A description without shards.
    pub fn new(run: Name, attempt: Attempt, step: Step, rank: Rank, world_size: u32) -> FileSelf {
        let (shards, omissions) = (Vec::new(), Vec::new());
        let format_version = FORMAT_VERSION;
        FileSelf { format_version, run, attempt, step, rank, world_size, shards, omissions }
    }
}

#[derive(Serialize)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    entries: BTreeMap<&'a str, Entry>,
}

/// The header with its length prefix, padded so that the data follows it directly: to at least
/// `room` bytes.
pub fn encode(about: &FileSelf, room: usize) -> serde_json::Result<Vec<u8>> {
    let mut offset = 0;
    let mut entries = BTreeMap::new();
    for shard in &about.shards {
        let data_offsets = (offset, offset + shard.length);
        offset = data_offsets.1;
        let (dtype, shape) = (shard.dtype.safetensors_name(), shard.place.extent());
        entries.insert(shard.entry.as_str(), Entry { dtype, shape, data_offsets });
    }
    let metadata = BTreeMap::from([(METADATA_KEY, serde_json::to_string(about)?)]);
    let json = serde_json::to_vec(&Header { metadata, entries })?;
    let least = 8 + json.len();
    let total = if least <= room { room } else { least.next_multiple_of(DATA_ALIGNMENT) };
    let mut bytes = Vec::with_capacity(total);
    bytes.extend(((total - 8) as u64).to_le_bytes());
    bytes.extend(json);
    bytes.resize(total, b' ');
    Ok(bytes)
}
