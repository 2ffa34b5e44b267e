//! An assembled tensor: its bytes, aligned, and views of them. No conversion:
//! bf16 and the f8 types are handed out as bits.

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::buffer::Buffer;

/// A tensor, or one box of it, in memory.
pub struct Tensor {
    /// Which tensor.
    pub key: TensorKey,
    /// Element type of the bytes.
    pub dtype: Dtype,
    /// Shape of what is here: of `place`, not of the global tensor.
    pub shape: Vec<u64>,
    /// Which part of the global tensor this is.
    pub place: IndexBox,
    pub(super) buffer: Buffer,
}

impl Tensor {
    /// The elements, row-major, as they lay in the job.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.bytes().len() / self.dtype.width()
    }
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
    /// The bytes of a bool tensor: what is not 0 is true.
    bools: u8 = Bool;
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.key, self.dtype, self.place)
    }
}
