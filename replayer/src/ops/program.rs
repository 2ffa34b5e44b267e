//! A formula over the columns of a row, and its evaluation with the error that rounding may have
//! brought to each element.
//!
//! The error is that which `kernels::uncertain` propagates, found the other way round: the
//! derivative of the result by each step is carried back from the result (reverse accumulation;
//! Linnainmaa 1976), once for all roundings, where a number carries the derivatives by each of its
//! roundings forward. A block of columns is evaluated at a time, in the first-level cache.

use super::reverse::{Asked, Errors, Of, Way, backward};
use crate::kernels::number::Number;
use crate::kernels::round::Precision;
use crate::kernels::vectorised;

/// Columns that are evaluated at a time.
pub(super) const LANES: usize = 128;
/// A number of each column.
pub(super) type Block = [f64; LANES];
pub(super) const ZERO: Block = [0.0; LANES];

/// The deviation of rounding 1, beyond which arithmetic has far fewer bits than f64.
const COARSE: f64 = 1e-12;

/// A formula.
pub(super) struct Program {
    pub nodes: Vec<Node>,
    /// Numbers that the row shares.
    pub known: Vec<Known>,
    /// Places of roundings that several of `known` have, and whether the row shares them.
    pub kept: Vec<bool>,
    /// The node that is the result.
    pub output: usize,
    /// The deviation of rounding 1 in arithmetic.
    pub unit: f64,
    /// What a result of arithmetic that is not 0 may be off by beside.
    pub least: f64,
    /// Whether an error has the last place.
    pub has_last: bool,
}

/// A step of a formula.
pub(super) struct Node {
    pub action: Action,
    /// Whose error the rounding of the step is.
    pub place: Option<Place>,
    /// Whether it errs by what is known only from the numbers themselves.
    pub has_extra: bool,
    /// Whether it has an error at all.
    pub is_uncertain: bool,
    /// Whether the result depends on it.
    pub is_needed: bool,
}

/// Whose error a rounding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Each element's own, independent of others.
    Own,
    /// Each element's own, added to all others of this place as if they erred together.
    Last,
    /// The row's.
    Shared,
}

/// What a step does with numbers of nodes before it.
pub(super) enum Action {
    /// Takes an input.
    Input(usize),
    Two(Two, Term, Term),
    Sqrt(usize),
    Abs(usize),
    Sign(usize),
    Larger(usize, usize),
    /// One of two numbers, by the sign of another one.
    Chosen(Choice),
    Square(usize),
    Function(Function, usize),
    /// A number that the row shares, for each column.
    Spread(usize),
    /// Keeps the number in a format.
    Stored(usize, Precision),
    /// The same of a number to which another was added.
    Changed(usize, Term, Precision),
}

/// `one` where `by` is above 0, or with `is_from` at 0 too; else `other`.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub is_from: bool,
    pub by: usize,
    pub one: usize,
    pub other: usize,
}

impl Choice {
    #[inline(always)]
    pub(super) fn is_one(self, by: f64) -> bool {
        by > 0.0 || (self.is_from && by == 0.0)
    }
}

/// A function of one number.
#[derive(Clone, Copy)]
pub(super) enum Function {
    Exp,
    Ln,
    Tanh,
    Power(f64),
}

impl Function {
    fn of(self, x: f64) -> f64 {
        match self {
            Function::Exp => Number::exp(x),
            Function::Ln => Number::ln(x),
            Function::Tanh => Number::tanh(x),
            Function::Power(exponent) => x.power(exponent),
        }
    }

    /// The derivative at an argument, where the function is `value`.
    pub(super) fn slope(self, x: f64, value: f64) -> f64 {
        match self {
            Function::Exp => value,
            Function::Ln => 1.0 / x,
            Function::Tanh => value.one_minus_square(),
            Function::Power(exponent) if x == 0.0 => f64::from(u8::from(exponent == 1.0)),
            Function::Power(exponent) => exponent * value / x,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Two {
    Plus,
    Minus,
    Times,
    Over,
}

/// A number of each column, by its node, or one that the row shares.
#[derive(Clone, Copy)]
pub(super) enum Term {
    Column(usize),
    Known(usize),
}

impl Term {
    pub(super) fn node(self) -> Option<usize> {
        match self {
            Term::Column(node) => Some(node),
            Term::Known(_) => None,
        }
    }
}

/// A number that the row shares, with its errors.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    pub value: f64,
    pub own: Spread,
    pub shared: Spread,
    pub last: f64,
    /// Errors of places that other numbers have too.
    pub kept: Vec<(usize, f64)>,
}

/// Sums over standard deviations, with signs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spread {
    /// Of their sizes.
    pub most: f64,
    /// Of their squares.
    pub squares: f64,
}

impl Spread {
    pub(super) fn add(&mut self, error: f64) {
        self.most += error.abs();
        self.squares += error * error;
    }
}

/// The values of an input, and the variance of the error that each has.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub values: &'a Block,
    pub variance: &'a Block,
}

/// Memory for the evaluation of programs, one block after the other.
#[derive(Default)]
pub(super) struct Evaluation {
    values: Vec<Block>,
    extra: Vec<Block>,
    /// The way back from the result.
    way: Way,
    /// Errors of numbers within a formula.
    inner: Box<Errors>,
}

vectorised!(
    /// Evaluates a program over a block.
    forward,
    forward_body,
    (program: &Program, inputs: &[Input<'_>], memory: &mut Evaluation) -> ()
);

impl Program {
    /// Evaluates it over a block.
    pub(super) fn run(&self, inputs: &[Input<'_>], memory: &mut Evaluation) {
        let count = self.nodes.len();
        if memory.values.len() < count {
            memory.values.resize(count, ZERO);
            memory.extra.resize(count, ZERO);
        }
        forward(self, inputs, memory);
    }

    /// Whether its result depends on an input.
    pub(super) fn takes(&self, input: usize) -> bool {
        let is_it = |node: &Node| matches!(node.action, Action::Input(at) if at == input);
        self.nodes.iter().any(|node| node.is_needed && is_it(node))
    }

    /// Its result in the block that was evaluated last.
    pub(super) fn result<'b>(&self, inputs: &[Input<'b>], memory: &'b Evaluation) -> &'b Block {
        value(self, inputs, &memory.values, self.output)
    }

    /// The errors of the result.
    pub(super) fn errors(
        &self,
        inputs: &[Input<'_>],
        asked: Asked,
        memory: &mut Evaluation,
        errors: &mut Errors,
    ) {
        let Evaluation { values, extra, way, .. } = memory;
        let of = Of { program: self, inputs, values, extra };
        backward(&of, &[(self.output, 1.0)], asked, way, errors);
    }
}

/// The block in which the value of a node is: steps that only round have that of the node before.
#[inline(always)]
pub(super) fn value<'b>(
    program: &Program,
    inputs: &[Input<'b>],
    values: &'b [Block],
    mut node: usize,
) -> &'b Block {
    loop {
        match program.nodes[node].action {
            Action::Input(at) => return inputs[at].values,
            Action::Stored(of, _) | Action::Changed(of, ..) => node = of,
            _ => return &values[node],
        }
    }
}

#[inline(always)]
fn forward_body(program: &Program, inputs: &[Input<'_>], memory: &mut Evaluation) {
    for (at, node) in program.nodes.iter().enumerate() {
        if !node.is_needed {
            continue;
        }
        if node.has_extra {
            extra(program, inputs, memory, at);
        }
        let (before, rest) = memory.values.split_at_mut(at);
        let out = &mut rest[0];
        let of = |node: usize| value(program, inputs, before, node);
        match node.action {
            Action::Input(_) | Action::Stored(..) | Action::Changed(..) => {}
            Action::Two(two, a, b) => match (a, b) {
                (Term::Column(a), Term::Column(b)) => {
                    let (a, b) = (of(a), of(b));
                    match two {
                        Two::Plus => each(out, |i| a[i] + b[i]),
                        Two::Minus => each(out, |i| a[i] - b[i]),
                        Two::Times => each(out, |i| a[i] * b[i]),
                        Two::Over => each(out, |i| a[i] / b[i]),
                    }
                }
                (Term::Column(a), Term::Known(b)) => {
                    let (a, b) = (of(a), program.known[b].value);
                    match two {
                        Two::Plus => each(out, |i| a[i] + b),
                        Two::Minus => each(out, |i| a[i] - b),
                        Two::Times => each(out, |i| a[i] * b),
                        // Beside arithmetic of fewer bits a further rounding is nothing.
                        Two::Over if program.unit > COARSE => each(out, |i| a[i] * (1.0 / b)),
                        Two::Over => each(out, |i| a[i] / b),
                    }
                }
                (Term::Known(a), b) => {
                    let a = program.known[a].value;
                    let Term::Column(b) = b else { unreachable!("known numbers were computed") };
                    let b = of(b);
                    match two {
                        Two::Plus => each(out, |i| a + b[i]),
                        Two::Minus => each(out, |i| a - b[i]),
                        Two::Times => each(out, |i| a * b[i]),
                        Two::Over => each(out, |i| a / b[i]),
                    }
                }
            },
            Action::Square(a) => {
                let a = of(a);
                each(out, |i| a[i] * a[i]);
            }
            Action::Sqrt(a) => {
                let a = of(a);
                each(out, |i| a[i].sqrt());
            }
            Action::Abs(a) => {
                let a = of(a);
                each(out, |i| if a[i] < 0.0 { -a[i] } else { a[i] });
            }
            Action::Sign(a) => {
                let a = of(a);
                each(out, |i| if a[i] == 0.0 { a[i] } else { a[i].signum() });
            }
            Action::Larger(a, b) => larger(of(a), of(b), out),
            Action::Chosen(choice) => {
                choose(choice, [choice.by, choice.one, choice.other].map(of), out)
            }
            Action::Function(function, a) => apply(function, of(a), out),
            Action::Spread(known) => *out = [program.known[known].value; LANES],
        }
    }
}

#[inline(always)]
fn larger(a: &Block, b: &Block, out: &mut Block) {
    each(out, |i| if is_second(a[i], b[i]) { b[i] } else { a[i] });
}

#[inline(always)]
fn choose(choice: Choice, [by, one, other]: [&Block; 3], out: &mut Block) {
    each(out, |i| if choice.is_one(by[i]) { one[i] } else { other[i] });
}

#[inline(always)]
fn apply(function: Function, of: &Block, out: &mut Block) {
    each(out, |i| function.of(of[i]));
}

/// What a power errs by beside its rounding: its logarithm and the product of that with the
/// exponent are rounded too, and at 0 a root errs by the root of what its argument errs by.
fn of_power(exponent: f64, unit: f64, argument: &Block, errors: &Errors, out: &mut Block) {
    each(out, |i| match argument[i] {
        0.0 if exponent < 1.0 => (errors.most[i] + errors.shared[i]).power(exponent),
        0.0 => 0.0,
        x => {
            let product = exponent * Number::ln(x);
            unit * (product * Number::exp(product)).abs()
        }
    });
}

/// Which of two numbers is the larger one.
#[inline(always)]
pub(super) fn is_second(a: f64, b: f64) -> bool {
    (b > a || b.is_nan()) && !a.is_nan()
}

#[inline(always)]
pub(super) fn each(out: &mut Block, of: impl Fn(usize) -> f64) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = of(i);
    }
}

/// The deviation by which a step errs beside its rounding, which depends on the errors of what it
/// takes.
fn extra(program: &Program, inputs: &[Input<'_>], memory: &mut Evaluation, at: usize) {
    let Evaluation { values, extra, way, inner: errors } = memory;
    let (before, rest) = extra.split_at_mut(at);
    let (out, of) = (&mut rest[0], Of { program, inputs, values, extra: before });
    let block = |node: usize| value(program, inputs, values, node);
    let none = Asked::default();
    match program.nodes[at].action {
        Action::Square(a) => {
            backward(&of, &[(a, 1.0)], Asked { row: true, ..none }, way, errors);
            each(out, |i| errors.own[i] + errors.row[i]);
        }
        Action::Sqrt(a) => {
            let argument = block(a);
            *out = ZERO;
            if argument.contains(&0.0) {
                backward(&of, &[(a, 1.0)], Asked { shared: true, own: true, ..none }, way, errors);
                each(out, |i| match argument[i] {
                    0.0 => (errors.most[i] + errors.shared[i]).sqrt(),
                    _ => 0.0,
                });
            }
        }
        Action::Sign(a) => {
            let argument = block(a);
            backward(&of, &[(a, 1.0)], Asked { shared: true, own: true, ..none }, way, errors);
            each(out, |i| {
                let most = 3f64.sqrt() * (errors.most[i] + errors.shared[i]);
                let is_certain = most == 0.0 || argument[i].abs() > most;
                let step = if argument[i] == 0.0 { 1.0 } else { 2.0 };
                if is_certain { 0.0 } else { step }
            });
        }
        Action::Larger(a, b) => {
            let (one, other) = (block(a), block(b));
            let asked = Asked { shared: true, row: true, own: true };
            backward(&of, &[(a, 1.0), (b, -1.0)], asked, way, errors);
            each(out, |i| {
                let apart = (one[i] - other[i]).abs();
                let is_near = apart <= 3f64.sqrt() * (errors.most[i] + errors.shared[i]);
                if is_near { (errors.own[i] + errors.row[i]).sqrt() } else { 0.0 }
            });
        }
        Action::Chosen(choice) => {
            let (by, one, other) = (block(choice.by), block(choice.one), block(choice.other));
            let asked = Asked { shared: true, own: true, ..none };
            backward(&of, &[(choice.by, 1.0)], asked, way, errors);
            let most = |i: usize| 3f64.sqrt() * (errors.most[i] + errors.shared[i]);
            let mut is_certain = [false; LANES];
            for (i, is_certain) in is_certain.iter_mut().enumerate() {
                *is_certain = most(i) == 0.0 || by[i].abs() > most(i);
            }
            let seeds = [(choice.one, 1.0), (choice.other, -1.0)];
            backward(&of, &seeds, Asked { row: true, ..none }, way, errors);
            each(out, |i| {
                let apart = (one[i] - other[i]).abs() + (errors.own[i] + errors.row[i]).sqrt();
                if is_certain[i] { 0.0 } else { apart }
            });
        }
        Action::Function(Function::Power(exponent), a) => {
            let argument = block(a);
            if exponent < 1.0 && argument.contains(&0.0) {
                backward(&of, &[(a, 1.0)], Asked { shared: true, own: true, ..none }, way, errors);
            }
            of_power(exponent, 2.0 * program.unit, argument, errors, out);
        }
        _ => {}
    }
}
