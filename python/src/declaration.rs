//! `tape.head(...)`: its keyword arguments become the declaration of the head.
//!
//! A misspelt option or value refuses the whole declaration. If only that option were dropped, its
//! default would take its place, and a head that the job never declared is worse than none: the
//! replay would blame the job for the difference.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::head::{GRPO_OPTIONS, HeadDeclaration, HeadOption, OPTIONS};
use backtape_replayer::head::HeadOptions;
use backtape_replayer::spelling::hint;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The one option that may be infinite, as masked logits often are.
const MASK_VALUE: &str = "mask_value";

/// The option that is a dict of options.
const GRPO: &str = "grpo";

/// Reads the keyword arguments of `tape.head`; an error names the option. `sources` says where each
/// item is from, `by_hand` is what was declared of options that were found otherwise, and `batches`
/// the batch that each microbatch is of, where several are of one.
pub(crate) fn read(
    options: &Bound<'_, PyDict>,
    sources: BTreeMap<String, String>,
    by_hand: &Bound<'_, PyDict>,
    batches: Vec<u32>,
) -> PyResult<HeadDeclaration> {
    let mut declaration = options_of(options)?;
    // A declaration that no replay could use is refused here, while somebody can still correct it.
    HeadOptions::new(&declaration).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let unknown = |error: serde_json::Error| PyValueError::new_err(format!("head: {error}"));
    for (item, source) in sources {
        let source = serde_json::from_value(Value::String(source)).map_err(unknown)?;
        declaration.sources.insert(item, source);
    }
    // Read as a declaration of its own, so that a wrong option or value is refused.
    let own = serde_json::to_value(options_of(by_hand)?).map_err(unknown)?;
    for name in by_hand.keys() {
        let name: String = name.extract()?;
        let value = own.get(&name).cloned().unwrap_or_default();
        declaration.by_hand.insert(name, value);
    }
    declaration.batches = batches;
    Ok(declaration)
}

/// The options of a declaration, each checked by itself.
fn options_of(options: &Bound<'_, PyDict>) -> PyResult<HeadDeclaration> {
    let mut all = Map::new();
    let mut masked_by_infinity = false;
    for (name, value) in options {
        let name: String = name.extract()?;
        let Some(option) = OPTIONS.iter().find(|option| option.name == name) else {
            return Err(unknown_option("", &name, OPTIONS.iter().map(|option| option.name)));
        };
        if name == MASK_VALUE && value.extract::<f64>().is_ok_and(|x| x == f64::NEG_INFINITY) {
            masked_by_infinity = true;
            continue;
        }
        let mut json = to_json(&name, &value)?;
        if name == "autocast" {
            by_its_own_name(&mut json);
        }
        alone("", option, &json, &value)?;
        all.insert(name, json);
    }
    let mut declaration: HeadDeclaration = serde_json::from_value(Value::Object(all))
        .map_err(|error| PyValueError::new_err(format!("head: {error}")))?;
    if masked_by_infinity {
        declaration.mask_value = Some(f64::NEG_INFINITY);
    }
    Ok(declaration)
}

/// Reads one option without the others, so that the error can say which option it is about. `prefix`
/// is as in [`unknown_option`].
fn alone<Of: Default + DeserializeOwned>(
    prefix: &str,
    option: &HeadOption<Of>,
    json: &Value,
    value: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let single = Map::from_iter([(option.name.to_string(), json.clone())]);
    let Err(error) = serde_json::from_value::<Of>(Value::Object(single)) else { return Ok(()) };
    let wanted = match option.words() {
        words if words.is_empty() => unfit(error.to_string(), option),
        words => format!("choose one of {}", words.join(", ")),
    };
    let (name, value) = (option.name, repr(value));
    Err(PyValueError::new_err(format!("head({prefix}{name}={value}): {wanted}")))
}

/// The end of the message about a value that does not fit: the type that is needed, or the words or
/// keys that exist.
fn unfit<Of>(error: String, option: &HeadOption<Of>) -> String {
    if error.starts_with("invalid type") || error.starts_with("invalid value") {
        return format!("{} is needed: {}", option.python, option.meaning);
    }
    let unknown = [("unknown field ", "key"), ("unknown variant ", "word")];
    let unknown_name =
        unknown.iter().find_map(|(start, kind)| Some((error.strip_prefix(start)?, kind)));
    let Some((names, kind)) = unknown_name else { return error };
    // serde names what it found and then what there is, each in backquotes.
    let mut names = names.split('`').skip(1).step_by(2);
    let (given, known) = (names.next().unwrap_or_default(), names.collect::<Vec<_>>());
    let (meant, all) = (hint(given, known.clone()), known.join(", "));
    format!("the {kind} {given:?} is not known{meant}; choose one of {all}")
}

/// A value as Python shows it.
fn repr(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "...".into(), |text| text.to_string())
}

/// An option of `tape.head`: its name, its type in Python, its default as it is written, its
/// meaning, and what a value must be where the type does not say all.
type OptionText = (&'static str, &'static str, String, &'static str, &'static str);

/// Every option of `tape.head`, and every option of a policy loss: the docs are made from these.
#[pyfunction]
pub(crate) fn head_options() -> (Vec<OptionText>, Vec<OptionText>) {
    fn option_text<Of: Default>(option: &HeadOption<Of>) -> OptionText {
        (option.name, option.python, option.default(), option.meaning, option.wanted)
    }
    (OPTIONS.iter().map(option_text).collect(), GRPO_OPTIONS.iter().map(option_text).collect())
}

/// The exception for an option that there is not. `prefix` is the option in whose dict it was
/// found, with a dot after it; empty for an argument of `tape.head` itself.
fn unknown_option(prefix: &str, name: &str, known: impl Iterator<Item = &'static str>) -> PyErr {
    let all: Vec<&str> = known.collect();
    let meant = hint(name, all.iter().copied());
    let rest = if meant.is_empty() { format!(": there are {}", all.join(", ")) } else { meant };
    PyTypeError::new_err(format!("head({prefix}{name}=...): there is no such option{rest}"))
}

/// A Python value as JSON. `tape.py` has turned numpy's scalars into Python's own before.
fn to_json(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if value.is_instance_of::<PyBool>() {
        return Ok(Value::Bool(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() {
        return Ok(value.extract::<i64>()?.into());
    }
    if value.is_instance_of::<PyFloat>() {
        let number: f64 = value.extract()?;
        let finite = serde_json::Number::from_f64(number);
        let error = || PyValueError::new_err(format!("head({name}={number}): it must be finite"));
        return finite.map(Value::Number).ok_or_else(error);
    }
    if value.is_instance_of::<PyString>() {
        return Ok(value.extract::<String>()?.into());
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        return dict_to_json(name, dict);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?.map(|item| to_json(name, &item?));
        return Ok(Value::Array(items.collect::<PyResult<_>>()?));
    }
    let type_name = value.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "head({name}=...): a {type_name} is neither text, number, truth value nor dict"
    )))
}

/// An empty dict declares nothing; dtype names may be numpy's.
fn dict_to_json(name: &str, dict: &Bound<'_, PyDict>) -> PyResult<Value> {
    if dict.is_empty() && name == "tiles" {
        return Ok(Value::Null);
    }
    let mut object = Map::new();
    for (key, value) in dict {
        let mut json = to_json(&format!("{name}.{key}"), &value)?;
        if name == "dtypes" {
            by_its_own_name(&mut json);
        }
        let key: String = key.extract()?;
        if name == GRPO {
            match GRPO_OPTIONS.iter().find(|option| option.name == key) {
                Some(option) => alone("grpo.", option, &json, &value)?,
                None => {
                    let known = GRPO_OPTIONS.iter().map(|option| option.name);
                    return Err(unknown_option("grpo.", &key, known));
                }
            }
        }
        object.insert(key, json);
    }
    Ok(Value::Object(object))
}

/// Replaces a dtype's name in numpy, torch or jax by backtape's own name for it.
fn by_its_own_name(json: &mut Value) {
    if let Value::String(text) = json
        && let Some(dtype) = Dtype::from_numpy(text)
    {
        *json = dtype.name().into();
    }
}
