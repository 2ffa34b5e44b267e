//! The tape of one step, between `with recorder.step(n)` and its end.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use backtape_dumper::Capture;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyDict;

use crate::errors::{RecorderError, refused};
use crate::payload::release_spent;
use crate::shard::{Cuts, Key, captures};
use crate::staging::Staging;
use crate::{declaration, errors};

/// The recorder's tape of a step; none once it is closed.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Tape(Mutex<Option<backtape_dumper::Tape>>);

impl Tape {
    pub(crate) fn new(tape: backtape_dumper::Tape) -> Tape {
        Tape(Mutex::new(Some(tape)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<backtape_dumper::Tape>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the recorder without the GIL, as it may wait for room in the queue. Raises
    /// RecorderError once the tape is closed.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&backtape_dumper::Tape) -> Result<T, backtape_dumper::RecorderError> + Send,
    ) -> PyResult<T> {
        let done = py.detach(|| self.lock().as_ref().map(call));
        release_spent(py);
        match done {
            Some(result) => result.map_err(|error| refused(&error)),
            None => Err(closed()),
        }
    }
}

impl Tape {
    /// Records the captures of one tensor, or names it as left out with the reason why it cannot be.
    fn hand_over(
        &self,
        py: Python<'_>,
        key: &Key,
        read: Result<Vec<Capture>, String>,
    ) -> PyResult<()> {
        self.with(py, |tape| match read {
            Ok(captures) => tape.record_all(captures),
            Err(reason) => tape.refuse(&key.name, key.role.as_deref(), key.microbatch, reason),
        })
    }
}

fn closed() -> PyErr {
    RecorderError::new_err("the step is over: record inside `with recorder.step(n) as tape`")
}

#[pymethods]
impl Tape {
    /// Declares the loss head: the keyword arguments of `tape.head`, where each item is from, and
    /// what was declared by hand beside what was found.
    fn head(
        &self,
        py: Python<'_>,
        options: &Bound<'_, PyDict>,
        sources: BTreeMap<String, String>,
        by_hand: &Bound<'_, PyDict>,
        batches: Vec<u32>,
    ) -> PyResult<()> {
        let declaration = declaration::read(options, sources, by_hand, batches)?;
        self.with(py, |tape| tape.head(declaration))
    }

    /// True when this tensor is asked for; one that is not need not be copied.
    fn wants(
        &self,
        py: Python<'_>,
        name: &str,
        role: Option<&str>,
        microbatch: Option<u32>,
    ) -> bool {
        py.detach(|| self.lock().as_ref().is_some_and(|tape| tape.wants(name, role, microbatch)))
    }

    /// Hands the shards of one tensor over, in one call as each costs the job more than a small
    /// shard; their bytes must not change from now on. Raises ValueError for a shard that cannot be
    /// read, and then none is recorded; RecorderError for one that the recorder refuses and has
    /// named as left out with all after it.
    fn record(&self, py: Python<'_>, key: Key, shards: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let read = shards.iter().map(|given| captures(given, &key));
        let read: Vec<Result<Vec<Capture>, String>> = read.collect::<PyResult<_>>()?;
        let read: Result<Vec<Vec<Capture>>, String> = read.into_iter().collect();
        self.hand_over(py, &key, read.map(|captures| captures.into_iter().flatten().collect()))
    }

    /// Copies the parts `cuts` of a tensor and hands them over, in one call: a step's algebra takes
    /// hundreds of small tensors, each between two kernels of the job, and what is not called then
    /// need not be fetched into the processor's cache again. `memory` is the tensor's address,
    /// length in bytes and dtype; `key` its name, microbatch, moment and reduction. Raises as
    /// [`Staging::copy_cuts`] and [`Tape::record`] do.
    fn record_plain(
        &self,
        py: Python<'_>,
        staging: &Bound<'_, Staging>,
        cuts: Py<Cuts>,
        memory: (usize, usize, PyBackedStr),
        key: (String, Option<u32>, Option<String>, Option<String>),
    ) -> PyResult<()> {
        let ((address, length, dtype), (name, microbatch, when, partial)) = (memory, key);
        if !self.wants(py, &name, None, microbatch) {
            return Ok(());
        }
        let mut copied = staging.get().copy_cuts(address, length, &dtype, cuts)?;
        copied.partial = partial;
        let key = Key::new(name, microbatch, when);
        let read = copied.captures(&key)?;
        self.hand_over(py, &key, read)
    }

    /// Says that a tensor is not recorded, and why.
    fn omit(
        &self,
        py: Python<'_>,
        tensor: &str,
        microbatch: Option<u32>,
        reason: String,
    ) -> PyResult<()> {
        self.with(py, |tape| {
            tape.omit(tensor, microbatch, reason);
            Ok(())
        })
    }

    /// Ends the step.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let result = py.detach(|| self.lock().take().map(backtape_dumper::Tape::close));
        release_spent(py);
        result.ok_or_else(closed)?.map_err(|error| errors::refused(&error))
    }
}
