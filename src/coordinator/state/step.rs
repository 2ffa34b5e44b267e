//! One step of an attempt: which files were reported and which ranks closed it.

use std::collections::{BTreeMap, BTreeSet};

use super::super::event::Closing;
use super::super::quotas;
use crate::faults;
use crate::hash::TrustHash;
use crate::head::HeadDeclaration;
use crate::identity::{Name, Rank};
use crate::manifest::{FileRecord, Manifest, Omission, RankSelection, cut_short};
use crate::selection::{IndexSelection, Selection};
use crate::shard::ShardRecord;

/// Sums over files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) files: u64,
    pub(crate) shards: u64,
    /// Bytes of their shards.
    pub(crate) bytes: u64,
}

impl Sums {
    fn of(file: &FileRecord) -> Sums {
        let bytes = |sum: u64, shard: &ShardRecord| sum.saturating_add(shard.length);
        Sums {
            files: 1,
            shards: file.shards.len() as u64,
            bytes: file.shards.iter().fold(0, bytes),
        }
    }

    pub(super) fn add(&mut self, other: Sums) {
        self.files += other.files;
        self.shards += other.shards;
        // Saturates, because false sizes in a rank's report must not make the coordinator panic.
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// A reported file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    pub(super) header_hash: TrustHash,
    pub(crate) sums: Sums,
    /// Its record as text for the manifest; empty once the manifest is written.
    text: String,
}

impl Kept {
    /// Its record as JSON, until the manifest is written.
    pub(super) fn text(&self) -> Option<&str> {
        (!self.text.is_empty()).then_some(&*self.text)
    }
}

/// Files of one rank, sorted by name. A sorted list, because there are many committed steps with
/// one or two files per rank, and a map would take a kilobyte for each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KeptFiles(Vec<(Name, Kept)>);

impl KeptFiles {
    pub(super) fn get(&self, name: &Name) -> Option<&Kept> {
        let index = self.0.binary_search_by(|(own, _)| own.cmp(name)).ok()?;
        Some(&self.0[index].1)
    }

    /// False if there is a file of that name, which stays.
    fn insert(&mut self, name: Name, kept: Kept) -> bool {
        match self.0.binary_search_by(|(own, _)| own.cmp(&name)) {
            Ok(_) => false,
            Err(at) => {
                self.0.insert(at, (name, kept));
                true
            }
        }
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Kept> {
        self.0.iter().map(|(_, kept)| kept)
    }

    /// Drops the texts, which the manifest contains; returns how many bytes they had.
    fn settle(&mut self) -> u64 {
        self.0.shrink_to_fit();
        self.0.iter_mut().map(|(_, kept)| std::mem::take(&mut kept.text).len() as u64).sum()
    }
}

/// What is known of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepState {
    /// When its first event arrived, in milliseconds of the coordinator's clock.
    pub(super) since_ms: u64,
    pub(super) files: BTreeMap<Rank, KeptFiles>,
    pub(crate) closed: BTreeMap<Rank, Closing>,
    /// Memory of the closes in bytes, computed once, because it needs the head's JSON text.
    weights: BTreeMap<Rank, u64>,
    /// Ranks that closed and have not reported all files that they counted.
    pub(crate) short: BTreeSet<Rank>,
    pub(super) head: Option<(Rank, HeadDeclaration)>,
    /// Disagreements between ranks, which do not prevent the commit.
    pub(super) notes: Vec<Omission>,
    /// Sums over the reported files; `counted`: files that the closes count.
    pub(crate) sums: Sums,
    counted: u64,
    pub(crate) committed: bool,
    /// True if it was restored from its manifest, which does not contain the whole closes.
    recalled: bool,
    pub(crate) overdue: bool,
}

impl StepState {
    /// A step whose first event arrives at `at_ms`.
    pub(super) fn begun(at_ms: u64) -> StepState {
        StepState { since_ms: at_ms, ..StepState::default() }
    }

    /// A committed step restored from its manifest: enough to recognise repeated events. Of each
    /// close it has only the count of files.
    pub(super) fn recalled(manifest: &Manifest) -> StepState {
        let mut state = StepState::default();
        for file in &manifest.files {
            state.add(file);
        }
        for rank in (0..manifest.world_size).map(Rank) {
            let files = state.reported(rank);
            let closing = Closing { files, ..Closing::default() };
            let weight = quotas::weight(&closing);
            state.close(rank, closing, weight);
        }
        state.settle();
        state.recalled = true;
        state
    }

    /// Why it is incomplete although every rank closed it.
    pub(super) fn cut_short(&self) -> Option<String> {
        cut_short(self.closed.values().flat_map(|closing| &closing.omissions))
    }

    /// Whether a repeated close is the same as the first.
    pub(super) fn same(&self, first: &Closing, again: &Closing) -> bool {
        match self.recalled {
            true => first.files == again.files,
            false => first == again,
        }
    }

    /// Files of one rank reported so far.
    pub(crate) fn reported(&self, rank: Rank) -> u32 {
        let count = self.files.get(&rank).map_or(0, |count| count.0.len());
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// The texts of all reported files in the manifest's order: by rank and name.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.files.values().flat_map(KeptFiles::values).map(|file| file.text.as_str())
    }

    pub(super) fn header_hashes(&self) -> BTreeMap<(Rank, Name), TrustHash> {
        let hashes_of_rank = |(rank, files): (&Rank, &KeptFiles)| {
            let rank = *rank;
            files
                .0
                .iter()
                .map(move |(name, kept)| ((rank, name.clone()), kept.header_hash))
                .collect::<Vec<_>>()
        };
        self.files.iter().flat_map(hashes_of_rank).collect()
    }

    /// True when every rank closed and all counted files are reported. No rank reports more than it
    /// counted, so that comparing the sums is enough.
    pub(super) fn complete(&self, world_size: u32) -> bool {
        let early = u64::from(faults::seeded("manifest-before-last-ack"));
        self.closed.len() as u64 + early >= u64::from(world_size) && self.counted == self.sums.files
    }

    /// Adds a file that is not present yet; returns its sums and the bytes that it takes in memory.
    pub(super) fn add(&mut self, file: &FileRecord) -> (Sums, u64) {
        let sums = Sums::of(file);
        let kept = Kept { header_hash: file.header_hash, sums, text: file.to_text() };
        let text_bytes = kept.text.len() as u64;
        let files_of_rank = self.files.entry(file.rank).or_default();
        if !files_of_rank.insert(file.name.clone(), kept) {
            return Default::default();
        }
        self.sums.add(sums);
        self.note_short(file.rank);
        (sums, text_bytes)
    }

    /// Updates whether a rank has yet to report files that it counted.
    fn note_short(&mut self, rank: Rank) {
        let counted = self.closed.get(&rank).map_or(0, |closing| closing.files);
        match self.reported(rank) < counted {
            true => self.short.insert(rank),
            false => self.short.remove(&rank),
        };
    }

    /// Marks the step as committed and drops the texts, which the manifest contains; returns the
    /// bytes that were kept in memory for each rank.
    pub(super) fn settle(&mut self) -> BTreeMap<Rank, u64> {
        self.committed = true;
        let mut weights = self.weights.clone();
        for (rank, files) in &mut self.files {
            *weights.entry(*rank).or_default() += files.settle();
        }
        weights
    }

    /// The ranks' selections, one entry for all ranks with the same one.
    pub(super) fn selections(&self) -> Vec<RankSelection> {
        let mut groups: Vec<(&Selection, Vec<u32>)> = Vec::new();
        for (rank, closing) in &self.closed {
            let Some(selection_of_rank) = closing.selection.as_deref() else { continue };
            match groups.iter_mut().find(|(selection, _)| *selection == selection_of_rank) {
                Some((_, ranks)) => ranks.push(rank.0),
                None => groups.push((selection_of_rank, vec![rank.0])),
            }
        }
        let record = |(selection, ranks): (&Selection, Vec<u32>)| RankSelection {
            ranks: IndexSelection::of(ranks),
            selection: selection.clone(),
        };
        groups.into_iter().map(record).collect()
    }

    /// Bytes of its ranks' closes.
    pub(super) fn bytes_of_closes(&self) -> u64 {
        self.weights.values().sum()
    }

    pub(super) fn close(&mut self, rank: Rank, closing: Closing, weight: u64) {
        match (&self.head, &closing.head) {
            (None, Some(head)) => self.head = Some((rank, HeadDeclaration::clone(head))),
            (Some((first, kept)), Some(head)) if !kept.has_same_options(head) => {
                let reason = disagreement(*first, kept, head);
                self.notes.push(Omission { rank, tensor: "head".into(), microbatch: None, reason });
            }
            _ => {}
        }
        self.counted += u64::from(closing.files);
        self.closed.insert(rank, closing);
        self.weights.insert(rank, weight);
        self.note_short(rank);
    }
}

fn disagreement(first: Rank, kept: &HeadDeclaration, other: &HeadDeclaration) -> String {
    let fields = |head: &HeadDeclaration| match serde_json::to_value(head) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (kept, other) = (fields(&kept.options_alone()), fields(&other.options_alone()));
    let differs = kept.iter().filter(|(name, value)| other.get(*name) != Some(value));
    let names: Vec<_> = differs.map(|(name, _)| name.as_str()).collect();
    format!(
        "it declared another head than rank {first} ({}): rank {first}'s is kept",
        names.join(", ")
    )
}
