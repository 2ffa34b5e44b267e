//! The stages: one table of all, and for each that was compared its numbers three ways, how
//! its errors are distributed, and which rows they are in.

use std::fmt::Write;

use super::Page;
use super::bars::{Bar, Widths, decades, draw};
use super::escape::esc;
use crate::head::Stage;
use crate::number::{count, error, plural, ratio, scale, short};
use crate::replay::outcome::Status;
use crate::report::measured;
use crate::report::schema::{ComparisonReport, StageReport};
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

fn index(at: Option<(u64, u64)>) -> String {
    at.map(|(row, column)| format!("[{row}, {column}]")).unwrap_or_default()
}

impl Page<'_> {
    pub(super) fn stages(&self, out: &mut String) {
        self.section(out, "stages", "Stages");
        if self.report.stages.is_empty() {
            out.push_str("<p>No stage was compared: no head was replayed.</p>\n</section>\n");
            return;
        }
        out.push_str(
            "<p class=\"bt-note\">error: captured against the stage recomputed in f64 from the dump's own \
             inputs, relative, Frobenius norm. floor: the error that the declared precision has \
             itself. The status comes from bounds on elements, rows, the whole and the slope, not \
             from the ratio.</p>\n",
        );
        stage_table(out, &self.report.stages, &format!("{}-row", self.id), "All stages");
        out.push_str("<div class=\"bt-cards\">\n");
        for stage in &self.report.stages {
            if let Some(worst) = &stage.worst {
                self.card(out, stage, worst);
            }
        }
        out.push_str("</div>\n</section>\n");
    }

    fn card(&self, out: &mut String, stage: &StageReport, worst: &ComparisonReport) {
        let Some(of) = Stage::ALL.iter().find(|of| of.name() == stage.name) else { return };
        let first = self.report.first_divergence.as_ref().is_some_and(|of| of.stage == stage.name);
        let _ = writeln!(
            out,
            "<section class=\"bt-card {}\" id=\"{}-stage-{}\" tabindex=\"-1\" aria-label=\"stage {}\">\n\
             <h3>{} {} <small>{}{}</small></h3>\n<p>{}.",
            class(stage.status),
            self.id,
            stage.name,
            stage.name,
            glyph(stage.status, false),
            stage.name,
            word(stage.status),
            if first { ", the first divergence" } else { "" },
            esc(of.words())
        );
        if !stage.reason.is_empty() {
            let _ = writeln!(out, " <strong>{}.</strong>", esc(&stage.reason));
        }
        // The source names the microbatch.
        let at = place(None, worst.rank);
        let of_these = match (stage.comparisons, stage.failing.len()) {
            (1, _) => String::new(),
            (n, 0) => format!(" The worst of {n} comparisons over microbatches and ranks."),
            (n, failing) => format!(" {failing} of {n} comparisons fail; this is the worst."),
        };
        let at = if at.is_empty() { at } else { format!(", {at}") };
        let _ = writeln!(out, "{of_these} From {}{at}.</p>", esc(&worst.source));
        self.three_ways(out, stage, worst);
        scores(out, worst);
        hits(out, worst);
        let _ = writeln!(
            out,
            "<p class=\"bt-note\">{}. {}.</p>",
            esc(&measured::sizes(&worst.measures, worst.elements)),
            esc(&measured::ulps(&worst.measures))
        );
        rows(out, worst, self.detail.items.min(8));
        out.push_str("</section>\n");
    }

    /// Captured, recomputed in f64, and what the declared policy makes of the same inputs.
    fn three_ways(&self, out: &mut String, stage: &StageReport, worst: &ComparisonReport) {
        let _ = writeln!(
            out,
            "<table class=\"bt-three\"><caption>{} three ways</caption>",
            esc(stage.name)
        );
        let mut line = |name: &str, value: String, about: String| {
            let _ = writeln!(
                out,
                "<tr><th scope=\"row\">{}</th><td class=\"bt-num\">{}</td><td>{}</td></tr>",
                esc(name),
                esc(&value),
                esc(&about)
            );
        };
        line("captured to reference", error(worst.error), "error: dumped against f64".into());
        let policy = match (&worst.best_member, worst.floor_source) {
            (Some(member), source) => format!("floor, {source}; nearest to the job: {member}"),
            (None, source) => format!("floor, {source}"),
        };
        line("policy to reference", error(worst.floor), policy);
        line("captured to policy", format!("{}x", ratio(worst.ratio)), "error over floor".into());
        if let Some(against) = &self.report.against {
            let other = against.stages.iter().find(|other| other.name == stage.name);
            if let Some(other) = other.and_then(|other| other.worst.as_ref()) {
                let about = format!("error of the other run, {}x its floor", ratio(other.ratio));
                line("other run to reference", error(other.error), about);
            }
            for apart in against.differences.iter().filter(|of| of.stage.name() == stage.name) {
                let allowed = apart.allowed.map_or("-".into(), error);
                let of = place(apart.microbatch.map(|mb| mb.0), None);
                line(
                    "this to other run",
                    error(apart.difference),
                    format!("allowed {allowed} {of}"),
                );
            }
        }
        if let (Some(captured), Some(reference)) = (worst.worst_captured, worst.worst_reference) {
            let at = index(worst.worst_index);
            line("worst captured", short(captured), format!("element {at}"));
            line("worst reference", short(reference), format!("element {at}"));
        }
        let beyond =
            format!("of {}; the first {}", count(worst.elements), index(worst.first_index));
        match worst.exceeding {
            0 => line(
                "beyond their bound",
                "0".into(),
                format!("of {}", plural(worst.elements, "element")),
            ),
            n => line("beyond their bound", count(n), beyond),
        }
        line("rows beyond", count(worst.exceeding_rows), String::new());
        line("scale", scale(worst.slope), "of the captured values".into());
        out.push_str("</table>\n");
    }
}

/// A table of stages: those of this run or of the other.
pub(super) fn stage_table(out: &mut String, stages: &[StageReport], id: &str, caption: &str) {
    let _ = writeln!(
        out,
        "<div class=\"bt-scroll\"><table class=\"bt-stages\"><caption>{}</caption><thead><tr>\
         <th scope=\"col\">stage</th><th scope=\"col\">status</th><th scope=\"col\">error</th>\
         <th scope=\"col\">floor</th><th scope=\"col\">ratio</th><th scope=\"col\">worst element</th>\
         <th scope=\"col\">captured</th><th scope=\"col\">reference</th><th scope=\"col\">where</th>\
         </tr></thead><tbody>",
        esc(caption)
    );
    for stage in stages {
        let input = stage.worst.is_none() && stage.status == Status::Pass;
        let _ = write!(
            out,
            "<tr id=\"{id}-{}\" class=\"{}\"><th scope=\"row\">{}</th><td>{} {}</td>",
            stage.name,
            class(stage.status),
            stage.name,
            glyph(stage.status, input),
            word(stage.status),
        );
        match &stage.worst {
            None => {
                let words =
                    if input { format!("input: {}", stage.reason) } else { stage.reason.clone() };
                let _ = write!(out, "<td colspan=\"7\" class=\"bt-why\">{}</td>", esc(&words));
            }
            Some(worst) => {
                let value = |x: Option<f64>| x.map(short).unwrap_or_default();
                for text in [
                    error(worst.error),
                    error(worst.floor),
                    ratio(worst.ratio),
                    index(worst.worst_index),
                    value(worst.worst_captured),
                    value(worst.worst_reference),
                    place(worst.microbatch, worst.rank),
                ] {
                    let _ = write!(out, "<td class=\"bt-num\">{}</td>", esc(&text));
                }
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// How |error| over σ is distributed, beside a normal distribution.
fn scores(out: &mut String, worst: &ComparisonReport) {
    let all: u64 = worst.scores.iter().map(|class| class.count).sum();
    if all == 0 {
        return;
    }
    // One element more than there are, so that a single one has a length.
    let length = |n: f64| (1.0 + n).ln() / (1.0 + all as f64).ln().max(f64::MIN_POSITIVE);
    let one = |class: &crate::report::schema::ScoreClass| Bar {
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
    let bars: Vec<Bar> = worst.scores.iter().map(one).collect();
    let about = "Elements by error over the standard deviation that rounding explains; logarithmic";
    let _ = writeln!(
        out,
        "<h4>Scores: |error| over σ</h4><p class=\"bt-note\">{about}; the stroke is a normal distribution.</p>"
    );
    draw(out, about, &bars, &Widths(96, 150, 260));
}

/// Error over floor by how often a row is a label.
fn hits(out: &mut String, worst: &ComparisonReport) {
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
        return;
    }
    let scale = decades(over.iter().map(|(_, x, _)| *x).chain([1.0]));
    let one = |(label, x, n): &(String, f64, u64)| Bar {
        label: label.clone(),
        from: 0.0,
        to: scale(*x),
        class: "bt-plain",
        mark: Some(scale(1.0)),
        value: format!("{}x in {}", ratio(*x), plural(*n, "row")),
    };
    let bars: Vec<Bar> = over.iter().map(one).collect();
    let about = "Error over what rounding explains, by how often a row is a label; logarithmic";
    let _ = writeln!(
        out,
        "<h4>Rows by label hits</h4><p class=\"bt-note\">{about}; the stroke is 1.</p>"
    );
    draw(out, about, &bars, &Widths(116, 150, 150));
}

fn rows(out: &mut String, worst: &ComparisonReport, most: usize) {
    if worst.worst_rows.is_empty() {
        return;
    }
    let shown = worst.worst_rows.iter().take(most);
    let words: Vec<String> =
        shown.map(|(row, _, over)| format!("{row} ({}x)", ratio(*over))).collect();
    let _ = writeln!(
        out,
        "<p class=\"bt-note\">worst rows, error over floor: {}</p>",
        esc(&words.join(", "))
    );
}
