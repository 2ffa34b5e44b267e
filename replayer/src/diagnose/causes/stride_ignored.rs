//! `stride-ignored`: a strided or transposed view is read, or written, as if it were contiguous.
//!
//! Detectors: the captured values of a few tokens are compared with what the usual views of q, of k
//! and of the tokens' cotangents give; rows of dq are every second, third or fourth row of the
//! reference; a gradient's elements lie one after another in a buffer of the transposed shape;
//! label logits were gathered with another row length. Emulation: those rows, read by the softmax
//! path alone or by the whole head.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::label_gathered;
use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::data_worlds::{MovedRows, ReplacedValues};
use crate::diagnose::detectors::misread_rows::{FailingTokens, Operand, hypotheses};
use crate::diagnose::detectors::row_maps::{Beyond, Map};
use crate::diagnose::detectors::single_tokens::{Direct, WORK, alike, dot, energy};
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::inputs::Scores;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::{Expectation, StagePlace, World};

/// The catalogue's entry.
pub struct StrideIgnored;

/// The longest run of rows between two left-out ones that is tried.
const LONGEST: usize = 4096;

impl Cause for StrideIgnored {
    fn id(&self) -> &str {
        "stride-ignored"
    }

    fn about(&self) -> &str {
        "a strided view was taken for contiguous memory: its rows lie elsewhere"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["TransformerEngine 2746"]
    }

    fn advice(&self) -> &str {
        "pass the tensor's strides to the kernel, or make it contiguous before the launch"
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails_any(&Stage::FORWARD) {
            return Vec::new();
        }
        let mut offered = written(evidence);
        offered.extend(flat(evidence));
        offered.extend(of_cotangents(evidence));
        if let Some(failing_tokens) = FailingTokens::new(evidence) {
            for (map, words) in views(evidence) {
                let parameters = vec![("operand", "q".to_string()), ("view", words)];
                offered.extend(hypotheses(
                    evidence,
                    &failing_tokens,
                    (Operand::Q, map),
                    &parameters,
                ));
            }
        }
        offered.extend(transposed_k(evidence));
        offered.extend(label_gathered::hypothesis(evidence));
        offered
    }
}

/// The views of the tokens' rows that are tried: one row left out after every n, every second,
/// third or fourth row, transposed; each with its words.
fn views(evidence: &Evidence<'_>) -> Vec<(Map, String)> {
    let Some(inputs) = evidence.inputs.first() else { return Vec::new() };
    let longest = of_ranks(evidence.step, inputs).iter().map(Vec::len).max().unwrap_or(0);
    let mut views = Vec::new();
    for step in [2, 3, 4] {
        for beyond in [Beyond::Wraps, Beyond::Zeros, Beyond::LastRow] {
            let words = format!("every {step}. row, beyond the end {}", beyond.name());
            views.push((Map::Strided { step, beyond }, words));
        }
    }
    // Every length is tried where a row costs little; otherwise lengths near that of a sequence.
    let lengths: Vec<usize> = match Direct::new(evidence, inputs) {
        Some(direct) if direct.work() * longest < WORK => (2..longest.min(LONGEST)).rev().collect(),
        _ => [inputs.sequence, inputs.sequence.saturating_sub(1), inputs.sequence + 1].into(),
    };
    for row in lengths.into_iter().filter(|&row| row > 1) {
        views.push((Map::Unsliced { row }, format!("one row left out after every {row}")));
    }
    let n = inputs.tokens();
    let rows = n / inputs.sequence.max(1);
    for rows in [rows, inputs.sequence] {
        if rows > 1 && rows < n {
            views.push((Map::Transposed { rows }, format!("[{rows}, {}] transposed", n / rows)));
        }
    }
    views
}

/// Hypotheses that rows of dq were written one after another into a buffer with longer rows.
fn written(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses = Vec::new();
    for step in [2, 3, 4] {
        for beyond in [Beyond::Zeros, Beyond::Wraps] {
            let map = Map::Strided { step, beyond };
            let mut from = BTreeMap::new();
            for (key, _) in evidence.failing_of(&[Stage::Dq]) {
                let rows_of_dq = || {
                    let (inputs, captured) =
                        (evidence.inputs_of(key.microbatch)?, evidence.captured(key)?);
                    let table = evidence.reference().stages.get(&key)?;
                    let rows = map.in_runs(inputs.tokens(), &of_ranks(evidence.step, inputs))?;
                    let right = |t: &usize| match rows[*t] {
                        Row::From(other) => table.get(&other).is_none_or(|values| {
                            energy(values) == 0.0 || alike(captured.row(*t), values)
                        }),
                        _ => energy(captured.row(*t)) == 0.0,
                    };
                    table.keys().all(right).then_some(rows)
                };
                from.extend(rows_of_dq().map(|rows| (key.microbatch, rows)));
            }
            if !from.is_empty() {
                let view = format!("every {step}. row, beyond the end {}", beyond.name());
                let parameters = vec![("operand", "dq".to_string()), ("view", view)];
                hypotheses.push(Hypothesis::new(MovedRows { from }, parameters));
            }
        }
    }
    hypotheses
}

/// The hypothesis that a gradient's elements were written one after another into a buffer of the
/// transposed shape: the kernel's product is `[V, D]` and the parameter `[D, V]`, or the other way
/// round.
fn flat(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (mut world, mut words) = (Flat::default(), Vec::new());
    for (key, residual) in evidence.failing_of(&[Stage::Dq, Stage::Dk]) {
        let (captured, all) = (evidence.captured(key)?, evidence.all_rows()?);
        let table = all.stages.get(&key)?;
        let first = *table.keys().next()?;
        let (n, d) = (table.len(), captured.columns);
        if *table.keys().next_back()? != first + n - 1 || d < 2 {
            return None;
        }
        let stored_transposed = key.stage == Stage::Dk && evidence.step.options.transposed();
        // The element of the product that lies at an element's place in the buffer.
        let place = |row: usize, column: usize| match stored_transposed {
            true => ((column * n + row) / d, (column * n + row) % d),
            false => ((row * d + column) % n, (row * d + column) / n),
        };
        let value = |row: usize, column: usize| {
            let (from, column_read) = place(row, column);
            table[&(first + from)][column_read]
        };
        let row = |row: usize| -> Vec<f64> { (0..d).map(|column| value(row, column)).collect() };
        let moved = |row: usize| (0..d).any(|column| place(row, column) != (row, column));
        let tells = |at: &usize| moved(*at) && energy(captured.row(first + at)) > 0.0;
        let told: Vec<usize> = (0..n).filter(tells).collect();
        let fits = |&at: &usize| alike(captured.row(first + at), &row(at));
        if told.len() < 2 || !told.iter().step_by(told.len().div_ceil(32)).all(fits) {
            return None;
        }
        words.push(format!("{} as the transposed matrix", key.stage));
        world.instead =
            std::mem::take(&mut world.instead).rows(key, (0..n).map(|at| (first + at, row(at))));
        // Each element has the rounding of the row that it comes from.
        let share = residual.floor / residual.reference.max(f64::MIN_POSITIVE) / d as f64;
        let each: Vec<f64> = table.values().map(|row| share * energy(row)).collect();
        let noise = |at: usize| (0..d).map(|column| each[place(at, column).0]).collect();
        world.noise.insert(key, (0..n).map(|at| (first + at, noise(at))).collect());
    }
    words.dedup();
    let parameters = vec![("written flat", words.join("; "))];
    (!words.is_empty()).then(|| Hypothesis::new(world, parameters))
}

/// A gradient whose elements come from other places, with the rounding variance that each brings.
#[derive(Default)]
struct Flat {
    instead: ReplacedValues,
    noise: BTreeMap<Key, BTreeMap<usize, Vec<f64>>>,
}

impl World for Flat {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.instead.expected(expectation);
    }

    fn noise(
        &self,
        StagePlace { stage, microbatch, rank }: StagePlace,
        row: usize,
        column: usize,
    ) -> f64 {
        let table = self.noise.get(&Key { stage, microbatch, rank });
        table.and_then(|table| table.get(&row)).map_or(0.0, |values| values[column])
    }
}

/// Hypotheses that the tokens' weights or cotangents are read with another stride: `dq_t` is then
/// its reference times the ratio of two tokens' weights.
fn of_cotangents(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut maps: Vec<(Map, String)> = Vec::new();
    for step in [2, 3, 4] {
        for beyond in [Beyond::Wraps, Beyond::Zeros, Beyond::LastRow] {
            let words = format!("every {step}. number, beyond the end {}", beyond.name());
            maps.push((Map::Strided { step, beyond }, words));
        }
    }
    let first = evidence.inputs.first();
    let batch =
        first.map_or((1, 1), |inputs| (inputs.tokens() / inputs.sequence.max(1), inputs.sequence));
    for rows in [batch.0, batch.1].into_iter().filter(|&rows| rows > 1) {
        maps.push((Map::Transposed { rows }, format!("[{rows}, ..] transposed")));
    }
    // If all cotangents are 1, reading the first weight for all is one factor, which other causes
    // explain.
    if evidence.inputs.iter().any(|inputs| inputs.cotangent.iter().any(|&x| x != 1.0)) {
        let first = Map::Strided { step: 0, beyond: Beyond::Zeros };
        maps.push((first, "the first number for all".into()));
    }
    let mut hypotheses = Vec::new();
    for (map, view) in maps {
        let rows_of = |inputs: &MicrobatchInputs| {
            Some((
                inputs.microbatch,
                map.in_runs(inputs.tokens(), &of_ranks(evidence.step, inputs))?,
            ))
        };
        let rows: BTreeMap<_, _> = evidence.inputs.iter().filter_map(rows_of).collect();
        if rows.is_empty() || !evidence.inputs.iter().any(|inputs| shows(evidence, inputs, &rows)) {
            continue;
        }
        let parameters = vec![("operand", "the tokens' cotangents".to_string()), ("view", view)];
        let g = evidence.reference().g.clone();
        hypotheses.push(Hypothesis::new(OtherCotangents { rows, g }, parameters));
    }
    hypotheses
}

/// Upstream gradients with the cotangents of other tokens, or their weights where no cotangents
/// were recorded. Ignored tokens stay ignored.
fn with_other_cotangents(inputs: &MicrobatchInputs, rows: &[Row], g: &[f64]) -> Vec<f64> {
    let has_cotangents = inputs.cotangent.iter().any(|&x| x != 1.0);
    let read = if has_cotangents { &inputs.cotangent } else { &inputs.weights };
    let share = |t: usize| (g[t] != 0.0 && read[t] != 0.0).then(|| g[t] / read[t]);
    let usual = (0..g.len()).find_map(share).unwrap_or(0.0);
    let upstream_of = |(t, row): (usize, &Row)| match row {
        Row::From(from) if inputs.labels[t] != IGNORED => share(t).unwrap_or(usual) * read[*from],
        _ => 0.0,
    };
    rows.iter().enumerate().map(upstream_of).collect()
}

fn shows(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    rows: &BTreeMap<Option<Microbatch>, Vec<Row>>,
) -> bool {
    let shown = || {
        let mut keys = evidence.failing.iter();
        let key =
            *keys.find(|key| key.stage == Stage::Dq && key.microbatch == inputs.microbatch)?;
        let (captured, reference) = (evidence.captured(key)?, evidence.reference());
        let (table, g) = (reference.stages.get(&key)?, reference.g.get(&key.microbatch)?);
        let changed = with_other_cotangents(inputs, rows.get(&key.microbatch)?, g);
        let (mut all, mut fit, mut moved) = (0.0, 0.0, 0.0);
        for (&t, row) in
            table.iter().filter(|(t, _)| g[**t] != 0.0 && inputs.labels[**t] != IGNORED)
        {
            let ratio = dot(captured.row(t), row) / energy(row);
            all += 1.0;
            fit +=
                f64::from(u8::from((ratio - changed[t] / g[t]).abs() < 0.05 * (1.0 + ratio.abs())));
            moved += f64::from(u8::from((changed[t] / g[t] - 1.0).abs() > 0.1));
        }
        Some(all >= 8.0 && moved >= 0.1 * all && fit >= 0.95 * all)
    };
    shown().unwrap_or(false)
}

struct OtherCotangents {
    rows: BTreeMap<Option<Microbatch>, Vec<Row>>,
    g: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for OtherCotangents {
    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        let rows_and_g = self.rows.get(&inputs.microbatch).zip(self.g.get(&inputs.microbatch));
        if let Some((rows, upstream)) = rows_and_g {
            g.copy_from_slice(&with_other_cotangents(inputs, rows, upstream));
        }
    }
}

/// The hypothesis that k's memory is `[D, V]` and is read as `[V, D]`, or the other way round.
fn transposed_k(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let failing_tokens = || {
        let key = *evidence.failing.iter().find(|key| key.stage == Stage::LabelLogits)?;
        let inputs = evidence.inputs_of(key.microbatch)?;
        let captured = evidence.captured(key)?;
        let Scores::Product { k, .. } = &inputs.scores else { return None };
        let other = k.transposed().ok()?.reshaped(&k.shape)?;
        let direct = Direct::new(evidence, inputs)?;
        let (q, k) = (direct.head.q, crate::head::step::matrix(&other)?);
        let fits = |t: &usize| {
            let label = inputs.labels[*t] as usize;
            let product: f64 = (0..q.cols)
                .map(|i| q.get_f64(t * q.cols + i) * k.get_f64(label * q.cols + i))
                .sum();
            let z = direct.logit(product, label).0;
            (z - captured.values[*t]).abs() <= 0.01 * (1.0 + z.abs())
        };
        let counted: Vec<usize> =
            (0..inputs.tokens()).filter(|&t| inputs.labels[t] != IGNORED).take(16).collect();
        let all = counted.iter().filter(|t| fits(t)).count();
        Some(!counted.is_empty() && all == counted.len())
    };
    if !failing_tokens().unwrap_or(false) {
        return Vec::new();
    }
    let parameters = vec![("operand", "k".to_string()), ("view", "transposed".to_string())];
    vec![Hypothesis::new(TransposedK, parameters)]
}

struct TransposedK;

impl World for TransposedK {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if let Scores::Product { k, .. } = &mut inputs.scores
            && let Ok(turned) = k.transposed()
            && let Some(read) = turned.reshaped(&k.shape)
        {
            *k = read;
        }
    }
}
