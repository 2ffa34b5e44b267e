//! What an entry of the catalogue is: a kind of fault ([`Cause`]) that offers hypotheses
//! ([`Hypothesis`]), each a world with concrete parameters that can be tried on the dump.

use std::sync::Arc;

use super::evidence::Evidence;
use crate::head::Stage;
use crate::replay::world::World;

/// How much work it takes to find the parameters of a cause. Cheap causes are tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// They are read off the dump, or solved for.
    Little,
    /// Policies are emulated, or some numbers tried.
    Some,
    /// Many ways to cut and order a sum are tried.
    Much,
    /// Hundreds of hypotheses are tried one by one.
    Most,
}

impl Effort {
    /// All of them, in order.
    pub const ALL: [Effort; 4] = [Effort::Little, Effort::Some, Effort::Much, Effort::Most];
}

/// One entry of the catalogue. Everything that is known of it lies in its own file.
pub trait Cause: Sync {
    /// Its id, as reports and docs/causes.md spell it.
    fn id(&self) -> &str;

    /// What it is, in one sentence.
    fn about(&self) -> &str;

    /// Where it happened in real projects: their names and issues or commits.
    fn cases(&self) -> &'static [&'static str];

    /// How to fix it, in one sentence.
    fn advice(&self) -> &str;

    /// The hypotheses of this cause that are worth a trial; empty where the detectors rule the
    /// cause out.
    fn hypotheses(&self, _evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        Vec::new()
    }

    /// True when this cause may do no more than round an intermediate value. A job that does not
    /// declare its roundings may do so, and as long as its errors are within the bounds it is no
    /// fault.
    fn may_be_right(&self) -> bool {
        false
    }

    /// How much work it takes to find its parameters.
    fn effort(&self) -> Effort {
        Effort::Little
    }

    /// For causes that have the job use an option of the head otherwise than declared: the option,
    /// or several that say the same.
    fn options(&self) -> &'static [&'static str] {
        &[]
    }

    /// For causes that show in the dump without a trial: what shows them.
    fn observed(&self, _evidence: &Evidence<'_>) -> Option<Observed> {
        None
    }
}

/// How many fitted numbers a hypothesis counts as that has one number for every token: any
/// hypothesis that explains as much with fewer is preferred.
const FOR_EVERY_TOKEN: usize = 8;

/// One set of parameters of a cause, ready to be tried.
#[derive(Clone)]
pub struct Hypothesis {
    /// What the job did, in executable form.
    pub world: Arc<dyn World>,
    /// Parameters in words, for the report.
    pub parameters: Vec<(&'static str, String)>,
    /// How many of them were fitted to captured gradients instead of being read from the dump. Of
    /// two hypotheses that explain as much, the one with fewer is preferred.
    pub fitted: usize,
    /// True when it has a number for every token, fitted to one gradient. Such numbers fit nearly
    /// any gradient, so it is believed only if it explains the other gradient as well.
    pub per_token: bool,
    /// True when it has the job use an option of the head that was seen to be off in its call.
    pub contradicts_call: bool,
}

impl Hypothesis {
    /// A hypothesis whose parameters all come from the dump.
    pub fn new(world: impl World + 'static, parameters: Vec<(&'static str, String)>) -> Hypothesis {
        let world = Arc::new(world);
        Hypothesis { world, parameters, fitted: 0, per_token: false, contradicts_call: false }
    }

    /// Whether its trial emulates a rounding policy. Such a trial cannot reuse the forward passes
    /// of other trials.
    pub fn emulates(&self, evidence: &Evidence<'_>) -> bool {
        evidence.roundings().is_some_and(|roundings| self.world.policy(&roundings).is_some())
    }

    /// The same hypothesis, marked as having a number for every token that was fitted to one
    /// gradient.
    pub fn with_number_per_token(self) -> Hypothesis {
        Hypothesis { fitted: FOR_EVERY_TOKEN, per_token: true, ..self }
    }

    /// The same hypothesis, with the number of its parameters that were fitted.
    pub fn fitted(self, fitted: usize) -> Hypothesis {
        Hypothesis { fitted, ..self }
    }
}

/// What shows a cause that needs no trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// One sentence with ranks, microbatches, rows.
    pub evidence: String,
    /// Stages that it explains.
    pub stages: Vec<Stage>,
    /// Parameters in words.
    pub parameters: Vec<(&'static str, String)>,
}
