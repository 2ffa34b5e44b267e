//! What a rank declares of its step: the JSON of `step.declared:RANK` (docs/step-format.md).

use std::collections::BTreeMap;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::squares::Squares;

/// The version of the declaration that this replay reads.
pub(crate) const VERSION: u32 = 1;

/// What a rank declares of its step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Declaration {
    /// Of the declaration's own form.
    pub version: u32,
    /// The framework and its version.
    #[serde(default)]
    pub framework: String,
    /// What becomes of the gradients of microbatches; `None` where the job has not said it.
    #[serde(default)]
    pub accumulation: Option<ReduceOp>,
    /// Backward passes that the rank ran in the step; `None` where it does not know.
    #[serde(default)]
    pub microbatches: Option<u32>,
    /// What the loss was multiplied by.
    #[serde(default, deserialize_with = "number")]
    pub loss_scale: Option<f64>,
    /// What a GradScaler multiplied the loss by, where it did not take it out again.
    #[serde(default, deserialize_with = "number")]
    pub scaled_loss: Option<f64>,
    /// The optimizer's step was left out.
    #[serde(default)]
    pub skipped: bool,
    /// The norms that the job computed.
    #[serde(default)]
    pub norms: Vec<Norm>,
    /// The bound of clipping by value.
    #[serde(default, deserialize_with = "number")]
    pub clip_value: Option<f64>,
    /// By the name of the parameter.
    #[serde(default)]
    pub parameters: BTreeMap<String, ParameterDeclaration>,
    /// Their names in the order of the declaration, which is that of the model.
    #[serde(skip)]
    pub order: Vec<String>,
    /// In the order in which parameters name them.
    #[serde(default)]
    pub optimizers: Vec<Optimizer>,
    /// Of gradients that are not recorded whole, by the name of the parameter.
    #[serde(default)]
    pub squares: BTreeMap<String, Squares>,
}

/// A number, or one that is not finite as the word that JSON has for it here.
pub(super) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(number_of(&Value::deserialize(from)?))
}

pub(super) fn number_of(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("inf") => Some(f64::INFINITY),
        Some("-inf") => Some(f64::NEG_INFINITY),
        Some("nan") => Some(f64::NAN),
        _ => value.as_f64(),
    }
}

/// A norm that the job computed.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Norm {
    /// As the job had it.
    #[serde(default, deserialize_with = "number")]
    pub value: Option<f64>,
    /// The p of a p-norm, or `inf`.
    #[serde(default)]
    pub kind: Value,
    /// What the gradient was clipped to.
    #[serde(default, deserialize_with = "number")]
    pub max_norm: Option<f64>,
    /// Added to the norm before it divides.
    #[serde(default, deserialize_with = "number")]
    pub epsilon: Option<f64>,
    /// This rank's share of a norm that nobody brought together.
    #[serde(default, deserialize_with = "number")]
    pub local: Option<f64>,
    /// Gradients in it that are of no parameter of the models.
    #[serde(default)]
    pub others: usize,
    /// The part of the parameters that was normed.
    #[serde(default)]
    pub of: Option<String>,
    /// The parameters, as far as this rank knows them.
    #[serde(default)]
    pub parameters: Vec<String>,
    /// The job gave no gradient to the function that computed it.
    #[serde(default)]
    pub of_nothing: bool,
    /// It was computed after the only step of the optimizer.
    #[serde(default)]
    pub after_step: bool,
}

impl Norm {
    /// Whether a parameter is part of it.
    pub(crate) fn is_of(&self, parameter: &str) -> bool {
        (self.parameters.is_empty() && !self.of_nothing)
            || self.parameters.iter().any(|name| name == parameter)
    }

    /// What gradients are clipped to by it, if they are.
    pub(crate) fn limit(&self) -> Option<Limit> {
        let epsilon = self.epsilon.unwrap_or(1e-6);
        let of_clipped = self.of.as_deref() == Some("clipped");
        Some(Limit { norm: self.value?, max_norm: self.max_norm?, epsilon, of_clipped })
    }

    /// The p of the norm; infinite for the largest element.
    pub(crate) fn power(&self) -> Option<f64> {
        match &self.kind {
            Value::Null => Some(2.0),
            other => number_of(other),
        }
    }
}

/// What a gradient is clipped to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limit {
    /// The norm that the job computed.
    pub norm: f64,
    /// The norm that is allowed.
    pub max_norm: f64,
    /// Added to the norm before it divides.
    pub epsilon: f64,
    /// Whether the gradient was clipped before, by a value or another norm.
    pub of_clipped: bool,
}

impl Limit {
    /// What the gradient is multiplied by where it is below 1.
    pub(crate) fn coefficient(&self) -> f64 {
        self.max_norm / (self.norm + self.epsilon)
    }
}

/// What a rank declares of a parameter.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct ParameterDeclaration {
    /// Which optimizer updates it.
    #[serde(default)]
    pub optimizer: Option<usize>,
    /// Which of the optimizer's groups it is in.
    #[serde(default)]
    pub group: Option<usize>,
    /// Whether a gradient is computed for it.
    #[serde(default)]
    pub trainable: Option<bool>,
    /// How its gradient is brought together over ranks, in order.
    #[serde(default)]
    pub reduce: Vec<Reduce>,
    /// The parameter whose tensor this name shares.
    #[serde(default)]
    pub same_as: Option<String>,
    /// The first backward pass whose gradient is for the update that was recorded.
    #[serde(default)]
    pub first_pass: u32,
    /// What the loss was multiplied by for its gradient, where that is not the step's loss scale.
    #[serde(default, deserialize_with = "number")]
    pub loss_scale: Option<f64>,
    /// What code of the job's own multiplied its gradient by, after the last backward pass and before
    /// the reduced gradient was recorded; 1 where it is known not to have.
    #[serde(default, deserialize_with = "number")]
    pub multiplied_by: Option<f64>,
    /// What its gradient is clipped to by value, where that is not the same for all.
    #[serde(default, deserialize_with = "number")]
    pub clip_value: Option<f64>,
    /// When its value changed though no optimizer stepped it.
    #[serde(default)]
    pub moved: Option<Moved>,
    /// Other optimizers that hold it, where no gradient came between their steps.
    #[serde(default)]
    pub also_in: Vec<usize>,
    /// Numbers of the optimizer's state, before and after.
    #[serde(default)]
    pub scalars: BTreeMap<String, (Value, Value)>,
    /// Why a part of it is not recorded.
    #[serde(default)]
    pub absent: BTreeMap<String, String>,
}

/// When the value of a parameter changed by something else than its optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum Moved {
    /// Between two backward passes whose gradients are summed.
    #[serde(rename = "between passes")]
    BetweenPasses,
    /// Between the first forward pass and the optimizer's step.
    #[serde(rename = "before the step")]
    BeforeStep,
}

/// One communication of a gradient.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Reduce {
    /// The mesh axis, or the name of the group.
    pub axis: String,
    /// What becomes of the addends.
    pub op: ReduceOp,
    /// The ranks that take part.
    pub ranks: Vec<u32>,
    /// What is sent.
    #[serde(default)]
    pub dtype: Option<String>,
    /// What a sum is divided by, where that is not the number of ranks.
    #[serde(default, deserialize_with = "number")]
    pub divisor: Option<f64>,
    /// A function of the job that takes the place of the communication.
    #[serde(default)]
    pub hook: Option<String>,
    /// How many addends there are, where that is not the number of ranks.
    #[serde(default)]
    pub addends: Option<usize>,
}

impl Reduce {
    /// How many addends are brought together.
    pub(crate) fn size(&self) -> usize {
        self.addends.unwrap_or(self.ranks.len())
    }
}

/// What a reduction makes of its addends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
}

/// An optimizer of the job.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Optimizer {
    /// Its class; `None` where the job has not said it.
    #[serde(default)]
    pub name: Option<String>,
    /// Where the class comes from.
    #[serde(default)]
    pub(crate) module: String,
    /// The rule that the job declares for it: the name of a known one, or formulas.
    #[serde(default)]
    pub rule: Option<Value>,
    /// Its step was left out.
    #[serde(default)]
    pub skipped: bool,
    /// How often it was called to step; `None` where the job has not said it.
    #[serde(default)]
    pub steps: Option<u32>,
    /// It stepped once more, and no backward pass came between.
    #[serde(default)]
    pub again: bool,
    /// The hyper-parameters of each group.
    #[serde(default)]
    pub groups: Vec<Hyper>,
    /// Tensors in its groups that are no parameter of the models.
    #[serde(default)]
    pub foreign: Vec<Foreign>,
}

impl Optimizer {
    /// Whether the job has called it to step.
    pub(crate) fn has_stepped(&self) -> bool {
        self.steps.is_some_and(|steps| steps > 0)
    }

    /// The class by whose rule it is judged.
    pub(crate) fn class(&self) -> Option<&str> {
        let declared = self.rule.as_ref().and_then(Value::as_str);
        declared.or(self.name.as_deref())
    }

    /// Whether it is a class of this module, or is declared to be as one.
    pub(crate) fn is_of(&self, module: &str) -> bool {
        self.rule.as_ref().is_some_and(Value::is_string) || self.module.starts_with(module)
    }

    /// The formula that a group declares; or why it has none. `None` where it declares none.
    pub(crate) fn formula(&self, group: usize) -> Option<Result<&Value, String>> {
        let rule = self.rule.as_ref().filter(|rule| !rule.is_string() && !rule.is_null())?;
        if let Some(why) = rule.get("absent").and_then(Value::as_str) {
            return Some(Err(why.to_string()));
        }
        let lacking = rule.get("lacking").and_then(|own| own.get(group.to_string())?.as_str());
        if let Some(why) = lacking {
            return Some(Err(why.to_string()));
        }
        let at = rule.get("groups").and_then(|groups| groups.get(group)?.as_u64());
        let found = at.and_then(|at| rule.get("formulas")?.get(at as usize));
        Some(found.ok_or_else(|| format!("it has no formula for group {group}")))
    }

    /// Whether a formula of it takes or changes a part of the state of this name.
    pub(crate) fn declares_state(&self, name: &str) -> bool {
        let formulas = self.rule.as_ref().and_then(|rule| rule.get("formulas")?.as_array());
        let has = |formula: &Value| formula.get("state").is_some_and(|own| own.get(name).is_some());
        formulas.is_some_and(|formulas| formulas.iter().any(has))
    }
}

/// A tensor that an optimizer steps, and that is no parameter of the models.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Foreign {
    /// Its shape.
    pub shape: Vec<u64>,
    /// Whether it has a gradient: a copy of more bits is given one.
    pub grad: bool,
}

/// The hyper-parameters of a group, by their names.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub(crate) struct Hyper(pub BTreeMap<String, Value>);

impl Hyper {
    /// A number; of a list, the entry at `name.INDEX`.
    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        if let Some(value) = self.0.get(name) {
            return number_of(value);
        }
        let (list, index) = name.rsplit_once('.')?;
        number_of(self.0.get(list)?.get(index.parse::<usize>().ok()?)?)
    }

    /// The name of a number, or of a list of numbers, that another group has otherwise.
    pub(crate) fn difference(&self, other: &Hyper) -> Option<&str> {
        let numbers = |hyper: &Hyper, name: &str| -> Option<Vec<f64>> {
            match hyper.0.get(name)? {
                Value::Array(list) => list.iter().map(number_of).collect(),
                value => number_of(value).map(|number| vec![number]),
            }
        };
        let is_other = |name: &&String| {
            let (own, other) = (numbers(self, name), numbers(other, name));
            own.is_some() && other.is_some() && own != other
        };
        self.0.keys().find(is_other).map(String::as_str)
    }

    /// Whether a switch is on; a number is on where it is not 0.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        match self.0.get(name) {
            Some(Value::Bool(on)) => *on,
            Some(Value::Number(number)) => number.as_f64() != Some(0.0),
            _ => false,
        }
    }
}

impl ParameterDeclaration {
    /// A number of the optimizer's state before its step.
    pub(crate) fn scalar_before(&self, name: &str) -> Option<f64> {
        number_of(&self.scalars.get(name)?.0)
    }

    /// A number of the optimizer's state after its step.
    pub(crate) fn scalar_after(&self, name: &str) -> Option<f64> {
        number_of(&self.scalars.get(name)?.1)
    }
}

/// The names of the parameters alone, in their order.
#[derive(Deserialize)]
struct Names {
    #[serde(default)]
    parameters: Keys,
}

/// The keys of a JSON object as they follow each other; a map would sort them.
#[derive(Default)]
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Keys, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Keys;

            fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some((key, _)) = map.next_entry::<String, IgnoredAny>()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        from.deserialize_map(Reader)
    }
}

impl Declaration {
    /// Reads the text of a declaration.
    pub(crate) fn read(text: &[u8]) -> Result<Declaration, String> {
        let wrong = |error: serde_json::Error| format!("it cannot be read: {error}");
        let mut declaration: Declaration = serde_json::from_slice(text).map_err(wrong)?;
        declaration.order = serde_json::from_slice::<Names>(text).map_err(wrong)?.parameters.0;
        if declaration.version != VERSION {
            return Err(format!(
                "it is of version {}, and this replay reads version {VERSION}: use the replay of \
                 the backtape that recorded it",
                declaration.version
            ));
        }
        Ok(declaration)
    }

    /// What the gradient of a parameter was clipped to, by the last norm that it is part of.
    pub(crate) fn limit_of(&self, parameter: &str) -> Option<Limit> {
        self.norm_of(parameter)?.limit()
    }

    /// Every norm that the gradient of a parameter was clipped to, in order.
    pub(crate) fn limits_of(&self, parameter: &str) -> Vec<Limit> {
        let own = self.norms.iter().filter(|norm| norm.is_of(parameter));
        own.filter_map(Norm::limit).collect()
    }

    /// The same where the norm was taken of the gradient with the loss scale in it.
    pub(crate) fn limit_with_scale(&self, parameter: &str) -> Option<Limit> {
        let is_scaled = self.scale_of(parameter).is_some_and(|scale| scale != 1.0);
        let norm = self.norm_of(parameter).filter(|_| is_scaled)?;
        norm.limit().filter(|_| norm.of.as_deref() == Some("reduced"))
    }

    /// What the loss was multiplied by for the gradient of a parameter: jobs with several scalers
    /// have several loss scales.
    pub(crate) fn scale_of(&self, parameter: &str) -> Option<f64> {
        let own = self.parameters.get(parameter).and_then(|own| own.loss_scale);
        own.or(self.loss_scale)
    }

    /// What the elements of a parameter's gradient are clipped to.
    pub(crate) fn clip_value_of(&self, parameter: &str) -> Option<f64> {
        let is_each = self.parameters.values().any(|own| own.clip_value.is_some());
        let of_all = self.clip_value.filter(|_| !is_each);
        self.parameters.get(parameter).and_then(|own| own.clip_value).or(of_all)
    }

    /// Every loss scale of the step.
    pub(crate) fn loss_scales(&self) -> Vec<f64> {
        let own = self.parameters.values().map(|own| own.loss_scale);
        own.chain([self.loss_scale]).flatten().collect()
    }

    /// The last norm that a parameter is part of and clipped by.
    fn norm_of(&self, parameter: &str) -> Option<&Norm> {
        self.norms.iter().rfind(|norm| norm.is_of(parameter) && norm.limit().is_some())
    }

    /// The group of the optimizer that a parameter is in.
    pub(crate) fn group_of(&self, parameter: &str) -> Option<usize> {
        self.parameters.get(parameter)?.group
    }

    /// The hyper-parameters of a parameter and the class of its optimizer.
    pub(crate) fn optimizer_of(&self, parameter: &str) -> Option<(&Optimizer, &Hyper)> {
        let declared = self.parameters.get(parameter)?;
        let optimizer = self.optimizers.get(declared.optimizer?)?;
        Some((optimizer, optimizer.groups.get(declared.group?)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declaration_of_the_docs_is_read_and_one_of_another_version_is_refused() {
        let page = include_str!("../../../docs/step-format.md");
        let (_, text) = page.split_once("    {\"version\"").expect("the page shows a declaration");
        let text = text.split_once("\n\n").expect("text follows it").0;
        let plain = |line: &str| line.split("//").next().unwrap_or_default().to_string();
        let text: String = text.lines().map(plain).collect();
        let declaration = Declaration::read(format!("{{\"version\"{text}").as_bytes()).unwrap();
        assert_eq!(declaration.microbatches, Some(2));
        assert_eq!(declaration.norms[0].power(), Some(2.0));
        let (optimizer, hyper) = (&declaration.optimizers[0], &declaration.optimizers[0].groups[0]);
        assert_eq!(optimizer.name.as_deref(), Some("AdamW"));
        assert_eq!(declaration.parameters["layers.0.weight"].scalar_after("step"), Some(7.0));
        assert_eq!((hyper.number("betas.1"), hyper.number("eps")), (Some(0.999), Some(1e-8)));
        assert_eq!(declaration.parameters["layers.0.weight"].reduce[0].op, ReduceOp::Mean);
        let squares = &declaration.squares["layers.0.weight"];
        assert_eq!((squares.reduced, squares.held.len()), (Some(15.3), 1));
        let refused = Declaration::read(br#"{"version": 2}"#).unwrap_err();
        assert!(refused.contains("version 2"), "{refused}");
        assert!(Declaration::read(b"no JSON").unwrap_err().contains("cannot be read"));
    }
}
