//! The text of `replay show`: a box of a tensor as numbers.

use std::fmt::Write;

use backtape::dtype::Dtype;

use super::text::WIDTH;
use crate::assemble::Tensor;
use crate::bits::{bits, integer, value};
use crate::number::count;

/// A tensor's values, the last dimension along the line, with the global index of each row and
/// column; as hexadecimal bits if `raw` is set.
///
/// ```text
/// dk f32 [8448, 256], [0:2, 0:3]
///                 0           1           2
/// [0,:]  -1.034e-05   2.211e-06   4.001e-06
/// [1,:]   0.0003112  -1.902e-05           0
/// ```
pub fn render(tensor: &Tensor, shape: &[u64], raw: bool) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{} {} {shape:?}, {}", tensor.key, tensor.dtype, tensor.place);
    let cells: Vec<String> = (0..tensor.elements()).map(|index| cell(tensor, index, raw)).collect();
    let Some((columns, outer)) = tensor.place.0.split_last() else {
        let _ = writeln!(out, "{}", cells.first().map_or("nothing", String::as_str));
        return out;
    };
    let across = (columns.1 - columns.0) as usize;
    if cells.is_empty() {
        out.push_str("the box is empty\n");
        return out;
    }
    let labels: Vec<String> =
        (0..cells.len() / across).map(|row| label(outer, row as u64)).collect();
    let margin = labels.iter().map(String::len).max().unwrap_or(0);
    let widest = cells.iter().map(String::len).max().unwrap_or(0);
    let width = widest.max(columns.1.to_string().len()) + 2;
    let fit = ((WIDTH.saturating_sub(margin)) / width).max(1);
    // A row that is longer than a line is shown in blocks of columns.
    for first in (0..across).step_by(fit) {
        let shown = first..across.min(first + fit);
        let _ = write!(out, "{:margin$}", "");
        for column in shown.clone() {
            let _ = write!(out, "{:>width$}", columns.0 + column as u64);
        }
        out.push('\n');
        for (row, label) in labels.iter().enumerate() {
            let _ = write!(out, "{label:<margin$}");
            for column in shown.clone() {
                let _ = write!(out, "{:>width$}", cells[row * across + column]);
            }
            out.push('\n');
        }
    }
    out
}

/// The sentence that replaces values that are too many to show.
pub fn too_many(elements: u64, most: u64) -> String {
    format!("{} values are more than the {} that are shown", count(elements), count(most))
}

/// The global index of a row, in all dimensions but the last.
fn label(outer: &[(u64, u64)], mut row: u64) -> String {
    let mut index: Vec<String> = Vec::new();
    for (lo, hi) in outer.iter().rev() {
        index.push((lo + row % (hi - lo)).to_string());
        row /= hi - lo;
    }
    index.reverse();
    index.push(":".into());
    format!("[{}]", index.join(","))
}

fn cell(tensor: &Tensor, index: usize, raw: bool) -> String {
    let width = tensor.dtype.width();
    let bits = bits(tensor.bytes(), width, index);
    match tensor.dtype {
        _ if raw => format!("{bits:0digits$x}", digits = 2 * width),
        Dtype::Bool => (bits != 0).to_string(),
        // Not as an i64, which does not hold every u64.
        Dtype::U64 => bits.to_string(),
        dtype => match integer(dtype, bits) {
            Some(whole) => whole.to_string(),
            None => shortest(dtype, bits),
        },
    }
}

/// The shortest decimal that is read back as the same float, so that different floats never look
/// equal.
fn shortest(dtype: Dtype, bits: u64) -> String {
    let x = value(dtype, bits);
    if !x.is_finite() {
        return x.to_string();
    }
    let same = |text: &str| text.parse::<f64>().is_ok_and(|y| rounds_to(dtype, y, bits));
    // A dtype of p fraction bits needs at most 2 + ceil(p log10 2) significant digits, f64 17.
    let shortest_text = (0..=16).map(|digits| format!("{x:.digits$e}")).find(|text| same(text));
    let text = shortest_text.unwrap_or_else(|| format!("{x:e}"));
    let plain = format!("{}", text.parse::<f64>().unwrap_or(x));
    if plain.len() <= text.len() { plain } else { text }
}

/// True when `y`, rounded to the dtype, has these bits.
fn rounds_to(dtype: Dtype, y: f64, bits: u64) -> bool {
    match dtype {
        Dtype::F64 => y.to_bits() == bits,
        Dtype::F32 => u64::from((y as f32).to_bits()) == bits,
        Dtype::Bf16 => u64::from(half::bf16::from_f64(y).to_bits()) == bits,
        Dtype::F16 => u64::from(half::f16::from_f64(y).to_bits()) == bits,
        // 8-bit floats have few digits, so that their exact decimal is short.
        _ => y == value(dtype, bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_decimal_gives_the_same_bits_back() {
        assert_eq!(shortest(Dtype::F32, u64::from(0.1f32.to_bits())), "0.1");
        assert_eq!(shortest(Dtype::Bf16, 0x3dcd), "0.1");
        assert_eq!(shortest(Dtype::F32, u64::from(1e-9f32.to_bits())), "1e-9");
        assert_eq!(shortest(Dtype::F32, 0x7fc0_0000), "NaN");
        for bits in 0..0x7f80u64 {
            let back: f64 = shortest(Dtype::Bf16, bits).parse().unwrap();
            assert_eq!(u64::from(half::bf16::from_f64(back).to_bits()), bits);
        }
    }

    #[test]
    fn a_row_is_named_by_its_global_index() {
        assert_eq!(label(&[(3, 5), (10, 14)], 6), "[4,12,:]");
        assert_eq!(label(&[], 0), "[:]");
    }
}
