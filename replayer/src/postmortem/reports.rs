//! The reports of a replay that nobody watches, each by what it is asked for.

use std::path::Path;
use std::sync::Arc;

use super::error::RunError;
use super::kernels::Kernels;
use super::machines::{AskedDevice, Used};
use super::settings::Settings;
use super::step::report;
use crate::algebra::against::Mapping;
use crate::device::{Device, Kernel};
use crate::diagnose::Causes;
use crate::dump::Selection;
use crate::replay::against::Asked;
use crate::replay::tasks::{Cluster, Cut, Workers};
use crate::replay::variant::Variant;
use crate::report::schema::{DeviceReport, Report};

/// The report of a replay of one run, or of two.
pub fn replay_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    other: Option<&Path>,
) -> Result<Report, RunError> {
    report(path, selection, &compare.into(), other, &Settings::default())
}

/// What a replay may be asked for beyond its step.
#[derive(Clone, Copy, Default)]
pub struct Extras<'a> {
    /// Functions of the user's own, which are tried on one run alone.
    pub variants: &'a [Arc<Variant>],
    /// Whether all that a page draws is gathered, see `report::html`.
    pub draws: bool,
    /// What computes the reference; where it cannot be used the report says why.
    pub device: Option<&'a AskedDevice>,
    /// How closely causes are looked for.
    pub causes: Causes,
    /// Which parameters of two runs are the same where their names differ.
    pub mapping: Option<&'a Mapping>,
}

/// The report of a replay of one run or of two, with all that is asked for.
pub fn full_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    other: Option<&Path>,
    extras: Extras<'_>,
) -> Result<Report, RunError> {
    let Extras { variants, draws, device, causes, mapping } = extras;
    let used = Used::open(device);
    let device = used.device.as_deref();
    let settings = Settings { variants, draws, causes, device, mapping, ..Settings::default() };
    let report = report(path, selection, &compare.into(), other, &settings)?;
    Ok(report.computed_by(used.report))
}

/// The report of a replay whose tiles others compute, to the same bits.
pub fn report_on_cluster(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    (workers, cut): (&dyn Workers, Cut),
) -> Result<Report, RunError> {
    let cluster = Cluster::new(workers, (path, selection), None, cut);
    let settings = Settings { cluster: Some(&cluster), ..Settings::default() };
    report(path, selection, &compare.into(), None, &settings)
}

/// The report of a replay whose reference a device computes.
pub fn report_on_device(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    device: &dyn Device,
) -> Result<Report, RunError> {
    let settings = Settings { device: Some(device), ..Settings::default() };
    let report = report(path, selection, &compare.into(), None, &settings)?;
    Ok(report.computed_by(Some(DeviceReport::of(device.description()))))
}

/// The report of a replay in which a user's kernels take part, on any device.
pub fn report_with_kernels(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    (kernels, device): (Vec<Kernel>, Box<dyn Device>),
) -> Result<Report, RunError> {
    let kernels = Kernels::on(kernels, device);
    let settings = Settings { kernels: Some(&kernels), ..Settings::default() };
    report(path, selection, &compare.into(), None, &settings)
}
