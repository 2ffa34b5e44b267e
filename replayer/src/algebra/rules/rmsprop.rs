//! RMSprop (Tieleman and Hinton 2012, Coursera: Neural Networks for Machine Learning, lecture
//! 6.5): `v = α v + (1 - α) g²`, `θ -= η g / (√v + ε)`; centered (Graves 2013,
//! <https://arxiv.org/abs/1308.0850>) with `√(v - m²)`, where `m` is the moving mean of `g`; with
//! momentum `b = μ b + g / (√v + ε)`, `θ -= η b`. optax has `√(v + ε)`, and its `b` holds `-η`.

use super::formulas::{
    Descent, class, corrected, correction, divided, is_optax, moving, root, square,
};
use super::variation::{of_corrections, of_descent, of_eps, vary};
use super::{EPS, LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["RMSprop", "rmsprop"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "RMSprop, centered or not, with momentum",
    source: "Tieleman and Hinton 2012; Graves 2013",
    counts_steps: false,
    switches: &["bias_correction", "centered", "eps_in_sqrt", "maximize", "nesterov"],
    wholes: &[],
    states: &[
        State { after: "square_avg", before: "square_avg_before", recorded: &["square_avg", "nu"] },
        State { after: "grad_avg", before: "grad_avg_before", recorded: &["grad_avg", "mu"] },
        State {
            after: "momentum_buffer",
            before: "momentum_buffer_before",
            recorded: &["momentum_buffer", "trace"],
        },
    ],
    hyper: &[
        LR,
        ("alpha", &["alpha", "decay"], f64::NAN),
        ("momentum", &["momentum"], 0.0),
        EPS,
        WEIGHT_DECAY,
    ],
};

/// RMSprop with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rmsprop {
    /// Which step this is, from 1, where the moments are corrected.
    pub step: f64,
    /// Weight decay and sign.
    pub descent: Descent,
    /// Whether the square of the mean is subtracted.
    pub centered: bool,
    /// Whether there is any momentum.
    pub has_momentum: bool,
    /// Whether the momentum is looked up ahead.
    pub nesterov: bool,
    /// Whether the momentum holds changes of the parameter, each by the learning rate of its step.
    pub holds_changes: bool,
    /// How often the moments are divided by `1 - α^step`.
    pub corrections: u32,
    /// Whether ε is added before the root.
    pub eps_inside: bool,
}

impl Rmsprop {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Rmsprop> {
        let is_optax = is_optax(optimizer);
        let is_inside = match hyper.0.contains_key("eps_in_sqrt") {
            true => hyper.is_on("eps_in_sqrt"),
            false => is_optax,
        };
        CLASSES.contains(&class(optimizer)?).then(|| Rmsprop {
            step,
            descent: Descent { maximize: hyper.is_on("maximize"), decoupled: false, late: false },
            centered: hyper.is_on("centered"),
            has_momentum: hyper.number("momentum").is_some_and(|momentum| momentum != 0.0),
            nesterov: hyper.is_on("nesterov"),
            holds_changes: is_optax,
            corrections: u32::from(hyper.is_on("bias_correction")),
            eps_inside: is_inside,
        })
    }

    /// The gradient divided by the root of its second moment.
    fn normed<N: Number>(&self, gradient: N, square_avg: N, grad_avg: N, alpha: N, eps: N) -> N {
        let correct = |moment: N| match self.corrections {
            0 => moment,
            times => corrected(moment, correction(alpha.clone(), self.step), times),
        };
        let mut second = correct(square_avg);
        if self.centered {
            // Rounding may bring the variance below 0, where a job that rounds otherwise has none.
            let zero = second.constant(0.0);
            second = (second - square(correct(grad_avg))).step().larger(zero);
        }
        divided(gradient, root(second, eps, self.eps_inside))
    }

    /// What is added to the momentum.
    fn addend<N: Number>(&self, normed: N, lr: N) -> N {
        if self.holds_changes { normed.scaled(lr).times(-1.0) } else { normed }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let eps_inside = !self.eps_inside;
        let mut all = vec![of_eps(Rule::Rmsprop, self.eps_inside, Rmsprop { eps_inside, ..own() })];
        all.push(vary(
            Rule::Rmsprop,
            "not-centered",
            match self.centered {
                true => "the mean of the gradient is not subtracted, and centered is declared",
                false => "the mean of the gradient is subtracted, and centered is not declared",
            },
            Rmsprop { centered: !self.centered, ..own() },
        ));
        if self.has_momentum {
            all.push(vary(
                Rule::Rmsprop,
                "lr-in-momentum",
                match self.holds_changes {
                    true => "the momentum holds gradients, and is declared to hold changes",
                    false => "the momentum holds changes by the learning rate, not gradients",
                },
                Rmsprop { holds_changes: !self.holds_changes, ..own() },
            ));
        }
        let corrections = |corrections| Rmsprop { corrections, ..own() };
        if self.step.is_finite() {
            let mut corrected = of_corrections(Rule::Rmsprop, self.corrections, corrections);
            // Twice corrected, the square of the mean is larger than that from which it is taken.
            corrected.retain(|own| !self.centered || own.cause != "bias-correction-twice");
            all.extend(corrected);
        }
        all.extend(of_descent(Rule::Rmsprop, self.descent, |descent| Rmsprop { descent, ..own() }));
        all
    }
}

op! {
    Rmsprop = "rmsprop";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        square_avg_before: Plane, "the second moment before the step";
        grad_avg_before: Plane, "the first moment before the step";
        momentum_buffer_before: Plane, "the momentum before the step";
        lr: Rows, "the learning rate";
        alpha: Rows, "how much of the moments stays";
        momentum: Rows, "how much of the momentum stays";
        eps: Rows, "what is added to the root";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        square_avg: Plane Forward Each
            |op, grad, before, square_avg_before, alpha, weight_decay| {
                let squared = square(op.descent.gradient(grad, before, weight_decay));
                moving(square_avg_before, squared, alpha)
            },
            "the second moment";
        grad_avg: Plane Forward Each |op, grad, before, grad_avg_before, alpha, weight_decay|
            moving(grad_avg_before, op.descent.gradient(grad, before, weight_decay), alpha),
            "the first moment";
        momentum_buffer: Plane Forward Each
            |op, grad, before, square_avg, grad_avg, momentum_buffer_before, lr, alpha, momentum,
             eps, weight_decay| {
                let gradient = op.descent.gradient(grad, before, weight_decay);
                let normed = op.normed(gradient, square_avg, grad_avg, alpha, eps);
                momentum_buffer_before.scaled(momentum) + op.addend(normed, lr)
            },
            "the momentum";
        update: Plane Forward Each
            |op, grad, before, square_avg, grad_avg, momentum_buffer, lr, alpha, momentum, eps,
             weight_decay| {
                let gradient = op.descent.gradient(grad, before.clone(), weight_decay.clone());
                let normed = op.normed(gradient, square_avg, grad_avg, alpha, eps);
                if !op.has_momentum {
                    return op.descent.update(normed, before, weight_decay, lr);
                }
                let ahead = match op.nesterov {
                    true => {
                        let addend = op.addend(normed, lr.clone());
                        (momentum_buffer.scaled(momentum) + addend).step()
                    }
                    false => momentum_buffer,
                };
                match op.holds_changes {
                    true => {
                        op.descent.subtracted(ahead.times(-1.0), before, weight_decay, lr)
                    }
                    false => op.descent.update(ahead, before, weight_decay, lr),
                }
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay|
            op.descent.after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
