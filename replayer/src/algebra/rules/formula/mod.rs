//! A rule that the job declares as a formula, for an optimizer that no rule is known of
//! (docs/step.md). The formula is data: it is evaluated over numbers of any kind, as the tables of
//! known rules are, so that both the exact reading and the error that rounding may have brought
//! come by themselves.

mod evaluate;
mod nodes;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::sync::Arc;

use serde_json::Value;

use self::evaluate::{Stage, of_one, of_two, raised};
pub(crate) use self::nodes::Nodes;
use self::nodes::{Node, One, Two};
use self::table::{Form, Table};
use super::variation::of_step;
use super::{Names, Rule, Variation};
use crate::algebra::counters::COUNTERS;
use crate::algebra::declaration::Hyper;
use crate::algebra::factor::is_near;
use crate::kernels::number::Number;
use crate::kernels::round::Precision;
use crate::kernels::uncertain::{MOST_SHARED, Roundings};
use crate::ops::{self, Op, Tensor};

/// Powers by the count of steps that are looked at: each is tried in 25 ways, with all others.
const MOST_POWERS: usize = 3;

/// Numbers of an optimizer's state by name, before the step and after it.
pub(crate) type Numbers = BTreeMap<String, [Option<f64>; 2]>;

/// What is known of the parameter that a formula is to be judged for.
pub(crate) struct Parameter {
    /// The name of its optimizer.
    pub optimizer: String,
    /// The numbers of its state.
    pub numbers: Numbers,
    /// The tensors of its state.
    pub tensors: BTreeSet<String>,
    /// Those of them that are kept in as many bits as the job computes in.
    pub wide: BTreeSet<String>,
    /// Whether its change was recorded.
    pub has_update: bool,
    /// Whether this is the first step, before which there is no state.
    pub is_first: bool,
    /// Whether the job may keep its results in fewer bits than it computes in.
    pub is_narrow: bool,
}

/// A declared formula for one parameter.
#[derive(Clone)]
pub(crate) struct Formula {
    table: &'static Table,
    given: Arc<Given>,
    /// Which step this is, from 1; NaN where nothing counts steps.
    step: f64,
    /// By node, what it is where it is one number for all elements.
    values: Arc<Vec<f64>>,
    /// How much of the parameter is added to it by the formula itself, as by weight decay.
    decay: f64,
}

/// The numbers that a formula takes.
struct Given {
    hyper: Hyper,
    numbers: Numbers,
}

impl Debug for Formula {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}, step {}", self.table.names.words, self.step)
    }
}

impl PartialEq for Formula {
    fn eq(&self, other: &Formula) -> bool {
        let is_same = |(x, y): (&f64, &f64)| x.to_bits() == y.to_bits();
        std::ptr::eq(self.table, other.table)
            && self.values.iter().zip(other.values.iter()).all(is_same)
    }
}

impl Formula {
    /// The formula that a job declares, for a parameter that takes its `step`-th step; or why it
    /// is none of such a parameter.
    pub(crate) fn of(
        declared: &Value,
        hyper: &Hyper,
        step: f64,
        parameter: Parameter,
    ) -> Result<Formula, String> {
        let formula = Nodes::read(declared)?;
        parameter.refuses(&formula)?;
        for node in &formula.nodes {
            if let Node::Hyper(name) = node
                && hyper.number(name).is_none()
            {
                return Err(format!("the optimizer declares no number {name}"));
            }
        }
        let Parameter { optimizer, numbers, tensors, wide, has_update, is_narrow, .. } = parameter;
        let form = Form { optimizer, tensors, wide, has_update };
        let table = Table::of(declared.to_string(), &formula, form);
        table.check(is_narrow)?;
        let given = Arc::new(Given { hyper: hyper.clone(), numbers });
        Ok(Formula { table, given, step, values: Arc::default(), decay: 0.0 }.counted())
    }

    /// The same as another step.
    pub(crate) fn counting(&self, step: f64) -> Formula {
        Formula { step, ..self.clone() }.counted()
    }

    /// The same with the numbers of its step.
    fn counted(self) -> Formula {
        let values = self.numbers();
        let decay = self.table.share_of_parameter(&values) - 1.0;
        // What is not nearly the parameter is no parameter that decays.
        let decay = if decay.abs() < 0.5 { decay } else { 0.0 };
        Formula { values: Arc::new(values), decay, ..self }
    }

    /// A number of the state, before the step or after it.
    fn number(&self, name: &str, is_after: bool) -> Option<f64> {
        if COUNTERS.contains(&name) && !self.step.is_nan() {
            return Some(if is_after { self.step } else { self.step - 1.0 });
        }
        self.given.numbers.get(name)?[usize::from(is_after)]
    }

    /// By node, what it is where it is one number for all elements, and else NaN.
    fn numbers(&self) -> Vec<f64> {
        let hyper = |name: &str| self.given.hyper.number(name).unwrap_or(f64::NAN);
        let numbers = self.evaluated(&1.0, &hyper, true);
        numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect()
    }

    /// By node, the same as numbers of a kind, of which `unit` is one; `hyper` makes one of a
    /// hyper-parameter. What the state says after the step is what it says, unless `is_told` is off.
    fn evaluated<N: Number>(
        &self,
        unit: &N,
        hyper: &dyn Fn(&str) -> N,
        is_told: bool,
    ) -> Vec<Option<N>> {
        let formula = &self.table.formula;
        let mut told: BTreeMap<usize, f64> = BTreeMap::new();
        for (name, node) in &formula.state {
            let after = self.number(name, true).filter(|_| is_told && self.table.is_told[*node]);
            told.extend(after.map(|after| (*node, after)));
        }
        let mut exact: Vec<f64> = Vec::with_capacity(formula.nodes.len());
        let mut all: Vec<Option<N>> = Vec::with_capacity(formula.nodes.len());
        for (at, node) in formula.nodes.iter().enumerate() {
            let made = match told.get(&at) {
                _ if !self.table.is_scalar[at] => None,
                Some(after) => Some((unit.constant(*after), *after)),
                None => self.made(node, unit, hyper, (&all, &exact)),
            };
            exact.push(made.as_ref().map_or(f64::NAN, |(_, exact)| *exact));
            all.push(made.map(|(number, _)| number));
        }
        all
    }

    /// A node of numbers that were made before it, and its value.
    fn made<N: Number>(
        &self,
        node: &Node,
        unit: &N,
        hyper: &dyn Fn(&str) -> N,
        (all, exact): (&[Option<N>], &[f64]),
    ) -> Option<(N, f64)> {
        let of = |node: &usize| all[*node].clone();
        let constant = |x: f64| (unit.constant(x), x);
        Some(match node {
            Node::Number(x) => constant(*x),
            Node::State(name) => constant(self.number(name, false).unwrap_or(0.0)),
            Node::Hyper(name) => (hyper(name), self.given.hyper.number(name)?),
            Node::Two(two, a, b) => {
                (of_two(*two, of(a)?, of(b)?), of_two(*two, exact[*a], exact[*b]))
            }
            Node::One(one, a) => (of_one(*one, of(a)?), of_one(*one, exact[*a])),
            Node::Power(a, b) => {
                let (base, exponent) = (exact[*a], exact[*b]);
                (raised(of(a)?, exponent, base < 0.0), raised(base, exponent, base < 0.0))
            }
            Node::Where { is_from, of: [a, b, one, other] } => {
                let is_one = exact[*a] > exact[*b] || (*is_from && exact[*a] == exact[*b]);
                let chosen = if is_one { one } else { other };
                (of(chosen)?, exact[*chosen])
            }
            Node::Grad | Node::Param => return None,
        })
    }

    /// The numbers of the state that are further off than rounding in f32 brings them from what the
    /// formula makes of those before the step: their names, what they are, and should be.
    pub(crate) fn wrong_numbers(&self) -> Vec<(String, f64, f64)> {
        let roundings = Roundings::new(Precision::F32.unit_roundoff(), None);
        let hyper = |name: &str| {
            let value = self.given.hyper.number(name).unwrap_or(f64::NAN);
            roundings.with_variance(value, Precision::F32.deviation(value).powi(2))
        };
        let right = self.evaluated(&roundings.exact(1.0), &hyper, false);
        let wrong = |(name, node): (&String, &usize)| {
            let after = self.given.numbers.get(name)?[1]?;
            let right = right[*node].as_ref()?;
            // All roundings at their largest, and that of what was stored.
            let stored = Precision::F32.deviation(after);
            let most = 3f64.sqrt()
                * (stored + right.errors().iter().map(|error| error.abs()).sum::<f64>());
            // A count is exact, and others have looked at it.
            let is_near = (after - right.value).abs() <= most;
            (!COUNTERS.contains(&name.as_str()) && !is_near)
                .then(|| (name.clone(), after, right.value))
        };
        self.table.formula.state.iter().filter_map(wrong).collect()
    }

    /// Whether a factor is one that corrections of its bias make: powers of a number by the step,
    /// and 1 less these, and their roots, that multiply or divide where they should not.
    pub(crate) fn corrects_by(&self, factor: f64) -> bool {
        let mut products = vec![1.0];
        for power in self.powers_of_step() {
            for correction in [power, 1.0 - power] {
                let exponents = [-1.0, -0.5, 0.0, 0.5, 1.0];
                let corrected = products.iter().flat_map(|product| {
                    exponents.map(|exponent| product * libm::pow(correction, exponent))
                });
                products = corrected.collect();
            }
        }
        let is_one = |product: f64| (product - 1.0).abs() < 1e-12;
        products.into_iter().any(|product| !is_one(product) && is_near(factor, product))
    }

    /// The values of powers by the count of steps, as those that correct moments; a few of them.
    fn powers_of_step(&self) -> Vec<f64> {
        let formula = &self.table.formula;
        let mut is_count: Vec<bool> = Vec::with_capacity(formula.nodes.len());
        let mut powers: Vec<f64> = Vec::new();
        for (at, node) in formula.nodes.iter().enumerate() {
            let is_of_count = node.takes().iter().any(|of| is_count[*of]);
            is_count.push(match node {
                Node::State(name) => COUNTERS.contains(&name.as_str()),
                _ => is_of_count && self.table.is_scalar[at],
            });
            let value = self.values[at];
            if let Node::Power(_, exponent) = node
                && is_count[*exponent]
                && value > 0.0
                && value < 1.0
                && !powers.contains(&value)
                && powers.len() < MOST_POWERS
            {
                powers.push(value);
            }
        }
        powers
    }

    /// How frameworks call its tensors and hyper-parameters.
    pub(crate) fn names(&self) -> &'static Names {
        &self.table.names
    }

    /// How it may have been implemented wrongly, whatever it is.
    pub(super) fn variations(&self) -> Vec<Variation> {
        let takes_steps = self.table.formula.states().any(|name| COUNTERS.contains(&name));
        match takes_steps && !self.step.is_nan() {
            true => of_step(Rule::Formula, self.step, |step| self.counting(step)),
            false => Vec::new(),
        }
    }
}

impl Parameter {
    /// Refuses a formula that takes or gives what the state has not.
    fn refuses(&self, formula: &Nodes) -> Result<(), String> {
        for name in formula.states() {
            if !self.tensors.contains(name) && !self.numbers.contains_key(name) {
                let known = self.tensors.iter().chain(self.numbers.keys());
                let known: Vec<&str> = known.map(String::as_str).collect();
                let known = if known.is_empty() { "nothing".into() } else { known.join(", ") };
                return Err(format!(
                    "it takes or gives {name} of the optimizer's state, of which {known} was \
                     recorded"
                ));
            }
            let before = self.numbers.get(name).is_none_or(|[before, _]| before.is_some());
            if !before && !self.is_first && !COUNTERS.contains(&name) {
                return Err(format!("{name} of the state was not recorded before the step"));
            }
        }
        Ok(())
    }
}

impl Table {
    /// Refuses a formula with powers that are none, or of which a stage has more roundings than can
    /// be told apart.
    fn check(&self, is_narrow: bool) -> Result<(), String> {
        let is_wrong = |node: &Node| match node {
            Node::Power(_, exponent) => !self.is_scalar[*exponent],
            _ => false,
        };
        if self.formula.nodes.iter().any(is_wrong) {
            return Err("it raises to the power of a tensor: an exponent is one number".into());
        }
        let most = |plan: &table::Plan| plan.shared[usize::from(is_narrow)] + plan.numbers;
        let longest = self.plans.iter().map(most).max().unwrap_or(0);
        match longest <= MOST_SHARED {
            true => Ok(()),
            false => Err(format!(
                "a stage of it has {longest} numbers and results that a job of so few bits may \
                 round alike in all elements, and at most {MOST_SHARED} can be told apart: judge the \
                 parameters of more bits, or give more of it as state"
            )),
        }
    }

    /// How often the parameter before the step is in the parameter after it.
    fn share_of_parameter(&self, values: &[f64]) -> f64 {
        let formula = &self.formula;
        let mut shares: Vec<f64> = Vec::with_capacity(formula.nodes.len());
        for node in &formula.nodes {
            let share = |at: &usize| shares[*at];
            let is_scalar = |at: &usize| self.is_scalar[*at];
            shares.push(match node {
                Node::Param => 1.0,
                Node::Two(Two::Add, a, b) => share(a) + share(b),
                Node::Two(Two::Sub, a, b) => share(a) - share(b),
                Node::Two(Two::Mul, a, b) if is_scalar(b) => share(a) * values[*b],
                Node::Two(Two::Mul, a, b) if is_scalar(a) => share(b) * values[*a],
                Node::Two(Two::Div, a, b) if is_scalar(b) => share(a) / values[*b],
                Node::One(One::Neg, a) => -share(a),
                _ => 0.0,
            });
        }
        shares[formula.param]
    }
}

impl Op for Formula {
    const NAME: &'static str = "the declared formula";

    fn inputs(&self) -> &'static [Tensor] {
        self.table.inputs
    }

    fn stages(&self) -> &'static [ops::Stage] {
        self.table.stages
    }

    fn shared_roundings(&self, stage: usize) -> Option<[usize; 2]> {
        Some(self.table.plans[stage].shared)
    }

    fn element<N: Number>(&self, stage: usize, inputs: &[N]) -> N {
        let plan = &self.table.plans[stage];
        Stage::element(self.table, plan, (&self.values, self.decay), inputs)
    }

    fn finish<N: Number>(&self, _stage: usize, sum: N, _count: f64) -> N {
        sum
    }
}
