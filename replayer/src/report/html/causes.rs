//! The cause beside the graph: what it is, what cures it, and what is left of the divergence
//! when it is emulated.

use std::fmt::Write;

use super::Page;
use super::bars::{Bar, Widths, decades, draw};
use super::escape::esc;
use crate::diagnose::{Found, StageResidual, Standing};
use crate::number::{error, plural};
use crate::report::causes::figures;
use crate::report::schema::Verdict;
use crate::report::text::place;

impl Page<'_> {
    pub(super) fn causes(&self, out: &mut String) {
        self.section(out, "causes", "Divergence and cause");
        match &self.report.first_divergence {
            Some(first) => {
                let at = place(first.microbatch, first.rank);
                let at = if at.is_empty() { at } else { format!(" ({at})") };
                let _ = writeln!(
                    out,
                    "<p>First divergence: <strong>{}</strong>, tensor {}, run {}{at}: {}.</p>",
                    esc(&first.stage),
                    esc(&first.tensor),
                    esc(&first.run),
                    esc(&first.reason)
                );
            }
            None if self.report.verdict == Verdict::Incomplete => {
                out.push_str(
                    "<p>Nothing diverges in what could be judged; the rest has no verdict.</p>\n",
                );
            }
            None => out.push_str("<p>Nothing diverges.</p>\n"),
        }
        let own = &self.report.causes;
        own.iter().take(self.detail.items).for_each(|cause| one(out, cause, ""));
        let other = self.report.against.as_ref().map(|against| &against.causes[..]);
        for cause in other.unwrap_or_default().iter().take(self.detail.items) {
            one(out, cause, "the other run: ");
        }
        self.variants(out);
        out.push_str("</section>\n");
    }

    fn variants(&self, out: &mut String) {
        let all = &self.report.variants;
        if all.is_empty() {
            return;
        }
        let mut text = String::new();
        crate::report::causes::variants(&mut text, all);
        let _ = writeln!(out, "<h3>Your own functions</h3><pre>{}</pre>", esc(&text));
    }
}

fn one(out: &mut String, cause: &Found, whose: &str) {
    let standing = match cause.standing {
        Standing::Named => "named",
        Standing::Tied => "TIED: the captured tensors cannot tell it from another",
        Standing::Unknown => "nothing in the catalogue explains it",
    };
    let _ = writeln!(
        out,
        "<article class=\"bt-cause\"><h3>{whose}{} <small>{standing}</small></h3>",
        esc(&cause.id)
    );
    let figures = figures(cause);
    if !figures.is_empty() {
        let _ = writeln!(out, "<p>It{}.</p>", esc(&figures));
    }
    let _ = writeln!(out, "<p>{}.</p>", esc(&cause.evidence));
    residuals(out, &cause.residuals);
    if !cause.parameters.is_empty() {
        let of: Vec<String> =
            cause.parameters.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        let _ = writeln!(out, "<p class=\"bt-note\">{}</p>", esc(&of.join("; ")));
    }
    let _ = writeln!(out, "<p><strong>To do:</strong> {}.</p></article>", esc(&cause.advice));
}

/// Two bars a stage: the error that is there, and the error that is left.
fn residuals(out: &mut String, all: &[StageResidual]) {
    if all.is_empty() {
        out.push_str("<p class=\"bt-note\">No residual is drawn: nothing was emulated that explains it.</p>\n");
        return;
    }
    let values = all.iter().flat_map(|of| [of.before, of.after, of.floor]);
    let scale = decades(values);
    let mut bars = Vec::new();
    for of in all {
        let bar = |label: String, x: f64, class| Bar {
            label,
            from: 0.0,
            to: scale(x),
            class,
            mark: Some(scale(of.floor)),
            value: left(x),
        };
        bars.push(bar(format!("{} before", of.stage), of.before, "bt-plain"));
        bars.push(bar(format!("{} after", of.stage), of.after, "bt-after"));
    }
    let comparisons: usize = all.iter().map(|of| of.comparisons).sum();
    let sampled = if all.iter().any(|of| of.sampled) { ", on a sample of the rows" } else { "" };
    let about = format!(
        "error before and after the cause is emulated, over {}{sampled}; logarithmic; the stroke is \
         what the declared precision explains",
        plural(comparisons as u64, "failing comparison")
    );
    let _ = writeln!(out, "<h4>Residual before and after</h4><p class=\"bt-note\">{about}</p>");
    draw(out, &about, &bars, &Widths(140, 170, 150));
}

fn left(x: f64) -> String {
    match x {
        0.0 => "0: equal in every bit".into(),
        x if x.is_finite() => error(x),
        _ => "not finite".into(),
    }
}
