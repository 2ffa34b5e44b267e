//! `token-weights`: the backward takes tokens with other weights than declared: squared, their
//! mean for each of them, or some tokens not at all or more than once.
//!
//! Detectors: a row of dq is one token's gradient, so its own weight is solved for. Where every
//! row is what it should be times such a number, the numbers are held against what the dump
//! knows of the tokens. Numbers that follow no rule are believed where dk, which they were not
//! solved from, is what they make it.
//! Emulation: upstream gradients by the rule that was found, in both gradients.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::against::Part;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::direct::{dot, energy};
use crate::diagnose::detectors::plane::Plane;
use crate::diagnose::detectors::solve::runs;
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct TokenWeights;

/// How near to a rule each token's number must be.
const NEAR: f64 = 0.05;
/// Share of the error that rows times a number each may leave.
const LEFT: f64 = 0.02;
/// Runs of tokens that are told in words.
const TOLD: usize = 6;
/// Numbers that follow no rule, in words; and how many fitted ones they count as.
const OWN: &str = "with a number of its own that the dump does not explain";
const RAW: usize = 8;

impl Cause for TokenWeights {
    fn id(&self) -> &str {
        "token-weights"
    }

    fn about(&self) -> &str {
        "the backward takes tokens with other weights than declared"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "weights that a loss and its backward both multiply by",
            "a cotangent per token of which the mean is taken",
        ]
    }

    fn advice(&self) -> &str {
        "compare what the backward multiplies each token's gradient by with the token's weight and incoming cotangent"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails(Stage::Dq) {
            return Vec::new();
        }
        let Some(seen) = seen(evidence) else { return Vec::new() };
        let both = [Part::Plane, Part::OfQ, Part::OfK];
        let parts = if evidence.fails(Stage::Dk) { &both[..] } else { &both[1..2] };
        let of = |(words, factors): (String, Factors)| {
            let fitted = match &words[..] {
                OWN => RAW,
                words if words.contains(" to ") => 2,
                _ => 0,
            };
            let parameters = vec![("each token counts", words)];
            let parts = parts.to_vec();
            Hypothesis::new(Weighted { factors, parts }, parameters).fitted(fitted)
        };
        let mut all = rules(evidence, &seen);
        if all.is_empty() && evidence.fails(Stage::Dk) {
            all.push((OWN.to_string(), seen));
        }
        all.into_iter().map(of).collect()
    }
}

/// What each token's gradient is multiplied by beside what is declared; 1 for what is ignored.
type Factors = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// How often each row of dq is what it should be; none where rows are more than that.
fn seen(evidence: &Evidence<'_>) -> Option<Factors> {
    let mut found: Factors =
        evidence.inputs.iter().map(|one| (one.microbatch, vec![1.0; one.tokens()])).collect();
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let plane = Plane::of(evidence, key)?;
        let captured = plane.dq(&*evidence.captured(key)?);
        let reference = plane.entries().times(&plane.k);
        for (at, &t) in plane.unit.rows.iter().enumerate() {
            let (c, r) = (captured.row(at), reference.row(at));
            let own = energy(r);
            let off = |x: f64| -> f64 { c.iter().zip(r).map(|(c, r)| (c - x * r).powi(2)).sum() };
            let factor = if own > 0.0 { dot(c, r) / own } else { 1.0 };
            before += off(1.0);
            left += off(factor);
            found.get_mut(&key.microbatch)?[t] = factor;
        }
    }
    (left <= LEFT * before).then_some(found)
}

/// The rules that the numbers follow, in words, with the numbers by the rule.
fn rules(evidence: &Evidence<'_>, seen: &Factors) -> Vec<(String, Factors)> {
    let counts = |one: &MicrobatchInputs, t: usize| {
        one.labels[t] != IGNORED && one.weights[t] != 0.0 && one.cotangent[t] != 0.0
    };
    let rule = |of: &dyn Fn(&MicrobatchInputs, usize) -> f64| -> Option<Factors> {
        let mut found = Factors::new();
        let mut changes = false;
        for one in evidence.inputs {
            let mut own = vec![1.0; one.tokens()];
            for t in (0..one.tokens()).filter(|&t| counts(one, t)) {
                let (wanted, seen) = (of(one, t), seen[&one.microbatch][t]);
                if !((seen - wanted).abs() <= NEAR * (1.0 + wanted.abs())) {
                    return None;
                }
                own[t] = wanted;
                changes |= (wanted - 1.0).abs() > NEAR;
            }
            found.insert(one.microbatch, own);
        }
        changes.then_some(found)
    };
    let mean = |of: &dyn Fn(&MicrobatchInputs) -> &[f64]| {
        let all = evidence
            .inputs
            .iter()
            .flat_map(|one| (0..one.tokens()).filter(|&t| counts(one, t)).map(move |t| of(one)[t]));
        let all: Vec<f64> = all.collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    };
    let own_mean = |one: &MicrobatchInputs| {
        let all: Vec<f64> =
            (0..one.tokens()).filter(|&t| counts(one, t)).map(|t| one.cotangent[t]).collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    };
    let (weight, cotangent) = (mean(&|one| &one.weights), mean(&|one| &one.cotangent));
    let squared = |x: &[f64], t: usize| x[t];
    let named: [(&str, Option<Factors>); 6] = [
        ("with the square of its weight", rule(&|one, t| squared(&one.weights, t))),
        ("with the square of its cotangent", rule(&|one, t| squared(&one.cotangent, t))),
        ("with the mean of all weights", rule(&|one, t| weight / one.weights[t])),
        ("with the mean of all cotangents", rule(&|one, t| cotangent / one.cotangent[t])),
        (
            "with the mean of its microbatch's cotangents",
            rule(&|one, t| own_mean(one) / one.cotangent[t]),
        ),
        ("as often as was found", rule(&|one, t| seen[&one.microbatch][t].round())),
    ];
    let told = |(words, factors): (&str, Option<Factors>)| {
        let factors = factors?;
        let words = match words {
            "as often as was found" => often(&factors)?,
            words => words.to_string(),
        };
        Some((words, factors))
    };
    named.into_iter().filter_map(told).collect()
}

/// Which tokens count more or less than once; none where they are no few runs.
fn often(factors: &Factors) -> Option<String> {
    let mut said = Vec::new();
    for (mb, factors) in factors {
        let of = mb.map_or(String::new(), |mb| format!("microbatch {mb} "));
        for (run, times) in runs(factors) {
            let often = if times == 0.0 { "not at all".into() } else { format!("{times} times") };
            said.push(format!("{of}tokens {} to {} {often}", run.start, run.end - 1));
        }
    }
    (!said.is_empty() && said.len() <= TOLD).then(|| said.join(", "))
}

/// Upstream gradients times a number each.
struct Weighted {
    factors: Factors,
    parts: Vec<Part>,
}

impl World for Weighted {
    fn speaks_of(&self, stage: Stage) -> bool {
        GRADIENTS.contains(&stage) && self.parts.contains(&Part::of(stage))
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        if let Some(factors) = self.factors.get(&inputs.microbatch) {
            g.iter_mut().zip(factors).for_each(|(g, x)| *g *= x);
        }
    }
}
