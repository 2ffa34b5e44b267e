//! Some tokens with their raw logits, on which another transform can be
//! tried for next to nothing: a fit takes a hundred tries, and a trial of the whole a GEMM.

use backtape::identity::Microbatch;
use backtape::role::Role;
use rayon::prelude::*;

use super::direct::dot;
use crate::diagnose::evidence::Evidence;
use crate::head::step::{matrix, numbers};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::transform::Transform;

/// Tokens of the whole step that are looked at.
const TOKENS: usize = 24;
/// The same where each try walks all of k.
const ROWS: usize = 12;
/// Elements of k that a try reads at most of a microbatch: some of its columns.
const OF_K: usize = 1 << 20;
/// Tries of a fit.
const TRIES: usize = 100;
/// A fit is believed when it leaves less than this share of the squared error.
const LEFT: f64 = 0.05;

/// What is looked at.
pub struct Tokens<'a> {
    each: Vec<Token>,
    heads: Vec<Looked<'a>>,
    /// Whether rows of dq are looked at, and not what was captured of the forward.
    backward: bool,
    declared: f64,
}

/// A microbatch, and the columns of q and k that are looked at.
struct Looked<'a> {
    head: HeadInputs<'a>,
    columns: Vec<usize>,
    /// Those of k, of the valid vocabulary, row by row.
    k: Vec<f64>,
}

struct Token {
    head: usize,
    label: usize,
    /// Products and bias, over the valid vocabulary.
    raw: Vec<f64>,
    lse: Option<f64>,
    label_logit: Option<f64>,
    /// Log-probability of the label.
    logprob: Option<f64>,
    /// The columns that are looked at.
    dq: Option<Vec<f64>>,
}

impl<'a> Tokens<'a> {
    /// Tokens that count, evenly from every microbatch; none where nothing is off that a transform
    /// is in, or no more may be looked for. Where a recorded forward is right it is the backward
    /// alone that may have another transform.
    pub fn of(evidence: &Evidence<'a>) -> Tokens<'a> {
        let off = evidence.fails_any(&Stage::GRADIENTS);
        let backward = !evidence.captured_forward() || !evidence.fails_any(&Stage::FORWARD) && off;
        let (each, heads, declared) = (Vec::new(), Vec::new(), f64::NAN);
        let mut found = Tokens { each, heads, backward, declared };
        let judged = !backward || evidence.fails_any(&Stage::OF_Q);
        let most = if backward { ROWS } else { TOKENS };
        let per = most.div_ceil(evidence.inputs.len().max(1));
        for inputs in evidence.inputs.iter().filter(|_| judged) {
            let Some(head) = inputs.head(evidence.step) else { continue };
            let counted = |&t: &usize| inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0;
            let shown = evidence.rows.as_ref().and_then(|rows| rows.tokens.get(&inputs.microbatch));
            let all: Vec<usize> = match shown {
                // Where something is wrong in some places alone, these are shown.
                Some(shown) => shown.iter().copied().filter(counted).collect(),
                None => (0..inputs.tokens()).filter(counted).collect(),
            };
            let step = all.len().div_ceil(per).max(1);
            let looked = Looked::of(head, backward);
            if evidence.spend(looked.work() * per.min(all.len())) {
                break;
            }
            let captured = Columns::of(evidence, inputs, backward);
            for &t in all.iter().step_by(step) {
                found.each.push(captured.token(&looked, found.heads.len(), t));
            }
            found.heads.push(looked);
        }
        found.declared = found.error(evidence.step.options.transform);
        found
    }

    /// Squared error of the captured lse, label logits and log-probabilities with another transform; of the
    /// backward that of dq beside what it should be a multiple of, from the captured lse or from
    /// one of its own. NaN where there is nothing to compare with.
    pub fn error(&self, transform: Transform) -> f64 {
        let one = |token: &Token| {
            let looked = &self.heads[token.head];
            let (z, lse) = logits(token, &looked.head, transform);
            if self.backward {
                let from = |lse: f64| beside(token, looked, transform, (&z, lse));
                let (own, captured) = (from(lse)?, token.lse.and_then(from));
                return Some(captured.map_or(own, |captured| own.min(captured)));
            }
            let off = |captured: Option<f64>, x: f64| captured.map_or(0.0, |c| (c - x).powi(2));
            let label = z[token.label];
            Some(
                off(token.lse, lse)
                    + off(token.label_logit, label)
                    + off(token.logprob, label - lse),
            )
        };
        let errors: Vec<f64> = self.each.par_iter().filter_map(one).collect();
        if errors.is_empty() { f64::NAN } else { errors.iter().sum() }
    }

    /// How many classes, from the first on, have the exponentials that make the captured lse of
    /// all tokens; none where no lse was captured.
    pub fn valid_vocab(&self, transform: Transform) -> Option<usize> {
        let classes = self.each.iter().map(|token| token.raw.len()).min()?;
        let mut errors = vec![0.0; classes];
        for token in &self.each {
            let lse = token.lse?;
            let mut sum = 0.0;
            for (error, raw) in errors.iter_mut().zip(&token.raw) {
                sum += (transform.value(*raw) - lse).exp();
                *error += f64::ln(sum).powi(2);
            }
        }
        let finite = (0..classes).filter(|&v| errors[v].is_finite());
        finite.min_by(|&a, &b| errors[a].total_cmp(&errors[b])).map(|v| v + 1)
    }

    /// Whether a fitted number leaves much less than the declared one.
    pub fn believes(&self, found: f64, error: &dyn Fn(f64) -> f64) -> bool {
        error(found) < LEFT * self.declared
    }
}

impl<'a> Looked<'a> {
    fn of(head: HeadInputs<'a>, backward: bool) -> Looked<'a> {
        let (d, v) = (head.q.cols, head.valid_vocab);
        let count = if backward { (OF_K / v.max(1)).clamp(1, d.max(1)) } else { 0 };
        let columns: Vec<usize> = (0..count.min(d)).map(|at| at * d / count).collect();
        let row = |v: usize| columns.iter().map(move |i| v * d + i);
        let k = (0..v).flat_map(row).map(|at| head.k.get_f64(at)).collect();
        Looked { head, columns, k }
    }

    /// Multiply-adds of a fit, a token.
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
        let of = |role: Role, count: usize| {
            let values = captured(evidence, role, inputs.microbatch)?;
            Some(values).filter(|values| values.len() == count)
        };
        let (n, d) = (inputs.tokens(), inputs.head(evidence.step).map_or(0, |head| head.q.cols));
        let dq = if !backward || d == 0 { None } else { of(Role::Dq, n * d) };
        let (label_logits, logprobs) = (of(Role::LabelLogits, n), of(Role::Logprobs, n));
        Columns { lse: of(Role::Lse, n), label_logits, logprobs, dq }
    }

    fn token(&self, looked: &Looked<'_>, number: usize, t: usize) -> Token {
        let head = &looked.head;
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
        let at = |of: &Option<Vec<f64>>| of.as_ref().map(|values| values[t]);
        Token {
            head: number,
            label: head.labels[t] as usize,
            raw: (0..head.valid_vocab).map(raw).collect(),
            lse: at(&self.lse),
            label_logit: at(&self.label_logits),
            logprob: at(&self.logprobs),
            dq: self.dq.as_ref().map(|dq| looked.columns.iter().map(|i| dq[t * d + i]).collect()),
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
    let mask = head.mask.filter(|_| masked > 0);
    let max = z.iter().copied().chain(mask).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|x| (x - max).exp()).sum();
    let sum = sum + mask.map_or(0.0, |mask| masked as f64 * (mask - max).exp());
    (z, max + sum.ln())
}

/// Squared length of what of a row of dq, as far as it is looked at, is no multiple of
/// `Σ (p - onehot) slope k`.
fn beside(
    token: &Token,
    looked: &Looked<'_>,
    transform: Transform,
    (z, lse): (&[f64], f64),
) -> Option<f64> {
    let dq = token.dq.as_ref()?;
    let mut model = vec![0.0; dq.len()];
    for ((v, &z), k) in z.iter().enumerate().zip(looked.k.chunks(dq.len().max(1))) {
        let slope = transform.slope_at(z);
        let onehot = if v == token.label { 1.0 } else { 0.0 };
        let entry = ((z - lse).exp() - onehot) * slope;
        model.iter_mut().zip(k).for_each(|(x, k)| *x += entry * k);
    }
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along = dot(dq, &model).powi(2) / dot(&model, &model);
    Some(dot(dq, dq) - along).filter(|energy| energy.is_finite())
}
