//! LAMB (You et al. 2020, <https://arxiv.org/abs/1904.00962>): Adam's direction with the weight decay
//! in it, times the norm of the parameter over the norm of the direction.

use super::formulas::{class, corrected, correction, divided, moving, root, square};
use super::variation::{of_corrections, of_eps, of_step};
use super::{
    BETA1, BETA2, EPS_ROOT, FIRST_MOMENT, LR, Names, Rule, SECOND_MOMENT, Variation, WEIGHT_DECAY,
};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Lamb", "LAMB", "lamb"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "LAMB",
    source: "You et al. 2020",
    counts_steps: true,
    switches: &["debias"],
    wholes: &[("ratio", "ratio_variance")],
    states: &[FIRST_MOMENT, SECOND_MOMENT],
    hyper: &[LR, BETA1, BETA2, ("eps", &["eps"], 1e-6), EPS_ROOT, WEIGHT_DECAY],
};

/// LAMB with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lamb {
    /// Which step this is, from 1.
    pub step: f64,
    /// How often the moments are divided by `1 - β^step`.
    pub corrections: u32,
    /// Whether ε is added to the second moment, and not to its root.
    pub eps_inside: bool,
    /// Whether the optimizer has no switch for the corrections.
    pub may_not_correct: bool,
}

impl Lamb {
    /// Variants that clip by a norm of all gradients, or clamp the norm of the parameter, are
    /// others.
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Lamb> {
        const OTHERS: [&str; 4] = ["max_grad_norm", "clamp_value", "trust_clip", "use_nvlamb"];
        let is_other = OTHERS.iter().any(|name| {
            hyper.is_on(name) || hyper.number(name).is_some_and(|number| number != 0.0)
        });
        let may_not_correct = !hyper.0.contains_key("debias");
        let corrections = u32::from(may_not_correct || hyper.is_on("debias"));
        let own = Lamb { step, corrections, eps_inside: false, may_not_correct };
        (CLASSES.contains(&class(optimizer)?) && !is_other).then_some(own)
    }

    /// The third version of the paper has no corrections, which its first authors' code follows.
    pub(super) fn forms(&self) -> Vec<Lamb> {
        let plain = Lamb { corrections: 0, may_not_correct: false, ..self.clone() };
        if self.may_not_correct { vec![plain] } else { Vec::new() }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let corrections = |corrections| Lamb { corrections, ..own() };
        let mut all = of_corrections(Rule::Lamb, self.corrections, corrections);
        let eps_inside = !self.eps_inside;
        all.push(of_eps(Rule::Lamb, self.eps_inside, Lamb { eps_inside, ..own() }));
        all.extend(of_step(Rule::Lamb, self.step, |step| Lamb { step, ..own() }));
        all
    }
}

op! {
    Lamb = "lamb";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        exp_avg_before: Plane, "the first moment before the step";
        exp_avg_sq_before: Plane, "the second moment before the step";
        ratio: Rows, "the norm of the parameter over that of the direction";
        lr: Rows, "the learning rate";
        beta1: Rows, "how much of the first moment stays";
        beta2: Rows, "how much of the second moment stays";
        eps: Rows, "what is added to the root of the second moment";
        eps_root: Rows, "what is added below the root";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        exp_avg: Plane Forward Each |_op, grad, exp_avg_before, beta1|
            moving(exp_avg_before, grad, beta1),
            "the first moment";
        exp_avg_sq: Plane Forward Each |_op, grad, exp_avg_sq_before, beta2|
            moving(exp_avg_sq_before, square(grad), beta2),
            "the second moment";
        direction: Plane Forward Each
            |op, before, exp_avg, exp_avg_sq, beta1, beta2, eps, eps_root, weight_decay| {
                let first = corrected(exp_avg, correction(beta1, op.step), op.corrections);
                let second = correction(beta2, op.step);
                let second = corrected(exp_avg_sq, second, op.corrections) + eps_root;
                let moved = divided(first, root(second, eps, op.eps_inside));
                (moved + before.scaled(weight_decay)).step()
            },
            "the direction of the change";
        update: Plane Forward Each |_op, direction, ratio, lr|
            direction.scaled(ratio).scaled(lr).times(-1.0),
            "what is added to the parameter";
        after: Plane Forward Each |_op, before, update| before + update,
            "the parameter after the step";
    }
}
