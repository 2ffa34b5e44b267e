//! The rules of optimizers, as tables of `ops`: one file each, and this list.
//!
//! A rule's table names the gradient `grad`, the parameter `before` and `after`, its change
//! `update`, each tensor of the state by one name (with `_before` for its value before the step),
//! and the hyper-parameters. Nothing here is taken from a framework's code: references and the
//! frameworks that they judge share the published formula alone.
//!
//! A table has stages that are computed element by element. What a rule takes of the whole
//! parameter (a norm, means of rows and columns, an orthogonal matrix) is an input of its table,
//! which `wholes` computes first, with the error that rounding may have brought to it.
//!
//! An optimizer that no rule is known of has one where the job declares a formula: `formula`.

pub(crate) mod adafactor;
pub(crate) mod adagrad;
pub(crate) mod adam;
pub(crate) mod adamax;
pub(crate) mod formula;
mod formulas;
pub(crate) mod lamb;
pub(crate) mod lion;
pub(crate) mod muon;
pub(crate) mod nadam;
pub(crate) mod radam;
pub(crate) mod rmsprop;
pub(crate) mod sgd;
#[cfg(test)]
mod tests;
mod variation;

use std::collections::BTreeMap;

use backtape::index_box::IndexBox;

use super::declaration::{Hyper, Optimizer};
use super::judge::{Compared, Judge, Operand};
use crate::kernels::round::Precision;
use crate::ops::expected::Expected;
use crate::ops::{Declared, Recorded, Tensors, tallies_from, tallies_of_two, values};
#[cfg(test)]
use crate::ops::{Span, tallies, tallies_by_numbers};

pub(crate) use variation::Variation;

/// How frameworks call what a rule's table names.
pub(crate) struct Names {
    /// What people call the rule.
    pub words: &'static str,
    /// Where it was published.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test holds the page to it"))]
    pub source: &'static str,
    /// Whether it depends on which step it is, however it is switched.
    pub counts_steps: bool,
    /// Switches that it heeds, beside those that say how it is computed alone.
    pub switches: &'static [&'static str],
    /// Inputs of the table that are made of the whole parameter (`wholes`), each with the name that
    /// its variance has.
    pub wholes: &'static [(&'static str, &'static str)],
    /// Tensors of the state.
    pub states: &'static [State],
    /// Hyper-parameters: the name in the table, those that are declared, and the value where none
    /// is.
    pub hyper: &'static [HyperName],
}

/// A tensor of an optimizer's state.
pub(crate) struct State {
    /// After the step, in the table.
    pub after: &'static str,
    /// Before the step, in the table.
    pub before: &'static str,
    /// As frameworks call it.
    pub recorded: &'static [&'static str],
}

/// A row of [`Names::hyper`].
type HyperName = (&'static str, &'static [&'static str], f64);

/// The learning rate.
const LR: HyperName = ("lr", &["lr", "learning_rate"], f64::NAN);
/// How much of the first moment stays.
const BETA1: HyperName = ("beta1", &["betas.0", "beta1", "b1"], 0.9);
/// How much of the second moment stays.
const BETA2: HyperName = ("beta2", &["betas.1", "beta2", "b2"], 0.999);
/// What is added to the root of the second moment.
const EPS: HyperName = ("eps", &["eps"], 1e-8);
/// What is added below the root.
const EPS_ROOT: HyperName = ("eps_root", &["eps_root"], 0.0);
/// How fast the parameter decays.
const WEIGHT_DECAY: HyperName = ("weight_decay", &["weight_decay"], 0.0);
/// The moving mean of gradients.
const FIRST_MOMENT: State =
    State { after: "exp_avg", before: "exp_avg_before", recorded: &["exp_avg", "mu", "m"] };
/// The moving mean of squared gradients.
const SECOND_MOMENT: State = State {
    after: "exp_avg_sq",
    before: "exp_avg_sq_before",
    recorded: &["exp_avg_sq", "nu", "v"],
};

impl Rule {
    /// The same for a parameter of this shape, stored in this format, whose state has rows and
    /// columns or has not; or why it is none of such a parameter.
    pub(crate) fn of_parameter(
        self,
        shape: &[u64],
        stored: Option<Precision>,
        is_factored: bool,
    ) -> Result<Rule, String> {
        match self {
            Rule::Adafactor(rule) => {
                rule.of_parameter(shape, stored, is_factored).map(Rule::Adafactor)
            }
            Rule::Muon(rule) => rule.of_parameter(shape).map(Rule::Muon),
            other => Ok(other),
        }
    }

    /// What a second step takes over from a first one: its inputs, and the stages that they were.
    fn again(&self) -> Vec<(&'static str, &'static str)> {
        let states = self.names().states.iter().map(|state| (state.before, state.after));
        states.chain([("before", "after")]).collect()
    }

    /// Other forms of the rule that are right too.
    pub(crate) fn forms(&self) -> Vec<Rule> {
        match self {
            Rule::Adam(rule) => rule.forms().into_iter().map(Rule::Adam).collect(),
            Rule::Lamb(rule) => rule.forms().into_iter().map(Rule::Lamb).collect(),
            _ => Vec::new(),
        }
    }

    /// Whether the parameter decays after it moved.
    pub(crate) fn decays_late(&self) -> bool {
        matches!(self, Rule::Adam(rule) if rule.descent.decoupled && rule.descent.late)
    }

    /// Whether it takes a norm or a matrix of the whole parameter.
    pub(crate) fn takes_wholes(&self) -> bool {
        !self.names().wholes.is_empty()
    }
}

/// Switches that say how an optimizer is computed, and change nothing of its formula.
const OF_COMPUTING: [&str; 4] = ["capturable", "differentiable", "foreach", "fused"];

impl Names {
    /// A switch that is on and that the rule does not know.
    pub(crate) fn other_switch<'h>(&self, hyper: &'h Hyper) -> Option<&'h str> {
        let is_known = |name: &str| OF_COMPUTING.contains(&name) || self.switches.contains(&name);
        let is_other = |(name, value): &(&String, &serde_json::Value)| {
            **value == serde_json::Value::Bool(true) && !is_known(name)
        };
        hyper.0.iter().find(is_other).map(|(name, _)| name.as_str())
    }

    /// A declared hyper-parameter, by its name in the table; NaN where neither the job nor all
    /// frameworks alike say it.
    pub(crate) fn number(&self, hyper: &Hyper, name: &str) -> f64 {
        let row = self.hyper.iter().find(|(own, ..)| *own == name);
        let declared = |(_, declared, default): &HyperName| {
            declared.iter().find_map(|own| hyper.number(own)).unwrap_or(*default)
        };
        row.map_or(f64::NAN, declared)
    }
}

/// The inputs of a table that were made of a whole parameter, with their variances.
fn computed(names: &Names, tensors: &Tensors<'_>) -> BTreeMap<&'static str, Expected> {
    let mut computed = BTreeMap::new();
    for (name, variance) in names.wholes {
        let (Some(values), Some(variance)) = (tensors.get(name), tensors.get(variance)) else {
            continue;
        };
        let all = |recorded: &Recorded<'_>| recorded.values.to_f64();
        let (values, own) = (all(values), all(variance));
        let row = vec![0.0; values.len()];
        computed.insert(*name, Expected { values, own, row, shared: Vec::new() });
    }
    computed
}

macro_rules! rules {
    ($($rule:ident in $module:ident,)*) => {
        /// The rule of an optimizer, with its switches.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // Each has a file.
        pub(crate) enum Rule { $($rule($module::$rule),)* Formula(formula::Formula) }

        impl Rule {
            /// The rule of an optimizer's group that takes its `step`-th step; `None` for an
            /// optimizer that no rule is known of.
            pub(crate) fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Rule> {
                None$(.or_else(|| $module::$rule::of(optimizer, hyper, step).map(Rule::$rule)))*
            }

            /// The optimizers of which a rule is known.
            pub(crate) fn known() -> Vec<&'static str> {
                [$($module::CLASSES,)*].concat()
            }

            /// Every known rule: how frameworks call its tensors, and its optimizers.
            #[cfg(test)]
            pub(crate) fn list() -> Vec<(&'static Names, &'static [&'static str])> {
                vec![$((&$module::NAMES, $module::CLASSES),)*]
            }

            /// Whether a tensor of this name is the state of some rule, and not of what stands
            /// around it, as a sum of gradients over several steps.
            pub(crate) fn is_state(name: &str) -> bool {
                let mut states = std::iter::empty()$(.chain($module::NAMES.states))*;
                states.any(|state| state.recorded.contains(&name))
            }

            /// What the tables call a tensor of this name; `None` for the state of no rule.
            pub(crate) fn state_of(name: &str) -> Option<&'static str> {
                let mut states = std::iter::empty()$(.chain($module::NAMES.states))*;
                let state = states.find(|state| state.recorded.contains(&name))?;
                Some(state.after)
            }

            /// How frameworks call its tensors and hyper-parameters.
            pub(crate) fn names(&self) -> &'static Names {
                match self {
                    $(Rule::$rule(_) => &$module::NAMES,)*
                    Rule::Formula(formula) => formula.names(),
                }
            }

            /// How it may have been implemented wrongly.
            pub(crate) fn variations(&self) -> Vec<Variation> {
                match self {
                    $(Rule::$rule(rule) => rule.variations(),)*
                    Rule::Formula(formula) => formula.variations(),
                }
            }

            /// Compares its stages with what was recorded of them.
            #[cfg(test)]
            pub(crate) fn tallies(
                &self,
                operands: &[Operand<'_>],
                declared: &Declared,
                span: Span,
            ) -> Vec<Compared> {
                let columns = operands.iter().map(|operand| operand.values.len()).max();
                let columns = columns.unwrap_or(0);
                let tensors = operands.iter().map(|operand| operand.recorded(columns)).collect();
                let compared = match self {
                    $(Rule::$rule(rule) => tallies(rule, &tensors, declared, span),)*
                    Rule::Formula(rule) => tallies(rule, &tensors, declared, span),
                };
                compared.into_iter().map(|(stage, tally)| (stage.name, tally)).collect()
            }

            /// The same by numbers that carry their errors, one element after the other.
            #[cfg(test)]
            pub(crate) fn tallies_by_numbers(
                &self,
                operands: &[Operand<'_>],
                declared: &Declared,
                span: Span,
            ) -> Vec<Compared> {
                let columns = operands.iter().map(|operand| operand.values.len()).max();
                let columns = columns.unwrap_or(0);
                let tensors = operands.iter().map(|operand| operand.recorded(columns)).collect();
                let compared = match self {
                    $(Rule::$rule(rule) => tallies_by_numbers(rule, &tensors, declared, span),)*
                    Rule::Formula(rule) => tallies_by_numbers(rule, &tensors, declared, span),
                };
                compared.into_iter().map(|(stage, tally)| (stage.name, tally)).collect()
            }

            /// The same of a step that was applied twice, the first time by the rule `first`.
            #[cfg(test)]
            pub(crate) fn tallies_after(
                &self,
                first: &Rule,
                operands: &[Operand<'_>],
                declared: &Declared,
                span: Span,
            ) -> Vec<Compared> {
                let columns = operands.iter().map(|operand| operand.values.len()).max();
                let columns = columns.unwrap_or(0);
                let tensors = operands.iter().map(|operand| operand.recorded(columns)).collect();
                let again = self.again();
                let compared = match (first, self) {
                    $((Rule::$rule(first), Rule::$rule(rule)) => {
                        tallies_of_two([first, rule], &again, &tensors, declared, span)
                    })*
                    (Rule::Formula(first), Rule::Formula(rule)) => {
                        tallies_of_two([first, rule], &again, &tensors, declared, span)
                    }
                    _ => panic!("the two steps are of two rules"),
                };
                compared.into_iter().map(|(stage, tally)| (stage.name, tally)).collect()
            }

            /// Compares its stages over a box.
            pub(crate) fn compare<'o>(
                &self,
                judge: &Judge<'_>,
                declared: &Declared,
                place: &IndexBox,
                operands: &(dyn Fn(&IndexBox) -> Result<Vec<Operand<'o>>, String> + Sync),
            ) -> Result<Vec<Compared>, String> {
                match self {
                    $(Rule::$rule(rule) => {
                        let names = &$module::NAMES;
                        if names.wholes.is_empty() {
                            return judge.compare(rule, declared, place, operands);
                        }
                        judge.compare_by(place, operands, &|tensors, span| {
                            let computed = computed(names, tensors);
                            tallies_from(rule, computed, tensors, declared, span)
                        })
                    })*
                    Rule::Formula(rule) => judge.compare(rule, declared, place, operands),
                }
            }

            /// The same of a step that was applied twice, the first time by the rule `first`, which is the
            /// same with another count of steps.
            pub(crate) fn compare_after<'o>(
                &self,
                first: &Rule,
                judge: &Judge<'_>,
                declared: &Declared,
                place: &IndexBox,
                operands: &(dyn Fn(&IndexBox) -> Result<Vec<Operand<'o>>, String> + Sync),
            ) -> Result<Vec<Compared>, String> {
                let again = self.again();
                match (first, self) {
                    $((Rule::$rule(first), Rule::$rule(rule)) => {
                        judge.compare_by(place, operands, &|tensors, span| {
                            tallies_of_two([first, rule], &again, tensors, declared, span)
                        })
                    })*
                    (Rule::Formula(first), Rule::Formula(rule)) => {
                        judge.compare_by(place, operands, &|tensors, span| {
                            tallies_of_two([first, rule], &again, tensors, declared, span)
                        })
                    }
                    _ => Err("the two steps are of two rules".into()),
                }
            }

            /// A stage that it gives, in f64: `update` is the change of the parameter.
            pub(crate) fn stage(
                &self,
                operands: &[Operand<'_>],
                declared: &Declared,
                stage: &str,
            ) -> Result<Vec<f64>, String> {
                let columns = operands.iter().map(|operand| operand.values.len()).max();
                let own = operands.iter().filter(|operand| operand.name != "update");
                let tensors = own.map(|operand| operand.recorded(columns.unwrap_or(0))).collect();
                match self {
                    $(Rule::$rule(rule) => values(rule, &tensors, declared, stage),)*
                    Rule::Formula(rule) => values(rule, &tensors, declared, stage),
                }
            }
        }
    };
}

rules! {
    Adafactor in adafactor,
    Adagrad in adagrad,
    Adam in adam,
    Adamax in adamax,
    Lamb in lamb,
    Lion in lion,
    Muon in muon,
    Nadam in nadam,
    Radam in radam,
    Rmsprop in rmsprop,
    Sgd in sgd,
}
