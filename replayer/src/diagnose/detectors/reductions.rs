//! Orders in which ranks or microbatches are added up in few bits, told from the bits of the sum:
//! one after the other from any of them on, in pairs, in groups, or in a ring, where each piece
//! of the sum begins at another rank.

use super::direct::distance;
use crate::kernels::round::Precision;

/// Addends up to which orders are looked for.
const MOST: usize = 32;
/// Elements that an order is tried on before all.
const SOME: usize = 512;
/// Share of the error that an order may leave: it makes the captured bits, or nearly all of them.
const LEFT: f64 = 1e-2;
/// Pieces of a ring at most, over its ranks: a bucket may end inside one.
const PIECES: usize = 4;

/// In which order addends meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One after the other, from one of them on, and on from the other end.
    From { first: usize, back: bool },
    /// Each with its neighbour, then pairs with pairs.
    Neighbours,
    /// Each with the one half of them further on, then those sums likewise.
    Halves,
    /// Groups of so many neighbours, or of every nth, each one after the other; then the groups.
    Groups { size: usize, apart: bool },
}

/// How every partial sum is rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Steps {
    precision: Precision,
    /// The bits beyond are cut off.
    truncates: bool,
    rounds_addends: bool,
}

/// A sum that was found to be in few bits.
pub struct Found {
    /// As it is made.
    pub values: Vec<f64>,
    /// How, in words.
    pub steps: Steps,
    /// The order, in words.
    pub order: String,
    /// Pieces that begin at ranks of their own.
    pub pieces: usize,
}

impl Steps {
    fn all() -> impl Iterator<Item = Steps> {
        let kinds = [(Precision::Bf16, false), (Precision::F16, false), (Precision::Bf16, true)];
        kinds.into_iter().flat_map(|(precision, truncates)| {
            [true, false].map(|rounds_addends| Steps { precision, truncates, rounds_addends })
        })
    }

    /// Their parameters, in words.
    pub fn words(&self) -> Vec<(&'static str, String)> {
        let cut = if self.truncates { ", the bits beyond cut off" } else { "" };
        vec![
            ("accumulator", format!("{}{cut}", self.precision.name())),
            ("addends rounded first", self.rounds_addends.to_string()),
        ]
    }

    fn round(&self, x: f64) -> f64 {
        match self.truncates {
            true => f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000)),
            // Additions are made in f32.
            false => self.precision.round64(Precision::F32.round64(x)),
        }
    }

    fn sum(&self, order: Order, addends: &[f64]) -> f64 {
        let add = |a: f64, b: f64| self.round(a + b);
        let n = addends.len();
        let x = |at: usize| match self.rounds_addends {
            true => self.round(addends[at]),
            false => addends[at],
        };
        // What an accumulator starts from is rounded when it is stored.
        let chain =
            |places: &mut dyn Iterator<Item = usize>| places.fold(0.0, |sum, at| add(sum, x(at)));
        match order {
            Order::From { first, back } => {
                let step = if back { n - 1 } else { 1 };
                chain(&mut (0..n).map(|i| (first + i * step) % n))
            }
            Order::Groups { size, apart } => {
                let groups = n / size;
                let place = |g: usize, i: usize| if apart { g + i * groups } else { g * size + i };
                (0..groups).fold(0.0, |sum, g| add(sum, chain(&mut (0..size).map(|i| place(g, i)))))
            }
            Order::Neighbours | Order::Halves => {
                let mut level: Vec<f64> = (0..n).map(|at| self.round(x(at))).collect();
                while level.len() > 1 {
                    level = match order {
                        Order::Halves => {
                            let half = level.len().div_ceil(2);
                            let pair = |i: usize| match level.get(i + half) {
                                Some(&other) => add(level[i], other),
                                None => level[i],
                            };
                            (0..half).map(pair).collect()
                        }
                        _ => {
                            let pair = |pair: &[f64]| match *pair {
                                [a, b] => add(a, b),
                                _ => pair[0],
                            };
                            level.chunks(2).map(pair).collect()
                        }
                    };
                }
                level.first().copied().unwrap_or(0.0)
            }
        }
    }
}

impl Order {
    fn rotations(n: usize) -> Vec<Order> {
        let of = |first| [false, true].map(|back| Order::From { first, back });
        (0..n).flat_map(of).collect()
    }

    fn all(n: usize) -> Vec<Order> {
        let mut all = Order::rotations(n);
        if n > 2 {
            all.extend([Order::Neighbours, Order::Halves]);
        }
        for size in (2..n).filter(|size| n.is_multiple_of(*size)) {
            all.extend([false, true].map(|apart| Order::Groups { size, apart }));
        }
        all
    }

    fn words(self, n: usize) -> String {
        match self {
            Order::From { first: 0, back: false } => "ascending".into(),
            Order::From { first, back: true } if first + 1 == n => "descending".into(),
            Order::From { first, back } => {
                let way = if back { "descending" } else { "ascending" };
                format!("{way} from the {}. on, the rest after it", first + 1)
            }
            Order::Neighbours => "each with its neighbour, then pairs with pairs".into(),
            Order::Halves => "each with the one half of them further on, and so on".into(),
            Order::Groups { size, apart: false } => format!("groups of {size} neighbours first"),
            Order::Groups { size, apart: true } => {
                format!("groups of every {}. first, {size} in each", n / size)
            }
        }
    }
}

/// The order and the format in which `addends`, `[count][elements]`, make what was captured;
/// `wide` is their sum in enough bits. `finish` makes of a sum what was captured. `ring`: whether
/// pieces may begin at addends of their own.
pub fn in_few_bits(
    captured: &[f64],
    addends: &[Vec<f64>],
    wide: &[f64],
    finish: &(dyn Fn(usize, f64) -> f64 + Sync),
    ring: bool,
) -> Option<Found> {
    let n = addends.len();
    if !(2..=MOST).contains(&n) || addends.iter().any(|one| one.len() != captured.len()) {
        return None;
    }
    let of = |at: usize| addends.iter().map(|one| one[at]).collect::<Vec<f64>>();
    let step = captured.len().div_ceil(SOME).max(1);
    let some: Vec<usize> = (0..captured.len()).step_by(step).collect();
    let pick = |values: &[f64]| some.iter().map(|&at| values[at]).collect::<Vec<f64>>();
    let (seen, before) = (pick(captured), distance(&pick(captured), &pick(wide)));
    let columns: Vec<(usize, Vec<f64>)> = some.iter().map(|&at| (at, of(at))).collect();
    let mut rings = Vec::new();
    for steps in Steps::all() {
        let value = |order: Order, (at, addends): &(usize, Vec<f64>)| {
            finish(*at, steps.sum(order, addends))
        };
        for order in Order::all(n) {
            let made: Vec<f64> = columns.iter().map(|column| value(order, column)).collect();
            if distance(&seen, &made) <= LEFT * before {
                let whole = |at: usize| finish(at, steps.sum(order, &of(at)));
                let values: Vec<f64> = (0..captured.len()).map(whole).collect();
                if distance(captured, &values) <= LEFT * distance(captured, wide) {
                    return Some(Found { values, steps, order: order.words(n), pieces: 1 });
                }
            }
        }
        let hits = columns.iter().zip(&seen).filter(|(column, seen)| {
            Order::rotations(n).iter().any(|&order| value(order, column) == **seen)
        });
        if ring && hits.count() == columns.len() {
            rings.push(steps);
        }
    }
    rings.into_iter().find_map(|steps| in_a_ring(captured, (&of, n), steps, finish))
}

/// A sum in pieces, each one after the other from an addend of its own on.
fn in_a_ring(
    captured: &[f64],
    (of, n): (&dyn Fn(usize) -> Vec<f64>, usize),
    steps: Steps,
    finish: &(dyn Fn(usize, f64) -> f64 + Sync),
) -> Option<Found> {
    let rotations = Order::rotations(n);
    let mut pieces: Vec<(usize, Vec<Order>)> = Vec::new();
    for (at, &seen) in captured.iter().enumerate() {
        let addends = of(at);
        let fits = |order: &Order| finish(at, steps.sum(*order, &addends)) == seen;
        match pieces.last_mut() {
            Some((_, left)) if left.iter().any(fits) => left.retain(fits),
            _ => {
                let left: Vec<Order> = rotations.iter().copied().filter(fits).collect();
                if left.is_empty() || pieces.len() == PIECES * n {
                    return None;
                }
                pieces.push((at, left));
            }
        }
    }
    let (count, end) = (pieces.len(), captured.len());
    let ends = pieces.iter().skip(1).map(|(at, _)| *at).chain([end]);
    let starts: Vec<String> = pieces
        .iter()
        .zip(ends)
        .map(|((at, left), end)| match left[0] {
            Order::From { first, .. } => {
                format!("elements {at} to {} from the {}.", end - 1, first + 1)
            }
            _ => unreachable!("a ring has rotations alone"),
        })
        .collect();
    let told = starts.iter().take(n).cloned().collect::<Vec<_>>().join(", ");
    let order = format!("a ring of {count} pieces: {told}");
    Some(Found { values: captured.to_vec(), steps, order, pieces: count })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    const N: usize = 6;

    fn addends() -> Vec<Vec<f64>> {
        let mut draw = Draw::new(5);
        let one =
            |draw: &mut Draw| (0..900).map(|_| Precision::F32.round64(draw.normal())).collect();
        (0..N).map(|_| one(&mut draw)).collect()
    }

    fn column(all: &[Vec<f64>], at: usize) -> Vec<f64> {
        all.iter().map(|one| one[at]).collect()
    }

    fn found(captured: &[f64], all: &[Vec<f64>]) -> Option<Found> {
        let wide: Vec<f64> = (0..captured.len()).map(|at| column(all, at).iter().sum()).collect();
        in_few_bits(captured, all, &wide, &|_, x| x, true)
    }

    #[test]
    fn every_order_and_format_is_told_from_the_bits_of_the_sum() {
        let all = addends();
        for steps in Steps::all() {
            for order in Order::all(N) {
                let captured: Vec<f64> =
                    (0..900).map(|at| steps.sum(order, &column(&all, at))).collect();
                let found = found(&captured, &all).unwrap();
                assert_eq!(found.values, captured, "{steps:?} {order:?} taken for {}", found.order);
                assert_eq!(found.steps, steps, "{order:?} taken for {}", found.order);
            }
        }
    }

    #[test]
    fn pieces_of_a_ring_are_found_wherever_they_begin() {
        let (all, steps) = (addends(), Steps::all().next().unwrap());
        let order = |at: usize| Order::From { first: (at + 70) / 160 % N, back: false };
        let captured: Vec<f64> =
            (0..900).map(|at| steps.sum(order(at), &column(&all, at))).collect();
        let found = found(&captured, &all).unwrap();
        assert!((6..=8).contains(&found.pieces), "{}", found.order);
    }

    #[test]
    fn a_sum_in_enough_bits_that_is_rounded_once_has_no_order() {
        let all = addends();
        let once = |at: usize| Precision::Bf16.round64(column(&all, at).iter().sum::<f64>());
        assert!(found(&(0..900).map(once).collect::<Vec<f64>>(), &all).is_none());
    }
}
