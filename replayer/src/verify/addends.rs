//! Checks of partial tensors: every addend must be there once, and cover as much as the others.
//!
//! Where the mesh declares which ranks hold which addend, that is used. Otherwise each rank's part
//! is an addend, and it is only checked that every element has equally many of them.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::{IndexBox, gaps_in};
use backtape::shard::TensorKey;

use super::contents::Contents;
use super::finding::{FindingKind, NotChecked, VerifyFinding};
use super::{absent_ranks, agreement, name_tensors};
use crate::dump::addend::{Addend, group};
use crate::dump::{ShardRef, StepDump, TensorInfo, name_ranks};

/// Most pairs of a cell and a box that are compared, which takes about a second; a finer grid is
/// reported as not checked.
const COMPARISONS: usize = 1 << 27;
/// Most gaps of a tensor that are named one by one.
const NAMED: usize = 32;

/// What is wrong with the addends of one partial tensor.
pub(super) fn findings(
    dump: &StepDump,
    (key, info, sampled): (&TensorKey, &TensorInfo, Option<&[IndexBox]>),
    contents: &Contents,
    not_checked: &mut Vec<NotChecked>,
) -> Vec<VerifyFinding> {
    let whole = [IndexBox::whole(&info.shape)];
    let wanted = sampled.unwrap_or(&whole);
    let groups = group(dump, info);
    let mut all_findings = Vec::new();
    for shards in groups.values() {
        all_findings.extend(agreement::findings(dump, key, shards, contents));
        all_findings.extend(lost(dump, key, shards, contents));
    }
    let by_mesh = groups.keys().all(|addend| matches!(addend, Addend::Mesh(_)));
    if by_mesh {
        all_findings.extend(narrow(dump, key, wanted, &groups));
        all_findings.extend(absent_coordinates(dump, key, &groups));
        return all_findings;
    }
    match uneven(dump, key, wanted, &groups) {
        Some(findings) => all_findings.extend(findings),
        None => not_checked.push(NotChecked {
            what: format!("whether every element of {key} has equally many addends"),
            why: "its boxes are cut too finely to be compared".into(),
        }),
    }
    let absent = absent_ranks(dump, info);
    if !absent.is_empty() && !dump.listed {
        let who = name_ranks(&absent);
        let sentence = format!("{key}: an addend may be lost: nothing of it was found from {who}");
        let finding = VerifyFinding::fault(FindingKind::MissingAddend, sentence);
        all_findings.push(finding.of(key).by(absent));
    }
    all_findings
}

/// Ranks without an addend of tensors of which nothing says which ranks their sums go over: those
/// of the same ranks together, as a step has many.
pub(super) fn undeclared(dump: &StepDump) -> Vec<NotChecked> {
    let mut by_ranks: BTreeMap<Vec<Rank>, Vec<&TensorKey>> = BTreeMap::new();
    for (key, info) in dump.tensors().iter().filter(|_| dump.listed) {
        let comparable = !info.disagreements.iter().any(|d| d.spoils_bytes());
        let is_sum = comparable && info.partial.is_some();
        let by_rank = |addend: &Addend| matches!(addend, Addend::Rank(_));
        if is_sum && group(dump, info).keys().any(by_rank) {
            by_ranks.entry(absent_ranks(dump, info)).or_default().push(key);
        }
    }
    by_ranks.remove(&Vec::new());
    let told = |(ranks, keys): (Vec<Rank>, Vec<&TensorKey>)| NotChecked {
        what: format!(
            "whether {} should hold an addend of {}",
            name_ranks(&ranks),
            name_tensors(keys.into_iter()).unwrap_or_default()
        ),
        why: "no mesh placement says which ranks the sum goes over".into(),
    };
    by_ranks.into_iter().map(told).collect()
}

/// The boxes of one addend that no intact shard holds.
fn lost(
    dump: &StepDump,
    key: &TensorKey,
    shards: &[ShardRef],
    contents: &Contents,
) -> Vec<VerifyFinding> {
    let intact = shards.iter().filter(|shard| contents[shard].intact);
    let intact: Vec<&IndexBox> = intact.map(|shard| &dump.record(shard).place).collect();
    let lost = shards.iter().map(|shard| dump.record(shard));
    let lost = lost.filter(|record| !intact.contains(&&record.place));
    lost.map(|record| {
        let (place, rank) = (&record.place, record.rank);
        let sentence = format!("{key} {place}: the addend of rank {rank} is lost");
        VerifyFinding::fault(FindingKind::Gap, sentence).of(key).at(place).by([rank])
    })
    .collect()
}

/// Gaps of addends on a mesh, where every addend must be all that is wanted of a tensor, sharded over
/// the other axes.
fn narrow(
    dump: &StepDump,
    key: &TensorKey,
    wanted: &[IndexBox],
    groups: &BTreeMap<Addend, Vec<ShardRef>>,
) -> Vec<VerifyFinding> {
    let mut findings = Vec::new();
    for (addend, shards) in groups {
        let mut boxes: Vec<&IndexBox> =
            shards.iter().map(|shard| &dump.record(shard).place).collect();
        boxes.sort();
        boxes.dedup();
        for gap in gaps_in(wanted, boxes).iter().take(NAMED) {
            let sentence = format!("{key} {gap}: no rank recorded it of the addend at {addend}");
            findings.push(VerifyFinding::fault(FindingKind::Gap, sentence).of(key).at(gap));
        }
    }
    findings
}

/// Finds coordinates on the summed axes for which no rank holds an addend.
fn absent_coordinates(
    dump: &StepDump,
    key: &TensorKey,
    groups: &BTreeMap<Addend, Vec<ShardRef>>,
) -> Option<VerifyFinding> {
    let Some(Addend::Mesh(first)) = groups.keys().next() else {
        return None;
    };
    let sizes = &dump.manifest.mesh.0;
    let size = |axis: &String| Some(u64::from(sizes.iter().find(|(name, _)| name == axis)?.1));
    let expected = first.iter().try_fold(1u64, |n, (axis, _)| n.checked_mul(size(axis)?))?;
    let group_count = groups.len() as u64;
    if group_count >= expected {
        return None;
    }
    let axes: Vec<&str> = first.iter().map(|(axis, _)| axis.as_str()).collect();
    let sentence = format!(
        "{key}: {group_count} of {expected} addends over {} were recorded",
        axes.join(" x ")
    );
    Some(VerifyFinding::fault(FindingKind::MissingAddend, sentence).of(key))
}

/// Finds elements that are wanted and have fewer addends than others, by counting in each cell of the
/// grid that all box boundaries make together; `None` if that grid is too fine.
fn uneven(
    dump: &StepDump,
    key: &TensorKey,
    wanted: &[IndexBox],
    groups: &BTreeMap<Addend, Vec<ShardRef>>,
) -> Option<Vec<VerifyFinding>> {
    let mut weights: BTreeMap<&IndexBox, usize> = BTreeMap::new();
    for shards in groups.values() {
        let mut boxes: Vec<&IndexBox> =
            shards.iter().map(|shard| &dump.record(shard).place).collect();
        boxes.sort();
        boxes.dedup();
        for place in boxes {
            *weights.entry(place).or_default() += 1;
        }
    }
    let mut cells = cells(weights.keys().copied().chain(wanted))?;
    cells.retain(|cell| wanted.iter().any(|own| crate::assemble::intersect(own, cell)));
    let count = |cell: &IndexBox| -> usize {
        let over = weights.iter().filter(|(place, _)| crate::assemble::intersect(place, cell));
        over.map(|(_, n)| n).sum()
    };
    let counts: Vec<usize> = cells.iter().map(count).collect();
    let most = counts.iter().copied().max().unwrap_or(0);
    let short = cells.iter().zip(counts).filter(|(_, n)| *n < most || *n == 0);
    let finding = |(cell, n): (&IndexBox, usize)| {
        let sentence = format!("{key} {cell} has {n} addends where other elements have {most}");
        VerifyFinding::fault(FindingKind::Gap, sentence).of(key).at(cell)
    };
    Some(short.take(NAMED).map(finding).collect())
}

/// The cells of the grid that the boundaries of all boxes make together: each cell is either inside
/// or outside of each box.
fn cells<'a>(boxes: impl Iterator<Item = &'a IndexBox> + Clone) -> Option<Vec<IndexBox>> {
    let most = COMPARISONS / boxes.clone().count().max(1);
    let mut cells = vec![IndexBox(Vec::new())];
    let dimensions = boxes.clone().next()?.0.len();
    for dim in 0..dimensions {
        let mut cuts: Vec<u64> =
            boxes.clone().flat_map(|place| [place.0[dim].0, place.0[dim].1]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        if cells.len().checked_mul(cuts.len())? > most {
            return None;
        }
        let longer = |cell: &IndexBox| -> Vec<IndexBox> {
            let ranges = cuts.windows(2).map(|pair| (pair[0], pair[1]));
            ranges.map(|range| IndexBox(cell.0.iter().copied().chain([range]).collect())).collect()
        };
        cells = cells.iter().flat_map(longer).collect();
    }
    Some(cells)
}
