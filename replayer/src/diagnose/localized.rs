//! A hypothesis that holds only in some places: in some microbatches, on some ranks, or for some
//! classes.
//!
//! A hypothesis as a cause offers it holds for all tokens of the step. Where the captured tensors
//! are wrong in some places only, it is tried once more limited to those, so that a sum over all
//! places is explained too.

use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use super::cause::Hypothesis;
use super::data_worlds::RecordedCounts;
use super::detectors::places::Places;
use super::detectors::reference::{Reference, reference};
use super::evidence::{Evidence, Key};
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Stage, Unit};
use crate::kernels::Tiles;
use crate::kernels::policy::Policy;
use crate::replay::world::Supplied;
use crate::replay::world::{Expectation, Pass, Read, StagePlace, UnitName, UnitTokens, World};

/// The name of the parameter that says where the hypothesis holds.
const WHERE: &str = "only in";

/// Limits a hypothesis to these places, whatever its own parameters say about where it holds.
pub(super) fn localized(
    hypothesis: Hypothesis,
    evidence: &Evidence<'_>,
    within: &Arc<Region>,
) -> Hypothesis {
    let places = &within.places;
    let declared = &evidence.step.options;
    let mut options = declared.clone();
    hypothesis.world.options(&mut options);
    // Options of the head, and values of tokens, hold for all classes and cannot be limited as they
    // are. So the values that they give for each token and class are computed in one trial, and
    // copied in the places meant.
    let is_limited_as_it_is =
        options == *declared && (!places.are_classes() || hypothesis.emulates(evidence));
    let inner = match is_limited_as_it_is {
        true => hypothesis.world.clone(),
        false => Arc::new(TrialSnapshot::of_all_stages(evidence, hypothesis.world.clone())),
    };
    let mut parameters = hypothesis.parameters;
    parameters.retain(|(name, _)| *name != WHERE);
    parameters.push((WHERE, places.words.clone()));
    let world = Arc::new(Localized { inner, within: within.clone() });
    Hypothesis { world, parameters, ..hypothesis }
}

/// The values that a trial of another world computed, by token and class. As a world it changes no
/// option of the head, so it can be limited to some places.
pub(super) struct TrialSnapshot {
    replayed: Reference,
    /// The world of that trial, for what is not a value of a token or class.
    world: Arc<dyn World>,
    /// Whether the forward and the loss come from that trial too.
    forward: bool,
}

impl TrialSnapshot {
    /// Forward, loss and backward of a world.
    pub(super) fn of_all_stages(evidence: &Evidence<'_>, world: Arc<dyn World>) -> TrialSnapshot {
        let replayed = reference(evidence, Some(&*world), evidence.rows.as_ref());
        TrialSnapshot { replayed, world, forward: true }
    }

    /// The backward of a world alone.
    pub(super) fn of_backward(evidence: &Evidence<'_>, world: Arc<dyn World>) -> TrialSnapshot {
        TrialSnapshot { forward: false, ..TrialSnapshot::of_all_stages(evidence, world) }
    }
}

impl World for TrialSnapshot {
    fn speaks_of(&self, stage: Stage) -> bool {
        self.world.speaks_of(stage)
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let lse_by_microbatch = match pass {
            Pass::Forward if !self.forward => return,
            Pass::Forward => &self.replayed.forward_lse,
            Pass::Backward => &self.replayed.lse,
        };
        copy(lse_by_microbatch.get(&inputs.microbatch), lse);
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        copy(self.replayed.g.get(&inputs.microbatch), g);
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, cotangents: [&mut [f64]; 3]) {
        let Some(heard) = self.replayed.cotangents.get(&tokens.inputs.microbatch) else { return };
        for (index, noted) in
            tokens.rows.iter().enumerate().filter_map(|(at, row)| Some((at, heard.get(row)?)))
        {
            (cotangents[0][index], cotangents[1][index], cotangents[2][index]) =
                (noted.lse, noted.label, noted.smooth);
        }
    }

    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.world.policy(declared)
    }

    fn scale(&self, place: StagePlace) -> f64 {
        self.world.scale(place)
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let StagePlace { stage, microbatch, rank } = expectation.place;
        let backward = stage.is_gradient() || stage == Stage::Dlogprobs;
        let heard = self.replayed.stages.get(&Key { stage, microbatch, rank });
        let Some(heard) = heard.filter(|_| self.forward || backward) else { return };
        for (to, row) in
            expectation.values.chunks_mut(expectation.columns.max(1)).zip(expectation.rows)
        {
            copy(heard.get(row), to);
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, _read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        if self.forward {
            copy(self.replayed.nll.get(&inputs.microbatch), nll);
        }
        Vec::new()
    }
}

fn copy(from: Option<&Vec<f64>>, to: &mut [f64]) {
    if let Some(from) = from.filter(|from| from.len() == to.len()) {
        to.copy_from_slice(from);
    }
}

/// A world in force in some places only; elsewhere everything is as declared.
struct Localized {
    inner: Arc<dyn World>,
    within: Arc<Region>,
}

/// Some places of a step, and the declared divisors of the tokens' losses.
pub(super) struct Region {
    places: Places,
    denominators: RecordedCounts,
}

impl Region {
    /// The places, with the divisors that the head declares.
    pub(super) fn new(evidence: &Evidence<'_>, places: Places) -> Region {
        Region { places, denominators: RecordedCounts::new(evidence) }
    }
}

impl Localized {
    fn places(&self) -> &Places {
        &self.within.places
    }

    /// Lets the inner world change the values of tokens, and keeps the change in these places only.
    fn of_tokens(
        &self,
        microbatch: Option<Microbatch>,
        values: &mut [f64],
        change: impl FnOnce(&mut [f64]),
    ) {
        if self.places().touches(microbatch) {
            let mut other = values.to_vec();
            change(&mut other);
            let changed = values.iter_mut().zip(other).enumerate();
            let inside = changed.filter(|(row, _)| self.places().holds(microbatch, *row));
            inside.for_each(|(_, (to, from))| *to = from);
        }
    }
}

impl World for Localized {
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
        inputs: &MicrobatchInputs,
        denominators: &mut Vec<(Unit, f64)>,
    ) {
        let mut other = denominators.clone();
        self.inner.denominators(step, all, inputs, &mut other);
        // Elsewhere the declared divisors stay, although the inner world may have changed the
        // inputs here.
        let declared =
            self.within.denominators.of(inputs.microbatch).unwrap_or(denominators).clone();
        let part = |all: Vec<(Unit, f64)>, inside: bool| {
            let holds = move |&row: &usize| self.places().holds(inputs.microbatch, row) == inside;
            all.into_iter().map(move |(unit, n)| {
                let rows = unit.rows.iter().copied().filter(holds).collect();
                (Unit { rows, ..unit }, n)
            })
        };
        let all = part(declared, false).chain(part(other, true));
        *denominators = all.filter(|(unit, _)| !unit.rows.is_empty()).collect();
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        self.of_tokens(inputs.microbatch, lse, |own| self.inner.lse(pass, inputs, own));
    }

    fn policy_column(&self, role: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        let change = |own: &mut [f64]| self.inner.policy_column(role, inputs, own);
        self.of_tokens(inputs.microbatch, values, change);
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        self.of_tokens(inputs.microbatch, g, |own| self.inner.upstream(inputs, own));
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, cotangents: [&mut [f64]; 3]) {
        let mb = tokens.inputs.microbatch;
        if !self.places().touches(mb) {
            return;
        }
        let mut other = cotangents.each_ref().map(|own| own.to_vec());
        let [lse, label, smooth] = &mut other;
        self.inner.cotangents(tokens, [lse, label, smooth]);
        for (to, from) in cotangents.into_iter().zip(other) {
            for ((to, from), &row) in to.iter_mut().zip(from).zip(tokens.rows) {
                *to = if self.places().holds(mb, row) { from } else { *to };
            }
        }
    }

    fn policy_of(&self, declared: &Roundings, unit: UnitName) -> Option<(Policy, Tiles)> {
        let here = self.places().are_classes() || self.places().touches(unit.0);
        self.inner.policy_of(declared, unit).filter(|_| here)
    }

    fn emulates(&self, place: StagePlace, row: usize) -> bool {
        let of_class = place.stage.is_of_k();
        let meant = match (self.places().are_classes(), of_class) {
            (true, true) => self.places().holds_class(row),
            (true, false) => true,
            (false, true) => self.places().is_in((place.microbatch, place.rank)),
            (false, false) => self.places().holds(place.microbatch, row),
        };
        meant && self.inner.emulates(place, row)
    }

    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.inner.policy(declared)
    }

    fn scale(&self, place: StagePlace) -> f64 {
        if self.places().is_in((place.microbatch, place.rank)) {
            self.inner.scale(place)
        } else {
            1.0
        }
    }

    fn token(&self, place: StagePlace, token: usize) -> usize {
        match self.places().holds(place.microbatch, token) {
            true => self.inner.token(place, token),
            false => token,
        }
    }

    fn trusts(&self, stage: Stage, microbatch: Option<Microbatch>) -> bool {
        !self.places().touches(microbatch) || self.inner.trusts(stage, microbatch)
    }

    fn has_nan(&self) -> bool {
        self.inner.has_nan()
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let mb = expectation.place.microbatch;
        let sums = expectation.place.stage.is_sum();
        let (classes, of_class) = (self.places().are_classes(), expectation.place.stage.is_of_k());
        if sums || (classes != of_class && !self.places().is_in((mb, expectation.place.rank))) {
            return;
        }
        if self.places().is_in((mb, expectation.place.rank)) {
            return self.inner.expected(expectation);
        }
        let holds = |row: usize| match classes {
            true => self.places().holds_class(row),
            false => self.places().holds(mb, row),
        };
        let (rows, columns, mut other) =
            (expectation.rows, expectation.columns, expectation.values.to_vec());
        self.inner.expected(&mut Expectation {
            place: expectation.place,
            rows,
            columns,
            values: &mut other,
        });
        let width = columns.max(1);
        for ((to, from), &row) in
            expectation.values.chunks_mut(width).zip(other.chunks(width)).zip(rows)
        {
            if holds(row) {
                to.copy_from_slice(from);
            }
        }
    }

    fn noise(&self, place: StagePlace, row: usize, column: usize) -> f64 {
        match self.places().is_in((place.microbatch, place.rank)) || self.places().holds_class(row)
        {
            true => self.inner.noise(place, row, column),
            false => 0.0,
        }
    }

    fn captured(&self, place: &StagePlace) -> Option<&Supplied> {
        self.inner.captured(place).filter(|_| self.places().is_in((place.microbatch, place.rank)))
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
        let own_ties = ties.iter_mut().enumerate();
        let outside = own_ties.filter(|(row, _)| !self.places().holds(inputs.microbatch, *row));
        outside.for_each(|(_, tie)| *tie = 0.0);
        Some(ties)
    }
}
