//! A unit's head as a user's kernel takes it, and what it gives as numbers.

use half::{bf16, f16};

use super::declared::{Declared, Name, Sizes, Type};
use crate::head::{Kind, Stage};
use crate::kernels::transform::Transform;
use crate::kernels::{HeadInputs, IGNORED, Matrix, Precision, Values};

/// The head of the tokens whose gradients belong together.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a> {
    /// q `[n, D]`, k `[V, D]` and the options.
    pub head: HeadInputs<'a>,
    /// `[n]`: captured where it was captured, else the reference.
    pub lse: &'a [f64],
    /// `[n]`: upstream gradient of each token's nll.
    pub g: &'a [f64],
    /// What is asked for.
    pub stage: Stage,
}

impl Unit<'_> {
    pub(super) fn sizes(&self) -> Sizes {
        let HeadInputs { q, k, valid_vocab, .. } = &self.head;
        Sizes { n: q.rows, d: q.cols, v: k.rows, valid: *valid_vocab }
    }

    /// Elements of the output.
    pub(super) fn count(&self) -> usize {
        let Sizes { n, v, .. } = self.sizes();
        if self.stage.is_of_k() { v * self.columns() } else { n * self.columns() }
    }

    /// Elements of a row of the output.
    pub(super) fn columns(&self) -> usize {
        match self.stage.kind() {
            Kind::TokenRows => self.head.q.cols,
            Kind::ClassRows => self.head.k.cols,
            _ => 1,
        }
    }

    /// The bytes of each argument, in their order; none for the output and for sizes.
    pub(super) fn inputs(&self, declared: &Declared) -> Result<Vec<Vec<u8>>, String> {
        let head = &self.head;
        let input_bytes = |(name, dtype): (Name, Type)| match name {
            Name::Q => narrowed("q", &head.q, dtype),
            Name::K => narrowed("k", &head.k, dtype),
            Name::Labels => Ok(head.labels.iter().flat_map(|&label| index(label, dtype)).collect()),
            Name::Lse => Ok(rounded(self.lse, dtype)),
            Name::G => Ok(rounded(self.g, dtype)),
            Name::Bias => match head.bias {
                Some(bias) => Ok(rounded(bias, dtype)),
                None => Err("takes a bias, and the head has none".into()),
            },
            Name::Constant(at) => {
                let (_, value) = Transform::CONSTANTS[at];
                Ok(rounded(&[value(&head.transform)], dtype))
            }
            Name::Output | Name::Size(_) => Ok(Vec::new()),
        };
        declared
            .arguments
            .iter()
            .map(|argument| input_bytes((argument.name, argument.dtype)))
            .collect()
    }
}

/// A row of k, or -1.
fn index(label: u32, dtype: Type) -> Vec<u8> {
    let index = if label == IGNORED { -1 } else { i64::from(label) };
    match dtype {
        Type::I32 => (index as i32).to_le_bytes().to_vec(),
        _ => index.to_le_bytes().to_vec(),
    }
}

/// A dumped matrix in the type that the kernel takes: its own bits, or a wider type, exactly.
fn narrowed(what: &str, matrix: &Matrix<'_>, dtype: Type) -> Result<Vec<u8>, String> {
    let dumped = match matrix.values {
        Values::Bf16(_) => Type::Bf16,
        Values::F16(_) => Type::F16,
        Values::F32(_) => Type::F32,
        Values::F64(_) => Type::F64,
    };
    if dtype != dumped && dtype.bytes() <= dumped.bytes() {
        let (is, wanted) = (dumped.name(), dtype.name());
        return Err(format!(
            "takes {what} as {wanted}, and it was dumped as {is}: declare {is} or wider"
        ));
    }
    Ok(match (matrix.values, dtype == dumped) {
        (Values::Bf16(bits) | Values::F16(bits), true) => bytemuck::cast_slice(bits).to_vec(),
        _ => rounded(&matrix.to_f64(), dtype),
    })
}

/// Numbers in a type, rounded once where it is narrower.
fn rounded(values: &[f64], dtype: Type) -> Vec<u8> {
    // Not by `half` alone, which drops the low half of an f64 before it rounds.
    let once = |precision: Precision| {
        let mut values = values.to_vec();
        precision.round_slice64(&mut values);
        values
    };
    let mut bytes = Vec::with_capacity(values.len() * dtype.bytes());
    match dtype {
        Type::Bf16 => once(Precision::Bf16)
            .iter()
            .for_each(|&x| bytes.extend(bf16::from_f64(x).to_le_bytes())),
        Type::F16 => {
            once(Precision::F16).iter().for_each(|&x| bytes.extend(f16::from_f64(x).to_le_bytes()))
        }
        Type::F32 => values.iter().for_each(|&x| bytes.extend((x as f32).to_le_bytes())),
        _ => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
    }
    bytes
}

/// The numbers of a type that are held in bytes.
pub(super) fn floats(bytes: &[u8], dtype: Type) -> Vec<f64> {
    let each = |element: &[u8]| match dtype {
        Type::Bf16 => bf16::from_le_bytes([element[0], element[1]]).to_f64(),
        Type::F16 => f16::from_le_bytes([element[0], element[1]]).to_f64(),
        Type::F32 => {
            f64::from(f32::from_le_bytes([element[0], element[1], element[2], element[3]]))
        }
        _ => element.try_into().map_or(f64::NAN, f64::from_le_bytes),
    };
    bytes.chunks_exact(dtype.bytes()).map(each).collect()
}
