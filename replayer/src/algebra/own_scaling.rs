//! Gradients that code of the job's own multiplies after the last backward pass, as where the losses of
//! tokens are summed and the gradients are divided by the number of tokens in the end.
//!
//! The recorder declares the number of each parameter. One number for all of them is the job's own: sums
//! are held against it. Where the tokens of the step are known, a number that is one over those of a
//! single microbatch or rank is held against that of all.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::part::Part;
use backtape::shard::TensorKey;
use serde::Serialize;

use super::domain::Domain;
use super::factor::is_near;
use super::inventory::Inventory;
use super::token_counts::TokenCounts;
use crate::kernels::round::Precision;
use crate::number::{count, plural, short};

/// How far a factor of a sample may be from the number, in roundings of the gradients' format.
const ROUNDINGS: f64 = 2.0;

/// How near a factor must be to a number of the job to be told as that, where gradients are of more bits.
const NEAR: f64 = 1e-6;

/// The largest number that is known to be whole, where others are as near to one by chance in a hundredth
/// of all cases.
const MOST_WHOLE: f64 = 5e3;

/// What all gradients were multiplied by.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Multiplied {
    /// The number.
    pub factor: f64,
    /// What it is of the job's sizes, in words; empty where nothing that is known gives it.
    pub equals: Vec<String>,
    /// The weights of all tokens together, where these are known: 1 in their mean.
    pub weight: Option<f64>,
}

/// What the job's own code multiplied gradients by.
pub(crate) struct OwnScaling {
    /// What sums of gradients are held against, as a factor.
    pub reference: f64,
    /// How far the number may be from what samples gave.
    pub tolerance: f64,
    /// What is told where one number is that of all.
    pub told: Option<Multiplied>,
    /// Which tokens were counted, in words, where they are not all that there are.
    pub miscounted: Option<String>,
}

impl OwnScaling {
    /// What the ranks declare; `None` where no gradient was multiplied.
    pub(super) fn of(
        inventory: &Inventory<'_>,
        unusable: &dyn Fn(&TensorKey) -> Option<String>,
    ) -> Option<OwnScaling> {
        let by_rank = inventory.seen_factors();
        let all: Vec<f64> = by_rank.values().flatten().copied().collect();
        let is_other = |own: &f64| *own != 1.0;
        // What divides a sum over microbatches by their number, or takes out a loss scale, is declared.
        let is_declared = inventory.declared.values().any(|own| {
            let scale = own.scaled_loss.filter(|scale| *scale != 1.0).is_some();
            own.accumulation.is_some() || scale
        });
        if !all.iter().any(is_other) || is_declared {
            return None;
        }
        let unit = inventory.coarsest_gradient().unit_roundoff();
        let tolerance = ROUNDINGS * unit;
        let scales: Vec<f64> =
            inventory.declared.values().flat_map(|own| own.loss_scales()).collect();
        let sizes = || Sizes::of(inventory, unusable, tolerance.max(NEAR));
        let common = common(&all, tolerance);
        if let Some(factor) = common.filter(|factor| *factor != 1.0) {
            if scales.iter().any(|scale| *scale != 1.0 && is_near(factor, 1.0 / scale)) {
                return None;
            }
            let sizes = sizes();
            let is_one = |own: &f64| is_one(*own, factor, tolerance);
            let is_of_tokens = || sizes.as_ref().is_some_and(|sizes| sizes.is_of_tokens(factor));
            // Where some are multiplied by something else, the tokens say which of the two is right.
            if !all.iter().all(is_one) && !is_of_tokens() {
                return Some(OwnScaling {
                    reference: 1.0,
                    tolerance,
                    told: None,
                    miscounted: None,
                });
            }
            if sizes.as_ref().is_some_and(|sizes| sizes.is_known_fault(factor)) {
                return None;
            }
            let miscounted = sizes.as_ref().and_then(|sizes| sizes.miscounted(factor));
            let reference = match (&miscounted, &sizes) {
                (Some(_), Some(sizes)) => sizes.right(),
                _ => factor,
            };
            let told = Multiplied {
                factor,
                equals: sizes.as_ref().map(|sizes| sizes.equals(factor)).unwrap_or_default(),
                weight: sizes.as_ref().and_then(|sizes| sizes.weight(factor)),
            };
            let told = Some(told).filter(|_| miscounted.is_none());
            return Some(OwnScaling { reference, tolerance, told, miscounted });
        }
        let of_ranks: Option<BTreeMap<Rank, f64>> = by_rank
            .iter()
            .map(|(rank, own)| Some((*rank, self::common(own, tolerance)?)))
            .collect();
        let own_tokens = of_ranks.filter(|_| common.is_none()).and_then(|of_ranks| {
            let sizes = sizes()?;
            let words = sizes.own_tokens(&of_ranks)?;
            Some((sizes.right(), words))
        });
        let (reference, miscounted) = own_tokens.unzip();
        let reference = reference.unwrap_or(1.0);
        Some(OwnScaling { reference, tolerance, told: None, miscounted })
    }
}

/// Whether two factors are one number to a tolerance.
fn is_one(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= 2.0 * tolerance * a.abs().max(b.abs())
}

/// The number that more than half of these are, to a tolerance.
fn common(all: &[f64], tolerance: f64) -> Option<f64> {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    let clusters = sorted.chunk_by(|a, b| is_one(*a, *b, tolerance));
    let largest = clusters.max_by_key(|own| own.len())?;
    (2 * largest.len() > all.len()).then(|| largest[largest.len() / 2])
}

impl Inventory<'_> {
    /// What a sum of gradients of a parameter is multiplied by that the job's own code has multiplied.
    pub(crate) fn multiplied_by(&self, rank: Rank, parameter: &str) -> Option<f64> {
        let own = self.own_scaling.as_ref().filter(|own| own.reference != 1.0)?;
        self.declared_of(rank, parameter)?.multiplied_by.map(|_| own.reference)
    }

    /// What was seen of each rank. A rank that saw nothing has multiplied nothing.
    fn seen_factors(&self) -> BTreeMap<Rank, Vec<f64>> {
        let seen = self.declared.iter().map(|(rank, declared)| {
            let own = declared.parameters.values().filter(|own| own.same_as.is_none());
            let known: Vec<f64> = own.clone().filter_map(|own| own.multiplied_by).collect();
            let trainable = own.filter(|own| own.trainable != Some(false)).count();
            let known = if known.is_empty() { vec![1.0; trainable] } else { known };
            (*rank, known.into_iter().filter(|own| own.is_finite()).collect())
        });
        seen.collect()
    }

    /// The format of fewest bits that a gradient is recorded in.
    fn coarsest_gradient(&self) -> Precision {
        let keys = self.parameters.keys().filter_map(|name| self.key(name, &Part::Reduced));
        let formats = keys.filter_map(|key| self.precision(key));
        let coarsest = formats.max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()));
        coarsest.unwrap_or(Precision::F32)
    }
}

/// The sizes of a job that its own code may divide by.
struct Sizes {
    tokens: Option<TokenCounts>,
    microbatches: f64,
    /// What the reduction multiplies the sum over ranks by.
    averaged: f64,
    near: f64,
}

impl Sizes {
    fn of(
        inventory: &Inventory<'_>,
        unusable: &dyn Fn(&TensorKey) -> Option<String>,
        near: f64,
    ) -> Option<Sizes> {
        let (rank, declared) = inventory.declared.first_key_value()?;
        let is_seen = |name: &&String| declared.parameters[*name].multiplied_by.is_some();
        let domain = declared.parameters.keys().find(is_seen);
        let domain = domain.map(|name| Domain::of(inventory, *rank, name));
        let averaged = domain.filter(|own| own.unknown.is_none()).map_or(1.0, |own| own.scale);
        let microbatches = f64::from(declared.microbatches.unwrap_or(1).max(1));
        let tokens = TokenCounts::of(inventory.dump, unusable);
        Some(Sizes { tokens, microbatches, averaged, near })
    }

    fn is(&self, factor: f64, number: f64) -> bool {
        (factor / number - 1.0).abs() <= self.near
    }

    /// The number that makes the mean over the tokens of the step of sums over them.
    fn right(&self) -> f64 {
        let whole = self.tokens.as_ref().map_or(f64::NAN, TokenCounts::whole);
        1.0 / (self.averaged * whole)
    }

    /// The weights of all tokens together.
    fn weight(&self, factor: f64) -> Option<f64> {
        Some(factor * self.averaged * self.tokens.as_ref()?.weight?)
    }

    /// Whether a factor is one over tokens of the step, or as many times that as ranks are averaged.
    fn is_of_tokens(&self, factor: f64) -> bool {
        let Some(tokens) = &self.tokens else { return false };
        let numbers = [tokens.whole(), tokens.with_padding.iter().sum::<f64>()];
        let mut numbers =
            numbers.into_iter().flat_map(|own| [1.0 / own, 1.0 / (own * self.averaged)]);
        numbers.any(|number| self.is(factor, number))
    }

    /// Whether a factor is one that jobs bring in by mistake: the number of ranks that are averaged already, or that
    /// of microbatches where the weights of tokens were right without it.
    fn is_known_fault(&self, factor: f64) -> bool {
        let is = |size: f64, number: f64| size > 1.0 && self.is(factor, number);
        let is_size = |size: f64| is(size, size) || is(size, 1.0 / size);
        let was_right = self.weight(1.0).map(|weight| is_near(weight, 1.0));
        let is_right = self.weight(factor).is_some_and(|weight| is_near(weight, 1.0));
        match () {
            () if is_right => false,
            () if is_size(1.0 / self.averaged) => was_right != Some(false),
            () if is(self.microbatches, self.microbatches) => was_right != Some(false),
            () => is_size(self.microbatches) && was_right == Some(true),
        }
    }

    /// Numbers of the job that a factor is, in words.
    fn words(&self, factor: f64) -> Vec<String> {
        let mut numbers: Vec<(f64, String)> = Vec::new();
        let mut over = |number: f64, words: String| numbers.push((number, words));
        let ranks = 1.0 / self.averaged;
        let times = |words: &str| format!("{} / {words}", plural(ranks as u64, "rank"));
        if let Some(tokens) = &self.tokens {
            let (whole, all) = (tokens.whole(), tokens.with_padding.iter().sum::<f64>());
            let several = tokens.groups() > 1.0;
            let of_step = format!("the {} of the step", tokens_of(whole));
            let padded = format!(
                "all {} of the step, of which {} count",
                tokens_of(all),
                short_count(whole)
            );
            for (number, words) in [(whole, of_step), (all, padded)] {
                over(1.0 / number, format!("1 / {words}"));
                if several && ranks > 1.0 && ranks.fract() == 0.0 {
                    over(ranks / number, times(&words));
                }
                // Numbers of a step without padding are the same.
                if all == whole {
                    break;
                }
            }
            let of_each = [&tokens.by_microbatch, &tokens.with_padding];
            for each in of_each.into_iter().filter(|each| each.len() > 1) {
                if each.iter().all(|own| own == &each[0]) {
                    over(
                        1.0 / each[0],
                        format!("1 / the {} of each microbatch", tokens_of(each[0])),
                    );
                }
            }
            let each: Vec<f64> =
                tokens.by_rank.keys().filter_map(|rank| tokens.of_rank(*rank)).collect();
            if several && each.iter().all(|own| self.is(*own, each[0])) {
                over(1.0 / each[0], format!("1 / the {} of each rank", tokens_of(each[0])));
            }
        }
        if self.microbatches > 1.0 {
            over(1.0 / self.microbatches, format!("1 / {} microbatches", self.microbatches));
        }
        if ranks > 1.0 && ranks.fract() == 0.0 {
            over(ranks, format!("the number of ranks, {ranks}"));
        }
        let fitting = numbers.into_iter().filter(|(number, _)| self.is(factor, *number));
        let words: Vec<String> = fitting.map(|(_, words)| words).collect();
        if !words.is_empty() {
            return words;
        }
        // Where the tokens are not known one over a whole number may be one over theirs.
        let whole = |number: f64| {
            let is_whole = self.is(number, number.round()) && self.near <= NEAR;
            (is_whole && (1.0..=MOST_WHOLE).contains(&number)).then(|| count(number.round() as u64))
        };
        let unknown = self.tokens.is_none();
        let of_one = whole(1.0 / factor).map(|own| format!("1 / {own}"));
        let of_ranks = whole(ranks / factor).map(|own| times(&own));
        of_one.or(of_ranks).filter(|_| unknown).into_iter().collect()
    }

    /// What a factor is that is no count of one microbatch.
    fn equals(&self, factor: f64) -> Vec<String> {
        let words = self.words(factor);
        match words.is_empty() {
            true => self.other_tokens(factor).into_iter().collect(),
            false => words,
        }
    }

    /// A factor that is one over a number of tokens between those that count and all of them: the job counts
    /// others than its loss does, as labels are before they are shifted.
    fn other_tokens(&self, factor: f64) -> Option<String> {
        // How far from a whole number says that it is none.
        const APART: f64 = 0.05;
        let tokens = self.tokens.as_ref()?;
        let (whole, all) = (tokens.whole(), tokens.with_padding.iter().sum::<f64>());
        let ranks = 1.0 / self.averaged;
        let number = [1.0, ranks].into_iter().map(|times| times / factor).find(|number| {
            let is_whole = (number - number.round()).abs() <= self.near * number;
            is_whole && self.near * number <= APART && (whole..all).contains(&number.round())
        })?;
        Some(format!(
            "1 / {}, and {} of the step count in the loss: the job counts others than that, as labels before they are shifted",
            tokens_of(number.round()),
            short_count(whole)
        ))
    }

    /// Which tokens a factor counts, where gradients are sums over those of all microbatches and it is one
    /// over those of one of them alone.
    fn miscounted(&self, factor: f64) -> Option<String> {
        let tokens = self.tokens.as_ref().filter(|own| own.are_sums)?;
        let last = tokens.by_microbatch.len().checked_sub(1).filter(|last| *last > 0)?;
        // What a number of the whole step is too says nothing.
        if !self.words(factor).is_empty() || self.is(factor, self.right()) {
            return None;
        }
        let ranks = 1.0 / self.averaged;
        let whole = tokens.whole();
        // Where none of a microbatch is padding a constant would be that number too.
        let is_padded = |at: usize| tokens.by_microbatch[at] != tokens.with_padding[at];
        let is_one_of = |at: usize| {
            let of_ranks = tokens.by_rank.values().map(|own| own[at]);
            let mut numbers = of_ranks.chain([tokens.by_microbatch[at]]).filter(|_| is_padded(at));
            numbers.find(|own| *own > 0.0 && [1.0, ranks].iter().any(|k| self.is(factor, k / own)))
        };
        let named = [(last, "last"), (0, "first")];
        let told = named.into_iter().find_map(|(at, name)| Some((name, is_one_of(at)?)));
        told.map(|(name, own)| {
            format!(
                "it is divided by the {} of the {name} microbatch, and those of all {} are summed in it, {}",
                tokens_of(own),
                plural(last as u64 + 1, "microbatch"),
                tokens_of(whole)
            )
        })
    }

    /// The same where each rank divides by its own tokens what holds those of all ranks.
    fn own_tokens(&self, of_ranks: &BTreeMap<Rank, f64>) -> Option<String> {
        let tokens = self.tokens.as_ref().filter(|own| own.are_sums)?;
        let ranks = 1.0 / self.averaged;
        let is_own = |k: f64| {
            let mut all = of_ranks.iter();
            all.all(|(rank, own)| {
                tokens.of_rank(*rank).is_some_and(|count| self.is(*own, k / count))
            })
        };
        let is_last = |k: f64| {
            let mut all = of_ranks.iter();
            all.all(|(rank, own)| {
                let last = tokens.by_rank.get(rank).and_then(|own| own.last());
                last.is_some_and(|count| self.is(*own, k / count))
            })
        };
        let what = match () {
            () if [1.0, ranks].into_iter().any(is_own) => "its own tokens",
            () if [1.0, ranks].into_iter().any(is_last) => "its own tokens of the last microbatch",
            () => return None,
        };
        Some(format!(
            "each rank divides it by the number of {what}, and it holds the {} of all ranks",
            tokens_of(tokens.whole())
        ))
    }
}

/// A number of tokens with its noun.
fn tokens_of(tokens: f64) -> String {
    if tokens == 1.0 { "1 token".into() } else { format!("{} tokens", short_count(tokens)) }
}

/// A number of tokens; weights make it none of whole tokens.
fn short_count(tokens: f64) -> String {
    if tokens.fract() == 0.0 { count(tokens as u64) } else { short(tokens) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks of two microbatches, averaged: 10 and 8 tokens of the first rank count, 6 and 4 of the other.
    fn sizes(are_sums: bool, weight: f64) -> Sizes {
        let by_rank = BTreeMap::from([(Rank(0), vec![10.0, 8.0]), (Rank(1), vec![6.0, 4.0])]);
        let tokens = TokenCounts {
            by_rank,
            by_microbatch: vec![16.0, 12.0],
            with_padding: vec![24.0, 24.0],
            are_sums,
            weight: Some(weight),
        };
        Sizes { tokens: Some(tokens), microbatches: 2.0, averaged: 0.5, near: NEAR }
    }

    fn of_sums() -> Sizes {
        sizes(true, 28.0)
    }

    #[test]
    fn a_number_is_told_as_the_tokens_ranks_or_microbatches_that_it_is() {
        let told = |factor: f64| of_sums().words(factor).join(", or ");
        assert_eq!(told(1.0 / 28.0), "1 / the 28 tokens of the step");
        assert_eq!(told(2.0 / 28.0), "2 ranks / the 28 tokens of the step");
        assert_eq!(told(1.0 / 48.0), "1 / all 48 tokens of the step, of which 28 count");
        assert_eq!(
            told(1.0 / 24.0),
            "2 ranks / all 48 tokens of the step, of which 28 count, or 1 / the 24 tokens of each microbatch"
        );
        assert_eq!(told(0.5), "1 / 2 microbatches");
        assert_eq!(told(0.37), "");
        assert_eq!(told(1.0 / 11.0), "", "the tokens are known, and it is none of them");
        let unknown = Sizes { tokens: None, ..of_sums() };
        assert_eq!(unknown.words(1.0 / 11.0).join(", or "), "1 / 11");
        assert_eq!(unknown.words(2.0 / 11.0).join(", or "), "2 ranks / 11");
        assert!(unknown.words(0.37).is_empty());
        assert_eq!(of_sums().weight(2.0 / 28.0), Some(1.0));
    }

    #[test]
    fn a_count_of_other_tokens_than_those_of_the_loss_is_told_as_that() {
        let told = |factor: f64| of_sums().equals(factor).join(", or ");
        assert!(
            told(1.0 / 31.0).starts_with("1 / 31 tokens, and 28 of the step count in the loss")
        );
        assert!(told(2.0 / 31.0).starts_with("1 / 31 tokens"), "ranks are averaged");
        assert_eq!(told(1.0 / 28.0), "1 / the 28 tokens of the step");
        for other in [1.0 / 49.0, 1.0 / 27.0, 1.0 / 31.5] {
            assert_eq!(told(other), "", "{other}");
        }
    }

    /// Goal: tokens of one microbatch alone are a fault of sums, and nothing else is. Method: numbers of both
    /// microbatches and others, of losses that are sums and of such that are not.
    #[test]
    fn tokens_of_one_microbatch_are_miscounted_where_losses_are_sums() {
        let last = of_sums().miscounted(1.0 / 12.0).expect("the last microbatch is told");
        assert!(last.contains("the 12 tokens of the last microbatch"), "{last}");
        let first = of_sums().miscounted(1.0 / 16.0).expect("the first one is told");
        assert!(first.contains("the 16 tokens of the first microbatch"), "{first}");
        assert_eq!(of_sums().right(), 2.0 / 28.0);
        for other in [2.0 / 28.0, 1.0 / 24.0, 0.37] {
            assert_eq!(of_sums().miscounted(other), None, "{other}");
        }
        assert_eq!(sizes(false, 2.0).miscounted(1.0 / 12.0), None);
        let mut full = of_sums();
        full.tokens.as_mut().unwrap().with_padding[1] = 12.0;
        assert_eq!(full.miscounted(1.0 / 12.0), None, "a constant is that number too");
    }

    #[test]
    fn ranks_that_divide_by_their_own_tokens_are_told() {
        let told = |zero: f64, one: f64| {
            of_sums().own_tokens(&BTreeMap::from([(Rank(0), zero), (Rank(1), one)]))
        };
        assert!(
            told(1.0 / 18.0, 1.0 / 10.0).is_some_and(|own| own.contains("its own tokens, and"))
        );
        assert!(told(2.0 / 8.0, 2.0 / 4.0).is_some_and(|own| own.contains("the last microbatch")));
        assert_eq!(told(1.0 / 18.0, 1.0 / 18.0), None);
    }

    /// Goal: a second division is no number of the job's own. Method: the sizes of a job whose weights are
    /// right, wrong without the number, or not known.
    #[test]
    fn a_size_that_makes_right_weights_wrong_is_a_fault() {
        let (right, twice) = (sizes(false, 2.0), sizes(false, 4.0));
        assert!(right.is_known_fault(0.5) && right.is_known_fault(2.0));
        assert!(!twice.is_known_fault(0.5), "the weights are right with it");
        let unknown = Sizes { tokens: None, averaged: 1.0, ..of_sums() };
        assert!(!unknown.is_known_fault(0.5), "losses are summed and divided in the end");
        assert!(unknown.is_known_fault(2.0));
        assert!(
            Sizes { tokens: None, ..of_sums() }.is_known_fault(0.5),
            "ranks are averaged already"
        );
    }

    #[test]
    fn one_number_is_that_of_more_than_half() {
        assert_eq!(common(&[0.5, 0.5 + 1e-9, 1.0], 1e-7), Some(0.5 + 1e-9));
        assert_eq!(common(&[0.5, 1.0], 1e-7), None);
        assert_eq!(common(&[], 1e-7), None);
    }
}
