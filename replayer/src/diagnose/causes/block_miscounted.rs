//! `block-miscounted`: a chunk of tokens or a tile of the vocabulary is left out of a sum, or is
//! in it more than once; or a tile of a gradient is not written, or written more than once.
//! A gradient of the bias is a sum over tokens, too.
//!
//! Real: the last partial chunk that a floor division drops, one that is moved back over its
//! neighbour and counts the overlap twice, rows of a reused buffer behind the last one.
//!
//! Detectors: a gradient is solved for the weight of each product, row and column
//! (`detectors::addend_counts`), a sum of dk for the weight of each token in it
//! (`detectors::sum_counts`). Where the gradient of the bias or the loss fails with dk, they are
//! compared with the weights of tokens that dk gave (`detectors::token_counts`). The rows of dk
//! also show how often each class is in the softmax (`detectors::class_counts`). A tile of some
//! rows and columns that alone holds zeros was not written. Emulation: tokens with the weights that
//! were found, in dk alone or in everything that is summed over tokens; classes, rows or columns of
//! a gradient with such weights; classes in the whole head.

use super::unwritten_tile;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addend_counts::{ALL, Counted, What, counted};
use crate::diagnose::detectors::class_counts::CountedClasses;
use crate::diagnose::detectors::sum_counts::{CountedSums, GradientPart};
use crate::diagnose::detectors::token_counts::CountedTokens;
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;

/// The catalogue's entry.
pub struct BlockMiscounted;

/// Up to this many runs are listed; where there are more, no block was miscounted.
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
        let all = Stage::GRADIENTS.into_iter().filter(|stage| *stage != Stage::Dlogits);
        let in_stage = |stage| {
            counted(evidence, stage, &ALL)
                .into_iter()
                .map(move |count_of_stage| (stage, count_of_stage))
        };
        let all = all.flat_map(in_stage);
        let mut hypotheses: Vec<Hypothesis> =
            all.filter_map(|(stage, (what, counted))| hypothesis(counted, what, stage)).collect();
        let kinds =
            [(GradientPart::Whole, What::Addends), (GradientPart::Softmax, What::OfSoftmax)];
        hypotheses
            .extend(kinds.into_iter().filter_map(|(part, what)| of_sums(evidence, part, what)));
        hypotheses.extend(of_tokens(evidence));
        hypotheses.extend(of_classes(evidence));
        hypotheses.extend(unwritten_tile::hypothesis(evidence));
        hypotheses
    }
}

/// Tokens that count more or less often than once in everything that is summed over tokens.
fn of_tokens(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let counted = CountedTokens::of(evidence)?;
    let stages: Vec<&str> = counted.stages.iter().map(|stage| stage.name()).collect();
    let parameters = vec![
        ("of", stages.join(", ")),
        ("what", "tokens".to_string()),
        ("which", counted.said.join(", ")),
    ];
    let fitted = 1 + counted.said.len();
    (counted.said.len() <= TOLD).then(|| Hypothesis::new(counted, parameters).fitted(fitted))
}

/// Classes that are in the softmax more or less often than once.
fn of_classes(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let counted = CountedClasses::of(evidence).filter(|counted| counted.said.len() <= TOLD)?;
    let parameters = vec![
        ("of", "the softmax, forward and backward".to_string()),
        ("what", "classes".to_string()),
        ("which", counted.said.join(", ")),
    ];
    let fitted = 1 + counted.said.len();
    Some(Hypothesis::new(counted, parameters).fitted(fitted))
}

/// Tokens that are in sums of dk more or less often than once, unless all of a rank's or a
/// microbatch's tokens have one weight.
fn of_sums(evidence: &Evidence<'_>, terms: GradientPart, what: What) -> Option<Hypothesis> {
    let counted = CountedSums::of(evidence, terms)?;
    if counted.of_parts || counted.is_of_devices() {
        return None;
    }
    let words = words_of(what, true);
    let parameters = vec![
        ("of", "the sums of dk".to_string()),
        ("what", words.to_string()),
        ("which", counted.said.join(", ")),
    ];
    let fitted = 1 + counted.said.len();
    (counted.said.len() <= TOLD).then(|| Hypothesis::new(counted, parameters).fitted(fitted))
}

fn words_of(what: What, of_k: bool) -> &'static str {
    match what {
        What::Addends | What::Tile if of_k => "tokens",
        What::Addends | What::Tile => "classes",
        What::OfSoftmax | What::TileOfSoftmax if of_k => "tokens, in the softmax part",
        What::OfSoftmax | What::TileOfSoftmax => "classes, in the softmax part",
        What::OneOfLabel => "the label's addends",
        What::Rows | What::OverHits => "rows",
        What::Columns => "columns",
    }
}

fn hypothesis(counted: Counted, what: What, stage: Stage) -> Option<Hypothesis> {
    let of_k = !stage.is_of_q();
    let words = words_of(what, of_k);
    // Weights in many runs that follow no rule are no miscounted block.
    if counted.rule.is_none() && counted.said.len() > TOLD {
        return None;
    }
    let fitted = if counted.rule.is_some() { 0 } else { 1 + counted.said.len() };
    let said = counted.rule.unwrap_or_else(|| counted.said.join(", "));
    let parameters =
        vec![("of", stage.name().to_string()), ("what", words.to_string()), ("which", said)];
    Some(Hypothesis::new(counted.world, parameters).fitted(fitted))
}
