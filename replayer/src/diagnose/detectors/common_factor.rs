//! Stages that are off by one factor, the same in every microbatch and on every rank.

use std::collections::BTreeSet;

use crate::diagnose::evidence::{Evidence, Key, Residual};
use crate::head::Stage;

/// How far from a ratio of counts a measured factor may lie, relatively, to be worth a trial:
/// rounding changes it by 1e-2 at most. Only the trial decides.
const NEAR: f64 = 0.02;

/// Stages in which a factor on the loss or on gradients may show.
pub const SCALED: [Stage; 12] = [
    Stage::Loss,
    Stage::Dlogprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
    Stage::DkLse,
    Stage::DkLabel,
    Stage::Dk,
    Stage::Dbias,
    Stage::Accumulate,
    Stage::Reduce,
];

/// The gradients among them, and their sums.
pub const BACKWARD: &[Stage] = SCALED.split_at(2).1;

/// Whether a measured factor is approximately the wanted one.
pub fn is_near(measured: f64, wanted: f64) -> bool {
    (measured - wanted).abs() <= NEAR * wanted.abs()
}

/// Whether a measured factor is nearer to the wanted one than to 1, on a logarithmic scale: another
/// fault may add to it.
pub fn is_towards(measured: f64, wanted: f64) -> bool {
    let away = wanted.abs().ln();
    measured * wanted > 0.0 && (measured.abs().ln() - away).abs() < away.abs() / 2.0
}

/// Whether a measured factor is on the same side of 1 as the wanted one, further away than rounding
/// explains.
fn is_beyond(measured: f64, wanted: f64) -> bool {
    measured * wanted > 0.0 && measured.abs().ln() / wanted.abs().ln() > 0.1
}

/// Sets of stages that a factor may explain: first those whose factor is nearer to it than to 1,
/// then all those that are off in its direction, as another fault may have added to it.
pub fn sets_times(evidence: &Evidence<'_>, factor: f64, stages: &[Stage]) -> Vec<BTreeSet<Stage>> {
    let near = stages_times(evidence, factor, stages);
    let every = |stage: Stage, test: &dyn Fn(f64) -> bool| {
        informative(evidence, stage)
            .all(|(_, residual)| residual.nonfinite == 0 && test(residual.factor))
    };
    let beyond =
        |&stage: &Stage| evidence.fails(stage) && every(stage, &|sets| is_beyond(sets, factor));
    let wide: BTreeSet<Stage> = stages.iter().copied().filter(beyond).collect();
    let mut sets = vec![near];
    if !sets[0].is_empty() && wide != sets[0] {
        sets.push(wide);
    }
    sets.retain(|set| !set.is_empty());
    sets
}

/// The comparisons of a stage that show its scale. A rank without tokens has a gradient of zeros,
/// which shows none.
pub fn informative<'e>(
    evidence: &'e Evidence<'_>,
    stage: Stage,
) -> impl Iterator<Item = (Key, Residual)> + 'e {
    let comparisons = evidence.residuals.iter().filter(move |(key, residual)| {
        key.stage == stage && (residual.reference > 0.0 || !residual.passes)
    });
    comparisons.map(|(&key, &residual)| (key, residual))
}

/// The failing stages among `stages` that are off in the direction of one factor in every microbatch
/// and on every rank. A factor in only one of them does not come from a count.
pub fn stages_times(evidence: &Evidence<'_>, factor: f64, stages: &[Stage]) -> BTreeSet<Stage> {
    let all = |&stage: &Stage| {
        let mut each = informative(evidence, stage).peekable();
        evidence.fails(stage)
            && each.peek().is_some()
            && each
                .all(|(_, residual)| residual.nonfinite == 0 && is_towards(residual.factor, factor))
    };
    stages.iter().copied().filter(all).collect()
}
