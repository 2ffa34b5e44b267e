//! Seeded random numbers that are the same on every machine and for every thread count.
//!
//! The generator is SplitMix64 (Steele, Lea, Flood 2014), which is not for secrets. It is short
//! enough for anyone to repeat a sample from the seed that a report prints.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Draw(u64);

/// The seed of a step: FNV-1a over the run's id and the step, so that a report
/// draws the same sample every time.
pub fn seed_of(run: &str, step: u64) -> u64 {
    let bytes = run.bytes().chain(step.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Draw {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * f64::EPSILON / 2.0
    }

    /// -1 or 1.
    pub fn sign(&mut self) -> f64 {
        if self.bits() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// Uniform in `0..n`; `n` is not 0. The bias is below n / 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// Standard normal (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(1.0 - self.unit())).sqrt();
        radius * libm::cos(std::f64::consts::TAU * self.unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_stream_and_another_run_another_seed() {
        let (mut first, mut two) = (Draw::new(7), Draw::new(7));
        assert!((0..100).all(|_| first.bits() == two.bits()));
        assert_ne!(seed_of("run-a", 0), seed_of("run-b", 0));
        assert_ne!(seed_of("run-a", 0), seed_of("run-a", 1));
    }

    /// Each mean may be off by six standard deviations.
    #[test]
    fn signs_units_and_normals_have_the_moments_of_their_names() {
        let (mut draw, n) = (Draw::new(3), 200_000.0);
        let mut mean = |of: &mut dyn FnMut(&mut Draw) -> f64| {
            (0..n as usize).map(|_| of(&mut draw)).sum::<f64>() / n
        };
        assert!(mean(&mut Draw::sign).abs() < 6.0 / n.sqrt());
        assert!((mean(&mut Draw::unit) - 0.5).abs() < 6.0 / (12.0 * n).sqrt());
        assert!(mean(&mut Draw::normal).abs() < 6.0 / n.sqrt());
        assert!((mean(&mut |draw| draw.normal().powi(2)) - 1.0).abs() < 6.0 * (2.0 / n).sqrt());
        assert!((mean(&mut |draw| draw.below(5) as f64) - 2.0).abs() < 6.0 * (2.0 / n).sqrt());
    }
}
