//! How small a fault would have been found: an agreement is worth as much as the faults that it
//! excludes.

use super::schema::StageReport;
use super::text::wrap;
use crate::compare::SeenFrom;
use crate::kernels::round::Precision;
use crate::number::error;
use crate::replay::outcome::Status;

/// The gradients that are named.
const STAGES: [&str; 3] = ["dlogits", "dq", "dk"];
/// Mean of 1/m² over mantissas m whose logarithm is uniform, as it nearly is for sums: ∫ m⁻³ dm /
/// ln 2 over [1, 2].
const MANTISSAS: f64 = 0.375 / std::f64::consts::LN_2;
/// Fewer chunks are not named: their sum errs little more than a single rounding.
const FEWEST: f64 = 3.0;

/// Writes one line about the gradients that pass.
pub(super) fn render(out: &mut String, stages: &[StageReport]) {
    let passes = |stage: &&StageReport| {
        STAGES.contains(&stage.name) && matches!(stage.status, Status::Pass | Status::Warn)
    };
    let said: Vec<String> = stages.iter().filter(passes).filter_map(of_stage).collect();
    if !said.is_empty() {
        wrap(out, "seen from ", &format!("{} (smaller faults pass as rounding)", said.join("; ")));
    }
}

fn of_stage(stage: &StageReport) -> Option<String> {
    let seen = stage.seen_from?;
    let (factor, noise) = (error(seen.factor), error(seen.noise));
    let name = stage.name;
    let mut said =
        format!("{name}: a factor that is wrong by {factor}, other errors of {noise} of its norm");
    if let Some(chunks) = chunks(&seen).filter(|_| name == "dk") {
        said += &format!(", a sum over {chunks} or more chunks in bf16");
    }
    Some(said)
}

/// The number of chunks from which a sum in bf16 would have been found; `None` where it is below
/// [`FEWEST`].
///
/// A partial sum of j of C chunks is about j/C of the whole, and its rounding has a relative
/// variance of u²/3 over its mantissa squared. So the partial sums together err like C/3 roundings
/// of the whole.
fn chunks(seen: &SeenFrom) -> Option<u64> {
    let rounding = Precision::Bf16.unit_roundoff().powi(2) / 3.0 * MANTISSAS;
    let chunks = (3.0 * seen.noise.powi(2) / rounding).ceil();
    (FEWEST..1e6).contains(&chunks).then_some(chunks as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    /// Goal: the formula agrees with sums that are really computed. Method: ten thousand sums of
    /// chunks of one sign and different sizes, each partial sum rounded to bf16.
    #[test]
    fn a_sum_of_so_many_chunks_errs_by_what_is_seen() {
        let noise = 0.01;
        let count = chunks(&SeenFrom { noise, factor: 0.0 }).unwrap();
        let (mut energy, mut whole, mut draw) = (0.0, 0.0, Draw::new(5));
        for i in 0..10_000 {
            let x = f64::exp2(f64::from(i) / 10_000.0);
            let (mut exact, mut sum) = (0.0, 0.0);
            for _ in 0..count {
                let chunk = x * draw.unit();
                exact += chunk;
                sum = Precision::Bf16.round64(sum + chunk);
            }
            energy += (sum - exact).powi(2);
            whole += exact * exact;
        }
        let made = (energy / whole).sqrt();
        assert!((0.8..1.25).contains(&(made / noise)), "{made} of {count} chunks");
    }

    #[test]
    fn what_a_rounding_shows_needs_no_chunks() {
        assert_eq!(chunks(&SeenFrom { noise: 1e-6, factor: 0.0 }), None);
    }
}
