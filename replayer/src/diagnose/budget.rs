//! How much work a search for causes may do. The bound is on counted work, not on time, so that a
//! dump has the same answer on every machine and with any number of threads.
//!
//! A unit of work is about a multiply-add of the reference. The replay counts its own work in
//! the same units, so a share of the replay's work is about that share of its time.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::kernels::{NoProgress, Progress};
use crate::replay::outcome::{NotChecked, Outcome};

/// Work of a trial beside its matrix products, which dominates for a head of a few tokens.
const TRIAL: u64 = 1 << 20;
/// Work of comparing one element with its allowance.
const ELEMENT: u64 = 100;
/// Work that a quick search may always do, about four seconds of one core. The replay of a small
/// head takes milliseconds, and twice that would be too little to find a cause.
const FLOOR: u64 = 1 << 35;
/// How many times the replay's work a quick search may do.
const QUICK: u64 = 2;
/// A cause may spend one part in this many of the budget on looking for its parameters.
const LOOKS: u64 = 4;
/// A thorough search may do this many times the work of a quick one.
const THOROUGH: u64 = 25;

/// The name of other declarations in the list of what was not fully tried.
const DECLARATIONS: &str = "other declarations";
/// The name of pairs of causes in that list.
pub(super) const PAIRS: &str = "pairs of causes";

/// How closely causes are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Causes {
    /// Causes are not looked for.
    None,
    /// Within twice the work of the replay.
    #[default]
    Quick,
    /// Within fifty times the work of the replay.
    Thorough,
}

impl Causes {
    /// All of them, as they are spelled on the command line.
    pub const WORDS: [&str; 3] = ["none", "quick", "thorough"];

    /// Work that a search after this replay may do.
    fn limit(self, outcome: &Outcome, among: u64) -> u64 {
        let replayed = outcome.work + beside_products(outcome);
        let quick = QUICK.saturating_mul(replayed).max(FLOOR / among.max(1));
        match self {
            Causes::None => 0,
            Causes::Quick => quick,
            Causes::Thorough => quick.saturating_mul(THOROUGH),
        }
    }
}

impl FromStr for Causes {
    type Err = String;

    fn from_str(word: &str) -> Result<Causes, String> {
        match word {
            "none" => Ok(Causes::None),
            "quick" => Ok(Causes::Quick),
            "thorough" => Ok(Causes::Thorough),
            _ => Err(format!("it is one of {}", Causes::WORDS.join(", "))),
        }
    }
}

/// What a search is given.
#[derive(Clone, Copy)]
pub struct Budget<'a> {
    /// How closely it looks.
    pub causes: Causes,
    /// Where the work done is reported.
    pub progress: &'a dyn Progress,
    /// Called before the search begins with the work that it may do.
    pub begin: &'a dyn Fn(u64),
    /// How many searches of one step share the work that a search may always do: one for each
    /// version of the tensors that ranks hold.
    pub among: u64,
}

impl Default for Budget<'_> {
    fn default() -> Self {
        Budget { causes: Causes::default(), progress: &NoProgress, begin: &|_| {}, among: 1 }
    }
}

/// Counts the work of a search, and lists what the budget left untried.
pub struct Meter<'a> {
    progress: &'a dyn Progress,
    done: AtomicU64,
    /// The work that was done when the current cause began to look for its parameters.
    looked_from: AtomicU64,
    limit: u64,
    /// The work that one cause may spend on looking for its parameters.
    share: AtomicU64,
    left_out: Mutex<BTreeSet<String>>,
}

impl<'a> Meter<'a> {
    /// The meter of a search that begins now.
    pub fn new(budget: &Budget<'a>, outcome: &Outcome) -> Meter<'a> {
        let limit = budget.causes.limit(outcome, budget.among);
        (budget.begin)(limit);
        let (done, left_out) = (AtomicU64::new(0), Mutex::default());
        let (looked_from, share) = (AtomicU64::new(0), AtomicU64::new(limit / LOOKS));
        Meter { progress: budget.progress, done, looked_from, limit, share, left_out }
    }

    /// Counts the work of a trial beside its matrix products.
    pub(super) fn looked_at(&self, outcome: &Outcome) {
        self.advance(beside_products(outcome));
    }

    /// Whether no further hypothesis may be tried. A third of the budget is kept for
    /// confirming over all rows what a sample accepts.
    pub(super) fn is_spent(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= self.limit / 3 * 2
    }

    /// Whether another declaration may be tried. Declarations get the first third of the budget and
    /// the causes the second; the last is kept for confirmations.
    pub(super) fn may_redeclare(&self) -> bool {
        let may = self.done.load(Ordering::Relaxed) < self.limit / 3;
        if !may {
            self.note_untried(DECLARATIONS);
        }
        may
    }

    /// Notes that a cause begins to look for its parameters.
    pub(super) fn begin_look(&self) {
        self.looked_from.store(self.done.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether the current cause may go on looking: it has not used up its share, nor is the budget
    /// spent.
    pub(super) fn may_look(&self) -> bool {
        let from = self.looked_from.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed) - from;
        !self.is_spent() && done < self.share.load(Ordering::Relaxed)
    }

    /// After a search that found nothing: the causes that ran out of their share and may be tried
    /// again, and raises their share to an equal part of what is left. Empty where that part would
    /// not be larger than before.
    pub(super) fn lend_rest(&self) -> BTreeSet<String> {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let is_cause = |of: &&String| ![DECLARATIONS, PAIRS].contains(&of.as_str());
        let causes: BTreeSet<String> = left_out.iter().filter(is_cause).cloned().collect();
        let left = (self.limit / 3 * 2).saturating_sub(self.done.load(Ordering::Relaxed));
        let each = left / (causes.len() as u64).max(1);
        if causes.is_empty() || each <= self.share.load(Ordering::Relaxed) {
            return BTreeSet::new();
        }
        self.share.store(each, Ordering::Relaxed);
        left_out.retain(|of| !causes.contains(of));
        causes
    }

    /// Whether the whole budget is used up, including the third for confirmations.
    pub(super) fn is_over(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= self.limit
    }

    /// Lists a cause as not fully tried if the budget is spent.
    pub(super) fn note_if_spent(&self, cause: &str) {
        if self.is_spent() {
            self.note_untried(cause);
        }
    }

    /// Lists a cause as not fully tried if it ran out of its share while it looked for parameters.
    pub(super) fn end_look(&self, cause: &str) {
        if !self.may_look() {
            self.note_untried(cause);
        }
    }

    fn note_untried(&self, cause: &str) {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        left_out.insert(cause.to_string());
    }

    /// What was not tried, for the report.
    pub(super) fn not_checked(self, causes: Causes) -> Option<NotChecked> {
        let left_out = self.left_out.into_inner().unwrap_or_else(PoisonError::into_inner);
        if left_out.is_empty() {
            return None;
        }
        let (others, ids): (Vec<String>, Vec<String>) =
            left_out.into_iter().partition(|of| [DECLARATIONS, PAIRS].contains(&of.as_str()));
        let ids = (!ids.is_empty()).then(|| format!("the causes {}", ids.join(", ")));
        let what = ids.into_iter().chain(others).collect::<Vec<_>>().join(", ");
        let why = match causes {
            Causes::Thorough => "not all of them were tried within the largest budget",
            _ => {
                "not all of them were tried within the budget of a quick search: --causes thorough tries more"
            }
        };
        Some(NotChecked { what, why: why.into() })
    }
}

impl Progress for Meter<'_> {
    fn advance(&self, work: u64) {
        self.done.fetch_add(work, Ordering::Relaxed);
        self.progress.advance(work);
    }
}

/// Work of the comparisons of an outcome, beside the matrix products.
fn beside_products(outcome: &Outcome) -> u64 {
    let all = outcome.stages.iter().flat_map(|stage| &stage.comparisons);
    TRIAL + ELEMENT * all.map(|comparison| comparison.tally.elements).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter(limit: u64) -> Meter<'static> {
        let (done, left_out) = (AtomicU64::new(0), Mutex::default());
        let (looked_from, share) = (AtomicU64::new(0), AtomicU64::new(limit / LOOKS));
        Meter { progress: &NoProgress, done, looked_from, limit, share, left_out }
    }

    #[test]
    fn trials_end_before_what_confirms_them() {
        let meter = meter(300);
        meter.advance(199);
        assert!(!meter.is_spent());
        meter.advance(1);
        assert!(meter.is_spent() && !meter.is_over());
        meter.advance(100);
        assert!(meter.is_over());
    }

    #[test]
    fn what_other_causes_did_not_need_is_lent_once() {
        let meter = meter(2400);
        meter.begin_look();
        meter.advance(600);
        assert!(!meter.may_look());
        meter.end_look("cut off");
        meter.advance(500);
        assert!(meter.lend_rest().is_empty(), "what is left is not more");
        let meter = super::tests::meter(24_000);
        meter.share.store(3000, Ordering::Relaxed);
        meter.begin_look();
        meter.advance(3000);
        meter.end_look("cut off");
        assert_eq!(meter.lend_rest().into_iter().collect::<Vec<_>>(), ["cut off"]);
        meter.begin_look();
        meter.advance(3001);
        assert!(meter.may_look(), "it looks further than before");
        assert!(meter.not_checked(Causes::Quick).is_none());
    }

    #[test]
    fn other_declarations_leave_the_causes_as_much_as_they_took_and_are_said() {
        let meter = meter(300);
        meter.advance(99);
        assert!(meter.may_redeclare());
        meter.advance(1);
        assert!(!meter.may_redeclare() && !meter.is_spent());
        meter.share.store(1, Ordering::Relaxed);
        assert!(meter.lend_rest().is_empty(), "they are no cause that is tried again");
        meter.note_untried("a cause");
        assert_eq!(meter.lend_rest().into_iter().collect::<Vec<_>>(), ["a cause"]);
        let said = meter.not_checked(Causes::Quick).unwrap();
        assert_eq!(said.what, "other declarations", "also where causes are tried again");
    }

    #[test]
    fn only_what_a_spent_budget_left_out_is_said() {
        let meter = meter(3);
        meter.note_if_spent("tried");
        meter.advance(2);
        meter.note_if_spent("left");
        let said = meter.not_checked(Causes::Quick).unwrap();
        assert_eq!(said.what, "the causes left");
        let meter = super::tests::meter(0);
        for what in [PAIRS, "left"] {
            meter.note_if_spent(what);
        }
        assert_eq!(
            meter.not_checked(Causes::Quick).unwrap().what,
            "the causes left, pairs of causes"
        );
        assert!(said.why.contains("--causes thorough"));
        assert!(super::tests::meter(3).not_checked(Causes::Quick).is_none());
    }

    #[test]
    fn a_word_that_is_none_is_refused_with_those_that_are() {
        assert_eq!("thorough".parse(), Ok(Causes::Thorough));
        assert!("slow".parse::<Causes>().unwrap_err().contains("none, quick, thorough"));
    }
}
