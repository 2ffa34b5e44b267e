//! What an optimizer may have done with a piece of a parameter, and how well that gives what was
//! recorded.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::declaration::Hyper;
use super::elements::Elements;
use super::inventory::Piece;
use super::judge::{Compared, Judge, Operand, arithmetic, is_refuted};
use super::outcome::Stage;
use super::rules::Rule;
use super::wholes::Whole;
use crate::kernels::round::Precision;

/// What an optimizer is supposed to have done with one piece of a parameter.
#[derive(Clone)]
pub(super) struct Supposed<'a> {
    pub(super) rule: Rule,
    /// The rule of a step that was taken before this one, of which nothing was recorded.
    pub(super) first: Option<Rule>,
    pub(super) hyper: &'a Hyper,
    /// The parameter whose state it took.
    pub(super) state_of: &'a str,
    /// The gradient that it took.
    pub(super) gradient: &'a TensorKey,
    /// What the gradient was multiplied by on the way, where the clipped one was not recorded.
    pub(super) coefficient: f64,
    /// What its learning rate was multiplied by.
    pub(super) lr_factor: f64,
    /// The weight decay, where it is not the declared one.
    pub(super) weight_decay: Option<f64>,
    /// Other hyper-parameters that are not the declared ones, by their names in the rule's table.
    pub(super) settings: Vec<(&'static str, f64)>,
    /// Whether the weight decay is added to the gradient, and not taken from the parameter.
    pub(super) is_coupled: bool,
    /// Whether it forgot its state.
    pub(super) is_reset: bool,
    /// Whether norms and matrices inside the rule are of the rank's own part of the parameter.
    pub(super) is_local: bool,
    /// The format that its numbers are rounded to, where that is not the parameter's.
    pub(super) computed_in: Option<Precision>,
}

/// The tensors of one parameter's step of the optimizer.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub(super) parameter: &'a str,
    pub(super) before: &'a TensorKey,
    pub(super) after: &'a TensorKey,
    pub(super) rank: Rank,
    /// Whether this is the first step, before which there is no state.
    pub(super) is_first: bool,
}

impl Judge<'_> {
    /// Compares the stages of a supposed rule.
    pub(super) fn stages(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Result<Vec<Compared>, String> {
        let stored = self.inventory.precision(tensors.after);
        let declared = arithmetic(supposed.computed_in.or(stored), None);
        // Without what is made of the whole parameter its state is judged all the same.
        let (wholes, lacking) = match self.wholes(tensors, piece, supposed) {
            Ok(wholes) => (wholes, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let operands = |part: &IndexBox| self.operands(tensors, supposed, &wholes, part);
        let compared = match &supposed.first {
            None => supposed.rule.compare(self, &declared, &piece.place, &operands),
            Some(first) => {
                supposed.rule.compare_after(first, self, &declared, &piece.place, &operands)
            }
        }?;
        let told =
            |(name, tally): Compared| (name, tally.map_err(|why| lacking.clone().unwrap_or(why)));
        Ok(compared.into_iter().map(told).collect())
    }

    /// What a supposed rule takes and gives of a part of the parameter.
    pub(super) fn operands(
        &self,
        tensors: &Tensors<'_>,
        supposed: &Supposed<'_>,
        wholes: &[Whole],
        part: &IndexBox,
    ) -> Result<Vec<Operand<'_>>, String> {
        let inventory = self.inventory;
        let given = |name, key: &TensorKey| {
            let values = inventory.elements(key, tensors.rank, part)?;
            Ok::<_, String>(Operand::part(name, values, None))
        };
        let recorded = |name, key: &TensorKey| {
            Ok::<_, String>(Operand { rounded: inventory.precision(key), ..given(name, key)? })
        };
        let mut gradient = given("grad", supposed.gradient)?;
        if supposed.coefficient != 1.0 {
            let mut values = gradient.values.widened();
            values.iter_mut().for_each(|x| *x *= supposed.coefficient);
            gradient.values = Elements::of(values);
            // The product was rounded, and so was its coefficient.
            gradient.rounded = inventory.precision(supposed.gradient);
        }
        if supposed.is_coupled {
            let decay = supposed.hyper.number("weight_decay").unwrap_or(0.0);
            let before = inventory.read_box(tensors.before, tensors.rank, part)?;
            let mut values = gradient.values.widened();
            values.iter_mut().zip(before).for_each(|(x, before)| *x += decay * before);
            gradient.values = Elements::of(values);
            gradient.rounded = Some(inventory.precision(tensors.after).unwrap_or(Precision::F32));
        }
        let mut operands =
            vec![gradient, given("before", tensors.before)?, recorded("after", tensors.after)?];
        if let Some(key) = inventory.key(tensors.parameter, &Part::Update) {
            operands.push(recorded("update", key)?);
        }
        for state in supposed.rule.names().states {
            let find = |parameter: &str, part: fn(String) -> Part| {
                let key = |own: &&str| inventory.key(parameter, &part((*own).to_string()));
                state.recorded.iter().find_map(key)
            };
            // In place of a tensor that a parameter has not, optimizers keep one of another shape.
            let shape = |key: &TensorKey| &inventory.dump.tensors()[key].shape;
            let is_fit = |key: &&TensorKey| {
                !supposed.rule.takes_wholes() || shape(key) == shape(tensors.after)
            };
            let before = find(supposed.state_of, Part::StateBefore).filter(is_fit);
            let after = find(tensors.parameter, Part::StateAfter).filter(is_fit);
            // A state that there is after a later step, and was not recorded before it, is unknown.
            let is_unknown = before.is_none() && after.is_some() && !tensors.is_first;
            match before.filter(|_| !supposed.is_reset) {
                Some(key) => operands.push(given(state.before, key)?),
                None if is_unknown => {}
                None => {
                    let zeros = Elements::zeros(part.elements().unwrap_or(0) as usize);
                    operands.push(Operand::part(state.before, zeros, None));
                }
            }
            if let Some(key) = after {
                operands.push(recorded(state.after, key)?);
            }
        }
        let rounded = supposed.computed_in.unwrap_or(Precision::F32);
        for (name, value) in hyper_numbers(supposed)? {
            operands.push(Operand::row(name, vec![value], Some(rounded)));
        }
        operands.extend(wholes.iter().flat_map(|whole| whole.operands(part)));
        Ok(operands)
    }

    /// Whether a supposition gives every stage that was recorded.
    pub(super) fn agrees(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> bool {
        self.misfit(tensors, piece, supposed).is_some()
    }

    /// How well a supposition gives every stage that was recorded: the sum of squared errors in
    /// units of what rounding explains. `None` where it does not give them.
    pub(super) fn misfit(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<f64> {
        let compared = self.trial().stages(tensors, piece, supposed).ok()?;
        let misfit = self.misfit_of(tensors, piece, (supposed, &compared));
        let bound = self.bound(&piece.place);
        let is_wrong = |own: &&Compared| {
            is_refuted(own) || own.1.as_ref().is_ok_and(|own| own.excess(&bound).is_some())
        };
        let is_state = |(name, _): &Compared| {
            let of = self.tensor_of(tensors, &supposed.rule, name);
            of.is_some_and(|(stage, _)| stage == Stage::State)
        };
        let are_states = compared.iter().filter(is_wrong).all(is_state);
        if misfit.is_some() || !are_states || !self.has_narrow_part(tensors, supposed) {
            return misfit;
        }
        let mut compared = self.stages(tensors, piece, supposed).ok()?;
        self.in_format_of_state(tensors, piece, supposed, &mut compared);
        self.misfit_of(tensors, piece, (supposed, &compared))
    }

    /// Whether the gradient or a state has few bits: then a state may be computed in as few.
    fn has_narrow_part(&self, tensors: &Tensors<'_>, supposed: &Supposed<'_>) -> bool {
        let is_narrow = |key| self.inventory.precision(key).is_some_and(|own| !own.keeps_f32());
        let mut all = self.inventory.parameters[tensors.parameter].tensors.iter();
        is_narrow(supposed.gradient)
            || all.any(|((part, _), key)| matches!(part, Part::StateAfter(_)) && is_narrow(key))
    }

    /// How well the stages as compared give what was recorded.
    fn misfit_of(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        (supposed, compared): (&Supposed<'_>, &[Compared]),
    ) -> Option<f64> {
        // What cannot be made of the whole parameter agrees with nothing.
        let is_lacking = |(name, tally): &Compared| *name == "after" && tally.is_err();
        let lacks = supposed.rule.takes_wholes() && compared.iter().any(is_lacking);
        if lacks || compared.iter().any(is_refuted) {
            return None;
        }
        let bound = self.bound(&piece.place);
        let of_tensor = compared
            .iter()
            .filter(|(name, _)| self.tensor_of(tensors, &supposed.rule, name).is_some());
        let mut judged = of_tensor.filter_map(|(_, tally)| tally.as_ref().ok()).peekable();
        judged.peek()?;
        judged.try_fold(0.0, |sum, tally| {
            let misfit = match tally.expected() {
                floor if floor > 0.0 => (tally.error() / floor).powi(2) * tally.elements as f64,
                _ => 0.0,
            };
            tally.excess(&bound).is_none().then_some(sum + misfit)
        })
    }

    pub(super) fn learning_rate(&self, supposed: &Supposed<'_>) -> Option<f64> {
        let numbers = hyper_numbers(supposed).ok()?;
        numbers.iter().find(|(name, _)| RATES.contains(name)).map(|(_, value)| *value)
    }
}

/// What the learning rate is called; in a declared formula it has the name that the job gives it.
const RATES: [&str; 2] = ["lr", "learning_rate"];
/// The hyper-parameters of a rule as numbers.
pub(super) fn hyper_numbers(supposed: &Supposed<'_>) -> Result<Vec<(&'static str, f64)>, String> {
    let names = supposed.rule.names();
    let number = |(name, ..): &(&'static str, &'static [&'static str], f64)| {
        let other = supposed.settings.iter().find(|(other, _)| other == name);
        let declared = || names.number(supposed.hyper, name);
        let value = match (*name, other.map_or_else(declared, |(_, value)| *value)) {
            (own, lr) if RATES.contains(&own) => lr * supposed.lr_factor,
            ("weight_decay", _) if supposed.is_coupled => 0.0,
            ("weight_decay", decay) => supposed.weight_decay.unwrap_or(decay),
            (_, other) => other,
        };
        match value.is_nan() {
            true => Err(format!("the optimizer declares no {name}")),
            false => Ok((*name, value)),
        }
    };
    names.hyper.iter().map(number).collect()
}
