//! The z-loss divided by another count of tokens than the rest of the loss: a mean of the means of
//! microbatches or ranks, or a mean over all tokens although the loss counts only some; or the
//! z-loss summed also over tokens that take no part.

use std::collections::BTreeMap;

use backtape::head::{Ranks, Scope, Span};
use backtape::identity::Microbatch;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::divisors::Divisors;
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Count, Counted, Whose, divisor};
use crate::head::MicrobatchInputs;
use crate::kernels::matrix::IGNORED;
use crate::replay::world::{Read, UnitTokens, World};

/// The factor of each token's z-loss, `[T]` by microbatch.
type Times = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// The hypotheses: every other count, each once.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let declared = &evidence.step.options.declared;
    let Some(divisors) = Divisors::of(evidence).filter(|_| declared.z_loss != 0.0) else {
        return Vec::new();
    };
    let (lambda, in_loss) = (declared.z_loss, declared.z_loss_in_loss);
    let (m, w) = (evidence.microbatches() as f64, evidence.ranks() as f64);
    let mut seen: Vec<Times> = Vec::new();
    let mut hypotheses = Vec::new();
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
                let is_one = |x: &f64| (x - 1.0).abs() < 1e-9;
                if times.values().flatten().all(is_one) || seen.contains(&times) {
                    continue;
                }
                seen.push(times.clone());
                let mut parameters = vec![("the z-loss is divided by", words)];
                if means != 1.0 {
                    parameters.push(("and by", format!("{means} for the mean of means")));
                }
                hypotheses.push(Hypothesis::new(Divided { times, lambda, in_loss }, parameters));
            }
        }
    }
    hypotheses
}

/// Hypotheses that tokens that take no part have a z-loss too, divided as declared or by the number
/// of all tokens.
pub(super) fn of_all_tokens(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let options = &evidence.step.options;
    let left_out = |inputs: &MicrobatchInputs| (0..inputs.tokens()).any(|t| !takes_part(inputs, t));
    let any = evidence.inputs.iter().any(left_out);
    let Some(divisors) = Divisors::of(evidence).filter(|_| any && options.declared.z_loss != 0.0)
    else {
        return Vec::new();
    };
    let (lambda, in_loss) = (options.declared.z_loss, options.declared.z_loss_in_loss);
    let (span, whose, sums) = (options.scope.clone(), Whose::Own, BTreeMap::new());
    let mean = Counted { count: Count::All, span, whose, means: 1.0, sums };
    let declared = || {
        let ones = |inputs: &MicrobatchInputs| (inputs.microbatch, vec![1.0; inputs.tokens()]);
        Some(evidence.inputs.iter().map(ones).collect())
    };
    let all = [("as declared", declared()), ("all tokens", times(evidence, &divisors, &mean))];
    let mut alone = Times::new();
    for (inputs, divided) in evidence.inputs.iter().zip(divisors.declared()) {
        let upstream_of =
            |t: usize| options.cotangent / divisor(divided, t).unwrap_or(f64::INFINITY);
        alone.insert(inputs.microbatch, (0..inputs.tokens()).map(upstream_of).collect());
    }
    let hypothesis_of = |(words, times): (&str, Option<Times>)| {
        let divided = Divided { times: times?, lambda, in_loss };
        let ranks =
            |inputs: &MicrobatchInputs| (inputs.microbatch, of_ranks(evidence.step, inputs));
        let ranks = evidence.inputs.iter().map(ranks).collect();
        let parameters = vec![
            ("the z-loss is summed over", "all tokens, those that take no part too".to_string()),
            ("and divided by", words.to_string()),
        ];
        Some(Hypothesis::new(OfAll { divided, alone: alone.clone(), ranks }, parameters))
    };
    all.into_iter().filter_map(hypothesis_of).collect()
}

fn takes_part(inputs: &MicrobatchInputs, token: usize) -> bool {
    inputs.labels[token] != IGNORED && inputs.weights[token] != 0.0
}

/// Every token has a z-loss.
struct OfAll {
    divided: Divided,
    /// The upstream gradient that a token would have if it took part.
    alone: Times,
    /// Each rank's tokens, by microbatch.
    ranks: BTreeMap<Option<Microbatch>, Vec<Vec<usize>>>,
}

impl World for OfAll {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, label, smooth]: [&mut [f64]; 3]) {
        self.divided.cotangents(tokens, [&mut *lse, label, smooth]);
        let mb = tokens.inputs.microbatch;
        let Some((alone, times)) = self.alone.get(&mb).zip(self.divided.times.get(&mb)) else {
            return;
        };
        for ((to, &row), l) in lse.iter_mut().zip(tokens.rows).zip(tokens.lse) {
            if !takes_part(tokens.inputs, row) {
                *to = alone[row] * times[row] * 2.0 * self.divided.lambda * l;
            }
        }
    }

    /// The replay sums the loss over tokens that take part. So the z-loss of a rank's other tokens
    /// is added to the first that does.
    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        self.divided.nll(inputs, read, nll);
        let mb = inputs.microbatch;
        let Some((ranks, times)) = self.ranks.get(&mb).zip(self.divided.times.get(&mb)) else {
            return Vec::new();
        };
        for rows in ranks.iter().filter(|_| self.divided.in_loss) {
            let (counted, others): (Vec<usize>, Vec<usize>) =
                rows.iter().partition(|&&t| takes_part(inputs, t));
            let term = |&t: &usize| times[t] * self.divided.lambda * read.lse.0[t].powi(2);
            if let Some(&first) = counted.first() {
                nll[first] += others.iter().map(term).sum::<f64>() / inputs.weights[first];
            }
        }
        Vec::new()
    }
}

/// The factor of each token's z-loss: the declared divisor over the one that it has in this world.
fn times(evidence: &Evidence<'_>, divisors: &Divisors<'_>, world: &Counted) -> Option<Times> {
    let groups = divisors.groups(&world.span)?;
    let policy = evidence.step.is_policy_loss();
    let mut times = Times::new();
    for ((inputs, groups), declared) in evidence.inputs.iter().zip(&groups).zip(divisors.declared())
    {
        let used = world.of_groups(policy, groups);
        let ratio = |t: usize| Some(divisor(declared, t)? / divisor(&used, t)?);
        let each = (0..inputs.tokens()).map(|t| ratio(t).filter(|x| x.is_finite()).unwrap_or(1.0));
        times.insert(inputs.microbatch, each.collect());
    }
    Some(times)
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
