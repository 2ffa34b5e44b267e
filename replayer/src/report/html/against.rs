//! Two runs: stage by stage, then tensors by name.

use askama::Template;
use askama::filters::Safe;

use super::stages::{class, glyph, stage_table};
use super::{Markup, Page, markup};
use crate::number::{error, ratio, short};
use crate::replay::against::{Difference, NamedDifference};
use crate::replay::outcome::Status;
use crate::report::schema::AgainstReport;
use crate::report::text::{place, word};

#[derive(Template)]
#[template(path = "against.html")]
struct Against<'a> {
    id: &'a str,
    against: &'a AgainstReport,
    /// Items of a list that are shown.
    items: usize,
    differences: Vec<Pair>,
    equal: usize,
    differ: usize,
    tensors: Vec<Named<'a>>,
    /// The stages of the other run.
    table: Markup,
}

/// A stage of both runs.
struct Pair {
    class: &'static str,
    name: &'static str,
    status: String,
    /// Difference, what is allowed, the worst element, and its values in both runs.
    numbers: [String; 5],
    place: String,
    remarks: String,
}

/// A tensor that differs.
struct Named<'a> {
    class: &'static str,
    difference: &'a NamedDifference,
    status: String,
    /// Difference, unit, by chance, growth, largest absolute difference, cosine.
    numbers: [String; 6],
}

impl Page<'_> {
    /// Whether the two runs have a section of their own: steps have theirs.
    pub(super) fn has_pair(&self) -> bool {
        self.report.against.as_ref().is_some_and(|against| {
            let compared = against.differences.len() + against.tensors.len();
            compared + against.stages.len() > 0 || against.step.is_none()
        })
    }

    pub(super) fn against(&self) -> Markup {
        let Some(against) = self.report.against.as_ref().filter(|_| self.has_pair()) else {
            return Safe(String::new());
        };
        let all = &against.tensors;
        let differ: Vec<_> =
            all.iter().filter(|difference| difference.status != Status::Pass).collect();
        let table = || {
            let caption = format!("Stages of the other run, {}", against.dump.run);
            stage_table(&against.stages, &format!("{}-other", self.id), &caption)
        };
        markup(&Against {
            id: &self.id,
            against,
            items: self.detail.items,
            differences: self.shown(&against.differences).iter().map(pair).collect(),
            equal: all.len() - differ.len(),
            differ: differ.len(),
            tensors: self.shown(&differ).iter().map(|difference| named(difference)).collect(),
            table: if against.stages.is_empty() { Safe(String::new()) } else { table() },
        })
    }
}

fn pair(difference: &Difference) -> Pair {
    let (index, ours, theirs) = match difference.worst {
        Some((at, x, y)) => (format!("[{}, {}]", at.0, at.1), short(x), short(y)),
        None if difference.difference == 0.0 => {
            ("equal bit for bit".into(), String::new(), String::new())
        }
        None => Default::default(),
    };
    let status = match difference.status {
        Status::Skip => "– not judged".into(),
        status => format!("{} {}", glyph(status, false), word(status)),
    };
    let mut remarks = vec![difference.reason.as_str(), difference.aligned.as_str()];
    remarks.retain(|text| !text.is_empty());
    let allowed = difference.allowed.map_or("-".into(), error);
    Pair {
        class: class(difference.status),
        name: difference.stage.name(),
        status,
        numbers: [error(difference.difference), allowed, index, ours, theirs],
        place: place(difference.microbatch.map(|mb| mb.0), None),
        remarks: remarks.join("; "),
    }
}

fn named(difference: &NamedDifference) -> Named<'_> {
    Named {
        class: class(difference.status),
        difference,
        status: format!("{} {}", glyph(difference.status, false), word(difference.status)),
        numbers: [
            error(difference.difference),
            error(difference.unit),
            error(difference.expected),
            difference.growth.map_or("-".into(), |growth| format!("{}x", ratio(growth))),
            error(difference.measures.max_abs),
            format!("{:.8}", difference.measures.cosine),
        ],
    }
}
