//! Stages that pass only because the job does not say how it rounds.
//!
//! The bound allows every rounding that is plausible at its worst, all to one side; the
//! members of the floor are what such policies really do. A clean job errs as one of them
//! does: what errs several times as much passes for want of a declaration, and is said.

use super::Replay;
use super::outcome::{Comparison, NotChecked, Outcome, Status};
use crate::head::Roundings;
use crate::head::roundings::F32;
use crate::kernels::policy::Path;
use crate::kernels::round::Precision;

/// Errors of clean jobs over that of the member that rounds most: beyond it, it is said. It
/// decides no verdict.
const LOOSE: f64 = 2.0;

impl Replay<'_> {
    /// Says of every stage that passes with an error far beyond every member's what the
    /// job would have to declare.
    pub(super) fn note_loose(&self, outcome: &mut Outcome) {
        let open = open(&self.roundings);
        if open.is_empty() {
            return;
        }
        let far = |one: &&Comparison| {
            let rounds = one.floor() > 2.0 * F32;
            one.excess.is_none() && !one.members.is_empty() && rounds && one.ratio() > LOOSE
        };
        let mut notes = Vec::new();
        for stage in outcome.stages.iter_mut().filter(|one| one.status == Status::Pass) {
            let found = stage.comparisons.iter().filter(far);
            let Some(worst) = found.max_by(|a, b| a.ratio().total_cmp(&b.ratio())) else {
                continue;
            };
            let times = worst.ratio();
            stage.status = Status::Warn;
            notes.push(NotChecked {
                what: format!("{} as closely as it could be", stage.stage),
                why: format!(
                    "its error is {:.1} times that of any policy that was emulated, and passes only because {} may be rounded to the inputs' dtype: declare them (tape.head(dtypes=...)) and replay again",
                    times,
                    open.join(", ")
                ),
            });
        }
        outcome.not_checked.extend(notes);
    }
}

/// Rounding points that the job leaves open, by their names in the declaration.
fn open(of: &Roundings) -> Vec<&'static str> {
    let (wide, narrow) = (&of.widest, &of.narrowest);
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
