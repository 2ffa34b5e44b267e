//! The reference values of every compared stage in the background of a search. They come from one
//! trial with a world that changes nothing and records the values it is given.

use std::collections::BTreeMap;
use std::sync::Mutex;

use backtape::identity::Microbatch;

use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::kernels::{Cotangents, TokenCotangents};
use crate::replay::trial::{Rows as Sample, counted_trial};
use crate::replay::world::{Expectation, Pass, Read, UnitTokens, World};

/// A `[T, V]` stage with more values than this is not recorded.
const MOST: usize = 1 << 24;

/// Reference values by row: a token or a class.
pub type Table = BTreeMap<usize, Vec<f64>>;

/// Rows of several tables, borrowed.
pub type Rows<'t> = BTreeMap<usize, &'t [f64]>;

/// The reference values of a world.
#[derive(Default)]
pub struct Reference {
    /// Rows of every comparison: all of them, or those of a sample.
    pub stages: BTreeMap<Key, Table>,
    /// lse as the backward reads it, `[T]` of each microbatch.
    pub lse: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// lse as the forward should give it.
    pub forward_lse: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// Label logits as the forward should give them.
    pub label_logits: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// Loss of each token before weights, `[T]` of each microbatch.
    pub nll: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// Upstream gradient of each token's nll, `[T]` of each microbatch.
    pub g: BTreeMap<Option<Microbatch>, Vec<f64>>,
    /// The cotangents of each token.
    pub cotangents: BTreeMap<Option<Microbatch>, BTreeMap<usize, TokenCotangents>>,
}

impl Reference {
    /// The softmax part of an entry of dlogits, from the logit and the logit's derivative; none
    /// where the token is not in the sample, or the result is not finite.
    pub fn softmax_entry(
        &self,
        microbatch: Option<Microbatch>,
        token: usize,
        (logit, slope): (f64, f64),
    ) -> Option<f64> {
        let c = self.cotangents.get(&microbatch)?.get(&token)?.lse;
        let lse = *self.lse.get(&microbatch)?.get(token)?;
        Some(c * slope * probability(logit, lse)).filter(|x| x.is_finite())
    }

    /// The rows of a stage from all units of a microbatch, of which each is a comparison of its
    /// own.
    pub fn rows_of(&self, (stage, microbatch): (Stage, Option<Microbatch>)) -> Rows<'_> {
        let is_of_stage = |key: &Key| key.stage == stage && key.microbatch == microbatch;
        let tables = self.stages.iter().filter(|(key, _)| is_of_stage(key));
        tables
            .flat_map(|(_, table)| table.iter().map(|(&row, values)| (row, &values[..])))
            .collect()
    }

    /// A token's row of a stage, from whichever unit holds it.
    pub fn of_token(
        &self,
        (stage, microbatch): (Stage, Option<Microbatch>),
        token: usize,
    ) -> Option<&Vec<f64>> {
        let is_of_stage = |key: &Key| key.stage == stage && key.microbatch == microbatch;
        let mut tables = self.stages.iter().filter(|(key, _)| is_of_stage(key));
        tables.find_map(|(_, table)| table.get(&token))
    }
}

/// The reference in a world, on top of the evidence's background.
pub fn reference(
    evidence: &Evidence<'_>,
    world: Option<&dyn World>,
    rows: Option<&Sample>,
) -> Reference {
    let recorder = Recorder {
        reference: Mutex::default(),
        tokens: evidence.inputs.iter().map(|inputs| (inputs.microbatch, inputs.tokens())).collect(),
    };
    let mut worlds = evidence.background.clone();
    worlds.extend(world);
    worlds.push(&recorder);
    let compared = evidence.outcome.stages.iter().filter(|outcome| !outcome.comparisons.is_empty());
    let compared = compared.map(|outcome| outcome.stage).collect();
    // If the dump cannot be judged in this world, the reference stays empty.
    let with = (rows, None, evidence.progress());
    let _ = counted_trial(evidence.step, &compared, &worlds, with);
    recorder.reference.into_inner().unwrap_or_default()
}

struct Recorder {
    reference: Mutex<Reference>,
    tokens: BTreeMap<Option<Microbatch>, usize>,
}

impl World for Recorder {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let Ok(mut reference) = self.reference.lock() else { return };
        let noted = match pass {
            Pass::Forward => &mut reference.forward_lse,
            Pass::Backward => &mut reference.lse,
        };
        noted.insert(inputs.microbatch, lse.to_vec());
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        if let Ok(mut reference) = self.reference.lock() {
            reference.g.insert(inputs.microbatch, g.to_vec());
        }
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, label, smooth]: [&mut [f64]; 3]) {
        let Ok(mut reference) = self.reference.lock() else { return };
        let noted = reference.cotangents.entry(tokens.inputs.microbatch).or_default();
        let [lse, label, smooth] = [&*lse, &*label, &*smooth];
        for (index, &t) in tokens.rows.iter().enumerate() {
            noted.insert(t, Cotangents { lse, label, smooth }.of_token(index));
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, _read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        if let Ok(mut reference) = self.reference.lock() {
            reference.nll.insert(inputs.microbatch, nll.to_vec());
        }
        Vec::new()
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let Ok(mut reference) = self.reference.lock() else { return };
        if expectation.place.stage == Stage::LabelLogits {
            reference
                .label_logits
                .insert(expectation.place.microbatch, expectation.values.to_vec());
        }
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        let tokens = self.tokens.get(&expectation.place.microbatch).copied().unwrap_or(0);
        let plane =
            matches!(expectation.place.stage, Stage::Logits | Stage::Logprobs | Stage::Dlogits);
        if plane && tokens * expectation.columns > MOST {
            return;
        }
        let table = reference.stages.entry(key).or_default();
        for (&row, values) in
            expectation.rows.iter().zip(expectation.values.chunks(expectation.columns.max(1)))
        {
            table.insert(row, values.to_vec());
        }
    }
}
