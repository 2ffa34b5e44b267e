//! Boxes (one half-open index range per dimension of a tensor) and which part of a tensor a set of
//! boxes covers.

use serde::{Deserialize, Serialize};

/// A box inside a global tensor: `[start, end)` per dimension. The box of a scalar has no
/// dimensions and one element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IndexBox(pub Vec<(u64, u64)>);

/// Why a box does not fit its tensor.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("box {index_box} does not fit in a tensor of shape {shape:?}")]
pub struct BoxError {
    /// The box that does not fit.
    pub index_box: IndexBox,
    /// The shape of the global tensor.
    pub shape: Vec<u64>,
}

impl IndexBox {
    /// The box that is the whole tensor.
    pub fn whole(shape: &[u64]) -> IndexBox {
        IndexBox(shape.iter().map(|&n| (0, n)).collect())
    }

    /// The box of shape `extent` that starts at `offsets`. Refuses a box that exceeds the global
    /// shape, also when offset plus extent overflows.
    pub fn at(offsets: &[u64], extent: &[u64], shape: &[u64]) -> Result<IndexBox, BoxError> {
        let ends = offsets.iter().zip(extent).map(|(&o, &n)| (o, o.saturating_add(n)));
        let index_box = IndexBox(ends.collect());
        if offsets.len() != extent.len() {
            return Err(BoxError { index_box, shape: shape.to_vec() });
        }
        index_box.check(shape)?;
        Ok(index_box)
    }

    /// Refuses a box that has another number of dimensions than the shape, a range that ends before
    /// it starts, or a range that exceeds the shape.
    pub fn check(&self, shape: &[u64]) -> Result<(), BoxError> {
        let inside = self.0.len() == shape.len()
            && self.0.iter().zip(shape).all(|(&(lo, hi), &n)| lo <= hi && hi <= n);
        if inside {
            Ok(())
        } else {
            Err(BoxError { index_box: self.clone(), shape: shape.to_vec() })
        }
    }

    /// Number of elements per dimension.
    pub fn extent(&self) -> Vec<u64> {
        self.0.iter().map(|&(lo, hi)| hi - lo).collect()
    }

    /// Number of elements; `None` if it overflows.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(1u64, |n, &(lo, hi)| n.checked_mul(hi.checked_sub(lo)?))
    }

    /// The box of the elements that both boxes hold, if there are any.
    pub fn intersection(&self, other: &IndexBox) -> Option<IndexBox> {
        let ranges = self.0.iter().zip(&other.0).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
        let both = IndexBox(ranges.collect());
        both.0.iter().all(|(lo, hi)| lo < hi).then_some(both)
    }

    /// This box without `hole`, as disjoint boxes, at most two per dimension. Together with the
    /// intersection of the two they make up this box.
    fn without(&self, hole: &IndexBox) -> Vec<IndexBox> {
        let Some(hole) = self.intersection(hole) else {
            return vec![self.clone()];
        };
        let mut rest = self.clone();
        let mut slabs = Vec::new();
        for dim in 0..self.0.len() {
            let (lo, hi) = rest.0[dim];
            let (cut_lo, cut_hi) = hole.0[dim];
            for (a, b) in [(lo, cut_lo), (cut_hi, hi)] {
                if a < b {
                    let mut slab = rest.clone();
                    slab.0[dim] = (a, b);
                    slabs.push(slab);
                }
            }
            rest.0[dim] = (cut_lo, cut_hi);
        }
        slabs
    }
}

impl std::fmt::Display for IndexBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranges: Vec<_> = self.0.iter().map(|(lo, hi)| format!("{lo}:{hi}")).collect();
        write!(f, "[{}]", ranges.join(", "))
    }
}

/// The parts of a tensor that no box of a set covers; empty if the set covers the whole tensor.
pub fn gaps<'a>(shape: &[u64], boxes: impl IntoIterator<Item = &'a IndexBox>) -> Vec<IndexBox> {
    gaps_in(&[IndexBox::whole(shape)], boxes)
}

/// The parts of some boxes, which share no element, that no box of a set covers.
pub fn gaps_in<'a>(
    wanted: &[IndexBox],
    boxes: impl IntoIterator<Item = &'a IndexBox>,
) -> Vec<IndexBox> {
    let has_elements = |own: &&IndexBox| own.elements() != Some(0);
    let mut open: Vec<IndexBox> = wanted.iter().filter(has_elements).cloned().collect();
    for cover in boxes {
        open = open.iter().flat_map(|gap| gap.without(cover)).collect();
    }
    open.sort();
    open
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn boxes_in(shape: [u64; 3]) -> impl Strategy<Value = IndexBox> {
        let range = |n: u64| (0..=n, 0..=n).prop_map(|(a, b)| (a.min(b), a.max(b)));
        (range(shape[0]), range(shape[1]), range(shape[2]))
            .prop_map(|(a, b, c)| IndexBox(vec![a, b, c]))
    }

    proptest! {
        /// Goal: gaps are exactly the elements no box holds. Method: against a
        /// bitmap, element by element.
        #[test]
        fn gaps_are_exactly_the_elements_that_no_box_holds(
            boxes in proptest::collection::vec(boxes_in([4, 5, 3]), 0..6)
        ) {
            let shape = [4u64, 5, 3];
            let index_box = gaps(&shape, &boxes);
            for i in 0..4 { for j in 0..5 { for k in 0..3 {
                let point = IndexBox(vec![(i, i + 1), (j, j + 1), (k, k + 1)]);
                let covered = boxes.iter().any(|b| b.intersection(&point).is_some());
                let open = index_box.iter().filter(|g| g.intersection(&point).is_some()).count();
                prop_assert_eq!(open, usize::from(!covered));
            }}}
        }
    }

    #[test]
    fn a_box_that_overflows_or_leaves_the_shape_is_refused() {
        assert!(IndexBox::at(&[u64::MAX], &[2], &[8]).is_err());
        assert!(IndexBox::at(&[7], &[2], &[8]).is_err());
        assert!(IndexBox::at(&[0, 0], &[8], &[8]).is_err());
        assert!(IndexBox::at(&[6], &[2], &[8]).is_ok());
    }

    #[test]
    fn a_scalar_is_covered_by_one_box_without_dimensions() {
        assert_eq!(gaps(&[], &[IndexBox(vec![])]), vec![]);
        assert_eq!(gaps(&[], []).len(), 1);
    }
}
