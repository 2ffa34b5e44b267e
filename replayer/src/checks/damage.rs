//! What could not be read: each fault that verification found with the files, the bytes
//! and the places of the dump. Every other check works with what is left.

use super::{Found, Place, Severity, Subject};
use crate::verify::{FindingKind, Severity as Weight, VerifyFinding};

/// Whether a fault takes something away from the dump. Replicas that differ are what the
/// job held, and have a check of their own.
pub fn is_damage(found: &VerifyFinding) -> bool {
    found.severity == Weight::Fault
        && !matches!(found.kind, FindingKind::ReplicasDisagree | FindingKind::Overlap)
}

pub(super) fn run(subjects: &[Subject<'_>], found: &mut Found) {
    for subject in subjects {
        found.looked();
        for fault in subject.proof.findings.iter().filter(|fault| is_damage(fault)) {
            let place = Place::of(subject).ranks(&fault.ranks);
            let place = match &fault.tensor {
                Some(key) => place.tensor(key),
                None => place,
            };
            let advice =
                "Fetch the file again from where it was written; replay verify lists every proof";
            found.add(Severity::Warn, None, place, fault.sentence.clone(), advice);
        }
    }
}
