//! Squares that a norm in f32 does not count, as they are too small to change its sum.

use backtape::index_box::IndexBox;
use rayon::prelude::*;

use super::declaration::Norm;
use super::elements::Elements;
use super::inventory::Piece;
use super::judge::Judge;
use super::norm_shares::Shares;
use crate::assemble::pieces;
use crate::kernels::round::Precision;

/// How many sums beside each other frameworks add a norm up in, at least: the lanes of a processor with
/// vectors of 256 bits.
const LANES: f64 = 8.0;

impl Judge<'_> {
    /// The share of a norm's squares that a sum in f32 may have lost. Addends of less than half a spacing
    /// of the sum leave it as it is, and all of that is missing: a gradient whose squares differ
    /// much, as that of an unembedding, has many of these beside a few large ones.
    pub(super) fn swallowed(&self, norm: &Norm, shares: &Shares<'_>) -> Result<f64, String> {
        let of = norm.of.as_deref().unwrap_or("reduced");
        let (mut lost, mut total) = (0.0, 0.0);
        for (parameter, share) in &shares.by_parameter {
            total += share.whole;
            let key = self.key_of(parameter, of).or_else(|| self.key_of(parameter, "reduced"));
            let Some(key) = key else { continue };
            let (mut of_parts, mut lost_of_parts) = (0.0, 0.0);
            for piece in self.inventory.pieces(key, &|_| ()) {
                let squares = |at_least: f64| -> Result<f64, String> {
                    let part = |part: &IndexBox| {
                        let values = self.inventory.elements(key, piece.ranks[0], part)?;
                        Ok(squares_up_to(&values, at_least))
                    };
                    parts_of(&piece).par_iter().map(part).sum()
                };
                let all = squares(f64::INFINITY)?;
                of_parts += all;
                lost_of_parts += squares(Precision::F32.unit_roundoff() * all / LANES)?;
            }
            // What was recorded of it may be a sample.
            lost += if of_parts > 0.0 { share.whole * lost_of_parts / of_parts } else { 0.0 };
        }
        Ok(if total > 0.0 { lost / total } else { 0.0 })
    }
}

fn parts_of(piece: &Piece) -> Vec<IndexBox> {
    pieces(&piece.place, 8)
}

/// The sum of the squares that are no larger than this.
fn squares_up_to(values: &Elements<'_>, most: f64) -> f64 {
    let matrix = values.matrix(1, values.len());
    let squares = (0..values.len()).map(|at| matrix.get_f64(at).powi(2));
    squares.filter(|square| *square <= most).sum()
}
