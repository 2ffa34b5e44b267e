//! How the values of options are written: in Python for messages, and in JSON, which has no
//! infinities.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::path::{DeclaredTiles, PolicyDeclaration};
use super::values::*;
use super::{GrpoDeclaration, Span};

/// A value in the syntax of a call of `tape.head`.
pub(super) trait InPython {
    /// `None`, `True`, `0.5`, `"mean"`, `{"ranks": "one"}`.
    fn in_python(&self) -> String;
}

impl<T: InPython> InPython for Option<T> {
    fn in_python(&self) -> String {
        self.as_ref().map_or_else(|| "None".into(), T::in_python)
    }
}

impl InPython for bool {
    fn in_python(&self) -> String {
        if *self { "True".into() } else { "False".into() }
    }
}

impl InPython for f64 {
    fn in_python(&self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Implements [`InPython`] for types that JSON and Python write alike.
macro_rules! as_in_json {
    ($($type:ty),*) => {
        $(impl InPython for $type {
            fn in_python(&self) -> String {
                serde_json::to_string(self).unwrap_or_default()
            }
        })*
    };
}

as_in_json!(
    String, u32, u64, i64, Loss, LossReduction, Denominator, Span, MicrobatchReduction, KLayout,
    SmoothingFormula, KlEstimator, RatioLevel, LossAverage, DeclaredTiles, PolicyDeclaration,
    GrpoDeclaration, std::collections::BTreeMap<String, String>
);

/// A number that may be infinite, as most jobs' value for masked logits is. It is written as text,
/// because serde_json would write `null`, which means no mask.
pub(super) mod infinite {
    use super::*;
    use crate::head::values::NumberOrText as Written;

    pub(in crate::head) fn serialize<S: Serializer>(
        value: &Option<f64>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let written = value.map(|number| match number.is_infinite() {
            true => Written::Text(number.to_string()),
            false => Written::Number(number),
        });
        written.serialize(to)
    }

    pub(in crate::head) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<f64>, D::Error> {
        let number = |text: String| match text.as_str() {
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            _ => Err(de::Error::custom(format!("mask_value={text:?} is not a number"))),
        };
        match Option::<Written>::deserialize(from)? {
            None => Ok(None),
            Some(Written::Number(value)) => Ok(Some(value)),
            Some(Written::Text(text)) => number(text).map(Some),
        }
    }
}
