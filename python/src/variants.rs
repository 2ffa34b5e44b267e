//! A user's own functions in a replay: what Python calls them with, and the values they return.

use std::path::PathBuf;
use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape_replayer::dump::Selection;
use backtape_replayer::head::Stage;
use backtape_replayer::kernels::Precision;
use backtape_replayer::postmortem::{self, Extras};
use backtape_replayer::replay::against::Asked;
use backtape_replayer::replay::unit_inputs::UnitInputs;
use backtape_replayer::replay::variant::{STAGES, Variant};
use backtape_replayer::replay::world::StagePlace;
use backtape_replayer::replay::world::Supplied;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::postmortem::{asked_causes, asked_device, failed, moment, report_and_page, safely};
use crate::report::Report;

/// One stage: its name, microbatch, rank, f64 values as bytes, and numpy's dtype name.
type Given = (String, Option<u32>, Option<u32>, Vec<u8>, String);

/// What the functions are called with: one dict for each unit of tokens.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None, step=None))]
pub(crate) fn variant_inputs<'py>(
    py: Python<'py>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let selection = Selection { run, attempt, step };
    let units = safely(py, || postmortem::variant_inputs(&path, &selection))?.map_err(failed)?;
    units.iter().map(|unit| described(py, unit)).collect()
}

fn described<'py>(py: Python<'py>, unit: &UnitInputs) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("microbatch", unit.microbatch.map(|mb| mb.0))?;
    dict.set_item("rank", unit.rank.map(|rank| rank.0))?;
    let rows: Vec<u8> = unit.rows.iter().flat_map(|&row| (row as u64).to_ne_bytes()).collect();
    dict.set_item("rows", PyBytes::new(py, &rows))?;
    let labels: Vec<u8> = unit.labels.iter().flat_map(|label| label.to_ne_bytes()).collect();
    dict.set_item("labels", PyBytes::new(py, &labels))?;
    for (name, values) in [("lse", &unit.lse), ("g", &unit.g)] {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        dict.set_item(name, PyBytes::new(py, &bytes))?;
    }
    dict.set_item("valid_vocab", unit.valid_vocab)?;
    let sources = PyDict::new(py);
    for (role, key) in &unit.sources {
        let place = (key.tensor.to_string(), key.microbatch.map(|mb| mb.0), moment(key));
        sources.set_item(role.name(), place)?;
    }
    dict.set_item("sources", sources)?;
    Ok(dict)
}

/// The report of a replay in which a user's functions take part; `report` is the file of its page.
#[pyfunction]
#[pyo3(signature = (
    path, variants, run=None, attempt=None, step=None, compare=None, report=None, draws=false,
    device=None, causes="quick"
))]
#[allow(clippy::too_many_arguments)] // Python's own, by name.
pub(crate) fn replay_varied(
    py: Python<'_>,
    path: PathBuf,
    variants: Vec<(String, Vec<Given>)>,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
    compare: Option<Vec<String>>,
    report: Option<PathBuf>,
    draws: bool,
    device: Option<&str>,
    causes: &str,
) -> PyResult<Report> {
    let invalid = |error: String| PyValueError::new_err(error);
    let compare =
        Asked::parse(compare.unwrap_or_default()).map_err(|error| invalid(error.to_string()))?;
    let selection = Selection { run, attempt, step };
    let read = |(name, given): (String, Vec<Given>)| {
        let supplied_of = |given| supplied(&name, given);
        let supplied = given.into_iter().map(supplied_of).collect::<Result<_, _>>()?;
        Ok(Arc::new(Variant { name, supplied }))
    };
    let variants: Vec<Arc<Variant>> =
        variants.into_iter().map(read).collect::<Result<_, String>>().map_err(invalid)?;
    let (device, causes) = (asked_device(device)?, asked_causes(causes)?);
    report_and_page(py, (report, draws), |draws| {
        let device = device.as_ref();
        let extras = Extras { variants: &variants, draws, device, causes, ..Extras::default() };
        postmortem::full_report(&path, &selection, compare, None, extras)
    })
}

fn supplied(
    variant: &str,
    (stage, microbatch, rank, bytes, dtype): Given,
) -> Result<Supplied, String> {
    let known = || STAGES.iter().map(|stage| stage.name()).collect::<Vec<_>>().join(", ");
    let stage: Stage = STAGES.into_iter().find(|of| of.name() == stage).ok_or_else(|| {
        format!(
            "variant {variant:?} returned {stage:?}: the stages that it may return are {}",
            known()
        )
    })?;
    let values = bytes.as_chunks::<8>().0.iter().map(|&bytes| f64::from_ne_bytes(bytes));
    let place = StagePlace { stage, microbatch: microbatch.map(Microbatch), rank: rank.map(Rank) };
    Ok(Supplied { place, values: values.collect(), precision: Precision::from_name(short(&dtype)) })
}

/// numpy's name of a float as backtape spells it.
fn short(dtype: &str) -> &str {
    match dtype {
        "bfloat16" => "bf16",
        "float16" => "f16",
        "float32" => "f32",
        "float64" => "f64",
        other => other,
    }
}
