//! The steps of two runs in the text report: place by place, where they part, and what to conclude.

use std::fmt::Write;

use super::text::wrap;
use crate::algebra::against::{GapOfRuns, GroupApart, Setting, Status, StepsApart, distance};
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

fn parted(out: &mut String, group: &GroupApart) {
    let whose = match group.status {
        Status::ThisIsWrong => "this run is wrong",
        Status::OtherIsWrong => "the other run is wrong",
        Status::BothAreWrong => "both runs are wrong",
        Status::Declared => "the runs declare it differently",
        _ => "the runs differ",
    };
    let cause = group.cause.as_ref().map(|cause| format!("; {cause}")).unwrap_or_default();
    let label = format!("{:<13}", group.at.name());
    wrap(out, &label, &format!("{whose}: {}: {}{cause}", group.what, distance(group)));
    if let Some((parameter, worst)) = &group.worst {
        let text = format!(
            "worst: {parameter} {:?} is {} here and {} there",
            worst.index,
            short(worst.this),
            short(worst.other)
        );
        wrap(out, "             ", &text);
    }
}

/// The two norms, and where their difference comes from, in one sentence.
fn gap(norm: &GapOfRuns) -> String {
    let both = format!("{} here, {} there", short(norm.this), short(norm.other));
    if norm.shares.is_empty() {
        return format!("{both}: roundings explain the difference");
    }
    let told = norm.shares.iter().filter(|share| share.share.abs() >= TOLD);
    let shares = told.map(|share| {
        let whose = if share.run == "both" { String::new() } else { format!(" of {}", share.run) };
        format!("{:.1} % from {} at {}{whose}", 100.0 * share.share, share.what, share.at)
    });
    let shares: Vec<String> = shares.collect();
    format!("{both}; of the difference of the squares {}", shares.join(", "))
}
