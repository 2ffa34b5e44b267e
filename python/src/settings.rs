//! The settings of a recorder: `backtape.settings.Settings` is read field for field, and its words
//! and numbers become the recorder's own settings.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use backtape::placement::Mesh;
use backtape_dumper::{ByteLimit, Conditions, Selection, SelectionError, TransportChoice};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::invalid;

/// The settings as Python gives them; `None` leaves the recorder's default.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    directory: PathBuf,
    steps: String,
    rank: u32,
    world_size: u32,
    run: Option<String>,
    coordinator: Option<String>,
    credentials: Option<PathBuf>,
    attempt: Option<u32>,
    launch: Option<String>,
    host: Option<String>,
    mesh: Vec<(String, u32)>,
    coordinates: BTreeMap<String, u32>,
    transport: String,
    strict: bool,
    queue_bytes: Option<u64>,
    call_cap_s: Option<f64>,
    join_deadline_s: Option<f64>,
    step_deadline_s: Option<f64>,
    close_patience_s: Option<f64>,
    tensors: Option<String>,
    ranks: Option<String>,
    microbatches: Option<String>,
    max_tensor_bytes: Option<String>,
    max_step_bytes: Option<String>,
    watch: bool,
    ring: u32,
    ring_bytes: Option<String>,
    heartbeat_s: Option<f64>,
    trigger_grad_norm: Option<f64>,
    trigger_spread: Option<f64>,
    max_triggers: Option<u32>,
    trigger_cooldown_s: Option<f64>,
    versions: BTreeMap<String, String>,
}

impl Settings {
    /// The recorder's settings. Raises ValueError that names the option for a word or number that
    /// cannot be read.
    pub(crate) fn read(self) -> PyResult<backtape_dumper::Settings> {
        let mut settings =
            backtape_dumper::Settings::new(self.directory, self.rank, self.world_size);
        settings.selection = Selection {
            steps: part("steps", Some(self.steps))?.unwrap_or_default(),
            tensors: part("tensors", self.tensors)?.unwrap_or_default(),
            ranks: part("ranks", self.ranks)?.unwrap_or_default(),
            microbatches: part("microbatches", self.microbatches)?.unwrap_or_default(),
            max_tensor_bytes: part("max_tensor_bytes", self.max_tensor_bytes)?,
            max_step_bytes: part("max_step_bytes", self.max_step_bytes)?,
        };
        settings.watch = self.watch;
        settings.ring_steps = self.ring;
        let ring_bytes: Option<ByteLimit> = part("ring_bytes", self.ring_bytes)?;
        settings.ring_bytes = ring_bytes.map_or(settings.ring_bytes, |limit| limit.0);
        settings.conditions = conditions(self.trigger_grad_norm, self.trigger_spread)?;
        settings.rules.max_triggers = self.max_triggers.unwrap_or(settings.rules.max_triggers);
        settings.transport = transport(&self.transport)?;
        settings.run = self.run;
        settings.coordinator = self.coordinator;
        settings.credentials = self.credentials;
        settings.attempt = self.attempt;
        settings.launch = self.launch;
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
            ("close_patience_s", self.close_patience_s, &mut settings.close_patience),
            ("heartbeat_s", self.heartbeat_s, &mut settings.heartbeat),
            ("trigger_cooldown_s", self.trigger_cooldown_s, &mut settings.rules.trigger_cooldown),
        ] {
            if let Some(seconds) = seconds {
                *field =
                    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(name, &error))?;
            }
        }
        Ok(settings)
    }
}

/// One part of the selection, as its text spells it.
fn part<T: FromStr<Err = SelectionError>>(name: &str, text: Option<String>) -> PyResult<Option<T>> {
    text.map(|text| text.parse().map_err(|error| invalid(name, &error))).transpose()
}

/// The conditions of `watch`; a spread of 0 turns that condition off.
fn conditions(grad_norm: Option<f64>, spread: Option<f64>) -> PyResult<Conditions> {
    for (name, value) in [("trigger_grad_norm", grad_norm), ("trigger_spread", spread)] {
        if value.is_some_and(|value| !(value >= 0.0)) {
            return Err(PyValueError::new_err(format!("{name}: it is a number of at least 0")));
        }
    }
    let spread =
        spread.map_or(Conditions::default().spread, |spread| (spread > 0.0).then_some(spread));
    Ok(Conditions { grad_norm, spread })
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
