//! The position-sensitive fingerprint of a tensor, which shows that bytes are at the place where
//! they belong.
//!
//! A byte hash cannot tell two swapped shards apart. The fingerprint mixes each
//! element's bits with its *global* index, and sums over elements modulo 2³² in
//! two lanes. The sum does not depend on how the tensor was cut: the sum over
//! its shards is the fingerprint of the whole. The framework computes it on the
//! sharded array with its own idea of global indices (python/backtape/jax_arrays.py);
//! this module computes it again from the box that the record claims.
//!
//! For the element with bits `w` at `(i_0, …, i_{n-1})`, all arithmetic modulo 2³²:
//!
//! ```text
//! h    = SEED;  h = fmix(h + (i_d + 1)·STRIDE)        for d = 0 … n-1
//! a    = fmix(h ^ w·WORD);  b = fmix(a ^ LANE)
//! ```
//!
//! `fmix` is murmur3's 32-bit finaliser. An element wider than 32 bits counts as
//! one more dimension of 32-bit words, least significant first; a narrower one
//! is zero-extended. 32-bit arithmetic because that is what jit has without x64.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::index_box::IndexBox;

const SEED: u32 = 0x9747_b28c;
const STRIDE: u32 = 0x9e37_79b1;
const WORD: u32 = 0x85eb_ca77;
const LANE: u32 = 0xc2b2_ae3d;

/// Two 32-bit sums over the elements of a box or of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(pub u32, pub u32);

impl Fingerprint {
    /// The fingerprint of two disjoint sets of elements together.
    #[must_use]
    pub fn plus(self, other: Fingerprint) -> Fingerprint {
        Fingerprint(self.0.wrapping_add(other.0), self.1.wrapping_add(other.1))
    }

    /// The fingerprint of `bytes`, the row-major contents of `place` inside its
    /// global tensor. `bytes.len()` must be the box's size in bytes.
    pub fn of(dtype: Dtype, place: &IndexBox, bytes: &[u8]) -> Fingerprint {
        let mut ranges = place.0.clone();
        if dtype.width() == 8 {
            ranges.push((0, 2));
        }
        let word = dtype.width().min(4);
        let Some(((lo, hi), leading)) = ranges.pop().map(|last| (last, ranges)) else {
            return row(bytes, word, |_| SEED);
        };
        let leading: Vec<Vec<u64>> = leading.iter().map(|&(lo, hi)| (lo..hi).collect()).collect();
        rows(&leading, (hi - lo) as usize, bytes, word, |h, chunk| run(chunk, word, h, lo as u32))
    }

    /// Cuts a box into two, so that two threads can fingerprint them: of the box's bytes those
    /// before the returned offset belong to the first, the others to the second, and the first has
    /// about this share of them. None if every dimension has at most one index.
    pub fn parts(
        dtype: Dtype,
        place: &IndexBox,
        share: f64,
    ) -> Option<(IndexBox, IndexBox, usize)> {
        // The outermost dimension with several indices is cut: then the bytes of each part are
        // contiguous.
        let dim = place.0.iter().position(|&(lo, hi)| hi - lo > 1)?;
        let (lo, hi) = place.0[dim];
        let middle = lo + (((hi - lo) as f64 * share) as u64).clamp(1, hi - lo - 1);
        let (mut first, mut second) = (place.clone(), place.clone());
        first.0[dim].1 = middle;
        second.0[dim].0 = middle;
        let bytes = first.elements()?.checked_mul(dtype.width() as u64)?;
        Some((first, second, usize::try_from(bytes).ok()?))
    }

    /// The fingerprint of `bytes`, a row-major array whose element `(j_0, …)` is element
    /// `(indices[0][j_0], …)` of the global tensor: for frameworks that report which indices a
    /// shard holds. `bytes.len()` must be the product of the lists' lengths times the width of an
    /// element.
    pub fn at(dtype: Dtype, indices: &[Vec<u64>], bytes: &[u8]) -> Fingerprint {
        let mut lists = indices.to_vec();
        if dtype.width() == 8 {
            lists.push(vec![0, 1]);
        }
        let word = dtype.width().min(4);
        let Some(last) = lists.pop() else {
            return row(bytes, word, |_| SEED);
        };
        let last: Vec<u32> = last.into_iter().map(|i| i as u32).collect();
        rows(&lists, last.len(), bytes, word, |h, chunk| listed(chunk, word, h, &last))
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}{:08x}", self.0, self.1)
    }
}

#[inline(always)]
fn fmix(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

#[inline(always)]
fn step(h: u32, index: u32) -> u32 {
    fmix(h.wrapping_add(index.wrapping_add(1).wrapping_mul(STRIDE)))
}

fn position(index: &[u64]) -> u32 {
    index.iter().fold(SEED, |h, &i| step(h, i as u32))
}

/// The sum of `row(h, chunk)` over the rows of `length` elements; `h` is the mixed index of the
/// dimensions before the last.
#[inline(always)]
fn rows(
    leading: &[Vec<u64>],
    length: usize,
    bytes: &[u8],
    word: usize,
    row: impl Fn(u32, &[u8]) -> Fingerprint,
) -> Fingerprint {
    if length == 0 {
        return Fingerprint::default();
    }
    if leading.iter().any(Vec::is_empty) {
        return Fingerprint::default();
    }
    let mut counters = vec![0; leading.len()];
    let mut index: Vec<u64> = leading.iter().map(|list| list[0]).collect();
    let mut sum = Fingerprint::default();
    for chunk in bytes.chunks_exact(length * word) {
        sum = sum.plus(row(position(&index), chunk));
        for (dim, list) in leading.iter().enumerate().rev() {
            counters[dim] = (counters[dim] + 1) % list.len();
            index[dim] = list[counters[dim]];
            if counters[dim] > 0 {
                break;
            }
        }
    }
    sum
}

/// Compiles a function a second time for AVX2, which multiplies eight 32-bit integers in one
/// instruction where the baseline needs several for four: five times as fast, and the sums are the
/// same integers.
macro_rules! vectorised {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*), $body:expr) => {
        $(#[$doc])*
        fn $name($($arg: $type),*) -> Fingerprint {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn wide($($arg: $type),*) -> Fingerprint {
                    $body
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the feature it is compiled for was just detected.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body
        }
    };
}

vectorised!(
    /// The fingerprint of a row whose last indices are `lo`, `lo + 1`, …; `h` is the mixed index of
    /// the dimensions before the last.
    run(bytes: &[u8], word: usize, h: u32, lo: u32),
    row(bytes, word, |i| step(h, lo.wrapping_add(i as u32)))
);
vectorised!(
    /// The fingerprint of a row whose last indices are `last`.
    listed(bytes: &[u8], word: usize, h: u32, last: &[u32]),
    row(bytes, word, |i| step(h, last[i]))
);

/// The fingerprint of the elements of one row; `place` gives the mixed index of each.
#[inline(always)]
fn row(bytes: &[u8], word: usize, place: impl Fn(usize) -> u32) -> Fingerprint {
    match word {
        1 => words(bytes, place, |[byte]| u32::from(byte)),
        2 => words(bytes, place, |half| u32::from(u16::from_le_bytes(half))),
        _ => words(bytes, place, u32::from_le_bytes),
    }
}

/// The same, of elements of one width. A loop, as chained iterators are not sure to be inlined into
/// the function that is compiled for vectors, and then take ten times as long.
#[inline(always)]
fn words<const WIDTH: usize>(
    bytes: &[u8],
    place: impl Fn(usize) -> u32,
    read: impl Fn([u8; WIDTH]) -> u32,
) -> Fingerprint {
    let mut sum = Fingerprint::default();
    for (i, &word) in bytes.as_chunks::<WIDTH>().0.iter().enumerate() {
        let a = fmix(place(i) ^ read(word).wrapping_mul(WORD));
        sum = sum.plus(Fingerprint(a, fmix(a ^ LANE)));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(shape: &[u64]) -> IndexBox {
        IndexBox::whole(shape)
    }

    #[test]
    fn the_sum_over_shards_is_the_fingerprint_of_the_whole_however_it_is_cut() {
        let bytes: Vec<u8> = (0..6 * 10 * 2).map(|i| (i * 37 % 251) as u8).collect();
        let all = Fingerprint::of(Dtype::Bf16, &whole(&[6, 10]), &bytes);
        let cut = |ranges: Vec<(u64, u64)>| {
            let part = IndexBox(ranges);
            let mut out = Vec::new();
            for i in part.0[0].0..part.0[0].1 {
                let offset = |j: u64| ((i * 10 + j) * 2) as usize;
                out.extend(&bytes[offset(part.0[1].0)..offset(part.0[1].1)]);
            }
            Fingerprint::of(Dtype::Bf16, &part, &out)
        };
        let by_rows = cut(vec![(0, 2), (0, 10)]).plus(cut(vec![(2, 6), (0, 10)]));
        let by_columns = cut(vec![(0, 6), (0, 3)]).plus(cut(vec![(0, 6), (3, 10)]));
        assert_eq!(by_rows, all);
        assert_eq!(by_columns, all);
    }

    #[test]
    fn index_lists_give_what_the_box_gives_and_strided_rows_add_up_to_the_whole() {
        for (dtype, width) in [(Dtype::Bf16, 2), (Dtype::F64, 8)] {
            let row: usize = 5 * width;
            let bytes: Vec<u8> = (0..6 * row).map(|i| (i * 37 % 251) as u8).collect();
            let all = Fingerprint::of(dtype, &whole(&[6, 5]), &bytes);
            let columns: Vec<u64> = (0..5).collect();
            let fingerprint_of = |rows: &[u64]| {
                let row_bytes = |&r: &u64| &bytes[r as usize * row..][..row];
                let rows_held: Vec<u8> = rows.iter().flat_map(row_bytes).copied().collect();
                Fingerprint::at(dtype, &[rows.to_vec(), columns.clone()], &rows_held)
            };
            assert_eq!(fingerprint_of(&[0, 1, 2, 3, 4, 5]), all);
            assert_eq!(fingerprint_of(&[0, 1, 4]).plus(fingerprint_of(&[2, 3, 5])), all);
            assert_ne!(fingerprint_of(&[0, 1, 2, 3, 5, 4]), Fingerprint::default());
        }
        let scalar = 7u32.to_le_bytes();
        let boxed = Fingerprint::of(Dtype::U32, &whole(&[]), &scalar);
        assert_eq!(Fingerprint::at(Dtype::U32, &[], &scalar), boxed);
    }

    /// Goal: the two definitions of a row, and boxes in parts, give the same sums.
    #[test]
    fn vectors_and_parts_give_what_one_element_after_the_other_gives() {
        let bytes: Vec<u8> = (0..16 * 3 * 67).map(|i| (i * 37 % 251) as u8).collect();
        for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            for shape in [vec![3, 67], vec![1, 3, 67], vec![201], vec![1], vec![2, 1]] {
                let place = IndexBox(shape.iter().map(|&size| (5, 5 + size)).collect());
                let elements = place.elements().unwrap() as usize;
                let bytes = &bytes[..elements * dtype.width()];
                let word = dtype.width().min(4);
                let naive =
                    (0..bytes.len() / word).fold(Fingerprint::default(), |sum, word_index| {
                        let mut index: Vec<u64> = place.0.iter().map(|&(lo, _)| lo).collect();
                        let (mut rest, low) = (
                            word_index * word / dtype.width(),
                            word_index % (dtype.width() / word),
                        );
                        for (dim, &size) in shape.iter().enumerate().rev() {
                            index[dim] += rest as u64 % size;
                            rest /= size as usize;
                        }
                        let tail = (dtype.width() == 8).then_some(low as u64);
                        let h = position(&index.into_iter().chain(tail).collect::<Vec<_>>());
                        sum.plus(row(&bytes[word_index * word..][..word], word, |_| h))
                    });
                assert_eq!(Fingerprint::of(dtype, &place, bytes), naive, "{dtype} {shape:?}");
                if let Some((first, second, offset)) = Fingerprint::parts(dtype, &place, 0.4) {
                    let first = Fingerprint::of(dtype, &first, &bytes[..offset]);
                    let both = first.plus(Fingerprint::of(dtype, &second, &bytes[offset..]));
                    assert_eq!(both, naive, "{dtype} {shape:?} in parts");
                } else {
                    assert_eq!(elements, 1);
                }
            }
        }
    }

    #[test]
    fn swapping_two_equal_sized_shards_changes_it() {
        let (a, b): (Vec<u8>, Vec<u8>) = ((0..40).collect(), (100..140).collect());
        let top = IndexBox(vec![(0, 2), (0, 5)]);
        let bottom = IndexBox(vec![(2, 4), (0, 5)]);
        let fingerprint =
            |place: &IndexBox, bytes: &[u8]| Fingerprint::of(Dtype::F32, place, bytes);
        assert_ne!(
            fingerprint(&top, &a).plus(fingerprint(&bottom, &b)),
            fingerprint(&top, &b).plus(fingerprint(&bottom, &a))
        );
    }

    /// The values that python/tests/test_fingerprint.py holds for JAX: the two
    /// definitions can only change together.
    #[test]
    fn known_values_tie_the_definition_to_the_one_inside_jit() {
        let ramp: Vec<u8> = (0u16..12).flat_map(|i| (i * 1000).to_le_bytes()).collect();
        let fingerprints = [
            Fingerprint::of(Dtype::Bf16, &whole(&[3, 4]), &ramp),
            Fingerprint::of(Dtype::F32, &whole(&[]), &1.5f32.to_le_bytes()),
            Fingerprint::of(Dtype::F64, &whole(&[2]), &ramp[..16]),
        ];
        let text: Vec<_> = fingerprints.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["ba525846ab4c17c3", "0b7bb7b0ec119ab4", "c8edd5c944923f1d"]);
    }
}
