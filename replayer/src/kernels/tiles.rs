//! How a kernel walks the token x vocabulary plane, and how it reports progress.
//!
//! Tiles bound the memory of a kernel beyond its inputs and its `[T, D]` outputs. They are also
//! part of its arithmetic: sums over the vocabulary are taken tile by tile, so other tile sizes
//! give other last bits. The thread count changes no bit.

use std::ops::Range;

/// Size of one tile of the token x vocabulary plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Rows of q a tile covers.
    pub tokens: usize,
    /// Rows of k a tile covers.
    pub vocab: usize,
}

impl Default for Tiles {
    /// 256 x 2048: a tile of logits is 2 MiB in f32 and 4 MiB in f64, wide enough
    /// for the GEMMs to run near their peak.
    fn default() -> Self {
        Tiles { tokens: 256, vocab: 2048 }
    }
}

/// Is told how far a kernel has come, by whichever thread finished the work.
pub trait Progress: Sync {
    /// `work` multiply-adds were done since the last call.
    fn advance(&self, work: u64);
}

/// For callers that watch nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn advance(&self, _work: u64) {}
}

/// The half-open ranges of at most `size` that cover `0..length` in order.
pub(crate) fn spans(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    assert!(size > 0, "a tile has at least one row");
    (0..length).step_by(size).map(move |start| start..length.min(start + size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_length_once_and_in_order() {
        for (length, size) in [(0, 3), (1, 3), (3, 3), (7, 3), (9, 3)] {
            let covered: Vec<usize> = spans(length, size).flatten().collect();
            assert_eq!(covered, (0..length).collect::<Vec<_>>());
        }
    }
}
