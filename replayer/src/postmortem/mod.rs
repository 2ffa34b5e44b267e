//! A look at a job after it ran: opens a dump, proves it, replays its head, looks for the cause
//! and returns a report.
//!
//! This is what the command, the Python package and the tests call. It reads dumps, and writes
//! the page that it is asked for; it knows no terminal, no environment and no exit code.

mod defect;
mod error;
mod files;
mod kernels;
mod machines;
mod pair;
mod readings;
mod reports;
mod settings;
mod step;
mod summary;
mod versions;

pub use defect::{Panicked, caught};
pub use error::RunError;
pub use files::PageFile;
pub use kernels::Kernels;
pub use machines::{AskedCluster, AskedDevice, Used};
pub use readings::{
    checks_report, checks_report_watched, precision_report, trajectory_report, variant_inputs,
};
pub use reports::{
    Extras, full_report, replay_report, report_on_cluster, report_on_device, report_with_kernels,
};
pub use settings::{Settings, Watch, Work, proved};
pub use step::report;

pub(crate) use files::Target;
