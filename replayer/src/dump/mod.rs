//! Opens one step of a dump: by its committed manifest, or without one from the headers of the
//! shard files.
//!
//! Opening checks files and headers, not contents: [`crate::verify`] checks every byte and every
//! box. A damaged file does not stop it: it becomes a [`FileFault`], and everything else stays
//! readable.
//!
//! ```text
//! dump::open("/dumps", Selection { run: Some("run-a"), step: Some(0), .. })
//!   -> StepDump { state: Partial { why: "it has no manifest ...", missing_ranks: [3] }, .. }
//! ```

pub(crate) mod addend;
mod error;
mod fault;
mod file;
mod find;
#[cfg(test)]
pub(crate) mod fixture;
mod judge;
mod listing;
mod locate;
mod place;
mod ragged;
mod reference;
mod salvage;
pub mod sampled;
mod tensors;
#[cfg(test)]
mod tests;
pub mod versions;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::manifest::{FileRecord, Glance, Manifest, ManifestError, RunRecord, cut_short};
use backtape::shard::{ShardRecord, TensorKey};
use backtape::store::layout::{MANIFEST, RUN_RECORD};
use backtape::store::{AttemptDir, StepDir};
use rayon::prelude::*;
use serde::Serialize;

pub use error::{AttemptState, OpenError};
pub use fault::{FaultKind, FileFault};
pub use file::DumpFile;
pub use find::FindError;
pub use listing::{ListedRun, ListedStep, list};
pub use place::Place;
pub use tensors::{Disagreement, ShardRef, TensorInfo};

/// Most ranks that a dump may have, which limits how many a damaged header can make us list as
/// missing. It is a hundred times the size of the largest known jobs.
pub const MAX_RANKS: u32 = 1 << 20;

/// Which step to open, where a path holds several: `--run`, `--attempt`, `--step`.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Selection {
    pub run: Option<String>,
    pub attempt: Option<u32>,
    pub step: Option<u64>,
}

/// One step of one attempt of a run, open for reading.
pub struct StepDump {
    /// Which run.
    pub run: Name,
    /// Which attempt, the number of the launch.
    pub attempt: Attempt,
    /// Which step.
    pub step: Step,
    /// The step's directory.
    pub directory: PathBuf,
    /// Other attempts that have the step but no shard of it, as launches that ended before they
    /// recorded it.
    passed_over: Vec<Attempt>,
    /// Whether the step was committed.
    pub state: StepState,
    /// Read from disk when committed, else from the coordinator's journal, else assembled from the
    /// headers of the shard files.
    pub manifest: Manifest,
    /// Whether it is known which files the step should hold, which the headers alone do not tell.
    pub listed: bool,
    files: Arc<Vec<DumpFile>>,
    faults: Vec<FileFault>,
    tensors: BTreeMap<TensorKey, TensorInfo>,
    /// Records of the shards of ragged tensors, with their boxes in the whole tensor.
    settled: ragged::Settled,
    /// Keeps the local copy of files from a bucket until the dump is dropped.
    _place: Place,
}

/// Whether a step is known to be whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepState {
    /// Its manifest is at its final name and has the right hash.
    Committed,
    /// Its manifest is lost, and the coordinator's journal lists every rank's whole part.
    Recovered {
        /// What happened to the manifest, as one clause.
        why: String,
    },
    /// A part of it is missing, or may be missing.
    Partial {
        /// Why, as one clause.
        why: String,
        /// Ranks of the job of which the dump holds no readable file.
        missing_ranks: Vec<Rank>,
    },
}

impl StepDump {
    /// The files that should be there, each with the file that was found.
    pub fn files(&self) -> impl Iterator<Item = (&FileRecord, &DumpFile)> {
        self.manifest.files.iter().zip(self.files.iter())
    }

    /// What is wrong with the files, by file name.
    pub fn faults(&self) -> &[FileFault] {
        &self.faults
    }

    /// Every tensor of the step, including those of which files are missing.
    pub fn tensors(&self) -> &BTreeMap<TensorKey, TensorInfo> {
        &self.tensors
    }

    /// The record of a shard, at its place in the whole tensor.
    pub fn record(&self, shard: &ShardRef) -> &ShardRecord {
        self.settled.get(shard).unwrap_or_else(|| self.written(shard))
    }

    /// The record of a shard as its rank wrote it; its fingerprint was computed for this box.
    pub fn written(&self, shard: &ShardRef) -> &ShardRecord {
        &self.manifest.files[shard.file].shards[shard.index]
    }

    /// The file that holds a shard.
    pub fn file_of(&self, shard: &ShardRef) -> &DumpFile {
        &self.files[shard.file]
    }

    /// A shard's bytes as they are on disk, right or wrong; `None` where the file ends before them
    /// or is missing.
    pub fn shard_bytes(&self, shard: &ShardRef) -> Option<&[u8]> {
        self.files[shard.file].bytes(shard.index)
    }

    /// A shard's bytes when they are those that the training process hashed.
    /// The hash is computed on the first call and remembered.
    pub fn intact_bytes(&self, shard: &ShardRef) -> Option<&[u8]> {
        self.files[shard.file].intact_bytes(shard.index, self.record(shard))
    }

    /// Which attempts were passed over, one sentence each.
    pub fn passed_over(&self) -> Vec<String> {
        let said = |attempt: &Attempt| {
            format!("attempt {attempt} was passed over: it holds no shard of step {}", self.step)
        };
        self.passed_over.iter().map(said).collect()
    }

    /// True when the step's manifest was committed and no rank stopped before the end of the step.
    pub fn committed(&self) -> bool {
        self.state == StepState::Committed
    }

    /// True when every rank's whole part of the step is known. Only such a step is judged: what is
    /// absent from it was never recorded.
    pub fn is_whole(&self) -> bool {
        !matches!(self.state, StepState::Partial { .. })
    }
}

impl StepState {
    /// Why it is not committed, as one clause.
    pub fn why(&self) -> Option<&str> {
        match self {
            StepState::Committed => None,
            StepState::Recovered { why } | StepState::Partial { why, .. } => Some(why),
        }
    }

    /// Ranks of which the dump holds no readable file.
    pub fn missing_ranks(&self) -> &[Rank] {
        match self {
            StepState::Partial { missing_ranks, .. } => missing_ranks,
            _ => &[],
        }
    }
}

/// The text that every output uses.
impl std::fmt::Display for StepState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StepState::Committed => f.write_str("committed"),
            StepState::Recovered { why } => write!(f, "RECOVERED: {why}"),
            StepState::Partial { why, .. } => write!(f, "PARTIAL: {why}"),
        }
    }
}

/// The dumped steps of the run that `path` and `selection` name, ascending; `selection.step` is
/// ignored.
pub fn steps(path: &Path, selection: &Selection) -> Result<Vec<Step>, OpenError> {
    let place = Place::of(path)?;
    let narrowed = place.narrow(&Selection { step: None, ..selection.clone() })?;
    let steps = locate::steps(&place, &narrowed).map_err(|error| place.with_user_paths(error))?;
    match narrowed.step {
        None => Ok(steps),
        Some(step) if steps.contains(&Step(step)) => Ok(vec![Step(step)]),
        Some(step) => {
            let wanted = Step(step);
            Err(OpenError::NoSuchStep { path: place.given(place.path()), wanted, steps })
        }
    }
}

/// The run that a place and `selection` name, and its attempts; `selection.step` is ignored.
pub fn attempts(
    place: &Place,
    selection: &Selection,
) -> Result<(PathBuf, Vec<AttemptDir>), OpenError> {
    let narrowed = place.narrow(selection)?;
    locate::attempts(place.path(), &narrowed).map_err(|error| place.with_user_paths(error))
}

/// Opens the step of another run that a step is compared with: the one of the same number, unless
/// `path` names another.
pub fn open_other(path: &Path, step: Step) -> Result<StepDump, OpenError> {
    let place = Place::of(path)?;
    let named = place.narrow(&Selection::default())?.step;
    let selection = Selection { step: named.or(Some(step.0)), ..Selection::default() };
    open_some(&place, &selection, &|_| true)
}

/// Opens the step that `path` and `selection` name. From a bucket its files are first copied to
/// this host, and are deleted when the dump is dropped.
pub fn open(path: &Path, selection: &Selection) -> Result<StepDump, OpenError> {
    open_some(&Place::of(path)?, selection, &|_| true)
}

/// The same, but from a bucket only the files that `wanted` accepts by name are copied, in addition
/// to those that `place` already has. The other files count as missing, so their shards must not be
/// used.
pub fn open_some(
    place: &Place,
    selection: &Selection,
    wanted: &(dyn Fn(&str) -> bool + Sync),
) -> Result<StepDump, OpenError> {
    open_at(place, selection, wanted).map_err(|error| place.with_user_paths(error))
}

fn open_at(
    place: &Place,
    selection: &Selection,
    wanted: &(dyn Fn(&str) -> bool + Sync),
) -> Result<StepDump, OpenError> {
    let located = locate::locate(place, &place.narrow(selection)?)?;
    place.bring(&located.step, wanted)?;
    place.bring_journal(&located.attempt)?;
    let (attempt, step) = (located.attempt.attempt, &located.step);
    let says = |manifest: &Manifest| (manifest.attempt, manifest.step);
    let salvaged = match read_manifest(place, step, attempt, (Manifest::from_bytes, says))? {
        Ok(manifest) => salvage::Salvaged::sealed(manifest),
        Err(why) => salvage::salvage(&located, why)?,
    };
    let (manifest, state, listed) = (salvaged.manifest, salvaged.state, salvaged.listed);
    let others = judge::names_by_header(&manifest);
    let opened: Vec<_> = manifest
        .files
        .par_iter()
        .map(|record| file::open(&located.step.path, record, &manifest, &others))
        .collect();
    let (files, faults): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    let mut faults: Vec<FileFault> = faults.into_iter().flatten().collect();
    faults.extend(salvaged.faults);
    if listed {
        faults.extend(file::strays(&located.step, &manifest)?);
    }
    faults.sort_by(|a, b| (&a.file, a.kind).cmp(&(&b.file, b.kind)));
    let (tensors, settled) = tensors::index(&manifest, &files);
    Ok(StepDump {
        run: manifest.run.clone(),
        attempt: located.attempt.attempt,
        step: located.step.step,
        directory: located.step.path,
        passed_over: located.passed_over,
        state,
        manifest,
        listed,
        files: Arc::new(files),
        faults,
        tensors,
        settled,
        _place: place.clone(),
    })
}

/// How a manifest is parsed, and how its attempt and step are read from it.
type Reading<T> = (fn(&[u8]) -> Result<T, ManifestError>, fn(&T) -> (Attempt, Step));

/// A parsed manifest, or the clause that says why it is missing or damaged.
fn read_manifest<T>(
    place: &Place,
    step: &StepDir,
    attempt: Attempt,
    (parse, says): Reading<T>,
) -> Result<Result<T, String>, OpenError> {
    let path = step.manifest();
    let named = || place.given(&path).display().to_string();
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Err("it has no manifest: it was never committed".into()));
        }
        Err(error) => {
            return Ok(Err(format!("its manifest {} cannot be read: {error}", named())));
        }
    };
    let manifest = match parse(&bytes) {
        Ok(manifest) => manifest,
        Err(ManifestError::Newer(version)) => {
            return Err(OpenError::Newer { path, found: version });
        }
        Err(error) => return Ok(Err(format!("its manifest {} is damaged: {error}", named()))),
    };
    let (says_here, lies) = (says(&manifest), (attempt, step.step));
    if says_here != lies {
        let words = |(attempt, step): (Attempt, Step)| format!("attempt {attempt} step {step}");
        return Err(OpenError::Misplaced { path, says: words(says_here), lies: words(lies) });
    }
    Ok(Ok(manifest))
}

/// Why a step is not committed, from its manifest alone; `None` if it is.
fn uncommitted(place: &Place, step: &StepDir, attempt: Attempt) -> Option<String> {
    if let Err(error) = place.bring(step, |name| name == MANIFEST) {
        return Some(error.to_string());
    }
    let says = |glance: &Glance| (glance.attempt, glance.step);
    match read_manifest(place, step, attempt, (Manifest::glance, says)) {
        Ok(Ok(glance)) => cut_short(&glance.omissions),
        Ok(Err(why)) => Some(why),
        Err(error) => Some(place.with_user_paths(error).to_string()),
    }
}

/// `run.json` of an attempt, if it can be read. Only names and the mesh of a salvaged step depend
/// on it.
fn run_record(directory: &Path) -> Option<RunRecord> {
    let bytes = std::fs::read(directory.join(RUN_RECORD)).ok()?;
    RunRecord::from_bytes(&bytes).ok().map(|read| read.record)
}

/// Names of the plain files in a step's directory, sorted.
fn listing(step: &StepDir) -> Result<Vec<String>, OpenError> {
    let read = |source| OpenError::Read { path: step.path.clone(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&step.path).map_err(read)? {
        let name = entry.map_err(read)?.file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Names ranks as `rank 3` or `ranks 0, 1 and 7`, shortened if there are many; `2 devices of rank
/// 0` where a rank occurs more than once.
pub(crate) fn name_ranks(ranks: &[Rank]) -> String {
    const SHOWN: usize = 12;
    let mut devices: BTreeMap<Rank, usize> = BTreeMap::new();
    ranks.iter().for_each(|&rank| *devices.entry(rank).or_default() += 1);
    if devices.len() < ranks.len() {
        let name_of = |(rank, count): (&Rank, &usize)| match count {
            1 => format!("rank {rank}"),
            count => format!("{count} devices of rank {rank}"),
        };
        return devices.iter().map(name_of).collect::<Vec<_>>().join(" and ");
    }
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(Rank::to_string).collect();
    match ranks {
        [] => "no rank".into(),
        [rank] => format!("rank {rank}"),
        _ if ranks.len() > SHOWN => {
            format!("ranks {} and {} more", shown.join(", "), ranks.len() - SHOWN)
        }
        _ => {
            format!("ranks {} and {}", shown[..shown.len() - 1].join(", "), shown[shown.len() - 1])
        }
    }
}
