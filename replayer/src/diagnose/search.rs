//! Tries the hypotheses of a catalogue and keeps what each of them explains.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::against::{Against, Part};
use super::budget::{Meter, PAIRS};
use super::cause::{Cause, Effort, Hypothesis};
use super::detectors::places::Places;
use super::evidence::{
    Evidence, Key, Residuals, accept_next_to_nothing, reject_wider_bounds, residuals,
};
use super::limited::{Within, limited};
use super::plain;
use crate::head::{HeadStep, Stage};
use crate::kernels::Progress;
use crate::replay::executor::pass_cache::PassCache;
use crate::replay::trial::{Rows, counted_trial};
use crate::replay::world::{AtTies, World};

/// A hypothesis that leaves less than this share of the energy, of all comparisons or of
/// one, may fail by ties alone.
const NEAR: f64 = 0.1;
/// A hypothesis that leaves so many times less energy than there was settles a search.
pub(super) const SETTLED: f64 = 1e4;
/// A hypothesis with more fitted numbers than these does not end the search: one that holds in some
/// places alone may explain as much with none.
const FEW: usize = 2;
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

/// Whether a hypothesis explains all that fails and leaves so little of it that no rounding of
/// sums is what happened.
fn is_settled(found: &[(usize, Tried<'_>)], evidence: &Evidence<'_>) -> bool {
    let before = left_of(&evidence.residuals, &evidence.failing);
    let settles = |(_, one): &(usize, Tried<'_>)| {
        !one.hypothesis.of_both
            && one.explains.is_superset(&evidence.failing)
            && SETTLED * one.left <= before
    };
    found.iter().any(settles)
}

/// Numbers for every token are read off dq, so they explain nothing where they explain dq alone. As
/// many fitted numbers as there are elements explain whatever those are, but for what is no number.
fn believe(hypothesis: &Hypothesis, residuals: &Residuals, explains: &mut BTreeSet<Key>) {
    let has = |part: Part| explains.iter().any(|key| Part::of(key.stage) == part);
    let elements = |key: &Key| residuals.get(key).map_or(0, |of| of.elements as usize);
    let all: usize = explains.iter().map(elements).sum();
    let beside = has(Part::OfK) || has(Part::Sums) || has(Part::Forward);
    let of_one = hypothesis.of_both && !(has(Part::OfQ) && beside);
    let bought = hypothesis.fitted > 0 && hypothesis.fitted >= all;
    if of_one || (bought && !hypothesis.world.has_nan()) {
        explains.clear();
    }
}

/// What a cause is tried as, for what is said of those that were not: by itself, or beside another.
fn tried_as<'c>(cause: &'c dyn Cause, evidence: &Evidence<'_>) -> &'c str {
    if evidence.background.is_empty() { cause.id() } else { PAIRS }
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
    pub cache: Arc<PassCache>,
    /// Counts its work, and ends it.
    pub meter: &'a Meter<'a>,
}

/// What detectors are shown, and where what they say of it holds: all that failed, everywhere; or
/// what failed in those places alone where something is wrong.
struct Look<'l> {
    shown: &'l Evidence<'l>,
    within: Option<&'l Arc<Within>>,
}

/// What a glance shows of a hypothesis that is no better than its background.
struct Dismissed {
    residuals: Residuals,
    left: f64,
}

impl<'a> Search<'a> {
    /// Every comparison in a world; `None` where the dump cannot be judged in it.
    pub fn residuals(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        if self.meter.is_spent() {
            return None;
        }
        self.judged(worlds, self.rows.as_ref())
    }

    /// The same of what is to be confirmed, from the part of the budget that is kept for it.
    pub(super) fn confirming(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        if self.meter.is_over() {
            return None;
        }
        self.judged(worlds, self.rows.as_ref())
    }

    /// The comparisons of some rows; each stage in the worlds that speak of it.
    fn judged(&self, worlds: &[&dyn World], rows: Option<&Rows>) -> Option<Residuals> {
        let mut groups: BTreeMap<Vec<usize>, BTreeSet<Stage>> = BTreeMap::new();
        let alone = !self.compared.contains(&Stage::Dk);
        for &stage in &self.compared {
            // What is said of dk is said of its sum where that alone was recorded.
            let sum = alone && stage.is_sum();
            let speaks =
                |world: &dyn World| world.speaks_of(stage) || sum && world.speaks_of(Stage::Dk);
            let of = (0..worlds.len()).filter(|&at| speaks(worlds[at])).collect();
            groups.entry(of).or_default().insert(stage);
        }
        let mut found = Residuals::new();
        for (of, stages) in groups {
            let all: Vec<&dyn World> = of.iter().map(|&at| worlds[at]).collect();
            let with = (rows, Some(&*self.cache), self.meter as &dyn Progress);
            let outcome = counted_trial(self.step, &self.compared, &all, with).ok()?;
            self.meter.looked_at(&outcome);
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
            cache: self.cache.clone(),
            meter: self.meter,
        }
    }

    /// Every comparison in a world, over the few rows of a glance.
    pub fn glance(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        let few = self.few.as_ref().filter(|_| !self.meter.is_spent())?;
        self.judged(worlds, Some(few))
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

    /// Every comparison in a world, over all rows. What is to pass and does not is looked at
    /// again with the values near ties, which takes as many emulations more.
    pub(super) fn in_full(
        &self,
        worlds: &[&dyn World],
        to_pass: &BTreeSet<Key>,
    ) -> Option<Residuals> {
        let mut all: Vec<&dyn World> = worlds.to_vec();
        let look = |all: &Vec<&dyn World>| match self.meter.is_over() {
            true => None,
            false => self.judged(all, None),
        };
        let found = look(&all)?;
        let passes = |key: &Key| found.get(key).is_some_and(|of| of.passes);
        if to_pass.iter().all(passes) {
            return Some(found);
        }
        all.push(&AtTies);
        look(&all)
    }

    /// The same search of what fails: a gradient and its parts together, as it is judged as
    /// their sum, without the gradients of which nothing fails.
    pub(super) fn of_failing(&self, failing: &BTreeSet<Key>) -> Search<'a> {
        let fails = |of: &[Stage]| failing.iter().any(|key| of.contains(&key.stage));
        let families = [&Stage::OF_Q[..], &Stage::OF_CLASSES[..]].map(|of| (of, fails(of)));
        self.only(|stage| families.iter().all(|(of, fails)| *fails || !of.contains(&stage)))
    }

    /// True when some comparisons pass in these worlds over all rows.
    pub fn holds(&self, worlds: &[&dyn World], keys: &BTreeSet<Key>) -> bool {
        let all = self.of_failing(keys).in_full(worlds, keys).unwrap_or_default();
        keys.iter().all(|key| all.get(key).is_some_and(|found| found.passes))
    }

    /// Tries a hypothesis again, over all rows. Of what passes and belongs to nothing that
    /// fails a sample has said enough.
    pub fn confirm(&self, of: &mut Tried<'_>, evidence: &Evidence<'_>) {
        let mut worlds = evidence.background.clone();
        worlds.push(&*of.hypothesis.world);
        let search = self.of_failing(&evidence.failing);
        let found = search.in_full(&worlds, &evidence.failing);
        if found.is_none() {
            self.meter.leaves(tried_as(of.cause, evidence));
        }
        of.residuals.retain(|key, _| !search.compared.contains(&key.stage));
        let mut found = found.unwrap_or_default();
        reject_wider_bounds(&mut found, &evidence.whole);
        of.residuals.extend(found);
        accept_next_to_nothing(&mut of.residuals, &evidence.residuals);
        (of.explains, of.against) = evidence.explained(&of.residuals);
        believe(&of.hypothesis, &of.residuals, &mut of.explains);
        of.left = left_of(&of.residuals, &evidence.failing);
        of.full = true;
    }

    /// Tries every hypothesis of the catalogue on top of the evidence's background, as far as
    /// the budget goes: causes whose parameters are soon found first. Those that are looked for
    /// among many are left out where one of the others explains a gross fault.
    pub fn all<'c>(&self, catalogue: &[&'c dyn Cause], evidence: &Evidence<'_>) -> Vec<Tried<'c>> {
        let alone = evidence.background.is_empty();
        let places = if alone { Places::of(evidence) } else { None };
        let here = places.as_ref().map(|places| self.over(places.among(evidence)));
        let shown = here.as_ref().and_then(|here| evidence.seen_in(here));
        let within = places.map(|places| Arc::new(Within::new(evidence, places)));
        let narrowed = within.as_ref().zip(shown.as_ref());
        let narrowed = narrowed.map(|(within, shown)| Look { shown, within: Some(within) });
        let whole = Look { shown: evidence, within: None };
        let looks: Vec<Look<'_>> = std::iter::once(whole).chain(narrowed).collect();
        let of_effort = |effort: Effort| {
            let causes = catalogue.iter().copied().enumerate();
            causes.filter(|(_, cause)| cause.effort() == effort).collect::<Vec<_>>()
        };
        let mut found: Vec<(usize, Tried<'c>)> = Vec::new();
        for effort in Effort::ALL {
            if effort > Effort::Little && is_settled(&found, evidence) {
                break;
            }
            self.try_all(&of_effort(effort), (evidence, &looks), &mut found);
            if alone && effort == Effort::Little {
                found.extend(self.in_each_place(&found, evidence));
            }
        }
        if alone && !found.iter().any(|(_, one)| one.explains.is_superset(&evidence.failing)) {
            self.try_plainly(&of_effort(Effort::Little), evidence, &mut found);
        }
        // Ties are told in the order of the catalogue.
        found.sort_by_key(|(at, _)| *at);
        found.into_iter().map(|(_, tried)| tried).collect()
    }

    /// The same search of these rows.
    fn over(&self, rows: Rows) -> Search<'a> {
        Search { rows: Some(rows), few: None, ..self.only(|_| true) }
    }

    /// What was tried, in one rank or one microbatch after the other, where sums alone fail and
    /// nothing explains them.
    fn in_each_place<'c>(
        &self,
        found: &[(usize, Tried<'c>)],
        evidence: &Evidence<'_>,
    ) -> Vec<(usize, Tried<'c>)> {
        if found.iter().any(|(_, one)| one.explains.is_superset(&evidence.failing)) {
            return Vec::new();
        }
        let mut more = Vec::new();
        for places in Places::each(evidence) {
            let within = Arc::new(Within::new(evidence, places));
            for (at, one) in found {
                if self.meter.is_spent() {
                    self.meter.leaves(tried_as(one.cause, evidence));
                    return more;
                }
                let of = limited(one.hypothesis.clone(), evidence, &within);
                more.extend(self.one(one.cause, of, evidence).map(|one| (*at, one)));
            }
        }
        more
    }

    /// Tries what some causes read off gradients without their parts, where those hide a failure.
    fn try_plainly<'c>(
        &self,
        causes: &[(usize, &'c dyn Cause)],
        evidence: &Evidence<'_>,
        found: &mut Vec<(usize, Tried<'c>)>,
    ) {
        let Some(step) = plain::step(evidence) else { return };
        let search = plain::search(&step, self);
        let Some(shown) = plain::shown(&search, evidence) else { return };
        self.try_all(causes, (evidence, &[Look { shown: &shown, within: None }]), found);
    }

    /// Tries the hypotheses of some causes: as they are, and as the further looks show them, as far
    /// as nothing explains everything. Those come last that emulate a policy: the others share
    /// their passes.
    fn try_all<'c>(
        &self,
        causes: &[(usize, &'c dyn Cause)],
        (evidence, looks): (&Evidence<'_>, &[Look<'_>]),
        found: &mut Vec<(usize, Tried<'c>)>,
    ) {
        // One that was fitted with many numbers is held against those that hold in some places.
        let explained = |found: &[(usize, Tried<'c>)]| {
            let of = |one: &Tried<'c>| one.explains.is_superset(&evidence.failing);
            found.iter().any(|(_, one)| of(one) && one.hypothesis.fitted <= FEW)
        };
        let mut last = Vec::new();
        for (number, look) in looks.iter().enumerate() {
            let further = number > 0;
            if further && explained(found) {
                break;
            }
            for &(at, cause) in causes {
                let all = self.hypotheses(cause, look.shown);
                for of in all {
                    if self.meter.is_spent() {
                        self.meter.leaves(tried_as(cause, evidence));
                        break;
                    }
                    let of = match look.within {
                        Some(within) => limited(of, evidence, within),
                        None => of,
                    };
                    match of.emulates(evidence) {
                        true => last.push((at, further, cause, of)),
                        false => found.extend(self.one(cause, of, evidence).map(|one| (at, one))),
                    }
                }
            }
        }
        last.sort_by_key(|(at, ..)| *at);
        let mut reproduced = None;
        for (at, further, cause, of) in last {
            // Of one cause no other hypothesis explains more than every bit.
            if (further && explained(found)) || reproduced == Some(at) {
                continue;
            }
            let mut one = self.one(cause, of, evidence);
            if one.as_mut().is_some_and(|one| self.reproduces(one, evidence)) {
                reproduced = Some(at);
            }
            found.extend(one.map(|one| (at, one)));
        }
    }

    /// Whether a hypothesis without a fitted number gives every bit of what fails: over all rows,
    /// of which a sample says too little.
    fn reproduces(&self, one: &mut Tried<'_>, evidence: &Evidence<'_>) -> bool {
        let failing = &evidence.failing;
        let exact = |one: &Tried<'_>| {
            one.hypothesis.fitted == 0 && one.explains.is_superset(failing) && one.exact(failing)
        };
        if exact(one) && !one.full {
            self.confirm(one, evidence);
        }
        exact(one)
    }

    /// What a cause has to be tried; nothing once the budget is spent.
    pub(super) fn hypotheses(&self, cause: &dyn Cause, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if self.meter.is_spent() {
            self.meter.leaves(tried_as(cause, evidence));
            return Vec::new();
        }
        self.meter.look();
        let found = cause.hypotheses(evidence);
        self.meter.has_looked(tried_as(cause, evidence));
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
        let Some(mut residuals) = self.residuals(&worlds) else {
            self.meter.leaves(tried_as(cause, evidence));
            return None;
        };
        reject_wider_bounds(&mut residuals, &evidence.residuals);
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
            let Some(at_ties) = self.residuals(&worlds) else {
                self.meter.leaves(tried_as(cause, evidence));
                return None;
            };
            residuals = at_ties;
            reject_wider_bounds(&mut residuals, &evidence.residuals);
            (explains, against) = evidence.explained(&residuals);
        }
        if explains.len() < evidence.failing.len() {
            accept_next_to_nothing(&mut residuals, &evidence.residuals);
            (explains, against) = evidence.explained(&residuals);
        }
        believe(&hypothesis, &residuals, &mut explains);
        let full = self.rows.is_none();
        Some(Tried { cause, hypothesis, residuals, explains, left, full, against })
    }
}
