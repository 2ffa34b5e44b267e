//! Forward stages of one microbatch: lse, label_logits, loss.

use backtape::head::Scope;
use backtape::role::Role;

use super::allowed::{rounded, summed};
use super::members::members;
use super::outcome::{Comparison, MemberError, Outcome};
use super::{Replay, Slice};
use crate::compare::{Allowed, Rows, Tally, once};
use crate::head::roundings::{F32, unit_of};
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
use crate::kernels::{policy, reference};

/// From here on `g p` lies within two spacings of bf16's exponent of g, so that
/// tokens of one g may round alike.
const CONFIDENT: f64 = 0.25;

/// What the backward of a microbatch starts from.
pub(super) struct ForwardState {
    /// lse per token: captured where it was captured, else the reference.
    pub(super) lse: Vec<f64>,
    /// Relative variance, alike over a token's row, that this lse brings.
    pub(super) scale: Vec<f64>,
    /// Tokens with a p so large that `g p` is nearly g.
    pub(super) confident: Vec<bool>,
}

impl Replay<'_> {
    pub(super) fn forward(
        &self,
        slice: &Slice,
        all: &[&MicrobatchInputs],
        outcome: &mut Outcome,
    ) -> Result<ForwardState, StepError> {
        let inputs = &slice.inputs;
        let head = head_inputs(inputs);
        self.check_inputs(inputs, &head, outcome);
        let exact = reference::forward(&head, self.tiles, self.progress);
        let variance = self.variances(&head, &exact);
        let captured_lse = self.column(Role::Lse, slice)?;
        let captured_label = self.column(Role::LabelLogits, slice)?;
        let emulated = self.emulate(&head, captured_lse.is_some() || captured_label.is_some());
        for (stage, captured, exact, variance, pick) in [
            (Stage::Lse, &captured_lse, &exact.lse, &variance.lse, 0),
            (Stage::LabelLogits, &captured_label, &exact.label_logits, &variance.label, 1),
        ] {
            let Some(captured) = captured.as_ref().filter(|_| self.wants(stage)) else {
                continue;
            };
            let members = emulated.iter().map(|(name, lse, label)| {
                let values = if pick == 0 { lse } else { label };
                let energy =
                    values.iter().zip(exact).map(|(&x, r)| (f64::from(x) - r).powi(2)).sum();
                MemberError { name: name.clone(), energy }
            });
            let members = members.collect();
            let comparison = self.column_comparison(inputs, captured, exact, variance, members);
            outcome.add(stage, comparison);
        }
        self.loss(slice, all, &exact, (&captured_lse, &captured_label), &variance, outcome)?;
        Ok(self.state(captured_lse.as_ref(), exact, &variance))
    }

    /// Inputs are looked at, not compared: only the dump knows them.
    fn check_inputs(
        &self,
        inputs: &MicrobatchInputs,
        head: &HeadInputs<'_>,
        outcome: &mut Outcome,
    ) {
        for (stage, matrix) in [(Stage::Q, &head.q), (Stage::K, &head.k)] {
            let bad = (0..matrix.len()).filter(|&i| !matrix.get_f64(i).is_finite()).count();
            if bad > 0 {
                let words = format!("{bad} values of {stage} are not finite");
                outcome.stages[stage as usize].status = super::outcome::Status::Fail;
                outcome.skip(stage, words);
            } else if outcome.stage(stage).status == super::outcome::Status::Skip {
                outcome.pass(stage, "finite");
            }
        }
        let counted = inputs.labels.iter().filter(|&&label| label != IGNORED).count();
        outcome.pass(Stage::Labels, format!("{counted} of {} tokens counted", inputs.labels.len()));
        if self.step.find(Role::Weights, inputs.microbatch).is_some() {
            outcome.pass(Stage::Weights, "finite");
        }
    }

    fn variances(&self, head: &HeadInputs<'_>, exact: &reference::Forward) -> Variances {
        let d = head.q.cols;
        let squares = |m: &Matrix<'_>, row: usize| -> f64 {
            (0..d).map(|i| m.get_f64(row * d + i).powi(2)).sum()
        };
        let largest = (0..head.valid_vocab).map(|v| squares(&head.k, v)).fold(0.0, f64::max);
        let lse = (0..head.q.rows).map(|t| {
            let norms = squares(&head.q, t) * largest;
            self.lse_variance(exact.lse[t], exact.row_max[t], norms, d, head.valid_vocab)
        });
        let label = (0..head.q.rows).map(|t| match head.labels[t] {
            IGNORED => 0.0,
            row => {
                let term =
                    |i| (head.q.get_f64(t * d + i) * head.k.get_f64(row as usize * d + i)).powi(2);
                self.label_logit_variance(exact.label_logits[t], (0..d).map(term).sum(), d)
            }
        });
        Variances { lse: lse.collect(), label: label.collect() }
    }

    /// lse and label logits of every member that rounds the logits differently.
    fn emulate(&self, head: &HeadInputs<'_>, needed: bool) -> Vec<(String, Vec<f32>, Vec<f32>)> {
        let mut found: Vec<(String, Vec<f32>, Vec<f32>)> = Vec::new();
        let all = members(&self.roundings, self.step.options.plain);
        let ends = [&all[0], &all[all.len() - 1]];
        for member in ends.into_iter().filter(|_| needed) {
            let result = policy::forward(&member.policy, head, self.tiles, self.progress);
            found.push((member.name.clone(), result.lse, result.label_logits));
        }
        found
    }

    /// A captured `[T]` tensor of the microbatch, if it was recorded.
    pub(super) fn column(&self, role: Role, slice: &Slice) -> Result<Option<Column>, StepError> {
        let Some(key) = self.step.find(role, slice.inputs.microbatch) else {
            return Ok(None);
        };
        let tensor = self.step.assemble(key)?;
        let tokens = slice.inputs.labels.len();
        match matrix(&tensor).filter(|values| values.len() == tokens) {
            Some(values) => {
                let unit = unit_of(tensor.dtype);
                let values = (0..tokens).map(|t| values.get_f64(t)).collect();
                Ok(Some(Column { source: key.to_string(), values, unit }))
            }
            None => Err(unfit(&tensor, &format!("{tokens} floats, one a token"))),
        }
    }

    fn column_comparison(
        &self,
        inputs: &MicrobatchInputs,
        captured: &Column,
        exact: &[f64],
        variance: &[f64],
        members: Vec<MemberError>,
    ) -> Comparison {
        let tokens = exact.len();
        let bound = self.bound(tokens, 1);
        // An ignored token's label logit is the job's own business.
        let kept: Vec<usize> =
            (0..tokens).filter(|&t| inputs.labels[t] != IGNORED || variance[t] > 0.0).collect();
        let values: Vec<f64> = kept.iter().map(|&t| captured.values[t]).collect();
        let exact: Vec<f64> = kept.iter().map(|&t| exact[t]).collect();
        let rows = Rows {
            captured: Matrix {
                rows: kept.len(),
                cols: 1,
                values: crate::kernels::Values::F64(&values),
            },
            reference: &exact,
            index: &|row| kept[row] as u64,
            repeats: &once,
        };
        let allowed = |row: usize, _, x: f64| Allowed {
            own: variance[kept[row]] + rounded(captured.unit, x),
            ..Allowed::default()
        };
        let tally = Tally::of(&rows, allowed, &bound);
        let excess = tally.excess(&bound);
        let (microbatch, source) = (inputs.microbatch, captured.source.clone());
        Comparison { microbatch, rank: None, source, tally, excess, members, by_hits: Vec::new() }
    }

    /// The loss of the microbatch from captured lse and label logits.
    fn loss(
        &self,
        slice: &Slice,
        all: &[&MicrobatchInputs],
        exact: &reference::Forward,
        captured: (&Option<Column>, &Option<Column>),
        variance: &Variances,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &slice.inputs;
        let Some(key) = self.step.find(Role::Loss, inputs.microbatch) else { return Ok(()) };
        if !self.wants(Stage::Loss) {
            return Ok(());
        }
        if self.step.options.scope == Scope::Rank {
            outcome.skip(Stage::Loss, "scope=rank: each rank has a loss of its own");
            return Ok(());
        }
        let tensor = self.step.assemble(key)?;
        let Some(found) = matrix(&tensor).filter(|values| values.len() == 1) else {
            return Err(unfit(&tensor, "one float"));
        };
        let whole = Unit { rank: None, rows: (0..inputs.labels.len()).collect() };
        let denominator = self.step.denominator(all, inputs, &whole);
        let (total, inner) = self.loss_sum(inputs, denominator, exact, captured, variance);
        let own = inner + rounded(unit_of(tensor.dtype), total) + rounded(2.0 * F32, total);
        let bound = self.bound(1, 1);
        let rows = Rows { captured: found, reference: &[total], index: &|_| 0, repeats: &once };
        let tally = Tally::of(&rows, |_, _, _| Allowed { own, ..Allowed::default() }, &bound);
        outcome.add(
            Stage::Loss,
            Comparison::new(inputs.microbatch, None, key.to_string(), tally, &bound),
        );
        Ok(())
    }

    /// Σ w nll / denominator, and the variance of its parts and of their sum.
    fn loss_sum(
        &self,
        inputs: &MicrobatchInputs,
        denominator: f64,
        exact: &reference::Forward,
        captured: (&Option<Column>, &Option<Column>),
        variance: &Variances,
    ) -> (f64, f64) {
        let value = |column: &Option<Column>, t: usize, exact: f64, variance: f64| match column {
            Some(column) => (column.values[t], rounded(column.unit, column.values[t])),
            None => (exact, variance),
        };
        let (mut total, mut squares, mut error) = (0.0, 0.0, 0.0);
        for t in (0..inputs.labels.len()).filter(|&t| inputs.labels[t] != IGNORED) {
            let (lse, lse_error) = value(captured.0, t, exact.lse[t], variance.lse[t]);
            let (label, label_error) =
                value(captured.1, t, exact.label_logits[t], variance.label[t]);
            let weight = inputs.weights[t] / denominator;
            let addend = weight * (lse - label);
            total += addend;
            squares += addend * addend;
            error += weight * weight * (lse_error + label_error) + rounded(F32, addend);
        }
        let n = inputs.labels.len() as f64;
        (total, error + summed(self.roundings.accumulate, n, total, squares))
    }

    fn state(
        &self,
        captured: Option<&Column>,
        exact: reference::Forward,
        variance: &Variances,
    ) -> ForwardState {
        let largest = exact.row_max.iter().zip(&exact.lse).map(|(max, lse)| (max - lse).exp());
        let confident = largest.map(|p| p > CONFIDENT).collect();
        match captured {
            Some(column) => {
                let scale = column.values.iter().map(|&lse| self.lse_scale(lse, column.unit));
                ForwardState { scale: scale.collect(), lse: column.values.clone(), confident }
            }
            None => {
                let scale = exact.lse.iter().zip(&variance.lse);
                let scale = scale.map(|(&lse, own)| self.lse_scale(lse, 0.0) + own);
                ForwardState { scale: scale.collect(), lse: exact.lse, confident }
            }
        }
    }
}

/// A captured `[T]` tensor, widened, with the unit roundoff of its dtype.
pub(super) struct Column {
    pub(super) source: String,
    pub(super) values: Vec<f64>,
    pub(super) unit: f64,
}

struct Variances {
    lse: Vec<f64>,
    label: Vec<f64>,
}

/// The kernels' view of a microbatch.
pub(crate) fn head_inputs(inputs: &MicrobatchInputs) -> HeadInputs<'_> {
    let checked = "checked when it was gathered";
    let (q, k) = (matrix(&inputs.q).expect(checked), matrix(&inputs.k).expect(checked));
    HeadInputs::plain(q, k, &inputs.labels, inputs.valid_vocab)
}
