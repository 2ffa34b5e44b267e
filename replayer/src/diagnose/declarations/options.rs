//! The options that are tried in the place of the declared ones, each with values that the data
//! give.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::head::{
    Denominator, HeadDeclaration, LossReduction, MicrobatchReduction, SmoothingFormula, Span,
    written,
};
use backtape::role::Role;

use super::policy;
use super::{Candidate, Change, Kind, Weights, read};
use crate::diagnose::causes::{softcap_mismatch, temperature_mismatch};
use crate::diagnose::detectors::fitted_numbers::{Wanted, linear, rounded};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::search::Search;
use crate::diagnose::worlds::{ChangedOptions, DeclaredLse};
use crate::head::lowered::shown_below;
use crate::head::{HeadOptions, Stage};
use crate::kernels::round::Precision;
use crate::replay::world::World;

/// The candidates in the order in which they are tried: counts, factors, terms of the model, then
/// dtypes.
pub(super) fn candidates(search: &Search<'_>, evidence: &Evidence<'_>) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    let policy = evidence.step.is_policy_loss();
    counts(evidence, &mut candidates);
    cotangents(evidence, &mut candidates);
    if !policy {
        // A recorded lse that agrees has the declared vocabulary, softcap and temperature.
        if !evidence.agrees(Stage::Lse) {
            vocabulary(evidence, &mut candidates);
            transforms(evidence, &mut candidates);
        }
        labels(evidence, &mut candidates);
        terms(evidence, &mut candidates);
    }
    if policy {
        policy_loss(evidence, &mut candidates);
    }
    dtypes(search, evidence, &mut candidates);
    candidates
}

/// The options of a policy loss.
fn policy_loss(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let head = &evidence.step.options.declared;
    for policy_edit in policy::edits(head) {
        let cost_and_kind = (0, kind_of(evidence, policy_edit.option));
        let edit = |head: &mut HeadDeclaration| *head = policy_edit.of(head);
        candidates.extend(candidate(
            evidence,
            policy_edit.option,
            cost_and_kind,
            policy_edit.look,
            edit,
        ));
    }
    let declared = head.grpo.clone().unwrap_or_default();
    let world = |beta: f64| -> Box<dyn World> {
        let change = move |options: &mut HeadOptions| {
            options.grpo.iter_mut().for_each(|grpo| grpo.kl_beta = beta);
        };
        Box::new(ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 })
    };
    let stages = [&Stage::GRADIENTS[..], &[Stage::Loss]].concat();
    let from = (declared.kl_beta, declared.kl_beta.abs().max(0.01));
    for beta in linear(evidence, (&stages, Wanted::All), from, &world).unwrap_or_default() {
        let cost_and_kind = (cost(beta), kind_of(evidence, "grpo.kl_beta"));
        let edit = |head: &mut HeadDeclaration| head.grpo.get_or_insert_default().kl_beta = beta;
        candidates.extend(candidate(evidence, "grpo.kl_beta", cost_and_kind, policy::KL, edit));
    }
}

/// The candidate of a changed declaration; none if nothing changes, or the options are invalid. The
/// report prints the option before and after.
fn candidate(
    evidence: &Evidence<'_>,
    option: &'static str,
    (fitted, kind): (usize, Kind),
    look: &'static str,
    edit: impl Fn(&mut HeadDeclaration),
) -> Option<Candidate> {
    let declared = &evidence.step.options.declared;
    let mut other = declared.clone();
    edit(&mut other);
    let options = HeadOptions::new(&other).ok().filter(|_| other != *declared)?;
    let lowered = evidence.step.options.lowered;
    let change: Change = Box::new(move |changed: &mut HeadOptions| {
        *changed = HeadOptions { lowered, ..options.clone() };
    });
    let [declared, instead] = [declared, &other].map(|head| written(head, option));
    Some(Candidate { option, declared, instead, fitted, kind, look, change, weights: None })
}

/// How many fitted numbers a value counts as: 1 for a round one, which somebody probably wrote,
/// else 2.
fn cost(value: f64) -> usize {
    if rounded(value, 2) == value { 1 } else { 2 }
}

/// [`Kind::Unsaid`] where an option has its default value, else [`Kind::Said`].
fn kind_of(evidence: &Evidence<'_>, option: &str) -> Kind {
    let usual = written(&HeadDeclaration::default(), option);
    if written(&evidence.step.options.declared, option) == usual {
        Kind::Unsaid
    } else {
        Kind::Said
    }
}

/// What losses are divided by, and over which tokens that is counted. Only where each failing
/// comparison is off by one factor.
fn counts(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    if !evidence.failing.iter().all(|key| evidence.residuals[key].is_scaled()) {
        return;
    }
    let how = (0, Kind::Counted);
    let look =
        "what the loss's code divides by, and over which ranks and microbatches that is counted";
    let mut counted = vec![Denominator::Valid, Denominator::All];
    if evidence.step.tensors.values().any(|info| info.role == Some(Role::Weights)) {
        counted.push(Denominator::Weights);
    }
    for denominator in counted {
        let edit = |head: &mut HeadDeclaration| {
            (head.reduction, head.denominator) = (LossReduction::Mean, denominator);
        };
        candidates.extend(candidate(evidence, "denominator", how, look, edit));
    }
    for scope in Span::without_axes() {
        let edit = |head: &mut HeadDeclaration| head.scope = scope.clone();
        candidates.extend(candidate(evidence, "scope", how, look, edit));
    }
    let edit = |head: &mut HeadDeclaration| {
        (head.reduction, head.denominator) = (LossReduction::Sum, Denominator::Valid);
    };
    candidates.extend(candidate(evidence, "reduction", how, look, edit));
    if evidence.fails_any(&Stage::SUMS) {
        let look = "whether the sum over microbatches is divided by how many there are";
        for reduction in [MicrobatchReduction::Mean, MicrobatchReduction::Sum] {
            let edit = |head: &mut HeadDeclaration| head.microbatch_reduction = reduction;
            candidates.extend(candidate(evidence, "microbatch_reduction", how, look, edit));
        }
    }
    if evidence.fails(Stage::Loss)
        && let Some(number) = read::denominator(evidence)
    {
        let edit = |head: &mut HeadDeclaration| {
            (head.reduction, head.denominator) = (LossReduction::Mean, Denominator::Number(number));
        };
        candidates.extend(candidate(evidence, "denominator", (1, Kind::Counted), look, edit));
    }
}

/// A loss scale: one power of two on every gradient, and none on the loss.
fn cotangents(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    if evidence.fails_any(&Stage::FORWARD) {
        return;
    }
    let power = read::one_factor(evidence).and_then(read::power_of_two);
    let Some(power) = power.filter(|&power| power > 1.0) else { return };
    let look = "the loss scale (torch: scaler.get_scale() when the gradients were recorded), which gradients carry until they are unscaled";
    let edit = |head: &mut HeadDeclaration| head.cotangent *= power;
    candidates.extend(candidate(evidence, "cotangent", (0, Kind::Counted), look, edit));
}

/// Which columns are padding.
fn vocabulary(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let look = "the vocabulary's size in the tokenizer and in the model, and whether the head masks what is beyond it";
    let kind = kind_of(evidence, "valid_vocab");
    for valid in read::valid_vocabs(evidence).into_iter().map(Some).chain([None]) {
        let fitted = usize::from(valid.is_some());
        let edit = |head: &mut HeadDeclaration| {
            head.valid_vocab = valid.map(|valid| valid as u64);
            head.mask_value = head.mask_value.filter(|_| valid.is_some());
        };
        candidates.extend(candidate(evidence, "valid_vocab", (fitted, kind), look, edit));
    }
}

/// Softcap and temperature.
fn transforms(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let look = "the model's configuration (final_logit_softcapping or the like) and the line that makes the logits";
    let kind = kind_of(evidence, "softcap");
    let caps = softcap_mismatch::fitted(evidence);
    for cap in caps.into_iter().map(Some).chain([None]) {
        let edit = |head: &mut HeadDeclaration| head.softcap = cap;
        let fitted = cap.map_or(0, cost);
        candidates.extend(candidate(evidence, "softcap", (fitted, kind), look, edit));
    }
    let look = "what the logits are multiplied or divided by before the softmax";
    for scale in temperature_mismatch::fitted(evidence) {
        let temperature = rounded(1.0 / scale, 2);
        let kind = kind_of(evidence, "temperature");
        let edit = |head: &mut HeadDeclaration| {
            (head.temperature, head.logit_scale) = (temperature, 1.0);
        };
        if (temperature * scale - 1.0).abs() < 1e-3 {
            candidates.extend(candidate(
                evidence,
                "temperature",
                (cost(temperature), kind),
                look,
                edit,
            ));
        }
        let kind = kind_of(evidence, "logit_scale");
        let edit = |head: &mut HeadDeclaration| {
            (head.temperature, head.logit_scale) = (1.0, scale);
        };
        candidates.extend(candidate(evidence, "logit_scale", (cost(scale), kind), look, edit));
    }
    let edit = |head: &mut HeadDeclaration| (head.temperature, head.logit_scale) = (1.0, 1.0);
    let kind = kind_of(evidence, "temperature");
    candidates.extend(candidate(evidence, "temperature", (0, kind), look, edit));
}

/// Which tokens count, and with which labels.
fn labels(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let look = "which label the job gives to tokens that take no part (torch: ignore_index)";
    let kind = kind_of(evidence, "ignore_label");
    for label in read::ignored_labels(evidence).into_iter().map(Some).chain([None]) {
        let edit = |head: &mut HeadDeclaration| head.ignore_label = label;
        candidates.extend(candidate(evidence, "ignore_label", (0, kind), look, edit));
    }
    let look = "whether the recorded labels are those that the loss was called with, or the tokens before the shift by one";
    let edit = |head: &mut HeadDeclaration| head.labels_shifted = !head.labels_shifted;
    candidates.extend(candidate(evidence, "labels_shifted", (0, Kind::Counted), look, edit));
    let weighted = evidence.step.tensors.values().any(|info| info.role == Some(Role::Weights));
    if weighted {
        candidates.push(Candidate {
            option: "weights",
            declared: "the recorded ones".into(),
            instead: "none".into(),
            fitted: 0,
            kind: Kind::Counted,
            look: "whether the recorded weights are what the loss multiplies by",
            change: Box::new(|_| {}),
            weights: Some(Weights::Ones),
        });
    } else {
        masks(evidence, candidates);
    }
}

/// A mask that was not recorded: of tokens that get no gradient, where the loss lacks them too.
fn masks(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    if !evidence.fails(Stage::Loss) {
        return;
    }
    let Some(masks) = read::masks(evidence) else { return };
    let left_out: usize =
        masks.values().map(|mask| mask.iter().filter(|counts| !**counts).count()).sum();
    let masks = Arc::new(masks);
    let declared = &evidence.step.options.declared;
    for denominator in [declared.denominator, Denominator::Weights] {
        let mut other = declared.clone();
        other.denominator = denominator;
        let Ok(options) = HeadOptions::new(&other) else { continue };
        let lowered = evidence.step.options.lowered;
        let divided = match denominator {
            _ if other == *declared => "",
            _ => " and denominator=\"weights\"",
        };
        candidates.push(Candidate {
            option: "weights",
            declared: "none recorded".into(),
            instead: format!("0 for the {left_out} tokens that get no gradient{divided}"),
            fitted: 1,
            kind: Kind::Counted,
            look: "whether the loss is multiplied by a mask or by weights, and record them as weights",
            change: Box::new(move |changed: &mut HeadOptions| {
                *changed = HeadOptions { lowered, ..options.clone() };
            }),
            weights: Some(Weights::Mask(masks.clone())),
        });
    }
}

/// Terms whose factor loss and gradients are linear in: z-loss and label smoothing.
fn terms(evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let stages = [&Stage::GRADIENTS[..], &[Stage::Loss]].concat();
    let declared = &evidence.step.options.declared;
    let look = "whether the loss adds z_loss · lse² (auxiliary or \"z\" loss in the configuration), and with which factor";
    let kind = kind_of(evidence, "z_loss");
    let world = |z: f64| -> Box<dyn World> {
        let change = move |options: &mut HeadOptions| options.declared.z_loss = z;
        Box::new(ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 })
    };
    let from = (declared.z_loss, declared.z_loss.abs().max(1e-4));
    let fits = linear(evidence, (&stages, Wanted::All), from, &world).unwrap_or_default();
    for z in fits.into_iter().filter(|z| *z > 0.0) {
        let edit = |head: &mut HeadDeclaration| head.z_loss = z;
        candidates.extend(candidate(evidence, "z_loss", (cost(z), kind), look, edit));
    }
    let edit = |head: &mut HeadDeclaration| (head.z_loss, head.z_loss_in_loss) = (0.0, true);
    candidates.extend(candidate(evidence, "z_loss", (0, kind), look, edit));
    if declared.z_loss != 0.0 {
        let look = "whether the recorded loss is the one that the z-loss was added to";
        let edit = |head: &mut HeadDeclaration| head.z_loss_in_loss = !head.z_loss_in_loss;
        candidates.extend(candidate(evidence, "z_loss_in_loss", (0, Kind::Unsaid), look, edit));
    }
    let look = "the label smoothing that the loss is called with, and its formula";
    let kind = kind_of(evidence, "label_smoothing");
    let world = |s: f64| -> Box<dyn World> {
        let change = move |options: &mut HeadOptions| options.declared.label_smoothing = s;
        Box::new(ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 })
    };
    let from = (declared.label_smoothing, 0.05);
    let fits = linear(evidence, (&stages, Wanted::All), from, &world).unwrap_or_default();
    for s in fits.into_iter().filter(|s| *s > 0.0) {
        let edit = |head: &mut HeadDeclaration| head.label_smoothing = s;
        candidates.extend(candidate(evidence, "label_smoothing", (cost(s), kind), look, edit));
    }
    let edit = |head: &mut HeadDeclaration| head.label_smoothing = 0.0;
    candidates.extend(candidate(evidence, "label_smoothing", (0, kind), look, edit));
    if declared.label_smoothing != 0.0 {
        let other = match declared.smoothing_formula {
            SmoothingFormula::Uniform => SmoothingFormula::Megatron,
            SmoothingFormula::Megatron => SmoothingFormula::Uniform,
        };
        let edit = |head: &mut HeadDeclaration| head.smoothing_formula = other;
        candidates.extend(candidate(evidence, "smoothing_formula", (0, Kind::Unsaid), look, edit));
    }
}

/// Dtypes: each declared one left out, all of them left out, and autocast to a lower format for
/// those that are not declared.
fn dtypes(search: &Search<'_>, evidence: &Evidence<'_>, candidates: &mut Vec<Candidate>) {
    let declared = &evidence.step.options.declared.dtypes;
    let look = "which dtype the tensor has in the job (print(tensor.dtype) where it is made), and whether a product may run in TF32 or under autocast";
    let without = |left_out: BTreeSet<String>| -> Option<Candidate> {
        let shown = left_out.iter().any(|point| shown_below(evidence.step, point).is_some());
        let kind = if shown { Kind::Shown } else { Kind::Loosened };
        let edit = |head: &mut HeadDeclaration| {
            head.dtypes.retain(|point, _| !left_out.contains(point));
        };
        // Only the dtypes that would be left out are printed, not the whole option.
        let members = |written: &dyn Fn(&str) -> String| {
            let of_name = |point: &String| format!("{point:?}: {}", written(point));
            format!("{{{}}}", left_out.iter().map(of_name).collect::<Vec<String>>().join(", "))
        };
        let candidate_without = candidate(evidence, "dtypes", (0, kind), look, edit)?;
        Some(Candidate {
            declared: members(&|point| format!("{:?}", declared[point])),
            instead: members(&|_| "undeclared".into()),
            ..candidate_without
        })
    };
    let all: BTreeSet<String> = declared.keys().cloned().collect();
    // If leaving out one dtype explains the failure, leaving out all does; so all are tried first.
    let explains = |candidate: &Candidate| super::agrees(search, evidence, candidate).is_some();
    if let Some(none) = without(all.clone()).filter(explains) {
        let single = all.into_iter().filter_map(|point| without(BTreeSet::from([point])));
        let single: Vec<Candidate> = single.filter(explains).collect();
        if single.is_empty() {
            candidates.push(none)
        } else {
            candidates.extend(single)
        }
        return;
    }
    let Some(roundings) = evidence.roundings() else { return };
    let stored = roundings.narrowest.input.unit_roundoff();
    for (format, name) in [(Precision::Bf16, "bf16"), (Precision::F16, "f16")] {
        if !(format.unit_roundoff() > stored) {
            continue;
        }
        let edit = |head: &mut HeadDeclaration| head.autocast = Some(name.into());
        let with_autocast = candidate(evidence, "autocast", (0, Kind::Loosened), look, edit);
        candidates.extend(with_autocast.map(|candidate| Candidate {
            change: Box::new(move |options: &mut HeadOptions| options.lowered = Some(format)),
            ..candidate
        }));
    }
}
