//! What was found of the stages of a step's parameters.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use serde::Serialize;

use super::local_norms::Unit;
use crate::compare::{Bound, Tally};

/// A stage of a parameter's way from its local gradients to its new value, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// A rank's gradients, summed over its microbatches.
    Accumulate,
    /// The gradients of ranks, brought together.
    Reduce,
    /// The loss scale taken out.
    Unscale,
    /// The norm of the gradients.
    Norm,
    /// The gradient clipped to a norm or a value.
    Clip,
    /// The optimizer's state after its step.
    State,
    /// The change of the parameter.
    Update,
    /// The copies of the parameter.
    Param,
}

impl Stage {
    /// Every stage, in order.
    pub(crate) const ALL: [Stage; 8] = [
        Stage::Accumulate,
        Stage::Reduce,
        Stage::Unscale,
        Stage::Norm,
        Stage::Clip,
        Stage::State,
        Stage::Update,
        Stage::Param,
    ];

    /// The stage of this name.
    pub(crate) fn named(name: &str) -> Option<Stage> {
        Stage::ALL.into_iter().find(|stage| stage.name() == name)
    }

    /// Its name in every output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stage::Accumulate => "accumulate",
            Stage::Reduce => "reduce",
            Stage::Unscale => "unscale",
            Stage::Norm => "norm",
            Stage::Clip => "clip",
            Stage::State => "state",
            Stage::Update => "update",
            Stage::Param => "param",
        }
    }
}

/// What was found of one stage of one parameter on the ranks that hold the same of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// The stage.
    pub stage: Stage,
    /// The parameter; empty for a norm, which is of many.
    pub parameter: String,
    /// The tensor that was judged, as it is recorded.
    pub tensor: String,
    /// The ranks that hold it.
    pub ranks: Vec<Rank>,
    /// The box that they hold.
    #[serde(rename = "box")]
    pub place: IndexBox,
    /// Sums of squares of what was captured and of what it should be, of a sum of gradients.
    #[serde(skip)]
    pub energies: Option<Energies>,
    /// How it came out.
    pub result: Outcome,
}

/// Sums of squares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Energies {
    /// Of the captured values.
    pub captured: f64,
    /// Of what they should be.
    pub right: f64,
    /// How far apart rounding may bring the two.
    pub apart: f64,
}

/// How a stage came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// It is what the stage before it gives, within what rounding explains.
    Agreed {
        /// The smallest factor, as its distance from 1, that would have been seen.
        seen_from: Option<f64>,
        /// Relative error, in the Frobenius norm.
        error: f64,
        /// The relative error that rounding explains.
        floor: f64,
    },
    /// It is not.
    Diverged(Box<Divergence>),
    /// Nothing can be said, and why.
    Unchecked {
        /// The reason, in words.
        why: String,
        /// Whether the job did no such thing, so that there is nothing to judge.
        #[serde(skip)]
        is_meant: bool,
    },
}

/// How far a stage is from what it should be, and what explains it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// Which bound is left, in words.
    pub reason: String,
    /// Captured over reference: one number for all elements, where it is one.
    pub factor: Option<f64>,
    /// Relative error, in the Frobenius norm.
    pub error: f64,
    /// The relative error that rounding explains.
    pub floor: f64,
    /// The element that is furthest off: its index, captured and reference.
    pub worst: Option<(Vec<u64>, f64, f64)>,
    /// What reproduces it, where something does.
    pub reading: Option<Reading>,
    /// Everything that reproduces it, the simplest first; `reading` is the one of them that
    /// reproduces most parameters.
    #[serde(skip)]
    pub readings: Vec<Reading>,
}

impl Divergence {
    /// One that no comparison of elements found, told in the words of its cause.
    pub(crate) fn told(reading: Reading, factor: Option<f64>, error: f64) -> Divergence {
        let reason = reading.words.clone();
        Divergence { readings: vec![reading], ..Divergence::of(reason, factor, error) }
    }

    /// One that no comparison of elements found, of which the cause is not known.
    pub(crate) fn of(reason: String, factor: Option<f64>, error: f64) -> Divergence {
        let (worst, reading, readings) = (None, None, Vec::new());
        Divergence { reason, factor, error, floor: 0.0, worst, reading, readings }
    }
}

/// What reproduces a divergence within what rounding explains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Reading {
    /// The cause, by its name in docs/causes.md.
    pub cause: &'static str,
    /// What the captured values are, in words.
    pub words: String,
    /// What to look at.
    pub look: &'static str,
    /// How far what it gives is from what was captured, as the sum of squared errors in units of what
    /// rounding explains; absent where that was not measured.
    #[serde(skip)]
    pub misfit: Aside<Option<f64>>,
    /// Where ranks or devices have weights of their own in a sum, by these.
    #[serde(skip)]
    pub weights: Aside<BTreeMap<Unit, f64>>,
}

/// What is known beside a reading and says nothing of which one it is, so that all are equal.
#[derive(Clone, Debug, Default)]
pub struct Aside<T>(pub T);

impl<T> PartialEq for Aside<T> {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl<T> Eq for Aside<T> {}

impl<T> PartialOrd for Aside<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Aside<T> {
    fn cmp(&self, _other: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl Reading {
    /// The same, with something else to look at than what the cause says.
    pub(crate) fn looking_at(self, look: &'static str) -> Reading {
        Reading { look, ..self }
    }

    /// The same, and how well it fits.
    pub(crate) fn fitting(self, misfit: f64) -> Reading {
        Reading { misfit: Aside(Some(misfit)), ..self }
    }
}

impl Outcome {
    /// What could not be judged, and why.
    pub(crate) fn unchecked(why: String) -> Outcome {
        Outcome::Unchecked { why, is_meant: false }
    }

    /// What the job did not do, in words.
    pub(crate) fn not_done(why: String) -> Outcome {
        Outcome::Unchecked { why, is_meant: true }
    }

    /// The outcome of a comparison that is within its bound.
    pub(crate) fn agreed(tally: &Tally, bound: &Bound) -> Outcome {
        let seen_from = tally.seen_from(bound).map(|seen| seen.factor);
        Outcome::Agreed { seen_from, error: tally.error(), floor: tally.expected() }
    }

    /// How it differs, where it does.
    pub(crate) fn divergence(&self) -> Option<&Divergence> {
        match self {
            Outcome::Diverged(divergence) => Some(divergence),
            _ => None,
        }
    }
}
