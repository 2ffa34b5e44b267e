//! Assembles tensors from the boxes that ranks held.
//!
//! Every shard is hashed before it is used: the result is what the job held, or an error that names
//! what is missing, never other bytes. A replica replaces a shard that is lost or damaged.
//! [`crate::verify`] checks whether the boxes are the right ones.
//!
//! ```text
//! assemble(&dump, "q microbatch 1")
//!   -> q microbatch 1 is incomplete: nothing intact holds [512:1024, 0:768],
//!      which rank 3 should (rank-00003-mb-0001.safetensors of rank 3 is missing)
//! ```

mod buffer;
mod error;
mod region;
pub mod slab;
mod tensor;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::index_box::{IndexBox, gaps, gaps_in};
use backtape::shard::TensorKey;
use rayon::prelude::*;

use crate::dump::{ShardRef, StepDump, StepState, TensorInfo};
use buffer::Buffer;

pub use buffer::ALIGNMENT;
pub use error::{AssembleError, Incomplete};
pub(crate) use region::{extract, intersect, pieces, pieces_of, run};
pub use tensor::{Row, Tensor};

/// Assembles a whole tensor that the ranks hold as values, not as addends.
pub fn assemble(dump: &StepDump, key: &TensorKey) -> Result<Tensor, AssembleError> {
    let info = values(dump, key)?;
    let place = IndexBox::whole(&info.shape);
    fill(dump, key, info.dtype, &info.shards, place)
}

/// A tensor, or one rank's addend of it, borrowed from the mapped file: its bytes and their shape.
/// `None` where it consists of several shards, or none is intact: then call [`assemble`] or
/// [`addend`], which also says what is missing.
pub fn in_place<'a>(
    dump: &'a StepDump,
    key: &TensorKey,
    rank: Option<Rank>,
) -> Option<(&'a [u8], Vec<u64>)> {
    let (shards, place) = match rank {
        None => {
            let info = values(dump, key).ok()?;
            (info.shards.clone(), IndexBox::whole(&info.shape))
        }
        Some(rank) => {
            let shards = addends_of(dump, key, &[rank]).ok()?.1;
            let [place] = &distinct_boxes(dump, &shards)[..] else { return None };
            (shards, place.clone())
        }
    };
    match &choose(dump, &shards, &place)[..] {
        [only] if *only.place == place => Some((only.bytes, place.extent())),
        _ => None,
    }
}

/// Assembles one box of a tensor that the ranks hold as values, from the shards that intersect it.
pub fn assemble_box(
    dump: &StepDump,
    key: &TensorKey,
    place: &IndexBox,
) -> Result<Tensor, AssembleError> {
    let info = values(dump, key)?;
    place
        .check(&info.shape)
        .map_err(|error| AssembleError::Outside { key: key.clone(), source: Box::new(error) })?;
    fill(dump, key, info.dtype, &info.shards, place.clone())
}

/// Assembles one rank's addend of a partial tensor: the box that its shards fill, which is the
/// whole tensor unless the tensor is also sharded over ranks.
pub fn addend(dump: &StepDump, key: &TensorKey, rank: Rank) -> Result<Tensor, AssembleError> {
    addend_of(dump, key, &[rank])
}

/// Assembles the addend that some ranks hold together, each a part of it, as ranks do that share
/// the tokens and shard the tensor (tensor parallelism).
pub fn addend_of(
    dump: &StepDump,
    key: &TensorKey,
    ranks: &[Rank],
) -> Result<Tensor, AssembleError> {
    let rank = ranks.first().copied().unwrap_or(Rank(0));
    let (info, shards) = addends_of(dump, key, ranks)?;
    let boxes = distinct_boxes(dump, &shards);
    let around = IndexBox(
        (0..info.shape.len())
            .map(|dim| {
                let ranges = boxes.iter().map(|place| place.0[dim]);
                ranges.fold((u64::MAX, 0), |a, b| (a.0.min(b.0), a.1.max(b.1)))
            })
            .collect(),
    );
    let open = gaps(&around.extent(), &shifted(&boxes, &around));
    if !open.is_empty() {
        return Err(AssembleError::Scattered { key: key.clone(), rank, boxes: boxes.len() });
    }
    fill(dump, key, info.dtype, &shards, around)
}

/// One rank's addend of a partial tensor, box by box in the order of their places. For layouts
/// whose boxes do not fill a single box (strided, zigzag).
pub fn addend_parts(
    dump: &StepDump,
    key: &TensorKey,
    rank: Rank,
) -> Result<Vec<Tensor>, AssembleError> {
    let (info, shards) = addends_of(dump, key, &[rank])?;
    let parts = distinct_boxes(dump, &shards).into_iter();
    parts.map(|place| fill(dump, key, info.dtype, &shards, place)).collect()
}

/// Ranks that hold an addend of a partial tensor (or a shard of any other).
pub fn holders(dump: &StepDump, key: &TensorKey) -> Vec<Rank> {
    let Some(info) = dump.tensors().get(key) else { return Vec::new() };
    let records = info.shards.iter().map(|shard| dump.record(shard));
    // Ranks along a mesh axis that replicates hold the same addend, which counts once.
    let counted = records.filter(|record| info.partial.is_none() || record.replica == 0);
    let mut ranks: Vec<Rank> = counted.map(|record| record.rank).collect();
    ranks.dedup();
    ranks
}

fn known<'a>(dump: &'a StepDump, key: &TensorKey) -> Result<&'a TensorInfo, AssembleError> {
    let Some(info) = dump.tensors().get(key) else {
        return Err(AssembleError::Absent {
            key: key.clone(),
            held: dump.tensors().keys().cloned().collect(),
        });
    };
    match info.disagreements.iter().find(|d| d.spoils_bytes()) {
        Some(disagreement) => Err(AssembleError::Disagreement {
            key: key.clone(),
            disagreement: Box::new(disagreement.clone()),
        }),
        None => Ok(info),
    }
}

/// The description of a tensor that the ranks hold as values; an error for addends.
pub fn whole<'a>(dump: &'a StepDump, key: &TensorKey) -> Result<&'a TensorInfo, AssembleError> {
    values(dump, key)
}

fn values<'a>(dump: &'a StepDump, key: &TensorKey) -> Result<&'a TensorInfo, AssembleError> {
    match known(dump, key)? {
        info if info.partial.is_none() => Ok(info),
        _ => Err(AssembleError::Addends { key: key.clone() }),
    }
}

fn addends_of<'a>(
    dump: &'a StepDump,
    key: &TensorKey,
    ranks: &[Rank],
) -> Result<(&'a TensorInfo, Vec<ShardRef>), AssembleError> {
    let info = known(dump, key)?;
    if info.partial.is_none() {
        return Err(AssembleError::Values { key: key.clone() });
    }
    let of_ranks = info.shards.iter().filter(|shard| ranks.contains(&dump.record(shard).rank));
    let shards: Vec<ShardRef> = of_ranks.copied().collect();
    if shards.is_empty() {
        let rank = ranks.first().copied().unwrap_or(Rank(0));
        return Err(AssembleError::NoAddend { key: key.clone(), rank, ranks: holders(dump, key) });
    }
    Ok((info, shards))
}

fn distinct_boxes(dump: &StepDump, shards: &[ShardRef]) -> Vec<IndexBox> {
    let places = shards.iter().map(|shard| dump.record(shard).place.clone());
    let mut boxes: Vec<IndexBox> = places.collect();
    boxes.sort();
    boxes.dedup();
    boxes
}

/// The parts of boxes that lie in `place`, in coordinates relative to its first corner.
fn shifted(boxes: &[IndexBox], place: &IndexBox) -> Vec<IndexBox> {
    let inside = boxes.iter().filter_map(|one| one.intersection(place));
    let shift = |one: IndexBox| {
        let pairs = one.0.iter().zip(&place.0);
        IndexBox(pairs.map(|(a, b)| (a.0 - b.0, a.1 - b.0)).collect())
    };
    inside.map(shift).collect()
}

/// An intact shard that will be copied from.
struct Source<'a> {
    place: &'a IndexBox,
    bytes: &'a [u8],
}

fn fill(
    dump: &StepDump,
    key: &TensorKey,
    dtype: Dtype,
    shards: &[ShardRef],
    place: IndexBox,
) -> Result<Tensor, AssembleError> {
    let sources = choose(dump, shards, &place);
    let boxes: Vec<IndexBox> = sources.iter().map(|source| source.place.clone()).collect();
    let open = gaps(&place.extent(), &shifted(&boxes, &place));
    let width = dtype.width();
    let wanted = place.elements().and_then(|n| n.checked_mul(width as u64));
    // The boxes cover the tensor, so its size is at most that of their bytes: a wrong record cannot
    // cause an allocation larger than the files.
    let stored_bytes: u128 = sources.iter().map(|source| source.bytes.len() as u128).sum();
    let (true, Some(bytes)) = (open.is_empty(), wanted.filter(|&n| u128::from(n) <= stored_bytes))
    else {
        let incomplete = incomplete(dump, key, shards, &place, open);
        return Err(AssembleError::Incomplete(Box::new(incomplete)));
    };
    let memory = || AssembleError::Memory { key: key.clone(), bytes };
    let length = usize::try_from(bytes).map_err(|_| memory())?;
    let mut buffer = Buffer::zeroed(length).ok_or_else(memory)?;
    copy_all(&place, &sources, buffer.bytes_mut(), width);
    let buffer = Arc::new(buffer);
    Ok(Tensor { key: key.clone(), dtype, shape: place.extent(), place, buffer })
}

/// One intact shard for every distinct box that intersects `place`: the lowest replica whose bytes
/// are there and have the right hash.
fn choose<'a>(dump: &'a StepDump, shards: &[ShardRef], place: &IndexBox) -> Vec<Source<'a>> {
    let reaching = shards.iter().filter(|shard| intersect(&dump.record(shard).place, place));
    let mut reaching: Vec<ShardRef> = reaching.copied().collect();
    // Shards of files without a fault come first, though intact shards of faulty files would do.
    reaching.sort_by_cached_key(|shard| {
        let record = dump.record(shard);
        let faulty = dump.file_of(shard).faulty();
        (record.place.clone(), faulty, record.replica, record.rank, *shard)
    });
    let same_box = |a: &ShardRef, b: &ShardRef| dump.record(a).place == dump.record(b).place;
    let replicas: Vec<&[ShardRef]> = reaching.chunk_by(same_box).collect();
    let first_intact = |replicas: &&[ShardRef]| {
        replicas.iter().find_map(|shard| {
            let (place, bytes) = (&dump.record(shard).place, dump.intact_bytes(shard)?);
            Some(Source { place, bytes })
        })
    };
    replicas.par_iter().filter_map(first_intact).collect()
}

/// Copies in parallel over pieces of the target. Each piece copies from its sources in a fixed
/// order, so that the result does not depend on the thread count even where boxes overlap.
fn copy_all(place: &IndexBox, sources: &[Source<'_>], mut target: &mut [u8], width: usize) {
    let mut work = Vec::new();
    if target.is_empty() {
        return;
    }
    for piece in pieces(place, width) {
        let elements: u64 = piece.0.iter().map(|(lo, hi)| hi - lo).product();
        let (target_of_piece, rest) = target.split_at_mut(elements as usize * width);
        work.push((piece, target_of_piece));
        target = rest;
    }
    work.into_par_iter().for_each(|(piece, target_of_piece)| {
        for source in sources {
            if !intersect(source.place, &piece) {
                continue;
            }
            if let Some(shared) = source.place.intersection(&piece) {
                region::copy(
                    &shared,
                    (source.place, source.bytes),
                    (&piece, target_of_piece),
                    width,
                );
            }
        }
    });
}

/// What no intact shard holds of a tensor that the ranks hold as values; `None` if [`assemble`]
/// would succeed. `sampled`: the boxes that alone should be there, where the job took a sample.
pub(crate) fn missing(
    dump: &StepDump,
    key: &TensorKey,
    info: &TensorInfo,
    sampled: Option<&[IndexBox]>,
) -> Option<Incomplete> {
    let place = IndexBox::whole(&info.shape);
    let sources = choose(dump, &info.shards, &place);
    let wanted = sampled.unwrap_or(std::slice::from_ref(&place));
    let open = gaps_in(wanted, sources.iter().map(|source| source.place));
    (!open.is_empty()).then(|| incomplete(dump, key, &info.shards, &place, open))
}

/// Describes what is missing, which ranks should hold it, and why their shards cannot be used.
fn incomplete(
    dump: &StepDump,
    key: &TensorKey,
    shards: &[ShardRef],
    place: &IndexBox,
    open: Vec<IndexBox>,
) -> Incomplete {
    let back = |gap: IndexBox| {
        let pairs = gap.0.iter().zip(&place.0);
        IndexBox(pairs.map(|(a, b)| (a.0 + b.0, a.1 + b.0)).collect())
    };
    let open: Vec<IndexBox> = open.into_iter().map(back).collect();
    let lost: Vec<&ShardRef> = shards
        .iter()
        .filter(|shard| open.iter().any(|gap| intersect(gap, &dump.record(shard).place)))
        .collect();
    let mut ranks: Vec<Rank> = lost.iter().map(|shard| dump.record(shard).rank).collect();
    ranks.dedup();
    let mut faults: Vec<String> = lost.iter().map(|shard| why_lost(dump, shard)).collect();
    faults.sort();
    faults.dedup();
    let missing_ranks = match &dump.state {
        StepState::Committed | StepState::Recovered { .. } => Vec::new(),
        StepState::Partial { missing_ranks, .. } => missing_ranks.clone(),
    };
    Incomplete { key: key.clone(), gaps: open, ranks, missing_ranks, faults }
}

/// Why a shard's bytes cannot be used.
fn why_lost(dump: &StepDump, shard: &ShardRef) -> String {
    let path = dump.file_of(shard).path();
    match dump.faults().iter().find(|fault| fault.file == path) {
        Some(fault) => fault.sentence.clone(),
        None => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            format!("its bytes in {name} do not hash to what the job hashed")
        }
    }
}
