//! The rules of optimizers, as tables of `ops`: one file each, and this list.
//!
//! A rule's table names the gradient `grad`, the parameter `before` and `after`, its change
//! `update`, each tensor of the state by one name (with `_before` for its value before the step),
//! and the hyper-parameters. Nothing here is taken from a framework's code: references and the
//! frameworks that they judge share the published formula alone.

pub mod adam;
pub mod sgd;

use backtape::index_box::IndexBox;

use super::declaration::{Hyper, Optimizer};
use super::judge::{Compared, Judge, Operand};
use crate::ops::{Declared, values};

/// How frameworks call what a rule's table names.
pub struct Names {
    /// Tensors of the state.
    pub states: &'static [State],
    /// Hyper-parameters: the name in the table, those that are declared, and the value where none
    /// is.
    pub hyper: &'static [(&'static str, &'static [&'static str], f64)],
}

/// A tensor of an optimizer's state.
pub struct State {
    /// After the step, in the table.
    pub after: &'static str,
    /// Before the step, in the table.
    pub before: &'static str,
    /// As frameworks call it.
    pub recorded: &'static [&'static str],
}

/// A rule that was changed as a faulty optimizer might be.
pub struct Variation {
    /// The cause's name in docs/causes.md.
    pub cause: &'static str,
    /// What is supposed, in words.
    pub words: String,
    /// What to look at.
    pub look: &'static str,
    /// The rule.
    pub rule: Rule,
}

macro_rules! rules {
    ($($rule:ident in $module:ident,)*) => {
        /// The rule of an optimizer, with its switches.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // Each has a file.
        pub enum Rule { $($rule($module::$rule),)* }

        impl Rule {
            /// The rule of an optimizer's group that takes its `step`-th step; `None` for an
            /// optimizer that no rule is known of.
            pub fn of(optimizer: &Optimizer, hyper: &Hyper, step: f64) -> Option<Rule> {
                None$(.or_else(|| $module::$rule::of(optimizer, hyper, step).map(Rule::$rule)))*
            }

            /// The optimizers of which a rule is known.
            pub fn known() -> Vec<&'static str> {
                [$($module::CLASSES,)*].concat()
            }

            /// How frameworks call its tensors and hyper-parameters.
            pub fn names(&self) -> &'static Names {
                match self { $(Rule::$rule(_) => &$module::NAMES,)* }
            }

            /// How it may have been implemented wrongly.
            pub fn variations(&self) -> Vec<Variation> {
                match self { $(Rule::$rule(rule) => rule.variations(),)* }
            }

            /// Compares its stages over a box.
            pub fn compare(
                &self,
                judge: &Judge<'_>,
                declared: &Declared,
                place: &IndexBox,
                operands: &(dyn Fn(&IndexBox) -> Result<Vec<Operand>, String> + Sync),
            ) -> Result<Vec<Compared>, String> {
                match self { $(Rule::$rule(rule) => judge.compare(rule, declared, place, operands),)* }
            }

            /// The change of the parameter that it gives, in f64.
            pub fn change(
                &self,
                operands: &[Operand],
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
    Adam in adam,
    Sgd in sgd,
}
