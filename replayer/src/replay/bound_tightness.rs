//! Stages that pass, and were not judged as closely as they could be.
//!
//! The bound allows every rounding that is plausible at its worst, all to one side; the
//! members of the floor are what such policies really do. A clean job errs as one of them
//! does. What errs several times as much passes for want of a declaration; what errs several
//! times less was declared in fewer bits than the job computes in, and faults that are smaller
//! than that rounding pass. Both are said.

use backtape::identity::{Microbatch, Rank};
use backtape::nan::by_size;

use super::comparison::Comparison;
use super::outcome::{NotChecked, Outcome, StageOutcome, Status};
use super::plan::Plan;
use crate::head::roundings::{F32, unit};
use crate::head::{Roundings, Stage};
use crate::kernels::policy::Path;
use crate::kernels::round::Precision;

/// Errors of clean jobs over that of the member that rounds most: beyond it, it is said. It
/// decides no verdict.
const LOOSE: f64 = 2.0;
/// How many times less than the member that rounds least a job errs whose dtypes are declared too
/// coarse. Sums in few bits err less than the emulated ones where they are taken in another order.
const COARSE: f64 = 8.0;

impl Plan<'_> {
    /// Says of every stage that passes with an error far beyond every member's what the
    /// job would have to declare.
    pub(super) fn note_wide_bounds(&self, outcome: &mut Outcome) {
        let open = open(&self.roundings);
        if open.is_empty() {
            return;
        }
        let far = |comparison: &&Comparison| {
            let rounds = comparison.floor() > 2.0 * F32;
            comparison.excess.is_none()
                && !comparison.members.is_empty()
                && rounds
                && comparison.ratio() > LOOSE
        };
        outcome.note_closer(|stage| {
            let loose = stage.comparisons.iter().filter(far);
            let worst = loose.max_by(|a, b| by_size(&a.ratio(), &b.ratio()))?;
            Some(format!(
                "its error is {:.1} times that of any policy that was emulated, and passes only because {} may be rounded to the inputs' dtype: declare them (tape.head(dtypes=...)) and replay again",
                worst.ratio(),
                open.join(", ")
            ))
        });
    }

    /// Says of every stage that passes with an error far below every member's that its dtypes
    /// are declared in fewer bits than the job shows.
    pub(super) fn note_coarse_dtypes(&self, outcome: &mut Outcome) {
        let declared = &self.step.options.declared.dtypes;
        let coarse = |name: &&String| unit(name).is_some_and(|unit| unit > F32);
        let coarse: Vec<String> = declared
            .iter()
            .filter(|(_, name)| coarse(name))
            .map(|(point, name)| format!("{point}={name}"))
            .collect();
        if coarse.is_empty() {
            return;
        }
        outcome.note_closer(|stage| {
            let with_members = stage.comparisons.iter().filter(|comparison| !comparison.members.is_empty());
            let near = with_members.map(|comparison| (comparison.tally.error(), comparison.least()));
            let near = near.filter(|(error, least)| error * COARSE < *least);
            let (error, least) = near.max_by(|a, b| by_size(&a.1, &b.1))?;
            Some(format!(
                "its error is {error:.1e}, and a job with the dtypes that are declared has {least:.1e} at least: a fault below that passes. One of {} is declared in fewer bits than the job computes in: declare what it has and replay again",
                coarse.join(", ")
            ))
        });
    }
}

impl Outcome {
    /// Marks each passing stage of which this says something, and keeps what it says.
    fn note_closer(&mut self, says: impl Fn(&StageOutcome) -> Option<String>) {
        for stage in self.stages.iter_mut().filter(|outcome| outcome.status == Status::Pass) {
            if let Some(why) = says(stage) {
                stage.status = Status::Warn;
                self.not_checked.push(NotChecked { what: loosely(stage.stage), why });
            }
        }
    }

    /// A comparison that passes by its bound was shown to be wrong all the same.
    pub(crate) fn reproduced(
        &mut self,
        stage: Stage,
        (microbatch, rank): (Option<Microbatch>, Option<Rank>),
        words: &str,
    ) {
        self.not_checked.retain(|note| note.what != loosely(stage));
        let outcome = &mut self.stages[stage as usize];
        let is_of_unit = |comparison: &&mut Comparison| {
            comparison.microbatch == microbatch && comparison.rank == rank
        };
        if let Some(comparison) = outcome.comparisons.iter_mut().find(is_of_unit) {
            comparison.excess = Some(words.into());
        }
        (outcome.status, outcome.reason) = (Status::Fail, words.into());
    }

    /// A comparison that its bound rejects was shown to be right all the same.
    pub(crate) fn cleared(
        &mut self,
        stage: Stage,
        (microbatch, rank): (Option<Microbatch>, Option<Rank>),
    ) {
        let outcome = &mut self.stages[stage as usize];
        let is_of_unit = |comparison: &&mut Comparison| {
            comparison.microbatch == microbatch && comparison.rank == rank
        };
        if let Some(comparison) = outcome.comparisons.iter_mut().find(is_of_unit) {
            comparison.excess = None;
        }
        if outcome.failing().next().is_none() {
            outcome.status = Status::Pass;
            outcome.reason.clear();
        }
        let what = format!("the bound of {stage}");
        let why = "its error is more than the bound allows, and a policy that the declaration leaves open makes it element by element: please report the bound as too narrow".into();
        if self.not_checked.iter().all(|note| note.what != what) {
            self.not_checked.push(NotChecked { what, why });
        }
    }
}

/// What is said not to be checked of a stage that passes by a declaration too wide.
fn loosely(stage: Stage) -> String {
    format!("{stage} as closely as it could be")
}

/// Rounding points that the job leaves open, by their names in the declaration.
fn open(roundings: &Roundings) -> Vec<&'static str> {
    let (wide, narrow) = (&roundings.widest, &roundings.narrowest);
    let fused = wide.path == Path::Fused;
    let points: [(&str, bool, Precision, Precision); 5] = [
        ("logits", true, wide.logits, narrow.logits),
        ("p", true, wide.p, narrow.p),
        ("dlogits", true, wide.dlogits, narrow.dlogits),
        ("label_grad", fused, wide.label_grad, narrow.label_grad),
        ("parts", fused, wide.parts, narrow.parts),
    ];
    points.into_iter().filter(|(_, there, a, b)| *there && a != b).map(|(name, ..)| name).collect()
}
