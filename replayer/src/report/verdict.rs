//! The verdict of a replay: one word, and the reasons for it.
//!
//! Each fault that is found adds a [`Reason`] with its own verdict. The most severe verdict of all
//! reasons is that of the replay, and without any reason the verdict is `Agreed`.

use serde::Serialize;

use super::schema::FirstDivergence;
use crate::checks::{Checked, Severity};
use crate::head::HeadStep;
use crate::replay::outcome::Outcome;

/// The verdict of a replay, the most severe last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Everything compared is what the declared precision must give.
    Agreed,
    /// Nothing diverged, and something asked for could not be judged.
    Incomplete,
    /// The two runs differ, and nothing recorded says how much they may.
    Differs,
    /// Something is more wrong than rounding can explain.
    Diverged,
    /// Everything agrees with another declaration of the head than the job's. It outranks every
    /// other verdict.
    Misdeclared,
}

/// Why a replay does not agree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reason {
    /// The verdict that it leads to.
    pub verdict: Verdict,
    /// What was found, or what is missing, in words.
    pub what: String,
}

impl Reason {
    /// The job did something wrong.
    pub fn diverged(what: impl Into<String>) -> Reason {
        Reason { verdict: Verdict::Diverged, what: what.into() }
    }

    /// The declaration does not describe the job.
    pub fn misdeclared(what: impl Into<String>) -> Reason {
        Reason { verdict: Verdict::Misdeclared, what: what.into() }
    }

    /// Two runs differ, and there is no bound for how much they may.
    pub fn differs(what: impl Into<String>) -> Reason {
        Reason { verdict: Verdict::Differs, what: what.into() }
    }

    /// The dump lacks something.
    pub fn incomplete(what: impl Into<String>) -> Reason {
        Reason { verdict: Verdict::Incomplete, what: what.into() }
    }
}

/// The most severe verdict of these reasons.
pub fn verdict(reasons: &[Reason]) -> Verdict {
    reasons.iter().map(|reason| reason.verdict).max().unwrap_or(Verdict::Agreed)
}

/// The reasons from the findings of the checks.
pub fn of_checks(checked: &Checked) -> Vec<Reason> {
    let failing = checked.findings.iter().filter(|found| found.severity == Severity::Fail);
    failing.map(|found| Reason::diverged(format!("{}: {}", found.check, found.evidence))).collect()
}

/// The reasons from the replay of one run's head; none where it was not asked for.
pub fn of_head(
    judged: Option<(&HeadStep<'_>, &Outcome)>,
    first: Option<&FirstDivergence>,
) -> Vec<Reason> {
    let Some((step, outcome)) = judged else { return Vec::new() };
    let mut reasons = Vec::new();
    let other = outcome.other_declaration.as_ref().filter(|other| other.misdeclared);
    reasons.extend(other.map(|other| Reason::misdeclared(other.verdict())));
    if let Some(first) = first {
        reasons.push(Reason::diverged(format!("{}: {}", first.stage, first.reason)));
    }
    for (key, why) in &step.unusable {
        reasons.push(Reason::incomplete(format!("what depends on {key}: {why}")));
    }
    let coverage = &outcome.coverage;
    reasons.extend(coverage.lacks.iter().map(|why| Reason::incomplete(why.clone())));
    for why in step.lacking.microbatches() {
        reasons.push(Reason::incomplete(why.clone()));
    }
    if !step.is_whole() && reasons.is_empty() {
        reasons.push(Reason::incomplete("an input of the head cannot be used"));
    }
    if outcome.compared() == 0 {
        reasons.push(Reason::incomplete("no stage could be compared"));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gravest_reason_is_the_verdict_and_none_agrees() {
        let (lacks, wrong) = (Reason::incomplete("q is lost"), Reason::diverged("dk"));
        assert_eq!(verdict(&[]), Verdict::Agreed);
        assert_eq!(verdict(std::slice::from_ref(&lacks)), Verdict::Incomplete);
        assert_eq!(verdict(&[wrong.clone(), lacks.clone()]), Verdict::Diverged);
        assert_eq!(verdict(&[lacks, wrong]), Verdict::Diverged);
    }
}
