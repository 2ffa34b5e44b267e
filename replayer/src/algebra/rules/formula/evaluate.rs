//! Evaluates a stage of a declared formula, over numbers of any kind.
//!
//! Where a job keeps results in few bits, it may round after each operation. A number that is made
//! of one tensor is rounded alike where the tensor is, and so is a quotient: in the first step that
//! of two moments is the same number for all elements.

use super::nodes::{Node, One, Two};
use super::table::{Plan, Table, What};
use crate::kernels::number::Number;
use crate::kernels::round::Precision;

/// The largest exponent of a power of a number that may be negative.
const MOST_WHOLE: f64 = 1e9;

/// A stage while it is evaluated.
pub(super) struct Stage<'a, N> {
    table: &'a Table,
    plan: &'a Plan,
    /// By node, what it is where it is one number for all elements.
    values: &'a [f64],
    /// The parameter before the step.
    before: N,
    /// By node.
    made: Vec<Option<N>>,
    /// By node, the same as numbers that multiply tensors.
    shared: Vec<Option<N>>,
}

/// Whether every format keeps it.
fn is_kept(x: f64) -> bool {
    Precision::Bf16.round64(x) == x && Precision::F16.round64(x) == x
}

/// A number to a power.
pub(super) fn raised<N: Number>(of: N, exponent: f64, may_be_negative: bool) -> N {
    let unit = of.constant(1.0);
    let size = exponent.abs();
    let is_whole = size == size.trunc() && size < MOST_WHOLE;
    let is_odd = is_whole && size % 2.0 == 1.0;
    let power = match size {
        0.0 => return unit,
        0.5 => of.sqrt(),
        1.0 => of,
        2.0 => of.squared(),
        // Only whole powers of negative numbers are numbers.
        _ if is_odd && may_be_negative => of.clone() * of.abs().power(size - 1.0),
        _ if is_whole && may_be_negative => of.abs().power(size),
        _ => of.power(size),
    };
    if exponent < 0.0 { unit / power } else { power }
}

/// What an operation on two numbers makes.
pub(super) fn of_two<N: Number>(two: Two, a: N, b: N) -> N {
    match two {
        Two::Add => a + b,
        Two::Sub => a - b,
        Two::Mul => a * b,
        Two::Div => a / b,
        Two::Larger => a.larger(b),
        Two::Smaller => a.times(-1.0).larger(b.times(-1.0)).times(-1.0),
    }
}

/// What an operation on one number makes.
pub(super) fn of_one<N: Number>(one: One, a: N) -> N {
    match one {
        One::Neg => a.times(-1.0),
        One::Sqrt => a.sqrt(),
        One::Abs => a.abs(),
        One::Sign => a.sign(),
        One::Exp => a.exp(),
        One::Log => a.ln(),
        One::Tanh => a.tanh(),
    }
}

impl<'a, N: Number> Stage<'a, N> {
    /// The stage of a plan; `values` are those of numbers that all elements share.
    pub(super) fn element(
        table: &'a Table,
        plan: &'a Plan,
        (values, decay): (&'a [f64], f64),
        inputs: &[N],
    ) -> N {
        let count = table.formula.nodes.len();
        let before = inputs[0].clone();
        let (made, shared) = (vec![None; count], vec![None; count]);
        let mut stage = Stage { table, plan, values, before, made, shared };
        for (node, input) in plan.given.iter().zip(inputs) {
            if let Some(node) = node {
                stage.made[*node] = Some(input.clone());
            }
        }
        for node in &plan.order {
            let made = stage.node(*node);
            stage.made[*node] = Some(made);
        }
        let decayed = |after: N, before: N| match decay {
            0.0 => after,
            decay => after.changed(before.times(decay)),
        };
        match plan.what {
            What::Node => stage.number(plan.root),
            What::Update => stage.update(),
            What::After => decayed(stage.number(plan.root), stage.before),
            What::Sum => decayed(stage.before.clone() + inputs[1].clone(), stage.before),
        }
    }

    fn number(&self, node: usize) -> N {
        match &self.made[node] {
            Some(number) => number.clone(),
            None => self.before.constant(self.values[node]),
        }
    }

    fn is_scalar(&self, node: usize) -> bool {
        self.table.is_scalar[node]
    }

    /// A number as one of a tensor's operation takes it.
    fn operand(&mut self, node: usize) -> N {
        if !self.is_scalar(node) || is_kept(self.values[node]) {
            return self.number(node);
        }
        if self.shared[node].is_none() {
            self.shared[node] = Some(self.number(node).scalar());
        }
        self.shared[node].clone().unwrap_or_else(|| self.number(node))
    }

    /// What an operation gives, as a job may keep it.
    fn kept(&self, node: usize, result: N, is_alike: bool) -> N {
        match () {
            // What is recorded is stored, which the walker knows.
            () if node == self.plan.root || self.plan.is_wide[node] => result,
            () if is_alike || self.plan.is_alike[node] => result.step_alike(),
            () => result.step(),
        }
    }

    fn node(&mut self, at: usize) -> N {
        let table = self.table;
        match &table.formula.nodes[at] {
            Node::Number(x) => self.before.constant(*x),
            Node::State(_) => self.before.constant(self.values[at]),
            // The state says it, as with a count of steps.
            _ if self.is_scalar(at) && table.is_told[at] => self.before.constant(self.values[at]),
            Node::Two(two, a, b) => self.two(at, *two, *a, *b),
            Node::One(one, a) => {
                let made = of_one(*one, self.number(*a));
                let is_exact = matches!(one, One::Neg | One::Abs | One::Sign);
                if is_exact || self.is_scalar(at) { made } else { self.kept(at, made, true) }
            }
            Node::Power(base, exponent) => {
                let made = self.power(*base, self.values[*exponent]);
                if self.is_scalar(at) { made } else { self.kept(at, made, true) }
            }
            Node::Where { is_from, of } => self.one_of(*is_from, *of),
            Node::Grad | Node::Param | Node::Hyper(_) => self.number(at),
        }
    }

    fn two(&mut self, at: usize, two: Two, a: usize, b: usize) -> N {
        let scalars = [self.is_scalar(a), self.is_scalar(b)];
        let (x, y) = match scalars {
            [true, true] => (self.number(a), self.number(b)),
            // Beside a tensor of many bits a number has as many.
            _ if self.plan.is_wide[at] => (self.number(a), self.number(b)),
            _ => (self.operand(a), self.operand(b)),
        };
        let made = match two {
            Two::Larger | Two::Smaller => return of_two(two, x, y),
            Two::Mul if a == b => x.squared(),
            _ => of_two(two, x, y),
        };
        // A tensor that is multiplied by nearly 1 may stay what it is, in all elements alike.
        let nearly = match (two, scalars) {
            (Two::Mul, [true, false]) => Some((b, self.values[a])),
            (Two::Mul, [false, true]) => Some((a, self.values[b])),
            (Two::Div, [false, true]) => Some((a, 1.0 / self.values[b])),
            _ => None,
        };
        match (scalars, nearly) {
            ([true, true], _) => made,
            _ if self.plan.is_wide[at] => made,
            (_, Some((of, factor))) if at != self.plan.root && (factor - 1.0).abs() < 0.5 => {
                if factor == 1.0 {
                    made
                } else {
                    made.changed(self.number(of).times(factor - 1.0))
                }
            }
            ([false, false], _) => self.kept(at, made, two == Two::Div),
            _ => self.kept(at, made, true),
        }
    }

    /// A number to a power.
    fn power(&self, base: usize, exponent: f64) -> N {
        let may_be_negative = !self.is_scalar(base) || self.values[base] < 0.0;
        raised(self.number(base), exponent, may_be_negative)
    }

    fn one_of(&mut self, is_from: bool, [a, b, one, other]: [usize; 4]) -> N {
        if self.is_scalar(a) && self.is_scalar(b) {
            let (x, y) = (self.values[a], self.values[b]);
            let is_one = x > y || (is_from && x == y);
            return self.operand(if is_one { one } else { other });
        }
        let apart = self.operand(a) - self.operand(b);
        let (one, other) = (self.operand(one), self.operand(other));
        apart.chosen(is_from, one, other)
    }

    /// The parameter after the step less the parameter before it.
    fn update(&mut self) -> N {
        match self.without(self.plan.root) {
            Some(Some(rest)) => rest,
            Some(None) => self.before.constant(0.0),
            None => self.number(self.plan.root) - self.before.clone(),
        }
    }

    /// A node less the parameter before the step, where the parameter is an addend of it. The
    /// inner one is `None` where nothing is left.
    fn without(&mut self, at: usize) -> Option<Option<N>> {
        if !self.plan.has_parameter[at] {
            return None;
        }
        let Node::Two(two, a, b) = self.table.formula.nodes[at] else { return Some(None) };
        if two == Two::Mul {
            let (of, by) = if self.is_scalar(b) { (a, b) } else { (b, a) };
            let (rest, factor) = (self.without(of)?, self.number(by));
            let change = (factor.clone() - factor.constant(1.0)).scalar();
            let change = (self.before.clone() * change).step();
            return Some(Some(match rest {
                Some(rest) => change + (rest * factor).step(),
                None => change,
            }));
        }
        let (of, other) = if self.plan.has_parameter[a] { (a, b) } else { (b, a) };
        let (rest, other) = (self.without(of)?, self.operand(other));
        Some(Some(match (two, rest) {
            (Two::Sub, Some(rest)) => rest - other,
            (Two::Sub, None) => other.times(-1.0),
            (_, Some(rest)) => rest + other,
            (_, None) => other,
        }))
    }
}
