//! The copies of a parameter: those of several ranks, the master copy, and names of one tensor.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::counters::counter;
use super::domain::Domain;
use super::inventory::{Inventory, Piece};
use super::judge::{Judge, Operand, WIDTH, arithmetic, ranks};
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::rules::Rule;
use crate::assemble::pieces;
use crate::compare::Tally;
use crate::kernels::round::Precision;
use crate::number::short;
use crate::ops::table::op;

/// A copy of a tensor.
struct Copy;

op! {
    Copy = "copy";
    inputs {
        master: Plane, "the copy of more bits";
    }
    stages {
        copy: Plane Forward Each |_op, master| master,
            "the copy";
    }
}

/// What ranks hold that share a name alone, in words.
pub(super) const OTHERS: &str = "ranks hold different values under this name, and nothing declares that they are to be the same: \
     other parameters of one name, or copies that drifted before";

impl Inventory<'_> {
    /// Whether ranks hold other parameters under one name, as pipelines and experts by hand do:
    /// their values differ before the step, no placement says that they are copies, and no reduction
    /// that is declared brings them together.
    pub(super) fn are_others(&self, parameter: &str) -> bool {
        let Some(key) = self.key(parameter, &Part::Before) else { return false };
        let shards = &self.dump.tensors()[key].shards;
        if shards.iter().any(|shard| self.dump.record(shard).replica > 0) {
            return false;
        }
        let mut boxes: BTreeMap<IndexBox, Vec<Rank>> = BTreeMap::new();
        for piece in self.pieces(key, &|_| ()) {
            boxes.entry(piece.place).or_default().push(piece.ranks[0]);
        }
        let is_apart = |ranks: &Vec<Rank>| {
            let domain = Domain::of(self, ranks[0], parameter);
            ranks.iter().any(|rank| !domain.ranks.contains(rank))
        };
        boxes.values().any(|ranks| ranks.len() > 1 && is_apart(ranks))
    }
}

/// How many values of two ranks are compared at the most, and at the least.
const COMPARED: usize = 1 << 16;
const FEWEST: usize = 16;
/// From which correlation on values are taken to have been the same once. Those that were drawn apart have
/// one of about one over the root of their number, and training may bring some about; experts that
/// begin as copies of one have as much as copies that have drifted.
const ALIKE: f64 = 0.9;

impl Inventory<'_> {
    /// The correlation of the values that two ranks hold before the step of parameters of one name
    /// which nothing declares to be copies, where that shows that they once were the same.
    pub(super) fn likeness(&self, parameter: &str) -> Option<f64> {
        let key = self.key(parameter, &Part::Before).filter(|_| self.are_others(parameter))?;
        let held = self.pieces(key, &|_| ());
        let pair = held.windows(2).find(|pair| pair[0].place == pair[1].place)?;
        let place = pieces(&pair[0].place, WIDTH).into_iter().next()?;
        let read = |piece: &Piece| self.read_box(key, piece.ranks[0], &place).ok();
        let (one, other) = (read(&pair[0])?, read(&pair[1])?);
        let count = one.len().min(COMPARED);
        let likeness = correlation(&one[..count], &other[..count]);
        (count >= FEWEST && likeness > ALIKE).then_some(likeness)
    }
}

/// Pearson's coefficient of two rows of numbers.
fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let count = one.len() as f64;
    let mean = |row: &[f64]| row.iter().sum::<f64>() / count;
    let (a, b) = (mean(one), mean(other));
    let products = |x: &[f64], x0: f64, y: &[f64], y0: f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - x0) * (y - y0)).sum()
    };
    products(one, a, other, b) / (products(one, a, one, a) * products(other, b, other, b)).sqrt()
}

/// Why a working copy is not its master copy rounded.
fn unlike_master(tally: &Tally, stored: Option<Precision>) -> Reading {
    let overflows = tally.first_nonfinite.as_ref().zip(stored).filter(|(at, stored)| {
        at.captured.is_infinite() && at.reference.abs() > stored.largest_finite()
    });
    let Some((at, stored)) = overflows else {
        return causes::MASTER_STALE.reads("the working copy is not the master copy rounded");
    };
    causes::UNKNOWN.reads(format!(
        "the master copy is {} there, and the largest number of {} is {}: the working copy overflows",
        short(at.reference),
        stored.name(),
        short(stored.largest_finite())
    ))
}

impl Judge<'_> {
    /// Whether all copies of a parameter are the same after the step.
    pub(crate) fn copies(&self, parameter: &str) -> Vec<Judged> {
        let mut judged = self.replicas(parameter);
        judged.extend(self.master(parameter));
        judged
    }

    /// Boxes that several ranks hold, with other bytes.
    fn replicas(&self, parameter: &str) -> Vec<Judged> {
        let mut judged = Vec::new();
        for ((part, _), key) in &self.inventory.parameters[parameter].tensors {
            // Gradients are judged on each rank that holds them.
            let is_copied = matches!(
                part,
                Part::Before
                    | Part::After
                    | Part::MasterBefore
                    | Part::MasterAfter
                    | Part::StateBefore(_)
                    | Part::StateAfter(_)
            );
            if !is_copied || self.is_part_of_own(parameter, part, key) {
                continue;
            }
            let copies = self.copies_of(parameter, key).into_iter();
            judged.extend(
                copies.filter(|copy| *part == Part::After || copy.result.divergence().is_some()),
            );
        }
        judged
    }

    /// Whether it is the state of an optimizer that no rule is known of, in another shape than the
    /// parameter's: each rank may keep that of its own rows, and nothing says that these are copies.
    fn is_part_of_own(&self, parameter: &str, part: &Part, key: &TensorKey) -> bool {
        let inventory = self.inventory;
        let is_state = matches!(part, Part::StateBefore(_) | Part::StateAfter(_));
        let shape = |key: &TensorKey| &inventory.dump.tensors()[key].shape;
        let is_other = |after: &TensorKey| shape(after) != shape(key);
        let is_unknown = || {
            inventory.declared.values().any(|own| {
                let of = own.optimizer_of(parameter);
                of.is_some_and(|(own, hyper)| Rule::of(own, hyper, 1.0).is_none())
            })
        };
        is_state && inventory.key(parameter, &Part::After).is_some_and(is_other) && is_unknown()
    }

    fn copies_of(&self, parameter: &str, key: &TensorKey) -> Vec<Judged> {
        let mut boxes: BTreeMap<IndexBox, Vec<Piece>> = BTreeMap::new();
        for piece in self.inventory.pieces(key, &|_| ()) {
            boxes.entry(piece.place.clone()).or_default().push(piece);
        }
        let several = boxes
            .into_values()
            .filter(|pieces| pieces.iter().map(|piece| piece.ranks.len()).sum::<usize>() > 1);
        several.map(|pieces| self.replica(parameter, key, &pieces)).collect()
    }

    fn replica(&self, parameter: &str, after: &TensorKey, pieces: &[Piece]) -> Judged {
        let mut whole = pieces[0].clone();
        whole.ranks = pieces.iter().flat_map(|piece| piece.ranks.clone()).collect();
        whole.ranks.sort();
        if self.inventory.are_others(parameter) {
            let result = match self.inventory.likeness(parameter) {
                Some(_) => Outcome::unchecked(OTHERS.into()),
                None => Outcome::not_done(OTHERS.into()),
            };
            return self.judged(Stage::Param, parameter, (after, &whole), Ok(result));
        }
        let result = match pieces {
            [_] => Outcome::Agreed { seen_from: None, error: 0.0, floor: 0.0 },
            _ => Outcome::Diverged(Box::new(self.drift(parameter, pieces))),
        };
        self.judged(Stage::Param, parameter, (after, &whole), Ok(result))
    }

    fn drift(&self, parameter: &str, pieces: &[Piece]) -> Divergence {
        let inventory = self.inventory;
        let versions: Vec<String> = pieces.iter().map(|piece| ranks(&piece.ranks)).collect();
        let before = inventory.key(parameter, &Part::Before);
        let were_apart = before.is_some_and(|before| {
            let own = |piece: &Piece| inventory.hashes(before, piece.ranks[0]);
            pieces.iter().any(|piece| own(piece) != own(&pieces[0]))
        });
        // Where ranks share the states each has those of its part alone.
        let has_state = |rank: &&Rank| {
            let own = inventory.declared_of(**rank, parameter);
            !own.is_some_and(|own| own.absent.contains_key("state"))
        };
        let counts: BTreeMap<String, Vec<Rank>> = pieces
            .iter()
            .flat_map(|piece| &piece.ranks)
            .filter(has_state)
            .fold(BTreeMap::new(), |mut all, rank| {
                all.entry(self.counted_before(*rank, parameter)).or_default().push(*rank);
                all
            });
        let held: Vec<Rank> = pieces.iter().flat_map(|piece| piece.ranks.clone()).collect();
        let setting = inventory.other_setting_of(parameter, &held);
        let words = match (were_apart, counts.len()) {
            (_, 2..) => {
                let each = counts.iter().map(|(count, own)| format!("{count} on {}", ranks(own)));
                let each = each.collect::<Vec<_>>().join(", ");
                format!("the optimizers' states are not the same before the step: {each}")
            }
            (true, _) => "the copies differed before the step already".into(),
            (false, _) => "the copies were the same before the step and differ after it".into(),
        };
        let words = setting.map_or(words.clone(), |setting| format!("{words}; {setting}"));
        let mut reading = causes::COPIES_DRIFT.reads(words);
        if counts.len() > 1 {
            reading.look = "how each rank's optimizer gets its state, as from a checkpoint";
        }
        let reason = format!("{} hold different values of it", versions.join("; "));
        Divergence { readings: vec![reading], ..Divergence::of(reason, None, f64::NAN) }
    }

    /// How many steps a rank's optimizer has counted before this one, in words.
    fn counted_before(&self, rank: Rank, parameter: &str) -> String {
        let declared = self.inventory.declared_of(rank, parameter);
        let count = declared.and_then(|own| own.scalar_before(counter(own)?));
        count.map_or_else(|| "no state".into(), |count| format!("{count} steps"))
    }

    /// Why the working copy was not recorded after the step, where the master copy was.
    fn not_brought_back(&self, parameter: &str) -> Option<Judged> {
        let inventory = self.inventory;
        let master = inventory.key(parameter, &Part::MasterAfter)?;
        let why = inventory.declared.values().find_map(|declared| {
            declared.parameters.get(parameter)?.absent.get("after").cloned()
        })?;
        let piece = inventory.pieces(master, &|_| ()).into_iter().next()?;
        Some(self.judged(Stage::Param, parameter, (master, &piece), Err(why)))
    }

    /// The working copy against the master copy.
    fn master(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let keys =
            (inventory.key(parameter, &Part::After), inventory.key(parameter, &Part::MasterAfter));
        let (Some(after), Some(master)) = keys else {
            return self.not_brought_back(parameter).into_iter().collect();
        };
        let judge = |piece: &Piece| {
            let stored = inventory.precision(after);
            let rank = piece.ranks[0];
            let operands = |part: &IndexBox| {
                Ok(vec![
                    Operand::part("master", inventory.elements(master, rank, part)?, None),
                    Operand::part("copy", inventory.elements(after, rank, part)?, stored),
                ])
            };
            let compared = self.compare(&Copy, &arithmetic(stored, None), &piece.place, &operands);
            let result = compared.and_then(|compared| {
                let tally = compared.into_iter().next().ok_or("it has no elements")?.1?;
                Ok(match self.outcome(&tally, &piece.place, |_| None) {
                    Outcome::Diverged(mut divergence) => {
                        divergence.readings = vec![unlike_master(&tally, stored)];
                        Outcome::Diverged(divergence)
                    }
                    other => other,
                })
            });
            self.judged(Stage::Param, parameter, (after, piece), result)
        };
        // A rank may have a part of the master copy beside the whole parameter.
        let is_part = inventory.held_elements(master) < inventory.held_elements(after);
        let (held, other) = if is_part { (master, after) } else { (after, master) };
        let pieces = inventory.pieces(held, &|rank| inventory.hashes(other, rank));
        pieces.iter().map(judge).collect()
    }
}
