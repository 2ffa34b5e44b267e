//! Why an optimizer's step is not that of its rule: what else gives the same.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::{OF_GRADIENT, Part};

use super::causes;
use super::declaration::ParameterDeclaration;
use super::factor::is_near;
use super::fits::Fit;
use super::inventory::Piece;
use super::judge::{Judge, WIDTH};
use super::optimizer::RESET;
use super::outcome::{Reading, Stage};
use super::rules::Rule;
use super::supposed::{Supposed, Tensors, hyper_numbers};
use crate::number::short;

/// A factor of a change that is nothing but rounding, where the change of which it is one agrees.
const NOTHING: f64 = 1e-4;

impl Judge<'_> {
    /// The captured change over that of the rule, where it is one number: that of a parameter is
    /// none of its change.
    pub(super) fn factor_of_change(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        readings: &[Reading],
    ) -> Option<f64> {
        let is = |cause: causes::Cause| readings.iter().any(|own| own.cause == cause.name);
        match () {
            () if is(causes::NO_OP) => Some(0.0),
            () if is(causes::LR_SCALED) || is(causes::ASCENDS) => {
                self.fitted(tensors, piece, supposed).map(|fit| fit.factor)
            }
            () => None,
        }
    }

    /// All that the optimizer may have done in place of what it declares. Several may give the
    /// same bits in one parameter; other parameters tell them apart.
    pub(super) fn explained(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Vec<Reading> {
        let misfit = |other: &Supposed<'_>| self.misfit(tensors, piece, other);
        if let Some(reading) = self.no_op(tensors, piece) {
            return vec![reading];
        }
        let mut readings = Vec::new();
        let reset = Supposed { is_reset: true, ..supposed.clone() };
        if let Some(misfit) = misfit(&reset).filter(|_| !tensors.is_first) {
            readings.push(causes::STATE_RESET.reads(RESET).fitting(misfit));
        }
        let shape = &self.inventory.dump.tensors()[tensors.after].shape;
        if supposed.rule.takes_wholes() && piece.place != IndexBox::whole(shape) {
            let local = Supposed { is_local: true, ..supposed.clone() };
            if let Some(misfit) = misfit(&local) {
                let words = "what the rule takes of the whole parameter is of this rank's part";
                readings.push(causes::SHARDED_NORM.reads(words).fitting(misfit));
            }
        }
        for variation in supposed.rule.variations() {
            if let Some(misfit) = misfit(&Supposed { rule: variation.rule, ..supposed.clone() }) {
                let reading = causes::named(variation.cause).reads(variation.words);
                readings.push(reading.fitting(misfit));
            }
        }
        let coupled = Supposed { is_coupled: true, ..supposed.clone() };
        let decays = supposed.hyper.number("weight_decay").is_some_and(|decay| decay != 0.0);
        if matches!(supposed.rule, Rule::Formula(_))
            && decays
            && let Some(misfit) = misfit(&coupled)
        {
            let words = "the weight decay is added to the gradient, and the declared formula takes it \
                         from the parameter";
            readings.push(causes::DECAY_COUPLED.reads(words).fitting(misfit));
        }
        readings.extend(self.as_it_was(tensors, piece, supposed));
        // A variation has no number that was fitted, so it goes before one.
        let twice = self.twice(tensors, piece, supposed);
        let is_tied = self.is_tied(tensors.parameter);
        readings.extend(twice.iter().filter(|_| is_tied).cloned());
        readings.extend(self.solved(tensors, piece, supposed));
        readings.extend(twice.filter(|_| !is_tied));
        if readings.is_empty() {
            readings.extend(self.other_setting(tensors, piece, supposed));
            readings.extend(self.scaled_gradient(tensors, piece, supposed));
        }
        let others = self.other_gradients(tensors, supposed);
        if let Some((other, misfit)) = others.iter().find_map(|own| Some((own, misfit(own)?))) {
            let part = Part::of_tensor(other.gradient.tensor.as_str()).map(|(part, _)| part);
            let part = part.map(|part| part.to_string()).unwrap_or_default();
            let words = format!("the optimizer took the gradient of the stage {part}");
            readings.push(causes::OTHER_GRADIENT.reads(words).fitting(misfit));
        }
        readings
    }

    fn no_op(&self, tensors: &Tensors<'_>, piece: &Piece) -> Option<Reading> {
        let inventory = self.inventory;
        let rank = tensors.rank;
        let is_same = tensors.before != tensors.after
            && inventory.hashes(tensors.before, rank) == inventory.hashes(tensors.after, rank)
            && piece.place.elements() != Some(0);
        let words = "the parameter is the same bit for bit before and after the step";
        let is_finite = || {
            let first = crate::assemble::pieces(&piece.place, WIDTH).into_iter().next()?;
            let values = inventory.read_box(tensors.before, rank, &first).ok()?;
            Some(values.iter().all(|x| x.is_finite()))
        };
        is_same.then(|| match is_finite() {
            Some(false) => {
                causes::UNKNOWN.reads("the parameter was not finite before the step already")
            }
            _ => causes::NO_OP.reads(words),
        })
    }

    /// The other gradients of the parameter that were recorded.
    fn other_gradients<'t>(
        &'t self,
        tensors: &Tensors<'t>,
        supposed: &Supposed<'t>,
    ) -> Vec<Supposed<'t>> {
        let parts = &self.inventory.parameters[tensors.parameter].tensors;
        let is_gradient = |part: &Part| {
            OF_GRADIENT.contains(part)
                || matches!(part, Part::Grad | Part::Accumulated | Part::Stale)
        };
        let others =
            parts.iter().filter(|((part, _), key)| is_gradient(part) && *key != supposed.gradient);
        let taken = |gradient| Supposed { gradient, coefficient: 1.0, ..supposed.clone() };
        others.map(|(_, gradient)| taken(gradient)).collect()
    }

    /// A learning rate or a weight decay that gives the change, solved from it.
    pub(super) fn solved(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        let declared = supposed.hyper.number("weight_decay").unwrap_or(0.0);
        let fit = self.fitted(tensors, piece, supposed)?;
        let (mut lr_factor, decay) = (fit.factor, fit.weight_decay);
        // What decays after its change does not move in proportion to the learning rate.
        if supposed.rule.decays_late() {
            let scaled = Supposed { lr_factor, ..supposed.clone() };
            lr_factor *= self.fitted(tensors, piece, &scaled)?.factor;
        }
        // The wrong sign is likelier than any other number that rounding leaves possible.
        let opposite = Supposed { lr_factor: -1.0, ..supposed.clone() };
        if lr_factor < 0.0
            && let Some(misfit) = self.misfit(tensors, piece, &opposite)
        {
            return Some(causes::ASCENDS.reads("the update has the wrong sign").fitting(misfit));
        }
        if let Some(told) = self.other_rate(tensors, piece, supposed, lr_factor) {
            return told;
        }
        if decay.is_nan() {
            return None;
        }
        if let Some(reading) = self.scaled_alone(tensors, piece, supposed, &fit) {
            return Some(reading);
        }
        // The weight decays of the optimizer's other groups are likelier than any other.
        let fitted = if decay.abs() < 1e-3 * declared.abs() { 0.0 } else { decay };
        let round = [2, 3].map(|digits| to_digits(fitted, digits));
        let others = self.other_decays(tensors).into_iter().chain([0.0, -declared]);
        let others = others.chain(round).chain([fitted]);
        let decayed =
            |weight_decay: &f64| Supposed { weight_decay: Some(*weight_decay), ..supposed.clone() };
        let mut others = others.filter(|weight_decay| *weight_decay != declared);
        let (weight_decay, misfit) =
            others.find_map(|own| Some((own, self.misfit(tensors, piece, &decayed(&own))?)))?;
        let cause = if declared == 0.0 { causes::DECAY_EXCLUDED } else { causes::DECAY_OTHER };
        let words = format!(
            "the parameter decays by {}, and {} is declared",
            short(weight_decay),
            short(declared)
        );
        Some(cause.reads(words).fitting(misfit))
    }

    /// A learning rate that gives the change, near this factor of the declared one: `None` where no
    /// such one does, and nothing in it where others would do as well.
    fn other_rate(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        fitted: f64,
    ) -> Option<Option<Reading>> {
        let lr = self.learning_rate(supposed)?;
        // Of many elements some say the factor more exactly than the fit of all: a round number may.
        let round = [2, 3].map(|digits| to_digits(lr * fitted, digits) / lr);
        let whole = [fitted.round(), 1.0 / (1.0 / fitted).round()];
        let near = whole.into_iter().chain(round).filter(|own| (own / fitted - 1.0).abs() < 2e-3);
        let (factor, misfit) = near.chain([fitted]).find_map(|lr_factor| {
            let scaled = Supposed { lr_factor, ..supposed.clone() };
            let is_other = lr_factor.is_finite() && lr_factor != 0.0 && !is_near(lr_factor, 1.0);
            let misfit = is_other.then(|| self.misfit(tensors, piece, &scaled))??;
            Some((lr_factor, misfit))
        })?;
        let sizes = self.sizes_of(tensors.rank, factor);
        // A change that is lost in rounding is that of any small learning rate, and bias corrections of
        // a formula make factors as well.
        let lost = Supposed { lr_factor: 0.0, ..supposed.clone() };
        let is_correction = match &supposed.rule {
            Rule::Formula(formula) => sizes.is_empty() && formula.corrects_by(factor),
            _ => false,
        };
        if is_correction || self.agrees(tensors, piece, &lost) {
            return Some(None);
        }
        let correction = self.one_correction(tensors, supposed, factor);
        if let Some(reading) = correction.filter(|_| sizes.is_empty()) {
            return Some(Some(reading.fitting(misfit)));
        }
        let words = format!(
            "the change is {} x that of the declared learning rate {}: it is that of {}{sizes}",
            short(factor),
            short(lr),
            short(lr * factor),
        );
        Some(Some(causes::LR_SCALED.reads(words).fitting(misfit)))
    }

    /// A factor of the change that is the bias correction of one moment at this step, which is lacking or
    /// is in it twice while the other's is right: in Adam's second form, of which no variation says that.
    /// A round number is rather that of a learning rate.
    fn one_correction(
        &self,
        tensors: &Tensors<'_>,
        supposed: &Supposed<'_>,
        factor: f64,
    ) -> Option<Reading> {
        let is_round = |factor: f64| (to_digits(factor, 2) / factor - 1.0).abs() < 1e-4;
        let is_second = matches!(&supposed.rule, Rule::Adam(rule) if rule.eps_hat && rule.corrections == [1, 1]);
        if !is_second || is_round(factor) || is_round(1.0 / factor) {
            return None;
        }
        let step = self.step_of(tensors.rank, tensors.parameter)?;
        let numbers = hyper_numbers(supposed).ok()?;
        let of = |name: &str, moment: &str, power: f64| {
            let (_, beta) = numbers.iter().find(|(own, _)| *own == name)?;
            let correction = (1.0 - beta.powf(step)).powf(power);
            let (cause, how) = match () {
                () if is_near(factor, correction) => {
                    (causes::UNCORRECTED, "used without bias correction")
                }
                () if is_near(factor, 1.0 / correction) => {
                    (causes::CORRECTED_TWICE, "corrected for its bias twice")
                }
                () => return None,
            };
            Some(cause.reads(format!("the {moment} moment is {how}")))
        };
        of("beta1", "first", 1.0).or_else(|| of("beta2", "second", -0.5))
    }

    /// Whether a supposition gives every tensor of the state that was recorded, whatever it gives of
    /// the change.
    pub(super) fn agrees_in_state(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> bool {
        let Ok(mut compared) = self.stages(tensors, piece, supposed) else { return false };
        self.in_format_of_state(tensors, piece, supposed, &mut compared);
        let bound = self.bound(&piece.place);
        let of_state = compared.iter().filter(|(name, _)| {
            let of = self.tensor_of(tensors, &supposed.rule, name);
            of.is_some_and(|(stage, _)| stage == Stage::State)
        });
        let mut tallies = of_state.map(|(_, tally)| tally.as_ref()).peekable();
        tallies.peek().is_some()
            && tallies.all(|tally| tally.is_ok_and(|tally| tally.excess(&bound).is_none()))
    }

    /// The gradient as it was recorded, where what the optimizer is to take of it was not: a compiled
    /// step clips it, and a fused optimizer takes the loss scale out.
    fn as_it_was(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        let plain = Supposed { coefficient: 1.0, ..supposed.clone() };
        if supposed.coefficient == 1.0 || !self.agrees_in_state(tensors, piece, &plain) {
            return None;
        }
        let is_scaled = |own: &ParameterDeclaration| own.absent.contains_key("unscaled");
        let declared = self.inventory.declared_of(tensors.rank, tensors.parameter);
        let (cause, what) = match declared.is_some_and(is_scaled) {
            true => (causes::SCALE_LEFT, "with the loss scale in it"),
            false => (causes::NOT_CLIPPED, "before it was clipped"),
        };
        Some(cause.reads(format!("the optimizer took the gradient {what}")))
    }

    /// A change that has another factor than its weight decay: code that subtracts both apart.
    fn scaled_alone(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        fit: &Fit,
    ) -> Option<Reading> {
        let declared = supposed.hyper.number("weight_decay").unwrap_or(0.0);
        let (factor, decay) = fit.apart.filter(|(factor, _)| !is_near(*factor, 1.0))?;
        let lr = self.learning_rate(supposed)?;
        let held = decay * factor;
        // What decays after the change takes its share of the change too.
        if is_near(factor, 1.0 - held * lr) {
            let late =
                Supposed { lr_factor: factor, weight_decay: Some(decay), ..supposed.clone() };
            return self.agrees(tensors, piece, &late).then(|| {
                let is_declared = is_near(held, declared);
                let other = match is_declared {
                    true => String::new(),
                    false => format!(" by {}, and {} is declared", short(held), short(declared)),
                };
                let words = format!("the parameter decays{other} after the rest of its change");
                causes::DECAY_OTHER.reads(words)
            });
        }
        // The decay by the declared learning rate, and by the one that fits.
        let decays = [declared / factor, decay].into_iter().map(Some);
        let mut tried = decays.map(|weight_decay| Supposed {
            lr_factor: factor,
            weight_decay,
            ..supposed.clone()
        });
        let other = tried.find(|other| self.agrees(tensors, piece, other))?;
        let is_declared = other.weight_decay == Some(declared / factor);
        let beside = match is_declared {
            true => "the weight decay is as declared".to_string(),
            false => {
                let held = short(decay * factor);
                format!("the weight decay is that of {held}, and {} is declared", short(declared))
            }
        };
        if factor.abs() < NOTHING {
            let words = format!("nothing of its change but the weight decay reached it; {beside}");
            return Some(causes::NO_OP.reads(words));
        }
        if is_near(factor, -1.0) {
            return Some(causes::ASCENDS.reads(format!("the update has the wrong sign; {beside}")));
        }
        let sizes = self.sizes_of(tensors.rank, factor);
        let words = format!("the change is {} x that of the rule{sizes}; {beside}", short(factor));
        Some(causes::LR_SCALED.reads(words))
    }

    /// The sizes of the job that a factor equals, in words.
    fn sizes_of(&self, rank: Rank, factor: f64) -> String {
        let ranks = self.inventory.declared.len() as f64;
        let microbatches = self.microbatches_of(rank).unwrap_or(1.0);
        let sizes = [(ranks, "ranks"), (microbatches, "microbatches")];
        for (size, name) in sizes.into_iter().filter(|(size, _)| *size > 1.0) {
            if is_near(factor, size) {
                return format!(", and the factor is {size} {name}");
            }
            if is_near(factor, 1.0 / size) {
                return format!(", and the factor is 1 over {size} {name}");
            }
        }
        String::new()
    }

    /// The weight decays that the optimizer declares for its groups.
    fn other_decays(&self, tensors: &Tensors<'_>) -> Vec<f64> {
        let declared = self.inventory.declared.get(&tensors.rank);
        let optimizer = declared.and_then(|own| own.optimizer_of(tensors.parameter));
        let groups = optimizer.map(|(optimizer, _)| &optimizer.groups[..]).unwrap_or_default();
        groups.iter().filter_map(|group| group.number("weight_decay")).collect()
    }
}

/// A number to so many digits, as people write settings.
fn to_digits(x: f64, digits: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let unit = 10f64.powi(x.abs().log10().floor() as i32 - digits + 1);
    (x / unit).round() * unit
}
