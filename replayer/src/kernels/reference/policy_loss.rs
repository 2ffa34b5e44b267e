//! Policy losses of reinforcement learning on log-probabilities, in f64.
//!
//! With `r = exp(logp - old)`: the clipped surrogate `-min(r A, clip(r, 1 - lo, 1 + hi) A)`
//! of PPO (Schulman et al. 2017, arXiv 1707.06347), with a KL term to a reference policy
//! inside the loss as in GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300).
//! Bounds that differ and a mean over all tokens are DAPO's (Yu et al. 2025, arXiv
//! 2503.14476); a constant denominator is Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783);
//! the ratio of a whole sequence is GSPO's (Zheng et al. 2025, arXiv 2507.18071); the
//! second bound for negative advantages is dual-clip PPO (Ye et al. 2020, arXiv
//! 1912.09729); the KL estimators are those of Schulman 2020, "Approximating KL
//! divergence". Advantages, references and old log-probabilities are constants.
//!
//! Subgradients at kinks are those of torch: `clamp` passes the gradient at its bounds,
//! and a binary `min` or `max` gives each side half at a tie. So at `r = 1 + hi` and
//! `r = 1 - lo` the gradient is the unclipped one, and at the tie of the dual clip it is
//! half of it. A job whose ratio rounds to the other side has another gradient
//! altogether: `PolicyLoss::at_kink` says where.

use crate::kernels::number::Number;
use crate::kernels::surrogate::{Differentiated, kl, surrogate};
use backtape::head::{GrpoDeclaration, LossAverage, RatioLevel};
use std::collections::BTreeMap;

/// What a policy loss reads; `[T]` but the last two.
#[derive(Debug, Clone, Copy)]
pub struct PolicyInputs<'a> {
    /// Log-probabilities of the sampled tokens under the policy being trained.
    pub logp: &'a [f64],
    /// Those under the policy that sampled the tokens; `None` stands for `logp` itself, detached:
    /// the ratio is then exactly 1, and its gradient is not 0.
    pub old: Option<&'a [f64]>,
    /// Advantages, one a token.
    pub advantages: &'a [f64],
    /// Log-probabilities under the reference policy of the KL term.
    pub reference: Option<&'a [f64]>,
    /// Weights; a token of weight 0 is masked, and nothing else of it is read.
    pub weights: &'a [f64],
    /// Sequence each token belongs to; any numbers.
    pub sequences: &'a [u32],
    /// What the sum over tokens, or over sequences, is divided by.
    pub denominator: f64,
    /// Distance of a ratio from a bound within which `at_kink` is set.
    pub kink_tolerance: f64,
}

/// Loss and gradient of each token, all `[T]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyLoss {
    /// Terms of the loss, weighted and normalised: they sum to it.
    pub terms: Vec<f64>,
    /// Gradient of the loss with respect to `logp`.
    pub dlogp: Vec<f64>,
    /// Whether a ratio that the gradient depends on lies within the tolerance of a
    /// bound at which the gradient jumps.
    pub at_kink: Vec<bool>,
}

/// Sums over the tokens of one sequence.
#[derive(Default, Clone, Copy)]
struct Sequence {
    weight: f64,
    /// Sum of `w (logp - old)`.
    log_ratio: f64,
    /// Sum of the derivatives of the loss with respect to the sequence's log-ratio.
    slope: f64,
    at_kink: bool,
}

/// The policy loss of tokens `[T]`. Panics unless all inputs are `[T]`, and when there
/// is a KL term and no reference.
pub fn policy_loss(options: &GrpoDeclaration, inputs: &PolicyInputs) -> PolicyLoss {
    let tokens = inputs.check(options);
    let mut sequences: BTreeMap<u32, Sequence> = BTreeMap::new();
    let counted: Vec<usize> = (0..tokens).filter(|&t| inputs.weights[t] != 0.0).collect();
    for &t in &counted {
        let sequence = sequences.entry(inputs.sequences[t]).or_default();
        sequence.weight += inputs.weights[t];
        sequence.log_ratio += inputs.weights[t] * inputs.log_ratio(t);
    }
    let mut result = PolicyLoss {
        terms: vec![0.0; tokens],
        dlogp: vec![0.0; tokens],
        at_kink: vec![false; tokens],
    };
    let shared = options.ratio == RatioLevel::Sequence;
    for &t in &counted {
        let sequence = sequences.entry(inputs.sequences[t]).or_default();
        let factor = match options.average {
            LossAverage::Token => inputs.weights[t] / inputs.denominator,
            LossAverage::Sequence => inputs.weights[t] / sequence.weight / inputs.denominator,
        };
        let log_ratio = match shared {
            true => sequence.log_ratio / sequence.weight,
            false => inputs.log_ratio(t),
        };
        let ratio = Differentiated::variable(log_ratio).exp();
        let advantage = inputs.advantages[t];
        let loss = surrogate(options, ratio, ratio.constant(advantage));
        let kl = inputs.kl(options, t);
        let slope = factor * loss.slope;
        let at_kink = is_at_kink(options, ratio.value, advantage, inputs.kink_tolerance);
        result.terms[t] = factor * (loss.value + kl.value);
        result.dlogp[t] = factor * kl.slope + if shared { 0.0 } else { slope };
        result.at_kink[t] = at_kink;
        sequence.slope += slope;
        sequence.at_kink |= at_kink;
    }
    if shared {
        // All tokens of a sequence share one ratio, and each of them moves its mean log-ratio.
        for &t in &counted {
            let sequence = sequences[&inputs.sequences[t]];
            result.dlogp[t] += sequence.slope * inputs.weights[t] / sequence.weight;
            result.at_kink[t] = sequence.at_kink;
        }
    }
    result
}

/// Whether a ratio lies at a bound at which the gradient jumps. Below `1 - lo` a positive advantage
/// takes the unclipped side, as above `1 + hi` a negative one does: only one bound is a kink.
fn is_at_kink(options: &GrpoDeclaration, ratio: f64, advantage: f64, tolerance: f64) -> bool {
    let near = |bound: f64| (ratio - bound).abs() <= tolerance;
    if advantage > 0.0 {
        return near(1.0 + options.clip_high);
    }
    advantage < 0.0 && (near(1.0 - options.clip_low) || options.dual_clip.is_some_and(near))
}

impl PolicyInputs<'_> {
    fn check(&self, options: &GrpoDeclaration) -> usize {
        let tokens = self.logp.len();
        let lengths = [self.advantages.len(), self.weights.len(), self.sequences.len()];
        let optional = [self.old, self.reference].into_iter().flatten().map(<[f64]>::len);
        let all = lengths.into_iter().chain(optional);
        assert!(all.into_iter().all(|length| length == tokens), "one of each input a token");
        assert!(options.kl_beta == 0.0 || self.reference.is_some(), "a KL term has a reference");
        tokens
    }

    fn log_ratio(&self, token: usize) -> f64 {
        self.old.map_or(0.0, |old| self.logp[token] - old[token])
    }

    /// The KL term of a token and its derivative by `logp`, `kl_beta` in both.
    fn kl(&self, options: &GrpoDeclaration, token: usize) -> Differentiated {
        let logp = Differentiated::variable(self.logp[token]);
        match self.reference.filter(|_| options.kl_beta != 0.0) {
            Some(reference) => {
                kl(options.kl, logp.constant(reference[token]) - logp).times(options.kl_beta)
            }
            None => logp.constant(0.0),
        }
    }
}
