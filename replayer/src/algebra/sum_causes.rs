//! Names the cause of a sum whose coefficients are known.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::shard::TensorKey;

use super::causes::{self, Cause};
use super::declaration::ReduceOp;
use super::domain::{Addend, Domain};
use super::explain::{microbatch_words, rank_words};
use super::factor::is_near;
use super::inventory::Inventory;
use super::local_norms::Unit;
use super::outcome::{Aside, Reading};
use crate::number::short;

/// A sum, solved.
pub(crate) struct Solved<'a> {
    /// Every gradient that may be part of it.
    pub addends: &'a [Addend],
    /// What each is multiplied by.
    pub weights: &'a [f64],
    /// Which of them ranks held before the step.
    pub stale: &'a [usize],
    /// What the job declares.
    pub domain: &'a Domain,
    /// What the dump holds.
    pub inventory: &'a Inventory<'a>,
    /// Whose gradient it is.
    pub parameter: &'a str,
    /// Its tensor.
    pub key: &'a TensorKey,
    /// Whose sum it is.
    pub rank: Rank,
    /// Whether each addend can be told from the others.
    pub is_unique: bool,
    /// Microbatches of the step.
    pub microbatches: usize,
}

/// What a sum is, in words, and its cause.
pub(crate) fn named(solved: &Solved<'_>) -> Reading {
    let stale = solved.not_cleared().or_else(|| solved.only_stale());
    let simple = stale.or_else(|| solved.factor()).or_else(|| solved.window());
    let by_microbatch = simple.or_else(|| solved.doubled()).or_else(|| solved.divided_again());
    let by_microbatch = by_microbatch.or_else(|| solved.clipped_each());
    let known = by_microbatch.or_else(|| solved.group()).or_else(|| solved.partly_reduced());
    known
        .or_else(|| solved.nothing())
        .or_else(|| solved.unequal_ranks())
        .unwrap_or_else(|| causes::UNKNOWN.reads(format!("{SUM_OF}{}{ONCE}", solved.terms())))
}

/// How a sum of unknown cause is told, before its terms and after them.
const SUM_OF: &str = "it is the sum of ";
const ONCE: &str = " (each should be in it once)";

/// How ranks are told that have other weights, before the terms.
pub(super) const WEIGHTED: &str = "ranks have other weights in it: ";

/// The terms of a sum that is told so.
pub(super) fn terms_of(words: &str) -> Option<&str> {
    words.strip_prefix(SUM_OF)?.strip_suffix(ONCE)
}

/// How a sum is told that is made smaller with each microbatch, before its terms.
pub(super) const SMALLER_EACH: &str = "what was summed before is made smaller with each microbatch, as \
     where .grad is clipped after each backward pass: ";

/// What to look at where code of the job's own multiplies gradients by several numbers.
const ONE_NUMBER: &str = "the code that multiplies gradients after the last backward pass: one number for \
     all parameters and ranks";

/// What to look at where the sum so far is clipped with each microbatch.
const ONCE_A_STEP: &str =
    "where gradients are clipped: once, after the last backward pass of the step";

/// Who computed an addend: a rank, or one of its devices.
fn unit(addend: &Addend) -> Unit {
    (addend.rank, addend.index)
}

fn unit_words(addend: &Addend) -> String {
    match addend.index {
        Some(index) => format!("device {index}"),
        None => format!("rank {}", addend.rank),
    }
}

impl Solved<'_> {
    /// Coefficients over the declared one, of all but what was there before the step.
    fn ratios(&self) -> impl Iterator<Item = (&Addend, f64)> {
        let all = self.addends.iter().zip(self.weights).enumerate();
        let fresh = all.filter(|(at, _)| !self.stale.contains(at));
        fresh.map(|(_, (addend, weight))| (addend, weight / self.domain.scale))
    }

    /// The same of the ranks that belong to the domain.
    fn own(&self) -> Vec<(&Addend, f64)> {
        self.ratios().filter(|(addend, _)| self.domain.ranks.contains(&addend.rank)).collect()
    }

    fn is_of_domain_alone(&self) -> bool {
        self.ratios()
            .all(|(addend, ratio)| ratio == 0.0 || self.domain.ranks.contains(&addend.rank))
    }

    fn has_stale(&self) -> bool {
        self.stale.iter().any(|at| self.weights[*at] != 0.0)
    }

    fn not_cleared(&self) -> Option<Reading> {
        let is_right = self.own().iter().all(|(_, ratio)| is_near(*ratio, 1.0));
        (self.has_stale_once() && is_right && self.is_of_domain_alone()).then(|| {
            let words = "the gradient that was there before the step is still in it (where one step \
                         of the optimizer is several tapes, that is meant: make it one)";
            causes::NOT_CLEARED.reads(words)
        })
    }

    /// What was there before the step, alone.
    fn only_stale(&self) -> Option<Reading> {
        let is_empty = self.ratios().all(|(_, ratio)| ratio == 0.0);
        (self.has_stale_once() && is_empty).then(|| {
            let words = "it is the gradient that was there before the step, and no gradient of \
                         this step is in it";
            causes::BUCKET_STALE.reads(words)
        })
    }

    /// One factor for all addends.
    fn factor(&self) -> Option<Reading> {
        let own = self.own();
        let factor = own.first()?.1;
        let is_one = own.iter().all(|(_, ratio)| is_near(*ratio, factor) && factor != 0.0);
        if !is_one || !self.is_of_domain_alone() || self.has_stale() {
            return None;
        }
        if let Some(reading) = self.multiplied(factor) {
            return Some(reading);
        }
        let explanations = self.explanations(factor);
        let cause = self.cause_of_factor(factor);
        let equals = match explanations.is_empty() {
            true => String::new(),
            false => format!(", which is {}", explanations.join(", or ")),
        };
        let is_mean = cause == causes::MICROBATCH_SCALE && factor < 1.0;
        let meant = match is_mean {
            true => {
                " (where the job divides the gradients themselves, accumulation=\"mean\" says so)"
            }
            false => "",
        };
        let words = format!("captured = {factor:.7} x reference on every element{equals}{meant}");
        Some(cause.reads(words))
    }

    /// A factor that code of the job's own has brought in after the last backward pass, as was seen.
    fn multiplied(&self, factor: f64) -> Option<Reading> {
        let own = self.inventory.own_scaling.as_ref()?;
        let of = |rank: Rank| self.inventory.declared_of(rank, self.parameter)?.multiplied_by;
        let seen = of(self.rank).filter(|seen| is_near(factor, seen / own.reference))?;
        // Where nothing says that the job means to multiply, a factor that is a size of it says more.
        let is_size = self.cause_of_factor(factor) != causes::SCALED;
        if own.reference == 1.0 && own.miscounted.is_none() && is_size {
            return None;
        }
        let captured = format!("captured = {factor:.7} x reference on every element");
        if let Some(words) = &own.miscounted {
            return Some(causes::TOKENS.reads(format!("{captured}: {words}")));
        }
        let mut others = self.inventory.declared.keys().filter(|rank| **rank != self.rank);
        let other = others.find_map(|rank| {
            let other = of(*rank)?;
            (!is_near(other, seen)).then(|| format!("by {} on rank {rank}", short(other)))
        });
        let other = other.unwrap_or_else(|| match own.reference == 1.0 {
            true => "not every other gradient by the same number".into(),
            false => format!("most others by {}", short(own.reference)),
        });
        let own = match seen == 1.0 {
            true => "did not multiply it".into(),
            false => format!("multiplied it by {}", short(seen)),
        };
        let words = format!(
            "{captured}: after the last backward pass code of the job's own {own}, and {other}"
        );
        Some(causes::SCALED.reads(words).looking_at(ONE_NUMBER))
    }

    /// The products of sizes that a factor equals.
    fn explanations(&self, factor: f64) -> Vec<String> {
        let mut parts: Vec<(String, f64)> = Vec::new();
        for axis in self.domain.axes.iter().filter(|axis| axis.size > 1) {
            parts.push((format!("|{}| = {}", axis.name, axis.size), axis.size as f64));
        }
        if self.microbatches > 1 {
            let count = self.microbatches;
            parts.push((format!("{count} microbatches"), count as f64));
        }
        for (name, size) in self.other_axes() {
            parts.push((format!("|{name}| = {size}, which it is not reduced over"), size));
        }
        let mut found = Vec::new();
        for (name, size) in &parts {
            if is_near(factor, *size) {
                found.push(name.clone());
            } else if is_near(factor, 1.0 / size) {
                found.push(format!("1 / ({name})"));
            }
        }
        let all: f64 = parts.iter().map(|(_, size)| size).product();
        if found.is_empty() && parts.len() > 1 {
            let names = parts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
            if is_near(factor, all) {
                found.push(format!("the product of {}", names.join(" and ")));
            } else if is_near(factor, 1.0 / all) {
                found.push(format!("1 / the product of {}", names.join(" and ")));
            }
        }
        found
    }

    /// The axes of the job's mesh that it is not declared to be reduced over, and their sizes.
    fn other_axes(&self) -> impl Iterator<Item = (&str, f64)> {
        let axes = self.inventory.dump.manifest.mesh.0.iter();
        let is_own = |name: &str| self.domain.axes.iter().any(|axis| axis.name == name);
        let axes = axes.filter(move |(name, size)| *size > 1 && !is_own(name));
        axes.map(|(name, size)| (name.as_str(), f64::from(*size)))
    }

    fn cause_of_factor(&self, factor: f64) -> Cause {
        let size_of = |op: ReduceOp| -> f64 {
            let axes = self.domain.axes.iter().filter(|axis| axis.op == op);
            axes.map(|axis| axis.size as f64).product()
        };
        let (averaged, summed) = (size_of(ReduceOp::Mean), size_of(ReduceOp::Sum));
        let microbatches = self.microbatches as f64;
        let is = |number: f64| number != 1.0 && is_near(factor, number);
        let mut sums = self.domain.axes.iter().filter(|axis| axis.op == ReduceOp::Sum);
        let averaged_axis = sums.any(|axis| is(1.0 / axis.size as f64));
        let mut means = self.domain.axes.iter().filter(|axis| axis.op == ReduceOp::Mean);
        let divided_axis = means.any(|axis| is(1.0 / axis.size as f64));
        // The mean over an axis that was averaged is itself: a factor of its size is a sum.
        let is_axis_of = |op: ReduceOp| {
            let mut axes = self.domain.axes.iter().filter(|axis| axis.op == op);
            axes.any(|axis| is(axis.size as f64))
        };
        match () {
            () if is(averaged) || is_axis_of(ReduceOp::Mean) => causes::SUM_FOR_MEAN,
            () if is(1.0 / summed) || averaged_axis => causes::MEAN_FOR_SUM,
            () if is(1.0 / averaged) || divided_axis => causes::MEAN_TWICE,
            () if is(summed) || is_axis_of(ReduceOp::Sum) => causes::REDUCED_TWICE,
            () if is(microbatches) || is(1.0 / microbatches) => causes::MICROBATCH_SCALE,
            () if self.other_axes().any(|(_, size)| is(size)) => causes::REDUCED_TWICE,
            () => causes::SCALED,
        }
    }

    /// Some microbatches left out, alike on all ranks.
    fn window(&self) -> Option<Reading> {
        let own = self.own();
        let by = |is_in: bool| -> BTreeSet<Option<Microbatch>> {
            let those = own.iter().filter(|(_, ratio)| (*ratio != 0.0) == is_in);
            those.map(|(addend, _)| addend.microbatch).collect()
        };
        let (taken, left) = (by(true), by(false));
        // A factor that all of them have in common is a second fault.
        let mut ratios = own.iter().filter(|(_, ratio)| *ratio != 0.0).map(|(_, ratio)| *ratio);
        let is_sum = ratios.all(|ratio| is_near(ratio, 1.0));
        let is_window = is_sum && !taken.is_empty() && !left.is_empty() && taken.is_disjoint(&left);
        let is_whole = !self.has_stale() || self.has_stale_once();
        (is_window && is_whole && self.is_of_domain_alone()).then(|| {
            let beside = match self.has_stale() {
                true => " and the gradient that was there before the step",
                false => " alone",
            };
            causes::ACCUMULATE_WINDOW.reads(format!(
                "it holds {}{beside}: {} left out",
                microbatch_words(&taken),
                match left.len() {
                    1 => format!("{} is", microbatch_words(&left)),
                    _ => format!("{} are", microbatch_words(&left)),
                }
            ))
        })
    }

    /// The ratios of the ranks of the domain, by rank and then by microbatch.
    fn in_order(&self) -> Vec<(&Addend, f64)> {
        let mut own = self.own();
        own.sort_by_key(|(addend, _)| (addend.rank, addend.microbatch));
        own
    }

    /// Whether each rank's coefficients are this many times as large with each microbatch, up or down
    /// to that of the last one, which is right.
    fn rises_to_one_by(&self, times: f64) -> bool {
        self.in_order().chunk_by(|a, b| a.0.rank == b.0.rank).all(|of_rank| {
            of_rank.len() > 1
                && of_rank.windows(2).all(|pair| is_near(pair[1].1 / pair[0].1, times))
                && of_rank.last().is_some_and(|last| is_near(last.1, 1.0))
        })
    }

    /// Each microbatch added to a sum that was doubled before.
    fn doubled(&self) -> Option<Reading> {
        let own = self.in_order();
        let mut ranks = own.chunk_by(|a, b| a.0.rank == b.0.rank);
        // The coefficients fall to that of the last microbatch: by powers of two where the sum is
        // added to itself, by one where each microbatch adds `.grad` with those before in it.
        let is_power = |ratio: f64| is_near(ratio.log2().round().exp2(), ratio);
        let is_doubled = ranks.all(|of_rank| {
            let last = of_rank.last().map_or(0.0, |addend| addend.1);
            let falls = of_rank.windows(2).all(|pair| pair[0].1 > pair[1].1 * 0.999);
            let powers = of_rank.iter().all(|addend| is_power(addend.1 / last));
            let by_one = of_rank.windows(2).all(|pair| is_near(pair[0].1 - pair[1].1, 1.0));
            is_near(last, 1.0) && falls && (powers || by_one) && !is_near(of_rank[0].1, last)
        });
        // A sum over two ranks that is taken again with each microbatch gives the same.
        let again = self.reduced_again();
        if let Some(words) = again {
            let words = match is_doubled {
                true => format!("{words}, or a rank adds that sum to itself"),
                false => words,
            };
            let cause = if is_doubled { causes::UNKNOWN } else { causes::REDUCED_TWICE };
            return Some(cause.reads(words));
        }
        let of_rank = self.in_order();
        let of_rank = of_rank.chunk_by(|a, b| a.0.rank == b.0.rank).next()?;
        let rises = |pair: &[(&Addend, f64)]| pair[0].1 > pair[1].1 * 1.001;
        let words = match of_rank.windows(2).all(rises) {
            true => "what was summed before is added once more with each microbatch".into(),
            false => {
                format!("what was summed before is added once more in between: {}", self.terms())
            }
        };
        is_doubled.then(|| causes::ACCUMULATE_DOUBLES.reads(words))
    }

    /// What was summed over ranks before, summed over them again with each microbatch.
    fn reduced_again(&self) -> Option<String> {
        let mut axes = self.domain.axes.iter().filter(|axis| axis.size > 1);
        let axis = axes.find(|axis| self.rises_to_one_by(1.0 / axis.size as f64))?;
        self.is_of_domain_alone().then(|| {
            format!(
                "what was summed over {} before is summed over it again with each microbatch",
                axis.name
            )
        })
    }

    /// The sum over the microbatches before divided by the size of an axis with each reduction.
    fn divided_again(&self) -> Option<Reading> {
        let means = self.domain.axes.iter().filter(|axis| axis.op == ReduceOp::Mean);
        let mut sizes = means.map(|axis| axis.size as f64).filter(|size| *size > 1.0);
        let size = sizes.find(|size| self.rises_to_one_by(*size))?;
        let words = format!(
            "what was reduced before is divided by {size} once more with each microbatch: the \
             first of them is in it {:.6} times",
            self.in_order().first()?.1
        );
        self.is_of_domain_alone().then(|| causes::DIVIDE_OLD_SHARD.reads(words))
    }

    /// What was summed before made smaller with each microbatch, by another number each time.
    fn clipped_each(&self) -> Option<Reading> {
        let own = self.in_order();
        let mut ranks = own.chunk_by(|a, b| a.0.rank == b.0.rank);
        let rises = ranks.all(|of_rank| {
            let is_positive = of_rank.iter().all(|(_, ratio)| *ratio > 0.0);
            let rises = of_rank.windows(2).all(|pair| pair[0].1 <= pair[1].1 * 1.001);
            let last = of_rank.last().map_or(0.0, |last| last.1);
            is_positive && rises && is_near(last, 1.0) && of_rank.len() > 1
        });
        // One factor for all is that of a buffer that is divided once more each time.
        let steps = own.chunk_by(|a, b| a.0.rank == b.0.rank);
        let steps: Vec<f64> =
            steps.flat_map(|own| own.windows(2).map(|pair| pair[1].1 / pair[0].1)).collect();
        let step = *steps.first()?;
        let is_whole = step >= 1.5 && is_near(step, step.round());
        if steps.iter().all(|other| is_near(*other, step)) && (steps.len() > 1 || is_whole) {
            return None;
        }
        let first = own.iter().map(|(_, ratio)| *ratio).min_by(f64::total_cmp)?;
        let is_smaller = first < 0.99 && !self.has_stale() && self.is_of_domain_alone();
        (rises && is_smaller && self.is_unique).then(|| {
            let words = format!("{SMALLER_EACH}{}", self.terms());
            causes::CLIP_TWICE.reads(words).looking_at(ONCE_A_STEP)
        })
    }

    /// Other ranks than the declared ones.
    fn group(&self) -> Option<Reading> {
        if self.addends.iter().any(|addend| addend.index.is_some()) {
            return self.devices();
        }
        let taken: BTreeSet<Rank> = self
            .ratios()
            .filter(|(_, ratio)| *ratio != 0.0)
            .map(|(addend, _)| addend.rank)
            .collect();
        let declared: BTreeSet<Rank> = self.domain.ranks.iter().copied().collect();
        // Ranks whose gradients have other coefficients are another fault.
        let mut ratios = self.ratios().map(|(_, ratio)| ratio).filter(|ratio| *ratio != 0.0);
        let first = ratios.next()?;
        if taken == declared || self.has_stale() || !ratios.all(|ratio| is_near(ratio, first)) {
            return None;
        }
        let words = format!(
            "it holds the gradients of {}, and should hold those of {}",
            rank_words(&taken),
            rank_words(&declared)
        );
        // A rank that keeps its own gradient does not divide it by the size of the group.
        let mut weights = self.ratios().filter(|(_, ratio)| *ratio != 0.0);
        let is_divided = weights.all(|(_, ratio)| is_near(ratio, 1.0));
        let is_averaged = !is_near(self.domain.scale, 1.0);
        let axes = self.axes_without(&taken).filter(|_| !(is_divided && is_averaged));
        if let Some(axes) = axes {
            let words = format!("{words}: it was not reduced over {}", axes.join(" and "));
            return Some(causes::NOT_REDUCED.reads(words));
        }
        let is_subset = taken.is_subset(&declared);
        let cause = if is_subset { causes::RANK_LEFT_OUT } else { causes::WRONG_GROUP };
        Some(cause.reads(words))
    }

    /// Some microbatches reduced, and of the others the rank's own gradient alone.
    fn partly_reduced(&self) -> Option<Reading> {
        let own = self.own();
        let microbatches: BTreeSet<_> = own.iter().map(|(addend, _)| addend.microbatch).collect();
        let (mut reduced, mut kept) = (BTreeSet::new(), BTreeSet::new());
        for microbatch in microbatches {
            let mut of = own.iter().filter(|(addend, _)| addend.microbatch == microbatch);
            let is_kept = |(addend, ratio): &(&Addend, f64)| match addend.rank == self.rank {
                true => is_near(ratio * self.domain.scale, 1.0),
                false => *ratio == 0.0,
            };
            if of.clone().all(|(_, ratio)| is_near(*ratio, 1.0)) {
                reduced.insert(microbatch);
            } else if of.all(is_kept) {
                kept.insert(microbatch);
            } else {
                return None;
            }
        }
        let is_part = !reduced.is_empty() && !kept.is_empty();
        let is_known = is_part && !self.has_stale() && self.is_of_domain_alone();
        is_known.then(|| {
            causes::NOT_REDUCED.reads(format!(
                "of {} only the rank's own gradient is in it, which was not reduced; {} reduced",
                microbatch_words(&kept),
                match reduced.len() {
                    1 => format!("{} was", microbatch_words(&reduced)),
                    _ => format!("{} were", microbatch_words(&reduced)),
                }
            ))
        })
    }

    /// Some devices of one process alone.
    fn devices(&self) -> Option<Reading> {
        let by = |is_in: bool| -> BTreeSet<Option<u64>> {
            let those = self.ratios().filter(|(_, ratio)| (*ratio != 0.0) == is_in);
            those.map(|(addend, _)| addend.index).collect()
        };
        let (taken, left) = (by(true), by(false));
        let mut ratios = self.ratios().map(|(_, ratio)| ratio).filter(|ratio| *ratio != 0.0);
        let first = ratios.next()?;
        let is_one = ratios.all(|ratio| is_near(ratio, first));
        if !is_one || left.is_empty() || !taken.is_disjoint(&left) || self.has_stale() {
            return None;
        }
        let named = |of: &BTreeSet<Option<u64>>| {
            let named: Vec<String> = of.iter().flatten().map(u64::to_string).collect();
            format!("{} {}", if named.len() == 1 { "device" } else { "devices" }, named.join(", "))
        };
        let words =
            format!("it holds the gradients of {}, and not of {}", named(&taken), named(&left));
        // A device that keeps its own gradient does not divide it by the size of the group, and devices
        // that average theirs along one axis of a mesh divide by their own number.
        let is_own = taken.len() == 1 && is_near(first * self.domain.scale, 1.0);
        let share = taken.len() as f64 / (taken.len() + left.len()) as f64;
        let is_mean = !is_near(self.domain.scale, 1.0) && is_near(first * share, 1.0);
        let is_group = is_mean && is_regular(&taken) && (1.0 / share).fract() == 0.0;
        let cause = if is_own || is_group { causes::NOT_REDUCED } else { causes::RANK_LEFT_OUT };
        Some(cause.reads(words))
    }

    /// The ranks of the domain that hold the same sum.
    fn alike(&self) -> BTreeSet<Rank> {
        let pieces = self.inventory.pieces(self.key, &|_| ()).into_iter();
        let own = pieces.filter(|piece| piece.ranks.contains(&self.rank));
        let ranks = own.flat_map(|piece| piece.ranks);
        ranks.filter(|rank| self.domain.ranks.contains(rank)).collect()
    }

    /// The axes over which it was not reduced, where that gives these ranks to all that hold it.
    fn axes_without(&self, taken: &BTreeSet<Rank>) -> Option<Vec<&str>> {
        let alike = self.alike();
        let names: Vec<&str> = self.domain.axes.iter().map(|axis| axis.name.as_str()).collect();
        let each = names.iter().map(|name| vec![*name]);
        let mut left_out = each.chain([names.clone()]);
        left_out.find(|axes| {
            alike.iter().all(|rank| {
                let domain = Domain::without(self.inventory, *rank, self.parameter, axes);
                domain.ranks.iter().copied().collect::<BTreeSet<_>>() == *taken
            })
        })
    }

    /// The right ranks with other factors.
    fn unequal_ranks(&self) -> Option<Reading> {
        let own = self.own();
        let alike =
            |a: &(&Addend, f64), b: &(&Addend, f64)| unit(a.0) != unit(b.0) || is_near(a.1, b.1);
        let by_rank = own.iter().all(|a| own.iter().all(|b| alike(a, b)));
        let differ = own.iter().any(|a| !is_near(a.1, own[0].1));
        // No rank weighs less than nothing: such coefficients fit something else.
        let are_weights = own.iter().all(|(_, ratio)| *ratio > 0.0) && !self.has_stale();
        (by_rank && differ && are_weights && self.is_unique).then(|| {
            let words = format!("{WEIGHTED}{}", self.terms());
            let weights = own.iter().map(|(addend, ratio)| (unit(addend), *ratio)).collect();
            Reading { weights: Aside(weights), ..causes::RANKS_WEIGHTED.reads(words) }
        })
    }

    /// No addend at all.
    fn nothing(&self) -> Option<Reading> {
        self.weights.iter().all(|weight| *weight == 0.0).then(|| {
            let words = "it is zero, and no gradient of this step is in it: it was cleared, or taken \
                         before the first backward pass";
            causes::ACCUMULATE_WINDOW.reads(words)
        })
    }

    /// Whether what was there before the step is in it once, on some ranks or all: where that is the
    /// same on several, only the sum of their coefficients is known.
    fn has_stale_once(&self) -> bool {
        let sum: f64 = self.stale.iter().map(|at| self.weights[*at]).sum();
        let times = |count: usize| is_near(sum, count as f64 * self.domain.scale);
        self.has_stale() && (is_near(sum, 1.0) || (1..=self.stale.len()).any(times))
    }

    /// The sum, written out.
    fn terms(&self) -> String {
        const SHOWN: usize = 8;
        let terms = self.ratios().filter(|(_, ratio)| *ratio != 0.0);
        let term = |(addend, ratio): (&Addend, f64)| match addend.microbatch {
            Some(microbatch) => {
                format!("{ratio:.4} of {} microbatch {microbatch}", unit_words(addend))
            }
            None => format!("{ratio:.4} of {}", unit_words(addend)),
        };
        let mut terms: Vec<String> = terms.map(term).collect();
        let of_before: f64 = self.stale.iter().map(|at| self.weights[*at]).sum();
        if of_before.abs() >= 5e-5 {
            terms.insert(0, format!("{of_before:.4} of what was there before the step"));
        }
        let more = terms.len().saturating_sub(SHOWN);
        terms.truncate(SHOWN);
        match more {
            0 => terms.join(", "),
            more => format!("{} and {more} more", terms.join(", ")),
        }
    }
}

/// Whether indices are equally far apart, as those of a mesh are along an axis.
fn is_regular(indices: &BTreeSet<Option<u64>>) -> bool {
    let indices: Vec<u64> = indices.iter().flatten().copied().collect();
    let mut steps = indices.windows(2).map(|pair| pair[1] - pair[0]);
    let first = steps.next();
    steps.all(|step| Some(step) == first)
}
