//! Forward stages of one microbatch: lse, label_logits, logprobs; the loss is in
//! `loss`, what is `[T, V]` in `plane`.

use std::ops::Range;

use backtape::role::Role;
use rayon::prelude::*;

use super::comparison::MemberError;
use super::context::Replay;
use super::correlated_errors::nearly_equal;
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::operation_variance::{LabelSize, TokenSize};
use super::outcome::{Outcome, Status};
use super::plan::Plan;
use super::plausible_policies::members;
use super::qk_products::Products;
use super::rounding_variance::{CONFIDENT, relative, share_of_equal_roundings, stored};
use super::token_column::{Column, Expected, Tokens};
use super::world::{Expectation, Pass, StagePlace};
use crate::head::roundings::precision_of;
use crate::head::step::StepError;
use crate::head::{MicrobatchInputs, Scores, Stage, Unit};
use crate::kernels::formula::probability;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Values};
use crate::kernels::reference;
use crate::kernels::transform::Transform;

/// What the later stages of a microbatch start from; all `[T]`.
pub(super) struct ForwardState {
    /// lse: captured where it was captured, else the reference.
    pub(super) lse: Vec<f64>,
    /// The same as the loss reads it: a hypothesis may have another one for the backward.
    pub(super) loss_lse: Vec<f64>,
    /// Variance of `lse` beyond what storing it says.
    pub(super) lse_variance: Vec<f64>,
    /// Variance of the error of a recomputed `lse` that tokens of nearly equal logits share;
    /// empty for none.
    pub(super) lse_shared: Vec<f64>,
    /// How far a hypothesis' lse may be off for values that lie near ties; empty for none.
    pub(super) lse_ties: Vec<f64>,
    /// Relative variance, alike over a token's row, that this lse brings.
    pub(super) scale: Vec<f64>,
    /// Share of the rounding of `g p` that is alike for all of a token's classes, 0 to 1:
    /// of a token with one p so large that it is nearly g, or with all p nearly equal.
    pub(super) alike: Vec<f64>,
    /// The same of the tokens' other entries, those that are not nearly g.
    pub(super) few: Vec<f64>,
    /// Variance of the logits of a token, where they are nearly equal.
    pub(super) logit_variance: Vec<f64>,
    /// Label logits, captured or reference, with their variance.
    pub(super) label: Expected,
    /// How far a logit may lie from the softmax's mean of them: `|max| + |mean| + 1`.
    pub(super) spread: Vec<f64>,
    /// Sum over the valid classes of the logits.
    pub(super) logit_sum: Vec<f64>,
    /// Sum of their squares.
    pub(super) logit_squares: Vec<f64>,
    /// Log-probabilities of the labels, captured or recomputed, with their variance.
    pub(super) logprobs: Expected,
    /// The products of q and k that the backward pass need not multiply again.
    pub(super) products: Products,
}

struct Emulated {
    name: String,
    lse: Vec<f64>,
    label: Vec<f64>,
}

impl Replay<'_> {
    pub(super) fn forward(
        &self,
        microbatch: &HeadMicrobatch,
        outcome: &mut Outcome,
    ) -> Result<ForwardState, StepError> {
        let inputs = &microbatch.inputs;
        self.plan.check_inputs(inputs, outcome);
        let column = |stage: Stage, outcome: &mut Outcome| {
            let role = stage.role().expect("columns have roles");
            let column = self.judge.column(role, microbatch);
            outcome.spared(column, (&[stage], inputs.microbatch)).map(Option::flatten)
        };
        let logprobs = column(Stage::Logprobs, outcome)?;
        let Some(head) = inputs.head(self.plan.step) else {
            let captured = logprobs.ok_or_else(|| self.plan.step.missing(Role::Logprobs, None))?;
            return Ok(ForwardState::of_logprobs(&captured));
        };
        let mut products = self.executor.room_for_products(&head, inputs);
        let (exact, mut variance) = self.reference_columns(microbatch, &head, &mut products)?;
        self.judge.world.lse(Pass::Forward, inputs, &mut variance.lse.values);
        self.judge.expect_column(Stage::Lse, inputs, &mut variance.lse.values);
        self.judge.expect_column(Stage::LabelLogits, inputs, &mut variance.label.values);
        for (stage, column) in
            [(Stage::Lse, &mut variance.lse), (Stage::LabelLogits, &mut variance.label)]
        {
            column.certain = self.judge.world.ties(stage, inputs).unwrap_or_default();
        }
        let captured = (column(Stage::Lse, outcome)?, column(Stage::LabelLogits, outcome)?);
        let emulated = self.emulate(
            microbatch,
            &head,
            !self.plan.trial && (captured.0.is_some() || captured.1.is_some()),
        )?;
        for (stage, captured, expected) in [
            (Stage::Lse, &captured.0, &variance.lse),
            (Stage::LabelLogits, &captured.1, &variance.label),
        ] {
            let Some(captured) = captured.as_ref().filter(|_| self.plan.wants(stage)) else {
                continue;
            };
            let error = |emulated: &Emulated| {
                let values = if stage == Stage::Lse { &emulated.lse } else { &emulated.label };
                let pairs = values.iter().zip(&expected.values);
                let energy = pairs.map(|(x, r)| (x - r).powi(2)).sum();
                MemberError { name: emulated.name.clone(), energy }
            };
            let members = emulated.iter().map(error).collect();
            let tokens = if stage == Stage::Lse { Tokens::All } else { Tokens::Followed };
            outcome
                .add(stage, self.judge.judge_column(inputs, captured, expected, tokens, members));
        }
        let trusts = |stage| self.judge.world.trusts(stage, inputs.microbatch);
        let (lse, label) = captured;
        let captured =
            (lse.filter(|_| trusts(Stage::Lse)), label.filter(|_| trusts(Stage::LabelLogits)));
        let mut state = self.judge.state(captured, exact, variance, inputs.valid_vocab);
        state.products = products;
        state.loss_lse.clone_from(&state.lse);
        self.judge.world.lse(Pass::Backward, inputs, &mut state.lse);
        if let Some(captured) = &logprobs {
            if self.plan.wants(Stage::Logprobs) {
                let (tokens, expected) = (Tokens::Followed, &state.logprobs);
                let comparison =
                    self.judge.judge_column(inputs, captured, expected, tokens, Vec::new());
                outcome.add(Stage::Logprobs, comparison);
            }
            if trusts(Stage::Logprobs) {
                state.logprobs = captured_expectation(captured);
            }
        }
        Ok(state)
    }
}

impl Judge<'_> {
    /// What the world makes of one number a token.
    fn expect_column(&self, stage: Stage, inputs: &MicrobatchInputs, values: &mut [f64]) {
        let rows: Vec<usize> = (0..values.len()).collect();
        let place = StagePlace { stage, microbatch: inputs.microbatch, rank: None };
        self.world.expected(&mut Expectation { place, rows: &rows, columns: 1, values });
    }
}

impl Plan<'_> {
    /// Inputs are looked at, not compared: only the dump knows them.
    fn check_inputs(&self, inputs: &MicrobatchInputs, outcome: &mut Outcome) {
        let head = inputs.head(self.step);
        let matrices = match (&inputs.scores, &head) {
            (Scores::Product { .. }, Some(head)) => vec![(Stage::Q, head.q), (Stage::K, head.k)],
            (Scores::Logits(_), Some(head)) => {
                head.given.iter().map(|&logits| (Stage::Logits, logits)).collect()
            }
            _ => Vec::new(),
        };
        for (stage, matrix) in matrices {
            // Logits may be masked by -inf where they are not valid.
            let valid = if stage == Stage::Logits { inputs.valid_vocab } else { matrix.cols };
            let bad = matrix.nonfinite(valid);
            if bad > 0 {
                let words = format!("{bad} values of {stage} are not finite");
                outcome.fail(stage, words);
            } else if outcome.stage(stage).status == Status::Skip {
                outcome.pass(stage, "finite");
            }
        }
        let counted = inputs.labels.iter().filter(|&&label| label != IGNORED).count();
        match inputs.wrong_labels() {
            Some(words) => outcome.fail(Stage::Labels, words),
            None if outcome.stage(Stage::Labels).status == Status::Fail => {}
            None => {
                let words = format!("{counted} of {} tokens counted", inputs.tokens());
                outcome.pass(Stage::Labels, words);
            }
        }
        for (stage, role) in [
            (Stage::Weights, Role::Weights),
            (Stage::Bias, Role::Bias),
            (Stage::Cotangent, Role::Cotangent),
            (Stage::TokenOrder, Role::TokenOrder),
            (Stage::Advantages, Role::Advantages),
            (Stage::OldLogprobs, Role::OldLogprobs),
            (Stage::RefLogprobs, Role::RefLogprobs),
        ] {
            if self.step.recorded(role, inputs.microbatch).is_some() {
                outcome.pass(stage, "read");
            }
        }
    }
}

impl Replay<'_> {
    /// lse and label logits in f64, from the captured logits where they were
    /// captured and are not the head's input.
    fn reference_columns(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        products: &mut Products,
    ) -> Result<(reference::Forward, Variances), StepError> {
        let exact = self.executor.forward(microbatch, head, products)?;
        let variance = self.judge.variances(head, &exact);
        let captured = self.plan.step.find(Role::Logits, microbatch.inputs.microbatch);
        let trusted = self.judge.world.trusts(Stage::Logits, microbatch.inputs.microbatch);
        let forced =
            captured.filter(|_| head.given.is_none() && self.plan.wants(Stage::Logits) && trusted);
        let Some(key) = forced else { return Ok((exact, variance)) };
        match self.forward_of_captured_logits(key, head, exact.clone()) {
            // Logits that cannot be used are said where they are judged.
            Err(error) if error.is_of_dump() => Ok((exact, variance)),
            forced => forced,
        }
    }

    /// The forward pass from captured logits: what they hold is not blamed on lse.
    fn forward_of_captured_logits(
        &self,
        key: &backtape::shard::TensorKey,
        head: &HeadInputs<'_>,
        mut exact: reference::Forward,
    ) -> Result<(reference::Forward, Variances), StepError> {
        let storage = precision_of(self.plan.step.tensors[key].dtype);
        let put = &mut |rows: Range<usize>, part: reference::Forward| {
            exact.lse[rows.clone()].copy_from_slice(&part.lse);
            exact.label_logits[rows.clone()].copy_from_slice(&part.label_logits);
            exact.row_max[rows.clone()].copy_from_slice(&part.row_max);
            exact.logit_sum[rows.clone()].copy_from_slice(&part.logit_sum);
            exact.logit_squares[rows].copy_from_slice(&part.logit_squares);
        };
        let none = |rows| Matrix { rows, cols: 0, values: Values::F32(&[]) };
        let bare = HeadInputs { q: none(head.q.rows), k: none(head.k.rows), bias: None, ..*head };
        let bare = HeadInputs { reads: None, transform: Transform::NONE, ..bare };
        self.executor.forward_of_logits(key, &bare, put)?;
        let compute = self.plan.roundings.compute();
        let sum = self.plan.roundings.widest.sums.lse.variance(head.valid_vocab as f64, 1.0, 0.0);
        let lse = (0..exact.lse.len()).map(|t| {
            let x = exact.row_max[t].abs() + 1.0;
            stored(storage, x) + sum + relative(4.0 * compute, exact.lse[t].abs() + x + 1.0)
        });
        let label = exact.label_logits.iter().map(|&x| stored(storage, x));
        let shared = self.judge.equal_logits(&exact, head.valid_vocab as f64);
        let variance = Variances {
            lse: Expected { shared, ..Expected::new(exact.lse.clone(), lse.collect()) },
            label: Expected::new(exact.label_logits.clone(), label.collect()),
        };
        Ok((exact, variance))
    }
}

impl Judge<'_> {
    fn variances(&self, head: &HeadInputs<'_>, exact: &reference::Forward) -> Variances {
        let d = head.q.cols;
        let largest = head.k.row_energies(0..head.valid_vocab).into_iter().fold(0.0, f64::max);
        let bias = head.bias.map_or(0.0, |bias| {
            bias[..head.valid_vocab].iter().fold(0.0, |most: f64, b| most.max(b.abs()))
        });
        let tokens = || (0..head.q.rows).into_par_iter().with_min_len(64);
        let lse = tokens().map(|t| {
            let norms = head.q.row_energy(t) * largest;
            let size = TokenSize { lse: exact.lse[t], row_max: exact.row_max[t], norms };
            self.lse_variance(&size, d, head.valid_vocab, bias)
        });
        let of_label = |(q, k): &mut (Vec<f64>, Vec<f64>), t: usize| match head.labels[t] {
            IGNORED => 0.0,
            row => {
                let row = row as usize;
                q.resize(d, 0.0);
                k.resize(d, 0.0);
                head.q.panel_f64(t..t + 1, q);
                head.k.panel_f64(row..row + 1, k);
                let (mut dot, mut squares) = (0.0, 0.0);
                for (q, k) in q.iter().zip(k) {
                    let term = q * *k;
                    dot += term;
                    squares += term * term;
                }
                let size = LabelSize { value: exact.label_logits[t], dot, squares };
                self.label_logit_variance(&size, d, head.bias.is_some())
            }
        };
        let label = tokens().map_init(Default::default, of_label);
        // An error e of the transform moves lse by e Σ p z, and Σ p z lies between
        // lse - ln V (the entropy is ln V at most) and the largest logit.
        let (alike, classes) = (self.transform_scale(), head.valid_vocab.max(1) as f64);
        let moved = exact.lse.iter().zip(&exact.row_max);
        let moved = moved.map(|(lse, max)| alike * max.abs().max(lse.abs() + classes.ln()).powi(2));
        let moved =
            moved.zip(self.equal_logits(exact, classes)).map(|(value, other)| value + other);
        let labels = exact.label_logits.iter().map(|x| alike * x * x);
        let (moved, labels) = (moved.collect(), labels.collect());
        Variances {
            lse: Expected { shared: moved, ..Expected::new(exact.lse.clone(), lse.collect()) },
            label: Expected {
                shared: labels,
                ..Expected::new(exact.label_logits.clone(), label.collect())
            },
        }
    }

    /// Variance of each token's lse, alike for all, from logits that are nearly equal.
    fn equal_logits(&self, exact: &reference::Forward, classes: f64) -> Vec<f64> {
        let sum = self.plan.roundings.widest.sums.lse;
        let spread = |t: usize| logit_variance(exact, t, classes).sqrt();
        let kept = self.kept_sum() * self.equal_sums(exact);
        (0..exact.lse.len()).map(|t| nearly_equal(sum, classes, spread(t)) + kept).collect()
    }

    /// The share of the tokens whose sums of exponentials round alike, where these are kept in few
    /// bits.
    fn equal_sums(&self, exact: &reference::Forward) -> f64 {
        let tokens = exact.lse.len().max(1) as f64;
        let logs = || exact.lse.iter().zip(&exact.row_max).map(|(lse, max)| lse - max);
        let mean = logs().sum::<f64>() / tokens;
        let spread = (logs().map(|x| (x - mean).powi(2)).sum::<f64>() / tokens).sqrt();
        share_of_equal_roundings(spread / (2.0 * self.constant()))
    }
}

impl Replay<'_> {
    /// lse and label logits of the members that round the logits most differently.
    fn emulate(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        needed: bool,
    ) -> Result<Vec<Emulated>, StepError> {
        let all = members(&self.plan.roundings);
        let last = all.len() - 1;
        let ends = all.into_iter().enumerate().filter(|(at, _)| *at == 0 || *at == last);
        let run = |(at, member): (usize, super::plausible_policies::Member)| {
            let (lse, label) = self.executor.emulated_forward(microbatch, head, (at, &member))?;
            Ok(Emulated { name: member.name, lse, label })
        };
        ends.filter(|_| needed).map(run).collect()
    }
}

impl Judge<'_> {
    fn state(
        &self,
        captured: (Option<Column>, Option<Column>),
        exact: reference::Forward,
        variance: Variances,
        classes: usize,
    ) -> ForwardState {
        let largest =
            exact.row_max.iter().zip(&exact.lse).map(|(&max, &lse)| probability(max, lse));
        let classes = classes.max(1) as f64;
        let spread: Vec<f64> = (0..exact.row_max.len())
            .map(|t| exact.row_max[t].abs() + (exact.logit_sum[t] / classes).abs() + 1.0)
            .collect();
        let step = 2.0 * self.constant();
        let alike = |(t, max): (usize, f64)| {
            let variance = logit_variance(&exact, t, classes);
            let few = share_of_equal_roundings(variance.sqrt() / step);
            (if max > CONFIDENT { 1.0 } else { few }, (few, variance))
        };
        let (alike, rest): (Vec<f64>, Vec<(f64, f64)>) = largest.enumerate().map(alike).unzip();
        let (few, logit_variance) = rest.into_iter().unzip();
        let lse_shared = match captured.0 {
            Some(_) => Vec::new(),
            None => self.equal_logits(&exact, classes),
        };
        let (lse, scale) = match &captured.0 {
            Some(column) => {
                let unit = column.stored.map_or(0.0, |precision| precision.unit_roundoff());
                let scale = column.values.iter().map(|&lse| self.lse_scale(lse, unit)).collect();
                (captured_expectation(column), scale)
            }
            None => {
                let scale = variance.lse.values.iter().zip(&variance.lse.variance);
                let scale = scale.map(|(&lse, own)| self.lse_scale(lse, 0.0) + own).collect();
                (variance.lse, scale)
            }
        };
        let label = captured.1.as_ref().map_or(variance.label, captured_expectation);
        let compute = self.plan.roundings.compute();
        let logprobs = (0..lse.values.len()).map(|t| {
            let (a, b) = (label.values[t], lse.values[t]);
            (a - b, label.variance[t] + lse.variance[t] + relative(compute, a.abs() + b.abs()))
        });
        let (values, between) = logprobs.unzip();
        let root = |expected: &Expected, t: usize| {
            expected.shared.get(t).map_or(0.0, |variance| variance.sqrt())
        };
        let both = (0..lse.values.len()).map(|t| (root(&lse, t) + root(&label, t)).powi(2));
        let both = both.collect();
        ForwardState {
            lse: lse.values,
            loss_lse: Vec::new(),
            lse_variance: lse.variance,
            lse_shared,
            lse_ties: lse.certain,
            scale,
            alike,
            few,
            logit_variance,
            spread,
            label,
            logit_sum: exact.logit_sum,
            logit_squares: exact.logit_squares,
            logprobs: Expected { shared: both, ..Expected::new(values, between) },
            products: Products::default(),
        }
    }
}

impl ForwardState {
    /// Probability of the label of each of a unit's tokens.
    pub(super) fn confidence(&self, unit: &Unit) -> Vec<f64> {
        let probability_of = |&t: &usize| probability(self.label.values[t], self.lse[t]);
        unit.rows.iter().map(probability_of).collect()
    }

    /// A head that starts from log-probabilities: nothing before them is known.
    fn of_logprobs(captured: &Column) -> ForwardState {
        let tokens = captured.values.len();
        ForwardState {
            lse: vec![0.0; tokens],
            loss_lse: vec![0.0; tokens],
            lse_variance: vec![0.0; tokens],
            lse_shared: Vec::new(),
            lse_ties: Vec::new(),
            scale: vec![0.0; tokens],
            alike: vec![0.0; tokens],
            few: vec![0.0; tokens],
            logit_variance: vec![0.0; tokens],
            spread: vec![0.0; tokens],
            label: Expected::new(vec![0.0; tokens], vec![0.0; tokens]),
            logit_sum: vec![0.0; tokens],
            logit_squares: vec![0.0; tokens],
            logprobs: captured_expectation(captured),
            products: Products::default(),
        }
    }
}

impl Expected {
    pub(super) fn new(values: Vec<f64>, variance: Vec<f64>) -> Expected {
        Expected { values, variance, certain: Vec::new(), shared: Vec::new() }
    }
}

/// What a later stage starts from when this was captured: its own storage may have
/// rounded what the job went on with.
fn captured_expectation(column: &Column) -> Expected {
    let (values, variance) = (0..column.values.len()).map(|t| column.at(t)).unzip();
    Expected::new(values, variance)
}

/// Variance of a token's logits where they are nearly equal: twice `lse - ln V - mean`.
fn logit_variance(exact: &reference::Forward, token: usize, classes: f64) -> f64 {
    (2.0 * (exact.lse[token] - classes.ln() - exact.logit_sum[token] / classes)).max(0.0)
}

struct Variances {
    lse: Expected,
    label: Expected,
}
