//! The declaration is the first suspect: looks for another one with which every stage agrees.
//!
//! A dump is judged by what the job said of its head, and people forget an option more often than
//! they break a kernel. So before causes are tried, each option of the head is left out, or set to
//! a value inferred from the data, and every stage is compared again with the same bounds. Another
//! declaration is believed if every comparison that failed passes, and none that passed fails.
//!
//! A wrong declaration and wrong code give the same data, so the report says both readings. The
//! verdict is `misdeclared` where the forward (with the loss) and the backward both have the other
//! option: a job whose passes contradict each other is wrong whatever is declared. Where the job
//! declared an option that its code does not have, the verdict is `diverged`.

mod options;
pub(super) mod policy;
pub(super) mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backtape::head::Source;
use backtape::identity::Microbatch;

use super::evidence::{Evidence, Key, Residuals, reject_wider_bounds};
use super::findings::CauseReport;
use super::proof;
use super::search::{Search, left_of};
use crate::head::{HeadOptions, HeadStep, MicrobatchInputs, Roundings, Stage};
use crate::replay::other_declaration::OtherDeclaration;
use crate::replay::world::World;

/// A change of the head's options.
type Change = Box<dyn Fn(&mut HeadOptions) + Send + Sync>;

/// What kind of option it is, which decides how much it proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A term of the model that the job did not mention: forgotten in the declaration, if forward
    /// and backward have it.
    Unsaid,
    /// A term of the model that the job declared: its code may have left it out.
    Said,
    /// How tokens, microbatches and ranks are counted, or a factor on the backward: causes of the
    /// catalogue explain the same, and come first.
    Counted,
    /// Dtypes that the recorded values contradict.
    Shown,
    /// Dtypes that are left out: the bounds are wider then, which proves nothing by itself.
    Loosened,
}

/// Another declaration that is tried.
struct Candidate {
    option: &'static str,
    declared: String,
    instead: String,
    fitted: usize,
    kind: Kind,
    /// Where to look in the job to distinguish a wrong declaration from wrong code.
    look: &'static str,
    change: Change,
    /// Weights that it has in place of the recorded ones.
    weights: Option<Weights>,
}

/// Weights of tokens that nobody recorded.
enum Weights {
    /// 1 for each.
    Ones,
    /// 1 for the tokens that get a gradient, and 0 for the others, by microbatch.
    Mask(Arc<Masks>),
}

/// Whether each token counts, by microbatch, `[T]`.
type Masks = BTreeMap<Option<Microbatch>, Vec<bool>>;

impl World for Candidate {
    fn options(&self, options: &mut HeadOptions) {
        (self.change)(options);
    }

    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        match &self.weights {
            None => {}
            Some(Weights::Ones) => inputs.weights.fill(1.0),
            Some(Weights::Mask(masks)) => {
                let mask = masks.get(&inputs.microbatch).into_iter().flatten();
                for (weight, counts) in inputs.weights.iter_mut().zip(mask) {
                    *weight = f64::from(u8::from(*counts));
                }
            }
        }
    }
}

/// A declaration with which everything agrees, before the causes were tried.
pub(super) struct Suspect {
    other: OtherDeclaration,
    kind: Kind,
    forward: bool,
}

impl Suspect {
    /// Whether only cheap causes need be tried beside it: the job did not mention the option, and
    /// its forward and backward both have it.
    pub(super) fn is_enough(&self) -> bool {
        self.kind == Kind::Unsaid && self.forward
    }

    /// Whether a cause explains every stage that this declaration explains. Always true for dtypes,
    /// which explain only by wider bounds.
    pub(super) fn is_no_more_than(&self, cause: &CauseReport) -> bool {
        let dtypes = matches!(self.kind, Kind::Shown | Kind::Loosened);
        dtypes || self.other.stages.iter().all(|stage| cause.stages.contains(stage))
    }

    /// The finding for the report. `explained`: whether a cause of the catalogue explains the
    /// divergence too.
    pub(super) fn finding(mut self, explained: bool) -> OtherDeclaration {
        self.other.misdeclared = match self.kind {
            Kind::Unsaid => self.is_enough(),
            Kind::Counted => !explained,
            Kind::Shown => true,
            Kind::Said | Kind::Loosened => false,
        };
        self.other
    }
}

/// The declaration that explains everything that fails; of several, the one with the fewest fitted
/// numbers, then the one that leaves least energy.
pub(super) fn suspect(search: &Search<'_>, evidence: &Evidence<'_>) -> Option<Suspect> {
    if evidence.failing.is_empty() {
        return None;
    }
    let mut agreeing: Vec<(Candidate, f64)> = Vec::new();
    for candidate in options::candidates(search, evidence) {
        if !search.meter.may_redeclare() {
            break;
        }
        // What was found in the job is not a declaration that somebody can have got wrong.
        let source = evidence.step.options.declared.source(candidate.option);
        if matches!(source, Some(Source::Seen | Source::Measured)) {
            continue;
        }
        // Leaving out a dtype only widens bounds, so it is tried only where nothing else explains
        // the failure.
        if matches!(candidate.kind, Kind::Shown | Kind::Loosened) && !agreeing.is_empty() {
            continue;
        }
        let agreed = agrees(search, evidence, &candidate);
        if let Some(left) = agreed.filter(|_| is_backed(search, evidence, &candidate)) {
            agreeing.push((candidate, left));
        }
    }
    agreeing.sort_by(|(a, x), (b, y)| a.fitted.cmp(&b.fitted).then(x.total_cmp(y)));
    let mut agreeing = agreeing.into_iter();
    let (best, _) = agreeing.next()?;
    // Another value of the same option is not reported as another reading.
    let others = agreeing.filter(|(candidate, _)| {
        candidate.option != best.option && candidate.fitted <= best.fitted
    });
    let others = others
        .map(|(candidate, _)| format!("{}={}", candidate.option, candidate.instead))
        .collect();
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

/// The energy left in the failing comparisons, if every comparison passes with this declaration, on
/// the sample and then on all rows; none otherwise.
fn agrees(search: &Search<'_>, evidence: &Evidence<'_>, candidate: &Candidate) -> Option<f64> {
    let worlds: [&dyn World; 1] = [candidate];
    let rejects = |residuals: &Residuals| !passes(residuals, &evidence.failing);
    if search.glance(&worlds).as_ref().is_some_and(rejects) {
        return None;
    }
    let all: BTreeSet<Key> = evidence.residuals.keys().copied().collect();
    let mut sampled = search.residuals(&worlds)?;
    // Other options must not explain by wider bounds alone; other dtypes can do nothing else.
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

/// Whether a candidate is supported by more than wider bounds. For dtypes that are left out: no, if
/// gradients fail that no policy with the dtypes left out reproduces.
fn is_backed(search: &Search<'_>, evidence: &Evidence<'_>, candidate: &Candidate) -> bool {
    if candidate.kind != Kind::Loosened {
        return true;
    }
    let mut options = evidence.step.options.clone();
    (candidate.change)(&mut options);
    let dtype = evidence.inputs.first().map(|inputs| inputs.dtype(evidence.step));
    let roundings = dtype.and_then(|dtype| Roundings::plausible(&options, dtype).ok());
    !roundings.is_some_and(|roundings| proof::is_refuted(search, evidence, (candidate, roundings)))
}

fn passes(residuals: &Residuals, keys: &BTreeSet<Key>) -> bool {
    keys.iter().all(|key| residuals.get(key).is_some_and(|residual| residual.passes))
}
