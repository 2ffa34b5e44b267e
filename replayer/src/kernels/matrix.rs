//! The matrices of a head as they were dumped: bits of a declared dtype, row-major.
//!
//! No copy of the whole is ever made: kernels convert one panel of rows at a time.
//! Not a tensor type: no strides, no views, two dimensions.

use super::formula::dense_entry;
use super::number::Number;
use super::transform::Transform;
use std::ops::Range;

use half::f16;
use rayon::prelude::*;

/// The label of a token that takes no part in the loss.
pub const IGNORED: u32 = u32::MAX;

/// Elements in the dtype they were dumped in; 16-bit floats as their bits, because
/// that is what lies in a shard file.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Bits of bfloat16.
    Bf16(&'a [u16]),
    /// Bits of IEEE binary16.
    F16(&'a [u16]),
    /// IEEE binary32.
    F32(&'a [f32]),
    /// IEEE binary64.
    F64(&'a [f64]),
}

/// A row-major matrix.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns, which is also the distance between rows.
    pub cols: usize,
    /// `rows * cols` elements.
    pub values: Values<'a>,
}

/// What a loss head reads: q `[T, D]`, k `[V, D]`, labels `[T]`.
///
/// Where the logits themselves were dumped and q and k were not, `given` holds them
/// and D is 0: the products are then zero and there is no dq and no dk.
#[derive(Debug, Clone, Copy)]
pub struct HeadInputs<'a> {
    /// Activations, one row a token.
    pub q: Matrix<'a>,
    /// Classifier weights, one row a vocabulary entry.
    pub k: Matrix<'a>,
    /// Row of k that is each token's target, or `IGNORED`.
    pub labels: &'a [u32],
    /// Rows of k from here on are padding: p = 0 there, and they are never read, so
    /// that whatever lies in them (NaN included) cannot leak into a gradient.
    pub valid_vocab: usize,
    /// Added to the dot products before the transform, `[V]`.
    pub bias: Option<&'a [f64]>,
    /// Raw logits `[T, V]` that take the place of the dot products.
    pub given: Option<Matrix<'a>>,
    /// From raw logit to logit.
    pub transform: Transform,
    /// Logit of every column from `valid_vocab` on; `None` or -inf when they have no
    /// part in the softmax. It is not transformed and has no gradient.
    pub mask: Option<f64>,
    /// `[T]`: how many tokens have this token's row of q, itself included: equal inputs
    /// round alike, so their errors are one error. `None` when no two are equal.
    pub copies: Option<&'a [f64]>,
    /// Where a hypothesis says that the softmax path read other rows than q's and k's, in
    /// the reference alone. The label path reads q and k.
    pub reads: Option<Reads<'a>>,
}

/// What the softmax path read in place of q `[T, D]` and k `[V, D]`.
#[derive(Debug, Clone, Copy)]
pub struct Reads<'a> {
    /// In place of q, in the logits.
    pub q: Matrix<'a>,
    /// In place of k, in the logits.
    pub k: Matrix<'a>,
    /// True when dk is the product with this q too.
    pub q_product: bool,
    /// True when dq is the product with this k too.
    pub k_product: bool,
    /// Raw logits `[T, ..]` in place of their products, and the column of the first class.
    pub scores: Option<(Matrix<'a>, usize)>,
}

/// Upstream of each token, all `[T]`: the gradient of the loss with respect to logit v
/// is `lse p_v + label [v = y] + smooth`, v valid.
#[derive(Debug, Clone, Copy)]
pub struct Cotangents<'a, F> {
    /// Of the log-sum-exp: `g (1 + 2 λ lse)`.
    pub lse: &'a [F],
    /// Of the label's logit: `-g (1 - s)`.
    pub label: &'a [F],
    /// Of every valid logit: `-g s / K`; 0 without label smoothing.
    pub smooth: &'a [F],
}

impl<'a, F> Cotangents<'a, F> {
    /// Those of some of the tokens.
    pub fn of(&self, tokens: Range<usize>) -> Cotangents<'a, F> {
        Cotangents {
            lse: &self.lse[tokens.clone()],
            label: &self.label[tokens.clone()],
            smooth: &self.smooth[tokens],
        }
    }
}

/// The cotangents of one token: what `Cotangents` has at its place.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs)]
pub struct TokenCotangents {
    pub lse: f64,
    pub label: f64,
    pub smooth: f64,
}

impl TokenCotangents {
    /// The derivative of the loss by a logit whose softmax is p, the label's own part left out.
    #[inline(always)]
    pub fn dense<N: Number>(&self, p: N) -> N {
        let (of_lse, smooth) = (p.constant(self.lse), p.constant(self.smooth));
        dense_entry(p, of_lse, smooth)
    }

    /// The derivative of the loss by a logit whose softmax is p; `is_label`: whether it is the
    /// token's label's. By the raw logit it is this times the slope of the transform.
    #[inline(always)]
    pub fn entry<N: Number>(&self, p: N, is_label: bool) -> N {
        let dense = self.dense(p);
        if !is_label {
            return dense;
        }
        let label = dense.constant(self.label);
        dense + label
    }
}

impl Cotangents<'_, f64> {
    /// Those of one token.
    pub fn of_token(&self, token: usize) -> TokenCotangents {
        let (lse, label) = (self.lse[token], self.label[token]);
        TokenCotangents { lse, label, smooth: self.smooth[token] }
    }
}

impl<'a> HeadInputs<'a> {
    /// q, k and labels with no option set.
    pub fn plain(q: Matrix<'a>, k: Matrix<'a>, labels: &'a [u32], valid_vocab: usize) -> Self {
        let (bias, given, mask, copies, reads) = (None, None, None, None, None);
        let transform = Transform::NONE;
        HeadInputs { q, k, labels, valid_vocab, bias, given, transform, mask, copies, reads }
    }
}

/// Some rows of a matrix, in place.
pub fn rows_of<'m>(matrix: &Matrix<'m>, range: Range<usize>) -> Matrix<'m> {
    let (from, to) = (range.start * matrix.cols, range.end * matrix.cols);
    let values = match matrix.values {
        Values::Bf16(bits) => Values::Bf16(&bits[from..to]),
        Values::F16(bits) => Values::F16(&bits[from..to]),
        Values::F32(values) => Values::F32(&values[from..to]),
        Values::F64(values) => Values::F64(&values[from..to]),
    };
    Matrix { rows: range.len(), cols: matrix.cols, values }
}

/// Some tokens of a head.
pub(crate) fn span_of<'h>(head: &HeadInputs<'h>, tokens: Range<usize>) -> HeadInputs<'h> {
    let cut = |matrix: Matrix<'h>| match matrix.cols {
        0 => Matrix { rows: tokens.len(), ..matrix },
        _ => rows_of(&matrix, tokens.clone()),
    };
    HeadInputs {
        q: cut(head.q),
        labels: &head.labels[tokens.clone()],
        copies: head.copies.map(|copies| &copies[tokens.clone()]),
        given: head.given.map(|given| rows_of(&given, tokens.clone())),
        reads: head.reads.map(|reads| Reads {
            q: rows_of(&reads.q, tokens.clone()),
            scores: reads.scores.map(|(matrix, first)| (rows_of(&matrix, tokens.clone()), first)),
            ..reads
        }),
        ..*head
    }
}

impl HeadInputs<'_> {
    /// The logit of a product in the column of class `v`, and its derivative by the product.
    pub(crate) fn logit(&self, product: f64, v: usize) -> (f64, f64) {
        let raw = product + self.bias.map_or(0.0, |bias| bias[v]);
        (self.transform.value(raw), self.transform.slope(raw))
    }

    /// Panics unless the shapes agree and every label names a valid row: the caller
    /// validates dumps and turns such a fault into a finding.
    pub(super) fn check(&self) {
        let (q, k) = (&self.q, &self.k);
        assert_eq!(q.len(), q.rows * q.cols, "q holds rows * cols values");
        assert_eq!(k.len(), k.rows * k.cols, "k holds rows * cols values");
        assert_eq!(q.cols, k.cols, "q and k have one inner dimension");
        assert_eq!(self.labels.len(), q.rows, "one label a token");
        assert!(self.valid_vocab <= k.rows, "valid_vocab is at most the rows of k");
        let valid = |label: u32| label == IGNORED || (label as usize) < self.valid_vocab;
        assert!(self.labels.iter().all(|&label| valid(label)), "labels are below valid_vocab");
    }

    /// The q and k that the logits are made of.
    pub(super) fn scored(&self) -> (&Matrix<'_>, &Matrix<'_>) {
        self.reads.as_ref().map_or((&self.q, &self.k), |reads| (&reads.q, &reads.k))
    }

    /// The target row of a token, or none when the token is ignored.
    pub(super) fn label(&self, token: usize) -> Option<usize> {
        Some(self.labels[token]).filter(|&label| label != IGNORED).map(|label| label as usize)
    }

    /// Multiply-adds of one GEMM over the valid token x vocabulary plane.
    pub(super) fn gemm_work(&self) -> u64 {
        self.q.rows as u64 * self.valid_vocab as u64 * self.q.cols as u64
    }
}

impl Matrix<'_> {
    /// Number of elements held.
    pub fn len(&self) -> usize {
        match self.values {
            Values::Bf16(bits) | Values::F16(bits) => bits.len(),
            Values::F32(values) => values.len(),
            Values::F64(values) => values.len(),
        }
    }

    /// Whether no element is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether every element is 0, of either sign.
    pub fn is_zero(&self) -> bool {
        (0..self.len()).all(|index| self.get_f64(index) == 0.0)
    }

    /// Element at a row-major index, exactly.
    #[inline]
    pub fn get_f64(&self, index: usize) -> f64 {
        match self.values {
            Values::Bf16(bits) => f64::from(bf16_to_f32(bits[index])),
            Values::F16(bits) => f16::from_bits(bits[index]).to_f64(),
            Values::F32(values) => f64::from(values[index]),
            Values::F64(values) => values[index],
        }
    }

    /// All elements as f64, row-major, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        (0..self.len()).into_par_iter().map(|index| self.get_f64(index)).collect()
    }

    /// Rows as f32, row-major: exact, but for f64 values, which are rounded to
    /// nearest.
    pub fn panel_f32(&self, rows: Range<usize>, panel: &mut [f32]) {
        let range = self.elements(rows);
        match self.values {
            Values::Bf16(bits) => convert(&bits[range], panel, bf16_to_f32),
            Values::F16(bits) => convert(&bits[range], panel, |bits| f16::from_bits(bits).to_f32()),
            Values::F32(values) => panel.copy_from_slice(&values[range]),
            Values::F64(values) => convert(&values[range], panel, |value| value as f32),
        }
    }

    /// Consecutive elements as f64, exactly.
    #[inline(always)]
    pub fn span_f64(&self, from: usize, values: &mut [f64]) {
        let range = from..from + values.len();
        match self.values {
            Values::Bf16(bits) => convert(&bits[range], values, |bits| bf16_to_f32(bits).into()),
            Values::F16(bits) => {
                convert(&bits[range], values, |bits| f16::from_bits(bits).to_f64())
            }
            Values::F32(all) => convert(&all[range], values, f64::from),
            Values::F64(all) => values.copy_from_slice(&all[range]),
        }
    }

    /// Rows as f64, row-major, exactly.
    pub fn panel_f64(&self, rows: Range<usize>, panel: &mut [f64]) {
        let range = self.elements(rows);
        match self.values {
            Values::Bf16(bits) => convert(&bits[range], panel, |bits| bf16_to_f32(bits).into()),
            Values::F16(bits) => convert(&bits[range], panel, |bits| f16::from_bits(bits).to_f64()),
            Values::F32(values) => convert(&values[range], panel, f64::from),
            Values::F64(values) => panel.copy_from_slice(&values[range]),
        }
    }

    /// How many values of the first `columns` of each row are no finite numbers.
    pub fn nonfinite(&self, columns: usize) -> usize {
        const ROWS: usize = 64;
        let count_in = |rows: Range<usize>| {
            let range = self.elements(rows);
            match self.values {
                Values::Bf16(bits) => nonfinite(&bits[range], (self.cols, columns), bf16_to_f32),
                Values::F16(bits) => {
                    let widen = |bits| f16::from_bits(bits).to_f32();
                    nonfinite(&bits[range], (self.cols, columns), widen)
                }
                Values::F32(all) => nonfinite(&all[range], (self.cols, columns), |x| x),
                Values::F64(all) => {
                    let nan_unless_finite = |x: f64| if x.is_finite() { 0.0 } else { f32::NAN };
                    nonfinite(&all[range], (self.cols, columns), nan_unless_finite)
                }
            }
        };
        let rows = self.len().checked_div(self.cols).unwrap_or(0);
        let spans = (0..rows.div_ceil(ROWS)).into_par_iter();
        spans.map(|span| count_in(span * ROWS..rows.min((span + 1) * ROWS))).sum()
    }

    /// Sum of the squares of a row's elements.
    pub fn row_energy(&self, row: usize) -> f64 {
        let range = self.elements(row..row + 1);
        match self.values {
            Values::Bf16(bits) => energy(&bits[range], |bits| bf16_to_f32(bits).into()),
            Values::F16(bits) => energy(&bits[range], |bits| f16::from_bits(bits).to_f64()),
            Values::F32(values) => energy(&values[range], f64::from),
            Values::F64(values) => energy(&values[range], |value| value),
        }
    }

    /// The same of several rows, by all threads.
    pub fn row_energies(&self, rows: Range<usize>) -> Vec<f64> {
        rows.into_par_iter().with_min_len(64).map(|row| self.row_energy(row)).collect()
    }

    /// Sum of the squares of all elements, by rows, whoever adds them.
    pub fn energy(&self) -> f64 {
        self.row_energies(0..self.rows).iter().sum()
    }

    /// Adds up, column by column, what `value` makes of each row's number and elements.
    pub fn column_totals(&self, value: impl Fn(usize, f64) -> f64) -> Vec<f64> {
        let (mut sums, mut row) = (vec![0.0; self.cols], vec![0.0; self.cols]);
        for row_index in 0..self.len().checked_div(self.cols).unwrap_or(0) {
            self.panel_f64(row_index..row_index + 1, &mut row);
            sums.iter_mut().zip(&row).for_each(|(sum, &x)| *sum += value(row_index, x));
        }
        sums
    }

    /// Where rows lie among the elements.
    pub(super) fn elements(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.cols..rows.end * self.cols
    }
}

/// bfloat16 is the upper half of binary32. A signalling NaN stays one, so that
/// widening keeps every bit; `bf16::to_f32` does the same.
#[inline(always)]
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Of rows of so many elements each, among the first of them.
fn nonfinite<S: Copy>(
    elements: &[S],
    (cols, first): (usize, usize),
    element: impl Fn(S) -> f32,
) -> usize {
    let is_bad = |&x: &S| usize::from(!element(x).is_finite());
    elements.chunks(cols.max(1)).map(|row| row.iter().take(first).map(is_bad).sum::<usize>()).sum()
}

/// In so many sums beside each other that a processor adds them at once.
fn energy<S: Copy>(row: &[S], element: impl Fn(S) -> f64) -> f64 {
    const AT_ONCE: usize = 8;
    let mut sums = [0.0; AT_ONCE];
    let parts = row.chunks_exact(AT_ONCE);
    let rest: f64 = parts.remainder().iter().map(|&x| element(x).powi(2)).sum();
    for part in parts {
        sums.iter_mut().zip(part).for_each(|(sum, &x)| *sum += element(x).powi(2));
    }
    sums.iter().sum::<f64>() + rest
}

#[inline(always)]
fn convert<S: Copy, D>(source: &[S], target: &mut [D], element: impl Fn(S) -> D) {
    assert_eq!(source.len(), target.len(), "a panel holds its rows and nothing else");
    for (target, &source) in target.iter_mut().zip(source) {
        *target = element(source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Every 16-bit pattern, NaN payloads included, against the `half` crate.
    #[test]
    fn sixteen_bit_panels_hold_what_half_reads_for_every_pattern() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut panel = vec![0.0f32; bits.len()];
        let mut wide = vec![0.0f64; bits.len()];
        let matrix = |values| Matrix { rows: 256, cols: 256, values };
        for (values, is_bf16) in [(Values::Bf16(&bits), true), (Values::F16(&bits), false)] {
            let matrix = matrix(values);
            matrix.panel_f32(0..256, &mut panel);
            matrix.panel_f64(0..256, &mut wide);
            for (index, &pattern) in bits.iter().enumerate() {
                let wanted = match is_bf16 {
                    true => bf16::from_bits(pattern).to_f64(),
                    false => f16::from_bits(pattern).to_f64(),
                };
                let same = |got: f64| got == wanted || (got.is_nan() && wanted.is_nan());
                assert!(same(panel[index].into()) && same(wide[index]), "{pattern:#06x}");
                assert!(same(matrix.get_f64(index)), "{pattern:#06x}");
            }
        }
    }

    #[test]
    fn a_panel_is_the_rows_asked_for_and_f64_values_are_rounded_to_f32() {
        let values: Vec<f64> = (0..12).map(|i| f64::from(i) + 1e-12).collect();
        let matrix = Matrix { rows: 4, cols: 3, values: Values::F64(&values) };
        let mut panel = [0.0f32; 6];
        matrix.panel_f32(1..3, &mut panel);
        assert_eq!(panel, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let mut wide = [0.0f64; 6];
        matrix.panel_f64(1..3, &mut wide);
        assert_eq!(wide, values[3..9]);
    }

    #[test]
    fn what_is_no_number_is_counted_in_the_first_columns_of_every_row() {
        let (rows, cols) = (150, 3);
        let mut values = vec![1.0f32; rows * cols];
        for (row, column, value) in [(0, 0, f32::NAN), (149, 1, f32::INFINITY), (70, 2, f32::NAN)] {
            values[row * cols + column] = value;
        }
        let wide: Vec<f64> = values.iter().map(|&x| x.into()).collect();
        for values in [Values::F32(&values), Values::F64(&wide)] {
            let matrix = Matrix { rows, cols, values };
            assert_eq!([1, 2, 3].map(|columns| matrix.nonfinite(columns)), [1, 2, 3]);
        }
        let (bf16, f16) = ([0x7f80, 0x3f80, 0xffc0], [0x7c00, 0x3c00, 0x7e00]);
        for values in [Values::Bf16(&bf16), Values::F16(&f16)] {
            assert_eq!(Matrix { rows: 1, cols, values }.nonfinite(3), 2);
        }
    }

    #[test]
    #[should_panic(expected = "labels are below valid_vocab")]
    fn a_label_in_the_masked_vocabulary_is_a_programming_error() {
        let values = [0.0f32; 4];
        let matrix = Matrix { rows: 2, cols: 2, values: Values::F32(&values) };
        HeadInputs::plain(matrix, matrix, &[0, 1], 1).check();
    }
}
