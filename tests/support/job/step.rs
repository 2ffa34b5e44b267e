//! One step of the job: every rank's microbatches through the head, the loss,
//! and dk on its way through microbatches and ranks.

use backtape::head::{Denominator, LossReduction, MicrobatchReduction, Scope};

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
    let divisor = F::of(counts.tokens);
    let (losses, dlogprobs, g) = match (&job.options.kind, job.options.reduction) {
        (Kind::Grpo(_), _) => {
            let found = policy::policy(job, share, &logprobs, counts);
            let g: Vec<F> = found.dlogprobs.iter().map(|&x| -x).collect();
            (found.losses, found.dlogprobs, g)
        }
        (_, reduction) => {
            let each = head.losses(&forward, &targets).into_iter().enumerate();
            let losses = each.map(|(t, loss)| weight(t) * loss / divisor).collect();
            let upstream = |t: usize| match reduction {
                LossReduction::None => F::of(share.cotangent[t]),
                _ => F::of(job.options.cotangent),
            };
            let g = (0..share.tokens).map(|t| upstream(t) * weight(t) / divisor).collect();
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
    let shares: Vec<&Share> = match job.options.scope {
        Scope::Global => inputs.shares.iter().flatten().collect(),
        Scope::Microbatch => inputs.shares[mb].iter().collect(),
        Scope::Rank => vec![&inputs.shares[mb][rank]],
    };
    let count = |share: &Share| -> f64 {
        let positions = 0..share.tokens;
        match job.options.denominator {
            // A policy loss has a mask in place of ignored labels: what it leaves is valid.
            Denominator::Valid if job.options.grpo().is_some() => {
                positions.filter(|&t| share.weight(job, t) != 0.0).count() as f64
            }
            Denominator::Valid => {
                positions.filter(|&t| share.target(job, t).is_some()).count() as f64
            }
            Denominator::All => share.tokens as f64,
            Denominator::Weights => positions.map(|t| share.weight(job, t)).sum(),
            Denominator::Number(_) => 0.0,
        }
    };
    let length = job.options.layout.sequence.unwrap_or(usize::MAX);
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
