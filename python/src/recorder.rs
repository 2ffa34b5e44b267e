//! The recorder of one rank.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::{RecorderError, refused};
use crate::payload::release_spent;
use crate::settings::Settings;
use crate::summary::Summary;
use crate::tape::Tape;

/// How long a Ctrl-C may go unnoticed while the recorder closes.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Records chosen steps of one rank.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Recorder(Arc<Mutex<backtape_dumper::Recorder>>);

fn lock(recorder: &Mutex<backtape_dumper::Recorder>) -> MutexGuard<'_, backtape_dumper::Recorder> {
    recorder.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Recorder {
    /// Checks the settings and starts the recorder's thread; does not wait for the coordinator.
    #[new]
    fn start(py: Python<'_>, settings: Settings) -> PyResult<Recorder> {
        let settings = settings.read()?;
        let started = py.detach(|| backtape_dumper::Recorder::start(settings));
        let recorder = started.map_err(|error| refused(&error))?;
        Ok(Recorder(Arc::new(Mutex::new(recorder))))
    }

    /// True when this step is to be recorded and was not yet.
    fn wants(&self, py: Python<'_>, step: u64) -> bool {
        let wants = lock(&self.0).wants(step);
        release_spent(py);
        wants
    }

    /// Opens the tape of a step.
    fn step(&self, py: Python<'_>, step: u64) -> PyResult<Tape> {
        let tape = py.detach(|| lock(&self.0).step(step));
        // The ring may have dropped its oldest step, and with it buffers.
        release_spent(py);
        tape.map(Tape::new).map_err(|error| refused(&error))
    }

    /// Hands over the scalars of a step; waits for nothing.
    fn scalars(&self, step: u64, time: f64, values: Vec<(String, f64)>) -> PyResult<()> {
        let row = backtape_dumper::Row { step, time, values };
        lock(&self.0).scalars(row).map_err(|error| refused(&error))
    }

    /// Looks at the loss and the gradient norm of a step, and triggers a recording where they are
    /// wrong.
    fn watch(&self, py: Python<'_>, step: u64, loss: Option<f64>, grad_norm: Option<f64>) {
        py.detach(|| lock(&self.0).watch(step, loss, grad_norm));
    }

    /// What has not worked for some seconds, as one sentence.
    fn trouble(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| lock(&self.0).trouble())
    }

    /// What was done so far.
    fn summary(&self, py: Python<'_>) -> Summary {
        py.detach(|| lock(&self.0).summary()).into()
    }

    /// Waits until every step is committed or known not to be. Ctrl-C ends the wait and not the
    /// work: the recorder goes on closing on a thread of its own.
    fn close(&self, py: Python<'_>) -> PyResult<Summary> {
        let (done, closed) = sync_channel(1);
        let recorder = Arc::clone(&self.0);
        let closing = std::thread::Builder::new().name("backtape-close".into());
        closing
            // After a Ctrl-C nobody receives the summary, which is then dropped.
            .spawn(move || drop(done.send(lock(&recorder).close())))
            .map_err(|error| RecorderError::new_err(error.to_string()))?;
        let closed = Mutex::new(closed);
        loop {
            let received = py.detach(|| {
                let closed = closed.lock().unwrap_or_else(PoisonError::into_inner);
                closed.recv_timeout(SIGNAL_INTERVAL)
            });
            release_spent(py);
            match received {
                Ok(summary) => return summary.map(Into::into).map_err(|error| refused(&error)),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(RecorderError::new_err("the recorder failed while it closed"));
                }
            }
        }
    }
}
