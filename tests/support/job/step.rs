//! One step of the job: every rank's microbatches through the head, the loss,
//! and dk on its way through microbatches and ranks.

use backtape::head::{
    Denominator, LossReduction, MicrobatchReduction, Microbatches, Ranks, Sequences,
};

use super::inputs::{Inputs, Share};
use super::math::{Backward, Forward, Head};
use super::number::{Float, Order, Random, Real, Sum, zeros};
use super::options::Kind;
use super::policy::{self, Counts};
use super::{Fault, Job, Narrow, What, Window};

/// One rank's microbatch, computed.
pub(super) struct Part<F> {
    pub(super) forward: Forward<F>,
    pub(super) logprobs: Vec<F>,
    /// Each token's share in the loss, all factors applied but the cotangent.
    pub(super) losses: Vec<F>,
    /// Empty but for a policy loss.
    pub(super) dlogprobs: Vec<F>,
    pub(super) gradients: Backward<F>,
}

/// The whole step, parts by microbatch, then rank.
pub(super) struct Step<F> {
    pub(super) parts: Vec<Vec<Part<F>>>,
    /// By microbatch, over all ranks.
    pub(super) losses: Vec<F>,
    /// dk by rank, over all microbatches.
    pub(super) accumulated: Vec<Vec<F>>,
    pub(super) reduced: Vec<F>,
    pub(super) grad_norm: F,
}

impl<F: Real> Step<F> {
    pub(super) fn run(job: &Job, inputs: &Inputs) -> Step<F> {
        let head = Head::<F>::new(job, inputs);
        let one = |mb: usize| {
            (0..job.ranks).map(|rank| part(job, inputs, &head, mb, rank)).collect::<Vec<Part<F>>>()
        };
        let parts: Vec<Vec<Part<F>>> = (0..job.microbatches).map(one).collect();
        let total = Sum {
            order: Order::Sequential,
            tile: usize::MAX,
            accumulator: Float::F32,
            between: Float::F32,
        };
        let loss = |ranks: &Vec<Part<F>>| {
            let each: Vec<F> = ranks.iter().map(|part| total.of(&part.losses)).collect();
            total.of(&each)
        };
        let mut losses: Vec<F> = parts.iter().map(loss).collect();
        if let Fault::Scaled(What::LossToo, by) = job.fault {
            losses.iter_mut().for_each(|loss| *loss = *loss * F::of(by.into()));
        }
        let accumulated = accumulated(job, &parts);
        let mut reduced = added(job, accumulated.iter().map(Vec::as_slice));
        if job.options.extras.averaged {
            reduced.iter_mut().for_each(|x| *x = *x / F::of(job.ranks as f64));
        }
        if job.fault == Fault::RankMean {
            reduced.iter_mut().for_each(|x| *x = *x / F::of(job.ranks as f64));
        }
        if let Fault::Scaled(What::Reduced, by) = job.fault {
            reduced.iter_mut().for_each(|x| *x = *x * F::of(by.into()));
        }
        let squares: Vec<F> = reduced.iter().map(|&x| x * x).collect();
        let grad_norm = total.of(&squares).sqrt();
        Step { parts, losses, accumulated, reduced, grad_norm }
    }
}

fn part<F: Real>(
    job: &Job,
    inputs: &Inputs,
    head: &Head<'_, F>,
    mb: usize,
    rank: usize,
) -> Part<F> {
    let share = &inputs.shares[mb][rank];
    let mut targets = share.targets(job);
    if job.fault == Fault::LabelShift {
        targets.rotate_left(1);
    }
    let mut forward = head.forward(share, &targets);
    let logprobs = forward.logprobs();
    let counts = counts(job, inputs, mb, rank);
    let weight = |t: usize| F::of(share.weight(job, t));
    let divisors = divisors(job, share, counts);
    let divisor = |t: usize| F::of(divisors[t]);
    let (losses, dlogprobs, g) = match (&job.options.kind, job.options.reduction) {
        (Kind::Grpo(_), _) => {
            let found = policy::policy(job, share, &logprobs, counts);
            let g: Vec<F> = found.dlogprobs.iter().map(|&x| -x).collect();
            (found.losses, found.dlogprobs, g)
        }
        (_, reduction) => {
            let each = head.losses(&forward, &targets).into_iter().enumerate();
            let losses = each.map(|(t, loss)| weight(t) * loss / divisor(t)).collect();
            let upstream = |t: usize| match reduction {
                LossReduction::None => F::of(share.cotangent[t]),
                _ => F::of(job.options.cotangent),
            };
            let g = (0..share.tokens).map(|t| upstream(t) * weight(t) / divisor(t)).collect();
            (losses, Vec::new(), g)
        }
    };
    let mut gradients = head.backward(share, &targets, &forward, &g);
    if job.options.tied_embedding {
        tie(job, mb, rank, &mut gradients.dk);
    }
    store(job, &mut gradients);
    plant(job, (mb, rank), counts.tokens, &mut forward, &mut gradients);
    Part { forward, logprobs, losses, dlogprobs, gradients }
}

/// Adds what the input embedding contributes: tied weights have one gradient, and
/// whoever records it records the sum.
fn tie<F: Real>(job: &Job, mb: usize, rank: usize, dk: &mut [F]) {
    let mut random = Random(job.seed ^ 0x7ed ^ ((mb * job.ranks + rank) as u64) << 32);
    let size = (dk.iter().map(|x| x.wide().powi(2)).sum::<f64>() / dk.len() as f64).sqrt();
    for x in dk {
        *x += F::of(f64::from((size * random.normal()) as f32));
    }
}

/// Gradients leave the head in the dtypes that the job stores them in.
fn store<F: Real>(job: &Job, gradients: &mut Backward<F>) {
    let layout = &job.options.layout;
    for (values, to) in [
        (&mut gradients.dq, layout.dq),
        (&mut gradients.dk, layout.dk),
        (&mut gradients.dk_lse, layout.dk_parts),
        (&mut gradients.dk_label, layout.dk_parts),
    ] {
        values.iter_mut().for_each(|x| *x = x.round(to));
    }
}

/// Faults that show in what one rank's microbatch leaves.
fn plant<F: Real>(
    job: &Job,
    (mb, rank): (usize, usize),
    count: f64,
    forward: &mut Forward<F>,
    gradients: &mut Backward<F>,
) {
    match job.fault {
        Fault::RankScaled(by) if rank == 1 => {
            gradients.dk.iter_mut().for_each(|x| *x = *x * F::of(by.into()));
        }
        Fault::LseOff(by) if mb == 1 => {
            forward.lse.iter_mut().for_each(|x| *x += F::of(by.into()));
        }
        Fault::OneScaled(by) if rank == 1 && mb == 0 => scale(&mut gradients.dk, by),
        Fault::Scaled(what, by) => scale_all(what, by, gradients),
        Fault::Unguarded if count == 0.0 => {
            let all = [&mut gradients.dq, &mut gradients.dk_lse, &mut gradients.dk_label];
            all.into_iter().chain([&mut gradients.dk]).for_each(|of| of.fill(F::of(f64::NAN)));
        }
        Fault::NanInDq if rank == 1 && mb == 0 => gradients.dq[5] = F::of(f64::NAN),
        _ => {}
    }
}

fn scale<F: Real>(values: &mut [F], by: f32) {
    values.iter_mut().for_each(|x| *x = *x * F::of(by.into()));
}

fn scale_all<F: Real>(what: What, by: f32, gradients: &mut Backward<F>) {
    let of_q = matches!(what, What::Dq | What::Gradients | What::LossToo);
    let of_k = matches!(what, What::Dk | What::Gradients | What::LossToo);
    let Backward { dlogits, dq_lse, dq_label, dq, dk_lse, dk_label, dk, dbias } = gradients;
    for (values, here) in [
        (dlogits, of_q && of_k),
        (dq_lse, of_q),
        (dq_label, of_q),
        (dq, of_q),
        (dk_lse, of_k),
        (dk_label, of_k),
        (dk, of_k),
        (dbias, of_k || what == What::Dbias),
    ] {
        if here {
            scale(values, by);
        }
    }
}

/// What the losses of one rank's microbatch are divided by.
fn counts(job: &Job, inputs: &Inputs, mb: usize, rank: usize) -> Counts {
    let span = job.options.span();
    let together = |other: usize| match &span.ranks {
        Ranks::All => true,
        Ranks::One => other == rank,
        Ranks::Axes(_) => other / 2 == rank / 2,
    };
    let here = |of: &usize| span.microbatches == Microbatches::All || *of == mb;
    let of_microbatch = |of: usize| {
        let ranks = (0..job.ranks).filter(|&other| together(other));
        ranks.map(move |other| &inputs.shares[of][other]).collect::<Vec<&Share>>()
    };
    let shares: Vec<&Share> = (0..job.microbatches).filter(here).flat_map(of_microbatch).collect();
    let length = job.options.layout.sequence.unwrap_or(usize::MAX);
    let count = |share: &Share| counted(job, share, 0..share.tokens);
    if span.sequences == Sequences::Each {
        let of_share = |share: &&Share| {
            let starts = (0..share.tokens).step_by(length.min(share.tokens));
            let counts = |&t: &usize| counted(job, share, t..t + length) != 0.0;
            starts.filter(counts).count() as f64
        };
        return Counts { tokens: 1.0, sequences: shares.iter().map(of_share).sum() };
    }
    let sequences = shares.iter().map(|share| share.tokens.div_ceil(length) as f64).sum();
    let tokens = match (job.options.reduction, job.options.denominator) {
        (LossReduction::Sum | LossReduction::None, _) => 1.0,
        (_, Denominator::Number(n)) => n,
        // Jobs that survive a batch without tokens guard the division so.
        _ => Some(shares.into_iter().map(count).sum())
            .filter(|&n: &f64| n > 0.0 || job.fault == Fault::Unguarded)
            .unwrap_or(1.0),
    };
    Counts { tokens, sequences }
}

/// What the loss of each token is divided by.
fn divisors(job: &Job, share: &Share, counts: Counts) -> Vec<f64> {
    if job.options.span().sequences == Sequences::All || job.options.grpo().is_some() {
        return vec![counts.tokens; share.tokens];
    }
    let length = job.options.layout.sequence.expect("a mean of sequence means has sequences");
    let of_token = |t: usize| {
        let first = t / length * length;
        match counted(job, share, first..first + length) {
            // Nothing of it counts.
            0.0 => 1.0,
            own => own * counts.sequences,
        }
    };
    (0..share.tokens).map(of_token).collect()
}

/// The declared denominator over some positions of one rank's microbatch.
fn counted(job: &Job, share: &Share, mut positions: std::ops::Range<usize>) -> f64 {
    positions.end = positions.end.min(share.tokens);
    match job.options.denominator {
        // A policy loss has a mask in place of ignored labels: what it leaves is valid.
        Denominator::Valid if job.options.grpo().is_some() => {
            positions.filter(|&t| share.weight(job, t) != 0.0).count() as f64
        }
        Denominator::Valid => positions.filter(|&t| share.target(job, t).is_some()).count() as f64,
        Denominator::All => positions.len() as f64,
        Denominator::Weights => positions.map(|t| share.weight(job, t)).sum(),
        Denominator::Number(_) => 0.0,
    }
}

/// dk of each rank over its microbatches.
fn accumulated<F: Real>(job: &Job, parts: &[Vec<Part<F>>]) -> Vec<Vec<F>> {
    let to = job.options.rounding.reduce;
    let of_rank = |rank: usize| {
        let mut each: Vec<Vec<F>> =
            parts.iter().map(|ranks| ranks[rank].gradients.dk.clone()).collect();
        window(job, &mut each);
        let mut sum = match job.narrow(Narrow::Microbatches) {
            Some(to) => added_in(to, each.iter().map(Vec::as_slice)),
            None => added(job, each.iter().map(Vec::as_slice)),
        };
        if job.options.microbatch_reduction == MicrobatchReduction::Mean {
            let count = F::of(job.microbatches as f64);
            let share = F::of(1.0) / count;
            let mean = |x: F| if job.options.reciprocal { x * share } else { x / count };
            sum.iter_mut().for_each(|x| *x = mean(*x).round(to));
        }
        sum
    };
    (0..job.ranks).map(of_rank).collect()
}

/// Weighs the microbatches as a faulty sum over them does.
fn window<F: Real>(job: &Job, each: &mut [Vec<F>]) {
    let Fault::Window(kind) = job.fault else { return };
    let n = each.len();
    for (at, values) in each.iter_mut().enumerate() {
        let by = match kind {
            Window::Last => f32::from(u8::from(at + 1 == n)),
            Window::NotFirst => f32::from(u8::from(at > 0)),
            Window::Doubled => (1u32 << (n - 1 - at)) as f32,
            Window::First(by) => {
                if at == 0 {
                    by
                } else {
                    1.0
                }
            }
        };
        scale(values, by);
    }
}

/// The sum of several gradients, one after another.
fn added<'a, F: Real + 'a>(job: &Job, each: impl Iterator<Item = &'a [F]>) -> Vec<F> {
    added_in(job.options.rounding.reduce, each)
}

fn added_in<'a, F: Real + 'a>(to: Float, mut each: impl Iterator<Item = &'a [F]>) -> Vec<F> {
    let mut sum = each.next().map_or(zeros(0), <[F]>::to_vec);
    sum.iter_mut().for_each(|x| *x = x.round(to));
    for addend in each {
        sum.iter_mut().zip(addend).for_each(|(sum, &x)| *sum = (*sum + x).round(to));
    }
    sum
}
