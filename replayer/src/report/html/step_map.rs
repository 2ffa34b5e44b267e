//! The heat map of the step: kinds of parameters by stages. A cell has a block for each parameter of
//! the kind, in the order of the model, and says in words how many fail.
//!
//! A model of few parameters has a row for each. Of more those whose names differ only by the numbers
//! of their modules are one row: where all layers of a kind fail, and where one layer does, both are
//! seen.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write;

use askama::filters::Safe;

use super::Markup;
use super::picture::CLASSES;
use crate::algebra::{Fate, Row, Stage, Status, kind};
use crate::number::{error, ratio};

/// Parameters up to which each has a row, and rows that the map has at most.
const ROWS: usize = 60;
/// Blocks of a cell. Where a kind has more parameters a block shows the gravest of several.
const BLOCKS: usize = 48;
/// Pixels of a block, and of a cell at most.
const BLOCK: usize = 6;
const WIDEST: usize = 96;
/// Upper ends of the classes of error over what rounding explains; as many as the other maps have
/// colours.
const ENDS: [f64; CLASSES - 2] = [1.0, 2.0, 4.0, 16.0, 100.0, 1e4, 1e6];

/// How a parameter fares at one stage: a block of the map.
pub(super) trait Fares {
    /// What is said where none of a kind has the stage.
    const ABSENT: &'static str;

    /// What is told of it.
    fn status(&self) -> Status;
    /// How many times what rounding explains it is off; what is no number is furthest.
    fn off(&self) -> f64;
    /// The mark of one that fails.
    fn mark(&self) -> &'static str;
    /// All that is known of it, in a clause.
    fn numbers(&self) -> String;

    /// Whether it is graver than another, and where it is as grave, further off.
    fn compare(&self, other: &Self) -> Ordering {
        self.status().cmp(&other.status()).then(self.off().total_cmp(&other.off()))
    }
}

impl Fares for Fate {
    const ABSENT: &'static str = "not recorded";

    fn status(&self) -> Status {
        self.status
    }

    fn off(&self) -> f64 {
        Fate::off(self)
    }

    fn mark(&self) -> &'static str {
        "✕"
    }

    fn numbers(&self) -> String {
        numbers(self)
    }
}

/// A parameter, and how it fares at each stage.
pub(super) struct Line<'a, F> {
    pub(super) name: &'a str,
    /// Whether it has a row of its own, whatever its name.
    pub(super) is_alone: bool,
    pub(super) at: Vec<Option<&'a F>>,
}

impl<F: Fares> Line<'_, F> {
    fn gravest(&self) -> Option<Status> {
        self.at.iter().flatten().map(|own| own.status()).max()
    }
}

/// The parameters of a step, as the map has them.
pub(super) fn lines<'a>(table: &'a [Row], columns: &[Stage]) -> Vec<Line<'a, Fate>> {
    let line = |row: &'a Row| Line {
        name: &row.name,
        // Norms are told apart by their number.
        is_alone: row.elements == 0,
        at: columns.iter().map(|stage| row.fate(*stage)).collect(),
    };
    table.iter().map(line).collect()
}

/// The rows of the map.
pub(super) struct Kinds {
    pub(super) rows: Vec<KindRow>,
    /// How many there are with those that are left out.
    pub(super) all: usize,
    /// Which row of the map each parameter is in, by its place in the table.
    pub(super) kind_of: Vec<usize>,
}

/// Parameters of one kind.
pub(super) struct KindRow {
    /// The pattern of their names.
    pub(super) name: String,
    /// Its number.
    pub(super) number: usize,
    pub(super) count: usize,
    pub(super) cells: Vec<Cell>,
}

/// A kind at a stage.
pub(super) struct Cell {
    pub(super) stage: &'static str,
    pub(super) class: &'static str,
    /// A block for each parameter.
    pub(super) strip: Markup,
    /// How many fail, in words.
    pub(super) label: String,
    /// The one that is furthest off, with its numbers.
    pub(super) about: String,
}

/// What the colours mean.
pub(super) fn legend() -> Vec<String> {
    let name = |class: usize| match class {
        0 => "equal".into(),
        1 => "below 1".into(),
        at if at < CLASSES - 1 => {
            format!("{} to {}", short_end(ENDS[at - 2]), short_end(ENDS[at - 1]))
        }
        _ => format!("{} and more", short_end(ENDS[ENDS.len() - 1])),
    };
    (0..CLASSES).map(name).collect()
}

fn short_end(end: f64) -> String {
    if end < 1e3 { format!("{end}") } else { format!("{end:.0e}") }
}

/// The class of a colour.
fn class(over: f64) -> usize {
    match over {
        0.0 => 0,
        over => ENDS.iter().position(|end| over < *end).map_or(CLASSES - 1, |at| at + 1),
    }
}

/// The kinds of parameters in the order of the model; of too many those that fail first.
pub(super) fn kind_rows<F: Fares>(lines: &[Line<'_, F>], columns: &[&'static str]) -> Kinds {
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut kinds: Vec<(String, Vec<&Line<'_, F>>)> = Vec::new();
    let mut kind_of = Vec::with_capacity(lines.len());
    for line in lines {
        let is_alone = lines.len() <= ROWS || line.is_alone;
        let name = if is_alone { line.name.to_string() } else { kind(line.name) };
        let number = *numbers.entry(name.clone()).or_insert(kinds.len());
        kind_of.push(number);
        if number == kinds.len() {
            kinds.push((name, Vec::new()));
        }
        kinds[number].1.push(line);
    }
    let all = kinds.len();
    let gravest = |members: &[&Line<'_, F>]| members.iter().filter_map(|line| line.gravest()).max();
    let mut numbered: Vec<_> = kinds.into_iter().enumerate().collect();
    if all > ROWS {
        // The sort is stable: among as grave ones the order of the model stays.
        numbered.sort_by_key(|(_, (_, members))| std::cmp::Reverse(gravest(members)));
        numbered.truncate(ROWS);
        numbered.sort_by_key(|(number, _)| *number);
    }
    let row = |(number, (name, members)): (usize, (String, Vec<&Line<'_, F>>))| {
        let cell = |(at, stage): (usize, &&'static str)| cell(&members, at, stage);
        let cells = columns.iter().enumerate().map(cell).collect();
        KindRow { cells, count: members.len(), number, name }
    };
    Kinds { rows: numbered.into_iter().map(row).collect(), all, kind_of }
}

fn cell<F: Fares>(members: &[&Line<'_, F>], at: usize, stage: &'static str) -> Cell {
    let fates: Vec<Option<&F>> = members.iter().map(|line| line.at[at]).collect();
    let count =
        |status: Status| fates.iter().flatten().filter(|own| own.status() == status).count();
    let (diverged, unchecked) = (count(Status::Diverged), count(Status::Unchecked));
    let there = fates.iter().flatten().count();
    let of = |n: usize| {
        if n == members.len() { format!("{n}") } else { format!("{n} of {}", members.len()) }
    };
    let worst = members.iter().zip(&fates).filter_map(|(line, own)| Some((line, (*own)?)));
    let worst = worst.max_by(|(_, a), (_, b)| a.compare(b));
    let mark = worst.map_or("", |(_, own)| own.mark());
    let (class, label) = match (diverged, unchecked, there) {
        (1.., 1.., _) => ("bt-fail", format!("{mark} {diverged}, ? {}", of(unchecked))),
        (1.., ..) => ("bt-fail", format!("{mark} {}", of(diverged))),
        (_, 1.., _) => ("bt-warn", format!("? {}", of(unchecked))),
        (.., 0) => ("bt-skip", "–".into()),
        _ => ("bt-pass", format!("✓ {}", of(there))),
    };
    let about = match worst {
        Some((line, own)) => format!("furthest off: {}: {}", line.name, own.numbers()),
        None => F::ABSENT.into(),
    };
    let strip = Safe(if there > 0 { strip(&fates) } else { String::new() });
    Cell { stage, class, strip, label, about }
}

/// What is known of one stage of one parameter, in a clause.
pub(super) fn numbers(fate: &Fate) -> String {
    let mut text = match fate.status {
        Status::Agreed => "pass".to_string(),
        Status::Diverged => "FAIL".to_string(),
        Status::Unchecked => format!("unchecked: {}", fate.why.as_deref().unwrap_or_default()),
    };
    if let (Some(own), Some(floor)) = (fate.error, fate.floor)
        && own.is_finite()
    {
        let _ = write!(text, ", error {}, rounding explains {}", error(own), error(floor));
    }
    match (fate.factor, &fate.why) {
        (Some(factor), _) => drop(write!(text, ", captured = {factor:.7} x reference")),
        (None, Some(why)) if fate.status == Status::Diverged => drop(write!(text, ", {why}")),
        _ => {}
    }
    if fate.status == Status::Diverged {
        let ranks: Vec<_> = fate.ranks.iter().map(|rank| backtape::identity::Rank(*rank)).collect();
        let cause = fate.cause.unwrap_or("unknown");
        let _ = write!(text, ", on {}; cause: {cause}", crate::dump::name_ranks(&ranks));
    }
    text
}

/// Error over what rounding explains, as a cell has it.
pub(super) fn over(fate: &Fate) -> String {
    match fate.over() {
        Some(0.0) => "0".into(),
        Some(over) => ratio(over),
        None => String::new(),
    }
}

/// The blocks as paths by their colour, so that they print and keep it in either theme.
fn strip<F: Fares>(fates: &[Option<&F>]) -> String {
    let blocks = fates.len().min(BLOCKS);
    let mut shown: Vec<Option<&F>> = vec![None; blocks];
    for (at, fate) in fates.iter().enumerate() {
        let block = &mut shown[at * blocks / fates.len()];
        let is_worse = |fate: &&F| block.is_none_or(|held: &F| fate.compare(held).is_gt());
        if let Some(fate) = fate.filter(|fate| is_worse(fate)) {
            *block = Some(fate);
        }
    }
    let (mut paths, mut open, mut dots): ([String; CLASSES], _, _) =
        (Default::default(), String::new(), String::new());
    for (x, fate) in shown.iter().enumerate() {
        let Some(fate) = fate else { continue };
        match fate.status() {
            Status::Unchecked => drop(write!(open, "M{x} .5h1")),
            _ => drop(write!(paths[class(fate.off().max(0.0))], "M{x} .5h1")),
        }
        if fate.status() == Status::Diverged {
            let _ = write!(dots, "M{x}.5 .5h0");
        }
    }
    let width = (blocks * BLOCK).clamp(2 * BLOCK, WIDEST);
    let mut out = format!(
        "<svg class=\"bt-strip\" aria-hidden=\"true\" viewBox=\"0 0 {blocks} 1\" width=\"{width}\" \
         height=\"14\" preserveAspectRatio=\"none\">"
    );
    for (class, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = write!(out, "<path class=\"bt-c{class}\" d=\"{path}\"/>");
    }
    for (class, path) in [("bt-open", open), ("bt-dots", dots)] {
        if !path.is_empty() {
            let _ = write!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    out.push_str("</svg>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(status: Status, error: f64) -> Fate {
        Fate {
            stage: Stage::Reduce,
            status,
            ranks: vec![0],
            tensor: "step.reduced:w".into(),
            factor: None,
            error: (status != Status::Unchecked).then_some(error),
            floor: (status != Status::Unchecked).then_some(1.0),
            seen_from: None,
            cause: None,
            why: None,
        }
    }

    fn row(name: String, stages: Vec<Fate>) -> Row {
        Row { name, shape: vec![4], elements: 4, optimizer: None, group: None, stages }
    }

    /// Goal: one failing layer of thousands is seen. Method: 5,000 layers of two kinds, of which one
    /// parameter fails, one is unchecked and one was not recorded.
    #[test]
    fn one_parameter_that_fails_is_seen_among_thousands_of_its_kind() {
        let of = |layer: usize, name: &str| match (layer, name) {
            (1234, "w") => vec![fate(Status::Diverged, 1e5)],
            (7, "w") => vec![fate(Status::Unchecked, 0.0)],
            (8, "w") => Vec::new(),
            _ => vec![fate(Status::Agreed, 0.5)],
        };
        let named =
            |layer: usize, name: &str| row(format!("layers.{layer}.{name}"), of(layer, name));
        let table: Vec<Row> =
            (0..5000).flat_map(|layer| ["w", "b"].map(|name| named(layer, name))).collect();
        let columns = [Stage::Reduce, Stage::Clip];
        let kinds = kind_rows(&lines(&table, &columns), &columns.map(Stage::name));
        let [w, b] = &kinds.rows[..] else { panic!("{} rows", kinds.rows.len()) };
        assert_eq!((w.name.as_str(), w.count), ("layers.*.w", 5000));
        assert_eq!((w.cells[0].class, w.cells[0].label.as_str()), ("bt-fail", "✕ 1, ? 1 of 5000"));
        assert!(w.cells[0].about.starts_with("furthest off: layers.1234.w: FAIL, error 1.0e5"));
        // The block of layer 1234, and no other, has a dot.
        assert_eq!(w.cells[0].strip.0.matches(".5 .5h0").count(), 1);
        let block = 1234 * BLOCKS / 5000;
        assert!(w.cells[0].strip.0.contains(&format!("M{block}.5 .5h0")), "{}", w.cells[0].strip.0);
        assert_eq!((b.cells[0].class, b.cells[0].label.as_str()), ("bt-pass", "✓ 5000"));
        assert_eq!((b.cells[1].class, b.cells[1].label.as_str()), ("bt-skip", "–"));
        assert_eq!((kinds.kind_of[0], kinds.kind_of[1], kinds.kind_of.len()), (0, 1, 10_000));
    }

    #[test]
    fn of_too_many_kinds_those_that_fail_are_shown() {
        let of = |at: usize| fate(if at == 900 { Status::Diverged } else { Status::Agreed }, 2.0);
        let table: Vec<Row> =
            (0..1000).map(|at| row(format!("word{}.w{at}", at % 7), vec![of(at)])).collect();
        let kinds = kind_rows(&lines(&table, &[Stage::Reduce]), &["reduce"]);
        assert_eq!((kinds.all, kinds.rows.len()), (1000, ROWS));
        assert!(kinds.rows.iter().any(|kind| kind.cells[0].class == "bt-fail"));
    }

    #[test]
    fn a_colour_tells_how_many_times_what_rounding_explains() {
        assert_eq!([0.0, 0.3, 1.0, 3.0, 5e6, f64::INFINITY].map(class), [0, 1, 2, 3, 8, 8]);
        assert_eq!(legend()[1], "below 1");
        assert_eq!(legend()[7], "1e4 to 1e6");
        assert_eq!(legend().len(), CLASSES);
    }
}
