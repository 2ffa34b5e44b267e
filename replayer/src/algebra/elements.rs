//! The elements of a part of a tensor: where they lie in the mapped file, as far as they lie there
//! one after the other; else a copy.

use std::borrow::Cow;

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::domain::Addend;
use super::inventory::{Inventory, damaged};
use crate::assemble::run;
use crate::compare::pair::widen;
use crate::kernels::matrix::{Matrix, Values};
use backtape::identity::Rank;

/// Elements of a part in row-major order.
#[derive(Clone, Debug)]
pub(crate) enum Elements<'a> {
    /// As they were recorded.
    F32(Cow<'a, [f32]>),
    /// Bits of 16-bit floats, as they were recorded, and whether these are bf16.
    Half(Cow<'a, [u16]>, bool),
    /// Widened.
    F64(Cow<'a, [f64]>),
}

/// Elements of a part at most.
const MOST: usize = 1 << 17;
static ZEROS: [f64; MOST] = [0.0; MOST];

impl<'a> Elements<'a> {
    /// So many zeros.
    pub(crate) fn zeros(count: usize) -> Elements<'a> {
        let zeros = ZEROS.get(..count);
        Elements::F64(zeros.map_or_else(|| Cow::Owned(vec![0.0; count]), Cow::Borrowed))
    }

    /// Numbers that were computed.
    pub(crate) fn of(values: Vec<f64>) -> Elements<'a> {
        Elements::F64(Cow::Owned(values))
    }

    /// Elements as they lie in a file; widened where the file has them at an odd place, or in a
    /// format that needs it.
    fn in_place(dtype: Dtype, bytes: &'a [u8]) -> Elements<'a> {
        let found = match dtype {
            Dtype::F32 => {
                bytemuck::try_cast_slice(bytes).ok().map(Cow::Borrowed).map(Elements::F32)
            }
            Dtype::F64 => {
                bytemuck::try_cast_slice(bytes).ok().map(Cow::Borrowed).map(Elements::F64)
            }
            Dtype::Bf16 | Dtype::F16 => {
                let half = |bits| Elements::Half(Cow::Borrowed(bits), dtype == Dtype::Bf16);
                bytemuck::try_cast_slice(bytes).ok().map(half)
            }
            _ => None,
        };
        found.unwrap_or_else(|| {
            let mut values = Vec::new();
            widen(dtype, bytes, &mut values);
            Elements::of(values)
        })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Elements::F32(values) => values.len(),
            Elements::Half(bits, _) => bits.len(),
            Elements::F64(values) => values.len(),
        }
    }

    /// The first element of each of so many rows.
    pub(crate) fn firsts(&self, rows: usize) -> Elements<'a> {
        let columns = self.len() / rows.max(1);
        let matrix = self.matrix(rows, columns);
        Elements::of((0..rows).map(|row| matrix.get_f64(row * columns)).collect())
    }

    /// As a matrix of so many rows and columns.
    pub(crate) fn matrix(&self, rows: usize, cols: usize) -> Matrix<'_> {
        let values = match self {
            Elements::F32(values) => Values::F32(values),
            Elements::Half(bits, true) => Values::Bf16(bits),
            Elements::Half(bits, false) => Values::F16(bits),
            Elements::F64(values) => Values::F64(values),
        };
        Matrix { rows, cols, values }
    }

    /// Widened.
    pub(crate) fn widened(self) -> Vec<f64> {
        if let Elements::F64(values) = self {
            return values.into_owned();
        }
        let mut values = vec![0.0; self.len()];
        self.matrix(1, self.len()).span_f64(0, &mut values);
        values
    }

    /// The elements of several tensors, one after the other.
    pub(crate) fn joined(all: Vec<Elements<'a>>) -> Elements<'a> {
        let is_f32 = |own: &Elements<'a>| matches!(own, Elements::F32(_));
        let is_half =
            |own: &Elements<'a>, bf16| matches!(own, Elements::Half(_, is) if *is == bf16);
        if let [_] = &all[..] {
            return all.into_iter().next().expect("there is one");
        }
        let count = all.iter().map(Elements::len).sum();
        if all.iter().all(is_f32) {
            let mut values: Vec<f32> = Vec::with_capacity(count);
            for own in &all {
                if let Elements::F32(own) = own {
                    values.extend_from_slice(own);
                }
            }
            return Elements::F32(Cow::Owned(values));
        }
        for bf16 in [true, false] {
            if !all.iter().all(|own| is_half(own, bf16)) {
                continue;
            }
            let mut values: Vec<u16> = Vec::with_capacity(count);
            for own in &all {
                if let Elements::Half(own, _) = own {
                    values.extend_from_slice(own);
                }
            }
            return Elements::Half(Cow::Owned(values), bf16);
        }
        let mut values = vec![0.0; count];
        let mut rest = &mut values[..];
        for own in &all {
            let (here, after) = rest.split_at_mut(own.len());
            own.matrix(1, own.len()).span_f64(0, here);
            rest = after;
        }
        Elements::of(values)
    }
}

impl<'a> Inventory<'a> {
    /// What a rank holds of a box of a tensor, row-major in the box.
    pub(crate) fn elements(
        &self,
        key: &TensorKey,
        rank: Rank,
        place: &IndexBox,
    ) -> Result<Elements<'a>, String> {
        let dump = self.dump;
        let info = &dump.tensors()[key];
        if info.shape.len() == place.0.len() {
            for shard in &info.shards {
                let record = dump.record(shard);
                let own = (record.rank == rank).then_some(&record.place);
                let found = own.and_then(|own| run(place, own, info.dtype.width()));
                if let Some(run) = found {
                    let bytes = dump.intact_bytes(shard).ok_or_else(|| damaged(key, rank))?;
                    return Ok(Elements::in_place(info.dtype, &bytes[run]));
                }
            }
        }
        Ok(Elements::of(self.gathered(key, rank, place)?))
    }

    /// An addend's elements of a box, row-major in the box.
    pub(crate) fn addend(&self, addend: &Addend, place: &IndexBox) -> Result<Elements<'a>, String> {
        match (addend.index, &addend.elsewhere) {
            (None, None) => self.elements(&addend.key, addend.rank, place),
            _ => Ok(Elements::of(self.read_addend(addend, place)?)),
        }
    }
}
