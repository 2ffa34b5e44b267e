//! One parameter of two runs, tensor by tensor: how far apart each is, without a judgement.

use backtape::part::Part;

use super::align::Pair;
use super::apart::Apart;
use super::outcome::At;
use super::side::{Gradient, Side};
use super::view::{Values, View};
use crate::algebra::rules::Rule;
use crate::kernels::round::Precision;

/// One tensor of a parameter in both runs.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    pub(super) at: At,
    /// The part, as this run records it.
    pub(super) part: String,
    pub(super) apart: Apart,
    /// What storing it in other formats may bring, as a share of each element.
    pub(super) stored: f64,
}

/// Every tensor of a parameter in both runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Tensors {
    pub(super) rows: Vec<Raw>,
    /// `Σ (w |g|)²` over the addends of the gradient, of each run.
    pub(super) addends: [f64; 2],
    /// Unit roundoff of what computed them.
    pub(super) units: [f64; 2],
    /// What could not be compared, and why.
    pub(super) lost: Vec<(At, String)>,
}

impl Tensors {
    /// Compares what both runs recorded of a parameter.
    pub(super) fn of(pair: &Pair, ours: &Side<'_>, theirs: &Side<'_>) -> Tensors {
        let mut tensors = Tensors::default();
        let both = Both { pair, ours, theirs };
        both.values(At::Before, &[Part::MasterBefore, Part::Before], &mut tensors);
        both.states(At::StateBefore, &mut tensors);
        both.gradients(&mut tensors);
        both.values_after_the_gradient(&mut tensors);
        both.states(At::State, &mut tensors);
        both.values(At::After, &[Part::MasterAfter, Part::After], &mut tensors);
        tensors
    }

    /// The tensor at a place.
    pub(super) fn at(&self, at: At) -> Option<&Raw> {
        self.rows.iter().find(|raw| raw.at == at)
    }

    /// Compares two tensors; those of other shapes are lost.
    fn add(&mut self, at: At, part: String, two: Result<[Values; 2], String>, stored: f64) {
        match two {
            Ok([a, b]) if a.shape == b.shape => {
                self.rows.push(Raw { at, part, apart: Apart::of(&a, &b), stored });
            }
            Ok([a, b]) => {
                let why = format!("it has the shape {:?} here and {:?} there", a.shape, b.shape);
                self.lost.push((at, why));
            }
            Err(why) => self.lost.push((at, why)),
        }
    }
}

struct Both<'a> {
    pair: &'a Pair,
    ours: &'a Side<'a>,
    theirs: &'a Side<'a>,
}

impl Both<'_> {
    fn sides(&self) -> [(&Side<'_>, &View); 2] {
        [(self.ours, &self.pair.ours), (self.theirs, &self.pair.theirs)]
    }

    /// Compares the first of these parts that both runs have.
    fn values(&self, at: At, parts: &[Part], tensors: &mut Tensors) {
        let has = |part: &&Part| self.sides().iter().all(|(side, view)| side.has(view, part));
        if let Some(part) = parts.iter().find(has) {
            self.value(at, [part, part], tensors);
        }
    }

    fn value(&self, at: At, parts: [&Part; 2], tensors: &mut Tensors) {
        let [a, b] = self.sides();
        let read = |(side, view): (&Side<'_>, &View), part| side.values(view, part);
        let two = read(a, parts[0]).and_then(|x| Ok([x, read(b, parts[1])?]));
        let formats = [a.0.stored(a.1, parts[0]), b.0.stored(b.1, parts[1])];
        tensors.add(at, parts[0].to_string(), two, between(formats));
    }

    /// Compares the tensors of the state that both runs hold, whatever frameworks call them.
    fn states(&self, at: At, tensors: &mut Tensors) {
        let make = if at == At::State { Part::StateAfter } else { Part::StateBefore };
        let [a, b] = self.sides();
        let (ours, theirs) = (states(a, at), states(b, at));
        for name in &ours {
            let own = Rule::state_of(name);
            let is_it =
                |other: &&String| *other == name || own.is_some() && Rule::state_of(other) == own;
            if let Some(other) = theirs.iter().find(is_it) {
                self.value(at, [&make(name.clone()), &make(other.clone())], tensors);
            }
        }
        // A first step has no state before it, or one of zeros.
        let alone = match (at, &ours[..], &theirs[..]) {
            (At::StateBefore, [], [_, ..]) => Some((b, &theirs, a, "the other run")),
            (At::StateBefore, [_, ..], []) => Some((a, &ours, b, "this run")),
            _ => None,
        };
        let Some(((side, view), names, other, whose)) = alone else { return };
        let is_zero = |name: &String| {
            let values = side.values(view, &make(name.clone()));
            values.is_ok_and(|values| values.of.iter().all(|x| *x == 0.0))
        };
        if !states(other, At::State).is_empty() && !names.iter().all(is_zero) {
            tensors.lost.push((at, format!("only {whose} has a state before the step")));
        }
    }

    fn gradients(&self, tensors: &mut Tensors) {
        let mut gradients: Vec<Gradient> = Vec::new();
        for (at, (side, view)) in self.sides().into_iter().enumerate() {
            match side.gradient(view) {
                Ok(gradient) => {
                    tensors.addends[at] = gradient.addends;
                    tensors.units[at] = gradient.unit;
                    gradients.push(gradient);
                }
                Err(why) => {
                    let whose = if at == 0 { "this run" } else { "the other run" };
                    tensors.lost.push((At::Grad, format!("{whose}: {why}")));
                }
            }
        }
        if let Ok([a, b]) = <[Gradient; 2]>::try_from(gradients) {
            tensors.add(At::Grad, "grad".into(), Ok([a.values, b.values]), 0.0);
        }
    }

    /// The gradient after the reduction, after the loss scale was taken out, and as the optimizer
    /// takes it. Where one run lacks a stage, what it had before stands for it.
    fn values_after_the_gradient(&self, tensors: &mut Tensors) {
        let chain =
            [(At::Reduce, Part::Reduced), (At::Unscale, Part::Unscaled), (At::Clip, Part::Clipped)];
        for (place, (at, part)) in chain.iter().enumerate() {
            let has = |(side, view): (&Side<'_>, &View)| side.has(view, part);
            if !self.sides().into_iter().any(has) {
                continue;
            }
            let last = |(side, view): (&Side<'_>, &View)| {
                let parts = chain[..=place].iter().rev().map(|(_, part)| part.clone());
                parts.into_iter().find(|part| side.has(view, part))
            };
            let [a, b] = self.sides();
            let (Some(x), Some(y)) = (last(a), last(b)) else { continue };
            let read = |(side, view): (&Side<'_>, &View), part: &Part| {
                let mut values = side.values(view, part)?;
                if *part == Part::Reduced {
                    let scale = side.loss_scale();
                    values.of.iter_mut().for_each(|x| *x /= scale);
                }
                Ok::<_, String>(values)
            };
            let two = read(a, &x).and_then(|first| Ok([first, read(b, &y)?]));
            let formats = [a.0.stored(a.1, &x), b.0.stored(b.1, &y)];
            tensors.add(*at, part.to_string(), two, between(formats));
        }
    }
}

/// The unit roundoff of the format of fewer bits; 0 where both are the same.
fn between(formats: [Option<Precision>; 2]) -> f64 {
    let [a, b] = formats.map(|format| format.map_or(0.0, Precision::unit_roundoff));
    if a == b { 0.0 } else { a.max(b) }
}

/// The names of a view's states that are shaped as its parameters are.
fn states((side, view): (&Side<'_>, &View), at: At) -> Vec<String> {
    let inventory = side.inventory;
    let name_of = |part: &Part| match (part, at) {
        (Part::StateAfter(name), At::State) | (Part::StateBefore(name), At::StateBefore) => {
            Some(name.clone())
        }
        _ => None,
    };
    let of = |parameter: &str| {
        let shape = side.shape(parameter);
        let tensors = inventory.parameters.get(parameter).into_iter();
        let tensors = tensors.flat_map(|own| &own.tensors);
        let is_shaped = move |(_, key): &(_, &_)| {
            shape.as_ref() == inventory.dump.tensors().get(*key).map(|info| &info.shape)
        };
        tensors.filter(is_shaped).filter_map(|((part, _), _)| name_of(part)).collect::<Vec<_>>()
    };
    let each: Vec<Vec<String>> = view.names().into_iter().map(of).collect();
    let Some((first, rest)) = each.split_first() else { return Vec::new() };
    let in_all = |name: &&String| rest.iter().all(|own| own.contains(name));
    first.iter().filter(in_all).cloned().collect()
}
