//! Gradients that were there before the step, and belong to it: the optimizer has not stepped yet.

use backtape::part::Part;
use backtape::shard::TensorKey;

use super::declaration::Optimizer;
use super::domain::{Addend, Domain};
use super::inventory::Piece;
use super::judge::Judge;
use super::outcome::{Energies, Outcome};
use super::sums::SumOf;

impl Judge<'_> {
    /// The sum with what was there before the recorded step, where that is what was recorded and no
    /// optimizer stepped: of a job whose tape is one of several passes of a step of its optimizer.
    pub(super) fn with_earlier(
        &self,
        (parameter, key, piece): (&str, &TensorKey, &Piece),
        addends: &[Addend],
        domain: &Domain,
    ) -> Option<(Outcome, Energies)> {
        let (inventory, rank, place) = (self.inventory, piece.ranks[0], &piece.place);
        let stale = inventory.key(parameter, &Part::Stale)?;
        let is_over = |own: &Optimizer| own.has_stepped() || own.skipped;
        if inventory.declared.get(&rank)?.optimizers.iter().any(is_over) {
            return None;
        }
        let holds = |rank| inventory.holds(stale, rank, place);
        let each = domain.ranks.iter().copied().filter(|rank| holds(*rank)).collect::<Vec<_>>();
        // A rank's sum is reduced as a whole, or what is reduced is added to its sum.
        let own = if holds(rank) { vec![rank] } else { Vec::new() };
        let [all, own] = [(each, domain.scale), (own, 1.0)].map(|(ranks, scale)| {
            let of_ranks = ranks.iter().map(|rank| Addend::new(*rank, None, stale.clone()));
            let weights = [vec![domain.scale; addends.len()], vec![scale; ranks.len()]].concat();
            (addends.iter().cloned().chain(of_ranks).collect::<Vec<_>>(), weights)
        });
        [all, own].into_iter().find_map(|(addends, weights)| {
            let of =
                SumOf { key, rank, place, addends: &addends, weights: &weights, sent: domain.sent };
            let tally = self.sum(&of).ok()?;
            let bound = self.bound(place);
            let (captured, right) = (tally.captured_energy, tally.reference_energy);
            let energies = Energies { captured, right, apart: tally.squares_apart(&bound) };
            tally.excess(&bound).is_none().then(|| (Outcome::agreed(&tally, &bound), energies))
        })
    }
}
