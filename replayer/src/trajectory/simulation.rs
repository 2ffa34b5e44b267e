//! Simulated runs for tests: loss, norms and moments of a random healthy job, or of one with a
//! planted fault. It shares no constant with the flags.

use backtape::scalars::Row;

use super::{RankScalars, Trajectory};
use crate::draw::Draw;

/// A random job, healthy unless it is changed.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) steps: u64,
    pub(super) stride: u64,
    pub(super) ranks: u32,
    pub(super) vocabulary: f64,
    pub(super) tokens: f64,
    /// The loss at the start; below, the loss that it approaches.
    pub(super) start: f64,
    pub(super) end: f64,
    /// Relative noise of the loss of one step.
    pub(super) noise: f64,
    /// Correlation of that noise from step to step.
    pub(super) wander: f64,
    pub(super) local_loss: bool,
    pub(super) clip: f64,
    pub(super) warmup: u64,
    pub(super) spikes: u64,
    pub(super) bf16: bool,
    /// Whether an f16 loss scaler overflows now and then.
    pub(super) scaler: bool,
    pub(super) records_tokens: bool,
}

impl Run {
    pub(super) fn random(seed: u64) -> Run {
        let mut draw = Draw::new(seed);
        let mut pick = |n: u64| draw.below(n as usize) as u64;
        let vocabulary = [256.0, 5000.0, 32_000.0, 50_257.0, 151_936.0][pick(5) as usize];
        let fresh = pick(3) > 0;
        let uniform = f64::ln(vocabulary);
        let steps = 60 + pick(1200);
        Run {
            seed,
            steps,
            stride: [1, 1, 1, 10][pick(4) as usize],
            ranks: 1 + pick(4) as u32,
            vocabulary,
            tokens: [1e4, 1e5, 1e6, 4e6][pick(4) as usize],
            start: uniform * if fresh { 0.98 + 0.1 * pick(4) as f64 / 4.0 } else { 0.2 },
            end: uniform * if fresh { 0.16 } else { 0.15 },
            noise: [0.001, 0.005, 0.02, 0.08][pick(4) as usize],
            wander: [0.0, 0.0, 0.5, 0.9][pick(4) as usize],
            local_loss: pick(2) == 0,
            clip: [0.5, 1.0, 1e9][pick(3) as usize],
            warmup: [1, steps / 20 + 1, steps / 5 + 1][pick(3) as usize],
            spikes: pick(3),
            bf16: pick(4) == 0,
            scaler: pick(5) == 0,
            records_tokens: pick(2) == 0,
        }
    }

    /// What the ranks record; `change` plants a fault, given step index, rank and values.
    pub(super) fn trajectory(
        &self,
        mut change: impl FnMut(u64, u32, &mut Vec<(String, f64)>),
    ) -> Trajectory {
        let mut draw = Draw::new(self.seed ^ 0x5eed);
        let mut ranks: Vec<RankScalars> =
            (0..self.ranks).map(|rank| RankScalars { rank, ..RankScalars::default() }).collect();
        let spike_steps: Vec<u64> =
            (0..self.spikes).map(|_| draw.below(self.steps as usize) as u64).collect();
        let (mut drift, mut square) = (0.0, 0.0);
        for i in 0..self.steps {
            let fresh = draw.normal() * (1.0 - self.wander * self.wander).sqrt();
            drift = self.wander * drift + fresh;
            // A spike appears at once and decays over ten steps; no spike is near the end.
            let spike: f64 = spike_steps
                .iter()
                .filter(|&&s| s + 100 < self.steps && (s..s + 40).contains(&i))
                .map(|&s| (-((i - s) as f64) / 5.0).exp())
                .sum();
            let level = self.level(i) * (1.0 + 0.5 * spike);
            let loss = level * (1.0 + self.noise * drift).max(0.5);
            let norm = (0.3 + 2.0 * (-(i as f64) / 60.0).exp())
                * (0.25 * draw.normal()).exp()
                * (1.0 + 9.0 * spike);
            let norm = self.stored(norm);
            let overflow = self.scaler && i % 97 == 13;
            let clipped = self.stored(norm.min(self.clip));
            square = 0.95 * square + 0.05 * clipped * clipped;
            for rank in &mut ranks {
                let own_noise = if self.local_loss { 0.03 * draw.normal() } else { 0.0 };
                let mut values = vec![
                    ("loss".to_string(), self.stored(loss * (1.0 + own_noise))),
                    ("learning_rate".into(), self.rate(i)),
                    ("grad_norm".into(), if overflow { f64::INFINITY } else { norm }),
                    ("grad_norm_clipped".into(), if overflow { f64::INFINITY } else { clipped }),
                    ("vocabulary".into(), self.vocabulary),
                    ("exp_avg_sq_max".into(), square * 0.3),
                    ("grad_norm/layers.0".into(), norm * 0.5 * (0.1 * draw.normal()).exp()),
                ];
                if self.records_tokens {
                    values.push(("tokens".into(), self.tokens));
                }
                change(i, rank.rank, &mut values);
                rank.push(&Row { step: i * self.stride, time: i as f64, values });
            }
        }
        Trajectory { world_size: self.ranks, ranks, ..Trajectory::default() }
    }

    pub(super) fn healthy(&self) -> Trajectory {
        self.trajectory(|_, _, _| {})
    }

    /// The loss without noise: a power law in the tokens from `start` to `end`.
    fn level(&self, i: u64) -> f64 {
        let tokens = (i * self.stride) as f64 * self.tokens;
        self.end + (self.start - self.end) / (1.0 + tokens / 3e6).powf(0.25)
    }

    fn rate(&self, i: u64) -> f64 {
        let (i, warm, all) = (i as f64, self.warmup as f64, self.steps as f64);
        let decay = ((i - warm) / (all - warm)).clamp(0.0, 1.0);
        3e-4 * (i / warm).min(1.0) * (0.55 + 0.45 * (std::f64::consts::PI * decay).cos())
    }

    fn stored(&self, value: f64) -> f64 {
        match self.bf16 {
            true => f64::from(half::bf16::from_f64(value)),
            false => f64::from(value as f32),
        }
    }
}
