//! `index-overflow-32`: a flat index `t V + v` does not fit into its integer of n bits: from row
//! `2^n / V` on, another element is read or written, or none.
//!
//! Detectors: label logits, or label parts of dq, are right up to such a row and wrong from there
//! on; or rows of dq are zeros from there on. Every number of bits is tried. Emulation: the index
//! wrapped to that many bits, counted from the start of each rank's own tensor; negative indices
//! count from the end, or are dropped.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::MovedRows;
use crate::diagnose::detectors::single_tokens::{Direct, alike, energy, tokens};
use crate::diagnose::detectors::stray_entries::Strays;
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::Precision;
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct IndexOverflow32;

/// The numbers of bits that are tried: in some kernels an index shares a word with something else.
/// Numbers of bits that no token's index exceeds give no hypothesis.
const BITS: RangeInclusive<u32> = 8..=32;
/// dlogits in this format are taken as unrounded.
const FULL: Precision = Precision::F32;
/// Share of the tokens that the wrapped index must explain.
const FITS: f64 = 0.9;

impl Cause for IndexOverflow32 {
    fn id(&self) -> &str {
        "index-overflow-32"
    }

    fn about(&self) -> &str {
        "flat indices of the token x vocabulary plane overflow their integer: rows from the border on are read or written elsewhere"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy 39", "quack d45300e"]
    }

    fn advice(&self) -> &str {
        "compute row offsets in 64 bits before the column is added"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages = [Stage::LabelLogits, Stage::Dlogits, Stage::Dq, Stage::DqLabel, Stage::Dk];
        if !evidence.fails_any(&stages) {
            return Vec::new();
        }
        let mut hypotheses = Vec::new();
        for bits in BITS {
            for signed in [true, false] {
                for negative in [Negative::FromTheEnd, Negative::Dropped] {
                    if !signed && negative == Negative::Dropped {
                        continue;
                    }
                    let index = Index { bits, signed, negative };
                    let before = hypotheses.len();
                    hypotheses.extend(of_labels(evidence, index, None));
                    // dlogits may be stored in few bits. A stray entry `-g` rounds alike for all
                    // tokens, while p - g together does not, so the rounding matters.
                    let seen = evidence.roundings().filter(|_| hypotheses.len() > before);
                    let kept = seen.map(|roundings| roundings.widest.dlogits);
                    let few =
                        kept.filter(|&precision| precision.unit_roundoff() > FULL.unit_roundoff());
                    hypotheses.extend(
                        few.and_then(|precision| of_labels(evidence, index, Some(precision))),
                    );
                }
            }
        }
        hypotheses.extend(unwritten(evidence));
        hypotheses
    }
}

/// How a negative index is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Negative {
    FromTheEnd,
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Index {
    bits: u32,
    signed: bool,
    negative: Negative,
}

impl Index {
    fn name(self) -> String {
        format!("{}int{}", if self.signed { "" } else { "u" }, self.bits)
    }

    /// The first index that does not fit.
    fn border(self) -> i128 {
        1i128 << (self.bits - u32::from(self.signed))
    }

    /// The element that a wrapped index addresses in a buffer of this size; `None` where it is
    /// dropped.
    fn wrapped(self, index: usize, size: usize) -> Option<usize> {
        let (whole, index, size) = (1i128 << self.bits, index as i128, size as i128);
        let half = if self.signed { whole / 2 } else { 0 };
        let wrapped = (index + half).rem_euclid(whole) - half;
        let wrapped = match self.negative {
            Negative::Dropped if wrapped < 0 => return None,
            _ => wrapped.rem_euclid(size),
        };
        usize::try_from(wrapped).ok()
    }
}

/// The tokens whose label's index does not fit, each with the token and class that the wrapped
/// index addresses.
type WrappedTokens = Vec<(usize, Option<(usize, usize)>)>;

fn moved(
    inputs: &MicrobatchInputs,
    runs: &[Vec<usize>],
    vocab: usize,
    index: Index,
) -> WrappedTokens {
    let mut wrapped = WrappedTokens::new();
    for run in runs {
        let size = run.len() * vocab;
        for (position, &t) in run.iter().enumerate() {
            let label = inputs.labels[t];
            let flat = position * vocab + label as usize;
            if label == IGNORED || (flat as i128) < index.border() {
                continue;
            }
            let to = index.wrapped(flat, size).map(|to| (run[to / vocab], to % vocab));
            wrapped.push((t, to));
        }
    }
    wrapped
}

/// The hypothesis that label logits and label entries are read and written at the wrapped index.
fn of_labels(
    evidence: &Evidence<'_>,
    index: Index,
    rounded: Option<Precision>,
) -> Option<Hypothesis> {
    let mut world = Strays::rounded(rounded);
    let (mut shown, mut rows) = (false, String::new());
    // Where the forward agrees, label logits were read in the right place.
    let forward = evidence.fails_any(&Stage::FORWARD) || !evidence.captured_forward();
    for inputs in evidence.inputs {
        let head = inputs.head(evidence.step)?;
        let vocab = head.k.rows;
        let runs = of_ranks(evidence.step, inputs);
        let moved = moved(inputs, &runs, vocab, index);
        if moved.is_empty() || moved.len() == inputs.tokens() {
            continue;
        }
        rows = format!("from row {} of {}", index.border() / vocab as i128, runs[0].len());
        let direct = Direct::of_logits(evidence, inputs)?;
        shown |= shows(evidence, inputs, &direct, &moved);
        let upstream = evidence.reference().g.get(&inputs.microbatch)?;
        let s = evidence.step.options.smoothing(inputs.valid_vocab);
        let counted = moved.iter().filter(|(t, _)| upstream[*t] != 0.0);
        let entries: Vec<(usize, usize, f64)> = counted
            .filter_map(|&(t, to)| {
                to.map(|(token, class)| (token, class, -upstream[t] * (1.0 - s)))
            })
            .collect();
        world.miss(inputs.microbatch, moved.iter().map(|&(t, _)| t).collect());
        world.add(evidence, inputs, &entries)?;
        if forward {
            let logits = moved.iter().map(|&(t, to)| (t, read(&direct, to))).collect();
            world.label_logits.insert(inputs.microbatch, logits);
            let off = moved.iter().map(|&(t, to)| (t, off(evidence, &direct, to))).collect();
            world.off.insert(inputs.microbatch, off);
        }
    }
    let mut parameters = vec![
        ("index", index.name()),
        (
            "of",
            if forward { "the label's logit and its gradient" } else { "the label's gradient" }
                .into(),
        ),
        ("rows", rows),
    ];
    parameters.extend(rounded.map(|to| ("dlogits rounded to", to.name().to_string())));
    shown.then(|| Hypothesis::new(world, parameters))
}

/// How far the logit at the wrapped index may be off through rounding, which is that of another
/// token's product.
fn off(evidence: &Evidence<'_>, direct: &Direct<'_>, to: Option<(usize, usize)>) -> f64 {
    let (Some((token, class)), Some(roundings)) = (to, evidence.roundings()) else { return 0.0 };
    let (q, k) = (direct.q(Row::From(token)), direct.k(Row::From(class)));
    let squares: f64 = q.iter().zip(&k).map(|(q, k)| (q * k).powi(2)).sum();
    let (z, slope) = direct.logit_at(token, class);
    let kept = roundings.widest.logits.unit_roundoff();
    let (sum, compute) = ((q.len() as f64 * squares).sqrt(), roundings.compute());
    // Three standard deviations of the sum, plus the rounding of each operation on the way to the
    // logit.
    3.0 * compute * (slope * sum + 2.0 * z.abs()) + kept * z.abs()
}

/// The logit at the wrapped index; 0 where it is dropped.
fn read(direct: &Direct<'_>, to: Option<(usize, usize)>) -> f64 {
    to.map_or(0.0, |(token, class)| direct.logit_at(token, class).0)
}

/// Whether the tokens beyond the border show it: their label logit is the one at the wrapped index,
/// or their row of dq or dlogits lacks the label's part.
fn shows(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    direct: &Direct<'_>,
    moved: &WrappedTokens,
) -> bool {
    // Label logits show it for every token, also for one of weight 0.
    let looked: Vec<usize> = match evidence.fails(Stage::LabelLogits) {
        true => (0..inputs.tokens()).collect(),
        false => tokens(evidence, inputs),
    };
    let captured_stage = |stage: Stage| {
        let mut keys = evidence.failing.iter();
        let key = keys.find(|key| key.stage == stage && key.microbatch == inputs.microbatch)?;
        Some((evidence.captured(*key)?, *key))
    };
    let mut seen: Vec<&(usize, Option<(usize, usize)>)> =
        moved.iter().filter(|(t, _)| looked.binary_search(t).is_ok()).collect();
    seen.truncate(64);
    let share = |fits: &dyn Fn(usize, Option<(usize, usize)>) -> bool| {
        let fit = seen.iter().filter(|&&&(t, to)| fits(t, to)).count();
        !seen.is_empty() && fit as f64 >= FITS * seen.len() as f64
    };
    if let Some((captured, _)) = captured_stage(Stage::LabelLogits) {
        return share(&|t, to| {
            let (z, x) = (read(direct, to), captured.values[t]);
            (z - x).abs() <= 0.01 * (1.0 + x.abs())
        });
    }
    let reference = evidence.reference();
    let Some(cotangents) = reference.cotangents.get(&inputs.microbatch) else { return false };
    let Some((captured, key)) = captured_stage(Stage::Dq) else {
        let Some((captured, key)) = captured_stage(Stage::Dlogits) else { return false };
        return share(&|t, _| {
            let row = reference.of_token((key.stage, key.microbatch), t);
            let (Some(row), Some(captured_stage)) = (row, cotangents.get(&t)) else { return true };
            let class = inputs.labels[t] as usize;
            let part = captured_stage.label * direct.logit_at(t, class).1;
            // The entry lacks the label's part.
            (captured.row(t)[class] - row[class] + part).abs() <= 0.1 * part.abs()
        });
    };
    share(&|t, _| {
        let row = reference.of_token((key.stage, key.microbatch), t);
        let (Some(row), Some(captured_stage)) = (row, cotangents.get(&t)) else { return false };
        let class = inputs.labels[t] as usize;
        let slope = direct.logit_of(&direct.q(Row::From(t)), class).1;
        let label = direct.k(Row::From(class));
        let without: Vec<f64> =
            row.iter().zip(label).map(|(x, k)| x - captured_stage.label * slope * k).collect();
        alike(captured.row(t), &without)
    })
}

/// Hypotheses that rows of dq are zeros from a border on.
fn unwritten(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses = Vec::new();
    for bits in BITS {
        for of_vocabulary in [true, false] {
            let (mut from, mut words) = (BTreeMap::new(), String::new());
            for (key, _) in evidence.failing_of(&[Stage::Dq]) {
                if let Some((rows, border)) = hole(evidence, key, bits, of_vocabulary) {
                    words = format!("zeros from row {border} on");
                    from.insert(key.microbatch, rows);
                }
            }
            if from.is_empty() {
                continue;
            }
            // 2^15 and 2^31 are the borders of signed 16- and 32-bit integers.
            let name = match bits {
                15 | 31 => format!("int{}", bits + 1),
                _ => format!("uint{bits}"),
            };
            let parameters = vec![("index", name), ("rows", words)];
            hypotheses.push(Hypothesis::new(MovedRows { from }, parameters));
        }
    }
    hypotheses
}

/// The rows of dq, if those from the border on are zeros and those before are not; and the border.
fn hole(
    evidence: &Evidence<'_>,
    key: Key,
    bits: u32,
    of_vocabulary: bool,
) -> Option<(Vec<Row>, usize)> {
    let (inputs, captured) = (evidence.inputs_of(key.microbatch)?, evidence.captured(key)?);
    let table = evidence.reference().stages.get(&key)?;
    let head = inputs.head(evidence.step)?;
    let width = if of_vocabulary { head.k.rows } else { head.q.cols };
    let border = (1usize << bits).div_ceil(width);
    let mut rows: Vec<Row> = (0..inputs.tokens()).map(Row::From).collect();
    for run in of_ranks(evidence.step, inputs) {
        run.iter().skip(border).for_each(|&t| rows[t] = Row::Zeros);
    }
    let rows_with_gradient = table.iter().filter(|(_, wanted)| energy(wanted) > 0.0);
    let (mut before, mut beyond) = (0, 0);
    for (&t, _) in rows_with_gradient {
        let wanted = rows[t] == Row::Zeros;
        if (energy(captured.row(t)) == 0.0) != wanted {
            return None;
        }
        *(if wanted { &mut beyond } else { &mut before }) += 1;
    }
    (before > 1 && beyond > 1).then_some((rows, border))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_beyond_the_border_is_negative_where_the_integer_has_a_sign() {
        let index = |signed, negative| Index { bits: 16, signed, negative };
        let signed = index(true, Negative::FromTheEnd);
        assert_eq!(signed.wrapped(32_767, 50_000), Some(32_767));
        assert_eq!(signed.wrapped(32_768, 50_000), Some(50_000 - 32_768));
        assert_eq!(index(true, Negative::Dropped).wrapped(32_768, 50_000), None);
        assert_eq!(index(false, Negative::FromTheEnd).wrapped(65_537, 70_000), Some(1));
        assert_eq!(signed.border(), 32_768);
    }
}
