//! The findings of verification, as sentences for a report and as fields for JSON.

use std::path::PathBuf;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;
use serde::Serialize;

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// The step has no trustworthy manifest.
    Uncommitted,
    /// The step holds no tensors.
    Empty,
    /// A file is missing, truncated, altered or not the one that was listed.
    DamagedFile,
    /// A file that no manifest lists.
    StrayFile,
    /// The run's own record, or the coordinator's journal, is not what was written.
    DamagedRecord,
    /// A shard's bytes do not have the hash that the job took.
    BytesAltered,
    /// A shard's bytes are right, but its box is wrong.
    OutOfPlace,
    /// A part of a tensor that no intact shard holds.
    Gap,
    /// Different boxes of one tensor that share elements.
    Overlap,
    /// Ranks that should hold the same bits hold different ones.
    ReplicasDisagree,
    /// Ranks declared a tensor differently.
    DeclarationsDisagree,
    /// An addend of a partial tensor is missing.
    MissingAddend,
    /// A rank reported that it did not record a tensor.
    Omitted,
    /// Only some ranks hold shards of a tensor.
    HeldBySome,
}

/// How severe a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The dump is not what the job held, or cannot be shown to be.
    Fault,
    /// Worth knowing; nothing of the dump is lost by it.
    Note,
}

/// One thing that verification found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifyFinding {
    /// How severe it is.
    pub severity: Severity,
    /// Its kind.
    pub kind: FindingKind,
    /// Which tensor.
    pub tensor: Option<TensorKey>,
    /// Which part of it.
    #[serde(rename = "box")]
    pub place: Option<IndexBox>,
    /// The ranks that it is about; only those that differ where the majority agrees.
    pub ranks: Vec<Rank>,
    /// In which file.
    pub path: Option<PathBuf>,
    /// The whole finding in one sentence.
    pub sentence: String,
}

/// Something that was not checked, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotChecked {
    /// What was not checked.
    pub what: String,
    /// Why not.
    pub why: String,
}

impl VerifyFinding {
    pub(super) fn fault(kind: FindingKind, sentence: String) -> VerifyFinding {
        VerifyFinding {
            severity: Severity::Fault,
            kind,
            tensor: None,
            place: None,
            ranks: Vec::new(),
            path: None,
            sentence,
        }
    }

    pub(super) fn note(kind: FindingKind, sentence: String) -> VerifyFinding {
        VerifyFinding { severity: Severity::Note, ..VerifyFinding::fault(kind, sentence) }
    }

    pub(super) fn of(self, tensor: &TensorKey) -> VerifyFinding {
        let tensor = Some(tensor.clone());
        VerifyFinding { tensor, ..self }
    }

    pub(super) fn at(self, place: &IndexBox) -> VerifyFinding {
        let place = Some(place.clone());
        VerifyFinding { place, ..self }
    }

    pub(super) fn by(self, ranks: impl Into<Vec<Rank>>) -> VerifyFinding {
        let ranks = ranks.into();
        VerifyFinding { ranks, ..self }
    }

    pub(super) fn within(self, path: impl Into<PathBuf>) -> VerifyFinding {
        let path = Some(path.into());
        VerifyFinding { path, ..self }
    }
}
