//! Why a device did not do it.

/// An error of the device, one sentence.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device, or its libraries are not installed.
    #[error("no CUDA device can be used: {0}")]
    Absent(String),
    /// The compiler refused the kernels.
    #[error("the kernels of {file} could not be compiled for {target}: {log}")]
    Compile {
        /// Their source.
        file: String,
        /// The virtual architecture.
        target: String,
        /// What the compiler said.
        log: String,
    },
    /// One of several devices did not do it.
    #[error("{source} ({device})")]
    On {
        /// Which.
        device: String,
        /// What it said.
        source: Box<DeviceError>,
    },
    /// A call failed.
    #[error("the device failed at {what}: {why}")]
    Call {
        /// What was called.
        what: String,
        /// What it said.
        why: String,
    },
}

impl DeviceError {
    pub(super) fn on(self, device: &str) -> DeviceError {
        DeviceError::On { device: device.into(), source: Box::new(self) }
    }

    pub(super) fn call(what: &str, why: impl std::fmt::Display) -> DeviceError {
        DeviceError::Call { what: what.into(), why: why.to_string() }
    }
}
