//! Solves a captured sum of dk for the weights of its addends: which ranks' and which microbatches'
//! gradients it contains, and how often.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use backtape::head::MicrobatchReduction;
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use super::captured::Values;
use super::dlogits_plane::{Plane, Rows};
use super::gradient::Gradient;
use super::least_squares::multiples;
use super::unit_states::UnitState;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::replay::addends;
use crate::replay::world::{Expectation, World};

/// A sum of more addends than this is not solved.
const MOST: usize = 128;
/// How far a weight may be from a whole number.
const WHOLE: f64 = 0.05;

/// An addend of a sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Addend {
    /// Its microbatch; none for a sum over microbatches.
    pub microbatch: Option<Microbatch>,
    /// Its rank; none where it was recorded as a whole.
    pub rank: Option<Rank>,
    /// The device, named by its box of the scores, where the rank has several.
    pub device: Option<String>,
    /// How often the sum contains it.
    pub weight: f64,
}

/// A sum with the weights of its addends, not all of them 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Solved {
    /// The sum.
    pub key: Key,
    /// Its addends with whole weights.
    pub addends: Vec<Addend>,
    /// A common factor of all weights.
    pub scale: f64,
    /// The values of the sum with these weights, for a dk whose addends were not recorded;
    /// otherwise the replay weighs the recorded ones.
    instead: Option<Arc<Rows>>,
}

impl Solved {
    /// A sum whose addends have these weights.
    pub fn of(sum: &Summed, (key, scale): (Key, f64), addends: Vec<Addend>) -> Solved {
        let instead = (key.stage == Stage::Dk).then(|| {
            let mut values = vec![0.0; sum.captured.values.len()];
            for ((_, part), addend) in sum.parts.iter().zip(&addends) {
                let weight = addend.weight * scale;
                values.iter_mut().zip(part).for_each(|(sum, x)| *sum += weight * x);
            }
            Arc::new(Rows { cols: sum.captured.columns, values })
        });
        Solved { key, addends, scale, instead }
    }

    /// The ranks of which no addend is in the sum, where all other ranks' addends are in it once.
    pub fn ranks_left_out(&self) -> Option<BTreeSet<Option<Rank>>> {
        let mut weights: BTreeMap<Option<Rank>, BTreeSet<u64>> = BTreeMap::new();
        for addend in &self.addends {
            weights.entry(addend.rank).or_default().insert(addend.weight.to_bits());
        }
        let only = |weight: f64| BTreeSet::from([weight.to_bits()]);
        let known = weights.values().all(|set| *set == only(0.0) || *set == only(1.0));
        let out: BTreeSet<Option<Rank>> =
            weights.iter().filter(|(_, set)| **set == only(0.0)).map(|(&rank, _)| rank).collect();
        (known && !out.is_empty() && out.len() < weights.len() && !out.contains(&None))
            .then_some(out)
    }

    /// The weight of each microbatch, where it is the same on all ranks.
    pub fn by_microbatch(&self) -> Option<BTreeMap<Microbatch, f64>> {
        let mut weights: BTreeMap<Microbatch, BTreeSet<u64>> = BTreeMap::new();
        for addend in &self.addends {
            weights.entry(addend.microbatch?).or_default().insert(addend.weight.to_bits());
        }
        let common_weight = |(mb, set): (Microbatch, BTreeSet<u64>)| {
            let weight = set.iter().next().copied().filter(|_| set.len() == 1)?;
            Some((mb, f64::from_bits(weight)))
        };
        weights.into_iter().map(common_weight).collect()
    }

    /// The scale in words.
    pub fn scale_name(&self) -> String {
        match self.scale {
            1.0 => "1".into(),
            scale if scale < 1.0 => format!("1/{}", (1.0 / scale).round()),
            scale => scale.to_string(),
        }
    }

    /// The sum with these weights.
    pub fn world(&self) -> Weighted {
        Weighted { sums: vec![self.clone()] }
    }
}

/// A world in which the addends of some sums have other weights than 1.
pub struct Weighted {
    /// The sums with their weights.
    pub sums: Vec<Solved>,
}

impl World for Weighted {
    fn weight(&self, stage: Stage, microbatch: Option<Microbatch>, rank: Option<Rank>) -> f64 {
        let of_stage = |solved: &&Solved| {
            // Each rank has its own sum over microbatches.
            solved.key.stage == stage && (stage == Stage::Reduce || solved.key.rank == rank)
        };
        let mut all = self.sums.iter().filter(of_stage).filter_map(|solved| {
            let is_addend =
                |addend: &&Addend| addend.microbatch == microbatch && addend.rank == rank;
            solved.addends.iter().find(is_addend).map(|addend| addend.weight * solved.scale)
        });
        all.next().unwrap_or(1.0)
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        let sum_of_key = self.sums.iter().find(|sum| sum.key == key);
        let Some(instead) = sum_of_key.and_then(|sum| sum.instead.as_ref()) else { return };
        for (&row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            if row < instead.count() {
                values.copy_from_slice(instead.row(row));
            }
        }
    }
}

/// Solves every failing sum of dk; returns those whose weights are whole numbers, not all 1, times
/// a common scale that the numbers of ranks and microbatches explain. A dk that was recorded as a
/// whole is treated as the sum of its ranks' parts.
pub fn solved(evidence: &Evidence<'_>) -> Vec<Solved> {
    let sums = [Stage::Dk, Stage::Accumulate, Stage::Reduce];
    let keys: Vec<Key> = evidence.failing_of(&sums).map(|(key, _)| key).collect();
    keys.into_iter().filter_map(|key| solve(evidence, key)).collect()
}

fn solve(evidence: &Evidence<'_>, key: Key) -> Option<Solved> {
    let sum = Summed::of(evidence, key, true)?;
    let (addends, scale) = fitted(evidence, &sum.parts, &sum.captured.values)?;
    let weighted = addends.iter().any(|addend| addend.weight != 1.0);
    weighted.then(|| Solved::of(&sum, (key, scale), addends))
}

/// An addend with its values.
pub type Part = (Addend, Vec<f64>);

/// The whole weights with which the addends add up to `values`, and their scale; `None` where the
/// least-squares weights are not whole.
pub fn fitted(
    evidence: &Evidence<'_>,
    parts: &[Part],
    values: &[f64],
) -> Option<(Vec<Addend>, f64)> {
    let count = parts.len();
    if !(2..=MOST).contains(&count) || parts.iter().any(|(_, x)| x.len() != values.len()) {
        return None;
    }
    let all: Vec<&[f64]> = parts.iter().map(|(_, part)| &part[..]).collect();
    let (weights, scale) = whole(evidence, &multiples(&all, values)?)?;
    let with_weight = |((addend, _), weight): (&Part, f64)| Addend { weight, ..addend.clone() };
    Some((parts.iter().zip(weights).map(with_weight).collect(), scale))
}

/// The declared divisor of a sum over microbatches: their number, where the mean is taken there, or
/// 1.
pub fn divisor(evidence: &Evidence<'_>, key: Key) -> f64 {
    let local = evidence.step.find_reduced(Role::Dk, false).is_some();
    let of_microbatches = key.stage == Stage::Accumulate || !local;
    match evidence.step.options.microbatch_reduction {
        MicrobatchReduction::Mean if of_microbatches => evidence.microbatches().max(1) as f64,
        _ => 1.0,
    }
}

/// Whether a rank's gradient is an addend of a sum. Each rank has its own sum over microbatches;
/// all ranks' gradients are in a sum over ranks, of which ranks may hold versions. A gradient of no
/// single rank is in every sum.
pub fn adds_to(sum: Key, rank: Option<Rank>) -> bool {
    let own_rank = sum.rank.filter(|_| sum.stage == Stage::Accumulate);
    own_rank.is_none() || rank.is_none() || rank == own_rank
}

/// The reference gradients that are addends of a failing sum, for addends that were not recorded;
/// `None` where there are none.
pub fn unrecorded(evidence: &Evidence<'_>, key: Key) -> Option<Vec<addends::Read>> {
    if evidence.step.options.transposed() {
        return None;
    }
    let of_rank = |of: &&addends::Read| adds_to(key, of.1);
    let of_key: Vec<_> = evidence.outcome.unrecorded.iter().filter(of_rank).cloned().collect();
    (!of_key.is_empty()).then_some(of_key)
}

/// The addends of a sum. `summed`: whether to take the ranks' sums over microbatches, where those
/// were captured, as the replay does; otherwise every microbatch's gradients.
pub fn addends_of(evidence: &Evidence<'_>, key: Key, summed: bool) -> Option<Vec<Part>> {
    let microbatches: Vec<_> = evidence.inputs.iter().map(|inputs| inputs.microbatch).collect();
    let recorded = addends::read(evidence.step, &microbatches, (key.stage, key.rank), summed);
    let all = recorded.or_else(|| unrecorded(evidence, key))?;
    let part_of = |(microbatch, rank, values)| {
        (Addend { microbatch, rank, device: None, weight: 0.0 }, values)
    };
    Some(all.into_iter().map(part_of).collect())
}

/// The reference gradient of every microbatch on every rank, as addends of the sum over ranks.
/// `None` where a microbatch is too large, or dk is stored transposed.
pub fn reference_parts(evidence: &Evidence<'_>) -> Option<Vec<Part>> {
    let key = Key { stage: Stage::Reduce, microbatch: None, rank: None };
    let (divisor, mut parts) = (divisor(evidence, key), Vec::new());
    if evidence.step.options.transposed() {
        return None;
    }
    for inputs in evidence.inputs {
        let microbatch = inputs.microbatch;
        for unit in evidence.step.rank_rows(inputs).ok()? {
            let holds = |plane: &Plane| {
                let position = |row: &usize| plane.rows.iter().position(|of| of == row);
                unit.rows.iter().map(position).collect::<Option<Vec<usize>>>()
            };
            let states = evidence.units().iter().filter(|unit| unit.microbatch == microbatch);
            let of_unit = |state: &UnitState| {
                let plane = evidence.plane_of(microbatch, state.rank)?;
                holds(&plane).map(|own| (plane, own))
            };
            let (plane, row_indices) = states.into_iter().find_map(of_unit)?;
            for (device, device_rows) in by_devices(evidence, inputs, (&unit, &row_indices)) {
                let entries = chosen(&plane.entries(), &device_rows);
                let mut values = entries.transposed_times(&chosen(&plane.q, &device_rows)).values;
                values.iter_mut().for_each(|x| *x /= divisor);
                let addend = Addend { microbatch, rank: unit.rank(), device, weight: 0.0 };
                parts.push((addend, values));
            }
        }
    }
    Some(parts)
}

/// A unit's rows by the devices that held them, where its one rank has several.
fn by_devices(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    (unit, row_indices): (&Unit, &[usize]),
) -> Vec<(Option<String>, Vec<usize>)> {
    let rank = unit.rank().filter(|_| unit.ranks.len() == 1);
    let devices = rank.map_or(Vec::new(), |rank| evidence.step.device_rows(inputs, rank));
    let rows: BTreeMap<usize, usize> =
        unit.rows.iter().copied().zip(row_indices.iter().copied()).collect();
    let rows_of_device = |(name, tokens): (String, Vec<usize>)| {
        let row_indices_of_device = tokens.iter().map(|token| rows.get(token).copied());
        Some((Some(name), row_indices_of_device.collect::<Option<Vec<usize>>>()?))
    };
    let parts: Vec<_> = devices.into_iter().filter_map(rows_of_device).collect();
    if parts.is_empty() { vec![(None, row_indices.to_vec())] } else { parts }
}

fn chosen(rows: &Rows, which: &[usize]) -> Rows {
    let values = which.iter().flat_map(|&at| rows.row(at)).copied().collect();
    Rows { cols: rows.cols, values }
}

/// A captured sum and its addends.
pub struct Summed {
    /// The captured values.
    pub captured: Rc<Values>,
    /// Its addends, over the declared divisor.
    pub parts: Vec<Part>,
    /// The declared divisor.
    pub divisor: f64,
}

impl Summed {
    /// `None` where addends are missing or of another shape.
    pub fn of(evidence: &Evidence<'_>, key: Key, summed: bool) -> Option<Summed> {
        if key.stage == Stage::Dk {
            return of_ranks(evidence, key);
        }
        let (captured, mut parts) = (evidence.captured(key)?, addends_of(evidence, key, summed)?);
        let divisor = divisor(evidence, key);
        for (_, values) in &mut parts {
            values.iter_mut().for_each(|x| *x /= divisor);
        }
        let same = parts.iter().all(|(_, values)| values.len() == captured.values.len());
        same.then_some(Summed { captured, parts, divisor })
    }

    /// The sum of the addends: what the captured sum should be.
    pub fn total(&self) -> Vec<f64> {
        let mut sum = vec![0.0; self.captured.values.len()];
        self.parts.iter().for_each(|(_, x)| sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x));
        sum
    }

    /// The sums of the addends of each kind.
    pub fn by<K: Ord>(&self, kind: impl Fn(&Addend) -> K) -> BTreeMap<K, Vec<f64>> {
        let mut sums = BTreeMap::new();
        for (addend, values) in &self.parts {
            let sum = sums.entry(kind(addend)).or_insert_with(|| vec![0.0; values.len()]);
            sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
        }
        sums
    }
}

/// A dk that was recorded as a whole, with the parts that each rank's tokens add to it. `None`
/// where its unit is too large, or all tokens are one rank's.
fn of_ranks(evidence: &Evidence<'_>, key: Key) -> Option<Summed> {
    let inputs = evidence.inputs_of(key.microbatch).filter(|_| key.rank.is_none())?;
    let ranks = evidence.step.rank_rows(inputs).ok()?;
    if !(2..=MOST).contains(&ranks.len()) {
        return None;
    }
    let gradient = Gradient::of(evidence, key)?;
    let (entries, q) = (gradient.entries(false)?, gradient.other());
    let place: BTreeMap<usize, usize> =
        gradient.plane.rows.iter().enumerate().map(|(at, &token)| (token, at)).collect();
    let part = |unit: &Unit| {
        let positions: Vec<usize> =
            unit.rows.iter().filter_map(|token| place.get(token)).copied().collect();
        let addend =
            Addend { microbatch: key.microbatch, rank: unit.rank(), device: None, weight: 0.0 };
        (addend, chosen(&entries, &positions).transposed_times(&chosen(q, &positions)).values)
    };
    let parts = ranks.iter().map(part).collect();
    let (columns, values) = (gradient.captured.cols, gradient.captured.values.clone());
    let captured = Rc::new(Values { columns, values, ..(*evidence.captured(key)?).clone() });
    Some(Summed { captured, parts, divisor: 1.0 })
}

/// Whole weights and their common scale, from fitted weights.
fn whole(evidence: &Evidence<'_>, weights: &[f64]) -> Option<(Vec<f64>, f64)> {
    let (ranks, count) = (evidence.ranks() as f64, evidence.microbatches() as f64);
    let scales = [1.0, 1.0 / ranks, 1.0 / count, ranks, count, 1.0 / (ranks * count)];
    // An addend that was not averaged over ranks or microbatches counts as often as there are of
    // them.
    let most = (ranks * count).max(2.0);
    let fit = |scale: &f64| {
        let rounded: Vec<f64> = weights.iter().map(|w| (w / scale).round().abs()).collect();
        let near = weights.iter().zip(&rounded).all(|(w, n)| (w / scale - n).abs() < WHOLE);
        let small = rounded.iter().all(|&n| n <= most) && rounded.contains(&1.0);
        (near && small).then_some((rounded, *scale))
    };
    scales.iter().find_map(fit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(weights: &[(u32, u32, f64)]) -> Solved {
        let addend = |&(mb, rank, weight): &(u32, u32, f64)| Addend {
            microbatch: Some(Microbatch(mb)),
            rank: Some(Rank(rank)),
            device: None,
            weight,
        };
        let key = Key { stage: Stage::Reduce, microbatch: None, rank: None };
        let addends = weights.iter().map(addend).collect();
        Solved { key, addends, scale: 1.0, instead: None }
    }

    #[test]
    fn ranks_are_left_out_only_where_all_their_microbatches_are() {
        let without_rank_1 = of(&[(0, 0, 1.0), (1, 0, 1.0), (0, 1, 0.0), (1, 1, 0.0)]);
        assert_eq!(without_rank_1.ranks_left_out(), Some(BTreeSet::from([Some(Rank(1))])));
        assert_eq!(without_rank_1.by_microbatch(), None);
        let mixed = of(&[(0, 0, 1.0), (1, 0, 1.0), (0, 1, 1.0), (1, 1, 0.0)]);
        assert_eq!((mixed.ranks_left_out(), mixed.by_microbatch()), (None, None));
        let last = of(&[(0, 0, 0.0), (1, 0, 1.0), (0, 1, 0.0), (1, 1, 1.0)]);
        let weights = last.by_microbatch().unwrap();
        assert_eq!(weights.into_values().collect::<Vec<_>>(), [0.0, 1.0]);
    }
}
