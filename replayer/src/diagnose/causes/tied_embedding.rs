//! `tied-embedding`: dk holds the input embedding's gradient too, or in its place, where the
//! head declares its own part alone.
//!
//! Detectors: rows of dk are right, or zero, for all classes but those of the step's input tokens,
//! and the errors in those are not proportional to the label part. The input tokens are the labels,
//! one position earlier, and the first token of each sequence. Emulation: the rows of input tokens
//! are taken as captured (the gradient that reached the embedding is not in the dump); every other
//! row must be the head's, or zero.

use std::collections::{BTreeMap, BTreeSet};

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::captured::{Values, unit};
use crate::diagnose::detectors::reference::Table;
use crate::diagnose::detectors::single_tokens::{Direct, distance, dot, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct TiedEmbedding;

/// At least this many rows belong to no input token of the step: those that must be right.
const OTHERS: usize = 16;
/// The added part must be at least this large, relative to the label part of a row that is the
/// label of one token.
const LEAST: f64 = 0.02;
/// Its squared cosine with the label part must be below this.
const ALONG: f64 = 0.8;

impl Cause for TiedEmbedding {
    fn id(&self) -> &str {
        "tied-embedding"
    }

    fn about(&self) -> &str {
        "dk holds the gradient of the tied input embedding: rows of the tokens that are read, and no others"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["Megatron-LM 844", "Megatron-LM 656"]
    }

    fn advice(&self) -> &str {
        "add the two parts of a tied weight's gradient once, on every rank that holds it, and declare tied_embedding=True"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut world = ReplacedValues::default();
        let mut contents = BTreeSet::new();
        for (key, _) in evidence.failing_of(&[Stage::Dk, Stage::Accumulate, Stage::Reduce]) {
            let Some((rows, input_only)) = rows_of_input(evidence, key) else { return Vec::new() };
            contents.insert(if input_only { "the input's part alone" } else { "both parts" });
            world = world.rows(key, rows.into_iter());
        }
        if contents.len() != 1 {
            return Vec::new();
        }
        let parameters = vec![("dk holds", contents.into_iter().collect::<String>())];
        vec![Hypothesis::new(world, parameters).fitted(6)]
    }
}

/// The classes that are known to be input tokens of a comparison, with how many tokens have each as
/// label; and how many more classes there may be that are not known.
fn input_classes(evidence: &Evidence<'_>, key: Key) -> (BTreeMap<usize, usize>, usize) {
    let mut hits: BTreeMap<usize, usize> = BTreeMap::new();
    let mut more = 0;
    for inputs in evidence.inputs {
        if key.stage == Stage::Dk && inputs.microbatch != key.microbatch {
            continue;
        }
        let all: Vec<usize> = match unit(
            evidence.step,
            evidence.inputs,
            Key { microbatch: inputs.microbatch, ..key },
        ) {
            Some(unit) if key.stage == Stage::Dk => unit.rows,
            _ => (0..inputs.tokens()).collect(),
        };
        let labels = all.iter().map(|&t| inputs.labels[t]).filter(|&label| label != IGNORED);
        labels.for_each(|label| *hits.entry(label as usize).or_default() += 1);
        // The first token of a sequence is no label, and the token of an ignored position is not
        // recorded.
        let ignored = all.iter().filter(|&&t| inputs.labels[t] == IGNORED).count();
        more += all.len().div_ceil(inputs.sequence.max(1)) + ignored;
    }
    (hits, more)
}

type Rows = Vec<(usize, Vec<f64>)>;

/// The captured rows of input tokens; and true, with rows of zeros for all other classes, where dk
/// holds the embedding's part alone. `None` where the captured dk is not of this kind.
fn rows_of_input(evidence: &Evidence<'_>, key: Key) -> Option<(Rows, bool)> {
    let captured = evidence.captured(key)?;
    let table = evidence.reference().stages.get(&key)?;
    if captured.rows() != evidence.inputs.first()?.head(evidence.step)?.k.rows {
        return None; // Sums are stored in the job's own layout.
    }
    let (hits, more) = input_classes(evidence, key);
    let off = |row: usize| distance(captured.row(row), &table[&row]);
    let others: Vec<usize> = table.keys().copied().filter(|row| !hits.contains_key(row)).collect();
    // The classes of first tokens are not known; the most wrong of the other rows are taken for
    // them.
    let mut by_off = others.clone();
    by_off.sort_by(|&a, &b| off(b).total_cmp(&off(a)));
    let zeros = |row: &usize| energy(captured.row(*row)) == 0.0 && energy(&table[row]) > 0.0;
    let empty = others.iter().filter(|row| zeros(row)).count();
    let input_only = empty >= OTHERS && empty + more >= others.len();
    if others.len() < OTHERS + more && !input_only {
        return None;
    }
    let rest: f64 = by_off.iter().skip(more).map(|&row| off(row)).sum();
    let of_read: f64 = hits.keys().filter(|row| table.contains_key(row)).map(|&row| off(row)).sum();
    if !input_only && !(of_read > 100.0 * rest) {
        return None;
    }
    if !is_its_own(evidence, key, (&captured, table), &hits) {
        return None;
    }
    let known = hits.keys().copied().filter(|row| table.contains_key(row));
    let mut rows: Rows = known.map(|row| (row, captured.row(row).to_vec())).collect();
    let unknown = by_off.iter().take(more);
    rows.extend(unknown.map(|&row| (row, captured.row(row).to_vec())));
    if input_only {
        let others = others.iter().filter(|row| zeros(row));
        rows.extend(others.map(|&row| (row, vec![0.0; captured.columns])));
    }
    Some((rows, input_only))
}

/// Whether the errors in rows that are the label of one token are a part of their own: too large
/// for rounding, and not parallel to the hidden state of that token.
fn is_its_own(
    evidence: &Evidence<'_>,
    key: Key,
    (captured, table): (&Values, &Table),
    hits: &BTreeMap<usize, usize>,
) -> bool {
    let (mut all, mut own_share) = (0.0, 0.0);
    for inputs in evidence.inputs {
        if key.stage == Stage::Dk && inputs.microbatch != key.microbatch {
            continue;
        }
        let Some(direct) = Direct::new(evidence, inputs) else { return false };
        let Some(g) = evidence.reference().g.get(&inputs.microbatch) else { return false };
        for (t, &label) in inputs.labels.iter().enumerate() {
            let row = label as usize;
            let once = label != IGNORED && hits.get(&row) == Some(&1) && g[t] != 0.0;
            let Some(wanted) = table.get(&row).filter(|_| once) else { continue };
            let off: Vec<f64> = captured.row(row).iter().zip(wanted).map(|(a, b)| a - b).collect();
            let q = direct.q(Row::From(t));
            let along = dot(&off, &q).powi(2) / (energy(&off) * energy(&q)).max(f64::MIN_POSITIVE);
            let label_part = g[t] * g[t] * energy(&q);
            all += 1.0;
            own_share +=
                f64::from(u8::from(energy(&off) > LEAST * LEAST * label_part && along < ALONG));
        }
    }
    all >= 4.0 && own_share >= 0.5 * all
}
