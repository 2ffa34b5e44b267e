//! Checks `run.json` and the coordinator's journal, which are stored beside the steps. No tensor
//! depends on them, and a dump that was copied without them is complete; but if they are there,
//! they must be as they were written.

use std::path::Path;

use backtape::coordinator::{JournalError, examine};
use backtape::manifest::{ManifestError, RunRecord};
use backtape::store::layout::{JOURNAL, RUN_RECORD};

use super::finding::{FindingKind, NotChecked, VerifyFinding};
use crate::dump::StepDump;

pub(super) fn findings(dump: &StepDump, not_checked: &mut Vec<NotChecked>) -> Vec<VerifyFinding> {
    let Some(attempt) = dump.directory.parent() else { return Vec::new() };
    let run = run_record(dump, &attempt.join(RUN_RECORD), not_checked);
    let mut all_findings = Vec::from_iter(run);
    all_findings.extend(journal(dump, &attempt.join(JOURNAL), not_checked));
    all_findings
}

fn fault(path: &Path, sentence: String) -> VerifyFinding {
    VerifyFinding::fault(FindingKind::DamagedRecord, sentence).within(path)
}

fn run_record(
    dump: &StepDump,
    path: &Path,
    not_checked: &mut Vec<NotChecked>,
) -> Option<VerifyFinding> {
    let bytes = std::fs::read(path).ok()?;
    let read = match RunRecord::from_bytes(&bytes) {
        Ok(read) => read,
        Err(error @ ManifestError::Altered) => {
            return Some(fault(path, format!("{RUN_RECORD} is damaged: {error}")));
        }
        Err(error) => return Some(fault(path, format!("{RUN_RECORD} cannot be read: {error}"))),
    };
    if !read.sealed {
        not_checked.push(NotChecked {
            what: format!("whether {RUN_RECORD} is what was written"),
            why: "it was written before it had a seal".into(),
        });
    }
    let (record, dump_names) = (&read.record, (&dump.run, dump.attempt));
    ((&record.run, record.attempt) != dump_names).then(|| {
        let (run, attempt) = (&record.run, record.attempt);
        fault(path, format!("{RUN_RECORD} is of run {run} attempt {attempt}: it was moved here"))
    })
}

fn journal(dump: &StepDump, path: &Path, not_checked: &mut Vec<NotChecked>) -> Vec<VerifyFinding> {
    if !path.is_file() {
        return Vec::new();
    }
    let examined = match examine(path, dump.step) {
        Ok(examined) => examined,
        Err(JournalError::TooLarge { bytes, most, .. }) => {
            not_checked.push(NotChecked {
                what: JOURNAL.into(),
                why: format!("its {bytes} bytes are more than the {most} that are read"),
            });
            return Vec::new();
        }
        Err(JournalError::Damaged { line, detail, .. }) => {
            let sentence = format!("{JOURNAL} is damaged at line {line}: {detail}");
            return vec![fault(path, sentence)];
        }
        Err(error) => return vec![fault(path, format!("{JOURNAL} cannot be read: {error}"))],
    };
    let mut findings = Vec::new();
    if let (true, Some(how)) = (dump.listed, examined.contradicts(&dump.manifest)) {
        let step = dump.step;
        findings.push(fault(
            path,
            format!("{JOURNAL} does not tell of step {step} what its manifest tells: {how}"),
        ));
    }
    if examined.torn_bytes > 0 {
        // A line that was being written when the coordinator stopped was never acknowledged.
        let sentence = format!(
            "{JOURNAL} ends in {} bytes that are no whole line: a crash cut them off, or they were altered",
            examined.torn_bytes
        );
        findings.push(VerifyFinding::note(FindingKind::DamagedRecord, sentence).within(path));
    }
    findings
}
