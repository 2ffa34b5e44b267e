//! Opens a step without a manifest: by the coordinator's journal, if that lists every rank's whole
//! part, else from the headers of its shard files.
//!
//! The headers only list what is there. Of what is missing they only show which ranks have no file
//! at all.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use backtape::coordinator::{Examined, examine};
use backtape::hash::TrustHash;
use backtape::head::HeadDeclaration;
use backtape::identity::{Name, Rank};
use backtape::manifest::{FileRecord, Manifest, cut_short};
use backtape::store::header::{FileSelf, MAX_HEADER, METADATA_KEY};
use backtape::store::layout::JOURNAL;
use backtape::{FORMAT_VERSION, VERSION};
use rayon::prelude::*;

use super::file::{rank_in, stray_fault};
use super::judge::chain;
use super::locate::{Located, directory_name};
use super::{
    FaultKind, FileFault, MAX_RANKS, OpenError, StepState, listing, name_ranks, run_record,
};

/// A manifest, how far it can be trusted, and the faults that were found.
pub(super) struct Salvaged {
    pub(super) manifest: Manifest,
    pub(super) state: StepState,
    pub(super) faults: Vec<FileFault>,
    /// Whether every file of the step is known to be in the manifest.
    pub(super) listed: bool,
}

impl Salvaged {
    /// A manifest that was found at its final name.
    pub(super) fn sealed(manifest: Manifest) -> Salvaged {
        Salvaged::of_whole(manifest, StepState::Committed)
    }

    fn of_whole(manifest: Manifest, state: StepState) -> Salvaged {
        let missing_ranks = Vec::new();
        let state = match cut_short(&manifest.omissions) {
            Some(why) => StepState::Partial { why, missing_ranks },
            None => state,
        };
        Salvaged { manifest, state, faults: Vec::new(), listed: true }
    }
}

/// What the coordinator's journal has about the step, if it can be read; verification reports if it
/// cannot.
fn journal(located: &Located) -> Option<Examined> {
    examine(&located.attempt.path.join(JOURNAL), located.step.step).ok()
}

/// A file whose header could be read.
struct Readable {
    name: Name,
    about: FileSelf,
    header_hash: TrustHash,
    header_length: u64,
}

pub(super) fn salvage(located: &Located, why: String) -> Result<Salvaged, OpenError> {
    let (step, journal) = (located.step.step, journal(located));
    let recovered = journal.as_ref().and_then(|journal| journal.manifest(step));
    if let Some(manifest) = recovered.filter(|manifest| manifest.attempt == located.attempt.attempt)
    {
        let why = format!("{why}; its files are listed by {JOURNAL}");
        return Ok(Salvaged::of_whole(manifest, StepState::Recovered { why }));
    }
    let names = listing(&located.step)?;
    let (shards, rest): (Vec<_>, Vec<_>) = names
        .into_iter()
        .partition(|name| name.ends_with(".safetensors") && !name.starts_with('.'));
    let mut faults: Vec<FileFault> =
        rest.iter().filter_map(|name| leftover(located, name)).collect();
    let read: Vec<_> = shards
        .par_iter()
        .map(|name| read_self(&located.step.path, name).map_err(|error| (name, error)))
        .collect();
    let mut readable = Vec::new();
    let mut newer = None;
    for result in read {
        match result {
            Ok(file) => readable.push(file),
            Err((name, error)) => {
                if let HeaderError::Newer(version) = error {
                    newer.get_or_insert((located.step.path.join(name), version));
                }
                faults.push(unreadable(located, name, &error));
            }
        }
    }
    // A damaged digit may look like a newer version, so this is an error only if no header can be
    // read.
    if let (Some((path, version)), true) = (newer, readable.is_empty()) {
        return Err(OpenError::Newer { path, found: version });
    }
    let run = run_name(located, &readable);
    let here = (located.attempt.attempt, located.step.step);
    readable.retain(|file| {
        let about = &file.about;
        let belongs = (about.attempt, about.step) == here && Some(&about.run) == run.as_ref();
        if !belongs {
            faults.push(misplaced(located, file));
        }
        belongs
    });
    faults.extend(readable.iter().filter_map(|file| misnamed(located, file)));
    let unclosed = journal.as_ref().and_then(|journal| journal.unclosed(step));
    let why = match unclosed.as_deref() {
        None | Some([]) => why,
        Some(ranks) => format!("{why}; by {JOURNAL} {} did not close it", name_ranks(ranks)),
    };
    let head = journal.and_then(|journal| journal.head(step));
    Ok(put_together(located, (why, head), run, readable, faults))
}

fn put_together(
    located: &Located,
    (why, head): (String, Option<HeadDeclaration>),
    run: Option<Name>,
    readable: Vec<Readable>,
    faults: Vec<FileFault>,
) -> Salvaged {
    let record = run_record(&located.attempt.path);
    let declared = record.as_ref().map(|record| record.world_size);
    let world_size = declared
        .or_else(|| most_common(readable.iter().map(|file| file.about.world_size)))
        .unwrap_or(0)
        .min(MAX_RANKS);
    let present: BTreeSet<Rank> = readable.iter().map(|file| file.about.rank).collect();
    let ranks = (0..world_size).map(Rank);
    let missing_ranks = ranks.filter(|rank| !present.contains(rank)).collect();
    let omissions = readable.iter().flat_map(|file| file.about.omissions.clone());
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        version: VERSION.into(),
        run: run.unwrap_or_else(|| Name::new("unknown").expect("letters")),
        attempt: located.attempt.attempt,
        step: located.step.step,
        world_size,
        mesh: record.map(|record| record.mesh).unwrap_or_default(),
        head,
        omissions: omissions.collect(),
        selections: Vec::new(),
        trigger: None,
        files: readable.into_iter().map(file_record).collect(),
    };
    let state = StepState::Partial { why, missing_ranks };
    Salvaged { manifest, state, faults, listed: false }
}

/// The run's name in run.json, else in most files, else that of the directory.
fn run_name(located: &Located, readable: &[Readable]) -> Option<Name> {
    run_record(&located.attempt.path)
        .map(|record| record.run)
        .or_else(|| most_common(readable.iter().map(|file| file.about.run.clone())))
        .or_else(|| Name::new(directory_name(&located.run)).ok())
}

fn most_common<T: Ord>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_insert(0u64) += 1;
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.map(|(value, _)| value)
}

fn file_record(file: Readable) -> FileRecord {
    let shards = file.about.shards;
    let data = shards.iter().fold(0u64, |n, shard| n.saturating_add(shard.length));
    FileRecord {
        name: file.name,
        rank: file.about.rank,
        length: file.header_length.saturating_add(data),
        header_hash: file.header_hash,
        shards,
    }
}

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
enum HeaderError {
    #[error("its name is not one that backtape gives")]
    Name(#[from] backtape::identity::NameError),
    #[error("it is not a file")]
    NotAFile,
    #[error("it ends before its header does")]
    Truncated(#[source] std::io::Error),
    #[error("its header claims {0} bytes: more than {MAX_HEADER} are not read")]
    TooLarge(u64),
    #[error("its header is damaged")]
    Syntax(#[from] serde_json::Error),
    #[error("it carries no shard records: another program wrote it")]
    Foreign,
    #[error("it has format version {0}, this backtape reads up to {FORMAT_VERSION}")]
    Newer(u64),
}

/// Reads only the header, so that a file that is truncated behind it still tells what it should
/// hold. `ShardFile::open` refuses such a file.
fn read_self(directory: &Path, name: &str) -> Result<Readable, HeaderError> {
    let path = directory.join(name);
    let name = Name::new(name)?;
    let meta = std::fs::metadata(&path).map_err(HeaderError::Truncated)?;
    if !meta.is_file() {
        return Err(HeaderError::NotAFile);
    }
    let mut file = File::open(&path).map_err(HeaderError::Truncated)?;
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix).map_err(HeaderError::Truncated)?;
    let length = u64::from_le_bytes(prefix);
    if length > MAX_HEADER as u64 {
        return Err(HeaderError::TooLarge(length));
    }
    let mut header = vec![0; 8 + length as usize];
    header[..8].copy_from_slice(&prefix);
    file.read_exact(&mut header[8..]).map_err(HeaderError::Truncated)?;
    let json: serde_json::Value = serde_json::from_slice(&header[8..])?;
    let text = json.pointer(&format!("/__metadata__/{METADATA_KEY}"));
    let text = text.and_then(|value| value.as_str()).ok_or(HeaderError::Foreign)?;
    let value: serde_json::Value = serde_json::from_str(text)?;
    let version = value.get("format_version").and_then(serde_json::Value::as_u64);
    if let Some(newer) = version.filter(|&newer| newer > u64::from(FORMAT_VERSION)) {
        return Err(HeaderError::Newer(newer));
    }
    Ok(Readable {
        name,
        about: serde_json::from_value(value)?,
        header_hash: TrustHash::of(&header),
        header_length: header.len() as u64,
    })
}

fn unreadable(located: &Located, name: &str, error: &HeaderError) -> FileFault {
    let kind = match error {
        HeaderError::Name(_) | HeaderError::Foreign => {
            return stray_fault(&located.step, name, &chain(error));
        }
        HeaderError::Truncated(_) => FaultKind::Truncated,
        HeaderError::NotAFile => FaultKind::Unreadable,
        _ => FaultKind::AlteredHeader,
    };
    FileFault {
        kind,
        file: located.step.path.join(name),
        rank: rank_in(name),
        tensors: Vec::new(),
        sentence: format!("{name} says nothing of itself: {}", chain(error)),
    }
}

/// The fault of a file from another step, attempt or run, which is not used.
fn misplaced(located: &Located, file: &Readable) -> FileFault {
    let about = &file.about;
    FileFault {
        kind: FaultKind::Misplaced,
        file: located.step.path.join(file.name.as_str()),
        rank: Some(about.rank),
        tensors: Vec::new(),
        sentence: format!(
            "{} is of run {} attempt {} step {}: not used",
            file.name, about.run, about.attempt, about.step
        ),
    }
}

/// The fault of a file that has another rank's name. It is used as the file of the rank in its
/// header, since each of its shards has its own hash.
fn misnamed(located: &Located, file: &Readable) -> Option<FileFault> {
    let named = rank_in(file.name.as_str()).filter(|&rank| rank != file.about.rank)?;
    Some(FileFault {
        kind: FaultKind::Misplaced,
        file: located.step.path.join(file.name.as_str()),
        rank: Some(file.about.rank),
        tensors: Vec::new(),
        sentence: format!(
            "{} bears the name of rank {named} and says that it is rank {}'s: used as the latter",
            file.name, file.about.rank
        ),
    })
}

/// The fault of a file that is neither a shard file nor the (damaged) manifest.
fn leftover(located: &Located, name: &str) -> Option<FileFault> {
    if name == backtape::store::layout::MANIFEST {
        return None;
    }
    let scratch = name.starts_with('.') && name.ends_with(".tmp");
    if !scratch {
        return Some(stray_fault(&located.step, name, "it is not a shard file"));
    }
    Some(FileFault {
        kind: FaultKind::Unfinished,
        file: located.step.path.join(name),
        rank: rank_in(name.trim_start_matches('.')),
        tensors: Vec::new(),
        sentence: format!(
            "{name} was being written when its rank stopped: nothing in it was acknowledged"
        ),
    })
}
