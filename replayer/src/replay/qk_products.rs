//! The products of q and k of a microbatch, kept from its forward pass for its backward pass where
//! they fit into memory: one of the four large products of a replay is then not multiplied twice.

use std::ops::Range;

use crate::kernels::matrix::{HeadInputs, Matrix, Reads, Values};

/// Of the memory that this process may have, one part in so many is taken at most.
pub(super) const SHARE: usize = 8;

/// Raw logits before bias and transform.
#[derive(Default)]
pub(super) struct Products {
    /// `[T, valid]`; empty where they are not kept.
    values: Vec<f64>,
    /// Whether a forward pass has written them: one that was found in a cache has not.
    filled: bool,
}

impl Products {
    /// Room for so many, none of which is written.
    pub(super) fn new(elements: usize) -> Products {
        Products { values: vec![0.0; elements], filled: false }
    }

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
