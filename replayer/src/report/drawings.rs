//! What a page draws and no other form of the report holds: heat maps, and what each rank
//! recorded. Plain data.

use std::collections::{BTreeMap, BTreeSet};

use backtape::hash::ContentHash;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;

use crate::dump::{MAX_RANKS, ShardRef, StepDump, StepState};
use crate::replay::maps::Map;
use crate::verify::{FindingKind, Severity, TensorVerdict, Verification};

/// Beside a report.
#[derive(Clone, Debug, Default)]
pub struct Drawings {
    /// Heat maps, in the order of the stages.
    pub maps: Vec<Map>,
    /// Every rank of the job, by rank.
    pub ranks: Vec<RankDrawn>,
    /// Every tensor of the step, by key.
    pub tensors: Vec<TensorVerdict>,
}

/// Reports are compared in tests; what is drawn of them follows from the same dump.
impl PartialEq for Drawings {
    fn eq(&self, other: &Drawings) -> bool {
        self.maps == other.maps && self.ranks == other.ranks
    }
}

/// What is there of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// Files of it are there.
    Recorded,
    /// It closed its part with nothing in it.
    Nothing,
    /// No readable file of it is there, and no manifest says that it had none.
    Missing,
}

/// One rank, as the dump and its verification have it.
#[derive(Clone, Debug, PartialEq)]
pub struct RankDrawn {
    /// Which.
    pub rank: u32,
    /// Its machine; empty where nothing of it says.
    pub host: String,
    /// What is there of it.
    pub held: Held,
    /// Shards that it recorded, and their bytes.
    pub shards: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Faults of the bytes, the places, the coverage and the replicas that name it.
    pub faults: [u64; 4],
    /// Boxes that it holds and others hold too: replicas.
    pub replicated: u64,
    /// Those of which some other holder has other bits.
    pub apart: u64,
}

/// The names of the four kinds of faults.
pub const FAULTS: [&str; 4] = ["bytes", "place", "coverage", "replicas"];

/// What is drawn of a dump: the maps of its replay, and its ranks.
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
    let one = |rank: u32| RankDrawn {
        rank,
        host: String::new(),
        held: if missing.contains(&Rank(rank)) { Held::Missing } else { Held::Nothing },
        shards: 0,
        bytes: 0,
        faults: [0; 4],
        replicated: 0,
        apart: 0,
    };
    let mut found: Vec<RankDrawn> = (0..world).map(one).collect();
    for file in &dump.manifest.files {
        let Some(of) = found.get_mut(file.rank.0 as usize) else { continue };
        of.held = Held::Recorded;
        for shard in &file.shards {
            of.shards += 1;
            of.bytes += shard.length;
            if of.host.is_empty() {
                of.host = shard.host.to_string();
            }
        }
    }
    note_replicas(dump, &mut found);
    for finding in proof.findings.iter().filter(|of| of.severity == Severity::Fault) {
        let Some(kind) = kind(finding.kind) else { continue };
        for rank in &finding.ranks {
            if let Some(of) = found.get_mut(rank.0 as usize) {
                of.faults[kind] += 1;
            }
        }
    }
    found
}

/// Which of the four kinds a finding is of; none where it is of the step as a whole.
fn kind(of: FindingKind) -> Option<usize> {
    match of {
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

/// Counts the boxes that a rank holds with others. The hashes are those that the training
/// processes took; that the bytes still have them is the bytes' own check.
fn note_replicas(dump: &StepDump, ranks: &mut [RankDrawn]) {
    for info in dump.tensors().values().filter(|info| info.partial.is_none()) {
        let mut boxes: BTreeMap<&IndexBox, Vec<(Rank, ContentHash)>> = BTreeMap::new();
        let record = |at: &ShardRef| dump.record(at);
        for shard in info.shards.iter().map(record) {
            boxes.entry(&shard.place).or_default().push((shard.rank, shard.hash));
        }
        for holders in boxes.values().filter(|holders| holders.len() > 1) {
            let apart = holders.iter().any(|(_, hash)| *hash != holders[0].1);
            for (rank, _) in holders {
                if let Some(of) = ranks.get_mut(rank.0 as usize) {
                    of.replicated += 1;
                    of.apart += u64::from(apart);
                }
            }
        }
    }
}
