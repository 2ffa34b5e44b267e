//! `rank-mean-vs-sum`: gradients are W or 1/W of what they should be, because ranks were
//! averaged where their sum was declared, or the other way round, or twice.
//!
//! Detectors: one factor in every microbatch and on every rank of a stage; W is the number of
//! ranks, or of those along some axes of the mesh. Or a segment of the reduced dk that is the mean
//! of its addends while the rest is their sum. Emulation: the factor.

use std::collections::BTreeMap;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::common_factor::{SCALED, sets_times};
use crate::diagnose::detectors::segments::segments;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Scaled, scaled};

/// The catalogue's entry.
pub struct RankMeanVsSum;

/// Subsets of at most this many axes of the mesh are tried; real meshes have four or five.
const AXES: usize = 8;

impl Cause for RankMeanVsSum {
    fn id(&self) -> &'static str {
        "rank-mean-vs-sum"
    }

    fn about(&self) -> &'static str {
        "gradients are off by exactly the number of ranks that they are reduced over"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["torchtune 2172", "torchtitan 1842", "torchtitan 2206", "torchtitan 2972", "miles 3231"]
    }

    fn advice(&self) -> &'static str {
        "reduce with the operation that the loss expects: a sum where it is divided by the global count, a mean where each rank divides by its own"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let sizes = group_sizes(evidence);
        let of_group = |(&size, words): (&u32, &String)| {
            let ranks = f64::from(size);
            let hypotheses_of = |(factor, name): (f64, &'static str)| {
                let hypothesis_of = move |stages| {
                    let parameters =
                        vec![("factor", name.to_string()), ("ranks", format!("{size} ({words})"))];
                    scaled(evidence, Scaled { factor, stages }, parameters)
                };
                sets_times(evidence, factor, &SCALED)
                    .into_iter()
                    .flat_map(hypothesis_of)
                    .collect::<Vec<_>>()
            };
            [(ranks, "W"), (1.0 / ranks, "1/W")]
                .into_iter()
                .flat_map(hypotheses_of)
                .collect::<Vec<_>>()
        };
        let mut hypotheses: Vec<Hypothesis> = sizes.iter().flat_map(of_group).collect();
        hypotheses.extend(of_segments(evidence, &sizes));
        hypotheses
    }
}

/// Segments of the reduced dk that are the mean over ranks while the rest is the sum.
fn of_segments(evidence: &Evidence<'_>, sizes: &BTreeMap<u32, String>) -> Vec<Hypothesis> {
    let mut hypotheses = Vec::new();
    for sum in segments(evidence) {
        let near =
            |size: &&u32| sum.factor().is_some_and(|x| (x * f64::from(**size) - 1.0).abs() < 1e-9);
        let Some(size) = sizes.keys().find(near) else { continue };
        let parameters = vec![
            ("factor", "1/W".to_string()),
            ("ranks", format!("{size} ({})", sizes[size])),
            ("where", sum.places()),
        ];
        hypotheses.push(Hypothesis::new(sum.world(), parameters).fitted(sum.segments.len()));
    }
    hypotheses
}

/// The sizes of the groups of ranks that a gradient may be reduced over, each with its name in
/// words.
fn group_sizes(evidence: &Evidence<'_>) -> BTreeMap<u32, String> {
    let manifest = &evidence.step.dump.manifest;
    let mut sizes = BTreeMap::from([(manifest.world_size, "all ranks".to_string())]);
    let axes = &manifest.mesh.0[..manifest.mesh.0.len().min(AXES)];
    for subset in 1u32..1 << axes.len() {
        let chosen = || axes.iter().enumerate().filter(|(at, _)| subset >> at & 1 == 1);
        let size = chosen().map(|(_, (_, size))| size).product();
        let names: Vec<&str> = chosen().map(|(_, (name, _))| name.as_str()).collect();
        sizes.entry(size).or_insert_with(|| format!("axis {}", names.join(" x ")));
    }
    sizes.retain(|&size, _| size > 1);
    sizes
}
