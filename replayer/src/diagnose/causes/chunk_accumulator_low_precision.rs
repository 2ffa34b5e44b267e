//! `chunk-accumulator-low-precision`: dk is summed over chunks of tokens in few bits.
//!
//! Real: Liger's fused linear cross-entropy and its relatives keep a grad_weight in the
//! parameter's dtype and add each chunk's product to it (Liger 830 and 1391, OLMo-core
//! 370, axolotl 1601). Loss and dq are right; the noise is uniform over rows and grows
//! like the root of the number of chunks.
//!
//! Detectors: dk fails, and a few of its rows summed again in chunks of some size fit much
//! better than one sum in f32 does (`detectors::sampled_sums`).
//! Emulation: `acc = round(acc + round(chunk))`, the chunk's product rounded before it is
//! added or not, from either end.

use super::emulated::{Emulated, bases, formats_below, has_products};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::detectors::pieces::{self, Pieces, Wanted};
use crate::diagnose::detectors::sampled_sums::SampledSums;
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::policy::{Cut, Path, Policy, Walk};
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;

/// The catalogue's entry.
pub struct ChunkAccumulatorLowPrecision;

impl Cause for ChunkAccumulatorLowPrecision {
    fn id(&self) -> &'static str {
        "chunk-accumulator-low-precision"
    }

    fn about(&self) -> &'static str {
        "dk is summed over chunks of tokens in a format of few bits"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["Liger-Kernel 830", "Liger-Kernel 1391", "OLMo-core 370", "axolotl 1601"]
    }

    fn advice(&self) -> &'static str {
        "keep the sum of dk over token chunks in f32 and cast it once at the end"
    }

    fn effort(&self) -> Effort {
        Effort::Much
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages = [Stage::DkLse, Stage::Dk];
        let dq = [Stage::DqLse, Stage::Dq];
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let beyond = evidence.is_beyond_rounding(&stages);
        if !has_products(evidence) || !evidence.fails_any(&stages) || beyond {
            return Vec::new();
        }
        let fused = roundings.widest.path == Path::Fused;
        // If dq of a fused head fails too, both are added over tiles, which is another cause.
        if fused && evidence.fails_any(&dq) {
            return Vec::new();
        }
        of_dk(evidence, &roundings)
    }
}

/// The hypotheses of dk summed over chunks of tokens, with every way to cut that its roundings
/// show.
pub(super) fn of_dk(evidence: &Evidence<'_>, roundings: &Roundings) -> Vec<Hypothesis> {
    let fused = roundings.widest.path == Path::Fused;
    let declared = evidence.step.options.declared.tiles.and_then(|tiles| tiles.tokens);
    let declared = declared.map(|size| size as usize);
    let mut hypotheses = Vec::new();
    for precision in formats_below(roundings.narrowest.chunk_add, roundings) {
        for base in bases(roundings) {
            // The label's part is in a chunk's product, or a fused head adds it separately.
            let whole = Policy { path: Path::Chunked, ..base };
            let inside = match !fused || evidence.fails(Stage::Dk) {
                true => searched(evidence, &whole, precision, declared),
                false => Vec::new(),
            };
            let apart = match fused && inside.is_empty() {
                true => searched(evidence, &base, precision, declared),
                false => Vec::new(),
            };
            hypotheses
                .extend(inside.iter().map(|pieces| hypothesis(&whole, pieces, declared, false)));
            hypotheses.extend(apart.iter().map(|pieces| hypothesis(&base, pieces, declared, true)));
        }
    }
    hypotheses
}

fn searched(
    evidence: &Evidence<'_>,
    base: &Policy,
    precision: Precision,
    declared: Option<usize>,
) -> Vec<Pieces> {
    let fused = base.path == Path::Fused;
    let stages = if fused { [Stage::DkLse, Stage::Dk] } else { [Stage::Dk, Stage::Dk] };
    let failing = stages.into_iter().find(|&stage| evidence.fails(stage));
    let search = || {
        let stage = failing?;
        let unit = evidence.worst_unit(&[stage])?;
        let sequence = unit.inputs(evidence)?.sequence;
        let sums = SampledSums::of_dk(evidence, unit, stage, base, !fused)?;
        let wanted = Wanted { precision, declared, sequence, equal: false };
        Some(pieces::search((&sums, &|work| evidence.spend(work)), wanted))
    };
    search().unwrap_or_default()
}

fn hypothesis(base: &Policy, pieces: &Pieces, declared: Option<usize>, fused: bool) -> Hypothesis {
    let path = if fused { Path::Fused } else { Path::Chunked };
    let Pieces { size, cut, total, addend, walk } = *pieces;
    let (tile_add, chunk_add, chunk_order) = (total, total, walk);
    let policy = Policy { path, tile_add, chunk_add, addend, chunk_order, cut, ..*base };
    // dq is summed as declared, in one tile of the vocabulary.
    let tiles = Tiles { tokens: size, vocab: usize::MAX >> 1 };
    let known = declared == Some(size) && cut == Cut::default();
    Hypothesis::new(Emulated::backward(policy, tiles), parameters(pieces))
        .fitted(usize::from(!known))
}

/// The parameters of a cut, in words.
pub(super) fn parameters(pieces: &Pieces) -> Vec<(&'static str, String)> {
    let order = if pieces.walk == Walk::Ascending { "ascending" } else { "descending" };
    let Cut { first, parts, sequence, shards } = pieces.cut;
    let places = if sequence > 0 { "places of every sequence" } else { "tokens" };
    let size = match (parts, first) {
        (0, 0) => format!("{} {places}", pieces.size),
        (0, first) => format!("{} {places}, the first of {first}", pieces.size),
        (parts, _) => format!("one of {parts} equal parts of the {places}"),
    };
    let mut parameters = vec![
        ("accumulator", pieces.total.name().to_string()),
        ("chunk", size),
        ("a chunk's part rounded to", pieces.addend.name().to_string()),
        ("order", order.to_string()),
    ];
    if shards > 1 {
        parameters.push(("shards", shards.to_string()));
    }
    parameters
}
