//! Permutations in which a job may have put tokens: reversed, transposed, in the zigzag of context
//! parallelism, interleaved, rolled.

use super::token_runs::TokenRuns;

/// A permutation: row t holds the token that stood at `from[t]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// The permutation in words.
    pub name: String,
    /// The token that each row holds, `[T]`.
    pub from: Vec<usize>,
    /// Runs of tokens that the permutation maps to themselves.
    pub runs: Vec<Vec<usize>>,
}

/// Numbers of ranks that a sequence may have been cut over.
const PARTS: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// Every such permutation that moves a token, within the runs of each division. `batch`: number of
/// sequences and tokens of one, where there are several.
pub fn orders(tokens: usize, extents: &[TokenRuns], batch: Option<(usize, usize)>) -> Vec<Order> {
    let mut orders: Vec<Order> = Vec::new();
    let mut add = |name: String, from: Vec<usize>, runs: &[Vec<usize>]| {
        let moved = from.iter().enumerate().any(|(t, &from)| t != from);
        if moved && orders.iter().all(|order| order.from != from) {
            orders.push(Order { name, from, runs: runs.to_vec() });
        }
    };
    for extent in extents {
        let runs = &extent.runs[..];
        let over = |name: &str| format!("{name} in {}", extent.name);
        add(over("reversed"), within(tokens, extent, &|n, at| n - 1 - at), runs);
        for parts in PARTS {
            let fits = extent.runs.iter().all(|run| run.len() >= 2 * parts);
            if !fits {
                continue;
            }
            let zigzag: Vec<usize> = (0..parts).flat_map(|i| [i, 2 * parts - 1 - i]).collect();
            let name = format!("zigzag over {parts} ranks");
            for border in BORDERS {
                let forth = permuted(tokens, extent, &|n| pieces(n, 2 * parts, border, &zigzag));
                add(over(&format!("{name}, undone")), inverse(&forth), runs);
                add(over(&name), forth, runs);
            }
            let forth = permuted(tokens, extent, &|n| {
                (0..parts).flat_map(|i| (i..n).step_by(parts)).collect()
            });
            let name = format!("every {parts}th token together");
            add(over(&format!("{name}, undone")), inverse(&forth), runs);
            add(over(&name), forth, runs);
        }
    }
    if let Some((rows, length)) = batch.filter(|&(rows, length)| rows > 1 && length > 1) {
        let swapped: Vec<usize> =
            (0..length).flat_map(|s| (0..rows).map(move |b| b * length + s)).collect();
        let all = [(0..tokens).collect()];
        add("tokens and sequences transposed, undone".into(), inverse(&swapped), &all);
        add("tokens and sequences transposed".into(), swapped, &all);
    }
    for extent in extents {
        for by in [1isize, -1, 2, -2] {
            let name = format!("rolled by {by} in {}", extent.name);
            add(name, extent.rolled(tokens, by), &extent.runs);
        }
    }
    orders
}

/// The inverse permutation.
pub fn inverse(from: &[usize]) -> Vec<usize> {
    let mut back = vec![0; from.len()];
    from.iter().enumerate().for_each(|(to, &from)| back[from] = to);
    back
}

fn within(tokens: usize, extent: &TokenRuns, place: &dyn Fn(usize, usize) -> usize) -> Vec<usize> {
    permuted(tokens, extent, &|n| (0..n).map(|at| place(n, at)).collect())
}

/// Permutes each run; `order` gives the permutation for a run's length.
fn permuted(tokens: usize, extent: &TokenRuns, order: &dyn Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let mut from: Vec<usize> = (0..tokens).collect();
    for run in &extent.runs {
        for (&to, position) in run.iter().zip(order(run.len())) {
            from[to] = run[position];
        }
    }
    from
}

/// Where piece `i` starts when `n` places are cut into `count` pieces.
type Border = fn(i: usize, n: usize, count: usize) -> usize;

/// Three ways to cut into nearly equal pieces: lengths spread evenly, the first pieces longer by
/// one, the last piece shorter.
const BORDERS: [Border; 3] = [
    |i, n, count| i * n / count,
    |i, n, count| i * (n / count) + i.min(n % count),
    |i, n, count| (i * n.div_ceil(count)).min(n),
];

/// Cuts `n` places into pieces and joins the pieces in this order.
fn pieces(n: usize, count: usize, border: Border, order: &[usize]) -> Vec<usize> {
    order.iter().flat_map(|&i| border(i, n, count)..border(i + 1, n, count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_a_permutation_and_none_is_the_identity() {
        let extents = [
            TokenRuns::cut("rows".into(), &[(0..60).collect()], 20),
            TokenRuns::cut("all".into(), &[(0..60).collect()], 60),
        ];
        let all = orders(60, &extents, Some((3, 20)));
        assert!(all.len() > 10);
        for order in all {
            let mut sorted = order.from.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..60).collect::<Vec<_>>(), "{}", order.name);
            assert_ne!(sorted, order.from);
        }
    }

    #[test]
    fn two_ranks_zigzag_hold_first_and_last_quarter_and_the_two_between() {
        let all = TokenRuns { name: "all".into(), runs: vec![(0..8).collect()] };
        let all_orders = orders(8, &[all], None);
        let zigzag =
            all_orders.iter().find(|order| order.name == "zigzag over 2 ranks in all").unwrap();
        assert_eq!(zigzag.from, [0, 1, 6, 7, 2, 3, 4, 5]);
    }
}
