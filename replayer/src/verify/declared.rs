//! Findings from the declarations of ranks and manifest, without reading shards: faulty files,
//! omissions, and tensors that ranks declared differently.

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::manifest::Omission;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::absent_ranks;
use super::finding::{FindingKind, VerifyFinding};
use crate::dump::{FileFault, StepDump, TensorInfo, name_ranks};

/// What is wrong with the step as a whole.
pub(super) fn step(dump: &StepDump) -> Vec<VerifyFinding> {
    let mut findings = Vec::new();
    if let Some(why) = dump.state.why() {
        let missing_ranks = dump.state.missing_ranks();
        let who = match missing_ranks {
            _ if dump.listed => String::new(),
            [] => "; every rank left some file".into(),
            ranks => format!("; {} left no readable file", name_ranks(ranks)),
        };
        let word = if dump.is_whole() { "not committed" } else { "partial" };
        let sentence = format!("step {} is {word}: {why}{who}", dump.step);
        let finding = VerifyFinding::fault(FindingKind::Uncommitted, sentence);
        findings.push(finding.by(missing_ranks.to_vec()));
    }
    if dump.tensors().is_empty() {
        let sentence = format!("step {} holds no tensor: there is nothing to verify", dump.step);
        findings.push(VerifyFinding::fault(FindingKind::Empty, sentence));
    }
    findings.extend(dump.faults().iter().map(file));
    findings.extend(omissions(dump));
    findings
}

fn file(fault: &FileFault) -> VerifyFinding {
    let sentence = match fault.tensors.as_slice() {
        [] => fault.sentence.clone(),
        keys => {
            let named: Vec<String> = keys.iter().take(8).map(TensorKey::to_string).collect();
            let more = match keys.len().saturating_sub(named.len()) {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            format!("{}; shards lost of {}{more}", fault.sentence, named.join(", "))
        }
    };
    let finding = match fault.kind.harmless() {
        true => VerifyFinding::note(FindingKind::StrayFile, sentence),
        false => VerifyFinding::fault(FindingKind::DamagedFile, sentence),
    };
    let ranks: Vec<Rank> = fault.rank.into_iter().collect();
    finding.by(ranks).within(&fault.file)
}

/// One finding for all ranks that omitted the same tensor for the same reason.
fn omissions(dump: &StepDump) -> Vec<VerifyFinding> {
    let mut grouped: BTreeMap<_, Vec<Rank>> = BTreeMap::new();
    for omission in &dump.manifest.omissions {
        let what = (&omission.tensor, omission.microbatch, &omission.reason);
        grouped.entry(what).or_default().push(omission.rank);
    }
    let finding_of =
        |((tensor, microbatch, reason), ranks): ((&String, Option<_>, &String), Vec<Rank>)| {
            let of_microbatch =
                microbatch.map(|mb| format!(" microbatch {mb}")).unwrap_or_default();
            // The text comes from the job and must not break the line.
            let (tensor, reason) = (one_line(tensor), one_line(reason));
            let who = name_ranks(&ranks);
            let sentence = format!("{tensor}{of_microbatch} was not recorded by {who}: {reason}");
            let finding = VerifyFinding::fault(FindingKind::Omitted, sentence).by(ranks);
            match key_of(dump, &tensor, microbatch) {
                Some(key) => finding.of(key),
                None => finding,
            }
        };
    grouped.into_iter().map(finding_of).collect()
}

fn key_of<'a>(
    dump: &'a StepDump,
    tensor: &str,
    microbatch: Option<backtape::identity::Microbatch>,
) -> Option<&'a TensorKey> {
    let mut keys = dump.tensors().keys();
    keys.find(|key| key.tensor.as_str() == tensor && key.microbatch == microbatch)
}

/// The omission of some rank that did not record this tensor, or a part of it.
pub(super) fn omitted<'a>(dump: &'a StepDump, key: &TensorKey) -> Option<&'a Omission> {
    let mut omissions = dump.manifest.omissions.iter();
    omissions.find(|o| o.tensor == key.tensor.as_str() && o.microbatch == key.microbatch)
}

/// Findings from the declarations of one tensor.
pub(super) fn tensor(dump: &StepDump, key: &TensorKey, info: &TensorInfo) -> Vec<VerifyFinding> {
    let mut findings = Vec::new();
    for disagreement in &info.disagreements {
        let finding = VerifyFinding::fault(
            FindingKind::DeclarationsDisagree,
            format!("{key}: {disagreement}"),
        );
        // The first version is that of most ranks; the others are named.
        let few = disagreement.versions.iter().skip(1);
        let mut ranks: Vec<Rank> = few.flat_map(|(_, ranks)| ranks.iter().copied()).collect();
        ranks.sort();
        ranks.dedup();
        findings.push(finding.of(key).by(ranks));
    }
    let absent = absent_ranks(dump, info);
    // What a rank declares of its step is its own.
    let is_of_one = Part::declaring_rank(key.tensor.as_str()).is_some();
    // Ranks that share the elements of a parameter may hold none of a small one; docs/step.md.
    let is_part = Part::of_tensor(key.tensor.as_str()).is_some();
    if !absent.is_empty() && !is_of_one && !is_part {
        let sentence = format!("{key}: {} hold no shard of it", name_ranks(&absent));
        let sentence = match absent.len() {
            1 => sentence.replace(" hold ", " holds "),
            _ => sentence,
        };
        let finding = VerifyFinding::note(FindingKind::HeldBySome, sentence);
        findings.push(finding.of(key).by(absent));
    }
    findings
}

fn one_line(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(200).collect()
}
