//! What a job's head computes, in what it rounds, and what it records: every
//! option of the declaration, and the choices that no job declares.

use backtape::head::{
    Denominator, GrpoDeclaration, LossReduction, MicrobatchReduction, Scope, SmoothingFormula, Span,
};

use super::number::{Float, Order};

/// Which loss.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    Xent,
    /// Logits are the input; there is no q and no k.
    XentLogits,
    Grpo(GrpoDeclaration),
}

/// What the tokens weigh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Weights {
    /// None recorded.
    Absent,
    /// 1, 1/2, 0, 1.
    Mixed,
    /// 0 or 1, as a loss mask.
    Mask,
}

/// Where a job rounds. `F32` is no rounding: everything is computed in f32.
#[derive(Clone, Debug)]
pub(crate) struct Rounding {
    /// Logits, after the product and after each op on them.
    pub(crate) logits: Float,
    /// p, on the fused path: on the others it would be rounded before 1 is taken
    /// off it, which the catalogue lists as a bug (`label-prob-rounded-early`).
    pub(crate) p: Float,
    /// g p, on the fused path; the gradient of the logits on the others.
    pub(crate) dlogits: Float,
    /// g q and g k before they are added.
    pub(crate) label_grad: Float,
    /// The two parts before they are added.
    pub(crate) parts: Float,
    /// Accumulators: below f32 only where the job declares it.
    pub(crate) accumulate: Float,
    pub(crate) label_scatter: Float,
    pub(crate) reduce: Float,
}

impl Rounding {
    /// Every rounding point by its name in `tape.head(dtypes=...)`.
    pub(crate) fn named(&self) -> [(&'static str, Float); 8] {
        [
            ("logits", self.logits),
            ("p", self.p),
            ("dlogits", self.dlogits),
            ("label_grad", self.label_grad),
            ("parts", self.parts),
            ("accumulate", self.accumulate),
            ("label_scatter", self.label_scatter),
            ("reduce", self.reduce),
        ]
    }
}

/// What the data are like.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    /// Standard deviation of the logits of a token that is not confident.
    pub(crate) spread: f64,
    /// What k (or the logits, where they are the input) is multiplied by: 0 where the job
    /// starts from a head of zeros, as muP does.
    pub(crate) head: f64,
    /// Every nth token is confident: its label's logit lies this far above.
    pub(crate) confident: Option<(usize, f64)>,
    /// Token t is a copy of token t mod n.
    pub(crate) copies: Option<usize>,
    /// Share of tokens with the ignored label.
    pub(crate) ignored: f64,
    /// No token of this rank counts.
    pub(crate) silent_rank: Option<usize>,
    /// Old log-probabilities equal the policy's own, as in the first epoch.
    pub(crate) on_policy: bool,
    /// One advantage for each sequence, not for each token.
    pub(crate) advantage_of_sequence: bool,
}

/// What lies where, and in which dtype.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// q is `[B, S, D]` with this S.
    pub(crate) sequence: Option<usize>,
    /// Each rank has this many tokens (or sequences) fewer than the one before.
    pub(crate) uneven: usize,
    /// k is `[D, V]`.
    pub(crate) dv: bool,
    /// k and the reduced dk are cut over the ranks along the vocabulary.
    pub(crate) k_sharded: bool,
    /// k is recorded once a step, not with each microbatch.
    pub(crate) k_once: bool,
    pub(crate) input: Float,
    pub(crate) dq: Float,
    pub(crate) dk: Float,
    /// Of the recorded dk_lse and dk_label.
    pub(crate) dk_parts: Float,
    /// Of dk summed over microbatches or ranks.
    pub(crate) sums: Float,
    pub(crate) bias: Float,
}

/// How a job records dlogits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Shown {
    /// As its products take them.
    #[default]
    AsUsed,
    /// Before they are rounded for its products.
    Unrounded,
    /// Rounded to the input's dtype for the record, where its products may take more bits.
    Rounded(Float),
}

/// Tensors that a job may record beyond what it always does, and what they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
    pub(crate) logits: bool,
    pub(crate) dlogits: bool,
    /// How dlogits are recorded.
    pub(crate) shown: Shown,
    pub(crate) logprobs: bool,
    /// dk summed over microbatches, before the reduction over ranks.
    pub(crate) accumulated: bool,
    /// dk and its parts are recorded summed over microbatches alone.
    pub(crate) sums_alone: bool,
    /// dk is not recorded after the reduction over ranks.
    pub(crate) unreduced: bool,
    /// dq_lse and dq_label beside dk_lse and dk_label.
    pub(crate) dq_parts: bool,
    /// The reduction over ranks is a mean, and its addends say so.
    pub(crate) averaged: bool,
}

/// Everything about a job but its sizes.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) kind: Kind,
    pub(crate) layout: Layout,
    pub(crate) data: Data,
    pub(crate) rounding: Rounding,
    /// Names in `dtypes` that the job declares.
    pub(crate) declared: Vec<&'static str>,
    pub(crate) order: Order,
    /// Vocabulary columns of a tile of the fused path.
    pub(crate) tile: usize,
    /// Tokens of a chunk: the chunked path.
    pub(crate) chunk: Option<usize>,
    /// p is `exp(z - max) / sum`, not `exp(z - lse)`.
    pub(crate) divides: bool,
    pub(crate) reduction: LossReduction,
    pub(crate) denominator: Denominator,
    pub(crate) scope: Scope,
    /// What the scope's three names have no word for, where the job counts so. Axes are those
    /// inside a pod: two ranks that follow each other.
    pub(crate) span: Option<Span>,
    pub(crate) microbatch_reduction: MicrobatchReduction,
    /// Means over microbatches multiply by `1 / M`, a rounded number, and do not divide.
    pub(crate) reciprocal: bool,
    pub(crate) cotangent: f64,
    pub(crate) weights: Weights,
    pub(crate) ignore_label: Option<i64>,
    pub(crate) mask_value: Option<f64>,
    pub(crate) label_smoothing: f64,
    pub(crate) smoothing_formula: SmoothingFormula,
    pub(crate) z_loss: f64,
    pub(crate) z_loss_in_loss: bool,
    pub(crate) softcap: Option<f64>,
    pub(crate) temperature: f64,
    pub(crate) logit_scale: f64,
    pub(crate) bias: bool,
    pub(crate) labels_shifted: bool,
    pub(crate) tied_embedding: bool,
    pub(crate) extras: Extras,
}

impl Options {
    /// Factor of the raw logits.
    pub(super) fn scale(&self) -> f64 {
        self.logit_scale / self.temperature
    }

    /// Over which tokens the job counts.
    pub(crate) fn span(&self) -> Span {
        self.span.clone().unwrap_or(self.scope.into())
    }

    /// Weight that smoothing takes from the label, over `valid` classes.
    pub(super) fn smoothed(&self, valid: usize) -> f64 {
        let classes = valid as f64;
        match self.smoothing_formula {
            SmoothingFormula::Uniform => self.label_smoothing,
            SmoothingFormula::Megatron => self.label_smoothing * classes / (classes - 1.0),
        }
    }

    /// The policy loss's options, where the loss is one.
    pub(super) fn grpo(&self) -> Option<&GrpoDeclaration> {
        match &self.kind {
            Kind::Grpo(options) => Some(options),
            _ => None,
        }
    }
}

impl Default for Options {
    /// A bf16 job on f32 logits, as in most tests.
    fn default() -> Options {
        let (half, full) = (Float::Bf16, Float::F32);
        Options {
            kind: Kind::Xent,
            layout: Layout {
                sequence: None,
                uneven: 0,
                dv: false,
                k_sharded: false,
                k_once: false,
                input: half,
                dq: half,
                dk: full,
                dk_parts: full,
                sums: full,
                bias: full,
            },
            data: Data {
                spread: 2.0,
                head: 1.0,
                confident: Some((7, 23.0)),
                copies: None,
                ignored: 0.0,
                silent_rank: None,
                on_policy: false,
                advantage_of_sequence: false,
            },
            rounding: Rounding {
                logits: full,
                p: full,
                dlogits: half,
                label_grad: half,
                parts: full,
                accumulate: full,
                label_scatter: full,
                reduce: full,
            },
            declared: vec!["logits"],
            order: Order::Sequential,
            tile: 64,
            chunk: None,
            divides: false,
            reduction: LossReduction::Mean,
            denominator: Denominator::Weights,
            scope: Scope::Global,
            span: None,
            microbatch_reduction: MicrobatchReduction::Sum,
            reciprocal: false,
            cotangent: 1.75,
            weights: Weights::Mixed,
            ignore_label: None,
            mask_value: None,
            label_smoothing: 0.0,
            smoothing_formula: SmoothingFormula::Uniform,
            z_loss: 0.0,
            z_loss_in_loss: true,
            softcap: None,
            temperature: 1.0,
            logit_scale: 1.0,
            bias: false,
            labels_shifted: true,
            tied_embedding: false,
            extras: Extras::default(),
        }
    }
}
