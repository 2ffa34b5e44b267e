//! `tile-add-low-precision`: a fused kernel adds each tile's part of dq and dk to a buffer
//! of few bits.
//!
//! Real: Apple's CCE adds tiles with atomics in the inputs' dtype (ml-cross-entropy 14 and 18). dq
//! and dk are both off, dq by the number of vocabulary tiles, dk by that of token tiles. With
//! atomics the order changes from run to run: then no hypothesis fits, and the cause stays unknown.
//!
//! Detectors: dq fails; a few rows of dq (and of dk, where that fails too) summed again in tiles of
//! some size fit much better than one sum in f32 does (`detectors::sampled_sums`). Emulation: `acc
//! = round(acc + round(tile))` for dq over the vocabulary, for dk over the tokens. Where only dk
//! fails, tiles of tokens cannot be told from chunks, and only `chunk-accumulator-low-precision` is
//! tried.

use super::emulated::{Emulated, bases, formats_below, has_products};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::detectors::pieces::{self, Pieces, Wanted};
use crate::diagnose::detectors::sampled_sums::SampledSums;
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;

/// The catalogue's entry.
pub struct TileAddLowPrecision;

impl Cause for TileAddLowPrecision {
    fn id(&self) -> &'static str {
        "tile-add-low-precision"
    }

    fn about(&self) -> &'static str {
        "parts of tiles are added to dq and dk in a format of few bits"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy 14", "ml-cross-entropy 18"]
    }

    fn advice(&self) -> &'static str {
        "add the tiles of dq and dk in f32 (CCE: accum_e_fp32 and accum_c_fp32) and cast once at the end"
    }

    fn effort(&self) -> Effort {
        Effort::Much
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let fused = roundings.widest.path == Path::Fused;
        let all = [Stage::DqLse, Stage::Dq, Stage::DkLse, Stage::Dk];
        if !has_products(evidence) || evidence.is_beyond_rounding(&all) {
            return Vec::new();
        }
        // In dk alone, tiles of tokens cannot be told from chunks, which another cause tries.
        if !evidence.fails_any(&[Stage::DqLse, Stage::Dq]) {
            return Vec::new();
        }
        let mut hypotheses = Vec::new();
        for precision in formats_below(roundings.narrowest.tile_add, &roundings) {
            for base in bases(&roundings) {
                // The label's part may be in its tile, or be added after all tiles.
                hypotheses.extend(of(evidence, (&roundings, &base), precision, true));
                if fused {
                    hypotheses.extend(of(evidence, (&roundings, &base), precision, false));
                }
            }
        }
        hypotheses
    }
}

/// The hypotheses of tiles of dq, each with the best tiles of dk where that fails too.
fn of(
    evidence: &Evidence<'_>,
    (roundings, base): (&Roundings, &Policy),
    precision: Precision,
    whole: bool,
) -> Vec<Hypothesis> {
    let declared = evidence.step.options.declared.tiles.unwrap_or_default();
    let (tokens, vocab) = (declared.tokens.map(|n| n as usize), declared.vocab.map(|n| n as usize));
    let failing = |stages: [Stage; 2]| stages.into_iter().find(|&stage| evidence.fails(stage));
    let of_dq = || {
        let stage = failing([Stage::DqLse, Stage::Dq])?;
        let unit = evidence.worst_unit(&[stage])?;
        let sums = SampledSums::of_dq(evidence, unit, stage, base, whole)?;
        // The emulation has vocabulary tiles of one size only.
        let wanted = Wanted { precision, declared: vocab, sequence: 0, equal: true };
        Some(pieces::search((&sums, &|work| evidence.spend(work)), wanted))
    };
    let of_dk = || {
        let stage = failing([Stage::DkLse, Stage::Dk])?;
        let unit = evidence.worst_unit(&[stage])?;
        let sequence = unit.inputs(evidence)?.sequence;
        let sums = SampledSums::of_dk(evidence, unit, stage, base, whole)?;
        let wanted = Wanted { precision, declared: tokens, sequence, equal: false };
        Some(pieces::search((&sums, &|work| evidence.spend(work)), wanted))
    };
    let columns: Vec<Pieces> = of_dq().unwrap_or_default();
    if columns.is_empty() {
        return Vec::new();
    }
    let rows = of_dk().unwrap_or_default();
    let row = rows.first().copied();
    let of_cut = |pieces: &Pieces| {
        let tiles = Tiles {
            tokens: row.map_or(roundings.tiles.tokens, |row| row.size),
            vocab: pieces.size,
        };
        let policy = Policy {
            path: if whole { Path::Chunked } else { Path::Fused },
            tile_add: precision,
            chunk_add: row.map_or(base.chunk_add, |row| row.total),
            addend: pieces.addend,
            tile_order: pieces.walk,
            chunk_order: row.map_or(base.chunk_order, |row| row.walk),
            cut: row.map_or(base.cut, |row| row.cut),
            ..*base
        };
        let mut parameters = vec![
            ("accumulator", precision.name().to_string()),
            ("vocabulary tile", pieces.size.to_string()),
            ("a tile's part rounded to", pieces.addend.name().to_string()),
        ];
        parameters.extend(row.map(|row| ("token tile", row.size.to_string())));
        let fitted = usize::from(vocab != Some(pieces.size))
            + usize::from(row.is_some_and(|row| tokens != Some(row.size)));
        Hypothesis::new(Emulated::backward(policy, tiles), parameters).fitted(fitted)
    };
    columns.iter().map(of_cut).collect()
}
