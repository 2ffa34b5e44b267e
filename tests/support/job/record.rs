//! What the ranks record of a step: every tensor in its dtype, layout and
//! placement.

use backtape::dtype::Dtype;
use backtape::head::{LossReduction, Ranks};
use backtape::index_box::IndexBox;
use backtape::shard::When;
use half::{bf16, f16};

use super::Job;
use super::inputs::{Inputs, Share};
use super::number::Float;
use super::options::{Kind, Shown, Weights};
use super::step::{Part, Step};
use crate::support::dump::Shard;

type Data = (Dtype, Vec<u8>);

/// Where a value belongs.
#[derive(Clone, Copy)]
struct At {
    rank: usize,
    microbatch: Option<u32>,
    when: Option<When>,
    partial: bool,
}

struct Recording<'a> {
    job: &'a Job,
    inputs: &'a Inputs,
    shards: Vec<Shard>,
}

pub(super) fn shards(job: &Job, inputs: &Inputs, step: &Step<f32>) -> Vec<Shard> {
    let mut recording = Recording { job, inputs, shards: Vec::new() };
    for (mb, parts) in step.parts.iter().enumerate() {
        for (rank, part) in parts.iter().enumerate() {
            let at = At { rank, microbatch: Some(mb as u32), when: None, partial: false };
            recording.inputs(at, mb);
            recording.forward(at, mb, part, step.losses[mb]);
            recording.gradients(at, part);
        }
    }
    recording.step(step);
    recording.shards
}

impl Recording<'_> {
    fn share(&self, at: At, mb: usize) -> &Share {
        &self.inputs.shares[mb][at.rank]
    }

    fn given(&self) -> bool {
        self.job.options.kind == Kind::XentLogits
    }

    fn push(&mut self, at: At, name: &'static str, shape: &[usize], place: IndexBox, data: Data) {
        let At { rank, microbatch, when, partial } = at;
        let shape = shape.iter().map(|&n| n as u64).collect();
        let ((dtype, bytes), rank) = (data, rank as u32);
        let shard = Shard { rank, name, microbatch, when, partial, dtype, shape, place, bytes };
        self.shards.push(shard);
    }

    fn whole(&mut self, at: At, name: &'static str, shape: &[usize], data: Data) {
        let place = shape.iter().map(|&n| (0, n as u64)).collect();
        self.push(at, name, shape, IndexBox(place), data);
    }

    /// A tensor whose leading dimensions are the tokens of all ranks.
    fn of_tokens(&mut self, at: At, name: &'static str, width: Option<usize>, data: Data) {
        let sequence = self.job.options.layout.sequence;
        let trailing: Vec<usize> = sequence.into_iter().chain(width).collect();
        self.rows(at, name, sequence.unwrap_or(1), &trailing, data);
    }

    /// A tensor whose first dimension counts groups of this many tokens.
    fn rows(&mut self, at: At, name: &'static str, group: usize, trailing: &[usize], data: Data) {
        let job = self.job;
        let count = |ranks: std::ops::Range<usize>| ranks.map(|r| job.rows(r) / group).sum();
        let (from, own): (usize, usize) = (count(0..at.rank), job.rows(at.rank) / group);
        let all: usize = count(0..job.ranks);
        let shape: Vec<usize> = std::iter::once(all).chain(trailing.iter().copied()).collect();
        let mut place: Vec<(u64, u64)> = shape.iter().map(|&n| (0, n as u64)).collect();
        place[0] = (from as u64, (from + own) as u64);
        self.push(at, name, &shape, IndexBox(place), data);
    }

    /// k or one of its gradients, in k's layout; `cut` over the ranks or whole.
    fn of_k(&mut self, at: At, name: &'static str, cut: bool, values: &[f32], to: Float) {
        let (job, d) = (self.job, self.job.width);
        let row = |rank: usize| if cut { job.vocab * rank / job.ranks } else { 0 };
        let (from, to_row) = match cut {
            true => (row(at.rank), row(at.rank + 1)),
            false => (0, job.vocab),
        };
        let rows = (from as u64, to_row as u64);
        let (shape, place, values) = match job.options.layout.dv {
            false => ([job.vocab, d], [rows, (0, d as u64)], values[from * d..to_row * d].to_vec()),
            true => {
                let column = |i: usize| (from..to_row).map(move |v| values[v * d + i]);
                ([d, job.vocab], [(0, d as u64), rows], (0..d).flat_map(column).collect())
            }
        };
        self.push(at, name, &shape, IndexBox(place.to_vec()), floats(to, &values));
    }

    fn inputs(&mut self, at: At, mb: usize) {
        let (job, layout, inputs) = (self.job, &self.job.options.layout, self.inputs);
        let share = &inputs.shares[mb][at.rank];
        if self.given() {
            self.of_tokens(at, "logits", Some(job.vocab), wide(layout.input, &share.given));
        } else {
            self.of_tokens(at, "q", Some(job.width), wide(layout.input, &share.q));
            if !layout.k_once {
                self.of_k(at, "k", layout.k_sharded, &narrow(&inputs.k), layout.input);
            }
        }
        self.of_tokens(at, "labels", None, integers(&share.labels));
        if job.options.weights != Weights::Absent {
            self.of_tokens(at, "weights", None, wide(Float::F32, &share.weights));
        }
        if job.options.bias {
            self.whole(at, "bias", &[job.vocab], wide(layout.bias, &inputs.bias));
        }
        if job.options.reduction == LossReduction::None {
            self.of_tokens(at, "cotangent", None, wide(Float::F32, &share.cotangent));
        }
        if job.options.grpo().is_some() {
            self.policies(at, mb);
        }
    }

    fn policies(&mut self, at: At, mb: usize) {
        let full = Float::F32;
        let share = self.share(at, mb);
        let (old, reference) = (wide(full, &share.old), wide(full, &share.reference));
        let advantages = wide(full, &share.advantages);
        let of_sequences = share.advantages.len() < share.tokens;
        self.of_tokens(at, "old_logprobs", None, old);
        self.of_tokens(at, "ref_logprobs", None, reference);
        match self.job.options.layout.sequence.filter(|_| of_sequences) {
            Some(length) => self.rows(at, "advantages", length, &[], advantages),
            None => self.of_tokens(at, "advantages", None, advantages),
        }
    }

    fn forward(&mut self, at: At, mb: usize, part: &Part<f32>, loss: f32) {
        let (options, full) = (&self.job.options, Float::F32);
        let policy = options.grpo().is_some();
        let share = self.share(at, mb);
        // A position that takes no part has no label: jobs leave 0 there.
        let counts: Vec<bool> = share.targets(self.job).iter().map(Option::is_some).collect();
        let masked = |values: &[f32]| -> Vec<f32> {
            values.iter().zip(&counts).map(|(&x, &here)| if here { x } else { 0.0 }).collect()
        };
        let logprobs = floats(full, &masked(&part.logprobs));
        self.of_tokens(at, "lse", None, floats(full, &part.forward.lse));
        self.of_tokens(at, "label_logits", None, floats(full, &part.forward.label_logits));
        if options.extras.logprobs || policy || self.given() {
            self.of_tokens(at, "logprobs", None, logprobs);
        }
        if options.extras.logits && !self.given() {
            let data = floats(options.rounding.logits, &self.masked_logits(part));
            self.of_tokens(at, "logits", Some(self.job.vocab), data);
        }
        if policy {
            self.of_tokens(at, "dlogprobs", None, floats(full, &part.dlogprobs));
        }
        match (options.reduction, options.span().ranks) {
            (LossReduction::None, _) => {
                self.of_tokens(at, "loss", None, floats(full, &part.losses));
            }
            // Each rank has a loss of its own: one tensor cannot hold them.
            (_, Ranks::One | Ranks::Axes(_)) if self.job.ranks > 1 => {}
            _ => self.whole(at, "loss", &[], floats(full, &[loss])),
        }
    }

    /// The logits as the softmax reads them, the padded columns masked.
    fn masked_logits(&self, part: &Part<f32>) -> Vec<f32> {
        let mask = self.job.options.mask_value.unwrap_or(0.0) as f32;
        let mut logits = part.forward.z.clone();
        for row in logits.chunks_mut(self.job.vocab) {
            row[self.job.valid..].fill(mask);
        }
        logits
    }

    fn gradients(&mut self, at: At, part: &Part<f32>) {
        let (job, options, found) = (self.job, &self.job.options, &part.gradients);
        let layout = &options.layout;
        let addend = At { when: Some(When::PreReduce), partial: true, ..at };
        if self.given() {
            let dlogits = floats(layout.dq, &found.dlogits);
            self.of_tokens(at, "dlogits", Some(job.vocab), dlogits);
            return;
        }
        if options.extras.dlogits {
            let stored = match options.extras.shown {
                Shown::AsUsed => options.rounding.dlogits,
                Shown::Unrounded => Float::F32,
                Shown::Rounded(to) => to,
            };
            let dlogits = floats(stored, &found.dlogits);
            self.of_tokens(at, "dlogits", Some(job.vocab), dlogits);
        }
        self.of_tokens(at, "dq", Some(job.width), floats(layout.dq, &found.dq));
        if job.fused() && options.extras.dq_parts {
            let (lse, label) = (floats(layout.dk_parts, &found.dq_lse), &found.dq_label);
            self.of_tokens(at, "dq_lse", Some(job.width), lse);
            self.of_tokens(at, "dq_label", Some(job.width), floats(layout.dk_parts, label));
        }
        let addends = !options.extras.sums_alone;
        if job.fused() && addends {
            self.of_k(addend, "dk_lse", false, &found.dk_lse, layout.dk_parts);
            self.of_k(addend, "dk_label", false, &found.dk_label, layout.dk_parts);
        }
        if addends {
            self.of_k(addend, "dk", false, &found.dk, layout.dk);
        }
        if options.bias {
            self.whole(addend, "dbias", &[job.vocab], floats(Float::F32, &found.dbias));
        }
    }

    /// What belongs to no microbatch.
    fn step(&mut self, step: &Step<f32>) {
        let (job, layout) = (self.job, &self.job.options.layout);
        if self.given() {
            return;
        }
        for rank in 0..job.ranks {
            let at = At { rank, microbatch: None, when: None, partial: false };
            if layout.k_once {
                self.of_k(at, "k", layout.k_sharded, &narrow(&self.inputs.k), layout.input);
            }
            if job.options.extras.accumulated {
                let own = At { when: Some(When::PreReduce), partial: true, ..at };
                self.of_k(own, "dk", false, &step.accumulated[rank], layout.sums);
            }
            let reduced = At { when: Some(When::PostReduce), ..at };
            if !job.options.extras.unreduced {
                self.of_k(reduced, "dk", layout.k_sharded, &step.reduced, layout.sums);
            }
            self.whole(at, "grad_norm", &[], floats(Float::F32, &[step.grad_norm]));
        }
    }
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

fn wide(to: Float, values: &[f64]) -> Data {
    floats(to, &narrow(values))
}

fn floats(to: Float, values: &[f32]) -> Data {
    match to {
        Float::Bf16 => {
            let bits = values.iter().flat_map(|&x| bf16::from_f32(x).to_bits().to_le_bytes());
            (Dtype::Bf16, bits.collect())
        }
        Float::F16 => {
            let bits = values.iter().flat_map(|&x| f16::from_f32(x).to_bits().to_le_bytes());
            (Dtype::F16, bits.collect())
        }
        Float::F32 => (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
    }
}

fn integers(values: &[i64]) -> Data {
    (Dtype::I32, values.iter().flat_map(|&n| (n as i32).to_le_bytes()).collect())
}

/// Whether a recorded tensor holds numbers only.
pub(super) fn finite(shard: &Shard) -> bool {
    let two = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    match shard.dtype {
        Dtype::Bf16 => shard.bytes.chunks(2).all(|b| bf16::from_bits(two(b)).is_finite()),
        Dtype::F16 => shard.bytes.chunks(2).all(|b| f16::from_bits(two(b)).is_finite()),
        Dtype::F32 => shard.bytes.chunks(4).all(|b| four(b).is_finite()),
        _ => true,
    }
}
