//! The cause beside the graph: what it is, what cures it, and what is left of the divergence
//! when it is emulated.

use askama::Template;

use super::bars::{Bar, Drawing, Widths, decades, draw};
use super::{Markup, Page, markup};
use crate::diagnose::{CauseReport, StageResidual, Standing};
use crate::number::{error, plural};
use crate::report::causes::figures;
use crate::report::schema::{FirstDivergence, Verdict};
use crate::report::text::place;

#[derive(Template)]
#[template(path = "causes.html")]
struct Causes<'a> {
    id: &'a str,
    first: Option<&'a FirstDivergence>,
    /// Its microbatch and rank.
    place: String,
    /// What is said where nothing diverges.
    nothing: &'static str,
    causes: Vec<Cause<'a>>,
    /// What the user's own functions came to, as the text has it.
    variants: String,
}

struct Cause<'a> {
    whose: &'static str,
    cause: &'a CauseReport,
    standing: &'static str,
    figures: String,
    residuals: Option<Drawing>,
    parameters: String,
}

impl Page<'_> {
    pub(super) fn causes(&self) -> Markup {
        let report = self.report;
        let first = report.first_divergence.as_ref();
        let of_first = first.map(|first| place(first.microbatch, first.rank)).unwrap_or_default();
        let nothing = match report.verdict {
            Verdict::Incomplete => {
                "Nothing diverges in what could be judged; the rest has no verdict."
            }
            _ => "Nothing diverges.",
        };
        let other = report.against.as_ref().map(|against| &against.causes[..]).unwrap_or_default();
        let own_causes = self.shown(&report.causes).iter().map(|shown| cause(shown, ""));
        let other = self.shown(other).iter().map(|shown| cause(shown, "the other run: "));
        let mut variants = String::new();
        if !report.variants.is_empty() {
            crate::report::causes::variants(&mut variants, &report.variants);
        }
        markup(&Causes {
            id: &self.id,
            first,
            place: if of_first.is_empty() { of_first } else { format!(" ({of_first})") },
            nothing,
            causes: own_causes.chain(other).collect(),
            variants,
        })
    }
}

fn cause<'a>(cause: &'a CauseReport, whose: &'static str) -> Cause<'a> {
    let standing = match cause.standing {
        Standing::Named => "named",
        Standing::Tied => "TIED: the captured tensors cannot tell it from another",
        Standing::Unknown => "nothing in the catalogue explains it",
    };
    let parameters: Vec<String> =
        cause.parameters.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    let residuals = residuals(&cause.residuals);
    Cause {
        whose,
        cause,
        standing,
        figures: figures(cause),
        residuals,
        parameters: parameters.join("; "),
    }
}

/// Two bars a stage: the error that is there, and the error that is left.
fn residuals(all: &[StageResidual]) -> Option<Drawing> {
    if all.is_empty() {
        return None;
    }
    let values = all.iter().flat_map(|residual| [residual.before, residual.after, residual.floor]);
    let scale = decades(values);
    let mut bars = Vec::new();
    for residual in all {
        let bar = |label: String, x: f64, class| Bar {
            label,
            from: 0.0,
            to: scale(x),
            class,
            mark: Some(scale(residual.floor)),
            value: left(x),
        };
        bars.push(bar(format!("{} before", residual.stage), residual.before, "bt-plain"));
        bars.push(bar(format!("{} after", residual.stage), residual.after, "bt-after"));
    }
    let comparisons: usize = all.iter().map(|residual| residual.comparisons).sum();
    let sampled =
        if all.iter().any(|residual| residual.sampled) { ", on a sample of the rows" } else { "" };
    let about = format!(
        "error before and after the cause is emulated, over {}{sampled}; logarithmic; the stroke is \
         what the declared precision explains",
        plural(comparisons as u64, "failing comparison")
    );
    Some(draw(about, bars, &Widths(140, 170, 150)))
}

fn left(x: f64) -> String {
    match x {
        0.0 => "0: equal in every bit".into(),
        x if x.is_finite() => error(x),
        _ => "not finite".into(),
    }
}
