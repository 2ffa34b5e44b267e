//! What a recorded sum really is a sum of: the coefficient of each addend, solved from the data.

use backtape::index_box::IndexBox;
use rayon::prelude::*;

use super::domain::Addend;
use super::judge::Judge;
use super::sums::SumOf;
use crate::assemble::{pieces, pieces_of};

/// A coefficient within such a distance of a simple number is tried as that number, the nearest
/// distance first. It decides nothing by itself: the walker judges the sum with the simple numbers.
pub(super) const NEAR: [f64; 3] = [0.02, 0.1, 0.3];
/// Addends up to which all elements are read: more are solved from fewer elements.
const FEW: usize = 64;
/// Multiplications of the scalar products of more addends.
const MOST_PRODUCTS: u64 = 1 << 32;
/// Parts of a tensor, evenly spread over it, that are read at once then.
const SPREAD: usize = 16;
/// Elements of the sum that are not zero, for each addend, with which the solution is well determined.
const ENOUGH: usize = 16;
/// Addends whose scalar products leave less than this of their energy are not told apart.
const SINGULAR: f64 = 1e-9;

/// The least-squares solution of a sum by its addends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Coefficients {
    /// Of each addend; 0 for one that others already make.
    pub values: Vec<f64>,
    /// The share of the sum's energy that no combination of the addends gives.
    pub left: f64,
    /// Whether each addend can be told from the others.
    pub is_unique: bool,
}

/// Scalar products of the addends with each other and with the sum.
#[derive(Clone, Default)]
pub(super) struct Products {
    /// `[addends, addends]`
    gram: Vec<f64>,
    /// `[addends]`
    with_sum: Vec<f64>,
    sum: f64,
    /// Elements of the sum that are not zero.
    reached: usize,
}

impl Judge<'_> {
    /// The scalar products of a sum's addends; the weights of `of` are not used.
    pub(super) fn scalar_products(&self, of: &SumOf<'_>) -> Result<Products, String> {
        let count = of.addends.len();
        let mut total = Products::none(count);
        for parts in batches(of.place, count) {
            let products: Vec<Result<Products, String>> =
                parts.par_iter().map(|part| self.products(of, part)).collect();
            for part in products {
                total.add(&part?);
            }
            if count > FEW && total.reached >= ENOUGH * count {
                break;
            }
        }
        Ok(total)
    }

    fn products(&self, of: &SumOf<'_>, part: &IndexBox) -> Result<Products, String> {
        let inventory = self.inventory;
        let sum = inventory.read_box(of.key, of.rank, part)?;
        let read = |addend: &Addend| inventory.read_addend(addend, part);
        let addends = of.addends.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        Ok(Products {
            gram: addends.iter().flat_map(|a| addends.iter().map(move |b| dot(a, b))).collect(),
            with_sum: addends.iter().map(|a| dot(a, &sum)).collect(),
            sum: dot(&sum, &sum),
            reached: sum.iter().filter(|x| **x != 0.0).count(),
        })
    }
}

/// The parts of a sum in the order in which they are read: all at once, or of many addends a few
/// that are spread over it evenly, and then those beside them.
fn batches(place: &IndexBox, count: usize) -> Vec<Vec<IndexBox>> {
    if count <= FEW {
        return vec![pieces(place, 8)];
    }
    let most = MOST_PRODUCTS / (count * count * SPREAD) as u64;
    let parts = pieces_of(place, most.max(ENOUGH as u64));
    let stride = parts.len().div_ceil(SPREAD);
    let batch = |first: usize| parts.iter().skip(first).step_by(stride).cloned().collect();
    (0..stride).map(batch).collect()
}

impl Products {
    fn none(count: usize) -> Products {
        Products {
            gram: vec![0.0; count * count],
            with_sum: vec![0.0; count],
            sum: 0.0,
            reached: 0,
        }
    }

    fn add(&mut self, other: &Products) {
        self.gram.iter_mut().zip(&other.gram).for_each(|(sum, x)| *sum += x);
        self.with_sum.iter_mut().zip(&other.with_sum).for_each(|(sum, x)| *sum += x);
        self.sum += other.sum;
        self.reached += other.reached;
    }

    /// Solves for the coefficients, where addends of one group have the same: a group for each
    /// addend, numbered from 0.
    pub(super) fn solve_by(&self, groups: &[usize]) -> Coefficients {
        let (count, all) = (groups.iter().max().map_or(0, |most| most + 1), groups.len());
        let mut joined = Products { sum: self.sum, ..Products::none(count) };
        for (row, group) in groups.iter().enumerate() {
            joined.with_sum[*group] += self.with_sum[row];
            for (column, other) in groups.iter().enumerate() {
                joined.gram[group * count + other] += self.gram[row * all + column];
            }
        }
        let solved = joined.solve();
        let values = groups.iter().map(|group| solved.values[*group]).collect();
        Coefficients { values, ..solved }
    }

    /// Gauss-Jordan elimination with the largest pivot that is left; an addend that the chosen ones
    /// already make gets the coefficient 0.
    fn solve(self) -> Coefficients {
        let count = self.with_sum.len();
        let (mut matrix, mut right) = (self.gram.clone(), self.with_sum.clone());
        let (mut pivots, mut is_unique) = (Vec::new(), true);
        let mut open: Vec<usize> = (0..count).collect();
        while let Some(place) = (0..open.len()).max_by(|a, b| {
            let size = |at: &usize| {
                let at = open[*at];
                matrix[at * count + at] / self.gram[at * count + at].max(f64::MIN_POSITIVE)
            };
            size(a).total_cmp(&size(b))
        }) {
            let pivot = open.swap_remove(place);
            let size = matrix[pivot * count + pivot];
            if !(size > SINGULAR * self.gram[pivot * count + pivot]) {
                is_unique = false;
                continue;
            }
            pivots.push(pivot);
            for row in (0..count).filter(|row| *row != pivot) {
                let factor = matrix[row * count + pivot] / size;
                (0..count)
                    .for_each(|at| matrix[row * count + at] -= factor * matrix[pivot * count + at]);
                right[row] -= factor * right[pivot];
            }
        }
        let mut values = vec![0.0; count];
        pivots.iter().for_each(|at| values[*at] = right[*at] / matrix[at * count + at]);
        let made: f64 = values.iter().zip(&self.with_sum).map(|(value, dot)| value * dot).sum();
        let left = if self.sum > 0.0 { ((self.sum - made) / self.sum).max(0.0) } else { 0.0 };
        Coefficients { values, left, is_unique }
    }
}

impl Coefficients {
    /// The coefficients with each that is as near as this to one of `simple`, or to 0, replaced by
    /// it.
    pub(super) fn simplified(&self, simple: &[f64], distance: f64) -> Vec<f64> {
        let largest = self.values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let nearest = |x: f64| {
            if x.abs() <= distance * largest {
                return 0.0;
            }
            let near = simple.iter().copied().filter(|s| (x - s).abs() <= distance * s.abs());
            near.min_by(|a, b| (x - a).abs().total_cmp(&(x - b).abs())).unwrap_or(x)
        };
        self.values.iter().map(|x| nearest(*x)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(x, y)| x * y).sum()
    }

    fn solved(addends: &[Vec<f64>], sum: &[f64]) -> Coefficients {
        let gram = addends.iter().flat_map(|a| addends.iter().map(move |b| dot(a, b)));
        let with_sum = addends.iter().map(|a| dot(a, sum)).collect();
        Products { gram: gram.collect(), with_sum, sum: dot(sum, sum), reached: sum.len() }.solve()
    }

    #[test]
    fn the_coefficients_of_a_sum_are_solved_and_what_no_addend_makes_is_left() {
        let mut draw = Draw::new(5);
        let addends: Vec<Vec<f64>> =
            (0..4).map(|_| (0..200).map(|_| draw.normal()).collect()).collect();
        let weights = [0.0, 2.0, 1.0, 0.25];
        let sum: Vec<f64> =
            (0..200).map(|at| (0..4).map(|a| weights[a] * addends[a][at]).sum()).collect();
        let found = solved(&addends, &sum);
        assert!(found.is_unique && found.left < 1e-12, "{found:?}");
        let off = found.values.iter().zip(weights).map(|(x, w)| (x - w).abs());
        assert!(off.fold(0.0, f64::max) < 1e-9, "{found:?}");
        assert_eq!(found.simplified(&[1.0, 2.0, 0.25], NEAR[0]), weights);
        let of = |draw: &[Vec<f64>], sum: &[f64]| {
            let gram = draw.iter().flat_map(|a| draw.iter().map(move |b| dot(a, b))).collect();
            Products {
                gram,
                with_sum: draw.iter().map(|a| dot(a, sum)).collect(),
                sum: dot(sum, sum),
                reached: sum.len(),
            }
        };
        let pairs: Vec<f64> = (0..200)
            .map(|at| 3.0 * (addends[0][at] + addends[1][at]) + addends[2][at] + addends[3][at])
            .collect();
        let grouped = of(&addends, &pairs).solve_by(&[0, 0, 1, 1]).simplified(&[1.0, 3.0], NEAR[0]);
        assert_eq!(grouped, [3.0, 3.0, 1.0, 1.0]);
        let other: Vec<f64> = (0..200).map(|_| draw.normal()).collect();
        assert!(solved(&addends, &other).left > 0.9);
    }

    #[test]
    fn equal_addends_are_not_told_apart() {
        let mut draw = Draw::new(6);
        let one: Vec<f64> = (0..50).map(|_| draw.normal()).collect();
        let sum: Vec<f64> = one.iter().map(|x| 2.0 * x).collect();
        let found = solved(&[one.clone(), one], &sum);
        assert!(!found.is_unique && found.left < 1e-12);
        assert!((found.values.iter().sum::<f64>() - 2.0).abs() < 1e-9);
    }
}
