//! The table of all parameters of a step, as plain rows: a script filters and sorts them.

use super::Detail;
use super::step_map::{numbers, over};
use crate::algebra::{Fate, Row, Stage, Status};
use crate::number::count;

/// A parameter and how it fares at each stage.
pub(super) struct ParameterRow<'a> {
    pub(super) row: &'a Row,
    /// Of its gravest stage.
    pub(super) class: &'static str,
    /// Which row of the heat map it is in.
    pub(super) kind: usize,
    pub(super) shape: String,
    pub(super) elements: String,
    /// The optimizer's group that holds it.
    pub(super) group: String,
    pub(super) cells: Vec<Cell>,
}

/// A stage of it.
pub(super) struct Cell {
    pub(super) text: String,
    /// Whether it fails, which stands out.
    pub(super) fails: bool,
    /// All its numbers; empty where the page has no room for them.
    pub(super) about: String,
}

/// Rows in the order of the model; where there are more than the page has room for, the first of
/// those that fail, then of those that are unchecked, then of the others.
pub(super) fn parameter_rows<'a>(
    (table, kind_of): (&'a [Row], &[usize]),
    columns: &[Stage],
    detail: &Detail,
) -> Vec<ParameterRow<'a>> {
    let mut numbered: Vec<(usize, &Row)> = table.iter().enumerate().collect();
    if numbered.len() > detail.parameters {
        // The sort is stable: among as grave ones the order of the model stays.
        numbered.sort_by_key(|(_, row)| std::cmp::Reverse(row.status()));
        numbered.truncate(detail.parameters);
        numbered.sort_by_key(|(at, _)| *at);
    }
    let cell = |fate: Option<&Fate>| Cell {
        text: fate.map_or("–".into(), text),
        fails: fate.is_some_and(|fate| fate.status == Status::Diverged),
        about: fate.filter(|_| detail.titles).map(numbers).unwrap_or_default(),
    };
    let row = |(at, row): (usize, &'a Row)| ParameterRow {
        row,
        class: match row.status() {
            Some(Status::Diverged) => "bt-fail",
            Some(Status::Unchecked) => "bt-warn",
            _ => "bt-pass",
        },
        kind: kind_of[at],
        shape: if row.elements > 0 { format!("{:?}", row.shape) } else { String::new() },
        elements: if row.elements > 0 { count(row.elements) } else { String::new() },
        group: match (row.optimizer, row.group) {
            (Some(optimizer), Some(group)) => format!("{optimizer}.{group}"),
            _ => String::new(),
        },
        cells: columns.iter().map(|stage| cell(row.fate(*stage))).collect(),
    };
    numbered.into_iter().map(row).collect()
}

/// A mark, and error over what rounding explains.
fn text(fate: &Fate) -> String {
    let mark = match fate.status {
        Status::Agreed => "✓",
        Status::Diverged => "✕",
        Status::Unchecked => "?",
    };
    format!("{mark} {}", over(fate)).trim_end().to_string()
}
