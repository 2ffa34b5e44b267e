//! The types of the values of a head's options.

use serde::{Deserialize, Serialize};

/// The loss function: the value of `loss=`.
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

/// How the losses of the tokens are reduced to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LossReduction {
    Mean,
    Sum,
    None,
}

/// By what a mean loss is divided.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "NumberOrText")]
pub enum Denominator {
    /// The number of tokens that are not ignored.
    Valid,
    /// The number of all tokens.
    All,
    /// The sum of the token weights.
    Weights,
    /// A constant.
    #[serde(untagged)]
    Number(f64),
}

/// A value that is either a number or a word.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number or a word is needed")]
pub(super) enum NumberOrText {
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

/// How the losses of a step's microbatches combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum MicrobatchReduction {
    Mean,
    Sum,
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
    /// Megatron-LM's formula, where ε is scaled by K/(K-1).
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

/// Over what the ratio of new to old policy is computed.
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
    /// The sum over all tokens, divided by the head's denominator.
    #[default]
    Token,
    /// The mean of each sequence first, then the mean over sequences.
    Sequence,
}
