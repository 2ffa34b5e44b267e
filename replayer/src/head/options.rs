//! The head's options, judged together: every value alone, and what contradicts
//! what. A head that cannot be meant is an error, never a silent default.

use backtape::head::{
    Denominator, GrpoDeclaration, HeadDeclaration, KLayout, Loss, LossReduction,
    MicrobatchReduction, Sequences, SmoothingFormula, Span,
};

use super::policy_file::DTYPES;
use super::roundings::DTYPE_KEYS;
use crate::kernels::matrix::Transform;
use crate::kernels::round::Precision;

/// How the logits' gradient reaches dq and dk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Forms dlogits, then two GEMMs.
    Plain,
    /// Vocabulary tiles; the label part by gather and scatter-add.
    Fused,
    /// Token chunks over the whole vocabulary, recomputed in the backward.
    Chunked,
}

/// A declaration that can be replayed.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadOptions {
    /// Which loss.
    pub loss: Loss,
    /// Mean or sum over tokens, or one loss a token.
    pub reduction: LossReduction,
    /// What a mean divides by.
    pub denominator: Denominator,
    /// Over which tokens the denominator counts.
    pub scope: Span,
    /// How microbatch gradients combine.
    pub microbatch_reduction: MicrobatchReduction,
    /// Labels of this value take no part.
    pub ignore_label: Option<i64>,
    /// Columns of the logits from here on are padding.
    pub valid_vocab: Option<u64>,
    /// Logit of the padded columns, where it is finite.
    pub mask: Option<f64>,
    /// Upstream cotangent of the loss.
    pub cotangent: f64,
    /// From raw logit to logit.
    pub transform: Transform,
    /// The walk of the declared path.
    pub walk: Walk,
    /// Policy loss, for `loss=grpo`.
    pub grpo: Option<GrpoDeclaration>,
    /// A format below the recorded one in which the job may have computed what it does not
    /// declare, by what the dump shows.
    pub lowered: Option<Precision>,
    /// The declaration that this came from.
    pub declared: HeadDeclaration,
}

/// Why a declared head cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum HeadError {
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
    /// A policy that cannot be.
    #[error(transparent)]
    Policy(#[from] super::policy_file::PolicyError),
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
    /// Checks a declaration: every option alone, then all of them together.
    pub fn new(declared: &HeadDeclaration) -> Result<HeadOptions, HeadError> {
        refuse_nonsense(declared)?;
        refuse_contradictions(declared)?;
        let scale = declared.logit_scale / declared.temperature;
        Ok(HeadOptions {
            loss: declared.loss,
            reduction: declared.reduction,
            denominator: declared.denominator,
            scope: declared.scope.clone(),
            microbatch_reduction: declared.microbatch_reduction,
            ignore_label: declared.ignore_label,
            valid_vocab: declared.valid_vocab,
            mask: declared.mask_value.filter(|mask| mask.is_finite()),
            cotangent: declared.cotangent,
            transform: Transform { scale, softcap: declared.softcap, ..Transform::NONE },
            walk: walk(declared)?,
            grpo: (declared.loss == Loss::Grpo).then(|| declared.grpo.clone().unwrap_or_default()),
            lowered: None,
            declared: declared.clone(),
        })
    }

    /// True when the job forms the logits' gradient at once.
    pub fn plain(&self) -> bool {
        self.walk != Walk::Fused || self.loss == Loss::XentLogits
    }

    /// True when the head starts from recorded logits and does nothing to them.
    pub fn takes_logits(&self) -> bool {
        self.loss == Loss::XentLogits && self.transform == Transform::NONE
    }

    /// Share of the target that smoothing spreads over `classes`: ε, or ε K/(K-1)
    /// in Megatron-LM's formula.
    pub fn smoothing(&self, classes: usize) -> f64 {
        let (epsilon, k) = (self.declared.label_smoothing, classes as f64);
        match self.declared.smoothing_formula {
            SmoothingFormula::Uniform => epsilon,
            SmoothingFormula::Megatron if classes > 1 => epsilon * k / (k - 1.0),
            SmoothingFormula::Megatron => 0.0,
        }
    }

    /// True when k and its gradients lie as `[D, V]`.
    pub fn transposed(&self) -> bool {
        self.declared.k_layout == KLayout::Dv
    }
}

/// The walk of `path`, or of the base of the policy that it names.
fn walk(head: &HeadDeclaration) -> Result<Walk, HeadError> {
    let named = |name: &str| match name {
        "plain" => Some(Walk::Plain),
        "fused" => Some(Walk::Fused),
        "chunked" => Some(Walk::Chunked),
        _ => None,
    };
    let base = head.policy.as_ref().and_then(|policy| policy.base.as_deref());
    let wanted = "plain, fused, chunked, or the name of a policy that policy={...} (or --policy FILE) describes";
    let unknown = |option, value: &str| HeadError::Value {
        option,
        value: value.into(),
        wanted: wanted.into(),
    };
    match (named(&head.path), base.map(|base| (base, named(base)))) {
        (Some(path), Some((base, Some(walk)))) if path != walk => Err(HeadError::Contradiction {
            one: format!("path={}", head.path),
            other: format!("policy={{base: {base}}}"),
            why: "one of them names another walk; declare the same in both",
        }),
        (_, Some((_, Some(walk)))) => Ok(walk),
        (_, Some((base, None))) => Err(unknown("policy.base", base)),
        (Some(walk), None) => Ok(walk),
        (None, None) if head.policy.is_some() => Ok(Walk::Plain),
        (None, None) => Err(unknown("path", &head.path)),
    }
}

fn refuse_nonsense(head: &HeadDeclaration) -> Result<(), HeadError> {
    let positive = |x: f64| x.is_finite() && x > 0.0;
    let filter = head.gradient_filter;
    let mask = head.mask_value;
    let number = match head.denominator {
        Denominator::Number(n) => n,
        _ => 1.0,
    };
    let checks: [(&'static str, f64, bool, &str); 10] = [
        (
            "denominator",
            number,
            number.is_finite() && number != 0.0,
            "a finite number other than zero",
        ),
        ("cotangent", head.cotangent, head.cotangent.is_finite(), "a finite number"),
        ("z_loss", head.z_loss, head.z_loss.is_finite(), "a finite number"),
        (
            "softcap",
            head.softcap.unwrap_or(1.0),
            positive(head.softcap.unwrap_or(1.0)),
            "a positive number, or None",
        ),
        ("temperature", head.temperature, positive(head.temperature), "a positive number"),
        (
            "logit_scale",
            head.logit_scale,
            head.logit_scale.is_finite() && head.logit_scale != 0.0,
            "a finite number other than zero",
        ),
        (
            "label_smoothing",
            head.label_smoothing,
            (0.0..1.0).contains(&head.label_smoothing),
            "a number from 0 to below 1",
        ),
        (
            "gradient_filter",
            filter.unwrap_or(0.0),
            (0.0..1.0).contains(&filter.unwrap_or(0.0)),
            "a number from 0 to below 1, or None",
        ),
        (
            "mask_value",
            mask.unwrap_or(0.0),
            !mask.unwrap_or(0.0).is_nan() && mask != Some(f64::INFINITY),
            "-inf or a finite number, or None",
        ),
        ("microbatches", f64::from(head.microbatches), head.microbatches > 0, "at least 1"),
    ];
    for (option, value, good, wanted) in checks {
        if !good {
            let (value, wanted) = (value.to_string(), format!("{wanted} is needed"));
            return Err(HeadError::Value { option, value, wanted });
        }
    }
    refuse_formats(head)
}

/// Names of formats, and of the points that have one.
fn refuse_formats(head: &HeadDeclaration) -> Result<(), HeadError> {
    if let Some(value) = head.autocast.as_ref().filter(|name| !["bf16", "f16"].contains(&&***name))
    {
        let (value, wanted) = (value.clone(), "bf16 or f16 is needed, or None".into());
        return Err(HeadError::Value { option: "autocast", value, wanted });
    }
    for (key, value) in &head.dtypes {
        let hint = crate::spelling::hint(key, DTYPE_KEYS);
        let wanted = if !DTYPE_KEYS.contains(&key.as_str()) {
            format!("no rounding point is called so{hint}; there are {}", DTYPE_KEYS.join(", "))
        } else if super::roundings::unit(value).is_none() {
            format!("no format is called so; there are {}", DTYPES.join(", "))
        } else {
            continue;
        };
        let value = format!("{{{key}: {value}}}");
        return Err(HeadError::Value { option: "dtypes", value, wanted });
    }
    Ok(())
}

/// Two options that cannot both hold, and what to do.
type Contradiction = (bool, String, String, &'static str);

/// Options that cannot both hold: silently preferring one would replay a head
/// that the job never had.
fn refuse_contradictions(head: &HeadDeclaration) -> Result<(), HeadError> {
    let mut found = of_terms(head).into_iter().chain(of_loss(head)).chain(of_sequences(head));
    match found.find(|(both, ..)| *both) {
        Some((_, one, other, why)) => Err(HeadError::Contradiction { one, other, why }),
        None => Ok(()),
    }
}

fn word(value: &dyn std::fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}

fn option(name: &str, value: f64) -> String {
    format!("{name}={value}")
}

/// Of reduction, factors and masks.
fn of_terms(head: &HeadDeclaration) -> Vec<Contradiction> {
    let divided = match head.denominator {
        Denominator::Valid => None,
        Denominator::Number(n) => Some(format!("denominator={n}")),
        ref other => Some(format!("denominator={}", word(other))),
    };
    let reduction = format!("reduction={}", word(&head.reduction));
    vec![
        (
            head.reduction == LossReduction::Sum && divided.is_some(),
            reduction.clone(),
            divided.clone().unwrap_or_default(),
            "a sum is not divided; declare reduction=\"mean\" or drop the denominator",
        ),
        (
            head.reduction == LossReduction::None && divided.is_some(),
            reduction.clone(),
            divided.unwrap_or_default(),
            "one loss a token is not divided; record the upstream cotangent instead",
        ),
        (
            head.temperature != 1.0 && head.logit_scale != 1.0,
            option("temperature", head.temperature),
            option("logit_scale", head.logit_scale),
            "they are two ways to say one factor; declare one of them",
        ),
        (
            head.mask_value.is_some() && head.valid_vocab.is_none(),
            option("mask_value", head.mask_value.unwrap_or_default()),
            "valid_vocab=none".into(),
            "nothing is masked; declare how many columns are valid, or drop the mask value",
        ),
    ]
}

/// Of a mean of sequence means with what else is declared.
fn of_sequences(head: &HeadDeclaration) -> Vec<Contradiction> {
    let each = head.scope.sequences == Sequences::Each;
    vec![
        (
            each && head.loss == Loss::Grpo,
            "loss=grpo".into(),
            "scope={sequences: each}".into(),
            "a policy loss says so itself; declare grpo={\"average\": \"sequence\"}",
        ),
        (
            each && head.reduction != LossReduction::Mean,
            format!("reduction={}", word(&head.reduction)),
            "scope={sequences: each}".into(),
            "only a mean can be one of sequences; declare reduction=\"mean\"",
        ),
        (
            each && matches!(head.denominator, Denominator::Number(_)),
            "scope={sequences: each}".into(),
            format!("denominator={}", word(&head.denominator)),
            "a number is no mean of sequences; declare what each sequence is divided by",
        ),
    ]
}

/// Of the kind of loss with what other kinds have.
fn of_loss(head: &HeadDeclaration) -> Vec<Contradiction> {
    let reduction = format!("reduction={}", word(&head.reduction));
    let loss = match head.loss {
        Loss::SoftmaxXent => "loss=softmax_xent",
        Loss::XentLogits => "loss=xent_logits",
        Loss::Grpo => "loss=grpo",
    };
    let policy = head.loss == Loss::Grpo;
    let logits = head.loss == Loss::XentLogits;
    vec![
        (
            head.grpo.is_some() && !policy,
            loss.into(),
            "grpo={...}".into(),
            "the options of a policy loss belong to loss=\"grpo\"",
        ),
        (
            policy && head.label_smoothing != 0.0,
            loss.into(),
            option("label_smoothing", head.label_smoothing),
            "a policy loss has no targets to smooth; drop one of them",
        ),
        (
            policy && head.z_loss != 0.0,
            loss.into(),
            option("z_loss", head.z_loss),
            "a policy loss is made of log-probabilities alone; drop one of them",
        ),
        (
            policy && head.reduction == LossReduction::None,
            loss.into(),
            reduction,
            "a policy loss is one number; declare \"mean\" or \"sum\"",
        ),
        (
            logits && head.k_layout == KLayout::Dv,
            loss.into(),
            "k_layout=dv".into(),
            "cross-entropy on materialised logits has no k; drop the layout",
        ),
        (
            logits && head.tied_embedding,
            loss.into(),
            "tied_embedding=true".into(),
            "cross-entropy on materialised logits has no k; drop the tie",
        ),
        (
            !head.z_loss_in_loss && head.z_loss == 0.0,
            "z_loss_in_loss=false".into(),
            "z_loss=0".into(),
            "there is no z-loss to leave out; declare its factor",
        ),
        (
            head.gradient_filter.is_some_and(|filter| filter > 0.0) && head.path == "plain",
            option("gradient_filter", head.gradient_filter.unwrap_or_default()),
            "path=plain".into(),
            "only a fused path filters tiles; declare path=\"fused\" or drop the filter",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::head::PolicyDeclaration;

    fn head() -> HeadDeclaration {
        HeadDeclaration::default()
    }

    #[test]
    fn an_impossible_value_is_named_with_what_is_needed() {
        for (head, named) in [
            (HeadDeclaration { softcap: Some(0.0), ..head() }, "softcap=0: a positive number"),
            (HeadDeclaration { label_smoothing: 1.5, ..head() }, "label_smoothing=1.5"),
            (HeadDeclaration { temperature: f64::NAN, ..head() }, "temperature=NaN"),
            (HeadDeclaration { mask_value: Some(f64::NAN), ..head() }, "mask_value=NaN"),
            (HeadDeclaration { path: "mine".into(), ..head() }, "path=mine: plain, fused, chunked"),
        ] {
            let text = HeadOptions::new(&head).unwrap_err().to_string();
            assert!(text.contains(named), "{text}");
        }
    }

    #[test]
    fn every_contradiction_names_both_options() {
        let grpo = || HeadDeclaration { loss: Loss::Grpo, ..head() };
        for (head, one, other) in [
            (
                HeadDeclaration { temperature: 0.7, logit_scale: 2.0, ..head() },
                "temperature=0.7",
                "logit_scale=2",
            ),
            (
                HeadDeclaration { mask_value: Some(-1e9), ..head() },
                "mask_value=-1000000000",
                "valid_vocab",
            ),
            (HeadDeclaration { label_smoothing: 0.1, ..grpo() }, "loss=grpo", "label_smoothing"),
            (HeadDeclaration { z_loss: 1e-4, ..grpo() }, "loss=grpo", "z_loss"),
            (
                HeadDeclaration { grpo: Some(GrpoDeclaration::default()), ..head() },
                "loss=softmax_xent",
                "grpo",
            ),
            (
                HeadDeclaration {
                    reduction: LossReduction::None,
                    denominator: Denominator::All,
                    ..head()
                },
                "reduction=none",
                "denominator=all",
            ),
            (
                HeadDeclaration {
                    policy: Some(PolicyDeclaration {
                        base: Some("plain".into()),
                        ..PolicyDeclaration::default()
                    }),
                    ..head()
                },
                "path=fused",
                "base: plain",
            ),
        ] {
            let text = HeadOptions::new(&head).unwrap_err().to_string();
            assert!(text.contains(one) && text.contains(other), "{text}");
        }
    }

    #[test]
    fn megatrons_smoothing_is_the_uniform_one_with_a_larger_share() {
        let of = |formula| HeadDeclaration {
            label_smoothing: 0.1,
            smoothing_formula: formula,
            ..head()
        };
        let share = |head: &HeadDeclaration| HeadOptions::new(head).unwrap().smoothing(5);
        assert_eq!(share(&of(SmoothingFormula::Uniform)), 0.1);
        assert!((share(&of(SmoothingFormula::Megatron)) - 0.125).abs() < 1e-15);
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
