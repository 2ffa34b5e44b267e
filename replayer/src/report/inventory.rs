//! The text of `replay inspect`: what a step holds, tensor by tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use backtape::placement::{Placement, Reduction};
use backtape::shard::TensorKey;

use super::dumped::title;
use super::text::{WIDTH, wrap};
use crate::dump::{StepDump, TensorInfo, name_ranks};
use crate::number::{bytes, plural};

/// Names of the columns; the numbers of the last two are aligned to the right.
const COLUMNS: [&str; 7] = ["tensor", "dtype", "shape", "role", "microbatch", "shards", "bytes"];

/// Writes one line for each tensor of the step, its microbatches together, and below it how it was
/// placed on the mesh.
///
/// ```text
/// tensor  dtype  shape        role  microbatch  shards    bytes
/// q       bf16   [16384, 64]  q     0-1              8  4.0 MiB
///   data: cut along dimension 0; fsdp: cut along dimension 0; held by ranks 0-3
/// ```
pub fn inventory(dump: &StepDump) -> String {
    let mut out = String::new();
    title(&mut out, dump);
    if !dump.manifest.mesh.0.is_empty() {
        let _ = writeln!(out, "mesh      {}\n", dump.manifest.mesh);
    }
    let rows: Vec<(Vec<String>, String)> =
        grouped(dump).into_iter().map(|group| (row(dump, &group), placed(dump, &group))).collect();
    table(&mut out, &rows);
    for omission in &dump.manifest.omissions {
        let _ = writeln!(
            out,
            "omitted   rank {}: {}: {}",
            omission.rank, omission.tensor, omission.reason
        );
    }
    out
}

/// Tensors that differ only in their microbatch.
type Group<'a> = Vec<(&'a TensorKey, &'a TensorInfo)>;

fn grouped(dump: &StepDump) -> Vec<Group<'_>> {
    let mut groups: BTreeMap<_, Group<'_>> = BTreeMap::new();
    for (key, info) in dump.tensors() {
        let alike = TensorKey { microbatch: None, ..key.clone() };
        let declared = (info.dtype.name(), info.shape.clone(), info.role.map(|role| role.name()));
        let kind = (alike, declared, info.partial.is_some());
        groups.entry(kind).or_default().push((key, info));
    }
    groups.into_values().collect()
}

fn row(dump: &StepDump, group: &Group<'_>) -> Vec<String> {
    let (key, info) = group[0];
    let shards = || group.iter().flat_map(|(_, info)| &info.shards);
    let size: u64 = shards().map(|shard| dump.record(shard).length).sum();
    let microbatches: Vec<u64> =
        group.iter().filter_map(|(key, _)| key.microbatch).map(|mb| u64::from(mb.0)).collect();
    vec![
        TensorKey { microbatch: None, ..key.clone() }.to_string(),
        info.dtype.name().into(),
        format!("{:?}", info.shape),
        info.role.map_or("-".into(), |role| role.name().into()),
        if microbatches.is_empty() { "-".into() } else { ranges(&microbatches) },
        shards().count().to_string(),
        bytes(size),
    ]
}

/// Ascending numbers in the form `0-3,7`.
fn ranges(numbers: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |&(first, last): &(u64, u64)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(",")
}

/// How the shards of a tensor were placed on the mesh, as the framework declared it, and which
/// ranks held them.
fn placed(dump: &StepDump, group: &Group<'_>) -> String {
    let records: Vec<_> =
        group.iter().flat_map(|(_, info)| &info.shards).map(|shard| dump.record(shard)).collect();
    let said: BTreeSet<String> = records
        .iter()
        .map(|record| {
            let axes = record.placement.iter().map(|(axis, how)| format!("{axis}: {}", lies(*how)));
            axes.collect::<Vec<_>>().join("; ")
        })
        .collect();
    let ranks: BTreeSet<_> = records.iter().map(|record| record.rank).collect();
    let ranks: Vec<_> = ranks.into_iter().collect();
    let mut parts: Vec<String> = said.into_iter().filter(|text| !text.is_empty()).collect();
    if let Some(reduction) = group[0].1.partial {
        parts.push(match reduction {
            Reduction::Sum => "addends of a sum".into(),
            Reduction::Mean => "addends of a mean".into(),
        });
    }
    parts.push(format!("held by {}", name_ranks(&ranks)));
    parts.join("; ")
}

fn lies(how: Placement) -> String {
    match how {
        Placement::Shard(dimension) => format!("cut along dimension {dimension}"),
        Placement::Replicate => "replicated".into(),
        Placement::Partial(Reduction::Sum) => "addends of a sum".into(),
        Placement::Partial(Reduction::Mean) => "addends of a mean".into(),
    }
}

/// Writes a table that is as wide as its contents; if that is wider than a line, each name has a
/// line of its own.
fn table(out: &mut String, rows: &[(Vec<String>, String)]) {
    let width = |column: usize| {
        let cells = rows.iter().map(|(row, _)| row[column].chars().count());
        cells.chain([COLUMNS[column].len()]).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let all: usize = widths.iter().sum::<usize>() + 2 * (COLUMNS.len() - 1);
    let apart = all > WIDTH;
    if apart {
        widths[0] = COLUMNS[0].len();
    }
    let line = |out: &mut String, cells: &[String]| {
        let mut text = String::new();
        for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = match column + 2 >= COLUMNS.len() {
                true => write!(text, "{gap}{cell:>width$}"),
                false => write!(text, "{gap}{cell:<width$}"),
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    };
    line(out, &COLUMNS.map(String::from));
    for (cells, placed) in rows {
        if apart {
            let _ = writeln!(out, "{}", cells[0]);
            line(out, &[&[String::new()], &cells[1..]].concat());
        } else {
            line(out, cells);
        }
        wrap(out, "  ", placed);
    }
    let tensors = plural(rows.len() as u64, "tensor");
    let _ = writeln!(out, "\n{tensors}, microbatches taken together");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_numbers_are_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ranges(&[3]), "3");
    }

    #[test]
    fn a_table_never_leaves_the_line_but_for_a_name() {
        let row = |name: &str| {
            let cells = [name, "bf16", "[16384, 64]", "q", "0-1", "8", "4.0 MiB"].map(String::from);
            (cells.to_vec(), "data: cut along dimension 0; held by ranks 0-3".into())
        };
        let mut short = String::new();
        table(&mut short, &[row("q")]);
        assert!(short.starts_with("tensor  dtype  shape        role"), "{short}");
        let mut long = String::new();
        table(&mut long, &[row("q"), row(&"layers.7.".repeat(12))]);
        let widest = long.lines().filter(|line| !line.starts_with("layers"));
        assert!(widest.clone().all(|line| line.len() <= WIDTH), "{long}");
        assert!(long.contains("\n        bf16"), "{long}");
    }
}
