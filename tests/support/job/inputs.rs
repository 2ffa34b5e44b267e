//! What enters a job's head: numbers drawn from the seed, exactly as they are
//! then recorded. Kept in f64, which holds every dtype of a job exactly.

use super::Job;
use super::math::Head;
use super::number::{Float, Random};
use super::options::{Kind, Weights};

/// Standard deviation of the elements of k.
const K_SIZE: f64 = 0.4;

/// One rank's microbatch.
pub(super) struct Share {
    pub(super) tokens: usize,
    pub(super) q: Vec<f64>,
    /// Logits that are an input, `[T, V]`.
    pub(super) given: Vec<f64>,
    /// As recorded, ignored labels included.
    pub(super) labels: Vec<i64>,
    /// 1 where none are recorded.
    pub(super) weights: Vec<f64>,
    pub(super) cotangent: Vec<f64>,
    /// For each token, or for each sequence.
    pub(super) advantages: Vec<f64>,
    pub(super) old: Vec<f64>,
    pub(super) reference: Vec<f64>,
}

/// Everything that is drawn: shares by microbatch, then rank.
pub(super) struct Inputs {
    /// `[V, D]`, whatever the recorded layout.
    pub(super) k: Vec<f64>,
    pub(super) bias: Vec<f64>,
    pub(super) shares: Vec<Vec<Share>>,
}

impl Share {
    /// The token whose label and weight a position's loss takes: its own, or the
    /// next of its sequence.
    fn source(&self, job: &Job, t: usize) -> Option<usize> {
        match job.options.layout.sequence {
            Some(length) if !job.options.labels_shifted => {
                (!(t + 1).is_multiple_of(length)).then_some(t + 1)
            }
            _ => Some(t),
        }
    }

    /// The class that a position is to predict, if it takes part.
    pub(super) fn target(&self, job: &Job, t: usize) -> Option<usize> {
        let label = self.labels[self.source(job, t)?];
        (Some(label) != job.options.ignore_label).then_some(label as usize)
    }

    /// The weight of a position; 0 where it takes no part.
    pub(super) fn weight(&self, job: &Job, t: usize) -> f64 {
        match self.target(job, t) {
            Some(_) => self.weights[self.source(job, t).expect("it takes part")],
            None => 0.0,
        }
    }

    pub(super) fn targets(&self, job: &Job) -> Vec<Option<usize>> {
        (0..self.tokens).map(|t| self.target(job, t)).collect()
    }
}

fn rounded(to: Float, x: f64) -> f64 {
    f64::from(to.round_f32(x as f32))
}

impl Inputs {
    pub(super) fn draw(job: &Job) -> Inputs {
        let mut random = Random(job.seed);
        let layout = &job.options.layout;
        let mut normals = |n: usize, size: f64, to: Float| -> Vec<f64> {
            (0..n).map(|_| rounded(to, random.normal() * size)).collect()
        };
        let k = normals(job.vocab * job.width, K_SIZE * job.options.data.head, layout.input);
        let bias = normals(if job.options.bias { job.vocab } else { 0 }, 1.0, layout.bias);
        let mut inputs = Inputs { k, bias, shares: Vec::new() };
        for _ in 0..job.microbatches {
            let shares = (0..job.ranks).map(|rank| inputs.share(job, rank, &mut random)).collect();
            inputs.shares.push(shares);
        }
        inputs
    }

    fn share(&self, job: &Job, rank: usize, random: &mut Random) -> Share {
        let tokens = job.rows(rank);
        let labels = labels(job, rank, tokens, random);
        let weights = weights(job, rank, tokens, random);
        let mut share = Share {
            tokens,
            q: Vec::new(),
            given: Vec::new(),
            labels,
            weights,
            cotangent: (0..tokens).map(|_| rounded(Float::F32, random.normal())).collect(),
            advantages: Vec::new(),
            old: Vec::new(),
            reference: Vec::new(),
        };
        match job.options.kind {
            Kind::XentLogits => share.given = given(job, &share, random),
            _ => share.q = self.activations(job, &share, random),
        }
        if let Some(copies) = job.options.data.copies {
            repeat(&mut share.q, job.width, copies);
            repeat(&mut share.given, job.vocab, copies);
        }
        if job.options.grpo().is_some() {
            self.policies(job, &mut share, random);
        }
        share
    }

    /// q: normal, and along its label's row of k where the token is confident.
    fn activations(&self, job: &Job, share: &Share, random: &mut Random) -> Vec<f64> {
        let (d, options) = (job.width, &job.options);
        // The logits are scaled after the product: q makes up for it.
        let size = options.data.spread / (K_SIZE * (d as f64).sqrt() * options.scale());
        let mut q: Vec<f64> = (0..share.tokens * d).map(|_| random.normal() * size).collect();
        if let Some((every, above)) = options.data.confident {
            let along = above / (K_SIZE * K_SIZE * d as f64 * options.scale());
            for t in (0..share.tokens).step_by(every) {
                let Some(row) = share.target(job, t) else { continue };
                for i in 0..d {
                    q[t * d + i] += along * self.k[row * d + i];
                }
            }
        }
        q.into_iter().map(|x| rounded(options.layout.input, x)).collect()
    }

    /// Log-probabilities of other policies near this one, and advantages.
    fn policies(&self, job: &Job, share: &mut Share, random: &mut Random) {
        let head = Head::<f64>::new(job, self);
        let own = head.forward(share, &share.targets(job)).logprobs();
        let mut near = |away: f64| -> Vec<f64> {
            let other = |&x: &f64| rounded(Float::F32, x + away * random.normal());
            own.iter().map(other).collect()
        };
        share.old = near(if job.options.data.on_policy { 0.0 } else { 0.2 });
        share.reference = near(0.3);
        let sequence =
            job.options.layout.sequence.filter(|_| job.options.data.advantage_of_sequence);
        let count = share.tokens / sequence.unwrap_or(1);
        share.advantages = (0..count).map(|_| rounded(Float::F32, random.normal())).collect();
    }
}

fn labels(job: &Job, rank: usize, tokens: usize, random: &mut Random) -> Vec<i64> {
    let data = &job.options.data;
    let mut labels: Vec<i64> = (0..tokens).map(|_| random.label(job.valid) as i64).collect();
    if let Some(ignore) = job.options.ignore_label {
        let length = job.options.layout.sequence.unwrap_or(tokens);
        for (t, label) in labels.iter_mut().enumerate() {
            // The mean over a sequence needs a token in it.
            let kept = job.options.grpo().is_some() && t.is_multiple_of(length);
            if data.silent_rank == Some(rank) || (random.chance(data.ignored) && !kept) {
                *label = ignore;
            }
        }
    }
    if let Some(copies) = data.copies {
        repeat(&mut labels, 1, copies);
    }
    labels
}

fn weights(job: &Job, rank: usize, tokens: usize, random: &mut Random) -> Vec<f64> {
    let length = job.options.layout.sequence.unwrap_or(tokens);
    let one = |t: usize| match job.options.weights {
        Weights::Absent => 1.0,
        Weights::Mixed => [1.0, 0.5, 0.0, 1.0][t % 4],
        Weights::Mask if t.is_multiple_of(length) => 1.0,
        Weights::Mask => f64::from(u8::from(random.chance(0.7))),
    };
    let mut weights: Vec<f64> = (0..tokens).map(one).collect();
    if let Some(copies) = job.options.data.copies {
        repeat(&mut weights, 1, copies);
    }
    // Without a label that is ignored, it is the weights that make a rank silent.
    if job.options.ignore_label.is_none() && job.options.data.silent_rank == Some(rank) {
        weights.fill(0.0);
    }
    weights
}

/// Logits that come from elsewhere; the padded columns hold what they like.
fn given(job: &Job, share: &Share, random: &mut Random) -> Vec<f64> {
    let options = &job.options;
    let (v, scale) = (job.vocab, options.scale());
    let mut values: Vec<f64> =
        (0..share.tokens * v).map(|_| random.normal() * options.data.spread / scale).collect();
    if let Some((every, above)) = options.data.confident {
        for t in (0..share.tokens).step_by(every) {
            if let Some(label) = share.target(job, t) {
                values[t * v + label] += above / scale;
            }
        }
    }
    let each = |x: f64| rounded(options.layout.input, x * options.data.head);
    values.into_iter().map(each).collect()
}

/// Makes row t a copy of row t mod n.
fn repeat<T: Copy>(rows: &mut [T], width: usize, n: usize) {
    for at in (n * width)..rows.len() {
        rows[at] = rows[at % (n * width)];
    }
}
