//! An assembled tensor: its aligned bytes, and views of them by type. Nothing is converted: bf16
//! and the f8 types are viewed as bits. Clones share the bytes.

use std::sync::Arc;

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use rayon::prelude::*;

use super::buffer::Buffer;
use super::error::AssembleError;
use super::region::extract;

/// A tensor, or one box of it, in memory.
#[derive(Clone)]
pub struct Tensor {
    /// Which tensor.
    pub key: TensorKey,
    /// Element type of the bytes.
    pub dtype: Dtype,
    /// Shape of `place`, not of the global tensor.
    pub shape: Vec<u64>,
    /// Which part of the global tensor this is.
    pub place: IndexBox,
    pub(super) buffer: Arc<Buffer>,
}

/// What a row of a new tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// A copy of this row of the original.
    From(usize),
    /// Zeros.
    Zeros,
    /// NaN.
    Nans,
}

impl Tensor {
    /// The elements, row-major, with the bits that the job held.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// A box of this tensor, by its place in the global tensor; `None` unless it lies inside this
    /// tensor.
    pub fn part(&self, place: &IndexBox) -> Option<Tensor> {
        let shared = self.place.intersection(place);
        let shared = shared.or_else(|| (place.elements() == Some(0)).then(|| place.clone()))?;
        if shared != *place {
            return None;
        }
        let bytes = extract(place, &self.place, self.bytes(), self.dtype.width());
        let mut buffer = Buffer::zeroed(bytes.len())?;
        buffer.bytes_mut().copy_from_slice(&bytes);
        let (key, dtype, buffer) = (self.key.clone(), self.dtype, Arc::new(buffer));
        Some(Tensor { key, dtype, shape: place.extent(), place: place.clone(), buffer })
    }

    /// The transposed matrix, with the bits of its elements unchanged.
    ///
    /// Panics unless it has two dimensions.
    pub fn transposed(&self) -> Result<Tensor, AssembleError> {
        let [rows, cols] = self.shape[..] else { panic!("{self:?} is not a matrix") };
        let memory =
            || AssembleError::Memory { key: self.key.clone(), bytes: self.bytes().len() as u64 };
        let mut buffer = Buffer::zeroed(self.bytes().len()).ok_or_else(memory)?;
        transpose(
            self.bytes(),
            buffer.bytes_mut(),
            rows as usize,
            cols as usize,
            self.dtype.width(),
        );
        let place = IndexBox(self.place.0.iter().rev().copied().collect());
        Ok(Tensor {
            key: self.key.clone(),
            dtype: self.dtype,
            shape: vec![cols, rows],
            place,
            buffer: Arc::new(buffer),
        })
    }

    /// The same bytes with another shape; `None` where the number of elements differs, or memory is
    /// short.
    pub fn reshaped(&self, shape: &[u64]) -> Option<Tensor> {
        let same = shape.iter().product::<u64>() == self.shape.iter().product::<u64>();
        let mut copied = self.with_rows(&|row| Row::From(row)).filter(|_| same)?;
        copied.shape = shape.to_vec();
        copied.place = IndexBox::whole(shape);
        Some(copied)
    }

    /// A tensor of this shape whose rows (leading dimensions flattened) `row` chooses; `None` for a
    /// dtype that is not a float, or where memory is short.
    pub fn with_rows(&self, row: &dyn Fn(usize) -> Row) -> Option<Tensor> {
        let nan: &[u8] = match self.dtype {
            Dtype::Bf16 => &[0xc0, 0x7f],
            Dtype::F16 => &[0x00, 0x7e],
            Dtype::F32 => &[0, 0, 0xc0, 0x7f],
            Dtype::F64 => &[0, 0, 0, 0, 0, 0, 0xf8, 0x7f],
            _ => return None,
        };
        let width = self.shape.last().map_or(1, |&n| n as usize) * self.dtype.width();
        let mut buffer = Buffer::zeroed(self.bytes().len())?;
        let rows = self.bytes().len().checked_div(width).unwrap_or(0);
        for (index, target) in buffer.bytes_mut().chunks_exact_mut(width.max(1)).enumerate() {
            match row(index) {
                Row::From(from) if from < rows => {
                    target.copy_from_slice(&self.bytes()[from * width..(from + 1) * width]);
                }
                Row::From(_) | Row::Zeros => {}
                Row::Nans => {
                    target.chunks_exact_mut(nan.len()).for_each(|x| x.copy_from_slice(nan))
                }
            }
        }
        let (key, dtype, buffer) = (self.key.clone(), self.dtype, Arc::new(buffer));
        Some(Tensor { key, dtype, shape: self.shape.clone(), place: self.place.clone(), buffer })
    }

    /// A copy in which some rows are replaced by those of another tensor; `None` where its shape or
    /// dtype differs, or memory is short.
    pub fn with_rows_of(&self, other: &Tensor, rows: &[usize]) -> Option<Tensor> {
        if (self.dtype, &self.shape) != (other.dtype, &other.shape) {
            return None;
        }
        let mut mixed = self.with_rows(&Row::From)?;
        let width = self.shape.last().map_or(1, |&n| n as usize) * self.dtype.width();
        let target = Arc::get_mut(&mut mixed.buffer)?.bytes_mut();
        for &row in rows {
            let row = row * width..(row + 1) * width;
            target.get_mut(row.clone())?.copy_from_slice(other.bytes().get(row)?);
        }
        Some(mixed)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.bytes().len() / self.dtype.width()
    }
}

/// Rows of the result that one thread fills at a time: their source columns share cache lines.
const TRANSPOSED_ROWS: usize = 32;

fn transpose(source: &[u8], target: &mut [u8], rows: usize, cols: usize, width: usize) {
    if source.is_empty() {
        return;
    }
    target.par_chunks_mut(TRANSPOSED_ROWS * rows * width).enumerate().for_each(
        |(block, target)| {
            let first = block * TRANSPOSED_ROWS;
            let height = target.len() / (rows * width);
            for row in 0..rows {
                for col in 0..height {
                    let from = (row * cols + first + col) * width;
                    let to = (col * rows + row) * width;
                    target[to..to + width].copy_from_slice(&source[from..from + width]);
                }
            }
        },
    );
}

macro_rules! views {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $($dtype:ident)|+;)*) => {
        impl Tensor { $(
            $(#[$doc])*
            pub fn $name(&self) -> Option<&[$type]> {
                matches!(self.dtype, $(Dtype::$dtype)|+).then(|| self.buffer.view())
            }
        )* }
    };
}

views! {
    /// The bits of a bf16 tensor.
    bf16_bits: u16 = Bf16;
    /// The bits of an f16 tensor.
    f16_bits: u16 = F16;
    /// The bits of an f8 tensor of either kind.
    f8_bits: u8 = F8E4m3 | F8E5m2;
    /// The values of an f32 tensor.
    f32: f32 = F32;
    /// The values of an f64 tensor.
    f64: f64 = F64;
    /// The values of an i8 tensor.
    i8: i8 = I8;
    /// The values of a u8 tensor.
    u8: u8 = U8;
    /// The values of an i16 tensor.
    i16: i16 = I16;
    /// The values of a u16 tensor.
    u16: u16 = U16;
    /// The values of an i32 tensor.
    i32: i32 = I32;
    /// The values of a u32 tensor.
    u32: u32 = U32;
    /// The values of an i64 tensor.
    i64: i64 = I64;
    /// The values of a u64 tensor.
    u64: u64 = U64;
    /// The bytes of a bool tensor; every byte but 0 is true.
    bools: u8 = Bool;
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.key, self.dtype, self.place)
    }
}
