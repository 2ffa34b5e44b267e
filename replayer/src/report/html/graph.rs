//! The graph of the head's stages, forward above and backward below, with the stage
//! at which the gradients diverge first. Each box leads to its stage.

use std::fmt::Write;

use super::Page;
use super::escape::esc;
use super::stages::glyph;
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

struct Node<'a> {
    stage: Stage,
    report: &'a StageReport,
    row: i32,
    x: i32,
    y: i32,
}

impl Page<'_> {
    pub(super) fn graph(&self, out: &mut String) {
        self.section(out, "graph", "Stage graph");
        let nodes = self.nodes();
        if nodes.is_empty() {
            out.push_str("<p>No head was replayed: there is no graph of its stages.</p>\n");
            out.push_str("</section>\n");
            return;
        }
        let first = self.report.first_divergence.as_ref().map(|first| first.stage.as_str());
        let marked = first.and_then(|name| nodes.iter().find(|node| node.report.name == name));
        let height = nodes.iter().map(|node| node.y).max().unwrap_or(0) + BOX.1 + 6;
        let _ = writeln!(
            out,
            "<div class=\"bt-scroll\"><svg class=\"bt-graph\" role=\"group\" \
             aria-label=\"stages of the head, inputs first\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\">"
        );
        for node in &nodes {
            let parents = nodes.iter().filter(|other| node.stage.parents().contains(&other.stage));
            for parent in parents {
                edge(out, parent, node, marked.is_some_and(|of| of.stage == node.stage));
            }
        }
        for node in &nodes {
            self.node(out, node, marked.is_some_and(|of| of.stage == node.stage));
        }
        out.push_str("</svg></div>\n");
        let words = match (first, marked) {
            (Some(_), Some(_)) => {
                "The double frame marks the first divergence; the lines into it are what it is computed from."
            }
            (Some(_), None) => {
                "The first divergence is no stage of the head: it is among the tensors of both runs below."
            }
            (None, _) => "No stage diverges.",
        };
        let _ = writeln!(
            out,
            "<p class=\"bt-note\">{words} ✓ pass, ! warn, ✕ fail, with error over floor; ○ an input; \
             dashed: not compared.</p>\n</section>"
        );
    }

    fn nodes(&self) -> Vec<Node<'_>> {
        let stages = &self.report.stages;
        let of = |stage: &Stage| stages.iter().find(|one| one.name == stage.name());
        let mut nodes = Vec::new();
        let mut row = 0;
        for stages in ROWS {
            let drawn = |stage: &&Stage| {
                of(stage).is_some_and(|of| of.status != Status::Skip || !OPTIONAL.contains(stage))
            };
            let shown: Vec<&Stage> = stages.iter().filter(drawn).collect();
            let room = WIDTH - shown.len() as i32 * PITCH.0 + (PITCH.0 - BOX.0);
            for (at, &&stage) in shown.iter().enumerate() {
                let Some(report) = of(&stage) else { continue };
                let (x, y) = (room / 2 + at as i32 * PITCH.0, TOP + row * PITCH.1);
                nodes.push(Node { stage, report, row, x, y });
            }
            row += i32::from(!shown.is_empty());
        }
        nodes
    }

    fn node(&self, out: &mut String, node: &Node<'_>, first: bool) {
        let Node { stage, report, x, y, .. } = node;
        let status = match (report.status, report.worst.is_some(), stage.is_input()) {
            (Status::Skip, ..) => "not compared".to_string(),
            (Status::Pass, false, true) => "input".into(),
            (of, true, _) => {
                let ratio = report.worst.as_ref().map_or(f64::NAN, |worst| worst.ratio);
                format!("{} {}x", word(of), ratio_of(ratio))
            }
            (of, ..) => word(of).into(),
        };
        let class = match report.status {
            Status::Pass => "bt-pass",
            Status::Warn => "bt-warn",
            Status::Fail => "bt-fail",
            Status::Skip => "bt-skip",
        };
        let target = if report.worst.is_some() { "stage" } else { "row" };
        let mark = glyph(report.status, stage.is_input() && report.worst.is_none());
        let said = if first { "; the first divergence" } else { "" };
        let about = format!("{}: {status}{said}. {}", report.name, stage.words());
        let _ = writeln!(
            out,
            "<a href=\"#{}-{target}-{}\" class=\"bt-node {class}\" aria-label=\"{}\"><title>{}</title>",
            self.id,
            report.name,
            esc(&about),
            esc(&about),
        );
        if first {
            let _ = writeln!(
                out,
                "<rect class=\"bt-first\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"7\"/>\
                 <text class=\"bt-flag\" x=\"{}\" y=\"{}\">first divergence</text>",
                x - 4,
                y - 4,
                BOX.0 + 8,
                BOX.1 + 8,
                x + BOX.0 / 2,
                y - 8
            );
        }
        let _ = writeln!(
            out,
            "<rect class=\"bt-box\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"4\"/>\
             <text class=\"bt-name\" x=\"{}\" y=\"{}\">{}</text>\
             <text class=\"bt-word\" x=\"{}\" y=\"{}\">{mark} {}</text></a>",
            BOX.0,
            BOX.1,
            x + BOX.0 / 2,
            y + 15,
            report.name,
            x + BOX.0 / 2,
            y + 29,
            esc(&status)
        );
    }
}

/// A ratio of no numbers is said as that.
fn ratio_of(x: f64) -> String {
    if x.is_nan() { "NaN ".into() } else { ratio(x) }
}

/// From the foot of one box to the head of another; what passes other rows is faint.
fn edge(out: &mut String, from: &Node<'_>, to: &Node<'_>, marked: bool) {
    let (x1, y1) = (from.x + BOX.0 / 2, from.y + BOX.1);
    let (x2, y2) = (to.x + BOX.0 / 2, to.y);
    let bend = (y2 - y1) / 2;
    let class = match (marked, to.row - from.row) {
        (true, _) => "bt-edge bt-into",
        (false, 1) => "bt-edge",
        _ => "bt-edge bt-far",
    };
    let _ = writeln!(
        out,
        "<path class=\"{class}\" d=\"M{x1} {y1}C{x1} {} {x2} {} {x2} {y2}\"/>",
        y1 + bend,
        y2 - bend
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_one_place_below_what_it_is_computed_from() {
        let row = |stage: Stage| {
            let mut places = ROWS.iter().enumerate().filter(|(_, row)| row.contains(&stage));
            let found = places.next().map(|(at, _)| at);
            assert!(places.next().is_none(), "{stage} stands twice");
            found.unwrap_or_else(|| panic!("{stage} stands nowhere"))
        };
        for &stage in Stage::ALL {
            assert!(stage.parents().iter().all(|&parent| row(parent) < row(stage)), "{stage}");
        }
    }
}
