//! The steps of two runs in the text report: place by place, where they part, and what to conclude.

use std::fmt::Write;

use super::text::wrap;
use crate::algebra::against::{
    GapOfRuns, GapShare, GroupApart, Setting, Status, StepsApart, distance,
};
use crate::number::{error, short};

/// Groups shown one by one.
const SHOWN: usize = 12;

/// Shares of a gap below this round to nothing.
const TOLD: f64 = 5e-4;

/// Writes what two runs' steps say of each other.
pub(super) fn render(out: &mut String, apart: &StepsApart) {
    let [ours, theirs] = &apart.split;
    wrap(out, "split     ", &format!("{ours} here; {theirs} there"));
    for found in &apart.found {
        wrap(out, "same      ", found);
    }
    let _ = writeln!(
        out,
        "{:<13}{:>8} {:>9} {:>7}  {:>10} {:>10}",
        "both runs", "equal", "explained", "DIFFER", "difference", "by chance"
    );
    for row in &apart.stages {
        let _ = writeln!(
            out,
            "{:<13}{:>8} {:>9} {:>7}  {:>10} {:>10}",
            row.at.name(),
            row.equal,
            row.explained,
            row.differ,
            error(row.largest),
            row.floor.map_or("-".into(), error)
        );
    }
    for group in apart.groups.iter().take(SHOWN) {
        parted(out, group);
    }
    if apart.groups.len() > SHOWN {
        let more = format!("and {} more groups: --json names all", apart.groups.len() - SHOWN);
        wrap(out, "", &more);
    }
    for setting in &apart.settings {
        let Setting { name, this, other, what, .. } = setting;
        wrap(out, "settings  ", &format!("{name} is {this} here and {other} there: {what}"));
    }
    if let Some(norm) = &apart.norm {
        wrap(out, "grad_norm ", &gap(norm));
    }
    for conclusion in &apart.conclusion {
        wrap(out, "therefore ", conclusion);
    }
    out.push('\n');
}

/// What a difference that comes in means.
pub(super) fn whose(status: Status) -> &'static str {
    match status {
        Status::ThisIsWrong => "this run is wrong",
        Status::OtherIsWrong => "the other run is wrong",
        Status::BothAreWrong => "both runs are wrong",
        Status::Declared => "the runs declare it differently",
        _ => "the runs differ",
    }
}

/// What parts the runs at a group of parameters, in one sentence.
pub(super) fn said(group: &GroupApart) -> String {
    let cause = group.cause.as_ref().map(|cause| format!("; {cause}")).unwrap_or_default();
    format!("{}: {}{cause}", group.what, distance(group))
}

/// The element of a group that is furthest apart.
pub(super) fn worst(group: &GroupApart) -> Option<String> {
    let (parameter, worst) = group.worst.as_ref()?;
    let (this, other) = (short(worst.this), short(worst.other));
    Some(format!("{parameter} {:?} is {this} here and {other} there", worst.index))
}

fn parted(out: &mut String, group: &GroupApart) {
    let label = format!("{:<13}", group.at.name());
    wrap(out, &label, &format!("{}: {}", whose(group.status), said(group)));
    if let Some(worst) = worst(group) {
        wrap(out, "             ", &format!("worst: {worst}"));
    }
}

/// The two norms, and where their difference comes from, in one sentence.
pub(super) fn gap(norm: &GapOfRuns) -> String {
    let both = format!("{} here, {} there", short(norm.this), short(norm.other));
    if norm.shares.is_empty() {
        return format!("{both}: roundings explain the difference");
    }
    let told = norm.shares.iter().filter(|share| share.share.abs() >= TOLD);
    let shares = told.map(|share| format!("{:.1} % from {}", 100.0 * share.share, origin(share)));
    let shares: Vec<String> = shares.collect();
    format!("{both}; of the difference of the squares {}", shares.join(", "))
}

/// Where a share comes from.
pub(super) fn origin(share: &GapShare) -> String {
    let whose = if share.run == "both" { String::new() } else { format!(" of {}", share.run) };
    format!("{} at {}{whose}", share.what, share.at)
}
