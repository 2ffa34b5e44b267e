//! The tensors of a step, gathered from the records of all ranks.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::manifest::Manifest;
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::{ShardRecord, TensorKey};
use serde::Serialize;

use super::DumpFile;
use super::ragged::{Settled, settle};

/// One shard of a [`super::StepDump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardRef {
    pub(crate) file: usize,
    pub(crate) index: usize,
}

/// The description of one tensor from the records of all ranks. Where they disagree it is that of
/// most shards, and `disagreements` is not empty.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct TensorInfo {
    pub role: Option<Role>,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Set when the shards are addends of the tensor, not its value.
    pub partial: Option<Reduction>,
    /// True when the ranks hold consecutive parts of unequal length.
    pub ragged: bool,
    /// All shards, by rank, then by replica, including those whose bytes are lost.
    pub shards: Vec<ShardRef>,
    pub disagreements: Vec<Disagreement>,
}

/// A property that ranks declared differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    /// `dtype`, `shape`, `role` or `partial`.
    pub what: &'static str,
    /// Each declared value and the ranks that declared it, the most frequent first.
    pub versions: Vec<(String, Vec<Rank>)>,
}

impl Disagreement {
    /// True when the bytes are ambiguous because of it.
    pub fn spoils_bytes(&self) -> bool {
        self.what != "role"
    }
}

impl std::fmt::Display for Disagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the ranks disagree on its {}: ", self.what)?;
        for (i, (version, ranks)) in self.versions.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{version} on {}", crate::dump::name_ranks(ranks))?;
        }
        Ok(())
    }
}

/// Gathers the records by tensor. Records that contradict themselves are left out, and are a fault
/// of their file.
pub(super) fn index(
    manifest: &Manifest,
    files: &[DumpFile],
) -> (BTreeMap<TensorKey, TensorInfo>, Settled) {
    let mut gathered: BTreeMap<&TensorKey, Vec<(&ShardRecord, ShardRef)>> = BTreeMap::new();
    for (file, (record, opened)) in manifest.files.iter().zip(files).enumerate() {
        for (index, shard) in record.shards.iter().enumerate() {
            if opened.believed(index) {
                let shards_of_key = gathered.entry(&shard.key).or_default();
                shards_of_key.push((shard, ShardRef { file, index }));
            }
        }
    }
    let mut settled = Settled::new();
    let mut tensors = BTreeMap::new();
    for (key, shards) in gathered {
        let ragged = settle(&shards, &manifest.mesh);
        let described = match &ragged {
            Some(ragged) => {
                describe(ragged.iter().map(|(shard, record)| (record, *shard)).collect())
            }
            None => describe(shards),
        };
        let is_ragged = ragged.is_some();
        tensors
            .extend(described.map(|info| (key.clone(), TensorInfo { ragged: is_ragged, ..info })));
        settled.extend(ragged.into_iter().flatten());
    }
    (tensors, settled)
}

fn describe(mut shards: Vec<(&ShardRecord, ShardRef)>) -> Option<TensorInfo> {
    shards.sort_by_key(|(shard, at)| (shard.rank, shard.replica, *at));
    let mut disagreements = Vec::new();
    let shown = |value: Option<String>| value.unwrap_or_else(|| "none".into());
    let role =
        most(&shards, "role", &mut disagreements, |s| s.role, |r| shown(r.map(|r| r.to_string())))?;
    let dtype = most(&shards, "dtype", &mut disagreements, |s| s.dtype, Dtype::to_string)?;
    let shape = most(&shards, "shape", &mut disagreements, |s| &s.shape, |n| format!("{n:?}"))?;
    let partial = most(
        &shards,
        "partial",
        &mut disagreements,
        |s| s.partial,
        |p| shown(p.map(|p| format!("{p:?}").to_lowercase())),
    )?;
    Some(TensorInfo {
        role,
        dtype,
        shape: shape.clone(),
        partial,
        ragged: false,
        shards: shards.iter().map(|(_, shard)| *shard).collect(),
        disagreements,
    })
}

/// The value that most shards declare; of equally frequent ones that of the lowest rank.
fn most<'a, T: PartialEq>(
    shards: &[(&'a ShardRecord, ShardRef)],
    what: &'static str,
    disagreements: &mut Vec<Disagreement>,
    read: impl Fn(&'a ShardRecord) -> T,
    show: impl Fn(&T) -> String,
) -> Option<T> {
    let mut versions: Vec<(T, usize, Vec<Rank>)> = Vec::new();
    for (shard, _) in shards {
        let value = read(shard);
        let index = versions.iter().position(|(known, ..)| *known == value);
        let index = index.unwrap_or_else(|| {
            versions.push((value, 0, Vec::new()));
            versions.len() - 1
        });
        let (_, count, ranks) = &mut versions[index];
        *count += 1;
        if ranks.last() != Some(&shard.rank) {
            ranks.push(shard.rank);
        }
    }
    // The sort is stable: among equally frequent values the first one is the lowest rank's.
    versions.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
    if versions.len() > 1 {
        let versions = versions.iter().map(|(v, _, ranks)| (show(v), ranks.clone()));
        disagreements.push(Disagreement { what, versions: versions.collect() });
    }
    versions.into_iter().next().map(|(value, ..)| value)
}
