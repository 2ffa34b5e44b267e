//! Element types of recorded tensors: a tag and a width. Nothing here converts values.

use serde::{Deserialize, Serialize};

/// Element type of a tensor. backtape stores the bits of every element unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // The variants are their own documentation.
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F8E4m3,
    F8E5m2,
    F16,
    Bf16,
    F32,
    F64,
}

/// An element type's width in bytes and its names.
struct Entry {
    dtype: Dtype,
    name: &'static str,
    safetensors: &'static str,
    /// The name in numpy or ml_dtypes.
    numpy: &'static str,
    width: usize,
}

const fn entry(
    dtype: Dtype,
    name: &'static str,
    safetensors: &'static str,
    numpy: &'static str,
    width: usize,
) -> Entry {
    Entry { dtype, name, safetensors, numpy, width }
}

/// Every element type, in the order of [`Dtype`]'s variants.
const TABLE: [Entry; 15] = [
    entry(Dtype::Bool, "bool", "BOOL", "bool", 1),
    entry(Dtype::U8, "u8", "U8", "uint8", 1),
    entry(Dtype::I8, "i8", "I8", "int8", 1),
    entry(Dtype::U16, "u16", "U16", "uint16", 2),
    entry(Dtype::I16, "i16", "I16", "int16", 2),
    entry(Dtype::U32, "u32", "U32", "uint32", 4),
    entry(Dtype::I32, "i32", "I32", "int32", 4),
    entry(Dtype::U64, "u64", "U64", "uint64", 8),
    entry(Dtype::I64, "i64", "I64", "int64", 8),
    entry(Dtype::F8E4m3, "f8e4m3", "F8_E4M3", "float8_e4m3fn", 1),
    entry(Dtype::F8E5m2, "f8e5m2", "F8_E5M2", "float8_e5m2", 1),
    entry(Dtype::F16, "f16", "F16", "float16", 2),
    entry(Dtype::Bf16, "bf16", "BF16", "bfloat16", 2),
    entry(Dtype::F32, "f32", "F32", "float32", 4),
    entry(Dtype::F64, "f64", "F64", "float64", 8),
];

impl Dtype {
    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// Bytes of one element.
    pub fn width(self) -> usize {
        self.entry().width
    }

    /// The name in messages and in JSON: `bf16`.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// The name in a safetensors header: `BF16`.
    pub fn safetensors_name(self) -> &'static str {
        self.entry().safetensors
    }

    /// The name numpy or ml_dtypes knows it by: `bfloat16`.
    pub fn numpy_name(self) -> &'static str {
        self.entry().numpy
    }

    /// Finds a dtype by the name that a safetensors header carries.
    pub fn from_safetensors(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|entry| entry.safetensors == name).map(|entry| entry.dtype)
    }

    /// Finds a dtype by the name that numpy or ml_dtypes gives it.
    pub fn from_numpy(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|entry| entry.numpy == name).map(|entry| entry.dtype)
    }

    /// True for the floating-point types.
    pub fn is_float(self) -> bool {
        self >= Dtype::F8E4m3
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_variants_and_every_name_finds_its_way_back() {
        for (index, entry) in TABLE.iter().enumerate() {
            assert_eq!(entry.dtype as usize, index);
            assert_eq!(Dtype::from_safetensors(entry.safetensors), Some(entry.dtype));
            assert_eq!(Dtype::from_numpy(entry.numpy), Some(entry.dtype));
            let json = serde_json::to_string(&entry.dtype).unwrap();
            assert_eq!(json, format!("\"{}\"", entry.name));
        }
    }
}
