//! Orders in which ranks or microbatches are added up in few bits, told from the bits of the sum:
//! one after the other from any of them on, in pairs, in groups, or in a ring, where each piece
//! of the sum begins at another rank.

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
    /// `wide`: the groups' own sums are in f32.
    Groups { size: usize, apart: bool, wide: bool },
}

/// How every partial sum is rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Steps {
    precision: Precision,
    /// The bits beyond are cut off.
    truncates: bool,
    rounds_addends: bool,
    /// What the sum is divided by once it is taken; the addends are that much larger.
    divisor: f64,
}

/// A captured sum and its addends.
pub(crate) struct Summed<'a> {
    /// As captured.
    pub(crate) captured: &'a [f64],
    /// `[count][elements]`, which add up to `wide`.
    pub(crate) addends: &'a [Vec<f64>],
    /// In enough bits.
    pub(crate) wide: &'a [f64],
    /// What the job may divide by after it has added, not before.
    pub(crate) divisors: &'a [f64],
    /// Whether pieces may begin at addends of their own: those of ranks.
    pub(crate) ring: bool,
}

/// A sum that was found to be in few bits.
pub(crate) struct FewBitSum {
    /// As it is made.
    pub(crate) values: Vec<f64>,
    /// How.
    pub(crate) steps: Steps,
    /// The order, in words.
    pub(crate) order: String,
    /// Pieces that begin at ranks of their own.
    pub(crate) pieces: usize,
}

impl Steps {
    fn all(divisor: f64) -> impl Iterator<Item = Steps> {
        let kinds = [(Precision::Bf16, false), (Precision::F16, false), (Precision::Bf16, true)];
        kinds.into_iter().flat_map(move |(precision, truncates)| {
            let steps = |rounds_addends| Steps { precision, truncates, rounds_addends, divisor };
            [steps(true), steps(false)]
        })
    }

    /// What partial sums are rounded to, in words.
    pub(crate) fn format(&self) -> String {
        let cut = if self.truncates { ", the bits beyond cut off" } else { "" };
        format!("{}{cut}", self.precision.name())
    }

    /// Their parameters, in words.
    pub(crate) fn words(&self) -> Vec<(&'static str, String)> {
        let mut words = vec![
            ("accumulator", self.format()),
            ("addends rounded first", self.rounds_addends.to_string()),
        ];
        if self.divisor != 1.0 {
            words.push(("the sum divided by", self.divisor.to_string()));
        }
        words
    }

    /// The sum as it is stored; `narrow`: in the format of the partial sums.
    fn finished(&self, order: Order, addends: &[f64], narrow: bool) -> f64 {
        if self.divisor == 1.0 {
            return self.sum(order, addends);
        }
        let larger: Vec<f64> = addends.iter().map(|x| x * self.divisor).collect();
        let sum = self.sum(order, &larger) / self.divisor;
        if narrow { self.round(sum) } else { Precision::F32.round64(sum) }
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
        let x = |index: usize| match self.rounds_addends {
            true => self.round(addends[index]),
            false => addends[index],
        };
        // What an accumulator starts from is rounded when it is stored.
        let chain =
            |places: &mut dyn Iterator<Item = usize>| places.fold(0.0, |sum, at| add(sum, x(at)));
        match order {
            Order::From { first, back } => {
                let step = if back { n - 1 } else { 1 };
                chain(&mut (0..n).map(|i| (first + i * step) % n))
            }
            Order::Groups { size, apart, wide } => {
                let groups = n / size;
                let place = |g: usize, i: usize| if apart { g + i * groups } else { g * size + i };
                let sent = |x: f64| if self.rounds_addends { self.round(x) } else { x };
                let of_group = |g: usize| match wide {
                    true => sent((0..size).map(|i| addends[place(g, i)]).fold(0.0, in_f32)),
                    false => chain(&mut (0..size).map(|i| place(g, i))),
                };
                (0..groups).fold(0.0, |sum, g| add(sum, of_group(g)))
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
        let rotation = |first| [false, true].map(|back| Order::From { first, back });
        (0..n).flat_map(rotation).collect()
    }

    fn all(n: usize) -> Vec<Order> {
        let mut all = Order::rotations(n);
        if n > 2 {
            all.extend([Order::Neighbours, Order::Halves]);
        }
        for size in (2..n).filter(|size| n.is_multiple_of(*size)) {
            for wide in [false, true] {
                all.extend([false, true].map(|apart| Order::Groups { size, apart, wide }));
            }
        }
        all
    }

    fn words(self, n: usize) -> String {
        match self {
            Order::From { first: 0, back: false } => "ascending".into(),
            Order::From { first, back: true } if first + 1 == n => "descending".into(),
            Order::From { first, back } => {
                let way = if back { "descending" } else { "ascending" };
                format!("{way} from addend {} on, the others after it", first + 1)
            }
            Order::Neighbours => "each with its neighbour, then pairs with pairs".into(),
            Order::Halves => "each with the one half of them further on, and so on".into(),
            Order::Groups { size, apart, wide } => {
                let which = match apart {
                    true => format!("{size} addends that lie {} apart", n / size),
                    false => format!("{size} neighbours"),
                };
                format!("first in groups of {which}{}", if wide { ", in f32" } else { "" })
            }
        }
    }
}

/// What a job may divide a sum by after it was taken, not its addends before: what it is declared
/// to be divided by, and the number of its addends.
pub(crate) fn divisors(declared: f64, addends: usize) -> Vec<f64> {
    let mut all = vec![1.0, declared, addends as f64, declared * addends as f64];
    all.sort_by(f64::total_cmp);
    all.dedup();
    all
}

/// An addition in f32.
fn in_f32(a: f64, b: f64) -> f64 {
    Precision::F32.round64(a + b)
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

impl Summed<'_> {
    fn of(&self, element: usize) -> Vec<f64> {
        self.addends.iter().map(|values| values[element]).collect()
    }

    fn is_sound(&self) -> bool {
        let same = |values: &Vec<f64>| values.len() == self.captured.len();
        (2..=MOST).contains(&self.addends.len()) && self.addends.iter().all(same)
    }

    /// The order and the format in which the addends make what was captured.
    pub(crate) fn in_few_bits(&self) -> Option<FewBitSum> {
        if !self.is_sound() {
            return None;
        }
        let (n, captured) = (self.addends.len(), self.captured);
        let step = captured.len().div_ceil(SOME).max(1);
        let some: Vec<usize> = (0..captured.len()).step_by(step).collect();
        let pick = |values: &[f64]| some.iter().map(|&at| values[at]).collect::<Vec<f64>>();
        let (seen, before) = (pick(captured), distance(&pick(captured), &pick(self.wide)));
        let columns: Vec<Vec<f64>> = some.iter().map(|&at| self.of(at)).collect();
        let (orders, rotations) = (Order::all(n), Order::rotations(n));
        let mut rings: Vec<(Steps, bool)> = Vec::new();
        let mut best: Option<(f64, Steps, Order)> = None;
        for steps in self.divisors.iter().flat_map(|&divisor| Steps::all(divisor)) {
            let narrow = seen.iter().all(|&x| steps.round(x) == x);
            let value = |order: Order, values: &[f64]| steps.finished(order, values, narrow);
            for &order in &orders {
                let made: Vec<f64> = columns.iter().map(|values| value(order, values)).collect();
                let off = distance(&seen, &made);
                if off <= LEFT * before && best.is_none_or(|(least, ..)| off < least) {
                    best = Some((off, steps, order));
                }
            }
            let hit = |(values, seen): (&Vec<f64>, &f64)| {
                rotations.iter().any(|&order| value(order, values) == *seen)
            };
            if self.ring && columns.iter().zip(&seen).all(hit) {
                rings.push((steps, narrow));
            }
        }
        let whole = best.and_then(|(_, steps, order)| {
            let narrow = captured.iter().all(|&x| steps.round(x) == x);
            let value = |at: usize| steps.finished(order, &self.of(at), narrow);
            let values: Vec<f64> = (0..captured.len()).map(value).collect();
            let near = distance(captured, &values) <= LEFT * distance(captured, self.wide);
            near.then(|| FewBitSum { values, steps, order: order.words(n), pieces: 1 })
        });
        whole
            .or_else(|| rings.into_iter().find_map(|(steps, narrow)| self.in_a_ring(steps, narrow)))
    }

    /// In pieces, each one after the other from an addend of its own on.
    fn in_a_ring(&self, steps: Steps, narrow: bool) -> Option<FewBitSum> {
        let n = self.addends.len();
        let rotations = Order::rotations(n);
        let mut pieces: Vec<(usize, Vec<Order>)> = Vec::new();
        for (element, &seen) in self.captured.iter().enumerate() {
            let addends = self.of(element);
            let fits = |order: &Order| steps.finished(*order, &addends, narrow) == seen;
            match pieces.last_mut() {
                Some((_, left)) if left.iter().any(fits) => left.retain(fits),
                _ => {
                    let left: Vec<Order> = rotations.iter().copied().filter(fits).collect();
                    if left.is_empty() || pieces.len() == PIECES * n {
                        return None;
                    }
                    pieces.push((element, left));
                }
            }
        }
        let ends = pieces.iter().skip(1).map(|(at, _)| *at).chain([self.captured.len()]);
        let told = pieces.iter().zip(ends).take(n).map(|((element, left), end)| {
            let first = match left[0] {
                Order::From { first, .. } => first + 1,
                _ => 1,
            };
            format!("elements {element} to {} begin with addend {first}", end - 1)
        });
        let told = told.collect::<Vec<_>>().join(", ");
        let order = format!("a ring of {} pieces: {told}", pieces.len());
        Some(FewBitSum { values: self.captured.to_vec(), steps, order, pieces: pieces.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    const N: usize = 6;

    fn addends() -> Vec<Vec<f64>> {
        let mut draw = Draw::new(5);
        let addend =
            |draw: &mut Draw| (0..900).map(|_| Precision::F32.round64(draw.normal())).collect();
        (0..N).map(|_| addend(&mut draw)).collect()
    }

    fn column(all: &[Vec<f64>], element: usize) -> Vec<f64> {
        all.iter().map(|values| values[element]).collect()
    }

    fn sum_in_few_bits(captured: &[f64], all: &[Vec<f64>]) -> Option<FewBitSum> {
        let wide: Vec<f64> = (0..captured.len()).map(|at| column(all, at).iter().sum()).collect();
        let divisors = &[1.0, 6.0];
        let summed = Summed { captured, addends: all, wide: &wide, divisors, ring: true };
        summed.in_few_bits()
    }

    #[test]
    fn every_order_and_format_is_told_from_the_bits_of_the_sum() {
        let all = addends();
        for steps in [1.0, 6.0].into_iter().flat_map(Steps::all) {
            for order in Order::all(N) {
                let sum = |at| steps.finished(order, &column(&all, at), true);
                let captured: Vec<f64> = (0..900).map(sum).collect();
                let sum = sum_in_few_bits(&captured, &all).unwrap();
                assert_eq!(sum.values, captured, "{steps:?} {order:?} taken for {}", sum.order);
                let format = sum.steps.format();
                assert_eq!(format, steps.format(), "{order:?} taken for {}", sum.order);
            }
        }
    }

    #[test]
    fn pieces_of_a_ring_are_found_wherever_they_begin() {
        let (all, steps) = (addends(), Steps::all(1.0).next().unwrap());
        let order = |at: usize| Order::From { first: (at + 70) / 160 % N, back: false };
        let captured: Vec<f64> =
            (0..900).map(|at| steps.sum(order(at), &column(&all, at))).collect();
        let sum = sum_in_few_bits(&captured, &all).unwrap();
        assert!((6..=8).contains(&sum.pieces), "{}", sum.order);
    }

    #[test]
    fn a_sum_in_enough_bits_that_is_rounded_once_has_no_order() {
        let all = addends();
        let once = |at: usize| Precision::Bf16.round64(column(&all, at).iter().sum::<f64>());
        assert!(sum_in_few_bits(&(0..900).map(once).collect::<Vec<f64>>(), &all).is_none());
    }
}
