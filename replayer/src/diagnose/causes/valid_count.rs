//! `valid-count`: the loss was divided by another count than the declared one: all tokens
//! for those that are not ignored, a count taken before the labels were shifted, the sum
//! of the weights, or by nothing.
//!
//! Detectors: D6, the factor of every comparison is the ratio of the two counts.
//! Emulation: the other count.

use backtape::head::{Scope, Span};

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::divisors::{Divisors, sums};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Count, Counted};

/// The catalogue's entry.
pub struct ValidCount;

impl Cause for ValidCount {
    fn id(&self) -> &'static str {
        "valid-count"
    }

    fn about(&self) -> &'static str {
        "the loss was divided by another count of tokens than the declared one"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["TransformerEngine 2476", "TransformerEngine 1879"]
    }

    fn advice(&self) -> &'static str {
        "count the tokens that the loss is divided by from the labels and weights that it is summed over"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let options = &evidence.step.options;
        let declared = Count::declared(options);
        // A number or a sum has no scope: the counts of any may have been taken.
        let spans = match declared {
            Some(Count::One) | None => {
                [Scope::Global, Scope::Microbatch, Scope::Rank].map(Span::from).into()
            }
            Some(_) => vec![options.scope.clone()],
        };
        let Some(divisors) = Divisors::of(evidence) else { return Vec::new() };
        let sums = sums(evidence);
        let mut found = Vec::new();
        for span in &spans {
            let Some(groups) = divisors.groups(span) else { continue };
            for count in Count::ALL.into_iter().filter(|&count| Some(count) != declared) {
                if count == Count::One && span != &spans[0] {
                    continue;
                }
                let world = Counted { count, span: span.clone(), means: 1.0, sums: sums.clone() };
                let Some(ratios) = divisors.ratios(&world, &groups) else { continue };
                if ratios.iter().any(|one| one.ratio != 1.0) && divisors.fit(&ratios, 1.0) {
                    let words = declared.map_or("a number".to_string(), |of| of.words().into());
                    let parameters = vec![
                        ("declared", words),
                        ("divided by", count.words().to_string()),
                        ("counted over", span.to_string()),
                    ];
                    found.push(Hypothesis::new(world, parameters));
                }
            }
        }
        found
    }
}
