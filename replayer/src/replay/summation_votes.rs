//! How a captured sum votes between a sum in few bits and a sum in enough.

use backtape::identity::Rank;

use crate::compare::Bound;
use crate::head::Stage;
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

/// How a captured sum compares with a sum in few bits and with a sum in enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Votes {
    /// Elements that are what the narrow sum gives, and not the wide one rounded once.
    pub(super) chained: u64,
    /// The other way round.
    pub(super) rounded_once: u64,
}

/// Which numbers had a vote, by a hash of a few bits: others of the same hash have none, which
/// leaves out a few votes of many.
struct Seen(pub(super) Vec<u64>);

/// A sum over microbatches and ranks, as it was captured.
pub(super) struct Whole<'a> {
    pub(super) stage: Stage,
    pub(super) rank: Option<Rank>,
    pub(super) captured: Matrix<'a>,
    pub(super) shape: &'a [u64],
    /// The sum in f64.
    pub(super) wide: &'a [f64],
}

impl Votes {
    /// Votes of the elements where a narrow sum and the wide one, rounded once, differ. Equal sums
    /// have one vote: the rows of all classes that are nobody's label are equal where k is 0.
    pub(super) fn of(
        captured: &Matrix<'_>,
        wide: &[f64],
        chained: &[f64],
        precision: Precision,
    ) -> Votes {
        let mut votes = Votes { chained: 0, rounded_once: 0 };
        let mut seen = Seen::default();
        for (element, (&wide, &chained)) in wide.iter().zip(chained).enumerate() {
            let (stored, once) = (captured.get_f64(element), precision.round64(wide));
            if once != chained && seen.is_new([wide, chained, stored]) {
                votes.chained += u64::from(stored == chained);
                votes.rounded_once += u64::from(stored == once);
            }
        }
        votes
    }

    /// True where no sum in enough bits votes so. The narrow sum is the nearest number of
    /// its format to nothing: whatever addends a job added in f32, before or after they were
    /// stored, its sum is at most as often the narrow one as the wide one rounded. So a
    /// vote is at most a fair coin, and Hoeffding bounds the coins' sum.
    pub(super) fn is_chained(&self, bound: &Bound) -> bool {
        let all = (self.chained + self.rounded_once) as f64;
        self.chained as f64 > all / 2.0 + (bound.stage * all / 2.0).sqrt()
    }
}

impl Default for Seen {
    fn default() -> Seen {
        Seen(vec![0; (1 << Seen::BITS) / 64])
    }
}

impl Seen {
    const BITS: u32 = 20;

    fn is_new(&mut self, numbers: [f64; 3]) -> bool {
        // Fibonacci hashing: the upper bits of products with 2^64 over the golden ratio.
        let mix = |hash: u64, x: &f64| (hash ^ x.to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = numbers.iter().fold(0, |hash, x| mix(hash, x).rotate_left(31));
        let slot = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - Seen::BITS)) as usize;
        let (word, bit) = (&mut self.0[slot / 64], 1 << (slot % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}
