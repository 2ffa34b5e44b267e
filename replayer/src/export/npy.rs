//! The header of a `.npy` file, in version 1.0 or 2.0 of numpy's format.

use backtape::dtype::Dtype;

use super::{ExportError, Member};

/// The data starts at a multiple of this, as numpy writes it.
const ALIGNMENT: usize = 64;

/// The bytes before the elements.
pub(super) fn header(member: &Member<'_>) -> Result<Vec<u8>, ExportError> {
    let Some(descr) = descr(member.stored) else {
        let (key, dtype) = (member.key.clone(), member.dtype);
        return Err(ExportError::NotOfNumpy { key, dtype });
    };
    let sizes: Vec<String> = member.shape.iter().map(|size| format!("{size},")).collect();
    let shape = sizes.join(" ");
    let shape = if sizes.len() > 1 { shape.trim_end_matches(',') } else { shape.as_str() };
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Version 1 stores the header's length in two bytes, which is enough except for shapes of
    // thousands of dimensions.
    let (version, counted) = if text.len() < 60_000 { (1u8, 2) } else { (2, 4) };
    let before = 8 + counted;
    let length = (before + text.len() + 1).next_multiple_of(ALIGNMENT) - before;
    let mut out = b"\x93NUMPY".to_vec();
    out.extend([version, 0]);
    out.extend(&(length as u32).to_le_bytes()[..counted]);
    out.extend(text.as_bytes());
    out.resize(before + length - 1, b' ');
    out.push(b'\n');
    Ok(out)
}

/// numpy's name of a little-endian dtype; `None` for dtypes that only ml_dtypes has.
fn descr(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::Bool => "|b1",
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::U16 => "<u2",
        Dtype::I16 => "<i2",
        Dtype::U32 => "<u4",
        Dtype::I32 => "<i4",
        Dtype::U64 => "<u8",
        Dtype::I64 => "<i8",
        Dtype::F16 => "<f2",
        Dtype::F32 => "<f4",
        Dtype::F64 => "<f8",
        Dtype::Bf16 | Dtype::F8E4m3 | Dtype::F8E5m2 => return None,
    })
}
