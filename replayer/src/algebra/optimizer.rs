//! The stages of the optimizer: its state and the change of the parameter, by the rule that it
//! declares.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::part::{OF_GRADIENT, Part};
use backtape::shard::TensorKey;

use super::causes;
use super::counters::{counter, doubt_counters};
use super::declaration::{Hyper, Optimizer};
use super::held::is_left_out;
use super::inventory::Piece;
use super::judge::{Compared, Judge};
use super::outcome::{Judged, Outcome, Reading, Stage};
use super::rules::Rule;
use super::supposed::{Supposed, Tensors};

impl Judge<'_> {
    /// The optimizer's stages of a parameter.
    pub(crate) fn optimizer(&self, parameter: &str) -> Vec<Judged> {
        let inventory = self.inventory;
        let copies = [(Part::MasterBefore, Part::MasterAfter), (Part::Before, Part::After)];
        let both = copies.iter().find_map(|(before, after)| {
            Some((inventory.key(parameter, before)?, inventory.key(parameter, after)?))
        });
        let mut judged = self.held(parameter);
        let Some((before, after)) = both else {
            if judged.is_empty() {
                judged.extend(self.not_recorded(parameter));
            }
            return judged;
        };
        let tensors = &inventory.parameters[parameter].tensors;
        let others: Vec<&TensorKey> = tensors.values().filter(|key| *key != after).collect();
        let origin = |rank: Rank| {
            let hashes = others.iter().map(|key| inventory.hashes(key, rank));
            (hashes.collect::<Vec<_>>(), self.hyper_words(rank, parameter))
        };
        let has_state = tensors.keys().any(|(part, _)| matches!(part, Part::StateBefore(_)));
        judged.extend(self.counters(parameter));
        for piece in inventory.pieces(after, &origin) {
            let rank = piece.ranks[0];
            // A state that was reset counts from 1 again: the first step is that before which there
            // is no state.
            let counted = self.step_of(rank, parameter);
            let is_first = !has_state && counted.is_none_or(|step| step <= 1.0);
            let tensors = Tensors { parameter, before, after, rank, is_first };
            judged.extend(self.optimized(&tensors, &piece));
        }
        // A step that was applied twice has counted twice too.
        let is_twice = |reading: &&Reading| reading.cause == causes::UPDATED_TWICE.name;
        let readings = judged.iter().filter_map(|one| one.result.divergence());
        let twice = readings.flat_map(|own| own.readings.iter().find(is_twice)).next().cloned();
        for one in judged.iter_mut().filter(|_| twice.is_some()) {
            let Outcome::Diverged(divergence) = &mut one.result else { continue };
            let is_count = |own: &Reading| own.cause == causes::STEP_COUNTER.name;
            if divergence.readings.iter().all(is_count) {
                divergence.readings = twice.iter().cloned().collect();
            }
        }
        doubt_counters(&mut judged);
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
        let declared = self.inventory.declared.get(&piece.ranks[0]);
        let is_meant = declared.is_some_and(|declared| is_left_out(declared, parameter));
        let result = Ok(Outcome::Unchecked { why, is_meant });
        Some(self.judged(Stage::Update, parameter, (gradient, piece), result))
    }

    /// The hyper-parameters as text, which tells ranks that declare others apart.
    fn hyper_words(&self, rank: Rank, parameter: &str) -> String {
        let declared = self.inventory.declared.get(&rank);
        let of = declared.and_then(|declared| declared.optimizer_of(parameter));
        let words = |optimizer: &Optimizer| format!("{:?} {:?}", optimizer.name, optimizer.rule);
        of.map(|(optimizer, hyper)| format!("{} {hyper:?}", words(optimizer))).unwrap_or_default()
    }

    /// What the gradient that the optimizer took was multiplied by after the last one that was
    /// recorded: jobs that clip inside a compiled step do not have the clipped one.
    fn coefficient(&self, rank: Rank, parameter: &str) -> f64 {
        let inventory = self.inventory;
        let is_lacking = inventory.key(parameter, &Part::Clipped).is_none()
            && inventory
                .declared_of(rank, parameter)
                .is_some_and(|declared| declared.absent.contains_key("clipped"));
        let declared = inventory.declared.get(&rank);
        let limit = declared.filter(|_| is_lacking).and_then(|own| own.limit_of(parameter));
        // A fused optimizer takes the loss scale out itself.
        let is_scaled = inventory.key(parameter, &Part::Unscaled).is_none()
            && inventory.taken_out_by_clipping(rank, parameter).is_none()
            && inventory
                .declared_of(rank, parameter)
                .is_some_and(|declared| declared.absent.contains_key("unscaled"));
        let scale = declared.filter(|_| is_scaled).and_then(|own| own.scale_of(parameter));
        limit.map_or(1.0, |limit| limit.coefficient().min(1.0)) / scale.unwrap_or(1.0)
    }

    /// Which step of the optimizer this is, from 1, as its state counts.
    pub(super) fn step_of(&self, rank: Rank, parameter: &str) -> Option<f64> {
        let declared = self.inventory.declared_of(rank, parameter)?;
        let of_state = counter(declared).and_then(|name| declared.scalar_after(name));
        // Some keep it in the group, where it is that of before the step.
        let of_group = || {
            let declared = self.inventory.declared.get(&rank)?;
            let (_, hyper) = declared.optimizer_of(parameter)?;
            Some(hyper.number("step")? + 1.0)
        };
        of_state.or_else(of_group)
    }

    pub(super) fn microbatches_of(&self, rank: Rank) -> Option<f64> {
        self.inventory.declared.get(&rank)?.microbatches.map(f64::from)
    }

    /// Whether the optimizer has a state of the parameter, and changed neither of them.
    pub(super) fn is_untouched(&self, rank: Rank, parameter: &str) -> bool {
        let inventory = self.inventory;
        let tensors = &inventory.parameters[parameter].tensors;
        let declared = inventory.declared.get(&rank);
        let optimizer = declared.and_then(|declared| declared.optimizer_of(parameter));
        let is_state = |name: &str| {
            let is_declared = optimizer.is_some_and(|(own, _)| own.declares_state(name));
            is_declared || Rule::is_state(name)
        };
        let mut pairs = vec![(Part::Before, Part::After)];
        pairs.extend(tensors.keys().filter_map(|(part, _)| match part {
            Part::StateAfter(name) if is_state(name) => {
                Some((Part::StateBefore(name.clone()), part.clone()))
            }
            _ => None,
        }));
        let is_same = |(before, after): &(Part, Part)| {
            let keys = (inventory.key(parameter, before), inventory.key(parameter, after));
            let (Some(before), Some(after)) = keys else { return false };
            inventory.hashes(before, rank) == inventory.hashes(after, rank)
        };
        // A gradient of zeros may leave moments as they are; the step is counted all the same.
        let own = inventory.declared_of(rank, parameter);
        let is_counted = own.is_some_and(|own| {
            counter(own).is_some_and(|name| own.scalar_before(name) != own.scalar_after(name))
        });
        pairs.len() > 1 && pairs.iter().all(is_same) && !is_counted
    }

    fn optimized(&self, tensors: &Tensors<'_>, piece: &Piece) -> Vec<Judged> {
        let (parameter, rank) = (tensors.parameter, tensors.rank);
        let without = |outcome: Outcome| {
            vec![self.judged(Stage::Update, parameter, (tensors.after, piece), Ok(outcome))]
        };
        if let Some(outcome) = self.without_step(rank, parameter) {
            let left_out = self.left_out(tensors, piece);
            return if left_out.is_empty() { without(outcome) } else { left_out };
        }
        if self.is_stepped_elsewhere(rank, parameter) {
            return Vec::new();
        }
        let supposed = match self.supposed(tensors) {
            Ok(supposed) => self.of_its_form(tensors, piece, supposed),
            Err(why) => return without(Outcome::unchecked(why)),
        };
        match self.stages(tensors, piece, &supposed) {
            Ok(mut compared) => {
                self.in_format_of_state(tensors, piece, &supposed, &mut compared);
                let mut judged = self.read_stages(tensors, piece, &supposed, compared);
                judged.extend(self.judged_factors(tensors, &supposed));
                judged.extend(self.numbers_of_state(tensors, piece, &supposed.rule));
                judged
            }
            Err(why) => without(Outcome::unchecked(why)),
        }
    }

    /// Why no optimizer took a step of a parameter on a rank.
    fn without_step(&self, rank: Rank, parameter: &str) -> Option<Outcome> {
        let inventory = self.inventory;
        let declared = inventory.declared.get(&rank);
        let of = declared.and_then(|own| own.optimizer_of(parameter));
        if declared.is_some_and(|declared| is_left_out(declared, parameter)) {
            return Some(Outcome::not_done(LEFT_OUT.into()));
        }
        if of.is_none() {
            return Some(Outcome::unchecked(format!("rank {rank} {NOT_DECLARED}")));
        }
        if self.is_untouched(rank, parameter) {
            let what = match inventory.samples.of_parameter(parameter) {
                Some(_) => "nothing of its state changed in what was sampled",
                None => "nothing of its state changed",
            };
            return Some(Outcome::not_done(format!("{what}: {NO_STEP}")));
        }
        let has_gradient = OF_GRADIENT.iter().any(|part| inventory.key(parameter, part).is_some());
        let is_still = !has_gradient && self.is_changed(rank, parameter) == Some(false);
        is_still.then(|| Outcome::not_done("it had no gradient, and did not change".into()))
    }

    /// Whether a copy's step is another rank's: of copies that share the optimizer's work, one
    /// rank's has the state and is judged.
    fn is_stepped_elsewhere(&self, rank: Rank, parameter: &str) -> bool {
        let inventory = self.inventory;
        let tensors = inventory.parameters[parameter].tensors.iter();
        let states = tensors.filter(|((part, _), _)| matches!(part, Part::StateAfter(_)));
        let mut is_here = states.map(|(_, key)| inventory.holders(key).contains(&rank)).peekable();
        is_here.peek().is_some() && is_here.all(|is_here| !is_here)
    }

    /// What the optimizer is to have done with a parameter; or why that is not known.
    fn supposed<'t>(&'t self, tensors: &Tensors<'t>) -> Result<Supposed<'t>, String> {
        let (inventory, parameter, rank) = (self.inventory, tensors.parameter, tensors.rank);
        let declared = inventory.declared.get(&rank);
        let of = declared.and_then(|own| own.optimizer_of(parameter));
        let (optimizer, hyper) = of.ok_or("no optimizer of it is declared")?;
        let counted = self.step_of(rank, parameter);
        let step = counted.unwrap_or(if tensors.is_first { 1.0 } else { f64::NAN });
        let rule = self.rule_of(tensors, (optimizer, hyper), step)?;
        if !matches!(rule, Rule::Formula(_))
            && let Some(why) = self.not_of_rule(rank, parameter, (&rule, hyper))
        {
            return Err(why);
        }
        let shape = &inventory.dump.tensors()[tensors.after].shape;
        let stored = inventory.precision(tensors.after);
        let rule = rule.of_parameter(shape, stored, self.is_factored(parameter))?;
        if counted.is_none() && rule.names().counts_steps {
            return Err(format!(
                "{} counts its steps, and neither its state nor its group has a counter: a number \
                 named step, or the only whole number of the state",
                rule.names().words
            ));
        }
        let gradient = OF_GRADIENT.iter().rev().find_map(|part| inventory.key(parameter, part));
        Ok(Supposed {
            rule,
            first: None,
            hyper,
            state_of: parameter,
            gradient: gradient.ok_or("the gradient that the optimizer took was not recorded")?,
            coefficient: self.coefficient(rank, parameter),
            lr_factor: 1.0,
            weight_decay: None,
            settings: Vec::new(),
            is_coupled: false,
            is_reset: false,
            is_local: false,
            computed_in: None,
        })
    }

    /// Why the step of a parameter is not that of its rule alone.
    fn not_of_rule(
        &self,
        rank: Rank,
        parameter: &str,
        (rule, hyper): (&Rule, &Hyper),
    ) -> Option<String> {
        let names = rule.names();
        if let Some(switch) = names.other_switch(hyper) {
            return Some(format!(
                "the optimizer's switch {switch} is on, and the rule of {} does not know it",
                names.words
            ));
        }
        let inventory = self.inventory;
        let accumulated = Part::StateBefore("acc_grads".into());
        let is_clipped = inventory.key(parameter, &Part::Clipped).is_some();
        if !is_clipped && inventory.key(parameter, &accumulated).is_some() {
            return Some(
                "MultiSteps averages gradients of several calls: give what it takes as clipped="
                    .into(),
            );
        }
        let declared = inventory.declared.get(&rank)?;
        let is_lacking = declared.parameters.get(parameter)?.absent.contains_key("clipped");
        (declared.clip_value_of(parameter).is_some() && is_lacking && !is_clipped).then(|| {
            "the gradient is clipped by value, and the clipped one was not recorded: give clipped=".into()
        })
    }

    /// The form of the rule that the job follows, where several are published.
    fn of_its_form<'s>(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: Supposed<'s>,
    ) -> Supposed<'s> {
        let forms = supposed.rule.forms();
        if forms.is_empty() || self.agrees(tensors, piece, &supposed) {
            return supposed;
        }
        let with = |rule: Rule| Supposed { rule, ..supposed.clone() };
        let forms: Vec<Supposed<'s>> = forms.into_iter().map(with).collect();
        let right = forms.iter().find(|form| self.agrees(tensors, piece, form));
        // Where none is right, it is the form that is wrong in one known way.
        let is_known = |form: &&Supposed<'_>| {
            let wrong = |rule| self.agrees(tensors, piece, &Supposed { rule, ..(*form).clone() });
            form.rule.variations().into_iter().any(|variation| wrong(variation.rule))
        };
        let is_fitted = |form: &&Supposed<'_>| self.solved(tensors, piece, form).is_some();
        let own = || std::iter::once(&supposed).chain(&forms);
        let wrong = || own().find(is_known).or_else(|| own().find(is_fitted));
        right.or_else(wrong).unwrap_or(&supposed).clone()
    }

    /// Compares a state once more that is kept in few bits, or takes a gradient of few, where it is not
    /// what the rule gives in the parameter's format: frameworks compute `β m` in the format of `m` or
    /// in that of the parameter, and `(1 - β) g` in that of `g`. Each is right.
    pub(super) fn in_format_of_state(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        compared: &mut [Compared],
    ) {
        let bound = self.bound(&piece.place);
        let excess = |of: &Compared| of.1.as_ref().is_ok_and(|own| own.excess(&bound).is_some());
        let narrow = |key| self.inventory.precision(key).filter(|own| !own.keeps_f32());
        let format = |(name, _): &Compared| {
            let (stage, key) = self.tensor_of(tensors, &supposed.rule, name)?;
            let own = narrow(key).or_else(|| narrow(supposed.gradient));
            own.filter(|_| stage == Stage::State)
        };
        let Some(computed_in) = compared.iter().filter(|own| excess(own)).find_map(format) else {
            return;
        };
        let other = Supposed { computed_in: Some(computed_in), ..supposed.clone() };
        let Ok(others) = self.stages(tensors, piece, &other) else { return };
        for (own, other) in compared.iter_mut().zip(others) {
            let is_state = format(own) == Some(computed_in);
            if is_state && excess(own) && other.1.is_ok() && !excess(&other) {
                *own = other;
            }
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
        let (mut judged, mut names) = (Vec::new(), BTreeMap::new());
        for (name, tally) in compared {
            let Some((stage, key)) = self.tensor_of(tensors, &supposed.rule, name) else {
                continue;
            };
            if stage == Stage::State {
                names.insert(key.to_string(), (name, key));
            }
            let result = tally.map(|tally| self.outcome(&tally, &piece.place, |_| None));
            judged.push(self.judged(stage, tensors.parameter, (key, piece), result));
        }
        let is_diverged = judged.iter().any(|one| one.result.divergence().is_some());
        let mut readings = match is_diverged {
            true => self.explained(tensors, piece, supposed),
            false => Vec::new(),
        };
        let unexplained = is_diverged && readings.is_empty();
        let swapped = if unexplained { self.swapped(tensors, piece, supposed) } else { None };
        readings.extend(swapped.iter().map(|(reading, _)| reading.clone()));
        for one in &mut judged {
            let is_change = one.stage == Stage::Update;
            let explained = one.result.divergence().map(|divergence| divergence.floor);
            let key = names.get(one.tensor.as_str()).filter(|_| readings.is_empty());
            let words = key.zip(explained).and_then(|((name, key), explained)| {
                self.combination(tensors, piece, supposed, (name, key, explained))
            });
            if let Outcome::Diverged(divergence) = &mut one.result {
                divergence.readings = readings.clone();
                divergence.readings.extend(words.map(|words| causes::UNKNOWN.reads(words)));
                if let Some((_, other)) = &swapped {
                    divergence.reason += &format!("; what it took is that of {other}");
                }
                if is_change {
                    divergence.factor = self.factor_of_change(tensors, piece, supposed, &readings);
                }
            }
        }
        judged
    }

    /// The recorded tensor of a stage of a rule's table.
    pub(super) fn tensor_of<'t>(
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
        if rule.takes_wholes() && self.is_factored(tensors.parameter) {
            return None;
        }
        let part = |own: &&str| Part::StateAfter((*own).to_string());
        let key =
            state.recorded.iter().find_map(|own| inventory.key(tensors.parameter, &part(own)))?;
        Some((Stage::State, key))
    }
}

/// Why a parameter and its state may be what they were before, in words.
pub(super) const NO_STEP: &str = "the optimizer took no step of it (it had no gradient, or \
                                  gradients are accumulated over several steps)";
/// What a parameter is that no optimizer of a rank is said to hold, in words.
pub(super) const NOT_DECLARED: &str = "declares no optimizer of it";
/// What a step that was skipped is, in words.
const LEFT_OUT: &str = "the job left the optimizer's step out";
/// What a reset of the state is, in words.
pub(super) const RESET: &str = "the state before this step is not in the state after it";
