//! What the formulas of several rules have in common.
//!
//! `step` marks where a job that keeps its numbers in few bits may round: after each operation that
//! some implementation does by itself.

use crate::algebra::declaration::Optimizer;
use crate::kernels::number::Number;

/// The class of an optimizer, without the framework's name before it.
pub(crate) fn class(optimizer: &Optimizer) -> Option<&str> {
    let name = optimizer.class()?;
    Some(name.strip_prefix("optax.").unwrap_or(name))
}

/// Whether it is optax's: its rules are functions, and so their names begin with a small letter.
pub(crate) fn is_optax(optimizer: &Optimizer) -> bool {
    class(optimizer).is_some_and(|name| name.starts_with(|first: char| first.is_lowercase()))
}

/// Whether an optimizer is code of the job, and none of a framework's.
pub(crate) fn is_own_code(optimizer: &Optimizer) -> bool {
    let frameworks = ["torch.", "apex.", "deepspeed.", "transformer_engine.", "optax"];
    let is_of = |module: &str| frameworks.iter().any(|own| module.starts_with(own));
    !optimizer.module.is_empty() && !is_of(&optimizer.module) && !is_optax(optimizer)
}

/// How weight decay and the sign of the gradient enter a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Descent {
    /// Whether it ascends.
    pub maximize: bool,
    /// Whether the parameter decays by itself, and not through the gradient.
    pub decoupled: bool,
    /// Whether it is the parameter after the rest of the change that decays by itself.
    pub late: bool,
}

impl Descent {
    /// The gradient that the rest of the rule takes.
    pub(crate) fn gradient<N: Number>(&self, grad: N, before: N, weight_decay: N) -> N {
        let grad = if self.maximize { grad.times(-1.0) } else { grad };
        if self.decoupled { grad } else { (grad + (before * weight_decay.scalar()).step()).step() }
    }

    /// What is added to a parameter that is moved by `lr direction`.
    pub(crate) fn update<N: Number>(&self, direction: N, before: N, weight_decay: N, lr: N) -> N {
        self.subtracted(direction.scaled(lr.clone()), before, weight_decay, lr)
    }

    /// What is added to a parameter that is moved by `lr first / root`. Frameworks multiply before
    /// they divide, and what is too small for a format then is lost.
    pub(crate) fn by_quotient<N: Number>(
        &self,
        (first, root): (N, N),
        before: N,
        weight_decay: N,
        lr: N,
    ) -> N {
        let moved = divided(first * lr.clone().scalar(), root).step_alike();
        self.subtracted(moved, before, weight_decay, lr)
    }

    /// What is added to a parameter from which `moved` is subtracted.
    pub(crate) fn subtracted<N: Number>(&self, moved: N, before: N, weight_decay: N, lr: N) -> N {
        let still = moved.times(-1.0);
        let before = if self.late { (before + still.clone()).step() } else { before };
        match self.decoupled {
            true => still - ((before * weight_decay.scalar()).step() * lr).step(),
            false => still,
        }
    }

    /// The parameter after the step. One that decays by itself may be stored in between.
    pub(crate) fn after<N: Number>(&self, before: N, update: N, weight_decay: N, lr: N) -> N {
        let after = before.clone() + update;
        if !self.decoupled {
            return after;
        }
        let kept = lr.constant(1.0) - weight_decay.clone() * lr.clone();
        after.by_settings(before.clone(), kept).changed(before * weight_decay * lr)
    }
}

/// `β x + (1 - β) y`
pub(crate) fn moving<N: Number>(moment: N, addend: N, beta: N) -> N {
    let rest = beta.constant(1.0) - beta.clone();
    moment.scaled(beta) + (addend * rest.scalar()).step()
}

/// `y²`
pub(crate) fn square<N: Number>(y: N) -> N {
    y.squared().step()
}

/// `1 - β^step`
pub(crate) fn correction<N: Number>(beta: N, step: f64) -> N {
    let power = beta.power(step);
    power.constant(1.0) - power
}

/// A moment that is divided by its correction so often.
pub(crate) fn corrected<N: Number>(moment: N, correction: N, times: u32) -> N {
    let correction = if times > 0 { correction.scalar() } else { correction };
    (0..times).fold(moment, |moment, _| (moment / correction.clone()).step())
}

/// A number in the job's format, and ε. Where that is less than half a spacing all elements lose it.
pub(crate) fn raised<N: Number>(x: N, eps: N) -> N {
    let eps = eps.scalar();
    (x + eps.clone()).changed(eps)
}

/// The root of a second moment with what keeps it from 0.
pub(crate) fn root<N: Number>(second: N, eps: N, is_inside: bool) -> N {
    let eps = eps.scalar();
    match is_inside {
        true => (second + eps).step_alike().sqrt(),
        false => second.sqrt().step_alike() + eps,
    }
    .step_alike()
}

/// A gradient or first moment that is divided by the root of a second moment. In the first step
/// that is plus or minus the same number for all elements.
pub(crate) fn divided<N: Number>(first: N, root: N) -> N {
    (first / root).step_alike()
}
