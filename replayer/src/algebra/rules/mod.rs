//! The rules of optimizers, as tables of `ops`: one file each, and this list.
//!
//! A rule's table names the gradient `grad`, the parameter `before` and `after`, its change
//! `update`, each tensor of the state by one name (with `_before` for its value before the step),
//! and the hyper-parameters. Nothing here is taken from a framework's code: references and the
//! frameworks that they judge share the published formula alone.
//!
//! A table has stages that are computed element by element. Rules that take a norm or a product of
//! a whole matrix (LAMB, Adafactor, Muon) are no such tables, and are not known here: the steps of
//! these optimizers are unchecked.

pub(crate) mod adagrad;
pub(crate) mod adam;
pub(crate) mod adamax;
mod formulas;
pub(crate) mod lion;
pub(crate) mod nadam;
pub(crate) mod radam;
pub(crate) mod rmsprop;
pub(crate) mod sgd;
#[cfg(test)]
mod tests;
mod variation;

use backtape::index_box::IndexBox;

use super::declaration::{Hyper, Optimizer};
use super::judge::{Compared, Judge, Operand};
use crate::ops::{Declared, values};
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
    /// Tensors of the state.
    pub states: &'static [State],
    /// Hyper-parameters: the name in the table, those that are declared, and the value where none
    /// is.
    pub hyper: &'static [(&'static str, &'static [&'static str], f64)],
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

impl Names {
    /// A declared hyper-parameter, by its name in the table; NaN where neither the job nor all
    /// frameworks alike say it.
    pub(crate) fn number(&self, hyper: &Hyper, name: &str) -> f64 {
        let row = self.hyper.iter().find(|(own, ..)| *own == name);
        let declared = |(_, declared, default): &(_, &[&str], f64)| {
            declared.iter().find_map(|own| hyper.number(own)).unwrap_or(*default)
        };
        row.map_or(f64::NAN, declared)
    }
}

macro_rules! rules {
    ($($rule:ident in $module:ident,)*) => {
        /// The rule of an optimizer, with its switches.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // Each has a file.
        pub(crate) enum Rule { $($rule($module::$rule),)* }

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
                match self { $(Rule::$rule(_) => &$module::NAMES,)* }
            }

            /// How it may have been implemented wrongly.
            pub(crate) fn variations(&self) -> Vec<Variation> {
                match self { $(Rule::$rule(rule) => rule.variations(),)* }
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
                    $(Rule::$rule(rule) => judge.compare(rule, declared, place, operands),)*
                }
            }

            /// The change of the parameter that it gives, in f64.
            pub(crate) fn change(
                &self,
                operands: &[Operand<'_>],
                declared: &Declared,
            ) -> Result<Vec<f64>, String> {
                let columns = operands.iter().map(|operand| operand.values.len()).max();
                let own = operands.iter().filter(|operand| operand.name != "update");
                let tensors = own.map(|operand| operand.recorded(columns.unwrap_or(0))).collect();
                match self { $(Rule::$rule(rule) => values(rule, &tensors, declared, "update"),)* }
            }
        }
    };
}

rules! {
    Adagrad in adagrad,
    Adam in adam,
    Adamax in adamax,
    Lion in lion,
    Nadam in nadam,
    Radam in radam,
    Rmsprop in rmsprop,
    Sgd in sgd,
}
