//! Finds gradients that were reduced on some ranks only: a reduced gradient that equals one rank's
//! own addend, although other ranks' addends are not zero.
//!
//! The sum of a rank's addends over microbatches is compared element by element with the rank's
//! reduced gradient, also divided by the number of microbatches, of ranks, or by both. Two sums of
//! M addends in the same dtype differ by `(M + 1) u Σ|a|` at most. The first elements of a right
//! gradient already differ by more, so the check costs little where nothing is wrong.

use std::collections::BTreeSet;

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::{ShardRecord, TensorKey, When};

use super::facts::roundoff;
use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::assemble::{extract, pieces as cut};
use crate::bits::{bits, format, value};
use crate::dump::{TensorInfo, name_ranks};

/// Fewest nonzero elements that must agree: two unrelated bf16 numbers agree with probability 2⁻⁷.
const EVIDENCE: u64 = 16;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let before = results.looked_at;
        for (key, info) in subject.dump.tensors() {
            let reduced = key.when == Some(When::PostReduce)
                || (key.microbatch.is_none() && key.when.is_none());
            if reduced && info.partial.is_none() && !addends(subject, key).is_empty() {
                results.looked();
                tensor(subject, key, info, results);
            }
        }
        if results.looked_at == before {
            let why = "no reduced tensor with its addends was recorded";
            results.skip(format!("step {}: reduced gradients", subject.dump.step), why);
        }
    }
}

fn tensor(subject: &Subject<'_>, key: &TensorKey, info: &TensorInfo, results: &mut CheckResults) {
    let (recorded, _) = pieces(subject.dump, info);
    let places: BTreeSet<&IndexBox> = recorded.iter().map(|piece| piece.place()).collect();
    // The check `replicas` reports boxes whose holders differ.
    if places.len() != recorded.len() {
        return;
    }
    let hit =
        recorded.iter().filter_map(|piece| Some((own_addend(subject, key, info, piece)?, piece)));
    let hit: Vec<(Rank, &Piece<'_>)> = hit.collect();
    if let Some((rank, piece)) = hit.first() {
        let ranks: Vec<Rank> = hit.iter().map(|(rank, _)| *rank).collect();
        let evidence = format!(
            "{key} {} is the addend of rank {rank} alone, though other ranks had something to add; so on {}",
            piece.place(),
            name_ranks(&ranks)
        );
        let place = Place::of(subject).tensor(key).ranks(&ranks);
        let advice = "Reduce it over every rank that holds an addend, and record it after the reduction has ended";
        results.add(Severity::Fail, Some("partial-not-reduced"), place, evidence, advice);
    }
}

/// The addends of a tensor: those that were summed over microbatches, else those of each
/// microbatch.
fn addends<'a>(subject: &Subject<'a>, key: &TensorKey) -> Vec<(&'a TensorKey, &'a TensorInfo)> {
    let is_addend = |(other, info): &(&TensorKey, &TensorInfo)| {
        other.tensor == key.tensor
            && info.partial.is_some()
            && other.when != Some(When::PostReduce)
            && (other.microbatch.is_none()
                || key.microbatch.is_none()
                || other.microbatch == key.microbatch)
    };
    let all: Vec<_> = subject.dump.tensors().iter().filter(is_addend).collect();
    match all.iter().find(|(other, _)| other.microbatch == key.microbatch) {
        Some(one) => vec![*one],
        None => all,
    }
}

/// The holder of a piece that equals this holder's own addend, if there is one and the addends of
/// other ranks in the box are not zero.
pub(super) fn own_addend(
    subject: &Subject<'_>,
    key: &TensorKey,
    info: &TensorInfo,
    piece: &Piece<'_>,
) -> Option<Rank> {
    let addends = addends(subject, key);
    if addends.is_empty() || format(info.dtype).is_none() {
        return None;
    }
    piece.ranks.iter().copied().find(|&rank| is_own(subject, info, piece, &addends, rank))
}

type Named<'a> = (&'a TensorKey, &'a TensorInfo);

fn is_own(
    subject: &Subject<'_>,
    info: &TensorInfo,
    piece: &Piece<'_>,
    addends: &[Named<'_>],
    rank: Rank,
) -> bool {
    let (microbatches, ranks) = (addends.len() as f64, f64::from(subject.dump.manifest.world_size));
    let factors = [1.0, 1.0 / microbatches, 1.0 / ranks, 1.0 / (microbatches * ranks)];
    let (mut left, mut nonzero, mut others) = ([true; 4], 0, false);
    let width = info.dtype.width();
    let coarsest =
        addends.iter().map(|(_, info)| roundoff(info.dtype)).fold(roundoff(info.dtype), f64::max);
    let u = (microbatches + 1.0) * coarsest;
    let own_shards = contents(subject, addends, rank);
    for part in cut(piece.place(), width) {
        // Replicas of the rank's own addend do not count as another rank's.
        let foreign = |record: &ShardRecord| {
            record.rank != rank && !own_shards.contains(&(&record.key, &record.place, record.hash))
        };
        let bytes = extract(&part, piece.place(), piece.bytes, width);
        let Some((own_sum, size)) = sum(subject, addends, &part, |record| record.rank == rank)
        else {
            return false;
        };
        for (i, (&own_element, &size)) in own_sum.iter().zip(&size).enumerate() {
            let reduced = value(info.dtype, bits(&bytes, width, i));
            for (left, factor) in left.iter_mut().zip(factors) {
                *left &= (reduced - own_element * factor).abs() <= u * size * factor;
            }
            nonzero += u64::from(own_element != 0.0);
        }
        if left == [false; 4] {
            return false;
        }
        if !others && let Some((other, _)) = sum(subject, addends, &part, foreign) {
            let more =
                other.iter().zip(&size).filter(|(other, size)| other.abs() > 4.0 * u * **size);
            others = more.count() as u64 >= EVIDENCE;
        }
    }
    nonzero >= EVIDENCE && others
}

/// What identifies the content of an addend: tensor, box and hash.
type Content<'a> = (&'a TensorKey, &'a IndexBox, ContentHash);

fn contents<'a>(subject: &Subject<'a>, addends: &[Named<'a>], rank: Rank) -> BTreeSet<Content<'a>> {
    let shards = addends.iter().flat_map(|(_, info)| &info.shards);
    let records =
        shards.map(|shard| subject.dump.record(shard)).filter(|record| record.rank == rank);
    records.map(|record| (&record.key, &record.place, record.hash)).collect()
}

/// The sum of the addends of some ranks in a box, and the sum of their magnitudes; `None` where
/// none of these ranks holds the whole box.
fn sum(
    subject: &Subject<'_>,
    addends: &[Named<'_>],
    place: &IndexBox,
    is_addend: impl Fn(&ShardRecord) -> bool,
) -> Option<(Vec<f64>, Vec<f64>)> {
    let count = place.elements()? as usize;
    let (mut total, mut size, mut any) = (vec![0.0; count], vec![0.0; count], false);
    for (_, info) in addends {
        let width = info.dtype.width();
        for shard in &info.shards {
            let record = subject.dump.record(shard);
            let inside = record.place.intersection(place).as_ref() == Some(place);
            if !is_addend(record) || !inside {
                continue;
            }
            let bytes = extract(place, &record.place, subject.dump.intact_bytes(shard)?, width);
            any = true;
            for i in 0..count {
                let x = value(info.dtype, bits(&bytes, width, i));
                total[i] += x;
                size[i] += x.abs();
            }
        }
    }
    any.then_some((total, size))
}
