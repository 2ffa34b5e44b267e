//! A few tokens with their raw logits (q·k plus bias), from which lse and logits under another
//! transform (soft cap, scale) follow cheaply. A fit takes a hundred tries, and a full trial of
//! each would take a GEMM.

use backtape::identity::Microbatch;
use backtape::role::Role;
use rayon::prelude::*;

use super::single_tokens::dot;
use crate::diagnose::evidence::Evidence;
use crate::head::step::{matrix, numbers};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::formula::{log_sum_exp, probability};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::transform::Transform;

/// How many tokens of the whole step are used.
const TOKENS: usize = 24;
/// The same where each try reads all of k.
const ROWS: usize = 12;
/// A try reads at most this many elements of k in a microbatch; only some of its columns are used.
const OF_K: usize = 1 << 20;
/// How many tries a fit takes, for counting its work.
const TRIES: usize = 100;
/// A fit is believed when it leaves less than this share of the squared error.
const LEFT: f64 = 0.05;

/// The tokens, and what was captured of them.
pub struct RawLogits<'a> {
    each: Vec<Token>,
    heads: Vec<UsedColumns<'a>>,
    /// Whether rows of dq are compared, and not the captured forward values.
    backward: bool,
    declared: f64,
}

/// A microbatch, and the columns of k and dq that are used.
struct UsedColumns<'a> {
    head: HeadInputs<'a>,
    columns: Vec<usize>,
    /// These columns of k, for the valid classes, row by row.
    k: Vec<f64>,
}

struct Token {
    head: usize,
    label: usize,
    /// Product plus bias, for each valid class.
    raw: Vec<f64>,
    lse: Option<f64>,
    label_logit: Option<f64>,
    /// Log-probability of the label.
    logprob: Option<f64>,
    /// The used columns of the captured row.
    dq: Option<Vec<f64>>,
}

impl<'a> RawLogits<'a> {
    /// Evenly spaced tokens of every microbatch that count in the loss. None where no value fails
    /// that depends on the transform, or the budget is spent. Where the recorded forward agrees,
    /// only the backward can have another transform, so dq is used.
    pub fn of(evidence: &Evidence<'a>) -> RawLogits<'a> {
        let off = evidence.fails_any(&Stage::GRADIENTS);
        let backward = !evidence.captured_forward() || !evidence.fails_any(&Stage::FORWARD) && off;
        let (each, heads, declared) = (Vec::new(), Vec::new(), f64::NAN);
        let mut raw_logits = RawLogits { each, heads, backward, declared };
        let judged = !backward || evidence.fails_any(&Stage::OF_Q);
        let most = if backward { ROWS } else { TOKENS };
        let per = most.div_ceil(evidence.inputs.len().max(1));
        for inputs in evidence.inputs.iter().filter(|_| judged) {
            let Some(head) = inputs.head(evidence.step) else { continue };
            let counted = |&t: &usize| inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0;
            let shown = evidence.rows.as_ref().and_then(|rows| rows.tokens.get(&inputs.microbatch));
            let all: Vec<usize> = match shown {
                // Where only some places are wrong, the evidence shows only their tokens.
                Some(shown) => shown.iter().copied().filter(counted).collect(),
                None => (0..inputs.tokens()).filter(counted).collect(),
            };
            let step = all.len().div_ceil(per).max(1);
            let used = UsedColumns::of(head, backward);
            if evidence.spend(used.work() * per.min(all.len())) {
                break;
            }
            let captured = Columns::of(evidence, inputs, backward);
            for &t in all.iter().step_by(step) {
                raw_logits.each.push(captured.token(&used, raw_logits.heads.len(), t));
            }
            raw_logits.heads.push(used);
        }
        raw_logits.declared = raw_logits.error(evidence.step.options.transform);
        raw_logits
    }

    /// Squared error of the captured lse, label logits and log-probabilities under another
    /// transform. For the backward: squared distance of dq from the nearest multiple of the dq that
    /// the transform gives, with the captured lse or the transform's own. NaN where nothing was
    /// captured.
    pub fn error(&self, transform: Transform) -> f64 {
        let of_token = |token: &Token| {
            let used = &self.heads[token.head];
            let (z, lse) = logits(token, &used.head, transform);
            if self.backward {
                let from = |lse: f64| off_any_multiple(token, used, transform, (&z, lse));
                let (declared, captured) = (from(lse)?, token.lse.and_then(from));
                return Some(captured.map_or(declared, |captured| declared.min(captured)));
            }
            let off = |captured: Option<f64>, x: f64| captured.map_or(0.0, |c| (c - x).powi(2));
            let label = z[token.label];
            Some(
                off(token.lse, lse)
                    + off(token.label_logit, label)
                    + off(token.logprob, label - lse),
            )
        };
        let errors: Vec<f64> = self.each.par_iter().filter_map(of_token).collect();
        if errors.is_empty() { f64::NAN } else { errors.iter().sum() }
    }

    /// How many of the first classes must be summed for the exponentials to give the captured lse
    /// of all tokens; none where no lse was captured.
    pub fn valid_vocab(&self, transform: Transform) -> Option<usize> {
        let classes = self.each.iter().map(|token| token.raw.len()).min()?;
        let mut errors = vec![0.0; classes];
        for token in &self.each {
            let lse = token.lse?;
            let mut sum = 0.0;
            for (error, raw) in errors.iter_mut().zip(&token.raw) {
                sum += probability(transform.value(*raw), lse);
                *error += f64::ln(sum).powi(2);
            }
        }
        let finite = (0..classes).filter(|&v| errors[v].is_finite());
        finite.min_by(|&a, &b| errors[a].total_cmp(&errors[b])).map(|v| v + 1)
    }

    /// Whether a fitted number leaves much less error than the declared one.
    pub fn believes(&self, number: f64, error: &dyn Fn(f64) -> f64) -> bool {
        error(number) < LEFT * self.declared
    }
}

impl<'a> UsedColumns<'a> {
    fn of(head: HeadInputs<'a>, backward: bool) -> UsedColumns<'a> {
        let (d, v) = (head.q.cols, head.valid_vocab);
        let count = if backward { (OF_K / v.max(1)).clamp(1, d.max(1)) } else { 0 };
        let columns: Vec<usize> = (0..count.min(d)).map(|at| at * d / count).collect();
        let row = |v: usize| columns.iter().map(move |i| v * d + i);
        let k = (0..v).flat_map(row).map(|at| head.k.get_f64(at)).collect();
        UsedColumns { head, columns, k }
    }

    /// Multiply-adds of a fit, per token.
    fn work(&self) -> usize {
        self.head.valid_vocab * (self.head.q.cols + TRIES * (self.columns.len() + 1))
    }
}

/// Captured tensors of a microbatch, `[T]` and `[T, D]`.
struct Columns {
    lse: Option<Vec<f64>>,
    label_logits: Option<Vec<f64>>,
    logprobs: Option<Vec<f64>>,
    dq: Option<Vec<f64>>,
}

impl Columns {
    fn of(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, backward: bool) -> Columns {
        let column = |role: Role, count: usize| {
            let values = captured(evidence, role, inputs.microbatch)?;
            Some(values).filter(|values| values.len() == count)
        };
        let (n, d) = (inputs.tokens(), inputs.head(evidence.step).map_or(0, |head| head.q.cols));
        let dq = if !backward || d == 0 { None } else { column(Role::Dq, n * d) };
        let (label_logits, logprobs) = (column(Role::LabelLogits, n), column(Role::Logprobs, n));
        Columns { lse: column(Role::Lse, n), label_logits, logprobs, dq }
    }

    fn token(&self, used: &UsedColumns<'_>, number: usize, t: usize) -> Token {
        let head = &used.head;
        let d = head.q.cols;
        let [mut q, mut k] = [(); 2].map(|()| vec![0.0; d]);
        head.q.panel_f64(t..t + 1, &mut q);
        let raw = |v: usize| {
            let product = match &head.given {
                Some(given) => given.get_f64(t * given.cols + v),
                None => {
                    head.k.panel_f64(v..v + 1, &mut k);
                    dot(&q, &k)
                }
            };
            product + head.bias.map_or(0.0, |bias| bias[v])
        };
        let value_of_token = |of: &Option<Vec<f64>>| of.as_ref().map(|values| values[t]);
        Token {
            head: number,
            label: head.labels[t] as usize,
            raw: (0..head.valid_vocab).map(raw).collect(),
            lse: value_of_token(&self.lse),
            label_logit: value_of_token(&self.label_logits),
            logprob: value_of_token(&self.logprobs),
            dq: self.dq.as_ref().map(|dq| used.columns.iter().map(|i| dq[t * d + i]).collect()),
        }
    }
}

fn captured(
    evidence: &Evidence<'_>,
    role: Role,
    microbatch: Option<Microbatch>,
) -> Option<Vec<f64>> {
    let key = evidence.step.find(role, microbatch)?;
    if evidence.step.tensors[key].partial.is_some() {
        return None;
    }
    let tensor = evidence.step.assemble(key).ok()?;
    matrix(&tensor)?;
    numbers(&tensor)
}

/// Logits of a token and their lse.
fn logits(token: &Token, head: &HeadInputs<'_>, transform: Transform) -> (Vec<f64>, f64) {
    let z: Vec<f64> = token.raw.iter().map(|&x| transform.value(x)).collect();
    let masked = head.k.rows.max(token.raw.len()) - token.raw.len();
    let lse = log_sum_exp(&z, head.mask.map(|mask| (mask, masked)));
    (z, lse)
}

/// Squared distance of a row of dq, in the used columns, from the nearest multiple of `Σ (p -
/// onehot) slope k`.
fn off_any_multiple(
    token: &Token,
    used: &UsedColumns<'_>,
    transform: Transform,
    (z, lse): (&[f64], f64),
) -> Option<f64> {
    let dq = token.dq.as_ref()?;
    let mut model = vec![0.0; dq.len()];
    for ((v, &z), k) in z.iter().enumerate().zip(used.k.chunks(dq.len().max(1))) {
        let slope = transform.slope_at(z);
        let onehot = if v == token.label { 1.0 } else { 0.0 };
        let entry = (probability(z, lse) - onehot) * slope;
        model.iter_mut().zip(k).for_each(|(x, k)| *x += entry * k);
    }
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along = dot(dq, &model).powi(2) / dot(&model, &model);
    Some(dot(dq, dq) - along).filter(|energy| energy.is_finite())
}
