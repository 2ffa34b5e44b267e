//! Where captured values are NaN or infinite, and a world in which the reference is NaN there.

use std::collections::BTreeMap;

use backtape::identity::{Microbatch, Rank};

use super::token_runs::of_ranks;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::world::{Expectation, World};

/// The number of columns and, row-major, whether each value is NaN or infinite.
pub type Mask = (usize, Vec<bool>);

/// Every failing comparison with NaN or infinite values.
#[derive(Clone, Debug)]
pub struct Nans {
    /// The first such comparison, in the order of the stages.
    pub first: Key,
    /// The rank that holds its first such value, where that is known.
    pub rank: Option<Rank>,
    /// Row of its first such value.
    pub row: usize,
    /// Column of its first such value.
    pub column: usize,
    /// The mask of each such comparison.
    pub masks: BTreeMap<Key, Mask>,
}

impl Nans {
    /// The rows of a comparison in which all, or any, values are NaN or infinite.
    pub fn rows(&self, key: Key, all: bool) -> Vec<usize> {
        let Some((columns, mask)) = self.masks.get(&key) else { return Vec::new() };
        let rows = mask.chunks((*columns).max(1)).enumerate();
        let bad = |row: &[bool]| match all {
            true => row.iter().all(|&bad| bad),
            false => row.contains(&true),
        };
        rows.filter(|(_, row)| bad(row)).map(|(at, _)| at).collect()
    }
}

/// The NaN and infinite values of the failing comparisons; `None` where there are none.
pub fn nans(evidence: &Evidence<'_>) -> Option<Nans> {
    let mut masks = BTreeMap::new();
    for &key in &evidence.failing {
        if evidence.residuals[&key].nonfinite == 0 {
            continue;
        }
        let captured = evidence.captured(key)?;
        let mask: Vec<bool> = captured.values.iter().map(|x| !x.is_finite()).collect();
        if mask.contains(&true) {
            masks.insert(key, (captured.columns, mask));
        }
    }
    let (&first, (columns, mask)) = masks.first_key_value()?;
    let position = mask.iter().position(|&bad| bad)?;
    let (row, column) = (position / columns, position % columns);
    let rank = first.rank.or_else(|| holder(evidence, first, row));
    Some(Nans { first, rank, row, column, masks })
}

/// The rank that holds a token's row.
fn holder(evidence: &Evidence<'_>, key: Key, row: usize) -> Option<Rank> {
    let inputs = evidence.inputs_of(key.microbatch).filter(|_| key.stage < Stage::DkLse)?;
    let runs = of_ranks(evidence.step, inputs);
    let units = evidence.step.rank_rows(inputs).ok()?;
    let position = runs.iter().position(|run| run.contains(&row))?;
    units.get(position)?.rank()
}

/// The reference is NaN where the captured values are NaN or infinite, and as declared elsewhere.
pub struct NanWhere {
    /// The NaN and infinite values of each comparison.
    pub masks: BTreeMap<Key, Mask>,
    /// Stages whose captured values later stages of the job did not read.
    pub distrusts: Vec<Stage>,
}

impl World for NanWhere {
    fn has_nan(&self) -> bool {
        true
    }

    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        !self.distrusts.contains(&stage)
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        let Some((columns, mask)) = self.masks.get(&key) else { return };
        for (&row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            for (column, x) in values.iter_mut().enumerate().take(*columns) {
                if mask.get(row * columns + column) == Some(&true) {
                    *x = f64::NAN;
                }
            }
        }
    }
}
