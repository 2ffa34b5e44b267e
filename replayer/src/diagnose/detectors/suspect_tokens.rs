//! The tokens whose labels may be wrong: those of the ranks and microbatches whose rows fail.

use std::collections::BTreeMap;

use backtape::identity::{Microbatch, Rank};

use super::single_tokens::tokens;
use crate::diagnose::evidence::{Evidence, Key};
use crate::dump::name_ranks;
use crate::head::{MicrobatchInputs, Stage, Unit};

/// Stages in which each token's row shows its label.
const ROWS: [Stage; 3] = [Stage::LabelLogits, Stage::DqLabel, Stage::Dq];
/// The report names at most this many microbatches of ranks.
const PLACES: usize = 8;

/// Which tokens are suspect, by microbatch.
pub struct SuspectTokens<'e> {
    /// What is known of the divergence.
    pub evidence: &'e Evidence<'e>,
    /// Whether each token is suspect, `[T]` by microbatch.
    rows: BTreeMap<Option<Microbatch>, Vec<bool>>,
    /// The suspect microbatches of ranks in words; `None` where all tokens are suspect.
    places: Option<Vec<String>>,
}

impl<'e> SuspectTokens<'e> {
    /// Finds them. All tokens of a microbatch are suspect where its rows were not compared rank by
    /// rank.
    pub fn of(evidence: &'e Evidence<'_>) -> SuspectTokens<'e> {
        let (mut rows, mut places, mut all) = (BTreeMap::new(), Vec::new(), true);
        for inputs in evidence.inputs {
            let failing = failing_units(evidence, inputs);
            let mut asked_rows = vec![failing.is_none(); inputs.tokens()];
            for unit in failing.iter().flatten() {
                unit.rows.iter().for_each(|&row| asked_rows[row] = true);
                places.push(place(inputs, unit));
            }
            all &= asked_rows.iter().all(|&asked| asked);
            rows.insert(inputs.microbatch, asked_rows);
        }
        SuspectTokens { evidence, rows, places: (!all).then_some(places) }
    }

    /// Whether each token of a microbatch is suspect, `[T]`.
    pub fn rows(&self, inputs: &MicrobatchInputs) -> &[bool] {
        &self.rows[&inputs.microbatch]
    }

    /// The suspect tokens that count in the loss, of the sample or of all.
    pub fn tokens(&self, inputs: &MicrobatchInputs) -> Vec<usize> {
        let rows = self.rows(inputs);
        tokens(self.evidence, inputs).into_iter().filter(|&t| rows[t]).collect()
    }

    /// The suspect microbatches and ranks in words; none where all are, or more than `PLACES`.
    pub fn place(&self) -> Option<String> {
        let places = self.places.as_ref()?;
        (1..=PLACES).contains(&places.len()).then(|| places.join(", "))
    }
}

/// The tokens of the ranks whose rows fail; `None` where the failing rows were not compared rank by
/// rank.
fn failing_units(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<Vec<Unit>> {
    let of_rows = |key: &&Key| ROWS.contains(&key.stage) && key.microbatch == inputs.microbatch;
    evidence.residuals.keys().find(of_rows)?;
    let failing = evidence.failing.iter().filter(of_rows);
    let ranks: Vec<Rank> = failing.map(|key| key.rank).collect::<Option<_>>()?;
    let mut units = evidence.step.rank_rows(inputs).ok()?;
    units.retain(|unit| unit.ranks.iter().any(|rank| ranks.contains(rank)));
    Some(units)
}

/// A microbatch and the ranks that hold these tokens of it, in words.
pub fn place(inputs: &MicrobatchInputs, unit: &Unit) -> String {
    let ranks = name_ranks(&unit.ranks);
    match inputs.microbatch {
        Some(Microbatch(at)) => format!("microbatch {at} of {ranks}"),
        None => ranks,
    }
}
