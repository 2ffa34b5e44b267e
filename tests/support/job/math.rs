//! The head itself, one rank's microbatch at a time: forward and backward on
//! the plain, the fused and the chunked path.
//!
//! `z0 = q·k + bias`, `z1 = scale z0`, `z = cap tanh(z1 / cap)`; columns from
//! `valid` on take no part. The loss of a token is
//! `lse - (1 - s) z_y - s/K Σ z_v + λ lse²`. Every tensor is row-major; the
//! gradient of the logits is with respect to z0.

use super::inputs::{Inputs, Share};
use super::number::{Float, Real, Sum, all, zeros};
use super::options::{Kind, Shown};
use super::{Fault, Job, Narrow};

/// What all ranks share.
pub(super) struct Head<'a, F> {
    job: &'a Job,
    k: Vec<F>,
    bias: Vec<F>,
}

/// What the forward leaves for the backward.
pub(super) struct Forward<F> {
    /// `[T, V]`; padded columns stay 0.
    pub(super) z: Vec<F>,
    /// dz/dz0, `[T, V]`.
    slope: Vec<F>,
    max: Vec<F>,
    sum: Vec<F>,
    pub(super) lse: Vec<F>,
    /// 0 where no label is.
    pub(super) label_logits: Vec<F>,
    /// Σ z over the classes, where smoothing needs it.
    z_sums: Vec<F>,
}

/// Gradients before they are stored.
pub(super) struct Backward<F> {
    /// Of z0, label part included, `[T, V]`.
    pub(super) dlogits: Vec<F>,
    pub(super) dq_lse: Vec<F>,
    pub(super) dq_label: Vec<F>,
    pub(super) dq: Vec<F>,
    pub(super) dk_lse: Vec<F>,
    pub(super) dk_label: Vec<F>,
    pub(super) dk: Vec<F>,
    pub(super) dbias: Vec<F>,
}

impl<F: Real> Forward<F> {
    /// Log-probability of each token's label.
    pub(super) fn logprobs(&self) -> Vec<F> {
        self.label_logits.iter().zip(&self.lse).map(|(&z, &lse)| z - lse).collect()
    }
}

impl<'a, F: Real> Head<'a, F> {
    pub(super) fn new(job: &'a Job, inputs: &Inputs) -> Head<'a, F> {
        Head { job, k: all(&inputs.k), bias: all(&inputs.bias) }
    }

    fn sum(&self, tile: usize) -> Sum {
        let options = &self.job.options;
        let accumulator = options.rounding.accumulate;
        Sum { order: options.order, tile, accumulator, between: Float::F32 }
    }

    pub(super) fn forward(&self, share: &Share, targets: &[Option<usize>]) -> Forward<F> {
        let (job, n) = (self.job, share.tokens);
        let mut found = Forward {
            z: zeros(n * job.vocab),
            slope: zeros(n * job.vocab),
            max: zeros(n),
            sum: zeros(n),
            lse: zeros(n),
            label_logits: zeros(n),
            z_sums: zeros(n),
        };
        let (q, given) = (all::<F>(&share.q), all::<F>(&share.given));
        let mut terms = zeros(job.width);
        for t in 0..n {
            for v in 0..job.valid {
                let at = t * job.vocab + v;
                let raw = match job.options.kind {
                    Kind::XentLogits => given[at],
                    _ => self.dot(&q[t * job.width..][..job.width], v, &mut terms),
                };
                (found.z[at], found.slope[at]) = self.transformed(raw, v);
            }
            let row: Vec<F> = found.z[t * job.vocab..][..job.valid].to_vec();
            let row = &rounded(row, job.narrow(Narrow::ForwardLogits))[..];
            (found.max[t], found.sum[t]) = self.softmax(row);
            found.lse[t] = found.max[t] + found.sum[t].ln();
            if job.options.label_smoothing > 0.0 {
                found.z_sums[t] = self.sum(usize::MAX).of(row);
            }
            if let Some(label) = targets[t] {
                found.label_logits[t] = row[label];
            }
        }
        found
    }

    fn dot(&self, q: &[F], v: usize, terms: &mut [F]) -> F {
        let k = &self.k[v * self.job.width..][..self.job.width];
        let to = self.job.narrow(Narrow::Gemm).unwrap_or(Float::F32);
        let each = terms.iter_mut().zip(q.iter().zip(k));
        each.for_each(|(term, (&q, &k))| *term = q.round(to) * k.round(to));
        self.sum(usize::MAX).of(terms).round(self.job.options.rounding.logits)
    }

    /// From raw logit to logit, and the derivative. Each op rounds its result.
    fn transformed(&self, raw: F, v: usize) -> (F, F) {
        let options = &self.job.options;
        let (to, scale) = (options.rounding.logits, F::of(options.scale()));
        let mut z = raw;
        if let Some(&bias) = self.bias.get(v) {
            let bias = match self.job.fault {
                Fault::Biased(times) => bias * F::of(times.into()),
                _ => bias,
            };
            z = (z + bias).round(to);
        }
        if options.scale() != 1.0 {
            z = (z * scale).round(to);
        }
        let Some(cap) = options.softcap.map(F::of) else { return (z, scale) };
        let bent = (z / cap).tanh().round(to);
        ((cap * bent).round(to), (F::of(1.0) - bent * bent) * scale)
    }

    /// Maximum and sum of exponentials; online over tiles on the fused path.
    fn softmax(&self, row: &[F]) -> (F, F) {
        let tile = if self.job.fused() { self.job.options.tile } else { row.len() };
        let plain = Sum { accumulator: Float::F32, ..self.sum(usize::MAX) };
        let (mut max, mut sum) = (row[0], F::of(0.0));
        for tile in row.chunks(tile) {
            let before = max;
            max = tile.iter().fold(max, |max, &z| if z > max { z } else { max });
            let terms: Vec<F> = tile.iter().map(|&z| (z - max).exp()).collect();
            sum = sum * (before - max).exp() + plain.of(&terms);
        }
        (max, sum)
    }

    /// Loss of each token before weights: 0 where there is no label.
    pub(super) fn losses(&self, forward: &Forward<F>, targets: &[Option<usize>]) -> Vec<F> {
        let options = &self.job.options;
        let smoothed = options.smoothed(self.job.valid);
        let one = |t: usize| {
            let lse = forward.lse[t];
            if targets[t].is_none() {
                return F::of(0.0);
            }
            let mut loss = lse - F::of(1.0 - smoothed) * forward.label_logits[t];
            if let Some(to) = self.job.narrow(Narrow::Loss) {
                loss = (lse.round(to) - forward.label_logits[t].round(to)).round(to);
            }
            if smoothed > 0.0 {
                loss = loss - F::of(smoothed / self.job.valid as f64) * forward.z_sums[t];
            }
            if options.z_loss_in_loss {
                loss += F::of(options.z_loss) * lse * lse;
            }
            loss
        };
        (0..targets.len()).map(one).collect()
    }

    /// Gradients of tokens whose losses have these cotangents.
    pub(super) fn backward(
        &self,
        share: &Share,
        targets: &[Option<usize>],
        forward: &Forward<F>,
        g: &[F],
    ) -> Backward<F> {
        let (n, d, v) = (share.tokens, self.job.width, self.job.vocab);
        let rounding = &self.job.options.rounding;
        let (dense, label) = self.entries(targets, forward, g, rounding.dlogits);
        let q = all::<F>(&share.q);
        let mut found = Backward {
            dq_lse: zeros(0),
            dq_label: zeros(0),
            dq: zeros(0),
            dk_lse: zeros(0),
            dk_label: zeros(0),
            dk: zeros(0),
            dbias: self.dbias(targets, &dense, &label),
            dlogits: zeros(0),
        };
        if !q.is_empty() {
            found.dq_lse = self.product(&dense, v, &self.k, d, n, false);
            found.dk_lse = self.product(&dense, v, &q, d, n, true);
            (found.dq_label, found.dk_label) = self.label_part(&q, targets, &label);
            found.dq = self.added(&found.dq_lse, &found.dq_label);
            found.dk = self.added(&found.dk_lse, &found.dk_label);
        }
        found.dlogits = match self.job.options.extras.shown {
            Shown::Unrounded => self.entries(targets, forward, g, Float::F32).0,
            Shown::AsUsed | Shown::Rounded(_) => dense,
        };
        found
    }

    /// The gradient of the logits: dense, and on the fused path without the
    /// label's part, which is then one number a token.
    fn entries(
        &self,
        targets: &[Option<usize>],
        forward: &Forward<F>,
        g: &[F],
        to: Float,
    ) -> (Vec<F>, Vec<F>) {
        let (job, options) = (self.job, &self.job.options);
        let (rounding, one) = (&options.rounding, F::of(1.0));
        let smoothed = options.smoothed(job.valid);
        let (kept, spread) = (F::of(1.0 - smoothed), F::of(smoothed / job.valid as f64));
        let (mut dense, mut label) = (zeros(targets.len() * job.vocab), zeros(targets.len()));
        for (t, target) in targets.iter().enumerate() {
            let Some(target) = *target else { continue };
            let upstream = one + F::of(2.0 * options.z_loss) * forward.lse[t];
            for v in 0..job.valid {
                let at = t * job.vocab + v;
                let narrow = |what| job.narrow(what).unwrap_or(Float::F32);
                let lse = forward.lse[t].round(narrow(Narrow::KeptLse));
                let z = forward.z[at].round(narrow(Narrow::BackwardLogits));
                let p = match options.divides {
                    true => (forward.z[at] - forward.max[t]).exp() / forward.sum[t],
                    false => (z - lse).exp(),
                };
                let p = p.round(narrow(Narrow::EarlyP));
                let mut entry = match job.fused() {
                    true => g[t] * upstream * p.round(rounding.p),
                    false if v == target => g[t] * (upstream * p - kept),
                    false => g[t] * (upstream * p),
                };
                if smoothed > 0.0 {
                    entry = entry - g[t] * spread;
                }
                dense[at] = (entry * forward.slope[at]).round(to);
            }
            if job.fused() {
                label[t] = -(g[t] * kept) * forward.slope[t * job.vocab + target];
            }
        }
        if let Fault::Filter(least, block) = job.fault {
            self.filter((least.into(), block), targets, forward, &mut dense);
        }
        (dense, label)
    }

    /// Clears the blocks in which no `|p - onehot|` reaches a threshold.
    fn filter(
        &self,
        (least, block): (f64, [usize; 2]),
        targets: &[Option<usize>],
        forward: &Forward<F>,
        dense: &mut [F],
    ) {
        let (v, valid) = (self.job.vocab, self.job.valid);
        let size = |t: usize, class: usize| {
            let p = (forward.z[t * v + class] - forward.lse[t]).exp().wide();
            if targets[t] == Some(class) { (p - 1.0).abs() } else { p }
        };
        for first in (0..targets.len()).step_by(block[0]) {
            let tokens = first..(first + block[0]).min(targets.len());
            for from in (0..valid).step_by(block[1]) {
                let classes = from..(from + block[1]).min(valid);
                let all = || tokens.clone().flat_map(|t| classes.clone().map(move |c| (t, c)));
                if all().all(|(t, class)| size(t, class) < least) {
                    all().for_each(|(t, class)| dense[t * v + class] = F::of(0.0));
                }
            }
        }
    }

    /// `W M` over the vocabulary, `[T, D]`, or `Wᵀ M` over the tokens, `[V, D]`.
    fn product(&self, w: &[F], v: usize, m: &[F], d: usize, n: usize, over_tokens: bool) -> Vec<F> {
        let job = self.job;
        let (rows, length) = if over_tokens { (job.valid, n) } else { (n, job.valid) };
        let tile = match over_tokens {
            true => job.options.chunk.unwrap_or(usize::MAX),
            false if job.fused() => job.options.tile,
            false => usize::MAX,
        };
        let between = match job.fault {
            Fault::Narrow(Narrow::Chunks, to) if over_tokens => to,
            Fault::Narrow(Narrow::Tiles, to) => to,
            _ => Float::F32,
        };
        let tile = match job.fault {
            Fault::Narrow(Narrow::Tiles, _) if over_tokens => 32,
            _ => tile,
        };
        let sum = Sum { between, ..self.sum(tile) };
        let gemm = job.narrow(Narrow::Gemm).or(job.narrow(Narrow::GemmBackward));
        let other = gemm.unwrap_or(Float::F32);
        let entry = gemm.or(job.narrow(Narrow::Dlogits)).unwrap_or(Float::F32);
        let mut found = zeros(if over_tokens { v * d } else { n * d });
        let (mut terms, mut column) = (zeros(length), zeros(length));
        for row in 0..rows {
            for (j, w_j) in column.iter_mut().enumerate() {
                *w_j = if over_tokens { w[j * v + row] } else { w[row * v + j] };
                *w_j = w_j.round(entry);
            }
            for i in 0..d {
                for (j, term) in terms.iter_mut().enumerate() {
                    *term = column[j] * m[j * d + i].round(other);
                }
                found[row * d + i] = sum.of(&terms);
            }
        }
        found
    }

    /// Gather of k for dq, scatter-add of q for dk.
    fn label_part(&self, q: &[F], targets: &[Option<usize>], label: &[F]) -> (Vec<F>, Vec<F>) {
        let (d, rounding) = (self.job.width, &self.job.options.rounding);
        let (mut dq, mut dk) = (zeros(q.len()), zeros(self.k.len()));
        let counted = targets.iter().enumerate().filter_map(|(t, row)| Some((t, (*row)?)));
        for (t, row) in counted.filter(|_| self.job.fused()) {
            for i in 0..d {
                dq[t * d + i] = (label[t] * self.k[row * d + i]).round(rounding.label_grad);
                let addend = (label[t] * q[t * d + i]).round(rounding.label_grad);
                let sum: F = dk[row * d + i] + addend;
                dk[row * d + i] = sum.round(self.job.scatter());
            }
        }
        (dq, dk)
    }

    fn added(&self, one: &[F], other: &[F]) -> Vec<F> {
        if !self.job.fused() {
            return one.to_vec();
        }
        let to = self.job.options.rounding.parts;
        one.iter().zip(other).map(|(&a, &b)| a.round(to) + b.round(to)).collect()
    }

    fn dbias(&self, targets: &[Option<usize>], dense: &[F], label: &[F]) -> Vec<F> {
        let (v, sum) = (self.job.vocab, self.sum(usize::MAX));
        let mut found = zeros::<F>(self.bias.len());
        for (row, x) in found.iter_mut().enumerate() {
            let terms: Vec<F> = (0..targets.len()).map(|t| dense[t * v + row]).collect();
            *x = sum.of(&terms);
        }
        let whole = self.job.fault != Fault::DbiasUnlabelled;
        if self.job.fused() && whole && !found.is_empty() {
            let counted = targets.iter().zip(label).filter_map(|(row, &g)| Some(((*row)?, g)));
            counted.for_each(|(row, g)| found[row] += g);
        }
        found
    }
}

fn rounded<F: Real>(mut values: Vec<F>, to: Option<Float>) -> Vec<F> {
    values.iter_mut().for_each(|x| *x = x.round(to.unwrap_or(Float::F32)));
    values
}
