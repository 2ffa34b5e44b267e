//! The way back through a program: the derivative of its result by each of its steps, and with it
//! what each rounding on the way brings to the result.

use super::program::{
    Action, Block, Input, Known, LANES, Place, Program, Term, Two, ZERO, each, value,
};
use crate::kernels::round::Precision;
use crate::kernels::vectorised;

/// What of the errors is asked for, beside the variance of each element's own.
#[derive(Clone, Copy, Default)]
pub(super) struct Asked {
    /// The sum of the sizes of what the row shares.
    pub shared: bool,
    /// Its variance.
    pub row: bool,
    /// The sum of the sizes of each element's own.
    pub own: bool,
}

/// The errors of a block.
pub(super) struct Errors {
    /// Variance of each element's own.
    pub own: Block,
    /// Sums of sizes of the deviations that the row shares.
    pub shared: Block,
    /// Their variance.
    pub row: Block,
    /// Sums of sizes of the deviations of the elements' own.
    pub most: Block,
    last: Block,
    kept: Vec<Block>,
}

impl Default for Errors {
    fn default() -> Errors {
        let [own, shared, row, most, last] = [ZERO; 5];
        Errors { own, shared, row, most, last, kept: Vec::new() }
    }
}

impl Errors {
    fn clear(&mut self, asked: Asked, program: &Program) {
        self.kept.resize(program.kept.len(), ZERO);
        self.kept.iter_mut().for_each(|block| *block = ZERO);
        self.own = ZERO;
        let Errors { shared, row, most, last, .. } = self;
        let asked =
            [(asked.shared, shared), (asked.row, row), (asked.own, most), (program.has_last, last)];
        asked.into_iter().filter(|(is, _)| *is).for_each(|(_, block)| *block = ZERO);
    }
}

/// The derivative of the result by a node.
#[derive(Clone, Copy)]
enum Adjoint {
    /// It is no part of the result.
    None,
    /// One number for all columns.
    Uniform(f64),
    /// A block times a number.
    Lanes(Held, f64),
}

/// Where a block is.
#[derive(Clone, Copy)]
enum Held {
    /// A derivative.
    Slot(usize),
    /// The value of a node.
    Value(usize),
}

/// A program that was evaluated over a block.
pub(super) struct Of<'b> {
    pub program: &'b Program,
    pub inputs: &'b [Input<'b>],
    /// By node.
    pub values: &'b [Block],
    /// By node, for those that have one: the deviation of its further error.
    pub extra: &'b [Block],
}

/// Memory for the way back.
#[derive(Default)]
#[expect(clippy::vec_box, reason = "blocks change places, and are not copied")]
pub(super) struct Way {
    adjoints: Vec<Adjoint>,
    slots: Vec<Box<Block>>,
    free: Vec<Box<Block>>,
}

vectorised!(
    /// Finds the errors of a weighted sum of nodes that were evaluated.
    backward,
    backward_body,
    (of: &Of<'_>, seeds: &[(usize, f64)], asked: Asked, way: &mut Way, errors: &mut Errors) -> ()
);

/// A derivative as a number and a block, which may both be there.
#[derive(Clone, Copy)]
struct Factor<'b>(f64, Option<&'b Block>);

/// The deviation of keeping a number in a format, as `Precision::deviation` has it.
#[inline(always)]
fn storing(precision: Precision) -> impl Fn(f64) -> f64 + Copy {
    let (unit, tiny) = (precision.unit_roundoff() / 3f64.sqrt(), precision.deviation(0.0));
    move |x: f64| unit * x.abs() + tiny
}

/// What is multiplied with nothing.
fn one(_: usize) -> f64 {
    1.0
}

/// Calls `each` with the products of a derivative and of what is given for each column.
#[inline(always)]
fn products(by: Factor<'_>, of: impl Fn(usize) -> f64, mut each: impl FnMut(usize, f64)) {
    match by {
        Factor(k, None) => (0..LANES).for_each(|i| each(i, k * of(i))),
        Factor(k, Some(block)) => (0..LANES).for_each(|i| each(i, k * block[i] * of(i))),
    }
}

impl Errors {
    /// Adds the error of a rounding: the derivative by it, times its deviation.
    #[inline(always)]
    fn add(
        &mut self,
        place: Place,
        asked: Asked,
        by: Factor<'_>,
        deviation: impl Fn(usize) -> f64 + Copy,
    ) {
        match place {
            Place::Own => {
                let own = &mut self.own;
                products(by, deviation, |i, c| own[i] += c * c);
                if asked.own {
                    let most = &mut self.most;
                    products(by, deviation, |i, c| most[i] += c.abs());
                }
            }
            Place::Last => {
                let last = &mut self.last;
                products(by, deviation, |i, c| last[i] += c.abs());
            }
            Place::Shared => self.add_shared(asked, by, deviation, [1.0, 1.0]),
        }
    }

    /// The same of errors of the row, of which the sum of sizes and that of squares are given.
    #[inline(always)]
    fn add_shared(
        &mut self,
        asked: Asked,
        by: Factor<'_>,
        block: impl Fn(usize) -> f64 + Copy,
        of: [f64; 2],
    ) {
        let [most, squares] = of;
        if asked.shared {
            let shared = &mut self.shared;
            products(by, block, |i, c| shared[i] += most * c.abs());
        }
        if asked.row {
            let row = &mut self.row;
            products(by, block, |i, c| row[i] += squares * (c * c));
        }
    }

    /// Adds the errors of a known number: the derivative by it is `by` times `block`.
    #[inline(always)]
    fn add_known(
        &mut self,
        known: &Known,
        asked: Asked,
        by: Factor<'_>,
        block: impl Fn(usize) -> f64 + Copy,
    ) {
        if known.own.squares > 0.0 {
            let (own, squares) = (&mut self.own, known.own.squares);
            products(by, block, |i, c| own[i] += squares * (c * c));
            if asked.own {
                let (most, sizes) = (&mut self.most, known.own.most);
                products(by, block, |i, c| most[i] += sizes * c.abs());
            }
        }
        if known.last > 0.0 {
            let (last, size) = (&mut self.last, known.last);
            products(by, block, |i, c| last[i] += size * c.abs());
        }
        if known.shared.most > 0.0 {
            self.add_shared(asked, by, block, [known.shared.most, known.shared.squares]);
        }
        for (at, error) in &known.kept {
            let kept = &mut self.kept[*at];
            products(by, block, |i, c| kept[i] += error * c);
        }
    }

    /// Adds the errors that were kept apart, and those that share the last place.
    #[inline(always)]
    fn close(&mut self, program: &Program, asked: Asked) {
        for (at, is_shared) in program.kept.iter().enumerate() {
            let block = std::mem::replace(&mut self.kept[at], ZERO);
            let place = if *is_shared { Place::Shared } else { Place::Own };
            self.add(place, asked, Factor(1.0, None), |i| block[i]);
        }
        if program.has_last {
            let last = std::mem::replace(&mut self.last, ZERO);
            self.add(Place::Own, asked, Factor(1.0, None), |i| last[i]);
        }
    }
}

#[inline(always)]
fn backward_body(
    of: &Of<'_>,
    seeds: &[(usize, f64)],
    asked: Asked,
    way: &mut Way,
    errors: &mut Errors,
) {
    let program = of.program;
    errors.clear(asked, program);
    way.free.append(&mut way.slots);
    way.adjoints.clear();
    way.adjoints.resize(program.nodes.len(), Adjoint::None);
    let mut back = Back { of, way };
    seeds.iter().for_each(|(node, seed)| back.give(*node, Adjoint::Uniform(*seed)));
    let top = seeds.iter().map(|(node, _)| *node).max().unwrap_or(0);
    for at in (0..=top).rev() {
        let adjoint = back.way.adjoints[at];
        if matches!(adjoint, Adjoint::None) {
            continue;
        }
        back.errs(at, adjoint, asked, errors);
        back.propagate(at, adjoint, asked, errors);
    }
    errors.close(program, asked);
}

/// The way back from the result.
struct Back<'b> {
    of: &'b Of<'b>,
    way: &'b mut Way,
}

impl Adjoint {
    fn times(self, factor: f64) -> Adjoint {
        match self {
            Adjoint::None => Adjoint::None,
            Adjoint::Uniform(own) => Adjoint::Uniform(own * factor),
            Adjoint::Lanes(held, own) => Adjoint::Lanes(held, own * factor),
        }
    }
}

impl<'b> Back<'b> {
    #[inline(always)]
    fn value(&self, node: usize) -> &'b Block {
        value(self.of.program, self.of.inputs, self.of.values, node)
    }

    /// A derivative as a number and a block.
    #[inline(always)]
    fn factor(&self, adjoint: Adjoint) -> Factor<'_> {
        match adjoint {
            Adjoint::None => Factor(0.0, None),
            Adjoint::Uniform(factor) => Factor(factor, None),
            Adjoint::Lanes(Held::Slot(at), factor) => Factor(factor, Some(&self.way.slots[at])),
            Adjoint::Lanes(Held::Value(at), factor) => Factor(factor, Some(self.value(at))),
        }
    }

    /// A derivative times a block of numbers.
    #[inline(always)]
    fn product(&mut self, adjoint: Adjoint, by: impl Fn(usize) -> f64) -> Adjoint {
        let mut out = self.way.free.pop().unwrap_or_else(|| Box::new(ZERO));
        let Factor(factor, block) = self.factor(adjoint);
        match block {
            Some(block) => each(&mut out, |i| block[i] * by(i)),
            None => each(&mut out, by),
        }
        self.way.slots.push(out);
        Adjoint::Lanes(Held::Slot(self.way.slots.len() - 1), factor)
    }

    /// Adds to the derivative by a node.
    #[inline(always)]
    fn give(&mut self, node: usize, more: Adjoint) {
        if !self.of.program.nodes[node].is_uncertain {
            return;
        }
        self.way.adjoints[node] = match (self.way.adjoints[node], more) {
            (Adjoint::None, more) => more,
            (Adjoint::Uniform(a), Adjoint::Uniform(b)) => Adjoint::Uniform(a + b),
            (a, b) => {
                let mut sum = ZERO;
                products(self.factor(a), one, |i, c| sum[i] += c);
                products(self.factor(b), one, |i, c| sum[i] += c);
                self.product(Adjoint::Uniform(1.0), |i| sum[i])
            }
        };
    }

    /// Adds the errors of a known number, by which the derivative is a derivative times a block.
    #[inline(always)]
    fn give_known(
        &self,
        known: usize,
        adjoint: Adjoint,
        block: impl Fn(usize) -> f64 + Copy,
        asked: Asked,
        errors: &mut Errors,
    ) {
        errors.add_known(&self.of.program.known[known], asked, self.factor(adjoint), block);
    }

    /// Adds the errors that a step makes itself.
    #[inline(always)]
    fn errs(&self, at: usize, adjoint: Adjoint, asked: Asked, errors: &mut Errors) {
        let node = &self.of.program.nodes[at];
        let by = self.factor(adjoint);
        if node.has_extra {
            let extra = &self.of.extra[at];
            errors.add(Place::Own, asked, by, |i| extra[i]);
        }
        let Some(place) = node.place else { return };
        match node.action {
            Action::Input(input) => {
                let variance = self.of.inputs[input].variance;
                if place == Place::Own && !asked.own {
                    let own = &mut errors.own;
                    return products(by, one, |i, c| own[i] += c * c * variance[i]);
                }
                errors.add(place, asked, by, |i| variance[i].sqrt());
            }
            Action::Stored(of, precision) => {
                let (stored, deviation) = (self.value(of), storing(precision));
                errors.add(place, asked, by, |i| deviation(stored[i]));
            }
            Action::Changed(of, change, precision) => {
                let (stored, deviation) = (self.value(of), storing(precision));
                errors.add(place, asked, by, |i| deviation(stored[i]));
                let root = 1.0 / 3f64.sqrt();
                match change {
                    Term::Column(change) => {
                        let change = self.value(change);
                        let most = |i: usize| change[i].abs() * root;
                        let shared = |i: usize| deviation(stored[i]).min(most(i));
                        errors.add(Place::Shared, asked, by, shared);
                    }
                    Term::Known(change) => {
                        let most = self.of.program.known[change].value.abs() * root;
                        let shared = |i: usize| deviation(stored[i]).min(most);
                        errors.add(Place::Shared, asked, by, shared);
                    }
                }
            }
            _ => {
                let (result, program) = (self.value(at), self.of.program);
                let (unit, least) = (program.unit, program.least);
                errors.add(place, asked, by, |i| {
                    unit * result[i].abs() + if result[i] != 0.0 { least } else { 0.0 }
                });
            }
        }
    }

    /// Carries the derivative by a step back to what it takes.
    #[inline(always)]
    fn propagate(&mut self, at: usize, adjoint: Adjoint, asked: Asked, errors: &mut Errors) {
        match self.of.program.nodes[at].action {
            Action::Input(_) | Action::Sign(_) => {}
            Action::Stored(of, _) | Action::Changed(of, ..) => self.give(of, adjoint),
            Action::Two(two, a, b) => self.propagate_two(at, (two, a, b), adjoint, asked, errors),
            Action::Square(a) => {
                let of = self.value(a);
                let adjoint = match adjoint {
                    Adjoint::Uniform(factor) => Adjoint::Lanes(Held::Value(a), factor),
                    lanes => self.product(lanes, |i| of[i]),
                };
                self.give(a, adjoint.times(2.0));
            }
            Action::Sqrt(a) => {
                let root = self.value(at);
                let adjoint =
                    self.product(adjoint, |i| if root[i] == 0.0 { 0.0 } else { 0.5 / root[i] });
                self.give(a, adjoint);
            }
            Action::Abs(a) => {
                let of = self.value(a);
                let adjoint = self.product(adjoint, |i| if of[i] < 0.0 { -1.0 } else { 1.0 });
                self.give(a, adjoint);
            }
            Action::Function(function, a) => {
                let (of, made) = (self.value(a), self.value(at));
                let adjoint = self.product(adjoint, |i| function.slope(of[i], made[i]));
                self.give(a, adjoint);
            }
            Action::Spread(known) => self.give_known(known, adjoint, one, asked, errors),
            Action::Chosen(choice) => {
                let by = self.value(choice.by);
                let share = |is: bool| if is { 1.0 } else { 0.0 };
                let to_one = self.product(adjoint, |i| share(choice.is_one(by[i])));
                self.give(choice.one, to_one);
                let to_other = self.product(adjoint, |i| share(!choice.is_one(by[i])));
                self.give(choice.other, to_other);
            }
            Action::Larger(a, b) => {
                let (one, other) = (self.value(a), self.value(b));
                let is_other = |i: usize| super::program::is_second(one[i], other[i]);
                let to_one = self.product(adjoint, |i| if is_other(i) { 0.0 } else { 1.0 });
                self.give(a, to_one);
                let to_other = self.product(adjoint, |i| if is_other(i) { 1.0 } else { 0.0 });
                self.give(b, to_other);
            }
        }
    }

    #[inline(always)]
    fn propagate_two(
        &mut self,
        at: usize,
        (two, a, b): (Two, Term, Term),
        adjoint: Adjoint,
        asked: Asked,
        errors: &mut Errors,
    ) {
        let program = self.of.program;
        match (two, a, b) {
            (Two::Plus | Two::Minus, a, b) => {
                let second = if two == Two::Plus { 1.0 } else { -1.0 };
                for (term, adjoint) in [(a, adjoint), (b, adjoint.times(second))] {
                    match term {
                        Term::Column(node) => self.give(node, adjoint),
                        Term::Known(known) => self.give_known(known, adjoint, one, asked, errors),
                    }
                }
            }
            (Two::Times, Term::Column(a), Term::Column(b)) => {
                for (to, by) in [(a, b), (b, a)] {
                    if program.nodes[to].is_uncertain {
                        let of = self.value(by);
                        let product = match adjoint {
                            Adjoint::Uniform(k) => Adjoint::Lanes(Held::Value(by), k),
                            lanes => self.product(lanes, |i| of[i]),
                        };
                        self.give(to, product);
                    }
                }
            }
            (Two::Times, Term::Column(column), Term::Known(known))
            | (Two::Times, Term::Known(known), Term::Column(column)) => {
                let of = self.value(column);
                self.give_known(known, adjoint, |i| of[i], asked, errors);
                self.give(column, adjoint.times(program.known[known].value));
            }
            (Two::Over, Term::Column(column), Term::Known(known)) => {
                let reciprocal = 1.0 / program.known[known].value;
                let quotient = self.value(at);
                let by = adjoint.times(-reciprocal);
                self.give_known(known, by, |i| quotient[i], asked, errors);
                self.give(column, adjoint.times(reciprocal));
            }
            (Two::Over, of, Term::Column(divisor)) => {
                let (by, quotient) = (self.value(divisor), self.value(at));
                let to_first = self.product(adjoint, |i| 1.0 / by[i]);
                if program.nodes[divisor].is_uncertain {
                    let to_second = self.product(to_first, |i| quotient[i]);
                    self.give(divisor, to_second.times(-1.0));
                }
                match of {
                    Term::Column(node) => self.give(node, to_first),
                    Term::Known(known) => self.give_known(known, to_first, one, asked, errors),
                }
            }
            (_, Term::Known(_), Term::Known(_)) => unreachable!("known numbers were computed"),
        }
    }
}
