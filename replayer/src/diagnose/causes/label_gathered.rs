//! Label logits that were gathered at the wrong place of the logits' memory: by one length of a row
//! where rows have another, as where rows are padded and the gather takes the number of classes.

use std::collections::BTreeMap;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::direct::Direct;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// Elements by which a row may be longer than its classes.
const MOST: usize = 512;
/// Tokens that must show it.
const FEWEST: usize = 6;
/// Tokens that are looked at before all are.
const LOOKED: usize = 24;
/// Largest difference of a logit from the one that it is taken for, relative.
const NEAR: f64 = 0.01;

/// The logits' rows are so long, and those of the gather so long.
#[derive(Clone, Copy)]
struct Lengths {
    row: usize,
    gather: usize,
}

impl Lengths {
    /// The token and the class whose logit a token's label finds.
    fn found(self, token: usize, label: usize) -> (usize, usize) {
        let at = token * self.gather + label;
        (at / self.row, at % self.row)
    }
}

/// Where every captured label logit is the one that two such lengths find.
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
    // Those of the first token are found where they are.
    let all: Vec<usize> = (1..inputs.tokens()).filter(counted).collect();
    let some: Vec<usize> = all.iter().step_by(all.len().div_ceil(LOOKED).max(1)).copied().collect();
    let fits = |of: &Lengths| {
        let mut shown = 0;
        for &t in &some {
            let Some(z) = logit(&direct, inputs, *of, t) else { continue };
            let own = captured.values[t];
            if !((own - z).abs() <= NEAR * (own.abs() + z.abs())) {
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
            // What lies between rows is not known.
            let z = logit(&direct, inputs, lengths, t).unwrap_or(captured.values[t]);
            rows.insert(t, vec![(0, z)]);
        }
        world.of.insert(key, rows);
    }
    let parameters = vec![
        ("operand", "the label's logit".to_string()),
        ("view", format!("rows of {}, read as rows of {}", lengths.row, lengths.gather)),
    ];
    Some(Hypothesis::new(world, parameters).fitted(1))
}

/// The logit that a token's label finds; none outside the logits.
fn logit(direct: &Direct<'_>, inputs: &MicrobatchInputs, of: Lengths, token: usize) -> Option<f64> {
    let (row, class) = of.found(token, inputs.labels[token] as usize);
    let inside = row < inputs.tokens() && class < direct.head.valid_vocab;
    inside.then(|| direct.logit_at(row, class).0)
}
