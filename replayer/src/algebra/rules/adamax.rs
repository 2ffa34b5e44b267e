//! Adamax (Kingma and Ba 2015, <https://arxiv.org/abs/1412.6980>, algorithm 2):
//! `m = β1 m + (1 - β1) g`, `u = max(β2 u, |g| + ε)`, `θ -= η m / ((1 - β1^t) u)`. The paper has no
//! ε; torch and optax have it here.

use super::formulas::{Descent, class, corrected, correction, moving, raised};
use super::variation::{of_corrections, of_descent, of_step, vary};
use super::{BETA1, BETA2, EPS, FIRST_MOMENT, LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Adamax", "adamax", "adamaxw"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Adamax",
    source: "Kingma and Ba 2015",
    counts_steps: true,
    switches: &["maximize"],
    wholes: &[],
    states: &[
        FIRST_MOMENT,
        State { after: "exp_inf", before: "exp_inf_before", recorded: &["exp_inf", "nu", "u"] },
    ],
    hyper: &[LR, BETA1, BETA2, EPS, WEIGHT_DECAY],
};

/// Adamax with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Adamax {
    /// Which step this is, from 1.
    pub step: f64,
    /// Weight decay and sign.
    pub descent: Descent,
    /// How often the first moment is divided by `1 - β1^step`.
    pub corrections: u32,
    /// Whether ε is added where the largest gradient divides, and not where it is taken.
    pub eps_divides: bool,
}

impl Adamax {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Adamax> {
        let name = class(optimizer)?;
        CLASSES.contains(&name).then(|| Adamax {
            step,
            descent: Descent {
                maximize: hyper.is_on("maximize"),
                decoupled: name == "adamaxw",
                late: false,
            },
            corrections: 1,
            eps_divides: false,
        })
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let corrections = |corrections| Adamax { corrections, ..own() };
        let mut all = of_corrections(Rule::Adamax, self.corrections, corrections);
        all.push(vary(
            Rule::Adamax,
            "eps-elsewhere",
            "eps is added to the largest gradient where it divides, not where it is taken",
            Adamax { eps_divides: !self.eps_divides, ..own() },
        ));
        all.extend(of_descent(Rule::Adamax, self.descent, |descent| Adamax { descent, ..own() }));
        all.extend(of_step(Rule::Adamax, self.step, |step| Adamax { step, ..own() }));
        all
    }
}

op! {
    Adamax = "adamax";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        exp_avg_before: Plane, "the moment before the step";
        exp_inf_before: Plane, "the largest gradient before the step";
        lr: Rows, "the learning rate";
        beta1: Rows, "how much of the moment stays";
        beta2: Rows, "how much of the largest gradient stays";
        eps: Rows, "what is added to the size of the gradient";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        exp_avg: Plane Forward Each |op, grad, before, exp_avg_before, beta1, weight_decay|
            moving(exp_avg_before, op.descent.gradient(grad, before, weight_decay), beta1),
            "the moment";
        exp_inf: Plane Forward Each
            |op, grad, before, exp_inf_before, beta2, eps, weight_decay| {
                let size = op.descent.gradient(grad, before, weight_decay).abs();
                let size = if op.eps_divides { size } else { raised(size, eps) };
                exp_inf_before.scaled(beta2).larger(size)
            },
            "the largest gradient";
        update: Plane Forward Each
            |op, before, exp_avg, exp_inf, lr, beta1, eps, weight_decay| {
                let first = corrected(exp_avg, correction(beta1, op.step), op.corrections);
                let largest = match op.eps_divides {
                    true => raised(exp_inf, eps),
                    false => exp_inf,
                };
                op.descent.by_quotient((first, largest), before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
