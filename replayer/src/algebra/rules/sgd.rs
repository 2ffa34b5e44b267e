//! Stochastic gradient descent with momentum (Polyak 1964), dampening and Nesterov's variant
//! (Sutskever et al. 2013).

use super::{Names, Rule, State, Variation};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::ops::table::op;

/// The classes that this rule is of.
pub const CLASSES: &[&str] = &["SGD", "sgd", "FusedSGD"];

/// How frameworks call its tensors and hyper-parameters.
pub const NAMES: Names = Names {
    states: &[State {
        after: "momentum_buffer",
        before: "momentum_buffer_before",
        recorded: &["momentum_buffer", "trace"],
    }],
    hyper: &[
        ("lr", &["lr", "learning_rate"], f64::NAN),
        ("momentum", &["momentum", "decay"], 0.0),
        ("dampening", &["dampening"], 0.0),
        ("weight_decay", &["weight_decay"], 0.0),
    ],
};

/// SGD with its switches.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// Whether there was no momentum yet: the buffer then starts with the whole gradient.
    pub is_first: bool,
    /// Whether there is any momentum.
    pub has_momentum: bool,
    /// Whether the gradient is looked up ahead.
    pub nesterov: bool,
    /// Whether it ascends.
    pub maximize: bool,
    /// Whether the parameter decays by itself, and not through the gradient.
    pub decoupled: bool,
}

impl Sgd {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Sgd> {
        let momentum = hyper.number("momentum").or_else(|| hyper.number("decay"));
        CLASSES.contains(&optimizer.name.as_deref()?).then(|| Sgd {
            is_first: step <= 1.0,
            has_momentum: momentum.is_some_and(|momentum| momentum != 0.0),
            nesterov: hyper.is_on("nesterov"),
            maximize: hyper.is_on("maximize"),
            decoupled: false,
        })
    }

    fn gradient<N: Number>(&self, grad: N, before: N, weight_decay: N) -> N {
        let grad = if self.maximize { grad.times(-1.0) } else { grad };
        if self.decoupled { grad } else { (grad + (before * weight_decay).step()).step() }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let vary = |cause, words: &str, look, rule: Sgd| Variation {
            cause,
            words: words.to_string(),
            look,
            rule: Rule::Sgd(rule),
        };
        let own = || self.clone();
        vec![
            vary(
                "nesterov",
                match self.nesterov {
                    true => "the update is that of plain momentum, and is declared as Nesterov's",
                    false => "the update is Nesterov's, and is declared as plain momentum",
                },
                "the optimizer's switch nesterov",
                Sgd { nesterov: !self.nesterov, ..own() },
            ),
            vary(
                "state-reset",
                "the momentum before this step is not in it",
                "what clears or reloads the optimizer's state",
                Sgd { is_first: true, ..own() },
            ),
            vary(
                "decay-coupled",
                "the weight decay does not go through the gradient and the momentum",
                "where the optimizer applies weight decay",
                Sgd { decoupled: !self.decoupled, ..own() },
            ),
            vary(
                "update-ascends",
                "the parameter moves along the gradient, not against it",
                "the sign of the update, and maximize",
                Sgd { maximize: !self.maximize, ..own() },
            ),
        ]
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
                let gradient = op.gradient(grad, before, weight_decay);
                if op.is_first || !op.has_momentum {
                    return gradient;
                }
                let share = dampening.constant(1.0) - dampening;
                (momentum_buffer_before * momentum).step() + gradient * share
            },
            "the momentum";
        update: Plane Forward Each
            |op, grad, before, momentum_buffer, lr, momentum, weight_decay| {
                let decay = (before.clone() * weight_decay.clone() * lr.clone()).step();
                let direction = match (op.has_momentum, op.nesterov) {
                    (true, true) => {
                        let gradient = op.gradient(grad, before, weight_decay);
                        gradient + (momentum_buffer * momentum).step()
                    }
                    (true, false) => momentum_buffer,
                    (false, _) => op.gradient(grad, before, weight_decay),
                };
                let moved = (direction.step() * lr).step();
                let still = moved.constant(0.0) - moved;
                if op.decoupled { still - decay } else { still }
            },
            "what is added to the parameter";
        after: Plane Forward Each |_op, before, update| before + update,
            "the parameter after the step";
    }
}
