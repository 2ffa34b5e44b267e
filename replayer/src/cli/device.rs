//! `--device`: what computes the reference.

use clap::Args;

use crate::postmortem::{AskedDevice, Used};

/// Which device.
#[derive(Debug, Default, Args)]
pub(super) struct DeviceArguments {
    /// The device that computes the f64 reference and the emulated policies: cpu (the default),
    /// cuda for the first GPU, cuda:1 for another, cuda:0,1 for several or cuda:all for all. If it
    /// cannot be used, the CPU computes them and the report says why.
    #[arg(long, value_name = "DEVICE", conflicts_with = "engine")]
    pub(super) device: Option<AskedDevice>,
}

/// Says on the terminal that a device cannot be used: at once, before the work.
pub(super) fn say(used: &Used) {
    if let Some(why) = used.report.as_ref().and_then(|report| report.fallback.as_ref()) {
        anstream::eprintln!("replay: {why}; the CPU computes the reference in its place");
    }
}
