//! The loss of a microbatch, and the gradient that each token's loss starts the
//! backward with.

use backtape::role::Role;

use super::forward::ForwardState;
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::rounding_variance::relative;
use super::token_column::{Expected, Tokens};
use super::world::{Expectation, Read, StagePlace};
use crate::head::step::StepError;
use crate::head::units::share;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::kernels::reference::policy_loss::{PolicyInputs, PolicyLoss, policy_loss};

/// Distance of a ratio from a clip bound, in units of its standard deviation, up to
/// which the job may have taken the other side: beyond 6.5 a normal falls once in
/// 10¹⁰ tokens.
const KINK: f64 = 6.5;

/// What each token's backward starts with, `[T]`.
pub(super) struct Upstream {
    /// Gradient of the loss with respect to the token's nll: `w cotangent / denominator`.
    pub(super) g: Vec<f64>,
    /// Relative variance of `g`, alike over the token's row.
    pub(super) variance: Vec<f64>,
    /// Share of `g` that may be there or not: a ratio that rounds across its bound.
    pub(super) certain: Vec<f64>,
}

impl Upstream {
    /// Whether the g of some of these tokens may be there or not.
    pub(super) fn any_uncertain(&self, tokens: &[usize]) -> bool {
        tokens.iter().any(|&t| self.is_uncertain(t))
    }

    /// A world's g of other terms is made of the same log-probabilities as the declared one, and
    /// errs as much where its terms cancel and those of the declared one do not.
    fn keep_errors_of(&mut self, declared: &[f64]) {
        for ((g, variance), declared) in self.g.iter().zip(&mut self.variance).zip(declared) {
            if g.abs() < declared.abs() && *g != 0.0 {
                *variance *= (declared / g).powi(2);
            }
        }
    }

    /// Whether the g of a token may be there or not.
    pub(super) fn is_uncertain(&self, token: usize) -> bool {
        !(self.certain[token] <= 0.0)
    }
}

impl Judge<'_> {
    /// `g` of every token, unit by unit (a rank's own denominator is its unit's).
    pub(super) fn upstream(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
        outcome: &mut Outcome,
    ) -> Result<Upstream, StepError> {
        let inputs = &microbatch.inputs;
        let tokens = inputs.tokens();
        let zeros = || vec![0.0; tokens];
        let mut upstream = Upstream { g: zeros(), variance: zeros(), certain: zeros() };
        if self.plan.step.is_policy_loss() {
            self.policy_upstream(microbatch, state, &mut upstream, outcome)?;
            let declared = upstream.g.clone();
            self.world.upstream(inputs, &mut upstream.g);
            upstream.keep_errors_of(&declared);
            return Ok(upstream);
        }
        for (unit, denominator) in &microbatch.denominators {
            for &t in unit.rows.iter().filter(|&&t| inputs.labels[t] != IGNORED) {
                let weight = inputs.weights[t] * inputs.cotangent[t];
                upstream.g[t] = self.plan.step.options.cotangent * share(weight, *denominator);
            }
        }
        self.world.upstream(inputs, &mut upstream.g);
        Ok(upstream)
    }

    /// The policy loss of the microbatch: its gradient by each log-probability.
    fn policy_upstream(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
        upstream: &mut Upstream,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &microbatch.inputs;
        let (exact, expected) = self.policy_gradient(microbatch, state)?;
        let place =
            StagePlace { stage: Stage::Dlogprobs, microbatch: inputs.microbatch, rank: None };
        let mut supposed = expected.clone().times(self.world.scale(place));
        let (rows, values) = ((0..inputs.tokens()).collect::<Vec<_>>(), &mut supposed.values[..]);
        self.world.expected(&mut Expectation { place, rows: &rows, columns: 1, values });
        let captured = self.column(Role::Dlogprobs, microbatch);
        let captured =
            outcome.spared(captured, (&[Stage::Dlogprobs], inputs.microbatch))?.flatten();
        if let Some(captured) = captured.as_ref().filter(|_| self.plan.wants(Stage::Dlogprobs)) {
            let comparison =
                self.judge_column(inputs, captured, &supposed, Tokens::Labelled, Vec::new());
            outcome.add(Stage::Dlogprobs, comparison);
        }
        let captured = captured.filter(|_| self.world.trusts(Stage::Dlogprobs, inputs.microbatch));
        for t in 0..inputs.tokens() {
            let (dlogp, variance) = match &captured {
                Some(column) => column.at(t),
                None => (expected.values[t], expected.variance[t]),
            };
            upstream.g[t] = -dlogp;
            let squared = dlogp * dlogp;
            upstream.variance[t] = if squared > 0.0 { variance / squared } else { 0.0 };
            let jumps = captured.is_none() && exact.at_kink[t];
            upstream.certain[t] = if jumps { expected.certain[t] } else { 0.0 };
        }
        self.policy_loss_value(microbatch, &exact, &expected, state, outcome)
    }

    pub(super) fn policy_gradient(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
    ) -> Result<(PolicyLoss, Expected), StepError> {
        let inputs = &microbatch.inputs;
        let (tokens, mb) = (inputs.tokens(), inputs.microbatch);
        let options = self.plan.step.options.grpo.as_ref().expect("a policy loss has its options");
        let need = |role| {
            self.plan
                .step
                .optional(role, mb, tokens)
                .and_then(|values| values.ok_or_else(|| self.plan.step.missing(role, mb)))
        };
        let mut advantages = self.plan.step.advantages(inputs)?;
        let mut old = self.plan.step.optional(Role::OldLogprobs, mb, tokens)?;
        let mut reference =
            if options.kl_beta == 0.0 { None } else { Some(need(Role::RefLogprobs)?) };
        self.world.policy_column(Role::Advantages, inputs, &mut advantages);
        for (role, column) in [(Role::OldLogprobs, &mut old), (Role::RefLogprobs, &mut reference)] {
            if let Some(values) = column {
                self.world.policy_column(role, inputs, values);
            }
        }
        let counted = |t: usize| if inputs.labels[t] == IGNORED { 0.0 } else { inputs.weights[t] };
        let weights: Vec<f64> = (0..tokens).map(counted).collect();
        let deviation = state.logprobs.variance.iter().fold(0.0, |most: f64, v| most.max(v.sqrt()));
        let kink_tolerance = KINK * (deviation + 8.0 * self.plan.roundings.compute()) * 2.0;
        let sequences = inputs.sequences();
        let zeros = || vec![0.0; tokens];
        let mut exact = PolicyLoss { terms: zeros(), dlogp: zeros(), at_kink: vec![false; tokens] };
        let mut divided = zeros();
        for (unit, denominator) in &microbatch.denominators {
            // The tokens of other denominators are masked, and stay zero.
            let own_weights = masked(&weights, &unit.rows);
            let part = policy_loss(
                options,
                &PolicyInputs {
                    logp: &state.logprobs.values,
                    old: old.as_deref(),
                    advantages: &advantages,
                    reference: reference.as_deref(),
                    weights: &own_weights,
                    sequences: &sequences,
                    denominator: *denominator,
                    kink_tolerance,
                },
            );
            for &t in &unit.rows {
                (exact.terms[t], exact.dlogp[t]) = (part.terms[t], part.dlogp[t]);
                exact.at_kink[t] = part.at_kink[t];
                divided[t] = *denominator;
            }
        }
        let upstream = self.plan.step.options.cotangent;
        exact.dlogp.iter_mut().for_each(|dlogp| *dlogp *= upstream);
        // Both the surrogate's and the KL term's slope move with the log-probability
        // by at most themselves: d(r A)/dlogp = r A, d(expm1 d) = e^d.
        let (compute, logp) = (self.plan.roundings.compute(), &state.logprobs.values);
        let sizes = (0..tokens).map(|t| {
            let ratio = old.as_ref().map_or(1.0, |old| (logp[t] - old[t]).exp());
            let kl = reference.as_ref().map_or(0.0, |r| (r[t] - logp[t]).exp() + 1.0);
            let size = share(weights[t], divided[t]) * upstream;
            size * (ratio * advantages[t].abs() + options.kl_beta * kl)
        });
        let sizes: Vec<f64> = sizes.map(f64::abs).collect();
        let variance = sizes.iter().zip(&state.logprobs.variance);
        let variance = variance.map(|(size, v)| size * size * (v + (8.0 * compute).powi(2)));
        let certain = sizes.iter().zip(&exact.at_kink);
        let certain = certain.map(|(&size, &kink)| if kink { size } else { 0.0 }).collect();
        let expected =
            Expected { certain, ..Expected::new(exact.dlogp.clone(), variance.collect()) };
        Ok((exact, expected))
    }

    fn policy_loss_value(
        &self,
        microbatch: &HeadMicrobatch,
        exact: &PolicyLoss,
        gradient: &Expected,
        state: &ForwardState,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        // A loss moves with its log-probability by its gradient at most.
        let compute = self.plan.roundings.compute();
        let variance = (0..exact.terms.len()).map(|t| {
            let slope = gradient.values[t].abs() + gradient.certain.get(t).copied().unwrap_or(0.0);
            slope * slope * state.logprobs.variance[t]
                + gradient.variance[t].max(0.0) * f64::EPSILON
                + relative(8.0 * compute, exact.terms[t].abs() + slope)
        });
        let terms = Expected::new(exact.terms.clone(), variance.collect());
        self.judge_loss(microbatch, &terms, outcome)
    }

    /// The loss of the microbatch from captured lse and label logits:
    /// `w (lse - (1-s) z_y - s/K Σz + λ lse²) / denominator`.
    pub(super) fn loss(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &microbatch.inputs;
        if self.plan.step.is_policy_loss()
            || !self.plan.holds_loss(microbatch)
            || !self.plan.wants(Stage::Loss)
        {
            return Ok(());
        }
        let loss = self.plan.step.options.reported_loss(inputs.valid_vocab);
        let (s, lambda, k) = (loss.smoothing, loss.z_loss, inputs.valid_vocab as f64);
        let divided = divisors(microbatch);
        let noise = self.term_noise(inputs.head(self.plan.step).map_or(0, |head| head.q.cols));
        let compute = self.plan.roundings.compute();
        let mean = |t: usize| state.logit_sum[t] / k.max(1.0);
        let mut nll = self.nll(inputs, state);
        let lse = (&state.loss_lse[..], &state.lse_variance[..]);
        let read = Read { lse, label: (&state.label.values, &state.label.variance) };
        let ties = self.world.nll(inputs, &read, &mut nll);
        let token = |t: usize| {
            if inputs.labels[t] == IGNORED {
                return (0.0, 0.0);
            }
            let (lse, label) = (state.loss_lse[t], state.label.values[t]);
            let mean = mean(t);
            let size = lse.abs() + label.abs() + s * mean.abs() + lambda.abs() * lse * lse;
            // The mean of the logits: each is rounded, and so is their sum. Logits of either
            // sign have partial sums of √(Σz²) where their total is next to nothing.
            let logits = noise.logit_rel_var * (mean * mean + lse * lse);
            let (total, squares) = (state.logit_sum[t], state.logit_squares[t]);
            let sum =
                self.plan.roundings.widest.sums.lse.variance(k, total, squares) / (k * k).max(1.0);
            let variance = loss.by_lse(lse).powi(2) * state.lse_variance[t]
                + (1.0 - s).powi(2) * state.label.variance[t]
                + s * s * (logits + sum)
                + relative(self.plan.roundings.kept_log_p(), nll[t])
                + relative(2.0 * compute, size);
            let weight = share(inputs.weights[t], divided[t]);
            (weight * nll[t], weight * weight * variance)
        };
        let (values, variance): (Vec<f64>, Vec<f64>) = (0..inputs.tokens()).map(token).unzip();
        // What does not count is not divided: where no token counts, by 0.
        let weight = |t: usize| match inputs.labels[t] {
            IGNORED => 0.0,
            _ => share(inputs.weights[t], divided[t]),
        };
        let shared = values.iter().enumerate().map(|(t, x)| {
            let weight = weight(t);
            let of_lse = state.lse_shared.get(t).copied().unwrap_or(0.0);
            4.0 * self.transform_scale() * x * x + weight * weight * of_lse
        });
        let shared = shared.collect();
        let certain = (0..inputs.tokens()).map(|t| {
            let tie = |ties: &[f64]| ties.get(t).copied().unwrap_or(0.0);
            let read = tie(&state.lse_ties) + tie(&state.label.certain);
            // What the world says of a loss counts what it reads.
            weight(t).abs() * if ties.is_empty() { read } else { tie(&ties) }
        });
        let certain = certain.collect();
        let terms = Expected { shared, certain, ..Expected::new(values, variance) };
        self.judge_loss(microbatch, &terms, outcome)
    }

    /// The loss of every token before weights, `[T]`: `lse - (1-s) z_y - s/K Σz + λ lse²`.
    pub(super) fn nll(&self, inputs: &MicrobatchInputs, state: &ForwardState) -> Vec<f64> {
        let loss = self.plan.step.options.reported_loss(inputs.valid_vocab);
        let classes = inputs.valid_vocab.max(1) as f64;
        let value = |t: usize| {
            let (lse, label) = (state.loss_lse[t], state.label.values[t]);
            loss.value(lse, label, || state.logit_sum[t] / classes)
        };
        (0..inputs.tokens()).map(value).collect()
    }
}

/// What the loss of each token is divided by, `[T]`.
pub(super) fn divisors(microbatch: &HeadMicrobatch) -> Vec<f64> {
    let mut divided = vec![1.0; microbatch.inputs.tokens()];
    for (unit, denominator) in &microbatch.denominators {
        unit.rows.iter().for_each(|&t| divided[t] = *denominator);
    }
    divided
}

/// The weights of some tokens, 0 for all others.
fn masked(weights: &[f64], rows: &[usize]) -> Vec<f64> {
    let mut masked = vec![0.0; weights.len()];
    rows.iter().for_each(|&t| masked[t] = weights[t]);
    masked
}
