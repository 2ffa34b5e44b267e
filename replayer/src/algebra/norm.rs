//! The norm of the gradients: each element of the global gradient once.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::nan::larger;
use backtape::part::Part;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::causes;
use super::copies::OTHERS;
use super::declaration::Norm;
use super::domain::fewer_bits;
use super::elements::Elements;
use super::gradient::is_near;
use super::inventory::Piece;
use super::judge::Judge;
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::squares::Held;
use super::void_norms;
use crate::assemble::pieces;
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;

/// What a norm may be off by, in standard deviations of its rounding: one number is compared, and
/// beyond 6.5 a normal falls once in 10¹⁰.
const REACH: f64 = 6.5;

/// Roundings, in units of the format, that a norm in few bits may be off by.
const NORM_ROUNDINGS: f64 = 8.0;

/// The norm of one parameter, to the power that sums.
#[derive(Clone, Debug, Default)]
struct Share {
    /// `Σ |g|^p`, or the largest element, of the whole gradient.
    whole: f64,
    /// The same of what each rank holds.
    held: BTreeMap<Rank, f64>,
    /// Variance of the rounding of `whole`.
    variance: f64,
    /// How many ranks hold each element.
    copies: f64,
}

/// A norm as the job has it and as it should be.
struct Joined {
    /// As the job has it.
    value: f64,
    /// As the recorded gradients have it.
    expected: f64,
    /// The same to the power that sums.
    total: f64,
    /// The p of the norm.
    power: f64,
}

impl Joined {
    /// A norm that was rounded to a format of few bits. A number of more bits is none of that
    /// format but once in 2¹³ (f16) or 2¹⁶ (bf16) times.
    fn read_rounded(&self) -> Option<Reading> {
        let is_of = |format: &Precision| {
            // The norms of parameters, the sum of their squares and its root are rounded.
            let reach = NORM_ROUNDINGS * format.unit_roundoff() * self.expected;
            format.round64(self.value) == self.value && (self.value - self.expected).abs() <= reach
        };
        let format = [Precision::Bf16, Precision::F16].into_iter().find(is_of)?;
        let words = format!(
            "{} is a number of {}, and errs as one does that is computed in it",
            self.value,
            format.name()
        );
        Some(causes::NORM_LOW.reads(words))
    }

    /// The norm of norms of parameters that were rounded to a format of few bits.
    fn read_rounded_parts(
        &self,
        shares: &BTreeMap<&str, Share>,
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        let power = Some(self.power).filter(|power| power.is_finite())?;
        let is_sum_of = |format: &Precision| {
            let root = |share: &Share| format.round64(share.whole.powf(1.0 / power));
            is(shares.values().map(|share| root(share).powf(power)).sum())
        };
        let format = [Precision::Bf16, Precision::F16].into_iter().find(is_sum_of)?;
        let words =
            format!("it is the norm of norms of parameters that are rounded to {}", format.name());
        Some(causes::NORM_LOW.reads(words))
    }
}

/// By how much `x^(1/p)` errs for each unit of `ln x`, where a job has `1/p` in f32. A job takes
/// such a root of each parameter, of what a rank holds, and of all.
fn exponent_error(power: f64) -> f64 {
    let exponent = 1.0 / power;
    (f64::from(exponent as f32) - exponent).abs()
}

impl Judge<'_> {
    /// Every norm that a rank declares, those that are the same on several ranks once.
    pub(crate) fn norms(&self) -> Vec<Judged> {
        let mut groups: BTreeMap<(usize, u64, String), (Rank, Vec<Rank>)> = BTreeMap::new();
        for (rank, declared) in &self.inventory.declared {
            for (at, norm) in declared.norms.iter().enumerate() {
                let which = (
                    at,
                    norm.value.or(norm.local).unwrap_or(f64::NAN).to_bits(),
                    norm.of.clone().unwrap_or_default(),
                );
                let group = groups.entry(which).or_insert_with(|| (*rank, Vec::new()));
                group.1.push(*rank);
            }
        }
        let judge = |((at, ..), (rank, ranks)): (&(usize, u64, String), &(Rank, Vec<Rank>))| {
            let norm = &self.inventory.declared[rank].norms[*at];
            let result = match self.is_of_nothing() {
                true => Outcome::Diverged(Box::new(void_norms::of_nothing(norm))),
                false => self.norm(norm, ranks, *at).unwrap_or_else(Outcome::unchecked),
            };
            let parameter = String::new();
            let (tensor, ranks) = (format!("norm {at}"), ranks.clone());
            let (place, energies) = (IndexBox(Vec::new()), None);
            Judged { stage: Stage::Norm, parameter, tensor, ranks, place, energies, result }
        };
        groups.iter().map(judge).collect()
    }

    /// The parameters of a norm: those that any rank names beside it, as a rank names only those
    /// of which it holds a part.
    fn normed(&self, at: usize) -> BTreeSet<&str> {
        let norms = self.inventory.declared.values().filter_map(|own| own.norms.get(at));
        norms.flat_map(|norm| norm.parameters.iter().map(String::as_str)).collect()
    }

    /// A norm that these ranks declare.
    fn norm(&self, norm: &Norm, ranks: &[Rank], at: usize) -> Result<Outcome, String> {
        let (is_local, rank) = (norm.value.is_none(), ranks[0]);
        let value = norm.value.or(norm.local).ok_or("the job recorded no value of it")?;
        if norm.others > 0 {
            return Err(format!(
                "{} gradients in it are of no parameter that was recorded",
                norm.others
            ));
        }
        if let Some(why) = self.between_clippings(norm, rank, at) {
            return Err(why);
        }
        let power =
            norm.power().ok_or_else(|| format!("a norm of kind {} is not known", norm.kind))?;
        let (shares, stored) = self.shares(norm, rank, (at, power))?;
        let is_max = power.is_infinite();
        let join = |values: &mut dyn Iterator<Item = f64>| match is_max {
            true => values.fold(0.0, larger),
            false => values.sum(),
        };
        let root = |total: f64| if is_max { total } else { total.powf(1.0 / power) };
        let own = |share: &Share| match is_local {
            true => share.held.get(&rank).copied().unwrap_or(0.0),
            false => share.whole,
        };
        let total = join(&mut shares.values().map(own));
        let expected = root(total);
        let variance: f64 = shares.values().map(|share| share.variance).sum();
        let format = stored.unwrap_or(Precision::F32);
        // Each parameter's norm and the whole's are stored; a root divides a relative error by p.
        let relative =
            if is_max { 0.0 } else { variance.sqrt() / (power * total.max(f64::MIN_POSITIVE)) };
        let unit = format.unit_roundoff().max(Precision::F32.unit_roundoff());
        let roots = 3.0 * exponent_error(power) * total.max(f64::MIN_POSITIVE).ln().abs();
        let small = (1.0 + (shares.len() as f64).sqrt()) * format.smallest_subnormal();
        let allowed = expected * (REACH * relative + 4.0 * unit + roots) + small;
        // A step is left out for gradients that are not finite, and their norm is neither.
        let is_infinite = !expected.is_finite() || expected > format.largest_finite();
        if is_infinite && !value.is_finite() && self.inventory.is_left_out() {
            return Ok(Outcome::Agreed { seen_from: None, error: 0.0, floor: 0.0 });
        }
        if (value - expected).abs() <= allowed {
            let least = expected.max(f64::MIN_POSITIVE);
            let (error, floor) = ((value - expected).abs() / least, allowed / least);
            return Ok(Outcome::Agreed { seen_from: Some(floor), error, floor });
        }
        let factor = value / expected;
        let error = (factor - 1.0).abs();
        let mut divergence = Divergence {
            reason: format!(
                "the job has {value:.6}, and the recorded gradients have {expected:.6}"
            ),
            factor: factor.is_finite().then_some(factor),
            error,
            floor: allowed / expected,
            worst: None,
            reading: None,
            readings: Vec::new(),
        };
        let tolerance = (allowed / expected).max(1e-6);
        // What is as near to the right norm as the job's explains nothing.
        let is = |other: f64| {
            let other = root(other);
            let is_apart = (other - expected).abs() > 2.0 * tolerance * expected;
            is_apart && (value - other).abs() <= 2.0 * tolerance * value.abs().max(other)
        };
        let joined = Joined { value, expected, total, power };
        let read = self
            .read_scale(norm, rank, &joined, &is)
            .or_else(|| joined.read_rounded())
            .or_else(|| self.read_norm(&shares, (ranks, total, is_max), &is))
            .or_else(|| joined.read_rounded_parts(&shares, &is));
        divergence.readings = read.into_iter().collect();
        Ok(Outcome::Diverged(Box::new(divergence)))
    }

    /// Why the gradients that a norm is of were not recorded, where they were clipped before it, and
    /// once more after it: the clipped ones that are recorded are the last.
    fn between_clippings(&self, norm: &Norm, rank: Rank, at: usize) -> Option<String> {
        let declared = self.inventory.declared.get(&rank)?;
        let clips = |norm: &Norm| norm.limit().is_some_and(|limit| limit.coefficient() < 1.0);
        let (before, after) = declared.norms.split_at(at.min(declared.norms.len()));
        // Whether a clipping by value came before it or after it is not known.
        let is_between =
            after.iter().any(clips) || declared.clip_value.is_some() && before.iter().any(clips);
        (norm.of.as_deref() == Some("clipped") && is_between)
            .then(|| "it is of gradients between two clippings, which were not recorded".into())
    }

    /// The share of each parameter of a norm, and the format of fewest bits that one is stored in.
    fn shares(
        &self,
        norm: &Norm,
        rank: Rank,
        (at, power): (usize, f64),
    ) -> Result<(BTreeMap<&str, Share>, Option<Precision>), String> {
        let of = norm.of.as_deref().unwrap_or("reduced");
        let mut shares: BTreeMap<&str, Share> = BTreeMap::new();
        let (mut stored, mut lost) = (None, Vec::new());
        for parameter in self.normed(at) {
            let key = self.key_of(parameter, of);
            if self.inventory.are_others(parameter) {
                return Err(format!("{parameter} is in it: {OTHERS}"));
            }
            if let Some(held) = self.inventory.declared_squares(parameter, of, rank) {
                let (held, squares_of) = (held?, (parameter, key));
                stored = fewer_bits(stored, held.format);
                shares.insert(parameter, self.declared_share(squares_of, &held, power)?);
            } else if let Some(key) = key {
                let format = self.inventory.precision(key);
                stored = fewer_bits(stored, format);
                shares.insert(parameter, self.share(key, rank, power, format)?);
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
        Ok((shares, stored))
    }

    fn key_of(&self, parameter: &str, of: &str) -> Option<&TensorKey> {
        let name = format!("step.{of}:{parameter}");
        self.inventory.key(parameter, &Part::of_tensor(&name)?.0)
    }

    /// What enters instead, in place of each element once.
    fn read_norm(
        &self,
        shares: &BTreeMap<&str, Share>,
        (declaring, total, is_max): (&[Rank], f64, bool),
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        let held = |rank: &Rank| -> f64 {
            let own = shares.values().filter_map(|share| share.held.get(rank)).copied();
            if is_max { own.fold(0.0, larger) } else { own.sum() }
        };
        let ranks: BTreeSet<Rank> =
            shares.values().flat_map(|share| share.held.keys().copied()).collect();
        // Of ranks that hold different parts no two have one norm of their own: a number that both
        // declare went over ranks.
        let is_own = |rank: &Rank| !is_near(held(rank), total) && is(held(rank));
        if declaring.iter().all(is_own) {
            let words = format!("it is the norm of what rank {} holds alone", declaring[0]);
            return Some(causes::NORM_LOCAL.reads(words));
        }
        let all: f64 = ranks.iter().map(held).sum();
        if is_max {
            return self.read_largest(shares, is);
        }
        if is(all) {
            let words = "every copy of a gradient that several ranks hold is counted";
            return Some(causes::NORM_COPIES.reads(words));
        }
        self.read_multiplicities(shares, total, is)
    }

    /// The norm of gradients that have the loss scale in them, or from which it was taken out again,
    /// which stands for that of gradients without.
    fn read_scale(
        &self,
        norm: &Norm,
        rank: Rank,
        joined: &Joined,
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        let scale = self.inventory.declared.get(&rank)?.loss_scale?;
        let power = if joined.power.is_infinite() { 1.0 } else { joined.power };
        let is_unscaled = norm.of.as_deref() == Some("unscaled") && !is_near(scale, 1.0);
        let factor = scale.powf(power);
        if is_unscaled && is(joined.total * factor) {
            let words = format!("it is of the gradients with the loss scale {scale} in them");
            return Some(causes::CLIP_BEFORE_UNSCALE.reads(words));
        }
        let words = format!("it is of the gradients divided by the loss scale {scale} once more");
        (is_unscaled && is(joined.total / factor)).then(|| causes::SCALE_TWICE.reads(words))
    }

    /// The parameter whose largest element it is, where that is not the largest of all.
    fn read_largest(
        &self,
        shares: &BTreeMap<&str, Share>,
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        let (name, _) = shares.iter().find(|(_, share)| is(share.whole))?;
        let words = format!("it is the largest element of {name}: larger ones are not in it");
        Some(causes::NORM_MISSES.reads(words))
    }

    /// Groups of parameters that enter not at all, alone, or as often as there are copies of them.
    fn read_multiplicities(
        &self,
        shares: &BTreeMap<&str, Share>,
        total: f64,
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        if is(0.0) {
            return Some(causes::NORM_MISSES.reads("no gradient is in it"));
        }
        let mut groups: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for name in shares.keys() {
            for group in self.groups_of(name) {
                groups.entry(group).or_default().insert(name);
            }
        }
        // Larger groups first: a fault is more often one of many parameters than of one.
        let mut groups: Vec<(String, BTreeSet<&str>)> = groups.into_iter().collect();
        groups.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
        let sum =
            |names: &BTreeSet<&str>| names.iter().map(|name| shares[*name].whole).sum::<f64>();
        for (group, names) in groups.iter().filter(|(_, names)| names.len() < shares.len()) {
            if is(total - sum(names)) {
                return Some(causes::NORM_MISSES.reads(format!("{group} are not in it")));
            }
            if is(sum(names)) {
                return Some(causes::NORM_MISSES.reads(format!("{group} alone are in it")));
            }
        }
        // Copies count on their lowest rank, and so do parts that are taken for copies. What every rank
        // has loses nothing, so the smallest group says it best.
        let lost = |name: &str| {
            let (share, held) = (&shares[name], shares[name].held.first_key_value());
            held.map_or(0.0, |(_, held)| share.whole - held).max(0.0)
        };
        for (group, names) in groups.iter().rev() {
            let lost: f64 = names.iter().map(|name| lost(name)).sum();
            if lost > 0.0 && is(total - lost) {
                let words = format!("of {group} only what the lowest rank holds is in it");
                return Some(causes::NORM_MISSES.reads(words));
            }
        }
        for (group, names) in &groups {
            let copies = names.iter().map(|name| shares[*name].copies).fold(1.0, f64::max);
            for times in [copies, 1.0 / copies] {
                if times != 1.0 && is(total + (times - 1.0) * sum(names)) {
                    let words = format!("{group} are in it {times:.4} times");
                    return Some(causes::NORM_COPIES.reads(words));
                }
            }
        }
        None
    }

    /// The groups that a parameter is in, in words: by the words of its name, its shape, its
    /// optimizer's group, the axes that it is reduced over, and by itself.
    fn groups_of(&self, parameter: &str) -> Vec<String> {
        let mut groups = vec![parameter.to_string()];
        // `attention_norm` and `feed_norm` are norms.
        let parts =
            parameter.split('.').flat_map(|part| std::iter::once(part).chain(part.split('_')));
        groups.extend(parts.map(|word| format!("the parameters with {word} in their name")));
        let parts = [Part::Reduced, Part::Before];
        if let Some(key) = parts.iter().find_map(|part| self.inventory.key(parameter, part)) {
            groups.push(match self.inventory.dump.tensors()[key].shape.len() {
                0 | 1 => "the parameters of one dimension".into(),
                _ => "the parameters of several dimensions".into(),
            });
        }
        let Some(declared) = self.inventory.declared_of(Rank(0), parameter) else { return groups };
        if let (Some(optimizer), Some(group)) = (declared.optimizer, declared.group) {
            groups.push(format!("the parameters of group {group} of optimizer {optimizer}"));
        }
        let axes: Vec<&str> = declared.reduce.iter().map(|own| own.axis.as_str()).collect();
        groups.push(match axes.is_empty() {
            true => "the parameters that are not reduced".into(),
            false => format!("the parameters that are reduced over {}", axes.join(" and ")),
        });
        groups
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
            for rank in &piece.ranks {
                let held = share.held.entry(*rank).or_default();
                *held = if power.is_infinite() { larger(*held, value) } else { *held + value };
            }
            if counted.contains(&piece.place) {
                continue;
            }
            counted.push(piece.place.clone());
            share.copies = share.copies.max(piece.ranks.len() as f64);
            share.whole = match power.is_infinite() {
                true => larger(share.whole, value),
                false => share.whole + value,
            };
            let unit = format.map_or(0.0, Precision::unit_roundoff);
            share.variance += sum.variance(count, value, squares) + (2.0 * unit * value).powi(2);
            share.variance += count * Precision::F32.smallest_subnormal().powi(2);
        }
        Ok(share)
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
        Ok(Share {
            whole: held.whole(),
            held: held.by_rank.clone(),
            variance: held.parts.iter().map(variance).sum(),
            copies: held.copies as f64,
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

    /// Goal: a norm of few bits is told from one that is off by as much. Method: bf16 and f16 of a
    /// number, and numbers of f32 beside them.
    #[test]
    fn a_norm_of_few_bits_is_told_from_one_that_is_off() {
        let expected = 3.917_324_8;
        let told = |value: f64| {
            let joined = Joined { value, expected, total: expected * expected, power: 2.0 };
            joined.read_rounded().map(|reading| reading.cause)
        };
        for format in [Precision::Bf16, Precision::F16] {
            assert_eq!(told(format.round64(expected)), Some("norm-low-precision"));
        }
        assert_eq!(told(f64::from((expected * 1.001) as f32)), None);
        assert_eq!(told(Precision::Bf16.round64(2.0 * expected)), None);
    }

    /// The norm of norms that were rounded one by one.
    #[test]
    fn norms_of_parameters_that_are_rounded_are_told() {
        let norms = [1.234_567, 0.345_678, 2.618_281];
        let share = |norm: &f64| Share { whole: norm * norm, copies: 1.0, ..Share::default() };
        let shares: BTreeMap<&str, Share> =
            ["a", "b", "c"].into_iter().zip(norms.iter().map(share)).collect();
        let total: f64 = norms.iter().map(|norm| norm * norm).sum();
        let value =
            norms.map(|norm| Precision::Bf16.round64(norm).powi(2)).iter().sum::<f64>().sqrt();
        let joined = Joined { value, expected: total.sqrt(), total, power: 2.0 };
        let is = |other: f64| (other.sqrt() / value - 1.0).abs() < 1e-6;
        let reading = joined.read_rounded_parts(&shares, &is);
        assert_eq!(reading.map(|reading| reading.cause), Some("norm-low-precision"));
        assert_eq!(
            joined.read_rounded_parts(&shares, &|other| (other.sqrt() / 3.0 - 1.0).abs() < 1e-6),
            None
        );
    }
}
