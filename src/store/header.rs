//! The header of a shard file: safetensors' own, with our records in `__metadata__`.
//!
//! One metadata key only: with two or more, writers built on a hash map emit
//! them in random order (safetensors issue 584) and equal dumps would differ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::FORMAT_VERSION;
use crate::identity::{Attempt, Name, Rank, Step};
use crate::manifest::Omission;
use crate::shard::ShardRecord;

/// The one metadata key.
pub const METADATA_KEY: &str = "backtape";

/// Largest header read: bounds what a hostile length prefix can make us
/// allocate. 20,000 shards take about 12 MiB.
pub const MAX_HEADER: usize = 64 << 20;

/// Alignment of the first data byte: a memory map of a file with one dtype can be used in place,
/// and a header that outgrew its room can be made room for without a copy of the data, as file
/// systems insert whole blocks only.
pub const DATA_ALIGNMENT: usize = 4096;

/// What a shard file says of itself: enough to salvage a step without manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileSelf {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// Which run.
    pub run: Name,
    /// Which launch of it.
    pub attempt: Attempt,
    /// Which step.
    pub step: Step,
    /// Which rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub world_size: u32,
    /// The shards, in the order of their bytes.
    pub shards: Vec<ShardRecord>,
    /// What this rank gave up on while it wrote this file.
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

/// The whole header, length prefix and padding included; data follows at once.
/// `room` is the least number of bytes it shall take.
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
