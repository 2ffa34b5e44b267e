//! The steps of two runs against each other: which run is wrong or where the two part, place by
//! place, as a heat map of parameters by places, and as a table of all parameters.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write;

use askama::Template;

use super::step_map::{Fares, KindRow, Line, kind_rows, legend};
use super::{Markup, Page, markup};
use crate::algebra::Status;
use crate::algebra::against::{self, At, Compared, GroupApart, StepsApart};
use crate::number::{error, plural};
use crate::report::step_against::{said, whose, worst};

#[derive(Template)]
#[template(path = "step_pair.html")]
struct StepPair<'a> {
    id: &'a str,
    apart: &'a StepsApart,
    /// How many parameters were compared.
    size: String,
    /// Items of a list that are shown.
    items: usize,
    /// How parameters were brought together, and which could not be.
    found: &'a [String],
    lacking: &'a [String],
    groups: Vec<GroupShown>,
    norm: Option<Markup>,
    places: Vec<PlaceShown>,
    /// Their names, as columns.
    names: Vec<&'static str>,
    map_id: String,
    legend: Vec<String>,
    kinds: Vec<KindRow>,
    all_kinds: usize,
    rows: Vec<PairRow<'a>>,
    all_rows: usize,
    /// Rows that are not printed.
    right: usize,
}

/// Parameters at which one difference comes in.
struct GroupShown {
    mark: &'static str,
    place: &'static str,
    whose: &'static str,
    said: String,
    worst: String,
}

/// A line of the table of places.
struct PlaceShown {
    class: &'static str,
    mark: &'static str,
    name: &'static str,
    counts: [usize; 3],
    /// The largest difference, and what roundings come to by chance.
    numbers: [String; 2],
}

/// A parameter of both runs.
struct PairRow<'a> {
    class: &'static str,
    kind: usize,
    name: &'a str,
    other: &'a str,
    cells: Vec<Cell>,
}

/// A place of it.
struct Cell {
    text: String,
    /// Whether a difference comes in, which stands out.
    enters: bool,
    about: String,
}

/// A mark that says the same without a colour.
fn mark(status: against::Status) -> &'static str {
    match status {
        against::Status::ThisIsWrong
        | against::Status::OtherIsWrong
        | against::Status::BothAreWrong => "✕",
        status if status.enters() => "≠",
        _ => "✓",
    }
}

impl Fares for Compared {
    const ABSENT: &'static str = "not compared";

    fn status(&self) -> Status {
        if self.status.enters() { Status::Diverged } else { Status::Agreed }
    }

    fn off(&self) -> f64 {
        match self.difference {
            0.0 => 0.0,
            difference if difference.is_nan() => f64::INFINITY,
            difference => difference / self.floor,
        }
    }

    fn mark(&self) -> &'static str {
        mark(self.status)
    }

    fn numbers(&self) -> String {
        let mut text = match self.status {
            against::Status::Equal => "equal".to_string(),
            against::Status::Rounding => "explained by rounding".into(),
            against::Status::Carried => "explained by what it was made from".into(),
            status => whose(status).into(),
        };
        if self.difference.is_nan() {
            text.push_str(", a value is no number in one of them");
        } else if self.difference > 0.0 {
            let (difference, floor) = (error(self.difference), error(self.floor));
            let _ = write!(text, ", apart by {difference}, roundings come to {floor}");
        }
        if let Some(factor) = self.factor {
            let _ = write!(text, ", this run has {factor:.7} x the other's");
        }
        if let Some(cause) = &self.cause {
            let _ = write!(text, ": {cause}");
        }
        let _ = write!(text, " ({})", self.part);
        text
    }

    fn compare(&self, other: &Compared) -> Ordering {
        self.status.cmp(&other.status).then(self.off().total_cmp(&other.off()))
    }
}

impl Page<'_> {
    /// The section of two runs' steps; `None` where one run recorded none.
    pub(super) fn step_pair(&self) -> Option<Markup> {
        let apart = self.report.against.as_ref()?.step.as_ref()?;
        let places: Vec<At> = apart.stages.iter().map(|row| row.at).collect();
        let names: Vec<&'static str> = places.iter().map(|at| at.name()).collect();
        let lines = self.pair_lines(apart, &places);
        let kinds = kind_rows(&lines, &names);
        let rows = self.pair_rows(&lines, &kinds.kind_of);
        Some(markup(&StepPair {
            id: &self.id,
            apart,
            size: plural(apart.pairs as u64, "parameter"),
            items: self.detail.items,
            found: self.shown(&apart.found),
            lacking: self.shown(&apart.lacking),
            groups: self.shown(&apart.groups).iter().map(group).collect(),
            norm: apart.norm.as_ref().map(|norm| self.norms_of_runs(norm)),
            places: apart.stages.iter().map(place).collect(),
            names,
            map_id: format!("{}-both-steps", self.id),
            legend: legend(),
            all_kinds: kinds.all,
            kinds: kinds.rows,
            right: rows.iter().filter(|row| row.class == "bt-pass").count(),
            rows,
            all_rows: lines.len(),
        }))
    }

    /// Each parameter by the gravest of its tensors at each place, in the order of the model.
    fn pair_lines<'a>(&self, apart: &'a StepsApart, places: &[At]) -> Vec<Line<'a, Compared>> {
        let table = self.report.algebra.iter().flat_map(|step| &step.table);
        let order: BTreeMap<&str, usize> =
            table.enumerate().map(|(at, row)| (&row.name[..], at)).collect();
        // Of a parameter that is joined from several its first one counts.
        let is_end = |c: char| "(),; ".contains(c);
        let first = |name: &str| {
            let mut words = name.split(is_end).map(|word| word.trim_end_matches(".T"));
            words.find_map(|word| order.get(word).copied()).unwrap_or(usize::MAX)
        };
        let mut gravest: BTreeMap<(usize, &str), Line<'a, Compared>> = BTreeMap::new();
        for own in &apart.compared {
            let Some(at) = places.iter().position(|place| *place == own.at) else { continue };
            let name = &own.parameter[..];
            let line = gravest.entry((first(name), name)).or_insert_with(|| Line {
                name,
                is_alone: false,
                at: vec![None; places.len()],
            });
            if line.at[at].is_none_or(|held| own.compare(held).is_gt()) {
                line.at[at] = Some(own);
            }
        }
        gravest.into_values().collect()
    }

    /// A row for each parameter, as many as the page has room for: of more those at which a
    /// difference comes in are there first.
    fn pair_rows<'a>(&self, lines: &[Line<'a, Compared>], kind_of: &[usize]) -> Vec<PairRow<'a>> {
        let status =
            |line: &Line<'_, Compared>| line.at.iter().flatten().map(|own| own.status).max();
        let enters = |line: &Line<'_, Compared>| status(line).is_some_and(against::Status::enters);
        let mut numbered: Vec<_> = lines.iter().enumerate().collect();
        if numbered.len() > self.detail.parameters {
            // The sort is stable: among as grave ones the order of the model stays.
            numbered.sort_by_key(|(_, line)| !enters(line));
            numbered.truncate(self.detail.parameters);
            numbered.sort_by_key(|(at, _)| *at);
        }
        let cell = |own: &Option<&Compared>| Cell {
            text: own
                .map_or("–".into(), |own| format!("{} {}", own.mark(), error(own.difference))),
            enters: own.is_some_and(|own| own.status.enters()),
            about: own.filter(|_| self.detail.titles).map(Fares::numbers).unwrap_or_default(),
        };
        let row = |(at, line): (usize, &Line<'a, Compared>)| PairRow {
            class: if enters(line) { "bt-fail" } else { "bt-pass" },
            kind: kind_of[at],
            name: line.name,
            other: line
                .at
                .iter()
                .flatten()
                .find_map(|own| own.other.as_deref())
                .unwrap_or(line.name),
            cells: line.at.iter().map(cell).collect(),
        };
        numbered.into_iter().map(row).collect()
    }
}

fn group(group: &GroupApart) -> GroupShown {
    GroupShown {
        mark: mark(group.status),
        place: group.at.name(),
        whose: whose(group.status),
        said: said(group),
        worst: worst(group).map(|text| format!(" Worst: {text}.")).unwrap_or_default(),
    }
}

fn place(row: &against::Row) -> PlaceShown {
    let differs = row.differ > 0;
    PlaceShown {
        class: if differs { "bt-fail" } else { "bt-pass" },
        mark: if differs { "≠" } else { "✓" },
        name: row.at.name(),
        counts: [row.equal, row.explained, row.differ],
        numbers: [error(row.largest), row.floor.map_or("-".into(), error)],
    }
}

#[cfg(test)]
mod tests {
    use super::super::step::tests::{HOSTILE, assert_well_formed, report, step};
    use super::super::{MAX_BYTES, page};
    use crate::algebra::against::{GapOfRuns, GapShare, Setting, Status, Worst};
    use crate::report::Report;
    use crate::report::schema::AgainstReport;

    use super::*;

    fn compared(name: &str, at: At, status: Status, difference: f64) -> Compared {
        Compared {
            parameter: name.into(),
            other: (at == At::Before).then(|| format!("other.{name}")),
            at,
            part: at.name().into(),
            status,
            difference,
            floor: 1e-6,
            factor: None,
            unequal: 1,
            worst: None,
            cause: None,
        }
    }

    /// Two runs of these parameters, of which every fifth is wrong in the other run after the
    /// reduction.
    fn apart(names: &[String]) -> StepsApart {
        let of = |(at, name): (usize, &String)| {
            let (status, difference) = match at % 5 {
                0 => (Status::OtherIsWrong, 0.5),
                _ => (Status::Rounding, 1e-7),
            };
            [
                compared(name, At::Before, Status::Equal, 0.0),
                compared(name, At::Reduce, Status::Equal, 0.0),
                compared(name, At::Reduce, status, difference),
            ]
        };
        let failing: Vec<String> = names.iter().step_by(5).cloned().collect();
        let row = |at, differ| against::Row {
            at,
            equal: names.len() - differ,
            explained: 0,
            differ,
            largest: f64::NAN,
            floor: Some(1e-6),
        };
        let worst = Worst { index: vec![1, 0], this: 1.0, other: f64::NAN };
        let share =
            |what: &str, share| GapShare { at: "grad", run: "both", what: what.into(), share };
        let setting = Setting {
            name: HOSTILE.into(),
            this: HOSTILE.into(),
            other: "2".into(),
            what: HOSTILE.into(),
            at: At::After,
        };
        StepsApart {
            conclusion: vec![HOSTILE.into()],
            differs: Vec::new(),
            pairs: names.len(),
            split: [HOSTILE.into(), HOSTILE.into()],
            found: vec![HOSTILE.into(); 300],
            lacking: vec![HOSTILE.into()],
            settings: vec![setting],
            stages: vec![row(At::Before, 0), row(At::Reduce, failing.len())],
            groups: vec![GroupApart {
                at: At::Reduce,
                status: Status::OtherIsWrong,
                what: failing[0].clone(),
                worst: Some((failing[0].clone(), worst)),
                parameters: failing,
                factor: Some(0.5),
                readings: vec![HOSTILE.into()],
                difference: 0.5,
                floor: 1e-6,
                cause: Some(HOSTILE.into()),
            }],
            norm: Some(GapOfRuns {
                this: 1.0,
                other: f64::NAN,
                shares: vec![share(HOSTILE, 1.5), share("w", -0.5)],
            }),
            not_compared: Vec::new(),
            compared: names.iter().enumerate().flat_map(of).collect(),
        }
    }

    /// A report of two runs in which nothing but their steps was compared.
    fn of_two(names: &[String]) -> Report {
        let mut this = report(Some(step(names)));
        let other = report(Some(step(names)));
        this.against = Some(AgainstReport {
            dump: other.dump,
            stages: Vec::new(),
            causes: Vec::new(),
            differences: Vec::new(),
            tensors: Vec::new(),
            likely: None,
            unjudged: 0,
            checks: other.checks,
            grad_norm: other.grad_norm,
            norm_gap: None,
            algebra: other.algebra,
            step: Some(apart(names)),
            drawings: None,
        });
        this
    }

    /// Goal: whatever two runs call their parameters, the page shows it as text, and says of each
    /// parameter the gravest of its tensors. Method: hostile text wherever text stands.
    #[test]
    fn both_runs_are_text_and_the_gravest_tensor_of_a_parameter_is_told() {
        let names: Vec<String> = (0..10).map(|at| format!("layers.{at}.{HOSTILE}")).collect();
        let page = page(&of_two(&names));
        assert_well_formed(&page);
        assert!(!page.contains("<img") && !page.contains('\u{202e}'));
        let both = page.split("id=\"bt-both-steps\"").nth(1).expect("the section is there");
        let both = both.split("</section>").next().unwrap();
        assert!(
            both.contains("<td>✕</td>") || both.contains("✕ reduce"),
            "what differs has a card"
        );
        assert_eq!(both.matches("✕ 5.0e-1").count(), 2, "every fifth parameter is wrong");
        assert_eq!(both.matches("✓ 1.0e-7").count(), 8);
        assert!(both.contains("<td>other.layers.0."), "the name in the other run");
        assert!(both.contains("150.0 %") && both.contains("-50.0 %"), "shares below zero");
        assert!(both.contains("100 more that were brought together are not shown"));
        for id in ["bt-step", "bt-other-step", "bt-both-steps-map", "bt-other-step-map"] {
            assert_eq!(page.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
        }
        assert!(!page.contains("Nothing that was asked for is held by both runs"));
    }

    /// Goal: three tables of a large model leave a page that opens. Method: 5,000 parameters with
    /// long names; those that are wrong are in the table.
    #[test]
    fn both_runs_of_5000_parameters_fit_on_the_page() {
        let named = |at: usize| format!("model.layers.{at}.mlp.experts.up_projection.weight");
        let names: Vec<String> = (0..5000).map(named).collect();
        let page = page(&of_two(&names));
        assert!(page.len() <= MAX_BYTES, "{} bytes", page.len());
        assert_eq!(page.matches("<tr data-kind=").count(), 3, "one kind in each map");
        assert!(page.contains("✕ 1000 of 5000"));
        let both = page.split("id=\"bt-both-steps-all\"").nth(1).unwrap();
        let both = both.split("</table>").next().unwrap();
        assert_eq!(both.matches("<tr class=\"bt-fail\"").count(), 1000);
    }
}
