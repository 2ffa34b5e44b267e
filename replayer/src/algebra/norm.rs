//! The norm of the gradients: each element of the global gradient once.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::nan::larger;
use backtape::part::Part;

use super::causes;
use super::copies::OTHERS;
use super::declaration::Norm;
use super::factor::is_near;
use super::judge::Judge;
use super::norm_shares::{Expected, Share, Shares, root};
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::void_norms;
use crate::kernels::round::Precision;

/// What stands for the tensor of a norm, before its index among those of the step.
pub(super) const NORM: &str = "norm ";

/// Roundings, in units of the format, that a norm in few bits may be off by.
const NORM_ROUNDINGS: f64 = 8.0;

/// How far apart two norms of the same gradients may be that are computed in f32.
const IN_F32: f64 = 1e-5;

/// Norms that are tried of each group of parameters, about; each is met by chance as often as numbers
/// are within its tolerance, and in all not more often than this.
const TRIED_OF_GROUP: f64 = 4.0;
const BY_CHANCE: f64 = 0.5;

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
    /// A norm that is infinite as a number on the way to it is too large for the format.
    fn read_overflow(&self, most: f64) -> Option<Reading> {
        let overflows = self.value.is_infinite() && self.expected.is_finite() && self.total > most;
        let words = "it is infinite: what is summed is above the largest number of the format";
        overflows.then(|| causes::NORM_LOW.reads(words))
    }

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
            let (tensor, ranks) = (format!("{NORM}{at}"), ranks.clone());
            let (place, energies) = (IndexBox(Vec::new()), None);
            Judged { stage: Stage::Norm, parameter, tensor, ranks, place, energies, result }
        };
        groups.iter().map(judge).collect()
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
        let shares = self.shares(norm, rank, (at, power))?;
        let own = |share: &Share| match is_local {
            true => share.held.get(&rank).copied().unwrap_or(0.0),
            false => share.whole,
        };
        let right = shares.expected(power, &own);
        let Expected { total, norm: expected, allowed } = right;
        // A step is left out for gradients that are not finite, and their norm is neither.
        let most = shares.stored.unwrap_or(Precision::F32).largest_finite();
        let is_infinite = !expected.is_finite() || expected > most;
        if is_infinite && !value.is_finite() && self.inventory.is_left_out() {
            return Ok(Outcome::Agreed { seen_from: None, error: 0.0, floor: 0.0 });
        }
        // Ranks that hold other values under one name hold other parameters, or copies that drifted:
        // a norm that is right for one of the two is no fault.
        let others = shares.others().map(|name| format!("{name} is in it: {OTHERS}"));
        let apart = shares.expected(power, &|share| share.apart.unwrap_or_else(|| own(share)));
        if let Some(why) = others.clone().filter(|_| right.is(value) || apart.is(value)) {
            return Err(why);
        }
        if right.is(value) {
            let least = expected.max(f64::MIN_POSITIVE);
            let (error, floor) = ((value - expected).abs() / least, allowed / least);
            return Ok(Outcome::Agreed { seen_from: Some(floor), error, floor });
        }
        if let Some(wider) = self.short_of(norm, value, (&right, &shares), power)? {
            let floor = wider / expected;
            let error = (value - expected).abs() / expected;
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
        let joined = Joined { value, expected, total, power };
        let read = |tolerance| {
            self.read_joined(norm, ranks, (&shares.by_parameter, &joined), (tolerance, most))
        };
        let tolerance = (allowed / expected).max(1e-6);
        // A number of more bits than the gradients have was computed in as many.
        let is_wide = shares.stored.is_some_and(|stored| stored.round64(value) != value);
        let exact = if is_wide { read(IN_F32) } else { None };
        divergence.readings = exact.or_else(|| read(tolerance)).into_iter().collect();
        match others.filter(|_| divergence.readings.is_empty()) {
            Some(why) => Err(why),
            None => Ok(Outcome::Diverged(Box::new(divergence))),
        }
    }

    /// How far off a norm may be that is smaller than it should be by no more than squares that its sum
    /// cannot have counted; `None` where it is off by more.
    fn short_of(
        &self,
        norm: &Norm,
        value: f64,
        (right, shares): (&Expected, &Shares<'_>),
        power: f64,
    ) -> Result<Option<f64>, String> {
        let is_near = value < right.norm && value > 0.999 * right.norm;
        if power != 2.0 || !is_near {
            return Ok(None);
        }
        // A share of the squares is half that share of their root.
        let wider = right.allowed + right.norm * self.swallowed(norm, shares)? / 2.0;
        Ok((right.norm - value <= wider).then_some(wider))
    }

    /// What reproduces a norm within a tolerance; `most` is the largest number of its format.
    fn read_joined(
        &self,
        norm: &Norm,
        ranks: &[Rank],
        (shares, joined): (&BTreeMap<&str, Share>, &Joined),
        (tolerance, most): (f64, f64),
    ) -> Option<Reading> {
        let Joined { value, expected, total, power } = *joined;
        // What is as near to the right norm as the job's explains nothing.
        let is = |other: f64| {
            let other = root(other, power);
            let is_apart =
                value.is_finite() && (other - expected).abs() > 2.0 * tolerance * expected;
            is_apart && (value - other).abs() <= 2.0 * tolerance * value.abs().max(other)
        };
        joined
            .read_overflow(most)
            .or_else(|| self.read_scale(norm, ranks[0], joined, &is))
            .or_else(|| joined.read_rounded())
            .or_else(|| self.read_devices(norm, shares.keys().copied(), &is))
            .or_else(|| self.read_norm(shares, (ranks, total, power), &is, tolerance))
            .or_else(|| joined.read_rounded_parts(shares, &is))
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

    /// What enters instead, in place of each element once.
    fn read_norm(
        &self,
        shares: &BTreeMap<&str, Share>,
        (declaring, total, power): (&[Rank], f64, f64),
        is: &dyn Fn(f64) -> bool,
        tolerance: f64,
    ) -> Option<Reading> {
        let held = |rank: &Rank| -> f64 {
            let own = shares.values().filter_map(|share| share.held.get(rank)).copied();
            if power.is_infinite() { own.fold(0.0, larger) } else { own.sum() }
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
        if power.is_infinite() {
            return self.read_largest(shares, is);
        }
        if is(all) {
            let words = "every copy of a gradient that several ranks hold is counted";
            return Some(causes::NORM_COPIES.reads(words));
        }
        self.read_multiplicities(shares, (total, tolerance), is)
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
        (total, tolerance): (f64, f64),
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
        // Where rounding leaves much room some group fits by chance, and says nothing.
        if TRIED_OF_GROUP * groups.len() as f64 * 4.0 * tolerance > BY_CHANCE {
            return None;
        }
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
        let mesh = &self.inventory.dump.manifest.mesh.0;
        let sizes: Vec<f64> = mesh.iter().map(|(_, size)| f64::from(*size)).collect();
        for (group, names) in &groups {
            let copies = names.iter().map(|name| shares[*name].copies).fold(1.0, f64::max);
            // Devices of one process hold copies that it records once.
            let counts = [copies, sizes.iter().product()].into_iter().chain(sizes.iter().copied());
            for times in counts.flat_map(|count| [count, 1.0 / count]) {
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
