//! Loss heads for the tests of both the reference and the policies: uneven sizes,
//! repeated and ignored labels, confident tokens, cotangents that are not 1.

use super::matrix::{HeadInputs, IGNORED, Matrix, Values};
use super::tiles::{Progress, Tiles};
use super::transform::Transform;
use std::sync::atomic::{AtomicU64, Ordering};

/// A head that owns its values.
#[derive(Debug, Clone)]
pub(crate) struct Fixture {
    pub(crate) tokens: usize,
    pub(crate) depth: usize,
    pub(crate) vocab: usize,
    pub(crate) valid: usize,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) labels: Vec<u32>,
    pub(crate) g_lse: Vec<f32>,
    pub(crate) g_label: Vec<f32>,
    /// `[T]`: cotangent of every valid logit of the token; zeros without label smoothing.
    pub(crate) smooth: Vec<f32>,
    /// `[V]`; NaN in the padding.
    pub(crate) bias: Option<Vec<f64>>,
    /// Logits `[T, V]` given in place of q and k, whose depth is then 0; NaN in the padding.
    pub(crate) given: Option<Vec<f64>>,
    pub(crate) transform: Transform,
    pub(crate) mask: Option<f64>,
}

/// Tiles that cut the plane of `Fixture::usual` into three whole ones and a part in each direction.
pub(crate) const SMALL_TILES: Tiles = Tiles { tokens: 6, vocab: 16 };

impl Fixture {
    /// 22 tokens, depth 13, vocabulary 61 of which 57 are valid.
    pub(crate) fn usual() -> Self {
        Fixture::new(22, 13, 61, 57)
    }

    /// Every fifth token is confident (four times its label's row of k is added to its q), every
    /// seventh is ignored, labels repeat, and g_label is not -g_lse, as with z-loss.
    pub(crate) fn new(tokens: usize, depth: usize, vocab: usize, valid: usize) -> Self {
        let mut state = 12_345u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 9) as f32 / (1 << 22) as f32 - 1.0
        };
        let mut q: Vec<f32> = (0..tokens * depth).map(|_| number()).collect();
        let k: Vec<f32> = (0..vocab * depth).map(|_| number()).collect();
        let ignored = |token: usize| token % 7 == 3;
        let label = |token: usize| (token / 3 * 31 % valid) as u32;
        for token in (0..tokens).step_by(5) {
            for d in 0..depth {
                q[token * depth + d] += 4.0 * k[label(token) as usize * depth + d];
            }
        }
        let g = |token: usize| {
            if ignored(token) { 0.0 } else { 1e-3 * (1 + token % 3) as f32 }
        };
        Fixture {
            tokens,
            depth,
            vocab,
            valid,
            q,
            k,
            labels: (0..tokens).map(|t| if ignored(t) { IGNORED } else { label(t) }).collect(),
            g_lse: (0..tokens).map(|token| 1.1 * g(token)).collect(),
            g_label: (0..tokens).map(|token| -g(token)).collect(),
            smooth: vec![0.0; tokens],
            bias: None,
            given: None,
            transform: Transform::NONE,
            mask: None,
        }
    }

    /// A bias on every valid row, of both signs.
    pub(crate) fn with_bias(mut self) -> Self {
        let bias = |v: usize| if v < self.valid { (v as f64 * 0.7).sin() } else { f64::NAN };
        self.bias = Some((0..self.vocab).map(bias).collect());
        self
    }

    /// Gives logits in place of q and k, which become empty.
    pub(crate) fn with_given(mut self) -> Self {
        let logit = |t: usize, v: usize| 3.0 * ((t * 31 + v * 17) as f64).sin();
        let place = |i: usize| (i / self.vocab, i % self.vocab);
        let padded = |(t, v)| if v < self.valid { logit(t, v) } else { f64::NAN };
        self.given = Some((0..self.tokens * self.vocab).map(place).map(padded).collect());
        (self.depth, self.q, self.k) = (0, Vec::new(), Vec::new());
        self
    }

    /// Gives each token a cotangent of all its logits, as label smoothing does; it differs between
    /// tokens.
    pub(crate) fn with_smoothing(mut self) -> Self {
        for (token, smooth) in self.smooth.iter_mut().enumerate() {
            *smooth = self.g_label[token] * 0.01 * (1 + token % 4) as f32;
        }
        self
    }

    pub(crate) fn inputs(&self) -> HeadInputs<'_> {
        let matrix = |rows, values| Matrix { rows, cols: self.depth, values };
        let (q, k) = (Values::F32(&self.q), Values::F32(&self.k));
        let given = |values| {
            let values = Values::F64(values);
            Matrix { rows: self.tokens, cols: self.vocab, values }
        };
        HeadInputs {
            bias: self.bias.as_deref(),
            given: self.given.as_deref().map(given),
            transform: self.transform,
            mask: self.mask,
            ..HeadInputs::plain(
                matrix(self.tokens, q),
                matrix(self.vocab, k),
                &self.labels,
                self.valid,
            )
        }
    }

    pub(crate) fn g_lse_f64(&self) -> Vec<f64> {
        self.g_lse.iter().map(|&g| g.into()).collect()
    }

    pub(crate) fn g_label_f64(&self) -> Vec<f64> {
        self.g_label.iter().map(|&g| g.into()).collect()
    }

    pub(crate) fn smooth_f64(&self) -> Vec<f64> {
        self.smooth.iter().map(|&g| g.into()).collect()
    }

    pub(crate) fn q(&self, token: usize) -> &[f32] {
        &self.q[token * self.depth..(token + 1) * self.depth]
    }

    pub(crate) fn k(&self, row: usize) -> &[f32] {
        &self.k[row * self.depth..(row + 1) * self.depth]
    }

    /// Sum of `|q| |k|` of one logit: what its rounding errors are relative to.
    pub(crate) fn dot_magnitude(&self, token: usize, row: usize) -> f64 {
        let terms = self.q(token).iter().zip(self.k(row));
        terms.map(|(&q, &k)| (f64::from(q) * f64::from(k)).abs()).sum()
    }
}

/// Adds up the work that a kernel reports.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Progress for Counter {
    fn advance(&self, work: u64) {
        self.0.fetch_add(work, Ordering::Relaxed);
    }
}

/// Runs a closure in a rayon pool of so many threads.
pub(crate) fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}
