//! The Python binding: what `import backtape` stands on.
//!
//! It is thin on purpose. It turns Python values into the recorder's, keeps the bytes of an array
//! alive while the recorder's thread reads them, and releases the GIL around everything that can
//! wait. Python (`backtape/*.py`) decides what an array is, which part of a tensor it holds and
//! what a failure means for the job; the dumper decides what becomes of the bytes.
//!
//! No other crate of the workspace names pyo3.

mod command;
mod declaration;
mod dlpack;
mod errors;
mod gpu;
mod memory;
mod payload;
mod postmortem;
mod probe;
mod recorder;
mod report;
mod settings;
mod shard;
mod stage;
mod staging;
mod summary;
mod tape;
mod tasks;
mod variants;

use backtape_replayer::spill::Spilling;
use pyo3::prelude::*;

/// The allocator that `replay --spill` turns on; until then it passes every call to the system's.
#[global_allocator]
static SPILLING: Spilling = Spilling;

/// The extension module `backtape._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", backtape::VERSION)?;
    module.add("__build__", backtape::BUILD)?;
    module.add("RecorderError", py.get_type::<errors::RecorderError>())?;
    // Python code that keeps faults from the job must catch it by name: it is no `Exception`.
    module.add("PanicException", py.get_type::<pyo3::panic::PanicException>())?;
    module.add_class::<recorder::Recorder>()?;
    module.add_class::<tape::Tape>()?;
    module.add_class::<summary::Summary>()?;
    module.add_class::<staging::Staging>()?;
    module.add_class::<shard::Cuts>()?;
    module.add_class::<shard::Copied>()?;
    module.add_class::<gpu::Gpu>()?;
    module.add_class::<gpu::Arriving>()?;
    module.add_class::<postmortem::StepDump>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<report::Report>()?;
    module.add_function(wrap_pyfunction!(declaration::head_options, module)?)?;
    module.add_function(wrap_pyfunction!(stage::stages, module)?)?;
    module.add_function(wrap_pyfunction!(stage::recompute_stage, module)?)?;
    module.add_function(wrap_pyfunction!(postmortem::dumped_steps, module)?)?;
    module.add_function(wrap_pyfunction!(postmortem::replay, module)?)?;
    module.add_function(wrap_pyfunction!(postmortem::checks, module)?)?;
    module.add_function(wrap_pyfunction!(postmortem::trajectory, module)?)?;
    module.add_function(wrap_pyfunction!(command::replay_main, module)?)?;
    module.add_function(wrap_pyfunction!(command::coordinator_main, module)?)?;
    module.add_function(wrap_pyfunction!(tasks::perform_task, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_device, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_store, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_coordinator, module)?)?;
    module.add_function(wrap_pyfunction!(variants::variant_inputs, module)?)?;
    module.add_function(wrap_pyfunction!(variants::replay_varied, module)?)?;
    module.add_function(wrap_pyfunction!(shard::fingerprint, module)?)?;
    module.add_function(wrap_pyfunction!(shard::check_dtype, module)?)?;
    module.add_function(wrap_pyfunction!(staging::sums_of, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bytes_of, module)?)?;
    module.add_function(wrap_pyfunction!(dlpack::read_capsule, module)?)?;
    Ok(())
}
