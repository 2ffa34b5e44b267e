//! The places in which captured values are wrong while they agree elsewhere: microbatches, ranks,
//! sequences, tokens or classes. A fault may be in one separately compiled graph, on one rank's
//! machine, or in one chunk.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::head::LossReduction;
use backtape::identity::{Microbatch, Rank};

use super::least_squares::runs_of;
use super::single_tokens::{distance, energy};
use super::suspect_tokens::place;
use crate::diagnose::evidence::{Evidence, Key};
use crate::dump::name_ranks;
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::replay::trial::Rows;
use crate::replay::world::UnitName;

/// Stages whose rows are tokens.
const OF_TOKENS: [Stage; 8] = [
    Stage::Logits,
    Stage::LabelLogits,
    Stage::Lse,
    Stage::Logprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
];
/// Rows are wrong if their squared error is more than this many times what rounding causes.
const OVER: f64 = 16.0;
/// A run of rows is wrong as a whole if at least this share of its rows is.
const MOST: f64 = 0.8;
/// The largest number of places that are tried one at a time.
const MOST_TRIED: usize = 24;
/// The report lists at most this many places, and this many runs in one of them.
const TOLD: usize = 6;

/// Some tokens of a step, or some classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Places {
    /// The tokens, ascending, by microbatch.
    rows: BTreeMap<Option<Microbatch>, Vec<usize>>,
    /// The units whose tokens are all among these.
    units: BTreeSet<UnitName>,
    /// The classes, ascending, where the wrong places are classes and not tokens.
    classes: Option<Vec<usize>>,
    /// The places in words.
    pub words: String,
}

impl Places {
    /// The places that are wrong; `None` where everything is wrong, or the comparisons do not show
    /// it.
    pub fn of(evidence: &Evidence<'_>) -> Option<Places> {
        Places::of_tokens(evidence).or_else(|| Places::of_classes(evidence))
    }

    /// Each rank and each microbatch as a place of its own, for the case that only sums fail, which
    /// do not show where something is wrong. Empty where something else fails, or there are more
    /// than `MOST_TRIED`.
    pub fn each(evidence: &Evidence<'_>) -> Vec<Places> {
        let all: Vec<(&MicrobatchInputs, Vec<Unit>)> =
            evidence.inputs.iter().map(|inputs| (inputs, runs(evidence, inputs))).collect();
        let ranks: BTreeSet<Vec<Rank>> =
            all.iter().flat_map(|(_, runs)| runs.iter().map(|run| run.ranks.clone())).collect();
        let alone =
            evidence.failing.iter().all(|key| key.stage.is_sum() || key.stage == Stage::Loss);
        if !alone || ranks.len() + all.len() > MOST_TRIED {
            return Vec::new();
        }
        let places_where = |words: String, here: &dyn Fn(&MicrobatchInputs, &Unit) -> bool| {
            let mut places = Places { words, ..Places::default() };
            for (inputs, runs) in &all {
                let failing_runs = runs.iter().filter(|run| here(inputs, run));
                let mut rows: Vec<usize> = failing_runs.flat_map(|run| run.rows.clone()).collect();
                rows.sort_unstable();
                places.add(evidence, inputs, (rows, runs));
            }
            places
        };
        let mut places = Vec::new();
        for ranks in ranks.iter().filter(|_| ranks.len() > 1) {
            places.push(places_where(name_ranks(ranks), &|_, run| run.ranks == *ranks));
        }
        for (microbatch_inputs, _) in all.iter().filter(|_| all.len() > 1) {
            let mb = microbatch_inputs.microbatch;
            let words = mb.map_or_else(String::new, |mb| format!("microbatch {}", mb.0));
            places.push(places_where(words, &|inputs, _| inputs.microbatch == mb));
        }
        places
    }

    fn of_tokens(evidence: &Evidence<'_>) -> Option<Places> {
        let mut places = Places::default();
        let (mut right, mut words, mut ranks) = (false, Vec::new(), BTreeSet::new());
        for inputs in evidence.inputs {
            let runs = runs(evidence, inputs);
            let wrong: Vec<Wrong> =
                runs.iter().filter_map(|run| Wrong::of(evidence, inputs, run)).collect();
            let whole =
                wrong.len() == runs.len() && wrong.iter().all(|element| element.part.is_none());
            right |= !whole;
            ranks.insert(wrong.iter().map(|element| element.words(None)).collect::<Vec<_>>());
            match inputs.microbatch {
                Some(Microbatch(at)) if whole => words.push(format!("microbatch {at}")),
                _ => words.extend(wrong.iter().map(|element| element.words(Some(inputs)))),
            }
            let mut rows: Vec<usize> = wrong.into_iter().flat_map(|element| element.rows).collect();
            rows.sort_unstable();
            places.add(evidence, inputs, (rows, &runs));
        }
        // Where the same ranks are wrong in every microbatch, the microbatches are not listed.
        if let (Some(first_rank), None) = (ranks.first(), ranks.iter().nth(1)) {
            words.clone_from(first_rank);
        }
        let more = words.len().saturating_sub(TOLD);
        words.truncate(TOLD);
        places.words = words.join(", ");
        if more > 0 {
            places.words.push_str(&format!(" and {more} more"));
        }
        (right && !places.rows.is_empty()).then_some(places)
    }

    /// The classes of the ranks that have wrong gradients, where each rank holds some of the
    /// classes and nothing but gradients of k fails.
    fn of_classes(evidence: &Evidence<'_>) -> Option<Places> {
        let (mut classes, mut words): (Vec<usize>, Option<String>) = Default::default();
        for &key in &evidence.failing {
            let of_k = Some(key).filter(|key| key.stage.is_of_k())?;
            let tensor = evidence.step.find(of_k.stage.role()?, of_k.microbatch)?;
            let runs = evidence.step.rank_classes(tensor);
            let errors = Errors::of(evidence, of_k)?;
            let wrong: Vec<&Unit> = runs.iter().filter(|run| errors.are_wrong(&run.rows)).collect();
            if wrong.is_empty() || wrong.len() == runs.len() {
                return None;
            }
            classes.extend(wrong.iter().flat_map(|run| &run.rows));
            let names: Vec<String> = wrong.iter().map(|run| name_ranks(&run.ranks)).collect();
            let classes = format!("the classes of {}", names.join(", "));
            if words.get_or_insert_with(|| classes.clone()) != &classes {
                return None;
            }
        }
        classes.sort_unstable();
        classes.dedup();
        Some(Places { classes: Some(classes), words: words?, ..Places::default() })
    }

    fn add(
        &mut self,
        evidence: &Evidence<'_>,
        inputs: &MicrobatchInputs,
        (rows, runs): (Vec<usize>, &[Unit]),
    ) {
        if rows.is_empty() {
            return;
        }
        if rows.len() == inputs.tokens() {
            self.units.insert((inputs.microbatch, None));
        }
        let inside = |unit: &&Unit| unit.rows.iter().all(|row| rows.binary_search(row).is_ok());
        let units = evidence.step.units(inputs).unwrap_or_default();
        let all = units.iter().chain(runs).filter(|unit| !unit.ranks.is_empty()).filter(inside);
        self.units.extend(all.map(|unit| (inputs.microbatch, unit.rank())));
        self.rows.insert(inputs.microbatch, rows);
    }

    /// The rows of the trials that lie in these places. A microbatch that is right keeps one row,
    /// so that it still has a comparison.
    pub fn among(&self, evidence: &Evidence<'_>) -> Rows {
        let tokens = |inputs: &MicrobatchInputs| {
            let mb = inputs.microbatch;
            let looked = evidence.rows.as_ref().and_then(|rows| rows.tokens.get(&mb));
            let all: Vec<usize> = looked.cloned().unwrap_or((0..inputs.tokens()).collect());
            let here = |&row: &usize| self.are_classes() || self.holds(mb, row);
            let tokens_here: Vec<usize> = all.iter().copied().filter(here).collect();
            (
                mb,
                if tokens_here.is_empty() {
                    all.into_iter().take(1).collect()
                } else {
                    tokens_here
                },
            )
        };
        let vocab = evidence.inputs.first().and_then(|inputs| inputs.head(evidence.step));
        let every = || (0..vocab.map_or(0, |head| head.k.rows)).collect();
        let classes = evidence.rows.as_ref().map_or_else(every, |rows| rows.classes.clone());
        let here = |&class: &usize| !self.are_classes() || self.holds_class(class);
        Rows {
            tokens: evidence.inputs.iter().map(tokens).collect(),
            classes: classes.into_iter().filter(here).collect(),
        }
    }

    /// Whether these places are classes and not tokens.
    pub fn are_classes(&self) -> bool {
        self.classes.is_some()
    }

    /// Whether a class is among these places.
    pub fn holds_class(&self, class: usize) -> bool {
        self.classes.as_ref().is_some_and(|classes| classes.binary_search(&class).is_ok())
    }

    /// Whether a token is among these places.
    pub fn holds(&self, microbatch: Option<Microbatch>, row: usize) -> bool {
        self.rows.get(&microbatch).is_some_and(|rows| rows.binary_search(&row).is_ok())
    }

    /// Whether some token of a microbatch is.
    pub fn touches(&self, microbatch: Option<Microbatch>) -> bool {
        self.rows.contains_key(&microbatch)
    }

    /// Whether all tokens of a unit are among these places.
    pub fn is_in(&self, (microbatch, rank): UnitName) -> bool {
        self.units.contains(&(microbatch, None)) || self.units.contains(&(microbatch, rank))
    }
}

/// A microbatch's tokens by the ranks that hold them; all of them where that is one rank or not
/// known.
fn runs(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<Unit> {
    match evidence.step.rank_rows(inputs) {
        Ok(units) if units.len() > 1 => units,
        _ => vec![Unit { ranks: Vec::new(), rows: (0..inputs.tokens()).collect() }],
    }
}

/// The wrong tokens among those of a rank.
struct Wrong<'r> {
    run: &'r Unit,
    rows: Vec<usize>,
    /// Which of the rank's tokens these are, in words; none where it is all of them.
    part: Option<String>,
}

impl<'r> Wrong<'r> {
    /// Finds them; `None` where none is wrong.
    fn of(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, run: &'r Unit) -> Option<Wrong<'r>> {
        let here = |key: &&Key| key.microbatch == inputs.microbatch;
        let failing: Vec<Key> = evidence.failing.iter().filter(here).copied().collect();
        // A loss that is not reduced has one row per token.
        let each = evidence.step.options.reduction == LossReduction::None;
        let of_rows =
            |key: &&Key| OF_TOKENS.contains(&key.stage) || each && key.stage == Stage::Loss;
        let errors: Vec<Errors> =
            failing.iter().filter(of_rows).filter_map(|&key| Errors::of(evidence, key)).collect();
        let whole = || Wrong { run, rows: run.rows.clone(), part: None };
        let rows_tell = !errors.is_empty();
        let of_run = |errors: &Errors| run.rows.iter().any(|row| errors.rows.contains_key(row));
        let errors: Vec<Errors> = errors.into_iter().filter(of_run).collect();
        if errors.is_empty() {
            // Only values that are sums over a unit's tokens fail: all its tokens are wrong.
            let is_of_run = |key: &Key| {
                let of_unit = key.stage.is_of_k() || key.stage == Stage::Loss;
                let here = |rank| run.ranks.contains(&rank);
                of_unit && key.rank.map_or(!rows_tell, here)
            };
            return failing.iter().any(is_of_run).then(whole);
        }
        let known = |row: &usize| errors.iter().all(|errors| errors.rows.contains_key(row));
        if !run.rows.iter().all(known) {
            // Where only a sample of the run was compared, the run is right or wrong as a whole.
            return errors.iter().any(|errors| errors.are_wrong(&run.rows)).then(whole);
        }
        let wrong = |rows: &[usize]| -> Vec<usize> {
            let is = |row: &usize| errors.iter().any(|errors| errors.are_wrong(&[*row]));
            rows.iter().copied().filter(is).collect()
        };
        let telling = |rows: &[usize]| {
            rows.iter().filter(|row| errors.iter().any(|errors| errors.rows[row].1 > 0.0)).count()
                as f64
        };
        let (wrong_rows, most) =
            (wrong(&run.rows), |n: usize, value: f64| n as f64 >= MOST * value);
        if wrong_rows.is_empty() {
            return None;
        }
        if most(wrong_rows.len(), telling(&run.rows)) {
            return Some(whole());
        }
        let sequence = |row: &usize| row / inputs.sequence.max(1);
        let sequences: Vec<&[usize]> =
            run.rows.chunk_by(|a, b| sequence(a) == sequence(b)).collect();
        let all: Vec<usize> = (0..sequences.len())
            .filter(|&at| sequences[at].iter().any(|row| wrong_rows.binary_search(row).is_ok()))
            .collect();
        let whole = |at: &usize| most(wrong(sequences[*at]).len(), telling(sequences[*at]));
        if sequences.len() > 1 && all.iter().all(whole) {
            let part = format!("sequences {} (counted from 0)", list(&runs_of(&all)));
            let rows = all.iter().flat_map(|&at| sequences[at].iter().copied()).collect();
            return Some(Wrong { run, rows, part: Some(part) });
        }
        let part = Some(format!("tokens {} (counted from 0)", list(&runs_of(&wrong_rows))));
        Some(Wrong { run, rows: wrong_rows, part })
    }

    /// These tokens in words; `inputs`: the microbatch to name, if any.
    fn words(&self, inputs: Option<&MicrobatchInputs>) -> String {
        let name_of_run = match inputs {
            Some(MicrobatchInputs { microbatch: Some(Microbatch(number)), .. })
                if self.run.ranks.is_empty() =>
            {
                format!("microbatch {number}")
            }
            _ if self.run.ranks.is_empty() => String::new(),
            Some(inputs) => place(inputs, self.run),
            None => name_ranks(&self.run.ranks),
        };
        match &self.part {
            None => name_of_run,
            Some(part) if name_of_run.is_empty() => part.clone(),
            Some(part) => format!("{part} in {name_of_run}"),
        }
    }
}

fn list(runs: &[Range<usize>]) -> String {
    let words_of = |run: &Range<usize>| match run.len() {
        1 => run.start.to_string(),
        _ => format!("{} to {}", run.start, run.end - 1),
    };
    let more = if runs.len() > TOLD { " and more" } else { "" };
    format!("{}{more}", runs.iter().take(TOLD).map(words_of).collect::<Vec<_>>().join(", "))
}

/// Each row's squared error and squared norm in a comparison, and what rounding causes.
struct Errors {
    rows: BTreeMap<usize, (f64, f64)>,
    /// The squared error that rounding causes in a row of zeros, and per unit of a row's squared
    /// norm.
    floor: [f64; 2],
}

impl Errors {
    fn of(evidence: &Evidence<'_>, key: Key) -> Option<Errors> {
        let (residual, captured) = (evidence.residuals.get(&key)?, evidence.captured(key)?);
        let table = evidence.reference().stages.get(&key)?;
        let error_of_row = |(&row, wanted): (&usize, &Vec<f64>)| {
            (row, (distance(captured.row(row), wanted), energy(wanted)))
        };
        let each = residual.floor / residual.elements.max(1) as f64 * captured.columns as f64;
        let floor = [each, residual.floor / residual.reference.max(f64::MIN_POSITIVE)];
        Some(Errors { rows: table.iter().map(error_of_row).collect(), floor })
    }

    /// Whether rows together are further off than rounding explains. The rounding of a row is
    /// proportional to its squared norm, but at least the mean of all rows.
    fn are_wrong(&self, rows: &[usize]) -> bool {
        let (mut error, mut floor) = (0.0, 0.0);
        for (off, size) in rows.iter().filter_map(|row| self.rows.get(row)) {
            error += off;
            floor += f64::max(self.floor[0], self.floor[1] * size);
        }
        !(error <= OVER * floor)
    }
}
