//! What a replay must compute, known before anything is computed.

use std::collections::BTreeSet;
use std::ops::Range;

use backtape::role::Role;

use super::maps::Draw;
use super::reference_dk::SumsWithoutAddends;
use crate::dump::TensorInfo;
use crate::head::{HeadStep, Roundings, Stage};
use crate::kernels::Tiles;

/// How much of dq and dk is recomputed. What costs one GEMM or less is judged on all
/// tokens, whatever the effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// All of them, element by element.
    #[default]
    All,
    /// None: they are checked with so many random probes.
    Probes {
        /// K of them.
        count: usize,
        /// What they are drawn from.
        seed: u64,
    },
    /// Rows of dq of a stratified sample of so many tokens; dk is estimated from them.
    Tokens {
        /// Of each microbatch.
        count: usize,
        /// What they are drawn from.
        seed: u64,
    },
}

/// What one replay must compute.
pub(crate) struct Plan<'a> {
    /// The step of the dump that is replayed.
    pub(super) step: &'a HeadStep<'a>,
    /// The stages that are compared.
    pub(super) wanted: BTreeSet<Stage>,
    /// How the job may round, as far as its declaration says.
    pub(super) roundings: Roundings,
    /// How the reference cuts the plane of tokens x classes.
    pub(super) tiles: Tiles,
    /// Comparisons that share the false alarms of the report.
    pub(super) comparisons: usize,
    pub(super) effort: Effort,
    /// Whether entries of dlogits are rounded with the label's part in them.
    pub(super) whole_entries: bool,
    /// Whose sums are judged, where dk was recorded summed and not in the addends of the sum.
    pub(super) sums_without_addends: Option<SumsWithoutAddends>,
    /// What is to be drawn, if anything is.
    pub(super) draw: Option<Draw>,
    /// True for a trial of a hypothesis: no floors, no norms.
    pub(super) trial: bool,
}

/// Bytes of one f64 buffer over a slab of k's rows.
const SLAB_BYTES: usize = 32 << 20;
/// The same where a declared policy's sums over the vocabulary must not be cut.
const WHOLE_BYTES: usize = 1 << 30;

impl Plan<'_> {
    /// Whether a stage is compared.
    pub(super) fn wants(&self, stage: Stage) -> bool {
        self.wanted.contains(&stage)
    }

    /// The largest entropy that a token's probabilities can have, `ln K` of the most classes, and 1
    /// at least.
    pub(super) fn largest_entropy(&self) -> f64 {
        let classes = |info: &TensorInfo| match info.role {
            Some(Role::K) => info.shape.first().copied(),
            Some(Role::Logits) => info.shape.last().copied(),
            _ => None,
        };
        let most = self.step.tensors.values().filter_map(classes).max();
        most.map_or(1.0, |classes| (classes as f64).ln().max(1.0))
    }

    /// The slabs of a vocabulary, in order.
    pub(super) fn slabs(&self, d: usize, v: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.slab_rows(d, v);
        (0..v).step_by(rows).map(move |start| start..(start + rows).min(v))
    }

    /// Rows of k in one slab. A declared order of summation is emulated over the
    /// whole vocabulary where that fits: cut in slabs, its sums would be others.
    pub(super) fn slab_rows(&self, d: usize, v: usize) -> usize {
        let exact = self.roundings.declared || self.roundings.swamps();
        let bytes = if exact && v * d * 8 <= WHOLE_BYTES { WHOLE_BYTES } else { SLAB_BYTES };
        (bytes / (8 * d.max(1))).max(self.tiles.vocab)
    }

    /// True when dq and dk are recomputed over all tokens.
    pub(super) fn recomputes(&self) -> bool {
        match self.effort {
            Effort::All => true,
            Effort::Probes { .. } => self.roundings.swamps(),
            Effort::Tokens { .. } => false,
        }
    }
}
