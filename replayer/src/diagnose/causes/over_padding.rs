//! Label smoothing that spreads ε over the padding's columns too, in the gradient, so each class
//! gets less. Unless the padding's entries of dlogits are set to 0 afterwards, they are in dq and
//! dk as well.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::assemble::Row;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::single_tokens::{Direct, WORK};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, StagePlace, UnitName, UnitTokens, World};

/// The hypotheses, with and without the padding's own entries.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let columns_and_valid = |inputs: &MicrobatchInputs| {
        let head = inputs.head(evidence.step)?;
        let columns = head.given.map_or(head.k.rows, |given| given.cols);
        (columns > head.valid_vocab).then_some((columns, head.valid_vocab))
    };
    let Some((columns, valid)) = evidence.inputs.first().and_then(columns_and_valid) else {
        return Vec::new();
    };
    let share = valid as f64 / columns as f64;
    let words = |entries: &str| {
        let over = format!("all {columns} columns, the padding included");
        vec![("smoothed over", over), ("the padding's entries", entries.to_string())]
    };
    let with_entries = entries(evidence, share).map(|with_entries| {
        Hypothesis::new(
            OverPadding { share, valid, entries: with_entries },
            words("-g ε/V, in dq and dk too"),
        )
    });
    let set = OverPadding { share, valid, entries: Entries::new() };
    let set = Hypothesis::new(set, words("set to 0"));
    [Some(set), with_entries].into_iter().flatten().collect()
}

/// The padding's entries of dlogits and what they add to gradients, by microbatch.
type Entries = BTreeMap<Option<Microbatch>, Padding>;

struct Padding {
    /// The entry of each token, the same in all columns of the padding.
    entries: BTreeMap<usize, f64>,
    /// Sum of the padding's rows of k, `[D]`.
    k: Vec<f64>,
    /// The gradients of each unit that all rows of the padding share.
    sums: BTreeMap<UnitName, Sums>,
}

#[derive(Default)]
struct Sums {
    /// Sum of the entries: dbias of the padding.
    entries: f64,
    /// Sum of the entries times q, `[D]`: a row of dk in the padding.
    products: Vec<f64>,
    /// Variance that rounding of the partial sums causes in it, `[D]`.
    noise: Vec<f64>,
}

impl Sums {
    /// `tokens`: entry and row of q of each token; `unit`: unit roundoff of a partial sum. Each of
    /// n addends passes through at most n roundings.
    fn of(tokens: &[(f64, Vec<f64>)], width: usize, unit: f64) -> Sums {
        let mut sums = Sums { products: vec![0.0; width], noise: vec![0.0; width], entries: 0.0 };
        for (entry, q) in tokens {
            sums.entries += entry;
            for ((to, noise), q) in sums.products.iter_mut().zip(&mut sums.noise).zip(q) {
                *to += entry * q;
                *noise += (unit * entry * q).powi(2) * tokens.len() as f64 / 3.0;
            }
        }
        sums
    }
}

/// Computes them; `None` where the padding of k has NaN, or there are too many rows.
fn entries(evidence: &Evidence<'_>, share: f64) -> Option<Entries> {
    let mut of_microbatches = Entries::new();
    let roundings = evidence.roundings()?;
    let unit_roundoff = roundings.compute();
    for inputs in evidence.inputs {
        let direct = Direct::of_logits(evidence, inputs)?;
        let (rows, valid) = (direct.head.k.rows, direct.head.valid_vocab);
        let slope = direct.head.transform.scale;
        let all = (rows - valid + inputs.tokens()).saturating_mul(direct.head.q.cols);
        if all > WORK || evidence.spend(all) {
            return None;
        }
        let of_unit = evidence.reference().cotangents.get(&inputs.microbatch)?;
        let entries: BTreeMap<usize, f64> =
            of_unit.iter().map(|(&t, cotangents)| (t, cotangents.smooth * share * slope)).collect();
        let mut k = vec![0.0; direct.head.q.cols];
        for row in valid..rows {
            k.iter_mut().zip(direct.k(Row::From(row))).for_each(|(to, k)| *to += k);
        }
        if k.iter().any(|x| !x.is_finite()) {
            return None;
        }
        let mut sums = BTreeMap::new();
        for unit in evidence.step.units(inputs).ok()? {
            let of_token = |&t: &usize| Some((*entries.get(&t)?, direct.q(Row::From(t))));
            let tokens: Vec<(f64, Vec<f64>)> = unit.rows.iter().filter_map(of_token).collect();
            let sums_of_unit = Sums::of(&tokens, k.len(), unit_roundoff);
            sums.insert((inputs.microbatch, unit.rank()), sums_of_unit);
        }
        of_microbatches.insert(inputs.microbatch, Padding { entries, k, sums });
    }
    Some(of_microbatches)
}

struct OverPadding {
    /// Share of the columns that are valid classes.
    share: f64,
    /// Columns that are not padding.
    valid: usize,
    entries: Entries,
}

impl World for OverPadding {
    fn cotangents(&self, _tokens: &UnitTokens<'_>, [_, _, smooth]: [&mut [f64]; 3]) {
        smooth.iter_mut().for_each(|x| *x *= self.share);
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let Some(entries) = self.entries.get(&expectation.place.microbatch) else { return };
        let sums = entries.sums.get(&(expectation.place.microbatch, expectation.place.rank));
        for (row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            let padded = *row >= self.valid;
            match (expectation.place.stage, entries.entries.get(row), sums) {
                (Stage::Dlogits, Some(entry), _) => {
                    values[self.valid..].iter_mut().for_each(|to| *to += entry);
                }
                (Stage::Dq, Some(entry), _) => {
                    values.iter_mut().zip(&entries.k).for_each(|(to, k)| *to += entry * k);
                }
                (Stage::Dk, _, Some(sums)) if padded => {
                    values.iter_mut().zip(&sums.products).for_each(|(to, x)| *to += x);
                }
                (Stage::Dbias, _, Some(sums)) if padded => values[0] += sums.entries,
                _ => {}
            }
        }
    }

    fn noise(&self, place: StagePlace, row: usize, column: usize) -> f64 {
        let entries = self.entries.get(&place.microbatch).filter(|_| row >= self.valid);
        let sums = entries.and_then(|padding| padding.sums.get(&(place.microbatch, place.rank)));
        sums.filter(|_| place.stage == Stage::Dk).map_or(0.0, |sums| sums.noise[column])
    }
}
