//! Which gradients are brought together, and how: the domain of a parameter on one rank, and the
//! addends that it sums.

use std::collections::BTreeSet;

use backtape::dtype::Dtype;
use backtape::identity::{Microbatch, Rank};
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::declaration::ReduceOp;
use super::inventory::Inventory;
use crate::head::roundings::precision_of;
use crate::kernels::round::Precision;

/// How the gradient of a parameter is brought together over ranks, as seen from one of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Domain {
    /// Every rank whose gradient is part of it, ascending.
    pub ranks: Vec<Rank>,
    /// What the sum is multiplied by: 1 over the size of each axis that is averaged.
    pub scale: f64,
    /// Name, operation and number of ranks of each axis.
    pub axes: Vec<Axis>,
    /// The format of fewest bits that is sent.
    pub sent: Option<Precision>,
    /// Why it is not known what becomes of the gradients.
    pub unknown: Option<String>,
}

/// One communication of a gradient.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Axis {
    /// The mesh axis, or the name of the group.
    pub name: String,
    /// What becomes of the addends.
    pub op: ReduceOp,
    /// How many ranks take part.
    pub size: usize,
}

/// A gradient that a sum takes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Addend {
    /// Who computed it.
    pub rank: Rank,
    /// The microbatch, or `None` for a sum over all of the rank's.
    pub microbatch: Option<Microbatch>,
    /// Its tensor.
    pub key: TensorKey,
    /// Its index in the first dimension of the tensor, where the tensor holds the addends of
    /// several devices (`grad_by`).
    pub index: Option<u64>,
    /// The box that it is read at, and the box of the sum: of a gradient that has no place in the
    /// sum, as that of another expert.
    pub elsewhere: Option<(IndexBox, IndexBox)>,
}

impl Addend {
    /// A gradient at its place.
    pub(crate) fn new(rank: Rank, microbatch: Option<Microbatch>, key: TensorKey) -> Addend {
        Addend { rank, microbatch, key, index: None, elsewhere: None }
    }
}

impl Domain {
    /// That of a rank which communicates with no other.
    pub(crate) fn alone(rank: Rank) -> Domain {
        Domain { ranks: vec![rank], scale: 1.0, axes: Vec::new(), sent: None, unknown: None }
    }

    /// The domain of a parameter as a rank, and the ranks that it is reduced with, declare it.
    pub(crate) fn of(inventory: &Inventory<'_>, rank: Rank, parameter: &str) -> Domain {
        Domain::without(inventory, rank, parameter, &[])
    }

    /// The same without the communications over some axes.
    pub(crate) fn without(
        inventory: &Inventory<'_>,
        rank: Rank,
        parameter: &str,
        axes: &[&str],
    ) -> Domain {
        let mut domain = Domain::alone(rank);
        let Some(declared) = inventory.declared_of(rank, parameter) else { return domain };
        domain.unknown = declared.absent.get("reduce").cloned();
        let kept = declared.reduce.iter().filter(|own| !axes.contains(&own.axis.as_str()));
        for reduce in kept {
            if let Some(hook) = &reduce.hook {
                let why = format!(
                    "the function {hook} of the job stands for the communication, and nothing says \
                     what it is to do: declare that by reduce= of step_algebra"
                );
                domain.unknown = Some(why);
            }
            let mut together = BTreeSet::new();
            for member in &domain.ranks {
                let own = inventory.declared_of(*member, parameter).unwrap_or(declared);
                let same = own.reduce.iter().find(|other| other.axis == reduce.axis);
                let ranks = &same.unwrap_or(reduce).ranks;
                together.extend(ranks.iter().copied().map(Rank));
            }
            let (name, op, size) = (reduce.axis.clone(), reduce.op, reduce.size());
            if op == ReduceOp::Mean && size > 0 {
                domain.scale /= size as f64;
            }
            domain.scale /= reduce.divisor.filter(|divisor| *divisor != 0.0).unwrap_or(1.0);
            domain.axes.push(Axis { name, op, size });
            domain.ranks = together.into_iter().collect();
            let sent = reduce.dtype.as_deref().and_then(format_named);
            domain.sent = fewer_bits(domain.sent, sent);
        }
        domain
    }
}

/// The format of a name, as frameworks spell it (`bfloat16`) or as dumps do (`bf16`).
fn format_named(name: &str) -> Option<Precision> {
    Dtype::from_numpy(name).and_then(precision_of).or_else(|| Precision::from_name(name))
}

/// The format of fewer bits.
pub(crate) fn fewer_bits(one: Option<Precision>, other: Option<Precision>) -> Option<Precision> {
    let formats = [one, other].into_iter().flatten();
    formats.max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()))
}

impl Inventory<'_> {
    /// The addends of a domain, by rank or by device; or why they are not known.
    pub(crate) fn addends(&self, domain: &Domain, parameter: &str) -> Result<Vec<Addend>, String> {
        if let Some(why) = &domain.unknown {
            return Err(why.clone());
        }
        let devices = self.addends_of_devices(parameter);
        if !devices.is_empty() {
            return Ok(devices);
        }
        let each = domain.ranks.iter().map(|rank| self.addends_of(*rank, parameter));
        Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// The addends of devices, which one tensor holds side by side: sums over microbatches where
    /// these were recorded, else each microbatch's.
    fn addends_of_devices(&self, parameter: &str) -> Vec<Addend> {
        let Some(tensors) = self.parameters.get(parameter).map(|own| &own.tensors) else {
            return Vec::new();
        };
        let of = |is: fn(&Part) -> bool| {
            let keys = tensors.iter().filter(move |((part, _), _)| is(part));
            let each = |((_, microbatch), key): (&(Part, Option<Microbatch>), &TensorKey)| {
                let size = self.dump.tensors()[key].shape.first().copied().unwrap_or(0);
                let rank = self.holders(key).first().copied().unwrap_or(Rank(0));
                let (microbatch, key) = (*microbatch, key.clone());
                let addend = move |index| Addend {
                    index: Some(index),
                    ..Addend::new(rank, microbatch, key.clone())
                };
                (0..size).map(addend).collect::<Vec<_>>()
            };
            keys.flat_map(each).collect::<Vec<_>>()
        };
        let summed = of(|part| matches!(part, Part::AccumulatedBy(_)));
        if summed.is_empty() { of(|part| matches!(part, Part::GradBy(_))) } else { summed }
    }

    /// The gradients of one rank: its sum over microbatches where that was recorded, else each
    /// microbatch's; or why they are not known.
    pub(crate) fn addends_of(&self, rank: Rank, parameter: &str) -> Result<Vec<Addend>, String> {
        if let Some(key) = self.key(parameter, &Part::Accumulated)
            && self.holders(key).contains(&rank)
            && self.why_no_sum(rank, parameter).is_none()
        {
            return Ok(vec![Addend::new(rank, None, key.clone())]);
        }
        self.grads_of(rank, parameter)
    }

    /// Why what a rank recorded as its sum over microbatches is not all of it: several reductions
    /// took a part each.
    pub(crate) fn why_no_sum(&self, rank: Rank, parameter: &str) -> Option<&str> {
        let absent = &self.declared_of(rank, parameter)?.absent;
        absent.get("accumulated").map(String::as_str)
    }

    /// The gradients of each microbatch of one rank. A microbatch of which the rank recorded none
    /// gave the parameter none.
    pub(crate) fn grads_of(&self, rank: Rank, parameter: &str) -> Result<Vec<Addend>, String> {
        let mut addends = Vec::new();
        let first = self.declared_of(rank, parameter).map_or(0, |declared| declared.first_pass);
        let is_own = |own: &Option<Microbatch>| own.is_none_or(|own| own.0 >= first);
        for microbatch in self.microbatches(parameter).into_iter().filter(is_own) {
            let tensors = &self.parameters[parameter].tensors;
            let key = tensors[&(Part::Grad, microbatch)].clone();
            if self.holders(&key).contains(&rank) {
                addends.push(Addend::new(rank, microbatch, key));
            }
        }
        // A compiled step that reduces the gradient of each microbatch has none before that.
        let is_reduced = !addends.is_empty() && self.grads_are_reduced(parameter);
        let absent = self.declared_of(rank, parameter).and_then(|own| own.absent.get("grad"));
        let absent = absent.filter(|_| !is_reduced);
        match (addends.is_empty(), absent) {
            (_, Some(why)) => Err(format!("rank {rank} did not record the gradient: {why}")),
            (true, None) => {
                Err(format!("rank {rank} recorded no gradient of it before communication"))
            }
            (false, None) => Ok(addends),
        }
    }
}
