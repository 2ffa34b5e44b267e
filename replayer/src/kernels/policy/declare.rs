//! What a policy declares: which path computes the gradients, what is rounded where, and how sums
//! are taken.

use super::{Cut, Precision};
use crate::kernels::tiles::spans;
use std::ops::Range;

/// How dlogits are computed and multiplied to dq and dk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Computes `dlogits = g_lse p + g_label onehot` for all tokens and classes, then two GEMMs: dq
    /// sums over the whole vocabulary, dk over all tokens, without tiles.
    Plain,
    /// Computes the softmax part by GEMMs tile by tile and the label part by gather and
    /// scatter-add, then adds the two. lse is summed online over the vocabulary tiles.
    Fused,
    /// As plain, for one chunk of tokens after the other (`Tiles::tokens`, the whole vocabulary):
    /// the backward pass computes the logits again, and dk is summed over the chunks (MaxText,
    /// Liger).
    Chunked,
}

/// The order in which the addends of a sum are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Not declared, so that the fastest order is taken: the GEMM crate's on the fast path, one
    /// after the other in the emulator.
    Native,
    /// One after the other, from 0.
    Sequential,
    /// Blocks of so many addends, each added one after the other, then the blocks' sums in the
    /// same way.
    Blocked(usize),
    /// Neighbours in pairs, then their sums in pairs, and so on.
    Pairwise,
    /// One after the other with a running compensation (Kahan 1965).
    Kahan,
    /// Kahan's sum as Neumaier (1974) repaired it: the compensation is added at the end.
    Neumaier,
}

/// How one sum is taken: every addition is rounded to `precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Format of the accumulator. Each addition is an f32 addition (f64 for `F64`), rounded to it.
    pub precision: Precision,
    /// In which order the addends are added.
    pub order: Order,
}

impl Sum {
    /// In f32 and in an order that is not declared: what the fast path does.
    pub const NATIVE: Sum = Sum { precision: Precision::F32, order: Order::Native };

    /// A sum in an accumulator of some precision, in an order that is not declared.
    pub const fn of(precision: Precision) -> Self {
        Sum { precision, order: Order::Native }
    }
}

/// The five sums of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    /// The sum of a logit, over D.
    pub logits: Sum,
    /// The sum of the exponentials of a row (and of its logits, for smoothing), over V; on the
    /// fused path over the columns of a tile. exp and all element-wise operations are computed in
    /// f64 where this sum is in f64, else in f32.
    pub lse: Sum,
    /// The sum of dq, over V; on the fused path over the columns of a tile.
    pub dq: Sum,
    /// The sums of dk and of the gradient of the bias: over all tokens on the plain path, else over
    /// the tokens of a tile or chunk.
    pub dk: Sum,
    /// Fused: the sum of the scatter-add, `acc = round(acc + g q)` over a row's tokens.
    pub label_scatter: Sum,
}

impl Sums {
    /// Takes all five sums in the same way.
    pub const fn all(sum: Sum) -> Self {
        Sums { logits: sum, lse: sum, dq: sum, dk: sum, label_scatter: sum }
    }
}

/// Which end a walk over tiles or chunks starts at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Walk {
    Ascending,
    Descending,
}

/// When logits are rounded, if a bias or a transform follows their GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRounding {
    /// As they leave the GEMM, and not again.
    Gemm,
    /// As they leave the GEMM, and again after the bias and each step of the transform, as in an
    /// eager job whose tensors are all in that format.
    Each,
    /// Only once, after bias and transform: they stay in the wider format and are cast at the end.
    End,
}

/// One implementation: its path, rounding points and sums. `F64` at a rounding point
/// rounds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Which path the gradients take.
    pub path: Path,
    /// What q and k are rounded to before any GEMM.
    pub input: Precision,
    /// What q and k are additionally rounded to as operands of the gradients' GEMMs.
    pub operand: Precision,
    /// What each product of a GEMM is rounded to before it is added. `F64` in the emulator means a
    /// fused multiply-add; the fast path may fuse them anyway.
    pub product: Precision,
    /// What the logits are rounded to.
    pub logits: Precision,
    /// When logits are rounded.
    pub logits_when: LogitRounding,
    /// What `log p = logit - lse` is rounded to, where the job keeps that and makes p of it, as
    /// log-softmax does; `F64` where it does not. The sum of lse and its logarithm are rounded to
    /// the same.
    pub log_p: Precision,
    /// What `p = exp(logit - lse)` is rounded to before its cotangent multiplies it.
    pub p: Precision,
    /// What dlogits (on the fused path their softmax part alone) are rounded to before the GEMMs.
    pub dlogits: Precision,
    /// Fused: what the products `g_label q` and `g_label k[y]` are rounded to.
    pub label_grad: Precision,
    /// Fused: what the softmax and label parts are rounded to before they are added.
    pub parts: Precision,
    /// What dq, dk and the gradient of the bias are rounded to at the end.
    pub output: Precision,
    /// Fused: what dq and dk are rounded to after a tile's part was added; chunked: dq alone.
    pub tile_add: Precision,
    /// Chunked: what dk is rounded to after a chunk's part was added.
    pub chunk_add: Precision,
    /// Fused, chunked: what a tile's or chunk's own part is rounded to before it is added.
    pub addend: Precision,
    /// Fused: into how many shards the tokens are cut. Each shard's scatter-add starts from 0, and
    /// the shards' sums are added one after the other.
    pub scatter_shards: usize,
    /// Fused: precision in which the shards' sums are added. A reduction over devices may be
    /// promoted to f32, as XLA does; the total is then stored in the precision of the parts.
    pub scatter_join: Precision,
    /// Fused: whether the scatter-add starts at the first or at the last token.
    pub scatter_order: Walk,
    /// How each sum is taken.
    pub sums: Sums,
    /// Fused: order of the vocabulary tiles.
    pub tile_order: Walk,
    /// Fused, chunked: order of the token tiles or chunks.
    pub chunk_order: Walk,
    /// Fused, chunked: how the tokens are cut into tiles or chunks, beside their size. Only fast
    /// policies on the CPU implement `Cut::sequence` and `Cut::shards`, which hypotheses about
    /// causes use.
    pub cut: Cut,
}

impl Policy {
    const fn uniform(path: Path, precision: Precision) -> Self {
        Policy {
            path,
            input: precision,
            operand: Precision::F64,
            product: precision,
            logits: precision,
            logits_when: LogitRounding::Each,
            log_p: Precision::F64,
            p: precision,
            dlogits: precision,
            label_grad: precision,
            parts: precision,
            output: precision,
            tile_add: precision,
            chunk_add: precision,
            addend: precision,
            scatter_shards: 1,
            scatter_join: precision,
            scatter_order: Walk::Ascending,
            sums: Sums::all(Sum::of(precision)),
            tile_order: Walk::Ascending,
            chunk_order: Walk::Ascending,
            cut: Cut { first: 0, parts: 0, sequence: 0, shards: 0 },
        }
    }

    /// Plain path, nothing rounded below f32.
    pub const fn plain_f32() -> Self {
        Policy::uniform(Path::Plain, Precision::F32)
    }

    /// Plain path of a bf16 job: bf16 inputs, dlogits and outputs.
    pub const fn plain_bf16() -> Self {
        Policy { path: Path::Plain, ..Policy::fused_bf16() }
    }

    /// Plain path in f64 throughout.
    pub const fn plain_f64() -> Self {
        Policy::uniform(Path::Plain, Precision::F64)
    }

    /// Fused path, nothing rounded below f32.
    pub const fn fused_f32() -> Self {
        Policy::uniform(Path::Fused, Precision::F32)
    }

    /// Fused path of a bf16 job: bf16 inputs, dlogits, label products, parts and
    /// outputs; logits and every accumulator in f32.
    pub const fn fused_bf16() -> Self {
        let half = Precision::Bf16;
        Policy {
            input: half,
            dlogits: half,
            label_grad: half,
            parts: half,
            output: half,
            ..Policy::fused_f32()
        }
    }

    /// Fused path in f64 throughout.
    pub const fn fused_f64() -> Self {
        Policy::uniform(Path::Fused, Precision::F64)
    }

    /// Chunked path, nothing rounded below f32.
    pub const fn chunked_f32() -> Self {
        Policy::uniform(Path::Chunked, Precision::F32)
    }

    /// Chunked path of a bf16 job: bf16 inputs, dlogits and outputs.
    pub const fn chunked_bf16() -> Self {
        Policy { path: Path::Chunked, ..Policy::fused_bf16() }
    }

    /// Whether the policy can run on f32 GEMMs: every sum is f32 in an order that is not declared.
    /// The scatter-add is a loop in token order there too, so it may have any precision below f64.
    pub fn is_fast(&self) -> bool {
        let Sums { logits, lse, dq, dk, label_scatter } = self.sums;
        let native = [logits, lse, dq, dk].iter().all(|&sum| sum == Sum::NATIVE);
        let scatter =
            label_scatter.order == Order::Native && label_scatter.precision != Precision::F64;
        native && self.product == Precision::F32 && (scatter || self.path != Path::Fused)
    }

    /// Whether the job keeps log p in few bits and makes p of it. A device does not emulate that.
    pub fn keeps_log_p(&self) -> bool {
        !self.log_p.keeps_f32()
    }

    /// The three precisions that logits are rounded to: as they leave their GEMM, after the bias
    /// and after each step of the transform, and at the end.
    pub(crate) fn logit_steps(&self) -> [Precision; 3] {
        let (declared, none) = (self.logits, Precision::F64);
        match self.logits_when {
            LogitRounding::Gemm => [declared, none, none],
            LogitRounding::Each => [declared, declared, declared],
            LogitRounding::End => [none, none, declared],
        }
    }

    /// For dq and for dk: what the part of a tile or chunk is rounded to before it is added, and
    /// what the sum is rounded to afterwards; `None` where one running sum continues from tile to
    /// tile.
    pub(crate) fn between(&self) -> [Option<(Precision, Precision)>; 2] {
        match self.path {
            Path::Plain => [None, None],
            Path::Fused => [Some((self.addend, self.tile_add)); 2],
            Path::Chunked => {
                let narrow = !self.tile_add.keeps_f32();
                let of_dq = narrow.then_some((self.addend, self.tile_add));
                [of_dq, Some((self.addend, self.chunk_add))]
            }
        }
    }

    /// The tokens that hit one row of k, in the order in which they are scattered, one list for
    /// each shard of the `tokens`.
    pub(in crate::kernels) fn scattered(
        &self,
        hits: &[(u32, u32)],
        tokens: usize,
    ) -> Vec<Vec<usize>> {
        let size = tokens.div_ceil(self.scatter_shards.max(1)).max(1);
        let shard = |hit: &(u32, u32)| hit.1 as usize / size;
        let token = |hit: &(u32, u32)| hit.1 as usize;
        let groups = hits.chunk_by(|a, b| shard(a) == shard(b));
        groups
            .map(|group| match self.scatter_order {
                Walk::Ascending => group.iter().map(token).collect(),
                Walk::Descending => group.iter().rev().map(token).collect(),
            })
            .collect()
    }

    /// Vocabulary tiles in the order in which they are computed.
    pub(crate) fn vocab_spans(&self, length: usize, size: usize) -> Vec<Range<usize>> {
        let mut all: Vec<_> = spans(length, size).collect();
        if self.path != Path::Plain && self.tile_order == Walk::Descending {
            all.reverse();
        }
        all
    }

    /// Token tiles or chunks in the order in which they are computed.
    pub(crate) fn token_spans(&self, length: usize, size: usize) -> Vec<Range<usize>> {
        let descending = self.path != Path::Plain && self.chunk_order == Walk::Descending;
        self.cut.spans(length, size, descending)
    }
}
