//! Checks that ranks that hold the same elements hold the same bits.
//!
//! Identical boxes are replicas. Different boxes that share elements are reported as overlaps, and
//! the shared elements are compared too.

use std::collections::BTreeMap;

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::{ShardRecord, TensorKey};

use super::contents::Contents;
use super::finding::{FindingKind, VerifyFinding};
use crate::assemble::{extract, intersect};
use crate::dump::{ShardRef, StepDump, name_ranks};

/// Most overlaps of a tensor that are named one by one; the others are only counted.
const NAMED: usize = 32;

/// Compares the elements that any two of these shards have in common.
pub(super) fn findings(
    dump: &StepDump,
    key: &TensorKey,
    shards: &[ShardRef],
    contents: &Contents,
) -> Vec<VerifyFinding> {
    let mut by_box: BTreeMap<&IndexBox, Vec<ShardRef>> = BTreeMap::new();
    for shard in shards {
        by_box.entry(&dump.record(shard).place).or_default().push(*shard);
    }
    let mut all_findings = Vec::new();
    for (place, replicas) in &by_box {
        let intact = replicas.iter().filter(|shard| contents[shard].intact);
        let records: Vec<_> = intact.map(|shard| dump.record(shard)).collect();
        all_findings.extend(replicas_disagree(key, place, &records));
    }
    all_findings.extend(overlaps(dump, key, &by_box));
    all_findings
}

/// Compares replicas by the recorded hashes, as the shards are intact. Hashes of 128 bits do not
/// collide by chance.
fn replicas_disagree(
    key: &TensorKey,
    place: &IndexBox,
    replicas: &[&ShardRecord],
) -> Option<VerifyFinding> {
    let mut versions: BTreeMap<ContentHash, Vec<Rank>> = BTreeMap::new();
    for record in replicas {
        versions.entry(record.hash).or_default().push(record.rank);
    }
    if versions.len() < 2 {
        return None;
    }
    let mut versions: Vec<Vec<Rank>> = versions.into_values().collect();
    versions.sort_by_key(|ranks| (std::cmp::Reverse(ranks.len()), ranks.clone()));
    let majority = versions[0].len() * 2 > replicas.len();
    let (odd, sentence) = if majority {
        let mut odd: Vec<Rank> = versions[1..].concat();
        odd.sort();
        let differ = if odd.len() == 1 { "differs" } else { "differ" };
        let (odd_ones, rest) = (name_ranks(&odd), name_ranks(&versions[0]));
        (odd, format!("{odd_ones} {differ} from {rest}, which agree"))
    } else {
        let named: Vec<String> = versions.iter().map(|ranks| name_ranks(ranks)).collect();
        let mut all = versions.concat();
        all.sort();
        (all, format!("there is no majority: {}", named.join(" against ")))
    };
    let sentence = format!("{key} {place} should be the same bits on all its holders: {sentence}");
    let finding = VerifyFinding::fault(FindingKind::ReplicasDisagree, sentence);
    Some(finding.of(key).at(place).by(odd))
}

fn overlaps(
    dump: &StepDump,
    key: &TensorKey,
    by_box: &BTreeMap<&IndexBox, Vec<ShardRef>>,
) -> Vec<VerifyFinding> {
    let boxes: Vec<&IndexBox> = by_box.keys().copied().collect();
    let pairs = overlapping_pairs(&boxes);
    let mut findings = Vec::new();
    for (a, b) in pairs.iter().copied() {
        let Some(shared) = boxes[a].intersection(boxes[b]) else {
            continue;
        };
        let (left, right) = (&by_box[boxes[a]], &by_box[boxes[b]]);
        let mut ranks: Vec<Rank> =
            left.iter().chain(right).map(|shard| dump.record(shard).rank).collect();
        ranks.sort();
        ranks.dedup();
        let who = name_ranks(&ranks);
        let (kind, sentence) = match same_bits(dump, &shared, left, right) {
            Some(false) => (
                FindingKind::ReplicasDisagree,
                format!(
                    "{key} {shared} differs between boxes {} and {} of {who}",
                    boxes[a], boxes[b]
                ),
            ),
            // Further overlaps are only counted, below.
            _ if findings.len() >= NAMED => continue,
            _ => (
                FindingKind::Overlap,
                format!("{key}: boxes {} and {} of {who} share {shared}", boxes[a], boxes[b]),
            ),
        };
        findings.push(VerifyFinding::fault(kind, sentence).of(key).at(&shared).by(ranks));
    }
    if pairs.len() > findings.len() {
        let sentence = format!("{key}: {} pairs of boxes overlap in all", pairs.len());
        findings.push(VerifyFinding::fault(FindingKind::Overlap, sentence).of(key));
    }
    findings
}

/// Whether both boxes have the same bits in `shared`; `None` if one of them has no intact shard.
fn same_bits(
    dump: &StepDump,
    shared: &IndexBox,
    left: &[ShardRef],
    right: &[ShardRef],
) -> Option<bool> {
    let part = |shards: &[ShardRef]| {
        shards.iter().find_map(|shard| {
            let (record, bytes) = (dump.record(shard), dump.intact_bytes(shard)?);
            Some(extract(shared, &record.place, bytes, record.dtype.width()))
        })
    };
    Some(part(left)? == part(right)?)
}

/// The pairs of boxes that share an element, by a sweep along the dimension with the most
/// boundaries: comparing all pairs of 10,000 slabs would take 50 million tests.
fn overlapping_pairs(boxes: &[&IndexBox]) -> Vec<(usize, usize)> {
    let dims = boxes.first().map_or(0, |place| place.0.len());
    let cuts = |dim: usize| {
        let mut starts: Vec<u64> = boxes.iter().map(|place| place.0[dim].0).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    // A tensor without dimensions has one box, and no pair.
    let Some(along) = (0..dims).max_by_key(|&dim| cuts(dim)) else {
        return Vec::new();
    };
    let mut order: Vec<usize> = (0..boxes.len()).collect();
    order.sort_by_key(|&i| boxes[i].0[along].0);
    let (mut open, mut pairs) = (Vec::<usize>::new(), Vec::new());
    for i in order {
        open.retain(|&j| boxes[j].0[along].1 > boxes[i].0[along].0);
        let sharing = open.iter().filter(|&&j| intersect(boxes[i], boxes[j]));
        pairs.extend(sharing.map(|&j| (i.min(j), i.max(j))));
        open.push(i);
    }
    pairs.sort_unstable();
    pairs
}
