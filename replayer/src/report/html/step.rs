//! The step: what becomes of every parameter's gradient. What diverges, the norm, the stages, the
//! kinds of parameters by stages as a heat map, and a table of all parameters that the script
//! filters and sorts.

use askama::Template;

use super::bars::{Bar, Widths, draw};
use super::step_map::{KindRow, kind_rows, legend};
use super::step_table::{ParameterRow, parameter_rows};
use super::{Markup, Page, markup};
use crate::algebra::{Group, NormGap, Stage, StageSummary, StepReport};
use crate::number::{count, error, plural, short};
use crate::report::algebra::{gap, held, said, worst};
use crate::report::norm::percent;

#[derive(Template)]
#[template(path = "step.html")]
struct Step<'a> {
    id: &'a str,
    /// How many parameters and elements there are.
    size: String,
    groups: Vec<GroupShown<'a>>,
    all_groups: usize,
    /// Items of a list that are shown.
    items: usize,
    norm: Option<NormShown>,
    stages: Vec<StageShown<'a>>,
    legend: Vec<String>,
    kinds: Vec<KindRow>,
    all_kinds: usize,
    rows: Vec<ParameterRow<'a>>,
    all_rows: usize,
    /// Rows that are not printed.
    right: usize,
}

/// What diverges at one stage in one way.
struct GroupShown<'a> {
    group: &'a Group,
    said: String,
    held: String,
    numbers: String,
    worst: String,
}

/// The norm as it is and as it would have been.
struct NormShown {
    words: String,
    norms: Markup,
    shares: Markup,
}

struct StageShown<'a> {
    stage: &'a StageSummary,
    class: &'static str,
    glyph: &'static str,
    seen: String,
}

impl Page<'_> {
    /// The section of the step; `None` where none was judged.
    pub(super) fn step(&self) -> Option<Markup> {
        let step = self.report.algebra.as_ref()?;
        let columns: Vec<Stage> = step.stages.iter().map(|own| own.stage).collect();
        let kinds = kind_rows(&step.table, &columns);
        let (kind_of, rows) = (kinds.kind_of, &step.table);
        let rows = parameter_rows((rows, &kind_of), &columns, &self.detail);
        let right = rows.iter().filter(|row| row.class == "bt-pass").count();
        let elements = count(step.elements);
        Some(markup(&Step {
            id: &self.id,
            size: format!("{}, {elements} elements", plural(step.parameters as u64, "parameter")),
            groups: self.shown(&step.diverged).iter().map(group).collect(),
            all_groups: step.diverged.len(),
            items: self.detail.items,
            norm: step.norm.as_ref().map(|norm| self.step_norm(norm)),
            stages: step.stages.iter().map(stage).collect(),
            legend: legend(),
            all_kinds: kinds.all,
            kinds: kinds.rows,
            right,
            rows,
            all_rows: step.table.len(),
        }))
    }

    /// Whether the step is what the page is about first: nothing else was replayed, or it diverges
    /// first.
    pub(super) fn step_leads(&self) -> bool {
        let first = self.report.first_divergence.as_ref().map(|first| &first.stage[..]);
        let of_step = |step: &StepReport| step.first().map(|group| group.stage.name());
        let of_step = self.report.algebra.as_ref().and_then(of_step);
        self.has_no_head() || (first.is_some() && first == of_step)
    }

    /// Whether a step is all that was replayed.
    pub(super) fn has_no_head(&self) -> bool {
        self.report.stages.is_empty() && self.report.algebra.is_some()
    }

    fn step_norm(&self, norm: &NormGap) -> NormShown {
        let known = |label: &str, value: f64| (label.to_string(), value);
        let norms: Vec<(String, f64)> = [
            norm.reported.map(|value| known("as reported", value)),
            Some(known("of the captured gradients", norm.captured)),
            Some(known("had every sum been right", norm.right)),
        ]
        .into_iter()
        .flatten()
        .collect();
        let most = norms.iter().map(|(_, value)| *value).filter(|x| x.is_finite());
        let most = most.fold(f64::MIN_POSITIVE, f64::max);
        let bar = |(label, value): &(String, f64)| Bar {
            label: label.clone(),
            from: 0.0,
            to: if value.is_finite() { value / most } else { 1.0 },
            class: "bt-total",
            mark: None,
            value: short(*value),
        };
        let largest = norm.shares.iter().map(|(_, share)| share.abs()).filter(|x| x.is_finite());
        let largest = largest.fold(f64::MIN_POSITIVE, f64::max);
        let share = |(what, share): &(String, f64)| Bar {
            label: what.clone(),
            from: 0.0,
            to: if share.is_finite() { share.abs() / largest } else { 1.0 },
            class: if *share < 0.0 { "bt-down" } else { "bt-up" },
            mark: None,
            value: format!("{} %", percent(*share)),
        };
        let of_norms = "grad_norm as it is and as it would have been".to_string();
        let of_shares = "shares of the difference of the squared norms".to_string();
        let shares = self.shown(&norm.shares).iter().map(share).collect();
        NormShown {
            words: gap(norm),
            norms: draw(of_norms, norms.iter().map(bar).collect(), &Widths(190, 190, 90)).bars,
            shares: draw(of_shares, shares, &Widths(300, 190, 90)).bars,
        }
    }
}

fn group(group: &Group) -> GroupShown<'_> {
    GroupShown {
        group,
        said: said(group),
        held: held(group),
        numbers: match group.error.is_finite() {
            true => format!(
                "Relative error {}, of which rounding explains {}.",
                error(group.error),
                error(group.floor)
            ),
            false => String::new(),
        },
        worst: worst(group).map(|text| format!(" Worst: {text}.")).unwrap_or_default(),
    }
}

fn stage(stage: &StageSummary) -> StageShown<'_> {
    let (class, glyph) = match (stage.diverged, stage.unchecked) {
        (1.., _) => ("bt-fail", "✕"),
        (_, 1..) => ("bt-warn", "?"),
        _ => ("bt-pass", "✓"),
    };
    let seen = stage.seen_from.map_or(String::new(), |factor| format!("1 ± {}", short(factor)));
    StageShown { stage, class, glyph, seen }
}
