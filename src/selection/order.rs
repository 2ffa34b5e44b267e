//! What the coordinator asks of a running job beside what the job itself was
//! told: a plan, and triggered recordings.

use serde::{Deserialize, Serialize};

use super::{ByteLimit, IndexSelection, Selection, StepSelection, TensorSelection};
use crate::identity::{Rank, Step};

/// The parts of a selection that a plan replaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Changes {
    /// In the place of [`Selection::steps`], and so on.
    pub steps: Option<StepSelection>,
    /// Which tensors.
    pub tensors: Option<TensorSelection>,
    /// Which ranks.
    pub ranks: Option<IndexSelection>,
    /// Which microbatches.
    pub microbatches: Option<IndexSelection>,
    /// Largest tensor.
    pub max_tensor_bytes: Option<ByteLimit>,
    /// Most bytes of a step.
    pub max_step_bytes: Option<ByteLimit>,
}

impl Changes {
    /// True when it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }
}

/// The parts that it replaces: `steps 100-110; tensors q,k`.
impl std::fmt::Display for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |name: &str, part: Option<String>| part.map(|part| format!("{name} {part}"));
        let spelled = |part: &Option<ByteLimit>| part.map(|part| part.to_string());
        let parts = [
            text("steps", self.steps.as_ref().map(ToString::to_string)),
            text("tensors", self.tensors.as_ref().map(ToString::to_string)),
            text("ranks", self.ranks.as_ref().map(ToString::to_string)),
            text("microbatches", self.microbatches.as_ref().map(ToString::to_string)),
            text("tensors of at most", spelled(&self.max_tensor_bytes)),
            text("steps of at most", spelled(&self.max_step_bytes)),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join("; "))
    }
}

/// A plan: from one step on, every rank records by these changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Counts the plans of an attempt from 1.
    pub version: u32,
    /// First step that it holds for: far enough ahead for every rank to have heard.
    pub from: Step,
    /// What it replaces.
    pub changes: Changes,
}

impl Planned {
    /// The selection of a rank that was told `own` when it started.
    pub fn over(&self, own: &Selection) -> Selection {
        own.with(&self.changes)
    }
}

/// One triggered recording: every rank records one further step, and writes
/// what its ring still holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    /// Counts the triggers of an attempt from 1.
    pub number: u32,
    /// Why, in words.
    pub reason: String,
    /// Who saw it; `None`: a person asked.
    pub rank: Option<Rank>,
    /// The step that it is about: the one that went wrong, or the newest that
    /// any rank had begun when a person asked.
    pub seen: Step,
    /// The step that every rank records.
    pub record: Step,
    /// Steps of the rings that every rank writes; `None` while that is open.
    pub ring: Option<Vec<Step>>,
}
