//! Reads a formula once, as the list of operations that it does with the columns of a row.
//!
//! What all elements of the row share (hyper-parameters, and what is computed of them alone) is
//! computed at once, with the number that carries its error. What is left is a [`Program`] over
//! columns, with a place for each rounding that the number would have had.

use std::cell::{Cell, RefCell};
use std::ops::{Add, Div, Mul, Sub};

use super::program::{Action, Choice, Function, Known, Node, Place, Program, Term, Two};
use crate::kernels::number::Number;
use crate::kernels::round::Precision;
use crate::kernels::uncertain::{LAST, Roundings, Uncertain};

/// An input of a formula.
#[expect(clippy::large_enum_variant, reason = "a formula has a few, which live while it is read")]
pub(super) enum Given<'a> {
    /// One number for the whole row.
    Known(Uncertain<'a>),
    /// A number for each column, and the place of its error, where it has one.
    Column(Option<Place>),
}

/// The operations of a formula, as they are read.
struct Trace<'a> {
    roundings: &'a Roundings,
    nodes: RefCell<Vec<Node>>,
    known: RefCell<Vec<Uncertain<'a>>>,
    /// An operation that a program does not have was done with columns.
    is_foreign: Cell<bool>,
}

/// A number of a formula that is read.
#[derive(Clone)]
#[expect(clippy::large_enum_variant, reason = "a formula has a few, which live while it is read")]
pub(super) enum Traced<'t, 'a> {
    /// One that the row shares.
    Known(Uncertain<'a>, Tracing<'t, 'a>),
    /// One of each column: a node of the program.
    Column(usize, Tracing<'t, 'a>),
}

/// Where a number's operations are noted.
#[derive(Clone, Copy)]
pub(super) struct Tracing<'t, 'a>(&'t Trace<'a>);

/// The program of a formula; `None` where it does an operation that programs do not have, or does
/// nothing with the columns. The roundings are those of a row that began.
pub(super) fn program<'a>(
    roundings: &'a Roundings,
    given: &[Given<'a>],
    formula: impl for<'t> FnOnce(&[Traced<'t, 'a>]) -> Traced<'t, 'a>,
) -> Option<Program> {
    let trace = Trace {
        roundings,
        nodes: RefCell::default(),
        known: RefCell::default(),
        is_foreign: Cell::new(false),
    };
    let tracing = Tracing(&trace);
    let number = |(at, given): (usize, &Given<'a>)| match given {
        Given::Known(number) => Traced::Known(number.clone(), tracing),
        Given::Column(place) => tracing.node(Action::Input(at), *place, false),
    };
    let numbers: Vec<_> = given.iter().enumerate().map(number).collect();
    let output = match formula(&numbers) {
        Traced::Column(node, _) => node,
        Traced::Known(..) => return None,
    };
    drop(numbers);
    if trace.is_foreign.get() {
        return None;
    }
    let known = trace.known.take();
    let (known, kept) = merged(&known, roundings.shared_places());
    let (mut nodes, unit) = (trace.nodes.take(), roundings.unit() / 3f64.sqrt());
    mark_needed(&mut nodes, output);
    let has_last = known.iter().any(|known| known.last > 0.0)
        || nodes.iter().any(|node| node.place == Some(Place::Last));
    let least = roundings.least();
    Some(Program { nodes, known, kept, output, unit, least, has_last })
}

/// Marks what the result is made of.
fn mark_needed(nodes: &mut [Node], output: usize) {
    nodes[output].is_needed = true;
    for at in (0..=output).rev() {
        if !nodes[at].is_needed {
            continue;
        }
        let taken = match nodes[at].action {
            Action::Input(_) | Action::Spread(_) => [None; 3],
            Action::Two(_, a, b) => [a.node(), b.node(), None],
            Action::Larger(a, b) => [Some(a), Some(b), None],
            Action::Chosen(choice) => [Some(choice.by), Some(choice.one), Some(choice.other)],
            Action::Changed(of, change, _) => [Some(of), change.node(), None],
            Action::Sqrt(of)
            | Action::Abs(of)
            | Action::Sign(of)
            | Action::Square(of)
            | Action::Function(_, of)
            | Action::Stored(of, _) => [Some(of), None, None],
        };
        taken.into_iter().flatten().for_each(|node| nodes[node].is_needed = true);
    }
}

/// The errors of known numbers: those of a place that several of them have are kept apart, as they
/// add up or cancel. Returns also which of the places kept are shared by the row.
fn merged(numbers: &[Uncertain<'_>], shared: usize) -> (Vec<Known>, Vec<bool>) {
    let of_place = |place: usize| numbers.iter().filter(|one| one.errors()[place] != 0.0).count();
    let kept: Vec<usize> = (0..LAST).filter(|place| of_place(*place) > 1).collect();
    let known = numbers.iter().map(|number| {
        let mut known = Known { value: number.value, ..Known::default() };
        for (place, error) in number.errors().iter().copied().enumerate() {
            match kept.iter().position(|own| *own == place) {
                _ if error == 0.0 => {}
                Some(at) => known.kept.push((at, error)),
                None if place == LAST => known.last += error.abs(),
                None if place < shared => known.shared.add(error),
                None => known.own.add(error),
            }
        }
        known
    });
    (known.collect(), kept.iter().map(|place| *place < shared).collect())
}

impl<'t, 'a> Tracing<'t, 'a> {
    /// The place of the next rounding.
    fn next(self) -> Place {
        self.place(self.0.roundings.next())
    }

    fn place(self, at: usize) -> Place {
        match at {
            at if at < self.0.roundings.shared_places() => Place::Shared,
            LAST => Place::Last,
            _ => Place::Own,
        }
    }

    /// The place of the rounding of one operation, where it is rounded.
    fn of_operation(self) -> Option<Place> {
        let roundings = self.0.roundings;
        match roundings.unit() {
            0.0 => None,
            _ if roundings.are_steps_alone() => Some(Place::Last),
            _ => Some(self.next()),
        }
    }

    /// A new node; `has_extra`: it has an error that is known only when it is evaluated.
    fn node(self, action: Action, place: Option<Place>, has_extra: bool) -> Traced<'t, 'a> {
        let mut nodes = self.0.nodes.borrow_mut();
        let is_uncertain = place.is_some()
            || has_extra
            || match &action {
                Action::Input(_) | Action::Sign(_) => false,
                Action::Two(_, a, b) => [a, b].into_iter().any(|term| match term {
                    Term::Column(node) => nodes[*node].is_uncertain,
                    Term::Known(at) => self.errs(*at),
                }),
                Action::Spread(at) => self.errs(*at),
                Action::Larger(a, b) => nodes[*a].is_uncertain || nodes[*b].is_uncertain,
                Action::Chosen(of) => nodes[of.one].is_uncertain || nodes[of.other].is_uncertain,
                Action::Sqrt(of)
                | Action::Abs(of)
                | Action::Square(of)
                | Action::Function(_, of)
                | Action::Stored(of, _)
                | Action::Changed(of, ..) => nodes[*of].is_uncertain,
            };
        nodes.push(Node { action, place, has_extra, is_uncertain, is_needed: false });
        Traced::Column(nodes.len() - 1, self)
    }

    /// Whether a known number has an error.
    fn errs(self, known: usize) -> bool {
        self.0.known.borrow()[known].errors().iter().any(|error| *error != 0.0)
    }

    fn is_uncertain(self, node: usize) -> bool {
        self.0.nodes.borrow()[node].is_uncertain
    }

    fn between(self) -> Option<Precision> {
        self.0.roundings.between()
    }
}

impl<'t, 'a> Traced<'t, 'a> {
    fn tracing(&self) -> Tracing<'t, 'a> {
        match self {
            Traced::Known(_, tracing) | Traced::Column(_, tracing) => *tracing,
        }
    }

    fn term(self) -> Term {
        match self {
            Traced::Column(node, _) => Term::Column(node),
            Traced::Known(number, Tracing(trace)) => {
                let mut known = trace.known.borrow_mut();
                known.push(number);
                Term::Known(known.len() - 1)
            }
        }
    }

    fn two(self, two: Two, other: Self, of_known: fn(Known2<'a>) -> Uncertain<'a>) -> Self {
        let tracing = self.tracing();
        match (self, other) {
            (Traced::Known(a, _), Traced::Known(b, _)) => {
                Traced::Known(of_known(Known2(a, b)), tracing)
            }
            (a, b) => {
                let (a, b, place) = (a.term(), b.term(), tracing.of_operation());
                tracing.node(Action::Two(two, a, b), place, false)
            }
        }
    }

    /// The node of a number, which one of the row gets for each column.
    fn column(self) -> usize {
        let tracing = self.tracing();
        match self {
            Traced::Column(node, _) => node,
            known => match known.term() {
                Term::Column(node) => node,
                Term::Known(at) => match tracing.node(Action::Spread(at), None, false) {
                    Traced::Column(node, _) => node,
                    Traced::Known(..) => unreachable!("a node is a column's"),
                },
            },
        }
    }

    /// A function of one number.
    fn function(
        self,
        function: Function,
        of_known: impl FnOnce(Uncertain<'a>) -> Uncertain<'a>,
    ) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(of_known(number), tracing),
            Traced::Column(node, tracing) => {
                let place = tracing.of_operation();
                let has_extra = matches!(function, Function::Power(_));
                if has_extra {
                    tracing.next();
                }
                tracing.node(Action::Function(function, node), place, has_extra)
            }
        }
    }

    /// One number of the row, or else an operation that programs do not have.
    fn known_only(self, of_known: impl FnOnce(Uncertain<'a>) -> Uncertain<'a>) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(of_known(number), tracing),
            column => {
                column.tracing().0.is_foreign.set(true);
                column
            }
        }
    }

    /// An operation on one number, which is rounded.
    fn one(
        self,
        action: fn(usize) -> Action,
        of_known: fn(Uncertain<'a>) -> Uncertain<'a>,
        has_extra: fn(&Self) -> bool,
    ) -> Self {
        let has_extra = has_extra(&self);
        match self {
            Traced::Known(number, tracing) => Traced::Known(of_known(number), tracing),
            Traced::Column(node, tracing) => {
                let place = tracing.of_operation();
                if has_extra {
                    tracing.next();
                }
                tracing.node(action(node), place, has_extra)
            }
        }
    }

    fn has_error(&self) -> bool {
        match self {
            Traced::Known(..) => false,
            Traced::Column(node, tracing) => tracing.is_uncertain(*node),
        }
    }
}

/// Two numbers of the row.
struct Known2<'a>(Uncertain<'a>, Uncertain<'a>);

macro_rules! operations {
    ($($trait:ident $method:ident $two:ident $sign:tt;)*) => { $(
        impl<'t, 'a> $trait for Traced<'t, 'a> {
            type Output = Traced<'t, 'a>;
            fn $method(self, other: Self) -> Self {
                self.two(Two::$two, other, |Known2(a, b)| a $sign b)
            }
        }
    )* };
}

operations! {
    Add add Plus +;
    Sub sub Minus -;
    Mul mul Times *;
    Div div Over /;
}

impl Number for Traced<'_, '_> {
    fn constant(&self, x: f64) -> Self {
        let tracing = self.tracing();
        Traced::Known(tracing.0.roundings.exact(x), tracing)
    }

    fn exp(self) -> Self {
        self.function(Function::Exp, Number::exp)
    }

    fn ln(self) -> Self {
        self.function(Function::Ln, Number::ln)
    }

    fn tanh(self) -> Self {
        self.function(Function::Tanh, Number::tanh)
    }

    fn power(self, exponent: f64) -> Self {
        self.function(Function::Power(exponent), |number| number.power(exponent))
    }

    fn scalar(self) -> Self {
        self.known_only(Number::scalar)
    }

    /// At 0 the root errs by the root of what its argument errs by. Its place is that of its
    /// rounding, which is 0 there.
    fn sqrt(self) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.sqrt(), tracing),
            Traced::Column(node, tracing) => {
                let has_extra = tracing.is_uncertain(node);
                tracing.node(Action::Sqrt(node), tracing.of_operation(), has_extra)
            }
        }
    }

    fn squared(self) -> Self {
        self.one(Action::Square, Number::squared, Traced::has_error)
    }

    fn abs(self) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.abs(), tracing),
            Traced::Column(node, tracing) => tracing.node(Action::Abs(node), None, false),
        }
    }

    fn sign(self) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.sign(), tracing),
            Traced::Column(node, tracing) => {
                let has_extra = tracing.is_uncertain(node);
                if has_extra {
                    tracing.next();
                }
                tracing.node(Action::Sign(node), None, has_extra)
            }
        }
    }

    fn larger(self, other: Self) -> Self {
        let tracing = self.tracing();
        match (self, other) {
            (Traced::Known(a, _), Traced::Known(b, _)) => Traced::Known(a.larger(b), tracing),
            (a, b) => {
                let (a, b) = (a.column(), b.column());
                let has_extra = tracing.is_uncertain(a) || tracing.is_uncertain(b);
                if has_extra {
                    tracing.next();
                }
                tracing.node(Action::Larger(a, b), None, has_extra)
            }
        }
    }

    fn chosen(self, is_from: bool, one: Self, other: Self) -> Self {
        let tracing = self.tracing();
        match (self, one, other) {
            (Traced::Known(of, _), Traced::Known(one, _), Traced::Known(other, _)) => {
                Traced::Known(of.chosen(is_from, one, other), tracing)
            }
            (by, one, other) => {
                let (by, one, other) = (by.column(), one.column(), other.column());
                let has_extra = tracing.is_uncertain(by);
                if has_extra {
                    tracing.next();
                }
                let choice = Choice { is_from, by, one, other };
                tracing.node(Action::Chosen(choice), None, has_extra)
            }
        }
    }

    fn step(self) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.step(), tracing),
            Traced::Column(node, tracing) => match tracing.between() {
                Some(precision) => {
                    tracing.node(Action::Stored(node, precision), Some(tracing.next()), false)
                }
                None => Traced::Column(node, tracing),
            },
        }
    }

    fn step_alike(self) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.step_alike(), tracing),
            Traced::Column(node, tracing) => match tracing.between() {
                Some(precision) => {
                    let place = tracing.place(tracing.0.roundings.next_scalar());
                    tracing.node(Action::Stored(node, precision), Some(place), false)
                }
                None => Traced::Column(node, tracing),
            },
        }
    }

    fn changed(self, change: Self) -> Self {
        let tracing = self.tracing();
        let Some(precision) = tracing.between() else { return self };
        match self {
            Traced::Known(number, _) => match change {
                Traced::Known(change, _) => Traced::Known(number.changed(change), tracing),
                column => column.known_only(|number| number),
            },
            Traced::Column(node, _) => {
                // Its rounding is shared as far as the change, and else its own.
                tracing.0.roundings.next_scalar();
                let place = Some(tracing.next());
                tracing.node(Action::Changed(node, change.term(), precision), place, false)
            }
        }
    }

    fn by_settings(self, of: Self, factor: Self) -> Self {
        let tracing = self.tracing();
        let roundings = tracing.0.roundings;
        if roundings.unit() >= Precision::F32.unit_roundoff() {
            return self;
        }
        let Traced::Known(factor, _) = factor else { return factor.known_only(|number| number) };
        let rounding = roundings.exact(0.0).by_settings(roundings.exact(1.0), factor);
        self + of * Traced::Known(rounding, tracing)
    }

    fn vanishing(self, by: Self) -> Self {
        let tracing = self.tracing();
        let Traced::Known(by, _) = by else { return by.known_only(|number| number) };
        if by.value.abs() <= 1.0 {
            return self;
        }
        let lost = tracing.0.roundings.exact(0.0).vanishing(by);
        self + Traced::Known(lost, tracing)
    }

    fn times(self, constant: f64) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.times(constant), tracing),
            column => {
                let constant = column.constant(constant);
                column * constant
            }
        }
    }

    fn over(self, constant: f64) -> Self {
        match self {
            Traced::Known(number, tracing) => Traced::Known(number.over(constant), tracing),
            column => {
                let constant = column.constant(constant);
                column / constant
            }
        }
    }
}
