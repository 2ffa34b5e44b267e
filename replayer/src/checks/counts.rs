//! Finds the denominator by which the job divided the recorded loss, and compares it with the
//! declared one.
//!
//! With S = Σ w (lse - label_logit + z_loss lse²) over the tokens of the loss, the job divided by N
//! = S / loss. The relative error of N is at most that of S plus the rounding of the loss to its
//! dtype. Each term of S errs by a few u (|lse| + |label_logit|) at most, and the sum of T terms by
//! T 2⁻²⁴ Σ|terms|. The check fails when another count fits N within that error and the declared
//! one does not. Where no count fits it warns, unless N is as near to the declared count as a loss
//! kept in bf16 would be.

use backtape::head::{
    Denominator, HeadDeclaration, Loss, LossReduction, Microbatches, Ranks, Sequences,
};
use backtape::role::Role;

use super::facts::{Facts, facts, roundoff};
use super::gradients::number;
use super::{CheckResults, Place, Severity, Subject};
use crate::number::short;

/// Roundings of a term: lse, the label's logit, their difference, its product with the weight.
const ROUNDINGS: f64 = 4.0;
const U32: f64 = 1.0 / (1u64 << 24) as f64;
/// Relative error of a loss that was rounded to bf16 a few times.
const COARSE: f64 = 4.0 / 256.0;
/// Above this relative error of N, different counts cannot be distinguished.
const USELESS: f64 = 0.1;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let what = format!("step {}: the loss's denominator", subject.dump.step);
        let Some(head) = subject.head() else {
            results.skip(what, "no head was declared");
            continue;
        };
        if let Some(why) = unfit(subject, head) {
            results.skip(what, why);
            continue;
        }
        let each: Result<Vec<Facts>, _> = facts(subject).into_iter().collect();
        let all = match each {
            Ok(all) if all.len() >= head.microbatches as usize => all,
            Ok(_) => {
                results.skip(what, "fewer microbatches were recorded than the head declares");
                continue;
            }
            Err((key, why)) => {
                results.skip(what, format!("{key}: {why}"));
                continue;
            }
        };
        for microbatch_facts in &all {
            microbatch(subject, head, microbatch_facts, &all, results);
        }
    }
}

/// Why the head's loss is not a sum of token losses divided by a count, if so.
fn unfit(subject: &Subject<'_>, head: &HeadDeclaration) -> Option<&'static str> {
    match head {
        _ if head.loss == Loss::Grpo => Some("a policy loss is no sum of -log p"),
        _ if head.reduction == LossReduction::None => Some("the loss is not reduced"),
        _ if head.label_smoothing != 0.0 => Some("with label smoothing the loss needs every logit"),
        _ if head.scope.ranks != Ranks::All && subject.dump.manifest.world_size > 1 => {
            Some("each rank has a loss of its own")
        }
        _ if head.scope.sequences == Sequences::Each => Some("the loss is a mean of means"),
        _ => None,
    }
}

/// A possible denominator: what is counted, and the count.
struct Count {
    name: &'static str,
    n: f64,
}

fn microbatch(
    subject: &Subject<'_>,
    head: &HeadDeclaration,
    facts: &Facts,
    all: &[Facts],
    results: &mut CheckResults,
) {
    let tensor = subject.of_role(Role::Loss).find(|(key, _)| key.microbatch == facts.microbatch);
    let Some((key, info)) = tensor else {
        return results.skip(facts.key.to_string(), "its loss was not recorded");
    };
    let Some(loss) = number(subject, info) else {
        return results.skip(key.to_string(), "the loss is not one number");
    };
    let Some((sum, error)) = numerator(head, facts) else {
        return results.skip(key.to_string(), "lse and label_logits were not both recorded");
    };
    let uncertain = error / sum.abs() + roundoff(info.dtype) + U32;
    if !(uncertain < USELESS) || !loss.is_finite() || loss == 0.0 {
        return results.skip(key.to_string(), "the sum of the token losses is not certain enough");
    }
    results.looked();
    let used = sum / loss;
    let fits = |n: f64| (used / n - 1.0).abs() <= uncertain;
    let declared = declared(head, facts, all);
    if fits(declared) {
        return;
    }
    let fitting: Vec<Count> =
        candidates(facts, all).into_iter().filter(|count| fits(count.n)).collect();
    let near = (used / declared - 1.0).abs() <= COARSE;
    if fitting.is_empty() && near {
        return;
    }
    report(subject, key, (used, declared), &fitting, results);
}

/// The sum of the token losses and its largest error; `None` where lse and the label's logits were
/// not both recorded.
fn numerator(head: &HeadDeclaration, facts: &Facts) -> Option<(f64, f64)> {
    let (lse, label_logits) = facts.likelihood.as_ref()?;
    let (mut sum, mut error, mut sizes) = (0.0, 0.0, 0.0f64);
    let z_loss = if head.z_loss_in_loss { head.z_loss } else { 0.0 };
    let u = ROUNDINGS * facts.roundoff.max(U32);
    for t in (0..facts.tokens()).filter(|&t| facts.weights[t] != 0.0) {
        let (w, z) = (facts.weights[t], z_loss * lse[t] * lse[t]);
        let term = w * (facts.nll(t)? + z);
        sum += term;
        sizes += term.abs();
        error += w.abs() * u * (lse[t].abs() + label_logits[t].abs() + 2.0 * z.abs());
    }
    Some((sum, error + facts.tokens() as f64 * U32 * sizes))
}

fn valid(facts: &Facts) -> f64 {
    facts.valid() as f64
}

fn tokens(facts: &Facts) -> f64 {
    facts.tokens() as f64
}

fn weights(facts: &Facts) -> f64 {
    facts.weights.iter().sum()
}

fn declared(head: &HeadDeclaration, facts: &Facts, all: &[Facts]) -> f64 {
    if head.reduction == LossReduction::Sum {
        return 1.0;
    }
    let over = |count: fn(&Facts) -> f64| match head.scope.microbatches {
        Microbatches::All => all.iter().map(count).sum(),
        Microbatches::One => count(facts),
    };
    match head.denominator {
        Denominator::Valid => over(valid),
        Denominator::All => over(tokens),
        Denominator::Weights => over(weights),
        Denominator::Number(n) => n,
    }
}

fn candidates(facts: &Facts, all: &[Facts]) -> Vec<Count> {
    let total = |of: fn(&Facts) -> f64| all.iter().map(of).sum::<f64>();
    vec![
        Count { name: "the valid tokens of the step", n: total(valid) },
        Count { name: "the valid tokens of the microbatch", n: valid(facts) },
        Count { name: "all tokens of the step", n: total(tokens) },
        Count { name: "all tokens of the microbatch", n: tokens(facts) },
        Count { name: "the weights' sum over the step", n: total(weights) },
        Count { name: "the weights' sum over the microbatch", n: weights(facts) },
        Count { name: "nothing: the loss is a sum", n: 1.0 },
    ]
}

fn report(
    subject: &Subject<'_>,
    key: &backtape::shard::TensorKey,
    (used, declared): (f64, f64),
    fitting: &[Count],
    results: &mut CheckResults,
) {
    let names: Vec<&str> = fitting.iter().map(|count| count.name).collect();
    let which = match names.is_empty() {
        true => "which is no count of tokens or weights".to_string(),
        false => format!("which is {}", names.join(", or ")),
    };
    let evidence = format!(
        "{key} was divided by {}, {which}; what is declared comes to {}",
        short(used),
        short(declared),
    );
    // Dividing by all tokens is the catalogue's cause `valid-count`; other counts can have several
    // causes.
    let all = names.iter().all(|name| name.starts_with("all tokens")) && !names.is_empty();
    let severity = if names.is_empty() { Severity::Warn } else { Severity::Fail };
    let place = Place::of(subject).tensor(key);
    let advice = "Divide by what the loss really counts, or declare denominator= and scope= as the job divides";
    results.add(severity, all.then_some("valid-count"), place, evidence, advice);
}
