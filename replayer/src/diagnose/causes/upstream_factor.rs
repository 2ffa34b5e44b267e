//! `upstream-factor`: every gradient of the head is multiplied by one number that no count of the
//! dump gives: something multiplies the cotangent of the loss.
//!
//! Real: a weight of the loss in a sum of several, 1/N in bf16, a world size of another job.
//!
//! Detectors: one factor in every gradient of q and of k; the loss may have it or not. Emulation:
//! the fitted factor. Where a count gives the factor, another cause explains it; where only
//! gradients of parameters have it, it may be `clipping`.

use std::collections::BTreeSet;

use super::clipping::common;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::common_factor::{SCALED, informative};
use crate::diagnose::detectors::fitted_numbers::shown;
use crate::diagnose::evidence::{Evidence, Key, Residual};
use crate::diagnose::worlds::Scaled;
use crate::head::Stage;
use crate::kernels::Precision;

/// Its id: this cause is dropped where a declaration gives the factor.
pub const ID: &str = "upstream-factor";

/// The catalogue's entry.
pub struct UpstreamFactor;

impl Cause for UpstreamFactor {
    fn id(&self) -> &str {
        ID
    }

    fn about(&self) -> &str {
        "every gradient is multiplied by one number that no count of the dump gives"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["a weight of the loss in a sum of several, 1/N kept in bf16, a stale world size"]
    }

    fn advice(&self) -> &str {
        "print the gradient that arrives at the loss (loss.register_hook in torch) and what the loss is multiplied and divided by; declare it as cotangent= if it is meant"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let failing: BTreeSet<Stage> =
            evidence.failing_of(&SCALED).map(|(key, _)| key.stage).collect();
        let both = [Part::OfQ, Part::OfK];
        let all = both.iter().all(|part| failing.iter().any(|&stage| Part::of(stage) == *part));
        let comparisons_of = |&stage: &Stage| informative(evidence, stage);
        let each: Vec<(Key, Residual)> = failing.iter().flat_map(comparisons_of).collect();
        let Some(factor) = common(&each).filter(|_| all) else { return Vec::new() };
        if is_cut_off(evidence, factor) {
            return Vec::new();
        }
        let loss = if failing.contains(&Stage::Loss) { "and the loss" } else { "and not the loss" };
        let parameters = vec![("factor", shown(factor)), ("of", format!("every gradient, {loss}"))];
        vec![Hypothesis::new(Scaled { factor, stages: failing }, parameters).fitted(1)]
    }
}

/// Whether values were truncated to bf16 instead of rounded, which makes all of them a little
/// smaller but is no factor. It is so if the factor is within one ulp of bf16 below 1 and more
/// captured values equal the truncated reference than the scaled one.
fn is_cut_off(evidence: &Evidence<'_>, factor: f64) -> bool {
    let format = Precision::Bf16;
    if !(0.0 < 1.0 - factor && 1.0 - factor < 2.0 * format.unit_roundoff()) {
        return false;
    }
    let cut = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000));
    let (mut as_cut, mut as_scaled) = (0, 0);
    for (key, _) in evidence.failing_of(&SCALED) {
        let Some(captured) = evidence.captured(key) else { continue };
        let Some(reference_rows) = evidence.reference().stages.get(&key) else { continue };
        for (&row, reference) in reference_rows.iter().filter(|_| captured.stored() == Some(format))
        {
            for (&captured_value, &x) in captured.row(row).iter().zip(reference) {
                as_cut += u32::from(captured_value == cut(x));
                as_scaled += u32::from(captured_value == format.round64(factor * x));
            }
        }
    }
    as_cut > as_scaled
}
