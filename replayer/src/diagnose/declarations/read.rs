//! Values of options that are read off the data.

use backtape::identity::Microbatch;
use backtape::role::Role;

use super::Masks;
use crate::diagnose::detectors::raw_logits::RawLogits;
use crate::diagnose::evidence::Evidence;
use crate::head::step::numbers;
use crate::head::{MicrobatchInputs, Scores};
use crate::kernels::matrix::IGNORED;

/// How far apart, relatively, two factors, or a factor and a power of two, may be: in bf16 a mean
/// is not known better.
const ALIKE: f64 = 4e-3;

/// The one factor of everything that fails.
pub(super) fn one_factor(evidence: &Evidence<'_>) -> Option<f64> {
    let mut residuals = evidence.failing.iter().map(|key| evidence.residuals[key]);
    let first = residuals.clone().next()?.factor;
    let same = |factor: f64| (factor / first - 1.0).abs() < ALIKE;
    residuals.all(|residual| residual.is_scaled() && same(residual.factor)).then_some(first)
}

/// The power of two that a factor is, if it is one and not 1.
pub(super) fn power_of_two(factor: f64) -> Option<f64> {
    let power = factor.log2().round();
    let near = power != 0.0 && (factor / power.exp2() - 1.0).abs() < ALIKE;
    (factor > 0.0 && near).then(|| power.exp2())
}

/// The number that every loss was divided by, where one factor explains everything that fails; a
/// whole number where one is near.
pub(in crate::diagnose) fn denominator(evidence: &Evidence<'_>) -> Option<f64> {
    let factor = one_factor(evidence)?;
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let mut declared = Vec::new();
    for inputs in &all {
        declared.extend(evidence.step.denominators(&all, inputs).ok()?.into_iter().map(|(_, n)| n));
    }
    let first = *declared.first()?;
    let divisor = first / factor;
    let whole = divisor.round();
    let number = if (divisor / whole - 1.0).abs() < ALIKE { whole } else { divisor };
    let usable = number.is_finite() && number != 0.0;
    (usable && declared.iter().all(|&n| n == first)).then_some(number)
}

/// The numbers of valid classes that the data suggest: up to the last class whose row of dk is not
/// zero, and the number over which the exponentials give the captured lse.
pub(super) fn valid_vocabs(evidence: &Evidence<'_>) -> Vec<usize> {
    let largest = evidence.inputs.iter().flat_map(|inputs| &inputs.labels);
    let largest = largest.filter(|&&label| label != IGNORED).max().map_or(0, |&n| n as usize);
    let columns = evidence.inputs.first().map_or(0, |inputs| inputs.valid_vocab);
    let mut sizes: Vec<usize> = evidence
        .inputs
        .iter()
        .filter_map(|inputs| live_rows(evidence, inputs))
        .max()
        .into_iter()
        .chain(RawLogits::of(evidence).valid_vocab(evidence.step.options.transform))
        .collect();
    sizes.retain(|&valid| valid > largest && valid < columns);
    sizes.dedup();
    sizes
}

/// How many rows a captured dk has up to the last that is not zero.
fn live_rows(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<usize> {
    let Scores::Product { k, .. } = &inputs.scores else { return None };
    let key = evidence.step.find(Role::Dk, inputs.microbatch)?;
    let tensor = evidence.step.assemble(key).ok()?;
    let (values, rows) = (numbers(&tensor)?, k.shape[0] as usize);
    let width = values.len().checked_div(rows).filter(|&width| width > 0)?;
    let row_of = |index: usize| {
        if evidence.step.options.transposed() { index % rows } else { index / width }
    };
    (0..values.len()).filter(|&index| values[index] != 0.0).map(row_of).max().map(|row| row + 1)
}

/// The label that the job may ignore: one whose tokens all have no gradient. Empty if there are
/// several.
pub(super) fn ignored_labels(evidence: &Evidence<'_>) -> Vec<i64> {
    let mut dead: Vec<u32> = Vec::new();
    let mut alive: Vec<u32> = Vec::new();
    for inputs in evidence.inputs {
        let Some(rows) = rows_of_dq(evidence, inputs.microbatch, inputs.tokens()) else { continue };
        for (t, &label) in inputs.labels.iter().enumerate() {
            if label != IGNORED && inputs.weights[t] != 0.0 {
                if rows[t] { alive.push(label) } else { dead.push(label) }
            }
        }
    }
    let outside =
        evidence.inputs.iter().flat_map(|inputs| &inputs.outside).map(|&(_, label)| label);
    let mut ignored: Vec<i64> = dead
        .into_iter()
        .filter(|label| !alive.contains(label))
        .map(i64::from)
        .chain(outside)
        .collect();
    ignored.sort_unstable();
    ignored.dedup();
    // The option has one value, so several labels without a gradient are no ignored label.
    if ignored.len() == 1 { ignored } else { Vec::new() }
}

/// Whether each token counts, by microbatch: of those that should, some have a gradient of zero. None
/// where all have one, or none has.
pub(super) fn masks(evidence: &Evidence<'_>) -> Option<Masks> {
    let (mut masks, mut counted, mut left_out) = (Masks::new(), 0, 0);
    for inputs in evidence.inputs {
        let rows = rows_of_dq(evidence, inputs.microbatch, inputs.tokens())?;
        for (label, has_gradient) in inputs.labels.iter().zip(&rows) {
            match (*label == IGNORED, has_gradient) {
                (true, _) => {}
                (false, true) => counted += 1,
                (false, false) => left_out += 1,
            }
        }
        let ignored = inputs.labels.iter().map(|label| *label == IGNORED);
        masks.insert(
            inputs.microbatch,
            rows.iter().zip(ignored).map(|(&row, no)| row || no).collect(),
        );
    }
    (counted > 0 && left_out > 0).then_some(masks)
}

/// Whether each row of dq has a nonzero element.
fn rows_of_dq(
    evidence: &Evidence<'_>,
    microbatch: Option<Microbatch>,
    tokens: usize,
) -> Option<Vec<bool>> {
    let key = evidence.step.find(Role::Dq, microbatch)?;
    if evidence.step.tensors[key].partial.is_some() {
        return None;
    }
    let values = numbers(&evidence.step.assemble(key).ok()?)?;
    let width = values.len().checked_div(tokens).filter(|&width| width > 0)?;
    Some(values.chunks(width).map(|row| row.iter().any(|&x| x != 0.0)).collect())
}
