//! The events of an attempt, as the journal contains them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::head::HeadDeclaration;
use crate::identity::{Attempt, LaunchName, Name, Rank, Step};
use crate::manifest::{FileRecord, Omission};
use crate::placement::Mesh;
use crate::selection::{Planned, Selection, Trigger};

/// An accepted event. Applying the same events in the same order gives the same state, independent
/// of clock and disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// The attempt began: always the first event of a journal.
    Opened(Opened),
    /// A rank entered.
    Joined(Joined),
    /// A file of a rank is durable.
    Reported {
        /// The step.
        step: Step,
        /// The file's record.
        file: FileRecord,
    },
    /// A rank's part of a step is complete.
    Closed {
        /// The step.
        step: Step,
        /// The rank.
        rank: Rank,
        /// What the rank sent with the close.
        closing: Closing,
    },
    /// A person set a plan.
    Planned(Planned),
    /// A rank or a person asked for a recording.
    Triggered(Trigger),
    /// It is decided which steps the ranks write from their ring buffers for a trigger.
    RingChosen {
        /// The trigger's number.
        number: u32,
        /// The steps that every rank writes.
        steps: Vec<Step>,
    },
}

impl Event {
    /// The step that it belongs to, if it belongs to one.
    pub(crate) fn step(&self) -> Option<Step> {
        match self {
            Event::Reported { step, .. } | Event::Closed { step, .. } => Some(*step),
            _ => None,
        }
    }
}

/// The data of an attempt that are fixed when it begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Format of the journal and of the files.
    pub format_version: u32,
    /// The run.
    pub run: Name,
    /// The launch of the run.
    pub attempt: Attempt,
    /// Ranks that must close a step.
    pub world_size: u32,
    /// Milliseconds since the epoch, by the coordinator's clock.
    pub started_ms: u64,
    /// The job's mesh, from the first rank.
    pub mesh: Mesh,
    /// Versions of the job's software, from the first rank.
    pub versions: BTreeMap<String, String>,
    /// Which launch opened it; absent if the launcher gave the attempt's number, or rank 0 is of an
    /// earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<Launched>,
}

/// Identifies a launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Launched {
    /// The process of rank 0 that opened the attempt; each launch has one.
    pub opener: u64,
    /// The launcher's name of the launch.
    pub name: Option<LaunchName>,
}

/// A rank that entered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Joined {
    /// The rank.
    pub rank: Rank,
    /// A random number, drawn once per process: distinguishes a restarted rank from a repeated
    /// request.
    pub incarnation: u64,
    /// The rank's machine.
    pub host: Name,
    /// The mesh that this rank reported; empty if it reported none.
    pub mesh: Mesh,
}

/// What a rank sends when it closes its part of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Closing {
    /// Number of its files, reported before or after this.
    pub files: u32,
    /// The head it declared.
    pub head: Option<Box<HeadDeclaration>>,
    /// What it did not record.
    pub omissions: Vec<Omission>,
    /// What it was to record, if that was not everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Box<Selection>>,
}
