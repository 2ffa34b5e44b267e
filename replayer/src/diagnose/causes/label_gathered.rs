//! Label logits that were gathered from the wrong place in the logits' memory, because the gather
//! used another row length than the logits have: for example the number of classes where rows are
//! padded.

use std::collections::BTreeMap;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::single_tokens::Direct;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// A row may be longer than the number of classes by up to this many elements.
const MOST: usize = 512;
/// At least this many tokens must fit.
const FEWEST: usize = 6;
/// How many tokens are compared first.
const LOOKED: usize = 24;
/// Largest relative difference between a captured label logit and the one at the wrong place.
const NEAR: f64 = 0.01;

/// The row length that the logits have, and the one that the gather used.
#[derive(Clone, Copy)]
struct Lengths {
    row: usize,
    gather: usize,
}

impl Lengths {
    /// The token and the class whose logit is gathered for a token's label.
    fn gathered(self, token: usize, label: usize) -> (usize, usize) {
        let offset = token * self.gather + label;
        (offset / self.row, offset % self.row)
    }
}

/// The hypothesis, where two such lengths explain every failing label logit.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::LabelLogits]).map(|(key, _)| key).collect();
    let first = *keys.first()?;
    let inputs = evidence.inputs_of(first.microbatch)?;
    let direct = Direct::of_logits(evidence, inputs)?;
    let classes = direct.head.k.rows.max(direct.head.valid_vocab);
    let padded = (1..=MOST).flat_map(|more| {
        let longer = classes + more;
        [Lengths { row: longer, gather: classes }, Lengths { row: classes, gather: longer }]
    });
    let captured = evidence.captured(first)?;
    let counted = |t: &usize| inputs.labels[*t] != IGNORED;
    // The first token's label logit is gathered from the right place in any case.
    let all: Vec<usize> = (1..inputs.tokens()).filter(counted).collect();
    let some: Vec<usize> = all.iter().step_by(all.len().div_ceil(LOOKED).max(1)).copied().collect();
    let fits = |lengths: &Lengths| {
        let mut shown = 0;
        for &t in &some {
            let Some(z) = logit(&direct, inputs, *lengths, t) else { continue };
            let logit = captured.values[t];
            if !((logit - z).abs() <= NEAR * (logit.abs() + z.abs())) {
                return false;
            }
            shown += 1;
        }
        shown >= FEWEST
    };
    if evidence.spend(2 * MOST * some.len() * direct.head.q.cols.max(1)) {
        return None;
    }
    let lengths = padded.into_iter().find(fits)?;
    let mut world = ReplacedValues::default();
    for key in keys {
        let inputs = evidence.inputs_of(key.microbatch)?;
        let (direct, captured) = (Direct::of_logits(evidence, inputs)?, evidence.captured(key)?);
        let mut rows = BTreeMap::new();
        for t in (0..inputs.tokens()).filter(|t| inputs.labels[*t] != IGNORED) {
            // The padding between rows is not in the dump, so a value gathered from there counts as
            // right.
            let z = logit(&direct, inputs, lengths, t).unwrap_or(captured.values[t]);
            rows.insert(t, vec![(0, z)]);
        }
        world.rows_of_key.insert(key, rows);
    }
    let parameters = vec![
        ("operand", "the label's logit".to_string()),
        ("view", format!("rows of {}, read as rows of {}", lengths.row, lengths.gather)),
    ];
    Some(Hypothesis::new(world, parameters).fitted(1))
}

/// The logit that is gathered for a token's label; none if that lies outside the logits.
fn logit(
    direct: &Direct<'_>,
    inputs: &MicrobatchInputs,
    lengths: Lengths,
    token: usize,
) -> Option<f64> {
    let (row, class) = lengths.gathered(token, inputs.labels[token] as usize);
    let inside = row < inputs.tokens() && class < direct.head.valid_vocab;
    inside.then(|| direct.logit_at(row, class).0)
}
