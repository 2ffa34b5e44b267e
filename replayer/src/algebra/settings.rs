//! Settings of an optimizer that are not the declared ones: those that fit what was recorded.

use super::causes;
use super::fits::without;
use super::inventory::Piece;
use super::judge::{Judge, arithmetic};
use super::outcome::Reading;
use super::supposed::{Supposed, Tensors, hyper_numbers};
use crate::number::short;

/// The numbers that are usual for what keeps a root from 0. It is in no formula by itself, so that no
/// line through the recorded numbers gives it.
const USUAL_EPS: [f64; 11] = [1e-8, 1e-5, 1e-6, 1e-7, 1e-9, 1e-10, 1e-12, 1e-15, 1e-16, 1e-3, 0.0];

impl Judge<'_> {
    /// A setting in place of the declared one that gives all that was recorded.
    pub(super) fn other_setting(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        let numbers = hyper_numbers(supposed).ok()?;
        let with = |settings: Vec<(&'static str, f64)>| Supposed { settings, ..supposed.clone() };
        // What is linear in a state is solved from it: how much of it stays.
        let shares = numbers.iter().filter(|(name, _)| !OTHERS.contains(name));
        let fitted = shares.filter_map(|(name, declared)| {
            let fitted = self.solved_setting(tensors, piece, supposed, (name, *declared))?;
            let is_other = (fitted - declared).abs() > NEAR * (1.0 - declared).max(NEAR)
                && (-1e-9..0.999_999).contains(&fitted);
            is_other.then_some((*name, fitted))
        });
        let fitted: Vec<(&'static str, f64)> = fitted.collect();
        let all_at_once = |value: fn(f64) -> f64| -> Vec<(&'static str, f64)> {
            fitted.iter().map(|(name, own)| (*name, value(*own))).collect()
        };
        let together = [all_at_once(rounded), all_at_once(|own| own)];
        let alone = fitted
            .iter()
            .flat_map(|(name, own)| [vec![(*name, rounded(*own))], vec![(*name, *own)]]);
        let eps = numbers.iter().find(|(name, _)| *name == "eps").map(|(_, declared)| *declared);
        let usual = USUAL_EPS.into_iter().filter(|other| eps.is_some_and(|eps| eps != *other));
        let all = alone.chain(together.clone()).chain(usual.map(|other| vec![("eps", other)]));
        let found = all.filter(|own| !own.is_empty()).find_map(|settings| {
            let misfit = self.misfit(tensors, piece, &with(settings.clone()))?;
            Some((settings, Some(misfit)))
        });
        // The change may take its own, as corrections of bias do.
        let is_right = self.agrees_in_state(tensors, piece, supposed);
        let in_state = || {
            if is_right {
                return None;
            }
            let mut all = together.iter().filter(|own| !own.is_empty());
            let own =
                all.find(|own| self.agrees_in_state(tensors, piece, &with((*own).clone())))?;
            Some((own.clone(), None))
        };
        let (settings, misfit) = found.or_else(in_state)?;
        let told = settings.iter().map(|(name, value)| {
            let declared =
                numbers.iter().find(|(own, _)| own == name).map_or(f64::NAN, |own| own.1);
            format!("{name} is {}, and {} is declared", short(*value), short(declared))
        });
        let words = told.collect::<Vec<_>>().join("; ");
        let reading = causes::SETTING_OTHER.reads(words);
        Some(match misfit {
            Some(misfit) => reading.fitting(misfit),
            None => reading,
        })
    }

    /// The value of a setting that fits the state best, of which every state is a linear function.
    fn solved_setting(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        (setting, declared): (&'static str, f64),
    ) -> Option<f64> {
        let compute = arithmetic(self.inventory.precision(tensors.after), None);
        let step = if declared < 0.5 { 0.125 } else { -0.125 };
        let settings = vec![(setting, declared + step)];
        let other = Supposed { settings, ..supposed.clone() };
        let wholes = self.wholes(tensors, piece, supposed).ok()?;
        let (mut along, mut square) = (0.0, 0.0);
        for state in supposed.rule.names().states {
            let Some((_, key)) = self.tensor_of(tensors, &supposed.rule, state.after) else {
                continue;
            };
            for part in crate::assemble::pieces(&piece.place, 8).into_iter().take(FITTED_PARTS) {
                let values = |supposed: &Supposed<'_>| {
                    let operands = self.operands(tensors, supposed, &wholes, &part).ok()?;
                    let operands = without(operands, state.after);
                    supposed.rule.stage(&operands, &compute, state.after).ok()
                };
                let (right, moved) = (values(supposed)?, values(&other)?);
                let captured = self.inventory.read_box(key, tensors.rank, &part).ok()?;
                let size: f64 = captured.iter().map(|x| x * x).sum();
                for ((right, moved), captured) in right.iter().zip(&moved).zip(&captured) {
                    let slope = moved - right;
                    along += slope * (captured - right) / size.max(f64::MIN_POSITIVE);
                    square += slope * slope / size.max(f64::MIN_POSITIVE);
                }
            }
        }
        let found = declared + step * along / square;
        found.is_finite().then_some(found)
    }

    /// A gradient that the optimizer took a number of times: that of the microbatches, or of the ranks.
    pub(super) fn scaled_gradient(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        let microbatches = self.microbatches_of(tensors.rank).unwrap_or(1.0);
        let ranks = self.inventory.declared.len() as f64;
        let sizes = [(microbatches, "microbatches"), (ranks, "ranks")];
        let factors =
            sizes.into_iter().flat_map(|(size, of)| [(size, size, of), (1.0 / size, size, of)]);
        factors.filter(|(_, size, _)| *size > 1.0).find_map(|(factor, size, of)| {
            let coefficient = supposed.coefficient * factor;
            let misfit =
                self.misfit(tensors, piece, &Supposed { coefficient, ..supposed.clone() })?;
            let words = format!(
                "the optimizer took {} x the gradient that was recorded last: there are {size} {of}",
                short(factor)
            );
            Some(causes::SCALED.reads(words).fitting(misfit))
        })
    }
}

/// How near a setting must be to the declared one, as a share of what that lacks to 1, to be taken for it.
const NEAR: f64 = 2e-2;

/// Parts of a parameter of which a setting is solved: each has a hundred thousand elements.
const FITTED_PARTS: usize = 8;

/// Hyper-parameters that no state is a linear function of.
const OTHERS: [&str; 6] = ["lr", "learning_rate", "weight_decay", "eps", "eps_root", "lr_decay"];

/// A share as people write it: what it lacks to 1, to two digits.
fn rounded(share: f64) -> f64 {
    let rest = 1.0 - share;
    if !(rest > 0.0) {
        return share;
    }
    let unit = 10f64.powi(rest.log10().floor() as i32 - 1);
    1.0 - (rest / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A share that was fitted comes out as people write it.
    #[test]
    fn a_fitted_share_is_rounded_in_what_it_lacks_to_one() {
        for (fitted, written) in [(0.998_999_7, 0.999), (0.979_98, 0.98), (0.4999, 0.5), (0.0, 0.0)]
        {
            assert!((rounded(fitted) - written).abs() < 1e-12, "{} of {fitted}", rounded(fitted));
        }
    }
}
