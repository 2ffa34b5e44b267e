//! Which token of one run is which token of the other.
//!
//! Two runs may hold the same tokens in another order: sorted by length, dealt
//! out to other ranks, in the zigzag of context parallelism. A recorded
//! `token_order` gives each row an identity; without one the rows of q can still
//! show that they are the same rows, which is worth a sentence and no more:
//! equal rows are common, and guessing which is which would be a lie.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::hash::ContentHash;
use backtape::role::Role;

use super::side::Side;
use super::view::{Combine, View};
use crate::assemble::AssembleError;
use crate::compare::pair::widen;

/// Rows hashed at a time.
const ROWS: u64 = 4096;

/// How the tokens of two runs relate.
pub(super) enum TokenOrder {
    /// Not recorded by both runs.
    Unknown,
    /// The same tokens in the same order.
    Same,
    /// The same tokens: which of the other run's rows each of ours is.
    Permuted(Vec<u64>),
    /// They cannot be aligned; why, in one sentence.
    Broken(String),
}

/// Compares what both runs recorded as `token_order`.
pub(super) fn token_order(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
) -> Result<TokenOrder, AssembleError> {
    let (Some(ours), Some(theirs)) = (ids(this_run)?, ids(other_run)?) else {
        return Ok(TokenOrder::Unknown);
    };
    let (ours, theirs) = match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => (ours, theirs),
        (Err(dtype), _) | (_, Err(dtype)) => {
            return Ok(TokenOrder::Broken(format!(
                "token_order is {dtype}: record integers, one for each row of q, to have rows aligned"
            )));
        }
    };
    if ours == theirs {
        return Ok(TokenOrder::Same);
    }
    let (here, there) = match (places(&ours, "this run"), places(&theirs, "the other run")) {
        (Ok(here), Ok(there)) => (here, there),
        (Err(why), _) | (_, Err(why)) => return Ok(TokenOrder::Broken(why)),
    };
    let alone = |ids: &[i128], places: &BTreeMap<i128, u64>| {
        let alone: Vec<i128> = ids.iter().copied().filter(|id| !places.contains_key(id)).collect();
        (alone.len(), alone.first().copied())
    };
    let (only_here, only_there) = (alone(&ours, &there), alone(&theirs, &here));
    if only_here.0 + only_there.0 > 0 {
        let say = |(n, first): (usize, Option<i128>), whose: &str| {
            let first = first.map(|id| format!(" (the first is {id})")).unwrap_or_default();
            format!("{n} only {whose}{first}")
        };
        return Ok(TokenOrder::Broken(format!(
            "token_order names tokens that one run alone holds, {} and {}: rows cannot be aligned, give both runs the same tokens",
            say(only_here, "in this run"),
            say(only_there, "in the other run"),
        )));
    }
    Ok(TokenOrder::Permuted(ours.iter().map(|id| there[id]).collect()))
}

/// Where each identity stands; an identity that repeats is none.
fn places(ids: &[i128], whose: &str) -> Result<BTreeMap<i128, u64>, String> {
    let mut rows = BTreeMap::new();
    for (row, &id) in ids.iter().enumerate() {
        if let Some(before) = rows.insert(id, row as u64) {
            return Err(format!(
                "token_order of {whose} holds {id} twice, in rows {before} and {row}: rows cannot be aligned, give each token a number of its own"
            ));
        }
    }
    Ok(rows)
}

/// The recorded identities over all microbatches; the dtype where they are no
/// integers.
fn ids(side: &Side<'_>) -> Result<Option<Result<Vec<i128>, Dtype>>, AssembleError> {
    let keys = side.all(Role::TokenOrder);
    let Some(view) = View::new(side.dump, &keys, Combine::Join, Some(1)) else {
        return Ok(None);
    };
    let Some(dtype) = view.stored().filter(|dtype| !dtype.is_float()) else {
        return Ok(Some(Err(view.dtype.unwrap_or(Dtype::F64))));
    };
    let mut ids = Vec::new();
    let mut start = 0;
    for end in view.seams() {
        ids.extend(integers(dtype, &view.bytes(start..end)?));
        start = end;
    }
    Ok(Some(Ok(ids)))
}

/// Exact: an id may be a hash of 64 bits, which f64 cannot hold.
fn integers(dtype: Dtype, bytes: &[u8]) -> Vec<i128> {
    match dtype {
        Dtype::I64 => bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b).into()).collect(),
        Dtype::U64 => bytes.as_chunks().0.iter().map(|&b| u64::from_le_bytes(b).into()).collect(),
        _ => {
            let mut values = Vec::new();
            widen(dtype, bytes, &mut values);
            values.into_iter().map(|x| x as i128).collect()
        }
    }
}

/// True when q holds the same rows in both runs, bit for bit, in another order.
pub(super) fn same_rows(this_run: &Side<'_>, other_run: &Side<'_>) -> Result<bool, AssembleError> {
    let (ours, theirs) = (this_run.all(Role::Q), other_run.all(Role::Q));
    let join = |side: &Side<'_>, keys: &[&_]| row_hashes(side, keys);
    let (Some(mut ours), Some(mut theirs)) = (join(this_run, &ours)?, join(other_run, &theirs)?)
    else {
        return Ok(false);
    };
    if ours.len() != theirs.len() || ours == theirs {
        return Ok(false);
    }
    ours.sort_unstable();
    theirs.sort_unstable();
    Ok(ours == theirs)
}

fn row_hashes(
    side: &Side<'_>,
    keys: &[&backtape::shard::TensorKey],
) -> Result<Option<Vec<ContentHash>>, AssembleError> {
    let view = View::new(side.dump, keys, Combine::Join, None).filter(View::is_plain);
    let Some((view, dtype)) = view.and_then(|view| view.stored().map(|dtype| (view, dtype))) else {
        return Ok(None);
    };
    let row = view.columns as usize * dtype.width();
    if row == 0 {
        return Ok(None);
    }
    let mut hashes = Vec::new();
    let mut start = 0;
    for end in view.seams() {
        while start < end {
            let stop = end.min(start + ROWS * view.columns);
            hashes.extend(view.bytes(start..stop)?.chunks_exact(row).map(ContentHash::of));
            start = stop;
        }
    }
    Ok(Some(hashes))
}
