//! How much of a sequence its peers and its own beginning do not foretell.
//!
//! Prediction by partial matching: after the k symbols before it, a symbol x has
//!
//! ```text
//! P_k(x) = (c(before_k, x) + P_{k-1}(x)) / (c(before_k) + 1),   P_0(x) = the share of x
//! ```
//!
//! where c counts what was seen in the other sequences and in the sequence's own beginning.
//! k goes up to [`ORDER`], so that what nearly goes round is foretold. A symbol that repeats the
//! one before it, as in padding, has probability 1. An odd symbol costs the more the longer the
//! contexts are that it breaks, so the sequence has the mean of its probabilities with k up to 1 and
//! up to all: at most a bit more than the smaller surprisal. A sequence that goes round in one cycle says
//! nothing: what a batch repeats by itself its peers may repeat as well.

use std::collections::HashMap;

/// The most symbols before one that are looked at.
const ORDER: usize = 4;

/// What follows what, and how often: by the symbols before (the nearest first), at most
/// [`ORDER`].
#[derive(Default)]
struct Counts {
    before: HashMap<Context, u64>,
    pairs: HashMap<(Context, i64), u64>,
}

/// The last symbols, and how many of them count.
type Context = ([i64; ORDER], usize);

impl Counts {
    fn add(&mut self, before: &[i64], x: i64) {
        for context in contexts(before) {
            *self.before.entry(context).or_default() += 1;
            *self.pairs.entry((context, x)).or_default() += 1;
        }
    }

    fn of(&self, context: &Context, x: i64) -> (u64, u64) {
        let before = self.before.get(context).copied().unwrap_or(0);
        (before, self.pairs.get(&(*context, x)).copied().unwrap_or(0))
    }
}

/// The contexts of a symbol with these before it, shortest first.
fn contexts(before: &[i64]) -> impl Iterator<Item = Context> {
    (1..=ORDER.min(before.len())).map(move |order| {
        let mut last = [0; ORDER];
        let nearest = before.iter().rev().take(order);
        last.iter_mut().zip(nearest).for_each(|(to, &from)| *to = from);
        (last, order)
    })
}

/// All distinct sequences.
pub(super) struct Stock {
    counts: Counts,
    single: HashMap<i64, u64>,
    total: u64,
}

impl Stock {
    pub(super) fn new(sequences: &[Vec<i64>]) -> Self {
        let mut stock = Self { counts: Counts::default(), single: HashMap::new(), total: 0 };
        for sequence in sequences {
            stock.total += sequence.len() as u64;
            sequence.iter().for_each(|&x| *stock.single.entry(x).or_default() += 1);
            (1..sequence.len()).for_each(|at| stock.counts.add(&sequence[..at], sequence[at]));
        }
        stock
    }

    /// The surprisal of one of the sequences in bits.
    pub(super) fn surprisal(&self, sequence: &[i64]) -> f64 {
        if goes_round(sequence) {
            return 0.0;
        }
        let (mut own, mut behind) = (Counts::default(), Counts::default());
        (1..sequence.len()).for_each(|at| own.add(&sequence[..at], sequence[at]));
        let share = |x: i64| self.single[&x] as f64 / self.total as f64;
        let start = sequence.first().map_or(0.0, |&x| -share(x).log2());
        // After the symbol before alone, and after as many as there are.
        let [mut near, mut far] = [start; 2];
        for at in 1..sequence.len() {
            let (before, x) = (&sequence[..at], sequence[at]);
            if before[at - 1] != x {
                // Of the sequence itself only what lies behind is known.
                let mut each = contexts(before).scan(share(x), |shorter, context| {
                    let (all, own) = (self.counts.of(&context, x), own.of(&context, x));
                    let behind = behind.of(&context, x);
                    let seen = (all.1 - own.1 + behind.1) as f64;
                    *shorter = (seen + *shorter) / ((all.0 - own.0 + behind.0) as f64 + 1.0);
                    Some(*shorter)
                });
                let first = each.next().unwrap_or(1.0);
                near -= first.log2();
                far -= each.last().unwrap_or(first).log2();
            }
            behind.add(before, x);
        }
        near.min(far) + 1.0
    }
}

/// Whether a sequence is one cycle, at least twice.
fn goes_round(sequence: &[i64]) -> bool {
    (1..=sequence.len() / 2).any(|length| sequence[length..] == sequence[..sequence.len() - length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_round_or_nearly_does_is_foretold_and_ids_drawn_apart_are_not() {
        let cycle: Vec<i64> = (0..400).map(|at| [7, -100, 3, -100][at % 4]).collect();
        let mut nearly = cycle.clone();
        nearly[150] = 9;
        let apart: Vec<i64> = (0..40).map(|at| 1 + (at * at * 31 + 17 * at) % 977).collect();
        let stock = Stock::new(&[cycle.clone(), nearly.clone(), apart.clone()]);
        assert_eq!(stock.surprisal(&cycle), 0.0);
        // One symbol in 400 that breaks it; pairs alone would make it some 200 bits.
        assert!(stock.surprisal(&nearly) < 60.0, "{}", stock.surprisal(&nearly));
        assert!(stock.surprisal(&apart) > 200.0, "{}", stock.surprisal(&apart));
    }
}
