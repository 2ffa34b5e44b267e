//! The step in the report: its reasons, its first divergence, and its lines of text.

use std::fmt::Write;

use backtape::manifest::Omission;

use super::schema::{FirstDivergence, Report};
use super::text::wrap;
use super::verdict::{self, Reason};
use crate::algebra::{
    DeclaredRule, Group, Multiplied, NOTHING_OF, NormGap, Sampled, StageSummary, StepReport,
};
use crate::number::{count, error, plural, short};
use crate::replay::outcome::NotChecked;

/// Groups that the text tells: it is one screen.
const GROUPS: usize = 4;

/// What stands in front of the lines that follow the first of a group.
const INDENT: &str = "           ";

/// What is not judged where a job's loss was not recorded.
pub(super) const NO_HEAD: &str = "the loss head";

impl Report {
    /// Says of a step without a declared head what the recorder left out of it: a head that was
    /// found and not recorded is one that cannot be judged, a loss that nothing knows is not.
    pub fn say_why_no_head(&mut self, omissions: &[Omission]) {
        let left = |name: &str| omissions.iter().find(|omission| omission.tensor == name);
        if let Some(omission) = left("head") {
            let what = format!("{NO_HEAD} could not be recorded: {}", omission.reason);
            self.reasons.push(Reason::incomplete(what));
            self.verdict = verdict::verdict(&self.reasons);
        } else if let Some(omission) = left("loss") {
            self.not_checked
                .push(NotChecked { what: NO_HEAD.into(), why: omission.reason.clone() });
        }
    }

    /// The report with what became of every parameter's gradient. `is_asked`: a user asked for it
    /// by name, so that its absence is a lack.
    pub fn with_algebra(mut self, algebra: Option<StepReport>, is_asked: bool) -> Report {
        let Some(algebra) = algebra else {
            if is_asked {
                let what = "no part of the step was recorded: backtape.torch.step_algebra or \
                            backtape.jax.step_algebra records it";
                self.reasons.push(Reason::incomplete(what));
                self.verdict = verdict::verdict(&self.reasons);
            }
            return self;
        };
        if algebra.compared() == 0 {
            let what = "no stage of the step could be judged";
            self.reasons.push(Reason::incomplete(what));
        }
        self.reasons.extend(algebra.lacks.iter().map(Reason::incomplete));
        if let Some(first) = algebra.first() {
            self.reasons.push(Reason::diverged(format!("{}: {}", first.stage.name(), said(first))));
            let first = self.first_of_step(first);
            self.first_divergence.get_or_insert(first);
        }
        let unchecked = algebra.unchecked.iter().map(|left| NotChecked {
            what: format!("{} of {}", left.stage.name(), left.what),
            why: left.why.clone(),
        });
        self.not_checked.extend(unchecked);
        self.findings.extend(algebra.faults.iter().cloned());
        self.verdict = verdict::verdict(&self.reasons);
        self.algebra = Some(algebra);
        self
    }

    fn first_of_step(&self, first: &Group) -> FirstDivergence {
        FirstDivergence {
            stage: first.stage.name().into(),
            tensor: first.what.clone(),
            microbatch: None,
            rank: match first.ranks[..] {
                [rank] => Some(rank),
                _ => None,
            },
            run: self.dump.run.clone(),
            reason: said(first),
        }
    }
}

/// How far the weights of all tokens together may be from 1.
const WEIGHED: f64 = 1e-2;

/// How many sentences of what a diverging step lacks are told.
const LACKS: usize = 4;

/// What a group of parameters is, in one clause.
pub(super) fn said(group: &Group) -> String {
    let words = match (&group.reading, group.factor) {
        (Some(reading), _) => reading.words.clone(),
        (None, Some(factor)) if (factor - 1.0).abs() > 1e-6 => {
            format!("captured = {factor:.7} x reference")
        }
        (None, _) => group.reason.clone(),
    };
    format!("{}: {words}", group.what)
}

/// On how much the step agrees, in words.
pub(super) fn covered(algebra: &StepReport) -> String {
    let judged = algebra.stages.iter().filter(|stage| stage.agreed > 0).count();
    format!(
        "{} of {}",
        plural(judged as u64, "stage"),
        plural(algebra.parameters as u64, "parameter")
    )
}

/// Writes the stages of the step, and what diverges in them; `label` says whose step it is.
pub(super) fn render(out: &mut String, algebra: &StepReport, label: &str) {
    let (parameters, elements) = (algebra.parameters as u64, count(algebra.elements));
    let size = format!("{}, {elements} elements", plural(parameters, "parameter"));
    wrap(out, label, &size);
    if let Some(sampled) = &algebra.sampled {
        wrap(out, "sampled   ", &sample(sampled));
    }
    if !algebra.rules.is_empty() {
        wrap(out, "rules     ", &declared(&algebra.rules));
    }
    if let Some(own) = &algebra.multiplied {
        wrap(out, "multiplied ", &multiplied(own));
    }
    let _ = writeln!(
        out,
        "{:<13}{:>8} {:>8} {:>10}  a wrong factor is seen from",
        "stage", "pass", "FAIL", "unchecked"
    );
    algebra.stages.iter().for_each(|own| stage(out, own));
    for group in algebra.diverged.iter().take(GROUPS) {
        diverged(out, group);
    }
    if let more @ 1.. = algebra.diverged.len().saturating_sub(GROUPS) {
        let groups = plural(more as u64, "more group");
        wrap(out, "and        ", &format!("{groups} of parameters: --report and --json have all"));
    }
    if let Some(norm) = &algebra.norm {
        wrap(out, "grad_norm  ", &gap(norm));
    }
    // Where nothing diverges they are the verdict's reasons; a stage without any judgement has its
    // line among what was not checked.
    let is_told = |own: &&String| algebra.first().is_some() && !own.starts_with(NOTHING_OF);
    for lack in algebra.lacks.iter().filter(is_told).take(LACKS) {
        wrap(out, "besides    ", lack);
    }
    out.push('\n');
}

/// By which rules optimizers were judged, where the job declares them.
pub(super) fn declared(rules: &[DeclaredRule]) -> String {
    let words = |own: &DeclaredRule| format!("{} by {}", own.optimizer, own.rule);
    rules.iter().map(words).collect::<Vec<_>>().join("; ")
}

/// What code of the job's own has multiplied all gradients by.
pub(super) fn multiplied(own: &Multiplied) -> String {
    let mut words = format!(
        "after the last backward pass code of the job's own multiplied the gradients by {}: ",
        short(own.factor)
    );
    words += &match own.equals.is_empty() {
        false => own.equals.join(", or "),
        true => "no number of the job that is known".into(),
    };
    if let Some(weight) = own.weight.filter(|weight| (weight - 1.0).abs() > WEIGHED) {
        let _ = write!(
            words,
            "; the weights of all tokens are {} together, and 1 in their mean",
            short(weight)
        );
    }
    words
}

/// What was sampled, and what that does not see.
pub(super) fn sample(sampled: &Sampled) -> String {
    let parameters = plural(sampled.parameters as u64, "parameter");
    let share = 100.0 * sampled.elements as f64 / sampled.of.max(1) as f64;
    let mut words = format!(
        "{} of {} elements ({} %) of {parameters}; norms are judged over all elements. What may not \
         be seen is a fault in fewer than {} elements of a parameter that lie anywhere, or in a \
         region of it that no block meets",
        count(sampled.elements),
        count(sampled.of),
        short(share),
        count(sampled.scattered),
    );
    if let Some(first) = sampled.unseen.first() {
        let more = match sampled.unseen.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let _ = write!(
            words,
            ". The gradient of {first}{more} is zero in all that was sampled, so nothing of its sums \
             was seen"
        );
    }
    words
}

/// What the norm is and would have been, in one sentence.
pub(super) fn gap(norm: &NormGap) -> String {
    let reported = norm.reported.map(|value| format!("{} as reported, ", short(value)));
    if norm.of_norm {
        return format!(
            "{}{} of the captured gradients: the norm is not theirs, and no sum that was judged is wrong",
            reported.unwrap_or_default(),
            short(norm.captured)
        );
    }
    let share = |(what, share): &(String, f64)| format!("{:.1} % from {what}", 100.0 * share);
    let shares: Vec<String> = norm.shares.iter().map(share).collect();
    let estimated = if norm.estimated { " (by the ratios in the samples)" } else { "" };
    let difference = match norm.shares.is_empty() {
        false => format!("of the difference of the squares {}", shares.join(", ")),
        true if (norm.captured - norm.right).is_finite() => {
            "roundings explain the difference, so it has no shares".into()
        }
        true => "their difference is no finite number, so it has no shares".into(),
    };
    format!(
        "{}{} of the captured gradients, {} had every sum been right{estimated}; {difference}",
        reported.unwrap_or_default(),
        short(norm.captured),
        short(norm.right),
    )
}

fn stage(out: &mut String, own: &StageSummary) {
    let seen = own.seen_from.map_or(String::new(), |factor| format!("1 ± {}", short(factor)));
    let _ = writeln!(
        out,
        "{:<13}{:>8} {:>8} {:>10}  {seen}",
        own.stage.name(),
        own.agreed,
        own.diverged,
        own.unchecked
    );
}

/// The ranks on which a group diverges.
pub(super) fn held(group: &Group) -> String {
    let ranks: Vec<_> = group.ranks.iter().map(|rank| backtape::identity::Rank(*rank)).collect();
    crate::dump::name_ranks(&ranks)
}

/// The element of a group that is furthest off.
pub(super) fn worst(group: &Group) -> Option<String> {
    let (parameter, index, captured, reference) = group.worst.as_ref()?;
    let (captured, reference) = (short(*captured), short(*reference));
    let of = group.state.as_ref().map(|state| format!("{state} of ")).unwrap_or_default();
    Some(format!("{of}{parameter} {index:?} is {captured}, and should be {reference}"))
}

fn diverged(out: &mut String, group: &Group) {
    let label = format!("{:<11}", group.stage.name());
    let by = match group.error.is_finite() {
        true => {
            format!(" (error {}, rounding explains {})", error(group.error), error(group.floor))
        }
        false => String::new(),
    };
    wrap(out, &label, &format!("FAIL on {}: {}{by}", held(group), said(group)));
    if let Some(worst) = worst(group) {
        wrap(out, INDENT, &format!("worst: {worst}"));
    }
    let Some(reading) = &group.reading else {
        wrap(out, INDENT, "cause: unknown");
        return;
    };
    wrap(out, INDENT, &format!("cause: {}; look at {}", reading.cause, reading.look));
}
