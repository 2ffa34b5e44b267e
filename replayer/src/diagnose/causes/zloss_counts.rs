//! The z-loss divided by another count of tokens than the rest of the loss: the mean of means of
//! microbatches or ranks, or a mean over all tokens where the others are not counted.

use std::collections::BTreeMap;

use backtape::head::{Ranks, Scope, Span};
use backtape::identity::Microbatch;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::divisors::Divisors;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Count, Counted, Whose, divisor};
use crate::head::MicrobatchInputs;
use crate::replay::world::{Read, UnitTokens, World};

/// How often each token's term counts, `[T]` by microbatch.
type Times = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Every other count, once each.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let declared = &evidence.step.options.declared;
    let Some(divisors) = Divisors::of(evidence).filter(|_| declared.z_loss != 0.0) else {
        return Vec::new();
    };
    let (lambda, in_loss) = (declared.z_loss, declared.z_loss_in_loss);
    let (m, w) = (evidence.microbatches() as f64, evidence.ranks() as f64);
    let mut seen: Vec<Times> = Vec::new();
    let mut found = Vec::new();
    let ranks = Span { ranks: Ranks::One, ..Span::from(Scope::Global) };
    for (span, groups) in [
        (Scope::Global.into(), 1.0),
        (Scope::Microbatch.into(), m),
        (ranks, w),
        (Scope::Rank.into(), m * w),
    ] {
        for count in Count::USUAL {
            for means in [1.0, groups] {
                let (span, sums) = (span.clone(), BTreeMap::new());
                let words = format!("{}, counted over {span}", count.words());
                let world = Counted { count, span, whose: Whose::Own, means, sums };
                let Some(times) = times(evidence, &divisors, &world) else { continue };
                let one = |x: &f64| (x - 1.0).abs() < 1e-9;
                if times.values().flatten().all(one) || seen.contains(&times) {
                    continue;
                }
                seen.push(times.clone());
                let mut parameters = vec![("the z-loss is divided by", words)];
                if means != 1.0 {
                    parameters.push(("and by", format!("{means} for the mean of means")));
                }
                found.push(Hypothesis::new(Divided { times, lambda, in_loss }, parameters));
            }
        }
    }
    found
}

/// How often the term of each token is there: what the loss is divided by over what it is.
fn times(evidence: &Evidence<'_>, divisors: &Divisors<'_>, world: &Counted) -> Option<Times> {
    let groups = divisors.groups(&world.span)?;
    let policy = evidence.step.is_policy_loss();
    let mut found = Times::new();
    for ((own, groups), declared) in evidence.inputs.iter().zip(&groups).zip(divisors.declared()) {
        let used = world.of_groups(policy, groups);
        let of = |t: usize| Some(divisor(declared, t)? / divisor(&used, t)?);
        let each = (0..own.tokens()).map(|t| of(t).filter(|x| x.is_finite()).unwrap_or(1.0));
        found.insert(own.microbatch, each.collect());
    }
    Some(found)
}

struct Divided {
    times: Times,
    lambda: f64,
    in_loss: bool,
}

impl World for Divided {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, ..]: [&mut [f64]; 3]) {
        let Some(times) = self.times.get(&tokens.inputs.microbatch) else { return };
        let each = lse.iter_mut().zip(tokens.rows).zip(tokens.lse).zip(tokens.g);
        for (((to, &row), l), &g) in each {
            *to = if g == 0.0 { 0.0 } else { g * (1.0 + 2.0 * self.lambda * times[row] * l) };
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        if let Some(times) = self.times.get(&inputs.microbatch).filter(|_| self.in_loss) {
            for ((nll, times), lse) in nll.iter_mut().zip(times).zip(read.lse.0) {
                *nll += (times - 1.0) * self.lambda * lse * lse;
            }
        }
        Vec::new()
    }
}
