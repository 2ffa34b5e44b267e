//! Lists what could not be read: each fault that verification found in the files, bytes and boxes
//! of the dump. The other checks use what is left.

use super::{CheckResults, Place, Severity, Subject};
use crate::verify::{FindingKind, Severity as Weight, VerifyFinding};

/// Whether a fault means that something of the dump is lost. Replicas that differ are what the job
/// held, and have a check of their own.
pub fn is_damage(finding: &VerifyFinding) -> bool {
    finding.severity == Weight::Fault
        && !matches!(finding.kind, FindingKind::ReplicasDisagree | FindingKind::Overlap)
}

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        results.looked();
        for fault in subject.proof.findings.iter().filter(|fault| is_damage(fault)) {
            let place = Place::of(subject).ranks(&fault.ranks);
            let place = match &fault.tensor {
                Some(key) => place.tensor(key),
                None => place,
            };
            let advice =
                "Fetch the file again from where it was written; replay verify lists every proof";
            results.add(Severity::Warn, None, place, fault.sentence.clone(), advice);
        }
    }
}
