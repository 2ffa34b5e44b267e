//! Boxes: half-open index ranges, one per dimension, and what a set of them covers.

use serde::{Deserialize, Serialize};

/// A box inside a global tensor: `[start, end)` per dimension. A scalar's box
/// has no dimension and one element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IndexBox(pub Vec<(u64, u64)>);

/// Why a box does not fit its tensor.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("box {found} does not fit in a tensor of shape {shape:?}")]
pub struct BoxError {
    /// The box as it was given.
    pub found: IndexBox,
    /// The global shape it should lie in.
    pub shape: Vec<u64>,
}

impl IndexBox {
    /// The box that is the whole tensor.
    pub fn whole(shape: &[u64]) -> IndexBox {
        IndexBox(shape.iter().map(|&n| (0, n)).collect())
    }

    /// The box of shape `extent` that starts at `offsets`; refuses one that
    /// leaves the global shape, also when the sum would overflow.
    pub fn at(offsets: &[u64], extent: &[u64], shape: &[u64]) -> Result<IndexBox, BoxError> {
        let ends = offsets.iter().zip(extent).map(|(&o, &n)| (o, o.saturating_add(n)));
        let found = IndexBox(ends.collect());
        if offsets.len() != extent.len() {
            return Err(BoxError { found, shape: shape.to_vec() });
        }
        found.check(shape)?;
        Ok(found)
    }

    /// Refuses a box of another rank, inverted, or outside the shape.
    pub fn check(&self, shape: &[u64]) -> Result<(), BoxError> {
        let inside = self.0.len() == shape.len()
            && self.0.iter().zip(shape).all(|(&(lo, hi), &n)| lo <= hi && hi <= n);
        if inside { Ok(()) } else { Err(BoxError { found: self.clone(), shape: shape.to_vec() }) }
    }

    /// Number of elements per dimension.
    pub fn extent(&self) -> Vec<u64> {
        self.0.iter().map(|&(lo, hi)| hi - lo).collect()
    }

    /// Number of elements; `None` when it overflows.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(1u64, |n, &(lo, hi)| n.checked_mul(hi.checked_sub(lo)?))
    }

    /// The part that two boxes share, when they share any element.
    pub fn intersection(&self, other: &IndexBox) -> Option<IndexBox> {
        let ranges = self.0.iter().zip(&other.0).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
        let both = IndexBox(ranges.collect());
        both.0.iter().all(|(lo, hi)| lo < hi).then_some(both)
    }

    /// Cuts `hole` out of this box: up to two slabs per dimension, disjoint,
    /// that together with the intersection make up this box again.
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

/// What a set of boxes leaves uncovered of a tensor: empty when it is all there.
pub fn gaps<'a>(shape: &[u64], boxes: impl IntoIterator<Item = &'a IndexBox>) -> Vec<IndexBox> {
    let whole = IndexBox::whole(shape);
    if whole.elements() == Some(0) {
        return Vec::new();
    }
    let mut open = vec![whole];
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
            let found = gaps(&shape, &boxes);
            for i in 0..4 { for j in 0..5 { for k in 0..3 {
                let point = IndexBox(vec![(i, i + 1), (j, j + 1), (k, k + 1)]);
                let covered = boxes.iter().any(|b| b.intersection(&point).is_some());
                let open = found.iter().filter(|g| g.intersection(&point).is_some()).count();
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
