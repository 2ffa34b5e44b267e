//! Why a sum of gradients is not what it should be: what it is a sum of instead.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::index_box::IndexBox;
use backtape::part::Part;

use super::causes;
use super::coefficients::{Coefficients, NEAR};
use super::declaration::ReduceOp;
use super::domain::{Addend, Domain};
use super::factor::is_near;
use super::judge::{Judge, ranks};
use super::outcome::{Divergence, Energies, Outcome, Reading};
use super::sum_causes::{Solved, named};
use super::sums::SumOf;
use crate::kernels::round::Precision;

/// Addends up to which a sum is solved for their coefficients.
const MOST_ADDENDS: usize = 1024;

impl Judge<'_> {
    /// Judges a sum, and where it diverges says what it is a sum of.
    pub(crate) fn judged_sum(
        &self,
        of: &SumOf<'_>,
        parameter: &str,
        domain: &Domain,
    ) -> Result<(Outcome, Energies), String> {
        let tally = self.sum(of)?;
        let bound = self.bound(of.place);
        let (captured, right) = (tally.captured_energy, tally.reference_energy);
        let energies = Energies { captured, right, apart: tally.squares_apart(&bound) };
        let Some(mut divergence) = self.divergence(&tally, of.place, &bound) else {
            return Ok((Outcome::agreed(&tally, &bound), energies));
        };
        if tally.nonfinite > 0 && !self.nan_is_meant {
            // What is not finite because an addend is not is no fault of the sum.
            let meant = Judge { nan_is_meant: true, ..*self };
            if meant.sum(of)?.excess(&meant.bound(of.place)).is_none() {
                return Err(
                    "gradients that it is the sum of are not finite: see how they were computed"
                        .into(),
                );
            }
        }
        if tally.nonfinite == 0 {
            divergence.readings = self.read_sum(of, (parameter, domain), &divergence)?;
            let is_unknown = divergence.readings.iter().all(is_unknown);
            let other = if is_unknown { self.sum_of_other(of, parameter, domain) } else { None };
            if let Some((reading, name)) = other {
                divergence.readings = vec![reading];
                divergence.reason += &format!("; it is that of {name}");
            }
        }
        Ok((Outcome::Diverged(Box::new(divergence)), energies))
    }

    /// Everything that a sum may be in place of what it should be, the simplest first.
    fn read_sum(
        &self,
        of: &SumOf<'_>,
        (parameter, domain): (&str, &Domain),
        divergence: &Divergence,
    ) -> Result<Vec<Reading>, String> {
        let own = self.with_stale(of, parameter, domain);
        let elements: u64 = of.place.extent().iter().product();
        let mut left = 0.0;
        let mut unknown: Vec<Reading> = Vec::new();
        for candidates in [own, self.with_other_ranks(of, parameter)] {
            let addends = &candidates.addends[..];
            if addends.len() > MOST_ADDENDS || addends.is_empty() {
                continue;
            }
            let of = SumOf { addends, ..*of };
            let products = self.scalar_products(&of)?;
            let mut readings: Vec<Reading> = Vec::new();
            for weights in candidates.divided_again(domain) {
                readings.extend(self.explained_by(&of, &candidates, domain, &weights)?);
            }
            for groups in candidates.families() {
                let solved = products.solve_by(&groups);
                left = solved.left;
                // As many coefficients as elements give any tensor: they say nothing of it.
                let unknowns = groups.iter().max().map_or(0, |last| *last as u64 + 1);
                if unknowns >= elements {
                    continue;
                }
                let reading = self.verified(&of, &candidates, domain, &solved)?;
                let known =
                    |reading: &Reading| readings.iter().all(|other| other.cause != reading.cause);
                readings.extend(reading.filter(known));
            }
            if elements <= addends.len() as u64 {
                for weights in candidates.plain(domain) {
                    readings.extend(self.explained_by(&of, &candidates, domain, &weights)?);
                }
            }
            readings.sort_by_key(is_unknown);
            if readings.first().is_some_and(|own| !is_unknown(own)) {
                return Ok(readings);
            }
            unknown.extend(readings);
        }
        if !unknown.is_empty() {
            return Ok(unknown);
        }
        if let Some(reading) = self.low_precision(of)? {
            return Ok(vec![reading]);
        }
        Ok(partly(left, divergence).into_iter().collect())
    }

    /// The reading of solved coefficients, if the sum is what they say.
    fn verified(
        &self,
        of: &SumOf<'_>,
        candidates: &Candidates,
        domain: &Domain,
        solved: &Coefficients,
    ) -> Result<Option<Reading>, String> {
        let simple = simple_numbers(domain, self.microbatches(of));
        let mut tried: Vec<Vec<f64>> = Vec::new();
        for distance in NEAR {
            tried.push(solved.simplified(&simple, distance));
        }
        tried.insert(1, solved.values.clone());
        tried.dedup();
        for weights in tried {
            let weights = Coefficients { values: weights, ..solved.clone() };
            let reading = self.explained_by(of, candidates, domain, &weights)?;
            if reading.is_some() {
                return Ok(reading);
            }
        }
        Ok(None)
    }

    /// The reading of coefficients, if the sum is what they say.
    fn explained_by(
        &self,
        of: &SumOf<'_>,
        candidates: &Candidates,
        domain: &Domain,
        weights: &Coefficients,
    ) -> Result<Option<Reading>, String> {
        let explained = SumOf { weights: &weights.values, ..*of };
        if self.trial().sum(&explained)?.excess(&self.bound(of.place)).is_some() {
            return Ok(None);
        }
        Ok(Some(named(&Solved {
            addends: of.addends,
            weights: &weights.values,
            stale: &candidates.stale,
            domain,
            inventory: self.inventory,
            parameter: &candidates.parameter,
            key: of.key,
            rank: of.rank,
            is_unique: weights.is_unique,
            microbatches: self.microbatches(of),
        })))
    }

    /// Whether it is right but for an accumulator of fewer bits than declared.
    fn low_precision(&self, of: &SumOf<'_>) -> Result<Option<Reading>, String> {
        for format in [Precision::Bf16, Precision::F16] {
            let lower = SumOf { sent: Some(format), ..*of };
            if self.trial().sum(&lower)?.excess(&self.bound(of.place)).is_none() {
                let words = format!(
                    "it errs as a sum in {} does, and is recorded and declared wider",
                    format.name()
                );
                return Ok(Some(causes::LOW_PRECISION.reads(words)));
            }
        }
        Ok(None)
    }

    /// The declared addends of a sum, and what ranks held before the step.
    fn with_stale(&self, of: &SumOf<'_>, parameter: &str, domain: &Domain) -> Candidates {
        let mut candidates = Candidates::new(parameter, of.addends.to_vec());
        let Some(key) = self.inventory.key(parameter, &Part::Stale) else { return candidates };
        for rank in &domain.ranks {
            let stale = Addend::new(*rank, None, key.clone());
            if self.inventory.holds(key, *rank, of.place) {
                candidates.stale.push(candidates.addends.len());
                candidates.addends.push(stale);
            }
        }
        candidates
    }

    /// A gradient of another box of the same extent, which a wrong group adds all the same.
    fn elsewhere(&self, addend: Addend, place: &IndexBox) -> Option<Addend> {
        let pieces = self.inventory.pieces(&addend.key, &|rank| rank);
        let own = pieces.into_iter().find(|piece| {
            piece.ranks.contains(&addend.rank) && piece.place.extent() == place.extent()
        })?;
        Some(Addend { elsewhere: Some((own.place, place.clone())), ..addend })
    }

    /// The gradients of every rank that covers the box, where others than the declared ones do. A
    /// rank's own sum over microbatches has no part in it that another rank computed.
    fn with_other_ranks(&self, of: &SumOf<'_>, parameter: &str) -> Candidates {
        let inventory = self.inventory;
        let by_device = of.addends.iter().any(|addend| addend.index.is_some());
        let is_of_ranks = of.key.tensor.as_str().starts_with("step.reduced:");
        let known: BTreeSet<Rank> = of.addends.iter().map(|addend| addend.rank).collect();
        let others = inventory.declared.keys().filter(|rank| !known.contains(rank));
        let mut more = Vec::new();
        for rank in others.filter(|_| is_of_ranks && !by_device) {
            let theirs = inventory.addends_of(*rank, parameter).unwrap_or_default();
            let placed = |addend: Addend| match inventory.holds(&addend.key, addend.rank, of.place)
            {
                true => Some(addend),
                false => self.elsewhere(addend, of.place),
            };
            more.extend(theirs.into_iter().filter_map(placed));
        }
        match more.is_empty() {
            true => Candidates::new(parameter, Vec::new()),
            false => Candidates::new(parameter, [of.addends.to_vec(), more].concat()),
        }
    }

    fn microbatches(&self, of: &SumOf<'_>) -> usize {
        let own: BTreeSet<Option<Microbatch>> =
            of.addends.iter().map(|addend| addend.microbatch).collect();
        let declared = self.inventory.declared.get(&of.rank);
        // What was there before the step, and a rank's own sum, have no microbatch.
        let own = own.iter().flatten().count().max(1);
        own.max(declared.and_then(|own| own.microbatches).unwrap_or(1) as usize)
    }
}

/// The gradients that may have become part of a sum.
struct Candidates {
    parameter: String,
    addends: Vec<Addend>,
    /// Which of them ranks held before the step.
    stale: Vec<usize>,
}

impl Candidates {
    fn new(parameter: &str, addends: Vec<Addend>) -> Candidates {
        Candidates { parameter: parameter.into(), addends, stale: Vec::new() }
    }

    /// The coefficients of a buffer that is divided by the size of an averaged axis once more with
    /// each microbatch. The first microbatches are small in it, and hard to solve for.
    fn divided_again(&self, domain: &Domain) -> Vec<Coefficients> {
        let microbatches: BTreeSet<Option<Microbatch>> =
            self.addends.iter().map(|addend| addend.microbatch).collect();
        let means = domain.axes.iter().filter(|axis| axis.op == ReduceOp::Mean && axis.size > 1);
        let of = |size: f64| {
            let weight = |(at, addend): (usize, &Addend)| {
                let later = microbatches.iter().filter(|other| **other > addend.microbatch);
                let is_fresh = !self.stale.contains(&at);
                if is_fresh { domain.scale / size.powi(later.count() as i32) } else { 0.0 }
            };
            let values = self.addends.iter().enumerate().map(weight).collect();
            Coefficients { values, left: 0.0, is_unique: true }
        };
        let means = means.filter(|_| microbatches.len() > 1);
        means.map(|axis| of(axis.size as f64)).collect()
    }

    /// Sums that a fault may leave, each addend in them once or not at all: of tensors with fewer
    /// elements than addends, for which coefficients cannot be solved.
    fn plain(&self, domain: &Domain) -> Vec<Coefficients> {
        let is_stale = |at: usize| self.stale.contains(&at);
        let fresh = || self.addends.iter().enumerate().filter(|(at, _)| !is_stale(*at));
        let microbatches: Vec<Option<Microbatch>> = fresh()
            .map(|(_, addend)| addend.microbatch)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        let ranks: BTreeSet<Rank> = fresh().map(|(_, addend)| addend.rank).collect();
        let mut all = Vec::new();
        let mut add = |of_stale: f64, weight: &dyn Fn(&Addend) -> f64| {
            let own = |(at, addend): (usize, &Addend)| match is_stale(at) {
                true => of_stale,
                false => weight(addend),
            };
            let values = self.addends.iter().enumerate().map(own).collect();
            all.push(Coefficients { values, left: 0.0, is_unique: true });
        };
        let (scale, has_stale) = (domain.scale, !self.stale.is_empty());
        if has_stale {
            // Ranks may hold the same of it: as many of them as have it in their sums.
            let count = self.stale.len() as f64;
            let shares = (1..=self.stale.len()).map(|ranks| ranks as f64 * scale / count);
            for of_stale in std::iter::once(1.0 / count).chain(shares) {
                add(of_stale, &|_| scale);
                add(of_stale, &|_| 0.0);
            }
        }
        // What is left of the microbatches where the sum begins anew, or ends, at one of them.
        for at in 1..microbatches.len() {
            let (before, after) = microbatches.split_at(at);
            for window in [after, before, &microbatches[at..=at], &microbatches[..1]] {
                // What was there before the step may have been brought together with them.
                for of_stale in [0.0, scale].into_iter().take(1 + usize::from(has_stale)) {
                    add(of_stale, &|addend| {
                        if window.contains(&addend.microbatch) { scale } else { 0.0 }
                    });
                }
            }
        }
        for rank in ranks {
            for own in [1.0, scale] {
                add(0.0, &|addend| if addend.rank == rank { own } else { 0.0 });
            }
        }
        all.dedup();
        all
    }

    /// Which addends have one coefficient, by how the fault may lie: alike for all, by rank, by
    /// microbatch, each by itself. The fewer coefficients, the fewer elements tell them apart. What
    /// was there before the step is a group of its own.
    fn families(&self) -> Vec<Vec<usize>> {
        let ranks = |addend: &Addend| (Some((addend.rank, addend.index)), None);
        let by: [&dyn Fn(&Addend) -> Apart; 4] =
            [&|_| (None, None), &ranks, &|addend| (None, Some(addend.microbatch)), &|addend| {
                (Some((addend.rank, addend.index)), Some(addend.microbatch))
            }];
        let mut families: Vec<Vec<usize>> = Vec::new();
        for apart in by {
            let mut known: Vec<(bool, Apart)> = Vec::new();
            let group = |(at, addend): (usize, &Addend)| {
                let is_stale = self.stale.contains(&at);
                let key = (is_stale, if is_stale { (None, None) } else { apart(addend) });
                let place = known.iter().position(|other| *other == key);
                place.unwrap_or_else(|| {
                    known.push(key);
                    known.len() - 1
                })
            };
            let family: Vec<usize> = self.addends.iter().enumerate().map(group).collect();
            if !families.contains(&family) {
                families.push(family);
            }
        }
        families
    }
}

/// What tells addends of a family apart.
type Apart = (Option<(Rank, Option<u64>)>, Option<Option<Microbatch>>);

fn is_unknown(reading: &Reading) -> bool {
    reading.cause == causes::UNKNOWN.name
}

/// What is told where no coefficients give a sum.
fn partly(left: f64, divergence: &Divergence) -> Option<Reading> {
    let is_far = left.sqrt() > 0.1 * divergence.error.min(1.0);
    is_far.then(|| {
        // Parameters that one fault hits differ in the share, and are told together.
        let part = if left.sqrt() > 0.5 { "more than half" } else { "a part" };
        let words =
            format!("no sum of the recorded gradients gives it: {part} of it is none of theirs");
        causes::UNKNOWN.reads(words)
    })
}

/// The coefficients that sums have by mistake: products of the sizes of axes and of the count of
/// microbatches, and powers of two where a sum is added to itself.
fn simple_numbers(domain: &Domain, microbatches: usize) -> Vec<f64> {
    let mut factors: Vec<f64> = domain.axes.iter().map(|axis| axis.size as f64).collect();
    factors.push(microbatches.max(1) as f64);
    let mut simple = vec![domain.scale];
    for factor in factors {
        let more = simple.iter().flat_map(|x| [x * factor, x / factor]);
        let more: Vec<f64> = more.collect();
        simple.extend(more);
    }
    let powers = 1..=microbatches.min(16) as i32;
    simple.extend(powers.clone().map(|k| domain.scale * 2f64.powi(k)));
    // A buffer that holds a sum may be divided by the size of an axis with each microbatch.
    for axis in domain.axes.iter().filter(|axis| axis.size > 1) {
        simple.extend(powers.clone().map(|k| domain.scale / (axis.size as f64).powi(k)));
    }
    simple.push(1.0);
    simple.sort_by(f64::total_cmp);
    simple.dedup_by(|a, b| is_near(*a, *b));
    simple
}

/// Names microbatches in a sentence.
pub(crate) fn microbatch_words(microbatches: &BTreeSet<Option<Microbatch>>) -> String {
    let named: Vec<String> = microbatches.iter().flatten().map(|mb| mb.to_string()).collect();
    match named.len() {
        1 => format!("microbatch {}", named[0]),
        _ => format!("microbatches {}", named.join(", ")),
    }
}

/// Names ranks in a sentence.
pub(crate) fn rank_words(of: &BTreeSet<Rank>) -> String {
    ranks(&of.iter().copied().collect::<Vec<_>>())
}
