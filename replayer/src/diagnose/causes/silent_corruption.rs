//! `silent-corruption`: a few stored elements are wrong, mostly by one flipped bit each, and all
//! others are right.
//!
//! Detector: few elements are beyond their bound; flipping one bit of a captured element gives the
//! right value. Emulation: those elements are taken as captured; every other one must be right.

use std::collections::BTreeSet;

use half::{bf16, f16};

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::captured::Values;
use crate::diagnose::detectors::reference::Table;
use crate::diagnose::detectors::single_tokens::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::comparison::Comparison;

/// The catalogue's entry.
pub struct SilentCorruption;

/// At most this many elements are wrong.
const MOST: u64 = 8;
/// Flipping the bit back may leave this share of an element's error.
const LEFT: f64 = 1.0 / 16.0;
/// An element that no flipped bit explains must be off by this many times the root mean square of
/// the stage.
const GROSS: f64 = 30.0;

/// At most this many rows are garbage.
const ROWS: u64 = 4;
/// The error of a row of garbage is at least this many times the norm of its reference and of the
/// mean row.
const LOUD: f64 = 5.0;

/// An element that differs from its reference.
#[derive(Clone, Copy, Debug)]
struct Wrong {
    row: usize,
    column: usize,
    captured: f64,
    reference: f64,
    /// The bit that was flipped, where one explains it.
    bit: Option<u32>,
}

impl Cause for SilentCorruption {
    fn id(&self) -> &str {
        "silent-corruption"
    }

    fn about(&self) -> &str {
        "a few stored elements are wrong and all others are right: bits were flipped"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["hosts with faulty memory or arithmetic"]
    }

    fn advice(&self) -> &str {
        "run the step again on another host: what stays is a bug, what goes is the hardware"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut world = ReplacedValues::default();
        let mut all: Vec<(Key, Wrong)> = Vec::new();
        // Comparisons with many wrong elements are skipped: they may follow from a wrong element
        // upstream.
        for &key in &evidence.failing {
            let Some(elements) = wrong(evidence, key) else { continue };
            let table = world.rows_of_key.entry(key).or_default();
            for element in elements {
                table.entry(element.row).or_default().push((element.column, element.captured));
                all.push((key, element));
            }
        }
        if all.is_empty() || all.len() as u64 > MOST {
            return garbage(evidence).into_iter().collect();
        }
        let parameters = parameters(&all);
        let fitted = 2 + all.len();
        let stages: Vec<Stage> = all.iter().map(|(key, _)| key.stage).collect();
        let distrusting =
            ReplacedValues { rows_of_key: world.rows_of_key.clone(), distrusts: stages };
        vec![
            Hypothesis::new(world, parameters.clone()).fitted(fitted),
            Hypothesis::new(distrusting, parameters).fitted(fitted),
        ]
    }
}

/// The hypothesis of a few rows that hold values much larger than the gradient.
fn garbage(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut world = ReplacedValues::default();
    let mut words: Vec<String> = Vec::new();
    for &key in &evidence.failing {
        let tally = &comparison(evidence, key)?.tally;
        if tally.exceeding_rows == 0 || tally.exceeding_rows > ROWS || tally.nonfinite > 0 {
            continue;
        }
        let captured = evidence.captured(key)?;
        let table = evidence.reference().stages.get(&key)?;
        let size = (tally.reference_energy / tally.rows.max(1) as f64).sqrt();
        let rows: Vec<usize> = tally.worst_rows.iter().map(|excess| excess.row as usize).collect();
        let gross = |row: &usize| {
            let Some(wanted) = table.get(row) else { return false };
            let off = distance(captured.row(*row), wanted).sqrt();
            off >= LOUD * energy(wanted).sqrt().max(size)
        };
        if captured.columns < 4 || !rows.iter().all(gross) {
            continue;
        }
        words.push(format!("{} rows {rows:?}", key.stage));
        world = world.rows(key, rows.into_iter().map(|row| (row, captured.row(row).to_vec())));
    }
    // Garbage that recurs in another microbatch or on another rank comes from the program, not from
    // the hardware.
    let microbatches: BTreeSet<_> =
        world.rows_of_key.keys().filter_map(|key| key.microbatch).collect();
    let ranks: BTreeSet<_> = world.rows_of_key.keys().filter_map(|key| key.rank).collect();
    if microbatches.len() > 1 || ranks.len() > 1 {
        return None;
    }
    let fitted = 2 + words.len();
    let parameters = vec![("where", words.join("; ")), ("rows", "hold garbage".to_string())];
    (!world.rows_of_key.is_empty()).then(|| Hypothesis::new(world, parameters).fitted(fitted))
}

fn parameters(all: &[(Key, Wrong)]) -> Vec<(&'static str, String)> {
    let words_of = |(key, element): &(Key, Wrong)| {
        let place = format!("{} [{}, {}]", key.stage, element.row, element.column);
        let mb = key.microbatch.map(|mb| format!(" of microbatch {mb}")).unwrap_or_default();
        let rank = key.rank.map(|rank| format!(" of rank {rank}")).unwrap_or_default();
        let bit = element.bit.map_or("no single bit".into(), |bit| format!("bit {bit} flipped"));
        format!("{place}{mb}{rank}: {:e} for {:.6e}, {bit}", element.captured, element.reference)
    };
    vec![
        ("elements", all.len().to_string()),
        ("where", all.iter().map(words_of).collect::<Vec<String>>().join("; ")),
    ]
}

/// The comparison as the replay found it.
fn comparison<'e>(evidence: &'e Evidence<'_>, key: Key) -> Option<&'e Comparison> {
    let mut all = evidence.outcome.stage(key.stage).comparisons.iter();
    all.find(|comparison| comparison.microbatch == key.microbatch && comparison.rank == key.rank)
}

/// The wrong elements of a comparison, where they are few and each is explained.
fn wrong(evidence: &Evidence<'_>, key: Key) -> Option<Vec<Wrong>> {
    let tally = &comparison(evidence, key)?.tally;
    let bad = tally.exceeding + tally.nonfinite;
    if bad == 0 || bad > MOST {
        return None;
    }
    let captured = evidence.captured(key)?;
    let table = evidence.reference().stages.get(&key)?;
    let size = (tally.reference_energy / tally.elements.max(1) as f64).sqrt();
    let mut all = errors(&captured, table);
    all.sort_by(|a, b| off(b).total_cmp(&off(a)));
    all.truncate(bad as usize);
    for element in &mut all {
        element.bit = flipped(&captured, element);
        let gross = off(element) >= GROSS * size.max(element.reference.abs()) && bad <= 4;
        if element.bit.is_none() && !gross {
            return None;
        }
    }
    Some(all)
}

fn off(element: &Wrong) -> f64 {
    let off = (element.captured - element.reference).abs();
    if off.is_nan() { f64::INFINITY } else { off }
}

fn errors(captured: &Values, table: &Table) -> Vec<Wrong> {
    let row = |(&row, values): (&usize, &Vec<f64>)| -> Vec<Wrong> {
        let all = captured.row(row).iter().zip(values).enumerate();
        let element = |(column, (&captured, &reference)): (usize, (&f64, &f64))| Wrong {
            row,
            column,
            captured,
            reference,
            bit: None,
        };
        all.map(element).filter(|element| off(element) > 0.0).collect()
    };
    table.iter().flat_map(row).collect()
}

/// The one bit whose flip explains an element's error.
fn flipped(captured: &Values, element: &Wrong) -> Option<u32> {
    let near = |x: f64| (x - element.reference).abs();
    let other = |bit: u32| -> f64 {
        match (captured.bits, element.captured) {
            (64, x) => f64::from_bits(x.to_bits() ^ (1 << bit)),
            (32, x) => f64::from(f32::from_bits((x as f32).to_bits() ^ (1 << bit))),
            (16, x) if captured.is_bf16 => {
                bf16::from_bits(bf16::from_f64(x).to_bits() ^ (1 << bit)).to_f64()
            }
            (_, x) => f16::from_bits(f16::from_f64(x).to_bits() ^ (1 << bit)).to_f64(),
        }
    };
    let bits = (0..captured.bits).map(|bit| (near(other(bit)), bit));
    let (left, bit) = bits.filter(|(left, _)| !left.is_nan()).min_by(|a, b| a.0.total_cmp(&b.0))?;
    (left <= LEFT * off(element) && left <= 0.02 * element.reference.abs()).then_some(bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(bits: u32, is_bf16: bool) -> Values {
        Values { columns: 1, values: vec![0.0], bits, is_bf16 }
    }

    fn at(captured: f64, reference: f64) -> Wrong {
        Wrong { row: 0, column: 0, captured, reference, bit: None }
    }

    #[test]
    fn a_flipped_bit_is_named_and_a_rounding_error_is_none() {
        let x = 0.0123f32;
        let flip = |bit: u32| f64::from(f32::from_bits(x.to_bits() ^ (1 << bit)));
        for bit in [22, 24, 27, 30, 31] {
            let bit_found = flipped(&values(32, false), &at(flip(bit), f64::from(x) * 1.001));
            assert_eq!(bit_found, Some(bit));
        }
        let off = at(f64::from(x) * 1.04, f64::from(x));
        assert_eq!(flipped(&values(32, false), &off), None, "a ratio is no bit");
        let half = bf16::from_f64(0.5);
        let wrong = bf16::from_bits(half.to_bits() ^ (1 << 13)).to_f64();
        assert_eq!(flipped(&values(16, true), &at(wrong, 0.5)), Some(13));
    }
}
