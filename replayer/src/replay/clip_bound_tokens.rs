//! Tokens of a policy loss whose ratio lies within rounding of a clip bound: their gradient may
//! be there or not, and no more is known of it.
//!
//! Their rows of dq and of dlogits are not judged. dk and dbias hold them in sums over all tokens:
//! of an element `Σ_t g_t c_tv q_ti`, with `c = p - onehot` as the head's options have it, a token
//! that may lack or have `u_t` of its g can move `u_t |c_tv| |q_ti|` and no more. That much is
//! allowed beside what rounding explains. `|c|` is at most p and the label's part, each for
//! itself, so the sum over these tokens is the reference's own backward on `|q|` with cotangents u.

use std::ops::Range;

use super::captured_gradients::Captured;
use super::findings::Findings;
use super::gathered_rows::Gathered;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::problem::Problem;
use super::slab::Slab;
use crate::head::{Stage, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix, Reads, Values};
use crate::kernels::reference::{self, DkSums, Keep};
use crate::kernels::{NoProgress, Progress};

/// The share of a gradient's norm up to which such tokens leave a verdict on it: with as much as
/// half of it unknown, a gradient of another sign would not be seen.
const MOST: f64 = 0.5;
/// Tokens that are named.
const NAMED: usize = 6;

impl Plan<'_> {
    /// Adds to a slab what these tokens may take from, or add to, its sums.
    pub(super) fn allow_uncertain_tokens(
        &self,
        problem: &Problem<'_>,
        (head, range): (&HeadInputs<'_>, Range<usize>),
        slab: &mut Slab,
    ) {
        let rows = problem.uncertain_rows();
        if rows.is_empty() {
            return;
        }
        let pick = |values: &[f64]| rows.iter().map(|&row| values[row]).collect::<Vec<f64>>();
        let read = head.reads.map_or(head.q, |reads| reads.q);
        let (q, read) = (Gathered::new(&head.q, &rows), Gathered::new(&read, &rows));
        let sizes: Vec<f64> =
            (0..q.matrix().len()).map(|at| q.matrix().get_f64(at).abs()).collect();
        let of_size = Matrix { values: Values::F64(&sizes), ..q.matrix() };
        let labels: Vec<u32> = rows.iter().map(|&row| head.labels[row]).collect();
        let scores = head.reads.and_then(|reads| reads.scores);
        let scores = scores.map(|(matrix, first)| (Gathered::new(&matrix, &rows), first));
        let scores = scores.as_ref().map(|(gathered, first)| (gathered.matrix(), *first));
        let k = head.reads.map_or(head.k, |reads| reads.k);
        let reads = Some(Reads { q: read.matrix(), k, q_product: false, k_product: false, scores });
        let head = HeadInputs { q: of_size, labels: &labels, copies: None, reads, ..*head };
        let [of_lse, label, smooth] = &problem.of_unsure;
        let values = [pick(of_lse), pick(label), pick(smooth)];
        let cotangents = Cotangents { lse: &values[0], label: &values[1], smooth: &values[2] };
        let noise = &problem.noise;
        let mut dq = reference::Backward::zeros(&head, noise);
        let mut sums = DkSums::zeros(&head, noise, self.tiles);
        let lse = pick(&problem.lse);
        let (given, progress): (_, &dyn Progress) = ((&lse[..], &cotangents, noise), &NoProgress);
        let walking = (self.tiles, Keep::Dk, progress);
        reference::backward_onto((&mut dq, &mut sums), (&head, 0), given, walking);
        let bounds_slab = Slab::completed(problem, (&head, range), sums);
        slab.take_uncertain(&bounds_slab);
    }

    /// The same of dlogits: true where no row of them can be judged.
    pub(super) fn note_uncertain_rows(
        &self,
        head_microbatch: &HeadMicrobatch,
        upstream: &Upstream,
        outcome: &mut Outcome,
    ) -> bool {
        let (tokens, microbatch) =
            (head_microbatch.inputs.tokens(), head_microbatch.inputs.microbatch);
        let open: Vec<usize> = (0..tokens).filter(|&t| upstream.is_uncertain(t)).collect();
        if open.is_empty() {
            return false;
        }
        let (stage, why) = (Stage::Dlogits, why_unknown(&open, tokens));
        if open.len() == tokens {
            outcome.leave(stage, microbatch, why);
            return true;
        }
        let what = format!("rows of {stage} of {}", super::microbatch::words(microbatch));
        outcome.narrow(stage, what, why);
        false
    }

    /// Says what these tokens leave without a verdict. A gradient most of which they may be has
    /// none at all.
    pub(super) fn note_uncertain_tokens(
        &self,
        (head_microbatch, unit): (&HeadMicrobatch, &Unit),
        problem: &Problem<'_>,
        (captured, stages): (&Captured, &[Stage]),
        findings: &mut Findings,
        outcome: &mut Outcome,
    ) {
        let open: Vec<usize> =
            problem.uncertain_rows().into_iter().map(|row| unit.rows[row]).collect();
        if open.is_empty() {
            return;
        }
        let microbatch = head_microbatch.inputs.microbatch;
        let why = why_unknown(&open, unit.rows.len());
        let name = super::microbatch::words(microbatch);
        for gradient in
            captured.gradients.iter().filter(|gradient| stages.contains(&gradient.stage))
        {
            let stage = gradient.stage;
            let all = open.len() == unit.rows.len();
            match findings.uncertain_share(stage) {
                _ if stage.is_of_q() && !all => {
                    outcome.narrow(stage, format!("rows of {stage} of {name}"), why.clone());
                }
                Some(share) if stage.is_of_k() && share < MOST => {
                    let what = format!("{:.2} % of the norm of {stage} of {name}", 100.0 * share);
                    outcome.narrow(stage, what, why.clone());
                }
                // Made of captured parts, none of which is missing.
                None if stage.is_of_k() => {}
                _ => {
                    findings.forget(&[stage]);
                    outcome.leave(stage, microbatch, why.clone());
                }
            }
        }
    }
}

/// Why the gradients of some tokens are not known.
fn why_unknown(open: &[usize], count: usize) -> String {
    let (n, named) = (open.len(), named(open));
    format!(
        "the ratios of {n} of {count} tokens ({named}) lie within rounding of a clip bound, so that their gradients may be there or not: record dlogprobs to have them judged"
    )
}

fn named(tokens: &[usize]) -> String {
    let first: Vec<String> = tokens.iter().take(NAMED).map(ToString::to_string).collect();
    match tokens.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
