//! One stage of a step's head, recomputed for Python.

use backtape::identity::{Microbatch, Rank};
use backtape::shard::TensorKey;
use backtape_replayer::head::{HeadStep, Stage};
use backtape_replayer::replay::recompute::{Asked, RecomputeError, recompute};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;

use crate::memory::Memory;
use crate::postmortem::{StepDump, failed, safely};

/// Names of all stages, in order.
#[pyfunction]
pub(crate) fn stages() -> Vec<&'static str> {
    Stage::ALL.iter().map(|stage| stage.name()).collect()
}

/// f64 values of a stage, and their shape.
#[pyfunction]
#[pyo3(signature = (dump, name, microbatch=None, rank=None, from_captured=true, policy=None, tokens=None))]
#[allow(clippy::too_many_arguments)] // As many as the stage has in Python, where they are named.
pub(crate) fn recompute_stage(
    py: Python<'_>,
    dump: &Bound<'_, StepDump>,
    name: &str,
    microbatch: Option<u32>,
    rank: Option<u32>,
    from_captured: bool,
    policy: Option<String>,
    tokens: Option<(usize, usize)>,
) -> PyResult<(Memory, Vec<u64>)> {
    let Some(&stage) = Stage::ALL.iter().find(|stage| stage.name() == name) else {
        let known = stages().join(", ");
        return Err(PyKeyError::new_err(format!("no stage {name:?}: the stages are {known}")));
    };
    let (microbatch, rank) = (microbatch.map(Microbatch), rank.map(Rank));
    let tokens = tokens.map(|(first, end)| first..end);
    let asked = Asked { stage, microbatch, rank, from_captured, policy, tokens };
    let dump = dump.get();
    let recomputed = safely(py, || {
        let proof = dump.proof();
        let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
        let step = HeadStep::new(dump.dump(), None, unusable)?;
        recompute(&step, &asked)
    })?;
    match recomputed {
        Ok(recomputed) => Ok((Memory::numbers(recomputed.values), recomputed.shape)),
        Err(error @ RecomputeError::Step(_)) => Err(failed(error)),
        Err(error @ (RecomputeError::Absent { .. } | RecomputeError::GradNorm)) => {
            Err(failed(error))
        }
        Err(error @ (RecomputeError::Tokens { .. } | RecomputeError::TooLarge { .. })) => {
            Err(PyValueError::new_err(error.to_string()))
        }
        Err(error) => Err(PyKeyError::new_err(error.to_string())),
    }
}
