//! The microbatches and ranks in which what was captured is not as declared, where it is in the
//! others: a fault may be of one graph that was compiled apart, or of one rank's machine.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Microbatch;

use super::asked::place;
use super::direct::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::dump::name_ranks;
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::replay::world::UnitName;

/// Stages whose rows are tokens.
const OF_TOKENS: [Stage; 7] = [
    Stage::LabelLogits,
    Stage::Lse,
    Stage::Logprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
];
/// Gradients whose rows are classes: all tokens of a unit are in each.
pub const OF_CLASSES: [Stage; 4] = [Stage::DkLse, Stage::DkLabel, Stage::Dk, Stage::Dbias];
/// Squared errors of a rank's rows over what rounding makes of them, from which on they are wrong.
const OVER: f64 = 16.0;
/// Places that are told in words.
const TOLD: usize = 8;

/// Some tokens of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Places {
    /// Their numbers, ascending, by microbatch.
    rows: BTreeMap<Option<Microbatch>, Vec<usize>>,
    /// The units all of whose tokens these are.
    units: BTreeSet<UnitName>,
    /// The classes whose gradients are wrong, ascending, where that is what tells them.
    classes: Option<Vec<usize>>,
    /// In words.
    pub words: String,
}

impl Places {
    /// Where something is wrong; `None` where that is everywhere, or nothing tells.
    pub fn of(evidence: &Evidence<'_>) -> Option<Places> {
        Places::of_tokens(evidence).or_else(|| Places::of_classes(evidence))
    }

    fn of_tokens(evidence: &Evidence<'_>) -> Option<Places> {
        let mut found = Places::default();
        let (mut right, mut words, mut ranks) = (false, Vec::new(), BTreeSet::new());
        for inputs in evidence.inputs {
            let runs = runs(evidence, inputs);
            let wrong: Vec<&Unit> =
                runs.iter().filter(|run| is_wrong(evidence, inputs, run)).collect();
            right |= wrong.len() < runs.len();
            ranks.insert(wrong.iter().map(|run| name_ranks(&run.ranks)).collect::<Vec<_>>());
            match inputs.microbatch {
                Some(Microbatch(at)) if wrong.len() == runs.len() => {
                    words.push(format!("microbatch {at}"));
                }
                _ => words.extend(wrong.iter().map(|run| place(inputs, run))),
            }
            let mut rows: Vec<usize> = wrong.iter().flat_map(|run| run.rows.clone()).collect();
            rows.sort_unstable();
            found.add(evidence, inputs, (rows, &runs));
        }
        // The same ranks in every microbatch.
        if let (Some(of), None) = (ranks.first(), ranks.iter().nth(1)) {
            words.clone_from(of);
        }
        let more = words.len().saturating_sub(TOLD);
        words.truncate(TOLD);
        found.words = words.join(", ");
        if more > 0 {
            found.words.push_str(&format!(" and {more} more"));
        }
        (right && !found.rows.is_empty()).then_some(found)
    }

    /// The ranks whose classes have wrong gradients, where nothing else fails and each rank holds
    /// some of the classes.
    fn of_classes(evidence: &Evidence<'_>) -> Option<Places> {
        let (mut classes, mut words): (Vec<usize>, Option<String>) = Default::default();
        for &key in &evidence.failing {
            let of = Some(key).filter(|key| OF_CLASSES.contains(&key.stage))?;
            let tensor = evidence.step.find(of.stage.role()?, of.microbatch)?;
            let runs = evidence.step.rank_classes(tensor);
            let wrong =
                |run: &&Unit| rows_are_wrong(evidence, of, run).is_some_and(|is_wrong| is_wrong);
            let wrong: Vec<&Unit> = runs.iter().filter(wrong).collect();
            if wrong.is_empty() || wrong.len() == runs.len() {
                return None;
            }
            classes.extend(wrong.iter().flat_map(|run| &run.rows));
            let own: Vec<String> = wrong.iter().map(|run| name_ranks(&run.ranks)).collect();
            let own = format!("the classes of {}", own.join(", "));
            if words.get_or_insert_with(|| own.clone()) != &own {
                return None;
            }
        }
        classes.sort_unstable();
        classes.dedup();
        Some(Places { classes: Some(classes), words: words?, ..Places::default() })
    }

    /// Whether it is some classes that are wrong, and not some tokens.
    pub fn are_classes(&self) -> bool {
        self.classes.is_some()
    }

    /// Whether a class's gradient is among what is wrong.
    pub fn holds_class(&self, class: usize) -> bool {
        self.classes.as_ref().is_some_and(|classes| classes.binary_search(&class).is_ok())
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

    /// Whether a token is among them.
    pub fn holds(&self, microbatch: Option<Microbatch>, row: usize) -> bool {
        self.rows.get(&microbatch).is_some_and(|rows| rows.binary_search(&row).is_ok())
    }

    /// Whether some token of a microbatch is.
    pub fn touches(&self, microbatch: Option<Microbatch>) -> bool {
        self.rows.contains_key(&microbatch)
    }

    /// Whether all tokens of a unit are.
    pub fn is_in(&self, (microbatch, rank): UnitName) -> bool {
        self.units.contains(&(microbatch, None)) || self.units.contains(&(microbatch, rank))
    }
}

/// A microbatch's tokens by the ranks that hold them.
fn runs(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<Unit> {
    match evidence.step.rank_rows(inputs) {
        Ok(units) if !units.is_empty() => units,
        _ => vec![Unit { ranks: Vec::new(), rows: (0..inputs.tokens()).collect() }],
    }
}

/// Whether rows of a rank's tokens, or a gradient that only they are in, are not as declared.
fn is_wrong(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, run: &Unit) -> bool {
    let here = |key: &&Key| key.microbatch == inputs.microbatch;
    let mut failing = evidence.failing.iter().filter(here);
    failing.any(|key| {
        if OF_CLASSES.contains(&key.stage) {
            return key.rank.is_none_or(|rank| run.ranks.contains(&rank));
        }
        OF_TOKENS.contains(&key.stage) && rows_are_wrong(evidence, *key, run).unwrap_or(false)
    })
}

/// Whether the rows of these tokens are further off than rounding explains, all together.
fn rows_are_wrong(evidence: &Evidence<'_>, key: Key, run: &Unit) -> Option<bool> {
    let (of, captured) = (evidence.residuals.get(&key)?, evidence.captured(key)?);
    let table = evidence.reference().stages.get(&key)?;
    let each = of.floor / of.elements.max(1) as f64;
    let (mut error, mut floor) = (0.0, 0.0);
    for (&row, wanted) in table.iter().filter(|(row, _)| run.rows.binary_search(row).is_ok()) {
        error += distance(captured.row(row), wanted);
        // Rounding of a row grows with it; a row of nothing has the mean of all.
        let own = of.floor * energy(wanted) / of.reference.max(f64::MIN_POSITIVE);
        floor += own.max(each * wanted.len() as f64);
    }
    Some(!(error <= OVER * floor))
}
