//! The units in which the backward pass of a microbatch is replayed, and the denominators of their
//! losses.
//!
//! A unit is a set of tokens whose gradients were summed before anything was recorded. Where dk was
//! recorded as addends that are still to be added up, the units are the tokens of the ranks of
//! each addend; otherwise all tokens of the microbatch are one unit. Ranks that hold the same
//! tokens (tensor parallelism) hold one addend together, and so do ranks with the same coordinates
//! on the mesh axes that the addends are summed over. Where neither gives complete addends, their
//! sum is still over all tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::head::{
    Denominator, LossAverage, LossReduction, Microbatches, Ranks, RatioLevel, Sequences,
};
use backtape::identity::Rank;
use backtape::index_box::{IndexBox, gaps};
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::step::StepError;
use super::view::flat_rows;
use super::{HeadStep, MicrobatchInputs};
use crate::dump::addend::{Addend, group};
use crate::dump::name_ranks;
use crate::kernels::matrix::IGNORED;

/// Tokens whose gradients were summed before they were recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// The ranks that hold the tokens; empty for all tokens of the microbatch.
    pub ranks: Vec<Rank>,
    /// Row indices into `[T, D]`, ascending.
    pub rows: Vec<usize>,
}

impl Unit {
    /// The rank to name in a report.
    pub fn rank(&self) -> Option<Rank> {
        self.ranks.first().copied()
    }
}

/// How much of an addend some ranks hold.
#[derive(PartialEq)]
enum AddendShare {
    Nothing,
    /// A part of it, or only copies of what other ranks hold.
    Part,
    Whole,
}

/// A group of tokens, and all tokens that are counted in the same denominator, by microbatch.
pub(crate) type CountedTogether<'m> = (Unit, Vec<(&'m MicrobatchInputs, Unit)>);

/// A microbatch and its tokens in groups, each with its own denominator.
type Parted<'m> = (&'m MicrobatchInputs, Vec<Unit>);

impl HeadStep<'_> {
    /// The units of a microbatch. They are the tokens of each rank where the ranks recorded
    /// addends of dk, or where only the sum of dk over microbatches was recorded; all tokens where
    /// dk was recorded whole, or where only the sum of the addends is a gradient of known tokens.
    /// `Err` says why there are none.
    pub fn units(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        let whole = || vec![Unit { ranks: Vec::new(), rows: (0..inputs.tokens()).collect() }];
        let parts = [Role::Dk, Role::DkLse, Role::DkLabel, Role::Dbias];
        let recorded = parts.iter().filter_map(|&role| self.find(role, inputs.microbatch));
        let recorded: Vec<&TensorKey> = recorded.collect();
        let is_addend = |key: &&TensorKey| self.tensors[*key].partial.is_some();
        let addends: Vec<&TensorKey> = recorded.iter().copied().filter(is_addend).collect();
        if let Some(units) = self.own_units(inputs)? {
            if !addends.is_empty() {
                return Ok(units);
            }
            let mut rows: Vec<usize> = units.iter().flat_map(|unit| unit.rows.clone()).collect();
            rows.sort_unstable();
            let ranks = units.into_iter().flat_map(|unit| unit.ranks).collect();
            return Ok(vec![Unit { ranks, rows }]);
        }
        if recorded.is_empty() {
            return Ok(self.units_of_a_sum(inputs).unwrap_or_else(whole));
        }
        if addends.is_empty() {
            return Ok(whole());
        }
        let mut units = self.rank_rows(inputs).unwrap_or_default();
        let told = !units.is_empty()
            && addends.iter().all(|key| self.join_by_mesh(key, inputs, &mut units))
            && addends.iter().all(|key| self.whole_addends(key, &units))
            && self.sum_alone(inputs).is_none_or(|sum| {
                self.join_by_mesh(sum, inputs, &mut units) && self.own_sums(sum, &units)
            });
        if told {
            return Ok(units);
        }
        // All tokens are one unit if the addends of at least one gradient are complete, or if a
        // sum of dk over microbatches or ranks was recorded: those can be judged.
        let each: Vec<Result<(), String>> =
            addends.iter().map(|key| self.all_added(key, inputs)).collect();
        let summed = [false, true].iter().any(|&all| self.find_reduced(Role::Dk, all).is_some());
        match summed || each.iter().any(Result::is_ok) {
            true => Ok(whole()),
            false => each.into_iter().collect::<Result<(), String>>().map(|()| whole()),
        }
    }

    /// The sum of dk over microbatches, recorded as addends of ranks, where dk of this microbatch
    /// was not recorded.
    fn sum_alone(&self, inputs: &MicrobatchInputs) -> Option<&TensorKey> {
        inputs.microbatch?;
        let sum = self.find_reduced(Role::Dk, false);
        let sum = sum.filter(|_| self.find(Role::Dk, inputs.microbatch).is_none());
        sum.filter(|sum| self.tensors[*sum].partial.is_some())
    }

    /// The units where dk was only recorded summed over microbatches: the tokens of each rank, so
    /// that each rank's part of the sum is known, and which of them is wrong.
    fn units_of_a_sum(&self, inputs: &MicrobatchInputs) -> Option<Vec<Unit>> {
        let local = self.find_reduced(Role::Dk, false);
        let sum = local.or_else(|| self.find_reduced(Role::Dk, true))?;
        inputs.microbatch?;
        let mut units = self.rank_rows(inputs).ok()?;
        let partial = self.tensors[sum].partial.is_some();
        let told =
            !partial || self.join_by_mesh(sum, inputs, &mut units) && self.own_sums(sum, &units);
        units.retain(|unit| !unit.rows.is_empty());
        (told && units.len() > 1).then_some(units)
    }

    /// Joins units whose ranks hold one addend together according to the mesh, including ranks
    /// that hold a part of it and no tokens. Returns false where one unit holds several addends.
    fn join_by_mesh(
        &self,
        key: &TensorKey,
        inputs: &MicrobatchInputs,
        units: &mut Vec<Unit>,
    ) -> bool {
        for (addend, shards) in group(self.dump, &self.tensors[key]) {
            let Addend::Mesh(coordinates) = &addend else { return true };
            let mut ranks: Vec<Rank> = shards.iter().map(|s| self.dump.record(s).rank).collect();
            let of_tokens = self.tensors[&inputs.rows_key].shards.iter();
            let of_tokens = of_tokens.map(|shard| self.dump.record(shard));
            let here = of_tokens.filter(|record| {
                coordinates.iter().all(|(axis, i)| record.mesh.get(axis) == Some(i))
            });
            ranks.extend(here.map(|record| record.rank));
            ranks.sort_unstable();
            ranks.dedup();
            let (joined, others): (Vec<Unit>, Vec<Unit>) =
                units.drain(..).partition(|unit| unit.ranks.iter().any(|r| ranks.contains(r)));
            *units = others;
            if joined.iter().flat_map(|unit| &unit.ranks).any(|rank| !ranks.contains(rank)) {
                return false;
            }
            let mut rows: Vec<usize> = joined.into_iter().flat_map(|unit| unit.rows).collect();
            rows.sort_unstable();
            units.push(Unit { ranks, rows });
        }
        units.sort_by_key(Unit::rank);
        true
    }

    /// Whether each unit's ranks hold the whole tensor, and no other rank holds a part of it.
    fn whole_addends(&self, key: &TensorKey, units: &[Unit]) -> bool {
        let is_whole =
            |unit: &Unit| !unit.rows.is_empty() && self.holds(key, unit) == AddendShare::Whole;
        units.iter().all(is_whole) && self.held_in(key, units)
    }

    /// The same for a sum over microbatches. Some units may not have recorded it, and it includes
    /// addends of ranks that have no tokens in this microbatch.
    fn own_sums(&self, key: &TensorKey, units: &[Unit]) -> bool {
        let is_whole_or_absent = |unit: &Unit| {
            matches!(self.holds(key, unit), AddendShare::Whole | AddendShare::Nothing)
        };
        let of_tokens = self.tensors.values().filter(|info| info.role == Some(self.scores()));
        let of_tokens = of_tokens.flat_map(|info| &info.shards);
        let known: BTreeSet<Rank> = of_tokens.map(|shard| self.dump.record(shard).rank).collect();
        let mut adding = self.tensors[key].shards.iter().map(|shard| self.dump.record(shard).rank);
        let joined = |rank: &Rank| units.iter().any(|unit| unit.ranks.contains(rank));
        // On a mesh of several axes a rank's addend may include those of ranks that recorded
        // nothing.
        let silent = units.iter().any(|unit| self.holds(key, unit) == AddendShare::Nothing);
        let told = self.dump.manifest.mesh.0.len() < 2 || !silent;
        told && units.iter().all(is_whole_or_absent)
            && adding.all(|rank| known.contains(&rank) || joined(&rank))
    }

    /// Whether only ranks of the units hold parts of a tensor.
    fn held_in(&self, key: &TensorKey, units: &[Unit]) -> bool {
        let known = |rank: Rank| units.iter().any(|unit| unit.ranks.contains(&rank));
        self.tensors[key].shards.iter().all(|shard| known(self.dump.record(shard).rank))
    }

    /// How much of a tensor a unit's ranks hold.
    fn holds(&self, key: &TensorKey, unit: &Unit) -> AddendShare {
        let info = &self.tensors[key];
        let records = info.shards.iter().map(|shard| self.dump.record(shard));
        let of_unit: Vec<_> = records.filter(|record| unit.ranks.contains(&record.rank)).collect();
        // A replica is a copy of another rank's addend.
        let first_copies = of_unit.iter().filter(|record| record.replica == 0);
        let mut boxes: Vec<&IndexBox> = first_copies.map(|record| &record.place).collect();
        boxes.sort();
        boxes.dedup();
        match (of_unit.is_empty(), boxes.is_empty()) {
            (true, _) => AddendShare::Nothing,
            (false, false) if gaps(&info.shape, boxes).is_empty() => AddendShare::Whole,
            (false, _) => AddendShare::Part,
        }
    }

    /// Checks that the sum of all addends is over all tokens: every unit's ranks recorded a
    /// addend, and no two of them the same part of one.
    pub(crate) fn all_added(
        &self,
        key: &TensorKey,
        inputs: &MicrobatchInputs,
    ) -> Result<(), String> {
        let info = &self.tensors[key];
        for (unit, adding) in self.adding(key, inputs)? {
            if adding.is_empty() {
                return Err(nothing_added(key, &unit));
            }
            let places = info.shards.iter().map(|shard| self.dump.record(shard));
            let mut places: Vec<_> = places
                .filter(|record| adding.contains(&record.rank) && record.replica == 0)
                .map(|record| (&record.place, record.rank))
                .collect();
            places.sort();
            let twice = |pair: &[(&IndexBox, Rank)]| {
                pair[0].1 != pair[1].1 && pair[0].0.intersection(pair[1].0).is_some()
            };
            if places.windows(2).any(twice) {
                let ranks = name_ranks(&adding);
                return Err(format!(
                    "{ranks} hold the same tokens and the same part of {key}, of which not all ranks hold the whole: give mesh and placement, which say what is one addend"
                ));
            }
        }
        Ok(())
    }

    /// Checks that every rank that holds tokens recorded an addend of a tensor, as far as it is
    /// known which rank holds which tokens.
    pub(crate) fn each_added(
        &self,
        key: &TensorKey,
        inputs: &MicrobatchInputs,
    ) -> Result<(), String> {
        let all = self.adding(key, inputs).unwrap_or_default();
        let lacks = all.iter().find(|(_, adding)| adding.is_empty());
        lacks.map_or(Ok(()), |(unit, _)| Err(nothing_added(key, unit)))
    }

    /// The tokens of each rank as units, and of each unit the ranks that recorded addends; empty
    /// where the mesh says over which ranks the addends were summed.
    fn adding(
        &self,
        key: &TensorKey,
        inputs: &MicrobatchInputs,
    ) -> Result<Vec<(Unit, Vec<Rank>)>, String> {
        let info = &self.tensors[key];
        let groups = group(self.dump, info);
        if groups.keys().all(|addend| matches!(addend, Addend::Mesh(_))) {
            return Ok(Vec::new());
        }
        let adds =
            |rank: Rank| info.shards.iter().any(|shard| self.dump.record(shard).rank == rank);
        let adding = |unit: Unit| {
            let adding_ranks = unit.ranks.iter().copied().filter(|&rank| adds(rank)).collect();
            (unit, adding_ranks)
        };
        Ok(self.rank_rows(inputs)?.into_iter().map(adding).collect())
    }

    /// Refuses tokens without known sequences, if the head needs to know where a sequence ends.
    pub(super) fn needs_sequences(&self, key: &TensorKey) -> Result<(), StepError> {
        let info = &self.tensors[key];
        let written = info.shards.first().map_or(0, |shard| self.dump.written(shard).shape.len());
        let grpo = self.options.grpo.as_ref();
        let sequences = !self.options.declared.labels_shifted
            || self.options.scope.sequences == Sequences::Each
            || grpo.is_some_and(|grpo| {
                grpo.average == LossAverage::Sequence || grpo.ratio == RatioLevel::Sequence
            });
        if !sequences || info.shape.len() >= written {
            return Ok(());
        }
        Err(StepError::Unfit {
            key: key.clone(),
            found: "rows of tokens of another length on each rank".into(),
            wanted: "rows of one length, or a head that does not ask where a sequence ends: labels shifted by the job (labels_shifted=True), and no mean or ratio over sequences".into(),
        })
    }

    /// The units of the ranks in `only`, whose tokens alone are judged; `None` where all tokens are
    /// judged.
    fn own_units(&self, inputs: &MicrobatchInputs) -> Result<Option<Vec<Unit>>, String> {
        let Some(only) = &self.only else { return Ok(None) };
        let mut units = self.rank_rows(inputs)?;
        let all = units.len();
        units.retain(|unit| unit.ranks.iter().any(|rank| only.contains(rank)));
        Ok((units.len() < all).then_some(units))
    }

    /// Whether each token is judged, `[T]`; `None` where all are.
    pub(crate) fn judged(&self, inputs: &MicrobatchInputs) -> Option<Vec<bool>> {
        let units = self.own_units(inputs).ok().flatten()?;
        let mut judged = vec![false; inputs.tokens()];
        units.iter().flat_map(|unit| &unit.rows).for_each(|&row| judged[row] = true);
        Some(judged)
    }

    /// The tokens of each rank; ranks that hold the same tokens share a unit.
    pub(crate) fn rank_rows(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        let info = &self.dump.tensors()[&inputs.rows_key];
        // The last dimension of q and of the logits does not count tokens.
        let leading = info.shape.len() - usize::from(self.scores() != Role::Logprobs);
        let units = self.held_by_ranks(&inputs.rows_key, 0..leading);
        let mut seen = vec![0u32; inputs.tokens()];
        units.iter().flat_map(|unit| &unit.rows).for_each(|&row| seen[row] += 1);
        if seen.iter().any(|&n| n != 1) {
            return Err("ranks hold tokens that overlap in part, so the share of each rank's addend is not known".into());
        }
        Ok(units)
    }

    /// The tokens of a microbatch that each device of a rank held, with the name of their box of
    /// the scores; empty where the rank held one box, or boxes that overlap.
    pub(crate) fn device_rows(
        &self,
        inputs: &MicrobatchInputs,
        rank: Rank,
    ) -> Vec<(String, Vec<usize>)> {
        let key = &inputs.rows_key;
        let records = self.dump.tensors()[key].shards.iter().map(|shard| self.dump.record(shard));
        let places_and_shapes: BTreeSet<_> = records
            .filter(|record| record.rank == rank)
            .map(|record| (&record.place, &record.shape))
            .collect();
        let tokens = |(place, shape): (&IndexBox, &Vec<u64>)| {
            let leading = shape.len() - usize::from(self.scores() != Role::Logprobs);
            let rows = flat_rows(&place.0[..leading], &shape[..leading]);
            (format!("{key} {place}"), rows)
        };
        let by_device: Vec<(String, Vec<usize>)> =
            places_and_shapes.into_iter().map(tokens).collect();
        let mut all: Vec<usize> = by_device.iter().flat_map(|(_, rows)| rows.clone()).collect();
        let row_count = all.len();
        all.sort_unstable();
        all.dedup();
        if by_device.len() > 1 && all.len() == row_count { by_device } else { Vec::new() }
    }

    /// How many devices of all ranks hold tokens of a microbatch, which is the number of addends
    /// of a reduced dk; 0 where it is not known.
    pub(crate) fn devices_with_tokens(&self, inputs: &MicrobatchInputs) -> usize {
        let units = self.rank_rows(inputs).unwrap_or_default();
        let of_rank = |rank| self.device_rows(inputs, rank).len().max(1);
        let holders = units.iter().filter(|unit| !unit.rows.is_empty()).filter_map(Unit::rank);
        holders.map(of_rank).sum()
    }

    /// The classes that each rank recorded of a gradient of k.
    pub(crate) fn rank_classes(&self, key: &TensorKey) -> Vec<Unit> {
        // A gradient of the bias has one dimension only, the classes.
        let several = self.tensors[key].shape.len() > 1;
        let class_axis = usize::from(self.options.transposed() && several);
        self.held_by_ranks(key, class_axis..class_axis + 1)
    }

    /// The indices of some dimensions of a tensor, flattened, that each rank recorded.
    fn held_by_ranks(&self, key: &TensorKey, dimensions: Range<usize>) -> Vec<Unit> {
        let mut by_rank: BTreeMap<Rank, Vec<usize>> = BTreeMap::new();
        for shard in &self.dump.tensors()[key].shards {
            let record = self.dump.record(shard);
            let place = &record.place.0[dimensions.clone()];
            let shape = &record.shape[dimensions.clone()];
            by_rank.entry(record.rank).or_default().extend(flat_rows(place, shape));
        }
        let mut by_rows: BTreeMap<Vec<usize>, Vec<Rank>> = BTreeMap::new();
        for (rank, mut rows) in by_rank {
            rows.sort_unstable();
            rows.dedup();
            by_rows.entry(rows).or_default().push(rank);
        }
        let unit = |(rows, ranks): (Vec<usize>, Vec<Rank>)| Unit { ranks, rows };
        let mut units: Vec<Unit> = by_rows.into_iter().map(unit).collect();
        units.sort_by_key(Unit::rank);
        units
    }

    /// The groups of a microbatch's tokens that have one denominator, with that denominator.
    pub fn denominators(
        &self,
        all: &[&MicrobatchInputs],
        own_inputs: &MicrobatchInputs,
    ) -> Result<Vec<(Unit, f64)>, String> {
        if let Some(n) = self.fixed_denominator() {
            return Ok(self
                .counted_together(own_inputs)?
                .into_iter()
                .map(|unit| (unit, n))
                .collect());
        }
        let mut groups = Vec::new();
        for (unit, over) in self.groups(all, own_inputs)? {
            let total: f64 =
                over.iter().map(|(inputs, unit)| self.denominator_over(inputs, &unit.rows)).sum();
            match self.options.scope.sequences {
                Sequences::All => groups.push((unit, total)),
                Sequences::Each => groups.extend(self.each_sequence(own_inputs, &unit, total)),
            }
        }
        Ok(groups)
    }

    /// The groups of a microbatch's tokens, each with all tokens that are counted in the same
    /// denominator.
    pub(crate) fn groups<'m>(
        &self,
        all: &[&'m MicrobatchInputs],
        inputs: &'m MicrobatchInputs,
    ) -> Result<Vec<CountedTogether<'m>>, String> {
        let others = match self.options.scope.microbatches {
            Microbatches::One => Vec::new(),
            Microbatches::All => self.parted(all)?,
        };
        Ok(self.with_others(&others, &(inputs, self.counted_together(inputs)?)))
    }

    /// The same for every microbatch, in order.
    pub(crate) fn all_groups<'m>(
        &self,
        all: &[&'m MicrobatchInputs],
    ) -> Result<Vec<Vec<CountedTogether<'m>>>, String> {
        let parted = self.parted(all)?;
        Ok(parted.iter().map(|own| self.with_others(&parted, own)).collect())
    }

    fn parted<'m>(&self, all: &[&'m MicrobatchInputs]) -> Result<Vec<Parted<'m>>, String> {
        all.iter().map(|&inputs| Ok((inputs, self.counted_together(inputs)?))).collect()
    }

    /// Adds to each group the tokens of the same ranks in every microbatch, or only in its own, as
    /// the scope declares.
    fn with_others<'m>(&self, all: &[Parted<'m>], wanted: &Parted<'m>) -> Vec<CountedTogether<'m>> {
        let over = |unit: &Unit| match self.options.scope.microbatches {
            Microbatches::One => vec![(wanted.0, unit.clone())],
            Microbatches::All => all
                .iter()
                .flat_map(|(inputs, units)| units.iter().map(move |unit| (*inputs, unit)))
                .filter(|(_, other)| other.rank() == unit.rank())
                .map(|(inputs, other)| (inputs, other.clone()))
                .collect(),
        };
        wanted.1.iter().map(|unit| (unit.clone(), over(unit))).collect()
    }

    /// The denominator, if it does not depend on the tokens.
    fn fixed_denominator(&self) -> Option<f64> {
        match (self.options.reduction, self.options.denominator) {
            (LossReduction::Sum | LossReduction::None, _) => Some(1.0),
            (LossReduction::Mean, Denominator::Number(n)) => Some(n),
            _ => None,
        }
    }

    /// The tokens of a microbatch in groups by rank that are counted together, as the scope
    /// declares.
    fn counted_together(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        match &self.options.scope.ranks {
            Ranks::All => {
                Ok(vec![Unit { ranks: Vec::new(), rows: (0..inputs.tokens()).collect() }])
            }
            Ranks::One => self.rank_rows(inputs),
            Ranks::Axes(axes) => {
                let mut groups: BTreeMap<Vec<(&String, u32)>, Unit> = BTreeMap::new();
                for unit in self.rank_rows(inputs)? {
                    let apart = self.coordinates_beside(axes, inputs, unit.rank())?;
                    let empty = || Unit { ranks: Vec::new(), rows: Vec::new() };
                    let group = groups.entry(apart).or_insert_with(empty);
                    group.ranks.extend(unit.ranks);
                    group.rows.extend(unit.rows);
                }
                let mut groups: Vec<Unit> = groups.into_values().collect();
                groups.iter_mut().for_each(|unit| unit.rows.sort_unstable());
                groups.sort_by_key(Unit::rank);
                Ok(groups)
            }
        }
    }

    /// The coordinates of a rank on the mesh axes that are not in `axes`.
    fn coordinates_beside(
        &self,
        axes: &[String],
        inputs: &MicrobatchInputs,
        rank: Option<Rank>,
    ) -> Result<Vec<(&String, u32)>, String> {
        let shards = self.tensors[&inputs.rows_key].shards.iter();
        let mut records = shards.map(|shard| self.dump.record(shard));
        let mesh = records.find(|record| Some(record.rank) == rank).map(|record| &record.mesh);
        let along = axes.join(" and ");
        let key = &inputs.rows_key;
        match mesh {
            Some(mesh) if axes.iter().all(|axis| mesh.contains_key(axis)) => {
                let beside = mesh.iter().filter(|(axis, _)| !axes.contains(axis));
                Ok(beside.map(|(axis, &at)| (axis, at)).collect())
            }
            Some(mesh) if !mesh.is_empty() => {
                let has: Vec<&str> = mesh.keys().map(String::as_str).collect();
                let has = has.join(" and ");
                Err(format!(
                    "scope declares ranks along {along}, and the mesh of {key} has the axes {has}: declare the scope with one of these, or record with a mesh that has {along}"
                ))
            }
            _ => Err(format!(
                "scope declares ranks along {along} and {key} does not say where its ranks lie there: record it with mesh= and coordinates"
            )),
        }
    }

    /// The sequences of a unit as units, with their denominators: a sequence's own count times the
    /// number of sequences in the whole scope.
    fn each_sequence(
        &self,
        inputs: &MicrobatchInputs,
        unit: &Unit,
        sequences: f64,
    ) -> Vec<(Unit, f64)> {
        let length = inputs.sequence.max(1);
        let cut = unit.rows.chunk_by(|a, b| a / length == b / length);
        let count_of_sequence = |rows: &[usize]| {
            let (ranks, rows) = (unit.ranks.clone(), rows.to_vec());
            let count = self.count(inputs, &mut rows.iter().copied());
            (Unit { ranks, rows }, count * sequences)
        };
        cut.map(count_of_sequence).collect()
    }

    /// What some rows of one microbatch add to a denominator: their own count, or for a mean of
    /// sequence means the number of sequences whose count is not 0.
    fn denominator_over(&self, inputs: &MicrobatchInputs, rows: &[usize]) -> f64 {
        if self.options.scope.sequences == Sequences::All {
            return self.count(inputs, &mut rows.iter().copied());
        }
        let length = inputs.sequence.max(1);
        let cut = rows.chunk_by(|a, b| a / length == b / length);
        cut.filter(|rows| self.count(inputs, &mut rows.iter().copied()) != 0.0).count() as f64
    }

    /// The declared denominator over some rows of one microbatch.
    fn count(&self, inputs: &MicrobatchInputs, rows: &mut dyn Iterator<Item = usize>) -> f64 {
        let counted = |&t: &usize| inputs.labels[t] != IGNORED;
        let average = self.options.grpo.as_ref().map(|grpo| grpo.average);
        if average == Some(LossAverage::Sequence) {
            // A mean over sequences counts those with at least one token that counts.
            let counts_towards = |t: &usize| counted(t) && inputs.weights[*t] != 0.0;
            let mut sequences: Vec<usize> =
                rows.filter(counts_towards).map(|t| t / inputs.sequence.max(1)).collect();
            sequences.dedup();
            return sequences.len() as f64;
        }
        match self.options.denominator {
            Denominator::Valid if self.is_policy_loss() => {
                rows.filter(|t| counted(t) && inputs.weights[*t] != 0.0).count() as f64
            }
            Denominator::Valid => rows.filter(counted).count() as f64,
            Denominator::All => rows.count() as f64,
            Denominator::Weights => rows.filter(counted).map(|t| inputs.weights[t]).sum(),
            Denominator::Number(n) => n,
        }
    }
}

fn nothing_added(key: &TensorKey, unit: &Unit) -> String {
    let ranks = name_ranks(&unit.ranks);
    format!(
        "{key} is held as addends and {ranks} recorded none, though tokens lie there: record each rank's, or give mesh and placement, which say over which ranks they were summed"
    )
}

/// A token's share of a mean, `weight / denominator`. A token of weight 0 adds nothing, even where
/// no token counts and the denominator is 0: a job that guards the division has 0 there, and one
/// that does not has a NaN, which then differs.
pub(crate) fn share(weight: f64, denominator: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight / denominator }
}
