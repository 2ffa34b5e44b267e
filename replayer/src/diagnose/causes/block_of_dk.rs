//! A dk alone whose product read the rows of q that a block's offset times its size gives.
//!
//! dk is `Eᵀ q'`, E the entries of dlogits and q' the rows that were read. With numbers r of either
//! sign for the classes, `r dk = (r Eᵀ) q'`: E is summed once, and every size of block is held
//! against a few columns of dk, none from a list.

use super::block_index_times_block::{BEYOND, parameters};
use crate::assemble::Row;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::direct::Direct;
use crate::diagnose::detectors::extents::of_ranks;
use crate::diagnose::detectors::gradient::Gradient;
use crate::diagnose::detectors::maps::{Beyond, Map};
use crate::diagnose::detectors::misread::Operand;
use crate::diagnose::detectors::plane::Rows;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// Columns of dk that are looked at, at most.
const COLUMNS: usize = 16;
/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 1e-3;

/// Where every dk that fails, and nothing else, is made so.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dk]).map(|(key, _)| key).collect();
    if evidence.fails_any(&[Stage::Dq, Stage::Dlogits, Stage::Dbias]) {
        return None;
    }
    let first = Gradient::of(evidence, *keys.first()?)?;
    let (size, beyond) = map_of(evidence, &first)?;
    let mut world = Instead::default();
    for key in keys {
        let of = Gradient::of(evidence, key)?;
        let changed = of.entries(false)?.transposed_times(&read(evidence, &of, (size, beyond))?);
        world = world.rows(key, (0..changed.count()).map(|at| (at, changed.row(at).to_vec())));
    }
    let mut words = parameters(Operand::Q, size, beyond);
    words.push(("only in", "dk".to_string()));
    Some(Hypothesis::new(world, words).fitted(1))
}

/// The block size, and what is read beyond the end, that come nearest to a few columns of dk.
fn map_of(evidence: &Evidence<'_>, of: &Gradient) -> Option<(usize, Beyond)> {
    let entries = of.entries(false)?;
    let (tokens, width) = (entries.count(), of.captured.cols.min(COLUMNS));
    let moved = tokens * tokens * BEYOND.len() * of.captured.cols;
    if evidence.spend(entries.values.len() + moved) {
        return None;
    }
    // Any signs do that follow no pattern of classes: those of a quadratic sequence.
    let sign = |class: usize| if (class * class + class / 3) % 7 < 3 { 1.0 } else { -1.0 };
    let weigh = |row: &[f64]| row.iter().enumerate().map(|(v, e)| sign(v) * e).sum::<f64>();
    let sums: Vec<f64> = (0..tokens).map(|t| weigh(entries.row(t))).collect();
    let column =
        |of: &Rows, d: usize| -> f64 { (0..of.count()).map(|v| sign(v) * of.row(v)[d]).sum() };
    let wanted: Vec<f64> = (0..width).map(|d| column(&of.captured, d)).collect();
    let off = |q: &Rows| -> f64 {
        let made =
            |d: usize| sums.iter().enumerate().map(|(t, sum)| sum * q.row(t)[d]).sum::<f64>();
        wanted.iter().enumerate().map(|(d, wanted)| (made(d) - wanted).powi(2)).sum()
    };
    let all = (2..tokens).flat_map(|size| BEYOND.map(|beyond| (size, beyond)));
    let tried = all.filter_map(|map| Some((map, off(&read(evidence, of, map)?))));
    let (map, least) = tried.min_by(|a, b| a.1.total_cmp(&b.1))?;
    (least <= LEFT * off(of.other())).then_some(map)
}

/// The rows of q that the unit's tokens read.
fn read(evidence: &Evidence<'_>, of: &Gradient, (size, beyond): (usize, Beyond)) -> Option<Rows> {
    let inputs = evidence.inputs_of(of.key.microbatch)?;
    let direct = Direct::new(evidence, inputs)?;
    let map = Map::BlockTwice { size, beyond };
    let rows: Vec<Row> = map.in_runs(inputs.tokens(), &of_ranks(evidence.step, inputs))?;
    let values = of.plane.rows.iter().flat_map(|&t| direct.q(rows[t])).collect();
    Some(Rows { cols: of.other().cols, values })
}
