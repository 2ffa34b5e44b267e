//! The report of `replay trajectory`: one JSON object, schema `backtape.trajectory/1`, and text of
//! at most 100 columns.

use std::fmt::Write;

use backtape::identity::{Attempt, Rank};
use serde::Serialize;

use super::text::wrap;
use crate::dump::name_ranks;
use crate::number::plural;
use crate::trajectory::{FlagSummary, Judged, RankScalars, Severity, Status, Trajectory};

/// Name and version of the schema.
pub const SCHEMA: &str = "backtape.trajectory/1";

/// Most scalars that the text names.
const NAMED: usize = 12;

/// The verdict of all flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrajectoryVerdict {
    /// No flag is raised, and all lines could be read.
    Clear,
    /// A flag is raised.
    Flagged,
    /// No flag is raised, and a part of the record could not be read.
    Incomplete,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct TrajectoryReport {
    pub schema: &'static str,
    pub version: &'static str,
    pub verdict: TrajectoryVerdict,
    pub path: String,
    pub run: String,
    pub attempt: u32,
    pub world_size: u32,
    /// Ranks that recorded scalars.
    pub ranks: Vec<u32>,
    pub rows: u64,
    pub first_step: Option<u64>,
    pub last_step: Option<u64>,
    /// The names of all scalars.
    pub scalars: Vec<String>,
    /// Lines that could not be read.
    pub damage: Vec<String>,
    /// Remarks of the recorders, and what is unusual in the files.
    pub remarks: Vec<String>,
    #[serde(flatten)]
    pub judged: Judged,
}

impl TrajectoryReport {
    /// The report of a trajectory and of the flags that were raised.
    pub fn new(
        path: String,
        run: String,
        attempt: Attempt,
        read: &Trajectory,
        judged: Judged,
    ) -> TrajectoryReport {
        let verdict = match (judged.flagged(), read.damage.is_empty()) {
            (true, _) => TrajectoryVerdict::Flagged,
            (false, false) => TrajectoryVerdict::Incomplete,
            (false, true) => TrajectoryVerdict::Clear,
        };
        let series = || read.ranks.iter().flat_map(|rank| rank.series.iter());
        let mut scalars: Vec<String> = series().map(|(name, _)| name.clone()).collect();
        scalars.sort_unstable();
        scalars.dedup();
        TrajectoryReport {
            schema: SCHEMA,
            version: backtape::VERSION,
            verdict,
            path,
            run,
            attempt: attempt.0,
            world_size: read.world_size,
            ranks: read.ranks.iter().map(|rank| rank.rank).collect(),
            rows: read.ranks.iter().map(|rank| rank.rows).sum(),
            first_step: series().filter_map(|(_, s)| s.steps().first().copied()).min(),
            last_step: series().filter_map(|(_, s)| s.steps().last().copied()).max(),
            scalars,
            damage: read.damage.clone(),
            remarks: remarks(read),
            judged,
        }
    }
}

fn remarks(read: &Trajectory) -> Vec<String> {
    let mut remarks: Vec<String> = Vec::new();
    let absent: Vec<Rank> = (0..read.world_size)
        .filter(|rank| read.ranks.binary_search_by_key(rank, |scalars| scalars.rank).is_err())
        .map(Rank)
        .collect();
    if !absent.is_empty() {
        let ranks = name_ranks(&absent);
        remarks.push(format!("no scalars of {ranks} are here: they are compared with nothing"));
    }
    if !read.torn.is_empty() {
        let files = read.torn.join(", ");
        remarks.push(format!("the last line of {files} is torn, as a kill leaves it: left out"));
    }
    for rank in &read.ranks {
        remarks.extend(rank.notes.clone());
        if rank.processes > 1 {
            let (rank, processes) = (rank.rank, rank.processes);
            remarks.push(format!("rank {rank} was started {processes} times in this attempt"));
        }
        remarks.extend(rewound(rank));
    }
    remarks
}

fn rewound(rank: &RankScalars) -> Option<String> {
    let most = rank.series.values().map(|series| series.rewinds()).max().filter(|&n| n > 0)?;
    let times = plural(most, "time");
    Some(format!("the steps of rank {} went back {times}: the later values count", rank.rank))
}

/// The report as text.
pub fn render(report: &TrajectoryReport) -> String {
    let mut out = String::new();
    let steps = match (report.first_step, report.last_step) {
        (Some(first), Some(last)) => format!("steps {first} to {last}"),
        _ => "no steps".into(),
    };
    let ranks: Vec<Rank> = report.ranks.iter().map(|&rank| Rank(rank)).collect();
    let run = format!(
        "{}, attempt {}: {} of {}, {steps}, {}",
        report.run,
        report.attempt,
        name_ranks(&ranks),
        plural(u64::from(report.world_size), "rank"),
        plural(report.rows, "row"),
    );
    wrap(&mut out, "run       ", &run);
    let more = report.scalars.len().saturating_sub(NAMED);
    let names: Vec<&str> = report.scalars.iter().take(NAMED).map(String::as_str).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    wrap(&mut out, "scalars   ", &format!("{}{more}", names.join(", ")));
    for remark in &report.remarks {
        wrap(&mut out, "remark    ", remark);
    }
    for damage in &report.damage {
        wrap(&mut out, "DAMAGE    ", damage);
    }
    let _ = writeln!(out, "\n{:<14}{:<11}{:>9}  about", "flag", "status", "looked at");
    report.judged.flags.iter().for_each(|flag| summary(&mut out, flag));
    if !report.judged.findings.is_empty() {
        out.push('\n');
    }
    for finding in &report.judged.findings {
        let word = match finding.severity {
            Severity::Flag => "FLAG      ",
            Severity::Note => "note      ",
        };
        wrap(&mut out, word, &format!("{}: {}", finding.flag, finding.evidence));
        if finding.severity == Severity::Flag {
            wrap(&mut out, "          ", &format!("threshold: {}", finding.threshold));
        }
    }
    for skipped in &report.judged.not_checked {
        wrap(&mut out, "unchecked ", &format!("{} ({})", skipped.what, skipped.why));
    }
    out.push('\n');
    wrap(&mut out, "", &verdict(report));
    out
}

fn summary(out: &mut String, flag: &FlagSummary) {
    let status = match flag.status {
        Status::Clear => "clear",
        Status::Flagged => "FLAGGED",
        Status::NotChecked => "unchecked",
    };
    let _ = writeln!(out, "{:<14}{status:<11}{:>9}  {}", flag.flag, flag.looked_at, flag.about);
}

fn verdict(report: &TrajectoryReport) -> String {
    let flags = &report.judged.flags;
    let raised = flags.iter().filter(|flag| flag.status == Status::Flagged).count() as u64;
    let looked = flags.iter().filter(|flag| flag.status != Status::NotChecked).count();
    let flag_count = flags.len();
    match report.verdict {
        TrajectoryVerdict::Flagged => {
            format!(
                "FLAGGED: {} raised; {looked} of {flag_count} had something to look at.",
                plural(raised, "flag")
            )
        }
        TrajectoryVerdict::Incomplete => {
            "INCOMPLETE: no flag is raised; what is damaged above could not be looked at.".into()
        }
        TrajectoryVerdict::Clear => {
            format!("CLEAR: no flag is raised; {looked} of {flag_count} had something to look at.")
        }
    }
}
