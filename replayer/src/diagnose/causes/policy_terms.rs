//! The derivative of a policy loss in the backward alone: with another option than the loss has, or
//! with the ratio of the policies left out, squared, or taken of the token before or after.

use std::collections::BTreeMap;
use std::sync::Arc;

use backtape::head::RatioLevel;
use backtape::identity::Microbatch;
use backtape::role::Role;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::declarations::policy::{PolicyEdit, edits};
use crate::diagnose::declarations::written;
use crate::diagnose::detectors::direct::{multiple, tokens};
use crate::diagnose::detectors::extents::known;
use crate::diagnose::detectors::reference::reference;
use crate::diagnose::evidence::{Evidence, GRADIENTS, Key};
use crate::diagnose::limited::Heard;
use crate::diagnose::rearranged::Instead;
use crate::diagnose::worlds::{DeclaredLse, Optioned};
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, World};

/// Share of the error that a rule may leave to be worth a trial.
const LEFT: f64 = 1e-3;

/// Both kinds, where the step has a policy loss.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let fails = evidence.fails_any(&[&GRADIENTS[..], &[Stage::Dlogprobs]].concat());
    if !fails || !evidence.step.is_policy_loss() {
        return Vec::new();
    }
    let mut found = of_options(evidence);
    found.extend(of_ratio(evidence));
    found
}

/// What the report calls a token's factor.
const COUNTS: &str = "each token counts";

/// Another option than the loss has.
fn of_options(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let declared = &evidence.step.options.declared;
    let one = |edit: PolicyEdit| {
        let other = edit.of(declared);
        let options = HeadOptions::new(&other).ok().filter(|_| other != *declared)?;
        let parameters = vec![
            (COUNTS, "as its log-probability's gradient has it".to_string()),
            ("of a loss with", format!("{}={}", edit.option, written(&other, edit.option))),
            ("declared", written(declared, edit.option)),
        ];
        let head = Arc::new(with(evidence, options));
        Some(Hypothesis::new(Heard::backward(evidence, head), parameters))
    };
    edits(declared).into_iter().filter_map(one).collect()
}

fn with(
    evidence: &Evidence<'_>,
    options: HeadOptions,
) -> Optioned<impl Fn(&mut HeadOptions) + Send + Sync + 'static> {
    let lowered = evidence.step.options.lowered;
    let change = move |of: &mut HeadOptions| *of = HeadOptions { lowered, ..options.clone() };
    Optioned { change, lse: DeclaredLse::new(), factor: 1.0 }
}

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Gradients of the log-probabilities, `[T]` of each microbatch, and what they are made of.
struct Derivative {
    /// Of the surrogate `min(r A, clip(r) A)`.
    surrogate: OfTokens,
    /// Of the KL term.
    kl: OfTokens,
    /// r of each token.
    ratio: OfTokens,
    /// As the job has them, at the tokens that are looked at.
    captured: BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>,
}

impl Derivative {
    /// `None` where the ratio is not a token's own, or nothing that fails shows the derivative.
    fn of(evidence: &Evidence<'_>) -> Option<Derivative> {
        let declared = &evidence.step.options.declared;
        let grpo = evidence.step.options.grpo.as_ref()?;
        if grpo.ratio != RatioLevel::Token {
            return None;
        }
        let mut other = declared.clone();
        other.grpo.get_or_insert_default().kl_beta = 0.0;
        let without = HeadOptions::new(&other).ok()?;
        let without = with(evidence, without);
        // Not the derivative that the replay takes from what was recorded.
        let made = Instead { distrusts: vec![Stage::Dlogprobs], ..Instead::default() };
        let rows = evidence.rows.as_ref();
        let whole = reference(evidence, Some(&made), rows);
        let without: Vec<&dyn World> = vec![&made, &without];
        let without = reference(evidence, Some(&without), rows);
        let mut found = Derivative {
            surrogate: OfTokens::new(),
            kl: OfTokens::new(),
            ratio: OfTokens::new(),
            captured: BTreeMap::new(),
        };
        for one in evidence.inputs {
            let mb = one.microbatch;
            let (all, part) = (whole.g.get(&mb)?, without.g.get(&mb)?);
            let old = evidence.step.optional(Role::OldLogprobs, mb, one.tokens()).ok()??;
            let logp = logprobs(evidence, one)?;
            found.surrogate.insert(mb, part.iter().map(|g| -g).collect());
            found.kl.insert(mb, all.iter().zip(part).map(|(g, part)| part - g).collect());
            found.ratio.insert(mb, logp.iter().zip(old).map(|(p, old)| (p - old).exp()).collect());
            let shown = shown(evidence, one, all);
            found.captured.extend(shown.map(|shown| (mb, shown)));
        }
        (!found.captured.is_empty()).then_some(found)
    }

    /// Upstream gradients of the tokens where each ratio is another number.
    fn upstream(&self, ratio: &OfTokens) -> OfTokens {
        let of = |(mb, own): (&Option<Microbatch>, &Vec<f64>)| {
            let one = |t: usize| {
                let r = self.ratio[mb][t];
                -(self.surrogate[mb][t] / r * own[t] + self.kl[mb][t])
            };
            (*mb, (0..own.len()).map(one).collect())
        };
        ratio.iter().map(of).collect()
    }

    /// Whether what was captured follows such upstream gradients.
    fn follows(&self, g: &OfTokens) -> bool {
        let (mut before, mut left) = (0.0, 0.0);
        for (mb, captured) in &self.captured {
            for (&t, x) in captured {
                before += (x - self.surrogate[mb][t] - self.kl[mb][t]).powi(2);
                left += (x + g[mb][t]).powi(2);
            }
        }
        left <= LEFT * before
    }
}

/// Log-probabilities of the labels.
fn logprobs(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
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

/// The derivative that the job has: recorded, or what each row of dq is times its reference.
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
    let captured = evidence.captured(*keys.find(|key| key.stage == Stage::Dq)?)?;
    let rows = evidence.reference().rows_of((Stage::Dq, inputs.microbatch));
    let one = |t: usize| {
        let row = rows.get(&t)?;
        Some((t, -g[t] * multiple(captured.row(t), row).times))
    };
    Some(looked.into_iter().filter_map(one).collect())
}

/// Another number in the place of the ratio.
fn of_ratio(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let Some(derivative) = Derivative::of(evidence) else { return Vec::new() };
    let each = |of: &dyn Fn(f64) -> f64| -> OfTokens {
        let own = derivative.ratio.iter();
        own.map(|(mb, all)| (*mb, all.iter().map(|&r| of(r)).collect())).collect()
    };
    let mut all = vec![
        ("without the ratio of the policies".to_string(), each(&|_| 1.0)),
        ("with the square of the ratio".to_string(), each(&|r| r * r)),
    ];
    for (by, of) in [(-1, "before"), (1, "after")] {
        for (around, ends) in [(false, "the end has its own"), (true, "around the end")] {
            let kinds = evidence.inputs.first().map_or(0, |one| known(evidence.step, one).len());
            for kind in 0..kinds {
                let moved = moved(evidence, &derivative.ratio, (kind, by, around));
                all.extend(moved.map(|(over, ratio)| {
                    (format!("with the ratio of the token {of} it in {over}, {ends}"), ratio)
                }));
            }
        }
    }
    let one = |(words, ratio): (String, OfTokens)| {
        let g = derivative.upstream(&ratio);
        let follows = derivative.follows(&g);
        follows.then(|| Hypothesis::new(Upstream { g }, vec![(COUNTS, words)]))
    };
    all.into_iter().filter_map(one).collect()
}

/// Each token's neighbour's ratio in runs of one kind, and what those are.
fn moved(
    evidence: &Evidence<'_>,
    ratio: &OfTokens,
    (kind, by, around): (usize, isize, bool),
) -> Option<(String, OfTokens)> {
    let (mut name, mut found) = (String::new(), OfTokens::new());
    for one in evidence.inputs {
        let (own, n) = (ratio.get(&one.microbatch)?, one.tokens());
        let extent = known(evidence.step, one).into_iter().nth(kind)?;
        let from: Vec<usize> = match around {
            true => extent.rolled(n, by),
            false => {
                let inside = extent.shifted(n, by).into_iter().enumerate();
                inside.map(|(t, from)| from.unwrap_or(t)).collect()
            }
        };
        found.insert(one.microbatch, from.into_iter().map(|t| own[t]).collect());
        name = extent.name;
    }
    Some((name, found))
}

/// Upstream gradients of every token.
struct Upstream {
    g: OfTokens,
}

impl World for Upstream {
    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        if let Some(own) = self.g.get(&inputs.microbatch) {
            g.copy_from_slice(own);
        }
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        let own = self.g.get(&of.at.microbatch).filter(|_| of.at.stage == Stage::Dlogprobs);
        for (&row, to) in of.rows.iter().zip(of.values.iter_mut()) {
            *to = own.map_or(*to, |own| -own[row]);
        }
    }
}
