//! Tokens that count more or less often than once in everything that is summed over tokens: dk, the
//! gradient of the bias and the loss. This happens where one loop over chunks computes them all.
//!
//! The weight of each token is solved for by least squares from dk. The other failing stages are
//! then compared with the sums that have these weights, which is a real test, as they had no part
//! in the fit.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::addend_counts::in_words;
use super::dlogits_plane::Rows;
use super::gradient::Gradient;
use super::least_squares::whole_weights;
use super::single_tokens::distance;
use crate::diagnose::data_worlds::{CountedLosses, ReplacedValues};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Read, World};

/// A solution must leave less than this share of the error to be worth a trial.
const LEFT: f64 = 0.1;

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Tokens that count more or less often than once.
pub struct CountedTokens {
    gradients: ReplacedValues,
    /// How often each token of a microbatch counts in the loss; empty where the loss agrees.
    of_loss: CountedLosses,
    /// Each run of tokens that counts otherwise, in words.
    pub said: Vec<String>,
    /// The stages in which they do.
    pub stages: Vec<Stage>,
}

impl CountedTokens {
    /// Solves for them. `None` where dk agrees or fails alone, where it is too large or its weights
    /// are no whole numbers, or where these weights do not explain another failing gradient.
    pub fn of(evidence: &Evidence<'_>) -> Option<CountedTokens> {
        let fails = |stage: &Stage| evidence.failing.iter().any(|key| key.stage == *stage);
        let others = [Stage::Dbias, Stage::Loss];
        if !fails(&Stage::Dk) || !others.iter().any(fails) {
            return None;
        }
        let ones = |inputs: &MicrobatchInputs| (inputs.microbatch, vec![1.0; inputs.tokens()]);
        let mut weights: OfTokens = evidence.inputs.iter().map(ones).collect();
        let mut said = Vec::new();
        for (key, _) in evidence.failing_of(&[Stage::Dk]) {
            said.extend(solved(evidence, key, &mut weights)?);
        }
        said.dedup();
        let mut gradients = ReplacedValues::default();
        for (key, _) in evidence.failing_of(&Stage::OF_CLASSES) {
            let gradient = Gradient::of(evidence, key)?;
            let changed = weighed(&gradient, &weights)?;
            let rows = (0..changed.count()).map(|at| (gradient.row(at), changed.row(at).to_vec()));
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
    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.gradients.expected(expectation);
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        self.of_loss.nll(inputs, read, nll)
    }
}

/// Solves one dk for the weight of each token, writes the weights to `weights`, and returns those
/// that are not 1 in words.
fn solved(evidence: &Evidence<'_>, key: Key, weights: &mut OfTokens) -> Option<Vec<String>> {
    let gradient = Gradient::of(evidence, key)?;
    let entries = gradient.entries(false)?;
    let spend = |work| evidence.spend(work);
    let solution = whole_weights(
        (&entries, gradient.other()),
        (&gradient.error(), gradient.rounding),
        &spend,
    )?;
    let token_weights = weights.get_mut(&key.microbatch)?;
    solution
        .iter()
        .enumerate()
        .for_each(|(at, weight)| token_weights[gradient.addend(at)] = *weight);
    Some(in_words(&solution, &|at| gradient.addend(at)))
}

/// A gradient with these weights of its tokens; `None` where that does not explain its error.
fn weighed(gradient: &Gradient, weights: &OfTokens) -> Option<Rows> {
    let (token_weights, entries) =
        (weights.get(&gradient.key.microbatch)?, gradient.entries(false)?);
    let row = |index: usize| {
        let more = token_weights[gradient.addend(index)] - 1.0;
        entries.row(index).iter().map(move |x| more * x)
    };
    let values = (0..entries.count()).flat_map(row).collect();
    let changed = gradient.with(&Rows { cols: entries.cols, values });
    let off = |of_other: &Rows| distance(&gradient.captured.values, &of_other.values);
    (off(&changed) <= LEFT * off(&gradient.reference)).then_some(changed)
}
