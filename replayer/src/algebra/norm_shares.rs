//! What each parameter adds to a norm: sums over the elements of its gradient, each once.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::nan::larger;
use backtape::part::Part;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::declaration::Norm;
use super::domain::fewer_bits;
use super::elements::Elements;
use super::inventory::Piece;
use super::judge::Judge;
use super::squares::Held;
use crate::assemble::pieces;
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;

/// The norm of one parameter, to the power that sums.
#[derive(Clone, Debug, Default)]
pub(super) struct Share {
    /// `Σ |g|^p`, or the largest element, of the whole gradient.
    pub(super) whole: f64,
    /// The same of what each rank holds.
    pub(super) held: BTreeMap<Rank, f64>,
    /// Variance of the rounding of `whole`.
    pub(super) variance: f64,
    /// How many ranks hold each element.
    pub(super) copies: f64,
    /// What `whole` would be if ranks held other parameters under this name; `None` where it is known
    /// that they hold copies or parts of one.
    pub(super) apart: Option<f64>,
}

/// What a norm may be off by, in standard deviations of its rounding: one number is compared, and
/// beyond 6.5 a normal falls once in 10¹⁰.
const REACH: f64 = 6.5;

/// The shares of a norm.
pub(super) struct Shares<'a> {
    /// By parameter.
    pub(super) by_parameter: BTreeMap<&'a str, Share>,
    /// The format of fewest bits that a gradient is stored in.
    pub(super) stored: Option<Precision>,
}

/// A norm as it should be.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    /// To the power that sums.
    pub(super) total: f64,
    /// The norm.
    pub(super) norm: f64,
    /// How far from it rounding may bring that of a job.
    pub(super) allowed: f64,
}

impl Expected {
    /// Whether a job's norm is this one but for rounding.
    pub(super) fn is(&self, value: f64) -> bool {
        (value - self.norm).abs() <= self.allowed
    }
}

/// The norm of so large a total.
pub(super) fn root(total: f64, power: f64) -> f64 {
    if power.is_infinite() { total } else { total.powf(1.0 / power) }
}

/// By how much `x^(1/p)` errs for each unit of `ln x`, where a job has `1/p` in f32. A job takes
/// such a root of each parameter, of what a rank holds, and of all.
fn exponent_error(power: f64) -> f64 {
    let exponent = 1.0 / power;
    (f64::from(exponent as f32) - exponent).abs()
}

impl Share {
    /// The share of the gradient divided by a loss scale.
    fn over(mut self, scale: f64, power: f64) -> Share {
        let factor = if power.is_infinite() { 1.0 / scale } else { scale.powf(-power) };
        self.whole *= factor;
        self.held.values_mut().for_each(|held| *held *= factor);
        self.apart = self.apart.map(|apart| apart * factor);
        self.variance *= factor * factor;
        self
    }
}

impl Shares<'_> {
    /// A parameter under whose name ranks may hold other parameters.
    pub(super) fn others(&self) -> Option<&str> {
        let mut own = self.by_parameter.iter();
        own.find(|(_, share)| share.apart.is_some()).map(|(name, _)| *name)
    }

    /// The norm of what `own` counts of each share.
    pub(super) fn expected(&self, power: f64, own: &dyn Fn(&Share) -> f64) -> Expected {
        let (shares, is_max) = (self.by_parameter.values(), power.is_infinite());
        let variance: f64 = shares.clone().map(|share| share.variance).sum();
        let total = match is_max {
            true => shares.map(own).fold(0.0, larger),
            false => shares.map(own).sum(),
        };
        let norm = root(total, power);
        let format = self.stored.unwrap_or(Precision::F32);
        // Each parameter's norm and the whole's are stored; a root divides a relative error by p.
        let relative =
            if is_max { 0.0 } else { variance.sqrt() / (power * total.max(f64::MIN_POSITIVE)) };
        let unit = format.unit_roundoff().max(Precision::F32.unit_roundoff());
        let roots = 3.0 * exponent_error(power) * total.max(f64::MIN_POSITIVE).ln().abs();
        let small = (1.0 + (self.by_parameter.len() as f64).sqrt()) * format.smallest_subnormal();
        Expected { total, norm, allowed: norm * (REACH * relative + 4.0 * unit + roots) + small }
    }
}

impl Judge<'_> {
    /// The parameters of a norm: those that any rank names beside it, as a rank names only those
    /// of which it holds a part.
    fn normed(&self, at: usize) -> BTreeSet<&str> {
        let norms = self.inventory.declared.values().filter_map(|own| own.norms.get(at));
        norms.flat_map(|norm| norm.parameters.iter().map(String::as_str)).collect()
    }

    /// The share of each parameter of a norm.
    pub(super) fn shares(
        &self,
        norm: &Norm,
        rank: Rank,
        (at, power): (usize, f64),
    ) -> Result<Shares<'_>, String> {
        let of = norm.of.as_deref().unwrap_or("reduced");
        let mut shares: BTreeMap<&str, Share> = BTreeMap::new();
        let (mut stored, mut lost) = (None, Vec::new());
        for parameter in self.normed(at) {
            // A framework may take the loss scale out of the norm, and out of gradients as it clips them.
            let together = self.inventory.taken_out_by_clipping(rank, parameter);
            let (of, scale) = together.map_or((of, 1.0), |scale| ("reduced", scale));
            let key = self.key_of(parameter, of);
            if let Some(held) = self.inventory.declared_squares(parameter, of, rank) {
                let (held, squares_of) = (held?, (parameter, key));
                stored = fewer_bits(stored, held.format);
                let share = self.declared_share(squares_of, &held, power)?;
                shares.insert(parameter, share.over(scale, power));
            } else if let Some(key) = key {
                let format = self.inventory.precision(key);
                stored = fewer_bits(stored, format);
                let mut share = self.share(key, rank, power, format)?;
                share.apart = share.apart.filter(|_| self.inventory.are_others(parameter));
                shares.insert(parameter, share.over(scale, power));
            } else {
                lost.push(parameter);
            }
        }
        if let Some(first) = lost.first() {
            return Err(format!(
                "the gradients of {} of its parameters were not recorded, {first} among them",
                lost.len()
            ));
        }
        if shares.is_empty() {
            return Err("it names no parameters".into());
        }
        Ok(Shares { by_parameter: shares, stored })
    }

    pub(super) fn key_of(&self, parameter: &str, of: &str) -> Option<&TensorKey> {
        let name = format!("step.{of}:{parameter}");
        self.inventory.key(parameter, &Part::of_tensor(&name)?.0)
    }

    /// `Σ |g|^p` of a gradient, each element once; where copies differ, that of the rank counts.
    fn share(
        &self,
        key: &TensorKey,
        rank: Rank,
        power: f64,
        format: Option<Precision>,
    ) -> Result<Share, String> {
        let mut share = Share { copies: 1.0, ..Share::default() };
        let mut counted: Vec<IndexBox> = Vec::new();
        let sum = Sum { precision: Precision::F32, ..Sum::NATIVE };
        let mut copies = self.inventory.pieces(key, &|_| ());
        copies.sort_by_key(|piece| !piece.ranks.contains(&rank));
        for piece in copies {
            let [value, squares, count] = self.powers(key, &piece, power)?;
            let add = |to: f64| if power.is_infinite() { larger(to, value) } else { to + value };
            for rank in &piece.ranks {
                let held = share.held.entry(*rank).or_default();
                *held = add(*held);
            }
            share.apart = Some(add(share.apart.unwrap_or(0.0)));
            if counted.contains(&piece.place) {
                continue;
            }
            counted.push(piece.place.clone());
            share.copies = share.copies.max(piece.ranks.len() as f64);
            share.whole = add(share.whole);
            let unit = format.map_or(0.0, Precision::unit_roundoff);
            share.variance += sum.variance(count, value, squares) + (2.0 * unit * value).powi(2);
            share.variance += match power == 2.0 {
                true => alike(count, value, squares),
                false => in_classes(count, value, self.classes(key, &piece)?),
            };
            share.variance += count * Precision::F32.smallest_subnormal().powi(2);
        }
        Ok(share)
    }

    /// How many different values the elements of a piece have, where these are few; by its first ones.
    fn classes(&self, key: &TensorKey, piece: &Piece) -> Result<Option<usize>, String> {
        const LOOKED_AT: usize = 4096;
        let Some(part) = pieces(&piece.place, 8).into_iter().next() else { return Ok(None) };
        let values = self.inventory.elements(key, piece.ranks[0], &part)?;
        let (matrix, count) = (values.matrix(1, values.len()), values.len().min(LOOKED_AT));
        let sizes = (0..count).map(|at| matrix.get_f64(at).abs()).filter(|size| *size > 0.0);
        let classes = sizes.map(f64::to_bits).collect::<BTreeSet<_>>().len();
        Ok((classes > 0 && 2 * classes < count).then_some(classes))
    }

    /// The share of a gradient that is not recorded whole, by the sums of squares that ranks declare.
    /// None can be smaller than that of what the rank recorded.
    fn declared_share(
        &self,
        (parameter, key): (&str, Option<&TensorKey>),
        held: &Held,
        power: f64,
    ) -> Result<Share, String> {
        if power != 2.0 {
            return Err(format!(
                "{parameter} is not recorded whole, and of such a gradient ranks declare the sum \
                 of squares alone"
            ));
        }
        let mut recorded: BTreeMap<Rank, f64> = BTreeMap::new();
        for piece in key.map(|key| self.inventory.pieces(key, &|_| ())).unwrap_or_default() {
            let [value, ..] = self.powers(key.expect("it has pieces"), &piece, power)?;
            for rank in piece.ranks {
                *recorded.entry(rank).or_default() += value;
            }
        }
        // How far two sums of the same squares in f64 may be apart.
        let elements: u64 = held.parts.iter().map(|(elements, _)| elements).sum();
        let most = 1.0 + elements as f64 * f64::EPSILON;
        let is_less = |(rank, sum): &(&Rank, &f64)| {
            recorded.get(rank).is_some_and(|part| *part > **sum * most)
        };
        if let Some((rank, sum)) = held.by_rank.iter().find(is_less) {
            return Err(format!(
                "rank {rank} declares {sum:e} as the sum of the squares of {parameter}, and what \
                 it recorded of it has more"
            ));
        }
        let sum = Sum { precision: Precision::F32, ..Sum::NATIVE };
        let unit = held.format.map_or(0.0, Precision::unit_roundoff);
        // The sum of fourth powers is not known; it is at most the square of that of squares.
        let variance = |(count, value): &(u64, f64)| {
            sum.variance(*count as f64, *value, value * value) + (2.0 * unit * value).powi(2)
        };
        let is_apart = self.inventory.are_others(parameter);
        Ok(Share {
            whole: held.whole(),
            held: held.by_rank.clone(),
            variance: held.parts.iter().map(variance).sum(),
            copies: held.copies as f64,
            apart: is_apart.then(|| held.versions()),
        })
    }

    /// `Σ |g|^p`, `Σ |g|^2p` and the count of the elements of a piece.
    fn powers(&self, key: &TensorKey, piece: &Piece, power: f64) -> Result<[f64; 3], String> {
        let parts = pieces(&piece.place, 8);
        let part = |part: &IndexBox| {
            let values = self.inventory.elements(key, piece.ranks[0], part)?;
            Ok(powers_of(&values, power))
        };
        let parts: Vec<Result<[f64; 3], String>> = parts.par_iter().map(part).collect();
        let mut total = [0.0; 3];
        for part in parts {
            let [value, squares, count] = part?;
            let before: f64 = total[0];
            let joined = if power.is_infinite() { larger(before, value) } else { before + value };
            total = [joined, total[1] + squares, total[2] + count];
        }
        Ok(total)
    }
}

/// The same of addends that have few different values, each of which errs in one direction by itself.
/// Only norms of squares are added up in many sums beside each other.
fn in_classes(count: f64, sum: f64, classes: Option<usize>) -> f64 {
    let most = count * Precision::F32.unit_roundoff() * sum / 2.0;
    classes.map_or(0.0, |classes| (most / REACH).powi(2) / classes as f64)
}

/// What equal addends add to the variance of their sum: each partial sum of a binade is rounded the same
/// way, so that the errors add up, in the worst case to half a rounding of the sum for each addend.
fn alike(count: f64, sum: f64, squares: f64) -> f64 {
    let is_even = count > 1.0 && sum * sum > 0.999 * count * squares;
    let most = count * Precision::F32.unit_roundoff() * sum / 2.0;
    if is_even { (most / REACH).powi(2) } else { 0.0 }
}

/// `Σ |x|^p`, or the largest `|x|`, `Σ |x|^2p` and the count of some elements.
fn powers_of(values: &Elements<'_>, power: f64) -> [f64; 3] {
    const BLOCK: usize = 1024;
    // In several sums beside each other, which a processor adds at once.
    const AT_ONCE: usize = 4;
    let (matrix, count) = (values.matrix(1, values.len()), values.len());
    let (mut block, mut sums, mut squares) = ([0.0; BLOCK], [0.0; AT_ONCE], [0.0; AT_ONCE]);
    for from in (0..count).step_by(BLOCK) {
        let here = BLOCK.min(count - from);
        matrix.span_f64(from, &mut block[..here]);
        block[here..].fill(0.0);
        for chunk in block.chunks_exact(AT_ONCE) {
            for (lane, x) in chunk.iter().enumerate() {
                let x = x.abs();
                if power.is_infinite() {
                    sums[lane] = larger(sums[lane], x);
                    continue;
                }
                let raised = if power == 2.0 { x * x } else { x.powf(power) };
                sums[lane] += raised;
                squares[lane] += raised * raised;
            }
        }
    }
    let whole = match power.is_infinite() {
        true => sums.into_iter().fold(0.0, larger),
        false => sums.iter().sum(),
    };
    [whole, squares.iter().sum(), count as f64]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the sum of equal numbers, one by one in f32, is no fault. Method: numbers whose partial
    /// sums are rounded the same way, against the allowed deviation; and others of unequal size.
    #[test]
    fn a_sum_of_equal_numbers_may_err_in_one_direction() {
        let (count, x) = (1056u16, 5.127_624_6e-6_f32);
        let sum = (0..count).fold(0f32, |sum, _| sum + x);
        let (exact, count) = (f64::from(count) * f64::from(x), f64::from(count));
        let squares = count * f64::from(x).powi(2);
        let native = Sum { precision: Precision::F32, ..Sum::NATIVE };
        let error = (f64::from(sum) - exact).abs();
        assert!(error > REACH * native.variance(count, exact, squares).sqrt());
        assert!(error < REACH * alike(count, exact, squares).sqrt());
        assert_eq!(alike(count, exact, 1.1 * squares), 0.0);
    }
}
