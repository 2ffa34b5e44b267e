//! `block-index-times-block`: an index map returns the offset of a block instead of its index, and
//! the offset is multiplied by the block's size b once more. Block i is then read at row `i * b *
//! b`: the first block is right, the others are wrong or NaN.
//!
//! Detectors: the captured values of a few tokens are compared with what each block size gives, for
//! q and for k; rows of dq are the reference's rows of other blocks; rows of dk are NaN from the
//! second block on; where dk alone fails, a few of its rows are computed with every block size.
//! Emulation: those rows are read, in both passes or in one, by the softmax path alone or by the
//! whole head; beyond the end, the last block, the last row, zeros or NaN are read.

use std::collections::BTreeMap;

use super::block_of_dk;
use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::data_worlds::MovedRows;
use crate::diagnose::detectors::misread_rows::{
    FailingTokens, Operand, Passes, hypotheses, worlds,
};
use crate::diagnose::detectors::nan::nans;
use crate::diagnose::detectors::row_maps::{BLOCKS, Beyond, Map};
use crate::diagnose::detectors::single_tokens::{alike, energy};
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};

/// The catalogue's entry.
pub struct BlockIndexTimesBlock;

/// What may be read beyond the end.
pub(super) const BEYOND: [Beyond; 5] =
    [Beyond::BlockMovedBack, Beyond::BlockAtEnd, Beyond::LastRow, Beyond::Zeros, Beyond::Wraps];

impl Cause for BlockIndexTimesBlock {
    fn id(&self) -> &str {
        "block-index-times-block"
    }

    fn about(&self) -> &str {
        "a block's index was multiplied by its size twice: blocks after the first are read or written elsewhere"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["MLLM-JAX cef0a7e", "jax 31395", "jax 38497"]
    }

    fn advice(&self) -> &str {
        "return the block's index from the index map: Pallas multiplies it by the block's size itself"
    }

    fn effort(&self) -> Effort {
        Effort::Most
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails_any(&Stage::FORWARD) {
            return Vec::new();
        }
        let mut offered = written(evidence);
        if let Some(failing_tokens) = FailingTokens::new(evidence) {
            for operand in [Operand::K, Operand::Q] {
                let shown = if operand == Operand::K {
                    failing_tokens.block_sizes(evidence, &BEYOND)
                } else {
                    None
                };
                for size in shown.unwrap_or_else(|| sizes(evidence, operand)) {
                    for beyond in BEYOND {
                        let map = Map::BlockTwice { size, beyond };
                        let parameters = parameters(operand, size, beyond);
                        offered.extend(hypotheses(
                            evidence,
                            &failing_tokens,
                            (operand, map),
                            &parameters,
                        ));
                    }
                }
            }
        }
        offered.extend(block_of_dk::hypothesis(evidence));
        offered.extend(strict(evidence));
        offered
    }
}

pub(super) fn parameters(
    operand: Operand,
    size: usize,
    beyond: Beyond,
) -> Vec<(&'static str, String)> {
    let operand_name = if operand == Operand::Q { "q" } else { "k" };
    vec![
        ("operand", operand_name.to_string()),
        ("block", size.to_string()),
        ("beyond the end", beyond.name().to_string()),
    ]
}

/// The usual and declared block sizes that are smaller than the operand.
fn sizes(evidence: &Evidence<'_>, operand: Operand) -> Vec<usize> {
    let rows = |inputs: &MicrobatchInputs| match operand {
        Operand::Q => of_ranks(evidence.step, inputs).iter().map(Vec::len).max(),
        Operand::K => inputs.head(evidence.step).map(|head| head.k.rows),
    };
    let n = evidence.inputs.first().and_then(rows).unwrap_or(0);
    let tiles = evidence.step.options.declared.tiles.unwrap_or_default();
    let declared = if operand == Operand::Q { tiles.tokens } else { tiles.vocab };
    let mut sizes: Vec<usize> =
        BLOCKS.into_iter().chain(declared.map(|size| size as usize)).collect();
    sizes.retain(|&size| size > 1 && n > size);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Hypotheses that rows beyond the end are NaN: then every token is NaN, and so are the rows of dk
/// whose block lies beyond the end.
fn strict(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let Some(nans_found) = nans(evidence) else { return Vec::new() };
    let Some(key) = nans_found.masks.keys().find(|key| key.stage >= Stage::DkLse) else {
        return Vec::new();
    };
    let rows = nans_found.rows(*key, true);
    let mut hypotheses = Vec::new();
    for size in sizes(evidence, Operand::K) {
        let map = Map::BlockTwice { size, beyond: Beyond::Nans };
        let of_k = |inputs: &MicrobatchInputs| map.rows(inputs.head(evidence.step)?.k.rows);
        let Some(read) = evidence.inputs.first().and_then(of_k) else { continue };
        let valid = evidence.inputs[0].valid_vocab;
        let wanted: Vec<usize> = (0..valid).filter(|&v| read[v] == Row::Nans).collect();
        let bad: Vec<usize> = rows.iter().copied().filter(|&v| v < valid).collect();
        if wanted.is_empty() || bad != wanted {
            continue;
        }
        let parameters = parameters(Operand::K, size, Beyond::Nans);
        let all = worlds(evidence, Operand::K, Passes::Backward, &of_k, &parameters);
        hypotheses.extend(all);
    }
    // Only k in the backward is tried: a forward that reads NaN makes everything NaN, which does
    // not show the block size.
    hypotheses
}

/// Hypotheses that blocks of dq are written at `i * b * b`, while the rows where they belong keep
/// the zeros they had.
fn written(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses = Vec::new();
    for size in sizes(evidence, Operand::Q) {
        let mut from = BTreeMap::new();
        let mut fits = false;
        for (key, _) in evidence.failing_of(&[Stage::Dq]) {
            let (Some(inputs), Some(captured)) =
                (evidence.inputs_of(key.microbatch), evidence.captured(key))
            else {
                continue;
            };
            let Some(table) = evidence.reference().stages.get(&key) else { continue };
            let rows = rows_written(inputs.tokens(), &of_ranks(evidence.step, inputs), size);
            let right = |t: &usize| match rows[*t] {
                Row::From(other) => table
                    .get(&other)
                    .is_none_or(|values| energy(values) == 0.0 || alike(captured.row(*t), values)),
                _ => energy(captured.row(*t)) == 0.0,
            };
            fits = table.keys().all(right);
            if !fits {
                break;
            }
            from.insert(key.microbatch, rows);
        }
        if fits && !from.is_empty() {
            let parameters = vec![("operand", "dq".to_string()), ("block", size.to_string())];
            hypotheses.push(Hypothesis::new(MovedRows { from }, parameters));
        }
    }
    hypotheses
}

/// The content of each row after blocks were written at `i * b * b` in memory that was zero.
fn rows_written(n: usize, runs: &[Vec<usize>], size: usize) -> Vec<Row> {
    let mut all = vec![Row::Zeros; n];
    for run in runs {
        for position in 0..run.len() {
            let to = (position / size) * size * size + position % size;
            if let Some(&to) = run.get(to) {
                all[to] = Row::From(run[position]);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_written_squares_away_leave_holes() {
        let rows = rows_written(6, &[(0..6).collect()], 2);
        let (a, z) = (Row::From, Row::Zeros);
        assert_eq!(rows, [a(0), a(1), z, z, a(2), a(3)]);
    }
}
