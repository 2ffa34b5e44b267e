//! Checks the head's options: every value by itself, and which options contradict each other. A
//! head that cannot be replayed as declared is an error, never a silent default.

use backtape::head::{
    Denominator, GRPO_OPTIONS, GrpoDeclaration, HeadDeclaration, HeadOption, KLayout, Loss,
    LossReduction, MicrobatchReduction, OPTIONS, Sequences, SmoothingFormula, Span, written,
};

use super::policy_file::DTYPES;
use super::roundings::DTYPE_KEYS;
use crate::kernels::TokenCotangents;
use crate::kernels::formula::TokenLoss;
use crate::kernels::round::Precision;
use crate::kernels::transform::Transform;

/// How dlogits are computed and multiplied to dq and dk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Computes all dlogits, then two GEMMs.
    Plain,
    /// Computes vocabulary tiles, and the label part by gather and scatter-add.
    Fused,
    /// Computes token chunks over the whole vocabulary, and their logits again in the backward
    /// pass.
    Chunked,
}

/// A declaration that can be replayed.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadOptions {
    /// Which loss.
    pub loss: Loss,
    /// Mean or sum over tokens, or one loss for each token.
    pub reduction: LossReduction,
    /// What a mean divides by.
    pub denominator: Denominator,
    /// Over which tokens the denominator counts.
    pub scope: Span,
    /// How microbatch gradients combine.
    pub microbatch_reduction: MicrobatchReduction,
    /// Tokens with this label do not count.
    pub ignore_label: Option<i64>,
    /// Columns of the logits from here on are padding.
    pub valid_vocab: Option<u64>,
    /// Logit of the padded columns, where it is finite.
    pub mask: Option<f64>,
    /// Upstream cotangent of the loss.
    pub cotangent: f64,
    /// The transform from a raw logit to the logit: scale, then softcap.
    pub transform: Transform,
    /// How the declared path computes the gradients.
    pub walk: Walk,
    /// Policy loss, for `loss=grpo`.
    pub grpo: Option<GrpoDeclaration>,
    /// The format, narrower than the recorded one, in which the job seems to have computed what it
    /// does not declare, by signs in the dump.
    pub lowered: Option<Precision>,
    /// The declaration that this came from.
    pub declared: HeadDeclaration,
}

/// Why a declared head cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum HeadError {
    /// Two options that cannot both hold.
    #[error("the head declares {first} and {second}: {why}")]
    Contradiction {
        /// The first option with its value.
        first: String,
        /// The second option with its value.
        second: String,
        /// What to do about it.
        why: &'static str,
    },
    /// An invalid policy.
    #[error(transparent)]
    Policy(#[from] super::policy_file::PolicyError),
    /// A value that the option cannot have.
    #[error("the head declares {option}={value}: {wanted}")]
    Value {
        /// Its name in `tape.head`, that of a policy loss as `grpo.kl_beta`.
        option: String,
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
            transform: transform(declared),
            walk: walk(declared)?,
            grpo: (declared.loss == Loss::Grpo).then(|| declared.grpo.clone().unwrap_or_default()),
            lowered: None,
            declared: declared.clone(),
        })
    }

    /// True when the job computes whole dlogits, label part included.
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

    /// The loss of a token over so many classes, with the z-loss. What a job reports as its loss may
    /// lack the z-loss (`z_loss_in_loss`); its gradient does not.
    pub fn token_loss(&self, classes: usize) -> TokenLoss {
        TokenLoss { smoothing: self.smoothing(classes), z_loss: self.declared.z_loss }
    }

    /// The loss of a token as the job reports it.
    pub fn reported_loss(&self, classes: usize) -> TokenLoss {
        let z_loss = if self.declared.z_loss_in_loss { self.declared.z_loss } else { 0.0 };
        TokenLoss { z_loss, ..self.token_loss(classes) }
    }

    /// The cotangents of a token with this lse whose negative log-likelihood has the cotangent g,
    /// over so many classes K: `g (1 + 2 λ lse)`, `-g (1 - s)` and `-g s / K`, with the z-loss
    /// factor λ and the smoothing s. An ignored token, with g = 0, has none, even if its lse is
    /// NaN.
    pub fn cotangents(&self, g: f64, lse: f64, classes: usize) -> TokenCotangents {
        let loss = self.token_loss(classes);
        TokenCotangents {
            lse: if g == 0.0 { 0.0 } else { g * loss.by_lse(lse) },
            label: -g * (1.0 - loss.smoothing),
            smooth: -g * loss.smoothing / classes.max(1) as f64,
        }
    }

    /// True when the job stores k and its gradients as `[D, V]`.
    pub fn transposed(&self) -> bool {
        self.declared.k_layout == KLayout::Dv
    }
}

/// The declared transform from a raw logit to the logit.
pub(crate) fn transform(head: &HeadDeclaration) -> Transform {
    Transform::new(head.logit_scale / head.temperature, head.softcap)
}

/// How `path` computes the gradients, or the base of the policy that it names.
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
        option: String::from(option),
        value: value.into(),
        wanted: wanted.into(),
    };
    match (named(&head.path), base.map(|base| (base, named(base)))) {
        (Some(path), Some((base, Some(walk)))) if path != walk => Err(HeadError::Contradiction {
            first: format!("path={}", head.path),
            second: format!("policy={{base: {base}}}"),
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
    refuse_values("", OPTIONS, head)?;
    head.grpo.as_ref().map_or(Ok(()), |grpo| refuse_values("grpo.", GRPO_OPTIONS, grpo))?;
    refuse_formats(head)
}

/// Refuses a value that its option cannot have; `prefix` is put before the option's name.
fn refuse_values<Of: Default>(
    prefix: &str,
    options: &[HeadOption<Of>],
    declared: &Of,
) -> Result<(), HeadError> {
    let Some(bad) = options.iter().find(|option| !option.is_good(declared)) else { return Ok(()) };
    let option = format!("{prefix}{}", bad.name);
    let (value, wanted) = (bad.shown(declared), format!("{} is needed", bad.wanted));
    Err(HeadError::Value { option, value, wanted })
}

/// Refuses unknown names of formats and of rounding points.
fn refuse_formats(head: &HeadDeclaration) -> Result<(), HeadError> {
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
        return Err(HeadError::Value { option: "dtypes".into(), value, wanted });
    }
    Ok(())
}

/// Whether two options that cannot both hold are declared, their names, and what to do about it.
type Contradiction = (bool, [&'static str; 2], &'static str);

/// Refuses two options that cannot both hold: silently preferring one would replay a head that the
/// job never had.
fn refuse_contradictions(head: &HeadDeclaration) -> Result<(), HeadError> {
    let all = [of_terms(head), of_loss(head), of_sequences(head)].concat();
    let Some((_, names, why)) = all.into_iter().find(|(both, ..)| *both) else { return Ok(()) };
    let [first, second] = names.map(|name| format!("{name}={}", written(head, name)));
    Err(HeadError::Contradiction { first, second, why })
}

/// Contradictions of reduction, factors and masks.
fn of_terms(head: &HeadDeclaration) -> Vec<Contradiction> {
    let divided = head.denominator != Denominator::Valid;
    vec![
        (
            head.reduction == LossReduction::Sum && divided,
            ["reduction", "denominator"],
            "a sum is not divided; declare reduction=\"mean\" or drop the denominator",
        ),
        (
            head.reduction == LossReduction::None && divided,
            ["reduction", "denominator"],
            "one loss a token is not divided; record the upstream cotangent instead",
        ),
        (
            head.temperature != 1.0 && head.logit_scale != 1.0,
            ["temperature", "logit_scale"],
            "they are two ways to say one factor; declare one of them",
        ),
        (
            head.mask_value.is_some() && head.valid_vocab.is_none(),
            ["mask_value", "valid_vocab"],
            "nothing is masked; declare how many columns are valid, or drop the mask value",
        ),
        (
            !head.z_loss_in_loss && head.z_loss == 0.0,
            ["z_loss_in_loss", "z_loss"],
            "there is no z-loss to leave out; declare its factor",
        ),
        (
            head.gradient_filter.is_some_and(|filter| filter > 0.0) && head.path == "plain",
            ["gradient_filter", "path"],
            "only a fused path filters tiles; declare path=\"fused\" or drop the filter",
        ),
    ]
}

/// Contradictions of a mean of sequence means with other options.
fn of_sequences(head: &HeadDeclaration) -> Vec<Contradiction> {
    let each = head.scope.sequences == Sequences::Each;
    vec![
        (
            each && head.loss == Loss::Grpo,
            ["loss", "scope"],
            "a policy loss says so itself; declare grpo={\"average\": \"sequence\"}",
        ),
        (
            each && head.reduction != LossReduction::Mean,
            ["reduction", "scope"],
            "only a mean can be one of sequences; declare reduction=\"mean\"",
        ),
        (
            each && matches!(head.denominator, Denominator::Number(_)),
            ["scope", "denominator"],
            "a number is no mean of sequences; declare what each sequence is divided by",
        ),
    ]
}

/// Contradictions of the kind of loss with options of other kinds.
fn of_loss(head: &HeadDeclaration) -> Vec<Contradiction> {
    let policy = head.loss == Loss::Grpo;
    let logits = head.loss == Loss::XentLogits;
    vec![
        (
            head.grpo.is_some() && !policy,
            ["loss", "grpo"],
            "the options of a policy loss belong to loss=\"grpo\"",
        ),
        (
            policy && head.label_smoothing != 0.0,
            ["loss", "label_smoothing"],
            "a policy loss has no targets to smooth; drop one of them",
        ),
        (
            policy && head.z_loss != 0.0,
            ["loss", "z_loss"],
            "a policy loss is made of log-probabilities alone; drop one of them",
        ),
        (
            policy && head.reduction == LossReduction::None,
            ["loss", "reduction"],
            "a policy loss is one number; declare \"mean\" or \"sum\"",
        ),
        (
            logits && head.k_layout == KLayout::Dv,
            ["loss", "k_layout"],
            "cross-entropy on materialised logits has no k; drop the layout",
        ),
        (
            logits && head.tied_embedding,
            ["loss", "tied_embedding"],
            "cross-entropy on materialised logits has no k; drop the tie",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::head::{DeclaredTiles, PolicyDeclaration};

    fn head() -> HeadDeclaration {
        HeadDeclaration::default()
    }

    #[test]
    fn an_impossible_value_is_named_with_what_is_needed() {
        for (head, named) in [
            (HeadDeclaration { softcap: Some(0.0), ..head() }, "softcap=0.0: a positive number"),
            (HeadDeclaration { label_smoothing: 1.5, ..head() }, "label_smoothing=1.5"),
            (HeadDeclaration { temperature: f64::NAN, ..head() }, "temperature=nan"),
            (HeadDeclaration { mask_value: Some(f64::NAN), ..head() }, "mask_value=nan"),
            (HeadDeclaration { path: "mine".into(), ..head() }, "path=mine: plain, fused, chunked"),
            (HeadDeclaration { valid_vocab: Some(0), ..head() }, "valid_vocab=0: at least 1"),
            (HeadDeclaration { z_loss: -1e-4, ..head() }, "z_loss=-0.0001: a number from 0 on"),
            (
                HeadDeclaration {
                    tiles: Some(DeclaredTiles { tokens: Some(0), vocab: None }),
                    ..head()
                },
                "tiles={\"tokens\":0,\"vocab\":null}: sizes of at least 1",
            ),
            (
                HeadDeclaration {
                    loss: Loss::Grpo,
                    grpo: Some(GrpoDeclaration { clip_low: -0.2, ..GrpoDeclaration::default() }),
                    ..head()
                },
                "grpo.clip_low=-0.2: a number from 0 on",
            ),
            (
                HeadDeclaration {
                    loss: Loss::Grpo,
                    grpo: Some(GrpoDeclaration {
                        dual_clip: Some(0.5),
                        ..GrpoDeclaration::default()
                    }),
                    ..head()
                },
                "grpo.dual_clip=0.5: a number above 1",
            ),
        ] {
            let text = HeadOptions::new(&head).unwrap_err().to_string();
            assert!(text.contains(named), "{text}");
        }
    }

    #[test]
    fn every_contradiction_names_both_options() {
        let grpo = || HeadDeclaration { loss: Loss::Grpo, ..head() };
        for (head, first, other) in [
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
            (
                HeadDeclaration { label_smoothing: 0.1, ..grpo() },
                "loss=\"grpo\"",
                "label_smoothing",
            ),
            (HeadDeclaration { z_loss: 1e-4, ..grpo() }, "loss=\"grpo\"", "z_loss"),
            (
                HeadDeclaration { grpo: Some(GrpoDeclaration::default()), ..head() },
                "loss=\"softmax_xent\"",
                "grpo",
            ),
            (
                HeadDeclaration {
                    reduction: LossReduction::None,
                    denominator: Denominator::All,
                    ..head()
                },
                "reduction=\"none\"",
                "denominator=\"all\"",
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
            assert!(text.contains(first) && text.contains(other), "{text}");
        }
    }

    #[test]
    fn megatrons_smoothing_is_the_uniform_one_with_a_larger_share() {
        let smoothed = |formula| HeadDeclaration {
            label_smoothing: 0.1,
            smoothing_formula: formula,
            ..head()
        };
        let share = |head: &HeadDeclaration| HeadOptions::new(head).unwrap().smoothing(5);
        assert_eq!(share(&smoothed(SmoothingFormula::Uniform)), 0.1);
        assert!((share(&smoothed(SmoothingFormula::Megatron)) - 0.125).abs() < 1e-15);
    }

    #[test]
    fn a_contradiction_names_both_sides() {
        let head = HeadDeclaration {
            reduction: LossReduction::Sum,
            denominator: Denominator::Number(4.0),
            ..HeadDeclaration::default()
        };
        let text = HeadOptions::new(&head).unwrap_err().to_string();
        assert!(text.contains("reduction=\"sum\"") && text.contains("denominator=4"), "{text}");
    }

    #[test]
    fn a_misspelt_dtype_name_is_refused_with_the_names_that_are_known() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("label_skatter".into(), "f32".into());
        assert!(HeadOptions::new(&head).unwrap_err().to_string().contains("label_scatter"));
    }
}
