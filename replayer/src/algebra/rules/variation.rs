//! How optimizers are implemented wrongly: what several rules have in common.

use super::Rule;
use super::formulas::Descent;

/// A rule that was changed as a faulty optimizer might be.
pub(crate) struct Variation {
    /// The cause's name in `causes`.
    pub cause: &'static str,
    /// What is supposed, in words.
    pub words: String,
    /// The rule.
    pub rule: Rule,
}

/// A cause that is a rule of another switch.
pub(crate) fn vary<R>(wrap: fn(R) -> Rule, cause: &'static str, words: &str, rule: R) -> Variation {
    Variation { cause, words: words.to_string(), rule: wrap(rule) }
}

/// The weight decay at the other place, and the other sign.
pub(crate) fn of_descent<R>(
    wrap: fn(R) -> Rule,
    own: Descent,
    change: impl Fn(Descent) -> R,
) -> Vec<Variation> {
    let words = match own.decoupled {
        true => {
            "the weight decay goes through the gradient and the state, and is declared to be \
             decoupled from them"
        }
        false => {
            "the weight decay is decoupled from the gradient and the state, and is declared to \
             go through them"
        }
    };
    let coupled = change(Descent { decoupled: !own.decoupled, ..own });
    let ascending = change(Descent { maximize: !own.maximize, ..own });
    vec![
        vary(wrap, "decay-coupled", words, coupled),
        vary(
            wrap,
            "update-ascends",
            "the parameter moves along the gradient, not against it",
            ascending,
        ),
    ]
}

/// Bias correction left out, or applied once more than declared.
pub(crate) fn of_corrections<R>(
    wrap: fn(R) -> Rule,
    own: u32,
    change: impl Fn(u32) -> R,
) -> Vec<Variation> {
    let more = match own {
        0 => ("bias-correction-added", "the moments are divided by 1 - β^step"),
        _ => ("bias-correction-twice", "the moments are divided by 1 - β^step twice"),
    };
    let mut all = vec![vary(wrap, more.0, more.1, change(own + 1))];
    if own > 0 {
        let words = "the moments are used without bias correction";
        all.push(vary(wrap, "bias-correction-missing", words, change(0)));
    }
    all
}

/// ε on the other side of the root.
pub(crate) fn of_eps<R>(wrap: fn(R) -> Rule, is_inside: bool, rule: R) -> Variation {
    let words = match is_inside {
        true => "eps is added to the root, and is declared to be added before the root",
        false => "eps is added before the root, not after it",
    };
    vary(wrap, "eps-inside-sqrt", words, rule)
}

/// The count of another step.
pub(crate) fn of_step<R>(
    wrap: fn(R) -> Rule,
    own: f64,
    change: impl Fn(f64) -> R,
) -> Vec<Variation> {
    let mut others = vec![1.0, own - 1.0, own + 1.0];
    others.retain(|&step| step >= 1.0 && step != own);
    others.dedup();
    let varied = |step: f64| {
        let words = format!("the step counts as step {step}, and the state says step {own}");
        vary(wrap, "step-counter", &words, change(step))
    };
    others.into_iter().map(varied).collect()
}
