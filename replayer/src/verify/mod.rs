//! Verifies that the dump is what the job held: the bytes of every shard, its box, and the
//! agreement of the ranks.
//!
//! It checks the dump, not the training. Replicas that really differed in the job are a finding
//! here too, because a verdict cannot be based on either of them.
//!
//! ```text
//! verify(&dump, &|bytes| ())
//!   -> 512 shards, 511 hash right
//!      q microbatch 1 [2:4, 0:8] of rank 3: the bytes are the job's own, but
//!      they do not belong in this box: they belong in [0:2, 0:8]
//! ```

mod addends;
mod agreement;
mod contents;
mod declared;
mod finding;
mod records;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::{FingerprintSource, TensorKey};
use rayon::prelude::*;
use serde::Serialize;

pub use finding::{FindingKind, NotChecked, Severity, VerifyFinding};

use crate::assemble;
use crate::dump::sampled::Samples;
use crate::dump::versions::disagrees;
use crate::dump::{MAX_RANKS, ShardRef, StepDump, TensorInfo};
use crate::number::{count, plural};
use contents::Contents;

/// Most gaps of a tensor that are named one by one; the others are only counted.
const NAMED_GAPS: usize = 32;

/// The result of verifying a step.
#[derive(Clone, Debug, Serialize)]
pub struct Verification {
    /// Shards that the step's records list.
    pub shards: u64,
    /// Bytes of these shards.
    pub bytes: u64,
    /// Shards whose bytes have the hash that the training process took.
    pub hashes_ok: u64,
    /// Shards whose bytes have the recorded fingerprint at their box.
    pub places_ok: u64,
    /// Faults first.
    pub findings: Vec<VerifyFinding>,
    /// One for every tensor, by key.
    pub tensors: Vec<TensorVerdict>,
    /// What could not be verified, and why.
    pub not_checked: Vec<NotChecked>,
}

/// What is known of one tensor after verification.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct TensorVerdict {
    #[serde(flatten)]
    pub key: TensorKey,
    pub role: Option<Role>,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub partial: Option<Reduction>,
    pub shards: u64,
    pub bytes: u64,
    /// Fingerprint of the global tensor: the sum over one intact shard of each box. `None` where
    /// the boxes do not make up the tensor, and for partial, ragged and sampled tensors.
    pub fingerprint: Option<Fingerprint>,
    /// Whether the framework or the recorder computed the fingerprints.
    pub fingerprint_source: FingerprintSource,
    /// Why no verdict may be based on it; `None` if it is usable.
    pub unusable: Option<String>,
}

impl Verification {
    /// True when no fault was found.
    pub fn intact(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity == Severity::Note)
    }

    /// True where the only faults are replicas that differ. The dump is then what the job held, so
    /// the job is at fault and not the dump.
    pub fn only_copies_differ(&self) -> bool {
        let mut faults =
            self.findings.iter().filter(|finding| finding.severity != Severity::Note).peekable();
        faults.peek().is_some()
            && faults.all(|finding| finding.kind == FindingKind::ReplicasDisagree)
    }

    /// Why no verdict may be based on this tensor; `None` if it is usable.
    pub fn unusable(&self, key: &TensorKey) -> Option<&str> {
        match self.tensors.binary_search_by(|verdict| verdict.key.cmp(key)) {
            Ok(index) => self.tensors[index].unusable.as_deref(),
            Err(_) => Some("it was not dumped"),
        }
    }
}

/// Verifies a step. `progress` gets the bytes of each shard when it is done, from any thread.
pub fn verify(dump: &StepDump, progress: &(dyn Fn(u64) + Sync)) -> Verification {
    let contents = contents::check(dump, progress);
    let tensors: Vec<(&TensorKey, &TensorInfo)> = dump.tensors().iter().collect();
    let samples = Samples::of(dump);
    let judge = |(key, info): &(&TensorKey, &TensorInfo)| {
        let sampled = samples.boxes(key, &info.shape);
        judge(dump, (key, info, sampled.as_deref()), &contents)
    };
    let judged: Vec<_> = tensors.par_iter().map(judge).collect();
    let mut findings = declared::step(dump);
    let (mut verdicts, mut not_checked) = (Vec::new(), Vec::new());
    for (verdict, findings_of_tensor, unchecked) in judged {
        verdicts.push(verdict);
        findings.extend(findings_of_tensor);
        not_checked.extend(unchecked);
    }
    findings.extend(records::findings(dump, &mut not_checked));
    not_checked.extend(addends::undeclared(dump));
    not_checked.extend(outside(&samples));
    not_checked.extend(unproved(dump, &verdicts, &contents));
    // The sort is stable: findings of one kind and tensor keep the order of their boxes.
    findings.sort_by(|a, b| (a.severity, a.kind, &a.tensor).cmp(&(b.severity, b.kind, &b.tensor)));
    let right =
        |shard: &ShardRef| contents[shard].fingerprint == Some(dump.record(shard).fingerprint);
    Verification {
        shards: contents.len() as u64,
        bytes: contents.keys().map(|shard| dump.record(shard).length).sum(),
        hashes_ok: contents.values().filter(|checked| checked.intact).count() as u64,
        places_ok: contents.keys().filter(|shard| right(shard)).count() as u64,
        findings,
        tensors: verdicts,
        not_checked,
    }
}

fn judge(
    dump: &StepDump,
    (key, info, sampled): (&TensorKey, &TensorInfo, Option<&[IndexBox]>),
    contents: &Contents,
) -> (TensorVerdict, Vec<VerifyFinding>, Vec<NotChecked>) {
    let mut not_checked = Vec::new();
    let mut findings = declared::tensor(dump, key, info);
    findings.extend(contents::findings(dump, key, info, contents));
    // Boxes of different shapes or dtypes cannot be compared; the disagreement was already
    // reported.
    let comparable = !info.disagreements.iter().any(|d| d.spoils_bytes());
    if comparable && info.partial.is_some() {
        let tensor = (key, info, sampled);
        findings.extend(addends::findings(dump, tensor, contents, &mut not_checked));
    } else if comparable {
        findings.extend(agreement::findings(dump, key, &info.shards, contents));
        findings.extend(gaps(dump, key, info, sampled));
    }
    let unusable = unusable(dump, key, info, &findings);
    let sources = info.shards.iter().map(|shard| dump.record(shard).fingerprint_source);
    let by_framework = sources.clone().all(|source| source == FingerprintSource::Framework);
    let verdict = TensorVerdict {
        key: key.clone(),
        role: info.role,
        dtype: info.dtype,
        shape: info.shape.clone(),
        partial: info.partial,
        shards: info.shards.len() as u64,
        bytes: info.shards.iter().map(|shard| dump.record(shard).length).sum(),
        fingerprint: match sampled {
            None => whole_fingerprint(dump, info, contents, &findings),
            Some(_) => None,
        },
        fingerprint_source: match by_framework {
            true => FingerprintSource::Framework,
            false => FingerprintSource::Recorder,
        },
        unusable,
    };
    (verdict, findings, not_checked)
}

/// The parts of a tensor, or of the boxes that are sampled of it, that no intact shard holds.
fn gaps(
    dump: &StepDump,
    key: &TensorKey,
    info: &TensorInfo,
    sampled: Option<&[IndexBox]>,
) -> Vec<VerifyFinding> {
    let Some(missing) = assemble::missing(dump, key, info, sampled) else {
        return Vec::new();
    };
    let all = missing.gaps.clone();
    let finding_of = |gap: &IndexBox| {
        let only = assemble::Incomplete { gaps: vec![gap.clone()], ..missing.clone() };
        let finding = VerifyFinding::fault(FindingKind::Gap, only.to_string());
        finding.of(key).at(gap).by(missing.ranks.clone())
    };
    let mut findings: Vec<_> = all.iter().take(NAMED_GAPS).map(finding_of).collect();
    if all.len() > NAMED_GAPS {
        let sentence = format!("{key} has {} gaps in all", all.len());
        findings.push(VerifyFinding::fault(FindingKind::Gap, sentence).of(key));
    }
    findings
}

/// The most severe reason why no verdict may be based on the tensor. A damaged file or shard is not
/// a reason if a replica replaces it.
fn unusable(
    dump: &StepDump,
    key: &TensorKey,
    info: &TensorInfo,
    findings: &[VerifyFinding],
) -> Option<String> {
    use FindingKind::{DeclarationsDisagree, Gap, MissingAddend, OutOfPlace, ReplicasDisagree};
    let spoiling = [DeclarationsDisagree, Gap, MissingAddend, OutOfPlace, ReplicasDisagree];
    // Several versions of a box are what the job held, and each can be judged by itself.
    let versions = |f: &VerifyFinding| {
        let box_of = f.place.as_ref();
        f.kind == ReplicasDisagree && box_of.is_some_and(|place| disagrees(dump, info, place))
    };
    let spoilt =
        spoiling.iter().find_map(|kind| findings.iter().find(|f| f.kind == *kind && !versions(f)));
    if let Some(finding) = spoilt {
        return Some(finding.sentence.clone());
    }
    // A tensor of values is complete if its boxes are, but a sum is wrong if one rank's addend is
    // missing.
    let omission = declared::omitted(dump, key).filter(|_| info.partial.is_some())?;
    Some(format!("rank {} did not record its addend of {key}", omission.rank))
}

/// The fingerprint of the global tensor, from one intact shard of each box.
fn whole_fingerprint(
    dump: &StepDump,
    info: &TensorInfo,
    contents: &Contents,
    findings: &[VerifyFinding],
) -> Option<Fingerprint> {
    use FindingKind::{DeclarationsDisagree, Gap, OutOfPlace, Overlap, ReplicasDisagree};
    let spoils = [DeclarationsDisagree, Gap, OutOfPlace, Overlap, ReplicasDisagree];
    if info.partial.is_some() || info.ragged || findings.iter().any(|f| spoils.contains(&f.kind)) {
        return None;
    }
    let mut boxes = BTreeSet::new();
    let mut sum = Fingerprint::default();
    for shard in &info.shards {
        // The first intact shard of a box represents its replicas.
        if let Some(shard_fingerprint) = contents[shard].fingerprint
            && boxes.insert(&dump.record(shard).place)
        {
            sum = sum.plus(shard_fingerprint);
        }
    }
    Some(sum)
}

/// Ranks of the job that hold no shard of a tensor.
fn absent_ranks(dump: &StepDump, info: &TensorInfo) -> Vec<Rank> {
    let holders: BTreeSet<Rank> = info.shards.iter().map(|shard| dump.record(shard).rank).collect();
    let all = (0..dump.manifest.world_size.min(MAX_RANKS)).map(Rank);
    all.filter(|rank| !holders.contains(rank)).collect()
}

/// What was left out by the job's own choice.
fn outside(samples: &Samples) -> Option<NotChecked> {
    let (number, elements, of) = samples
        .all()
        .fold((0, 0, 0), |(n, own, of), (_, one)| (n + 1, own + one.elements(), of + one.of()));
    let parameters = plural(number, "parameter");
    (number > 0).then(|| NotChecked {
        what: format!("{} of the {} elements of {parameters}", count(of - elements), count(of)),
        why: "the job recorded a sample of them".into(),
    })
}

/// Tensors in words: some by name, and how many others; `None` where there are none.
fn name_tensors<'a>(keys: impl Iterator<Item = &'a TensorKey>) -> Option<String> {
    const NAMED: usize = 8;
    let (mut named, mut others, mut of_step) = (Vec::new(), 0, 0);
    for key in keys {
        let name = key.tensor.as_str();
        match (Part::of_tensor(name), Part::declaring_rank(name)) {
            // What a rank declares of its step is text, and has no place.
            (_, Some(_)) => {}
            (Some(_), None) => of_step += 1,
            (None, None) if named.len() < NAMED => named.push(key.to_string()),
            (None, None) => others += 1,
        }
    }
    let mut what = named.join(", ");
    if others > 0 {
        what += &format!(" and {others} more");
    }
    if of_step > 0 {
        let before = if what.is_empty() { "" } else { ", and of " };
        what += &format!("{before}{} of the step", plural(of_step, "tensor"));
    }
    (!what.is_empty()).then_some(what)
}

/// What none of the checks can prove.
fn unproved(dump: &StepDump, verdicts: &[TensorVerdict], contents: &Contents) -> Vec<NotChecked> {
    let mut not_checked = Vec::new();
    let ragged = dump.tensors().iter().filter(|(_, info)| info.ragged).map(|(key, _)| key);
    not_checked.extend(name_tensors(ragged).map(|what| NotChecked {
        what: format!("how long each rank's part of {what} should be"),
        why: "ragged: every rank recorded a part of its own length, and the whole is those parts one after the other in the order of the mesh".into(),
    }));
    let by_job = verdicts
        .iter()
        .filter(|verdict| verdict.fingerprint_source == FingerprintSource::Recorder)
        .map(|verdict| &verdict.key);
    not_checked.extend(name_tensors(by_job).map(|what| NotChecked {
        what: format!("the place of {what}"),
        why: "the box is the job's own declaration: the recorder's fingerprint proves that it travelled unchanged, not that it was right".into(),
    }));
    let lost = contents.values().filter(|checked| !checked.intact).count();
    if lost > 0 {
        not_checked.push(NotChecked {
            what: format!("the place of {lost} shards"),
            why: "their bytes are lost or altered".into(),
        });
    }
    if !dump.listed {
        not_checked.push(NotChecked {
            what: "whether every file and every tensor of the step is there".into(),
            why: "without a manifest only what is there can speak".into(),
        });
    }
    not_checked
}
