//! `valid-count`: the loss was divided by another count than the declared one: all tokens
//! for those that are not ignored, a count taken before the labels were shifted, the sum
//! of the weights, one rank's count for all, or by nothing.
//!
//! Detectors: the factor of every comparison is the ratio of the two counts. Where all have one
//! factor, it gives the wrong count itself: if bf16 or f16 can represent it and it is as near to
//! the declared count as a sum in that format may be, the tokens were counted in that format.
//! Emulation: the other count.

use std::collections::BTreeMap;

use backtape::head::{Ranks, Scope, Span};

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::declarations::read;
use crate::diagnose::detectors::divisors::{Divisors, sums};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Count, Counted, Whose};
use crate::head::units::CountedTogether;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::round::Precision;

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
        // A declared number or a sum has no scope, so counts over every scope are tried.
        let spans = match declared {
            Some(Count::One) | None => {
                [Scope::Global, Scope::Microbatch, Scope::Rank].map(Span::from).into()
            }
            Some(_) => vec![options.scope.clone()],
        };
        let Some(divisors) = Divisors::of(evidence) else { return Vec::new() };
        let sums = sums(evidence);
        let mut hypotheses = Vec::new();
        for span in &spans {
            let Some(groups) = divisors.groups(span) else { continue };
            for count in Count::ALL.into_iter().filter(|&count| Some(count) != declared) {
                if count == Count::One && span != &spans[0] {
                    continue;
                }
                let (span, sums, whose) = (span.clone(), sums.clone(), Whose::Own);
                let world = Counted { count, span, whose, means: 1.0, sums };
                hypotheses.extend(divided_by(&divisors, &groups, world, declared));
            }
        }
        hypotheses.extend(counts_of_one(evidence, &divisors, &sums));
        hypotheses.extend(first_labels(evidence, &divisors, &sums));
        hypotheses.extend(counted_in_few_bits(evidence, &divisors, &sums));
        hypotheses
    }
}

/// The hypothesis of one count, where it gives the factors of a failing stage.
fn divided_by(
    divisors: &Divisors<'_>,
    groups: &[Vec<CountedTogether<'_>>],
    world: Counted,
    declared: Option<Count>,
) -> Option<Hypothesis> {
    let ratios = divisors.ratios(&world, groups)?;
    if ratios.iter().all(|ratio| ratio.ratio == 1.0) || !divisors.fit(&ratios, 1.0) {
        return None;
    }
    let words = declared.map_or("a number".to_string(), |count| count.words().into());
    let mut parameters = vec![
        ("declared", words),
        ("divided by", world.count.words().to_string()),
        ("counted over", world.span.to_string()),
    ];
    parameters.extend(world.whose.words().map(|words| ("of which", words.to_string())));
    Some(Hypothesis::new(world, parameters))
}

/// The hypothesis that tokens were counted before the labels were shifted, so that the first label
/// of a sequence counted too, unless it was an ignored one. The shifted labels do not show in how
/// many sequences it was, so the number is read off the factor.
fn first_labels(
    evidence: &Evidence<'_>,
    divisors: &Divisors<'_>,
    sums: &BTreeMap<Stage, f64>,
) -> Option<Hypothesis> {
    let options = &evidence.step.options;
    let is_valid = Count::declared(options) == Some(Count::Valid);
    let number = read::denominator(evidence).filter(|_| is_valid)?;
    let valid = divisors.declared().first()?.first()?.1;
    let sequences = |inputs: &MicrobatchInputs| inputs.tokens().div_ceil(inputs.sequence.max(1));
    let sequences: usize = evidence.inputs.iter().map(sequences).sum();
    let more = number - valid;
    if more.fract() != 0.0 || more < 1.0 || more > sequences as f64 {
        return None;
    }
    let (span, sums, means) = (options.scope.clone(), sums.clone(), number / valid);
    let world = Counted { count: Count::Valid, span, whose: Whose::Own, means, sums };
    let parameters = vec![
        ("declared", Count::Valid.words().to_string()),
        ("divided by", format!("{number}, {}", Count::ValidBeforeShift.words())),
        ("counted as well", format!("the first labels of {more} of {sequences} sequences")),
    ];
    Some(Hypothesis::new(world, parameters).fitted(1))
}

/// The hypothesis that the declared count was summed in bf16 or f16. The wrong count must be
/// representable in the format, and either as near to the declared one as rounding each rank's and
/// microbatch's count and their sum allows, or a number at which adding 1 no longer changes the
/// sum.
fn counted_in_few_bits(
    evidence: &Evidence<'_>,
    divisors: &Divisors<'_>,
    sums: &BTreeMap<Stage, f64>,
) -> Option<Hypothesis> {
    let options = &evidence.step.options;
    let count = Count::declared(options).filter(|&count| count != Count::One)?;
    let number = read::denominator(evidence)?;
    let declared = divisors.declared().first()?.first()?.1;
    let parts = (evidence.ranks() * evidence.microbatches()) as f64;
    let is_counted_in = |format: &Precision| {
        // From this number on the format represents no odd numbers.
        let most = 1.0 / format.unit_roundoff();
        let spacing = number.log2().floor().exp2() * 2.0 * format.unit_roundoff();
        let near = (number - declared).abs() <= 0.5 * spacing * (parts + 1.0);
        let stands = number < declared && number % most == 0.0 && number / most <= parts;
        number % spacing == 0.0 && spacing > 1.0 && near || stands
    };
    let format = [Precision::Bf16, Precision::F16].into_iter().find(is_counted_in)?;
    if number == declared {
        return None;
    }
    let (span, sums, means) = (options.scope.clone(), sums.clone(), number / declared);
    let world = Counted { count, span, whose: Whose::Own, means, sums };
    let parameters = vec![
        ("declared", count.words().to_string()),
        ("divided by", format!("{number}, where it is {declared}")),
        ("counted in", format.name().to_string()),
    ];
    Some(Hypothesis::new(world, parameters).fitted(1))
}

/// Hypotheses that one rank's count was used on all: the largest, as where counts were reduced by
/// their maximum, the smallest, or the first rank's, as where it was broadcast.
fn counts_of_one(
    evidence: &Evidence<'_>,
    divisors: &Divisors<'_>,
    sums: &BTreeMap<Stage, f64>,
) -> Vec<Hypothesis> {
    let declared = Count::declared(&evidence.step.options);
    let counts = Count::declared_and_usual(&evidence.step.options);
    let mut hypotheses = Vec::new();
    let ranks = Span { ranks: Ranks::One, ..Span::from(Scope::Global) };
    for span in [ranks, Scope::Rank.into()] {
        let Some(groups) = divisors.groups(&span) else { continue };
        for &count in &counts {
            for whose in [Whose::Largest, Whose::Smallest, Whose::First] {
                let (span, sums) = (span.clone(), sums.clone());
                let world = Counted { count, span, whose, means: 1.0, sums };
                hypotheses.extend(divided_by(divisors, &groups, world, declared));
            }
        }
    }
    hypotheses
}
