//! `uninitialised-output`: rows of a gradient were never written and hold what was in the memory
//! before: zeros, one bit pattern, or rows of an earlier use.
//!
//! Detectors: failing rows of one bit pattern, or zeros in whole runs of rows where the reference
//! is not small; rows of tokens that do not count, or of the last tile, that equal other rows of
//! the same gradient; wrong rows that equal those of another microbatch's gradient. Emulation:
//! those rows are taken as captured, or as the other row's gradient, and every other row must be
//! right; where dlogits are the buffer, dk is computed from the stale rows.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::{MovedRows, ReplacedValues, StaleRows};
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::least_squares::runs_of;
use crate::diagnose::detectors::reference::Table;
use crate::diagnose::detectors::single_tokens::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// The catalogue's entry.
pub struct UninitialisedOutput;

/// At most this many runs of rows are zero.
const RUNS: usize = 4;
/// The reference rows of unwritten rows must be at least this share of the others' median norm:
/// small rows may have been dropped by a filter.
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
            let Some((value, ranges)) = unwritten(evidence, key) else { continue };
            runs += ranges.len();
            words.push(format!("{} {}", key.stage, list(&ranges)));
            let Some(captured) = evidence.captured(key) else { continue };
            let all = ranges.into_iter().flatten().map(|row| (row, captured.row(row).to_vec()));
            constant = constant.rows(key, all);
            words.last_mut().into_iter().for_each(|w| w.push_str(&format!(" hold {value:e}")));
        }
        let mut hypotheses = Vec::new();
        if !constant.rows_of_key.is_empty() {
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

/// The failing rows that consist of one repeated value: that value, and the runs of these rows.
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
    // Rows outside the sample count as unwritten if they hold the same value.
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

/// Whether a value is the NaN that arithmetic produces. Computed NaNs occur in single rows or in
/// all rows; a tile that was never written may hold this NaN too, where the framework fills memory
/// with it.
fn is_computed(value: f64) -> bool {
    value.to_bits() << 1 == f64::NAN.to_bits() << 1
}

/// Whether the zero rows lie in few runs and their reference is not small.
fn is_hole(captured: &Values, table: &Table, runs: &[Range<usize>]) -> bool {
    let middle = |mut norms: Vec<f64>| {
        norms.sort_by(f64::total_cmp);
        norms.get(norms.len() / 2).copied().unwrap_or(0.0)
    };
    let inside = |row: &usize| runs.iter().any(|run| run.contains(row));
    let norms = |wanted: bool| -> Vec<f64> {
        let rows =
            table.iter().filter(|(row, values)| inside(row) == wanted && energy(values) > 0.0);
        rows.map(|(_, values)| energy(values).sqrt()).collect()
    };
    let whole: usize = runs.iter().map(ExactSizeIterator::len).sum();
    runs.len() <= RUNS
        && whole > 1
        && whole < captured.rows()
        && middle(norms(true)) >= USUAL * middle(norms(false))
}

/// The other row of the reference that a captured row equals.
fn other_row(row: &[f64], table: &Table, row_index: usize) -> Option<usize> {
    let norm = energy(row);
    let near = |(at, other): (&usize, &Vec<f64>)| {
        (*at != row_index && distance(row, other) <= 1e-3 * norm).then_some(*at)
    };
    if norm > 0.0 { table.iter().find_map(near) } else { None }
}

/// The hypothesis that wrong rows equal, bit for bit, the same rows of another microbatch: all
/// microbatches share a buffer, of which some rows are neither cleared nor written. For dq only
/// rows of tokens that take no part are compared; `replay checks` compares the others.
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
        let others =
            evidence.inputs.iter().map(|inputs| Key { microbatch: inputs.microbatch, ..key });
        let mut others = others.filter(|other| other.microbatch != key.microbatch);
        let (other, captured_other) = others.find_map(|other| {
            let captured_other =
                evidence.captured(other).filter(|values| values.columns == captured.columns)?;
            let same = |&row: &usize| {
                row < captured_other.rows() && captured_other.row(row) == captured.row(row)
            };
            (!wrong.is_empty() && wrong.iter().all(same)).then_some((other, captured_other))
        })?;
        seen += wrong.len();
        let source = other.microbatch.map_or(0, |mb| mb.0);
        words.push(format!(
            "{} of {} rows hold those of microbatch {source}",
            wrong.len(),
            key.stage
        ));
        world =
            world.rows(key, wrong.into_iter().map(|row| (row, captured_other.row(row).to_vec())));
    }
    words.sort();
    words.dedup();
    // One row may be anything.
    (seen > 1).then(|| Hypothesis::new(world, vec![("rows", words.join("; "))]))
}

/// Hypotheses that rows of tokens without gradient hold other tokens' rows: in dq alone, or in
/// dlogits, from which dq and dk are computed.
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
            return Vec::new(); // A sample does not contain the other rows.
        };
        // One map per microbatch, which its ranks fill, each for its own rows.
        let identity = || (0..inputs.tokens()).map(Row::From).collect();
        let from = moved.entry(key.microbatch).or_insert_with(identity);
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

/// The hypothesis that all rows from some row on equal other rows of the same gradient.
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
    // A single row of one gradient may be anything.
    let parameters = vec![("rows", words.join("; "))];
    (seen > 1).then(|| Hypothesis::new(world, parameters).fitted(3))
}

/// The tail of a gradient that equals its rows from another row on; that row; and how many rows of
/// the tail are nonzero. Rows of zeros, such as the padding of the vocabulary, equal each other
/// without proving anything.
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
    let shown_rows: Vec<bool> = tail.clone().map(holds).collect::<Option<_>>()?;
    Some((tail, other, shown_rows.into_iter().filter(|&shown| shown).count()))
}
