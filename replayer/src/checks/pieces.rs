//! The pieces of a tensor, as most checks read them: each distinct content of each box once, with
//! the ranks that hold it. The bytes are borrowed from the mapped file.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::ShardRecord;

use crate::dump::{StepDump, TensorInfo};

/// One box of a tensor, its bytes, and the ranks that held them.
pub(super) struct Piece<'a> {
    /// The record of the first holder.
    pub(super) record: &'a ShardRecord,
    /// Bytes whose hash is the one that the training process took.
    pub(super) bytes: &'a [u8],
    /// Every rank that held these bytes in this box, ascending.
    pub(super) ranks: Vec<Rank>,
    /// The same ranks, each as often as its devices held these bytes.
    pub(super) holders: Vec<Rank>,
    /// Shape of the global tensor.
    pub(super) shape: &'a [u64],
}

/// The intact pieces of a tensor, sorted by box, then by rank, and how many shards are lost. There
/// are no pieces where the ranks disagree about its dtype or shape.
pub(super) fn pieces<'a>(dump: &'a StepDump, info: &'a TensorInfo) -> (Vec<Piece<'a>>, usize) {
    if info.disagreements.iter().any(|d| d.spoils_bytes()) {
        return (Vec::new(), info.shards.len());
    }
    let (mut by_content, mut lost) = (BTreeMap::<_, Piece<'a>>::new(), 0);
    for shard in &info.shards {
        let record = dump.record(shard);
        let Some(bytes) = dump.intact_bytes(shard) else {
            lost += 1;
            continue;
        };
        let new_piece = || {
            let (ranks, holders) = (Vec::new(), Vec::new());
            Piece { record, bytes, ranks, holders, shape: &info.shape }
        };
        let piece = by_content.entry((&record.place, record.hash)).or_insert_with(new_piece);
        piece.holders.push(record.rank);
        if piece.ranks.last() != Some(&record.rank) {
            piece.ranks.push(record.rank);
        }
    }
    let mut by_content: Vec<Piece<'a>> = by_content.into_values().collect();
    by_content.sort_by(|a, b| (&a.record.place, &a.ranks).cmp(&(&b.record.place, &b.ranks)));
    (by_content, lost)
}

impl<'a> Piece<'a> {
    /// Elements of a row that lie in this box: its extent along the last dimension; 1 for a tensor
    /// of no or one dimension.
    pub(super) fn columns(&self) -> usize {
        match self.record.place.0.as_slice() {
            [] | [_] => 1,
            [.., (from, to)] => (to - from) as usize,
        }
    }

    /// The range of the tensor's columns that this box covers.
    pub(super) fn column_range(&self) -> (u64, u64) {
        match self.record.place.0.as_slice() {
            [] | [_] => (0, 1),
            [.., range] => *range,
        }
    }

    /// Rows of this box, with the leading dimensions flattened; each element of a vector is a row.
    pub(super) fn rows(&self) -> usize {
        let elements = self.bytes.len() / self.record.dtype.width();
        elements.checked_div(self.columns()).unwrap_or(0)
    }

    /// Bytes of a row of this box.
    pub(super) fn row_bytes(&self, row: usize) -> &'a [u8] {
        let width = self.columns() * self.record.dtype.width();
        &self.bytes[row * width..(row + 1) * width]
    }

    /// The index in the global tensor of a row of this box.
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
