//! A small training step computed the plain way, with faults that can be
//! planted: what several ranks would dump. It shares no code with the replayer.
//!
//! Sizes are uneven on purpose: no dimension is a multiple of a tile, labels
//! repeat as in text, some tokens are confident, the cotangent is not one.

use backtape::dtype::Dtype;
use backtape::head::{DeclaredTiles, Denominator, HeadDeclaration, MicrobatchReduction};
use backtape::index_box::IndexBox;
use backtape::shard::When;
use half::bf16;

use super::dump::Shard;

/// What is wrong with the job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// dk's label part accumulates in bf16.
    LabelScatterBf16,
    /// dk of rank 1 is scaled.
    RankScaled(f32),
    /// lse of one microbatch is off by this much.
    LseOff(f32),
    /// The label of every token is its neighbour's.
    LabelShift,
    /// dk is reduced as a mean over ranks.
    RankMean,
    /// One element of dq is NaN.
    NanInDq,
}

/// Sizes and seed of a job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) microbatches: usize,
    pub(crate) tokens: usize,
    pub(crate) vocab: usize,
    pub(crate) valid: usize,
    pub(crate) width: usize,
    pub(crate) fused: bool,
    pub(crate) fault: Fault,
}

impl Default for Job {
    fn default() -> Job {
        Job {
            seed: 1,
            ranks: 3,
            microbatches: 2,
            tokens: 131,
            vocab: 275,
            valid: 261,
            width: 24,
            fused: true,
            fault: Fault::None,
        }
    }
}

/// Deterministic numbers: the seed is in every failure message through `Job`.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 32)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Zipf-like: low ids are frequent.
    fn label(&mut self, valid: usize) -> usize {
        ((valid as f64).powf(self.unit()) - 1.0) as usize
    }
}

/// One rank's microbatch.
struct Part {
    q: Vec<f32>,
    labels: Vec<usize>,
    weights: Vec<f32>,
    lse: Vec<f32>,
    label_logits: Vec<f32>,
    dq: Vec<f32>,
    dk_lse: Vec<f32>,
    dk_label: Vec<f32>,
    dk: Vec<f32>,
}

fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

impl Job {
    /// The head as such a job declares it.
    pub(crate) fn head(&self) -> HeadDeclaration {
        let mut head = HeadDeclaration {
            path: if self.fused { "fused" } else { "plain" }.into(),
            denominator: Denominator::Weights,
            microbatches: self.microbatches as u32,
            microbatch_reduction: MicrobatchReduction::Sum,
            valid_vocab: Some(self.valid as u64),
            cotangent: 1.75,
            tiles: Some(DeclaredTiles { tokens: None, vocab: Some(64) }),
            ..HeadDeclaration::default()
        };
        head.dtypes.insert("logits".into(), "f32".into());
        head
    }

    /// Every shard that the ranks record.
    pub(crate) fn shards(&self) -> Vec<Shard> {
        let mut random = Random(self.seed);
        let k: Vec<f32> =
            (0..self.vocab * self.width).map(|_| round(random.normal() as f32 * 0.4)).collect();
        let inputs: Vec<Vec<Part>> = (0..self.microbatches)
            .map(|_| (0..self.ranks).map(|_| self.draw(&mut random, &k)).collect())
            .collect();
        let total: f32 = inputs.iter().flatten().flat_map(|part| &part.weights).sum();
        let mut shards = Vec::new();
        let mut reduced = vec![0f32; k.len()];
        for (mb, parts) in inputs.into_iter().enumerate() {
            let mut loss = 0f32;
            let mut whole = Vec::new();
            for (rank, mut part) in parts.into_iter().enumerate() {
                self.run(&mut part, &k, total, rank, mb);
                for t in 0..self.tokens {
                    loss += part.weights[t] / total * (part.lse[t] - part.label_logits[t]);
                }
                reduced.iter_mut().zip(&part.dk).for_each(|(sum, x)| *sum += x);
                whole.push(part);
            }
            self.record(&mut shards, &k, &whole, loss, mb as u32);
        }
        if self.fault == Fault::RankMean {
            reduced.iter_mut().for_each(|x| *x /= self.ranks as f32);
        }
        let shape = [self.vocab, self.width];
        let norm = reduced.iter().map(|x| x * x).sum::<f32>().sqrt();
        for rank in 0..self.ranks as u32 {
            shards.push(shard(
                rank,
                "dk",
                None,
                Some(When::PostReduce),
                &shape,
                None,
                f32s(&reduced),
            ));
            shards.push(shard(rank, "grad_norm", None, None, &[], None, f32s(&[norm])));
        }
        shards
    }

    fn draw(&self, random: &mut Random, k: &[f32]) -> Part {
        let labels: Vec<usize> = (0..self.tokens).map(|_| random.label(self.valid)).collect();
        let mut q: Vec<f32> =
            (0..self.tokens * self.width).map(|_| random.normal() as f32).collect();
        // Every seventh token is confident: q points along its label's row.
        for t in (0..self.tokens).step_by(7) {
            for i in 0..self.width {
                q[t * self.width + i] += 6.0 * k[labels[t] * self.width + i];
            }
        }
        let q = q.into_iter().map(round).collect();
        let weights = (0..self.tokens).map(|t| [1.0, 0.5, 0.0, 1.0][t % 4]).collect();
        let none = Vec::new;
        Part {
            q,
            labels,
            weights,
            lse: none(),
            label_logits: none(),
            dq: none(),
            dk_lse: none(),
            dk_label: none(),
            dk: none(),
        }
    }

    /// Forward and backward of one rank's microbatch, sequentially in f32 with
    /// the rounding points of a bf16 job.
    fn run(&self, part: &mut Part, k: &[f32], total: f32, rank: usize, mb: usize) {
        let (d, v) = (self.width, self.vocab);
        part.dq = vec![0.0; self.tokens * d];
        let mut label_dq = part.dq.clone();
        (part.dk_lse, part.dk_label) = (vec![0.0; v * d], vec![0.0; v * d]);
        for t in 0..self.tokens {
            let q = &part.q[t * d..(t + 1) * d];
            let dot = |row: usize| q.iter().zip(&k[row * d..]).map(|(a, b)| a * b).sum::<f32>();
            let logits: Vec<f32> = (0..self.valid).map(dot).collect();
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let exact = max + logits.iter().map(|x| (x - max).exp()).sum::<f32>().ln();
            let lse = match self.fault {
                Fault::LseOff(by) if mb == 1 => exact + by,
                _ => exact,
            };
            let label = match self.fault {
                Fault::LabelShift => part.labels[(t + 1) % self.tokens],
                _ => part.labels[t],
            };
            part.lse.push(lse);
            part.label_logits.push(logits[label]);
            let g = 1.75 * part.weights[t] / total;
            for row in 0..self.valid {
                let mut w = g * (logits[row] - exact).exp();
                if !self.fused && row == label {
                    w -= g;
                }
                let w = round(w);
                for i in 0..d {
                    part.dq[t * d + i] += w * k[row * d + i];
                    part.dk_lse[row * d + i] += w * q[i];
                }
            }
            for i in (0..d).filter(|_| self.fused) {
                label_dq[t * d + i] = round(-g * k[label * d + i]);
                let sum = part.dk_label[label * d + i] + round(-g * q[i]);
                let low = self.fault == Fault::LabelScatterBf16;
                part.dk_label[label * d + i] = if low { round(sum) } else { sum };
            }
        }
        part.dq.iter_mut().zip(&label_dq).for_each(|(x, label)| *x = round(*x + label));
        let sums = part.dk_lse.iter().zip(&part.dk_label).map(|(a, b)| a + b);
        let scale = match self.fault {
            Fault::RankScaled(by) if rank == 1 => by,
            _ => 1.0,
        };
        part.dk = sums.map(|x| x * scale).collect();
        if self.fault == Fault::NanInDq && rank == 1 && mb == 0 {
            part.dq[5] = f32::NAN;
        }
    }

    fn record(&self, shards: &mut Vec<Shard>, k: &[f32], parts: &[Part], loss: f32, mb: u32) {
        let (tokens, all) = (self.tokens, self.tokens * self.ranks);
        let (d, kv) = (self.width, [self.vocab, self.width]);
        for (rank, part) in parts.iter().enumerate() {
            let rows = Some((rank * tokens, (rank + 1) * tokens));
            let rank = rank as u32;
            let mut add = |name, shape: &[usize], rows, data| {
                shards.push(shard(rank, name, Some(mb), None, shape, rows, data));
            };
            add("q", &[all, d], rows, bf16s(&part.q));
            add("k", &kv, None, bf16s(k));
            add("labels", &[all], rows, i32s(&part.labels));
            add("weights", &[all], rows, f32s(&part.weights));
            add("lse", &[all], rows, f32s(&part.lse));
            add("label_logits", &[all], rows, f32s(&part.label_logits));
            add("loss", &[], None, f32s(&[loss]));
            add("dq", &[all, d], rows, bf16s(&part.dq));
            for (name, values) in
                [("dk_lse", &part.dk_lse), ("dk_label", &part.dk_label), ("dk", &part.dk)]
            {
                if self.fused || name == "dk" {
                    let when = Some(When::PreReduce);
                    let mut addend = shard(rank, name, Some(mb), when, &kv, None, f32s(values));
                    addend.partial = true;
                    shards.push(addend);
                }
            }
        }
    }
}

type Data = (Dtype, Vec<u8>);

fn shard(
    rank: u32,
    name: &'static str,
    microbatch: Option<u32>,
    when: Option<When>,
    shape: &[usize],
    rows: Option<(usize, usize)>,
    (dtype, bytes): Data,
) -> Shard {
    let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
    let mut place = IndexBox::whole(&shape);
    if let Some((from, to)) = rows {
        place.0[0] = (from as u64, to as u64);
    }
    Shard { rank, name, microbatch, when, partial: false, dtype, shape, place, bytes }
}

fn bf16s(values: &[f32]) -> Data {
    let bits = values.iter().flat_map(|&x| bf16::from_f32(x).to_bits().to_le_bytes());
    (Dtype::Bf16, bits.collect())
}

fn f32s(values: &[f32]) -> Data {
    (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

fn i32s(values: &[usize]) -> Data {
    (Dtype::I32, values.iter().flat_map(|&n| (n as i32).to_le_bytes()).collect())
}
