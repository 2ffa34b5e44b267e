//! A policy loss whose backward is not the derivative of its forward: it has another option, leaves
//! out the ratio of the policies, squares it, reads that of the token before or after, or clips it
//! differently; or it multiplies the surrogate or the KL term by another factor, such as a wrong
//! sign.

use std::collections::BTreeMap;
use std::sync::Arc;

use backtape::head::{HeadDeclaration, RatioLevel, written};
use backtape::identity::Microbatch;
use backtape::role::Role;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::declarations::policy::{PolicyEdit, edits};
use crate::diagnose::detectors::fitted_numbers::readings;
use crate::diagnose::detectors::least_squares::multiples;
use crate::diagnose::detectors::reference::reference;
use crate::diagnose::detectors::single_tokens::{multiple, tokens};
use crate::diagnose::detectors::token_runs::known;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::localized::TrialSnapshot;
use crate::diagnose::worlds::{ChangedOptions, DeclaredLse};
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, World};

/// Share of the squared error that a rule may leave to be worth a trial.
const LEFT: f64 = 1e-3;
/// A fitted factor below this counts as 0.
const ABSENT: f64 = 1e-3;

/// The hypotheses of other options, of another ratio and of other factors of the terms, where the
/// step has a policy loss.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let stages = [&Stage::GRADIENTS[..], &[Stage::Dlogprobs, Stage::Dlogits]].concat();
    let fails = evidence.fails_any(&stages);
    if !fails || !evidence.step.is_policy_loss() {
        return Vec::new();
    }
    let mut hypotheses = of_options(evidence);
    if let Some(derivative) = Derivative::of(evidence) {
        hypotheses.extend(of_ratio(evidence, &derivative));
        hypotheses.extend(of_terms(&derivative));
    }
    hypotheses
}

/// The name in reports of the parameter that describes a token's factor.
const COUNTS: &str = "each token counts";

/// The hypotheses that the backward has another option than the loss.
fn of_options(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let declared = &evidence.step.options.declared;
    let hypothesis_of = |edit: PolicyEdit| {
        let other = edit.of(declared);
        let options = HeadOptions::new(&other).ok().filter(|_| other != *declared)?;
        let parameters = vec![
            (COUNTS, "as its log-probability's gradient has it".to_string()),
            ("of a loss with", format!("{}={}", edit.option, written(&other, edit.option))),
            ("declared", written(declared, edit.option)),
        ];
        let head = Arc::new(with(evidence, options));
        Some(Hypothesis::new(TrialSnapshot::of_backward(evidence, head), parameters))
    };
    edits(declared).into_iter().filter_map(hypothesis_of).collect()
}

fn with(
    evidence: &Evidence<'_>,
    options: HeadOptions,
) -> ChangedOptions<impl Fn(&mut HeadOptions) + Send + Sync + 'static> {
    let lowered = evidence.step.options.lowered;
    let change =
        move |changed: &mut HeadOptions| *changed = HeadOptions { lowered, ..options.clone() };
    ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 }
}

/// The number that replaces a token's ratio, from the ratio, whether its advantage is positive, and
/// the share that the surrogate lets through.
type Rule<'a> = &'a dyn Fn(f64, bool, f64) -> f64;

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// The terms of the loss's derivative by each log-probability, `[T]` of each microbatch.
struct Derivative {
    /// The derivative of `r A`, never clipped.
    unclipped: OfTokens,
    /// The share of it that the clipped surrogate `min(r A, clip(r) A)` lets through.
    passed: OfTokens,
    /// The derivative of the KL term.
    kl: OfTokens,
    /// The ratio r of each token.
    ratio: OfTokens,
    /// The ratio to the reference policy, where all microbatches have its log-probabilities.
    to_reference: Option<OfTokens>,
    /// The job's derivative, at the sampled tokens.
    captured: BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>,
}

impl Derivative {
    /// `None` where the declared ratio is not per token, or nothing that fails shows the
    /// derivative.
    fn of(evidence: &Evidence<'_>) -> Option<Derivative> {
        let declared = &evidence.step.options.declared;
        let grpo = evidence.step.options.grpo.as_ref()?;
        if grpo.ratio != RatioLevel::Token {
            return None;
        }
        // The derivative is recomputed; by default the replay would start from the recorded one.
        let made =
            ReplacedValues { distrusts: vec![Stage::Dlogprobs], ..ReplacedValues::default() };
        let rows = evidence.rows.as_ref();
        let whole = reference(evidence, Some(&made), rows);
        let mut other = declared.clone();
        other.grpo.get_or_insert_default().kl_beta = 0.0;
        let of_other = |other: &HeadDeclaration| {
            let world = with(evidence, HeadOptions::new(other).ok()?);
            let worlds: Vec<&dyn World> = vec![&made, &world];
            Some(reference(evidence, Some(&worlds), rows))
        };
        let without = of_other(&other)?;
        let open = other.grpo.get_or_insert_default();
        (open.clip_low, open.clip_high, open.dual_clip) = (1.0, f64::MAX, None);
        let open = of_other(&other)?;
        let mut derivative = Derivative {
            unclipped: OfTokens::new(),
            passed: OfTokens::new(),
            kl: OfTokens::new(),
            ratio: OfTokens::new(),
            to_reference: Some(OfTokens::new()),
            captured: BTreeMap::new(),
        };
        for inputs in evidence.inputs {
            let mb = inputs.microbatch;
            let (all, part) = (whole.g.get(&mb)?, without.g.get(&mb)?);
            let open = open.g.get(&mb)?;
            let old = evidence.step.optional(Role::OldLogprobs, mb, inputs.tokens()).ok()??;
            let logp = logprobs(evidence, inputs)?;
            let share = |(part, open): (&f64, &f64)| if *open == 0.0 { 0.0 } else { part / open };
            derivative.unclipped.insert(mb, open.iter().map(|g| -g).collect());
            derivative.passed.insert(mb, part.iter().zip(open).map(share).collect());
            derivative.kl.insert(mb, all.iter().zip(part).map(|(g, part)| part - g).collect());
            let ratio_to = |other: Vec<f64>| -> Vec<f64> {
                logp.iter().zip(other).map(|(p, other)| (p - other).exp()).collect()
            };
            let other =
                evidence.step.optional(Role::RefLogprobs, mb, inputs.tokens()).ok().flatten();
            derivative.to_reference = derivative.to_reference.zip(other).map(|(mut all, other)| {
                all.insert(mb, ratio_to(other));
                all
            });
            derivative.ratio.insert(mb, ratio_to(old));
            let shown = shown(evidence, inputs, all);
            derivative.captured.extend(shown.map(|shown| (mb, shown)));
        }
        (!derivative.captured.is_empty()).then_some(derivative)
    }

    /// The numbers that a rule gives in the place of the tokens' ratios.
    fn each(&self, rule: Rule<'_>) -> OfTokens {
        let ratios_by_rule = |(mb, ratio): (&Option<Microbatch>, &Vec<f64>)| {
            let (open, passed) = (&self.unclipped[mb], &self.passed[mb]);
            let all = ratio.iter().enumerate();
            // A negative derivative of the loss means a positive advantage: the log-probability
            // should grow.
            let all = all.map(|(t, &r)| rule(r, open[t] < 0.0, passed[t]));
            (*mb, all.collect())
        };
        self.ratio.iter().map(ratios_by_rule).collect()
    }

    /// Upstream gradients of the tokens with these numbers in the place of the ratios.
    fn upstream(&self, ratio: &OfTokens) -> OfTokens {
        let of_microbatch = |(mb, ratio): (&Option<Microbatch>, &Vec<f64>)| {
            let of_token = |t: usize| {
                let r = self.ratio[mb][t];
                -(self.unclipped[mb][t] / r * ratio[t] + self.kl[mb][t])
            };
            (*mb, (0..ratio.len()).map(of_token).collect())
        };
        ratio.iter().map(of_microbatch).collect()
    }

    /// The factors of the derivatives of the surrogate and of the KL term in the captured
    /// derivative, by least squares.
    fn terms(&self) -> Option<[f64; 2]> {
        let (mut surrogate, mut kl, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for (mb, captured) in &self.captured {
            for (&t, x) in captured {
                surrogate.push(self.unclipped[mb][t] * self.passed[mb][t]);
                kl.push(self.kl[mb][t]);
                seen.push(*x);
            }
        }
        let times = multiples(&[&surrogate, &kl], &seen)?;
        let read = |x: f64| match x.abs() < ABSENT {
            true => Some(0.0),
            false => readings(x, seen.len() as u64).first().copied(),
        };
        Some([read(times[0])?, read(times[1])?])
    }

    /// Upstream gradients of the tokens of the failing microbatches, each term times its factor.
    fn of_parts(&self, [surrogate, kl]: [f64; 2]) -> OfTokens {
        let of_microbatch = |(mb, open): (&Option<Microbatch>, &Vec<f64>)| {
            let of_token =
                |t: usize| -(surrogate * open[t] * self.passed[mb][t] + kl * self.kl[mb][t]);
            (*mb, (0..open.len()).map(of_token).collect())
        };
        let fails = |(mb, _): &(&Option<Microbatch>, &Vec<f64>)| self.captured.contains_key(*mb);
        self.unclipped.iter().filter(fails).map(of_microbatch).collect()
    }

    /// Whether these upstream gradients explain the captured derivative.
    fn follows(&self, g: &OfTokens) -> bool {
        let (mut before, mut left) = (0.0, 0.0);
        for (mb, captured) in &self.captured {
            for (&t, x) in captured {
                let surrogate = self.unclipped[mb][t] * self.passed[mb][t];
                before += (x - surrogate - self.kl[mb][t]).powi(2);
                left += (x + g[mb][t]).powi(2);
            }
        }
        left <= LEFT * before
    }
}

/// Log-probabilities of the labels, `[T]` of the microbatch.
pub(super) fn logprobs(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
    let reference = evidence.reference();
    let mb = inputs.microbatch;
    let key = Key { stage: Stage::Logprobs, microbatch: mb, rank: None };
    match evidence.captured(key) {
        Some(captured) => Some(captured.values.clone()),
        None => {
            let (label, lse) = (reference.label_logits.get(&mb)?, reference.forward_lse.get(&mb)?);
            Some(label.iter().zip(lse).map(|(z, lse)| z - lse).collect())
        }
    }
}

/// The job's derivative: as recorded, or from the factor of each row of dq or dlogits relative to
/// its reference.
fn shown(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    g: &[f64],
) -> Option<BTreeMap<usize, f64>> {
    let mut keys = evidence.failing.iter().filter(|key| key.microbatch == inputs.microbatch);
    let looked = tokens(evidence, inputs);
    if let Some(key) = keys.clone().find(|key| key.stage == Stage::Dlogprobs) {
        let captured = evidence.captured(*key)?;
        return Some(looked.into_iter().map(|t| (t, captured.values[t])).collect());
    }
    // A row of dlogits, and so one of dq, is a multiple of its token's derivative.
    let of_rows = |key: &&Key| matches!(key.stage, Stage::Dq | Stage::Dlogits);
    let key = keys.find(of_rows)?;
    let captured = evidence.captured(*key)?;
    let rows = evidence.reference().rows_of((key.stage, inputs.microbatch));
    let of_token = |t: usize| {
        let row = rows.get(&t)?;
        Some((t, -g[t] * multiple(captured.row(t), row).times))
    };
    Some(looked.into_iter().filter_map(of_token).collect())
}

/// The hypotheses of another number in the place of the ratio.
fn of_ratio(evidence: &Evidence<'_>, derivative: &Derivative) -> Vec<Hypothesis> {
    let mut all = vec![
        ("without the ratio of the policies".to_string(), derivative.each(&|_, _, passed| passed)),
        (
            "with the square of the ratio".to_string(),
            derivative.each(&|r, _, passed| passed * r * r),
        ),
    ];
    all.extend(clipped(evidence, derivative));
    for (by, direction) in [(-1, "before"), (1, "after")] {
        for (around, ends) in [(false, "the end has its own"), (true, "around the end")] {
            let kinds =
                evidence.inputs.first().map_or(0, |inputs| known(evidence.step, inputs).len());
            for kind in 0..kinds {
                let moved = moved(evidence, &derivative.ratio, (kind, by, around));
                all.extend(moved.map(|(over, mut ratio)| {
                    for (mb, ratio_of_microbatch) in &mut ratio {
                        ratio_of_microbatch
                            .iter_mut()
                            .zip(&derivative.passed[mb])
                            .for_each(|(x, share)| *x *= share);
                    }
                    (format!("with the ratio of the token {direction} it in {over}, {ends}"), ratio)
                }));
            }
        }
    }
    let hypothesis_of = |(words, ratio): (String, OfTokens)| {
        let g = derivative.upstream(&ratio);
        let follows = derivative.follows(&g);
        follows.then(|| Hypothesis::new(Upstream { g }, vec![(COUNTS, words)]))
    };
    all.into_iter().filter_map(hypothesis_of).collect()
}

/// The hypothesis that the surrogate and the KL term have the fitted factors.
fn of_terms(derivative: &Derivative) -> Option<Hypothesis> {
    let [surrogate, kl] = derivative.terms()?;
    let words = match (surrogate, kl) {
        // Equal factors are one factor on the whole; and a missing KL term is tried as an option.
        (surrogate, kl) if surrogate == kl || (surrogate, kl) == (1.0, 0.0) => return None,
        (1.0, kl) => format!("with the gradient of the KL term {kl} times"),
        (surrogate, 1.0) => format!("with the gradient of the surrogate {surrogate} times"),
        _ => format!(
            "with the gradient of the surrogate {surrogate} times and that of the KL term {kl} times"
        ),
    };
    let g = derivative.of_parts([surrogate, kl]);
    let fitted = [surrogate, kl].iter().filter(|times| **times != 1.0).count();
    let follows = derivative.follows(&g);
    follows.then(|| Hypothesis::new(Upstream { g }, vec![(COUNTS, words)]).fitted(fitted))
}

/// Other numbers for the ratio: clipped by other rules, its inverse, and the ratio to the reference
/// policy.
fn clipped(evidence: &Evidence<'_>, derivative: &Derivative) -> Vec<(String, OfTokens)> {
    let Some(grpo) = &evidence.step.options.grpo else { return Vec::new() };
    let (low, high) = (1.0 - grpo.clip_low, 1.0 + grpo.clip_high);
    let none_if = |clips: bool, r: f64| if clips { 0.0 } else { r };
    let rules: [(&str, Rule<'_>); 4] = [
        ("with a ratio that is never clipped", &|r, _, _| r),
        (
            "with a ratio that is clipped at both bounds, whatever the sign of the advantage",
            &|r, _, _| none_if(r < low || r > high, r),
        ),
        (
            "with a ratio that is clipped at the bound of the other sign of the advantage",
            &|r, up, _| none_if(if up { r < low } else { r > high }, r),
        ),
        ("with the clipped ratio as a constant factor", &|r, _, _| r.clamp(low, high)),
    ];
    let mut ratios: Vec<(String, OfTokens)> =
        rules.into_iter().map(|(words, of)| (words.to_string(), derivative.each(of))).collect();
    let clips = |r: f64, up: bool| if up { r > high } else { r < low };
    let inverse = derivative.each(&|r, up, _| none_if(clips(1.0 / r, up), 1.0 / r));
    ratios.push(("with the inverse of the ratio".to_string(), inverse));
    if let Some(mut other) = derivative.to_reference.clone() {
        for (mb, ratio_of_microbatch) in &mut other {
            let up = derivative.unclipped[mb].iter().map(|x| *x < 0.0);
            ratio_of_microbatch
                .iter_mut()
                .zip(up)
                .for_each(|(r, up)| *r = none_if(clips(*r, up), *r));
        }
        ratios.push(("with the ratio to the reference policy".to_string(), other));
    }
    ratios
}

/// The ratio of each token's neighbour in the runs of one division, and the name of that division.
fn moved(
    evidence: &Evidence<'_>,
    ratio: &OfTokens,
    (kind, by, around): (usize, isize, bool),
) -> Option<(String, OfTokens)> {
    let (mut name, mut moved_ratios) = (String::new(), OfTokens::new());
    for inputs in evidence.inputs {
        let (own_ratio, n) = (ratio.get(&inputs.microbatch)?, inputs.tokens());
        let extent = known(evidence.step, inputs).into_iter().nth(kind)?;
        let from: Vec<usize> = match around {
            true => extent.rolled(n, by),
            false => {
                let inside = extent.shifted(n, by).into_iter().enumerate();
                inside.map(|(t, from)| from.unwrap_or(t)).collect()
            }
        };
        moved_ratios.insert(inputs.microbatch, from.into_iter().map(|t| own_ratio[t]).collect());
        name = extent.name;
    }
    Some((name, moved_ratios))
}

/// Given upstream gradients of every token.
struct Upstream {
    g: OfTokens,
}

impl World for Upstream {
    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        if let Some(upstream) = self.g.get(&inputs.microbatch) {
            g.copy_from_slice(upstream);
        }
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let upstream = self
            .g
            .get(&expectation.place.microbatch)
            .filter(|_| expectation.place.stage == Stage::Dlogprobs);
        for (&row, to) in expectation.rows.iter().zip(expectation.values.iter_mut()) {
            *to = upstream.map_or(*to, |own| -own[row]);
        }
    }
}
