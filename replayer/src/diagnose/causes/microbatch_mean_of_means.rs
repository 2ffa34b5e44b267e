//! `microbatch-mean-of-means`: each microbatch (or each rank) divided its loss by its own
//! count of tokens and the means were averaged, where the mean over all tokens was
//! declared, or the other way round. Tokens of short microbatches weigh too much.
//!
//! Detectors: D6, the factor of a comparison is the ratio of the two denominators, which
//! differs between microbatches or ranks: N / (M n).
//! Emulation: the other denominators, averaged or not.

use std::collections::BTreeMap;

use backtape::head::{Microbatches, Ranks, Scope, Sequences, Span};
use backtape::placement::Mesh;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::uniform::{informative, is_near};
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::worlds::{Count, Counted, Ratio};
use crate::head::Stage;

/// The catalogue's entry.
pub struct MicrobatchMeanOfMeans;

/// Axes of a mesh whose choices are tried.
const AXES: usize = 4;
/// Stages that follow the denominators of the tokens.
pub(super) const FOLLOW: [Stage; 10] = [
    Stage::Loss,
    Stage::Dlogprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
    Stage::DkLse,
    Stage::DkLabel,
    Stage::Dk,
    Stage::Dbias,
];

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
        let declared = Count::declared(options);
        let mut counts: Vec<Count> = declared.into_iter().filter(|&of| of != Count::One).collect();
        let more = [Count::Valid, Count::All, Count::Weights];
        counts.extend(more.into_iter().filter(|&of| Some(of) != declared));
        let mut found = Vec::new();
        for (span, groups) in spans(evidence) {
            if span == options.scope {
                continue;
            }
            let (m, w) = (evidence.microbatches() as f64, groups as f64);
            let mut means = vec![1.0, m, w, m * w];
            means.sort_by(f64::total_cmp);
            means.dedup();
            for &count in &counts {
                for &means in &means {
                    let (span, sums) = (span.clone(), sums(evidence));
                    let world = Counted { count, span, means, sums };
                    let differ = |of: &[Ratio]| of.iter().any(|one| one.ratio != of[0].ratio);
                    if fits(evidence, &world, differ) {
                        found.push(hypothesis(world));
                    }
                }
            }
        }
        found
    }
}

/// Over which tokens a job may count, the usual ones first, and how many groups of ranks do so for
/// themselves: the ranks of the whole step, each rank, or those along some of the mesh's axes.
fn spans(evidence: &Evidence<'_>) -> Vec<(Span, usize)> {
    let all = evidence.ranks();
    let usual = [Scope::Microbatch, Scope::Rank, Scope::Global].map(Span::from);
    let mut found: Vec<(Span, usize)> = usual.map(|span| (span, all)).into();
    let sequences = Sequences::All;
    found.push((Span { ranks: Ranks::One, microbatches: Microbatches::All, sequences }, all));
    let Mesh(axes) = &evidence.step.dump.manifest.mesh;
    let axes: Vec<&(String, u32)> = axes.iter().filter(|(_, size)| *size > 1).take(AXES).collect();
    for chosen in 1..(1usize << axes.len()).saturating_sub(1) {
        let is_in = |at: &usize| chosen >> at & 1 == 1;
        let (inside, beside): (Vec<usize>, Vec<usize>) = (0..axes.len()).partition(is_in);
        let groups = beside.iter().map(|&at| axes[at].1 as usize).product();
        let names: Vec<String> = inside.iter().map(|&at| axes[at].0.clone()).collect();
        for microbatches in [Microbatches::All, Microbatches::One] {
            let ranks = Ranks::Axes(names.clone());
            found.push((Span { ranks, microbatches, sequences }, groups));
        }
    }
    found
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

/// Whether some stage that fails has, in all its comparisons, the factors of a world,
/// and the world's ratios are as wanted.
pub(super) fn fits(
    evidence: &Evidence<'_>,
    world: &Counted,
    wanted: impl Fn(&[Ratio]) -> bool,
) -> bool {
    let Some(ratios) = world.ratios(evidence.step, evidence.inputs) else { return false };
    if !wanted(&ratios) {
        return false;
    }
    // A comparison over several ranks has a factor between theirs.
    let range = |key: &Key| {
        let of = ratios.iter().filter(|one| {
            one.microbatch == key.microbatch
                && (one.rank.is_none() || key.rank.is_none() || one.rank == key.rank)
        });
        of.fold((f64::INFINITY, 0.0f64), |(low, high), one| {
            (low.min(one.ratio), high.max(one.ratio))
        })
    };
    let within = |key: &Key, factor: f64| {
        let (low, high) = range(key);
        (low..=high).contains(&factor) || is_near(factor, low) || is_near(factor, high)
    };
    FOLLOW.iter().any(|&stage| {
        evidence.fails(stage)
            && informative(evidence, stage)
                .all(|(key, one)| one.nonfinite > 0 || within(&key, one.factor))
    })
}

/// Factors of the sums over microbatches and ranks: means that were taken there show as
/// the count of what was averaged.
pub(super) fn sums(evidence: &Evidence<'_>) -> BTreeMap<Stage, f64> {
    let (m, w) = (evidence.microbatches() as f64, evidence.ranks() as f64);
    let factors = [m, 1.0 / m, w, 1.0 / w, m * w, 1.0 / (m * w)];
    let one = |stage: Stage| {
        let all = |&&factor: &&f64| {
            factor != 1.0
                && evidence.fails(stage)
                && informative(evidence, stage).all(|(_, one)| is_near(one.factor, factor))
        };
        factors.iter().find(all).map(|&factor| (stage, factor))
    };
    [Stage::Accumulate, Stage::Reduce].into_iter().filter_map(one).collect()
}
