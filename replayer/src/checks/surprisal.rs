//! The surprisal of a sequence of ids: how many bits of it the other sequences and its own
//! beginning do not predict.
//!
//! It is computed by prediction by partial matching. The probability of a symbol x after the k
//! symbols before it is
//!
//! ```text
//! P_k(x) = (c(before_k, x) + P_{k-1}(x)) / (c(before_k) + 1),   P_0(x) = the share of x
//! ```
//!
//! where c counts occurrences in the other sequences and in the sequence's own beginning. k goes up
//! to [`ORDER`], so that a sequence that is nearly periodic is predicted. A symbol that repeats the
//! one before it, as in padding, has probability 1.
//!
//! An unexpected symbol costs more bits after a long context than after a short one. So the
//! probability of a sequence is the mean of two: one with k up to 1, one with k up to [`ORDER`].
//! Its surprisal is at most one bit more than the smaller of the two.
//!
//! A periodic sequence has a surprisal of 0: what repeats within a sequence may well occur in other
//! batches too.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Longest context: how many symbols before a symbol are used.
const ORDER: usize = 4;

/// How often each context occurred, and how often each symbol followed it. The keys are hashes,
/// since there are 2 [`ORDER`] of them for every symbol.
#[derive(Default)]
struct Counts {
    by_hash: HashMap<u64, u32>,
}

impl Counts {
    fn add(&mut self, before: &[i64], x: i64) {
        for context in contexts(before) {
            *self.by_hash.entry(hash(&context)).or_default() += 1;
            *self.by_hash.entry(hash(&(context, x))).or_default() += 1;
        }
    }

    /// How often a context occurred, and how often this symbol followed it.
    fn of(&self, context: &[i64], x: i64) -> [f64; 2] {
        let count = |key: u64| f64::from(self.by_hash.get(&key).copied().unwrap_or(0));
        [count(hash(&context)), count(hash(&(context, x)))]
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The contexts of a symbol after these symbols, shortest first.
fn contexts(before: &[i64]) -> impl Iterator<Item = &[i64]> {
    (1..=ORDER.min(before.len())).map(|order| &before[before.len() - order..])
}

/// Counts over all distinct sequences.
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

    /// The surprisal in bits of one of the sequences.
    pub(super) fn surprisal(&self, sequence: &[i64]) -> f64 {
        if is_periodic(sequence) {
            return 0.0;
        }
        let (mut own_counts, mut behind) = (Counts::default(), Counts::default());
        (1..sequence.len()).for_each(|index| own_counts.add(&sequence[..index], sequence[index]));
        let share = |x: i64| self.single[&x] as f64 / self.total as f64;
        let start = sequence.first().map_or(0.0, |&x| -share(x).log2());
        // Surprisal with contexts of one symbol, and with contexts of up to [`ORDER`].
        let [mut near, mut far] = [start; 2];
        for index in 1..sequence.len() {
            let (before, x) = (&sequence[..index], sequence[index]);
            if before[index - 1] != x {
                // The counts of the sequence itself are replaced by those of its beginning.
                let mut each = contexts(before).scan(share(x), |shorter, context| {
                    let [all, own_counted, behind] =
                        [&self.counts, &own_counts, &behind].map(|counts| counts.of(context, x));
                    let [seen, followed] = [0, 1].map(|at| all[at] - own_counted[at] + behind[at]);
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

/// Whether a sequence is a cycle that occurs at least twice: whether its longest proper prefix that
/// is also a suffix is at least half of it (the prefix function of Knuth, Morris and Pratt).
fn is_periodic(sequence: &[i64]) -> bool {
    let mut longest = vec![0; sequence.len()];
    for index in 1..sequence.len() {
        let mut same: usize = longest[index - 1];
        while same > 0 && sequence[index] != sequence[same] {
            same = longest[same - 1];
        }
        longest[index] = same + usize::from(sequence[index] == sequence[same]);
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
        assert!(is_periodic(&[1, 2, 1, 2, 1]) && is_periodic(&[5, 5]));
        assert!(!is_periodic(&[1, 2, 3, 1, 2]) && !is_periodic(&[5]) && !is_periodic(&[]));
        // One symbol in 400 that breaks it; pairs alone would make it some 200 bits.
        assert!(stock.surprisal(&nearly) < 60.0, "{}", stock.surprisal(&nearly));
        assert!(stock.surprisal(&apart) > 200.0, "{}", stock.surprisal(&apart));
    }
}
