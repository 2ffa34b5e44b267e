//! `tape.head(...)`: keyword arguments to the head's declaration.
//!
//! A misspelt option or value refuses the whole declaration. Dropping only the
//! one option would leave a default in its place, and a head that the job never
//! declared is worse than none: the replay would blame the job for it.

use backtape::dtype::Dtype;
use backtape::head::HeadDeclaration;
use backtape_replayer::head::HeadOptions;
use backtape_replayer::spelling::hint;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::{Map, Value};

/// The one option that may be infinite: masked logits often are.
const MASK_VALUE: &str = "mask_value";

/// Reads the keyword arguments of `tape.head`; an error names the option.
pub(crate) fn read(options: &Bound<'_, PyDict>) -> PyResult<HeadDeclaration> {
    let known = known_options()?;
    let mut all = Map::new();
    let mut masked_by_infinity = false;
    for (name, value) in options {
        let name: String = name.extract()?;
        if !known.contains_key(&name) {
            return Err(unknown_option(&name, &known));
        }
        if name == MASK_VALUE && value.extract::<f64>().is_ok_and(|x| x == f64::NEG_INFINITY) {
            masked_by_infinity = true;
            continue;
        }
        let mut json = to_json(&name, &value)?;
        if name == "autocast" {
            by_its_own_name(&mut json);
        }
        // Alone first, so that the error can say which option it is about.
        let alone = Map::from_iter([(name.clone(), json.clone())]);
        serde_json::from_value::<HeadDeclaration>(Value::Object(alone))
            .map_err(|error| PyValueError::new_err(format!("head({name}={value}): {error}")))?;
        all.insert(name, json);
    }
    let mut declaration: HeadDeclaration = serde_json::from_value(Value::Object(all))
        .map_err(|error| PyValueError::new_err(format!("head: {error}")))?;
    if masked_by_infinity {
        declaration.mask_value = Some(f64::NEG_INFINITY);
    }
    // What no replay could make use of is refused here, where somebody can still correct it.
    HeadOptions::new(&declaration)
        .map_err(|error| PyValueError::new_err(format!("head: {error}")))?;
    Ok(declaration)
}

/// Every option by its name, as a declaration is written.
fn known_options() -> PyResult<Map<String, Value>> {
    // An option that is written only where it is set is an option all the same.
    let all = HeadDeclaration { autocast: Some(String::new()), ..HeadDeclaration::default() };
    let written = serde_json::to_value(all);
    let written = written.map_err(|error| PyValueError::new_err(format!("head: {error}")))?;
    Ok(written.as_object().cloned().unwrap_or_default())
}

fn unknown_option(name: &str, known: &Map<String, Value>) -> PyErr {
    let meant = hint(name, known.keys().map(String::as_str));
    let all: Vec<&str> = known.keys().map(String::as_str).collect();
    let rest = if meant.is_empty() { format!(": there are {}", all.join(", ")) } else { meant };
    PyTypeError::new_err(format!("head({name}=...): there is no such option{rest}"))
}

/// A Python value as JSON. Python has turned numpy scalars into its own before.
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
    let found = value.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "head({name}=...): a {found} is neither text, number, truth value nor dict"
    )))
}

/// An empty dict declares nothing; dtype names may be numpy's.
fn dict_to_json(name: &str, dict: &Bound<'_, PyDict>) -> PyResult<Value> {
    if dict.is_empty() && name == "tiles" {
        return Ok(Value::Null);
    }
    let mut object = Map::new();
    for (key, value) in dict {
        let mut json = to_json(name, &value)?;
        if name == "dtypes" {
            by_its_own_name(&mut json);
        }
        object.insert(key.extract()?, json);
    }
    Ok(Value::Object(object))
}

/// A dtype of numpy's, torch's or jax's name as it is called here.
fn by_its_own_name(json: &mut Value) {
    if let Value::String(text) = json
        && let Some(dtype) = Dtype::from_numpy(text)
    {
        *json = dtype.name().into();
    }
}
