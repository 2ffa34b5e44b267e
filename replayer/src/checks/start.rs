//! Compares the loss of the first step with log V.
//!
//! An untrained model gives every class nearly the same probability: its mean -log p is log V, plus
//! about half the variance of its logits. If the loss is far below log V, the model was trained
//! before or can see its labels. The finding is only a note: a dump does not say whether the
//! weights were fresh.

use backtape::identity::Step;

use super::facts::{classes, facts};
use super::{CheckResults, Place, Severity, Subject};

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    let Some(subject) = subjects.iter().find(|subject| subject.dump.step == Step(0)) else {
        return results.skip("the loss against log V", "step 0 was not dumped");
    };
    let Some(classes) = classes(subject).filter(|&classes| classes > 1) else {
        return results.skip("the loss against log V", "the number of classes is not known");
    };
    let (mut sum, mut n) = (0.0, 0.0);
    for facts in facts(subject).into_iter().flatten() {
        for t in (0..facts.tokens()).filter(|&t| facts.weights[t] != 0.0) {
            if let Some(nll) = facts.nll(t) {
                (sum, n) = (sum + nll, n + 1.0);
            }
        }
    }
    if n == 0.0 {
        return results
            .skip("the loss against log V", "lse and label_logits were not both recorded");
    }
    results.looked();
    let (mean, uniform) = (sum / n, (classes as f64).ln());
    let reading = match mean / uniform {
        x if x < 0.5 => {
            "far below: the model was trained before, copies its input or sees its labels"
        }
        x if x <= 1.25 => "as an untrained model has",
        x if x.is_nan() => "not a number",
        _ => "above: its logits are spread widely, which knows less than nothing",
    };
    let evidence = format!(
        "the mean of -log p over {n} counted tokens is {mean:.4}, log {classes} = {uniform:.4}: {reading}"
    );
    let advice = "Look at the shift of the labels and at the mask if the weights were fresh";
    results.add(Severity::Note, None, Place::of(subject), evidence, advice);
}
