//! Flags a loss that falls faster than data allow, as when the model copies its input, sees its
//! labels, or gets the same batch again and again.
//!
//! An untrained model has a mean loss of log V. After D tokens it cannot know more than these
//! tokens tell: Kaplan et al. 2020 (equation 1.2) measured (5.4e13 / D)^0.095 nats as the loss of
//! the largest models on D tokens of web text with V = 50257. This floor is scaled by log V for
//! other vocabularies and divided by three, since source code and markup have a half to a third as
//! many nats per token as web text. Where the job does not record its tokens, 16 million per step
//! are assumed, the largest batches in use.

use super::View;
use super::finding::{FlagResults, Place};
use super::series::median;
use crate::number::short;

/// Kaplan et al. 2020, arXiv 2001.08361, equation 1.2 and table 5.
const TOKENS: f64 = 5.4e13;
const EXPONENT: f64 = 0.095;
const VOCABULARY: f64 = 50_257.0;

/// Ratio of the nats per token of web text and of source code.
const STRUCTURED: f64 = 3.0;

/// Assumed tokens of a step where the job does not record them.
const TOKENS_A_STEP: f64 = 16e6;

/// A first loss this high means an untrained model: 7 nats are a uniform choice among 1,096
/// classes.
const UNTRAINED_NATS: f64 = 7.0;

/// Range of an untrained model's loss over log V: the variance of its logits raises the loss by
/// half of it.
const UNTRAINED: std::ops::RangeInclusive<f64> = 0.75..=1.5;

/// The median of this many values must be below the floor, so that a single outlier is not flagged.
const WINDOW: usize = 5;

/// Share of log V below which almost no loss is left, as when the model copies its input.
const NOTHING: f64 = 0.01;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether the loss falls too fast";
    let Some(loss) = view.loss.as_ref().filter(|loss| loss.len() >= WINDOW) else {
        return results.skip(what, "fewer than 5 values of loss were recorded");
    };
    if loss.values().iter().any(|&value| value < 0.0) {
        return results.skip(what, "loss is negative at some steps: no cross-entropy");
    }
    let start = loss.values()[0];
    let (uniform, source) = match &view.vocabulary {
        Some((classes, source)) => (classes.ln(), format!("V = {classes} {source}")),
        None if start >= UNTRAINED_NATS => {
            (start, format!("log V taken from the first loss, which is above {UNTRAINED_NATS}"))
        }
        None => {
            let why = "the vocabulary is not known: record vocabulary=V or pass --vocabulary V";
            return results.skip(what, why);
        }
    };
    if loss.steps()[0] > 1 {
        return results
            .skip(what, "the record begins after step 1: the first loss is not the start's");
    }
    if !UNTRAINED.contains(&(start / uniform)) {
        let why = format!(
            "the first loss, {}, is not near log V = {}: the model was not untrained",
            short(start),
            short(uniform)
        );
        return results.skip(what, why);
    }
    results.looked();
    let tokens = view.of("tokens");
    let mut seen = 0.0;
    let of_step = |step| tokens.and_then(|tokens| tokens.at(step)).filter(|n| *n > 0.0);
    let mut last = None;
    for (index, window) in loss.values().windows(WINDOW).enumerate() {
        let step = loss.steps()[index];
        // Steps that were not recorded consumed tokens too.
        let steps = last.map_or(step + 1, |last| step - last) as f64;
        seen += steps * of_step(step).unwrap_or(TOKENS_A_STEP);
        last = Some(step);
        let floor = (TOKENS / seen).powf(EXPONENT) * uniform / VOCABULARY.ln() / STRUCTURED;
        let level = median(window);
        if level < floor.min(uniform / STRUCTURED) {
            let assumed = if tokens.is_some() { "recorded" } else { "assumed at most" };
            return raise(view, results, step, level, (uniform, floor, seen), (&source, assumed));
        }
    }
}

fn raise(
    view: &View<'_>,
    results: &mut FlagResults,
    step: u64,
    level: f64,
    (uniform, floor, seen): (f64, f64, f64),
    (source, assumed): (&str, &str),
) {
    let loss = view.loss.as_ref().expect("looked at");
    let least = loss.values().iter().copied().fold(f64::INFINITY, f64::min);
    let reading = match least < NOTHING * uniform {
        true => {
            "next to nothing is left, as where the model copies or sees its labels, or one \
                 batch repeats"
        }
        false => "labels may be visible, or the data repeat",
    };
    let evidence = format!(
        "loss falls from {} at step {} to {} by step {step}, after {seen:.1e} tokens ({assumed}): \
         {reading}",
        short(loss.values()[0]),
        loss.steps()[0],
        short(level),
    );
    let threshold = format!(
        "{} nats: a third of what Kaplan et al. 2020 (eq. 1.2) measured as the least after that \
         many tokens, scaled by log V = {} ({source})",
        short(floor.min(uniform / STRUCTURED)),
        short(uniform),
    );
    results.raise(Place::at("loss", step), evidence, threshold);
}
