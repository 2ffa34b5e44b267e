//! The same step as another job would have dumped it: cut over other ranks, into
//! other microbatches, in another layout or order. Works on the shards that a
//! job recorded and shares no code with the replayer.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;

use super::dump::Shard;

type Key = (&'static str, Option<u32>, Option<backtape::shard::When>, u32);

fn of_tokens(name: &str) -> bool {
    ["q", "labels", "weights", "lse", "label_logits", "dq", "token_order"].contains(&name)
}

fn add(sum: &mut [u8], more: &[u8]) {
    for (sum, more) in sum.chunks_exact_mut(4).zip(more.chunks_exact(4)) {
        let value = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
        let total = value(sum) + value(more);
        sum.copy_from_slice(&total.to_le_bytes());
    }
}

/// Every `group` microbatches as one: tokens follow each other, gradients of k
/// and the loss are summed in f32.
pub(crate) fn merge_microbatches(shards: &[Shard], group: u32) -> Vec<Shard> {
    let mut sums: BTreeMap<Key, Shard> = BTreeMap::new();
    let mut found = Vec::new();
    for shard in shards {
        let Some(mb) = shard.microbatch else {
            found.push(shard.clone());
            continue;
        };
        let mut merged = Shard { microbatch: Some(mb / group), ..shard.clone() };
        if of_tokens(shard.name) {
            let (rows, at) = (shard.shape[0], u64::from(mb % group));
            merged.shape[0] = rows * u64::from(group);
            let (lo, hi) = shard.place.0[0];
            merged.place.0[0] = (lo + at * rows, hi + at * rows);
            found.push(merged);
            continue;
        }
        let key = (shard.name, merged.microbatch, shard.when, shard.rank);
        match sums.get_mut(&key) {
            // k is the same in every microbatch.
            Some(_) if shard.name == "k" => {}
            Some(sum) => add(&mut sum.bytes, &shard.bytes),
            None => {
                sums.insert(key, merged);
            }
        }
    }
    found.extend(sums.into_values());
    found
}

/// Everything on rank 0: its rows are all rows, its addend is the sum, and what
/// it reduces over one rank is the sum of its own microbatches.
pub(crate) fn on_one_rank(shards: &[Shard]) -> Vec<Shard> {
    let mut whole: BTreeMap<Key, Shard> = BTreeMap::new();
    for shard in shards {
        let key = (shard.name, shard.microbatch, shard.when, 0);
        match whole.get_mut(&key) {
            None => {
                whole.insert(key, Shard { rank: 0, ..shard.clone() });
            }
            Some(sum) if shard.partial => add(&mut sum.bytes, &shard.bytes),
            // Ranks come in order, so their rows follow each other.
            Some(own) if of_tokens(shard.name) => own.bytes.extend(&shard.bytes),
            Some(_) => {}
        }
    }
    let mut found: Vec<Shard> = whole.into_values().collect();
    found.iter_mut().for_each(|shard| shard.place = IndexBox::whole(&shard.shape));
    let mut addends = found.iter().filter(|s| s.name == "dk" && s.partial).cloned();
    let mut total = addends.next().expect("a job has dk").bytes;
    addends.for_each(|more| add(&mut total, &more.bytes));
    let reduced = found.iter_mut().filter(|s| s.name == "dk" && !s.partial);
    reduced.for_each(|shard| shard.bytes.clone_from(&total));
    found
}

/// k and its gradients as `[D, V]`.
pub(crate) fn transpose_k(shards: &[Shard]) -> Vec<Shard> {
    let turn = |shard: &Shard| {
        let mut turned = shard.clone();
        if shard.name == "k" || shard.name.starts_with("dk") {
            let (rows, columns) = (shard.shape[0] as usize, shard.shape[1] as usize);
            let width = shard.dtype.width();
            turned.shape.reverse();
            turned.place.0.reverse();
            for row in 0..rows {
                for column in 0..columns {
                    let (from, to) =
                        ((row * columns + column) * width, (column * rows + row) * width);
                    turned.bytes[to..to + width].copy_from_slice(&shard.bytes[from..from + width]);
                }
            }
        }
        turned
    };
    shards.iter().map(turn).collect()
}

/// Rows of each microbatch on one rank in another order: row `i` is what row
/// `order(i, rows)` was.
pub(crate) fn reorder(shards: &[Shard], order: impl Fn(usize, usize) -> usize) -> Vec<Shard> {
    let turn = |shard: &Shard| {
        let mut turned = shard.clone();
        if of_tokens(shard.name) {
            let rows = shard.shape[0] as usize;
            let row = shard.bytes.len() / rows;
            for i in 0..rows {
                let from = order(i, rows) * row;
                turned.bytes[i * row..(i + 1) * row]
                    .copy_from_slice(&shard.bytes[from..from + row]);
            }
        }
        turned
    };
    shards.iter().map(turn).collect()
}

/// Adds the identity of every token: for one rank, by microbatch.
pub(crate) fn with_token_order(mut shards: Vec<Shard>, first: i64) -> Vec<Shard> {
    let of_labels: Vec<Shard> = shards.iter().filter(|s| s.name == "labels").cloned().collect();
    for labels in of_labels {
        let (rows, mb) = (labels.shape[0] as i64, i64::from(labels.microbatch.unwrap_or(0)));
        let ids = (0..rows).map(|row| first + 3 * (mb * rows + row));
        let bytes = ids.flat_map(i64::to_le_bytes).collect();
        shards.push(Shard { name: "token_order", dtype: Dtype::I64, bytes, ..labels });
    }
    shards
}

/// A tensor of bf16 on one rank, outside the head.
pub(crate) fn activation(name: &'static str, shape: &[u64], values: &[f32]) -> Shard {
    let bits = values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes());
    Shard {
        rank: 0,
        name,
        microbatch: Some(0),
        when: None,
        partial: false,
        dtype: Dtype::Bf16,
        shape: shape.to_vec(),
        place: IndexBox::whole(shape),
        bytes: bits.collect(),
    }
}

/// The same tensor cut into equal bands of rows, one for each rank.
pub(crate) fn cut_rows(shard: &Shard, ranks: u32) -> Vec<Shard> {
    let (rows, row) = (shard.shape[0], shard.bytes.len() / shard.shape[0] as usize);
    let edge = |rank: u32| rows * u64::from(rank) / u64::from(ranks);
    let cut = |rank: u32| {
        let (lo, hi) = (edge(rank), edge(rank + 1));
        let mut part = Shard { rank, ..shard.clone() };
        part.place.0[0] = (lo, hi);
        part.bytes = shard.bytes[lo as usize * row..hi as usize * row].to_vec();
        part
    };
    (0..ranks).map(cut).collect()
}
