//! `backtape.settings.Settings`, field for field, to the recorder's settings.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use backtape::placement::Mesh;
use backtape_dumper::{SelectionError, StepSelection, TransportChoice};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::invalid;

/// What `backtape.Recorder(...)` was told; `None` leaves the recorder's default.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    directory: PathBuf,
    steps: String,
    rank: u32,
    world_size: u32,
    run: Option<String>,
    coordinator: Option<String>,
    attempt: Option<u32>,
    host: Option<String>,
    mesh: Vec<(String, u32)>,
    coordinates: BTreeMap<String, u32>,
    transport: String,
    strict: bool,
    queue_bytes: Option<u64>,
    call_cap_s: Option<f64>,
    join_deadline_s: Option<f64>,
    step_deadline_s: Option<f64>,
    versions: BTreeMap<String, String>,
}

impl Settings {
    /// Checks the words and numbers that Python does not check.
    pub(crate) fn read(self) -> PyResult<backtape_dumper::Settings> {
        let mut settings =
            backtape_dumper::Settings::new(self.directory, self.rank, self.world_size);
        settings.steps = selection(&self.steps).map_err(|error| invalid("steps", &error))?;
        settings.transport = transport(&self.transport)?;
        settings.run = self.run;
        settings.coordinator = self.coordinator;
        settings.attempt = self.attempt;
        settings.host = self.host;
        settings.mesh = Mesh(self.mesh);
        settings.coordinates = self.coordinates;
        settings.strict = self.strict;
        settings.versions = self.versions;
        settings.queue_bytes = self.queue_bytes.unwrap_or(settings.queue_bytes);
        for (name, seconds, field) in [
            ("call_cap_s", self.call_cap_s, &mut settings.call_cap),
            ("join_deadline_s", self.join_deadline_s, &mut settings.join_deadline),
            ("step_deadline_s", self.step_deadline_s, &mut settings.step_deadline),
        ] {
            if let Some(seconds) = seconds {
                *field =
                    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(name, &error))?;
            }
        }
        Ok(settings)
    }
}

/// No step at all where only scalars are recorded.
fn selection(steps: &str) -> Result<StepSelection, SelectionError> {
    if steps.is_empty() { Ok(StepSelection::none()) } else { steps.parse() }
}

fn transport(word: &str) -> PyResult<TransportChoice> {
    match word {
        "auto" => Ok(TransportChoice::Auto),
        "direct" => Ok(TransportChoice::Direct),
        "stream" => Ok(TransportChoice::Stream),
        _ => {
            Err(PyValueError::new_err(format!("transport={word:?}: it is auto, direct or stream")))
        }
    }
}
