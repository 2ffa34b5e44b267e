//! NAdam (Dozat 2016, <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>), with decoupled
//! decay (Loshchilov and Hutter 2019). The moments are Adam's, and with `μ_t` for the momentum of
//! step t and `Π_t` for the product of all `μ` up to it,
//!
//! `θ -= η ((1 - μ_t) g / (1 - Π_t) + μ_{t+1} m / (1 - Π_{t+1})) / (√(v / (1 - β2^t)) + ε)`.
//!
//! In torch `μ_t = β1 (1 - 0.96^{t ψ} / 2)`, in optax it is `β1`.

use super::formulas::{Descent, class, corrected, correction, is_optax, moving, root, square};
use super::variation::{of_corrections, of_descent, of_eps, of_step, vary};
use super::{
    BETA1, BETA2, EPS, EPS_ROOT, FIRST_MOMENT, LR, Names, Rule, SECOND_MOMENT, Variation,
    WEIGHT_DECAY,
};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["NAdam", "nadam", "nadamw"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "NAdam",
    source: "Dozat 2016",
    counts_steps: true,
    switches: &["decoupled_weight_decay", "maximize", "nesterov"],
    wholes: &[],
    states: &[FIRST_MOMENT, SECOND_MOMENT],
    hyper: &[LR, BETA1, BETA2, EPS, EPS_ROOT, WEIGHT_DECAY],
};

/// NAdam with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Nadam {
    /// Which step this is, from 1.
    pub step: f64,
    /// Weight decay and sign.
    pub descent: Descent,
    /// How fast the momentum grows to β1; `None`: it is β1 from the start.
    pub momentum_decay: Option<f64>,
    /// The momentum of this step, of the next one, and the product of all up to this one, each
    /// divided by β1 of its own.
    factors: [f64; 3],
    /// Whether the gradient of this step enters the update beside the moment.
    pub looks_ahead: bool,
    /// How often the moments are corrected for their bias.
    pub corrections: u32,
    /// Whether ε is added before the root.
    pub eps_inside: bool,
}

impl Nadam {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Nadam> {
        let name = class(optimizer)?;
        let decay = hyper.number("momentum_decay").unwrap_or(4e-3);
        let nadam = Nadam {
            step,
            descent: Descent {
                maximize: hyper.is_on("maximize"),
                decoupled: ["nadamw", "adamw"].contains(&name)
                    || hyper.is_on("decoupled_weight_decay"),
                late: false,
            },
            momentum_decay: (!is_optax(optimizer)).then_some(decay),
            factors: [1.0; 3],
            looks_ahead: true,
            corrections: 1,
            eps_inside: false,
        };
        let is_of_adam = ["adam", "adamw"].contains(&name) && hyper.is_on("nesterov");
        (CLASSES.contains(&name) || is_of_adam).then(|| nadam.scheduled())
    }

    /// NAdam as optax has it: with the momentum that Adam has.
    pub(super) fn of_adam(step: f64, descent: Descent) -> Nadam {
        Nadam {
            step,
            descent,
            momentum_decay: None,
            factors: [1.0; 3],
            looks_ahead: true,
            corrections: 1,
            eps_inside: false,
        }
    }

    /// The same with the factors of its step and decay.
    fn scheduled(mut self) -> Nadam {
        let Some(decay) = self.momentum_decay else {
            return Nadam { factors: [1.0; 3], ..self };
        };
        let factor = |step: f64| 1.0 - 0.5 * libm::pow(0.96, step * decay);
        let (mut product, mut step) = (1.0, 1.0);
        // Below 1e-30 the product is nothing beside 1, of which it is subtracted.
        while step <= self.step && product > 1e-30 && factor(step) < 1.0 {
            product *= factor(step);
            step += 1.0;
        }
        self.factors = [factor(self.step), factor(self.step + 1.0), product];
        self
    }

    /// What the root of the second moment divides.
    fn direction<N: Number>(&self, gradient: N, exp_avg: N, beta1: N) -> N {
        let [this, next, product] = self.factors;
        let momentum = beta1.clone().times(this);
        let next = beta1.clone().times(next);
        let product = beta1.power(self.step).times(product);
        let unit = || product.constant(1.0);
        if !self.looks_ahead {
            return corrected(exp_avg, unit() - product, self.corrections);
        }
        let own = (gradient * (unit() - momentum).scalar()).step();
        let own = corrected(own, unit() - product.clone(), self.corrections);
        let moment = (exp_avg * next.clone().scalar()).step();
        own + corrected(moment, unit() - product.clone() * next, self.corrections)
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let corrections = |corrections| Nadam { corrections, ..own() };
        let mut all = of_corrections(Rule::Nadam, self.corrections, corrections);
        let eps_inside = !self.eps_inside;
        all.push(of_eps(Rule::Nadam, self.eps_inside, Nadam { eps_inside, ..own() }));
        all.push(vary(
            Rule::Nadam,
            "nesterov",
            "the update is Adam's: the gradient of this step is in it by the moment alone",
            Nadam { looks_ahead: false, ..own() },
        ));
        let (momentum_decay, words) = match self.momentum_decay {
            Some(_) => (None, "the momentum is beta1 from the first step, as in optax"),
            None => (Some(4e-3), "the momentum grows to beta1 by 0.96^(0.004 step), as in torch"),
        };
        all.push(vary(
            Rule::Nadam,
            "momentum-schedule",
            words,
            Nadam { momentum_decay, ..own() }.scheduled(),
        ));
        all.extend(of_descent(Rule::Nadam, self.descent, |descent| Nadam { descent, ..own() }));
        all.extend(of_step(Rule::Nadam, self.step, |step| Nadam { step, ..own() }.scheduled()));
        all
    }
}

op! {
    Nadam = "nadam";
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
            |op, grad, before, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, eps_root,
             weight_decay| {
                let gradient = op.descent.gradient(grad, before.clone(), weight_decay.clone());
                let direction = op.direction(gradient, exp_avg, beta1).step();
                let correction = correction(beta2, op.step);
                let second = corrected(exp_avg_sq, correction, op.corrections) + eps_root;
                let root = root(second, eps, op.eps_inside);
                op.descent.by_quotient((direction, root), before, weight_decay, lr)
            },
            "what is added to the parameter";
        // torch adds the part of the gradient and that of the moment one after the other.
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr).times(1.0).step(),
            "the parameter after the step";
    }
}
