//! What happens to an attempt, as the journal keeps it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::head::HeadDeclaration;
use crate::identity::{Attempt, LaunchName, Name, Rank, Step};
use crate::manifest::{FileRecord, Omission};
use crate::placement::Mesh;
use crate::selection::{Planned, Selection, Trigger};

/// Something that was accepted. Applying the same events in the same order
/// gives the same state: nothing here depends on a clock or on the disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// The attempt began: always the first event of a journal.
    Opened(Opened),
    /// A rank entered.
    Joined(Joined),
    /// A file of a rank is durable.
    Reported {
        /// Of which step.
        step: Step,
        /// What is in it.
        file: FileRecord,
    },
    /// A rank's part of a step is complete.
    Closed {
        /// Which step.
        step: Step,
        /// Whose part.
        rank: Rank,
        /// What it comprises.
        closing: Closing,
    },
    /// A person gave a plan.
    Planned(Planned),
    /// A rank or a person asked for a recording.
    Triggered(Trigger),
    /// What the ranks' rings hold in common of a trigger is known.
    RingChosen {
        /// Of which trigger.
        number: u32,
        /// Every rank writes these.
        steps: Vec<Step>,
    },
}

impl Event {
    /// The step that it adds to.
    pub(crate) fn step(&self) -> Option<Step> {
        match self {
            Event::Reported { step, .. } | Event::Closed { step, .. } => Some(*step),
            _ => None,
        }
    }
}

/// What is known when an attempt begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Format of the journal and of the files.
    pub format_version: u32,
    /// Which run.
    pub run: Name,
    /// Which launch of it.
    pub attempt: Attempt,
    /// Ranks that must close a step.
    pub world_size: u32,
    /// Milliseconds since the epoch, by the coordinator's clock.
    pub started_ms: u64,
    /// The mesh, as the first rank gave it.
    pub mesh: Mesh,
    /// The software, as the first rank gave it.
    pub versions: BTreeMap<String, String>,
    /// Whose launch it is; absent where a launcher or an older rank 0 counted the attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<Launched>,
}

/// What tells one launch from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Launched {
    /// The process of rank 0 that opened the attempt: there is one in each launch.
    pub opener: u64,
    /// What the launcher calls it.
    pub name: Option<LaunchName>,
}

/// A rank that entered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Joined {
    /// Who.
    pub rank: Rank,
    /// Drawn once per process: tells a restart from a repeated request.
    pub incarnation: u64,
    /// From which machine.
    pub host: Name,
    /// The mesh as this rank sees it; empty when it does not say.
    pub mesh: Mesh,
}

/// What a rank says when it closes its part of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Closing {
    /// Files it reported, or is about to.
    pub files: u32,
    /// The head it declared.
    pub head: Option<Box<HeadDeclaration>>,
    /// What it did not record.
    pub omissions: Vec<Omission>,
    /// What it was asked for, where that was not everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Box<Selection>>,
}
