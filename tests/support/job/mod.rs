//! A training job's loss head, small enough for a test: what several ranks would
//! dump of one step, with every option that a head can declare, and with faults
//! that can be planted. It stands in for somebody's training code, so it shares
//! no code with the replayer.
//!
//! Sizes are uneven on purpose: no dimension is a multiple of a tile, labels
//! repeat as in text, some tokens are confident, the cotangent is not one.
//!
//! A clean job rounds where real frameworks do and sums in the orders that they
//! do. Its accumulators are f32 unless it declares otherwise.

mod draw;
mod inputs;
mod math;
pub(crate) mod number;
pub(crate) mod options;
mod policy;
mod record;
mod step;
mod tests;

use backtape::head::{DeclaredTiles, HeadDeclaration, KLayout, Loss};
use backtape::placement::Reduction;

use super::dump::Shard;
use inputs::Inputs;
pub(crate) use number::Float;
use options::{Kind, Options};
use step::Step;

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
    /// Some of what is recorded is scaled; what is summed from it follows.
    Scaled(What, f32),
    /// dk of one rank's one microbatch is scaled.
    OneScaled(f32),
    /// The sum over microbatches does not hold each once.
    Window(Window),
    /// A mean over no tokens is 0/0.
    Unguarded,
    /// The bias is added so many times.
    Biased(f32),
    /// dbias is without the label's part.
    DbiasUnlabelled,
    /// Something is rounded to a format that the job does not declare.
    Narrow(Narrow, Float),
    /// Blocks of so many tokens and classes in which no `|p - onehot|` reaches the first
    /// number are left out of dlogits.
    Filter(f32, [usize; 2]),
}

/// What is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Narrow {
    /// dk's sum over chunks of the declared size, and each chunk's part.
    Chunks,
    /// dq's sum over vocabulary tiles and dk's over tiles of 32 tokens, and their parts.
    Tiles,
    /// dk's sum over microbatches.
    Microbatches,
    /// p before 1 is taken off it.
    EarlyP,
    /// lse between forward and backward.
    KeptLse,
    /// The backward's logits.
    BackwardLogits,
    /// The logits that lse and the label's logit are taken from.
    ForwardLogits,
    /// lse and the label's logit, and their difference, for the loss.
    Loss,
    /// Operands of every product.
    Gemm,
    /// Operands of the backward's products.
    GemmBackward,
    /// dlogits, in products.
    Dlogits,
}

/// What a fault scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum What {
    /// dq and its parts.
    Dq,
    /// dk, its parts and dbias.
    Dk,
    /// dq, dk, their parts, dbias and dlogits.
    Gradients,
    /// The same and the loss.
    LossToo,
    Dbias,
    /// dk summed over ranks.
    Reduced,
}

/// Weights of a sum over microbatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Window {
    /// The last alone.
    Last,
    /// All but the first.
    NotFirst,
    /// Doubled before another is added.
    Doubled,
    /// The first is added with this weight: no window at all.
    First(f32),
}

/// Sizes, seed and options of a job: its `Debug` is enough to build it again.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) microbatches: usize,
    /// Of the first rank, in one microbatch.
    pub(crate) tokens: usize,
    pub(crate) vocab: usize,
    pub(crate) valid: usize,
    pub(crate) width: usize,
    /// The fused path, unless the options say chunked.
    pub(crate) fused: bool,
    pub(crate) fault: Fault,
    pub(crate) options: Options,
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
            options: Options::default(),
        }
    }
}

impl Job {
    /// One job in four averages its ranks. By the seed, so that a known seed draws what it did.
    pub(crate) fn draw_mean(&mut self) {
        let extras = &mut self.options.extras;
        extras.averaged = self.seed % 4 == 1 && (extras.accumulated || !extras.sums_alone);
    }

    /// What its addends make up.
    pub(crate) fn reduction(&self) -> Reduction {
        if self.options.extras.averaged { Reduction::Mean } else { Reduction::Sum }
    }

    /// A clean job with everything drawn from the seed.
    pub(crate) fn random(seed: u64) -> Job {
        draw::job(seed)
    }

    /// The head as such a job declares it.
    pub(crate) fn head(&self) -> HeadDeclaration {
        let options = &self.options;
        let named = options.rounding.named();
        let declared = named.into_iter().filter(|(name, _)| options.declared.contains(name));
        HeadDeclaration {
            loss: match options.kind {
                Kind::Xent => Loss::SoftmaxXent,
                Kind::XentLogits => Loss::XentLogits,
                Kind::Grpo(_) => Loss::Grpo,
            },
            path: self.path().into(),
            reduction: options.reduction,
            denominator: options.denominator,
            scope: options.span(),
            microbatches: self.microbatches as u32,
            microbatch_reduction: options.microbatch_reduction,
            ignore_label: options.ignore_label,
            z_loss: options.z_loss,
            z_loss_in_loss: options.z_loss_in_loss,
            softcap: options.softcap,
            label_smoothing: options.label_smoothing,
            smoothing_formula: options.smoothing_formula,
            temperature: options.temperature,
            logit_scale: options.logit_scale,
            valid_vocab: Some(self.valid as u64).filter(|_| self.valid < self.vocab),
            mask_value: options.mask_value,
            k_layout: if options.layout.dv { KLayout::Dv } else { KLayout::Vd },
            labels_shifted: options.labels_shifted,
            tied_embedding: options.tied_embedding,
            cotangent: options.cotangent,
            dtypes: declared.map(|(name, to)| (name.into(), to.name().into())).collect(),
            tiles: self.tiles(),
            grpo: options.grpo().cloned(),
            ..HeadDeclaration::default()
        }
    }

    fn path(&self) -> &'static str {
        match (self.options.chunk, self.fused) {
            (Some(_), _) => "chunked",
            (None, true) => "fused",
            (None, false) => "plain",
        }
    }

    /// Whether dlogits are never formed.
    fn fused(&self) -> bool {
        self.path() == "fused"
    }

    fn tiles(&self) -> Option<DeclaredTiles> {
        let chunk = self.options.chunk.map(|tokens| tokens as u32);
        let tile = Some(self.options.tile as u32).filter(|_| self.fused());
        let tiles = DeclaredTiles { tokens: chunk, vocab: tile };
        (tiles != DeclaredTiles::default()).then_some(tiles)
    }

    /// Dtype in which the label scatter accumulates.
    fn scatter(&self) -> Float {
        match self.fault {
            Fault::LabelScatterBf16 => Float::Bf16,
            _ => self.options.rounding.label_scatter,
        }
    }

    /// What the fault rounds this to, if it does.
    fn narrow(&self, what: Narrow) -> Option<Float> {
        match self.fault {
            Fault::Narrow(of, to) if of == what => Some(to),
            _ => None,
        }
    }

    /// Tokens of one microbatch on a rank.
    fn rows(&self, rank: usize) -> usize {
        let length = self.options.layout.sequence.unwrap_or(1);
        let most = (self.tokens / length).max(1);
        let fewer = (rank * self.options.layout.uneven).min(most / 2);
        (most - fewer) * length
    }

    /// Every shard that the ranks record.
    pub(crate) fn shards(&self) -> Vec<Shard> {
        let inputs = Inputs::draw(self);
        record::shards(self, &inputs, &Step::<f32>::run(self, &inputs))
    }
}
