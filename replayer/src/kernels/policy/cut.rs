//! How the tokens of a sum are cut into chunks.

use std::ops::Range;

use super::dispatch::{DkParts, DqParts, Narrow};
use super::{Policy, emulate};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix, Values};
use crate::kernels::tiles::{Progress, Tiles};

/// What a chunk's size leaves open; the default is chunks of that size from the first token on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cut {
    /// Tokens of the first chunk; 0 for as many as of the others.
    pub first: usize,
    /// In so many parts as equal as can be, whatever the size; 0 for chunks of the size.
    pub parts: usize,
    /// Tokens of a sequence where chunks run along it: a chunk is some places of every
    /// sequence, and sizes count places. 0 for tokens one after the other.
    pub sequence: usize,
    /// Shards of equal length, each with chunks and a sum of its own; the shards' sums are
    /// added one after the other. 0 and 1 for none.
    pub shards: usize,
}

impl Cut {
    /// Places that chunks are cut from, and tokens at each.
    pub fn places(&self, tokens: usize) -> (usize, usize) {
        match self.sequence {
            s if s > 0 && tokens > s && tokens.is_multiple_of(s) => (s, tokens / s),
            _ => (tokens, 1),
        }
    }

    /// The chunks, in the order of the walk.
    pub fn spans(&self, tokens: usize, size: usize, descending: bool) -> Vec<Range<usize>> {
        let (places, each) = self.places(tokens);
        let mut all: Vec<Range<usize>> = Vec::new();
        if self.shards > 1 {
            parts(0..places, self.shards).into_iter().for_each(|of| self.cut(of, size, &mut all));
        } else {
            self.cut(0..places, size, &mut all);
        }
        if each > 1 {
            all.iter_mut().for_each(|one| *one = one.start * each..one.end * each);
        }
        if descending {
            all.reverse();
        }
        all
    }

    /// Adds the chunks of a shard.
    fn cut(&self, shard: Range<usize>, size: usize, to: &mut Vec<Range<usize>>) {
        if self.parts > 0 {
            return to.extend(parts(shard, self.parts));
        }
        let first = if self.first == 0 { size } else { self.first };
        let head = shard.start..shard.end.min(shard.start + first);
        let rest = (head.end..shard.end).step_by(size.max(1));
        let rest = rest.map(|start| start..shard.end.min(start + size));
        to.extend(std::iter::once(head).chain(rest).filter(|one| !one.is_empty()));
    }

    /// Where the shards after the first one begin, in an ascending walk.
    pub(crate) fn shard_starts(&self, tokens: usize) -> Vec<usize> {
        let (places, each) = self.places(tokens);
        let shards = if self.shards > 1 { parts(0..places, self.shards) } else { Vec::new() };
        shards.into_iter().map(|of| of.start * each).filter(|&start| start > 0).collect()
    }

    /// The token that each place of the walk is, where that is not its own.
    pub(super) fn order(&self, tokens: usize) -> Option<Vec<usize>> {
        let (places, each) = self.places(tokens);
        let of = |at: usize| (at % each) * places + at / each;
        (each > 1).then(|| (0..tokens).map(of).collect())
    }
}

/// A range in parts as equal as can be, longer ones first, as `numpy.array_split` has them.
fn parts(of: Range<usize>, count: usize) -> Vec<Range<usize>> {
    let (length, mut start) = (of.len(), of.start);
    let size = |part: usize| length / count + usize::from(part < length % count);
    let all = (0..count).map(|part| {
        let end = start + size(part);
        std::mem::replace(&mut start, end)..end
    });
    all.filter(|one| !one.is_empty()).collect()
}

/// `emulate::backward` with the tokens in another order; dq comes back in theirs.
pub(super) fn in_order(
    order: &[usize],
    (policy, inputs, tiles): (&Policy, &HeadInputs, Tiles),
    (lse, cotangents): (&[f64], &Cotangents<f64>),
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkParts),
) -> DqParts {
    let depth = inputs.q.cols;
    let mut q = vec![0.0f32; order.len() * depth];
    for (&token, row) in order.iter().zip(q.chunks_mut(depth.max(1))) {
        inputs.q.panel_f32(token..token + 1, row);
    }
    let moved = |of: &[f64]| order.iter().map(|&token| of[token]).collect::<Vec<f64>>();
    let labels: Vec<u32> = order.iter().map(|&token| inputs.labels[token]).collect();
    let [own, label, smooth] = [cotangents.lse, cotangents.label, cotangents.smooth].map(moved);
    let moved_inputs = HeadInputs {
        q: Matrix { values: Values::F32(&q), ..inputs.q },
        labels: &labels,
        copies: None,
        ..*inputs
    };
    let of = Cotangents { lse: &own, label: &label, smooth: &smooth };
    let narrow = Narrow::new(&moved(lse), &of);
    let upstream = narrow.upstream();
    let found = emulate::backward(policy, &moved_inputs, upstream, tiles, progress, on_dk);
    let back = |rows: Vec<f64>| {
        let mut all = vec![0.0; rows.len()];
        for (&token, row) in order.iter().zip(rows.chunks(depth.max(1))) {
            all[token * depth..][..depth].copy_from_slice(row);
        }
        all
    };
    DqParts { dq_lse: back(found.dq_lse), dq_label: back(found.dq_label), dq: back(found.dq) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_tokens_once_however_they_are_cut() {
        let cuts = [
            (Cut::default(), vec![0..4, 4..8, 8..10]),
            (Cut { first: 2, ..Cut::default() }, vec![0..2, 2..6, 6..10]),
            (Cut { parts: 3, ..Cut::default() }, vec![0..4, 4..7, 7..10]),
            (Cut { shards: 2, ..Cut::default() }, vec![0..4, 4..5, 5..9, 9..10]),
        ];
        for (cut, wanted) in cuts {
            assert_eq!(cut.spans(10, 4, false), wanted, "{cut:?}");
        }
        let shards = Cut { shards: 2, ..Cut::default() };
        assert_eq!((shards.shard_starts(10), Cut::default().shard_starts(10)), (vec![5], vec![]));
    }

    #[test]
    fn chunks_along_a_sequence_hold_some_places_of_every_sequence() {
        let cut = Cut { sequence: 3, ..Cut::default() };
        assert_eq!(cut.spans(6, 2, false), [0..4, 4..6]);
        assert_eq!(cut.order(6), Some(vec![0, 3, 1, 4, 2, 5]));
        assert_eq!(cut.order(7), None);
    }
}
