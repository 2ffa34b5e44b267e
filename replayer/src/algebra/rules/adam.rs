//! Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with AMSGrad (Reddi, Kale and
//! Kumar 2018).

use super::{Names, Rule, State, Variation};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::ops::table::op;

/// The classes that this rule is of.
pub const CLASSES: &[&str] = &["Adam", "AdamW", "adam", "adamw", "FusedAdam"];

/// How frameworks call its tensors and hyper-parameters.
pub const NAMES: Names = Names {
    states: &[
        State { after: "exp_avg", before: "exp_avg_before", recorded: &["exp_avg", "mu", "m"] },
        State {
            after: "exp_avg_sq",
            before: "exp_avg_sq_before",
            recorded: &["exp_avg_sq", "nu", "v"],
        },
        State {
            after: "max_exp_avg_sq",
            before: "max_exp_avg_sq_before",
            recorded: &["max_exp_avg_sq", "nu_max"],
        },
    ],
    hyper: &[
        ("lr", &["lr", "learning_rate"], f64::NAN),
        ("beta1", &["betas.0", "beta1", "b1"], 0.9),
        ("beta2", &["betas.1", "beta2", "b2"], 0.999),
        ("eps", &["eps"], 1e-8),
        ("eps_root", &["eps_root"], 0.0),
        ("weight_decay", &["weight_decay"], 0.0),
    ],
};

/// Adam with its switches.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// Which step this is, from 1.
    pub step: f64,
    /// Whether the parameter decays by itself (AdamW), and not through the gradient.
    pub decoupled: bool,
    /// Whether the largest second moment divides.
    pub amsgrad: bool,
    /// Whether it ascends.
    pub maximize: bool,
    /// How often the moments are divided by `1 - β^step`.
    pub corrections: u32,
    /// Whether ε is added to the second moment, and not to its root.
    pub eps_inside: bool,
}

impl Adam {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Adam> {
        let name = optimizer.name.as_deref()?;
        CLASSES.contains(&name).then(|| Adam {
            step,
            decoupled: name.eq_ignore_ascii_case("adamw")
                || hyper.is_on("decoupled_weight_decay")
                || hyper.is_on("adam_w_mode"),
            amsgrad: hyper.is_on("amsgrad"),
            maximize: hyper.is_on("maximize"),
            corrections: 1,
            eps_inside: false,
        })
    }

    /// The gradient that the moments take.
    fn gradient<N: Number>(&self, grad: N, before: N, weight_decay: N) -> N {
        let grad = if self.maximize { grad.times(-1.0) } else { grad };
        if self.decoupled { grad } else { (grad + (before * weight_decay).step()).step() }
    }

    /// `β x + (1 - β) y`
    fn moving<N: Number>(&self, moment: N, addend: N, beta: N) -> N {
        let rest = beta.constant(1.0) - beta.clone();
        (moment * beta).step() + addend * rest
    }

    /// A moment divided by `1 - β^step`.
    fn corrected<N: Number>(&self, moment: N, beta: N) -> N {
        let power = beta.ln().times(self.step).exp();
        let correction = power.constant(1.0) - power;
        (0..self.corrections).fold(moment, |moment, _| moment / correction.clone())
    }

    /// The largest of two numbers that are not negative, `(a + b + |a - b|) / 2`.
    fn largest<N: Number>(a: N, b: N) -> N {
        (a.clone() + b.clone() + (a - b).abs()).times(0.5)
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let vary = |cause, words: &str, look, rule: Adam| Variation {
            cause,
            words: words.to_string(),
            look,
            rule: Rule::Adam(rule),
        };
        let own = || self.clone();
        let mut all = vec![
            vary(
                "bias-correction-missing",
                "the moments are used without bias correction",
                "the division of both moments by 1 - β^step",
                Adam { corrections: 0, ..own() },
            ),
            vary(
                "bias-correction-twice",
                "the moments are divided by 1 - β^step twice",
                "the division of both moments by 1 - β^step",
                Adam { corrections: 2, ..own() },
            ),
            vary(
                "eps-inside-sqrt",
                "eps is added to the second moment before the root, not after it",
                "where the optimizer adds eps",
                Adam { eps_inside: !self.eps_inside, ..own() },
            ),
            vary(
                "decay-coupled",
                match self.decoupled {
                    true => {
                        "the weight decay goes through the gradient and the moments (Adam), \
                             and is declared to be decoupled (AdamW)"
                    }
                    false => {
                        "the weight decay is decoupled (AdamW), and is declared to go \
                              through the gradient (Adam)"
                    }
                },
                "whether this optimizer is Adam or AdamW",
                Adam { decoupled: !self.decoupled, ..own() },
            ),
            vary(
                "update-ascends",
                "the parameter moves along the gradient, not against it",
                "the sign of the update, and maximize",
                Adam { maximize: !self.maximize, ..own() },
            ),
        ];
        for step in [1.0, self.step - 1.0, self.step + 1.0] {
            if step >= 1.0 && step != self.step {
                all.push(vary(
                    "step-counter",
                    &format!(
                        "the bias correction is that of step {step}, and the state says step {}",
                        self.step
                    ),
                    "where the step counter is kept, restored and counted up",
                    Adam { step, ..own() },
                ));
            }
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
            op.moving(exp_avg_before, op.gradient(grad, before, weight_decay), beta1),
            "the first moment";
        exp_avg_sq: Plane Forward Each |op, grad, before, exp_avg_sq_before, beta2, weight_decay| {
                let gradient = op.gradient(grad, before, weight_decay);
                op.moving(exp_avg_sq_before, gradient.clone() * gradient, beta2)
            },
            "the second moment";
        max_exp_avg_sq: Plane Forward Each |op, exp_avg_sq, max_exp_avg_sq_before|
            if op.amsgrad { Adam::largest(exp_avg_sq, max_exp_avg_sq_before) } else { exp_avg_sq },
            "the second moment that divides";
        update: Plane Forward Each
            |op, before, exp_avg, max_exp_avg_sq, lr, beta1, beta2, eps, eps_root, weight_decay| {
                let first = op.corrected(exp_avg, beta1).step();
                let second = op.corrected(max_exp_avg_sq, beta2) + eps_root;
                let root = match op.eps_inside {
                    true => (second + eps).sqrt(),
                    false => second.sqrt().step() + eps,
                }
                .step();
                let moved = ((first / root).step() * lr.clone()).step();
                let still = moved.constant(0.0) - moved;
                if op.decoupled { still - (before * weight_decay * lr).step() } else { still }
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update|
            // A decoupled decay is applied to the parameter first.
            if op.decoupled { (before + update).step() } else { before + update },
            "the parameter after the step";
    }
}
