//! Stochastic gradient descent with momentum (Polyak 1964), dampening and Nesterov's variant
//! (Sutskever et al. 2013).

use super::formulas::{Descent, class};
use super::variation::{of_descent, vary};
use super::{LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["SGD", "sgd", "FusedSGD"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "SGD with momentum, dampening, Nesterov",
    source: "Polyak 1964; Sutskever et al. 2013",
    counts_steps: false,
    switches: &["maximize", "nesterov"],
    wholes: &[],
    states: &[State {
        after: "momentum_buffer",
        before: "momentum_buffer_before",
        recorded: &["momentum_buffer", "trace"],
    }],
    hyper: &[
        LR,
        ("momentum", &["momentum", "decay"], 0.0),
        ("dampening", &["dampening"], 0.0),
        WEIGHT_DECAY,
    ],
};

/// SGD with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sgd {
    /// Whether there was no momentum yet: the buffer then starts with the whole gradient.
    pub is_first: bool,
    /// Whether there is any momentum.
    pub has_momentum: bool,
    /// Whether the gradient is looked up ahead.
    pub nesterov: bool,
    /// Weight decay and sign.
    pub descent: Descent,
}

impl Sgd {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Sgd> {
        let momentum = hyper.number("momentum").or_else(|| hyper.number("decay"));
        CLASSES.contains(&class(optimizer)?).then(|| Sgd {
            is_first: step <= 1.0,
            has_momentum: momentum.is_some_and(|momentum| momentum != 0.0),
            nesterov: hyper.is_on("nesterov"),
            descent: Descent { maximize: hyper.is_on("maximize"), decoupled: false, late: false },
        })
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let mut all = Vec::new();
        if self.has_momentum {
            all.push(vary(
                Rule::Sgd,
                "nesterov",
                match self.nesterov {
                    true => "the update is that of plain momentum, and is declared as Nesterov's",
                    false => "the update is Nesterov's, and is declared as plain momentum",
                },
                Sgd { nesterov: !self.nesterov, ..own() },
            ));
            all.push(vary(
                Rule::Sgd,
                "state-reset",
                "the momentum before this step is not in it",
                Sgd { is_first: true, ..own() },
            ));
        }
        all.extend(of_descent(Rule::Sgd, self.descent, |descent| Sgd { descent, ..own() }));
        all
    }
}

op! {
    Sgd = "sgd";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        momentum_buffer_before: Plane, "the momentum before the step";
        lr: Rows, "the learning rate";
        momentum: Rows, "how much of the momentum stays";
        dampening: Rows, "how much of the gradient does not enter the momentum";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        momentum_buffer: Plane Forward Each
            |op, grad, before, momentum_buffer_before, momentum, dampening, weight_decay| {
                let gradient = op.descent.gradient(grad, before, weight_decay);
                if op.is_first || !op.has_momentum {
                    return gradient;
                }
                let share = dampening.constant(1.0) - dampening;
                momentum_buffer_before.scaled(momentum) + (gradient * share.scalar()).step()
            },
            "the momentum";
        update: Plane Forward Each
            |op, grad, before, momentum_buffer, lr, momentum, weight_decay| {
                let gradient = op.descent.gradient(grad, before.clone(), weight_decay.clone());
                let direction = match (op.has_momentum, op.nesterov) {
                    (true, true) => (gradient + momentum_buffer.scaled(momentum)).step(),
                    (true, false) => momentum_buffer,
                    (false, _) => gradient,
                };
                op.descent.update(direction, before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
