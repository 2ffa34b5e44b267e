//! What is known of a divergence: the replay's comparisons, and measurements of the captured
//! tensors, made when first asked for and kept.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use backtape::identity::{Microbatch, Rank};
use backtape::nan::by_size;

use super::detectors::captured::{Values, captured};
use super::detectors::dlogits_plane::Plane;
use super::detectors::reference::{self, Reference};
use super::detectors::shown_labels::{self, Labels};
use super::detectors::single_tokens::{distance, energy};
use super::detectors::unit_states::{UnitState, units};
use super::sample;
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Stage};
use crate::kernels::{NoProgress, Progress};
use crate::replay::executor::pass_cache::PassCache;
use crate::replay::outcome::Outcome;
use crate::replay::trial::Rows;
use crate::replay::world::World;

use super::search::Search;

/// Rounding the partial sums of a gradient makes an error of less than this share of its energy.
const HALF: f64 = 0.5;

/// One comparison of a replay: a stage of one microbatch and unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The stage.
    pub stage: Stage,
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub rank: Option<Rank>,
}

/// How far a captured tensor is from its reference in a world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// Sum of squared errors; infinite where a captured value is NaN or infinite.
    pub energy: f64,
    /// The sum of squared errors that rounding is expected to cause.
    pub floor: f64,
    /// Sum of squares of the reference.
    pub reference: f64,
    /// Sum of squares of the captured values.
    pub captured: f64,
    /// `⟨captured, reference⟩ / ⟨reference, reference⟩`.
    pub factor: f64,
    /// How many captured values were compared.
    pub elements: u64,
    /// How many rows hold the error: see [`crate::compare::Tally::rows_in_error`].
    pub rows: f64,
    /// How many values are NaN or infinite.
    pub nonfinite: u64,
    /// True when rounding explains it.
    pub passes: bool,
    /// Energy over the largest that rounding may cause, by the worst of the comparison's tests: of
    /// all its elements or of a part of them.
    pub overshoot: f64,
}

impl Residual {
    /// The energy that is left when the reference is scaled by the factor that fits best.
    pub fn left_by_scale(&self) -> f64 {
        match self.captured - self.factor * self.factor * self.reference {
            left if left.is_finite() && self.nonfinite == 0 => left.max(0.0),
            _ => f64::INFINITY,
        }
    }

    /// True when one factor explains the comparison: what it leaves is within twice the
    /// amplitude of the floor, and it leaves much less than there was.
    pub fn is_scaled(&self) -> bool {
        let left = self.left_by_scale();
        !self.passes
            && (left <= 4.0 * self.floor * self.factor.powi(2) || left < 0.01 * self.energy)
    }
}

/// A hypothesis that leaves at most this share of a comparison's energy explains it, even where the
/// rest is somewhat beyond its bound: that 99 % of the error's amplitude vanish is no coincidence.
const NOTHING: f64 = 1e-4;
/// How many times the bound the energy may then be. The bounds are those of the declared head; a
/// head with a fault may round more, for example where it reads one row repeatedly, and an
/// emulation rounds in other places than the job.
const ROUNDS_MORE: f64 = 16.0;

/// Lets those comparisons pass that failed before and of whose energy a hypothesis leaves at most
/// [`NOTHING`].
pub(super) fn accept_next_to_nothing(residuals: &mut Residuals, before: &Residuals) {
    for (key, residual) in residuals {
        let failed = before.get(key).filter(|before| !before.passes && residual.nonfinite == 0);
        let next_to_nothing =
            failed.is_some_and(|before| residual.energy <= NOTHING * before.energy);
        residual.passes |= next_to_nothing && residual.overshoot <= ROUNDS_MORE;
    }
}

/// A hypothesis counts as having wider bounds where its floor is more than this many times that of
/// the declared head. Neither this number nor the next is derived: they exclude a wrong cause that
/// had 5.5 times the declared bound and left 0.98 of the energy.
const WIDER: f64 = 1.5;
/// With wider bounds, at most this share of a comparison's energy may be left.
const REDUCED: f64 = 0.5;

/// Lets a comparison fail that passes only because the hypothesis widened its bounds, while its
/// error hardly shrank. Errors and bounds are taken relative to the reference, whose size a
/// hypothesis may change.
pub(super) fn reject_wider_bounds(residuals: &mut Residuals, before: &Residuals) {
    for (key, residual) in residuals {
        let failed = before.get(key).filter(|before| !before.passes && before.nonfinite == 0);
        let Some(before) = failed else { continue };
        let size = residual.reference / before.reference;
        let wider = residual.floor > WIDER * before.floor * size;
        if wider && residual.energy > REDUCED * before.energy * size {
            residual.passes = false;
            residual.floor = before.floor * size;
        }
    }
}

/// A row whose squared error is at least this share of its squared norm may hold something else
/// than its own values.
const OTHER: f64 = 0.25;

/// Up to this many multiply-adds of one GEMM, a reference of all rows is computed.
const ALL_ROWS: u64 = 1 << 31;

/// Every comparison of an outcome.
pub type Residuals = BTreeMap<Key, Residual>;

/// The comparisons of an outcome, by key.
pub fn residuals(outcome: &Outcome) -> Residuals {
    let mut residuals = Residuals::new();
    for stage in &outcome.stages {
        for comparison in &stage.comparisons {
            let key = Key {
                stage: stage.stage,
                microbatch: comparison.microbatch,
                rank: comparison.rank,
            };
            let tally = &comparison.tally;
            let bad = tally.nonfinite > 0;
            let residual = Residual {
                energy: if bad { f64::INFINITY } else { tally.error_energy },
                floor: tally.budget.expected(),
                reference: tally.reference_energy,
                captured: tally.captured_energy,
                factor: 1.0 + tally.slope(),
                elements: tally.elements,
                rows: tally.rows_in_error(),
                nonfinite: tally.nonfinite,
                passes: comparison.excess.is_none(),
                overshoot: comparison.overshoot,
            };
            residuals.insert(key, residual);
        }
    }
    residuals
}

/// The planes of dlogits that were asked for, by microbatch and rank; `None` for one that is too
/// large.
type Planes = BTreeMap<(Option<Microbatch>, Option<Rank>), Option<Rc<Plane>>>;

/// What is known of a divergence.
pub struct Evidence<'a> {
    /// The dump and the head.
    pub step: &'a HeadStep<'a>,
    /// The full replay.
    pub outcome: &'a Outcome,
    /// Inputs of every microbatch, as declared.
    pub inputs: &'a [MicrobatchInputs],
    /// Every comparison in the background of this search: as declared, or in the worlds of causes
    /// that were found before.
    pub residuals: Residuals,
    /// The same over all rows, where the background is the declaration alone.
    pub whole: Residuals,
    /// The comparisons that fail.
    pub failing: BTreeSet<Key>,
    /// The worlds that are in force already; none for the declared head.
    pub background: Vec<&'a dyn World>,
    /// Lets detectors try a world while they look for its parameters.
    search: Option<&'a Search<'a>>,
    /// What each unit's backward starts from (lse and cotangents), computed when first asked for.
    units: OnceCell<Vec<UnitState>>,
    /// Rows that trials compare; none for all of them.
    pub rows: Option<Rows>,
    glance: OnceCell<Option<Residuals>>,
    reference: OnceCell<Reference>,
    all_rows: OnceCell<Reference>,
    labels: OnceCell<Option<Labels>>,
    captured: RefCell<BTreeMap<Key, Option<Rc<Values>>>>,
    planes: RefCell<Planes>,
}

impl<'a> Evidence<'a> {
    /// Evidence from the comparisons in a background.
    pub fn new(
        step: &'a HeadStep<'a>,
        outcome: &'a Outcome,
        inputs: &'a [MicrobatchInputs],
        residuals: Residuals,
        background: Vec<&'a dyn World>,
    ) -> Evidence<'a> {
        let whole =
            if background.is_empty() { self::residuals(outcome) } else { residuals.clone() };
        let failing = residuals.iter().filter(|(_, residual)| !residual.passes);
        let failing = failing.map(|(&key, _)| key).collect();
        let rows = sample::rows(outcome, inputs);
        let (reference, all_rows, labels) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        let (captured, planes) = (RefCell::default(), RefCell::default());
        let (search, units) = (None, OnceCell::new());
        Evidence {
            step,
            outcome,
            inputs,
            residuals,
            whole,
            failing,
            background,
            rows,
            glance: OnceCell::new(),
            reference,
            all_rows,
            labels,
            captured,
            planes,
            search,
            units,
        }
    }

    /// The same with a search, in which detectors can fit parameters.
    pub fn searched_by(self, search: &'a Search<'a>) -> Evidence<'a> {
        Evidence { search: Some(search), ..self }
    }

    /// The same divergence, compared on the rows of another search; none where the dump cannot be
    /// judged there.
    pub(super) fn seen_in<'s>(&self, search: &'s Search<'s>) -> Option<Evidence<'s>>
    where
        'a: 's,
    {
        let residuals = search.residuals(&[])?;
        let evidence = Evidence::new(self.step, self.outcome, self.inputs, residuals, Vec::new());
        let (failing, rows) = (self.failing.clone(), search.rows.clone());
        Some(Evidence { failing, rows, ..evidence.searched_by(search) })
    }

    /// Forward passes that trials share.
    pub(super) fn cache(&self) -> Option<&PassCache> {
        self.search.map(|search| &*search.cache)
    }

    /// Counts the work of looking for parameters, in multiply-adds. Returns true when no more may
    /// be done: the caller must then skip that work.
    pub fn spend(&self, work: usize) -> bool {
        let Some(search) = self.search else { return false };
        // Work that is refused is not counted.
        if search.meter.may_look() {
            search.meter.advance(work as u64);
        }
        !search.meter.may_look()
    }

    /// Whether some failing comparison of these stages has an error too large for rounded partial
    /// sums, which lose the low bits of a gradient, not half of it.
    pub fn is_beyond_rounding(&self, stages: &[Stage]) -> bool {
        self.failing_of(stages).any(|(_, residual)| !(residual.energy <= HALF * residual.reference))
    }

    /// Where computations report their work while parameters are looked for.
    pub fn progress(&self) -> &'a dyn Progress {
        self.search.map_or(&NoProgress, |search| search.meter)
    }

    /// Every comparison in a world on top of the background; none where the dump cannot
    /// be judged in it.
    pub fn residuals_in(&self, world: &dyn World) -> Option<Residuals> {
        let mut worlds = self.background.clone();
        worlds.push(world);
        self.search?.residuals(&worlds)
    }

    /// The background's comparisons over the few rows of a glance; none where there are no glances.
    pub(super) fn glance(&self) -> Option<&Residuals> {
        let compared = || self.search.and_then(|search| search.glance(&self.background));
        self.glance.get_or_init(compared).as_ref()
    }

    /// The comparisons of a glance in a world on top of the background.
    pub fn glance_in(&self, world: &dyn World) -> Option<Residuals> {
        let mut worlds = self.background.clone();
        worlds.push(world);
        self.search?.glance(&worlds)
    }

    /// The reference values of every compared stage in the background, for the rows that trials
    /// compare.
    pub fn reference(&self) -> &Reference {
        let rows = self.rows.as_ref();
        self.reference.get_or_init(|| reference::reference(self, None, rows))
    }

    /// The labels that rows of dq show, where they differ from the recorded ones.
    pub fn labels_of_rows(&self) -> Option<&Labels> {
        self.labels.get_or_init(|| shown_labels::read(self)).as_ref()
    }

    /// The reference of all rows. `None` where trials look at a sample and either all rows are too
    /// many, or no sampled row is so far off that it may hold another row's values.
    pub fn all_rows(&self) -> Option<&Reference> {
        let work = |inputs: &MicrobatchInputs| {
            let head = inputs.head(self.step)?;
            Some(head.q.rows as u64 * head.k.rows as u64 * head.q.cols.max(1) as u64)
        };
        match &self.rows {
            None => Some(self.reference()),
            Some(_) if self.inputs.iter().filter_map(work).sum::<u64>() > ALL_ROWS => None,
            Some(_) if !self.holds_other_rows() => None,
            Some(_) => Some(self.all_rows.get_or_init(|| reference::reference(self, None, None))),
        }
    }

    /// Whether some row of a failing gradient is as far from its reference as another row, zeros or
    /// uninitialised memory would be. The sample contains the rows with the largest errors, so it
    /// is enough to look there.
    fn holds_other_rows(&self) -> bool {
        let is_other = |key: Key| {
            let (captured, rows) = (self.captured(key)?, self.reference().stages.get(&key)?);
            let off = |(&row, reference): (&usize, &Vec<f64>)| {
                !(distance(captured.row(row), reference) <= OTHER * energy(reference))
            };
            Some(rows.iter().any(off))
        };
        self.failing_of(&Stage::GRADIENTS).any(|(key, _)| is_other(key).unwrap_or(true))
    }

    /// The captured values of a comparison.
    pub fn captured(&self, key: Key) -> Option<Rc<Values>> {
        let mut all = self.captured.borrow_mut();
        let entry = all.entry(key);
        entry.or_insert_with(|| captured(self.step, self.inputs, key).map(Rc::new)).clone()
    }

    /// All entries of dlogits of a unit whose gradient fails; `None` where it passes, or the unit
    /// is too large.
    pub fn plane(&self, key: Key) -> Option<Rc<Plane>> {
        let fails = self.residuals.get(&key).is_some_and(|residual| !residual.passes);
        if fails { self.plane_of(key.microbatch, key.rank) } else { None }
    }

    /// All entries of dlogits of a unit, computed once. The matrix products for which a caller
    /// wants them are counted at every call.
    pub fn plane_of(
        &self,
        microbatch: Option<Microbatch>,
        rank: Option<Rank>,
    ) -> Option<Rc<Plane>> {
        let place = (microbatch, rank);
        let cached = self.planes.borrow().get(&place).cloned();
        let plane = cached.unwrap_or_else(|| {
            let held_entries =
                self.planes.borrow().values().flatten().map(|plane| plane.p.values.len()).sum();
            let made = Plane::new(self, place, held_entries).map(Rc::new);
            self.planes.borrow_mut().insert(place, made.clone());
            made
        })?;
        (!self.spend(plane.work())).then_some(plane)
    }

    /// The inputs of a microbatch.
    pub fn inputs_of(&self, microbatch: Option<Microbatch>) -> Option<&'a MicrobatchInputs> {
        self.inputs.iter().find(|inputs| inputs.microbatch == microbatch)
    }

    /// Whether some comparison of a stage fails. Where dk was recorded only as sums, a failing sum
    /// counts for dk.
    pub fn fails(&self, stage: Stage) -> bool {
        let any_fails =
            |wanted: &dyn Fn(Stage) -> bool| self.failing.iter().any(|key| wanted(key.stage));
        let in_sums = stage == Stage::Dk && self.has_sums_alone() && any_fails(&Stage::is_sum);
        any_fails(&|one| one == stage) || in_sums
    }

    /// Whether a stage was compared and passes everywhere.
    pub fn agrees(&self, stage: Stage) -> bool {
        self.residuals.keys().any(|key| key.stage == stage) && !self.fails(stage)
    }

    /// Whether dk of single units was not compared, only sums of it at most.
    pub fn has_sums_alone(&self) -> bool {
        !self.residuals.keys().any(|key| key.stage == Stage::Dk)
    }

    /// Whether some comparison of one of the stages fails.
    pub fn fails_any(&self, stages: &[Stage]) -> bool {
        stages.iter().any(|&stage| self.fails(stage))
    }

    /// The failing comparisons of one of the stages.
    pub fn failing_of<'e>(
        &'e self,
        stages: &'e [Stage],
    ) -> impl Iterator<Item = (Key, Residual)> + 'e {
        let wanted = |key: &&Key| stages.contains(&key.stage);
        self.failing.iter().filter(wanted).map(|key| (*key, self.residuals[key]))
    }

    /// Whether something of the forward pass before the loss was compared.
    pub fn captured_forward(&self) -> bool {
        self.residuals.keys().any(|key| Stage::FORWARD[..4].contains(&key.stage))
    }

    /// What each unit's backward starts from in the background: lse and cotangents.
    pub fn units(&self) -> &[UnitState] {
        self.units.get_or_init(|| units(self))
    }

    /// The unit in which some stages fail worst, by energy over floor.
    pub fn worst_unit(&self, stages: &[Stage]) -> Option<&UnitState> {
        let over = |(_, residual): &(Key, Residual)| residual.energy / residual.floor;
        let failing = self.failing_of(stages);
        let (key, _) = failing.max_by(|a, b| by_size(&over(a), &over(b)))?;
        let is_unit = |unit: &&UnitState| {
            unit.microbatch == key.microbatch && (unit.rank == key.rank || key.rank.is_none())
        };
        self.units().iter().find(is_unit)
    }

    /// The rounding policies that the job's declaration allows.
    pub fn roundings(&self) -> Option<Roundings> {
        let dtype = self.inputs.first()?.dtype(self.step);
        Roundings::plausible(&self.step.options, dtype).ok()
    }

    /// Microbatches of the step.
    pub fn microbatches(&self) -> usize {
        self.inputs.len()
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> usize {
        self.step.dump.manifest.world_size as usize
    }

    /// True when every failing comparison of these stages is its reference times one
    /// factor of its own, and there is one.
    pub fn all_scaled(&self, stages: &[Stage]) -> bool {
        let mut failing = self.failing_of(stages).peekable();
        failing.peek().is_some() && failing.all(|(_, residual)| residual.is_scaled())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { stage: Stage::Dq, microbatch: None, rank: None };

    fn single_residual(energy: f64, floor: f64, reference: f64, passes: bool) -> Residuals {
        let rest = (reference, 1.0, 1, 1.0, 0, 1.0);
        let (captured, factor, elements, rows, nonfinite, overshoot) = rest;
        let residual = Residual {
            energy,
            floor,
            reference,
            captured,
            factor,
            elements,
            rows,
            nonfinite,
            passes,
            overshoot,
        };
        [(KEY, residual)].into_iter().collect()
    }

    /// Goal: a hypothesis that leaves the error as it was and passes in wider bounds is no
    /// explanation. Method: an error, a bound and a reference, before and in a hypothesis' world.
    #[test]
    fn wider_bounds_alone_explain_nothing() {
        let before = single_residual(1.2, 1.0, 100.0, false);
        let passes = |mut residuals: Residuals| {
            reject_wider_bounds(&mut residuals, &before);
            (residuals[&KEY].passes, residuals[&KEY].floor)
        };
        assert_eq!(passes(single_residual(1.2, 5.0, 100.0, true)), (false, 1.0));
        assert_eq!(
            passes(single_residual(0.5, 5.0, 100.0, true)),
            (true, 5.0),
            "it is hardly there any more"
        );
        assert_eq!(
            passes(single_residual(0.9, 1.0, 100.0, true)),
            (true, 1.0),
            "the bound is the same"
        );
        assert_eq!(
            passes(single_residual(12.0, 10.0, 1000.0, true)),
            (true, 10.0),
            "all of it is larger"
        );
        let mut residuals = single_residual(1.2, 5.0, 100.0, true);
        reject_wider_bounds(&mut residuals, &single_residual(1.2, 1.0, 100.0, true));
        assert!(residuals[&KEY].passes, "it passed before");
    }
}
