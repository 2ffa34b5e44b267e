//! The multiply-adds of a replay, and what the effort that was asked for leaves out.

use super::context::Replay;
use super::estimate::estimate_work;
use super::microbatch::HeadMicrobatch;
use super::outcome::{NotChecked, Outcome};
use super::plan::Effort;
use super::plausible_policies::members;
use crate::kernels::{policy, reference};
use crate::number::error;

impl Replay<'_> {
    /// Multiply-adds of the whole replay, for the progress bar.
    pub(super) fn work(&self, microbatches: &[HeadMicrobatch], effort: Effort) -> u64 {
        let members = members(&self.plan.roundings).len() as u64;
        let work_of = |microbatch: &HeadMicrobatch| {
            let Some(head) = microbatch.inputs.head(self.plan.step) else { return 0 };
            let forward = reference::forward_work(&head) + 2 * policy::forward_work(&head);
            let emulated = (members * policy::backward_work(&head)) as f64;
            let emulated = (emulated * self.share_emulated(&head)) as u64;
            let all = reference::backward_work(&head) + emulated;
            let backward = match effort {
                Effort::Probes { count, .. } if !self.plan.roundings.swamps() => {
                    reference::probe_work(&head, count)
                }
                Effort::Tokens { count, .. } => {
                    let (n, tokens) = (count.min(head.q.rows), head.q.rows.max(1) as u64);
                    all / tokens * n as u64 + estimate_work(&head, n)
                }
                _ => all,
            };
            forward + if head.given.is_none() { backward } else { 0 }
        };
        microbatches.iter().map(work_of).sum()
    }

    /// Says what the effort left out, and what that saved.
    pub(super) fn note_effort(&self, microbatches: &[HeadMicrobatch], outcome: &mut Outcome) {
        let how = match self.plan.effort {
            Effort::All => return,
            Effort::Probes { .. } if self.plan.recomputes() => {
                let what = "dq and dk with random probes".into();
                let why = "an accumulator is declared below f32, and what it loses is known by emulation alone: they were recomputed".into();
                return outcome.not_checked.push(NotChecked { what, why });
            }
            Effort::Probes { count, seed } => format!("--freivalds {count}, seed {seed}"),
            Effort::Tokens { count, seed } => format!("--tokens {count}, seed {seed}"),
        };
        let work = |effort| self.work(microbatches, effort) as f64;
        let (done, all) = (work(self.plan.effort), work(Effort::All));
        let what = "dq and dk over all tokens, element by element".into();
        let why = format!("{how}: {} multiply-adds in place of {}", error(done), error(all));
        outcome.not_checked.push(NotChecked { what, why });
    }
}
