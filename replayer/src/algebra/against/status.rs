//! What a difference between two runs means: each run's own judgement of the stage says which is
//! wrong; what a step is given has none, and is held against what roundings come to.

use std::collections::BTreeMap;

use backtape::part::Part;

use super::align::Pair;
use super::conclusion::words;
use super::outcome::{At, Compared, Status};
use super::pair::{Raw, Tensors};
use super::settings::Found;
use super::side::{Own, Side};
use crate::kernels::round::Precision;

/// How much larger than that of the stage before a difference may be where a stage was not judged:
/// a scaling keeps the share, and a clipping adds the difference of two norms.
const KEPT: f64 = 4.0;

/// What all parameters of two runs have in common.
pub(super) struct Whole {
    /// Unit roundoff of what computed the gradients of each run.
    pub(super) units: [f64; 2],
    /// Tensors on the way to a gradient, forward and backward.
    pub(super) tensors: f64,
    /// The longest sum on the way.
    pub(super) longest: f64,
    /// Whether a parameter differs before the step by more than its formats explain.
    pub(super) begins_apart: bool,
    /// The mean square of an element, by place and part.
    means: BTreeMap<(At, String), f64>,
    /// The same of the addends of gradients, of each run.
    addends: [f64; 2],
}

impl Whole {
    /// What all pairs have in common.
    pub(super) fn of(all: &[Tensors], (ours, theirs): (&Side<'_>, &Side<'_>)) -> Whole {
        let unit = |at: usize, side: &Side<'_>| {
            let shown = all.iter().map(|own| own.units[at]).fold(0.0, f64::max);
            shown.max(side.working_unit())
        };
        let shapes = || [ours, theirs].map(|side| (side, side.names()));
        let extents = shapes().into_iter().flat_map(|(side, names)| {
            let shapes = names.into_iter().filter_map(|name| side.shape(name));
            shapes.flatten().collect::<Vec<_>>()
        });
        let before = all.iter().filter_map(|own| own.at(At::Before));
        let begins_apart = before.clone().any(is_beyond_storage);
        Whole {
            units: [unit(0, ours), unit(1, theirs)],
            tensors: ours.names().len().max(theirs.names().len()) as f64,
            longest: extents.max().unwrap_or(1) as f64,
            begins_apart,
            means: means(all),
            addends: [0, 1].map(|at| {
                let of = |own: &Tensors| (own.addends[at], own.at(At::Grad).map(elements));
                mean(all.iter().filter_map(|own| Some((of(own).0, of(own).1?))))
            }),
        }
    }

    /// The square that a difference is a share of, at least: a gradient that cancels, as that of the
    /// bias of a key under softmax, is rounding alone, and no share of itself says so. That of mean
    /// elements stands for it.
    fn least(&self, raw: &Raw) -> f64 {
        let is_gradient = (At::Grad..=At::State).contains(&raw.at);
        let mean = self.means.get(&(raw.at, raw.part.clone())).filter(|_| is_gradient);
        mean.map_or(0.0, |mean| mean * raw.apart.elements as f64)
    }

    /// The difference of a tensor, as a share of its norm or of that of mean elements.
    pub(super) fn difference(&self, raw: &Raw) -> f64 {
        raw.apart.relative(self.least(raw))
    }

    /// What roundings of the forward and the backward bring to a gradient, as a share of what
    /// [`Whole::difference`] is. Each of about `2 k` tensors on the way was rounded to the format
    /// that was computed in and summed in f32 over at most `D` terms; errors of independent
    /// roundings grow as a random walk (Higham and Mary 2019): `√(2 k (u² + D u_f32²))`, of the
    /// norms of the addends.
    fn floor(&self, addends: [f64; 2], raw: &Raw) -> f64 {
        let square = |at: usize| {
            let unit = self.units[at];
            let sums = unit.min(Precision::F32.unit_roundoff());
            let of = addends[at].max(self.addends[at] * raw.apart.elements as f64);
            2.0 * self.tensors * (unit * unit + self.longest * sums * sums) * of
        };
        let of = raw.apart.energy().max(self.least(raw)).max(f64::MIN_POSITIVE);
        ((square(0) + square(1)) / of).sqrt()
    }
}

fn elements(raw: &Raw) -> u64 {
    raw.apart.elements
}

fn mean(all: impl Iterator<Item = (f64, u64)>) -> f64 {
    let (square, count) = all.fold((0.0, 0), |(sum, n), (own, count)| (sum + own, n + count));
    square / (count as f64).max(1.0)
}

fn means(all: &[Tensors]) -> BTreeMap<(At, String), f64> {
    let mut sums: BTreeMap<(At, String), Vec<(f64, u64)>> = BTreeMap::new();
    for raw in all.iter().flat_map(|own| &own.rows) {
        let own = (raw.apart.energy(), raw.apart.elements);
        sums.entry((raw.at, raw.part.clone())).or_default().push(own);
    }
    sums.into_iter().map(|(key, own)| (key, mean(own.into_iter()))).collect()
}

fn is_beyond_storage(raw: &Raw) -> bool {
    !raw.apart.is_equal() && !(raw.apart.relative(0.0) <= raw.stored)
}

/// One parameter of two runs.
pub(super) struct Judged<'a> {
    pub(super) pair: &'a Pair,
    pub(super) sides: [&'a Side<'a>; 2],
    pub(super) own: &'a Tensors,
    pub(super) settings: &'a [Found],
    pub(super) whole: &'a Whole,
}

impl Judged<'_> {
    /// Every tensor of the parameter with what its difference means.
    pub(super) fn all(&self) -> Vec<Compared> {
        let mut compared: Vec<Compared> = Vec::new();
        let is_renamed = self.pair.ours != self.pair.theirs;
        let other = is_renamed.then(|| self.pair.theirs.to_string());
        for raw in &self.own.rows {
            let floor = self.floor(raw);
            let (status, cause) = self.status(raw, floor, &compared);
            compared.push(Compared {
                parameter: self.pair.name(),
                other: other.clone(),
                at: raw.at,
                part: raw.part.clone(),
                status,
                difference: self.whole.difference(raw),
                floor,
                factor: self.factor(raw, floor),
                unequal: raw.apart.unequal,
                worst: raw.apart.worst.clone(),
                cause,
            });
        }
        compared
    }

    /// One number that is the whole difference, where it is another than 1.
    fn factor(&self, raw: &Raw, floor: f64) -> Option<f64> {
        let factor = raw.apart.factor(floor)?;
        ((factor - 1.0).abs() > KEPT * floor.max(f64::EPSILON)).then_some(factor)
    }

    fn floor(&self, raw: &Raw) -> f64 {
        let own = || [raw.apart.ours, raw.apart.theirs];
        match raw.at {
            At::Before | At::StateBefore => raw.stored,
            At::Grad => self.whole.floor(self.own.addends, raw),
            // Later stages are held against their own references; the share is that of the gradient.
            _ => match self.own.at(At::Grad) {
                Some(grad) => self.whole.floor(self.own.addends, grad).max(raw.stored),
                None => self.whole.floor(own(), raw).max(raw.stored),
            },
        }
    }

    fn status(&self, raw: &Raw, floor: f64, before: &[Compared]) -> (Status, Option<String>) {
        let own = [0, 1].map(|at| self.own_of(at, raw.at));
        let wrong = own.clone().map(|own| match own {
            Own::Wrong(judged) => judged.result.divergence(),
            _ => None,
        });
        let cause = wrong.iter().flatten().next().map(|divergence| words(divergence));
        match wrong.map(|wrong| wrong.is_some()) {
            [true, true] => return (Status::BothAreWrong, cause),
            [true, false] => return (Status::ThisIsWrong, cause),
            [false, true] => return (Status::OtherIsWrong, cause),
            [false, false] => {}
        }
        if raw.apart.is_equal() {
            return (Status::Equal, None);
        }
        let is_judged = own.iter().all(|own| *own == Own::Right);
        let status = match raw.at {
            At::Before | At::StateBefore => given(self.whole.difference(raw) <= floor),
            At::Grad => self.of_gradient(raw, floor),
            _ if self.is_declared(raw.at) => Status::Declared,
            _ if is_judged => self.carried(raw, floor, before),
            At::State | At::After => self.unjudged(raw.at, before),
            _ => match before.iter().rfind(|own| own.at >= At::Grad) {
                None => self.of_gradient(raw, floor),
                Some(last) => {
                    let most = (KEPT * last.difference).max(floor);
                    match self.whole.difference(raw) <= most {
                        true => self.carried(raw, floor, before),
                        false => Status::Differs,
                    }
                }
            },
        };
        (status, None)
    }

    /// How a run's own judgement of a stage came out. A stage that it did not have is right.
    fn own_of(&self, side: usize, at: At) -> Own<'_> {
        let view = if side == 0 { &self.pair.ours } else { &self.pair.theirs };
        let part = match at {
            At::Unscale => Some(Part::Unscaled),
            At::Clip => Some(Part::Clipped),
            _ => None,
        };
        match part.is_some_and(|part| !self.sides[side].has(view, &part)) {
            true => Own::Right,
            false => self.sides[side].own(view, at.stages()),
        }
    }

    /// A gradient as it was computed: nothing that was recorded judges it.
    fn of_gradient(&self, raw: &Raw, floor: f64) -> Status {
        let difference = self.whole.difference(raw);
        match (difference <= floor, self.factor(raw, floor)) {
            (true, _) => Status::Rounding,
            (false, None) if self.whole.begins_apart && difference.is_finite() => Status::Carried,
            _ => Status::Differs,
        }
    }

    /// A stage that both runs make as they declare: it differs as what it was made from, or by its
    /// own rounding.
    fn carried(&self, raw: &Raw, floor: f64, before: &[Compared]) -> Status {
        let is_apart = |own: &Compared| !matches!(own.status, Status::Equal | Status::Rounding);
        let is_rounding = self.whole.difference(raw) <= floor && !before.iter().any(is_apart);
        if is_rounding { Status::Rounding } else { Status::Carried }
    }

    fn is_declared(&self, at: At) -> bool {
        let acts = |own: &Found| own.3 == at && at > At::Grad;
        self.settings.iter().any(acts)
    }

    /// A stage of the optimizer that was not judged: where all that it was given is the same, it
    /// gives the same.
    fn unjudged(&self, at: At, before: &[Compared]) -> Status {
        let is_given = |own: &&Compared| own.at < At::State && own.at <= at;
        let is_same = before.iter().filter(is_given).all(|own| own.status == Status::Equal);
        match is_same && self.settings.is_empty() {
            true => Status::Differs,
            false => Status::Carried,
        }
    }
}

fn given(is_rounding: bool) -> Status {
    if is_rounding { Status::Rounding } else { Status::Differs }
}
