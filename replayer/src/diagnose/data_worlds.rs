//! Worlds that several causes share, in which tensors hold other data: other labels, tokens in
//! other places, rows with other values.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::detectors::shown_labels::NONE;
use super::evidence::{Evidence, Key};
use super::worlds::divisor;
use crate::assemble::Row;
use crate::head::inputs::{Misread, Scores};
use crate::head::{HeadStep, MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::{Expectation, Pass, Read, StagePlace, UnitTokens, World};

/// The job used other labels than the recorded ones, `[T]` by microbatch.
#[derive(Default)]
pub struct Relabelled {
    /// The labels. [`IGNORED`] for a token that takes no part; [`NONE`] for one that keeps its
    /// recorded label but lacks the label's part of its gradient.
    pub labels: BTreeMap<Option<Microbatch>, Vec<u32>>,
    /// Upstream gradients to keep: those of a job that divides by the count of the recorded labels,
    /// where the loss does not show it.
    pub g: Option<BTreeMap<Option<Microbatch>, Vec<f64>>>,
    /// The divisors by the recorded labels, where the loss and the backward are divided by those.
    pub counts: Option<RecordedCounts>,
    /// Weights that were moved with the labels, `[T]`; empty where none were.
    pub weights: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

/// The divisor of each token's loss when the recorded labels are counted, whatever labels a world
/// puts in their place.
#[derive(Clone)]
pub struct RecordedCounts(BTreeMap<Option<Microbatch>, Vec<(Unit, f64)>>);

impl RecordedCounts {
    /// The divisors of the declared head.
    pub fn new(evidence: &Evidence<'_>) -> RecordedCounts {
        let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
        let of_microbatch = |inputs: &MicrobatchInputs| {
            Some((inputs.microbatch, evidence.step.denominators(&all, inputs).ok()?))
        };
        RecordedCounts(evidence.inputs.iter().filter_map(of_microbatch).collect())
    }

    /// The groups of a microbatch's tokens, each with its divisor.
    pub fn of(&self, microbatch: Option<Microbatch>) -> Option<&Vec<(Unit, f64)>> {
        self.0.get(&microbatch)
    }
}

impl World for Relabelled {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if let Some(labels) = self.labels.get(&inputs.microbatch) {
            let read = inputs.labels.iter_mut().zip(labels);
            read.filter(|(_, label)| **label != NONE).for_each(|(to, label)| *to = *label);
        }
        if let Some(weights) = self.weights.get(&inputs.microbatch) {
            inputs.weights.clone_from(weights);
        }
    }

    fn denominators(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        inputs: &MicrobatchInputs,
        denominators: &mut Vec<(Unit, f64)>,
    ) {
        let recorded = self.counts.as_ref().and_then(|counts| counts.of(inputs.microbatch));
        let Some((recorded, here)) = recorded.zip(step.denominators(all, inputs).ok()) else {
            return;
        };
        // Multiplied as a ratio, because a background world may have replaced the declared divisor.
        for (unit, n) in denominators {
            let ratio = |&row: &usize| Some(divisor(recorded, row)? / divisor(&here, row)?);
            let ratio = unit.rows.first().and_then(ratio);
            *n *= ratio.filter(|ratio| ratio.is_finite()).unwrap_or(1.0);
        }
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        let Some(labels) = self.labels.get(&tokens.inputs.microbatch) else { return };
        let missing = label.iter_mut().zip(tokens.rows).filter(|(_, row)| labels[**row] == NONE);
        missing.for_each(|(to, _)| *to = 0.0);
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        // A label that no rank finds in its shard of the vocabulary gives a logit of zero: each
        // rank adds 0.
        let labels = self.labels.get(&expectation.place.microbatch);
        let Some(labels) = labels.filter(|_| expectation.place.stage == Stage::LabelLogits) else {
            return;
        };
        let missing = expectation
            .values
            .iter_mut()
            .zip(expectation.rows)
            .filter(|(_, row)| labels[**row] == NONE);
        missing.for_each(|(to, _)| *to = 0.0);
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        let Some(kept) = self.g.as_ref().and_then(|g| g.get(&inputs.microbatch)) else { return };
        let share = |&t: &usize| kept[t] != 0.0 && g[t] != 0.0;
        let ratio = (0..g.len()).find(share).map_or(1.0, |t| kept[t] / g[t]);
        for (t, to) in g.iter_mut().enumerate() {
            *to = match inputs.labels[t] {
                IGNORED => 0.0,
                _ if kept[t] != 0.0 => kept[t],
                _ => *to * ratio,
            };
        }
    }
}

/// How often each token's loss counts, `[T]` by microbatch.
#[derive(Default)]
pub struct CountedLosses(pub BTreeMap<Option<Microbatch>, Vec<f64>>);

impl World for CountedLosses {
    fn nll(&self, inputs: &MicrobatchInputs, _read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        if let Some(often) = self.0.get(&inputs.microbatch) {
            nll.iter_mut().zip(often).for_each(|(nll, times)| *nll *= times);
        }
        Vec::new()
    }
}

/// Tokens are permuted within their microbatch: q, label, weight and cotangent together.
pub struct MovedTokens {
    /// For each place, the token that stands there, by microbatch.
    pub from: BTreeMap<Option<Microbatch>, Vec<usize>>,
}

impl World for MovedTokens {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        let Some(from) = self.from.get(&inputs.microbatch) else { return };
        if let Scores::Product { q, .. } = &mut inputs.scores
            && let Some(moved) = q.with_rows(&|row| Row::From(from[row]))
        {
            *q = moved;
        }
        let all = &mut *inputs;
        all.labels = from.iter().map(|&t| all.labels[t]).collect();
        for values in [&mut all.weights, &mut all.cotangent, &mut all.copies] {
            *values = from.iter().map(|&t| values[t]).collect();
        }
    }
}

/// Tokens are read from the same places of another microbatch.
pub struct ReadFromElsewhere {
    /// Where each microbatch reads its tokens from.
    pub from: BTreeMap<Option<Microbatch>, Elsewhere>,
}

/// The microbatch that tokens are read from, and which tokens; all of them where none are named.
pub type Elsewhere = (Option<Microbatch>, Option<Vec<usize>>);

impl World for ReadFromElsewhere {
    fn inputs(&self, step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        let Some((other, tokens)) = self.from.get(&inputs.microbatch) else { return };
        let Ok(other) = step.inputs(*other) else { return };
        if other.tokens() != inputs.tokens() {
            return;
        }
        let Some(tokens) = tokens else {
            let (microbatch, rows_key) = (inputs.microbatch, inputs.rows_key.clone());
            *inputs = MicrobatchInputs { microbatch, rows_key, ..other };
            return;
        };
        use Scores::{Logits, Product};
        let rows = match (&mut inputs.scores, &other.scores) {
            (Product { q, .. }, Product { q: other, .. }) | (Logits(q), Logits(other)) => {
                (q, other)
            }
            _ => return,
        };
        let Some(mixed) = rows.0.with_rows_of(rows.1, tokens) else { return };
        *rows.0 = mixed;
        for &t in tokens {
            inputs.labels[t] = other.labels[t];
            inputs.weights[t] = other.weights[t];
            inputs.cotangent[t] = other.cotangent[t];
            inputs.copies[t] = other.copies[t];
        }
    }
}

/// Rows of dq hold the gradients of other tokens, zeros or NaN.
pub struct MovedRows {
    /// What each row holds, by microbatch.
    pub from: BTreeMap<Option<Microbatch>, Vec<Row>>,
}

impl World for MovedRows {
    fn token(&self, place: StagePlace, token: usize) -> usize {
        match self.from.get(&place.microbatch).map(|from| from[token]) {
            Some(Row::From(from)) => from,
            _ => token,
        }
    }

    fn has_nan(&self) -> bool {
        self.from.values().flatten().any(|row| *row == Row::Nans)
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        if !expectation.place.stage.is_of_q() {
            return;
        }
        let Some(from) = self.from.get(&expectation.place.microbatch) else { return };
        for (&row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            match from[row] {
                Row::From(_) => {}
                Row::Zeros => values.fill(0.0),
                Row::Nans => values.fill(f64::NAN),
            }
        }
    }
}

/// Given values replace some elements of the reference; all others are as declared and must be
/// right.
#[derive(Clone, Default)]
pub struct ReplacedValues {
    /// Columns with their values, by row, by comparison.
    pub rows_of_key: BTreeMap<Key, BTreeMap<usize, Vec<(usize, f64)>>>,
    /// Stages whose captured values later stages of the job did not read.
    pub distrusts: Vec<Stage>,
}

impl ReplacedValues {
    /// The same, with whole rows of a comparison replaced too.
    pub fn rows(
        mut self,
        key: Key,
        rows: impl Iterator<Item = (usize, Vec<f64>)>,
    ) -> ReplacedValues {
        let table = self.rows_of_key.entry(key).or_default();
        for (row, values) in rows {
            table.insert(row, values.into_iter().enumerate().collect());
        }
        self
    }
}

impl World for ReplacedValues {
    fn has_nan(&self) -> bool {
        self.rows_of_key.values().flat_map(BTreeMap::values).flatten().any(|(_, x)| !x.is_finite())
    }

    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        !self.distrusts.contains(&stage)
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        let Some(table) = self.rows_of_key.get(&key) else { return };
        for (row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            for &(column, x) in table.get(row).into_iter().flatten() {
                values[column] = if x.is_finite() { x } else { f64::NAN };
            }
        }
    }
}

/// The job had another lse than declared.
pub struct OtherLse {
    /// What the forward gives, `[T]` by microbatch.
    pub lse: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// Microbatches whose captured lse the backward starts from.
    pub captured: Vec<Option<Microbatch>>,
}

impl World for OtherLse {
    fn has_nan(&self) -> bool {
        self.lse.values().flatten().any(|lse| !lse.is_finite())
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let taken = pass == Pass::Backward && self.captured.contains(&inputs.microbatch);
        if let Some(other) = self.lse.get(&inputs.microbatch).filter(|_| !taken) {
            lse.copy_from_slice(other);
        }
    }
}

/// Rows of dlogits are those of other tokens, and dq and dk are computed from them. Only the row of
/// q that dk multiplies with a row of dlogits is the token's own.
pub struct StaleRows {
    /// What each row holds, by microbatch.
    pub from: BTreeMap<Option<Microbatch>, Vec<Row>>,
    /// Upstream gradients as declared, `[T]` by microbatch: a stale row has those of its source.
    pub g: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl StaleRows {
    fn source(&self, microbatch: Option<Microbatch>, token: usize) -> usize {
        match self.from.get(&microbatch).map(|from| from[token]) {
            Some(Row::From(from)) => from,
            _ => token,
        }
    }
}

impl World for StaleRows {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        let mb = inputs.microbatch;
        let Scores::Product { q, .. } = &inputs.scores else { return };
        if let Some(read) = q.with_rows(&|row| Row::From(self.source(mb, row))) {
            inputs.reads = Some(Misread { q: Some((read, false)), k: None, scores: None });
        }
        let source = |t: usize| self.source(mb, t);
        inputs.labels = (0..inputs.labels.len()).map(|t| inputs.labels[source(t)]).collect();
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if pass == Pass::Backward {
            let declared = lse.to_vec();
            let lse_of = |t: usize| declared[self.source(inputs.microbatch, t)];
            lse.iter_mut().enumerate().for_each(|(t, lse)| *lse = lse_of(t));
        }
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        let Some(upstream) = self.g.get(&inputs.microbatch) else { return };
        let g_of = |t: usize| upstream[self.source(inputs.microbatch, t)];
        g.iter_mut().enumerate().for_each(|(t, g)| *g = g_of(t));
    }
}
