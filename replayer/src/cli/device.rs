//! `--device`: what computes the reference.

use clap::Args;

use crate::postmortem::{AskedDevice, Used};

/// Which device.
#[derive(Debug, Default, Args)]
pub(super) struct DeviceArguments {
    /// What computes the f64 reference and the emulated policies: cpu, by default, or the first GPU
    /// as cuda, another as cuda:1, several as cuda:0,1, all as cuda:all. Where it cannot be used the
    /// CPU does it, and the report says why.
    #[arg(long, value_name = "DEVICE", conflicts_with = "engine")]
    pub(super) device: Option<AskedDevice>,
}

/// Says on the terminal that a device cannot be used: at once, before the work.
pub(super) fn say(used: &Used) {
    if let Some(why) = used.report.as_ref().and_then(|of| of.fallback.as_ref()) {
        anstream::eprintln!("replay: {why}; the CPU computes the reference in its place");
    }
}
