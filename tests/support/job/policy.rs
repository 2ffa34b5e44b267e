//! The policy loss on log-probabilities: token losses and their gradient.
//!
//! `-min(r A, clip(r) A) + β KL`, where r is a token's ratio of policies or the
//! geometric mean of its sequence's; with a dual clip the first part is at most
//! `-c A` where A is negative.

use backtape::head::{GrpoDeclaration, KlEstimator, LossAverage, RatioLevel};

use super::Job;
use super::inputs::Share;
use super::number::Real;

/// What a policy loss gives for one rank's microbatch.
pub(super) struct Policy<F> {
    /// The share of each token in the loss, all factors applied but the cotangent.
    pub(super) losses: Vec<F>,
    /// Gradient of each token's log-probability, cotangent included.
    pub(super) dlogprobs: Vec<F>,
}

/// Divisors: of a mean over tokens, and how many sequences there are.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    pub(super) tokens: f64,
    pub(super) sequences: f64,
}

pub(super) fn policy<F: Real>(job: &Job, share: &Share, logp: &[F], counts: Counts) -> Policy<F> {
    let options = job.options.grpo().expect("a policy loss");
    let length = job.options.layout.sequence.unwrap_or(share.tokens);
    let zero = F::of(0.0);
    let mut found =
        Policy { losses: vec![zero; share.tokens], dlogprobs: vec![zero; share.tokens] };
    for from in (0..share.tokens).step_by(length) {
        sequence(job, options, share, logp, counts, from..from + length, &mut found);
    }
    found
}

fn sequence<F: Real>(
    job: &Job,
    options: &GrpoDeclaration,
    share: &Share,
    logp: &[F],
    counts: Counts,
    tokens: std::ops::Range<usize>,
    found: &mut Policy<F>,
) {
    let (zero, cotangent) = (F::of(0.0), F::of(job.options.cotangent));
    let weight = |t: usize| F::of(share.weight(job, t));
    let log_ratio = |t: usize| logp[t] - F::of(share.old[t]);
    let counted = tokens.clone().fold(zero, |sum, t| sum + weight(t));
    let mean = tokens.clone().fold(zero, |sum, t| sum + weight(t) * log_ratio(t));
    let divisor = match options.average {
        LossAverage::Token => F::of(counts.tokens),
        LossAverage::Sequence => counted * F::of(counts.sequences),
    };
    let mut shared = zero;
    for t in tokens.clone().filter(|&t| share.weight(job, t) != 0.0) {
        let factor = weight(t) / divisor;
        let ratio = match options.ratio {
            RatioLevel::Token => log_ratio(t).exp(),
            RatioLevel::Sequence => (mean / counted).exp(),
        };
        let (clipped, slope) = surrogate(options, ratio, F::of(share.advantage(job, t)));
        let (kl, kl_slope) = divergence(options.kl, F::of(share.reference[t]) - logp[t]);
        let beta = F::of(options.kl_beta);
        found.losses[t] = factor * (clipped + beta * kl);
        let mut upstream = factor * beta * kl_slope;
        match options.ratio {
            RatioLevel::Token => upstream += factor * slope,
            RatioLevel::Sequence => shared += factor * slope,
        }
        found.dlogprobs[t] = cotangent * upstream;
    }
    if options.ratio == RatioLevel::Sequence {
        for t in tokens {
            if share.weight(job, t) != 0.0 {
                found.dlogprobs[t] += cotangent * (shared * weight(t) / counted);
            }
        }
    }
}

/// The clipped surrogate loss and its slope in the log of the ratio.
fn surrogate<F: Real>(options: &GrpoDeclaration, ratio: F, advantage: F) -> (F, F) {
    let (low, high) = (F::of(1.0 - options.clip_low), F::of(1.0 + options.clip_high));
    let within = if ratio < low { low } else { ratio };
    let within = if within > high { high } else { within };
    let (free, bound) = (ratio * advantage, within * advantage);
    let (loss, slope) = if free <= bound { (-free, -free) } else { (-bound, F::of(0.0)) };
    match options.dual_clip.map(|most| -(F::of(most) * advantage)) {
        Some(most) if advantage < F::of(0.0) && loss > most => (most, F::of(0.0)),
        _ => (loss, slope),
    }
}

/// The estimated KL divergence, and its slope in the policy's log-probability.
fn divergence<F: Real>(estimator: KlEstimator, d: F) -> (F, F) {
    let one = F::of(1.0);
    match estimator {
        KlEstimator::K1 => (-d, one),
        KlEstimator::K2 => (d * d / F::of(2.0), -d),
        KlEstimator::K3 => (d.exp() - d - one, one - d.exp()),
    }
}

impl Share {
    fn advantage(&self, job: &Job, t: usize) -> f64 {
        match job.options.layout.sequence {
            Some(length) if job.options.data.advantage_of_sequence => self.advantages[t / length],
            _ => self.advantages[t],
        }
    }
}
