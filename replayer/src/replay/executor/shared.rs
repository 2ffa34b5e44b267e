//! What trials share: captured tensors, sums and comparisons that most of them ask for alike.

use std::fmt::Debug;
use std::sync::Arc;

use super::pass_cache::Biases;
use super::{Executor, Place};
use crate::head::step::StepError;
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::reference;
use crate::replay::addends::Sum;
use crate::replay::captured_gradients::Captured;
use crate::replay::comparison::Comparison;

impl Executor<'_> {
    /// Captured gradients, read once for all trials that ask for the same; `which` is none where
    /// they are this trial's own.
    pub(in crate::replay) fn captured(
        &self,
        which: Option<&dyn Debug>,
        read: &mut dyn FnMut() -> Result<Captured, StepError>,
    ) -> Result<Arc<Captured>, StepError> {
        match (&self.place, which) {
            (Place::Cached(cache), Some(which)) => cache.captured(which, read),
            _ => read().map(Arc::new),
        }
    }

    /// A sum of captured addends, taken once for all trials that weigh them alike.
    pub(in crate::replay) fn sum(
        &self,
        which: &dyn Debug,
        take: &mut dyn FnMut() -> Result<Sum, StepError>,
    ) -> Result<Arc<Sum>, StepError> {
        match &self.place {
            Place::Cached(cache) => cache.sum(which, take),
            _ => take().map(Arc::new),
        }
    }

    /// How a captured sum compares with what is expected of it, judged once for all trials that
    /// expect the same.
    pub(in crate::replay) fn comparison(
        &self,
        which: &dyn Debug,
        sum_and_expected: (&Arc<Sum>, &[f64]),
        judge: &mut dyn FnMut() -> Comparison,
    ) -> Comparison {
        match &self.place {
            Place::Cached(cache) => cache.judged(which, sum_and_expected, judge),
            _ => judge(),
        }
    }

    /// The biases of a head's addends, found once for all trials that have the same head,
    /// cotangents and options.
    pub(in crate::replay) fn biases(
        &self,
        operands: (&HeadInputs<'_>, &[f64], &Cotangents<'_, f64>),
        options: &dyn Debug,
        find: impl FnOnce() -> Biases,
    ) -> Biases {
        match &self.place {
            Place::Cached(cache) => cache.biases(operands, options, find),
            _ => find(),
        }
    }

    /// The labels' logits of a head.
    pub(in crate::replay) fn label_logits(&self, head: &HeadInputs<'_>) -> Arc<Vec<f64>> {
        match &self.place {
            Place::Cached(cache) => cache.label_logits(head),
            _ => Arc::new(reference::label_logits(head)),
        }
    }
}
