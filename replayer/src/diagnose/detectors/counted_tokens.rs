//! Tokens that count otherwise than once in all that is summed over them: dk, the gradient of the
//! bias and the loss, as where one loop over chunks makes them all.
//!
//! dk is solved for how often it holds each token; what else fails is held against these numbers,
//! which were not solved from it.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::counted::in_words;
use super::direct::distance;
use super::gradient::Gradient;
use super::plane::Rows;
use super::solve::whole_weights;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::{CountedLosses, Instead};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Read, World};

/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Tokens that count otherwise than once.
pub struct CountedTokens {
    gradients: Instead,
    /// How often each token of a microbatch counts in the loss; empty where the loss agrees.
    of_loss: CountedLosses,
    /// Each run of tokens that counts otherwise, in words.
    pub said: Vec<String>,
    /// The stages in which they do.
    pub stages: Vec<Stage>,
}

impl CountedTokens {
    /// `None` where dk agrees or fails alone, is too large to be solved or not made of whole tokens,
    /// or where another gradient is not what these tokens make it.
    pub fn of(evidence: &Evidence<'_>) -> Option<CountedTokens> {
        let fails = |stage: &Stage| evidence.failing.iter().any(|key| key.stage == *stage);
        let others = [Stage::Dbias, Stage::Loss];
        if !fails(&Stage::Dk) || !others.iter().any(fails) {
            return None;
        }
        let ones = |one: &MicrobatchInputs| (one.microbatch, vec![1.0; one.tokens()]);
        let mut weights: OfTokens = evidence.inputs.iter().map(ones).collect();
        let mut said = Vec::new();
        for (key, _) in evidence.failing_of(&[Stage::Dk]) {
            said.extend(solved(evidence, key, &mut weights)?);
        }
        said.dedup();
        let mut gradients = Instead::default();
        for (key, _) in evidence.failing_of(&Stage::OF_CLASSES) {
            let of = Gradient::of(evidence, key)?;
            let changed = weighed(&of, &weights)?;
            let rows = (0..changed.count()).map(|at| (of.row(at), changed.row(at).to_vec()));
            gradients = gradients.rows(key, rows);
        }
        let mut stages: Vec<Stage> = Stage::OF_CLASSES.into_iter().filter(fails).collect();
        match fails(&Stage::Loss) {
            true => stages.push(Stage::Loss),
            false => weights.clear(),
        }
        Some(CountedTokens { gradients, of_loss: CountedLosses(weights), said, stages })
    }
}

impl World for CountedTokens {
    fn expected(&self, of: &mut Expectation<'_>) {
        self.gradients.expected(of);
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        self.of_loss.nll(inputs, read, nll)
    }
}

/// How often a dk holds each of its tokens, in words.
fn solved(evidence: &Evidence<'_>, key: Key, weights: &mut OfTokens) -> Option<Vec<String>> {
    let of = Gradient::of(evidence, key)?;
    let entries = of.entries(false)?;
    let spend = |work| evidence.spend(work);
    let found = whole_weights((&entries, of.other()), (&of.error(), of.rounding), &spend)?;
    let own = weights.get_mut(&key.microbatch)?;
    found.iter().enumerate().for_each(|(at, weight)| own[of.addend(at)] = *weight);
    Some(in_words(&found, &|at| of.addend(at)))
}

/// A gradient that holds its tokens so often; `None` where that does not explain it.
fn weighed(of: &Gradient, weights: &OfTokens) -> Option<Rows> {
    let (own, entries) = (weights.get(&of.key.microbatch)?, of.entries(false)?);
    let row = |at: usize| {
        let more = own[of.addend(at)] - 1.0;
        entries.row(at).iter().map(move |x| more * x)
    };
    let values = (0..entries.count()).flat_map(row).collect();
    let changed = of.with(&Rows { cols: entries.cols, values });
    let off = |of_other: &Rows| distance(&of.captured.values, &of_other.values);
    (off(&changed) <= LEFT * off(&of.reference)).then_some(changed)
}
