//! `uninitialised-output`: rows of a gradient were never written and hold what the memory
//! held: zeros, one pattern, or rows of an earlier use.
//!
//! Detectors: failing rows of one bit pattern, or zeros in whole runs of rows where the
//! gradient has its usual size; rows of tokens that do not count, or of the last tile, that
//! are other rows of the same gradient; wrong rows that another microbatch's gradient has, too.
//! Emulation: those rows hold what was captured, or the other row's gradient, and every
//! other row must be right; where dlogits are the buffer, dk follows from the stale rows.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::{MovedRows, ReplacedValues, StaleRows};
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::direct::{distance, energy};
use crate::diagnose::detectors::least_squares::runs_of;
use crate::diagnose::detectors::reference::Table;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// The catalogue's entry.
pub struct UninitialisedOutput;

/// Runs of unwritten rows at most, where they hold zeros.
const RUNS: usize = 4;
/// Rows that were not written are as large as the others: a filter drops small ones.
const USUAL: f64 = 0.3;

impl Cause for UninitialisedOutput {
    fn id(&self) -> &str {
        "uninitialised-output"
    }

    fn about(&self) -> &str {
        "rows of a gradient were never written: they hold what the memory held before"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["MLP-cuda before 396b00e", "flash-linear-attention 892"]
    }

    fn advice(&self) -> &str {
        "write every row of the output, those of ignored tokens and of the last tile too, or clear it before"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let rows: [Stage; 6] = Stage::PRODUCTS;
        let mut constant = ReplacedValues::default();
        let mut words: Vec<String> = Vec::new();
        let mut runs = 0;
        for (key, _) in evidence.failing_of(&rows) {
            let Some((value, found)) = unwritten(evidence, key) else { continue };
            runs += found.len();
            words.push(format!("{} {}", key.stage, list(&found)));
            let Some(captured) = evidence.captured(key) else { continue };
            let all = found.into_iter().flatten().map(|row| (row, captured.row(row).to_vec()));
            constant = constant.rows(key, all);
            words.last_mut().into_iter().for_each(|w| w.push_str(&format!(" hold {value:e}")));
        }
        let mut hypotheses = Vec::new();
        if !constant.of.is_empty() {
            let parameters = vec![("rows", words.join("; "))];
            hypotheses.push(Hypothesis::new(constant, parameters).fitted(2 * runs.min(8)));
        }
        hypotheses.extend(of_other_microbatches(evidence));
        hypotheses.extend(stale_tokens(evidence));
        hypotheses.extend(stale_tail(evidence));
        hypotheses
    }
}

fn list(runs: &[Range<usize>]) -> String {
    let all = runs.iter().take(4).map(|run| format!("{}..{}", run.start, run.end));
    let mut words = all.collect::<Vec<String>>().join(", ");
    if runs.len() > 4 {
        words.push_str(&format!(" and {} more runs", runs.len() - 4));
    }
    words
}

/// Rows of one pattern that should not be: the pattern and their runs.
fn unwritten(evidence: &Evidence<'_>, key: Key) -> Option<(f64, Vec<Range<usize>>)> {
    let captured = evidence.captured(key)?;
    let table = evidence.reference().stages.get(&key)?;
    if captured.columns < 2 {
        return None;
    }
    let of_row = |row: usize| {
        let values = captured.row(row);
        let same = values.iter().all(|x| x.to_bits() == values[0].to_bits());
        same.then_some(values[0])
    };
    let wrong = |row: &usize| {
        let (values, wanted) = (captured.row(*row), table.get(row));
        wanted.is_some_and(|wanted| !(distance(values, wanted) <= 0.25 * energy(wanted)))
    };
    let all: Vec<(usize, f64)> = table
        .keys()
        .filter(|&row| wrong(row))
        .filter_map(|&row| Some((row, of_row(row)?)))
        .collect();
    let &(_, value) = all.first()?;
    let same = |x: f64| x.to_bits() == value.to_bits();
    if !all.iter().all(|&(_, x)| same(x)) {
        return None;
    }
    // Rows that a sample did not look at are unwritten where they hold the pattern too.
    let rows: Vec<usize> = match table.len() < captured.rows() || value != 0.0 {
        true => (0..captured.rows()).filter(|&row| of_row(row).is_some_and(same)).collect(),
        false => all.iter().map(|&(row, _)| row).collect(),
    };
    let runs = runs_of(&rows);
    if is_computed(value) && (rows.len() == captured.rows() || runs.iter().any(|run| run.len() < 2))
    {
        return None;
    }
    (value != 0.0 || is_hole(&captured, table, &runs)).then_some((value, runs))
}

/// The NaN that arithmetic makes: it comes in single rows, or in all that it reached. A tile
/// that was never written may hold it too, where the framework fills memory with it.
fn is_computed(value: f64) -> bool {
    value.to_bits() << 1 == f64::NAN.to_bits() << 1
}

/// Zeros in few runs of rows, where the gradient has its usual size.
fn is_hole(captured: &Values, table: &Table, runs: &[Range<usize>]) -> bool {
    let middle = |mut norms: Vec<f64>| {
        norms.sort_by(f64::total_cmp);
        norms.get(norms.len() / 2).copied().unwrap_or(0.0)
    };
    let inside = |row: &usize| runs.iter().any(|run| run.contains(row));
    let norms = |wanted: bool| -> Vec<f64> {
        let of = table.iter().filter(|(row, of)| inside(row) == wanted && energy(of) > 0.0);
        of.map(|(_, of)| energy(of).sqrt()).collect()
    };
    let whole: usize = runs.iter().map(ExactSizeIterator::len).sum();
    runs.len() <= RUNS
        && whole > 1
        && whole < captured.rows()
        && middle(norms(true)) >= USUAL * middle(norms(false))
}

/// The row of a table that a captured row is.
fn other_row(row: &[f64], table: &Table, of: usize) -> Option<usize> {
    let norm = energy(row);
    let near = |(at, other): (&usize, &Vec<f64>)| {
        (*at != of && distance(row, other) <= 1e-3 * norm).then_some(*at)
    };
    if norm > 0.0 { table.iter().find_map(near) } else { None }
}

/// Wrong rows of a gradient's parts, or rows of dq of tokens that take no part, that hold, bit for
/// bit, what stands in the same rows of another microbatch: one buffer for all, of which some rows
/// are neither cleared nor written. Other rows of whole gradients are looked at by the check of
/// buffers.
fn of_other_microbatches(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let parts = [Stage::DqLse, Stage::DqLabel, Stage::Dq, Stage::DkLse, Stage::DkLabel];
    let (mut world, mut words, mut seen) = (ReplacedValues::default(), Vec::new(), 0);
    for (key, _) in evidence.failing_of(&parts) {
        let (captured, table) = (evidence.captured(key)?, evidence.reference().stages.get(&key)?);
        let is_wrong = |row: usize, wanted: &[f64]| {
            let off = distance(captured.row(row), wanted);
            off > 0.0 && !(off <= 0.25 * energy(wanted))
        };
        let counts = |of: (&usize, &Vec<f64>)| is_wrong(*of.0, of.1) && energy(of.1) > 0.0;
        if key.stage == Stage::Dq && table.iter().any(counts) {
            continue;
        }
        let wrong: Vec<usize> = table
            .iter()
            .filter(|(row, wanted)| is_wrong(**row, wanted))
            .map(|(&row, _)| row)
            .collect();
        let others = evidence.inputs.iter().map(|one| Key { microbatch: one.microbatch, ..key });
        let mut others = others.filter(|other| other.microbatch != key.microbatch);
        let (other, held) = others.find_map(|other| {
            let held = evidence.captured(other).filter(|of| of.columns == captured.columns)?;
            let same = |&row: &usize| row < held.rows() && held.row(row) == captured.row(row);
            (!wrong.is_empty() && wrong.iter().all(same)).then_some((other, held))
        })?;
        seen += wrong.len();
        let of = other.microbatch.map_or(0, |mb| mb.0);
        words.push(format!("{} of {} rows hold those of microbatch {of}", wrong.len(), key.stage));
        world = world.rows(key, wrong.into_iter().map(|row| (row, held.row(row).to_vec())));
    }
    words.sort();
    words.dedup();
    // One row may be anything.
    (seen > 1).then(|| Hypothesis::new(world, vec![("rows", words.join("; "))]))
}

/// Rows of tokens without gradient that hold other tokens' rows: in dq alone, or in the
/// dlogits that dq and dk are made of.
fn stale_tokens(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut moved: BTreeMap<_, Vec<Row>> = BTreeMap::new();
    let mut count = 0;
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let (Some(inputs), Some(captured)) =
            (evidence.inputs_of(key.microbatch), evidence.captured(key))
        else {
            continue;
        };
        let Some(table) = evidence.all_rows().and_then(|all| all.stages.get(&key)) else {
            return Vec::new(); // a sample does not hold the other rows
        };
        // One map a microbatch: each of its ranks has rows of its own.
        let own = || (0..inputs.tokens()).map(Row::From).collect();
        let from = moved.entry(key.microbatch).or_insert_with(own);
        for (&t, _) in table.iter().filter(|(_, wanted)| energy(wanted) == 0.0) {
            let row = captured.row(t);
            if energy(row) == 0.0 {
                continue;
            }
            let Some(other) = other_row(row, table, t) else { return Vec::new() };
            from[t] = Row::From(other);
            count += 1;
        }
    }
    if count == 0 {
        return Vec::new();
    }
    let parameters = |what: &str| {
        vec![
            ("rows", format!("{count} of tokens that do not count hold rows of others")),
            ("of", what.into()),
        ]
    };
    vec![
        Hypothesis::new(MovedRows { from: moved.clone() }, parameters("dq")).fitted(2),
        Hypothesis::new(
            StaleRows { from: moved, g: evidence.reference().g.clone() },
            parameters("dlogits"),
        )
        .fitted(2),
    ]
}

/// Rows from some row on to the end, that are other rows of the same gradient.
fn stale_tail(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut world = ReplacedValues::default();
    let mut words: Vec<String> = Vec::new();
    let mut seen = 0;
    for (key, _) in evidence.failing_of(&[Stage::DkLse, Stage::Dk, Stage::Dq]) {
        let (captured, table) = (evidence.captured(key)?, evidence.all_rows()?.stages.get(&key)?);
        let Some((tail, other, shown)) = tail_of_others(&captured, table) else { continue };
        seen += shown;
        words.push(format!("{} {}..{} hold rows {other}.. of it", key.stage, tail.start, tail.end));
        world = world.rows(key, tail.map(|row| (row, captured.row(row).to_vec())));
    }
    words.sort();
    words.dedup();
    // One row of one gradient may be anything.
    let parameters = vec![("rows", words.join("; "))];
    (seen > 1).then(|| Hypothesis::new(world, parameters).fitted(3))
}

/// The tail of a gradient that holds rows of it from another one on, that row, and how many
/// of the tail's are not zeros in both: the padding of the vocabulary is, and its rows may
/// be all that shows it.
fn tail_of_others(captured: &Values, table: &Table) -> Option<(Range<usize>, usize, usize)> {
    let (&start, &last) = (table.keys().next()?, table.keys().next_back()?);
    let rows = start..last + 1;
    if rows.len() != table.len() || rows.end > captured.rows() {
        return None;
    }
    let wrong =
        |row: &usize| distance(captured.row(*row), &table[row]) > 0.25 * energy(&table[row]);
    let first = rows.clone().find(wrong)?;
    let tail = first..rows.end;
    if tail.len() < 2 || 2 * tail.len() > rows.len() {
        return None;
    }
    let other = other_row(captured.row(first), table, first)?;
    let holds = |row: usize| {
        let (values, wanted) = (captured.row(row), table.get(&(other + row - first))?);
        (distance(values, wanted) <= 1e-3 * energy(values)).then(|| energy(values) > 0.0)
    };
    let held: Vec<bool> = tail.clone().map(holds).collect::<Option<_>>()?;
    Some((tail, other, held.into_iter().filter(|&shown| shown).count()))
}
