//! The head's options, judged together: what can be replayed, and what
//! contradicts what. An option that is not replayed yet is an error that names
//! it, never a silent default.

use backtape::head::{
    Denominator, HeadDeclaration, KLayout, Loss, LossReduction, MicrobatchReduction, Scope,
};

use super::roundings::DTYPE_KEYS;

/// A declaration that can be replayed.
#[derive(Clone, Debug)]
pub struct HeadOptions {
    /// Mean or sum over tokens.
    pub reduction: LossReduction,
    /// What a mean divides by.
    pub denominator: Denominator,
    /// Over which tokens the denominator counts.
    pub scope: Scope,
    /// How microbatch gradients combine.
    pub microbatch_reduction: MicrobatchReduction,
    /// Labels of this value take no part.
    pub ignore_label: Option<i64>,
    /// Columns of the logits from here on are padding.
    pub valid_vocab: Option<u64>,
    /// Upstream cotangent of the loss.
    pub cotangent: f64,
    /// True when the job forms the logits' gradient at once (`plain`).
    pub plain: bool,
    /// The declaration that this came from.
    pub declared: HeadDeclaration,
}

/// Why a declared head cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum HeadError {
    /// A known option at a value this version does not replay.
    #[error(
        "the head declares {option}={value}: this version of replay does not know how to replay it, so it gives no verdict; `replay verify` still proves the dump"
    )]
    NotReplayed {
        /// Its name in `tape.head`.
        option: &'static str,
        /// Its declared value.
        value: String,
    },
    /// Two options that cannot both hold.
    #[error("the head declares {one} and {other}: {why}")]
    Contradiction {
        /// The first option with its value.
        one: String,
        /// The second option with its value.
        other: String,
        /// What to do.
        why: &'static str,
    },
    /// A value that is none.
    #[error("the head declares {option}={value}: {wanted}")]
    Value {
        /// Its name in `tape.head`.
        option: &'static str,
        /// Its declared value.
        value: String,
        /// What is accepted.
        wanted: String,
    },
}

impl HeadOptions {
    /// Checks a declaration.
    pub fn new(declared: &HeadDeclaration) -> Result<HeadOptions, HeadError> {
        refuse_unreplayed(declared)?;
        refuse_nonsense(declared)?;
        Ok(HeadOptions {
            reduction: declared.reduction,
            denominator: declared.denominator,
            scope: declared.scope,
            microbatch_reduction: declared.microbatch_reduction,
            ignore_label: declared.ignore_label,
            valid_vocab: declared.valid_vocab,
            cotangent: declared.cotangent,
            plain: declared.path == "plain",
            declared: declared.clone(),
        })
    }
}

fn refuse_unreplayed(head: &HeadDeclaration) -> Result<(), HeadError> {
    let refuse = |option, value: String| Err(HeadError::NotReplayed { option, value });
    match head {
        h if h.loss != Loss::SoftmaxXent => refuse("loss", format!("{:?}", h.loss)),
        h if h.path != "plain" && h.path != "fused" => refuse("path", h.path.clone()),
        h if h.reduction == LossReduction::None => refuse("reduction", "none".into()),
        h if h.z_loss != 0.0 => refuse("z_loss", h.z_loss.to_string()),
        h if h.softcap.is_some() => refuse("softcap", format!("{:?}", h.softcap)),
        h if h.label_smoothing != 0.0 => refuse("label_smoothing", h.label_smoothing.to_string()),
        h if h.temperature != 1.0 => refuse("temperature", h.temperature.to_string()),
        h if h.k_layout != KLayout::Vd => refuse("k_layout", "dv".into()),
        h if !h.labels_shifted => refuse("labels_shifted", "False".into()),
        h if h.tied_embedding => refuse("tied_embedding", "True".into()),
        _ => Ok(()),
    }
}

fn refuse_nonsense(head: &HeadDeclaration) -> Result<(), HeadError> {
    if let Denominator::Number(n) = head.denominator {
        let wrong = |wanted: &str| HeadError::Value {
            option: "denominator",
            value: n.to_string(),
            wanted: wanted.into(),
        };
        if !(n.is_finite() && n != 0.0) {
            return Err(wrong("a finite number other than zero is needed"));
        }
        if head.reduction == LossReduction::Sum {
            return Err(HeadError::Contradiction {
                one: "reduction=sum".into(),
                other: format!("denominator={n}"),
                why: "a sum is not divided; declare reduction=\"mean\" or drop the denominator",
            });
        }
    }
    if !head.cotangent.is_finite() {
        let value = head.cotangent.to_string();
        let wanted = "a finite number is needed".into();
        return Err(HeadError::Value { option: "cotangent", value, wanted });
    }
    for (key, value) in &head.dtypes {
        if !DTYPE_KEYS.contains(&key.as_str()) || super::roundings::unit(value).is_none() {
            return Err(HeadError::Value {
                option: "dtypes",
                value: format!("{key}: {value}"),
                wanted: format!("known names are {DTYPE_KEYS:?}, of f64, f32, tf32, bf16 or f16"),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_is_not_replayed_is_named_not_ignored() {
        let softcap = HeadDeclaration { softcap: Some(30.0), ..HeadDeclaration::default() };
        assert!(HeadOptions::new(&softcap).unwrap_err().to_string().contains("softcap=Some(30.0)"));
        let smoothing = HeadDeclaration { label_smoothing: 0.1, ..HeadDeclaration::default() };
        assert!(HeadOptions::new(&smoothing).unwrap_err().to_string().contains("label_smoothing"));
    }

    #[test]
    fn a_contradiction_names_both_sides() {
        let head = HeadDeclaration {
            reduction: LossReduction::Sum,
            denominator: Denominator::Number(4.0),
            ..HeadDeclaration::default()
        };
        let text = HeadOptions::new(&head).unwrap_err().to_string();
        assert!(text.contains("reduction=sum") && text.contains("denominator=4"), "{text}");
    }

    #[test]
    fn a_misspelt_dtype_name_is_refused_with_the_names_that_are_known() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("label_skatter".into(), "f32".into());
        assert!(HeadOptions::new(&head).unwrap_err().to_string().contains("label_scatter"));
    }
}
