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
//! one before it, as in padding, has probability 1.
//!
//! An odd symbol costs more after a long context than after a short one. So the probability of a
//! sequence is the mean of two: one with k up to 1, one with k up to [`ORDER`]. That is at most one
//! bit more than the smaller of their surprisals.
//!
//! A sequence that goes round in one cycle counts as no evidence: what a batch repeats by itself,
//! other batches may repeat as well.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The most symbols before one that are looked at.
const ORDER: usize = 4;

/// What follows what, and how often. Contexts, and contexts with what follows, are kept as hashes:
/// there are [`ORDER`] of each for every symbol.
#[derive(Default)]
struct Counts {
    of: HashMap<u64, u32>,
}

impl Counts {
    fn add(&mut self, before: &[i64], x: i64) {
        for context in contexts(before) {
            *self.of.entry(hash(&context)).or_default() += 1;
            *self.of.entry(hash(&(context, x))).or_default() += 1;
        }
    }

    /// How often a context was seen, and how often before this symbol.
    fn of(&self, context: &[i64], x: i64) -> [f64; 2] {
        let of = |key: u64| f64::from(self.of.get(&key).copied().unwrap_or(0));
        [of(hash(&context)), of(hash(&(context, x)))]
    }
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The contexts of a symbol with these before it, shortest first.
fn contexts(before: &[i64]) -> impl Iterator<Item = &[i64]> {
    (1..=ORDER.min(before.len())).map(|order| &before[before.len() - order..])
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
                    let [all, own, behind] =
                        [&self.counts, &own, &behind].map(|counts| counts.of(context, x));
                    let [seen, followed] = [0, 1].map(|at| all[at] - own[at] + behind[at]);
                    *shorter = (followed + *shorter) / (seen + 1.0);
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

/// Whether a sequence is one cycle, at least twice: whether it begins with more than half of what it
/// ends with, told from the longest such beginning of each of its parts.
fn goes_round(sequence: &[i64]) -> bool {
    let mut longest = vec![0; sequence.len()];
    for at in 1..sequence.len() {
        let mut same: usize = longest[at - 1];
        while same > 0 && sequence[at] != sequence[same] {
            same = longest[same - 1];
        }
        longest[at] = same + usize::from(sequence[at] == sequence[same]);
    }
    longest.last().is_some_and(|&same| 2 * same >= sequence.len() && same > 0)
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
        assert!(goes_round(&[1, 2, 1, 2, 1]) && goes_round(&[5, 5]));
        assert!(!goes_round(&[1, 2, 3, 1, 2]) && !goes_round(&[5]) && !goes_round(&[]));
        // One symbol in 400 that breaks it; pairs alone would make it some 200 bits.
        assert!(stock.surprisal(&nearly) < 60.0, "{}", stock.surprisal(&nearly));
        assert!(stock.surprisal(&apart) > 200.0, "{}", stock.surprisal(&apart));
    }
}
