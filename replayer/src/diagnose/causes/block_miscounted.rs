//! `block-miscounted`: a chunk of tokens or a tile of the vocabulary is left out of a sum, or is
//! in it more than once; or a tile of a gradient is not written, or written more than once.
//!
//! Real: the last partial chunk that a floor division drops, one that is moved back over its
//! neighbour and counts the overlap twice, rows of a reused buffer behind the last one.
//!
//! Detectors: a gradient is solved for how often it holds each addend, row and column
//! (`detectors::counted`).
//! Emulation: tokens that count as often as was found, for dk alone; classes, rows or columns
//! of a gradient as often.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::counted::{ALL, Counted, What, counted};
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;

/// The catalogue's entry.
pub struct BlockMiscounted;

/// Runs that are told in words; where there are more it is no block.
const TOLD: usize = 6;

impl Cause for BlockMiscounted {
    fn id(&self) -> &str {
        "block-miscounted"
    }

    fn about(&self) -> &str {
        "a chunk or tile is left out of a gradient, or is in it more than once"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "a last partial chunk that a floor division drops, or that is moved back over its neighbour",
        ]
    }

    fn advice(&self) -> &str {
        "look at the bounds of the loop over chunks or tiles: the last partial one must be masked, and counted once"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let all =
            [Stage::DqLse, Stage::DqLabel, Stage::Dq, Stage::DkLse, Stage::DkLabel, Stage::Dk];
        let of =
            |stage| counted(evidence, stage, &ALL).into_iter().map(move |found| (stage, found));
        let all = all.into_iter().flat_map(of);
        all.filter_map(|(stage, (what, counted))| hypothesis(counted, what, stage)).collect()
    }
}

fn hypothesis(counted: Counted, what: What, stage: Stage) -> Option<Hypothesis> {
    let of_k = matches!(stage, Stage::DkLse | Stage::DkLabel | Stage::Dk);
    let words = match what {
        What::Addends | What::Tile if of_k => "tokens",
        What::Addends | What::Tile => "classes",
        What::OfSoftmax | What::TileOfSoftmax if of_k => "tokens, in the softmax part",
        What::OfSoftmax | What::TileOfSoftmax => "classes, in the softmax part",
        What::LastOfLabel => "the label's addends",
        What::Rows | What::OverHits => "rows",
        What::Columns => "columns",
    };
    // What is scattered by no rule is no block.
    if counted.rule.is_none() && counted.said.len() > TOLD {
        return None;
    }
    let fitted = if counted.rule.is_some() { 0 } else { 1 + counted.said.len() };
    let said = counted.rule.unwrap_or_else(|| counted.said.join(", "));
    let parameters =
        vec![("of", stage.name().to_string()), ("what", words.to_string()), ("which", said)];
    Some(Hypothesis::new(counted.world, parameters).fitted(fitted))
}
