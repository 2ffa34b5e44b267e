//! What the verdict allows and what it does not, in the places where real training
//! programs showed it to be too narrow or too wide.

use backtape::head::{HeadDeclaration, MicrobatchReduction, Scope};
use backtape::role::Role;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump;
use crate::support::job::options::Rounding;
use crate::support::job::{Fault, Float, Job, What};

const ASKED: &[Role] = &[Role::Dq, Role::Dk];

fn declared(job: &Job, declare: impl FnOnce(&mut HeadDeclaration)) -> Report {
    asked(job, ASKED, declare)
}

fn asked(job: &Job, roles: &[Role], declare: impl FnOnce(&mut HeadDeclaration)) -> Report {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    let mut head = job.head();
    declare(&mut head);
    dump::write(&path, job.ranks as u32, &head, &job.shards());
    replay_report(&path, &Selection::default(), roles, None).unwrap()
}

/// A job that computes and stores in this dtype what it does not declare.
fn in_dtype(to: Float, job: Job) -> Job {
    let mut job = job;
    let options = &mut job.options;
    (options.layout.input, options.layout.dq) = (to, Float::F32);
    options.rounding =
        Rounding { dlogits: Float::F32, label_grad: Float::F32, ..options.rounding.clone() };
    job
}

/// Goal: a mean over no tokens is 0, not 0/0. Method: the weights of one rank, or of
/// none but that rank, are 0, and a job that guards the division.
#[test]
fn a_part_of_the_batch_whose_weights_are_all_zero_has_gradients_of_zero() {
    for (scope, ranks) in [(Scope::Rank, 3), (Scope::Microbatch, 1)] {
        let mut job = Job { ranks, ..Job::default() };
        job.options.scope = scope;
        job.options.data.silent_rank = Some(ranks - 1);
        let report = declared(&job, |_| {});
        assert_eq!(report.verdict, Verdict::Agreed, "{scope:?}\n{}", text::render(&report));
    }
}

/// Goal: a fused kernel may form p - 1 in place: the label's term is then carried
/// through the sum like any other. Method: a plain job that calls itself fused.
/// Goal: one constant that rounds alike for every element of a mean is no divergence.
#[test]
fn a_mean_over_three_microbatches_that_multiplies_by_a_third_agrees() {
    for reciprocal in [false, true] {
        let mut job = Job { microbatches: 3, ranks: 1, ..Job::default() };
        job.options.layout.dk = Float::F32;
        job.options.microbatch_reduction = MicrobatchReduction::Mean;
        job.options.extras.accumulated = true;
        job.options.reciprocal = reciprocal;
        let report = asked(&job, &[], |_| {});
        assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
    }
}

#[test]
fn a_fused_job_in_f32_that_never_tells_the_parts_apart_agrees() {
    for seed in 1..5 {
        let mut job = in_dtype(Float::F32, Job { seed, fused: false, ..Job::default() });
        (job.vocab, job.valid) = (785, 785);
        (job.options.data.spread, job.options.data.confident) = (0.5, None);
        let report = declared(&job, |head| head.path = "fused".into());
        assert_eq!(report.verdict, Verdict::Agreed, "seed {seed}\n{}", text::render(&report));
    }
}

/// Goal: p in f16 explains no loss below f16's range in dlogits, which are g p: its
/// smallest step is g times smaller there. Method: dlogits fall below f16's range, and
/// the job says that it keeps them in f32.
#[test]
fn an_underflow_of_dlogits_is_not_explained_by_the_smallest_step_of_p() {
    let mut job = in_dtype(Float::F16, Job { fused: false, tokens: 300, ..Job::default() });
    (job.options.cotangent, job.options.data.confident) = (0.02, None);
    let honest = |head: &mut HeadDeclaration| {
        head.dtypes.insert("dlogits".into(), "f32".into());
    };
    let clean = declared(&job, honest);
    assert_eq!(clean.verdict, Verdict::Agreed, "{}", text::render(&clean));
    job.options.rounding.dlogits = Float::F16;
    let report = declared(&job, honest);
    assert_eq!(report.verdict, Verdict::Diverged, "{}", text::render(&report));
}

/// Goal: what passes only because nobody says how the job rounds is said, with what to
/// declare; a clean job is not called so, and with the declaration it is a divergence.
#[test]
fn an_error_beyond_every_policy_that_only_worst_cases_allow_is_a_warning() {
    let dk = |report: &Report| report.stages.iter().find(|one| one.name == "dk").unwrap().status;
    let mut job = Job { ranks: 1, microbatches: 1, fused: false, ..Job::default() };
    job.options.declared = vec![];
    // Logits are small, or rounding them would make an error as large as the fault's.
    (job.options.data.confident, job.options.data.spread) = (None, 0.5);
    let clean = declared(&job, |_| {});
    assert_eq!((clean.verdict, dk(&clean)), (Verdict::Agreed, Status::Pass));
    job.fault = Fault::Scaled(What::Gradients, 1.006);
    let loose = declared(&job, |_| {});
    let words = text::render(&loose);
    assert_eq!((loose.verdict, dk(&loose)), (Verdict::Agreed, Status::Warn), "{words}");
    assert!(words.contains("dk as closely as it could be"), "{words}");
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("dq and dk less closely than is possible"), "{words}");
    let said = declared(&job, |head| {
        for name in ["logits", "p", "dlogits"] {
            head.dtypes.insert(name.into(), "f32".into());
        }
    });
    assert_eq!(said.verdict, Verdict::Diverged, "{}", text::render(&said));
}
