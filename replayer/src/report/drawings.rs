//! What only the HTML page shows, as plain data: heat maps, and what each rank recorded.

use std::collections::{BTreeMap, BTreeSet};

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;

use crate::dump::{MAX_RANKS, ShardRef, StepDump, StepState};
use crate::replay::maps::Map;
use crate::verify::{FindingKind, Severity, TensorVerdict, Verification};

/// The data of the drawings that belong to a report.
#[derive(Clone, Debug, Default)]
pub struct Drawings {
    /// Heat maps, in the order of the stages.
    pub maps: Vec<Map>,
    /// Every rank of the job, by rank.
    pub ranks: Vec<RankDrawn>,
    /// Every tensor of the step, by key.
    pub tensors: Vec<TensorVerdict>,
}

/// Only tests compare reports. `tensors` is left out, since it comes from the same dump as the
/// rest.
impl PartialEq for Drawings {
    fn eq(&self, other: &Drawings) -> bool {
        self.maps == other.maps && self.ranks == other.ranks
    }
}

/// How much of a rank the dump holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// Files of the rank are there.
    Recorded,
    /// The rank closed its part of the step without recording anything.
    Nothing,
    /// No readable file of the rank is there, and no manifest says that it recorded nothing.
    Missing,
}

/// One rank: what the dump holds of it, and what verification found.
#[derive(Clone, Debug, PartialEq)]
pub struct RankDrawn {
    /// The rank's number.
    pub rank: u32,
    /// The name of its machine; empty where no shard of it is listed.
    pub host: String,
    /// How much of it the dump holds.
    pub state: RankState,
    /// Shards that it recorded.
    pub shards: u64,
    /// Bytes of these shards.
    pub bytes: u64,
    /// Faults that name the rank, by kind as in [`FAULTS`].
    pub faults: [u64; 4],
    /// Boxes that it holds and that other ranks hold too.
    pub replicated: u64,
    /// Those boxes whose holders do not all have the same bits.
    pub apart: u64,
}

/// The names of the four kinds of faults.
pub const FAULTS: [&str; 4] = ["bytes", "place", "coverage", "replicas"];

/// Collects the drawings of a dump: the maps of its replay, its ranks and its tensors.
pub fn drawings(dump: &StepDump, proof: &Verification, maps: Vec<Map>) -> Drawings {
    let mut maps = maps;
    maps.sort_by_key(|map| map.stage);
    Drawings { maps, ranks: ranks(dump, proof), tensors: proof.tensors.clone() }
}

fn ranks(dump: &StepDump, proof: &Verification) -> Vec<RankDrawn> {
    let missing: BTreeSet<Rank> = match &dump.state {
        StepState::Committed | StepState::Recovered { .. } => BTreeSet::new(),
        StepState::Partial { missing_ranks, .. } => missing_ranks.iter().copied().collect(),
    };
    let named = dump.manifest.files.iter().map(|file| file.rank.0.saturating_add(1));
    let world = named.chain([dump.manifest.world_size]).max().unwrap_or(0).min(MAX_RANKS);
    let drawn_rank = |rank: u32| RankDrawn {
        rank,
        host: String::new(),
        state: if missing.contains(&Rank(rank)) { RankState::Missing } else { RankState::Nothing },
        shards: 0,
        bytes: 0,
        faults: [0; 4],
        replicated: 0,
        apart: 0,
    };
    let mut drawn: Vec<RankDrawn> = (0..world).map(drawn_rank).collect();
    for file in &dump.manifest.files {
        let Some(rank) = drawn.get_mut(file.rank.0 as usize) else { continue };
        rank.state = RankState::Recorded;
        for shard in &file.shards {
            rank.shards += 1;
            rank.bytes += shard.length;
            if rank.host.is_empty() {
                rank.host = shard.host.to_string();
            }
        }
    }
    note_replicas(dump, &mut drawn);
    for finding in proof.findings.iter().filter(|finding| finding.severity == Severity::Fault) {
        let Some(kind) = kind(finding.kind) else { continue };
        for rank in &finding.ranks {
            if let Some(drawn_rank) = drawn.get_mut(rank.0 as usize) {
                drawn_rank.faults[kind] += 1;
            }
        }
    }
    drawn
}

/// Index into [`FAULTS`] of the kind of a finding; `None` where it is about the step as a whole.
fn kind(finding: FindingKind) -> Option<usize> {
    match finding {
        FindingKind::DamagedFile | FindingKind::StrayFile | FindingKind::BytesAltered => Some(0),
        FindingKind::OutOfPlace | FindingKind::DeclarationsDisagree => Some(1),
        FindingKind::Gap
        | FindingKind::Overlap
        | FindingKind::MissingAddend
        | FindingKind::Omitted => Some(2),
        FindingKind::ReplicasDisagree => Some(3),
        FindingKind::Uncommitted
        | FindingKind::Empty
        | FindingKind::DamagedRecord
        | FindingKind::HeldBySome => None,
    }
}

/// Counts the boxes that each rank shares with others. It compares the hashes that the training
/// processes took; that the bytes still have these hashes is checked elsewhere.
fn note_replicas(dump: &StepDump, ranks: &mut [RankDrawn]) {
    for info in dump.tensors().values().filter(|info| info.partial.is_none()) {
        let mut boxes: BTreeMap<&IndexBox, Vec<(Rank, ContentHash)>> = BTreeMap::new();
        let record = |shard: &ShardRef| dump.record(shard);
        for shard in info.shards.iter().map(record) {
            boxes.entry(&shard.place).or_default().push((shard.rank, shard.hash));
        }
        for holders in boxes.values().filter(|holders| holders.len() > 1) {
            let apart = holders.iter().any(|(_, hash)| *hash != holders[0].1);
            for (rank, _) in holders {
                if let Some(drawn) = ranks.get_mut(rank.0 as usize) {
                    drawn.replicated += 1;
                    drawn.apart += u64::from(apart);
                }
            }
        }
    }
}
