//! A replay that runs: its plan, who computes, and who judges.

use super::executor::Executor;
use super::judge::Judge;
use super::plan::Plan;

/// What the stages of one replay have in common.
pub(crate) struct Replay<'a> {
    /// What must be computed.
    pub(super) plan: &'a Plan<'a>,
    /// Who computes it.
    pub(super) executor: Executor<'a>,
    /// What may differ from it.
    pub(super) judge: Judge<'a>,
}
