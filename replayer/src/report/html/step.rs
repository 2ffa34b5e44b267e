//! The step: what becomes of every parameter's gradient. What diverges, the norm, the stages, the
//! kinds of parameters by stages as a heat map, and a table of all parameters that the script
//! filters and sorts.

use askama::Template;

use super::step_map::{KindRow, kind_rows, legend, lines};
use super::step_table::{ParameterRow, parameter_rows};
use super::{Markup, Page, markup};
use crate::algebra::{Group, Stage, StageSummary, StepReport};
use crate::number::{count, error, plural, short};
use crate::report::algebra::{declared, held, multiplied, said, sample, worst};

#[derive(Template)]
#[template(path = "step.html")]
struct Step<'a> {
    id: &'a str,
    title: &'a str,
    /// How many parameters and elements there are.
    size: String,
    /// What was sampled, and what that does not see.
    sampled: Option<String>,
    /// What code of the job's own has multiplied the gradients by.
    multiplied: Option<String>,
    /// By which rules optimizers were judged, where the job declares them.
    rules: Option<String>,
    groups: Vec<GroupShown<'a>>,
    all_groups: usize,
    /// Items of a list that are shown.
    items: usize,
    norm: Option<Markup>,
    stages: Vec<StageShown<'a>>,
    /// Their names, as columns.
    names: Vec<&'static str>,
    map_id: String,
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

struct StageShown<'a> {
    stage: &'a StageSummary,
    class: &'static str,
    glyph: &'static str,
    seen: String,
}

impl Page<'_> {
    /// The section of the step; `None` where none was judged.
    pub(super) fn step(&self) -> Option<Markup> {
        let title = match self.report.against.as_ref().is_some_and(|own| own.algebra.is_some()) {
            true => "The step of this run: from local gradients to new parameters",
            false => "The step: from local gradients to new parameters",
        };
        Some(self.step_of(self.report.algebra.as_ref()?, &self.id, title))
    }

    /// The same of the run that it is compared with.
    pub(super) fn other_step(&self) -> Option<Markup> {
        let step = self.report.against.as_ref()?.algebra.as_ref()?;
        let title = "The step of the other run: from local gradients to new parameters";
        Some(self.step_of(step, &format!("{}-other", self.id), title))
    }

    fn step_of(&self, step: &StepReport, id: &str, title: &str) -> Markup {
        let columns: Vec<Stage> = step.stages.iter().map(|own| own.stage).collect();
        let names: Vec<&'static str> = columns.iter().map(|stage| stage.name()).collect();
        let kinds = kind_rows(&lines(&step.table, &columns), &names);
        let (kind_of, rows) = (kinds.kind_of, &step.table);
        let rows = parameter_rows((rows, &kind_of), &columns, &self.detail);
        let right = rows.iter().filter(|row| row.class == "bt-pass").count();
        let elements = count(step.elements);
        markup(&Step {
            id,
            title,
            size: format!("{}, {elements} elements", plural(step.parameters as u64, "parameter")),
            sampled: step.sampled.as_ref().map(sample),
            multiplied: step.multiplied.as_ref().map(multiplied),
            rules: (!step.rules.is_empty()).then(|| declared(&step.rules)),
            groups: self.shown(&step.diverged).iter().map(group).collect(),
            all_groups: step.diverged.len(),
            items: self.detail.items,
            norm: step.norm.as_ref().map(|norm| self.step_norm(norm)),
            stages: step.stages.iter().map(stage).collect(),
            names,
            map_id: format!("{id}-step"),
            legend: legend(),
            all_kinds: kinds.all,
            kinds: kinds.rows,
            right,
            rows,
            all_rows: step.table.len(),
        })
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

#[cfg(test)]
pub(super) mod tests {
    use super::super::{MAX_BYTES, fragment, page};
    use crate::algebra::{Aside, DeclaredRule, Fate, NormGap, Reading, Row, Status, Unchecked};
    use crate::checks::Checked;
    use crate::replay::outcome::GradNorm;
    use crate::report::schema::{DumpSummary, Report, SCHEMA, Verdict};

    use super::*;

    /// What a page may not hold but as text.
    pub(in super::super) const HOSTILE: &str =
        "</table><img src=x onerror=\"alert('1')\">&\u{202e}";

    /// A report of a dump in which nothing but the step was replayed.
    pub(in super::super) fn report(algebra: Option<StepReport>) -> Report {
        let dump = DumpSummary {
            path: "runs/a".into(),
            run: "a".into(),
            attempt: 0,
            step: 7,
            state: "committed".into(),
            ranks: "2 ranks".into(),
            head: "none declared".into(),
            head_items: Vec::new(),
            shards: 1,
            bytes: 1,
            proved: true,
            copies_differ: false,
            trigger: None,
            selection: None,
        };
        let report = Report {
            schema: SCHEMA,
            version: backtape::VERSION,
            verdict: Verdict::Agreed,
            reasons: Vec::new(),
            step: 7,
            first_divergence: None,
            dump,
            stages: Vec::new(),
            coverage: None,
            algebra: None,
            contradictions: Vec::new(),
            other_declaration: None,
            causes: Vec::new(),
            variants: Vec::new(),
            grad_norm: GradNorm::default(),
            against: None,
            findings: Vec::new(),
            not_checked: Vec::new(),
            checks: Checked::default(),
            device: None,
            multiplied: Vec::new(),
            kernels: Vec::new(),
            drawings: None,
        };
        report.with_algebra(algebra, true)
    }

    fn summed() -> Reading {
        Reading {
            cause: "reduce-sum-for-mean",
            words: "captured = 2.0000000 x reference".into(),
            look: "the division by the size of the group",
            misfit: Aside::default(),
            weights: Aside::default(),
        }
    }

    /// A step of these parameters, of which every fifth fails at the reduction.
    pub(in super::super) fn step(names: &[String]) -> StepReport {
        let fate = |stage, diverges: bool| Fate {
            stage,
            status: if diverges { Status::Diverged } else { Status::Agreed },
            ranks: vec![0, 1],
            tensor: "step.reduced:w".into(),
            factor: diverges.then_some(2.0),
            error: Some(if diverges { 1.0 } else { 3e-8 }),
            floor: Some(7e-8),
            seen_from: None,
            cause: diverges.then_some("reduce-sum-for-mean"),
            why: diverges.then(|| "elements are off".into()),
        };
        let row = |(at, name): (usize, &String)| Row {
            name: name.clone(),
            shape: vec![4, 2],
            elements: 8,
            optimizer: Some(0),
            group: Some(1),
            stages: vec![fate(Stage::Reduce, at % 5 == 0), fate(Stage::Update, false)],
        };
        let table: Vec<Row> = names.iter().enumerate().map(row).collect();
        let failing = names.iter().step_by(5).cloned().collect::<Vec<_>>();
        let summary = |stage, diverged| StageSummary {
            stage,
            agreed: names.len() - diverged,
            diverged,
            unchecked: 0,
            seen_from: Some(1e-6),
        };
        let group = Group {
            stage: Stage::Reduce,
            what: failing[0].clone(),
            ranks: vec![0, 1],
            reading: Some(summed()),
            factor: Some(2.0),
            reason: "elements are off".into(),
            error: 1.0,
            floor: 7e-8,
            worst: Some((failing[0].clone(), vec![1, 0], 2.0, 1.0)),
            parameters: failing.clone(),
            state: None,
        };
        let norm = NormGap {
            reported: Some(3.0),
            captured: 3.0,
            right: f64::NAN,
            estimated: false,
            of_norm: false,
            apart: 1e-6,
            shares: vec![(names[0].clone(), 1.2), ("others".into(), -0.2)],
        };
        let (stage, what) = (Stage::State, names[0].clone());
        let unchecked = Unchecked { stage, what, why: HOSTILE.into() };
        StepReport {
            parameters: names.len(),
            elements: 8 * names.len() as u64,
            sampled: None,
            rules: vec![DeclaredRule { optimizer: HOSTILE.into(), rule: HOSTILE.into() }],
            stages: vec![summary(Stage::Reduce, failing.len()), summary(Stage::Update, 0)],
            diverged: vec![group],
            norm: Some(norm),
            multiplied: None,
            unchecked: vec![unchecked],
            lacks: Vec::new(),
            faults: vec![HOSTILE.into()],
            table,
            judged: Vec::new(),
        }
    }

    /// The tags that are still open after each other, read as a browser reads them; a wrong end is a
    /// failure.
    pub(in super::super) fn assert_well_formed(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = page;
        while let Some((_, after)) = rest.split_once('<') {
            let (tag, after) = after.split_once('>').expect("every tag ends");
            rest = after;
            let name = tag.split([' ', '\n']).next().unwrap_or_default();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "</{name}> before {after:.80}"),
                None if name.starts_with('!') || tag.ends_with('/') => {}
                None if ["meta", "input"].contains(&name) => {}
                None => open.push(name),
            }
            if ["script", "style"].contains(&name) {
                rest = &after[after.find(&format!("</{name}>")).expect("it ends")..];
            }
        }
        assert!(open.is_empty(), "{open:?} are left open");
    }

    #[test]
    fn names_of_parameters_are_text_and_every_tag_is_closed() {
        let named = |at: usize| format!("layers.{at}.{HOSTILE}");
        let names: Vec<String> = (0..90).map(named).chain([HOSTILE.into()]).collect();
        let report = report(Some(step(&names)));
        for page in [page(&report), fragment(&report, "a")] {
            assert_well_formed(&page);
            assert!(!page.contains("<img") && !page.contains('\u{202e}'));
            assert!(page.contains("&lt;/table&gt;&lt;img src=x"), "shown as what it is");
        }
    }

    /// Goal: a large model stays on the page, in full. Method: 5,000 parameters with long names.
    #[test]
    fn all_of_5000_parameters_are_in_the_table_and_their_kinds_in_the_map() {
        let kinds = ["attention.query.weight", "mlp.experts.up_projection.weight"];
        let named = |layer: usize| kinds.map(|kind| format!("model.layers.{layer}.{kind}"));
        let names: Vec<String> = (0..2500).flat_map(named).collect();
        let page = page(&report(Some(step(&names))));
        assert!(page.len() <= MAX_BYTES, "{} bytes", page.len());
        let rows = page.matches("<th scope=\"row\">model.layers.").count();
        assert_eq!(rows, 5000);
        assert_eq!(page.matches("<tr data-kind=").count(), 2);
        assert!(page.contains("✕ 500 of 2500"), "how many of a kind fail");
        assert!(page.contains("On paper 4000 parameters"));
    }

    #[test]
    fn a_page_of_a_step_alone_says_its_cause_first_and_nothing_of_a_head() {
        let report = report(Some(step(&(0..10).map(|at| format!("w{at}")).collect::<Vec<_>>())));
        let page = page(&report);
        let top = page.split("</header>").next().unwrap();
        assert!(top.contains("reduce-sum-for-mean</strong></a>: to do: look at the division"));
        assert!(!page.contains("Stage graph") && !page.contains("Heat maps of dq"));
        assert!(page.contains("-20.0 %") && page.contains("bt-down"), "a share below zero");
    }

    #[test]
    fn a_page_without_a_step_has_no_section_of_it() {
        let page = page(&report(None));
        assert!(!page.contains("id=\"bt-step\"") && page.contains("Stage graph"));
    }
}
