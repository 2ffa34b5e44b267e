//! Ragged tensors: ranks hold parts of unequal length, as with dynamic padding, where each rank's
//! token count depends on its longest sequence. A rank that records a local array with a placement
//! knows only its own part, and declares a whole of as many such parts as the axis has ranks. Where
//! these declared shapes differ between ranks, the tensor is ragged: it consists of the parts of
//! all ranks, one after the other in the order of the axis.
//!
//! Only the boxes in the whole tensor are computed here. The record as it was written is kept,
//! since its fingerprint was computed for it.

use std::collections::BTreeMap;

use backtape::index_box::IndexBox;
use backtape::placement::{Mesh, Placement};
use backtape::shard::{FingerprintSource, ShardRecord};

use super::ShardRef;

/// Records of the shards of ragged tensors, with their boxes in the whole tensor.
pub(super) type Settled = BTreeMap<ShardRef, ShardRecord>;

/// Computes the boxes of a ragged tensor's shards in the whole tensor; `None` where the declared
/// shapes do not differ, or differ in a way that parts of unequal length do not explain.
pub(super) fn settle(shards: &[(&ShardRecord, ShardRef)], mesh: &Mesh) -> Option<Settled> {
    let (first, _) = shards.first()?;
    let shape = &first.shape;
    let alike = |record: &ShardRecord| {
        record.shape.len() == shape.len() && record.placement == first.placement
    };
    if !shards.iter().all(|(record, _)| alike(record) && is_equal_part(record, mesh)) {
        return None;
    }
    let differs = |dim: &usize| shards.iter().any(|(record, _)| record.shape[*dim] != shape[*dim]);
    let last = (0..shape.len()).rfind(differs)?;
    // If a dimension that is not sharded has unequal lengths, as S in [B, S], rows of tokens have
    // no common width, and the dimensions up to it are flattened.
    let folded = (0..=last).any(|dim| differs(&dim) && axes_of(first, dim).is_empty());
    let cut = if folded { 0..last + 1 } else { last..last + 1 };
    if (0..cut.start).any(|dim| differs(&dim)) {
        return None;
    }
    let order = |record: &ShardRecord| -> Option<Vec<u32>> {
        let axes = mesh.0.iter().filter(|(axis, _)| cuts(record, axis, cut.clone()));
        match mesh.0.is_empty() {
            // Without a mesh the ranks are the only axis.
            true => Some(vec![record.rank.0]),
            false => axes.map(|(axis, _)| place_on(record, axis, mesh)).collect(),
        }
    };
    let length =
        |record: &ShardRecord| -> u64 { record.place.extent()[cut.clone()].iter().product() };
    let mut lengths: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
    for (record, _) in shards {
        let rows = length(record);
        // Ranks that hold the same part must declare the same length.
        if *lengths.entry(order(record)?).or_insert(rows) != rows {
            return None;
        }
    }
    if lengths.len() as u64 != parts(first, cut.clone(), mesh)? {
        return None;
    }
    let mut ends = 0;
    let starts: BTreeMap<Vec<u32>, u64> = lengths
        .into_iter()
        .map(|(labels, rows)| {
            ends += rows;
            (labels, ends - rows)
        })
        .collect();
    let placed = |&(record, shard): &(&ShardRecord, ShardRef)| {
        let start = starts[&order(record)?];
        let mut placed_record = record.clone();
        placed_record.shape.splice(cut.clone(), [ends]);
        let own_range = (start, start + length(record));
        let ranges = &mut placed_record.place.0;
        ranges.splice(cut.clone(), [own_range]);
        Some((shard, placed_record))
    };
    shards.iter().map(placed).collect()
}

/// Whether a record declares the whole tensor as equal parts like its own, one for each rank along
/// the axes that shard it, as the recorder does for a local array with a placement.
fn is_equal_part(record: &ShardRecord, mesh: &Mesh) -> bool {
    let IndexBox(ranges) = &record.place;
    record.fingerprint_source == FingerprintSource::Recorder
        && !record.placement.is_empty()
        && record.shape.iter().zip(ranges).enumerate().all(|(dim, (&whole, &(lo, hi)))| {
            let mut sizes =
                axes_of(record, dim).into_iter().map(|axis| size_of(axis, record, mesh));
            let parts = sizes.try_fold(1u64, |n, size| n.checked_mul(size?));
            let rows = hi - lo;
            parts.and_then(|n| n.checked_mul(rows)) == Some(whole) && (rows == 0 || lo % rows == 0)
        })
}

/// The mesh axes that shard a dimension.
fn axes_of(record: &ShardRecord, dim: usize) -> Vec<&str> {
    let cut = record
        .placement
        .iter()
        .filter(|(_, placement)| **placement == Placement::Shard(dim as u32));
    cut.map(|(axis, _)| axis.as_str()).collect()
}

fn cuts(record: &ShardRecord, axis: &str, dims: std::ops::Range<usize>) -> bool {
    matches!(record.placement.get(axis), Some(Placement::Shard(dim)) if dims.contains(&(*dim as usize)))
}

/// How many ranks lie along an axis: from the mesh, or without a mesh from the record, as the whole
/// length divided by that of its own part.
fn size_of(axis: &str, record: &ShardRecord, mesh: &Mesh) -> Option<u64> {
    match mesh.0.iter().find(|(name, _)| name == axis) {
        Some((_, size)) => Some(u64::from(*size)),
        None if mesh.0.is_empty() => {
            let rows = record.place.0.first().map(|(lo, hi)| hi - lo)?;
            record.shape.first()?.checked_div(rows)
        }
        None => None,
    }
}

/// The coordinate of a rank on an axis.
fn place_on(record: &ShardRecord, axis: &str, mesh: &Mesh) -> Option<u32> {
    let only = mesh.0.len() == 1;
    record.mesh.get(axis).copied().or(only.then_some(record.rank.0))
}

/// How many parts the whole tensor has.
fn parts(record: &ShardRecord, cut: std::ops::Range<usize>, mesh: &Mesh) -> Option<u64> {
    let axes = record.placement.keys().filter(|axis| cuts(record, axis, cut.clone()));
    axes.map(|axis| size_of(axis, record, mesh)).try_fold(1u64, |n, size| n.checked_mul(size?))
}
