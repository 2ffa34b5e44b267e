//! The stages: one table of all, and for each that was compared its numbers three ways, how
//! its errors are distributed, and which rows they are in.

use askama::Template;

use super::bars::{Bar, Drawing, Widths, decades, draw};
use super::{Markup, Page, markup};
use crate::head::Stage;
use crate::number::{count, error, plural, ratio, scale, short};
use crate::replay::outcome::Status;
use crate::report::measured;
use crate::report::schema::{ComparisonReport, ScoreClass, StageReport};
use crate::report::text::{place, word};

/// A mark that says a status without a colour.
pub(super) fn glyph(status: Status, input: bool) -> &'static str {
    match status {
        Status::Pass if input => "○",
        Status::Pass => "✓",
        Status::Warn => "!",
        Status::Fail => "✕",
        Status::Skip => "–",
    }
}

/// A class by its status.
pub(super) fn class(status: Status) -> &'static str {
    match status {
        Status::Pass => "bt-pass",
        Status::Warn => "bt-warn",
        Status::Fail => "bt-fail",
        Status::Skip => "bt-skip",
    }
}

fn index(element: Option<(u64, u64)>) -> String {
    element.map(|(row, column)| format!("[{row}, {column}]")).unwrap_or_default()
}

#[derive(Template)]
#[template(path = "stages.html")]
struct Stages<'a> {
    id: &'a str,
    /// Whether there is any.
    compared: bool,
    table: Markup,
    cards: Vec<Card<'a>>,
}

/// All that is known of one stage that was compared.
struct Card<'a> {
    stage: &'a StageReport,
    class: &'static str,
    glyph: &'static str,
    status: String,
    /// What the stage is.
    words: &'static str,
    /// How many comparisons there are of it, and which this is.
    of_these: String,
    source: String,
    /// Captured, recomputed in f64, and what the declared policy makes of the same inputs: a name,
    /// a value, and what it is.
    lines: Vec<(&'static str, String, String)>,
    scores: Option<Drawing>,
    hits: Option<Drawing>,
    sizes: String,
    ulps: String,
    /// The worst rows.
    rows: String,
}

#[derive(Template)]
#[template(path = "stage_table.html")]
struct Table<'a> {
    id: &'a str,
    caption: &'a str,
    rows: Vec<Row<'a>>,
}

struct Row<'a> {
    stage: &'a StageReport,
    class: &'static str,
    status: String,
    /// Error, floor, ratio, the worst element, both its values, where; none of a stage that was
    /// not compared, and why in place of them.
    cells: Vec<String>,
    why: String,
}

impl Page<'_> {
    pub(super) fn stages(&self) -> Markup {
        let stages = &self.report.stages;
        let compared = stages
            .iter()
            .filter_map(|stage| stage.worst.as_ref().map(|comparison| (stage, comparison)));
        markup(&Stages {
            id: &self.id,
            compared: !stages.is_empty(),
            table: stage_table(stages, &format!("{}-row", self.id), "All stages"),
            cards: compared.filter_map(|(stage, worst)| self.card(stage, worst)).collect(),
        })
    }

    fn card<'a>(&self, stage: &'a StageReport, worst: &ComparisonReport) -> Option<Card<'a>> {
        let known_stage = Stage::ALL.iter().find(|known_stage| known_stage.name() == stage.name)?;
        let first = self
            .report
            .first_divergence
            .as_ref()
            .is_some_and(|divergence| divergence.stage == stage.name);
        let first = if first { ", the first divergence" } else { "" };
        // The source names the microbatch.
        let of_rank = place(None, worst.rank);
        let of_rank = if of_rank.is_empty() { of_rank } else { format!(", {of_rank}") };
        let of_these = match (stage.comparisons, stage.failing.len()) {
            (1, _) => String::new(),
            (n, 0) => format!(" The worst of {n} comparisons over microbatches and ranks."),
            (n, failing) => format!(" {failing} of {n} comparisons fail; this is the worst."),
        };
        Some(Card {
            stage,
            class: class(stage.status),
            glyph: glyph(stage.status, false),
            status: format!("{}{first}", word(stage.status)),
            words: known_stage.words(),
            of_these,
            source: format!("{}{of_rank}", worst.source),
            lines: self.three_ways(stage, worst),
            scores: scores(worst),
            hits: hits(worst),
            sizes: measured::sizes(&worst.measures, worst.elements),
            ulps: measured::ulps(&worst.measures),
            rows: rows(worst, self.detail.items.min(8)),
        })
    }

    fn three_ways(
        &self,
        stage: &StageReport,
        worst: &ComparisonReport,
    ) -> Vec<(&'static str, String, String)> {
        let policy = match (&worst.best_member, worst.floor_source) {
            (Some(member), source) => format!("floor, {source}; nearest to the job: {member}"),
            (None, source) => format!("floor, {source}"),
        };
        let over = format!("{}x", ratio(worst.ratio));
        let mut lines = vec![
            ("captured to reference", error(worst.error), "error: dumped against f64".into()),
            ("policy to reference", error(worst.floor), policy),
            ("captured to policy", over, "error over floor".into()),
        ];
        if let Some(against) = &self.report.against {
            let other = against.stages.iter().find(|other| other.name == stage.name);
            if let Some(other) = other.and_then(|other| other.worst.as_ref()) {
                let about = format!("error of the other run, {}x its floor", ratio(other.ratio));
                lines.push(("other run to reference", error(other.error), about));
            }
            for apart in against
                .differences
                .iter()
                .filter(|difference| difference.stage.name() == stage.name)
            {
                let allowed = apart.allowed.map_or("-".into(), error);
                let where_apart = place(apart.microbatch.map(|mb| mb.0), None);
                let about = format!("allowed {allowed} {where_apart}");
                lines.push(("this to other run", error(apart.difference), about));
            }
        }
        if let (Some(captured), Some(reference)) = (worst.worst_captured, worst.worst_reference) {
            let element = index(worst.worst_index);
            lines.push(("worst captured", short(captured), format!("element {element}")));
            lines.push(("worst reference", short(reference), format!("element {element}")));
        }
        let beyond = match worst.exceeding {
            0 => format!("of {}", plural(worst.elements, "element")),
            _ => format!("of {}; the first {}", count(worst.elements), index(worst.first_index)),
        };
        lines.push(("beyond their bound", count(worst.exceeding), beyond));
        lines.push(("rows beyond", count(worst.exceeding_rows), String::new()));
        lines.push(("scale", scale(worst.slope), "of the captured values".into()));
        lines
    }
}

/// A table of stages: those of this run or of the other.
pub(super) fn stage_table(stages: &[StageReport], id: &str, caption: &str) -> Markup {
    markup(&Table { id, caption, rows: stages.iter().map(row).collect() })
}

fn row(stage: &StageReport) -> Row<'_> {
    let StageReport { status, worst, reason, .. } = stage;
    let input = worst.is_none() && *status == Status::Pass;
    let value = |x: Option<f64>| x.map(short).unwrap_or_default();
    let cells = worst.as_ref().map(|worst| {
        vec![
            error(worst.error),
            error(worst.floor),
            ratio(worst.ratio),
            index(worst.worst_index),
            value(worst.worst_captured),
            value(worst.worst_reference),
            place(worst.microbatch, worst.rank),
        ]
    });
    Row {
        stage,
        class: class(*status),
        status: format!("{} {}", glyph(*status, input), word(*status)),
        cells: cells.unwrap_or_default(),
        why: if input { format!("input: {reason}") } else { reason.clone() },
    }
}

/// How |error| over σ is distributed, beside a normal distribution.
fn scores(worst: &ComparisonReport) -> Option<Drawing> {
    let all: u64 = worst.scores.iter().map(|class| class.count).sum();
    if all == 0 {
        return None;
    }
    // One element more than there are, so that a single one has a length.
    let length = |n: f64| (1.0 + n).ln() / (1.0 + all as f64).ln().max(f64::MIN_POSITIVE);
    let bar_of = |class: &ScoreClass| Bar {
        label: match class.to {
            Some(to) => format!("{} to {to} σ", class.from),
            None => format!("{} σ and more", class.from),
        },
        from: 0.0,
        to: length(class.count as f64),
        class: if class.from >= 6.0 && class.count > 0 { "bt-far-out" } else { "bt-plain" },
        mark: Some(length(class.normal)),
        value: format!("{} ({} if normal)", count(class.count), count(class.normal.round() as u64)),
    };
    let bars: Vec<Bar> = worst.scores.iter().map(bar_of).collect();
    let about = "Elements by error over the standard deviation that rounding explains; logarithmic";
    Some(draw(about.into(), bars, &Widths(96, 150, 260)))
}

/// Error over floor by how often a row is a label.
fn hits(worst: &ComparisonReport) -> Option<Drawing> {
    let classes = worst.by_hits.iter().filter(|class| class.rows > 0);
    let over: Vec<(String, f64, u64)> = classes
        .map(|class| {
            let name = match class.hits_from {
                n @ (0 | 1) => format!("{n} hits"),
                n => format!("{n} to {} hits", 2 * u64::from(n) - 1),
            };
            (name, (class.error_energy / class.expected_energy).sqrt(), class.rows)
        })
        .collect();
    if over.len() < 2 {
        return None;
    }
    let scale = decades(over.iter().map(|(_, x, _)| *x).chain([1.0]));
    let bar_of = |(label, x, n): &(String, f64, u64)| Bar {
        label: label.clone(),
        from: 0.0,
        to: scale(*x),
        class: "bt-plain",
        mark: Some(scale(1.0)),
        value: format!("{}x in {}", ratio(*x), plural(*n, "row")),
    };
    let bars: Vec<Bar> = over.iter().map(bar_of).collect();
    let about = "Error over what rounding explains, by how often a row is a label; logarithmic";
    Some(draw(about.into(), bars, &Widths(116, 150, 150)))
}

/// The worst rows, and error over floor of each.
fn rows(worst: &ComparisonReport, most: usize) -> String {
    let shown = worst.worst_rows.iter().take(most);
    let words: Vec<String> =
        shown.map(|(row, _, over)| format!("{row} ({}x)", ratio(*over))).collect();
    words.join(", ")
}
