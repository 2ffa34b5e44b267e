//! Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with AMSGrad (Reddi, Kale and
//! Kumar 2018).

use super::formulas::{
    Descent, class, corrected, correction, is_optax, is_own_code, moving, root, square,
};
use super::nadam::Nadam;
use super::variation::{of_corrections, of_descent, of_eps, of_step, vary};
use super::{
    BETA1, BETA2, EPS, EPS_ROOT, FIRST_MOMENT, LR, Names, Rule, SECOND_MOMENT, State, Variation,
    WEIGHT_DECAY,
};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] =
    &["Adam", "AdamW", "adam", "adamw", "FusedAdam", "DeepSpeedCPUAdam", "amsgrad"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Adam, AdamW, AMSGrad",
    source: "Kingma and Ba 2015; Reddi et al. 2018",
    counts_steps: true,
    switches: &[
        "adam_w_mode",
        "amsgrad",
        "bias_correction",
        "correct_bias",
        "decoupled_weight_decay",
        "maximize",
    ],
    wholes: &[],
    states: &[
        FIRST_MOMENT,
        SECOND_MOMENT,
        State {
            after: "max_exp_avg_sq",
            before: "max_exp_avg_sq_before",
            recorded: &["max_exp_avg_sq", "nu_max"],
        },
    ],
    hyper: &[LR, BETA1, BETA2, EPS, EPS_ROOT, WEIGHT_DECAY],
};

/// Adam with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Adam {
    /// Which step this is, from 1.
    pub step: f64,
    /// Weight decay (by itself: AdamW) and sign.
    pub descent: Descent,
    /// Whether the largest second moment divides.
    pub amsgrad: bool,
    /// Whether the second moment is corrected before the largest is taken, as optax does.
    pub corrects_first: bool,
    /// How often the first and the second moment are divided by `1 - β^step`.
    pub corrections: [u32; 2],
    /// Whether ε is added to the second moment, and not to its root.
    pub eps_inside: bool,
    /// Whether ε is added to the root of the second moment before that is corrected (section 2 of
    /// the paper).
    pub eps_hat: bool,
    /// Whether it is none of the frameworks' own, and may follow another published form.
    pub is_own_code: bool,
}

impl Adam {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Adam> {
        let name = class(optimizer)?;
        // optax's adam with that switch is its nadam.
        let is_other = is_optax(optimizer) && hyper.is_on("nesterov");
        let is_off = |name: &str| hyper.0.contains_key(name) && !hyper.is_on(name);
        let corrections = u32::from(!is_off("bias_correction") && !is_off("correct_bias"));
        (CLASSES.contains(&name) && !is_other).then(|| Adam {
            step,
            descent: Descent {
                maximize: hyper.is_on("maximize"),
                decoupled: name.eq_ignore_ascii_case("adamw")
                    || hyper.is_on("decoupled_weight_decay")
                    || hyper.is_on("adam_w_mode"),
                late: false,
            },
            amsgrad: hyper.is_on("amsgrad") || name == "amsgrad",
            corrects_first: name == "amsgrad",
            corrections: [corrections; 2],
            eps_inside: false,
            eps_hat: false,
            is_own_code: is_own_code(optimizer),
        })
    }

    /// Other forms that are published under the same name: the ε of the paper's second form, and a
    /// decay of the parameter after it moved. Code of a job's own may follow either.
    pub(super) fn forms(&self) -> Vec<Adam> {
        if !self.is_own_code {
            return Vec::new();
        }
        let late = Descent { late: self.descent.decoupled, ..self.descent };
        let all = [(late, false), (self.descent, true), (late, true)];
        let all = all.map(|(descent, eps_hat)| Adam { descent, eps_hat, ..self.clone() });
        all.into_iter().filter(|form| form != self).collect()
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let corrections = |both| Adam { corrections: [both, both], ..own() };
        let mut all = of_corrections(Rule::Adam, self.corrections[0], corrections);
        for (moment, corrections) in [("first", [0, 1]), ("second", [1, 0])] {
            let words = format!("the {moment} moment is used without bias correction");
            let rule = Adam { corrections, ..own() };
            all.push(vary(Rule::Adam, "bias-correction-missing", &words, rule));
        }
        let eps_inside = !self.eps_inside;
        all.push(of_eps(Rule::Adam, self.eps_inside, Adam { eps_inside, ..own() }));
        all.extend(of_descent(Rule::Adam, self.descent, |descent| Adam { descent, ..own() }));
        all.extend(of_step(Rule::Adam, self.step, |step| Adam { step, ..own() }));
        if !self.amsgrad {
            let words = "the update is NAdam's: the gradient of this step is in it twice";
            let rule = Nadam::of_adam(self.step, self.descent);
            all.push(vary(Rule::Nadam, "nesterov", words, rule));
        }
        all
    }
}

op! {
    Adam = "adam";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        exp_avg_before: Plane, "the first moment before the step";
        exp_avg_sq_before: Plane, "the second moment before the step";
        max_exp_avg_sq_before: Plane, "the largest second moment before the step";
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
        max_exp_avg_sq: Plane Forward Each |op, exp_avg_sq, max_exp_avg_sq_before, beta2| {
                let times = if op.corrects_first { op.corrections[1] } else { 0 };
                let own = corrected(exp_avg_sq, correction(beta2, op.step), times);
                if op.amsgrad { own.larger(max_exp_avg_sq_before) } else { own }
            },
            "the second moment that divides";
        update: Plane Forward Each
            |op, before, exp_avg, max_exp_avg_sq, lr, beta1, beta2, eps, eps_root, weight_decay| {
                let first = corrected(exp_avg, correction(beta1, op.step), op.corrections[0]);
                let second = correction(beta2.clone(), op.step);
                let times = if op.corrects_first { 0 } else { op.corrections[1] };
                let second = corrected(max_exp_avg_sq.clone(), second, times) + eps_root;
                let root = match op.eps_hat {
                    true => {
                        let rest = correction(beta2, op.step).sqrt().scalar();
                        (root(max_exp_avg_sq, eps, false) / rest).step_alike()
                    }
                    false => root(second, eps, op.eps_inside),
                };
                op.descent.by_quotient((first, root), before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
