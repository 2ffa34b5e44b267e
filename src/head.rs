//! The declaration of the loss head, as the job made it with `tape.head`.
//!
//! Only what was declared is here: an absent dtype is *unknown*, not f32, and
//! the replayer treats it so. Whether the options fit together and fit the
//! tensors is judged by the replayer, which knows what it can replay.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Which loss, as `loss=` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Softmax cross-entropy on q and k.
    SoftmaxXent,
    /// Cross-entropy on materialised logits.
    XentLogits,
    /// Policy loss on log-probabilities.
    Grpo,
}

/// How token losses become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LossReduction {
    Mean,
    Sum,
    None,
}

/// What a mean divides by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "NumberOrText")]
pub enum Denominator {
    /// Tokens that are not ignored.
    Valid,
    /// All tokens.
    All,
    /// The sum of the token weights.
    Weights,
    /// A constant.
    #[serde(untagged)]
    Number(f64),
}

/// An option that is a number or a word, as it is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number or a word is needed")]
enum NumberOrText {
    Number(f64),
    Text(String),
}

impl TryFrom<NumberOrText> for Denominator {
    type Error = String;

    fn try_from(written: NumberOrText) -> Result<Denominator, String> {
        match written {
            NumberOrText::Number(number) => Ok(Denominator::Number(number)),
            NumberOrText::Text(text) => match text.as_str() {
                "valid" => Ok(Denominator::Valid),
                "all" => Ok(Denominator::All),
                "weights" => Ok(Denominator::Weights),
                _ => Err(format!(
                    "{text:?} is none: choose \"valid\" (tokens that are not ignored), \"all\" \
                     (every token), \"weights\" (their sum) or a number"
                )),
            },
        }
    }
}

/// A span with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All ranks and all microbatches of the step.
    Global,
    /// All ranks, one microbatch.
    Microbatch,
    /// One rank, one microbatch.
    Rank,
}

mod span;
pub use span::{Microbatches, Ranks, Sequences, Span};

/// How the microbatches of a step combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum MicrobatchReduction {
    Mean,
    Sum,
}

/// Tile sizes of a fused path, where the job declares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct DeclaredTiles {
    pub tokens: Option<u32>,
    pub vocab: Option<u32>,
}

/// Layout of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KLayout {
    /// `[V, D]`
    Vd,
    /// `[D, V]`
    Dv,
}

/// Formula of label smoothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SmoothingFormula {
    /// ε/V on every class.
    Uniform,
    /// Megatron-LM's, scaled by K/(K-1).
    Megatron,
}

/// How a KL divergence is estimated from log-probabilities of sampled tokens
/// (Schulman 2020, "Approximating KL divergence"), `d = ref - policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KlEstimator {
    /// `-d`
    K1,
    /// `d²/2`
    K2,
    /// `exp(d) - d - 1`
    #[default]
    K3,
}

/// What the ratio of policies is taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RatioLevel {
    /// Each token's own ratio (PPO, GRPO).
    #[default]
    Token,
    /// The geometric mean over the sequence (GSPO).
    Sequence,
}

/// How token losses of a policy loss are averaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossAverage {
    /// All tokens alike, over the head's denominator.
    #[default]
    Token,
    /// The mean of each sequence first, then the mean over sequences.
    Sequence,
}

/// Options of a policy loss, `loss="grpo"`:
/// `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_beta KL`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct GrpoDeclaration {
    pub clip_low: f64,
    pub clip_high: f64,
    /// Bound of `-r A` for negative advantages, as a ratio (dual-clip PPO).
    pub dual_clip: Option<f64>,
    pub kl_beta: f64,
    pub kl: KlEstimator,
    pub ratio: RatioLevel,
    pub average: LossAverage,
}

impl Default for GrpoDeclaration {
    fn default() -> Self {
        GrpoDeclaration {
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: None,
            kl_beta: 0.0,
            kl: KlEstimator::K3,
            ratio: RatioLevel::Token,
            average: LossAverage::Token,
        }
    }
}

/// A path of the user's own: what it rounds and how it sums. A TOML file of
/// `--policy` has the same fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyDeclaration {
    /// `plain`, `fused` or `chunked`: the order of the walk.
    pub base: Option<String>,
    /// Rounding point to dtype: `input`, `product`, `logits`, `p`, `dlogits`,
    /// `label_grad`, `parts`, `output`.
    pub round: BTreeMap<String, String>,
    /// Sum to how it is taken: `logits`, `lse`, `dq`, `dk`, `label_scatter`,
    /// `tiles` (partial results of tiles), `chunks` (of token chunks).
    pub sums: BTreeMap<String, SumDeclaration>,
    /// Tile sizes.
    pub tiles: DeclaredTiles,
}

/// How one sum is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumDeclaration {
    /// Dtype of the accumulator.
    pub dtype: String,
    /// `sequential`, `blocked`, `pairwise`, `kahan` or `neumaier`; absent: not known.
    #[serde(default)]
    pub order: Option<String>,
    /// Addends of a block, for `blocked`.
    #[serde(default)]
    pub block: Option<u32>,
}

/// What `tape.head` declares: the signature in DESIGN, and the options that heads
/// in use have beyond it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct HeadDeclaration {
    pub loss: Loss,
    /// `fused`, `plain` or a policy's name.
    pub path: String,
    pub reduction: LossReduction,
    pub denominator: Denominator,
    /// Over which tokens the denominator counts.
    pub scope: Span,
    pub microbatches: u32,
    pub microbatch_reduction: MicrobatchReduction,
    pub ignore_label: Option<i64>,
    pub z_loss: f64,
    /// Whether the recorded loss holds the z-loss; the gradients always do.
    pub z_loss_in_loss: bool,
    pub softcap: Option<f64>,
    pub label_smoothing: f64,
    pub smoothing_formula: SmoothingFormula,
    pub temperature: f64,
    /// Factor of the logits: the other way to say a temperature.
    pub logit_scale: f64,
    pub valid_vocab: Option<u64>,
    #[serde(with = "infinite")]
    pub mask_value: Option<f64>,
    pub k_layout: KLayout,
    pub labels_shifted: bool,
    pub tied_embedding: bool,
    pub cotangent: f64,
    pub dtypes: BTreeMap<String, String>,
    /// The format of `torch.autocast`, where the head ran under it: points that are not
    /// declared may be rounded to it, operands of products among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autocast: Option<String>,
    pub tiles: Option<DeclaredTiles>,
    /// Probabilities below it may be dropped from the backward.
    pub gradient_filter: Option<f64>,
    pub policy: Option<PolicyDeclaration>,
    pub grpo: Option<GrpoDeclaration>,
}

impl Default for HeadDeclaration {
    fn default() -> Self {
        HeadDeclaration {
            loss: Loss::SoftmaxXent,
            path: "fused".into(),
            reduction: LossReduction::Mean,
            denominator: Denominator::Valid,
            scope: Scope::Global.into(),
            microbatches: 1,
            microbatch_reduction: MicrobatchReduction::Mean,
            ignore_label: None,
            z_loss: 0.0,
            z_loss_in_loss: true,
            softcap: None,
            label_smoothing: 0.0,
            smoothing_formula: SmoothingFormula::Uniform,
            temperature: 1.0,
            logit_scale: 1.0,
            valid_vocab: None,
            mask_value: None,
            k_layout: KLayout::Vd,
            labels_shifted: true,
            tied_embedding: false,
            cotangent: 1.0,
            dtypes: BTreeMap::new(),
            autocast: None,
            tiles: None,
            gradient_filter: None,
            policy: None,
            grpo: None,
        }
    }
}

/// JSON has no infinities, and `-inf` is what most jobs mask logits with: it is
/// written as text. Without this serde_json would write `null`: no mask at all.
mod infinite {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::NumberOrText as Written;

    pub(super) fn serialize<S: Serializer>(value: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
        let written = value.map(|number| match number.is_infinite() {
            true => Written::Text(number.to_string()),
            false => Written::Number(number),
        });
        written.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        let number = |text: String| match text.as_str() {
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            _ => Err(de::Error::custom(format!("mask_value={text:?} is not a number"))),
        };
        match Option::<Written>::deserialize(from)? {
            None => Ok(None),
            Some(Written::Number(value)) => Ok(Some(value)),
            Some(Written::Text(text)) => number(text).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_denominator_survives_json() {
        for (text, value) in [
            ("\"valid\"", Denominator::Valid),
            ("\"weights\"", Denominator::Weights),
            ("1024.0", Denominator::Number(1024.0)),
        ] {
            assert_eq!(serde_json::from_str::<Denominator>(text).unwrap(), value);
            assert_eq!(serde_json::to_string(&value).unwrap(), text);
        }
        let refused = serde_json::from_str::<Denominator>("\"tokens\"").unwrap_err().to_string();
        let wanted = "\"tokens\" is none: choose \"valid\" (tokens that are not ignored), \"all\"";
        assert!(refused.starts_with(wanted), "{refused}");
        let refused = serde_json::from_str::<Denominator>("[1]").unwrap_err().to_string();
        assert!(refused.contains("a number or a word is needed"), "{refused}");
    }

    #[test]
    fn an_infinite_mask_value_survives_json() {
        for mask_value in [None, Some(f64::NEG_INFINITY), Some(-2.38e38)] {
            let head = HeadDeclaration { mask_value, ..HeadDeclaration::default() };
            let json = serde_json::to_string(&head).unwrap();
            assert_eq!(serde_json::from_str::<HeadDeclaration>(&json).unwrap(), head, "{json}");
        }
        assert!(serde_json::from_str::<HeadDeclaration>(r#"{"mask_value": "low"}"#).is_err());
    }

    #[test]
    fn a_misspelt_option_is_an_error_not_a_default() {
        let error = serde_json::from_str::<HeadDeclaration>(r#"{"redaction": "mean"}"#);
        assert!(error.unwrap_err().to_string().contains("redaction"));
    }
}
