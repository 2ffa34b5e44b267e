//! Norms of what one device of a process holds alone: a process that has several records its arrays
//! as the boxes of its devices, which it holds all.

use super::causes;
use super::declaration::Norm;
use super::judge::Judge;
use super::outcome::Reading;

impl Judge<'_> {
    /// The device whose own part has this norm, where parameters lie in as many boxes as there are
    /// devices, or whole on each of them.
    pub(super) fn read_devices<'n>(
        &self,
        norm: &Norm,
        names: impl Iterator<Item = &'n str>,
        is: &dyn Fn(f64) -> bool,
    ) -> Option<Reading> {
        let of = norm.of.as_deref().unwrap_or("reduced");
        if self.inventory.declared.len() > 1 || norm.power() != Some(2.0) {
            return None;
        }
        let mut of_boxes: Vec<Vec<f64>> = Vec::new();
        for name in names {
            let key = self.key_of(name, of)?;
            if self.inventory.samples.of_parameter(name).is_some() {
                return None;
            }
            let pieces = self.inventory.pieces(key, &|_| ());
            let squares = pieces.iter().map(|own| self.squares_of(key, own.ranks[0], &own.place));
            of_boxes.push(squares.collect::<Option<Vec<f64>>>().filter(|own| !own.is_empty())?);
        }
        let devices = of_boxes.iter().map(Vec::len).max().filter(|devices| *devices > 1)?;
        let fit = of_boxes.iter().all(|own| own.len() == 1 || own.len() == devices);
        let held = |at: usize| of_boxes.iter().map(|own| own[at.min(own.len() - 1)]).sum::<f64>();
        let at = (0..devices).filter(|_| fit).find(|at| is(held(*at)))?;
        Some(causes::NORM_LOCAL.reads(format!(
            "it is the norm of what one device holds alone, that of box {at} of the {devices} in which \
             the parameters lie"
        )))
    }
}
