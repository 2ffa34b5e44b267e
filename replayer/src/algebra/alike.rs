//! Factors of several parameters that are one but for rounding, and words in which such factors stand.

use super::outcome::{Judged, Outcome, Reading, Stage};

/// Relative distance of factors of several parameters that are told as one: what is printed of them
/// has four digits.
pub(super) const SAME: f64 = 1e-3;

/// Gives readings of one stage that differ by the rounding of the numbers in them the words of the
/// first of them.
pub(super) fn say_as_one(judged: &mut [Judged]) {
    let mut known: Vec<(Stage, f64, Reading)> = Vec::new();
    for one in judged {
        let stage = one.stage;
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let floor = divergence.floor;
        let Some(reading) = &mut divergence.reading else { continue };
        let is_same = |(of_stage, of_floor, other): &&(Stage, f64, Reading)| {
            *of_stage == stage
                && other.cause == reading.cause
                && are_one(&other.words, &reading.words, apart([*of_floor, floor].into_iter()))
        };
        match known.iter().find(is_same) {
            None => known.push((stage, floor, reading.clone())),
            Some((.., same)) => *reading = same.clone(),
        }
    }
}

/// A number in words. Whole ones are names, as of ranks, or counts, and are none.
fn number(word: &str) -> Option<f64> {
    let word = word.trim_end_matches([',', ';', ':', '.']);
    word.contains(['.', 'e']).then(|| word.parse().ok())?
}

/// Whether words are the same but for the rounding of the numbers in them.
fn are_one(a: &str, b: &str, tolerance: f64) -> bool {
    let is_one = |(a, b): (&str, &str)| {
        a == b
            || matches!((number(a), number(b)), (Some(a), Some(b)) if is_one_factor(a, b, tolerance))
    };
    a.split(' ').count() == b.split(' ').count() && a.split(' ').zip(b.split(' ')).all(is_one)
}

/// Whether two factors are the same but for rounding.
pub(super) fn is_one_factor(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * b.abs()
}

/// How far apart factors of one fault may be: the coarser the format, the less is known of each.
pub(super) fn tolerance<'a>(own: impl Iterator<Item = &'a Judged>) -> f64 {
    apart(own.filter_map(|one| one.result.divergence()).map(|own| own.floor))
}

/// The same by what rounding explains of each.
fn apart(floors: impl Iterator<Item = f64>) -> f64 {
    let halves = floors.map(|floor| floor / 2.0).filter(|floor| floor.is_finite());
    halves.fold(SAME, f64::max).min(MOST_ALIKE)
}

/// Factors that are further apart are two, however coarse the format is.
const MOST_ALIKE: f64 = 1e-2;

/// The factor that all have in common.
pub(super) fn one_factor<'a>(own: impl Iterator<Item = &'a Judged> + Clone) -> Option<f64> {
    let tolerance = tolerance(own.clone());
    let mut factors = own.map(|one| one.result.divergence().and_then(|own| own.factor));
    let first = factors.next()??;
    factors
        .all(|other| other.is_some_and(|other| is_one_factor(other, first, tolerance)))
        .then_some(first)
}
