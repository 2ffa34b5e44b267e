//! The graph of the head's stages, forward above and backward below, with the stage
//! at which the gradients diverge first. Each box leads to its stage.

use askama::Template;

use super::stages::{class, glyph};
use super::{Markup, Page, markup};
use crate::head::Stage;
use crate::number::ratio;
use crate::replay::outcome::Status;
use crate::report::schema::StageReport;
use crate::report::text::word;

/// Rows of the drawing, from the inputs down.
const ROWS: &[&[Stage]] = &[
    &[Stage::Q, Stage::K, Stage::Bias, Stage::Labels, Stage::Weights, Stage::Cotangent],
    &[Stage::TokenOrder, Stage::Advantages, Stage::OldLogprobs, Stage::RefLogprobs],
    &[Stage::Logits],
    &[Stage::Lse, Stage::LabelLogits],
    &[Stage::P, Stage::Nll, Stage::Logprobs],
    &[Stage::Loss, Stage::Dlogprobs],
    &[Stage::G],
    &[Stage::GLse, Stage::GLabel],
    &[Stage::Dlogits],
    &[Stage::DqLse, Stage::DqLabel, Stage::DkLse, Stage::DkLabel],
    &[Stage::Dq, Stage::Dk, Stage::Dbias],
    &[Stage::Accumulate],
    &[Stage::Reduce],
    &[Stage::GradNorm],
];

/// What a head need not have: left out of the drawing where it was not recorded.
const OPTIONAL: &[Stage] = &[
    Stage::Bias,
    Stage::Cotangent,
    Stage::TokenOrder,
    Stage::Advantages,
    Stage::OldLogprobs,
    Stage::RefLogprobs,
    Stage::Logprobs,
    Stage::Dlogprobs,
    Stage::Dbias,
];

const BOX: (i32, i32) = (112, 36);
const PITCH: (i32, i32) = (122, 55);
const WIDTH: i32 = 6 * PITCH.0;
/// Room above the first row.
const TOP: i32 = 18;

#[derive(Template)]
#[template(path = "graph.html")]
struct Graph<'a> {
    id: &'a str,
    width: i32,
    height: i32,
    /// Of a box.
    size: (i32, i32),
    edges: Vec<Edge>,
    nodes: Vec<Node<'a>>,
    /// Where the first divergence is.
    words: &'static str,
}

struct Node<'a> {
    stage: Stage,
    report: &'a StageReport,
    row: i32,
    x: i32,
    y: i32,
    /// Whether the gradients diverge here first.
    first: bool,
    class: &'static str,
    /// Which element of the page says more of it.
    target: &'static str,
    mark: &'static str,
    status: String,
    /// All of it in a sentence.
    about: String,
}

struct Edge {
    class: &'static str,
    from: (i32, i32),
    to: (i32, i32),
    bend: i32,
}

impl Page<'_> {
    pub(super) fn graph(&self) -> Markup {
        let first = self.report.first_divergence.as_ref().map(|first| first.stage.as_str());
        let nodes = self.nodes(first);
        let mut edges = Vec::new();
        for node in &nodes {
            let parents = nodes.iter().filter(|other| node.stage.parents().contains(&other.stage));
            edges.extend(parents.map(|parent| edge(parent, node)));
        }
        let words = match first {
            Some(_) if nodes.iter().any(|node| node.first) => {
                "The double frame marks the first divergence; the lines into it are what it is computed from."
            }
            Some(_) => {
                "The first divergence is no stage of the head: it is among the tensors of both runs below."
            }
            None => "No stage diverges.",
        };
        let height = nodes.iter().map(|node| node.y).max().unwrap_or(0) + BOX.1 + 6;
        markup(&Graph { id: &self.id, width: WIDTH, height, size: BOX, edges, nodes, words })
    }

    fn nodes(&self, first: Option<&str>) -> Vec<Node<'_>> {
        let stages = &self.report.stages;
        let report_of = |stage: &Stage| stages.iter().find(|one| one.name == stage.name());
        let mut nodes = Vec::new();
        let mut row = 0;
        for stages in ROWS {
            let drawn = |stage: &&Stage| {
                report_of(stage)
                    .is_some_and(|of| of.status != Status::Skip || !OPTIONAL.contains(stage))
            };
            let shown: Vec<&Stage> = stages.iter().filter(drawn).collect();
            let room = WIDTH - shown.len() as i32 * PITCH.0 + (PITCH.0 - BOX.0);
            for (index, &&stage) in shown.iter().enumerate() {
                let Some(report) = report_of(&stage) else { continue };
                let (x, y) = (room / 2 + index as i32 * PITCH.0, TOP + row * PITCH.1);
                nodes.push(node((stage, report), row, (x, y), first == Some(report.name)));
            }
            row += i32::from(!shown.is_empty());
        }
        nodes
    }
}

/// A stage at its place on the drawing.
fn node<'a>(
    (stage, report): (Stage, &'a StageReport),
    row: i32,
    (x, y): (i32, i32),
    first: bool,
) -> Node<'a> {
    let status = match (report.status, &report.worst, stage.is_input()) {
        (Status::Skip, ..) => "not compared".to_string(),
        (Status::Pass, None, true) => "input".into(),
        (status, Some(worst), _) => format!("{} {}x", word(status), ratio_of(worst.ratio)),
        (status, ..) => word(status).into(),
    };
    let said = if first { "; the first divergence" } else { "" };
    Node {
        stage,
        report,
        row,
        x,
        y,
        first,
        class: class(report.status),
        target: if report.worst.is_some() { "stage" } else { "row" },
        mark: glyph(report.status, stage.is_input() && report.worst.is_none()),
        about: format!("{}: {status}{said}. {}", report.name, stage.words()),
        status,
    }
}

/// A ratio of no numbers is said as that.
fn ratio_of(x: f64) -> String {
    if x.is_nan() { "NaN ".into() } else { ratio(x) }
}

/// From the foot of one box to the head of another; what passes other rows is faint.
fn edge(from: &Node<'_>, to: &Node<'_>) -> Edge {
    let class = match (to.first, to.row - from.row) {
        (true, _) => "bt-edge bt-into",
        (false, 1) => "bt-edge",
        _ => "bt-edge bt-far",
    };
    let (foot, head) = (from.y + BOX.1, to.y);
    let bend = (head - foot) / 2;
    Edge { class, from: (from.x + BOX.0 / 2, foot), to: (to.x + BOX.0 / 2, head), bend }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_one_place_below_what_it_is_computed_from() {
        let row = |stage: Stage| {
            let mut places = ROWS.iter().enumerate().filter(|(_, row)| row.contains(&stage));
            let position = places.next().map(|(at, _)| at);
            assert!(places.next().is_none(), "{stage} stands twice");
            position.unwrap_or_else(|| panic!("{stage} stands nowhere"))
        };
        for &stage in Stage::ALL {
            assert!(stage.parents().iter().all(|&parent| row(parent) < row(stage)), "{stage}");
        }
    }
}
