//! What a hypothesis says that the job did, other than it declared.
//!
//! A stage is judged in a world as it always is: same inputs from the dump, same
//! allowance for rounding, same bounds. Only what the world changes is different. So a
//! hypothesis is accepted by the test that rejected the declaration, and by no other.
//!
//! A world changes every microbatch and rank alike unless it says otherwise; which of
//! them it explains is read off the comparisons that pass in it.

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use crate::head::{HeadOptions, HeadStep, MicrobatchInputs, Roundings, Stage, Unit};
use crate::kernels::policy::Policy;
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;

/// When lse is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// As the forward pass gives it: what a captured lse should be.
    Forward,
    /// As the backward pass reads it, captured or not.
    Backward,
}

/// Whose values a world is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlace {
    /// The stage.
    pub stage: Stage,
    /// Which microbatch; none for sums over them.
    pub microbatch: Option<Microbatch>,
    /// The first rank of the unit; none for a global tensor.
    pub rank: Option<Rank>,
}

/// Values that a stage should have, some rows of it.
pub struct Expectation<'a> {
    /// Whose.
    pub place: StagePlace,
    /// Row of the whole tensor that each row here is: a token of `[T, D]`, a class of
    /// `[V, D]`.
    pub rows: &'a [usize],
    /// Values of a row.
    pub columns: usize,
    /// `rows * columns` values, row-major.
    pub values: &'a mut [f64],
}

/// Tokens of one unit, all `[n]`.
pub struct UnitTokens<'a> {
    /// The microbatch's inputs, as the world has them.
    pub inputs: &'a MicrobatchInputs,
    /// Which of its tokens.
    pub rows: &'a [usize],
    /// lse as the backward reads it.
    pub lse: &'a [f64],
    /// Upstream gradient of each token's nll.
    pub g: &'a [f64],
    /// First rank of the unit.
    pub rank: Option<Rank>,
}

/// What the loss of each token is made of, `[T]` of the microbatch: values, and the variance
/// of each.
pub struct Read<'a> {
    /// Log-sum-exp, captured where it was captured.
    pub lse: (&'a [f64], &'a [f64]),
    /// Logit of the label, likewise.
    pub label: (&'a [f64], &'a [f64]),
}

/// A microbatch, and the first rank of a unit of its tokens; no rank for all of them.
pub type UnitName = (Option<Microbatch>, Option<Rank>);

/// A hypothesis. What it leaves out is as declared.
pub trait World: Send + Sync {
    /// Whether it says anything of a stage: a fault may be in the gradient of q alone.
    fn speaks_of(&self, _stage: Stage) -> bool {
        true
    }

    /// Other options of the head; f64 formulas and allowances follow them.
    fn options(&self, _options: &mut HeadOptions) {}

    /// Other inputs of a microbatch. Shapes and the range of labels stay.
    fn inputs(&self, _step: &HeadStep<'_>, _inputs: &mut MicrobatchInputs) {}

    /// Other advantages, or other log-probabilities of the old or the reference policy, `[T]` of
    /// the microbatch.
    fn policy_column(&self, _of: Role, _inputs: &MicrobatchInputs, _values: &mut [f64]) {}

    /// Other numbers that the tokens' losses are divided by: groups of the microbatch's
    /// tokens, each with its own. `all`: every microbatch of the step.
    fn denominators(
        &self,
        _step: &HeadStep<'_>,
        _all: &[&MicrobatchInputs],
        _inputs: &MicrobatchInputs,
        _denominators: &mut Vec<(Unit, f64)>,
    ) {
    }

    /// Another lse, `[T]` of the microbatch.
    fn lse(&self, _pass: Pass, _inputs: &MicrobatchInputs, _lse: &mut [f64]) {}

    /// Other upstream gradients of the tokens' nll, `[T]` of the microbatch.
    fn upstream(&self, _inputs: &MicrobatchInputs, _g: &mut [f64]) {}

    /// Other cotangents of the unit's lse, label logits and all logits: `g (1 + 2 λ lse)`,
    /// `-g (1 - s)`, `-g s / K`.
    fn cotangents(&self, _tokens: &UnitTokens<'_>, _of: [&mut [f64]; 3]) {}

    /// A policy that is emulated in place of the f64 formulas of dq, dk and dbias, made
    /// of the declared one. What it computes is compared with the allowance of the
    /// *declared* policy: a fault is no excuse.
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        None
    }

    /// The same of one unit: which microbatch, and its first rank.
    fn policy_of(&self, declared: &Roundings, _unit: UnitName) -> Option<(Policy, Tiles)> {
        self.policy(declared)
    }

    /// Whether the policy's values stand for the reference in this row: a token's row, or a
    /// class's of a gradient of k.
    fn emulates(&self, _at: StagePlace, _row: usize) -> bool {
        true
    }

    /// A factor of the stage's values and of their rounding, but not of the rounding with
    /// which they were stored.
    fn scale(&self, _at: StagePlace) -> f64 {
        1.0
    }

    /// The token whose gradient a row of dq holds, where rows lie elsewhere than declared.
    fn token(&self, _at: StagePlace, token: usize) -> usize {
        token
    }

    /// Whether the job went on with what was captured of a stage. Where it did not, because
    /// the memory held something else by then, later stages start from the reference.
    fn trusts(&self, _stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        true
    }

    /// True when a NaN of this world's reference means that the job's value is no number
    /// either. Elsewhere a NaN passes no test.
    fn has_nan(&self) -> bool {
        false
    }

    /// Last: other values than the stage would have.
    fn expected(&self, _expectation: &mut Expectation<'_>) {}

    /// More variance of an element of a gradient of k, where this world puts a value that the
    /// declared head has elsewhere or not at all: its roundings are not those that are allowed
    /// for the element as declared.
    fn noise(&self, _at: StagePlace, _row: usize, _column: usize) -> f64 {
        0.0
    }

    /// What stands in for a captured tensor: a fixed kernel's values, to be judged in its
    /// place.
    fn captured(&self, _at: &StagePlace) -> Option<&Supplied> {
        None
    }

    /// Weight of an addend in the sum over microbatches (`Accumulate`) or over ranks
    /// (`Reduce`).
    fn weight(&self, _stage: Stage, _microbatch: Option<Microbatch>, _rank: Option<Rank>) -> f64 {
        1.0
    }

    /// How a sum over microbatches (`Accumulate`) or over ranks (`Reduce`) is taken where
    /// every partial sum is rounded. `None`: it is summed in f64.
    fn chain(&self, _stage: Stage) -> Option<Chain> {
        None
    }

    /// Other losses of the tokens before weights, `[T]` of the microbatch; returns how far
    /// each may be off for values that lie near ties, empty for not at all.
    fn nll(&self, _inputs: &MicrobatchInputs, _read: &Read<'_>, _nll: &mut [f64]) -> Vec<f64> {
        Vec::new()
    }

    /// Whether policies are emulated at both ends of what the job's own arithmetic may do to
    /// a logit: where they differ a value lies near a tie, and may have rounded either way.
    fn at_ties(&self) -> bool {
        false
    }

    /// How far what a world says of a stage of one number a token may be off, `[T]` of the
    /// microbatch: a value that lies within the arithmetic's error of a tie may round
    /// either way. `None`: not at all.
    fn ties(&self, _stage: Stage, _inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        None
    }
}

/// A sum of gradients, one addend after the other, every partial sum rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// What partial sums are rounded to.
    pub precision: Precision,
    /// True where the last addend is met first.
    pub descending: bool,
    /// True where each addend is divided (and rounded) before it is added, not the sum.
    pub divides_first: bool,
    /// True where an addend is brought to the format before it is added.
    pub rounds_addends: bool,
}

/// The job did what it declared.
pub struct Declared;

impl World for Declared {}

/// Beside another world: values near ties may have rounded either way.
pub struct AtTies;

impl World for AtTies {
    fn at_ties(&self) -> bool {
        true
    }
}

/// Several worlds at once, one after the other.
impl<W: World + ?Sized> World for Vec<&W> {
    fn options(&self, options: &mut HeadOptions) {
        self.iter().for_each(|world| world.options(options));
    }

    fn inputs(&self, step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        self.iter().for_each(|world| world.inputs(step, inputs));
    }

    fn policy_column(&self, role: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        self.iter().for_each(|world| world.policy_column(role, inputs, values));
    }

    fn denominators(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        inputs: &MicrobatchInputs,
        denominators: &mut Vec<(Unit, f64)>,
    ) {
        self.iter().for_each(|world| world.denominators(step, all, inputs, denominators));
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        self.iter().for_each(|world| world.lse(pass, inputs, lse));
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        self.iter().for_each(|world| world.upstream(inputs, g));
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, cotangents: [&mut [f64]; 3]) {
        let [lse, label, smooth] = cotangents;
        for world in self {
            world.cotangents(tokens, [&mut *lse, &mut *label, &mut *smooth]);
        }
    }

    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.iter().find_map(|world| world.policy(declared))
    }

    fn policy_of(&self, declared: &Roundings, unit: UnitName) -> Option<(Policy, Tiles)> {
        self.iter().find_map(|world| world.policy_of(declared, unit))
    }

    fn emulates(&self, place: StagePlace, row: usize) -> bool {
        self.iter().all(|world| world.emulates(place, row))
    }

    fn scale(&self, place: StagePlace) -> f64 {
        self.iter().map(|world| world.scale(place)).product()
    }

    fn token(&self, place: StagePlace, token: usize) -> usize {
        self.iter().rev().fold(token, |token, world| world.token(place, token))
    }

    fn trusts(&self, stage: Stage, microbatch: Option<Microbatch>) -> bool {
        self.iter().all(|world| world.trusts(stage, microbatch))
    }

    fn has_nan(&self) -> bool {
        self.iter().any(|world| world.has_nan())
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.iter().for_each(|world| world.expected(expectation));
    }

    fn noise(&self, place: StagePlace, row: usize, column: usize) -> f64 {
        self.iter().map(|world| world.noise(place, row, column)).sum()
    }

    fn captured(&self, place: &StagePlace) -> Option<&Supplied> {
        self.iter().find_map(|world| world.captured(place))
    }

    fn weight(&self, stage: Stage, microbatch: Option<Microbatch>, rank: Option<Rank>) -> f64 {
        self.iter().map(|world| world.weight(stage, microbatch, rank)).product()
    }

    fn chain(&self, stage: Stage) -> Option<Chain> {
        self.iter().find_map(|world| world.chain(stage))
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let mut ties = Vec::new();
        for world in self {
            let world_ties = world.nll(inputs, read, nll);
            ties = if world_ties.is_empty() { ties } else { world_ties };
        }
        ties
    }

    fn at_ties(&self) -> bool {
        self.iter().any(|world| world.at_ties())
    }

    fn ties(&self, stage: Stage, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        self.iter().find_map(|world| world.ties(stage, inputs))
    }
}

/// Values of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Supplied {
    /// Which stage, microbatch and, for dk and its parts, first rank of the unit.
    pub place: StagePlace,
    /// `[T, D]` of the microbatch for dq and its parts, `[V, D]` for dk and its parts,
    /// `[V]` for dbias, `[T]` for lse, label_logits and logprobs; row-major.
    pub values: Vec<f64>,
    /// What the function returned them in.
    pub precision: Option<Precision>,
}
