//! The norm of each rank's own gradients, or each device's, before they were brought together: by it
//! one knows those that were clipped too early, each by its own.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use rayon::prelude::*;

use super::domain::{Addend, Domain};
use super::factor::is_near;
use super::inventory::Inventory;
use super::judge::WIDTH;
use crate::assemble::pieces;

/// Who computed a gradient: a rank, or one of its devices.
pub(super) type Unit = (Rank, Option<u64>);

/// By who computed them, the norm of all gradients that are brought together.
pub(super) type LocalNorms = BTreeMap<Unit, f64>;

impl Inventory<'_> {
    /// The norms; `None` where a gradient of some parameter was not recorded before it was reduced.
    pub(super) fn local_norms(&self) -> Option<LocalNorms> {
        let mut squares = LocalNorms::new();
        for name in self.parameters.keys() {
            let Some(key) = self.key(name, &Part::Reduced) else { continue };
            let rank = *self.holders(key).first()?;
            let addends = self.addends(&Domain::of(self, rank, name), name).ok()?;
            let mut of_unit: BTreeMap<Unit, Vec<Addend>> = BTreeMap::new();
            for addend in addends {
                of_unit.entry((addend.rank, addend.index)).or_default().push(addend);
            }
            let place = IndexBox::whole(&self.dump.tensors()[key].shape);
            for (unit, own) in of_unit {
                *squares.entry(unit).or_default() += self.squares_of_sum(&own, &place)?;
            }
        }
        Some(squares.into_iter().map(|(unit, squares)| (unit, squares.sqrt())).collect())
    }

    fn squares_of_sum(&self, addends: &[Addend], place: &IndexBox) -> Option<f64> {
        let of = |part: &IndexBox| {
            let mut sum = vec![0.0; part.elements()? as usize];
            for addend in addends {
                let values = self.read_addend(addend, part).ok()?;
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
            Some(sum.iter().map(|x| x * x).sum::<f64>())
        };
        pieces(place, WIDTH).par_iter().map(of).sum()
    }
}

/// The norm to which each gradient was clipped by its own, where these factors are such: all that
/// were made smaller have it, and the others are within it.
pub(super) fn clipped_to(factors: &BTreeMap<Unit, f64>, norms: &LocalNorms) -> Option<f64> {
    let clipped = |unit: &Unit, factor: f64| Some(factor * norms.get(unit)?);
    let is_smaller = |factor: f64| factor < 1.0 && !is_near(factor, 1.0);
    let smaller = factors.iter().filter(|(_, factor)| is_smaller(**factor));
    let all: Option<Vec<f64>> = smaller.map(|(unit, factor)| clipped(unit, *factor)).collect();
    let all = all.filter(|all| all.len() > 1)?;
    let allowed = all[0];
    let is_within = |(unit, factor): (&Unit, &f64)| {
        is_smaller(*factor)
            || (is_near(*factor, 1.0)
                && norms.get(unit).is_some_and(|norm| *norm <= allowed * 1.001))
    };
    (all.iter().all(|own| is_near(*own, allowed)) && factors.iter().all(is_within))
        .then_some(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: factors are told as clipping where each brings its gradient to one norm, and not else.
    /// Method: three ranks, of which one is within the norm, and then factors as of token counts.
    #[test]
    fn factors_that_bring_each_gradient_to_one_norm_are_clipping() {
        let units = [0, 1, 2].map(|rank| (Rank(rank), None));
        let of = |values: [f64; 3]| units.into_iter().zip(values).collect::<LocalNorms>();
        let norms = of([4.0, 2.0, 0.5]);
        let told = |factors: [f64; 3]| clipped_to(&of(factors), &norms);
        assert_eq!(told([0.25, 0.5, 1.0]), Some(1.0));
        assert_eq!(told([0.1, 0.2, 0.8]), Some(0.4));
        assert_eq!(told([0.25, 0.6, 1.0]), None);
        assert_eq!(told([0.1, 0.2, 1.0]), None);
        assert_eq!(told([0.25, 1.0, 1.0]), None);
        assert_eq!(told([1.2, 0.9, 0.9]), None);
    }
}
