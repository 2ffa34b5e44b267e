//! A damaged dump accuses nobody. Every recorded shard of a job of every kind is damaged in
//! turn, and no replay of it may diverge; and one agrees only where a replica whose bytes are
//! proved was read in its place. What does not depend on the damage is still judged.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use backtape::head::{Denominator, GrpoDeclaration, HeadDeclaration, LossReduction, Scope};
use backtape::manifest::Manifest;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump::{self, Shard};
use crate::support::job::options::{Extras, Kind, Layout, Options, Weights};
use crate::support::job::{Fault, Job};
use crate::support::program::replay;

/// A job of two ranks and two microbatches that records all there is.
fn job(kind: Kind, reduction: LossReduction) -> Job {
    let base = Options::default();
    let fused = reduction == LossReduction::Mean && kind != Kind::XentLogits;
    // A fused path records dlogits without the label's part.
    let dlogits = !fused;
    let extras = Extras {
        logits: true,
        dlogits,
        logprobs: true,
        accumulated: true,
        dq_parts: true,
        ..Extras::default()
    };
    let layout = Layout { k_sharded: true, ..base.layout };
    let bias = kind == Kind::Xent;
    // One loss a token is not divided, and each has a cotangent of its own.
    let none = reduction == LossReduction::None;
    let cotangent = if none { 1.0 } else { base.cotangent };
    let denominator = if none { Denominator::Valid } else { base.denominator };
    let weights = Weights::Mixed;
    let options =
        Options { kind, reduction, denominator, cotangent, extras, layout, bias, weights, ..base };
    let (ranks, microbatches) = (2, 2);
    let (tokens, vocab, valid, width) = (9, 14, 13, 4);
    Job { ranks, microbatches, tokens, vocab, valid, width, fused, options, ..Job::default() }
}

fn grpo() -> GrpoDeclaration {
    GrpoDeclaration { kl_beta: 0.05, ..GrpoDeclaration::default() }
}

fn kinds() -> Vec<Job> {
    vec![
        job(Kind::Xent, LossReduction::Mean),
        job(Kind::Xent, LossReduction::None),
        job(Kind::XentLogits, LossReduction::Mean),
        job(Kind::Grpo(grpo()), LossReduction::Mean),
    ]
}

fn write(directory: &Path, job: &Job, shards: &[Shard]) -> PathBuf {
    let path = directory.join("run-a");
    dump::write(&path, job.ranks as u32, &job.head(), shards);
    path
}

fn judged(path: &Path) -> Report {
    replay_report(path, &Selection::default(), &[][..], None).unwrap()
}

fn manifest(path: &Path) -> Manifest {
    let bytes = fs::read(path.join("step-00000000/manifest.json")).unwrap();
    Manifest::from_bytes(&bytes).unwrap()
}

/// Flips one bit of a shard; what undoes it.
fn flip(path: &Path, manifest: &Manifest, file: usize, shard: usize) -> impl FnOnce() + use<> {
    let record = &manifest.files[file];
    let all: u64 = record.shards.iter().map(|shard| shard.length).sum();
    let before: u64 = record.shards[..shard].iter().map(|shard| shard.length).sum();
    let length = record.shards[shard].length;
    // Not always the same bit: a sign, an exponent and a mantissa are hit in turn.
    let at = record.length - all + before + (7 * shard as u64 + file as u64) % length;
    let path = path.join("step-00000000").join(record.name.as_str());
    let whole = fs::read(&path).unwrap();
    let mut altered = whole.clone();
    altered[at as usize] ^= 1 << (shard % 8);
    fs::write(&path, altered).unwrap();
    move || fs::write(path, whole).unwrap()
}

fn stage<'r>(report: &'r Report, name: &str) -> &'r backtape_replayer::report::schema::StageReport {
    report.stages.iter().find(|stage| stage.name == name).unwrap()
}

/// One shard of every tensor of every kind of head; `make soak-flips` damages each.
#[test]
fn one_flipped_bit_in_a_shard_of_any_role_accuses_nobody() {
    flip_all(|tensor, seen| seen.insert(tensor.to_string()));
}

#[test]
#[ignore = "minutes: make soak-flips"]
fn one_flipped_bit_in_any_shard_of_any_role_accuses_nobody() {
    flip_all(|_, _| true);
}

/// Damages the shards of each kind of head that are meant, by the tensor and those of it that
/// were damaged before.
fn flip_all(meant: impl Fn(&str, &mut BTreeSet<String>) -> bool) {
    for job in kinds() {
        let mut seen = BTreeSet::new();
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &job, &job.shards());
        let clean = judged(&path);
        assert_eq!(clean.verdict, Verdict::Agreed, "{job:?}\n{}", text::render(&clean));
        let manifest = manifest(&path);
        for (file, record) in manifest.files.iter().enumerate() {
            for (at, shard) in record.shards.iter().enumerate() {
                if !meant(shard.key.tensor.as_str(), &mut seen) {
                    continue;
                }
                let mend = flip(&path, &manifest, file, at);
                let report = judged(&path);
                let said = format!("{} of {}\n{}", shard.key, record.name, text::render(&report));
                let replica = manifest.shards().any(|(other, copy)| {
                    other.rank != record.rank
                        && (&copy.key, &copy.place) == (&shard.key, &shard.place)
                        && copy.partial.is_none()
                });
                let wanted = if replica { Verdict::Agreed } else { Verdict::Incomplete };
                assert_eq!(report.verdict, wanted, "{said}");
                let named = |words: &String| words.contains(&shard.key.to_string());
                assert!(report.findings.iter().any(named), "{said}");
                mend();
            }
        }
    }
}

/// Goal: what is intact is judged beside what is not. Method: a fault in lse, and damage to the
/// weights, on which lse does not depend; damage to one microbatch's q, and dq of the other.
#[test]
fn a_divergence_in_an_intact_stage_counts_beside_a_damaged_input() {
    let faulty = Job { fault: Fault::LseOff(0.5), ..job(Kind::Xent, LossReduction::Mean) };
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &faulty, &faulty.shards());
    damage(&path, "weights", None);
    let report = judged(&path);
    let said = text::render(&report);
    assert_eq!(report.verdict, Verdict::Diverged, "{said}");
    assert_eq!(report.first_divergence.as_ref().unwrap().stage, "lse", "{said}");
    assert!(report.causes.is_empty(), "{said}");
    for name in ["dq", "dk", "loss", "weights"] {
        let found = stage(&report, name);
        assert_eq!(found.status, Status::Skip, "{said}");
        assert!(found.reason.contains("weights microbatch"), "{said}");
    }
}

#[test]
fn the_other_microbatches_are_judged_beside_a_damaged_q() {
    let job = job(Kind::Xent, LossReduction::Mean);
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &job, &job.shards());
    damage(&path, "q", Some(1));
    let report = judged(&path);
    let said = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{said}");
    for name in ["lse", "loss", "dq", "dk", "accumulate", "reduce"] {
        assert_eq!(stage(&report, name).status, Status::Pass, "{name}\n{said}");
    }
    assert!(report.not_checked.iter().any(|of| of.what.contains("q microbatch 1")), "{said}");
    let named = path.to_str().unwrap();
    let ended = replay(&["--dump", named]);
    assert_eq!(ended.code, 3, "{ended:?}");
    assert!(ended.stdout.contains("q microbatch 1"), "{ended:?}");
}

/// Damages one shard of a tensor.
fn damage(path: &Path, tensor: &str, microbatch: Option<u32>) {
    let manifest = manifest(path);
    let of = |shard: &backtape::shard::ShardRecord| {
        let key = &shard.key;
        key.tensor.as_str() == tensor
            && microbatch.is_none_or(|mb| key.microbatch.is_some_and(|own| own.0 == mb))
    };
    let mut found = manifest.files.iter().enumerate();
    let (file, at) =
        found.find_map(|(file, record)| Some((file, record.shards.iter().position(of)?))).unwrap();
    drop(flip(path, &manifest, file, at));
}

/// The same job, of which something was not recorded.
fn without(job: &Job, left_out: impl Fn(&Shard) -> bool) -> Vec<Shard> {
    job.shards().into_iter().filter(|shard| !left_out(shard)).collect()
}

fn declared(job: &Job, change: impl FnOnce(&mut HeadDeclaration)) -> HeadDeclaration {
    let mut head = job.head();
    change(&mut head);
    head
}

#[test]
fn fewer_microbatches_than_declared_are_no_step() {
    let job = job(Kind::Xent, LossReduction::Mean);
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &job, &without(&job, |shard| shard.microbatch == Some(1)));
    let report = judged(&path);
    let said = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{said}");
    assert!(said.contains("microbatches=2"), "{said}");
    assert_eq!(stage(&report, "lse").status, Status::Pass, "{said}");
    // The sum over ranks was captured before and after it, and divides by nothing.
    assert_eq!(stage(&report, "reduce").status, Status::Pass, "{said}");
    for name in ["loss", "dq", "dk", "accumulate"] {
        assert_eq!(stage(&report, name).status, Status::Skip, "{name}\n{said}");
    }
}

#[test]
fn what_does_not_divide_by_every_microbatch_is_judged_without_one_of_them() {
    let job = job(Kind::Xent, LossReduction::Mean);
    let job = Job { options: Options { scope: Scope::Microbatch, ..job.options }, ..job };
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &job, &without(&job, |shard| shard.microbatch == Some(1)));
    let report = judged(&path);
    let said = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{said}");
    assert_eq!(stage(&report, "dq").status, Status::Pass, "{said}");
    assert_eq!(stage(&report, "accumulate").status, Status::Skip, "{said}");
}

/// Goal: an input that stands beside one microbatch and not beside the other was not recorded,
/// and is not taken for one that the job does not have.
#[test]
fn an_input_of_some_microbatches_is_missing_in_the_others() {
    let of_two = |shard: &Shard| shard.microbatch == Some(1);
    for job in kinds() {
        for name in ["q", "labels", "weights", "bias", "cotangent", "old_logprobs", "advantages"] {
            let left_out = |shard: &Shard| of_two(shard) && shard.name == name;
            let shards = without(&job, left_out);
            if shards.len() == job.shards().len() {
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("run-a");
            dump::write(&path, job.ranks as u32, &declared(&job, |_| {}), &shards);
            let report = judged(&path);
            let said = text::render(&report);
            assert_eq!(report.verdict, Verdict::Incomplete, "{name}\n{said}");
            assert!(said.contains(name), "{name}\n{said}");
        }
    }
}
