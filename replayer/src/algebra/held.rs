//! Which optimizer holds a parameter, and on which ranks it took its step.

use std::collections::BTreeSet;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes::{self, Cause};
use super::declaration::{Declaration, Optimizer};
use super::inventory::{Inventory, Piece};
use super::judge::{Judge, ranks};
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::rules::Rule;
use super::supposed::Tensors;

impl Judge<'_> {
    /// A parameter that no optimizer holds, or whose step some ranks alone took.
    pub(super) fn held(&self, parameter: &str) -> Vec<Judged> {
        let split = self.skipped_by_some(parameter).or_else(|| self.not_held(parameter));
        let again = || self.stepped_again(parameter);
        split.or_else(|| self.stepped_by_several(parameter)).or_else(again).into_iter().collect()
    }

    /// Ranks that left out the step that others took of the same parameter.
    fn skipped_by_some(&self, parameter: &str) -> Option<Judged> {
        let mut skipped = BTreeSet::new();
        let mut stepped = BTreeSet::new();
        for (rank, declared) in &self.inventory.declared {
            match is_skipped(declared, parameter) {
                Some(true) => skipped.insert(*rank),
                Some(false) if self.is_changed(*rank, parameter) == Some(true) => {
                    stepped.insert(*rank)
                }
                _ => false,
            };
        }
        let is_left = |rank: &Rank| self.is_changed(*rank, parameter) != Some(true);
        let is_split = !stepped.is_empty() && !skipped.is_empty() && skipped.iter().all(is_left);
        let [skipped, stepped] = [skipped, stepped].map(|own| own.into_iter().collect::<Vec<_>>());
        let key = self.inventory.key(parameter, &Part::After).filter(|_| is_split)?;
        let is_said = |rank: &Rank| {
            let declared = self.inventory.declared.get(rank);
            declared.is_none_or(|declared| is_left_out(declared, parameter))
        };
        let (did, cause) = match skipped.iter().all(is_said) {
            true => ("left the optimizer's step out", causes::INF_SKIPPED),
            false => ("did not call the optimizer's step", causes::NO_OP),
        };
        let words = format!("{} {did}, and {} took it", ranks(&skipped), ranks(&stepped));
        let look = match cause == causes::NO_OP {
            true => "the condition under which a rank calls the optimizer's step",
            false => cause.look,
        };
        Some(self.stepped_otherwise(parameter, (key, &skipped), words, Cause { look, ..cause }))
    }

    /// A parameter with a gradient that is in no optimizer, where one holds a tensor of its shape
    /// which is no parameter and gets no gradient. That an optimizer leaves parameters out is no
    /// fault by itself.
    fn not_held(&self, parameter: &str) -> Option<Judged> {
        let inventory = self.inventory;
        let key = inventory.key(parameter, &Part::Reduced)?;
        let shape = &inventory.dump.tensors()[key].shape;
        let is_dead = |declared: &&Declaration| {
            let mut foreign = declared.optimizers.iter().flat_map(|own| &own.foreign);
            foreign.any(|tensor| !tensor.grad && tensor.shape == *shape)
        };
        let is_lost = |rank: &Rank| {
            let declared = inventory.declared.get(rank).filter(is_dead);
            let own = declared.and_then(|declared| declared.parameters.get(parameter));
            own.is_some_and(|own| own.optimizer.is_none() && own.trainable == Some(true))
                && self.is_changed(*rank, parameter) == Some(false)
        };
        let lost: Vec<Rank> = inventory.holders(key).into_iter().filter(is_lost).collect();
        (!lost.is_empty()).then(|| {
            let words = "no optimizer holds it, and it did not change; an optimizer holds a tensor \
                         of its shape that is no parameter of the models and has no gradient";
            self.stepped_otherwise(parameter, (key, &lost), words.into(), causes::NOT_HELD)
        })
    }

    /// A gradient that was not cleared because no optimizer holds its parameter: that is what is
    /// wrong, and not when `zero_grad` is called.
    pub(super) fn not_cleared_as_not_held(&self, parameter: &str, judged: &mut [Judged]) {
        for one in judged {
            let Outcome::Diverged(divergence) = &mut one.result else { continue };
            let is_stale = |own: &Reading| own.cause == causes::NOT_CLEARED.name;
            if divergence.readings.iter().any(is_stale) && self.inventory.is_held_by_none(parameter)
            {
                let words = "the gradient that was there before the step is still in it, and no \
                             optimizer that was given holds the parameter: none clears its \
                             gradient, and none steps it";
                divergence.readings = vec![causes::NOT_HELD.reads(words)];
            }
        }
    }

    /// A parameter and its state, where the job says that it left the step out: both stay as they are.
    pub(super) fn left_out(&self, tensors: &Tensors<'_>, piece: &Piece) -> Vec<Judged> {
        let (inventory, rank, parameter) = (self.inventory, tensors.rank, tensors.parameter);
        let declared = inventory.declared.get(&rank);
        if !declared.is_some_and(|declared| is_left_out(declared, parameter)) {
            return Vec::new();
        }
        let parts = inventory.parameters[parameter].tensors.keys();
        let states = parts.filter_map(|(part, _)| match part {
            Part::StateAfter(name) if Rule::is_state(name) => {
                Some((Stage::State, Part::StateBefore(name.clone()), part.clone()))
            }
            _ => None,
        });
        let own = [(Stage::Update, Part::Before, Part::After)];
        let of = |(stage, before, part): (Stage, Part, Part)| {
            let before = inventory.key(parameter, &before)?;
            let after = inventory.key(parameter, &part)?;
            let [one, other] = [before, after].map(|key| inventory.hashes(key, rank));
            if one.is_empty() || one.len() != other.len() {
                return None;
            }
            let result = match one == other {
                true => Outcome::Agreed { seen_from: None, error: 0.0, floor: 0.0 },
                false => {
                    let words = format!(
                        "the job left the optimizer's step out, and {part} is not what it was \
                         before"
                    );
                    let reading = causes::UNKNOWN.reads(words);
                    Outcome::Diverged(Box::new(Divergence::told(reading, None, 1.0)))
                }
            };
            Some(self.judged(stage, parameter, (after, piece), Ok(result)))
        };
        states.chain(own).filter_map(of).collect()
    }

    /// A parameter that several optimizers stepped with the same gradient.
    fn stepped_by_several(&self, parameter: &str) -> Option<Judged> {
        let key = self.inventory.key(parameter, &Part::After)?;
        let mut held: Vec<usize> = Vec::new();
        let mut ranks = Vec::new();
        for (rank, declared) in &self.inventory.declared {
            let Some(own) = declared.parameters.get(parameter) else { continue };
            let mut all = own.also_in.clone();
            all.extend(own.optimizer);
            all.retain(|at| declared.optimizers.get(*at).is_some_and(Optimizer::has_stepped));
            if all.len() > 1 {
                all.sort_unstable();
                held = all;
                ranks.push(*rank);
            }
        }
        let of: Vec<String> = held.iter().map(usize::to_string).collect();
        (!ranks.is_empty()).then(|| {
            let words = format!(
                "optimizers {} hold it, and each of them stepped it with the same gradient",
                of.join(" and ")
            );
            self.stepped_otherwise(parameter, (key, &ranks), words, causes::UPDATED_TWICE)
        })
    }

    /// A parameter whose optimizer stepped twice by the same gradient.
    fn stepped_again(&self, parameter: &str) -> Option<Judged> {
        let key = self.inventory.key(parameter, &Part::After)?;
        let declared = self.inventory.declared.iter();
        let is_again = |declared: &Declaration| {
            declared.optimizer_of(parameter).is_some_and(|(optimizer, _)| optimizer.again)
        };
        let ranks: Vec<Rank> =
            declared.filter(|(_, own)| is_again(own)).map(|own| *own.0).collect();
        let words = "the optimizer stepped once more, and no backward pass came between: it took the \
                     same gradient twice";
        (!ranks.is_empty()).then(|| {
            self.stepped_otherwise(parameter, (key, &ranks), words.into(), causes::UPDATED_TWICE)
        })
    }

    /// Whether a rank's part of the parameter is another after the step; `None` where it recorded
    /// no value before and after it.
    pub(super) fn is_changed(&self, rank: Rank, parameter: &str) -> Option<bool> {
        let hashes = |part: &Part| {
            let key = self.inventory.key(parameter, part)?;
            Some(self.inventory.hashes(key, rank)).filter(|hashes| !hashes.is_empty())
        };
        Some(hashes(&Part::Before)? != hashes(&Part::After)?)
    }

    /// A parameter whose step did not come once on some ranks.
    fn stepped_otherwise(
        &self,
        parameter: &str,
        (key, ranks): (&TensorKey, &[Rank]),
        words: String,
        cause: Cause,
    ) -> Judged {
        // Of a step that was taken too often the factor is not known.
        let factor = (cause != causes::UPDATED_TWICE).then_some(0.0);
        let divergence = Divergence::told(cause.reads(words), factor, 1.0);
        let result = Ok(Outcome::Diverged(Box::new(divergence)));
        self.judged(Stage::Update, parameter, (key, &self.whole(key, ranks)), result)
    }

    /// All of a tensor, as ranks hold it together.
    fn whole(&self, key: &TensorKey, ranks: &[Rank]) -> Piece {
        let shape = self.inventory.dump.tensors()[key].shape.iter();
        let place = shape.map(|extent| (0, *extent)).collect();
        Piece { ranks: ranks.to_vec(), place: IndexBox(place) }
    }
}

impl Inventory<'_> {
    /// Whether no optimizer holds a parameter, on any rank, though one stepped others.
    pub(super) fn is_held_by_none(&self, parameter: &str) -> bool {
        let declared = || self.declared.values();
        let own = declared().filter_map(|declared| declared.parameters.get(parameter));
        let mut own = own.peekable();
        own.peek().is_some()
            && own.all(|own| own.optimizer.is_none() && own.trainable == Some(true))
            && declared().flat_map(|own| &own.optimizers).any(Optimizer::has_stepped)
    }

    /// Whether the optimizer of a parameter stepped again while the tape was open.
    pub(super) fn has_later_steps(&self, parameter: &str) -> bool {
        let mut own = self.declared.values().filter_map(|own| own.parameters.get(parameter));
        own.any(|own| own.absent.contains_key("later_steps"))
    }
}

/// Whether the optimizer of a parameter took no step; `None` where none holds it.
fn is_skipped(declared: &Declaration, parameter: &str) -> Option<bool> {
    let (optimizer, _) = declared.optimizer_of(parameter)?;
    Some(is_left_out(declared, parameter) || optimizer.steps == Some(0))
}

/// Whether the job says that it left the step of a parameter's optimizer out.
pub(super) fn is_left_out(declared: &Declaration, parameter: &str) -> bool {
    let of = declared.optimizer_of(parameter);
    let is_only = declared.optimizers.len() == 1;
    of.is_some_and(|(optimizer, _)| optimizer.skipped || (declared.skipped && is_only))
}
