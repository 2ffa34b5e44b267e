//! Groups the shards of a partial tensor by the addend that they are parts of.
//!
//! Where the mesh declares which ranks hold which addend, that is used. Otherwise each rank's part
//! is an addend.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::placement::Placement;
use backtape::shard::ShardRecord;

use super::{ShardRef, StepDump, TensorInfo};

/// Identifies an addend: by coordinates on the mesh axes that are summed over, else by rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Addend {
    Mesh(Vec<(String, u32)>),
    Rank(Rank),
}

impl std::fmt::Display for Addend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Addend::Rank(rank) => write!(f, "rank {rank}"),
            Addend::Mesh(at) => {
                let axes: Vec<String> = at.iter().map(|(axis, i)| format!("{axis}={i}")).collect();
                f.write_str(&axes.join(" "))
            }
        }
    }
}

/// The shards of each addend. They are grouped by coordinates only if every shard names the same
/// summed axes.
pub(crate) fn group(dump: &StepDump, info: &TensorInfo) -> BTreeMap<Addend, Vec<ShardRef>> {
    let records = || info.shards.iter().map(|shard| dump.record(shard));
    let axes = records().next().map(summed_axes).unwrap_or_default();
    let same = |record: &ShardRecord| {
        summed_axes(record) == axes && axes.iter().all(|axis| record.mesh.contains_key(*axis))
    };
    let by_mesh = !axes.is_empty() && records().all(same);
    let mut groups: BTreeMap<Addend, Vec<ShardRef>> = BTreeMap::new();
    for shard in &info.shards {
        let record = dump.record(shard);
        let addend = if by_mesh {
            let coordinate = |axis: &&str| ((*axis).to_string(), record.mesh[*axis]);
            Addend::Mesh(axes.iter().map(coordinate).collect())
        } else {
            Addend::Rank(record.rank)
        };
        groups.entry(addend).or_default().push(*shard);
    }
    groups
}

fn summed_axes(record: &ShardRecord) -> Vec<&str> {
    let placements = record.placement.iter();
    let summed = placements.filter(|(_, placement)| matches!(placement, Placement::Partial(_)));
    summed.map(|(axis, _)| axis.as_str()).collect()
}
