//! The products of q and k of a microbatch, kept from its forward pass for its backward pass where
//! they fit into memory: one of the four large products of a replay is then not multiplied twice.

use std::ops::Range;

use super::{Effort, Replay};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Reads, Values};
use crate::kernels::reference::WIDE;
use crate::spill::memory;

/// Of the memory that this process may have, one part in so many is taken at most.
const SHARE: usize = 8;

/// Raw logits before bias and transform.
#[derive(Default)]
pub(super) struct Products {
    /// `[T, valid]`; empty where they are not kept.
    values: Vec<f64>,
    /// Whether a forward pass has written them: one that was found in a cache has not.
    filled: bool,
}

impl Products {
    /// Runs a forward pass, which writes the products to the room that it is given.
    pub(super) fn filled<R>(&mut self, run: impl FnOnce(Option<&mut [f64]>) -> R) -> R {
        self.filled = !self.values.is_empty();
        run(Some(&mut self.values[..]).filter(|_| self.filled))
    }

    /// What a backward pass over some tokens reads in place of multiplying; `None` where it must
    /// multiply. `q` are the rows of these tokens.
    pub(super) fn read_by<'a>(
        &'a self,
        head: &HeadInputs<'a>,
        (q, tokens): (Matrix<'a>, &[usize]),
    ) -> Option<Reads<'a>> {
        let tokens = contiguous(tokens).filter(|_| self.filled)?;
        let (rows, cols) = (tokens.len(), head.valid_vocab);
        let values = Values::F64(&self.values[tokens.start * cols..tokens.end * cols]);
        let scores = Some((Matrix { rows, cols, values }, 0));
        Some(Reads { q, k: head.k, q_product: true, k_product: true, scores })
    }
}

/// Ascending numbers without gaps as a range.
fn contiguous(numbers: &[usize]) -> Option<Range<usize>> {
    let first = *numbers.first()?;
    let follow = numbers.iter().enumerate().all(|(at, &number)| number == first + at);
    follow.then(|| first..first + numbers.len())
}

impl Replay<'_> {
    /// Room for the products of a microbatch whose gradients are recomputed here, if it is worth it.
    pub(super) fn room_for_products(
        &self,
        head: &HeadInputs<'_>,
        inputs: &MicrobatchInputs,
    ) -> Products {
        let here = self.on.is_none() && self.device.is_none() && !self.trial;
        let plain = head.given.is_none() && head.reads.is_none();
        // With fewer columns the whole change, squares in f32 and this, made a replay slower.
        let plain = plain && head.q.cols >= WIDE;
        // A label beyond the valid classes has no column.
        let inside = |&label: &u32| label == IGNORED || (label as usize) < head.valid_vocab;
        let of_gradients = Stage::OF_Q.iter().chain(&Stage::OF_CLASSES).any(|stage| {
            let role = stage.role();
            role.is_some_and(|role| self.step.find(role, inputs.microbatch).is_some())
        });
        let elements = head.q.rows.saturating_mul(head.valid_vocab);
        let fits = elements.saturating_mul(size_of::<f64>()) <= memory() / SHARE;
        let wanted = here && plain && of_gradients && self.effort == Effort::All;
        let kept = wanted && fits && head.labels.iter().all(inside);
        Products { values: vec![0.0; if kept { elements } else { 0 }], filled: false }
    }
}

#[cfg(test)]
mod tests {
    use super::contiguous;

    #[test]
    fn tokens_without_gaps_are_a_range_and_others_are_none() {
        assert_eq!(contiguous(&[3, 4, 5]), Some(3..6));
        assert_eq!(contiguous(&[7]), Some(7..8));
        assert_eq!((contiguous(&[]), contiguous(&[3, 5]), contiguous(&[4, 3])), (None, None, None));
    }
}
