//! The shards of a tensor as the checks walk them: each distinct content of each box
//! once, with the ranks that hold it, where it lies in the mapped file.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::ShardRecord;

use crate::dump::{StepDump, TensorInfo};

/// One box of a tensor, its bytes, and who held them.
pub(super) struct Piece<'a> {
    /// The record of the first holder.
    pub(super) record: &'a ShardRecord,
    /// As the training process hashed them.
    pub(super) bytes: &'a [u8],
    /// Every rank that held these bytes in this box, ascending.
    pub(super) ranks: Vec<Rank>,
    /// The same, a rank as often as its devices held them.
    pub(super) holders: Vec<Rank>,
    /// Of the global tensor.
    pub(super) shape: &'a [u64],
}

/// The intact pieces of a tensor by box, then rank, and how many shards are lost.
/// Nothing where the ranks disagree on what its bytes mean.
pub(super) fn pieces<'a>(dump: &'a StepDump, info: &'a TensorInfo) -> (Vec<Piece<'a>>, usize) {
    if info.disagreements.iter().any(|d| d.spoils_bytes()) {
        return (Vec::new(), info.shards.len());
    }
    let (mut found, mut lost) = (BTreeMap::<_, Piece<'a>>::new(), 0);
    for at in &info.shards {
        let record = dump.record(at);
        let Some(bytes) = dump.intact_bytes(at) else {
            lost += 1;
            continue;
        };
        let one = || {
            let (ranks, holders) = (Vec::new(), Vec::new());
            Piece { record, bytes, ranks, holders, shape: &info.shape }
        };
        let piece = found.entry((&record.place, record.hash)).or_insert_with(one);
        piece.holders.push(record.rank);
        if piece.ranks.last() != Some(&record.rank) {
            piece.ranks.push(record.rank);
        }
    }
    let mut found: Vec<Piece<'a>> = found.into_values().collect();
    found.sort_by(|a, b| (&a.record.place, &a.ranks).cmp(&(&b.record.place, &b.ranks)));
    (found, lost)
}

impl<'a> Piece<'a> {
    /// Elements of a row that lie in this box: its extent along the last dimension; 1
    /// for a tensor without dimensions or of one.
    pub(super) fn columns(&self) -> usize {
        match self.record.place.0.as_slice() {
            [] | [_] => 1,
            [.., (from, to)] => (to - from) as usize,
        }
    }

    /// Where the columns of a row lie in the tensor.
    pub(super) fn column_range(&self) -> (u64, u64) {
        match self.record.place.0.as_slice() {
            [] | [_] => (0, 1),
            [.., range] => *range,
        }
    }

    /// Rows of this box: leading dimensions flattened; the elements of a vector are rows.
    pub(super) fn rows(&self) -> usize {
        let elements = self.bytes.len() / self.record.dtype.width();
        elements.checked_div(self.columns()).unwrap_or(0)
    }

    /// Bytes of a row of this box.
    pub(super) fn row_bytes(&self, row: usize) -> &'a [u8] {
        let width = self.columns() * self.record.dtype.width();
        &self.bytes[row * width..(row + 1) * width]
    }

    /// The row of the global tensor that a row of this box is.
    pub(super) fn global_row(&self, row: usize) -> u64 {
        let place = &self.record.place.0;
        let leading = match place.len() {
            0 => return 0,
            1 => 1,
            n => n - 1,
        };
        let (mut rest, mut flat, mut stride) = (row as u64, 0u64, 1u64);
        for (&(from, to), &size) in place[..leading].iter().zip(self.shape).rev() {
            let extent = (to - from).max(1);
            flat += (from + rest % extent) * stride;
            rest /= extent;
            stride = stride.saturating_mul(size);
        }
        flat
    }

    /// The box.
    pub(super) fn place(&self) -> &'a IndexBox {
        &self.record.place
    }
}
