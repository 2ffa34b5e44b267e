//! A user's own kernels, run on a step beside the catalogue.

use std::sync::Arc;

use crate::device::{Device, Kernel};
use crate::head::HeadStep;
use crate::head::step::StepError;
use crate::replay::user_kernels;
use crate::replay::variant::Variant;
use crate::report::schema::KernelReport;

/// Kernels, and the device that runs them.
#[derive(Default)]
pub struct Kernels {
    kernels: Vec<Kernel>,
    device: Option<Box<dyn Device>>,
}

impl Kernels {
    /// What a device is to run.
    pub fn on(kernels: Vec<Kernel>, device: Box<dyn Device>) -> Kernels {
        Kernels { kernels, device: Some(device) }
    }

    /// Runs each on a step: its values as variants, and what the guards say.
    pub fn run(
        &self,
        step: &HeadStep<'_>,
    ) -> Result<(Vec<Arc<Variant>>, Vec<KernelReport>), StepError> {
        let Some(device) = self.device.as_deref() else { return Ok(Default::default()) };
        let mut ran = (Vec::new(), Vec::new());
        for kernel in &self.kernels {
            let user_kernels::Ran { variant, findings } = user_kernels::run(step, device, kernel)?;
            ran.1.push(KernelReport { name: variant.name.clone(), findings });
            ran.0.push(Arc::new(variant));
        }
        Ok(ran)
    }
}
