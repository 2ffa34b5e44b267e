//! A hypothesis that holds in some microbatches, or on some ranks, alone.
//!
//! What a hypothesis says of a step it says of all its tokens. Where what was captured is wrong in
//! some places only, it is tried once more there: a sum over all of them is then explained, too.

use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use super::cause::Hypothesis;
use super::detectors::places::Places;
use super::detectors::reference::{Reference, reference};
use super::evidence::{Evidence, Key};
use super::rearranged::RecordedCounts;
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Stage, Unit};
use crate::kernels::Tiles;
use crate::kernels::policy::Policy;
use crate::replay::world::Supplied;
use crate::replay::world::{At, Expectation, Pass, Read, UnitName, UnitTokens, World};

/// Where it holds, among the parameters.
const WHERE: &str = "only in";

/// A hypothesis in these places alone, wherever it said that it holds.
pub(super) fn limited(of: Hypothesis, evidence: &Evidence<'_>, within: &Arc<Within>) -> Hypothesis {
    let places = &within.places;
    let declared = &evidence.step.options;
    let mut options = declared.clone();
    of.world.options(&mut options);
    // Options, and what is said of tokens, are those of all classes: what they make of each token
    // and class is heard and copied.
    let whole = options == *declared && (!places.are_classes() || of.emulates(evidence));
    let inner = match whole {
        true => of.world.clone(),
        false => Arc::new(Heard::everything(evidence, of.world.clone())),
    };
    let mut parameters = of.parameters;
    parameters.retain(|(name, _)| *name != WHERE);
    parameters.push((WHERE, places.words.clone()));
    let world = Arc::new(Limited { inner, within: within.clone() });
    Hypothesis { world, parameters, ..of }
}

/// What a head with other options makes of the tokens, heard in a trial: a world without options
/// of its own, that can be had in some places alone.
pub(super) struct Heard {
    found: Reference,
    /// The world that was listened to, for what is no number of a token.
    of: Arc<dyn World>,
    /// Whether the forward and the loss are of that head, too.
    forward: bool,
}

impl Heard {
    /// Forward, loss and backward of a head.
    pub(super) fn everything(evidence: &Evidence<'_>, of: Arc<dyn World>) -> Heard {
        let found = reference(evidence, Some(&*of), evidence.rows.as_ref());
        Heard { found, of, forward: true }
    }

    /// The backward alone.
    pub(super) fn backward(evidence: &Evidence<'_>, of: Arc<dyn World>) -> Heard {
        Heard { forward: false, ..Heard::everything(evidence, of) }
    }
}

impl World for Heard {
    fn speaks_of(&self, stage: Stage) -> bool {
        self.of.speaks_of(stage)
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let of = match pass {
            Pass::Forward if !self.forward => return,
            Pass::Forward => &self.found.forward_lse,
            Pass::Backward => &self.found.lse,
        };
        copy(of.get(&inputs.microbatch), lse);
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        copy(self.found.g.get(&inputs.microbatch), g);
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, of: [&mut [f64]; 3]) {
        let Some(heard) = self.found.cotangents.get(&tokens.inputs.microbatch) else { return };
        for (at, own) in
            tokens.rows.iter().enumerate().filter_map(|(at, row)| Some((at, heard.get(row)?)))
        {
            (of[0][at], of[1][at], of[2][at]) = (own.lse, own.label, own.smooth);
        }
    }

    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.of.policy(declared)
    }

    fn scale(&self, at: At) -> f64 {
        self.of.scale(at)
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        let At { stage, microbatch, rank } = of.at;
        let backward = stage.is_gradient() || stage == Stage::Dlogprobs;
        let heard = self.found.stages.get(&Key { stage, microbatch, rank });
        let Some(heard) = heard.filter(|_| self.forward || backward) else { return };
        for (to, row) in of.values.chunks_mut(of.columns.max(1)).zip(of.rows) {
            copy(heard.get(row), to);
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, _read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        if self.forward {
            copy(self.found.nll.get(&inputs.microbatch), nll);
        }
        Vec::new()
    }
}

fn copy(from: Option<&Vec<f64>>, to: &mut [f64]) {
    if let Some(from) = from.filter(|from| from.len() == to.len()) {
        to.copy_from_slice(from);
    }
}

/// A world in some places; elsewhere all is as declared.
struct Limited {
    inner: Arc<dyn World>,
    within: Arc<Within>,
}

/// Some places of a step, and what tokens' losses are divided by as declared.
pub(super) struct Within {
    places: Places,
    denominators: RecordedCounts,
}

impl Within {
    /// Of a divergence.
    pub(super) fn new(evidence: &Evidence<'_>, places: Places) -> Within {
        Within { places, denominators: RecordedCounts::new(evidence) }
    }
}

impl Limited {
    fn places(&self) -> &Places {
        &self.within.places
    }

    /// Takes over what the inner world makes of the values of tokens, in these places.
    fn of_tokens(
        &self,
        microbatch: Option<Microbatch>,
        values: &mut [f64],
        of: impl FnOnce(&mut [f64]),
    ) {
        if self.places().touches(microbatch) {
            let mut other = values.to_vec();
            of(&mut other);
            let own = values.iter_mut().zip(other).enumerate();
            let own = own.filter(|(row, _)| self.places().holds(microbatch, *row));
            own.for_each(|(_, (to, from))| *to = from);
        }
    }
}

impl World for Limited {
    fn speaks_of(&self, stage: Stage) -> bool {
        let meant = !self.places().are_classes() || stage.is_of_k();
        meant && self.inner.speaks_of(stage)
    }

    fn inputs(&self, step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if !self.places().touches(inputs.microbatch) {
            return;
        }
        let (labels, weights) = (inputs.labels.clone(), inputs.weights.clone());
        let cotangent = inputs.cotangent.clone();
        self.inner.inputs(step, inputs);
        for t in 0..inputs.tokens() {
            if !self.places().holds(inputs.microbatch, t) {
                inputs.labels[t] = labels[t];
                (inputs.weights[t], inputs.cotangent[t]) = (weights[t], cotangent[t]);
            }
        }
    }

    fn denominators(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
        of: &mut Vec<(Unit, f64)>,
    ) {
        let mut other = of.clone();
        self.inner.denominators(step, all, own, &mut other);
        // Elsewhere it is what is declared, whatever the inputs are here.
        let declared = self.within.denominators.of(own.microbatch).unwrap_or(of).clone();
        let part = |all: Vec<(Unit, f64)>, inside: bool| {
            let holds = move |&row: &usize| self.places().holds(own.microbatch, row) == inside;
            all.into_iter().map(move |(unit, n)| {
                let rows = unit.rows.iter().copied().filter(holds).collect();
                (Unit { rows, ..unit }, n)
            })
        };
        let all = part(declared, false).chain(part(other, true));
        *of = all.filter(|(unit, _)| !unit.rows.is_empty()).collect();
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        self.of_tokens(inputs.microbatch, lse, |own| self.inner.lse(pass, inputs, own));
    }

    fn policy_column(&self, of: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        let change = |own: &mut [f64]| self.inner.policy_column(of, inputs, own);
        self.of_tokens(inputs.microbatch, values, change);
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        self.of_tokens(inputs.microbatch, g, |own| self.inner.upstream(inputs, own));
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, of: [&mut [f64]; 3]) {
        let mb = tokens.inputs.microbatch;
        if !self.places().touches(mb) {
            return;
        }
        let mut other = of.each_ref().map(|own| own.to_vec());
        let [lse, label, smooth] = &mut other;
        self.inner.cotangents(tokens, [lse, label, smooth]);
        for (to, from) in of.into_iter().zip(other) {
            for ((to, from), &row) in to.iter_mut().zip(from).zip(tokens.rows) {
                *to = if self.places().holds(mb, row) { from } else { *to };
            }
        }
    }

    fn policy_of(&self, declared: &Roundings, unit: UnitName) -> Option<(Policy, Tiles)> {
        let here = self.places().are_classes() || self.places().touches(unit.0);
        self.inner.policy_of(declared, unit).filter(|_| here)
    }

    fn emulates(&self, at: At, row: usize) -> bool {
        let of_class = at.stage.is_of_k();
        let meant = match (self.places().are_classes(), of_class) {
            (true, true) => self.places().holds_class(row),
            (true, false) => true,
            (false, true) => self.places().is_in((at.microbatch, at.rank)),
            (false, false) => self.places().holds(at.microbatch, row),
        };
        meant && self.inner.emulates(at, row)
    }

    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.inner.policy(declared)
    }

    fn scale(&self, at: At) -> f64 {
        if self.places().is_in((at.microbatch, at.rank)) { self.inner.scale(at) } else { 1.0 }
    }

    fn token(&self, at: At, token: usize) -> usize {
        match self.places().holds(at.microbatch, token) {
            true => self.inner.token(at, token),
            false => token,
        }
    }

    fn trusts(&self, stage: Stage, microbatch: Option<Microbatch>) -> bool {
        !self.places().touches(microbatch) || self.inner.trusts(stage, microbatch)
    }

    fn has_nan(&self) -> bool {
        self.inner.has_nan()
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        let mb = of.at.microbatch;
        let sums = of.at.stage.is_sum();
        let (classes, of_class) = (self.places().are_classes(), of.at.stage.is_of_k());
        if sums || (classes != of_class && !self.places().is_in((mb, of.at.rank))) {
            return;
        }
        if self.places().is_in((mb, of.at.rank)) {
            return self.inner.expected(of);
        }
        let holds = |row: usize| match classes {
            true => self.places().holds_class(row),
            false => self.places().holds(mb, row),
        };
        let (rows, columns, mut other) = (of.rows, of.columns, of.values.to_vec());
        self.inner.expected(&mut Expectation { at: of.at, rows, columns, values: &mut other });
        let width = columns.max(1);
        for ((to, from), &row) in of.values.chunks_mut(width).zip(other.chunks(width)).zip(rows) {
            if holds(row) {
                to.copy_from_slice(from);
            }
        }
    }

    fn noise(&self, at: At, row: usize, column: usize) -> f64 {
        match self.places().is_in((at.microbatch, at.rank)) || self.places().holds_class(row) {
            true => self.inner.noise(at, row, column),
            false => 0.0,
        }
    }

    fn captured(&self, at: &At) -> Option<&Supplied> {
        self.inner.captured(at).filter(|_| self.places().is_in((at.microbatch, at.rank)))
    }

    fn weight(&self, stage: Stage, microbatch: Option<Microbatch>, rank: Option<Rank>) -> f64 {
        match self.places().is_in((microbatch, rank)) {
            true => self.inner.weight(stage, microbatch, rank),
            false => 1.0,
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let mut ties = Vec::new();
        self.of_tokens(inputs.microbatch, nll, |own| ties = self.inner.nll(inputs, read, own));
        ties
    }

    fn at_ties(&self) -> bool {
        self.inner.at_ties()
    }

    fn ties(&self, stage: Stage, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        let mut ties = self.inner.ties(stage, inputs)?;
        let own = ties.iter_mut().enumerate();
        let outside = own.filter(|(row, _)| !self.places().holds(inputs.microbatch, *row));
        outside.for_each(|(_, tie)| *tie = 0.0);
        Some(ties)
    }
}
