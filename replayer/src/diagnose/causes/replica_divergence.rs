//! `replica-divergence`: ranks that should hold the same bits of a tensor do not.
//!
//! It is observed without a trial: the recorded bytes of the ranks differ. Where the versions are
//! sums of different gradients, or parts of one sum, other causes name it.

use std::collections::BTreeSet;

use backtape::identity::Rank;
use backtape::role::Role;

use crate::algebra::is_part;
use crate::diagnose::cause::{Cause, Observed};
use crate::diagnose::detectors::replicas::{Versions, versions};
use crate::diagnose::evidence::Evidence;
use crate::dump::name_ranks;
use crate::head::Stage;

/// Its id.
pub const ID: &str = "replica-divergence";

/// The catalogue's entry.
pub struct ReplicaDivergence;

impl Cause for ReplicaDivergence {
    fn id(&self) -> &str {
        ID
    }

    fn about(&self) -> &str {
        "ranks that should hold the same bits of a tensor hold different ones"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["hosts with faulty memory or arithmetic", "unsynchronised random states"]
    }

    fn advice(&self) -> &str {
        "compare the named rank's host and inputs with the others', and broadcast the parameters before going on. Where each rank holds a part of its own by design, nothing is wrong with the job: record it with that placement, as placement={\"data\": \"mean\"}"
    }

    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        let all = versions(evidence);
        let (told, rest): (Vec<&Versions>, Vec<&Versions>) = all.iter().partition(|versions| {
            versions.as_sums(evidence).is_some() || versions.is_parts_of_dq(evidence)
        });
        // Ranks whose dk are different sums compute different gradient norms.
        let follows =
            |versions: &Versions| versions.role == Some(Role::GradNorm) && !told.is_empty();
        // What of a step differs, and from which stage on, the step's own stages say.
        let mut own = rest.into_iter().filter(|versions| !is_part(&versions.key));
        let tensor = own.find(|versions| !follows(versions))?;
        let ranks: BTreeSet<Rank> = tensor.odd().into_iter().collect();
        let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let (count, most, bits) = tensor.difference();
        let mut parameters = vec![
            ("tensor", tensor.key.to_string()),
            ("versions", tensor.versions.len().to_string()),
            ("ranks", ranks.join(", ")),
            ("elements that differ", count.to_string()),
            ("largest difference", format!("{most:.2e} of the tensor's size")),
        ];
        if !bits.is_empty() {
            parameters.push(("flipped", bits.join("; ")));
        }
        let holders: Vec<String> =
            tensor.versions.iter().map(|(ranks, _)| name_ranks(ranks)).collect();
        let stages: Vec<Stage> = tensor.stage().into_iter().collect();
        let evidence = format!(
            "{} has {} versions of {}: {}",
            tensor.key,
            tensor.versions.len(),
            tensor.place,
            holders.join(" against ")
        );
        Some(Observed { evidence, stages, parameters })
    }
}
