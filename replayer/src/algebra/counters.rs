//! The counters of steps in an optimizer's state.

use std::collections::BTreeSet;

use backtape::identity::Rank;
use backtape::part::Part;

use super::causes;
use super::declaration::ParameterDeclaration;
use super::held::is_left_out;
use super::inventory::Inventory;
use super::judge::Judge;
use super::optimizer::RESET;
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::rules::Rule;
use crate::dump::name_ranks;

/// Counters of steps in the state of optimizers, as frameworks call them.
pub(crate) const COUNTERS: [&str; 2] = ["step", "count"];

/// Tensors of the state that are zero before the first step; a few others begin with a number.
const MOMENTS: [&str; 5] = ["exp_avg", "mu", "m", "momentum_buffer", "trace"];

/// The counter of steps in a parameter's state: by its name, or the only whole number in it.
pub(super) fn counter(declared: &ParameterDeclaration) -> Option<&str> {
    if let Some(known) = COUNTERS.into_iter().find(|name| declared.scalars.contains_key(*name)) {
        return Some(known);
    }
    let is_whole =
        |name: &&String| declared.scalar_after(name).is_some_and(|x| x >= 0.0 && x.fract() == 0.0);
    let mut whole = declared.scalars.keys().filter(is_whole);
    let first = whole.next()?;
    whole.next().is_none().then_some(first)
}

/// A counter of steps before a step and after it.
struct Count<'a> {
    name: &'a str,
    before: f64,
    after: f64,
}

impl Judge<'_> {
    /// The counters of a parameter, which count one more each, and only steps that left a moment.
    pub(super) fn counters(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let updated = [Part::MasterAfter, Part::After];
        let after = updated.iter().find_map(|part| inventory.key(parameter, part));
        let Some(after) = after else { return Vec::new() };
        let count_of = |rank: Rank| {
            let declared = inventory.declared_of(rank, parameter)?;
            let name = counter(declared).filter(|name| self.is_counter(rank, parameter, name))?;
            let before = declared.scalar_before(name).unwrap_or(0.0);
            Some(Count { name, before, after: declared.scalar_after(name)? })
        };
        // Ranks with the same part may count otherwise.
        let bits = |rank: Rank| count_of(rank).map(|own| [own.before, own.after].map(f64::to_bits));
        let mut judged = Vec::new();
        for piece in inventory.pieces(after, &bits) {
            let rank = piece.ranks[0];
            let count = count_of(rank).filter(|_| !self.is_untouched(rank, parameter));
            let Some(count) = count else { continue };
            // A step that was left out is not counted, nor is it where the optimizer made the state in it.
            let declared = inventory.declared.get(&rank);
            let is_left_out = declared.is_some_and(|own| is_left_out(own, parameter));
            let wrong = match is_left_out && count.after == count.before {
                true => None,
                false => count.not_one_more(self.microbatches_of(rank)),
            };
            let wrong = wrong.or_else(|| count.of_moments(inventory, rank, parameter));
            let Some(divergence) = wrong else { continue };
            let result = Ok(Outcome::Diverged(Box::new(divergence)));
            judged.push(self.judged(Stage::State, parameter, (after, &piece), result));
        }
        judged
    }
}

impl Judge<'_> {
    /// Whether a number of the state counts steps: by its name, or as the rule needs a counter.
    fn is_counter(&self, rank: Rank, parameter: &str, name: &str) -> bool {
        let declared = self.inventory.declared.get(&rank);
        let of = declared.and_then(|declared| declared.optimizer_of(parameter));
        let rule = of.and_then(|(optimizer, hyper)| Rule::of(optimizer, hyper, 1.0));
        COUNTERS.contains(&name) || rule.is_some_and(|rule| rule.names().counts_steps)
    }
}

/// A count of several steps is no fault of the counter where the state is not that of one step
/// either: then several may have been taken. `judged`: all of one parameter's optimizer.
pub(super) fn doubt_counters(judged: &mut [Judged]) {
    let is_count = |own: &Reading| own.cause == causes::STEP_COUNTER.name;
    let is_unexplained = judged.iter().any(|one| {
        let divergence = one.result.divergence();
        divergence
            .is_some_and(|own| own.readings.iter().all(|own| own.cause == causes::UNKNOWN.name))
    });
    for one in judged.iter_mut().filter(|_| is_unexplained) {
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        for reading in divergence.readings.iter_mut().filter(|own| is_count(own)) {
            if reading.words.ends_with(SEVERAL) {
                let words = format!(
                    "{}, and the state is not that of one step: more than one may have been taken \
                     while the tape was open",
                    reading.words
                );
                *reading = causes::UNKNOWN.reads(words);
            }
        }
    }
}

/// What a count of more than one step is, in words.
const SEVERAL: &str = ": several steps are counted";

impl Count<'_> {
    /// A count that is not that of one step more.
    fn not_one_more(&self, microbatches: Option<f64>) -> Option<Divergence> {
        let Count { name, before, after } = self;
        if *after == before + 1.0 {
            return None;
        }
        let more = match (after - before, microbatches) {
            (0.0, _) => ": this step is not counted",
            (by, Some(microbatches)) if by == microbatches && by > 1.0 => {
                ": microbatches are counted"
            }
            (by, _) if by > 1.0 => SEVERAL,
            _ => "",
        };
        let words = format!("{name} was {before} before the step and is {after} after it{more}");
        let mut readings = vec![causes::STEP_COUNTER.reads(words.clone())];
        if *after <= 1.0 && *before > 1.0 {
            readings.insert(0, causes::STATE_RESET.reads(RESET));
        }
        let error = (after - before - 1.0).abs() / (before + 1.0);
        Some(Divergence { readings, ..Divergence::of(words, None, error) })
    }

    /// A count that begins anew beside moments of steps before.
    fn of_moments(
        &self,
        inventory: &Inventory<'_>,
        rank: Rank,
        parameter: &str,
    ) -> Option<Divergence> {
        let Count { name, before, .. } = self;
        if *before != 0.0 || !inventory.has_moments(rank, parameter) {
            return None;
        }
        let words =
            format!("{name} was 0 before the step, and the moments were not zero: it was lost");
        Some(Divergence::told(causes::STEP_COUNTER.reads(words), None, 1.0))
    }
}

impl Inventory<'_> {
    /// Whether some moment of a parameter that a rank recorded was not zero before the step.
    fn has_moments(&self, rank: Rank, parameter: &str) -> bool {
        let tensors = &self.parameters[parameter].tensors;
        let moments = tensors.iter().filter(|((part, _), _)| {
            matches!(part, Part::StateBefore(state) if MOMENTS.contains(&state.as_str()))
        });
        let mut shards = moments.flat_map(|(_, key)| &self.dump.tensors()[key].shards);
        let is_some = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
        shards.any(|shard| {
            self.dump.record(shard).rank == rank
                && self.dump.intact_bytes(shard).is_some_and(is_some)
        })
    }

    /// Steps that are counted before this one although every moment of every parameter is zero: what
    /// makes the state before a checkpoint is loaded into it may be such a step, and the corrections
    /// of bias are then those of a later one. Gradients may have been zero too.
    pub(super) fn counted_without_moments(&self) -> Option<String> {
        let before = |own: &ParameterDeclaration| own.scalar_before(counter(own)?);
        let own = self.declared.values().flat_map(|declared| declared.parameters.values());
        let count = own.filter_map(before).find(|count| *count >= 1.0)?;
        let [without, with] = self.moments_by_rank();
        if without.is_empty() {
            return None;
        }
        let why = match with.is_empty() {
            true => "of all parameters are zero: either no gradient came until now, or a step without one \
                     is counted"
                .to_string(),
            false => {
                let ranks = name_ranks(&Vec::from_iter(without.iter().copied()));
                format!(
                    "of all that {ranks} had are zero, where other ranks' are not: either no gradient \
                     came there until now, or that state was lost"
                )
            }
        };
        Some(format!("{count} steps are counted before this one, and the moments {why}"))
    }

    /// The ranks of which every moment is zero before the step, and the others that have moments. One
    /// parameter's may be zero, as those of a layer that was not used yet.
    fn moments_by_rank(&self) -> &[BTreeSet<Rank>; 2] {
        self.moments_of_ranks.get_or_init(|| {
            let (mut all, mut with) = (BTreeSet::new(), BTreeSet::new());
            for (name, parameter) in &self.parameters {
                let states = parameter.tensors.iter().filter(|((part, _), _)| {
                    matches!(part, Part::StateBefore(state) if Rule::is_state(state))
                });
                // Of a sample nobody knows what the rest is.
                let is_whole = self.samples.of_parameter(name).is_none();
                for shard in states.flat_map(|(_, key)| &self.dump.tensors()[key].shards) {
                    let rank = self.dump.record(shard).rank;
                    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
                    all.insert(rank);
                    // One that is not zero says it of all that the rank has.
                    if with.contains(&rank) {
                        continue;
                    }
                    let is_zero = self.dump.intact_bytes(shard).is_some_and(is_zero);
                    if !is_whole || !is_zero {
                        with.insert(rank);
                    }
                }
            }
            [all.difference(&with).copied().collect(), with]
        })
    }
}
