//! The manifest: the list of all shards of a step. A step is committed once its complete manifest
//! exists under its final name.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer as _};

use crate::FORMAT_VERSION;
use crate::hash::TrustHash;
use crate::head::HeadDeclaration;
use crate::identity::{Attempt, Microbatch, Name, Rank, Step};
use crate::placement::Mesh;
use crate::selection::{IndexSelection, Selection};
use crate::shard::{ShardRecord, SortedRecord};

/// One durable file of one rank and the shards in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name below the step's directory.
    pub name: Name,
    /// The rank that wrote it.
    pub rank: Rank,
    /// Bytes, header included.
    pub length: u64,
    /// blake3 of its safetensors header: length prefix, JSON and padding.
    pub header_hash: TrustHash,
    /// The shards, in the order of their bytes.
    pub shards: Vec<ShardRecord>,
}

/// What a rank should have recorded and did not, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Omission {
    /// The rank.
    pub rank: Rank,
    /// The tensor's name, or [`EVERYTHING`].
    pub tensor: String,
    /// The microbatch, if the tensor has one.
    pub microbatch: Option<Microbatch>,
    /// The reason, in words.
    pub reason: String,
}

/// Used as the tensor of an [`Omission`]: the rank did not record any further tensor.
pub const EVERYTHING: &str = "*";

/// Why a step is incomplete although every rank closed its part: a rank stopped recording before
/// the end of the step, or never began.
pub fn cut_short<'a>(omissions: impl IntoIterator<Item = &'a Omission>) -> Option<String> {
    let mut all = omissions.into_iter().filter(|omission| omission.tensor == EVERYTHING);
    let first = all.next()?;
    let others: BTreeSet<Rank> =
        all.map(|omission| omission.rank).filter(|&rank| rank != first.rank).collect();
    let more = match others.len() {
        0 => String::new(),
        1 => "; so did another rank".into(),
        n => format!("; so did {n} other ranks"),
    };
    // The job gives the reason: newlines in it must not break the line.
    let reason: String = first.reason.chars().filter(|c| !c.is_control()).take(200).collect();
    Some(format!("rank {} did not record all of it: {reason}{more}", first.rank))
}

/// The parts of a manifest that can be read without the records of its files.
#[derive(Clone, Debug, Deserialize)]
pub struct Glance {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// The launch of the run.
    pub attempt: Attempt,
    /// The step.
    pub step: Step,
    /// What ranks should have recorded and did not.
    pub omissions: Vec<Omission>,
}

/// The list of all shards of a step. The same type is the schema on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// Version of backtape that wrote it.
    pub version: String,
    /// The run.
    pub run: Name,
    /// The launch of the run.
    pub attempt: Attempt,
    /// The step.
    pub step: Step,
    /// Number of ranks; each of them closed its part of the step.
    pub world_size: u32,
    /// The job's mesh, where it has one.
    pub mesh: Mesh,
    /// The loss head, where the job declared one.
    pub head: Option<HeadDeclaration>,
    /// Every file of the step, by rank and name.
    pub files: Vec<FileRecord>,
    /// What ranks should have recorded and did not, so that no tensor is missing without a reason.
    pub omissions: Vec<Omission>,
    /// What the ranks that were not to record everything were to record: a tensor that was not
    /// selected is not missing. Empty in dumps of versions that did not write it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub selections: Vec<RankSelection>,
    /// Set if no selection named this step and a trigger had it recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trigger: Option<TriggerRecord>,
}

/// Ranks that share one selection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSelection {
    /// The ranks.
    pub ranks: IndexSelection,
    /// What these ranks were to record.
    pub selection: Selection,
}

/// The trigger that had a step recorded while the job ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerRecord {
    /// Counts the triggers of an attempt from 1.
    pub number: u32,
    /// Why, in words.
    pub reason: String,
    /// The rank that triggered it; absent if a person asked for it.
    pub rank: Option<Rank>,
    /// The step whose values caused the trigger.
    pub seen: Step,
    /// True when the ranks had kept the captures in their ring buffers since the step and wrote
    /// them after the trigger.
    pub ring: bool,
}

/// The format of a manifest on disk; the hash seals the rest:
///
/// ```text
/// {"blake3":"<64 digits>","manifest":<text that the hash is of>}
/// ```
///
/// The keys of every object in the text are sorted, so that equal manifests give equal texts. A
/// reader hashes the text without parsing it first: a step of a million shards has 430 MiB of it,
/// and parsing into a tree of values took 9 times as long and 2 to 4 times the memory (`soak
/// manifest`).
const SEAL: [&str; 3] = ["{\"blake3\":\"", "\",\"manifest\":", "}\n"];

/// The part of a manifest that is read before its hash is checked: the format version.
#[derive(Deserialize)]
struct Outer {
    manifest: Version,
}

#[derive(Deserialize)]
struct Version {
    format_version: Option<u64>,
}

/// Why a manifest, or a run's record, cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is not JSON of the expected structure.
    #[error("it is not one that backtape wrote: {0}")]
    Syntax(#[from] serde_json::Error),
    /// Written by a newer backtape.
    #[error(
        "it has format version {0}, this backtape reads up to {FORMAT_VERSION}: install a newer one"
    )]
    Newer(u64),
    /// Its hash differs from the recorded one.
    #[error("its contents do not match its own hash: it was altered after it was written")]
    Altered,
}

impl TriggerRecord {
    /// The error in one line.
    pub fn sentence(&self) -> String {
        let who = self.rank.map_or("a person".into(), |rank| format!("rank {rank}"));
        let from = if self.ring { "kept in the ring; " } else { "" };
        format!("{from}trigger {} by {who} at step {}: {}", self.number, self.seen, self.reason)
    }
}

impl Manifest {
    /// If no rank was to record this tensor, a sentence that says so. `microbatch`: None asks for
    /// all microbatches.
    pub fn unselected(&self, tensor: &str, microbatch: Option<u32>) -> Option<String> {
        let asked = |rank: u32| {
            let mut of_rank = self.selections.iter().filter(|kept| kept.ranks.contains(rank));
            of_rank.next().is_none_or(|kept| {
                kept.selection.ranks.contains(rank) && kept.selection.wants(tensor, microbatch)
            })
        };
        if (0..self.world_size).any(asked) {
            return None;
        }
        let kept = self.selections.first()?;
        Some(format!("not recorded: selection ({})", kept.selection.restrictions()))
    }

    /// The contents of the manifest's file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let texts: Vec<String> = self.files.iter().map(FileRecord::to_text).collect();
        let bare = Manifest { files: Vec::new(), ..self.clone() };
        bare.to_bytes_of(texts.iter().map(String::as_str))
    }

    /// The same, with the given texts in the place of `self.files`. The coordinator serialises each
    /// file's record when it arrives, so that closing the step does not take longer with many
    /// files.
    pub(crate) fn to_bytes_of<'a>(&self, files: impl Iterator<Item = &'a str>) -> Vec<u8> {
        let text = sorted(&self);
        let (before, after) = text.split_once("\"files\":[]").expect("it has no files of its own");
        let mut bytes = SEAL[0].as_bytes().to_vec();
        bytes.resize(bytes.len() + HASH_DIGITS, b'0');
        bytes.extend(SEAL[1].as_bytes());
        let begin = bytes.len();
        bytes.extend(before.as_bytes());
        bytes.extend(b"\"files\":[");
        for (index, file) in files.enumerate() {
            if index > 0 {
                bytes.push(b',');
            }
            bytes.extend(file.as_bytes());
        }
        bytes.push(b']');
        bytes.extend(after.as_bytes());
        let digits = TrustHash::of(&bytes[begin..]).to_string();
        bytes[SEAL[0].len()..][..HASH_DIGITS].copy_from_slice(digits.as_bytes());
        bytes.extend(SEAL[2].as_bytes());
        bytes
    }

    /// Reads a manifest back; refuses an altered one and one of a newer format.
    pub fn from_bytes(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        read(bytes, |manifest: &Manifest| manifest.format_version)
    }

    /// The same without the records of the files, which are most of a manifest: their text is
    /// hashed and not kept.
    pub fn glance(bytes: &[u8]) -> Result<Glance, ManifestError> {
        read(bytes, |glance: &Glance| glance.format_version)
    }

    /// Every shard with the file that holds it.
    pub fn shards(&self) -> impl Iterator<Item = (&FileRecord, &ShardRecord)> {
        self.files.iter().flat_map(|file| file.shards.iter().map(move |shard| (file, shard)))
    }
}

fn read<T: DeserializeOwned>(
    bytes: &[u8],
    version: impl Fn(&T) -> u32,
) -> Result<T, ManifestError> {
    let read = match sealed(bytes) {
        Some(text) => serde_json::from_slice::<T>(text),
        None => return Err(unsealed(bytes)),
    };
    match read {
        Ok(read) if version(&read) > FORMAT_VERSION => {
            Err(ManifestError::Newer(version(&read).into()))
        }
        Ok(read) => Ok(read),
        // A newer format may have other fields: then its version is the error to report.
        Err(error) => match unsealed(bytes) {
            ManifestError::Newer(version) => Err(ManifestError::Newer(version)),
            _ => Err(error.into()),
        },
    }
}

/// Digits of a seal's hash.
const HASH_DIGITS: usize = 64;

/// The text of a manifest inside its seal, if the hash matches.
fn sealed(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(SEAL[0].as_bytes())?;
    let (digits, rest) = rest.split_at_checked(HASH_DIGITS)?;
    let text = rest.strip_prefix(SEAL[1].as_bytes())?.strip_suffix(SEAL[2].as_bytes())?;
    (TrustHash::of(text).to_string().as_bytes() == digits).then_some(text)
}

/// The error for bytes that do not have a manifest's seal.
fn unsealed(bytes: &[u8]) -> ManifestError {
    match serde_json::from_slice::<Outer>(bytes) {
        Err(error) => ManifestError::Syntax(error),
        Ok(Outer { manifest: Version { format_version: Some(version) } })
            if version > u64::from(FORMAT_VERSION) =>
        {
            ManifestError::Newer(version)
        }
        Ok(_) => ManifestError::Altered,
    }
}

/// JSON without spaces, with the keys of every object sorted.
fn sorted(value: &impl Serialize) -> String {
    // Objects of a `Value` are sorted by key; a struct would be written in the order of its fields.
    serde_json::to_value(value).expect("plain data").to_string()
}

impl FileRecord {
    /// The record's text in a manifest. Shards are written in the sorted order at once: to sort a
    /// tree of each takes most of the time that rank 0 has for a step of thousands.
    pub(crate) fn to_text(&self) -> String {
        let &FileRecord { rank, length, header_hash, .. } = self;
        let (name, shards) = (self.name.clone(), Vec::new());
        let bare = sorted(&FileRecord { name, rank, length, header_hash, shards });
        let (before, after) = bare.split_once("\"shards\":[]").expect("it has no shards");
        let mut text = format!("{before}\"shards\":").into_bytes();
        let mut writer = serde_json::Serializer::new(&mut text);
        writer.collect_seq(self.shards.iter().map(SortedRecord)).expect("plain data");
        text.extend(after.as_bytes());
        String::from_utf8(text).expect("JSON is text")
    }
}

/// `run.json`: the run, its start and the versions of the job's software.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// Version of backtape that wrote it.
    pub version: String,
    /// The run's name.
    pub run: Name,
    /// The launch of the run.
    pub attempt: Attempt,
    /// Ranks in the job.
    pub world_size: u32,
    /// The job's mesh, where it has one.
    pub mesh: Mesh,
    /// Seconds since the epoch, by the coordinator's clock.
    pub started: u64,
    /// Versions of the job's software, as the first rank gave them.
    pub versions: BTreeMap<String, String>,
}

/// The key of `run.json` that seals the others.
const RUN_SEAL: &str = "blake3";

/// `run.json` with whether it was sealed.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadRun {
    /// The record.
    pub record: RunRecord,
    /// False in dumps of versions that wrote no seal: then an alteration cannot be detected.
    pub sealed: bool,
}

impl RunRecord {
    /// The contents of `run.json`: sorted keys, one of which holds the hash of the others.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut value = serde_json::to_value(self).expect("a record is plain data");
        value[RUN_SEAL] = TrustHash::of(value.to_string().as_bytes()).to_string().into();
        let mut bytes = serde_json::to_vec_pretty(&value).expect("plain data");
        bytes.push(b'\n');
        bytes
    }

    /// Reads a record back; refuses an altered one and one of a newer format.
    pub fn from_bytes(bytes: &[u8]) -> Result<ReadRun, ManifestError> {
        let mut value: serde_json::Value = serde_json::from_slice(bytes)?;
        let version = value.get("format_version").and_then(serde_json::Value::as_u64);
        let newer = version.filter(|&version| version > u64::from(FORMAT_VERSION));
        let record = serde_json::from_value::<RunRecord>(value.clone());
        let mut written = serde_json::to_vec_pretty(&value)?;
        written.push(b'\n');
        let seal = value.as_object_mut().and_then(|fields| fields.remove(RUN_SEAL));
        let right = TrustHash::of(value.to_string().as_bytes()).to_string();
        let sealed = seal.is_some_and(|seal| seal == right.as_str()) && written == bytes;
        if let Some(version) = newer {
            return Err(ManifestError::Newer(version));
        }
        let record = record?;
        if !sealed {
            // Versions that wrote no seal wrote the fields in the order of their declaration.
            let mut before = serde_json::to_vec_pretty(&record)?;
            before.push(b'\n');
            if before != bytes {
                return Err(ManifestError::Altered);
            }
        }
        Ok(ReadRun { record, sealed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RunRecord {
        RunRecord {
            format_version: FORMAT_VERSION,
            version: "0.1.0".into(),
            run: Name::new("run-a").unwrap(),
            attempt: Attempt(0),
            world_size: 2,
            mesh: Mesh(vec![("data".into(), 2)]),
            started: 1_767_225_600,
            versions: BTreeMap::from([("jax".into(), "0.7.1".into())]),
        }
    }

    fn manifest() -> Manifest {
        let head = HeadDeclaration { z_loss: 1e-300, ..HeadDeclaration::default() };
        Manifest {
            format_version: FORMAT_VERSION,
            version: "0.1.0".into(),
            run: Name::new("run-a").unwrap(),
            attempt: Attempt(0),
            step: Step(3),
            world_size: 2,
            mesh: Mesh::default(),
            head: Some(head),
            files: Vec::new(),
            omissions: Vec::new(),
            selections: Vec::new(),
            trigger: None,
        }
    }

    /// Goal: every damage is detected. Method: each bit of both files is flipped, one at a time,
    /// also where the parsed value stays the same (`1e-300` and `1E-300`).
    #[test]
    fn every_flipped_bit_of_a_manifest_and_of_a_run_record_is_found() {
        let (run, step) = (record().to_bytes(), manifest().to_bytes());
        assert_eq!(RunRecord::from_bytes(&run).unwrap().record, record());
        assert!(RunRecord::from_bytes(&run).unwrap().sealed);
        assert_eq!(Manifest::from_bytes(&step).unwrap(), manifest());
        for bit in 0..8 * run.len() {
            let mut damaged = run.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(RunRecord::from_bytes(&damaged).is_err(), "bit {bit} of run.json");
        }
        for bit in 0..8 * step.len() {
            let mut damaged = step.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::from_bytes(&damaged).is_err(), "bit {bit} of manifest.json");
        }
    }

    #[test]
    fn a_run_record_of_before_the_seal_is_read_and_said_to_be_unsealed() {
        let mut bytes = serde_json::to_vec_pretty(&record()).unwrap();
        bytes.push(b'\n');
        assert!(!RunRecord::from_bytes(&bytes).unwrap().sealed);
        bytes[0] = b' ';
        assert!(RunRecord::from_bytes(&bytes).is_err());
    }

    /// A manifest that backtape 0.1.0 wrote, which serialised a tree of values.
    const GOLDEN: &[u8] = include_bytes!("../tests/golden/manifest-1.json");

    #[test]
    fn a_manifest_of_before_is_read_and_written_again_byte_for_byte() {
        let manifest = Manifest::from_bytes(GOLDEN).unwrap();
        assert_eq!(manifest.shards().count(), 13);
        assert!(manifest.to_bytes() == GOLDEN);
    }

    /// Goal: no change of a manifest passes unnoticed. Method: each bit of one is flipped.
    #[test]
    fn a_flipped_bit_anywhere_is_an_error_and_never_a_panic() {
        for byte in 0..GOLDEN.len() {
            let mut bytes = GOLDEN.to_vec();
            bytes[byte] ^= 1 << (byte % 8);
            assert!(Manifest::from_bytes(&bytes).is_err(), "byte {byte}");
        }
        for end in [0, 1, SEAL[0].len(), 80, GOLDEN.len() - 1] {
            assert!(Manifest::from_bytes(&GOLDEN[..end]).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn one_of_a_newer_format_is_refused_by_name_whatever_else_it_holds() {
        for json in [
            r#"{"manifest":{"format_version":9,"shards":[]},"seal":"?"}"#,
            r#"{"manifest":{"format_version":4294967296}}"#,
        ] {
            let refused = Manifest::from_bytes(json.as_bytes()).unwrap_err();
            assert!(matches!(refused, ManifestError::Newer(_)), "{refused}");
        }
        let mut manifest = Manifest::from_bytes(GOLDEN).unwrap();
        manifest.format_version = 9;
        let refused = Manifest::from_bytes(&manifest.to_bytes()).unwrap_err();
        assert!(matches!(refused, ManifestError::Newer(9)), "{refused}");
    }
}
