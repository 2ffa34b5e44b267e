//! What can be wrong with a file of a step.

use std::path::PathBuf;

use backtape::identity::Rank;
use backtape::shard::TensorKey;
use serde::Serialize;

/// The kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The manifest lists it, and it is not in the directory.
    Missing,
    /// It ends too early.
    Truncated,
    /// It has bytes beyond its recorded end.
    Extended,
    /// Its header is not the one that was written.
    AlteredHeader,
    /// The file system cannot read it.
    Unreadable,
    /// Its header says that it belongs elsewhere.
    Misplaced,
    /// The manifest and the file's own header disagree.
    Disagrees,
    /// No manifest lists it.
    Stray,
    /// It was being written when its rank stopped.
    Unfinished,
}

/// One thing that is wrong with one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileFault {
    /// What kind of damage.
    pub kind: FaultKind,
    /// Which file.
    pub file: PathBuf,
    /// The rank whose file it is, if known.
    pub rank: Option<Rank>,
    /// Tensors with a shard in it whose bytes are lost or wrong. Empty when
    /// every shard of the file still hashes right.
    pub tensors: Vec<TensorKey>,
    /// The fault in one sentence.
    pub sentence: String,
}

impl std::fmt::Display for FileFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl FaultKind {
    /// True when nothing that was listed is lost by it.
    pub fn harmless(self) -> bool {
        matches!(self, FaultKind::Stray | FaultKind::Unfinished)
    }
}
