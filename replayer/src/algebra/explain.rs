//! Why a sum of gradients is not what it should be: what it is a sum of instead.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::part::Part;

use super::causes;
use super::coefficients::Coefficients;
use super::domain::{Addend, Domain};
use super::gradient::is_near;
use super::judge::{Judge, ranks};
use super::outcome::{Divergence, Energies, Outcome, Reading};
use super::sum_causes::{Solved, named};
use super::sums::SumOf;
use crate::kernels::round::Precision;

/// Addends up to which a sum is solved for their coefficients.
const MOST_ADDENDS: usize = 64;

impl Judge<'_> {
    /// Judges a sum, and where it diverges says what it is a sum of.
    pub fn judged_sum(
        &self,
        of: &SumOf<'_>,
        parameter: &str,
        domain: &Domain,
    ) -> Result<(Outcome, Energies), String> {
        let tally = self.sum(of)?;
        let bound = self.bound(of.place);
        let (captured, right) = (tally.captured_energy, tally.reference_energy);
        let energies = Energies { captured, right };
        let Some(mut divergence) = self.divergence(&tally, of.place, &bound) else {
            let seen_from = tally.seen_from(&bound).map(|seen| seen.factor);
            return Ok((Outcome::Agreed { seen_from }, energies));
        };
        if tally.nonfinite == 0 {
            divergence.reading = self.read_sum(of, (parameter, domain), &divergence)?;
        }
        Ok((Outcome::Diverged(Box::new(divergence)), energies))
    }

    fn read_sum(
        &self,
        of: &SumOf<'_>,
        (parameter, domain): (&str, &Domain),
        divergence: &Divergence,
    ) -> Result<Option<Reading>, String> {
        if let Some(reading) = self.low_precision(of)? {
            return Ok(Some(reading));
        }
        let (addends, stale) = self.all_addends(of, parameter);
        if addends.len() > MOST_ADDENDS {
            return Ok(None);
        }
        let of = SumOf { addends: &addends, ..*of };
        let solved = self.coefficients(&of)?;
        let simple = simple_numbers(domain, self.microbatches(&of));
        let candidates = [solved.simplified(&simple), solved.values.clone()];
        for weights in candidates {
            let explained = SumOf { weights: &weights, ..of };
            let tally = self.sum(&explained)?;
            if tally.excess(&self.bound(of.place)).is_some() {
                continue;
            }
            let solved = Solved {
                addends: &addends,
                weights: &weights,
                stale,
                domain,
                rank: of.rank,
                is_unique: solved.is_unique,
                microbatches: self.microbatches(&of),
            };
            return Ok(Some(named(&solved)));
        }
        Ok(self.partly(&solved, divergence))
    }

    /// What is told where the coefficients do not give the sum.
    fn partly(&self, solved: &Coefficients, divergence: &Divergence) -> Option<Reading> {
        let is_far = solved.left.sqrt() > 0.1 * divergence.error.min(1.0);
        is_far.then(|| {
            let words = format!(
                "no sum of the recorded gradients gives it: {:.2} % of it is none of theirs",
                100.0 * solved.left.sqrt()
            );
            causes::UNKNOWN.reads(words)
        })
    }

    /// Whether it is right but for an accumulator of fewer bits than declared.
    fn low_precision(&self, of: &SumOf<'_>) -> Result<Option<Reading>, String> {
        for format in [Precision::Bf16, Precision::F16] {
            let lower = SumOf { sent: Some(format), ..*of };
            if self.sum(&lower)?.excess(&self.bound(of.place)).is_none() {
                let words = format!(
                    "it errs as a sum in {} does, and is recorded and declared wider",
                    format.name()
                );
                return Ok(Some(causes::LOW_PRECISION.reads(words)));
            }
        }
        Ok(None)
    }

    /// The gradients that may have become part of a sum: those of every rank that covers the box,
    /// and what this rank held before the step; and where in the list the latter is.
    fn all_addends(&self, of: &SumOf<'_>, parameter: &str) -> (Vec<Addend>, Option<usize>) {
        let inventory = self.inventory;
        let mut addends = of.addends.to_vec();
        let known: BTreeSet<Rank> = addends.iter().map(|addend| addend.rank).collect();
        let is_whole = |addend: &Addend| inventory.read_addend(addend, of.place).is_ok();
        let by_device = of.addends.iter().any(|addend| addend.index.is_some());
        let others = inventory.declared.keys().filter(|rank| !by_device && !known.contains(rank));
        // A rank's own sum over microbatches has no part in it that another rank computed.
        let is_of_ranks = of.key.tensor.as_str().starts_with("step.reduced:");
        for rank in others.filter(|_| is_of_ranks) {
            let theirs = inventory.addends_of(*rank, parameter).unwrap_or_default();
            addends.extend(theirs.into_iter().filter(is_whole));
        }
        let stale = inventory.key(parameter, &Part::Stale).cloned();
        let stale = stale.map(|key| Addend { rank: of.rank, microbatch: None, key, index: None });
        let stale = stale.filter(is_whole);
        let place = stale.is_some().then_some(addends.len());
        addends.extend(stale);
        (addends, place)
    }

    fn microbatches(&self, of: &SumOf<'_>) -> usize {
        let own: BTreeSet<Option<Microbatch>> =
            of.addends.iter().map(|addend| addend.microbatch).collect();
        let declared = self.inventory.declared.get(&of.rank);
        own.len().max(declared.and_then(|own| own.microbatches).unwrap_or(1) as usize)
    }
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
    let doubled = (1..=microbatches.min(16) as i32).map(|k| domain.scale * 2f64.powi(k));
    simple.extend(doubled);
    simple.push(1.0);
    simple.sort_by(f64::total_cmp);
    simple.dedup_by(|a, b| is_near(*a, *b));
    simple
}

/// Names microbatches in a sentence.
pub fn microbatch_words(microbatches: &BTreeSet<Option<Microbatch>>) -> String {
    let named: Vec<String> = microbatches.iter().flatten().map(|mb| mb.to_string()).collect();
    match named.len() {
        1 => format!("microbatch {}", named[0]),
        _ => format!("microbatches {}", named.join(", ")),
    }
}

/// Names ranks in a sentence.
pub fn rank_words(of: &BTreeSet<Rank>) -> String {
    ranks(&of.iter().copied().collect::<Vec<_>>())
}
