//! A tile of a gradient, some rows of some columns, that was never written and holds zeros: a
//! schedule of tiles that leaves some of them out.

use std::ops::Range;

use backtape::nan::larger;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::addends::Summed;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// Share of the largest element below which an element may be 0 as it should.
const SMALL: f64 = 1e-3;
/// Rows and columns of a tile at least.
const LEAST: usize = 2;

/// In every gradient, or sum of dk, that fails and of which one tile alone is zeros.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (mut world, mut said) = (ReplacedValues::default(), Vec::new());
    let keys = evidence
        .failing
        .iter()
        .filter(|key| matches!(key.stage, Stage::Dq | Stage::Dk) || key.stage.is_sum());
    for key in keys {
        let (rows, columns) = tile(evidence, *key)?;
        let words = [&rows, &columns].map(|of| format!("{} to {}", of.start, of.end - 1));
        said.push(format!("rows {} of columns {} of {} hold 0", words[0], words[1], key.stage));
        let table = world.of.entry(*key).or_default();
        for row in rows {
            table.insert(row, columns.clone().map(|column| (column, 0.0)).collect());
        }
    }
    said.dedup();
    let fitted = 4 * said.len();
    let parameters =
        vec![("what", "a tile that was not written".to_string()), ("which", said.join("; "))];
    (!said.is_empty()).then(|| Hypothesis::new(world, parameters).fitted(fitted))
}

/// The rows and columns of a failing gradient that alone hold zeros, and should not.
fn tile(evidence: &Evidence<'_>, key: Key) -> Option<(Range<usize>, Range<usize>)> {
    let captured = evidence.captured(key)?;
    let columns = captured.columns;
    let wanted: Vec<(usize, Vec<f64>)> = match key.stage.is_sum() {
        true => {
            let total = Summed::of(evidence, key, true)?.total();
            total.chunks(columns.max(1)).map(<[f64]>::to_vec).enumerate().collect()
        }
        false => {
            let table = evidence.all_rows()?.stages.get(&key)?;
            table.iter().map(|(&row, of)| (row, of.clone())).collect()
        }
    };
    let most = wanted.iter().flat_map(|(_, of)| of).fold(0.0, |most, x| larger(most, x.abs()));
    let (mut rows, mut of): (Option<Range<usize>>, Option<Range<usize>>) = (None, None);
    let grown = |range: &Option<Range<usize>>, at: usize| {
        let range = range.clone().unwrap_or(at..at + 1);
        Some(range.start.min(at)..range.end.max(at + 1))
    };
    for (row, wanted) in &wanted {
        for (column, (x, wanted)) in captured.row(*row).iter().zip(wanted).enumerate() {
            if *x == 0.0 && wanted.abs() > SMALL * most {
                rows = grown(&rows, *row);
                of = grown(&of, column);
            }
        }
    }
    let (rows, of) = rows.zip(of)?;
    let is_zero = |row: usize| captured.row(row)[of.clone()].iter().all(|x| *x == 0.0);
    let large = rows.len() >= LEAST && of.len() >= LEAST && of.len() < columns;
    (large && rows.clone().all(is_zero)).then_some((rows, of))
}
