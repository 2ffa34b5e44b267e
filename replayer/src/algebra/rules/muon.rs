//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>), as torch and optax have it:
//! the momentum of a matrix, made nearly orthogonal by a polynomial that is applied several times.

use super::formulas::{Descent, class, is_optax, moving};
use super::variation::vary;
use super::{LR, Names, Rule, State, Variation, WEIGHT_DECAY};
use crate::algebra::declaration::{Hyper, Optimizer};
use crate::ops::table::op;

/// The classes that this rule is of.
pub(crate) const CLASSES: &[&str] = &["Muon", "muon"];

/// How frameworks call its tensors and hyper-parameters.
pub(crate) const NAMES: Names = Names {
    words: "Muon of matrices",
    source: "Jordan et al. 2024",
    counts_steps: false,
    switches: &["nesterov", "use_muon"],
    wholes: &[("orthogonal", "orthogonal_variance"), ("alike", "alike_variance")],
    states: &[State {
        after: "momentum_buffer",
        before: "momentum_buffer_before",
        recorded: &["momentum_buffer", "mu"],
    }],
    hyper: &[LR, ("momentum", &["momentum", "beta"], 0.95), WEIGHT_DECAY],
};

/// What is made orthogonal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Taken {
    /// The momentum after this step, with the gradient mixed in once more where it is Nesterov's.
    Momentum,
    /// The gradient.
    Gradient,
    /// The momentum of before this step.
    MomentumBefore,
}

/// Muon with its switches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Muon {
    /// Which step this is, from 1; NaN where it is not counted.
    pub step: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
    /// What is made orthogonal.
    pub taken: Taken,
    /// Whether it is optax's.
    pub is_optax: bool,
    /// Coefficients of the polynomial `a X + b X Xᵀ X + c (X Xᵀ)² X`.
    pub coefficients: [f64; 3],
    /// How often the polynomial is applied.
    pub times: u32,
    /// What keeps the norm that divides the matrix from 0.
    pub eps: f64,
    /// How the change follows the shape.
    adjust: Adjust,
    /// What the orthogonal matrix is multiplied by, beside the learning rate.
    pub factor: f64,
}

/// What the orthogonal matrix of `rows` x `columns` is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Adjust {
    /// `√max(1, rows / columns)`; in optax, which has matrices transposed, of columns over rows.
    Original,
    /// `c √max(rows, columns)`.
    Rms(f64),
    /// `√(rows / columns)`
    Spectral,
}

impl Muon {
    /// torch's own, and optax's; other classes of the name have other defaults and rules.
    pub(super) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Muon> {
        let is_optax = is_optax(optimizer);
        let coefficient = |at: usize| {
            let names = ["ns_coefficients", "ns_coeffs"];
            names.iter().find_map(|name| hyper.number(&format!("{name}.{at}")))
        };
        let word = |name: &str| hyper.0.get(name).and_then(|value| value.as_str());
        let adjust = match (is_optax, word("adjust_lr_fn")) {
            (true, _) => hyper.number("consistent_rms").map_or(Adjust::Original, Adjust::Rms),
            (false, None | Some("original")) => Adjust::Original,
            (false, Some("match_rms_adamw")) => Adjust::Rms(0.2),
            (false, Some("spectral_unclamped")) => Adjust::Spectral,
            (false, Some(_)) => return None,
        };
        let is_other = hyper.is_on("adaptive")
            || word("preconditioning").is_some_and(|kind| kind != "frobenius")
            || !(is_optax || optimizer.is_of("torch.optim"))
            || hyper.0.get("ns_coeffs").is_some_and(|all| all.get(0).is_some_and(|x| x.is_array()));
        let default = [3.4445, -4.7750, 2.0315];
        (CLASSES.contains(&class(optimizer)?) && !is_other).then(|| Muon {
            step,
            nesterov: !hyper.0.contains_key("nesterov") || hyper.is_on("nesterov"),
            taken: Taken::Momentum,
            is_optax,
            coefficients: [0, 1, 2].map(|at| coefficient(at).unwrap_or(default[at])),
            times: hyper.number("ns_steps").unwrap_or(5.0) as u32,
            eps: hyper.number("eps").unwrap_or(if is_optax { 1e-8 } else { 1e-7 }),
            adjust,
            factor: 1.0,
        })
    }

    /// See [`Rule::of_parameter`].
    pub(super) fn of_parameter(self, shape: &[u64]) -> Result<Muon, String> {
        let [rows, columns] = shape else {
            return Err(format!(
                "Muon is known of matrices, and this parameter has {} dimensions",
                shape.len()
            ));
        };
        let (rows, columns) = (*rows as f64, *columns as f64);
        let factor = match self.adjust {
            Adjust::Original if self.is_optax => (columns / rows).max(1.0).sqrt(),
            Adjust::Original => (rows / columns).max(1.0).sqrt(),
            Adjust::Rms(share) => share * rows.max(columns).sqrt(),
            Adjust::Spectral => (rows / columns).sqrt(),
        };
        Ok(Muon { factor, ..self })
    }

    /// What is made orthogonal, from an element of the gradient and of the momentum. optax corrects
    /// both for their bias; ε is added to the norm of what is corrected.
    pub(crate) fn mixed(&self, gradient: f64, moment: f64, momentum: f64) -> f64 {
        let corrects = self.is_optax && self.step.is_finite();
        let corrected = |x: f64, step: f64| match corrects {
            true => x / (1.0 - libm::pow(momentum, step)),
            false => x,
        };
        match self.taken {
            Taken::Gradient => gradient,
            Taken::Momentum if self.nesterov => {
                momentum * corrected(moment, self.step + 1.0)
                    + (1.0 - momentum) * corrected(gradient, self.step)
            }
            Taken::Momentum | Taken::MomentumBefore => corrected(moment, self.step),
        }
    }

    pub(super) fn variations(&self) -> Vec<Variation> {
        let own = || self.clone();
        let taken = |taken| Muon { taken, ..own() };
        let cause = "orthogonalised-wrong-tensor";
        let words = |what: &str| format!("the matrix that is made orthogonal is {what}");
        vec![
            vary(Rule::Muon, cause, &words("the gradient"), taken(Taken::Gradient)),
            vary(
                Rule::Muon,
                cause,
                &words("the momentum of before this step"),
                taken(Taken::MomentumBefore),
            ),
            vary(
                Rule::Muon,
                "nesterov",
                match self.nesterov {
                    true => "the update is that of plain momentum, and is declared as Nesterov's",
                    false => "the update is Nesterov's, and is declared as plain momentum",
                },
                Muon { nesterov: !self.nesterov, ..own() },
            ),
        ]
    }

    fn descent() -> Descent {
        Descent { maximize: false, decoupled: true, late: false }
    }
}

op! {
    Muon = "muon";
    inputs {
        grad: Plane, "the gradient that the optimizer takes";
        before: Plane, "the parameter before the step";
        momentum_buffer_before: Plane, "the momentum before the step";
        orthogonal: Plane, "the orthogonal matrix";
        alike: Rows, "1, with what all of the matrix may be off by";
        lr: Rows, "the learning rate";
        momentum: Rows, "how much of the momentum stays";
        weight_decay: Rows, "how fast the parameter decays";
    }
    stages {
        momentum_buffer: Plane Forward Each |_op, grad, momentum_buffer_before, momentum|
            moving(momentum_buffer_before, grad, momentum),
            "the momentum";
        update: Plane Forward Each |op, before, orthogonal, alike, lr, weight_decay| {
                let direction = orthogonal.scaled(alike).times(op.factor);
                Muon::descent().update(direction, before, weight_decay, lr)
            },
            "what is added to the parameter";
        after: Plane Forward Each |_op, before, update, lr, weight_decay|
            Muon::descent().after(before, update, weight_decay, lr),
            "the parameter after the step";
    }
}
