//! `microbatch-mean-of-means`: each microbatch (or each rank) divided its loss by its own
//! count of tokens and the means were averaged, where the mean over all tokens was
//! declared, or the other way round. Tokens of short microbatches weigh too much.
//!
//! Detectors: the factor of a comparison is the ratio of the two denominators, which differs
//! between microbatches or ranks: N / (M n). Emulation: the other denominators, with and without
//! the division by the number of means.

use backtape::head::{Microbatches, Ranks, Scope, Sequences, Span};
use backtape::placement::Mesh;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::divisors::{Divisors, sums};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Count, Counted, Whose};

/// The catalogue's entry.
pub struct MicrobatchMeanOfMeans;

/// Subsets of at most this many axes of the mesh are tried.
const AXES: usize = 4;

impl Cause for MicrobatchMeanOfMeans {
    fn id(&self) -> &'static str {
        "microbatch-mean-of-means"
    }

    fn about(&self) -> &'static str {
        "losses were divided over other tokens than declared, and means of unequal microbatches or ranks were averaged alike"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["transformers 34191", "trl 2175"]
    }

    fn advice(&self) -> &'static str {
        "divide the summed loss of every microbatch and rank by the number of tokens of the whole step"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let options = &evidence.step.options;
        let counts = Count::declared_and_usual(options);
        let Some(divisors) = Divisors::of(evidence) else { return Vec::new() };
        let sums = sums(evidence);
        let mut hypotheses = Vec::new();
        for (span, ranks) in spans(evidence) {
            let groups = if span == options.scope { None } else { divisors.groups(&span) };
            let Some(groups) = groups else { continue };
            for &count in &counts {
                let (span, sums, whose) = (span.clone(), sums.clone(), Whose::Own);
                let world = Counted { count, span, whose, means: 1.0, sums };
                let Some(ratios) = divisors.ratios(&world, &groups) else { continue };
                if ratios.iter().all(|ratio| ratio.ratio == ratios[0].ratio) {
                    continue;
                }
                let fit = means(evidence, ranks).into_iter().filter(|&n| divisors.fit(&ratios, n));
                hypotheses.extend(fit.map(|means| hypothesis(Counted { means, ..world.clone() })));
            }
        }
        hypotheses
    }
}

/// By how many means the loss may have been divided: none, the microbatches, the groups of ranks,
/// or both.
fn means(evidence: &Evidence<'_>, ranks: usize) -> Vec<f64> {
    let (m, w) = (evidence.microbatches() as f64, ranks as f64);
    let mut means = vec![1.0, m, w, m * w];
    means.sort_by(f64::total_cmp);
    means.dedup();
    means
}

/// The spans of tokens that a job may count together, the usual ones first, and how many groups of
/// ranks each count for themselves: all ranks, each rank, or the ranks along some of the mesh's
/// axes.
fn spans(evidence: &Evidence<'_>) -> Vec<(Span, usize)> {
    let all = evidence.ranks();
    let usual = [Scope::Microbatch, Scope::Rank, Scope::Global].map(Span::from);
    let mut spans: Vec<(Span, usize)> = usual.map(|span| (span, all)).into();
    let sequences = Sequences::All;
    spans.push((Span { ranks: Ranks::One, microbatches: Microbatches::All, sequences }, all));
    let Mesh(axes) = &evidence.step.dump.manifest.mesh;
    let axes: Vec<&(String, u32)> = axes.iter().filter(|(_, size)| *size > 1).take(AXES).collect();
    for chosen in 1..(1usize << axes.len()).saturating_sub(1) {
        let is_in = |at: &usize| chosen >> at & 1 == 1;
        let (inside, beside): (Vec<usize>, Vec<usize>) = (0..axes.len()).partition(is_in);
        let groups = beside.iter().map(|&at| axes[at].1 as usize).product();
        let names: Vec<String> = inside.iter().map(|&at| axes[at].0.clone()).collect();
        for microbatches in [Microbatches::All, Microbatches::One] {
            let ranks = Ranks::Axes(names.clone());
            spans.push((Span { ranks, microbatches, sequences }, groups));
        }
    }
    spans
}

fn hypothesis(world: Counted) -> Hypothesis {
    let over = match world.span.named() {
        Some(Scope::Global) => "the whole step".to_string(),
        Some(Scope::Microbatch) => "each microbatch".to_string(),
        Some(Scope::Rank) => "each rank's part of a microbatch".to_string(),
        None => world.span.to_string(),
    };
    let parameters = vec![
        ("divided by", world.count.words().to_string()),
        ("counted over", over),
        ("means averaged", world.means.to_string()),
    ];
    Hypothesis::new(world, parameters)
}
