//! `zloss-mismatch`: the z-loss `λ lse²` counts otherwise in the gradient than declared.
//!
//! Detectors: D3, a token's softmax part is `1 + c lse` times what it should be.
//! Emulation: `g_lse = g (1 + c lse)` with c in {0, λ, 2λ, 4λ}.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::replay::world::{UnitTokens, World};

/// The catalogue's entry.
pub struct ZLossMismatch;

impl Cause for ZLossMismatch {
    fn id(&self) -> &str {
        "zloss-mismatch"
    }

    fn about(&self) -> &str {
        "the gradient of the z-loss is left out, or counted with another factor than the declared one"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["OLMo-core 702", "ml-cross-entropy 43"]
    }

    fn advice(&self) -> &str {
        "multiply the softmax part by 1 + 2 λ lse, with the λ that the loss has"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let lambda = evidence.step.options.declared.z_loss;
        if lambda == 0.0 || !evidence.fails_any(&GRADIENTS) {
            return Vec::new();
        }
        let of = |(slope, words): (f64, &str)| {
            let parameters = vec![("gradient", words.to_string()), ("z_loss", lambda.to_string())];
            Hypothesis::new(Sloped { slope }, parameters)
        };
        [(0.0, "left out"), (lambda, "λ lse in place of 2 λ lse"), (4.0 * lambda, "twice")]
            .into_iter()
            .map(of)
            .collect()
    }
}

struct Sloped {
    slope: f64,
}

impl World for Sloped {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, ..]: [&mut [f64]; 3]) {
        for ((to, l), &g) in lse.iter_mut().zip(tokens.lse).zip(tokens.g) {
            *to = if g == 0.0 { 0.0 } else { g * (1.0 + self.slope * l) };
        }
    }
}
