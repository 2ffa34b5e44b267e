//! `block-index-times-block` in the kernel of dk alone. Blocks of q are read at row `i * b * b`:
//! either only in the product `Eᵀ q`, or also in the softmax from which the entries E of dlogits
//! are computed.
//!
//! A few rows of dk are computed with every block size from 2 on.

use super::block_index_times_block::{BEYOND, parameters};
use crate::assemble::Row;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::dlogits_plane::Rows;
use crate::diagnose::detectors::gradient::Gradient;
use crate::diagnose::detectors::misread_rows::Operand;
use crate::diagnose::detectors::row_maps::{Beyond, Map};
use crate::diagnose::detectors::single_tokens::Direct;
use crate::diagnose::detectors::token_runs::of_ranks;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::TokenCotangents;

/// How many rows of dk are compared.
const CLASSES: usize = 12;
/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 1e-3;

/// The block size, and what is read beyond the end.
type Blocks = (usize, Beyond);

/// The hypothesis, where a block size explains dk, and dq, dlogits and dbias do not fail.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dk]).map(|(key, _)| key).collect();
    if evidence.fails_any(&[Stage::Dq, Stage::Dlogits, Stage::Dbias]) {
        return None;
    }
    let (blocks, whole) = Kernel::of(evidence, *keys.first()?)?.reading(evidence)?;
    let mut world = ReplacedValues::default();
    for key in keys {
        let kernel = Kernel::of(evidence, key)?;
        let q = kernel.q(evidence, blocks)?;
        let rows = 0..kernel.gradient.captured.count();
        world = world.rows(key, rows.map(|class| (class, kernel.row(&q, class, whole))));
    }
    let mut words = parameters(Operand::Q, blocks.0, blocks.1);
    let place = if whole { "dk, its softmax included" } else { "the product of dk" };
    words.push(("only in", place.to_string()));
    Some(Hypothesis::new(world, words).fitted(1))
}

/// What a unit's dk is computed from.
struct Kernel<'a> {
    gradient: Gradient,
    inputs: &'a MicrobatchInputs,
    direct: Direct<'a>,
    /// The right entries of dlogits, `[tokens, V]`.
    entries: Rows,
    /// For each token, lse as the backward reads it and the cotangents.
    tokens: Vec<(f64, TokenCotangents)>,
}

impl<'a> Kernel<'a> {
    fn of(evidence: &'a Evidence<'_>, key: Key) -> Option<Kernel<'a>> {
        let gradient = Gradient::of(evidence, key)?;
        let inputs = evidence.inputs_of(key.microbatch)?;
        let (reference, mb) = (evidence.reference(), key.microbatch);
        let (lse, cotangents) = (reference.lse.get(&mb)?, reference.cotangents.get(&mb)?);
        let token =
            |t: &usize| Some((*lse.get(*t)?, cotangents.get(t).copied().unwrap_or_default()));
        let tokens = gradient.plane.rows.iter().map(token).collect::<Option<_>>()?;
        let (direct, entries) = (Direct::new(evidence, inputs)?, gradient.entries(false)?);
        Some(Kernel { gradient, inputs, direct, entries, tokens })
    }

    /// The block size that comes nearest to the captured dk, and whether the softmax reads these
    /// blocks too.
    fn reading(&self, evidence: &Evidence<'_>) -> Option<(Blocks, bool)> {
        let (n, columns) = (self.tokens.len(), self.gradient.captured.cols);
        let classes = self.gradient.captured.count();
        if evidence.spend(2 * n * n * BEYOND.len() * CLASSES * columns) {
            return None;
        }
        let looked = || (0..classes).step_by(classes.div_ceil(CLASSES).max(1));
        let off = |q: &Rows, whole: bool| -> f64 {
            let error_of_row = |class: usize| {
                let made = self.row(q, class, whole);
                let pairs = made.iter().zip(self.gradient.captured.row(class));
                pairs.map(|(made, captured)| (made - captured).powi(2)).sum::<f64>()
            };
            looked().map(error_of_row).sum()
        };
        let maps = (2..n).flat_map(|size| BEYOND.map(|beyond| (size, beyond)));
        let tried = maps.filter_map(|blocks| Some((blocks, self.q(evidence, blocks)?)));
        let tried = tried
            .flat_map(|(blocks, q)| [false, true].map(|whole| ((blocks, whole), off(&q, whole))));
        let (reading, least) = tried.min_by(|a, b| a.1.total_cmp(&b.1))?;
        (least <= LEFT * off(self.gradient.other(), false)).then_some(reading)
    }

    /// The rows of q that the unit's tokens read.
    fn q(&self, evidence: &Evidence<'_>, (size, beyond): Blocks) -> Option<Rows> {
        let map = Map::BlockTwice { size, beyond };
        let runs = of_ranks(evidence.step, self.inputs);
        let rows: Vec<Row> = map.in_runs(self.inputs.tokens(), &runs)?;
        let tokens = self.gradient.plane.rows.iter();
        let values = tokens.flat_map(|&t| self.direct.q(rows[t])).collect();
        Some(Rows { cols: self.gradient.other().cols, values })
    }

    /// A row of dk computed with these rows of q. `whole`: whether the softmax reads them too.
    fn row(&self, q: &Rows, class: usize, whole: bool) -> Vec<f64> {
        let mut sum = vec![0.0; q.cols];
        for (index, &token) in self.tokens.iter().enumerate() {
            let row = q.row(index);
            let entry = match whole {
                false => self.entries.row(index)[class],
                true => {
                    let label = self.inputs.labels[self.gradient.plane.rows[index]] as usize;
                    self.direct.entry((row, class), token, label == class)
                }
            };
            sum.iter_mut().zip(row).for_each(|(sum, q)| *sum += entry * q);
        }
        sum
    }
}
