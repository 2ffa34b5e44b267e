//! Seeded randomness: the same seed gives the same trial on every machine.

/// SplitMix64 (Steele, Lea and Flood 2014): small, and good enough to draw faults from.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The draws of one trial of a campaign.
    pub(crate) fn of(seed: u64, trial: u64) -> Random {
        let mut random = Random(seed ^ trial.wrapping_mul(0xa076_1d64_78bd_642f));
        random.next();
        random
    }

    /// Sixty-four bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
