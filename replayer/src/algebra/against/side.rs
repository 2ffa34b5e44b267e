//! One of two runs: its parameters as global tensors, put together from whatever sharding, and what
//! its own judgement said of them.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::view::{Values, View};
use crate::algebra::domain::{Addend, Domain, fewer_bits};
use crate::algebra::inventory::{Inventory, put};
use crate::algebra::judge::Judge;
use crate::algebra::outcome::{Judged, Outcome, Stage};
use crate::algebra::summary::StepReport;
use crate::assemble::{assemble, pieces};
use crate::compare::pair::widen;
use crate::kernels::round::Precision;

/// One of two runs.
pub(super) struct Side<'a> {
    pub(super) inventory: &'a Inventory<'a>,
    pub(super) report: &'a StepReport,
    /// What was judged of each parameter; norms have the empty name.
    judged: BTreeMap<&'a str, Vec<&'a Judged>>,
}

/// How a run's own judgement of some stages of some parameters came out.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Own<'a> {
    /// It diverges there.
    Wrong(&'a Judged),
    /// It was judged, and agrees.
    Right,
    /// It was not judged, and why.
    Unjudged(Option<&'a str>),
}

/// The gradient of a parameter over all ranks and microbatches.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Gradient {
    pub(super) values: Values,
    /// `Σ (w |g|)²` over its addends: what their roundings are a share of.
    pub(super) addends: f64,
    /// Unit roundoff of what the addends were computed in, as far as they show it.
    pub(super) unit: f64,
}

impl<'a> Side<'a> {
    pub(super) fn new(inventory: &'a Inventory<'a>, report: &'a StepReport) -> Side<'a> {
        let mut judged: BTreeMap<&str, Vec<&Judged>> = BTreeMap::new();
        for one in &report.judged {
            judged.entry(&one.parameter).or_default().push(one);
        }
        Side { inventory, report, judged }
    }

    /// The names of its parameters.
    pub(super) fn names(&self) -> Vec<&'a str> {
        self.inventory.parameters.keys().map(String::as_str).collect()
    }

    /// The shape of a parameter, by whatever was recorded of it.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<u64>> {
        let parts = [Part::Before, Part::After, Part::Reduced, Part::Clipped, Part::Accumulated];
        let whole = parts.iter().find_map(|part| self.inventory.key(name, part));
        let grad = || {
            let mut tensors = self.inventory.parameters.get(name)?.tensors.iter();
            tensors.find(|((part, _), _)| *part == Part::Grad).map(|(_, key)| key)
        };
        let key = whole.or_else(grad)?;
        Some(self.inventory.dump.tensors()[key].shape.clone())
    }

    /// Whether a part was recorded of every parameter of a view.
    pub(super) fn has(&self, view: &View, part: &Part) -> bool {
        view.names().iter().all(|name| self.inventory.key(name, part).is_some())
    }

    /// A part of a view that is a value, put together from the ranks that hold it.
    pub(super) fn values(&self, view: &View, part: &Part) -> Result<Values, String> {
        view.values(&|name| {
            let key = self.inventory.key(name, part);
            let key = key.ok_or_else(|| format!("{part} of {name} was not recorded"))?;
            let values = self.whole(key)?;
            let shape = self.shape(name).unwrap_or_default();
            match values.shape == shape {
                true => Ok(values),
                false => Err(format!(
                    "{part} of {name} has the shape {:?}, and the parameter has {shape:?}",
                    values.shape
                )),
            }
        })
    }

    fn whole(&self, key: &TensorKey) -> Result<Values, String> {
        let dump = self.inventory.dump;
        let tensor = assemble(dump, key).map_err(|error| error.to_string())?;
        let mut of = Vec::new();
        widen(tensor.dtype, tensor.bytes(), &mut of);
        Ok(Values { shape: dump.tensors()[key].shape.clone(), of })
    }

    /// The format of fewest bits that a part of a view is stored in.
    pub(super) fn stored(&self, view: &View, part: &Part) -> Option<Precision> {
        let names = view.names();
        let keys = names.iter().filter_map(|name| self.inventory.key(name, part));
        keys.fold(None, |least, key| fewer_bits(least, self.inventory.precision(key)))
    }

    /// Unit roundoff of the format of fewest bits that a parameter is computed with.
    pub(super) fn working_unit(&self) -> f64 {
        let names = self.inventory.parameters.keys();
        let keys = names.filter_map(|name| self.inventory.key(name, &Part::Before));
        let formats = keys.filter_map(|key| self.inventory.precision(key));
        formats.map(Precision::unit_roundoff).fold(0.0, f64::max)
    }

    /// What the job multiplied its losses by.
    pub(super) fn loss_scale(&self) -> f64 {
        let declared = self.inventory.declared.values();
        let scale = declared.into_iter().find_map(|own| own.loss_scale);
        scale.filter(|scale| *scale != 0.0).unwrap_or(1.0)
    }

    /// The sum over ranks and microbatches of what was computed, as the run declares to bring it
    /// together, without its loss scale.
    pub(super) fn gradient(&self, view: &View) -> Result<Gradient, String> {
        let (mut addends, mut unit) = (0.0, 0.0f64);
        let mut each: BTreeMap<&str, Values> = BTreeMap::new();
        for name in view.names() {
            let own = self.gradient_of(name)?;
            addends += own.addends;
            unit = unit.max(own.unit);
            each.insert(name, own.values);
        }
        let values = view.values(&|name| Ok(each[name].clone()))?;
        Ok(Gradient { values, addends, unit })
    }

    fn gradient_of(&self, name: &str) -> Result<Gradient, String> {
        let inventory = self.inventory;
        let parts = [Part::Reduced, Part::Clipped, Part::Before];
        let key = parts.iter().find_map(|part| inventory.key(name, part));
        let key = key.ok_or_else(|| format!("nothing says where the gradient of {name} lies"))?;
        let shape = inventory.dump.tensors()[key].shape.clone();
        let whole = IndexBox::whole(&shape);
        let count = whole.elements().unwrap_or(0) as usize;
        let mut sum =
            Gradient { values: Values { shape, of: vec![f64::NAN; count] }, ..Gradient::default() };
        let (mut seen, mut covered) = (BTreeSet::new(), 0);
        for piece in inventory.pieces(key, &|_| ()) {
            if !seen.insert(piece.place.clone()) {
                continue;
            }
            covered += piece.place.elements().unwrap_or(0) as usize;
            let (addends, weight) = self.addends(name, piece.ranks[0], &piece.place)?;
            for part in pieces(&piece.place, 8) {
                let values = self.sum(&addends, weight, &part, &mut sum)?;
                put(&part, &values, &whole, &mut sum.values.of);
            }
        }
        match covered < count {
            true => Err(format!("ranks recorded {covered} of the {count} elements of {key}")),
            false => Ok(sum),
        }
    }

    /// The weighted sum of addends over a box; adds to `total` how large and how exact they are.
    fn sum(
        &self,
        addends: &[Addend],
        weight: f64,
        place: &IndexBox,
        total: &mut Gradient,
    ) -> Result<Vec<f64>, String> {
        let mut sum = vec![0.0; place.elements().unwrap_or(0) as usize];
        for addend in addends {
            let values = self.inventory.read_addend(addend, place)?;
            let stored = self.inventory.precision(&addend.key).unwrap_or(Precision::F32);
            let is_matrix = place.0.len() > 1;
            let shown = if is_matrix { shown(&values, stored) } else { stored };
            total.unit = total.unit.max(shown.unit_roundoff());
            total.addends += weight * weight * values.iter().map(|x| x * x).sum::<f64>();
            sum.iter_mut().zip(&values).for_each(|(sum, x)| *sum += x * weight);
        }
        Ok(sum)
    }

    /// What is brought together in a box that a rank holds, and what the sum is multiplied by.
    fn addends(
        &self,
        name: &str,
        rank: Rank,
        place: &IndexBox,
    ) -> Result<(Vec<Addend>, f64), String> {
        let inventory = self.inventory;
        let (addends, domain) = if inventory.grads_are_reduced(name) {
            (inventory.grads_of(rank, name)?, Domain::alone(rank))
        } else {
            let domain = Domain::of(inventory, rank, name);
            (inventory.addends(&domain, name)?, domain)
        };
        let judge = Judge { inventory, comparisons: 1, nan_is_meant: false, is_trial: false };
        let means = judge.accumulations(rank, name, &addends);
        let own = domain.scale / self.loss_scale();
        let (Some(key), [first, _, ..]) = (inventory.key(name, &Part::Reduced), &means[..]) else {
            return Ok((addends, own * means.first().copied().unwrap_or(1.0)));
        };
        // A job that does not say whether it sums or averages: the one that is nearer to what it
        // recorded.
        let (mut dot, mut square) = (0.0, 0.0);
        let mut unused = Gradient::default();
        for part in pieces(place, 8) {
            let sum = self.sum(&addends, domain.scale, &part, &mut unused)?;
            let reduced = inventory.read_box(key, rank, &part)?;
            dot += sum.iter().zip(&reduced).map(|(x, y)| x * y).sum::<f64>();
            square += sum.iter().map(|x| x * x).sum::<f64>();
        }
        let off = |mean: &f64| (dot / square - mean).abs();
        let best = means.iter().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(first);
        Ok((addends, own * best))
    }

    /// How its own judgement of these stages of a view came out; a divergence goes before what was
    /// not judged.
    pub(super) fn own(&self, view: &View, stages: &[Stage]) -> Own<'a> {
        let names = view.names();
        let all = names.iter().flat_map(|name| self.judged.get(name).into_iter().flatten());
        let all: Vec<&Judged> = all.filter(|one| stages.contains(&one.stage)).copied().collect();
        if let Some(wrong) = all.iter().find(|one| one.result.divergence().is_some()) {
            return Own::Wrong(wrong);
        }
        let why = all.iter().find_map(|one| match &one.result {
            Outcome::Unchecked { why, .. } => Some(why.as_str()),
            _ => None,
        });
        match (why, all.is_empty()) {
            (None, false) => Own::Right,
            (why, _) => Own::Unjudged(why),
        }
    }
}

/// Elements that are no zero and must all be numbers of a format before a product is taken to have
/// been rounded to it: by chance one of f32 is a number of bf16 in 2⁻¹⁶ of all cases.
const SHOWING: usize = 16;

/// The format of fewest bits that all values of a matrix have, where a job computes in fewer than
/// it stores: under autocast gradients are products of bf16 that are stored as f32.
fn shown(values: &[f64], stored: Precision) -> Precision {
    let others = || values.iter().filter(|x| **x != 0.0 && x.is_finite());
    let is_of = |format: &&Precision| others().all(|x| format.round64(*x) == *x);
    let few = [Precision::Bf16, Precision::F16];
    let mut few = few.iter().filter(|few| few.unit_roundoff() > stored.unit_roundoff());
    match others().nth(SHOWING - 1) {
        Some(_) => few.find(is_of).copied().unwrap_or(stored),
        None => stored,
    }
}
