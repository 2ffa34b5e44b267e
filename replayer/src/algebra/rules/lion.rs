//! Lion (Chen et al. 2023, <https://arxiv.org/abs/2302.06675>, algorithm 2):
//! `θ -= η (sign(β1 m + (1 - β1) g) + λ θ)`, then `m = β2 m + (1 - β2) g`.

use super::formulas::{Descent, class, moving};
use super::variation::{of_descent, vary};
use super::{BETA1, LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Lion", "lion", "FusedLion", "DeepSpeedCPULion"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Lion",
    source: "Chen et al. 2023",
    counts_steps: false,
    switches: &["maximize"],
    wholes: &[],
    states: &[State {
        after: "exp_avg",
        before: "exp_avg_before",
        recorded: &["exp_avg", "mu", "m"],
    }],
    hyper: &[LR, BETA1, ("beta2", &["betas.1", "beta2", "b2"], 0.99), WEIGHT_DECAY],
};

/// Lion with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lion {
    /// Weight decay and sign.
    pub descent: Descent,
    /// What of the moment and the gradient the update is the sign of.
    pub direction: Direction,
}

/// What the update of Lion is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Direction {
    /// The sign of the moment before the step, mixed with the gradient by β1.
    Published,
    /// The sign of the moment after the step.
    Moment,
    /// The mixture itself, without its sign.
    Unsigned,
    /// As published, β1 and β2 exchanged in update and moment.
    Exchanged,
}

impl Lion {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, _step: f64) -> Option<Lion> {
        // optax has other modes, which are smooth in place of the sign.
        let is_hard = hyper.0.get("mode").is_none_or(|mode| mode == "hard");
        (CLASSES.contains(&class(optimizer)?) && is_hard).then(|| Lion {
            descent: Descent { maximize: hyper.is_on("maximize"), decoupled: true, late: false },
            direction: Direction::Published,
        })
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let other = |direction| Lion { direction, ..self.clone() };
        let mut all = vec![
            vary(
                Rule::Lion,
                "betas-exchanged",
                "beta1 and beta2 are exchanged",
                other(Direction::Exchanged),
            ),
            vary(
                Rule::Lion,
                "update-from-new-moment",
                "the update is the sign of the moment after the step",
                other(Direction::Moment),
            ),
            vary(
                Rule::Lion,
                "sign-missing",
                "the update has not the sign of the mixture, but the mixture itself",
                other(Direction::Unsigned),
            ),
        ];
        all.extend(of_descent(Rule::Lion, self.descent, |descent| Lion {
            descent,
            ..self.clone()
        }));
        all
    }
}

op! {
    Lion = "lion";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        exp_avg_before: Plane, "the moment before the step";
        lr: Rows, "the learning rate";
        beta1: Rows, "how much of the moment stays in the update";
        beta2: Rows, "how much of the moment stays in it";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        exp_avg: Plane Forward Each
            |op, grad, before, exp_avg_before, beta1, beta2, weight_decay| {
                let beta = if op.direction == Direction::Exchanged { beta1 } else { beta2 };
                moving(exp_avg_before, op.descent.gradient(grad, before, weight_decay), beta)
            },
            "the moment";
        update: Plane Forward Each
            |op, grad, before, exp_avg_before, exp_avg, lr, beta1, beta2, weight_decay| {
                let gradient = op.descent.gradient(grad, before.clone(), weight_decay.clone());
                let beta = if op.direction == Direction::Exchanged { beta2 } else { beta1 };
                let direction = match op.direction {
                    Direction::Moment => exp_avg.sign(),
                    Direction::Unsigned => moving(exp_avg_before, gradient, beta).step(),
                    _ => moving(exp_avg_before, gradient, beta).sign(),
                };
                op.descent.update(direction, before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
