//! What a task is told: plain data, so that it can be sent.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::dump::Selection;
use crate::kernels::policy::{DkParts, DqParts};

/// The replay that a task is a part of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::replay) struct Session {
    pub(super) path: String,
    pub(super) run: Option<String>,
    pub(super) attempt: u32,
    pub(super) step: u64,
    /// What stands in for the declared policy, as JSON.
    pub(super) policy: Option<String>,
    /// Tensors that must not be believed, as JSON.
    pub(super) unusable: Vec<String>,
    pub(super) comparisons: usize,
    pub(super) whole: bool,
    /// Where large arrays lie in files.
    pub(super) spill: Option<String>,
}

impl Session {
    /// The step that is meant.
    pub(super) fn selection(&self) -> Selection {
        Selection { run: self.run.clone(), attempt: Some(self.attempt), step: Some(self.step) }
    }
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// The forward's sums of some tokens over some classes, onto those of the classes before.
    Forward,
    /// lse and label logits of some tokens, as a member has them.
    EmulatedForward,
    /// dq of some tokens and dk of some classes, onto those of the tiles before.
    Backward,
    /// dq and dk of a slab, as a member has them.
    Emulated,
    /// The comparison of a span of a captured plane.
    Plane,
}

/// Rows of a tensor whose leading dimensions are flattened, in runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RowsOf {
    /// As JSON.
    pub(super) key: String,
    #[serde(deserialize_with = "crate::parcel::ranges")]
    pub(super) runs: Vec<Range<usize>>,
}

impl RowsOf {
    /// Some rows, ascending or not, as runs.
    pub(super) fn new(key: String, rows: impl IntoIterator<Item = usize>) -> RowsOf {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in rows {
            match runs.last_mut() {
                Some(run) if run.end == row => run.end += 1,
                _ => runs.push(row..row + 1),
            }
        }
        RowsOf { key, runs }
    }
}

/// A part of a head: where its matrices lie, and the rest of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) q: Option<RowsOf>,
    /// One run of classes, in the layout of the formulas.
    pub(super) k: Option<RowsOf>,
    pub(super) given: Option<RowsOf>,
    /// Rows of k.
    pub(super) classes: usize,
    pub(super) valid: usize,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) labels: Vec<u32>,
    pub(super) bias: Option<Vec<f64>>,
    pub(super) copies: Option<Vec<f64>>,
    /// True where what is given is a logit, and nothing is done to it.
    pub(super) plain: bool,
}

/// Upstream of a part's tokens: lse, and the cotangents of lse, label and every logit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tokens {
    #[serde(with = "crate::parcel::numbers")]
    pub(super) lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) g_lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) g_label: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) g_smooth: Vec<f64>,
}

/// A span of a captured plane, and what its bounds are made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::replay) struct PlanePart {
    /// Place of the stage among all.
    pub(in crate::replay) stage: usize,
    #[serde(deserialize_with = "crate::parcel::range")]
    pub(in crate::replay) tokens: Range<usize>,
    pub(in crate::replay) microbatch: Option<u32>,
    #[serde(with = "crate::parcel::numbers")]
    pub(in crate::replay) spread: Vec<f64>,
    pub(in crate::replay) alike: Vec<(f64, f64)>,
    #[serde(with = "crate::parcel::numbers")]
    pub(in crate::replay) scale: Vec<f64>,
    /// Rows that are judged, of those of `tokens`.
    pub(in crate::replay) sure: Vec<usize>,
    /// The captured tensor, as JSON.
    pub(in crate::replay) key: String,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) session: Session,
    pub(super) kind: Kind,
    pub(super) part: Part,
    /// Of the members, for what a member makes of it.
    pub(super) member: usize,
    /// The first token among those of the unit.
    pub(super) first: usize,
    pub(super) tokens: Tokens,
    pub(super) plane: Option<PlanePart>,
}

/// What a member makes of a slab, block by block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Emulated {
    pub(super) blocks: Vec<EmulatedBlock>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) dq_lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) dq_label: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) dq: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct EmulatedBlock {
    #[serde(deserialize_with = "crate::parcel::range")]
    rows: Range<usize>,
    #[serde(with = "crate::parcel::numbers")]
    dk_lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    dk_label: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    dk: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    dbias: Vec<f64>,
}

impl EmulatedBlock {
    pub(super) fn of(block: &DkParts<'_>) -> EmulatedBlock {
        EmulatedBlock {
            rows: block.rows.clone(),
            dk_lse: block.dk_lse.to_vec(),
            dk_label: block.dk_label.to_vec(),
            dk: block.dk.to_vec(),
            dbias: block.dbias.to_vec(),
        }
    }
}

impl Emulated {
    /// Lends the blocks out as the kernel did, and gives dq.
    pub(super) fn lend(self, on_dk: &mut dyn FnMut(DkParts<'_>)) -> DqParts {
        for EmulatedBlock { rows, dk_lse, dk_label, dk, dbias } in &self.blocks {
            on_dk(DkParts { rows: rows.clone(), dk_lse, dk_label, dk, dbias });
        }
        DqParts { dq_lse: self.dq_lse, dq_label: self.dq_label, dq: self.dq }
    }
}
