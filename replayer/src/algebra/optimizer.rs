//! The stages of the optimizer: its state and the change of the parameter, by the rule that it
//! declares.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::{OF_GRADIENT, Part};
use backtape::shard::TensorKey;

use super::causes;
use super::declaration::{Hyper, Optimizer};
use super::elements::Elements;
use super::gradient::is_near;
use super::inventory::Piece;
use super::judge::{Compared, Judge, Operand, arithmetic};
use super::outcome::{Divergence, Judged, Outcome, Reading, Stage};
use super::rules::Rule;
use crate::kernels::round::Precision;

/// What an optimizer is supposed to have done with one piece of a parameter.
#[derive(Clone)]
struct Supposed<'a> {
    rule: Rule,
    hyper: &'a Hyper,
    /// The gradient that it took.
    gradient: &'a TensorKey,
    /// What the gradient was multiplied by on the way, where the clipped one was not recorded.
    coefficient: f64,
    /// What its learning rate was multiplied by.
    lr_factor: f64,
    /// The weight decay, where it is not the declared one.
    weight_decay: Option<f64>,
    /// Whether it forgot its state.
    is_reset: bool,
}

/// The tensors of one parameter's step of the optimizer.
struct Tensors<'a> {
    parameter: &'a str,
    before: &'a TensorKey,
    after: &'a TensorKey,
    rank: Rank,
    /// Whether this is the first step, before which there is no state.
    is_first: bool,
}

impl Judge<'_> {
    /// The optimizer's stages of a parameter.
    pub(crate) fn optimizer(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let copies = [(Part::MasterBefore, Part::MasterAfter), (Part::Before, Part::After)];
        let both = copies.iter().find_map(|(before, after)| {
            Some((inventory.key(parameter, before)?, inventory.key(parameter, after)?))
        });
        let Some((before, after)) = both else {
            return self.not_recorded(parameter).into_iter().collect();
        };
        let tensors = &inventory.parameters[parameter].tensors;
        let others: Vec<&TensorKey> = tensors.values().filter(|key| *key != after).collect();
        let origin = |rank: Rank| {
            let hashes = others.iter().map(|key| inventory.hashes(key, rank));
            (hashes.collect::<Vec<_>>(), self.hyper_words(rank, parameter))
        };
        let has_state = tensors.keys().any(|(part, _)| matches!(part, Part::StateBefore(_)));
        let mut judged = self.counters(parameter);
        for piece in inventory.pieces(after, &origin) {
            let rank = piece.ranks[0];
            // A state that was reset counts from 1 again: the first step is that before which there
            // is no state.
            let counted = self.step_of(rank, parameter);
            let is_first = !has_state && counted.is_none_or(|step| step <= 1.0);
            let tensors = Tensors { parameter, before, after, rank, is_first };
            judged.extend(self.optimized(&tensors, &piece));
        }
        judged
    }

    /// Why nothing is said of the update of a parameter that has a gradient: as that no optimizer
    /// holds it.
    fn not_recorded(&self, parameter: &str) -> Option<Judged> {
        let gradient = self.inventory.key(parameter, &Part::Reduced)?;
        let pieces = self.inventory.pieces(gradient, &|_| ());
        let piece = pieces.first()?;
        let absent = &self.inventory.declared_of(piece.ranks[0], parameter)?.absent;
        let why = absent.get("master_after").or_else(|| absent.get("after"))?.clone();
        let result = Ok(Outcome::Unchecked { why });
        Some(self.judged(Stage::Update, parameter, (gradient, piece), result))
    }

    /// The hyper-parameters as text, which tells ranks that declare others apart.
    fn hyper_words(&self, rank: Rank, parameter: &str) -> String {
        let declared = self.inventory.declared.get(&rank);
        let of = declared.and_then(|declared| declared.optimizer_of(parameter));
        of.map(|(optimizer, hyper)| format!("{:?} {hyper:?}", optimizer.name)).unwrap_or_default()
    }

    /// What the gradient that the optimizer took was multiplied by after the last one that was
    /// recorded: jobs that clip inside a compiled step do not have the clipped one.
    fn coefficient(&self, rank: Rank, parameter: &str) -> f64 {
        let inventory = self.inventory;
        let is_lacking = inventory.key(parameter, &Part::Clipped).is_none()
            && inventory
                .declared_of(rank, parameter)
                .is_some_and(|declared| declared.absent.contains_key("clipped"));
        let declared = inventory.declared.get(&rank).filter(|_| is_lacking);
        let limit = declared.and_then(|declared| declared.limit_of(parameter));
        limit.map_or(1.0, |limit| limit.coefficient().min(1.0))
    }

    /// Which step of the optimizer this is, from 1, as its state counts.
    fn step_of(&self, rank: Rank, parameter: &str) -> Option<f64> {
        let declared = self.inventory.declared_of(rank, parameter)?;
        COUNTERS.iter().find_map(|name| declared.scalar_after(name))
    }

    /// Whether the optimizer has a state of the parameter, and changed neither of them.
    fn is_untouched(&self, rank: Rank, parameter: &str) -> bool {
        let inventory = self.inventory;
        let tensors = &inventory.parameters[parameter].tensors;
        let mut pairs = vec![(Part::Before, Part::After)];
        pairs.extend(tensors.keys().filter_map(|(part, _)| match part {
            Part::StateAfter(name) if Rule::is_state(name) => {
                Some((Part::StateBefore(name.clone()), part.clone()))
            }
            _ => None,
        }));
        let is_same = |(before, after): &(Part, Part)| {
            let keys = (inventory.key(parameter, before), inventory.key(parameter, after));
            let (Some(before), Some(after)) = keys else { return false };
            inventory.hashes(before, rank) == inventory.hashes(after, rank)
        };
        pairs.len() > 1 && pairs.iter().all(is_same)
    }

    /// The counters of steps in the optimizer's state, which count one more each.
    fn counters(&self, parameter: &str) -> Vec<Judged> {
        let Some(after) = self.inventory.key(parameter, &Part::After) else { return Vec::new() };
        let mut judged = Vec::new();
        for piece in self.inventory.pieces(after, &|_| ()) {
            let rank = piece.ranks[0];
            let Some(declared) = self.inventory.declared_of(rank, parameter) else { continue };
            if self.is_untouched(rank, parameter) {
                continue;
            }
            let Some(name) = COUNTERS.iter().find(|name| declared.scalars.contains_key(**name))
            else {
                continue;
            };
            let (before, after_step) =
                (declared.scalar_before(name).unwrap_or(0.0), declared.scalar_after(name));
            let Some(count) = after_step.filter(|count| *count != before + 1.0) else { continue };
            let words = format!("{name} was {before} before the step and is {count} after it");
            let mut readings = vec![causes::STEP_COUNTER.reads(words.clone())];
            if count <= 1.0 && before > 1.0 {
                readings.insert(0, causes::STATE_RESET.reads(RESET));
            }
            let divergence = Divergence {
                reason: words,
                factor: None,
                error: (count - before - 1.0).abs() / (before + 1.0),
                floor: 0.0,
                worst: None,
                reading: None,
                readings,
            };
            let result = Ok(Outcome::Diverged(Box::new(divergence)));
            judged.push(self.judged(Stage::State, parameter, (after, &piece), result));
        }
        judged
    }

    fn optimized(&self, tensors: &Tensors<'_>, piece: &Piece) -> Vec<Judged> {
        let (inventory, parameter, rank) = (self.inventory, tensors.parameter, tensors.rank);
        let unchecked = |why: String| {
            let result = Ok(Outcome::Unchecked { why });
            vec![self.judged(Stage::Update, parameter, (tensors.after, piece), result)]
        };
        let declared = inventory.declared.get(&rank);
        if declared.is_some_and(|declared| declared.skipped) {
            return unchecked("the job left the optimizer's step out".into());
        }
        let Some((optimizer, hyper)) = declared.and_then(|own| own.optimizer_of(parameter)) else {
            return unchecked(format!("rank {rank} declares no optimizer of it"));
        };
        if optimizer.skipped {
            return unchecked("the job left the optimizer's step out".into());
        }
        if self.is_untouched(rank, parameter) {
            let what = match inventory.samples.of_parameter(parameter) {
                Some(_) => "nothing of its state changed in what was sampled",
                None => "nothing of its state changed",
            };
            return unchecked(format!(
                "{what}: the optimizer took no step of it (it had no gradient, or gradients are \
                 accumulated over several steps)"
            ));
        }
        let counted = self.step_of(rank, parameter);
        let step = counted.unwrap_or(if tensors.is_first { 1.0 } else { f64::NAN });
        let Some(rule) = Rule::of(optimizer, hyper, step) else {
            return unchecked(unknown_rule(optimizer));
        };
        if counted.is_none() && rule.names().counts_steps {
            let name = rule.names().words;
            return unchecked(format!("{name} counts its steps, and the count was not recorded"));
        }
        let gradient = OF_GRADIENT.iter().rev().find_map(|part| inventory.key(parameter, part));
        let Some(gradient) = gradient else {
            return unchecked("the gradient that the optimizer took was not recorded".into());
        };
        let supposed = Supposed {
            rule,
            hyper,
            gradient,
            coefficient: self.coefficient(rank, parameter),
            lr_factor: 1.0,
            weight_decay: None,
            is_reset: false,
        };
        match self.stages(tensors, piece, &supposed) {
            Ok(compared) => self.read_stages(tensors, piece, &supposed, compared),
            Err(why) => unchecked(why),
        }
    }

    /// Judges the stages as compared, and looks for what explains those that diverge.
    fn read_stages(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        compared: Vec<Compared>,
    ) -> Vec<Judged> {
        let mut judged = Vec::new();
        for (name, tally) in compared {
            let Some((stage, key)) = self.tensor_of(tensors, &supposed.rule, name) else {
                continue;
            };
            let result = tally.map(|tally| self.outcome(&tally, &piece.place, |_| None));
            judged.push(self.judged(stage, tensors.parameter, (key, piece), result));
        }
        let is_diverged = judged.iter().any(|one| one.result.divergence().is_some());
        let readings = match is_diverged {
            true => self.explained(tensors, piece, supposed),
            false => Vec::new(),
        };
        for one in &mut judged {
            if let Outcome::Diverged(divergence) = &mut one.result {
                divergence.readings = readings.clone();
            }
        }
        judged
    }

    /// The recorded tensor of a stage of a rule's table.
    fn tensor_of<'t>(
        &'t self,
        tensors: &Tensors<'t>,
        rule: &Rule,
        name: &str,
    ) -> Option<(Stage, &'t TensorKey)> {
        let inventory = self.inventory;
        match name {
            "after" => return Some((Stage::Update, tensors.after)),
            "update" => {
                return Some((Stage::Update, inventory.key(tensors.parameter, &Part::Update)?));
            }
            _ => {}
        }
        let state = rule.names().states.iter().find(|state| state.after == name)?;
        let part = |own: &&str| Part::StateAfter((*own).to_string());
        let key =
            state.recorded.iter().find_map(|own| inventory.key(tensors.parameter, &part(own)))?;
        Some((Stage::State, key))
    }

    /// Compares the stages of a supposed rule.
    fn stages(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Result<Vec<Compared>, String> {
        let declared = arithmetic(self.inventory.precision(tensors.after), None);
        let operands = |part: &IndexBox| self.operands(tensors, supposed, part);
        supposed.rule.compare(self, &declared, &piece.place, &operands)
    }

    /// What a supposed rule takes and gives of a part of the parameter.
    fn operands(
        &self,
        tensors: &Tensors<'_>,
        supposed: &Supposed<'_>,
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
        let mut operands =
            vec![gradient, given("before", tensors.before)?, recorded("after", tensors.after)?];
        if let Some(key) = inventory.key(tensors.parameter, &Part::Update) {
            operands.push(recorded("update", key)?);
        }
        for state in supposed.rule.names().states {
            let find = |part: fn(String) -> Part| {
                let key = |own: &&str| inventory.key(tensors.parameter, &part((*own).to_string()));
                state.recorded.iter().find_map(key)
            };
            let (before, after) = (find(Part::StateBefore), find(Part::StateAfter));
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
        for (name, value) in hyper_numbers(supposed)? {
            operands.push(Operand::row(name, vec![value], Some(Precision::F32)));
        }
        Ok(operands)
    }

    /// The factor of the whole change, and the weight decay, that fit the change best: its
    /// regression on the change that the rule gives and on the parameter.
    fn fitted(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<(f64, f64)> {
        let declared = arithmetic(self.inventory.precision(tensors.after), None);
        // Scalar products: of the rule's change, the parameter and the change with each other.
        let (mut rr, mut rp, mut pp, mut rc, mut pc) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for part in crate::assemble::pieces(&piece.place, 8) {
            let operands = self.operands(tensors, supposed, &part).ok()?;
            let rule = supposed.rule.change(&operands, &declared).ok()?;
            let named = |name: &str| operands.iter().find(|operand| operand.name == name);
            let widened = |name| Some(named(name)?.values.clone().widened());
            let (before, after) = (widened("before")?, widened("after")?);
            for ((r, p), a) in rule.iter().zip(&before).zip(&after) {
                let change = a - p;
                rr += r * r;
                rp += r * p;
                pp += p * p;
                rc += r * change;
                pc += p * change;
            }
        }
        let lr = self.learning_rate(supposed)?;
        let weight_decay = hyper_numbers(supposed).ok()?;
        let weight_decay = weight_decay.iter().find(|(name, _)| *name == "weight_decay")?.1;
        // With the rule's change as it is, what is left is a multiple of the parameter.
        let along = (pc - rp) / pp;
        (rr > 0.0 && pp > 0.0 && lr != 0.0).then(|| (rc / rr, weight_decay - along / lr))
    }

    /// Whether a supposition gives every stage that was recorded.
    fn agrees(&self, tensors: &Tensors<'_>, piece: &Piece, supposed: &Supposed<'_>) -> bool {
        let Ok(compared) = self.stages(tensors, piece, supposed) else { return false };
        let bound = self.bound(&piece.place);
        let mut judged = compared.iter().filter_map(|(name, tally)| {
            self.tensor_of(tensors, &supposed.rule, name)?;
            tally.as_ref().ok()
        });
        let mut any = false;
        judged.all(|tally| {
            any = true;
            tally.excess(&bound).is_none()
        }) && any
    }

    /// All that the optimizer may have done in place of what it declares. Several may give the
    /// same bits in one parameter; other parameters tell them apart.
    fn explained(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Vec<Reading> {
        let agrees = |other: &Supposed<'_>| self.agrees(tensors, piece, other);
        if let Some(reading) = self.no_op(tensors, piece) {
            return vec![reading];
        }
        let mut readings = Vec::new();
        let reset = Supposed { is_reset: true, ..supposed.clone() };
        if !tensors.is_first && agrees(&reset) {
            readings.push(causes::STATE_RESET.reads(RESET));
        }
        for variation in supposed.rule.variations() {
            if agrees(&Supposed { rule: variation.rule, ..supposed.clone() }) {
                readings.push(causes::named(variation.cause).reads(variation.words));
            }
        }
        // A variation has no number that was fitted, so it goes before one.
        readings.extend(self.solved(tensors, piece, supposed));
        let others = self.other_gradients(tensors, supposed);
        if let Some(other) = others.iter().find(|other| agrees(other)) {
            let part = Part::of_tensor(other.gradient.tensor.as_str()).map(|(part, _)| part);
            let part = part.map(|part| part.to_string()).unwrap_or_default();
            let words = format!("the optimizer took the gradient of the stage {part}");
            readings.push(causes::OTHER_GRADIENT.reads(words));
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
        is_same.then(|| causes::NO_OP.reads(words))
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
    fn solved(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Reading> {
        let declared = supposed.hyper.number("weight_decay").unwrap_or(0.0);
        let (lr_factor, decay) = self.fitted(tensors, piece, supposed)?;
        let scaled = Supposed { lr_factor, ..supposed.clone() };
        if is_near(lr_factor, -1.0) && self.agrees(tensors, piece, &scaled) {
            return Some(causes::ASCENDS.reads("the update has the wrong sign"));
        }
        if !is_near(lr_factor, 1.0) && self.agrees(tensors, piece, &scaled) {
            let lr = self.learning_rate(supposed)?;
            let words = format!(
                "the change is {lr_factor:.4} x that of the declared learning rate {lr:e}: it \
                     is that of {:e}",
                lr * lr_factor
            );
            return Some(causes::LR_SCALED.reads(words));
        }
        // The weight decays of the optimizer's other groups are likelier than any other.
        let fitted = if decay.abs() < 1e-3 * declared.abs() { 0.0 } else { decay };
        let others = self.other_decays(tensors).into_iter().chain([0.0, fitted]);
        let decayed =
            |weight_decay: &f64| Supposed { weight_decay: Some(*weight_decay), ..supposed.clone() };
        let mut others = others.filter(|weight_decay| *weight_decay != declared);
        let weight_decay = others.find(|other| self.agrees(tensors, piece, &decayed(other)))?;
        let cause = if declared == 0.0 { causes::DECAY_EXCLUDED } else { causes::DECAY_OTHER };
        let words =
            format!("the parameter decays by {weight_decay:.6}, and {declared:.6} is declared");
        Some(cause.reads(words))
    }

    /// The weight decays that the optimizer declares for its groups.
    fn other_decays(&self, tensors: &Tensors<'_>) -> Vec<f64> {
        let declared = self.inventory.declared.get(&tensors.rank);
        let optimizer = declared.and_then(|own| own.optimizer_of(tensors.parameter));
        let groups = optimizer.map(|(optimizer, _)| &optimizer.groups[..]).unwrap_or_default();
        groups.iter().filter_map(|group| group.number("weight_decay")).collect()
    }

    fn learning_rate(&self, supposed: &Supposed<'_>) -> Option<f64> {
        let numbers = hyper_numbers(supposed).ok()?;
        numbers.iter().find(|(name, _)| *name == "lr").map(|(_, value)| *value)
    }
}

/// Counters of steps in the state of optimizers, as frameworks call them.
pub(super) const COUNTERS: [&str; 2] = ["step", "count"];
/// What a reset of the state is, in words.
const RESET: &str = "the state before this step is not in the state after it";

fn unknown_rule(optimizer: &Optimizer) -> String {
    let known = Rule::known().join(", ");
    match &optimizer.name {
        Some(name) => format!("no rule is known of the optimizer {name}: known are {known}"),
        None => format!("the job has not said which optimizer it is: known are {known}"),
    }
}

/// The hyper-parameters of a rule as numbers.
fn hyper_numbers(supposed: &Supposed<'_>) -> Result<Vec<(&'static str, f64)>, String> {
    let names = supposed.rule.names();
    let number = |(name, ..): &(&'static str, &'static [&'static str], f64)| {
        let value = match (*name, names.number(supposed.hyper, name)) {
            ("lr", lr) => lr * supposed.lr_factor,
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
