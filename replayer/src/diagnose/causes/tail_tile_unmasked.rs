//! `tail-tile-unmasked`: the vocabulary is no multiple of the tile size, and the columns that fill
//! up the last tile count in the softmax.
//!
//! Detectors: `e^lse' - e^lse` of the failing rows, where lse' is the lse that they imply. It is
//! what the extra columns add: the same number `n e^c` for all tokens where all n columns have one
//! logit c. Emulation: `lse' = log(e^lse + Σ e^extra)` with n = -V mod tile for every usual tile,
//! or n as counted from the rows. The extra columns are zero rows of k, copies of the last row, the
//! next token's logits, or the columns that a tile that was moved back counts twice. Of a declared
//! padding, its rows of k count, unmasked: all of them or as many as lse' shows, in both passes or
//! in the backward alone.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Microbatch;
use rayon::prelude::*;

use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::OtherLse;
use crate::diagnose::detectors::implied_lse::{ImpliedLse, implied_lse, median};
use crate::diagnose::detectors::single_tokens::{Direct, WORK};
use crate::diagnose::evidence::Evidence;
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::replay::world::{Pass, World};

/// The catalogue's entry.
pub struct TailTileUnmasked;

/// Vocabulary tile sizes that kernels use.
const TILES: [usize; 20] = [
    8, 16, 24, 32, 48, 64, 96, 100, 128, 160, 192, 200, 256, 384, 512, 768, 1024, 2048, 4096, 8192,
];
/// How far, relatively, a number of extra columns may be from a whole number.
const WHOLE: f64 = 0.02;
/// Share of the tokens that the extra columns must explain.
const SHOWN: f64 = 0.7;

impl Cause for TailTileUnmasked {
    fn id(&self) -> &str {
        "tail-tile-unmasked"
    }

    fn about(&self) -> &str {
        "columns beyond the vocabulary count in the softmax: the last tile is not masked"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["verl 5349", "tokamax chunked path", "MLP-cuda before 396b00e"]
    }

    fn advice(&self) -> &str {
        "mask the columns from the vocabulary's end on by -inf before the maximum and the sum, in the forward and in the backward"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails_any(&Stage::FORWARD) {
            return Vec::new();
        }
        let mut hypotheses = padded(evidence);
        let seen: Vec<(&MicrobatchInputs, Vec<ImpliedLse>)> =
            evidence.inputs.iter().map(|inputs| (inputs, implied_lse(evidence, inputs))).collect();
        if seen.iter().all(|(_, seen)| seen.is_empty()) {
            hypotheses.extend(of_loss(evidence));
            return hypotheses;
        }
        hypotheses.extend(zeros(evidence, &seen));
        hypotheses.extend(others(evidence, &seen));
        hypotheses
    }
}

/// The hypotheses that the declared padding's own rows of k count: all of them, or as many as lse
/// shows; in forward and backward, or in the backward alone.
fn padded(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let head = evidence.inputs.first().and_then(|inputs| inputs.head(evidence.step));
    let Some(head) = head.filter(|head| head.k.rows > head.valid_vocab) else { return Vec::new() };
    let all = head.k.rows - head.valid_vocab;
    let tokens: usize = evidence.inputs.iter().map(MicrobatchInputs::tokens).sum();
    let is_small = tokens.saturating_mul(all * head.q.cols) <= WORK;
    let mut hypotheses = Vec::new();
    let counts: BTreeSet<usize> =
        [Some(all), is_small.then(|| columns_shown(evidence, all)).flatten()]
            .into_iter()
            .flatten()
            .collect();
    // A recorded lse that agrees contains none of them; the backward alone is tried below.
    let in_forward = !(is_small && evidence.agrees(Stage::Lse));
    for columns in counts.into_iter().filter(|_| in_forward) {
        let parameters = vec![
            ("columns", columns.to_string()),
            ("filled with", "what lies in the padding of k".to_string()),
        ];
        let fitted = usize::from(columns != all);
        let (backward, declared) = (Lse::new(), Lse::new());
        let world = Unpadded { columns, backward, declared };
        hypotheses.push(Hypothesis::new(world, parameters.clone()).fitted(fitted));
    }
    if is_small && !evidence.fails_any(&Stage::FORWARD) {
        let parameters = vec![
            ("columns", all.to_string()),
            ("filled with", "what lies in the padding of k".to_string()),
            ("in", "the backward alone".to_string()),
        ];
        let declared = evidence.reference().forward_lse.clone();
        let world = Unpadded { columns: all, backward: padded_lse(evidence, all), declared };
        hypotheses.push(Hypothesis::new(world, parameters));
    }
    hypotheses
}

/// How many of the padding's columns the implied lse contains; none where no number fits.
fn columns_shown(evidence: &Evidence<'_>, all: usize) -> Option<usize> {
    // The squared error that each number of columns leaves, over the sampled tokens.
    let (mut left, mut before) = (vec![0.0; all], 0.0);
    for inputs in evidence.inputs {
        let seen = implied_lse(evidence, inputs);
        let Some(direct) = Direct::new(evidence, inputs) else { continue };
        let valid = direct.head.valid_vocab;
        for token in seen.iter().step_by(seen.len().div_ceil(SAMPLED).max(1)) {
            let q = direct.q(Row::From(token.token));
            // What the columns add to the sum of exponentials, relative to it.
            let (wanted, mut sum) = ((token.implied - token.lse).exp_m1(), 0.0);
            for (index, left) in left.iter_mut().enumerate() {
                sum += probability(direct.logit_of(&q, valid + index).0, token.lse);
                *left += (sum - wanted).powi(2);
            }
            before += wanted * wanted;
        }
    }
    let (index, least) = left.into_iter().enumerate().min_by(|a, b| a.1.total_cmp(&b.1))?;
    (before > 0.0 && least <= FITS * before).then_some(index + 1)
}

/// How many tokens of a microbatch are sampled to count the padding's columns.
const SAMPLED: usize = 16;
/// Share of the squared error that the best number of columns may leave.
const FITS: f64 = 0.01;

/// lse over the valid classes and the padding, of every token.
fn padded_lse(evidence: &Evidence<'_>, columns: usize) -> Lse {
    let lse = &evidence.reference().forward_lse;
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let (direct, lse) = (Direct::new(evidence, inputs)?, lse.get(&inputs.microbatch)?);
        let valid = direct.head.valid_vocab;
        let lse_of = |t: usize| {
            let q = direct.q(Row::From(t));
            let more = |v: usize| probability(direct.logit_of(&q, v).0, lse[t]);
            lse[t] + (valid..valid + columns).map(more).sum::<f64>().ln_1p()
        };
        Some((inputs.microbatch, (0..inputs.tokens()).into_par_iter().map(lse_of).collect()))
    };
    evidence.inputs.iter().filter_map(of_microbatch).collect()
}

struct Unpadded {
    columns: usize,
    /// lse of the backward, where only the backward counts them, and the declared lse for the
    /// forward; both empty otherwise.
    backward: Lse,
    declared: Lse,
}

impl World for Unpadded {
    fn options(&self, options: &mut HeadOptions) {
        let valid = options.valid_vocab.map(|valid| valid + self.columns as u64);
        (options.valid_vocab, options.mask) = (valid, None);
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let given = if pass == Pass::Backward { &self.backward } else { &self.declared };
        given.get(&inputs.microbatch).into_iter().for_each(|other| lse.copy_from_slice(other));
    }
}

type Lse = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// The hypotheses of extra columns with logit 0, as the transform maps 0 to 0.
fn zeros(
    evidence: &Evidence<'_>,
    seen: &[(&MicrobatchInputs, Vec<ImpliedLse>)],
) -> Vec<Hypothesis> {
    let added = |implied: &ImpliedLse| implied.lse.exp() * (implied.implied - implied.lse).exp_m1();
    // A token with a large lse does not show what a few extra columns add.
    let tells = |implied: &&ImpliedLse| (implied.implied - implied.lse).abs() > 1e-3;
    let all: Vec<f64> = seen.iter().flat_map(|(_, seen)| seen).filter(tells).map(added).collect();
    let counted = median(all);
    if counted > 0.5 { filled(evidence, counted) } else { Vec::new() }
}

/// The hypotheses of about `counted` columns of zeros: as many as a tile size leaves over, where
/// one is near, and the whole number itself.
fn filled(evidence: &Evidence<'_>, counted: f64) -> Vec<Hypothesis> {
    let Some(vocab) = vocabulary(evidence) else { return Vec::new() };
    let near = |n: usize| n > 0 && (counted / n as f64 - 1.0).abs() < 10.0 * WHOLE;
    let tiles = TILES.iter().copied().chain(declared_tile(evidence));
    let mut counts: Vec<(usize, Option<usize>)> =
        tiles.map(|tile| (tile - 1 - (vocab + tile - 1) % tile, Some(tile))).collect();
    counts.sort_unstable();
    counts.dedup_by_key(|(n, _)| *n);
    counts.retain(|&(n, _)| near(n));
    let whole = counted.round() as usize;
    if (counted / whole as f64 - 1.0).abs() < WHOLE && counts.iter().all(|&(n, _)| n != whole) {
        counts.push((whole, None));
    }
    let hypothesis_of = |(n, tile): (usize, Option<usize>)| {
        let more = |lse: &f64| lse + (n as f64 * (-lse).exp()).ln_1p();
        let larger =
            |(&mb, lse): (&Option<Microbatch>, &Vec<f64>)| (mb, lse.iter().map(more).collect());
        let lse: Lse = evidence.reference().forward_lse.iter().map(larger).collect();
        let mut parameters =
            vec![("columns", n.to_string()), ("filled with", "zeros: logits of 0".to_string())];
        parameters.extend(tile.map(|tile| ("tile", tile.to_string())));
        hypothesis(evidence, lse, parameters, usize::from(tile.is_none()))
    };
    counts.into_iter().map(hypothesis_of).collect()
}

/// The hypotheses of columns of zeros where only the loss shows them: as many as explain the loss.
fn of_loss(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let shown = || {
        let (key, residual) = evidence.failing_of(&[Stage::Loss]).next()?;
        let captured = evidence.captured(key)?;
        let reference = evidence.reference();
        let table = reference.stages.get(&key)?;
        let (lse, g) =
            (reference.forward_lse.get(&key.microbatch)?, reference.g.get(&key.microbatch)?);
        let upstream = evidence.step.options.cotangent;
        if captured.values.len() != 1 || residual.nonfinite > 0 || upstream == 0.0 {
            return None;
        }
        let more = captured.values[0] - table.values().flatten().next()?;
        let added = |n: f64| -> f64 {
            let added_loss = |(lse, g): (&f64, &f64)| g / upstream * (n * (-lse).exp()).ln_1p();
            lse.iter().zip(g).map(added_loss).sum()
        };
        let (mut low, mut high) = (0.0, 65_536.0);
        for _ in 0..80 {
            let middle = 0.5 * (low + high);
            *(if added(middle) < more { &mut low } else { &mut high }) = middle;
        }
        (low > 0.5 && high < 65_535.0).then_some(low)
    };
    shown().map_or(Vec::new(), |counted| filled(evidence, counted))
}

fn vocabulary(evidence: &Evidence<'_>) -> Option<usize> {
    Some(evidence.inputs.first()?.head(evidence.step)?.k.rows)
}

fn declared_tile(evidence: &Evidence<'_>) -> Option<usize> {
    let tiles = evidence.step.options.declared.tiles?;
    Some(tiles.vocab? as usize).filter(|&tile| tile > 0)
}

/// Other contents of the extra columns: their logits for a token, from its own and the next token's
/// logits, the number of extra columns, and the tile size.
type Filling = fn(own: &[f64], next: Option<&[f64]>, lacks: usize, tile: usize) -> Vec<f64>;

const FILLINGS: [(&str, Filling); 3] = [
    ("the last row of k again and again", |own, _, lacks, _| {
        own.last().map_or(Vec::new(), |&last| vec![last; lacks])
    }),
    ("the next token's logits", |_, next, lacks, _| {
        next.map_or(vec![0.0; lacks], |next| next[..lacks.min(next.len())].to_vec())
    }),
    ("the columns before it: the last tile was moved back", |row, _, lacks, tile| {
        let start = row.len().saturating_sub(tile);
        row[start..(start + lacks).min(row.len())].to_vec()
    }),
];

/// The hypotheses of extra columns whose logits differ from token to token.
fn others(
    evidence: &Evidence<'_>,
    seen: &[(&MicrobatchInputs, Vec<ImpliedLse>)],
) -> Vec<Hypothesis> {
    let Some(vocab) = vocabulary(evidence) else { return Vec::new() };
    let mut tiles: Vec<usize> = declared_tile(evidence).into_iter().chain(TILES).collect();
    tiles.retain(|&tile| vocab % tile != 0 && tile < vocab);
    tiles.sort_unstable();
    tiles.dedup();
    let mut hypotheses = Vec::new();
    for (words, filling) in FILLINGS {
        for &tile in &tiles {
            let lacks = tile - vocab % tile;
            if !shows(evidence, seen, &|own, next| filling(own, next, lacks, tile)) {
                continue;
            }
            let lse = lse_of(evidence, &|lse, row, next| {
                let sum: f64 =
                    filling(row, next, lacks, tile).iter().map(|&z| probability(z, lse)).sum();
                lse + sum.ln_1p()
            });
            let parameters = vec![
                ("columns", lacks.to_string()),
                ("filled with", words.to_string()),
                ("tile", tile.to_string()),
            ];
            hypotheses.push(hypothesis(evidence, lse, parameters, 0));
        }
    }
    hypotheses
}

/// The logits of the extra columns, from a token's and the next token's logits.
type Filled<'a> = dyn Fn(&[f64], Option<&[f64]>) -> Vec<f64> + 'a;

/// A token's lse, from the declared one and its own and the next token's logits.
type OfToken<'a> = dyn Fn(f64, &[f64], Option<&[f64]>) -> f64 + Sync + 'a;

/// Whether these extra columns explain the implied lse of some tokens.
fn shows(
    evidence: &Evidence<'_>,
    seen: &[(&MicrobatchInputs, Vec<ImpliedLse>)],
    filling: &Filled<'_>,
) -> bool {
    let Some((inputs, seen)) = seen.iter().find(|(_, seen)| !seen.is_empty()) else {
        return false;
    };
    let Some(direct) = Direct::new(evidence, inputs) else { return false };
    let some = seen.iter().step_by(seen.len().div_ceil(6).max(1));
    let (mut all, mut fit) = (0.0, 0.0);
    for token in some {
        let row = |t: usize| direct.against(&direct.q(Row::From(t)), &Row::From).logits;
        let own_row = row(token.token);
        let next = (token.token + 1 < inputs.tokens()).then(|| row(token.token + 1));
        let sum: f64 =
            filling(&own_row, next.as_deref()).iter().map(|&z| probability(z, token.lse)).sum();
        let (wanted, off) = (sum.ln_1p(), token.implied - token.lse);
        if wanted.abs().max(off.abs()) > 1e-3 {
            all += 1.0;
            fit += f64::from(u8::from((wanted - off).abs() <= 0.1 * wanted.abs().max(off.abs())));
        }
    }
    all >= 2.0 && fit >= SHOWN * all
}

/// lse of every token, as a function of its declared lse, its own and the next token's
/// logits.
fn lse_of(evidence: &Evidence<'_>, other: &OfToken<'_>) -> Lse {
    let reference = evidence.reference();
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let direct = Direct::new(evidence, inputs)?;
        let lse = reference.forward_lse.get(&inputs.microbatch)?;
        let row = |t: usize| direct.against(&direct.q(Row::From(t)), &Row::From).logits;
        let n = inputs.tokens();
        let of_tokens = (0..n).into_par_iter().map(|t| {
            let next = (t + 1 < n).then(|| row(t + 1));
            other(lse[t], &row(t), next.as_deref())
        });
        Some((inputs.microbatch, of_tokens.collect()))
    };
    evidence.inputs.iter().filter_map(of_microbatch).collect()
}

fn hypothesis(
    evidence: &Evidence<'_>,
    lse: Lse,
    parameters: Vec<(&'static str, String)>,
    fitted: usize,
) -> Hypothesis {
    Hypothesis::new(OtherLse { lse, captured: captured_lse(evidence) }, parameters).fitted(fitted)
}

/// The microbatches whose lse was captured, so that their backward starts from it.
pub fn captured_lse(evidence: &Evidence<'_>) -> Vec<Option<Microbatch>> {
    let is_captured = |mb: &Option<Microbatch>| {
        let role = Stage::Lse.role();
        role.and_then(|role| evidence.step.find(role, *mb)).is_some()
    };
    evidence.inputs.iter().map(|inputs| inputs.microbatch).filter(is_captured).collect()
}
