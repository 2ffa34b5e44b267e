//! What an entry of the catalogue is: a hypothesis about a job, with its parameters, that
//! can be tried on the dump.

use std::sync::Arc;

use super::evidence::Evidence;
use crate::head::Stage;
use crate::replay::world::World;

/// How long the parameters of a cause take to be found, in the order in which causes are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// They are read off the dump, or solved for.
    Little,
    /// Policies are emulated, or some numbers tried.
    Some,
    /// Many sums are tried.
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
    /// Its id, as NUMERICS and the reports spell it.
    fn id(&self) -> &str;

    /// What it is, in one sentence.
    fn about(&self) -> &str;

    /// Where it really happened: projects and their issues.
    fn cases(&self) -> &'static [&'static str];

    /// What cures it, in one sentence.
    fn advice(&self) -> &str;

    /// What is worth trying, with parameters; empty where the detectors say that this
    /// cause cannot be.
    fn hypotheses(&self, _evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        Vec::new()
    }

    /// True when what it does may be no more than to round an intermediate: a job that does
    /// not declare how it rounds may do that, and where the bounds allow it, it is no fault.
    fn may_be_right(&self) -> bool {
        false
    }

    /// How long its parameters take to be looked for: causes that take little are tried first.
    fn effort(&self) -> Effort {
        Effort::Little
    }

    /// For causes that are seen and not computed: the sentence that proves it.
    fn observed(&self, _evidence: &Evidence<'_>) -> Option<Observed> {
        None
    }
}

/// Fitted numbers that one for every token counts as: whatever explains as much with fewer is
/// to be preferred.
const FOR_EVERY_TOKEN: usize = 8;

/// One set of parameters of a cause, ready to be tried.
#[derive(Clone)]
pub struct Hypothesis {
    /// What the job did.
    pub world: Arc<dyn World>,
    /// Parameters in words, for the report.
    pub parameters: Vec<(&'static str, String)>,
    /// How many of them were fitted to captured gradients rather than taken from what the
    /// dump says of itself. A hypothesis with fewer is preferred.
    pub fitted: usize,
    /// Whether it has a number for every token: whatever one gradient is, such numbers explain
    /// it. It is believed where it explains the other gradient too.
    pub of_both: bool,
}

impl Hypothesis {
    /// A hypothesis whose parameters all come from the dump.
    pub fn new(world: impl World + 'static, parameters: Vec<(&'static str, String)>) -> Hypothesis {
        Hypothesis { world: Arc::new(world), parameters, fitted: 0, of_both: false }
    }

    /// Whether it is a policy that is emulated: such trials share no passes with others.
    pub fn emulates(&self, evidence: &Evidence<'_>) -> bool {
        evidence.roundings().is_some_and(|of| self.world.policy(&of).is_some())
    }

    /// The same with a number for every token, fitted to one gradient.
    pub fn of_both(self) -> Hypothesis {
        Hypothesis { fitted: FOR_EVERY_TOKEN, of_both: true, ..self }
    }

    /// The same with so many parameters fitted.
    pub fn fitted(self, fitted: usize) -> Hypothesis {
        Hypothesis { fitted, ..self }
    }
}

/// What a cause that needs no emulation was seen by.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// One sentence with ranks, microbatches, rows.
    pub evidence: String,
    /// Stages that it explains.
    pub stages: Vec<Stage>,
    /// Parameters in words.
    pub parameters: Vec<(&'static str, String)>,
}
