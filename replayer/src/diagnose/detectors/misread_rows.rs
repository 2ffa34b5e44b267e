//! Which rows of q or k the softmax path read. For a few tokens, the lse or dq that each map of
//! rows would give is compared with the captured one.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::block_sizes::distinct;
use super::captured::Values;
use super::row_maps::Map;
use super::single_tokens::{Direct, alike, distance, dot, energy};
use super::token_runs::of_ranks;
use crate::assemble::Row;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::OtherLse;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::inputs::{Misread, Scores};
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::kernels::matrix::IGNORED;
use crate::replay::world::{Pass, World};

/// About how many tokens are compared.
const COMPARED: usize = 4;
/// How near an lse must be, relatively, to be worth a trial.
pub(super) const NEAR: f64 = 0.01;

/// The operand whose rows are read wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Tokens' hidden states.
    Q,
    /// Rows of the unembedding.
    K,
}

/// The passes that read the wrong rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Forward and backward.
    Both,
    /// The forward alone: the backward then starts from a wrong lse, and is right otherwise.
    Forward,
    /// The backward alone, from the right lse.
    Backward,
}

impl Passes {
    fn name(self) -> &'static str {
        match self {
            Passes::Both => "forward and backward",
            Passes::Forward => "forward",
            Passes::Backward => "backward",
        }
    }
}

/// A few failing tokens and their captured values.
pub struct FailingTokens<'a> {
    pub(super) direct: Direct<'a>,
    pub(super) inputs: &'a MicrobatchInputs,
    pub(super) tokens: Vec<usize>,
    pub(super) lse: Option<Captured>,
    /// Captured label logits, where they fail, with their tokens.
    pub(super) labels: Vec<(usize, f64)>,
    pub(super) dq: Option<(Captured, Key)>,
}

impl<'a> FailingTokens<'a> {
    /// Tokens of the first microbatch whose lse or dq fails; `None` where neither fails anywhere.
    pub fn new(evidence: &'a Evidence<'_>) -> Option<FailingTokens<'a>> {
        let fails = |stage: Stage, mb: Option<Microbatch>| {
            let mut keys = evidence.failing.iter();
            keys.find(|key| key.stage == stage && key.microbatch == mb).copied()
        };
        for inputs in evidence.inputs {
            let mb = inputs.microbatch;
            let lse = fails(Stage::Lse, mb).and_then(|key| evidence.captured(key));
            let of_dq = fails(Stage::Dq, mb).or(fails(Stage::DqLse, mb));
            let dq = of_dq.and_then(|key| Some((evidence.captured(key)?, key)));
            let Some(direct) = Direct::new(evidence, inputs) else { continue };
            if lse.is_none() && dq.is_none() {
                continue;
            }
            let tokens = wrong(evidence, inputs, (&lse, &dq));
            if !tokens.is_empty() {
                let labels = fails(Stage::LabelLogits, mb).and_then(|key| evidence.captured(key));
                let labels = labels.map_or(Vec::new(), |values| distinct(inputs, &values));
                return Some(FailingTokens { direct, inputs, tokens, lse, labels, dq });
            }
        }
        None
    }

    /// Whether the captured values of the tokens are those that reading these rows gives.
    pub fn fits(
        &self,
        evidence: &Evidence<'_>,
        (operand, rows): (Operand, &[Row]),
        passes: Passes,
    ) -> bool {
        if self.lse.is_none() && passes == Passes::Forward {
            return false; // seen in dq alone it is another lse, and needs no map
        }
        let moved = |&&t: &&usize| operand == Operand::K || rows[t] != Row::From(t);
        let moved_tokens: Vec<usize> = self.tokens.iter().filter(moved).copied().collect();
        !moved_tokens.is_empty()
            && moved_tokens.iter().all(|&t| self.token_fits(evidence, t, (operand, rows), passes))
    }

    fn token_fits(
        &self,
        evidence: &Evidence<'_>,
        t: usize,
        (operand, rows): (Operand, &[Row]),
        passes: Passes,
    ) -> bool {
        let (q, k): (Row, &(dyn Fn(usize) -> Row + Sync)) = match operand {
            Operand::Q => (rows[t], &Row::From),
            Operand::K => (Row::From(t), &|v| rows[v]),
        };
        let row = self.direct.against(&self.direct.q(q), k);
        if let (Some(lse), true) = (&self.lse, passes != Passes::Backward) {
            return (row.lse - lse.values[t]).abs() <= NEAR * (1.0 + row.lse.abs());
        }
        let Some((captured, key)) = &self.dq else { return false };
        let reference = evidence.reference();
        let declared_lse = reference.lse.get(&self.inputs.microbatch).map(|lse| lse[t]);
        let lse = if passes == Passes::Backward { declared_lse } else { Some(row.lse) };
        let cotangents = reference.cotangents.get(&self.inputs.microbatch);
        let Some((token_cotangents, lse)) =
            cotangents.and_then(|cotangents| Some((*cotangents.get(&t)?, lse?)))
        else {
            return false;
        };
        let width = captured.columns;
        let mut dense = vec![0.0; width];
        let q_row = self.direct.q(q);
        for (v, &z) in row.logits.iter().enumerate() {
            let k_row = self.direct.k(k(v));
            let slope = self.direct.logit(dot(&q_row, &k_row), v).1;
            let entry = slope * token_cotangents.dense(probability(z, lse));
            dense.iter_mut().zip(&k_row).for_each(|(sum, k)| *sum += entry * k);
        }
        if key.stage == Stage::Dq && self.inputs.labels[t] != IGNORED {
            let label = self.inputs.labels[t] as usize;
            // The label's row of k may be read rightly, or from the same wrong place as the others.
            return [Row::From(label), k(label)].into_iter().any(|row| {
                let k_row = self.direct.k(row);
                let slope = self.direct.logit(dot(&q_row, &k_row), label).1;
                let sum = dense
                    .iter()
                    .zip(&k_row)
                    .map(|(sum, k)| sum + slope * token_cotangents.label * k);
                alike(captured.row(t), &sum.collect::<Vec<f64>>())
            });
        }
        alike(captured.row(t), &dense)
    }
}

/// The captured values of a comparison.
type Captured = std::rc::Rc<Values>;

/// A few tokens that count in the loss and clearly fail, evenly spaced over the batch.
fn wrong(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    (lse, dq): (&Option<Captured>, &Option<(Captured, Key)>),
) -> Vec<usize> {
    let reference = evidence.reference();
    let counts = |t: &usize| inputs.labels[*t] != IGNORED && inputs.weights[*t] != 0.0;
    let mut off: Vec<(f64, usize)> = match (lse, dq) {
        (Some(lse), _) => {
            let Some(wanted) = reference.forward_lse.get(&inputs.microbatch) else {
                return Vec::new();
            };
            let error = |t: usize| ((lse.values[t] - wanted[t]).abs(), t);
            (0..inputs.tokens()).filter(counts).map(error).collect()
        }
        (None, Some((captured, key))) => {
            let Some(table) = reference.stages.get(key) else { return Vec::new() };
            let error = |(&t, row): (&usize, &Vec<f64>)| {
                let norm = energy(row).max(f64::MIN_POSITIVE);
                (distance(captured.row(t), row) / norm, t)
            };
            table.iter().filter(|(t, _)| counts(t)).map(error).collect()
        }
        _ => Vec::new(),
    };
    off.retain(|(off, _)| off.is_finite() && *off > 1e-3);
    off.sort_by_key(|&(_, t)| t);
    // Evenly spaced, and the last one always: rows that lie beyond the end are read for the last
    // tokens.
    let step = off.len().div_ceil(COMPARED).max(1);
    let mut some: Vec<usize> = off.iter().step_by(step).map(|&(_, t)| t).collect();
    some.extend(off.last().map(|&(_, t)| t));
    some.dedup();
    some
}

/// The hypotheses of a map of rows that fit the tokens: one for each set of passes, and for what
/// else reads the wrong rows.
pub fn hypotheses(
    evidence: &Evidence<'_>,
    failing_tokens: &FailingTokens<'_>,
    (operand, map): (Operand, Map),
    parameters: &[(&'static str, String)],
) -> Vec<Hypothesis> {
    let rows_of = |inputs: &MicrobatchInputs| {
        let n = match operand {
            Operand::Q => return map.in_runs(inputs.tokens(), &of_ranks(evidence.step, inputs)),
            Operand::K => inputs.head(evidence.step)?.k.rows,
        };
        map.rows(n)
    };
    let Some(rows) = rows_of(failing_tokens.inputs) else { return Vec::new() };
    let mut hypotheses = Vec::new();
    for passes in [Passes::Both, Passes::Backward, Passes::Forward] {
        if evidence.spend(0) || !failing_tokens.fits(evidence, (operand, &rows), passes) {
            continue;
        }
        hypotheses.extend(worlds(evidence, operand, passes, &rows_of, parameters));
    }
    hypotheses
}

/// The hypotheses for known wrong rows: one for each extent to which they are read (see [`Reach`]).
pub fn worlds(
    evidence: &Evidence<'_>,
    operand: Operand,
    passes: Passes,
    rows_of: &dyn Fn(&MicrobatchInputs) -> Option<Vec<Row>>,
    parameters: &[(&'static str, String)],
) -> Vec<Hypothesis> {
    let rows_by_microbatch =
        |inputs: &MicrobatchInputs| Some((inputs.microbatch, rows_of(inputs)?));
    let Some(rows) =
        evidence.inputs.iter().map(rows_by_microbatch).collect::<Option<BTreeMap<_, _>>>()
    else {
        return Vec::new();
    };
    let world = |reach: Reach| Elsewhere { operand, rows: rows.clone(), reach, lse: None };
    let named = |what: &str| {
        let mut all = parameters.to_vec();
        all.push(("passes", passes.name().to_string()));
        all.push(("also read there", what.to_string()));
        all
    };
    let reaches = [
        (Reach::All, "labels' rows and products"),
        (Reach::Products, "products"),
        (Reach::Scores, "nothing else"),
    ];
    let mut hypotheses = Vec::new();
    match passes {
        Passes::Forward => {
            let wrong = world(Reach::Scores);
            let seen = super::reference::reference(evidence, Some(&wrong), evidence.rows.as_ref());
            let captured = crate::diagnose::causes::tail_tile_unmasked::captured_lse(evidence);
            let world = OtherLse { lse: seen.forward_lse, captured };
            hypotheses.push(Hypothesis::new(world, named("nothing else")));
        }
        Passes::Both | Passes::Backward => {
            let lse = (passes == Passes::Backward).then(|| evidence.reference().lse.clone());
            for (reach, what) in reaches {
                let world = Elsewhere { lse: lse.clone(), ..world(reach) };
                hypotheses.push(Hypothesis::new(world, named(what)));
            }
        }
    }
    hypotheses
}

/// What else reads the wrong rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Everything, the label's row included: the operand as a whole is another one.
    All,
    /// The logits, and the product that gives the other operand's gradient.
    Products,
    /// The logits alone.
    Scores,
}

/// Rows of an operand are read from other places.
pub struct Elsewhere {
    /// Which operand.
    pub operand: Operand,
    /// For each row, the row that is read instead, by microbatch.
    pub rows: BTreeMap<Option<Microbatch>, Vec<Row>>,
    /// What reads the wrong rows.
    pub reach: Reach,
    /// The lse that the backward starts from, where the forward read the right rows.
    pub lse: Option<BTreeMap<Option<Microbatch>, Vec<f64>>>,
}

impl World for Elsewhere {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        let Some(rows) = self.rows.get(&inputs.microbatch) else { return };
        let Scores::Product { q, k } = &mut inputs.scores else { return };
        let operand = if self.operand == Operand::Q { q } else { k };
        let Some(read) = operand.with_rows(&|row| rows[row]) else { return };
        if self.reach == Reach::All {
            *operand = read;
            return;
        }
        let product = self.reach == Reach::Products;
        inputs.reads = Some(match self.operand {
            Operand::Q => Misread { q: Some((read, product)), k: None, scores: None },
            Operand::K => Misread { q: None, k: Some((read, product)), scores: None },
        });
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let lse_read =
            self.lse.as_ref().and_then(|by_microbatch| by_microbatch.get(&inputs.microbatch));
        if let Some(lse_read) = lse_read.filter(|_| pass == Pass::Backward) {
            lse.copy_from_slice(lse_read);
        }
    }

    fn has_nan(&self) -> bool {
        self.rows.values().flatten().any(|row| *row == Row::Nans)
    }
}
