//! RAdam (Liu et al. 2020, <https://arxiv.org/abs/1908.03265>, algorithm 2), with decoupled decay
//! (Loshchilov and Hutter 2019). The moments are Adam's. With `ρ∞ = 2 / (1 - β2) - 1` and
//! `ρ = ρ∞ - 2 t β2^t / (1 - β2^t)` the parameter moves by `m / (1 - β1^t)` alone while ρ is at
//! most 5, and then by
//!
//! `r m / (1 - β1^t) √(1 - β2^t) / (√v + ε)`, `r² = (ρ - 4)(ρ - 2)ρ∞ / ((ρ∞ - 4)(ρ∞ - 2)ρ)`.
//!
//! optax divides `v` by `1 - β2^t` before ε is added. torch multiplies `m / (1 - β1^t)` by the learning
//! rate before all else, and what is too small for a format then is lost.

use super::formulas::{
    Descent, class, corrected, correction, divided, is_optax, moving, root, square,
};
use super::variation::{of_corrections, of_descent, of_eps, of_step, vary};
use super::{Names, Rule, Variation};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["RAdam", "radam"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "RAdam",
    source: "Liu et al. 2020",
    counts_steps: true,
    switches: &["decoupled_weight_decay", "maximize"],
    wholes: &[],
    states: super::nadam::NAMES.states,
    hyper: super::nadam::NAMES.hyper,
};

/// RAdam with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Radam {
    /// Which step this is, from 1.
    pub step: f64,
    /// Weight decay and sign.
    pub descent: Descent,
    /// The β2 that the length of the average is computed from.
    pub beta2: f64,
    /// The least length of the average by which the update adapts.
    pub threshold: f64,
    /// Whether an update that adapts is rectified.
    pub rectifies: bool,
    /// Whether the length is computed in the numbers of the optimizer's tensors. torch has it in
    /// f64, unless it is captured in a graph.
    pub rounds_length: bool,
    /// Whether ε is added to the root of the corrected second moment.
    pub corrects_first: bool,
    /// How often the moments are divided by `1 - β^step`.
    pub corrections: u32,
    /// Whether ε is added before the root.
    pub eps_inside: bool,
}

impl Radam {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Radam> {
        let is_optax = is_optax(optimizer);
        let beta2 = NAMES.number(hyper, "beta2");
        // optax's Nesterov variant of it is not known here.
        let is_known = CLASSES.contains(&class(optimizer)?) && !hyper.is_on("nesterov");
        is_known.then(|| Radam {
            step,
            descent: Descent {
                maximize: hyper.is_on("maximize"),
                decoupled: hyper.is_on("decoupled_weight_decay"),
                late: false,
            },
            beta2,
            threshold: hyper.number("threshold").unwrap_or(5.0),
            rectifies: true,
            rounds_length: is_optax || hyper.is_on("capturable"),
            corrects_first: is_optax,
            corrections: 1,
            eps_inside: false,
        })
    }

    /// The longest average, and that of the step.
    fn lengths<N: Number>(&self, beta2: N) -> (N, N) {
        // optax has the longest one of β2 as it is declared, and the power of it as it is rounded.
        let longest = beta2.constant(2.0 / (1.0 - self.beta2) - 1.0).times(1.0);
        let power = beta2.clone().power(self.step);
        let lost = power.clone().times(2.0 * self.step) / (power.constant(1.0) - power);
        (longest.clone(), longest - lost)
    }

    /// Whether the update adapts to the second moment in this step.
    fn adapts(&self) -> bool {
        self.lengths(self.beta2).1 > self.threshold
    }

    fn rectification<N: Number>(&self, beta2: N) -> N {
        let of = |longest: N, length: N| {
            let own = length.clone().plus(-4.0) * length.clone().plus(-2.0) * longest.clone();
            let most = longest.clone().plus(-4.0) * longest.plus(-2.0) * length;
            (own / most).sqrt()
        };
        if self.rounds_length {
            let (longest, length) = self.lengths(beta2);
            return of(longest, length);
        }
        let (longest, length) = self.lengths(self.beta2);
        let own = (length - 4.0) * (length - 2.0) * longest;
        beta2.constant(libm::sqrt(own / ((longest - 4.0) * (longest - 2.0) * length)))
    }

    /// A first moment that is corrected and times the learning rate, divided by the root of the second.
    fn adapted<N: Number>(&self, first: N, second: N, [beta2, eps, eps_root]: [N; 3]) -> N {
        let correction = correction(beta2.clone(), self.step);
        let adapted = match self.corrects_first {
            true => {
                let second = corrected(second, correction, self.corrections) + eps_root;
                divided(first, root(second, eps, self.eps_inside))
            }
            false => {
                let root = root(second + eps_root, eps, self.eps_inside);
                corrected(
                    divided(first, root),
                    correction.constant(1.0) / correction.sqrt(),
                    self.corrections,
                )
            }
        };
        match self.rectifies {
            true => (adapted.step() * self.rectification(beta2).scalar()).step(),
            false => adapted.step(),
        }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let corrections = |corrections| Radam { corrections, ..own() };
        let mut all = of_corrections(Rule::Radam, self.corrections, corrections);
        let mut other = |cause, words: &str, rule: Radam| {
            all.push(vary(Rule::Radam, cause, words, rule));
        };
        if self.adapts() {
            let words = "the update is Adam's: it is not rectified";
            other("rectification-missing", words, Radam { rectifies: false, ..own() });
        }
        for threshold in [4.0, 5.0, f64::INFINITY] {
            let rule = Radam { threshold, ..own() };
            if rule.adapts() == self.adapts() {
                continue;
            }
            let words = match self.adapts() {
                true => "the update does not adapt to the second moment in this step",
                false => "the update adapts to the second moment in this step already",
            };
            other("rectification-threshold", words, rule);
        }
        if self.adapts() {
            let eps_inside = !self.eps_inside;
            all.push(of_eps(Rule::Radam, self.eps_inside, Radam { eps_inside, ..own() }));
        }
        all.extend(of_descent(Rule::Radam, self.descent, |descent| Radam { descent, ..own() }));
        all.extend(of_step(Rule::Radam, self.step, |step| Radam { step, ..own() }));
        all
    }
}

op! {
    Radam = "radam";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        exp_avg_before: Plane, "the first moment before the step";
        exp_avg_sq_before: Plane, "the second moment before the step";
        lr: Rows, "the learning rate";
        beta1: Rows, "how much of the first moment stays";
        beta2: Rows, "how much of the second moment stays";
        eps: Rows, "what is added to the root of the second moment";
        eps_root: Rows, "what is added below the root";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        exp_avg: Plane Forward Each |op, grad, before, exp_avg_before, beta1, weight_decay|
            moving(exp_avg_before, op.descent.gradient(grad, before, weight_decay), beta1),
            "the first moment";
        exp_avg_sq: Plane Forward Each |op, grad, before, exp_avg_sq_before, beta2, weight_decay| {
                let squared = square(op.descent.gradient(grad, before, weight_decay));
                moving(exp_avg_sq_before, squared, beta2)
            },
            "the second moment";
        update: Plane Forward Each
            |op, before, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, eps_root, weight_decay| {
                let first = corrected(exp_avg, correction(beta1, op.step), op.corrections);
                let first = first.scaled(lr.clone());
                let moved = match op.adapts() {
                    true => op.adapted(first, exp_avg_sq, [beta2, eps, eps_root]),
                    false => first,
                };
                op.descent.subtracted(moved, before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
