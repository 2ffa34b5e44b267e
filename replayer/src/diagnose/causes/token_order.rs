//! `token-order`: rows of tokens are in another order than the tensors that they belong to, for
//! example because context parallelism's zigzag was not undone.
//!
//! Detectors: captured rows of dq are the reference's rows in another order, in all sequences or in
//! some of them; the labels that the failing rows show are the recorded ones in another order.
//! Emulation: the rows of dq in that order (after its parts were added, or before), or all of a
//! token's inputs, or the labels alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use backtape::identity::Microbatch;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::{MovedRows, MovedTokens, Relabelled};
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::implied_lse::median;
use crate::diagnose::detectors::label_fit::LabelTest;
use crate::diagnose::detectors::reference::Rows;
use crate::diagnose::detectors::single_tokens::{alike, distance, energy, tokens};
use crate::diagnose::detectors::token_orders::{Order, inverse, orders};
use crate::diagnose::detectors::token_runs::known;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::variant::{StandsIn, Variant};
use crate::replay::world::StagePlace;
use crate::replay::world::Supplied;

/// The catalogue's entry.
pub struct TokenOrder;

/// Share of the rows that must be where a permutation puts them.
const FITS: f64 = 0.9;
/// The report names at most this many runs.
const RUNS: usize = 8;
/// At most this many rows of dq are matched with each other.
const MATCHED: usize = 6000;

impl Cause for TokenOrder {
    fn id(&self) -> &str {
        "token-order"
    }

    fn about(&self) -> &str {
        "rows of tokens stand in another order than what they belong to"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ms-swift 9977", "slime 73"]
    }

    fn advice(&self) -> &str {
        "permute labels, weights and positions with the hidden states, and undo the order before rows are compared or reduced"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails(Stage::LabelLogits) {
            return Vec::new();
        }
        let mut hypotheses = of_rows(evidence);
        hypotheses.extend(of_labels(evidence));
        hypotheses
    }
}

/// The failing comparison of dq, or of a part of it, of each microbatch.
pub fn failing_dq<'e>(evidence: &'e Evidence<'_>) -> impl Iterator<Item = Key> + 'e {
    let parts = [Stage::Dq, Stage::DqLse, Stage::DqLabel];
    let first_failing = move |inputs: &MicrobatchInputs| {
        let of_stage = |&stage: &Stage| {
            let mut keys = evidence.failing.iter();
            keys.find(|key| key.stage == stage && key.microbatch == inputs.microbatch).copied()
        };
        parts.iter().find_map(of_stage)
    };
    evidence.inputs.iter().filter_map(first_failing)
}

fn all_orders(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<Order> {
    let extents = known(evidence.step, inputs);
    let batch = (inputs.tokens() / inputs.sequence.max(1), inputs.sequence);
    orders(inputs.tokens(), &extents, Some(batch))
}

type Orders = BTreeMap<Option<Microbatch>, Vec<usize>>;

/// The hypotheses of rows of dq in another order: only those of dq, or everything of a token.
fn of_rows(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut orders_by_name: BTreeMap<String, Orders> = BTreeMap::new();
    let (mut put_back, mut parts) = (Vec::new(), Vec::new());
    for key in failing_dq(evidence) {
        let Some(inputs) = evidence.inputs_of(key.microbatch) else { continue };
        let Some(captured) = evidence.captured(key) else { continue };
        let place = (key.stage, key.microbatch);
        let rows = evidence.reference().rows_of(place);
        let orders = all_orders(evidence, inputs);
        let whole = orders.iter().find(|order| fits(&captured, &rows, &inverse(&order.from)));
        let part = || orders.iter().find_map(|order| in_part(&captured, &rows, order));
        let named = whole.cloned().or_else(|| {
            let (order, runs) = part()?;
            parts.push(place_of(key.microbatch, &runs, order.runs.len()));
            Some(order)
        });
        let whole = || Some(evidence.all_rows()?.rows_of(place));
        let order = named.or_else(|| matched(&captured, &whole()?, inputs.tokens()));
        let Some(order) = order else { return Vec::new() };
        put_back.push(in_place(key, &captured, &inverse(&order.from)));
        orders_by_name.entry(order.name).or_default().insert(key.microbatch, order.from);
    }
    // All microbatches of a job must have the same permutation by name.
    if orders_by_name.len() != 1 {
        return Vec::new();
    }
    // Where the parts of dq were captured in the right order, only their sum was permuted.
    let alone = !evidence.fails_any(&[Stage::DqLse, Stage::DqLabel])
        && evidence.residuals.keys().any(|key| key.stage == Stage::DqLse);
    let mut hypotheses = Vec::new();
    for (name, from) in orders_by_name {
        let fitted = if name == MATCH { 4 } else { 0 };
        let rows =
            |indices: &Vec<usize>| indices.iter().map(|&t| Row::From(t)).collect::<Vec<Row>>();
        let moved = from.iter().map(|(&mb, indices)| (mb, rows(indices))).collect();
        let parameters = |what: &str| {
            let only = (!parts.is_empty()).then(|| ("only in", parts.join("; ")));
            let named = [("order", name.clone()), ("of", what.to_string())];
            named.into_iter().chain(only).collect::<Vec<_>>()
        };
        if alone {
            let supplied = std::mem::take(&mut put_back);
            let world = StandsIn(Arc::new(Variant { name: name.clone(), supplied }));
            let parameters = parameters("rows of dq after its parts were added");
            hypotheses.push(Hypothesis::new(world, parameters).fitted(fitted));
        }
        let rows = MovedRows { from: moved };
        hypotheses.push(Hypothesis::new(rows, parameters("rows of dq")).fitted(fitted));
        if evidence.fails(Stage::Lse) || evidence.fails(Stage::LabelLogits) {
            let world = MovedTokens { from };
            let words = "everything that was computed of a token";
            hypotheses.push(Hypothesis::new(world, parameters(words)).fitted(fitted));
        }
    }
    hypotheses
}

/// The captured rows with the permutation undone: the row at `to[t]` is token t's.
fn in_place(key: Key, captured: &Values, to: &[usize]) -> Supplied {
    let place = StagePlace { stage: key.stage, microbatch: key.microbatch, rank: None };
    let values = to.iter().flat_map(|&row| captured.row(row)).copied().collect();
    Supplied { place, values, precision: captured.stored() }
}

/// The name of a permutation that follows no known rule.
const MATCH: &str = "one that is known only row by row";

/// Whether the sampled rows of the reference are captured where a permutation puts them.
fn fits(captured: &Values, rows: &Rows<'_>, to: &[usize]) -> bool {
    let all: Vec<usize> = (0..to.len()).collect();
    let told = telling(rows, median_size(rows), to, &all);
    told.len() >= 4 && stand_at(captured, rows, &told, &|t| to[t])
}

/// The permutation applied only to those runs that follow it, if all other runs are in their own
/// order; and which runs those are.
fn in_part(captured: &Values, rows: &Rows<'_>, order: &Order) -> Option<(Order, Vec<usize>)> {
    let to = inverse(&order.from);
    let mut from: Vec<usize> = (0..to.len()).collect();
    let (mut told, mut runs, least) = (0, Vec::new(), median_size(rows));
    for (index, run) in order.runs.iter().enumerate() {
        let own_tokens = telling(rows, least, &to, run);
        if own_tokens.is_empty() || stand_at(captured, rows, &own_tokens, &|t| t) {
            continue;
        }
        if !stand_at(captured, rows, &own_tokens, &|t| to[t]) {
            return None;
        }
        run.iter().for_each(|&t| from[t] = order.from[t]);
        told += own_tokens.len();
        runs.push(index);
    }
    (told >= 4).then(|| (Order { from, ..order.clone() }, runs))
}

/// In words, which runs of a microbatch are permuted.
fn place_of(microbatch: Option<Microbatch>, runs: &[usize], run_count: usize) -> String {
    let some: Vec<String> = runs.iter().take(RUNS).map(usize::to_string).collect();
    let more = if runs.len() > RUNS { " ..." } else { "" };
    let mb = microbatch.map_or(String::new(), |mb| format!("microbatch {mb}, "));
    format!("{mb}{} of {run_count} (counted from 0: {}{more})", runs.len(), some.join(", "))
}

/// The median squared norm: only the larger half of the rows is compared, as small rows of f16 are
/// mostly rounding.
fn median_size(rows: &Rows<'_>) -> f64 {
    median(rows.values().map(|row| energy(row)).filter(|&size| size > 0.0).collect())
}

/// The tokens that a permutation moves and whose rows have at least this squared norm.
fn telling(rows: &Rows<'_>, least: f64, to: &[usize], run: &[usize]) -> Vec<usize> {
    let tells = |t: &&usize| to[**t] != **t && rows.get(*t).is_some_and(|row| energy(row) >= least);
    run.iter().filter(tells).copied().collect()
}

/// Whether nearly all of these rows are captured at these places.
fn stand_at(
    captured: &Values,
    rows: &Rows<'_>,
    tokens: &[usize],
    place: &dyn Fn(usize) -> usize,
) -> bool {
    let fit = tokens.iter().filter(|&&t| alike(captured.row(place(t)), rows[&t])).count();
    fit as f64 >= FITS * tokens.len() as f64
}

/// The permutation that matches every captured row with one row of the reference; none where there
/// is none.
fn matched(captured: &Values, rows: &Rows<'_>, tokens: usize) -> Option<Order> {
    if rows.len() != tokens || tokens > MATCHED {
        return None; // In a sample most rows' matches are missing.
    }
    let norms: Vec<f64> = rows.values().map(|row| energy(row)).collect();
    let mut by_norm: Vec<usize> = (0..tokens).collect();
    by_norm.sort_by(|&a, &b| norms[a].total_cmp(&norms[b]));
    let mut taken = vec![false; tokens];
    let mut from = vec![usize::MAX; tokens];
    for (t, to) in from.iter_mut().enumerate() {
        let row = captured.row(t);
        let norm = energy(row);
        if norm == 0.0 {
            continue;
        }
        // Equal rows have nearly equal norms.
        let first = by_norm.partition_point(|&s| norms[s] < 0.95 * norm);
        let near = by_norm[first..].iter().take_while(|&&s| norms[s] <= 1.05 * norm);
        let near = near.filter(|&&s| !taken[s]).map(|&s| (distance(row, rows[&s]), s));
        let (off, s) = near.min_by(|a, b| a.0.total_cmp(&b.0).then((a.1 != t).cmp(&(b.1 != t))))?;
        if off > 1e-3 * norm {
            return None;
        }
        (*to, taken[s]) = (s, true);
    }
    // Rows of zeros are matched with the rows that are left.
    let zeros: Vec<usize> = (0..tokens).filter(|&t| from[t] == usize::MAX).collect();
    let mut free = (0..tokens).filter(|&s| !taken[s]);
    for t in zeros {
        let s = free.next()?;
        if norms[s] > 0.0 && energy(captured.row(t)) == 0.0 {
            return None;
        }
        from[t] = s;
    }
    let moved = from.iter().enumerate().any(|(t, &s)| t != s);
    moved.then(|| Order { name: MATCH.into(), from, runs: vec![(0..tokens).collect()] })
}

/// The hypotheses of labels in another order than the tokens.
fn of_labels(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses: HashMap<String, BTreeMap<Option<Microbatch>, Vec<u32>>> = HashMap::new();
    for inputs in evidence.inputs {
        let Some(test) = LabelTest::new(evidence, inputs) else { continue };
        let looked = tokens(evidence, inputs);
        let some: Vec<usize> =
            looked.iter().step_by(looked.len().div_ceil(64).max(1)).copied().collect();
        for order in all_orders(evidence, inputs) {
            if order.name.starts_with("rolled") {
                continue; // a label shift
            }
            let label =
                |t: usize| Some(inputs.labels[order.from[t]]).filter(|&label| label != IGNORED);
            if test.share(&some, &label) >= FITS {
                let labels = order.from.iter().map(|&t| inputs.labels[t]).collect();
                hypotheses.entry(order.name).or_default().insert(inputs.microbatch, labels);
            }
        }
    }
    let hypothesis_of = |(name, labels): (String, BTreeMap<Option<Microbatch>, Vec<u32>>)| {
        let parameters = vec![("order", name), ("of", "labels against hidden states".to_string())];
        let g = Some(evidence.reference().g.clone());
        Hypothesis::new(Relabelled { labels, g, ..Relabelled::default() }, parameters)
    };
    let mut all: Vec<_> = hypotheses.into_iter().collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all.into_iter().map(hypothesis_of).collect()
}
