//! What a policy says: which path, what is rounded where, and how sums are taken.

use super::{Cut, Precision};
use crate::kernels::tiles::spans;
use std::ops::Range;

/// How dlogits come about and reach dq and dk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Forms `dlogits = g_lse p + g_label onehot` whole, then two GEMMs: dq sums over the
    /// whole vocabulary, dk over all tokens. Knows no tiles.
    Plain,
    /// Softmax part by GEMMs tile by tile, label part by gather and scatter-add, then
    /// their sum. lse is taken online over the vocabulary tiles.
    Fused,
    /// Plain over one chunk of tokens after the other (`Tiles::tokens`, the whole
    /// vocabulary): logits again in the backward, dk summed over chunks (MaxText, Liger).
    Chunked,
}

/// The order in which the addends of a sum meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Not known: what is fastest here. In the GEMM crate's order on the fast path, one
    /// after the other in the emulator.
    Native,
    /// One after the other, from 0.
    Sequential,
    /// Blocks of so many addends one after the other, then the blocks' sums likewise.
    Blocked(usize),
    /// Neighbours two by two, then their sums two by two, and so on.
    Pairwise,
    /// One after the other with a running compensation (Kahan 1965).
    Kahan,
    /// Kahan's sum as Neumaier (1974) repaired it: the compensation is added at the end.
    Neumaier,
}

/// How one sum is taken: every addition is rounded to `precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Of the accumulator. An addition is an f32 addition (f64 for `F64`), rounded to it.
    pub precision: Precision,
    /// Of the addends.
    pub order: Order,
}

impl Sum {
    /// f32 in no order of its own: what the fast path does.
    pub const NATIVE: Sum = Sum { precision: Precision::F32, order: Order::Native };

    /// An accumulator of some precision, in no order of its own.
    pub const fn of(precision: Precision) -> Self {
        Sum { precision, order: Order::Native }
    }
}

/// The five sums of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    /// Of a logit, over D.
    pub logits: Sum,
    /// Of the exponentials of a row (and of its logits, for smoothing), over V; on the
    /// fused path over the columns of a tile. exp and all that is done element by element
    /// is f64 where this is, else f32.
    pub lse: Sum,
    /// Of dq, over V; on the fused path over the columns of a tile.
    pub dq: Sum,
    /// Of dk and of the gradient of the bias, over T; but on the plain path over the
    /// tokens of a tile or chunk.
    pub dk: Sum,
    /// Fused: of the scatter-add, `acc = round(acc + g q)` over a row's tokens.
    pub label_scatter: Sum,
}

impl Sums {
    /// All of one kind.
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

/// When logits are rounded, where bias or transform follow their GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRounding {
    /// As they leave the GEMM, not again.
    Gemm,
    /// As they leave the GEMM, and after each option: an eager job of few bits.
    Each,
    /// After all options alone: kept wide, and cast at the end.
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
    /// What q and k are rounded to besides as operands of the gradients' GEMMs.
    pub operand: Precision,
    /// What each product of a GEMM is rounded to before it is added. (The fast path may
    /// fuse product and addition; in the emulator `F64` does.)
    pub product: Precision,
    /// What the logits are rounded to.
    pub logits: Precision,
    /// When they are.
    pub logits_when: LogitRounding,
    /// What `p = exp(logit - lse)` is rounded to before its cotangent multiplies it.
    pub p: Precision,
    /// What dlogits (fused: their softmax part alone) are rounded to before the GEMMs.
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
    /// Fused: tokens are cut into so many shards, each scatters from 0, and the shards'
    /// sums are added one after the other.
    pub scatter_shards: usize,
    /// Fused: precision in which the shards' sums are added. A reduction over devices may be
    /// promoted to f32, as XLA's are; what the total is stored in is that of the parts.
    pub scatter_join: Precision,
    /// Fused: which token a scatter starts at.
    pub scatter_order: Walk,
    /// How each sum is taken.
    pub sums: Sums,
    /// Fused: order of the vocabulary tiles.
    pub tile_order: Walk,
    /// Fused, chunked: order of the token tiles or chunks.
    pub chunk_order: Walk,
    /// Fused, chunked: how the tokens are cut into tiles or chunks beside their size. What
    /// lies out of order or in shards is for hypotheses: fast policies on a CPU alone know it.
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

    /// Whether f32 GEMMs can serve it: every sum f32 in no order of its own. The
    /// scatter-add is a loop there too, in token order, so it may be of any precision
    /// that f32 holds.
    pub fn is_fast(&self) -> bool {
        let Sums { logits, lse, dq, dk, label_scatter } = self.sums;
        let native = [logits, lse, dq, dk].iter().all(|&sum| sum == Sum::NATIVE);
        let scatter =
            label_scatter.order == Order::Native && label_scatter.precision != Precision::F64;
        native && self.product == Precision::F32 && (scatter || self.path != Path::Fused)
    }

    /// What logits are rounded to as they leave their GEMM, after the bias and after each step of
    /// the transform, and at the end.
    pub(crate) fn logit_steps(&self) -> [Precision; 3] {
        let (own, none) = (self.logits, Precision::F64);
        match self.logits_when {
            LogitRounding::Gemm => [own, none, none],
            LogitRounding::Each => [own, own, own],
            LogitRounding::End => [none, none, own],
        }
    }

    /// What the parts of dq and of dk are rounded to before they are added, and what their
    /// sums are after; `None` where a sum goes on from tile to tile.
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

    /// The hits of one row of k, in the order in which they are scattered, shard by shard
    /// of the `tokens`.
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

    /// Vocabulary tiles in the order of the walk.
    pub(crate) fn vocab_spans(&self, length: usize, size: usize) -> Vec<Range<usize>> {
        let mut all: Vec<_> = spans(length, size).collect();
        if self.path != Path::Plain && self.tile_order == Walk::Descending {
            all.reverse();
        }
        all
    }

    /// Token tiles or chunks in the order of the walk.
    pub(crate) fn token_spans(&self, length: usize, size: usize) -> Vec<Range<usize>> {
        let descending = self.path != Path::Plain && self.chunk_order == Walk::Descending;
        self.cut.spans(length, size, descending)
    }
}
