//! D6: stages that are off by one factor, the same in every microbatch and on every rank.

use std::collections::BTreeSet;

use crate::diagnose::evidence::{Evidence, Key, Residual};
use crate::head::Stage;

/// How far from a ratio of counts a measured factor may lie to be worth a trial. The trial
/// decides, not this: rounding moves a slope by 1e-2 at most.
const NEAR: f64 = 0.02;

/// Stages that a factor of the gradients may show in.
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

/// Whether a measured factor is about this one.
pub fn is_near(found: f64, wanted: f64) -> bool {
    (found - wanted).abs() <= NEAR * wanted.abs()
}

/// Whether a measured factor is nearer to this one than to 1: another fault may stand
/// beside it.
pub fn is_towards(found: f64, wanted: f64) -> bool {
    let away = wanted.abs().ln();
    found * wanted > 0.0 && (found.abs().ln() - away).abs() < away.abs() / 2.0
}

/// Whether a measured factor is on this one's side of 1, further than rounding brings it.
fn is_beyond(found: f64, wanted: f64) -> bool {
    found * wanted > 0.0 && found.abs().ln() / wanted.abs().ln() > 0.1
}

/// Sets of stages that a factor may explain: those that are near it; and all that another
/// fault may have brought further from it.
pub fn sets_times(evidence: &Evidence<'_>, factor: f64, of: &[Stage]) -> Vec<BTreeSet<Stage>> {
    let near = stages_times(evidence, factor, of);
    let every = |stage: Stage, test: &dyn Fn(f64) -> bool| {
        informative(evidence, stage).all(|(_, one)| one.nonfinite == 0 && test(one.factor))
    };
    let beyond =
        |&stage: &Stage| evidence.fails(stage) && every(stage, &|found| is_beyond(found, factor));
    let wide: BTreeSet<Stage> = of.iter().copied().filter(beyond).collect();
    let mut found = vec![near];
    if !found[0].is_empty() && wide != found[0] {
        found.push(wide);
    }
    found.retain(|set| !set.is_empty());
    found
}

/// The comparisons of a stage that say something of its scale: not those of a rank
/// without tokens, whose gradient is zero.
pub fn informative<'e>(
    evidence: &'e Evidence<'_>,
    stage: Stage,
) -> impl Iterator<Item = (Key, Residual)> + 'e {
    let of = evidence.residuals.iter().filter(move |(key, residual)| {
        key.stage == stage && (residual.reference > 0.0 || !residual.passes)
    });
    of.map(|(&key, &residual)| (key, residual))
}

/// Of some stages those that fail, and that one factor explains in every microbatch and
/// on every rank: what only one of them has is not a matter of counts.
pub fn stages_times(evidence: &Evidence<'_>, factor: f64, of: &[Stage]) -> BTreeSet<Stage> {
    let all = |&stage: &Stage| {
        let mut each = informative(evidence, stage).peekable();
        evidence.fails(stage)
            && each.peek().is_some()
            && each.all(|(_, one)| one.nonfinite == 0 && is_towards(one.factor, factor))
    };
    of.iter().copied().filter(all).collect()
}
