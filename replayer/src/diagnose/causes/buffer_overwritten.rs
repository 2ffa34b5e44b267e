//! `buffer-overwritten`: a tensor was recorded, or read again, after another one had been written
//! over it: logits that hold gradients, a gradient that holds an activation, a q that is another
//! microbatch's by the time dk is computed from it.
//!
//! Detectors: a failing tensor equals another stage's reference, or an input, or its own gradient
//! times one factor; or everything after the logits was computed from q and k, and not from the
//! recorded logits; or dk is solved for the q that it was computed with, and that is another
//! microbatch's. Emulation: that tensor in its place, while what follows is computed from the right
//! one; and the backward of the overwritten logits, which is what a second backward computes.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;
use backtape::nan::largest;

use super::overwritten_logits::{LogitsContent, PLANE, SAME, Tokens, of_logits};
use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::other_q::{of_other_q, of_other_q_in_sums};
use crate::diagnose::detectors::single_tokens::{Direct, distance, energy, tokens};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::inputs::Misread;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::kernels::matrix::IGNORED;
use crate::replay::world::{Pass, World};

/// The catalogue's entry.
pub struct BufferOverwritten;

impl Cause for BufferOverwritten {
    fn id(&self) -> &str {
        "buffer-overwritten"
    }

    fn about(&self) -> &str {
        "another tensor had been written over the memory by the time it was recorded or read"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["unsloth 5002", "Megatron-LM 1594"]
    }

    fn advice(&self) -> &str {
        "record before the in-place kernel, and let nothing read the logits after their gradient was written over them"
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut hypotheses = of_logits(evidence);
        hypotheses.extend(of_gradients(evidence));
        hypotheses.extend(of_columns(evidence));
        hypotheses.extend(
            of_other_q(evidence)
                .or_else(|| of_other_q_in_sums(evidence))
                .map(|(world, said)| Hypothesis::new(world, vec![("tensor", said.join("; "))])),
        );
        hypotheses.extend(second_backward(evidence));
        hypotheses
    }
}

/// The hypothesis that a gradient's buffer holds an input, or another part of the same gradient.
fn of_gradients(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let stages = Stage::PRODUCTS;
    let mut world = ReplacedValues::default();
    let mut words: Vec<String> = Vec::new();
    for (key, _) in evidence.failing_of(&stages) {
        let Some(captured) = evidence.captured(key) else { continue };
        let Some((name, values)) = other_rows(evidence, key, &captured) else { continue };
        words.push(format!("{} holds {name}", key.stage));
        let rows = values.chunks(captured.columns.max(1)).map(<[f64]>::to_vec).enumerate();
        world = world.rows(key, rows);
    }
    words.sort();
    words.dedup();
    let is_any = !world.rows_of_key.is_empty();
    let hypothesis = || Hypothesis::new(world, vec![("tensor", words.join("; "))]);
    is_any.then(hypothesis).into_iter().collect()
}

/// The input or the other gradient that a captured gradient equals: its name and values.
fn other_rows(evidence: &Evidence<'_>, key: Key, captured: &Values) -> Option<(String, Vec<f64>)> {
    let inputs = evidence.inputs_of(key.microbatch)?;
    let head = inputs.head(evidence.step)?;
    let of_tokens = key.stage < Stage::DkLse;
    let (name, input) = if of_tokens { ("q", head.q) } else { ("k", head.k) };
    let mut all: Vec<(String, Vec<f64>)> = vec![(name.into(), input.to_f64())];
    let parts = match of_tokens {
        true => Stage::OF_Q,
        false => Stage::OF_K,
    };
    for stage in parts.into_iter().filter(|&stage| stage != key.stage) {
        let table = evidence.reference().stages.get(&Key { stage, ..key });
        let whole = table.filter(|table| table.len() == captured.rows());
        all.extend(
            whole.map(|table| {
                (stage.name().to_string(), table.values().flatten().copied().collect())
            }),
        );
    }
    all.into_iter().find(|(_, values)| {
        values.len() == captured.values.len()
            && energy(values) > 0.0
            && distance(values, &captured.values) <= SAME * SAME * energy(values)
    })
}

/// The hypothesis that lse or the label logits hold another quantity of one number per token.
fn of_columns(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut world = ReplacedValues { distrusts: Vec::new(), ..ReplacedValues::default() };
    let mut words: Vec<String> = Vec::new();
    for (key, _) in evidence.failing_of(&[Stage::Lse, Stage::LabelLogits]) {
        let reference = evidence.reference();
        let (Some(captured), Some(lse), Some(label), Some(inputs)) = (
            evidence.captured(key),
            reference.forward_lse.get(&key.microbatch),
            reference.label_logits.get(&key.microbatch),
            evidence.inputs_of(key.microbatch),
        ) else {
            continue;
        };
        let columns: [(&str, Vec<f64>); 5] = [
            ("lse", lse.clone()),
            ("label_logits", label.clone()),
            ("log-probabilities", label.iter().zip(lse).map(|(a, b)| a - b).collect()),
            ("nll", label.iter().zip(lse).map(|(a, b)| b - a).collect()),
            (
                "probabilities",
                label.iter().zip(lse).map(|(&z, &lse)| probability(z, lse)).collect(),
            ),
        ];
        let counts = |t: &usize| inputs.labels[*t] != IGNORED;
        let is = |values: &Vec<f64>| {
            let counted = (0..values.len()).filter(counts);
            let off = |t: usize| (captured.values[t] - values[t]).abs() / (1.0 + values[t].abs());
            counted.clone().count() >= 8 && largest(counted.map(off)) < 0.01
        };
        let Some((name, values)) = columns.into_iter().find(|(_, values)| is(values)) else {
            continue;
        };
        words.push(format!("{} holds {name}", key.stage));
        world.distrusts.push(key.stage);
        world = world.rows(key, values.into_iter().map(|x| vec![x]).enumerate());
    }
    words.sort();
    words.dedup();
    let is_any = !world.rows_of_key.is_empty();
    let hypothesis = || Hypothesis::new(world, vec![("tensor", words.join("; "))]);
    is_any.then(hypothesis).into_iter().collect()
}

/// The hypothesis of a second backward that reads logits over which the first one wrote their
/// gradient.
fn second_backward(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    // The gradients whose rows show it on a few tokens.
    let gradients = [Stage::Dlogits, Stage::Dq];
    let small = |inputs: &MicrobatchInputs| {
        let head = inputs.head(evidence.step);
        head.is_some_and(|head| head.given.is_none() && head.k.rows * inputs.tokens() <= PLANE)
    };
    if !evidence.fails_any(&gradients) || !evidence.inputs.iter().all(small) {
        return Vec::new();
    }
    let shown = |inputs: &MicrobatchInputs| {
        let all = tokens(evidence, inputs);
        let few: Vec<usize> = all.iter().copied().step_by(all.len().div_ceil(4).max(1)).collect();
        let sample = overwritten(evidence, inputs, &few);
        sample.is_some_and(|overwritten| shows(evidence, (inputs.microbatch, &few), &overwritten))
    };
    if !evidence.inputs.iter().any(shown) {
        return Vec::new();
    }
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let all: Vec<usize> = (0..inputs.tokens()).collect();
        Some((inputs.microbatch, overwritten(evidence, inputs, &all)?))
    };
    let Some(all) = evidence.inputs.iter().map(of_microbatch).collect::<Option<BTreeMap<_, _>>>()
    else {
        return Vec::new();
    };
    let parameters = vec![
        ("tensor", "logits".to_string()),
        ("holds", "their gradient, when a second backward reads them".to_string()),
    ];
    vec![Hypothesis::new(SecondBackward { tokens: all }, parameters)]
}

/// Logits of some tokens that hold their own gradient, before the head's transform, which gives
/// them back; and their log-sum-exp.
struct Overwritten {
    raw: Vec<f64>,
    lse: Vec<f64>,
}

fn overwritten(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    tokens: &[usize],
) -> Option<Overwritten> {
    let direct = Direct::new(evidence, inputs)?;
    let reference = evidence.reference();
    let lse = reference.lse.get(&inputs.microbatch)?;
    let g = reference.g.get(&inputs.microbatch)?;
    let options = &evidence.step.options;
    let transform = direct.head.transform;
    let (vocab, valid) = (direct.head.k.rows, inputs.valid_vocab);
    let mut overwritten =
        Overwritten { raw: vec![0.0; inputs.tokens() * vocab], lse: vec![0.0; inputs.tokens()] };
    for &t in tokens {
        let q = direct.q(Row::From(t));
        let upstream = options.cotangents(g[t], lse[t], valid);
        let held_values: Vec<f64> = (0..valid)
            .map(|v| {
                let logit = direct.logit_of(&q, v);
                LogitsContent::Gradient.of(logit, lse[t], upstream, inputs.labels[t] as usize == v)
            })
            .collect();
        overwritten.lse[t] = direct.lse(&held_values);
        for (v, &x) in held_values.iter().enumerate() {
            let bias = direct.head.bias.map_or(0.0, |bias| bias[v]);
            overwritten.raw[t * vocab + v] = transform.undone(x) - bias;
        }
    }
    Some(overwritten)
}

/// Whether the captured rows of dq or dlogits are what a second backward gives.
fn shows(
    evidence: &Evidence<'_>,
    (mb, tokens): (Option<Microbatch>, &[usize]),
    overwritten: &Overwritten,
) -> bool {
    let shown = || {
        let key = *evidence
            .failing
            .iter()
            .find(|key| matches!(key.stage, Stage::Dq | Stage::Dlogits) && key.microbatch == mb)?;
        let (inputs, captured) = (evidence.inputs_of(mb)?, evidence.captured(key)?);
        let direct = Direct::new(evidence, inputs)?;
        let cotangents = evidence.reference().cotangents.get(&mb)?;
        let vocab = direct.head.k.rows;
        let (mut off, mut size) = (0.0, 0.0);
        for &t in tokens {
            let token_cotangents = cotangents.get(&t)?;
            let mut row = vec![0.0; captured.columns];
            for v in 0..inputs.valid_vocab {
                let (z, slope) = direct.logit(overwritten.raw[t * vocab + v], v);
                let is_label = inputs.labels[t] as usize == v;
                let entry =
                    slope * token_cotangents.entry(probability(z, overwritten.lse[t]), is_label);
                match key.stage {
                    Stage::Dlogits => row[v] = entry,
                    _ => row
                        .iter_mut()
                        .zip(direct.k(Row::From(v)))
                        .for_each(|(x, k)| *x += entry * k),
                }
            }
            off += distance(&row, captured.row(t));
            size += energy(&row);
        }
        Some(size > 0.0 && off <= SAME * size)
    };
    shown().unwrap_or(false)
}

struct SecondBackward {
    tokens: Tokens<Overwritten>,
}

impl World for SecondBackward {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if let Some(overwritten) = self.tokens.get(&inputs.microbatch) {
            inputs.reads =
                Some(Misread { q: None, k: None, scores: Some(overwritten.raw.clone()) });
        }
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let overwritten = self.tokens.get(&inputs.microbatch).filter(|_| pass == Pass::Backward);
        if let Some(overwritten) = overwritten {
            lse.copy_from_slice(&overwritten.lse);
        }
    }
}
