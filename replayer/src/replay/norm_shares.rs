//! The norm of the gradients, and how the gap between two norms is shared out.

use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};
use rayon::prelude::*;
use serde::Serialize;

use crate::head::HeadStep;
use crate::head::step::{StepError, numbers};
use crate::kernels::matrix::Matrix;

/// Rows and tiles that are named; the rest is one share.
const NAMED: usize = 8;

/// One part of a gap.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// `tensor`, `rank`, `microbatch`, `rows` (by label hits), `row` or `vocabulary`.
    /// The shares of one kind add up to the gap.
    pub kind: &'static str,
    /// Which one.
    pub of: String,
    /// Its part of the gap.
    pub gap: f64,
    /// The same over the gap.
    pub share: f64,
}

/// The captured grad_norm beside what it would be with the reference dk.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GradNorm {
    /// As the job reported it.
    pub captured: Option<f64>,
    /// With the captured dk replaced by the reference, all else unchanged.
    pub reference: Option<f64>,
    /// captured - reference.
    pub gap: Option<f64>,
    /// Norm of the captured dk.
    pub dk_captured: Option<f64>,
    /// Norm of the reference dk.
    pub dk_reference: Option<f64>,
    /// How far from the reference's the norm of dk is when its policy is emulated:
    /// what rounding alone explains of the gap.
    pub floor: Option<f64>,
    /// Norm over all dumped gradients, in f64.
    pub recomputed: Option<f64>,
    /// The gradients that it is taken over.
    pub gradients: Vec<String>,
    /// What the reported norm says about itself, in one sentence.
    pub reported_as: Option<String>,
    /// Who the gap belongs to.
    pub shares: Vec<Share>,
}

/// Two gradients of one shape whose norms are apart.
pub(super) struct Cut<'a> {
    pub(super) ours: Matrix<'a>,
    pub(super) theirs: &'a [f64],
    /// Sum of the two norms.
    pub(super) norms: f64,
    pub(super) gap: f64,
}

impl Cut<'_> {
    fn share(&self, kind: &'static str, name: String, gap: f64) -> Share {
        let share = if self.gap == 0.0 { 0.0 } else { gap / self.gap };
        Share { kind, of: name, gap, share }
    }

    /// The elements of both.
    pub(super) fn both(&self) -> impl Iterator<Item = (f64, f64)> {
        self.theirs.iter().enumerate().map(|(at, &theirs)| (self.ours.get_f64(at), theirs))
    }

    pub(super) fn rows(&self) -> Vec<f64> {
        let columns = self.ours.cols.max(1);
        let of_row = |(row, theirs): (usize, &[f64])| {
            let pairs = theirs.iter().enumerate();
            let each = pairs.map(|(column, r)| (self.ours.get_f64(row * columns + column), r));
            each.map(|(c, r)| (c - r) * (c + r)).sum::<f64>() / self.norms
        };
        self.theirs.par_chunks(columns).enumerate().map(of_row).collect()
    }

    /// Shares of rows, and of tiles of so many rows.
    pub(super) fn by_place(&self, hits: &[u32], tile: usize) -> Vec<Share> {
        let rows = self.rows();
        let mut shares = self.by_rows(hits, &rows);
        shares.extend(self.by_vocabulary(tile, &rows));
        shares
    }

    /// By how often a row is a label, and the rows of the largest shares.
    fn by_rows(&self, hits: &[u32], rows: &[f64]) -> Vec<Share> {
        let mut classes: Vec<f64> = Vec::new();
        for (&n, gap) in hits.iter().zip(rows) {
            let class = (u32::BITS - n.leading_zeros()) as usize;
            classes.resize(classes.len().max(class + 1), 0.0);
            classes[class] += gap;
        }
        let name = |class: usize| match class {
            0 => "0 label hits".to_string(),
            1 => "1 label hit".to_string(),
            _ => format!("{} to {} label hits", 1u32 << (class - 1), (1u64 << class) - 1),
        };
        let classes = classes.iter().enumerate();
        let mut shares: Vec<Share> =
            classes.map(|(class, &gap)| self.share("rows", name(class), gap)).collect();
        if hits.is_empty() {
            shares.clear();
        }
        let rows = rows.iter().enumerate().map(|(row, &gap)| (format!("row {row}"), gap));
        shares.extend(self.largest("row", rows.collect()));
        shares
    }

    fn by_vocabulary(&self, tile: usize, rows: &[f64]) -> Vec<Share> {
        let tiles = rows.chunks(tile.max(1)).enumerate();
        let name = |at: usize, n: usize| format!("[{}:{}]", at * tile, at * tile + n);
        let tiles = tiles.map(|(at, rows)| (name(at, rows.len()), rows.iter().sum())).collect();
        self.largest("vocabulary", tiles)
    }

    /// The largest shares, and all others as one: they add up to the gap still.
    fn largest(&self, kind: &'static str, mut all: Vec<(String, f64)>) -> Vec<Share> {
        all.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        let rest: f64 = all.iter().skip(NAMED).map(|(_, gap)| gap).sum();
        let others = all.len().saturating_sub(NAMED);
        all.truncate(NAMED);
        if others > 0 {
            all.push((format!("{others} others"), rest));
        }
        all.into_iter().map(|(of, gap)| self.share(kind, of, gap)).collect()
    }

    /// One share a name; what the addends leave of the gap is the reduction's.
    pub(super) fn grouped(
        &self,
        kind: &'static str,
        parts: impl Iterator<Item = (String, f64)>,
    ) -> Vec<Share> {
        let mut groups: Vec<(String, f64)> = Vec::new();
        for (name, gap) in parts {
            match groups.iter_mut().find(|(of, _)| *of == name) {
                Some((_, total)) => *total += gap,
                None => groups.push((name, gap)),
            }
        }
        if groups.len() < 2 {
            return Vec::new();
        }
        let rest = self.gap - groups.iter().map(|(_, gap)| gap).sum::<f64>();
        groups.push(("the reduction".into(), rest));
        groups.into_iter().map(|(of, gap)| self.share(kind, of, gap)).collect()
    }
}

/// The norm that the job reported.
pub(super) fn reported(step: &HeadStep<'_>) -> Result<Option<f64>, StepError> {
    let Some(key) = step.find(Role::GradNorm, None::<Microbatch>) else { return Ok(None) };
    let values = numbers(&step.assemble(key)?);
    Ok(values.filter(|values| values.len() == 1).map(|values| values[0]))
}

/// Gradients of parameters as the optimizer gets them: the head's own, and every
/// tensor without a role that was captured after the reduction.
pub(super) fn gradients<'s>(step: &'s HeadStep<'_>) -> Vec<&'s TensorKey> {
    let is_gradient = |(key, info): &(&TensorKey, &crate::dump::TensorInfo)| {
        let last = key.microbatch.is_none() && info.partial.is_none();
        let of_head = matches!(info.role, Some(Role::Dk | Role::Dbias));
        let of_others = info.role.is_none() && key.when == Some(When::PostReduce);
        last && info.dtype.is_float() && (of_head && key.when != Some(When::PreReduce) || of_others)
    };
    step.tensors.iter().filter(is_gradient).map(|(key, _)| key).collect()
}
