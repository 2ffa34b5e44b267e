//! Whole heads against loops over scalars in the arithmetic of `half`: bit equality.

use super::*;
use half::{bf16, f16};
use std::ops::{Add, AddAssign, Mul, Range};

/// A 16-bit type of the `half` crate, with its own arithmetic.
trait Half: Copy + Add<Output = Self> + Mul<Output = Self> + AddAssign + Default {
    const PRECISION: Precision;
    fn narrow(value: f32) -> Self;
    fn wide(self) -> f32;
}

impl Half for bf16 {
    const PRECISION: Precision = Precision::Bf16;
    fn narrow(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl Half for f16 {
    const PRECISION: Precision = Precision::F16;
    fn narrow(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

/// A job that does everything in `H`: sums, products and roundings; exp and ln in f32.
struct Job<'a, H> {
    fixture: &'a Fixture,
    path: Path,
    /// Whether p is made of a log p that is kept in `H`.
    keeps_log: bool,
    tiles: Tiles,
    q: Vec<H>,
    k: Vec<H>,
}

impl<'a, H: Half> Job<'a, H> {
    fn new(fixture: &'a Fixture, path: Path, tiles: Tiles) -> Self {
        let narrow = |values: &[f32]| values.iter().map(|&x| H::narrow(x)).collect();
        Job { fixture, path, keeps_log: false, tiles, q: narrow(&fixture.q), k: narrow(&fixture.k) }
    }

    fn policy(&self) -> Policy {
        let precision = H::PRECISION;
        Policy {
            input: precision,
            product: precision,
            logits: precision,
            log_p: if self.keeps_log { precision } else { Precision::F64 },
            p: precision,
            dlogits: precision,
            output: precision,
            label_grad: precision,
            parts: precision,
            tile_add: precision,
            chunk_add: precision,
            ..every_sum(self.path, precision, Order::Sequential)
        }
    }

    fn label(&self, token: usize) -> Option<usize> {
        self.fixture.inputs().label(token)
    }

    fn q(&self, token: usize, d: usize) -> H {
        // The bias counts as one more column of k, with q = 1.
        match d < self.fixture.depth {
            true => self.q[token * self.fixture.depth + d],
            false => H::narrow(1.0),
        }
    }

    fn k(&self, v: usize, d: usize) -> H {
        self.k[v * self.fixture.depth + d]
    }

    fn logit(&self, token: usize, v: usize) -> H {
        let terms = (0..self.fixture.depth).map(|d| self.q(token, d) * self.k(v, d));
        terms.fold(H::default(), |sum, term| sum + term)
    }

    fn lse(&self, token: usize) -> f32 {
        let row = (0..self.fixture.valid).map(|v| self.logit(token, v).wide());
        let max = row.clone().fold(f32::MIN, f32::max);
        let add = |sum: H, x: f32| H::narrow(sum.wide() + exp(x - max));
        max + self.kept(libm::log(row.fold(H::default(), add).wide().into()) as f32)
    }

    fn kept(&self, x: f32) -> f32 {
        if self.keeps_log { H::narrow(x).wide() } else { x }
    }

    fn dlogit(&self, token: usize, v: usize, lse: f32) -> H {
        let p = H::narrow(exp(self.kept(self.logit(token, v).wide() - lse)));
        let g = self.fixture.g_lse[token] * p.wide();
        let hit = self.path != Path::Fused && self.label(token) == Some(v);
        H::narrow(if hit { g + self.fixture.g_label[token] } else { g })
    }

    /// Adds up the sums of the tiles.
    fn tiled(&self, length: usize, tile: usize, term: impl Fn(usize) -> H) -> H {
        let part = |range: Range<usize>| range.fold(H::default(), |sum, at| sum + term(at));
        let starts = (0..length).step_by(tile);
        let parts = starts.map(|start| part(start..length.min(start + tile)));
        parts.fold(H::default(), |sum, part| sum + part)
    }

    fn dq(&self, token: usize, d: usize, lse: f32) -> H {
        let term = |v| self.dlogit(token, v, lse) * self.k(v, d);
        let sum = self.tiled(self.fixture.valid, self.tiles.vocab, term);
        match self.label(token).filter(|_| self.path == Path::Fused) {
            None => sum,
            Some(label) => sum + H::narrow(self.fixture.g_label[token] * self.k(label, d).wide()),
        }
    }

    fn dk(&self, v: usize, d: usize, lse: &[f64]) -> H {
        let term = |token: usize| self.dlogit(token, v, lse[token] as f32) * self.q(token, d);
        let sum = self.tiled(self.fixture.tokens, self.tiles.tokens, term);
        if self.path != Path::Fused {
            return sum;
        }
        let hits = (0..self.fixture.tokens).filter(|&token| self.label(token) == Some(v));
        let add = |sum: H, token: usize| {
            sum + H::narrow(self.fixture.g_label[token] * self.q(token, d).wide())
        };
        sum + hits.fold(H::default(), add)
    }
}

fn exp(x: f32) -> f32 {
    libm::exp(x.into()) as f32
}

fn assert_literal<H: Half>(keeps_log: bool) {
    let fixture = Fixture::new(7, 3, 11, 10);
    let depth = fixture.depth;
    for (path, tiles) in [
        (Path::Plain, Tiles { tokens: 7, vocab: 10 }),
        (Path::Fused, Tiles { tokens: 3, vocab: 4 }),
        (Path::Chunked, Tiles { tokens: 3, vocab: 10 }),
    ] {
        let job: Job<H> = Job { keeps_log, ..Job::new(&fixture, path, tiles) };
        let (forward, dq, dk, dbias) = emulated(&job.policy(), &fixture, tiles);
        for token in 0..fixture.tokens {
            let lse = forward.lse[token];
            if path != Path::Fused {
                assert_eq!(lse, f64::from(job.lse(token)), "lse of {token}");
            }
            let label = job.label(token).map_or(0.0, |label| job.logit(token, label).wide());
            assert_eq!(forward.label_logits[token], f64::from(label));
            for d in 0..depth {
                let wanted = job.dq(token, d, lse as f32).wide();
                assert_eq!(dq.dq[token * depth + d], f64::from(wanted), "dq {path:?} {token} {d}");
            }
        }
        for v in 0..fixture.valid {
            for d in 0..depth + 1 {
                let got = if d < depth { dk[v * depth + d] } else { dbias[v] };
                let wanted = job.dk(v, d, &forward.lse).wide();
                assert_eq!(got, f64::from(wanted), "dk {path:?} {v} {d}");
            }
        }
    }
}

#[test]
fn a_head_all_in_bf16_has_the_bits_of_scalar_loops() {
    assert_literal::<bf16>(false);
    assert_literal::<bf16>(true);
}

#[test]
fn a_head_all_in_f16_has_the_bits_of_scalar_loops() {
    assert_literal::<f16>(false);
    assert_literal::<f16>(true);
}
