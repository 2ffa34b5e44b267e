//! Finds tensors of which ranks hold different versions though they should hold the same, and
//! splits the step by the ranks that hold the same versions.
//!
//! ```text
//! k: ranks 0, 1 and 3 hold one version, rank 2 another
//!   -> [0, 1, 3]: the step without rank 2's k;  [2]: the step with rank 2's k alone
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::{ShardRef, StepDump, TensorInfo};

/// Most groups of ranks; if there are more, only the largest is used.
const MOST: usize = 8;

/// The step as one group of ranks holds it.
pub struct HeldBy {
    /// The ranks that hold the same version of every tensor.
    pub ranks: Vec<Rank>,
    /// The step, without the other versions of what they hold.
    pub dump: StepDump,
}

/// The boxes with several versions: for each version, by hash, the ranks that hold it.
type Boxes<'a> = BTreeMap<&'a IndexBox, BTreeMap<ContentHash, Vec<Rank>>>;

/// The boxes of a tensor whose intact replicas differ.
fn boxes<'a>(dump: &'a StepDump, info: &TensorInfo) -> Boxes<'a> {
    let mut all: Boxes<'a> = BTreeMap::new();
    if info.partial.is_some() {
        return all;
    }
    for shard in info.shards.iter().filter(|shard| dump.intact_bytes(shard).is_some()) {
        let record = dump.record(shard);
        let ranks = all.entry(&record.place).or_default().entry(record.hash).or_default();
        ranks.push(record.rank);
    }
    all.retain(|_, versions| versions.len() > 1);
    all
}

/// Whether holders of a box have different versions though the job declares that they hold the
/// same, by the tensor's role or by a placement. A loss, and tensors without a role, may differ
/// between ranks.
pub fn disagrees(dump: &StepDump, info: &TensorInfo, place: &IndexBox) -> bool {
    one_value(dump, info) && boxes(dump, info).contains_key(place)
}

/// Whether the job declares that all holders of a box hold the same value.
pub fn one_value(dump: &StepDump, info: &TensorInfo) -> bool {
    let placed = || info.shards.iter().any(|shard| !dump.record(shard).placement.is_empty());
    !matches!(info.role, None | Some(Role::Loss)) || placed()
}

/// The tensors accepted by `usable` of which there are several versions.
pub fn disputed(dump: &StepDump, usable: impl Fn(&TensorKey) -> bool) -> Vec<TensorKey> {
    let several = |(key, info): &(&TensorKey, &TensorInfo)| {
        usable(key) && one_value(dump, info) && !boxes(dump, info).is_empty()
    };
    dump.tensors().iter().filter(several).map(|(key, _)| key.clone()).collect()
}

/// The groups of ranks that hold the same version of every tensor that `usable` accepts, the
/// largest first; empty where no tensor has several versions.
pub fn versions(dump: &StepDump, usable: impl Fn(&TensorKey) -> bool) -> Vec<HeldBy> {
    let known = dump.tensors().iter().filter(|(key, info)| usable(key) && one_value(dump, info));
    let disputed: BTreeMap<&TensorKey, Boxes<'_>> = known
        .map(|(key, info)| (key, boxes(dump, info)))
        .filter(|(_, boxes)| !boxes.is_empty())
        .collect();
    if disputed.is_empty() {
        return Vec::new();
    }
    // The version that each rank holds of each disputed box; ranks with the same versions are a
    // group.
    let mut hashes: BTreeMap<Rank, BTreeMap<(&TensorKey, &IndexBox), ContentHash>> =
        BTreeMap::new();
    for (&key, boxes) in &disputed {
        for (&place, versions) in boxes {
            for (&hash, ranks) in versions {
                ranks.iter().for_each(|&rank| {
                    hashes.entry(rank).or_default().insert((key, place), hash);
                });
            }
        }
    }
    let mut groups: BTreeMap<_, Vec<Rank>> = BTreeMap::new();
    hashes.iter().for_each(|(&rank, of)| groups.entry(of).or_default().push(rank));
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks.clone()));
    groups.truncate(if groups.len() > MOST { 1 } else { MOST });
    // Ranks that hold no disputed box join the largest group.
    let others: BTreeSet<Rank> = dump.manifest.files.iter().map(|file| file.rank).collect();
    let others = others.into_iter().filter(|rank| !hashes.contains_key(rank));
    if let Some((_, ranks)) = groups.first_mut() {
        ranks.extend(others);
        ranks.sort_unstable();
    }
    let version_of =
        |(hashes_of_ranks, ranks): (&BTreeMap<(&TensorKey, &IndexBox), ContentHash>, Vec<Rank>)| {
            let keep = |key: &TensorKey, shard: &ShardRef| {
                let record = dump.record(shard);
                let versions = disputed.get(key).and_then(|boxes| boxes.get(&record.place));
                versions.is_none_or(|versions| {
                    let most = versions.iter().max_by_key(|(_, ranks)| {
                        (ranks.len(), std::cmp::Reverse(ranks.first().copied()))
                    });
                    let wanted_hash =
                        hashes_of_ranks.get(&(key, &record.place)).or(most.map(|(hash, _)| hash));
                    wanted_hash == Some(&record.hash)
                })
            };
            HeldBy { ranks, dump: dump.keeping(keep) }
        };
    groups.into_iter().map(version_of).collect()
}

impl StepDump {
    /// The same step with only some of its shards.
    fn keeping(&self, keep: impl Fn(&TensorKey, &ShardRef) -> bool) -> StepDump {
        let mut tensors = self.tensors.clone();
        for (key, info) in &mut tensors {
            info.shards.retain(|shard| keep(key, shard));
        }
        StepDump {
            run: self.run.clone(),
            attempt: self.attempt,
            step: self.step,
            directory: self.directory.clone(),
            state: self.state.clone(),
            manifest: self.manifest.clone(),
            listed: self.listed,
            settled: self.settled.clone(),
            passed_over: self.passed_over.clone(),
            files: Arc::clone(&self.files),
            faults: self.faults.clone(),
            tensors,
            _place: self._place.clone(),
        }
    }
}
