//! The text of `replay ls`: the runs and steps that a directory or bucket holds.

use std::fmt::Write;

use super::text::wrap;
use crate::dump::ListedRun;
use crate::number::{bytes, count, plural};

/// Most steps of a run that are shown; of a longer run those in the middle are left out.
const SHOWN: usize = 40;

/// Writes one line for each run and each of its steps.
pub fn render(runs: &[ListedRun]) -> String {
    let mut out = String::new();
    for run in runs {
        let ranks = run.world_size.map(|ranks| plural(u64::from(ranks), "rank"));
        let ranks = ranks.unwrap_or_else(|| "its record is lost".into());
        let _ = writeln!(out, "{}  {}  {}", run.run, ranks, run.path.display());
        if run.steps.is_empty() {
            out.push_str("  no step was dumped\n");
        }
        for (index, step) in run.steps.iter().enumerate() {
            let left = run.steps.len() - SHOWN.min(run.steps.len());
            match index {
                _ if left == 0 || index < SHOWN / 2 || index >= run.steps.len() - SHOWN / 2 => {}
                at if at == SHOWN / 2 => {
                    let _ = writeln!(out, "  ... {} more, --json lists all", count(left as u64));
                    continue;
                }
                _ => continue,
            }
            let attempt = match step.attempt {
                0 => String::new(),
                number => format!("  --attempt {number}"),
            };
            let state = match (step.committed, step.files) {
                (_, 0) => "no shards",
                (true, _) => "committed",
                (false, _) => "partial",
            };
            let files = plural(step.files, "file");
            let size = bytes(step.bytes);
            let named = format!("--step {}{attempt}", step.step);
            let _ = writeln!(out, "  {named:<28}{state:<11}{files:>12}{size:>12}");
            if let Some(why) = &step.partial {
                wrap(&mut out, "      ", why);
            }
        }
    }
    out
}
