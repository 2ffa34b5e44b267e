//! How the tokens are cut into the chunks over which a policy sums dk one after the other.

use std::ops::Range;

use super::dispatch::{DkParts, DqParts, Narrow};
use super::{Policy, emulate};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix, Values};
use crate::kernels::tiles::{Progress, Tiles};

/// How tokens are cut into chunks, beside the chunk size. The default is chunks of that size from
/// the first token on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cut {
    /// Tokens of the first chunk; 0 where it has as many as the others.
    pub first: usize,
    /// Number of chunks, as equal as possible, in which case the chunk size is ignored; 0 for
    /// chunks of that size.
    pub parts: usize,
    /// Length of a sequence, where a chunk holds some positions of every sequence; sizes then count
    /// positions. 0 where a chunk holds consecutive tokens.
    pub sequence: usize,
    /// Number of equal shards, each of which is cut into chunks and summed by itself; the shards'
    /// sums are then added one after the other. 0 and 1 for a single sum.
    pub shards: usize,
}

impl Cut {
    /// The number of positions that chunks are cut from, and of tokens at each position.
    pub fn places(&self, tokens: usize) -> (usize, usize) {
        match self.sequence {
            s if s > 0 && tokens > s && tokens.is_multiple_of(s) => (s, tokens / s),
            _ => (tokens, 1),
        }
    }

    /// The chunks, in the order in which they are computed, as ranges of places in that order.
    pub fn spans(&self, tokens: usize, size: usize, descending: bool) -> Vec<Range<usize>> {
        let (places, each) = self.places(tokens);
        let mut all: Vec<Range<usize>> = Vec::new();
        if self.shards > 1 {
            parts(0..places, self.shards)
                .into_iter()
                .for_each(|shard| self.cut(shard, size, &mut all));
        } else {
            self.cut(0..places, size, &mut all);
        }
        if each > 1 {
            all.iter_mut().for_each(|chunk| *chunk = chunk.start * each..chunk.end * each);
        }
        if descending {
            all.reverse();
        }
        all
    }

    /// Appends the chunks of a shard to `to`.
    fn cut(&self, shard: Range<usize>, size: usize, to: &mut Vec<Range<usize>>) {
        if self.parts > 0 {
            return to.extend(parts(shard, self.parts));
        }
        let first = if self.first == 0 { size } else { self.first };
        let head = shard.start..shard.end.min(shard.start + first);
        let rest = (head.end..shard.end).step_by(size.max(1));
        let rest = rest.map(|start| start..shard.end.min(start + size));
        to.extend(std::iter::once(head).chain(rest).filter(|chunk| !chunk.is_empty()));
    }

    /// The first tokens of all shards but the first one, in an ascending walk.
    pub(crate) fn shard_starts(&self, tokens: usize) -> Vec<usize> {
        let (places, each) = self.places(tokens);
        let shards = if self.shards > 1 { parts(0..places, self.shards) } else { Vec::new() };
        shards.into_iter().map(|shard| shard.start * each).filter(|&start| start > 0).collect()
    }

    /// The token at each place of the walk; `None` where the walk takes the tokens in their own
    /// order.
    pub(super) fn order(&self, tokens: usize) -> Option<Vec<usize>> {
        let (places, each) = self.places(tokens);
        let token_at = |at: usize| (at % each) * places + at / each;
        (each > 1).then(|| (0..tokens).map(token_at).collect())
    }
}

/// Cuts a range into `count` parts as equal as possible, longer ones first, as `numpy.array_split`
/// does.
fn parts(range: Range<usize>, count: usize) -> Vec<Range<usize>> {
    let (length, mut start) = (range.len(), range.start);
    let size = |part: usize| length / count + usize::from(part < length % count);
    let all = (0..count).map(|part| {
        let end = start + size(part);
        std::mem::replace(&mut start, end)..end
    });
    all.filter(|part| !part.is_empty()).collect()
}

/// `emulate::backward` with the tokens in another order; the rows of dq are put back into the order
/// of the tokens.
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
    let moved = |moved_cotangents: &[f64]| {
        order.iter().map(|&token| moved_cotangents[token]).collect::<Vec<f64>>()
    };
    let labels: Vec<u32> = order.iter().map(|&token| inputs.labels[token]).collect();
    let [own_lse, label, smooth] = [cotangents.lse, cotangents.label, cotangents.smooth].map(moved);
    let moved_inputs = HeadInputs {
        q: Matrix { values: Values::F32(&q), ..inputs.q },
        labels: &labels,
        copies: None,
        ..*inputs
    };
    let moved_cotangents = Cotangents { lse: &own_lse, label: &label, smooth: &smooth };
    let narrow = Narrow::new(&moved(lse), &moved_cotangents);
    let upstream = narrow.upstream();
    let walked = emulate::backward(policy, &moved_inputs, upstream, tiles, progress, on_dk);
    let back = |rows: Vec<f64>| {
        let mut all = vec![0.0; rows.len()];
        for (&token, row) in order.iter().zip(rows.chunks(depth.max(1))) {
            all[token * depth..][..depth].copy_from_slice(row);
        }
        all
    };
    DqParts { dq_lse: back(walked.dq_lse), dq_label: back(walked.dq_label), dq: back(walked.dq) }
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
