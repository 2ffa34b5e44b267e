//! Tries the hypotheses of a catalogue and records which failing comparisons each of them explains.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::budget::{Meter, PAIRS};
use super::cause::{Cause, Effort, Hypothesis};
use super::counterevidence::{Counterevidence, Part};
use super::detectors::places::Places;
use super::evidence::{
    Evidence, Key, Residuals, accept_next_to_nothing, reject_wider_bounds, residuals,
};
use super::localized::{Region, localized};
use super::without_parts;
use crate::head::{HeadStep, Stage};
use crate::kernels::Progress;
use crate::replay::executor::pass_cache::PassCache;
use crate::replay::trial::{Rows, counted_trial};
use crate::replay::world::{AtTies, World};

/// A hypothesis that leaves less than this share of the energy, of all comparisons or of one, may
/// fail only because values near a rounding tie rounded the other way in the job. It is tried again
/// with allowance for those.
const NEAR: f64 = 0.1;
/// A hypothesis that reduces the energy by this factor ends the search.
pub(super) const SETTLED: f64 = 1e4;
/// A hypothesis with more fitted numbers than this does not end the search: one that holds only in
/// some microbatches or on some ranks may explain as much without any.
const FEW: usize = 2;
/// A glance decides only if, in its few rows, every failing comparison has more than this many
/// times its floor.
const SHOWN: f64 = 4.0;
/// A hypothesis that leaves more than this share of the energy in a glance is dismissed.
const DISMISSED: f64 = 0.95;

/// A hypothesis that was tried, and what it explains.
pub struct Tried<'c> {
    /// The cause that offered it.
    pub cause: &'c dyn Cause,
    /// Its world and parameters.
    pub hypothesis: Hypothesis,
    /// Every comparison in its world.
    pub residuals: Residuals,
    /// Comparisons that fail without it and pass with it.
    pub explains: BTreeSet<Key>,
    /// Energy left in the failing comparisons, each divided by its floor, summed.
    pub left: f64,
    /// True when the comparisons are over all rows, not over a sample.
    pub full: bool,
    /// The parts of the step that agree as declared and would not in this world.
    pub against: Counterevidence,
}

impl Tried<'_> {
    /// The number of fitted parameters, plus one half where a part of the step speaks against the
    /// hypothesis. Of two hypotheses that explain as much, the cheaper is believed. Counterevidence
    /// costs less than a number: to say that the fault is in one part alone is a choice among few
    /// parts. It costs as much that the job's call was seen without the option that the hypothesis
    /// has it use.
    pub fn cost(&self) -> f64 {
        let is_doubted = !self.against.parts.is_empty() || self.hypothesis.contradicts_call;
        self.hypothesis.fitted as f64 + if is_doubted { 0.5 } else { 0.0 }
    }

    /// Energy left in some comparisons, each divided by its floor, so that large and small stages
    /// count alike.
    pub fn left_of(&self, keys: &BTreeSet<Key>) -> f64 {
        left_of(&self.residuals, keys)
    }

    /// True when every one of these comparisons is equal in every bit.
    pub fn exact(&self, keys: &BTreeSet<Key>) -> bool {
        keys.iter()
            .all(|key| self.residuals.get(key).is_some_and(|residual| residual.energy == 0.0))
    }
}

/// Energy left in some comparisons, each divided by its floor, summed; infinite where one is
/// missing.
pub fn left_of(residuals: &Residuals, keys: &BTreeSet<Key>) -> f64 {
    let of_key = |key: &Key| match residuals.get(key) {
        Some(residual) if residual.energy == 0.0 => 0.0,
        Some(residual) => residual.energy / residual.floor.max(f64::MIN_POSITIVE),
        None => f64::INFINITY,
    };
    keys.iter().map(of_key).sum()
}

/// Whether a hypothesis explains everything that fails and leaves so little energy that the
/// expensive causes, which round partial sums, need not be tried.
fn is_settled(tried: &[(usize, Tried<'_>)], evidence: &Evidence<'_>) -> bool {
    let before = left_of(&evidence.residuals, &evidence.failing);
    let settles = |(_, trial): &(usize, Tried<'_>)| {
        !trial.hypothesis.per_token
            && trial.explains.is_superset(&evidence.failing)
            && SETTLED * trial.left <= before
    };
    tried.iter().any(settles)
}

/// Takes back what a hypothesis explains only because it was fitted to it. Numbers for every token
/// are fitted to dq, so they must explain another part of the step too. As many fitted numbers as
/// there are elements fit any values; only that NaNs stand in the right elements would still mean
/// something.
fn discount_overfit(hypothesis: &Hypothesis, residuals: &Residuals, explains: &mut BTreeSet<Key>) {
    let has = |part: Part| explains.iter().any(|key| Part::of(key.stage) == part);
    let elements = |key: &Key| residuals.get(key).map_or(0, |residual| residual.elements as usize);
    let all: usize = explains.iter().map(elements).sum();
    let beside = has(Part::OfK) || has(Part::Sums) || has(Part::Forward);
    let of_one = hypothesis.per_token && !(has(Part::OfQ) && beside);
    let bought = hypothesis.fitted > 0 && hypothesis.fitted >= all;
    if of_one || (bought && !hypothesis.world.has_nan()) {
        explains.clear();
    }
}

/// The name under which the report lists what the budget left untried: the cause itself, or `PAIRS`
/// where it was tried together with another cause.
fn name_when_untried<'c>(cause: &'c dyn Cause, evidence: &Evidence<'_>) -> &'c str {
    if evidence.background.is_empty() { cause.id() } else { PAIRS }
}

/// What trials share: the dump, the stages and rows to compare, the cache and the budget.
pub struct Search<'a> {
    /// The dump and the head as declared.
    pub step: &'a HeadStep<'a>,
    /// Stages that are compared.
    pub compared: BTreeSet<Stage>,
    /// The rows that trials compare; all where none.
    pub rows: Option<Rows>,
    /// The few rows of a glance; none where the head is so small that a glance saves nothing.
    pub few: Option<Rows>,
    /// Forward passes that trials share.
    pub cache: Arc<PassCache>,
    /// Counts the work, and ends the search when the budget is spent.
    pub meter: &'a Meter<'a>,
}

/// What detectors look at, and where the hypotheses they offer are to hold. First everything, with
/// hypotheses that hold everywhere; then only the failing microbatches and ranks, with hypotheses
/// limited to those.
struct Look<'l> {
    shown: &'l Evidence<'l>,
    within: Option<&'l Arc<Region>>,
}

/// What a glance showed of a hypothesis that is no better than its background: its comparisons, and
/// the energy left, extrapolated to all rows.
struct Dismissed {
    residuals: Residuals,
    left: f64,
}

impl<'a> Search<'a> {
    /// Every comparison in these worlds; `None` where the dump cannot be judged in them, or no
    /// further hypothesis may be tried.
    pub fn residuals(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        if self.meter.is_spent() {
            return None;
        }
        self.judged(worlds, self.rows.as_ref())
    }

    /// The same for a confirmation, which may use the third of the budget that is kept for it.
    pub(super) fn confirming(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        if self.meter.is_over() {
            return None;
        }
        self.judged(worlds, self.rows.as_ref())
    }

    /// Compares these rows. Each stage is replayed only in those worlds that say something about
    /// it.
    fn judged(&self, worlds: &[&dyn World], rows: Option<&Rows>) -> Option<Residuals> {
        let mut groups: BTreeMap<Vec<usize>, BTreeSet<Stage>> = BTreeMap::new();
        let alone = !self.compared.contains(&Stage::Dk);
        for &stage in &self.compared {
            // Where only sums of dk were recorded, a world that speaks of dk also speaks of its
            // sums.
            let sum = alone && stage.is_sum();
            let speaks =
                |world: &dyn World| world.speaks_of(stage) || sum && world.speaks_of(Stage::Dk);
            let speaking = (0..worlds.len()).filter(|&at| speaks(worlds[at])).collect();
            groups.entry(speaking).or_default().insert(stage);
        }
        let mut compared = Residuals::new();
        for (indices, stages) in groups {
            let all: Vec<&dyn World> = indices.iter().map(|&at| worlds[at]).collect();
            let with = (rows, Some(&*self.cache), self.meter as &dyn Progress);
            let outcome = counted_trial(self.step, &self.compared, &all, with).ok()?;
            self.meter.looked_at(&outcome);
            compared
                .extend(residuals(&outcome).into_iter().filter(|(k, _)| stages.contains(&k.stage)));
        }
        Some(compared)
    }

    /// The same search, comparing only some stages.
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

    /// Every comparison in these worlds, over the few rows of a glance.
    pub fn glance(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        let few = self.few.as_ref().filter(|_| !self.meter.is_spent())?;
        self.judged(worlds, Some(few))
    }

    /// The glance's comparisons, if they show that the hypothesis is no better than its background;
    /// `None` if it deserves a full trial, also where not every failing comparison fails clearly in
    /// the glance's rows.
    fn dismissed(&self, worlds: &[&dyn World], evidence: &Evidence<'_>) -> Option<Dismissed> {
        let base = evidence.glance()?;
        let clear = |key: &Key| {
            base.get(key).is_some_and(|residual| {
                !residual.passes && residual.energy > SHOWN * residual.floor
            })
        };
        if !evidence.failing.iter().all(clear) {
            return None;
        }
        let residuals = self.glance(worlds)?;
        let share = left_of(&residuals, &evidence.failing) / left_of(base, &evidence.failing);
        let passes = |key: &Key| residuals.get(key).is_some_and(|residual| residual.passes);
        if !(share > DISMISSED) || evidence.failing.iter().any(passes) {
            return None;
        }
        Some(Dismissed { residuals, left: share * left_of(&evidence.residuals, &evidence.failing) })
    }

    /// Every comparison in these worlds, over all rows. If one of `to_pass` fails, they are
    /// compared again with allowance for values near rounding ties, which doubles the emulations.
    pub(super) fn in_full(
        &self,
        worlds: &[&dyn World],
        to_pass: &BTreeSet<Key>,
    ) -> Option<Residuals> {
        let mut all: Vec<&dyn World> = worlds.to_vec();
        let compare = |all: &Vec<&dyn World>| match self.meter.is_over() {
            true => None,
            false => self.judged(all, None),
        };
        let residuals = compare(&all)?;
        let passes = |key: &Key| residuals.get(key).is_some_and(|residual| residual.passes);
        if to_pass.iter().all(passes) {
            return Some(residuals);
        }
        all.push(&AtTies);
        compare(&all)
    }

    /// The same search without the family of gradients (those of q, or those of k and bias) in
    /// which nothing fails. A family stays whole, as a gradient is judged as the sum of its
    /// recorded parts.
    pub(super) fn of_failing(&self, failing: &BTreeSet<Key>) -> Search<'a> {
        let fails = |stages: &[Stage]| failing.iter().any(|key| stages.contains(&key.stage));
        let families =
            [&Stage::OF_Q[..], &Stage::OF_CLASSES[..]].map(|stages| (stages, fails(stages)));
        self.only(|stage| families.iter().all(|(stages, fails)| *fails || !stages.contains(&stage)))
    }

    /// True when some comparisons pass in these worlds over all rows.
    pub fn holds(&self, worlds: &[&dyn World], keys: &BTreeSet<Key>) -> bool {
        let all = self.of_failing(keys).in_full(worlds, keys).unwrap_or_default();
        keys.iter().all(|key| all.get(key).is_some_and(|residual| residual.passes))
    }

    /// Tries a hypothesis again over all rows, in the families of gradients in which something
    /// fails. For the others the sample is enough.
    pub fn confirm(&self, tried: &mut Tried<'_>, evidence: &Evidence<'_>) {
        let mut worlds = evidence.background.clone();
        worlds.push(&*tried.hypothesis.world);
        let search = self.of_failing(&evidence.failing);
        let confirmed = search.in_full(&worlds, &evidence.failing);
        if confirmed.is_none() {
            self.meter.note_if_spent(name_when_untried(tried.cause, evidence));
        }
        tried.residuals.retain(|key, _| !search.compared.contains(&key.stage));
        let mut confirmed = confirmed.unwrap_or_default();
        reject_wider_bounds(&mut confirmed, &evidence.whole);
        tried.residuals.extend(confirmed);
        accept_next_to_nothing(&mut tried.residuals, &evidence.residuals);
        (tried.explains, tried.against) = evidence.explained(&tried.residuals);
        discount_overfit(&tried.hypothesis, &tried.residuals, &mut tried.explains);
        tried.left = left_of(&tried.residuals, &evidence.failing);
        tried.full = true;
    }

    /// Tries the hypotheses of the catalogue on top of the evidence's background, as far as the
    /// budget goes, cheap causes first. The expensive ones are left out if a cheaper one settles
    /// the search.
    pub fn all<'c>(&self, catalogue: &[&'c dyn Cause], evidence: &Evidence<'_>) -> Vec<Tried<'c>> {
        let alone = evidence.background.is_empty();
        let places = if alone { Places::of(evidence) } else { None };
        let here = places.as_ref().map(|places| self.over_rows(places.among(evidence)));
        let shown = here.as_ref().and_then(|here| evidence.seen_in(here));
        let within = places.map(|places| Arc::new(Region::new(evidence, places)));
        let narrowed = within.as_ref().zip(shown.as_ref());
        let narrowed = narrowed.map(|(within, shown)| Look { shown, within: Some(within) });
        let whole = Look { shown: evidence, within: None };
        let looks: Vec<Look<'_>> = std::iter::once(whole).chain(narrowed).collect();
        let of_effort = |effort: Effort| {
            let causes = catalogue.iter().copied().enumerate();
            causes.filter(|(_, cause)| cause.effort() == effort).collect::<Vec<_>>()
        };
        let mut trials: Vec<(usize, Tried<'c>)> = Vec::new();
        for effort in Effort::ALL {
            if effort > Effort::Little && is_settled(&trials, evidence) {
                break;
            }
            self.try_all(&of_effort(effort), (evidence, &looks), &mut trials);
            if alone && effort == Effort::Little {
                trials.extend(self.in_each_place(&trials, evidence));
            }
        }
        if alone && !trials.iter().any(|(_, trial)| trial.explains.is_superset(&evidence.failing)) {
            self.try_without_parts(&of_effort(Effort::Little), evidence, &mut trials);
        }
        // Tied causes are reported in the order of the catalogue.
        trials.sort_by_key(|(at, _)| *at);
        trials.into_iter().map(|(_, tried)| tried).collect()
    }

    /// The same search over these rows.
    fn over_rows(&self, rows: Rows) -> Search<'a> {
        Search { rows: Some(rows), few: None, ..self.only(|_| true) }
    }

    /// Where only sums fail and nothing explains them: tries each hypothesis again, limited to one
    /// rank or one microbatch after the other.
    fn in_each_place<'c>(
        &self,
        trials: &[(usize, Tried<'c>)],
        evidence: &Evidence<'_>,
    ) -> Vec<(usize, Tried<'c>)> {
        if trials.iter().any(|(_, trial)| trial.explains.is_superset(&evidence.failing)) {
            return Vec::new();
        }
        let mut more = Vec::new();
        for places in Places::each(evidence) {
            let within = Arc::new(Region::new(evidence, places));
            for (index, trial) in trials {
                if self.meter.is_spent() {
                    self.meter.note_if_spent(name_when_untried(trial.cause, evidence));
                    return more;
                }
                let restricted = localized(trial.hypothesis.clone(), evidence, &within);
                more.extend(
                    self.try_one(trial.cause, restricted, evidence).map(|trial| (*index, trial)),
                );
            }
        }
        more
    }

    /// Where a gradient agrees with the sum of its recorded parts although a part is wrong: tries
    /// these causes on the same dump without the recorded parts.
    fn try_without_parts<'c>(
        &self,
        causes: &[(usize, &'c dyn Cause)],
        evidence: &Evidence<'_>,
        trials: &mut Vec<(usize, Tried<'c>)>,
    ) {
        let Some(step) = without_parts::step(evidence) else { return };
        let search = without_parts::search(&step, self);
        let Some(shown) = without_parts::shown(&search, evidence) else { return };
        self.try_all(causes, (evidence, &[Look { shown: &shown, within: None }]), trials);
    }

    /// Tries the hypotheses of some causes, first as offered for everything, then as offered for
    /// the failing places if nothing explains all yet. Hypotheses that emulate a rounding policy
    /// come last, because only the others share forward passes.
    fn try_all<'c>(
        &self,
        causes: &[(usize, &'c dyn Cause)],
        (evidence, looks): (&Evidence<'_>, &[Look<'_>]),
        trials: &mut Vec<(usize, Tried<'c>)>,
    ) {
        // A hypothesis with many fitted numbers does not stop those that hold in some places only.
        let explained = |trials: &[(usize, Tried<'c>)]| {
            let explains_all = |trial: &Tried<'c>| trial.explains.is_superset(&evidence.failing);
            trials.iter().any(|(_, trial)| explains_all(trial) && trial.hypothesis.fitted <= FEW)
        };
        let mut last = Vec::new();
        for (number, look) in looks.iter().enumerate() {
            let further = number > 0;
            if further && explained(trials) {
                break;
            }
            for &(index, cause) in causes {
                let all = self.hypotheses(cause, look.shown);
                for offered in all {
                    if self.meter.is_spent() {
                        self.meter.note_if_spent(name_when_untried(cause, evidence));
                        break;
                    }
                    let hypothesis = match look.within {
                        Some(within) => localized(offered, evidence, within),
                        None => offered,
                    };
                    match hypothesis.emulates(evidence) {
                        true => last.push((index, further, cause, hypothesis)),
                        false => trials.extend(
                            self.try_one(cause, hypothesis, evidence).map(|trial| (index, trial)),
                        ),
                    }
                }
            }
        }
        last.sort_by_key(|(at, ..)| *at);
        let mut reproduced = None;
        for (index, further, cause, hypothesis) in last {
            // Once a hypothesis of this cause reproduces every bit, its other hypotheses are
            // superfluous.
            if (further && explained(trials)) || reproduced == Some(index) {
                continue;
            }
            let mut tried = self.try_one(cause, hypothesis, evidence);
            if tried.as_mut().is_some_and(|trial| self.reproduces(trial, evidence)) {
                reproduced = Some(index);
            }
            trials.extend(tried.map(|trial| (index, trial)));
        }
    }

    /// Whether a hypothesis without fitted numbers gives every bit of the failing tensors over all
    /// rows. One that does so on a sample is confirmed first.
    fn reproduces(&self, tried: &mut Tried<'_>, evidence: &Evidence<'_>) -> bool {
        let failing = &evidence.failing;
        let exact = |tried: &Tried<'_>| {
            tried.hypothesis.fitted == 0
                && tried.explains.is_superset(failing)
                && tried.exact(failing)
        };
        if exact(tried) && !tried.full {
            self.confirm(tried, evidence);
        }
        exact(tried)
    }

    /// The hypotheses that a cause offers; none once the budget is spent.
    pub(super) fn hypotheses(&self, cause: &dyn Cause, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if self.meter.is_spent() {
            self.meter.note_if_spent(name_when_untried(cause, evidence));
            return Vec::new();
        }
        self.meter.begin_look();
        let mut hypotheses = cause.hypotheses(evidence);
        self.meter.end_look(name_when_untried(cause, evidence));
        let declared = &self.step.options.declared;
        let options = cause.options();
        let contradicts =
            !options.is_empty() && options.iter().all(|name| declared.is_seen_off(name));
        hypotheses.iter_mut().for_each(|of| of.contradicts_call = contradicts);
        hypotheses
    }

    fn try_one<'c>(
        &self,
        cause: &'c dyn Cause,
        hypothesis: Hypothesis,
        evidence: &Evidence<'_>,
    ) -> Option<Tried<'c>> {
        let mut worlds = evidence.background.clone();
        worlds.push(&*hypothesis.world);
        if let Some(Dismissed { residuals, left }) = self.dismissed(&worlds, evidence) {
            let (explains, full, against) = (BTreeSet::new(), false, Counterevidence::default());
            return Some(Tried { cause, hypothesis, residuals, explains, left, full, against });
        }
        let Some(mut residuals) = self.residuals(&worlds) else {
            self.meter.note_if_spent(name_when_untried(cause, evidence));
            return None;
        };
        reject_wider_bounds(&mut residuals, &evidence.residuals);
        let (mut explains, mut against) = evidence.explained(&residuals);
        let left = left_of(&residuals, &evidence.failing);
        let before = left_of(&evidence.residuals, &evidence.failing);
        // One comparison may be nearly explained while a second fault makes up most of the total
        // energy.
        let is_near = |key: &Key| {
            let pair = residuals.get(key).zip(evidence.residuals.get(key));
            !explains.contains(key)
                && pair.is_some_and(|(now, before)| now.energy < NEAR * before.energy)
        };
        let near = left < NEAR * before || evidence.failing.iter().any(is_near);
        // Nearly explained: values near a rounding tie may have rounded the other way in the job.
        if explains.len() < evidence.failing.len() && near {
            worlds.push(&AtTies);
            let Some(at_ties) = self.residuals(&worlds) else {
                self.meter.note_if_spent(name_when_untried(cause, evidence));
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
        discount_overfit(&hypothesis, &residuals, &mut explains);
        let full = self.rows.is_none();
        Some(Tried { cause, hypothesis, residuals, explains, left, full, against })
    }
}
