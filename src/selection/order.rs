//! What the coordinator tells the ranks of a running job to record beyond their own selection: a
//! plan, and triggered recordings.

use serde::{Deserialize, Serialize};

use super::{ByteLimit, IndexSelection, Selection, StepSelection, TensorSelection};
use crate::identity::{Rank, Step};

/// The parts of a selection that a plan replaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Changes {
    /// Replaces [`Selection::steps`]; the other fields likewise.
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
    /// True when it replaces nothing.
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }
}

/// Prints the replaced parts: `steps 100-110; tensors q,k`.
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

/// A plan: from one step on, every rank applies these changes to its selection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Counts the plans of an attempt from 1.
    pub version: u32,
    /// The first step to which it applies: late enough that every rank has received the plan by
    /// then.
    pub from: Step,
    /// The parts that it replaces.
    pub changes: Changes,
}

impl Planned {
    /// The selection of a rank whose own selection is `selection`.
    pub fn over(&self, selection: &Selection) -> Selection {
        selection.with(&self.changes)
    }
}

/// One triggered recording: every rank records one further step and writes the earlier steps that
/// its ring buffer still holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    /// Counts the triggers of an attempt from 1.
    pub number: u32,
    /// Why, in words.
    pub reason: String,
    /// The rank that triggered it; `None` if a person asked for it.
    pub rank: Option<Rank>,
    /// The step that caused it: the one that went wrong, or, if a person asked, the newest step
    /// that any rank had begun.
    pub seen: Step,
    /// The step that every rank records.
    pub record: Step,
    /// The steps that every rank writes from its ring buffer; `None` until that is decided.
    pub ring: Option<Vec<Step>>,
}
