//! `valid-count`: the loss was divided by another count than the declared one: all tokens
//! for those that are not ignored, a count taken before the labels were shifted, the sum
//! of the weights, or by nothing.
//!
//! Detectors: D6, the factor of every comparison is the ratio of the two counts. Where one
//! denominator is declared and the factor makes it another whole number, as precisely as no
//! chance does, that is a count of something.
//! Emulation: the other count.

use backtape::head::{Denominator, Scope, Span};

use super::clipping::common;
use crate::diagnose::against::Part;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::divisors::{Divisors, sums};
use crate::diagnose::evidence::{Evidence, Key, Residual};
use crate::diagnose::worlds::{Count, Counted, DeclaredLse, Optioned};
use crate::head::{HeadOptions, MicrobatchInputs};

/// The catalogue's entry.
pub struct ValidCount;

/// Rounding errors that a measured factor may be off by.
const SURE: f64 = 4.0;
/// The largest chance with which a number is whole by itself.
const CHANCE: f64 = 1e-2;
/// How many times the declared count another is at most, or the other way round.
const MOST: f64 = 5.0;
/// Ranks and microbatches whose ratios are no count of tokens.
const SMALL: u32 = 16;

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
        let mut found: Vec<Hypothesis> = of_no_rule(evidence).into_iter().collect();
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

/// A whole number of tokens that no rule gives.
fn of_no_rule(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let mut declared: Option<f64> = None;
    for one in evidence.inputs {
        for (_, n) in evidence.step.denominators(&all, one).ok()? {
            if *declared.get_or_insert(n) != n {
                return None;
            }
        }
    }
    let failing = evidence.failing.iter().filter(|key| Part::of(key.stage) != Part::Sums);
    let each: Vec<(Key, Residual)> = failing.map(|key| (*key, evidence.residuals[key])).collect();
    let (declared, factor) = (declared?, common(&each)?);
    let (counted, off) = (declared / factor, uncertainty(&each));
    let whole = counted.round();
    // So many whole numbers are as near by chance.
    let chance = 2.0 * off * counted;
    let near = whole <= MOST * declared && declared <= MOST * whole;
    let told = (counted - whole).abs() <= off * counted && chance <= CHANCE && near;
    if !told || whole == declared || is_simple(declared / whole) {
        return None;
    }
    let change = move |options: &mut HeadOptions| options.denominator = Denominator::Number(whole);
    let world = Optioned { change, lse: DeclaredLse::new(), factor: 1.0 };
    let words = format!("{whole}, where the count that is declared is {declared}");
    Some(Hypothesis::new(world, vec![("divided by", words)]).fitted(1))
}

/// How exactly one factor of all these comparisons is known, relative.
fn uncertainty(each: &[(Key, Residual)]) -> f64 {
    let one = |(_, of): &(Key, Residual)| of.reference / of.floor.max(f64::MIN_POSITIVE);
    SURE / each.iter().map(one).fold(0.0, f64::max).sqrt()
}

/// A factor that counts of ranks and microbatches make as well, or the scale of a loss.
fn is_simple(factor: f64) -> bool {
    let is_whole = |x: f64| x.round() >= 1.0 && (x - x.round()).abs() < 1e-9;
    let of_few = (1..=SMALL).any(|n| {
        let times = factor * f64::from(n);
        is_whole(times) && times.round() <= f64::from(SMALL)
    });
    of_few || is_whole(factor) || is_whole(1.0 / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_of_ranks_and_scales_of_a_loss_are_no_counts_of_tokens() {
        assert!([2.0, 0.5, 0.75, 1.25, 1024.0, 1.0 / 65536.0].into_iter().all(is_simple));
        assert!([201.0 / 210.0, 1.01, 0.97].into_iter().all(|factor| !is_simple(factor)));
    }
}
