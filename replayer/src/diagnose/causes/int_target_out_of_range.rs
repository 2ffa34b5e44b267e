//! `int-target-out-of-range`: labels that name no class are skipped by one pass and not by
//! the other: ignored ones (-1, -100), or ones beyond the vocabulary.
//!
//! Detectors: such labels are there, and gradients fail in their rows, or in the rows that their
//! flat index `t V + label` reaches. Emulation: the backward subtracts g at that index, or at a
//! clamped class, with or without the softmax part of the token; or the token has only the softmax
//! part.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis, Observed};
use crate::diagnose::data_worlds::Relabelled;
use crate::diagnose::detectors::stray_entries::Strays;
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::kernels::round::Precision;

/// The catalogue's entry.
pub struct IntTargetOutOfRange;

impl Cause for IntTargetOutOfRange {
    fn id(&self) -> &str {
        "int-target-out-of-range"
    }

    fn about(&self) -> &str {
        "labels that name no class are skipped by one pass and used as an index by the other"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["MLP-cuda before 396b00e"]
    }

    fn advice(&self) -> &str {
        "check every label against 0..V in the forward and in the backward alike, and leave the tokens of others out of both"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails_any(&Stage::FORWARD) {
            return Vec::new();
        }
        let all: Vec<OutOfRange> =
            evidence.inputs.iter().filter_map(|inputs| out_of_range(evidence, inputs)).collect();
        if all.iter().all(|out_of_range| out_of_range.labels.is_empty()) {
            return Vec::new();
        }
        let mut hypotheses = Vec::new();
        for (softmax, entry) in [(false, true), (true, false), (true, true)] {
            for to in formats(evidence).into_iter().filter(|to| entry || to.keeps_f32()) {
                hypotheses.extend(stray(evidence, &all, (softmax, entry), to));
            }
        }
        for clamp in [Clamp::First, Clamp::Last, Clamp::FromTheEnd, Clamp::FromThePadding] {
            hypotheses.extend(clamped(evidence, &all, clamp));
            for to in formats(evidence) {
                hypotheses.extend(label_of_clamped(evidence, &all, clamp, to));
            }
        }
        hypotheses
    }

    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        // Only where nothing fails; otherwise a hypothesis must explain the failure.
        let outside: Vec<&MicrobatchInputs> =
            evidence.inputs.iter().filter(|inputs| !inputs.outside.is_empty()).collect();
        let first = outside.first().filter(|_| evidence.failing.is_empty())?;
        let count: usize = outside.iter().map(|inputs| inputs.outside.len()).sum();
        let (token, label) = first.outside[0];
        Some(Observed {
            evidence: format!(
                "{count} labels name no class, the first that of token {token}: {label}; all that was captured is as if their tokens were ignored"
            ),
            stages: vec![Stage::Labels],
            parameters: vec![("labels", count.to_string()), ("first", label.to_string())],
        })
    }
}

/// The tokens whose label names no class, with the recorded label and the upstream gradient g that
/// they would have if they counted.
struct OutOfRange {
    microbatch: Option<Microbatch>,
    labels: BTreeMap<usize, i64>,
    g: BTreeMap<usize, f64>,
}

fn out_of_range(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<OutOfRange> {
    let mut labels: BTreeMap<usize, i64> = inputs.outside.iter().copied().collect();
    if let Some(ignore) = evidence.step.options.ignore_label {
        let ignored = (0..inputs.tokens()).filter(|&t| inputs.labels[t] == IGNORED);
        ignored.for_each(|t| {
            labels.entry(t).or_insert(ignore);
        });
    }
    let reference = evidence.reference().g.get(&inputs.microbatch)?;
    let weight = |t: usize| inputs.weights[t] * inputs.cotangent[t];
    // g of a token with weight 1, for each rank's tokens, as ranks may divide by their own counts.
    let mut ones = vec![None; inputs.tokens()];
    for run in of_ranks(evidence.step, inputs) {
        let counted = run.iter().find(|&&t| reference[t] != 0.0);
        let value = counted.map(|&t| reference[t] / weight(t));
        run.iter().for_each(|&t| ones[t] = value);
    }
    let any = ones.iter().flatten().next().copied()?;
    let g = |&t: &usize| {
        let value = ones[t].unwrap_or(any);
        (t, value * if weight(t) == 0.0 { 1.0 } else { weight(t) })
    };
    let g = labels.keys().map(g).collect();
    Some(OutOfRange { microbatch: inputs.microbatch, labels, g })
}

/// The formats that an entry may be rounded to: f64 for none, and the format of dlogits if it has
/// few bits. All stray entries are about `-g`, so their roundings are alike and add up.
fn formats(evidence: &Evidence<'_>) -> Vec<Precision> {
    let narrow = evidence.roundings().map(|roundings| roundings.widest.dlogits);
    [Precision::F64].into_iter().chain(narrow.filter(|to| !to.keeps_f32())).collect()
}

/// A world without any stray entry yet, and the declared smoothing. An entry is added to the one
/// that is there already, and the sum is rounded.
fn stray_entries(evidence: &Evidence<'_>, to: Precision) -> Option<(Strays, f64)> {
    let s = evidence.step.options.smoothing(evidence.inputs.first()?.valid_vocab);
    let mut world = Strays::rounded((!to.keeps_f32()).then_some(to));
    // Only one of several kernels may write them, for example the one that scatters the label's
    // part of dk.
    world.not_in = Stage::GRADIENTS.into_iter().filter(|&stage| evidence.agrees(stage)).collect();
    Some((world, s))
}

/// The hypothesis that such tokens have a label entry at the flat index, the softmax part, or both.
fn stray(
    evidence: &Evidence<'_>,
    all: &[OutOfRange],
    (softmax, entry): (bool, bool),
    to: Precision,
) -> Option<Hypothesis> {
    let (mut world, s) = stray_entries(evidence, to)?;
    for out_of_range in all {
        let inputs = evidence.inputs_of(out_of_range.microbatch)?;
        let vocab = inputs.head(evidence.step)?.k.rows as i64;
        if softmax {
            world.upstream.insert(out_of_range.microbatch, out_of_range.g.clone());
        }
        let mut entries = Vec::new();
        for run in of_ranks(evidence.step, inputs).iter().filter(|_| entry) {
            for (position, t) in run.iter().enumerate() {
                let Some(&label) = out_of_range.labels.get(t) else { continue };
                let flat = position as i64 * vocab + label;
                let Ok(row) = usize::try_from(flat.div_euclid(vocab)) else { continue };
                let Some(&token) = run.get(row) else { continue };
                let class = flat.rem_euclid(vocab) as usize;
                entries.push((token, class, -out_of_range.g[t] * (1.0 - s)));
            }
        }
        world.add(evidence, inputs, &entries)?;
    }
    let words = match (softmax, entry) {
        (true, true) => "the softmax part, and the label's at the flat index",
        (true, false) => "the softmax part alone",
        _ => "the label's part alone, at the flat index",
    };
    let mut parameters = parameters(all, words);
    if !to.keeps_f32() {
        parameters.push(("its entries rounded to", to.name().to_string()));
    }
    Some(Hypothesis::new(world, parameters))
}

fn parameters(all: &[OutOfRange], words: &str) -> Vec<(&'static str, String)> {
    let count: usize = all.iter().map(|out_of_range| out_of_range.labels.len()).sum();
    let mut labels: Vec<i64> =
        all.iter().flat_map(|out_of_range| out_of_range.labels.values()).copied().collect();
    labels.sort_unstable();
    labels.dedup();
    labels.truncate(8);
    let labels = labels.iter().map(i64::to_string).collect::<Vec<String>>().join(", ");
    vec![
        ("tokens", count.to_string()),
        ("labels", labels),
        ("the backward takes", words.to_string()),
    ]
}

/// The class that a label which names none is replaced by.
#[derive(Clone, Copy, Debug)]
enum Clamp {
    First,
    Last,
    FromTheEnd,
    /// The same, counting from the end of the padding's rows.
    FromThePadding,
}

impl Clamp {
    /// The class that replaces this label; none where this rule does not apply to it. The second
    /// argument: number of classes, and of rows of k.
    fn class(self, label: i64, [valid, rows]: [i64; 2]) -> Option<i64> {
        match self {
            Clamp::First if label < 0 => Some(0),
            Clamp::Last if label >= valid => Some(valid - 1),
            Clamp::FromTheEnd if (-valid..0).contains(&label) => Some(label + valid),
            Clamp::FromThePadding if rows > valid && (-rows..0).contains(&label) => {
                Some(label + rows).filter(|&class| class < valid)
            }
            _ => None,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Clamp::First => "class 0 in their place",
            Clamp::Last => "the last class in their place",
            Clamp::FromTheEnd => "classes counted from the end",
            Clamp::FromThePadding => "classes counted from the end of the padding",
        }
    }
}

/// The number of classes and of rows of k.
fn ends(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<[i64; 2]> {
    let rows = inputs.head(evidence.step)?.k.rows;
    Some([inputs.valid_vocab as i64, rows as i64])
}

/// The hypothesis that such tokens have only the label's part, at the class that replaces their
/// label.
fn label_of_clamped(
    evidence: &Evidence<'_>,
    all: &[OutOfRange],
    clamp: Clamp,
    to: Precision,
) -> Option<Hypothesis> {
    let (mut world, s) = stray_entries(evidence, to)?;
    for out_of_range in all {
        let inputs = evidence.inputs_of(out_of_range.microbatch)?;
        let ends = ends(evidence, inputs)?;
        let entry = |(&t, &label): (&usize, &i64)| {
            Some((t, clamp.class(label, ends)? as usize, -out_of_range.g[&t] * (1.0 - s)))
        };
        let entries: Vec<_> = out_of_range.labels.iter().map(entry).collect::<Option<_>>()?;
        world.add(evidence, inputs, &entries)?;
    }
    let words = format!("the label's part alone, at {}", clamp.words());
    let mut parameters = parameters(all, &words);
    if !to.keeps_f32() {
        parameters.push(("its entries rounded to", to.name().to_string()));
    }
    Some(Hypothesis::new(world, parameters))
}

fn clamped(evidence: &Evidence<'_>, all: &[OutOfRange], clamp: Clamp) -> Option<Hypothesis> {
    let (mut labels, mut g) = (BTreeMap::new(), evidence.reference().g.clone());
    for out_of_range in all {
        let inputs = evidence.inputs_of(out_of_range.microbatch)?;
        let ends = ends(evidence, inputs)?;
        let mut labels_read = inputs.labels.clone();
        for (&t, &label) in &out_of_range.labels {
            let class = clamp.class(label, ends)?;
            labels_read[t] = class as u32;
            g.get_mut(&out_of_range.microbatch)?[t] = out_of_range.g[&t];
        }
        labels.insert(out_of_range.microbatch, labels_read);
    }
    let words = clamp.words();
    let world = Relabelled { labels, g: Some(g), ..Relabelled::default() };
    Some(Hypothesis::new(world, parameters(all, words)))
}
