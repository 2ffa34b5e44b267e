//! A tile of a gradient, some columns of some rows, that was never written and holds zeros, because
//! the schedule of tiles leaves it out.

use std::ops::Range;

use backtape::nan::larger;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::addends::Summed;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// An element whose reference is below this share of the largest one may rightly be 0.
const SMALL: f64 = 1e-3;
/// A tile has at least this many rows and columns.
const LEAST: usize = 2;

/// The hypothesis that every failing gradient or sum of dk has one such tile of zeros and is right
/// elsewhere.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (mut world, mut said) = (ReplacedValues::default(), Vec::new());
    let keys = evidence
        .failing
        .iter()
        .filter(|key| matches!(key.stage, Stage::Dq | Stage::Dk) || key.stage.is_sum());
    for key in keys {
        let (rows, columns) = tile(evidence, *key)?;
        let words = [&rows, &columns].map(|range| format!("{} to {}", range.start, range.end - 1));
        said.push(format!("rows {} of columns {} of {} hold 0", words[0], words[1], key.stage));
        let table = world.rows_of_key.entry(*key).or_default();
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

/// The rows and columns of the tile in a failing gradient that holds zeros where the reference does
/// not.
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
            table.iter().map(|(&row, tile_columns)| (row, tile_columns.clone())).collect()
        }
    };
    let most = wanted
        .iter()
        .flat_map(|(_, tile_columns)| tile_columns)
        .fold(0.0, |most, x| larger(most, x.abs()));
    let (mut rows, mut tile_columns): (Option<Range<usize>>, Option<Range<usize>>) = (None, None);
    let grown = |range: &Option<Range<usize>>, index: usize| {
        let range = range.clone().unwrap_or(index..index + 1);
        Some(range.start.min(index)..range.end.max(index + 1))
    };
    for (row, wanted) in &wanted {
        for (column, (x, wanted)) in captured.row(*row).iter().zip(wanted).enumerate() {
            if *x == 0.0 && wanted.abs() > SMALL * most {
                rows = grown(&rows, *row);
                tile_columns = grown(&tile_columns, column);
            }
        }
    }
    let (rows, tile_columns) = rows.zip(tile_columns)?;
    let is_zero = |row: usize| captured.row(row)[tile_columns.clone()].iter().all(|x| *x == 0.0);
    let large = rows.len() >= LEAST && tile_columns.len() >= LEAST && tile_columns.len() < columns;
    (large && rows.clone().all(is_zero)).then_some((rows, tile_columns))
}
