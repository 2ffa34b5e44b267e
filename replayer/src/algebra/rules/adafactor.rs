//! Adafactor (Shazeer and Stern 2018, <https://arxiv.org/abs/1804.04235>), as torch and optax have it:
//! without momentum, the second moment of a matrix as a product of its rows' and columns' means.
//!
//! With t for the step, `1 - β2 = t^-0.8`. The change is `α u / max(1, RMS(u) / d)`, where u is the
//! gradient over the root of the second moment, and α the learning rate times the RMS of the
//! parameter, which is not taken below a limit.

use super::formulas::{class, divided, is_optax, moving};
use super::{LR, Names, Rule, State, Variation};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::kernels::number::Number;
use crate::kernels::round::Precision;
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Adafactor", "adafactor"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Adafactor without momentum",
    source: "Shazeer and Stern 2018",
    counts_steps: true,
    switches: &["factored", "maximize", "multiply_by_parameter_scale", "scale_parameter"],
    wholes: &[
        ("rate", "rate_variance"),
        ("rows_columns", "rows_columns_variance"),
        ("scale", "scale_variance"),
    ],
    states: &[State { after: "variance", before: "variance_before", recorded: &["variance", "v"] }],
    hyper: &[LR, ("weight_decay", &["weight_decay", "weight_decay_rate"], 0.0)],
};

/// What optimizers call the means of the squares of rows and of columns.
pub(crate) const FACTORS: [&[&str]; 2] = [&["row_var", "v_row"], &["col_var", "v_col"]];

/// Adafactor with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Adafactor {
    /// Which step this is, from 1.
    pub step: f64,
    /// How fast the second moment forgets: `1 - β2` is the step to this power.
    pub decay: f64,
    /// Whether it is optax's, which adds ε to squares, and whose decay is not times the learning
    /// rate.
    pub is_optax: bool,
    /// Whether the gradient's sign is turned.
    pub maximize: bool,
    /// Whether the second moment is kept as means of rows and columns.
    pub is_factored: bool,
    /// ε of the second moment; `None`: torch's, the spacing of the parameter's format.
    pub eps: Option<f64>,
    /// The least RMS of the parameter; `None`: the learning rate is not multiplied by it.
    pub least: Option<f64>,
    /// The RMS of the change above which it is clipped.
    pub threshold: Option<f64>,
}

impl Adafactor {
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Adafactor> {
        let is_optax = is_optax(optimizer);
        // optax's averages changes where it is given a momentum, and others their own variants.
        let is_other = hyper.number("momentum").is_some()
            || hyper.0.contains_key("scale_parameter")
            || hyper.0.contains_key("beta1");
        let off = |name: &str| hyper.0.contains_key(name) && !hyper.is_on(name);
        let number = |name: &str, default: f64| match hyper.0.get(name) {
            Some(serde_json::Value::Null) => None,
            _ => Some(hyper.number(name).unwrap_or(default)),
        };
        let rule = match is_optax {
            true => Adafactor {
                step: step - hyper.number("decay_offset").unwrap_or(0.0),
                decay: -hyper.number("decay_rate").unwrap_or(0.8),
                is_optax,
                maximize: false,
                is_factored: false,
                eps: Some(hyper.number("eps").unwrap_or(1e-30)),
                least: (!off("multiply_by_parameter_scale")).then_some(1e-3),
                threshold: number("clipping_threshold", 1.0),
            },
            false => Adafactor {
                step,
                decay: hyper.number("beta2_decay")?,
                is_optax,
                maximize: hyper.is_on("maximize"),
                is_factored: false,
                eps: hyper.number("eps.0"),
                least: Some(hyper.number("eps.1").unwrap_or(1e-3)),
                threshold: Some(hyper.number("d").unwrap_or(1.0)),
            },
        };
        (CLASSES.contains(&class(optimizer)?) && !is_other).then_some(rule)
    }

    /// See [`Rule::of_parameter`].
    pub(super) fn of_parameter(
        self,
        shape: &[u64],
        stored: Option<Precision>,
        is_factored: bool,
    ) -> Result<Adafactor, String> {
        if is_factored && self.is_optax && shape.len() != 2 {
            return Err("rows and columns of a parameter of more than two dimensions are not \
                        known of optax's Adafactor"
                .into());
        }
        let spacing = 2.0 * stored.unwrap_or(Precision::F32).unit_roundoff();
        let eps = Some(self.eps.unwrap_or(spacing));
        Ok(Adafactor { is_factored, eps, ..self })
    }

    /// `1 - β2` of this step.
    pub(crate) fn rate(&self) -> f64 {
        libm::pow(self.step, self.decay)
    }

    /// The ε of the second moment.
    pub(crate) fn eps(&self) -> f64 {
        self.eps.unwrap_or(0.0)
    }

    /// The learning rate before the scale of the parameter: torch's is `1 / √t` at most.
    pub(crate) fn most(&self, lr: f64) -> f64 {
        if self.is_optax { lr } else { lr.min(1.0 / self.step.sqrt()) }
    }

    /// What is added to a square of the gradient.
    pub(crate) fn floor_of_squares(&self) -> f64 {
        if self.is_optax { self.eps() } else { 0.0 }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        super::variation::of_step(Rule::Adafactor, self.step, |step| Adafactor {
            step,
            ..self.clone()
        })
    }

    /// The second moment that divides.
    fn divisor<N: Number>(&self, second: N) -> N {
        let least = second.constant(self.eps() * self.eps());
        if self.is_optax { second } else { second.larger(least) }
    }
}

op! {
    Adafactor = "adafactor";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        variance_before: Plane, "the second moment before the step";
        rate: Rows, "how much of the square enters the second moment";
        rows_columns: Plane, "the second moment that rows and columns give";
        scale: Rows, "what the direction is multiplied by";
        lr: Rows, "the learning rate";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        variance: Plane Forward Each |op, grad, variance_before, rate| {
                let squared = grad.squared().plus(op.floor_of_squares()).step();
                let stays = rate.constant(1.0) - rate;
                moving(variance_before, squared, stays)
            },
            "the second moment";
        direction: Plane Forward Each |op, grad, variance, rows_columns| {
                let grad = if op.maximize { grad.times(-1.0) } else { grad };
                let second = if op.is_factored { rows_columns } else { variance };
                divided(grad, op.divisor(second).sqrt().step_alike())
            },
            "the direction of the change";
        update: Plane Forward Each |op, direction, before, scale, lr, weight_decay| {
                let still = direction.scaled(scale).times(-1.0);
                let decayed = (before * weight_decay.scalar()).step();
                still - if op.is_optax { decayed } else { (decayed * lr.scalar()).step() }
            },
            "what is added to the parameter";
        after: Plane Forward Each |op, before, update, lr, weight_decay| {
                let after = before.clone() + update;
                if op.is_optax { after } else { after.changed(before * weight_decay * lr) }
            },
            "the parameter after the step";
    }
}
