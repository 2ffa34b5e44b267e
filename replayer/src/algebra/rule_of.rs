//! By which rule an optimizer's step is judged: a known one, that of another class that the job
//! names, or a formula that it declares.

use std::collections::BTreeSet;

use backtape::part::Part;
use serde::Serialize;
use serde_json::Value;

use super::declaration::{Hyper, Optimizer};
use super::inventory::{Inventory, Piece};
use super::judge::{Judge, arithmetic};
use super::outcome::{Divergence, Judged, Outcome, Stage};
use super::rules::Rule;
use super::rules::formula::{Formula, Parameter};
use super::supposed::Tensors;
use crate::kernels::round::Precision;
use crate::number::plural;

/// By which rule an optimizer was judged that no rule is known of by its own name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DeclaredRule {
    /// The optimizer's class.
    pub optimizer: String,
    /// The rule, in words.
    pub rule: String,
}

impl DeclaredRule {
    /// The rules that the ranks of a step declare, each once.
    pub(super) fn of(inventory: &Inventory<'_>) -> Vec<DeclaredRule> {
        let optimizers = inventory.declared.values().flat_map(|own| &own.optimizers);
        let told = |optimizer: &Optimizer| {
            let rule = optimizer.rule.as_ref()?;
            let function = rule.get("function").and_then(Value::as_str).unwrap_or("of no name");
            let formulas = rule.get("formulas").and_then(Value::as_array).into_iter().flatten();
            let counts =
                formulas.filter_map(|own| Some(own.get("nodes")?.as_array()?.len() as u64));
            let rule = match (rule, counts.max()) {
                (Value::String(name), _) => format!("that of {name}, as the job declares"),
                (_, Some(count)) => {
                    let nodes = plural(count, "node");
                    format!("the formula that the job declares, {function} of {nodes}")
                }
                _ => return None,
            };
            let optimizer = optimizer.name.clone().unwrap_or_else(|| "an optimizer".into());
            Some(DeclaredRule { optimizer, rule })
        };
        optimizers.filter_map(told).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

impl Judge<'_> {
    /// The rule of a parameter's step, which the state counts as the `step`-th; or why there is
    /// none.
    pub(super) fn rule_of(
        &self,
        tensors: &Tensors<'_>,
        (optimizer, hyper): (&Optimizer, &Hyper),
        step: f64,
    ) -> Result<Rule, String> {
        let (inventory, parameter) = (self.inventory, tensors.parameter);
        let declared = inventory.declared.get(&tensors.rank);
        let group = declared.and_then(|own| own.group_of(parameter)).unwrap_or(0);
        let Some(formula) = optimizer.formula(group) else {
            return Rule::of(optimizer, hyper, step).ok_or_else(|| unknown_rule(optimizer));
        };
        let name = optimizer.name.clone().unwrap_or_else(|| "an optimizer".into());
        let unusable =
            |why: String| format!("the rule that the job declares of {name} cannot be used: {why}");
        let parts = inventory.parameters[parameter].tensors.iter();
        let states = parts.filter_map(|((part, _), key)| match part {
            Part::StateBefore(name) | Part::StateAfter(name) => Some((name.clone(), key)),
            _ => None,
        });
        let is_wide = |key| inventory.precision(key).is_none_or(Precision::keeps_f32);
        let wide = states.clone().filter(|(_, key)| is_wide(key)).map(|(name, _)| name);
        let scalars = inventory.declared_of(tensors.rank, parameter);
        let scalars = scalars.into_iter().flat_map(|own| {
            let of = |name: &String| [own.scalar_before(name), own.scalar_after(name)];
            own.scalars.keys().map(move |name| (name.clone(), of(name)))
        });
        let known = Parameter {
            optimizer: name.clone(),
            numbers: scalars.collect(),
            wide: wide.collect(),
            tensors: states.map(|(name, _)| name).collect(),
            has_update: inventory.key(parameter, &Part::Update).is_some(),
            is_first: tensors.is_first,
            is_narrow: arithmetic(inventory.precision(tensors.after), None).between.is_some(),
        };
        let made = formula.and_then(|formula| Formula::of(formula, hyper, step, known));
        made.map(Rule::Formula).map_err(unusable)
    }

    /// Numbers of the state that are not what a declared formula makes of them.
    pub(super) fn numbers_of_state(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        rule: &Rule,
    ) -> Vec<Judged> {
        let Rule::Formula(formula) = rule else { return Vec::new() };
        let judged = |(name, after, right): (String, f64, f64)| {
            let reason = format!("{name} is {after} after the step, and should be {right}");
            let error = (after - right).abs() / right.abs().max(f64::MIN_POSITIVE);
            let divergence = Divergence::of(reason, None, error);
            let result = Ok(Outcome::Diverged(Box::new(divergence)));
            self.judged(Stage::State, tensors.parameter, (tensors.after, piece), result)
        };
        formula.wrong_numbers().into_iter().map(judged).collect()
    }
}

fn unknown_rule(optimizer: &Optimizer) -> String {
    let known = Rule::known().join(", ");
    match (optimizer.class(), &optimizer.name) {
        (Some(class), Some(name)) if class != name => format!(
            "the job declares that {name} is judged as {class}, and no rule is known of {class}: \
             known are {known}"
        ),
        (Some(name), _) if Rule::known().contains(&name) => format!(
            "{name} of {} has settings or a form of its own, which the published rule of that name \
             has not: declare its formula, as rules= does",
            optimizer.module
        ),
        (Some(name), _) => format!(
            "no rule is known of the optimizer {name}: say by rules={{{name:?}: ...}} which of the \
             known ones it follows, as \"AdamW\", or its formula (docs/step.md)"
        ),
        (None, _) => format!("the job has not said which optimizer it is: known are {known}"),
    }
}
