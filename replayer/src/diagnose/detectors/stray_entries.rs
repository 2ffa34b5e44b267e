//! Entries of dlogits that were written to the wrong place: the label's entry `-g` of a token lands
//! in another token's row, or at another class.
//!
//! Where dlogits are stored in few bits, the whole entry is rounded, not the label's part of it.
//! Tokens with the same `g` then round alike, and these roundings add up in the sums.

use std::collections::{BTreeMap, HashMap};

use backtape::identity::{Microbatch, Rank};

use super::single_tokens::Direct;
use crate::assemble::Row;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::Precision;
use crate::replay::world::{Expectation, UnitTokens, World};

/// An entry that stands at a place which is not its token's label.
#[derive(Clone, Debug)]
struct Stray {
    token: usize,
    class: usize,
    /// Its value, with the derivative of the logit applied.
    entry: f64,
    k: Vec<f64>,
    q: Vec<f64>,
    /// The first rank of the unit that holds the token.
    rank: Option<Rank>,
}

/// Label entries that are missing in their place, and those that stand elsewhere.
#[derive(Default)]
pub struct Strays {
    missing: BTreeMap<Option<Microbatch>, Vec<usize>>,
    strays: BTreeMap<Option<Microbatch>, Vec<Stray>>,
    /// Label logits that were read from another place, by token.
    pub label_logits: BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>,
    /// How far each of those may be off through rounding, which is that of the row it was read
    /// from, not of the token's own.
    pub off: BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>,
    /// The format that an entry of dlogits is rounded to after the stray was added; none where it
    /// is not rounded.
    rounded: Option<Precision>,
    /// Upstream gradients of tokens that do not count in the loss, where the softmax part has them
    /// all the same.
    pub upstream: BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>,
    /// Stages that do not have the stray entries.
    pub not_in: Vec<Stage>,
}

impl Strays {
    /// Without any entry yet, for dlogits that are rounded to this format.
    pub fn rounded(rounded: Option<Precision>) -> Strays {
        Strays { rounded, ..Strays::default() }
    }

    /// Removes the label entries of these tokens.
    pub fn miss(&mut self, microbatch: Option<Microbatch>, tokens: Vec<usize>) {
        self.missing.insert(microbatch, tokens);
    }

    /// Adds entries `(token, class, c)`; c is the value before the derivative of the logit is
    /// applied.
    pub fn add(
        &mut self,
        evidence: &Evidence<'_>,
        inputs: &MicrobatchInputs,
        entries: &[(usize, usize, f64)],
    ) -> Option<()> {
        let direct = Direct::of_logits(evidence, inputs)?;
        let units = evidence.step.units(inputs).ok()?;
        let stray = |&(token, class, c): &(usize, usize, f64)| {
            let (q, k) = (direct.q(Row::From(token)), direct.k(Row::From(class)));
            let (z, slope) = direct.logit_at(token, class);
            let reference = evidence.reference();
            let softmax_part =
                reference.softmax_entry(inputs.microbatch, token, (z, slope)).unwrap_or(0.0);
            let whole = softmax_part + c * slope;
            let entry = match self.rounded {
                Some(to) => f64::from(to.round(whole as f32)) - softmax_part,
                None => c * slope,
            };
            let unit = units.iter().find(|unit| unit.rows.binary_search(&token).is_ok());
            let rank = unit.and_then(|unit| unit.rank());
            Stray { token, class, entry, k, q, rank }
        };
        let valid = |of: &&(usize, usize, f64)| of.1 < inputs.valid_vocab;
        let all = entries.iter().filter(valid).map(stray).collect();
        self.strays.insert(inputs.microbatch, all);
        Some(())
    }
}

impl World for Strays {
    fn speaks_of(&self, stage: Stage) -> bool {
        !self.not_in.contains(&stage)
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        for (&t, &x) in self.upstream.get(&inputs.microbatch).into_iter().flatten() {
            g[t] = x;
        }
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        let Some(missing) = self.missing.get(&tokens.inputs.microbatch) else { return };
        for (index, t) in tokens.rows.iter().enumerate() {
            if missing.binary_search(t).is_ok() {
                label[index] = 0.0;
            }
        }
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let mb = expectation.place.microbatch;
        if expectation.place.stage == Stage::LabelLogits {
            for (&t, &z) in self.label_logits.get(&mb).into_iter().flatten() {
                expectation.values[t] = z;
            }
            return;
        }
        let Some(strays) = self.strays.get(&mb) else { return };
        let width = expectation.columns.max(1);
        let place: HashMap<usize, usize> =
            expectation.rows.iter().enumerate().map(|(at, &row)| (row, at)).collect();
        for stray in strays {
            let (row, more): (usize, Vec<(usize, f64)>) = match expectation.place.stage {
                Stage::Dlogits => (stray.token, vec![(stray.class, stray.entry)]),
                Stage::Dq | Stage::DqLabel => {
                    (stray.token, stray.k.iter().map(|k| stray.entry * k).enumerate().collect())
                }
                Stage::Dk | Stage::DkLabel if stray.rank == expectation.place.rank => {
                    (stray.class, stray.q.iter().map(|q| stray.entry * q).enumerate().collect())
                }
                Stage::Dbias if stray.rank == expectation.place.rank => {
                    (stray.class, vec![(0, stray.entry)])
                }
                _ => continue,
            };
            let Some(&index) = place.get(&row) else { continue };
            for (column, x) in more {
                expectation.values[index * width + column] += x;
            }
        }
    }

    fn ties(&self, stage: Stage, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        let off = self.off.get(&inputs.microbatch).filter(|_| stage == Stage::LabelLogits)?;
        let mut all = vec![0.0; inputs.tokens()];
        off.iter().for_each(|(&t, &x)| all[t] = x);
        Some(all)
    }
}
