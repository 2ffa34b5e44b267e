//! How far one tensor of two runs is apart.

use serde::Serialize;

use super::view::Values;

/// Sums over the elements of a tensor in both runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Apart {
    /// Elements compared.
    pub(super) elements: u64,
    /// Elements that are not the same number.
    pub(super) unequal: u64,
    /// Elements that are no finite number in one run, or another one in the other.
    pub(super) nonfinite: u64,
    /// `Σ a²`, of this run.
    pub(super) ours: f64,
    /// `Σ b²`, of the other.
    pub(super) theirs: f64,
    /// `Σ a b`
    dot: f64,
    /// `Σ (a - b)²`
    pub(super) square: f64,
    /// The element that is furthest apart.
    pub(super) worst: Option<Worst>,
}

/// One element of both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Its index.
    pub index: Vec<u64>,
    /// In this run.
    pub this: f64,
    /// In the other run.
    pub other: f64,
}

impl Apart {
    /// Compares two tensors of one shape.
    pub(super) fn of(ours: &Values, theirs: &Values) -> Apart {
        let elements = ours.of.len() as u64;
        let (mut apart, mut worst) = (Apart { elements, ..Apart::default() }, None);
        for (at, (a, b)) in ours.of.iter().zip(&theirs.of).enumerate() {
            let is_same = a == b || (a.is_nan() && b.is_nan());
            apart.unequal += u64::from(!is_same);
            if !(a.is_finite() && b.is_finite()) {
                apart.nonfinite += u64::from(!is_same);
                worst = if is_same { worst } else { Some((at, f64::INFINITY)) };
                continue;
            }
            apart.ours += a * a;
            apart.theirs += b * b;
            apart.dot += a * b;
            apart.square += (a - b) * (a - b);
            if !is_same && worst.is_none_or(|(_, most)| (a - b).abs() > most) {
                worst = Some((at, (a - b).abs()));
            }
        }
        apart.worst = worst.map(|(at, _)| Worst {
            index: index(&ours.shape, at as u64),
            this: ours.of[at],
            other: theirs.of[at],
        });
        apart
    }

    pub(super) fn is_equal(&self) -> bool {
        self.unequal == 0
    }

    /// The larger sum of squares of both.
    pub(super) fn energy(&self) -> f64 {
        self.ours.max(self.theirs)
    }

    /// The difference as a share of the larger norm, or of the root of `least` where that is
    /// larger; NaN where an element is no number in one.
    pub(super) fn relative(&self, least: f64) -> f64 {
        match (self.nonfinite, self.square) {
            (0, 0.0) => 0.0,
            (0, square) => (square / self.energy().max(least)).sqrt(),
            _ => f64::NAN,
        }
    }

    /// This run over the other, where one number is the whole difference: what it leaves is at most
    /// so large a share of the norm.
    pub(super) fn factor(&self, floor: f64) -> Option<f64> {
        if self.nonfinite > 0 || !(self.theirs > 0.0 && self.ours > 0.0) {
            return None;
        }
        let factor = self.dot / self.theirs;
        let left = self.ours - factor * self.dot;
        (left.max(0.0) <= (floor * floor).max(RESOLVED) * self.ours).then_some(factor)
    }
}

/// What differences of sums of squares in f64 resolve, as a share of them.
const RESOLVED: f64 = 1e-13;

fn index(shape: &[u64], flat: u64) -> Vec<u64> {
    let mut left = flat;
    let mut index: Vec<u64> = Vec::new();
    for extent in shape.iter().rev() {
        index.push(left % extent.max(&1));
        left /= extent.max(&1);
    }
    index.reverse();
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(of: &[f64]) -> Values {
        Values { shape: vec![1, of.len() as u64], of: of.to_vec() }
    }

    #[test]
    fn one_factor_is_told_and_noise_beyond_the_floor_has_none() {
        let b = row(&[1.0, -2.0, 0.5]);
        let twice = Apart::of(&row(&[2.0, -4.0, 1.0]), &b);
        assert_eq!((twice.factor(1e-6), twice.unequal), (Some(2.0), 3));
        let worst = twice.worst.clone().unwrap();
        assert_eq!((worst.index, worst.this, worst.other), (vec![0, 1], -4.0, -2.0));
        let noisy = Apart::of(&row(&[2.0, -4.0, 1.01]), &b);
        assert_eq!(noisy.factor(1e-6), None);
        assert!(noisy.factor(1e-2).is_some());
        assert!((twice.relative(84.0) - twice.relative(0.0) / 2.0).abs() < 1e-12);
        assert!(Apart::of(&b, &b).is_equal() && Apart::of(&b, &b).relative(0.0) == 0.0);
    }

    #[test]
    fn a_number_that_is_none_in_one_run_is_apart_and_the_same_in_both_is_not() {
        let nan = Apart::of(&row(&[f64::NAN, 1.0]), &row(&[0.0, 1.0]));
        assert!(nan.relative(0.0).is_nan() && nan.factor(1.0).is_none() && nan.nonfinite == 1);
        assert!(nan.worst.unwrap().this.is_nan());
        let both = row(&[f64::NAN, f64::INFINITY]);
        assert!(Apart::of(&both, &both).is_equal());
    }
}
