//! Tensors of which ranks that should hold one value hold several, and the step as each group
//! of ranks holds it.
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

/// Groups that are told apart; beyond it nothing but the largest is looked at.
const MOST: usize = 8;

/// The step as some ranks hold it.
pub struct HeldBy {
    /// The ranks that hold the same version of everything.
    pub ranks: Vec<Rank>,
    /// The step, without the other versions of what they hold.
    pub dump: StepDump,
}

/// The versions of each box of which there are several, by who holds them.
type Boxes<'a> = BTreeMap<&'a IndexBox, BTreeMap<ContentHash, Vec<Rank>>>;

/// The boxes of a tensor whose intact replicas differ.
fn boxes<'a>(dump: &'a StepDump, info: &TensorInfo) -> Boxes<'a> {
    let mut all: Boxes<'a> = BTreeMap::new();
    if info.partial.is_some() {
        return all;
    }
    for at in info.shards.iter().filter(|at| dump.intact_bytes(at).is_some()) {
        let record = dump.record(at);
        let held = all.entry(&record.place).or_default().entry(record.hash).or_default();
        held.push(record.rank);
    }
    all.retain(|_, versions| versions.len() > 1);
    all
}

/// Whether a box of a tensor is held in several versions though the job says that its holders
/// have one: by the tensor's part in the head, or by a placement. A loss and what has no part
/// in the head may be each rank's own.
pub fn disagrees(dump: &StepDump, info: &TensorInfo, place: &IndexBox) -> bool {
    one_value(dump, info) && boxes(dump, info).contains_key(place)
}

/// Whether the job says that all holders of a box have one value.
pub fn one_value(dump: &StepDump, info: &TensorInfo) -> bool {
    let placed = || info.shards.iter().any(|at| !dump.record(at).placement.is_empty());
    !matches!(info.role, None | Some(Role::Loss)) || placed()
}

/// The tensors that `usable` accepts of which there are several versions.
pub fn disputed(dump: &StepDump, usable: impl Fn(&TensorKey) -> bool) -> Vec<TensorKey> {
    let several = |(key, info): &(&TensorKey, &TensorInfo)| {
        usable(key) && one_value(dump, info) && !boxes(dump, info).is_empty()
    };
    dump.tensors().iter().filter(several).map(|(key, _)| key.clone()).collect()
}

/// The groups of ranks that hold one version of every tensor that `usable` accepts, the largest
/// first; empty where no tensor has several.
pub fn versions(dump: &StepDump, usable: impl Fn(&TensorKey) -> bool) -> Vec<HeldBy> {
    let known = dump.tensors().iter().filter(|(key, info)| usable(key) && one_value(dump, info));
    let disputed: BTreeMap<&TensorKey, Boxes<'_>> = known
        .map(|(key, info)| (key, boxes(dump, info)))
        .filter(|(_, boxes)| !boxes.is_empty())
        .collect();
    if disputed.is_empty() {
        return Vec::new();
    }
    // What a rank holds of everything disputed: ranks that hold the same are a group.
    let mut held: BTreeMap<Rank, BTreeMap<(&TensorKey, &IndexBox), ContentHash>> = BTreeMap::new();
    for (&key, boxes) in &disputed {
        for (&place, versions) in boxes {
            for (&hash, ranks) in versions {
                ranks.iter().for_each(|&rank| {
                    held.entry(rank).or_default().insert((key, place), hash);
                });
            }
        }
    }
    let mut groups: BTreeMap<_, Vec<Rank>> = BTreeMap::new();
    held.iter().for_each(|(&rank, of)| groups.entry(of).or_default().push(rank));
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks.clone()));
    groups.truncate(if groups.len() > MOST { 1 } else { MOST });
    // Ranks that hold nothing disputed go with the largest group.
    let others: BTreeSet<Rank> = dump.manifest.files.iter().map(|file| file.rank).collect();
    let others = others.into_iter().filter(|rank| !held.contains_key(rank));
    if let Some((_, ranks)) = groups.first_mut() {
        ranks.extend(others);
        ranks.sort_unstable();
    }
    let one = |(of, ranks): (&BTreeMap<(&TensorKey, &IndexBox), ContentHash>, Vec<Rank>)| {
        let keep = |key: &TensorKey, at: &ShardRef| {
            let record = dump.record(at);
            let versions = disputed.get(key).and_then(|boxes| boxes.get(&record.place));
            versions.is_none_or(|versions| {
                let most = versions.iter().max_by_key(|(_, ranks)| {
                    (ranks.len(), std::cmp::Reverse(ranks.first().copied()))
                });
                let own = of.get(&(key, &record.place)).or(most.map(|(hash, _)| hash));
                own == Some(&record.hash)
            })
        };
        HeldBy { ranks, dump: dump.keeping(keep) }
    };
    groups.into_iter().map(one).collect()
}

impl StepDump {
    /// The same step with some shards alone.
    fn keeping(&self, keep: impl Fn(&TensorKey, &ShardRef) -> bool) -> StepDump {
        let mut tensors = self.tensors.clone();
        for (key, info) in &mut tensors {
            info.shards.retain(|at| keep(key, at));
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
