//! Tries the hypotheses of a catalogue and keeps what each of them explains.

use std::collections::{BTreeMap, BTreeSet};

use super::against::Against;
use super::cause::{Cause, Hypothesis};
use super::evidence::{Evidence, Key, Residuals, residuals};
use crate::head::{HeadStep, Stage};
use crate::replay::pass_cache::PassCache;
use crate::replay::trial::{Rows, trial};
use crate::replay::world::{AtTies, World};

/// A hypothesis that leaves less than this share of the energy, of all comparisons or of
/// one, may fail by ties alone.
const NEAR: f64 = 0.1;
/// A glance that shows this many times the floor in all that fails speaks for all rows.
const SHOWN: f64 = 4.0;
/// A hypothesis that leaves more than this share of the energy is dismissed at a glance.
const DISMISSED: f64 = 0.95;

/// A hypothesis with what it explains.
pub struct Tried<'c> {
    /// Its cause.
    pub cause: &'c dyn Cause,
    /// Its world and parameters.
    pub hypothesis: Hypothesis,
    /// Every comparison in its world.
    pub residuals: Residuals,
    /// Comparisons that fail without it and pass with it.
    pub explains: BTreeSet<Key>,
    /// Sum over all failing comparisons of the energy left, each over its floor.
    pub left: f64,
    /// True when the comparisons are over all rows, not over a sample.
    pub full: bool,
    /// What agrees as declared and would not if this were what happened.
    pub against: Against,
}

impl Tried<'_> {
    /// Numbers that were fitted, and a half where a part of the step speaks against it: of two
    /// that explain as much, the one with less is believed. That a fault is in a part alone is
    /// a choice of few; a number is one of many.
    pub fn cost(&self) -> f64 {
        self.hypothesis.fitted as f64 + if self.against.parts.is_empty() { 0.0 } else { 0.5 }
    }

    /// Energy that is left of some comparisons, each over what rounding is expected to
    /// make of it, so that stages of different size count alike.
    pub fn left_of(&self, keys: &BTreeSet<Key>) -> f64 {
        left_of(&self.residuals, keys)
    }

    /// True when every one of these comparisons is equal in every bit.
    pub fn exact(&self, keys: &BTreeSet<Key>) -> bool {
        keys.iter().all(|key| self.residuals.get(key).is_some_and(|found| found.energy == 0.0))
    }
}

/// Energy left of some comparisons, each over its floor; infinite where one is missing.
pub fn left_of(of: &Residuals, keys: &BTreeSet<Key>) -> f64 {
    let one = |key: &Key| match of.get(key) {
        Some(found) if found.energy == 0.0 => 0.0,
        Some(found) => found.energy / found.floor.max(f64::MIN_POSITIVE),
        None => f64::INFINITY,
    };
    keys.iter().map(one).sum()
}

/// Where hypotheses are tried.
pub struct Search<'a> {
    /// The dump and the head as declared.
    pub step: &'a HeadStep<'a>,
    /// Stages that are compared.
    pub compared: BTreeSet<Stage>,
    /// Rows that trials look at.
    pub rows: Option<Rows>,
    /// Few of them, for a glance; none where all are few.
    pub few: Option<Rows>,
    /// Forward passes that trials have in common.
    pub cache: PassCache,
}

/// What a glance shows of a hypothesis that is no better than its background.
struct Dismissed {
    residuals: Residuals,
    left: f64,
}

impl<'a> Search<'a> {
    /// Every comparison in a world; `None` where the dump cannot be judged in it.
    pub fn residuals(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        self.judged(worlds, self.rows.as_ref())
    }

    /// The comparisons of some rows; each stage in the worlds that speak of it.
    fn judged(&self, worlds: &[&dyn World], rows: Option<&Rows>) -> Option<Residuals> {
        let mut groups: BTreeMap<Vec<usize>, BTreeSet<Stage>> = BTreeMap::new();
        for &stage in &self.compared {
            let of = (0..worlds.len()).filter(|&at| worlds[at].speaks_of(stage)).collect();
            groups.entry(of).or_default().insert(stage);
        }
        let mut found = Residuals::new();
        for (of, stages) in groups {
            let all: Vec<&dyn World> = of.iter().map(|&at| worlds[at]).collect();
            let outcome = trial(self.step, &self.compared, &all, (rows, Some(&self.cache))).ok()?;
            found
                .extend(residuals(&outcome).into_iter().filter(|(k, _)| stages.contains(&k.stage)));
        }
        Some(found)
    }

    /// The same search of some stages alone.
    pub(super) fn only(&self, wanted: impl Fn(Stage) -> bool) -> Search<'a> {
        Search {
            step: self.step,
            compared: self.compared.iter().filter(|&&stage| wanted(stage)).copied().collect(),
            rows: self.rows.clone(),
            few: self.few.clone(),
            cache: PassCache::default(),
        }
    }

    /// Every comparison in a world, over the few rows of a glance.
    pub fn glance(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        self.judged(worlds, Some(self.few.as_ref()?))
    }

    /// A hypothesis that a glance shows to be no better than its background, where the
    /// glance shows all that fails.
    fn dismissed(&self, worlds: &[&dyn World], evidence: &Evidence<'_>) -> Option<Dismissed> {
        let base = evidence.glance()?;
        let clear =
            |key: &Key| base.get(key).is_some_and(|of| !of.passes && of.energy > SHOWN * of.floor);
        if !evidence.failing.iter().all(clear) {
            return None;
        }
        let residuals = self.glance(worlds)?;
        let share = left_of(&residuals, &evidence.failing) / left_of(base, &evidence.failing);
        let passes = |key: &Key| residuals.get(key).is_some_and(|of| of.passes);
        if !(share > DISMISSED) || evidence.failing.iter().any(passes) {
            return None;
        }
        Some(Dismissed { residuals, left: share * left_of(&evidence.residuals, &evidence.failing) })
    }

    /// Every comparison in a world, over all rows.
    pub(super) fn in_full(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        let mut all: Vec<&dyn World> = worlds.to_vec();
        all.push(&AtTies);
        self.judged(&all, None)
    }

    /// True when some comparisons pass in these worlds over all rows.
    pub fn holds(&self, worlds: &[&dyn World], keys: &BTreeSet<Key>) -> bool {
        let all = self.in_full(worlds).unwrap_or_default();
        keys.iter().all(|key| all.get(key).is_some_and(|found| found.passes))
    }

    /// Tries a hypothesis again, over all rows.
    pub fn confirm(&self, of: &mut Tried<'_>, evidence: &Evidence<'_>) {
        let mut worlds = evidence.background.clone();
        worlds.push(&*of.hypothesis.world);
        of.residuals = self.in_full(&worlds).unwrap_or_default();
        (of.explains, of.against) = evidence.explained(&of.residuals);
        of.left = left_of(&of.residuals, &evidence.failing);
        of.full = true;
    }

    /// Tries every hypothesis of the catalogue on top of the evidence's background.
    pub fn all<'c>(&self, catalogue: &[&'c dyn Cause], evidence: &Evidence<'_>) -> Vec<Tried<'c>> {
        let mut found = Vec::new();
        for &cause in catalogue {
            for hypothesis in cause.hypotheses(evidence) {
                found.extend(self.one(cause, hypothesis, evidence));
            }
        }
        found
    }

    fn one<'c>(
        &self,
        cause: &'c dyn Cause,
        hypothesis: Hypothesis,
        evidence: &Evidence<'_>,
    ) -> Option<Tried<'c>> {
        let mut worlds = evidence.background.clone();
        worlds.push(&*hypothesis.world);
        if let Some(Dismissed { residuals, left }) = self.dismissed(&worlds, evidence) {
            let (explains, full, against) = (BTreeSet::new(), false, Against::default());
            return Some(Tried { cause, hypothesis, residuals, explains, left, full, against });
        }
        let mut residuals = self.residuals(&worlds)?;
        let (mut explains, mut against) = evidence.explained(&residuals);
        let left = left_of(&residuals, &evidence.failing);
        let before = left_of(&evidence.residuals, &evidence.failing);
        // One comparison may be near while a second fault is all of the energy.
        let is_near = |key: &Key| {
            let pair = residuals.get(key).zip(evidence.residuals.get(key));
            !explains.contains(key)
                && pair.is_some_and(|(now, before)| now.energy < NEAR * before.energy)
        };
        let near = left < NEAR * before || evidence.failing.iter().any(is_near);
        // Near, and a few values may have rounded the other way in the job.
        if explains.len() < evidence.failing.len() && near {
            worlds.push(&AtTies);
            residuals = self.residuals(&worlds)?;
            (explains, against) = evidence.explained(&residuals);
        }
        let full = self.rows.is_none();
        Some(Tried { cause, hypothesis, residuals, explains, left, full, against })
    }
}
