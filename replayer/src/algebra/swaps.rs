//! An optimizer's step that took what belongs to another parameter, or that was applied twice.

use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::counters::counter;
use super::domain::Domain;
use super::inventory::Piece;
use super::judge::Judge;
use super::outcome::Reading;
use super::sums::SumOf;
use super::supposed::{Supposed, Tensors};

/// Elements of a parameter by which other parameters are tried before all of it is compared.
const TRIED: u64 = 4096;

/// Elements from which on a gradient is proved to be another's, and how many others are looked at.
const FEWEST: u64 = 4;
const MOST_OTHERS: usize = 256;

impl Judge<'_> {
    /// Whether the parameter has several names.
    pub(super) fn is_tied(&self, parameter: &str) -> bool {
        let declared = self.inventory.declared.values();
        let mut parameters = declared.flat_map(|own| own.parameters.values());
        parameters.any(|own| own.same_as.as_deref() == Some(parameter))
    }

    /// The step applied twice, the second time to what the first gave.
    pub(super) fn twice(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        if supposed.rule.takes_wholes() {
            return None;
        }
        let declared = self.inventory.declared.get(&tensors.rank)?;
        let (optimizer, hyper) = declared.optimizer_of(tensors.parameter)?;
        let rule = |step: f64| self.rule_of(tensors, (optimizer, hyper), step).ok();
        let counted = self.step_of(tensors.rank, tensors.parameter);
        // Both steps are counted, or one of them; where nothing is counted, the second is not the
        // first step of all.
        let steps = match counted {
            Some(count) => vec![[count - 1.0, count], [count, count + 1.0], [count, count]],
            None if tensors.is_first => vec![[1.0, f64::NAN]],
            None => vec![[f64::NAN, f64::NAN]],
        };
        let of = |[first, second]: [f64; 2]| {
            let (first, rule) = (rule(first)?, rule(second)?);
            Some(Supposed { first: Some(first), rule, ..supposed.clone() })
        };
        let steps = steps.into_iter().filter(|[first, _]| !(*first < 1.0)).filter_map(of);
        let steps: Vec<Supposed<'_>> = steps.collect();
        let names = if self.is_tied(tensors.parameter) { ", which has several names" } else { "" };
        let words = format!("the step is applied twice to the parameter{names}");
        if let Some(misfit) = steps.iter().find_map(|other| self.misfit(tensors, piece, other)) {
            return Some(causes::UPDATED_TWICE.reads(words).fitting(misfit));
        }
        // The second step may have had another learning rate, where both are counted.
        let own = self.inventory.declared_of(tensors.rank, tensors.parameter);
        let counted = own.and_then(|own| {
            let name = counter(own)?;
            Some(own.scalar_after(name)? - own.scalar_before(name)?)
        });
        if counted != Some(2.0) {
            return None;
        }
        let in_state = steps.iter().any(|other| self.agrees_in_state(tensors, piece, other));
        in_state.then(|| {
            causes::UPDATED_TWICE
                .reads(format!("{words}, as its state says: the second time by other settings"))
        })
    }

    /// The other parameter of the same shape whose gradients a sum is of, as where a flat buffer is
    /// written back in another order.
    pub(super) fn sum_of_other(
        &self,
        of: &SumOf<'_>,
        parameter: &str,
        domain: &Domain,
    ) -> Option<(Reading, String)> {
        let inventory = self.inventory;
        let (shape, part) = (&inventory.dump.tensors()[of.key].shape, part_of(of.key)?);
        if of.place.elements()? < FEWEST {
            return None;
        }
        let is_fit = |name: &&String| {
            let key = inventory.key(name, &part);
            *name != parameter
                && key.is_some_and(|key| inventory.dump.tensors()[key].shape == *shape)
        };
        let corner = corner(of.place);
        let captured = inventory.read_box(of.key, of.rank, &corner).ok()?;
        // A gradient of zeros is anybody's.
        if captured.iter().all(|x| *x == 0.0) {
            return None;
        }
        let is_other = |name: &&String| {
            let Ok(addends) = inventory.addends(domain, name) else { return false };
            let weights = vec![domain.scale; addends.len()];
            [&corner, of.place].into_iter().all(|place| {
                let other = SumOf { addends: &addends, weights: &weights, place, ..*of };
                let tally = self.trial().sum(&other);
                tally.is_ok_and(|tally| tally.excess(&self.bound(place)).is_none())
            })
        };
        let name = inventory.parameters.keys().filter(is_fit).take(MOST_OTHERS).find(is_other)?;
        let words = "it is the gradient of another parameter of its shape";
        Some((causes::OTHER_GRADIENT.reads(words), name.clone()))
    }

    /// The state or the gradient of another parameter of the same shape, and its name.
    pub(super) fn swapped(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<(Reading, String)> {
        let inventory = self.inventory;
        let shape = &inventory.dump.tensors()[tensors.after].shape;
        let corner = Piece { place: corner(&piece.place), ..piece.clone() };
        let part = part_of(supposed.gradient)?;
        for other in inventory.parameters.keys().filter(|name| *name != tensors.parameter) {
            let after = inventory.key(other, &Part::After);
            if after.is_none_or(|after| inventory.dump.tensors()[after].shape != *shape) {
                continue;
            }
            let of_state = Supposed { state_of: other, ..supposed.clone() };
            let gradient = inventory.key(other, &part);
            let of_gradient = gradient.map(|gradient| Supposed { gradient, ..supposed.clone() });
            // What is made of a whole parameter is not made of a corner of it.
            let is_quick = !supposed.rule.takes_wholes();
            let agrees = |supposed: &Supposed<'_>| {
                (!is_quick || self.agrees(tensors, &corner, supposed))
                    && self.agrees(tensors, piece, supposed)
            };
            if !supposed.rule.names().states.is_empty() && agrees(&of_state) {
                let words = "the state before the step is that of another parameter of its shape";
                return Some((causes::STATE_SWAPPED.reads(words), other.clone()));
            }
            if of_gradient.is_some_and(|supposed| agrees(&supposed)) {
                let words = "the optimizer took the gradient of another parameter of its shape";
                return Some((causes::OTHER_GRADIENT.reads(words), other.clone()));
            }
        }
        None
    }
}

/// A corner of a box of no more than [`TRIED`] elements.
fn corner(place: &IndexBox) -> IndexBox {
    let mut left = TRIED;
    let mut cut = place.0.clone();
    for (low, high) in cut.iter_mut().rev() {
        let extent = (*high - *low).min(left.max(1));
        *high = *low + extent;
        left /= extent.max(1);
    }
    IndexBox(cut)
}

fn part_of(key: &TensorKey) -> Option<Part> {
    Part::of_tensor(key.tensor.as_str()).map(|(part, _)| part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corner_lies_in_its_box_and_has_few_elements() {
        let place = IndexBox(vec![(2, 900), (7, 1007), (0, 3)]);
        let corner = corner(&place);
        assert!(corner.elements().unwrap() <= TRIED && corner.elements().unwrap() > TRIED / 4);
        assert_eq!(corner.intersection(&place).as_ref(), Some(&corner));
        assert_eq!(super::corner(&IndexBox(vec![])).0, vec![]);
    }
}
