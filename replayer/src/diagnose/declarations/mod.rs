//! The declaration is the first suspect: another one that makes every stage agree.
//!
//! A dump is judged by what the job said of its head, and people forget an option more often
//! than they break a kernel. So before a cause is looked for, each option is left out or set,
//! with a value that is inferred from the data, and the whole is judged again by the same
//! bounds. One is believed when every comparison that failed passes and none that passed fails.
//!
//! The same data come from a wrong declaration and from code that leaves its declaration, so
//! both readings are said. `misdeclared` is the word where the forward, the loss among it, has
//! the other option as the backward has: a job that is at odds with itself is wrong whatever is
//! declared. What the job declared by itself and its code does not have is `diverged`.

mod options;
pub(super) mod policy;
pub(super) mod read;

use std::collections::BTreeSet;

use super::evidence::{Evidence, Key, Residuals, reject_wider_bounds};
use super::findings::Found;
use super::proof;
use super::search::{Search, left_of};
use crate::head::{HeadOptions, HeadStep, MicrobatchInputs, Roundings, Stage};
use crate::replay::other_declaration::OtherDeclaration;
use crate::replay::world::World;

/// What changes in a head's options.
type Change = Box<dyn Fn(&mut HeadOptions) + Send + Sync>;

/// How much an option says about where the fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A term of the model that the job did not mention: forgotten, where all of it is there.
    Unsaid,
    /// A term of the model that the job declared: its code may as well have left it out.
    Said,
    /// How tokens, microbatches and ranks are counted, or a factor of the backward: faults of
    /// the catalogue do the same, and are believed first.
    Counted,
    /// Dtypes that the recorded values contradict.
    Shown,
    /// Dtypes that are not declared: more is allowed then, which proves nothing.
    Loosened,
}

/// Another declaration that is tried.
struct Candidate {
    option: &'static str,
    declared: String,
    instead: String,
    fitted: usize,
    kind: Kind,
    /// What tells a wrong declaration from wrong code.
    look: &'static str,
    change: Change,
    /// Weights that were recorded take no part.
    unweighted: bool,
}

impl World for Candidate {
    fn options(&self, options: &mut HeadOptions) {
        (self.change)(options);
    }

    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if self.unweighted {
            inputs.weights.fill(1.0);
        }
    }
}

/// A declaration with which everything agrees, before it is known what else does.
pub(super) struct Suspect {
    other: OtherDeclaration,
    kind: Kind,
    forward: bool,
}

impl Suspect {
    /// Whether no cause has to be looked for beside it: an option that the job did not mention, and
    /// that its forward and its backward both have.
    pub(super) fn is_enough(&self) -> bool {
        self.kind == Kind::Unsaid && self.forward
    }

    /// Whether a cause explains every stage that fails, as this declaration does. Beside dtypes any
    /// cause is kept: they explain by wider bounds, and not by what happened.
    pub(super) fn is_no_more_than(&self, cause: &Found) -> bool {
        let dtypes = matches!(self.kind, Kind::Shown | Kind::Loosened);
        dtypes || self.other.stages.iter().all(|stage| cause.stages.contains(stage))
    }

    /// The finding, once it is known whether a cause of the catalogue explains it, too.
    pub(super) fn told(mut self, explained: bool) -> OtherDeclaration {
        self.other.misdeclared = match self.kind {
            Kind::Unsaid => self.is_enough(),
            Kind::Counted => !explained,
            Kind::Shown => true,
            Kind::Said | Kind::Loosened => false,
        };
        self.other
    }
}

/// The declaration that explains everything that fails; of several the one with the fewest
/// fitted numbers, then the one that leaves least.
pub(super) fn suspect(search: &Search<'_>, evidence: &Evidence<'_>) -> Option<Suspect> {
    if evidence.failing.is_empty() {
        return None;
    }
    let mut found: Vec<(Candidate, f64)> = Vec::new();
    for candidate in options::candidates(search, evidence) {
        if !search.meter.may_redeclare() {
            break;
        }
        // More is allowed without a dtype: that is looked at only where nothing else explains.
        if matches!(candidate.kind, Kind::Shown | Kind::Loosened) && !found.is_empty() {
            continue;
        }
        let agreed = agrees(search, evidence, &candidate);
        if let Some(left) = agreed.filter(|_| is_backed(search, evidence, &candidate)) {
            found.push((candidate, left));
        }
    }
    found.sort_by(|(a, x), (b, y)| a.fitted.cmp(&b.fitted).then(x.total_cmp(y)));
    let mut found = found.into_iter();
    let (best, _) = found.next()?;
    // Another value of the same option is no other reading.
    let others = found.filter(|(one, _)| one.option != best.option && one.fitted <= best.fitted);
    let others = others.map(|(one, _)| format!("{}={}", one.option, one.instead)).collect();
    let stages: BTreeSet<Stage> = evidence.failing.iter().map(|key| key.stage).collect();
    let forward = stages.iter().any(|stage| Stage::FORWARD.contains(stage));
    let other = OtherDeclaration {
        option: best.option,
        declared: best.declared,
        instead: best.instead,
        fitted: best.fitted > 0,
        stages: stages.into_iter().map(Stage::name).collect(),
        others,
        look: best.look,
        misdeclared: false,
    };
    Some(Suspect { other, kind: best.kind, forward })
}

/// The energy that is left of what fails, where all of it passes in a world and nothing that
/// passed fails; over all rows in the end.
fn agrees(search: &Search<'_>, evidence: &Evidence<'_>, candidate: &Candidate) -> Option<f64> {
    let worlds: [&dyn World; 1] = [candidate];
    let rejects = |found: &Residuals| !passes(found, &evidence.failing);
    if search.glance(&worlds).as_ref().is_some_and(rejects) {
        return None;
    }
    let all: BTreeSet<Key> = evidence.residuals.keys().copied().collect();
    let mut sampled = search.residuals(&worlds)?;
    // Other dtypes explain by wider bounds; other options do not.
    if !matches!(candidate.kind, Kind::Shown | Kind::Loosened) {
        reject_wider_bounds(&mut sampled, &evidence.residuals);
    }
    if !passes(&sampled, &all) {
        return None;
    }
    if search.rows.is_some() && !search.holds(&worlds, &all) {
        return None;
    }
    Some(left_of(&sampled, &evidence.failing))
}

/// Whether more than a wider bound speaks for a candidate: of dtypes that are left out, that
/// a policy with them reproduces the gradients that fail, where gradients are all that fails.
fn is_backed(search: &Search<'_>, evidence: &Evidence<'_>, candidate: &Candidate) -> bool {
    if candidate.kind != Kind::Loosened {
        return true;
    }
    let mut options = evidence.step.options.clone();
    (candidate.change)(&mut options);
    let dtype = evidence.inputs.first().map(|one| one.dtype(evidence.step));
    let roundings = dtype.and_then(|dtype| Roundings::plausible(&options, dtype).ok());
    !roundings.is_some_and(|of| proof::is_refuted(search, evidence, (candidate, of)))
}

fn passes(found: &Residuals, keys: &BTreeSet<Key>) -> bool {
    keys.iter().all(|key| found.get(key).is_some_and(|of| of.passes))
}
