//! Finds replicas that differ, and reduced gradients that are not the same on every rank.
//!
//! Replicas are compared by the hash that the training process took. Where they differ the elements
//! are counted: different arithmetic changes the last bits of many elements, a fault of memory or
//! transport flips one bit in a few. It is reported as corruption if at most [`FLIPS`] elements
//! differ, by one bit each, at least one of them above the two lowest bits, in a shard of [`RARE`]
//! times as many elements; another order of summation does not do that.
//!
//! It fails where the job declares that all holders have the same value ([`one_value`]); elsewhere
//! the values may differ on purpose, and it is a warning.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::pieces::{Piece, pieces};
use super::reduced::own_addend;
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::bits;
use crate::dump::versions::one_value;
use crate::dump::{TensorInfo, name_ranks};
use crate::number::plural;

/// Most differing elements that may be flipped bits.
const FLIPS: usize = 8;
/// How many times as many elements the shard must have.
const RARE: usize = 1000;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let mut of_step = 0;
        for (key, info) in subject.dump.tensors().iter().filter(|(_, info)| info.partial.is_none())
        {
            match Part::of_tensor(key.tensor.as_str()) {
                None => tensor(subject, key, info, results),
                Some(_) => of_step += 1,
            }
        }
        let step = subject.dump.step;
        if of_step > 0 {
            let what = format!("step {step}: copies of the {of_step} values of parameters");
            let why =
                "they are judged with what the ranks declare of the step: `replay --compare step`";
            results.skip(what, why);
        } else if results.looked_at == 0 {
            let why = "no box of a tensor was held by two ranks";
            results.skip(format!("step {step}: replicas"), why);
        }
    }
}

fn tensor(subject: &Subject<'_>, key: &TensorKey, info: &TensorInfo, results: &mut CheckResults) {
    let (recorded, _) = pieces(subject.dump, info);
    let boxes = by_place(&recorded);
    let shared =
        boxes.values().any(|versions| versions.iter().map(|p| p.holders.len()).sum::<usize>() > 1);
    if shared {
        results.looked();
    }
    for mut versions in boxes.into_values().filter(|versions| versions.len() > 1) {
        versions
            .sort_by_key(|piece| (std::cmp::Reverse(piece.holders.len()), piece.holders.clone()));
        differ(subject, key, info, &versions, results);
    }
}

/// The different contents of each box.
fn by_place<'p, 'd>(recorded: &'p [Piece<'d>]) -> BTreeMap<&'p IndexBox, Vec<&'p Piece<'d>>> {
    let mut boxes: BTreeMap<&IndexBox, Vec<&Piece<'_>>> = BTreeMap::new();
    recorded.iter().for_each(|piece| boxes.entry(piece.place()).or_default().push(piece));
    boxes
}

/// Whether ranks hold different reduced gradients; their gradient norms then differ as well.
fn gradients_differ(subject: &Subject<'_>) -> bool {
    let reduced = subject.dump.tensors().iter();
    let mut reduced = reduced.filter(|(key, info)| {
        info.role != Some(Role::GradNorm) && info.partial.is_none() && reduced_gradient(key, info)
    });
    reduced.any(|(_, info)| {
        let (recorded, _) = pieces(subject.dump, info);
        by_place(&recorded).values().any(|versions| versions.len() > 1)
    })
}

/// How two contents of a box differ.
struct Difference {
    elements: usize,
    /// Index and differing bits of the first [`FLIPS`] elements.
    first: Vec<(usize, u64)>,
}

fn difference(info: &TensorInfo, first: &Piece<'_>, other: &Piece<'_>) -> Difference {
    let width = info.dtype.width();
    let mut differing = Difference { elements: 0, first: Vec::new() };
    let pairs = first.bytes.chunks_exact(width).zip(other.bytes.chunks_exact(width));
    for (i, (a, b)) in pairs.enumerate().filter(|(_, (a, b))| a != b) {
        differing.elements += 1;
        if differing.first.len() < FLIPS {
            differing.first.push((i, bits(a, width, 0) ^ bits(b, width, 0)));
        }
    }
    differing
}

fn differ(
    subject: &Subject<'_>,
    key: &TensorKey,
    info: &TensorInfo,
    versions: &[&Piece<'_>],
    results: &mut CheckResults,
) {
    let holders: usize = versions.iter().map(|piece| piece.holders.len()).sum();
    let majority = versions[0].holders.len() * 2 > holders;
    let holders_of =
        |pieces: &[&Piece<'_>]| pieces.iter().flat_map(|piece| piece.holders.clone()).collect();
    let odd: Vec<Rank> = if majority { holders_of(&versions[1..]) } else { holders_of(versions) };
    let worst = difference(info, versions[0], versions[1]);
    let total = versions[0].bytes.len() / info.dtype.width();
    let who = match majority {
        true => format!(
            "{} differs from {}, which agree",
            name_ranks(&odd),
            name_ranks(&versions[0].holders)
        ),
        false => {
            let named: Vec<String> =
                versions.iter().map(|piece| name_ranks(&piece.holders)).collect();
            format!("there is no majority: {}", named.join(" against "))
        }
    };
    let row = |element: usize| versions[0].global_row(element / versions[0].columns().max(1));
    let mut rows: Vec<u64> = worst.first.iter().map(|(element, _)| row(*element)).collect();
    rows.dedup();
    let of_ranks: Vec<Rank> = odd.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    let place = Place::of(subject).tensor(key).ranks(&of_ranks).rows(&rows);
    let corrupted = flipped(&worst, total);
    let addends = reduced_gradient(key, info);
    let own_addends: Vec<Rank> = match addends {
        true => versions.iter().filter_map(|piece| own_addend(subject, key, info, piece)).collect(),
        false => Vec::new(),
    };
    let follows = info.role == Some(Role::GradNorm) && gradients_differ(subject);
    let (cause, advice): (_, String) = match (corrupted, addends, own_addends.is_empty()) {
        _ if follows => (None, "Mend the reduced gradients first: they differ too".into()),
        (true, ..) => (
            Some("silent-corruption"),
            format!("Test the memory, the processor and the links of {}", name_ranks(&odd)),
        ),
        (_, true, false) => (
            Some("partial-not-reduced"),
            format!("Reduce on every rank: {} kept its own addend", name_ranks(&own_addends)),
        ),
        (_, true, true) if one_microbatch(subject) => (
            Some("replica-divergence"),
            "Reduce over all ranks and devices that hold tokens: over every axis of the mesh that cuts them".into(),
        ),
        (_, true, true) => (
            Some("sync-wrong-microbatch"),
            "Reduce once, on every rank, after the last microbatch: look for a no_sync that one rank leaves later".into(),
        ),
        _ => (
            Some("replica-divergence"),
            "Look for state that is not broadcast, a seed that differs, or an op that is not deterministic".into(),
        ),
    };
    let bits = match corrupted {
        true => flips(&worst, row),
        false => String::new(),
    };
    let evidence = format!(
        "{key} {} should be the same bits on all its holders: {who}; {} of {total} differ{bits}",
        versions[0].place(),
        plural(worst.elements as u64, "element"),
    );
    let severity = if one_value(subject.dump, info) { Severity::Fail } else { Severity::Warn };
    results.add(severity, cause, place, evidence, advice);
}

/// Whether the step recorded a single microbatch, so that none can have been left out of a sum.
fn one_microbatch(subject: &Subject<'_>) -> bool {
    let all = subject.dump.tensors().keys().filter_map(|key| key.microbatch);
    all.collect::<BTreeSet<_>>().len() == 1
}

fn reduced_gradient(key: &TensorKey, info: &TensorInfo) -> bool {
    let gradient = matches!(info.role, Some(Role::Dk | Role::DkLse | Role::DkLabel | Role::Dbias));
    key.when == Some(When::PostReduce) || (gradient && key.microbatch.is_none())
}

fn flipped(difference: &Difference, total: usize) -> bool {
    let single = difference.first.iter().all(|(_, flipped)| flipped.count_ones() == 1);
    let high = difference.first.iter().any(|(_, flipped)| flipped.trailing_zeros() >= 2);
    difference.elements <= FLIPS && difference.elements * RARE <= total && single && high
}

fn flips(difference: &Difference, row: impl Fn(usize) -> u64) -> String {
    let bit_and_row = |(element, flipped): &(usize, u64)| {
        format!("bit {} in row {}", flipped.trailing_zeros(), row(*element))
    };
    format!(
        " by one bit each: {}",
        difference.first.iter().map(bit_and_row).collect::<Vec<_>>().join(", ")
    )
}
