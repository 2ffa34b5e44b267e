//! What memory processes hold while they live, and by how much that grows.
//!
//! Growth is the slope of the anonymous memory over time, by least squares over the lives of all
//! processes of a kind, each with a mean of its own: a process that is started anew begins at
//! its own level. Pages of the program itself, which the kernel can drop, are no growth.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::memory::anonymous_kib;
use crate::processes::Process;

/// The begin of a life is left out: buffers and lists that have a limit fill up to it (the
/// coordinator's list of newest files takes a minute), and allocators settle.
const SETTLES: Duration = Duration::from_secs(300);
/// A slope needs a process that lived so long after that: pages of a few KiB that are taken once
/// are MiB in an hour of a shorter life.
const JUDGED: Duration = Duration::from_secs(900);

/// A process, and what memory it held when.
pub(super) struct Life {
    pub(super) process: Process,
    born: Instant,
    /// Seconds of its life, and KiB.
    samples: Vec<(f64, f64)>,
}

impl Life {
    pub(super) fn new(process: Process) -> Life {
        Life { process, born: Instant::now(), samples: Vec::new() }
    }

    pub(super) fn sample(&mut self) -> Result<()> {
        if self.born.elapsed() >= SETTLES {
            let held = anonymous_kib(self.process.id())?;
            self.samples.push((self.born.elapsed().as_secs_f64(), held));
        }
        Ok(())
    }
}

/// Least squares over several lives: one slope, a mean for each life.
#[derive(Default)]
pub(super) struct Growth {
    /// Of each life, with its means taken off.
    points: Vec<Vec<(f64, f64)>>,
    longest: Longest,
}

/// The life that lasted longest: seconds that were looked at, and KiB at their begin and end.
#[derive(Default)]
struct Longest {
    seconds: f64,
    from: f64,
    to: f64,
}

impl Growth {
    pub(super) fn add(&mut self, life: &Life) {
        self.add_samples(&life.samples);
    }

    fn add_samples(&mut self, samples: &[(f64, f64)]) {
        let n = samples.len() as f64;
        let [(begin, from), .., (end, to)] = *samples else { return };
        let mean = |of: fn(&(f64, f64)) -> f64| samples.iter().map(of).sum::<f64>() / n;
        let (at, held) = (mean(|point| point.0), mean(|point| point.1));
        self.points.push(samples.iter().map(|(t, m)| (t - at, m - held)).collect());
        if end - begin > self.longest.seconds {
            self.longest = Longest { seconds: end - begin, from, to };
        }
    }

    /// True when a process lived long enough for its slope to say something.
    pub(super) fn is_judged(&self) -> bool {
        self.longest.seconds >= JUDGED.as_secs_f64()
    }

    pub(super) fn mib_per_hour(&self) -> f64 {
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            self.points.iter().flatten().map(|&(t, m)| of(t, m)).sum()
        };
        sum(&|t, m| t * m) / sum(&|t, _| t * t) * 3600.0 / 1024.0
    }

    /// One line.
    pub(super) fn told(&self, steps_per_hour: f64) -> String {
        if !self.is_judged() {
            let minutes = (SETTLES + JUDGED).as_secs() / 60;
            return format!("NOT JUDGED: no process lived for {minutes} minutes");
        }
        let Longest { seconds, from, to } = self.longest;
        format!(
            "{:+.2} MiB an hour, {:+.0} bytes a step ({} lives of more than {} minutes; the longest from \
             {from:.0} to {to:.0} KiB in {:.0} minutes)",
            self.mib_per_hour(),
            self.mib_per_hour() * f64::from(1 << 20) / steps_per_hour,
            self.points.len(),
            SETTLES.as_secs() / 60,
            seconds / 60.0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(level: f64, samples: u32) -> Vec<(f64, f64)> {
        let noise = |t: u32| if t.is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..samples).map(|t| (f64::from(t), level + f64::from(t) * 0.5 + noise(t))).collect()
    }

    #[test]
    fn the_slope_of_lives_that_begin_at_different_levels_is_theirs() {
        let mut growth = Growth::default();
        for level in [100.0, 5000.0, 9.0] {
            growth.add_samples(&life(level, 100));
        }
        assert!((growth.mib_per_hour() - 0.5 * 3600.0 / 1024.0).abs() < 0.01);
        assert!(!growth.is_judged() && growth.told(1.0).starts_with("NOT JUDGED"));
        growth.add_samples(&life(7.0, 1000));
        assert!(growth.is_judged());
        assert!(growth.told(7200.0).contains("4 lives"), "{}", growth.told(7200.0));
    }
}
