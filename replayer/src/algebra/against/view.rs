//! A parameter of one run as the other run holds it: whole, with its dimensions exchanged, in
//! another shape, or joined from several.

use std::fmt::{Display, Formatter};

/// What stands for a parameter in one of two runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum View {
    /// A parameter by its name, as it is.
    Whole(String),
    /// The dimensions in another order: dimension `i` is dimension `order[i]` of `of`.
    Permuted {
        /// What is permuted.
        of: Box<View>,
        /// Of each dimension, which it is in `of`; empty for the two of a matrix, exchanged.
        order: Vec<usize>,
    },
    /// The same elements in the same order, in another shape.
    Reshaped {
        /// What is reshaped.
        of: Box<View>,
        /// The shape.
        shape: Vec<u64>,
    },
    /// Several, one behind the other along a dimension.
    Joined {
        /// What is joined, in order.
        parts: Vec<View>,
        /// Along which dimension.
        dim: usize,
        /// In so many blocks of each in turn, as a fused projection has them head by head.
        blocks: u64,
    },
}

/// A tensor of a view: its shape and its elements, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Values {
    pub(super) shape: Vec<u64>,
    pub(super) of: Vec<f64>,
}

impl View {
    /// The transposed matrix.
    pub(super) fn transposed(self) -> View {
        View::Permuted { of: Box::new(self), order: Vec::new() }
    }

    /// The names in it, in order.
    pub(super) fn names(&self) -> Vec<&str> {
        match self {
            View::Whole(name) => vec![name],
            View::Permuted { of, .. } | View::Reshaped { of, .. } => of.names(),
            View::Joined { parts, .. } => parts.iter().flat_map(View::names).collect(),
        }
    }

    /// The same with other names.
    pub(super) fn renamed(&self, name: &dyn Fn(&str) -> String) -> View {
        let of = |of: &View| Box::new(of.renamed(name));
        match self {
            View::Whole(own) => View::Whole(name(own)),
            View::Permuted { of: own, order } => {
                View::Permuted { of: of(own), order: order.clone() }
            }
            View::Reshaped { of: own, shape } => {
                View::Reshaped { of: of(own), shape: shape.clone() }
            }
            View::Joined { parts, dim, blocks } => View::Joined {
                parts: parts.iter().map(|part| part.renamed(name)).collect(),
                dim: *dim,
                blocks: *blocks,
            },
        }
    }

    /// Its shape where parameters have these; or why it has none.
    pub(super) fn shape(
        &self,
        shape_of: &dyn Fn(&str) -> Option<Vec<u64>>,
    ) -> Result<Vec<u64>, String> {
        match self {
            View::Whole(name) => {
                shape_of(name).ok_or_else(|| format!("no shape of {name} is recorded"))
            }
            View::Permuted { of, order } => {
                let shape = of.shape(shape_of)?;
                let order = self.order(order, shape.len())?;
                Ok(order.iter().map(|at| shape[*at]).collect())
            }
            View::Reshaped { of, shape } => {
                let own = of.shape(shape_of)?;
                let count = |shape: &[u64]| shape.iter().product::<u64>();
                match count(&own) == count(shape) {
                    true => Ok(shape.clone()),
                    false => Err(format!("{of} has the shape {own:?}, which is not {shape:?}")),
                }
            }
            View::Joined { parts, dim, blocks } => {
                self.joined_shape(parts, *dim, *blocks, shape_of)
            }
        }
    }

    fn order(&self, order: &[usize], dimensions: usize) -> Result<Vec<usize>, String> {
        if order.is_empty() && dimensions == 2 {
            return Ok(vec![1, 0]);
        }
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        match sorted.iter().copied().eq(0..dimensions) {
            true => Ok(order.to_vec()),
            false => Err(format!("{self} is of a tensor of {dimensions} dimensions")),
        }
    }

    fn joined_shape(
        &self,
        parts: &[View],
        dim: usize,
        blocks: u64,
        shape_of: &dyn Fn(&str) -> Option<Vec<u64>>,
    ) -> Result<Vec<u64>, String> {
        let mut joined: Option<Vec<u64>> = None;
        for part in parts {
            let shape = part.shape(shape_of)?;
            let Some(extent) = shape.get(dim).copied() else {
                return Err(format!("{part} has the shape {shape:?}, and no dimension {dim}"));
            };
            if blocks == 0 || extent % blocks != 0 {
                return Err(format!(
                    "{part} has the shape {shape:?}, which has no {blocks} blocks"
                ));
            }
            let Some(whole) = &mut joined else {
                joined = Some(shape);
                continue;
            };
            let fits = |(at, (a, b)): (usize, (&u64, &u64))| at == dim || a == b;
            if whole.len() != shape.len() || !whole.iter().zip(&shape).enumerate().all(fits) {
                return Err(format!(
                    "{part} has the shape {shape:?}, which does not fit {whole:?}"
                ));
            }
            whole[dim] += extent;
        }
        joined.ok_or_else(|| format!("{self} joins nothing"))
    }

    /// Its elements, from those of parameters.
    pub(super) fn values(
        &self,
        read: &dyn Fn(&str) -> Result<Values, String>,
    ) -> Result<Values, String> {
        match self {
            View::Whole(name) => read(name),
            View::Permuted { of, order } => {
                let values = of.values(read)?;
                Ok(permuted(&values, &self.order(order, values.shape.len())?))
            }
            View::Reshaped { of, shape } => {
                Ok(Values { shape: shape.clone(), of: of.values(read)?.of })
            }
            View::Joined { parts, dim, blocks } => {
                let parts = parts.iter().map(|part| part.values(read));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                Ok(joined(&parts, *dim, *blocks))
            }
        }
    }
}

/// The elements with the dimensions in another order.
pub(super) fn permuted(values: &Values, order: &[usize]) -> Values {
    let mut strides = vec![1u64; values.shape.len()];
    for at in (0..strides.len().saturating_sub(1)).rev() {
        strides[at] = strides[at + 1] * values.shape[at + 1];
    }
    let shape: Vec<u64> = order.iter().map(|at| values.shape[*at]).collect();
    let steps: Vec<u64> = order.iter().map(|at| strides[*at]).collect();
    let (mut index, mut from) = (vec![0u64; shape.len()], 0u64);
    let mut of = Vec::with_capacity(values.of.len());
    for _ in 0..values.of.len() {
        of.push(values.of[from as usize]);
        // The last dimension counts up, and carries.
        for at in (0..shape.len()).rev() {
            index[at] += 1;
            from += steps[at];
            if index[at] < shape[at] {
                break;
            }
            from -= steps[at] * shape[at];
            index[at] = 0;
        }
    }
    Values { shape, of }
}

fn joined(parts: &[Values], dim: usize, blocks: u64) -> Values {
    let mut shape = parts[0].shape.clone();
    shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
    let outer: u64 = shape[..dim].iter().product();
    let inner: u64 = shape[dim + 1..].iter().product();
    let mut of = Vec::with_capacity(shape.iter().product::<u64>() as usize);
    for row in 0..outer {
        for block in 0..blocks {
            for part in parts {
                let run = part.shape[dim] / blocks * inner;
                let start = (row * part.shape[dim] * inner + block * run) as usize;
                of.extend_from_slice(&part.of[start..start + run as usize]);
            }
        }
    }
    Values { shape, of }
}

impl Display for View {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let words =
            |numbers: &mut dyn Iterator<Item = String>| numbers.collect::<Vec<_>>().join(" ");
        match self {
            View::Whole(name) => f.write_str(name),
            View::Permuted { of, order } if order.is_empty() => write!(f, "{of}.T"),
            View::Permuted { of, order } => {
                write!(f, "permute({of}; {})", words(&mut order.iter().map(usize::to_string)))
            }
            View::Reshaped { of, shape } => {
                write!(f, "reshape({of}; {})", words(&mut shape.iter().map(u64::to_string)))
            }
            View::Joined { parts, dim, blocks } => {
                let parts: Vec<String> = parts.iter().map(View::to_string).collect();
                write!(f, "cat({}; dim {dim}", parts.join(", "))?;
                match blocks {
                    1 => f.write_str(")"),
                    blocks => write!(f, "; blocks {blocks})"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(shape: &[u64], from: f64) -> Values {
        let count = shape.iter().product::<u64>();
        Values { shape: shape.to_vec(), of: (0..count).map(|at| from + at as f64).collect() }
    }

    #[test]
    fn dimensions_are_exchanged_and_parts_are_joined_along_any() {
        let transposed = permuted(&counted(&[2, 3], 0.0), &[1, 0]);
        assert_eq!(transposed.of, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        let kernel = permuted(&counted(&[2, 3, 4, 5], 0.0), &[3, 2, 0, 1]);
        assert_eq!(kernel.shape, [5, 4, 2, 3]);
        assert_eq!(kernel.of[..3], [0.0, 20.0, 40.0]);
        let (a, b) = (counted(&[2, 2], 0.0), counted(&[2, 1], 10.0));
        let rows = joined(&[a.clone(), a.clone()], 0, 1);
        assert_eq!((rows.shape, rows.of[4]), (vec![4, 2], 0.0));
        let columns = joined(&[a.clone(), b], 1, 1);
        assert_eq!(columns.of, [0.0, 1.0, 10.0, 2.0, 3.0, 11.0]);
        // Head by head: the first row of each, then the second of each.
        let heads = joined(&[a.clone(), counted(&[2, 2], 20.0)], 0, 2);
        assert_eq!(heads.of, [0.0, 1.0, 20.0, 21.0, 2.0, 3.0, 22.0, 23.0]);
    }

    #[test]
    fn a_view_that_does_not_fit_says_why() {
        let shapes = |name: &str| (name != "x").then(|| vec![4, if name == "b" { 3 } else { 2 }]);
        let whole = |name: &str| View::Whole(name.into());
        let cat = |parts: &[&str], dim, blocks| View::Joined {
            parts: parts.iter().map(|name| whole(name)).collect(),
            dim,
            blocks,
        };
        assert_eq!(cat(&["a", "b"], 1, 1).shape(&shapes), Ok(vec![4, 5]));
        assert_eq!(whole("b").transposed().shape(&shapes), Ok(vec![3, 4]));
        for (view, why) in [
            (whole("x"), "no shape of x"),
            (cat(&["a", "b"], 0, 1), "does not fit [4, 2]"),
            (cat(&["a", "b"], 2, 1), "no dimension 2"),
            (cat(&["a", "a"], 0, 3), "no 3 blocks"),
            (View::Reshaped { of: Box::new(whole("a")), shape: vec![3] }, "which is not [3]"),
            (View::Permuted { of: Box::new(whole("a")), order: vec![0, 0] }, "2 dimensions"),
        ] {
            let said = view.shape(&shapes).unwrap_err();
            assert!(said.contains(why), "{view}: {said}");
        }
    }
}
