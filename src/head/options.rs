//! The options of `tape.head` in one table: type, default, allowed values and meaning of each. The
//! declaration, the check of each value, the pages in docs and the Python types are generated from
//! it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::path::{DeclaredTiles, PolicyDeclaration};
use super::values::*;
use super::written::{InPython, infinite};
use super::{Ranks, Scope, Source, Span};

/// An option of the declaration `Of`: what is needed to list, check and explain it.
pub struct HeadOption<Of: 'static> {
    /// As it is written in `tape.head`.
    pub name: &'static str,
    /// Its type in Python.
    pub python: &'static str,
    /// What it means: the text in docs/heads.md.
    pub meaning: &'static str,
    /// What its value must be, if the type alone does not say it.
    pub wanted: &'static str,
    is_good: fn(&Of) -> bool,
    shown: fn(&Of) -> String,
}

impl<Of: Default> HeadOption<Of> {
    /// Whether its value is allowed.
    pub fn is_good(&self, declared: &Of) -> bool {
        (self.is_good)(declared)
    }

    /// Its value as it is written in Python.
    pub fn shown(&self, declared: &Of) -> String {
        (self.shown)(declared)
    }

    /// The allowed words, in quotes, if the option allows only words.
    pub fn words(&self) -> Vec<&'static str> {
        let only = self.python.strip_prefix("Literal[").and_then(|rest| rest.strip_suffix(']'));
        let only = only.filter(|words| !words.contains(']'));
        only.map_or_else(Vec::new, |words| words.split(", ").collect())
    }

    /// Its default, as it is written in Python.
    pub fn default(&self) -> String {
        self.shown(&Of::default())
    }
}

/// Defines a declaration's struct, its defaults and its list of options from one table. An entry
/// consists of the meaning, serde attributes, `name: type = default`, the type in Python and, if
/// the type does not exclude all wrong values, a check of the value. What is said of the options
/// follows them after `beside`, and is in no list.
macro_rules! options {
    (
        $(#[$of:meta])*
        $declaration:ident, $all:ident:
        $(
            $meaning:literal
            $(#[$attribute:meta])*
            $name:ident: $type:ty = $default:expr, $python:literal
            $(, $wanted:literal if $good:expr)?;
        )*
        $(
            beside
            $(#[$said:meta])*
            $beside:ident: $its_type:ty;
        )*
    ) => {
        $(#[$of])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $declaration {
            $(
                #[doc = $meaning]
                $(#[$attribute])*
                pub $name: $type,
            )*
            $(
                $(#[$said])*
                pub $beside: $its_type,
            )*
        }

        impl Default for $declaration {
            fn default() -> Self {
                $declaration { $($name: $default,)* $($beside: Default::default(),)* }
            }
        }

        /// Its options, in the order of the documentation.
        pub static $all: &[HeadOption<$declaration>] = &[$(
            HeadOption {
                name: stringify!($name),
                python: $python,
                meaning: $meaning,
                wanted: concat!($($wanted)?),
                #[allow(unused_variables)]
                is_good: |declared| {
                    $(
                        let good: fn(&$type) -> bool = $good;
                        if !good(&declared.$name) {
                            return false;
                        }
                    )?
                    true
                },
                shown: |declared| declared.$name.in_python(),
            },
        )*];
    };
}

/// The value of an option, or of one of a policy loss (`grpo.kl_beta`), as it is written in Python.
pub fn written(head: &HeadDeclaration, option: &str) -> String {
    fn of<Of: Default>(all: &[HeadOption<Of>], name: &str, declared: &Of) -> Option<String> {
        all.iter().find(|option| option.name == name).map(|option| option.shown(declared))
    }
    let text = match (option.split_once('.'), &head.grpo) {
        (None, _) => of(OPTIONS, option, head),
        (Some((_, name)), Some(grpo)) => of(GRPO_OPTIONS, name, grpo),
        (Some(_), None) => None,
    };
    text.unwrap_or_else(|| "None".into())
}

fn is_positive(x: &f64) -> bool {
    x.is_finite() && *x > 0.0
}

fn is_size(x: &f64) -> bool {
    x.is_finite() && *x >= 0.0
}

fn is_share(x: &f64) -> bool {
    (0.0..1.0).contains(x)
}

options! {
    /// What `tape.head` declares.
    HeadDeclaration, OPTIONS:

    "Which loss: on q and k, on recorded logits, or a policy loss."
    loss: Loss = Loss::SoftmaxXent, r#"Literal["softmax_xent", "xent_logits", "grpo"]"#;

    "How the backward sums: `plain` (dlogits whole, as autograd of a plain cross-entropy does), \
     `fused`, `chunked`, or a name for what `policy` describes."
    path: String = "fused".into(), r#"Literal["fused", "plain", "chunked"] | str"#;

    "How the losses of tokens become one: their mean, or their sum, which nothing divides. \
     `none`: `loss` is `[T]`, w ℓ, 0 where ignored; record the upstream `cotangent` `[T]`."
    reduction: LossReduction = LossReduction::Mean, r#"Literal["mean", "sum", "none"]"#;

    "What a mean divides by: `valid` tokens, which are not ignored (of a policy loss: whose \
     weight is not 0), `all` of them, the sum of `weights`, or a number."
    denominator: Denominator = Denominator::Valid, r#"Literal["valid", "all", "weights"] | float"#,
    "a finite number other than zero" if |of| match of {
        Denominator::Number(number) => number.is_finite() && *number != 0.0,
        _ => true,
    };

    "Over which tokens the denominator counts: all ranks and microbatches (`global`), all ranks \
     of one `microbatch`, or one `rank`'s part of a microbatch; or ranks, microbatches and \
     sequences one by one, as {\"ranks\": \"one\"}."
    scope: Span = Scope::Global.into(),
    r#"Literal["global", "microbatch", "rank"] | dict[str, Any]"#,
    "a scope whose list of axes names one at least" if |of| of.ranks != Ranks::Axes(Vec::new());

    "How many microbatches the step has."
    microbatches: u32 = 1, "int", "at least 1" if |n| *n > 0;

    "Whether the microbatches' gradients are averaged or summed. A denominator that counts all \
     microbatches, as that of `scope=\"global\"` does, is divided by already: declare `sum` with \
     it."
    microbatch_reduction: MicrobatchReduction = MicrobatchReduction::Mean,
    r#"Literal["mean", "sum"]"#;

    "Tokens with this label take no part (PyTorch: -100)."
    ignore_label: Option<i64> = None, "int | None";

    "The factor of lse² in the loss."
    z_loss: f64 = 0.0, "float", "a number from 0 on" if is_size;

    "Whether the recorded loss holds the z-loss; the gradients always do."
    z_loss_in_loss: bool = true, "bool";

    "The bound of the logits: z = softcap · tanh(z1 / softcap)."
    softcap: Option<f64> = None, "float | None",
    "a positive number, or None" if |cap| cap.as_ref().is_none_or(is_positive);

    "The share of the target that is spread over the classes."
    label_smoothing: f64 = 0.0, "float", "a number from 0 to below 1" if is_share;

    "What is spread over the K classes: label_smoothing, or Megatron-LM's label_smoothing · \
     K/(K-1)."
    smoothing_formula: SmoothingFormula = SmoothingFormula::Uniform,
    r#"Literal["uniform", "megatron"]"#;

    "What the logits are divided by."
    temperature: f64 = 1.0, "float", "a positive number" if is_positive;

    "What the logits are multiplied by: the other way to say a temperature."
    logit_scale: f64 = 1.0, "float",
    "a finite number other than zero" if |scale| scale.is_finite() && *scale != 0.0;

    "How many columns of the logits, from the first on, are classes; None: all are. Where padding \
     takes part in the softmax, as in Megatron, leave it out."
    valid_vocab: Option<u64> = None, "int | None",
    "at least 1, or None" if |valid| *valid != Some(0);

    "What the logits of the columns beyond are set to; None and -inf: they have no part in the \
     softmax."
    #[serde(with = "infinite")]
    mask_value: Option<f64> = None, "float | None",
    "-inf or a finite number, or None" if |mask| mask.is_none_or(|mask| mask < f64::INFINITY);

    "`dv`: k and its gradients lie as `[D, V]`."
    k_layout: KLayout = KLayout::Vd, r#"Literal["vd", "dv"]"#;

    "True: the label of position t stands at t. False: position t uses the label and the weight \
     of t+1 of its sequence (the last of the leading dimensions); the last position takes no \
     part, and counts in no denominator but `all`."
    labels_shifted: bool = true, "bool";

    "True: dk holds the input embedding's part too: dk_lse and dk_label are judged, where \
     recorded, dk is not."
    tied_embedding: bool = false, "bool";

    "A number that the loss was multiplied by before its backward: the loss scale, or the number \
     of ranks under DDP."
    cotangent: f64 = 1.0, "float", "a finite number" if |of| of.is_finite();

    "The dtype of each point at which the job rounds: `input` (of the GEMMs), `product`, \
     `logits`, `lse`, `log_p`, `p`, `dlogits`, `label_grad`, `parts`, `accumulate`, \
     `label_scatter`, `reduce`, `output`, in f64, f32, tf32, bf16, f16, f8_e4m3 or f8_e5m2. docs/dtypes.md says \
     which, by framework."
    dtypes: BTreeMap<String, String> = BTreeMap::new(), "dict[str, Any]";

    "`bf16` or `f16`: the head ran under `torch.autocast`; found by itself where `tape.head` is \
     called inside it. Points that are not declared may be rounded to it, operands of products \
     among them."
    #[serde(skip_serializing_if = "Option::is_none")]
    autocast: Option<String> = None, r#"Literal["bf16", "f16"] | None"#,
    "bf16 or f16, or None" if |of| of.as_deref().is_none_or(|of| matches!(of, "bf16" | "f16"));

    "How large the tiles of a kernel are, where you know it: {\"tokens\": 256, \"vocab\": 512}."
    tiles: Option<DeclaredTiles> = None, "dict[str, int] | None",
    "sizes of at least 1, or None" if |tiles| tiles.is_none_or(DeclaredTiles::are_some);

    "Probabilities below it may have been dropped from the backward (Apple CCE)."
    gradient_filter: Option<f64> = None, "float | None",
    "a number from 0 to below 1, or None" if |of| of.as_ref().is_none_or(is_share);

    "A whole path, {\"base\": ..., \"round\": ..., \"sums\": ..., \"tiles\": ...}: what a file of \
     `replay --policy` has."
    policy: Option<PolicyDeclaration> = None, "dict[str, Any] | None";

    "The options of a policy loss, with loss=\"grpo\"; None: their defaults."
    grpo: Option<GrpoDeclaration> = None, "GrpoOptions | None";

    beside
    /// Where each item is from, by the name of its option or as `dtypes.logits`. What is not named
    /// is assumed; where nothing is named, the dump does not say it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sources: BTreeMap<String, Source>;

    beside
    /// What was declared by hand of options that were seen or measured, and that stand above as
    /// they were found.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    by_hand: BTreeMap<String, Value>;

    beside
    /// The batch that each microbatch is of, where several losses of one backward pass have the same
    /// labels, as with two passes through a model with dropout; empty: each is of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    batches: Vec<u32>;
}

options! {
    /// Options of a policy loss, `loss="grpo"`:
    /// `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_beta KL`.
    GrpoDeclaration, GRPO_OPTIONS:

    "The ratio is clipped to 1 - clip_low at least: 0.2 clips at 0.8."
    clip_low: f64 = 0.2, "float", "a number from 0 on" if is_size;

    "The ratio is clipped to 1 + clip_high at most: 0.2 clips at 1.2."
    clip_high: f64 = 0.2, "float", "a number from 0 on" if is_size;

    "The bound c of the ratio for negative advantages (dual-clip PPO): the first term of L is -c \
     A at most. The KL term has no bound."
    dual_clip: Option<f64> = None, "float | None",
    "a number above 1, or None" if |bound| bound.is_none_or(|c| c.is_finite() && c > 1.0);

    "The factor of the KL term."
    kl_beta: f64 = 0.0, "float", "a number from 0 on" if is_size;

    "How the KL term is estimated: k1 -d, k2 d²/2, k3 exp(d) - d - 1, with d = ref_logprobs - \
     logprobs (Schulman 2020)."
    kl: KlEstimator = KlEstimator::K3, r#"Literal["k3", "k1", "k2"]"#;

    "`sequence`: the ratio is the geometric mean over the sequence (GSPO)."
    ratio: RatioLevel = RatioLevel::Token, r#"Literal["token", "sequence"]"#;

    "`token`: over the head's denominator; `sequence`: the mean of each sequence first, then the \
     mean over sequences, and `denominator` has no part."
    average: LossAverage = LossAverage::Token, r#"Literal["token", "sequence"]"#;
}
