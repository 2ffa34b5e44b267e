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
#[serde(rename_all = "lowercase")]
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

/// Over which tokens the denominator counts.
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

/// What `tape.head` declares. Field for field the signature in DESIGN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct HeadDeclaration {
    pub loss: Loss,
    /// `fused`, `plain` or a policy's name.
    pub path: String,
    pub reduction: LossReduction,
    pub denominator: Denominator,
    pub scope: Scope,
    pub microbatches: u32,
    pub microbatch_reduction: MicrobatchReduction,
    pub ignore_label: Option<i64>,
    pub z_loss: f64,
    pub softcap: Option<f64>,
    pub label_smoothing: f64,
    pub smoothing_formula: SmoothingFormula,
    pub temperature: f64,
    pub valid_vocab: Option<u64>,
    #[serde(with = "infinite")]
    pub mask_value: Option<f64>,
    pub k_layout: KLayout,
    pub labels_shifted: bool,
    pub tied_embedding: bool,
    pub cotangent: f64,
    pub dtypes: BTreeMap<String, String>,
    pub tiles: Option<DeclaredTiles>,
}

impl Default for HeadDeclaration {
    fn default() -> Self {
        HeadDeclaration {
            loss: Loss::SoftmaxXent,
            path: "fused".into(),
            reduction: LossReduction::Mean,
            denominator: Denominator::Valid,
            scope: Scope::Global,
            microbatches: 1,
            microbatch_reduction: MicrobatchReduction::Mean,
            ignore_label: None,
            z_loss: 0.0,
            softcap: None,
            label_smoothing: 0.0,
            smoothing_formula: SmoothingFormula::Uniform,
            temperature: 1.0,
            valid_vocab: None,
            mask_value: None,
            k_layout: KLayout::Vd,
            labels_shifted: true,
            tied_embedding: false,
            cotangent: 1.0,
            dtypes: BTreeMap::new(),
            tiles: None,
        }
    }
}

/// JSON has no infinities, and `-inf` is what most jobs mask logits with: it is
/// written as text. Without this serde_json would write `null`: no mask at all.
mod infinite {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
    }

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
        assert!(serde_json::from_str::<Denominator>("\"half\"").is_err());
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
