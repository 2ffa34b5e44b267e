//! Faults that are smaller than what undeclared roundings may do, found all the same by
//! finding the policy of the job and the fault beside it.

use backtape::role::Role;
use backtape_replayer::diagnose::{Budget, Standing, diagnose};
use backtape_replayer::dump::{Selection, open};
use backtape_replayer::head::{HeadStep, Stage};
use backtape_replayer::kernels::NoProgress;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::{NotChecked, Status};
use backtape_replayer::replay::{Effort, Request, replay};
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump;
use crate::support::job::{Fault, Float, Job, Narrow, What};

const ASKED: &[Role] = &[];

fn report(job: &Job) -> Report {
    declaring(job, &[])
}

/// The report of a job that declares these dtypes, too.
fn declaring(job: &Job, dtypes: &[(&str, &str)]) -> Report {
    let mut head = job.head();
    head.dtypes.extend(dtypes.iter().map(|&(name, dtype)| (name.into(), dtype.into())));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write(&path, job.ranks as u32, &head, &job.shards());
    replay_report(&path, &Selection::default(), ASKED, None).unwrap()
}

/// A job that declares no rounding, with so few tokens that the fault is small.
fn small(seed: u64, fault: Fault) -> Job {
    let mut job = Job { seed, ranks: 1, microbatches: 1, tokens: 24, fault, ..Job::default() };
    job.options.declared = vec![];
    job
}

/// The report, in one line.
fn words(report: &Report) -> String {
    text::render(report).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Goal: a scatter in bf16 of labels that hardly repeat errs less than bf16 addends may, and
/// is proved by its own rounding errors. Its clean twin has the same policy, and no cause.
#[test]
fn a_fault_within_undeclared_roundings_is_reproduced_and_named() {
    let mut hidden = 0;
    for seed in 0..4 {
        let clean = report(&small(seed, Fault::None));
        assert_eq!(clean.verdict, Verdict::Agreed, "seed {seed}\n{}", words(&clean));
        assert!(clean.causes.is_empty());
        let found = report(&small(seed, Fault::LabelScatterBf16));
        assert_eq!(found.verdict, Verdict::Diverged, "seed {seed}\n{}", words(&found));
        let [cause] = &found.causes[..] else { panic!("seed {seed}\n{}", words(&found)) };
        assert_eq!(cause.id, "label-scatter-low-precision", "seed {seed}");
        assert_eq!(cause.standing, Standing::Named, "seed {seed}");
        let first = found.first_divergence.as_ref().unwrap();
        assert_eq!(first.stage, "dk_label", "seed {seed}\n{}", words(&found));
        hidden += usize::from(words(&found).contains("undeclared roundings may be as large"));
    }
    assert!(hidden >= 2, "the bound itself found all but {hidden}");
}

/// Goal: the words say that the bound did not find it, and by how much it was reproduced.
#[test]
fn what_is_reproduced_says_so_and_what_the_job_rounds() {
    let found = report(&small(0, Fault::LabelScatterBf16));
    let words = words(&found);
    assert!(words.contains("undeclared roundings may be as large"), "{words}");
    assert!(words.contains("no plausible"), "{words}");
    assert!(words.contains("the job rounds: "), "{words}");
    assert!(!words.contains("as closely as it could be"), "{words}");
}

/// Goal: intermediates that a job rounds and does not declare are no fault where the bounds
/// allow them, however exactly a cause reproduces them: JAX itself rounds p before it takes 1
/// off it where all is bf16.
#[test]
fn roundings_of_intermediates_are_no_proof_of_a_fault() {
    for seed in 0..2 {
        for (what, spread) in
            [Narrow::KeptLse, Narrow::EarlyP].map(|what| [(what, 0.5), (what, 2.0)]).concat()
        {
            let mut job = small(seed, Fault::Narrow(what, Float::Bf16));
            job.options.data.spread = spread;
            let found = report(&job);
            let said = words(&found);
            let proved = said.contains("undeclared roundings may be as large");
            assert!(!proved, "seed {seed} {what:?} spread {spread}\n{said}");
        }
    }
}

/// Goal: what a plausible policy makes element by element is right, whatever the bound says,
/// and what no policy makes is not. Method: comparisons of a clean and of a faulty job that
/// are said to fail.
#[test]
fn a_comparison_that_a_plausible_policy_reproduces_is_no_divergence() {
    for (fault, right) in [(Fault::None, true), (Fault::LabelScatterBf16, false)] {
        let job = Job { ranks: 1, microbatches: 1, fault, ..Job::default() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run-a");
        dump::write(&path, 1, &job.head(), &job.shards());
        let dumped = open(&path, &Selection::default()).unwrap();
        let step = HeadStep::new(&dumped, None, |_| None).unwrap();
        let request = Request {
            compare: &[],
            effort: Effort::All,
            progress: &NoProgress,
            total: &|_| {},
            draws: false,
            cluster: None,
            device: None,
        };
        let mut outcome = replay(&step, &request).unwrap();
        let dk = &mut outcome.stages[Stage::DkLabel as usize];
        dk.status = Status::Fail;
        dk.comparisons[0].excess = Some("as a bound that is too narrow would say".into());
        diagnose(&step, &mut outcome, &[], &Budget::default()).unwrap();
        assert_eq!(outcome.first_divergence().is_none(), right, "{fault:?}");
        let said = |note: &NotChecked| note.what == "the bound of dk_label";
        assert_eq!(outcome.not_checked.iter().any(said), right);
    }
}

/// Goal: a small fault that no cause describes is not given the name of one, whether it is
/// hidden or leaves its bound by so little that a wrong cause would pass as well: with
/// confident tokens one element does, or the scale.
#[test]
fn a_small_fault_that_no_cause_describes_has_no_name() {
    let mut diverged = 0;
    for (seed, confident) in [(0, Some((7, 23.0))), (0, None), (1, Some((7, 23.0)))] {
        for what in [What::Gradients, What::Dk, What::Dq] {
            for factor in [1.0015, 1.003] {
                let mut job = small(seed, Fault::Scaled(what, factor));
                (job.options.data.confident, job.options.data.spread) = (confident, 0.5);
                let found = report(&job);
                let named = found.causes.iter().any(|one| one.id != "unknown");
                assert!(!named, "seed {seed} {what:?} {factor}\n{}", words(&found));
                diverged += usize::from(found.verdict == Verdict::Diverged);
            }
        }
    }
    assert!(diverged >= 4, "only {diverged} leave their bound");
}

/// Goal: a fault that leaves its bound by little is named all the same where the emulated
/// head reproduces it.
#[test]
fn a_fault_just_beyond_its_bound_is_named_where_it_is_reproduced() {
    let found = report(&small(2, Fault::LabelScatterBf16));
    let said = words(&found);
    assert!(said.contains("further off than rounding can bring them"), "{said}");
    assert!(said.contains("label-scatter-low-precision"), "{said}");
    assert!(said.contains("no plausible rounding without it does"), "{said}");
}

/// Goal: where everything is declared, a sum of a few chunks in bf16, which errs by less than
/// twice what the storage of the gradient does, is proved by its own rounding errors, with a
/// chunk that nobody declared; the clean twin agrees.
#[test]
fn a_sum_of_few_chunks_that_its_bound_lets_pass_is_reproduced() {
    let open = [("input", "bf16"), ("output", "f32")];
    let (mut hidden, mut said) = (0, Vec::new());
    for (seed, chunks) in [(3, 4), (4, 8), (5, 2), (6, 2)] {
        let mut job = Job { seed, tokens: 96, vocab: 131, valid: 131, ..small(seed, Fault::None) };
        job.options.declared = vec!["logits", "p", "dlogits", "label_grad", "parts", "accumulate"];
        job.options.layout.dk = Float::Bf16;
        job.options.layout.dk_parts = Float::Bf16;
        job.options.chunk = Some(96 / chunks);
        let clean = declaring(&job, &open);
        assert_eq!(clean.verdict, Verdict::Agreed, "seed {seed}\n{}", words(&clean));
        assert!(clean.causes.is_empty(), "seed {seed}\n{}", words(&clean));
        job.fault = Fault::Narrow(Narrow::Chunks, Float::Bf16);
        let found = declaring(&job, &open);
        assert_eq!(found.verdict, Verdict::Diverged, "seed {seed}\n{}", words(&found));
        let [cause] = &found.causes[..] else { panic!("seed {seed}\n{}", words(&found)) };
        assert_eq!(cause.id, "chunk-accumulator-low-precision", "seed {seed}");
        hidden += usize::from(words(&found).contains("the bound leaves room for as much"));
        said.push(words(&found));
    }
    assert!(hidden >= 1, "the bound itself found every one: {said:#?}");
}
