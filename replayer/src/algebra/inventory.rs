//! What a dump holds of a step: which parameters, which parts of each, and what the ranks declare.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use backtape::identity::{Microbatch, Rank};
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::declaration::{Declaration, ParameterDeclaration};
use super::domain::Addend;
use super::elements::Elements;
use super::own_scaling::OwnScaling;
use crate::assemble::{assemble_box, extract};
use crate::compare::pair::widen;
use crate::dump::sampled::Samples;
use crate::dump::{ShardRef, StepDump};
use crate::head::roundings::precision_of;
use crate::kernels::round::Precision;

/// What a dump holds of a step.
pub(crate) struct Inventory<'a> {
    /// The dump.
    pub dump: &'a StepDump,
    /// What ranks declare.
    pub declared: BTreeMap<Rank, Declaration>,
    /// By name.
    pub parameters: BTreeMap<String, Parameter>,
    /// What stands for parameters that are not recorded whole.
    pub samples: Samples,
    /// Declarations that cannot be used, in sentences.
    pub faults: Vec<String>,
    /// Parameters whose reduced gradient was recorded too early, and why.
    pub withdrawn: BTreeMap<String, String>,
    /// What the job's own code has multiplied gradients by.
    pub own_scaling: Option<OwnScaling>,
    /// What `moments_by_rank` has found.
    pub moments_of_ranks: OnceLock<[BTreeSet<Rank>; 2]>,
}

/// The parts that were recorded of a parameter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parameter {
    /// By part and microbatch.
    pub tensors: BTreeMap<(Part, Option<Microbatch>), TensorKey>,
}

/// What several ranks hold of a value: a box, with the same bytes on all of them.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// The ranks, ascending.
    pub ranks: Vec<Rank>,
    /// Which part of the parameter.
    pub place: IndexBox,
}

impl<'a> Inventory<'a> {
    /// Reads the names and the declarations; `None` where the dump holds no part of a step.
    pub(crate) fn of(
        dump: &'a StepDump,
        unusable: &dyn Fn(&TensorKey) -> Option<String>,
    ) -> Option<Inventory<'a>> {
        let samples = Samples::of(dump);
        let mut inventory = Inventory {
            dump,
            declared: BTreeMap::new(),
            parameters: BTreeMap::new(),
            faults: samples.faults.clone(),
            withdrawn: BTreeMap::new(),
            own_scaling: None,
            moments_of_ranks: OnceLock::new(),
            samples,
        };
        for key in dump.tensors().keys() {
            if let Some(rank) = Part::declaring_rank(key.tensor.as_str()) {
                inventory.read(Rank(rank), key, unusable);
            } else if let Some((part, parameter)) = Part::of_tensor(key.tensor.as_str()) {
                let parameter = inventory.parameters.entry(parameter.to_string()).or_default();
                parameter.tensors.insert((part, key.microbatch), key.clone());
            }
        }
        inventory.withdraw();
        inventory.own_scaling = OwnScaling::of(&inventory, unusable);
        let is_there = !inventory.parameters.is_empty() || !inventory.declared.is_empty();
        is_there.then_some(inventory)
    }

    fn read(
        &mut self,
        rank: Rank,
        key: &TensorKey,
        unusable: &dyn Fn(&TensorKey) -> Option<String>,
    ) {
        let text = match unusable(key) {
            Some(why) => Err(why),
            None => {
                let shard = self.dump.tensors()[key].shards.first();
                let bytes = shard.and_then(|shard| self.dump.intact_bytes(shard));
                bytes.ok_or_else(|| "its bytes are damaged".to_string())
            }
        };
        match text.and_then(Declaration::read) {
            Ok(declaration) => {
                self.declared.insert(rank, declaration);
            }
            Err(why) => self.faults.push(format!(
                "what rank {rank} declares of its step is not used: {why}; its parameters are \
                 judged by what other ranks declare"
            )),
        }
    }

    /// Takes away what a rank says itself that it is not: a reduced gradient that was recorded before
    /// the last microbatch.
    fn withdraw(&mut self) {
        let Inventory { dump, parameters, declared, withdrawn, .. } = self;
        for (name, parameter) in parameters {
            let Some(key) = parameter.tensors.get(&(Part::Reduced, None)) else { continue };
            // A rank that holds nothing of it says so too, and has recorded none.
            let shards = dump.tensors()[key].shards.iter();
            let ranks: BTreeSet<Rank> = shards.map(|shard| dump.record(shard).rank).collect();
            let of = |rank: &Rank| declared.get(rank)?.parameters.get(name)?.absent.get("reduced");
            if let Some(why) = ranks.iter().find_map(of) {
                withdrawn.insert(name.clone(), why.clone());
                parameter.tensors.remove(&(Part::Reduced, None));
            }
        }
    }

    /// Whether a gradient was recorded of some parameter that has elements.
    pub(crate) fn has_gradients(&self) -> bool {
        self.parameters.keys().any(|name| {
            let key = self.key(name, &Part::Reduced);
            key.is_some_and(|key| !self.dump.tensors()[key].shape.contains(&0))
        })
    }

    /// Whether some rank left an optimizer's step out.
    pub(crate) fn is_left_out(&self) -> bool {
        let of = |own: &Declaration| own.skipped || own.optimizers.iter().any(|one| one.skipped);
        self.declared.values().any(of)
    }

    /// What a rank declares of a parameter; else what any other rank does.
    pub(crate) fn declared_of(&self, rank: Rank, parameter: &str) -> Option<&ParameterDeclaration> {
        let of = |declaration: &'_ Declaration| declaration.parameters.contains_key(parameter);
        let own = self.declared.get(&rank).filter(|declaration| of(declaration));
        let any = || self.declared.values().find(|declaration| of(declaration));
        own.or_else(any)?.parameters.get(parameter)
    }

    /// The loss scale, where the clipping takes it out too: the norm is of gradients without it, and such
    /// gradients there are none before those that are clipped.
    pub(crate) fn taken_out_by_clipping(&self, rank: Rank, parameter: &str) -> Option<f64> {
        let declared = self.declared.get(&rank)?;
        // A rank names only the parameters of which it holds a part.
        let mut norms = self.declared.values().flat_map(|own| &own.norms);
        let norm = norms.rfind(|norm| norm.is_of(parameter) && norm.limit().is_some());
        let squares = declared.squares.get(parameter).and_then(|own| own.of_stage("unscaled"));
        let is_absent = |own: &ParameterDeclaration| own.absent.contains_key("unscaled");
        let is_without = norm?.of.as_deref() == Some("unscaled")
            && self.declared_of(rank, parameter).is_some_and(is_absent)
            && self.key(parameter, &Part::Unscaled).is_none()
            && squares.is_none();
        declared.scale_of(parameter).filter(|scale| is_without && *scale != 1.0)
    }

    /// The tensor of a part that is a value of the whole step.
    pub(crate) fn key(&self, parameter: &str, part: &Part) -> Option<&TensorKey> {
        self.parameters.get(parameter)?.tensors.get(&(part.clone(), None))
    }

    /// The microbatches of which a gradient of the parameter was recorded.
    pub(crate) fn microbatches(&self, parameter: &str) -> Vec<Option<Microbatch>> {
        let tensors = self.parameters.get(parameter).map(|parameter| &parameter.tensors);
        let grads = tensors.into_iter().flatten().filter(|((part, _), _)| *part == Part::Grad);
        grads.map(|((_, microbatch), _)| *microbatch).collect()
    }

    /// Whether the gradients of microbatches are values, and no rank's addend: a compiled step
    /// reduced each of them.
    pub(crate) fn grads_are_reduced(&self, parameter: &str) -> bool {
        let tensors = self.parameters.get(parameter).map(|parameter| &parameter.tensors);
        let mut grads = tensors.into_iter().flatten().filter(|((part, _), _)| *part == Part::Grad);
        grads.any(|(_, key)| self.dump.tensors()[key].partial.is_none())
    }

    /// The distinct boxes and bytes that ranks hold of a tensor. Copies are told once where all
    /// that they were made from, as `origin` says, is the same too.
    pub(crate) fn pieces<K: Ord>(&self, key: &TensorKey, origin: &dyn Fn(Rank) -> K) -> Vec<Piece> {
        let mut pieces: BTreeMap<(IndexBox, u128, K), Piece> = BTreeMap::new();
        for shard in &self.dump.tensors()[key].shards {
            let record = self.dump.record(shard);
            let which = (record.place.clone(), record.hash.0, origin(record.rank));
            let piece = pieces.entry(which);
            let piece =
                piece.or_insert_with(|| Piece { ranks: Vec::new(), place: record.place.clone() });
            if !piece.ranks.contains(&record.rank) {
                piece.ranks.push(record.rank);
            }
        }
        let mut pieces: Vec<Piece> = pieces.into_values().collect();
        pieces.iter_mut().for_each(|piece| piece.ranks.sort());
        pieces.sort_by(|a, b| (&a.place, &a.ranks).cmp(&(&b.place, &b.ranks)));
        pieces
    }

    /// What tells the bytes that a rank holds of a tensor from others.
    pub(crate) fn hashes(&self, key: &TensorKey, rank: Rank) -> Vec<u128> {
        let shards = self.dump.tensors()[key].shards.iter();
        let own = shards.filter(|shard| self.dump.record(shard).rank == rank);
        own.map(|shard| self.dump.record(shard).hash.0).collect()
    }

    /// How many elements of a tensor all ranks hold together.
    pub(crate) fn held_elements(&self, key: &TensorKey) -> u64 {
        let shards = self.dump.tensors()[key].shards.iter();
        shards.filter_map(|shard| self.dump.record(shard).place.elements()).sum()
    }

    /// The ranks that hold something of a tensor.
    pub(crate) fn holders(&self, key: &TensorKey) -> BTreeSet<Rank> {
        let shards = &self.dump.tensors()[key].shards;
        shards.iter().map(|shard| self.dump.record(shard).rank).collect()
    }

    /// The format of a tensor's elements; `None` for integers.
    pub(crate) fn precision(&self, key: &TensorKey) -> Option<Precision> {
        precision_of(self.dump.tensors()[key].dtype)
    }

    /// An addend's elements of a box, widened, row-major in the box.
    pub(crate) fn read_addend(
        &self,
        addend: &Addend,
        place: &IndexBox,
    ) -> Result<Vec<f64>, String> {
        if let Some((own, sum)) = &addend.elsewhere {
            let moved = place.0.iter().zip(own.0.iter().zip(&sum.0));
            let moved =
                moved.map(|((low, high), (own, sum))| (low - sum.0 + own.0, high - sum.0 + own.0));
            return self.read_box(&addend.key, addend.rank, &IndexBox(moved.collect()));
        }
        let Some(index) = addend.index else {
            return self.read_box(&addend.key, addend.rank, place);
        };
        let mut inner = place.0.clone();
        inner.insert(0, (index, index + 1));
        let tensor = assemble_box(self.dump, &addend.key, &IndexBox(inner));
        let tensor = tensor.map_err(|error| error.to_string())?;
        let mut values = Vec::new();
        widen(tensor.dtype, tensor.bytes(), &mut values);
        Ok(values)
    }

    /// What a rank holds of a box of a tensor, widened, row-major in the box.
    pub(crate) fn read_box(
        &self,
        key: &TensorKey,
        rank: Rank,
        place: &IndexBox,
    ) -> Result<Vec<f64>, String> {
        self.elements(key, rank, place).map(Elements::widened)
    }

    /// Whether a rank holds every element of a box of a tensor. Nothing is read.
    pub(crate) fn holds(&self, key: &TensorKey, rank: Rank, place: &IndexBox) -> bool {
        let info = &self.dump.tensors()[key];
        let records = info.shards.iter().map(|shard| self.dump.record(shard));
        let own = records.filter(|record| record.rank == rank);
        // Devices of one rank may hold copies of one box.
        let boxes: BTreeSet<&IndexBox> = own.map(|record| &record.place).collect();
        let shared = boxes.into_iter().filter_map(|own| own.intersection(place));
        let held: u64 = shared.filter_map(|shared| shared.elements()).sum();
        info.shape.len() == place.0.len() && place.elements() == Some(held)
    }

    /// What a rank holds of a box in several shards, or not in one piece.
    pub(super) fn gathered(
        &self,
        key: &TensorKey,
        rank: Rank,
        place: &IndexBox,
    ) -> Result<Vec<f64>, String> {
        let info = &self.dump.tensors()[key];
        let own = info.shards.iter().filter(|shard| self.dump.record(shard).rank == rank);
        let shards: Vec<&ShardRef> = own.collect();
        if info.shape.len() != place.0.len() {
            return Err(format!(
                "{key} has {} dimensions, and the tensor that it belongs to has {}",
                info.shape.len(),
                place.0.len()
            ));
        }
        self.gather((key, rank), &shards, place)
    }

    fn gather(
        &self,
        (key, rank): (&TensorKey, Rank),
        shards: &[&ShardRef],
        place: &IndexBox,
    ) -> Result<Vec<f64>, String> {
        let info = &self.dump.tensors()[key];
        let elements = place.elements().unwrap_or(0) as usize;
        let (mut values, mut written) = (vec![f64::NAN; elements], 0usize);
        for shard in shards {
            let record = self.dump.record(shard);
            let Some(shared) = record.place.intersection(place) else { continue };
            let bytes = self.dump.intact_bytes(shard).ok_or_else(|| damaged(key, rank))?;
            let part = extract(&shared, &record.place, bytes, info.dtype.width());
            let mut widened = Vec::new();
            widen(info.dtype, &part, &mut widened);
            written += widened.len();
            put(&shared, &widened, place, &mut values);
        }
        match written == elements {
            true => Ok(values),
            false => Err(format!(
                "rank {rank} recorded {written} of the {elements} elements of {key} that it needs"
            )),
        }
    }
}

pub(super) fn damaged(key: &TensorKey, rank: Rank) -> String {
    format!("the bytes of {key} of rank {rank} are damaged")
}

/// Copies the elements of `region` into those of `place`, both row-major.
pub(super) fn put(region: &IndexBox, from: &[f64], place: &IndexBox, to: &mut [f64]) {
    let extent = region.extent();
    let width = extent.last().copied().unwrap_or(1).max(1) as usize;
    let mut index: Vec<u64> = region.0.iter().map(|(low, _)| *low).collect();
    for run in from.chunks(width) {
        let offset = index
            .iter()
            .zip(&place.0)
            .fold(0, |sum, (at, (low, high))| sum * (high - low) + (at - low))
            as usize;
        to[offset..offset + run.len()].copy_from_slice(run);
        // The next row of the region: the last dimension but one counts up, and carries.
        for dimension in (0..index.len().saturating_sub(1)).rev() {
            index[dimension] += 1;
            if index[dimension] < region.0[dimension].1 {
                break;
            }
            index[dimension] = region.0[dimension].0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_lands_at_its_place() {
        let place = IndexBox(vec![(2, 4), (1, 4)]);
        let mut values = vec![0.0; 6];
        put(&IndexBox(vec![(2, 4), (2, 4)]), &[1.0, 2.0, 3.0, 4.0], &place, &mut values);
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0, 3.0, 4.0]);
        let mut number = vec![0.0];
        put(&IndexBox(vec![]), &[7.0], &IndexBox(vec![]), &mut number);
        assert_eq!(number, [7.0]);
    }
}
