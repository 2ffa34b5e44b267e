//! Adagrad (Duchi, Hazan and Singer 2011, <https://jmlr.org/papers/v12/duchi11a.html>):
//! `s += g²`, `θ -= η g / (√s + ε)`, where `η` may decay as `η / (1 + (t - 1) d)`. optax has
//! `√(s + ε)`.

use super::formulas::{Descent, class, divided, is_optax, root, square};
use super::variation::{of_descent, of_eps, of_step, vary};
use super::{LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Adagrad", "adagrad", "FusedAdagrad", "DeepSpeedCPUAdagrad"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Adagrad",
    source: "Duchi, Hazan and Singer 2011",
    counts_steps: false,
    switches: &["adagrad_w_mode", "maximize"],
    wholes: &[],
    states: &[State { after: "sum", before: "sum_before", recorded: &["sum", "sum_of_squares"] }],
    hyper: &[LR, ("lr_decay", &["lr_decay"], 0.0), ("eps", &["eps"], f64::NAN), WEIGHT_DECAY],
};

/// Adagrad with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Adagrad {
    /// Which step this is, from 1, where the learning rate decays.
    pub step: f64,
    /// Weight decay and sign.
    pub descent: Descent,
    /// Whether ε is added before the root.
    pub eps_inside: bool,
    /// Whether only this step's gradient divides.
    pub forgets: bool,
}

impl Adagrad {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Adagrad> {
        CLASSES.contains(&class(optimizer)?).then(|| Adagrad {
            step: if hyper.is_on("lr_decay") { step } else { 1.0 },
            descent: Descent {
                maximize: hyper.is_on("maximize"),
                decoupled: hyper.is_on("adagrad_w_mode"),
                late: false,
            },
            eps_inside: is_optax(optimizer),
            forgets: false,
        })
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let mut all = vec![of_eps(
            Rule::Adagrad,
            self.eps_inside,
            Adagrad { eps_inside: !self.eps_inside, ..own() },
        )];
        all.push(vary(
            Rule::Adagrad,
            "state-reset",
            "the gradients before this step are not in the sum of squares",
            Adagrad { forgets: true, ..own() },
        ));
        all.extend(of_descent(Rule::Adagrad, self.descent, |descent| Adagrad { descent, ..own() }));
        all.extend(of_step(Rule::Adagrad, self.step, |step| Adagrad { step, ..own() }));
        all
    }
}

op! {
    Adagrad = "adagrad";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        sum_before: Plane, "the sum of squares before the step";
        lr: Rows, "the learning rate";
        lr_decay: Rows, "how fast the learning rate decays";
        eps: Rows, "what is added to the root";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        sum: Plane Forward Each |op, grad, before, sum_before, weight_decay| {
                let squared = square(op.descent.gradient(grad, before, weight_decay));
                if op.forgets { squared } else { sum_before + squared }
            },
            "the sum of squares";
        update: Plane Forward Each |op, grad, before, sum, lr, lr_decay, eps, weight_decay| {
                let gradient = op.descent.gradient(grad, before.clone(), weight_decay.clone());
                let decay = lr_decay.times(op.step - 1.0).plus(1.0);
                // torch multiplies by the learning rate first, and stores that. Where it keeps that
                // as a tensor it divides in f32, by a number that it rounds before.
                let rate = lr.clone() / decay;
                let moved = (gradient.clone() * rate.clone().scalar()).step();
                let moved = match op.step == 1.0 {
                    true => moved,
                    // The divisor is rounded, and so is the quotient.
                    false => moved
                        .by_settings(gradient.clone(), rate.clone())
                        .by_settings(gradient, rate),
                };
                let moved = divided(moved, root(sum, eps, op.eps_inside));
                op.descent.subtracted(moved, before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
