//! Where captured values are no numbers, and the world in which that is so.

use std::collections::BTreeMap;

use backtape::identity::{Microbatch, Rank};

use super::extents::of_ranks;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::world::{Expectation, World};

/// Columns and, row-major, whether a value is no number.
pub type Mask = (usize, Vec<bool>);

/// Every failing comparison with values that are no numbers.
#[derive(Clone, Debug)]
pub struct Nans {
    /// The first of them, in the order of the stages.
    pub first: Key,
    /// Whose its first such value is, where that is known.
    pub rank: Option<Rank>,
    /// Row of its first such value.
    pub row: usize,
    /// Column of it.
    pub column: usize,
    /// All of them.
    pub of: BTreeMap<Key, Mask>,
}

impl Nans {
    /// Rows of a comparison in which all, or any, values are no numbers.
    pub fn rows(&self, of: Key, all: bool) -> Vec<usize> {
        let Some((columns, mask)) = self.of.get(&of) else { return Vec::new() };
        let rows = mask.chunks((*columns).max(1)).enumerate();
        let bad = |row: &[bool]| match all {
            true => row.iter().all(|&bad| bad),
            false => row.contains(&true),
        };
        rows.filter(|(_, row)| bad(row)).map(|(at, _)| at).collect()
    }
}

/// What the failing comparisons hold that is no number; `None` where all is.
pub fn nans(evidence: &Evidence<'_>) -> Option<Nans> {
    let mut of = BTreeMap::new();
    for &key in &evidence.failing {
        if evidence.residuals[&key].nonfinite == 0 {
            continue;
        }
        let captured = evidence.captured(key)?;
        let mask: Vec<bool> = captured.values.iter().map(|x| !x.is_finite()).collect();
        if mask.contains(&true) {
            of.insert(key, (captured.columns, mask));
        }
    }
    let (&first, (columns, mask)) = of.first_key_value()?;
    let at = mask.iter().position(|&bad| bad)?;
    let (row, column) = (at / columns, at % columns);
    let rank = first.rank.or_else(|| holder(evidence, first, row));
    Some(Nans { first, rank, row, column, of })
}

/// The rank that holds a token's row.
fn holder(evidence: &Evidence<'_>, of: Key, row: usize) -> Option<Rank> {
    let inputs = evidence.inputs_of(of.microbatch).filter(|_| of.stage < Stage::DkLse)?;
    let runs = of_ranks(evidence.step, inputs);
    let units = evidence.step.rank_rows(inputs).ok()?;
    let at = runs.iter().position(|run| run.contains(&row))?;
    units.get(at)?.rank()
}

/// No numbers where none were captured, and all else as it should be.
pub struct NanWhere {
    /// Where.
    pub of: BTreeMap<Key, Mask>,
    /// Stages that the job did not go on with.
    pub distrusts: Vec<Stage>,
}

impl World for NanWhere {
    fn has_nan(&self) -> bool {
        true
    }

    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        !self.distrusts.contains(&stage)
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        let key = Key { stage: of.at.stage, microbatch: of.at.microbatch, rank: of.at.rank };
        let Some((columns, mask)) = self.of.get(&key) else { return };
        for (&row, values) in of.rows.iter().zip(of.values.chunks_mut(of.columns.max(1))) {
            for (column, x) in values.iter_mut().enumerate().take(*columns) {
                if mask.get(row * columns + column) == Some(&true) {
                    *x = f64::NAN;
                }
            }
        }
    }
}
