//! `microbatch-mean-of-means`: each microbatch (or each rank) divided its loss by its own
//! count of tokens and the means were averaged, where the mean over all tokens was
//! declared, or the other way round. Tokens of short microbatches weigh too much.
//!
//! Detectors: D6, the factor of a comparison is the ratio of the two denominators, which
//! differs between microbatches or ranks: N / (M n).
//! Emulation: the other denominators, averaged or not.

use std::collections::BTreeMap;

use backtape::head::Scope;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::uniform::{informative, is_near};
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::worlds::{Count, Counted, Ratio};
use crate::head::Stage;

/// The catalogue's entry.
pub struct MicrobatchMeanOfMeans;

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
        let (m, w) = (evidence.microbatches() as f64, evidence.ranks() as f64);
        let mut means = vec![1.0, m, w, m * w];
        means.dedup();
        let scopes = [Scope::Microbatch, Scope::Rank, Scope::Global];
        let mut found = Vec::new();
        for scope in scopes.into_iter().filter(|&scope| Some(scope) != options.scope.named()) {
            for &count in &counts {
                for &means in &means {
                    let world = Counted { count, scope, means, sums: sums(evidence) };
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

fn hypothesis(world: Counted) -> Hypothesis {
    let over = match world.scope {
        Scope::Global => "the whole step",
        Scope::Microbatch => "each microbatch",
        Scope::Rank => "each rank's part of a microbatch",
    };
    let parameters = vec![
        ("divided by", world.count.words().to_string()),
        ("counted over", over.to_string()),
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
