//! Norms of what one device of a process holds alone: a process that has several records its arrays
//! as the boxes of its devices, which it holds all.

use backtape::shard::TensorKey;

use super::causes;
use super::declaration::Norm;
use super::inventory::Piece;
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
        let mut held_boxes = Vec::new();
        for name in names {
            let key = self.key_of(name, of)?;
            if self.inventory.samples.of_parameter(name).is_some() {
                return None;
            }
            held_boxes.push((key, self.inventory.pieces(key, &|_| ())));
        }
        let devices = held_boxes.iter().map(|(_, own)| own.len()).max();
        let devices = devices.filter(|devices| *devices > 1)?;
        let is_fit = |own: &usize| *own == 1 || *own == devices;
        if !held_boxes.iter().all(|(_, own)| is_fit(&own.len())) {
            return None;
        }
        let squares = |(key, own): &(&TensorKey, Vec<Piece>)| -> Option<Vec<f64>> {
            own.iter().map(|own| self.squares_of(key, own.ranks[0], &own.place)).collect()
        };
        let of_boxes: Vec<Vec<f64>> = held_boxes.iter().map(squares).collect::<Option<_>>()?;
        let held = |at: usize| of_boxes.iter().map(|own| own[at.min(own.len() - 1)]).sum::<f64>();
        let at = (0..devices).find(|at| is(held(*at)))?;
        Some(causes::NORM_LOCAL.reads(format!(
            "it is the norm of what one device holds alone, that of box {at} of the {devices} in which \
             the parameters lie"
        )))
    }
}
