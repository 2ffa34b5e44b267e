//! `--freivalds` and `--tokens` on whole dumps: what a full replay agrees with they agree
//! with, what is planted is found where they claim to see it, and the saving is counted.

use std::sync::atomic::{AtomicU64, Ordering};

use backtape::head::HeadDeclaration;
use backtape_replayer::dump::{Selection, open};
use backtape_replayer::head::{HeadStep, Stage};
use backtape_replayer::kernels::{NoProgress, Progress};
use backtape_replayer::replay::outcome::{NotChecked, Outcome, Status};
use backtape_replayer::replay::{Effort, Request, replay};

use crate::support::dump::{self, Shard};
use crate::support::job::options::Kind;
use crate::support::job::{Fault, Job};

/// Random clean jobs with q and k: some seconds.
const JOBS: u64 = 42;
const PROBES: Effort = Effort::Probes { count: 40, seed: 7 };
const GRADIENTS: [Stage; 6] =
    [Stage::DqLse, Stage::DqLabel, Stage::Dq, Stage::DkLse, Stage::DkLabel, Stage::Dk];

fn tokens(count: usize) -> Effort {
    Effort::Tokens { count, seed: 7 }
}

fn judged(head: &HeadDeclaration, ranks: usize, shards: &[Shard], effort: Effort) -> Outcome {
    counted(head, ranks, shards, effort, &NoProgress).unwrap()
}

fn counted(
    head: &HeadDeclaration,
    ranks: usize,
    shards: &[Shard],
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Outcome, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write(&path, ranks as u32, head, shards);
    let dumped = open(&path, &Selection::default()).unwrap();
    let step = HeadStep::new(&dumped, None, |_| None).map_err(|error| error.to_string())?;
    let request = Request {
        compare: &[],
        effort,
        progress,
        total: &|_| {},
        draws: false,
        cluster: None,
        device: None,
    };
    replay(&step, &request).map_err(|error| error.to_string())
}

fn of(job: &Job, effort: Effort) -> Outcome {
    judged(&job.head(), job.ranks, &job.shards(), effort)
}

fn faulty(fault: Fault) -> Job {
    Job { fault, ..Job::default() }
}

fn failing(outcome: &Outcome) -> Vec<Stage> {
    let failed = outcome.stages.iter().filter(|stage| stage.status == Status::Fail);
    failed.map(|stage| stage.stage).collect()
}

/// Goal: probes call no clean job diverged, and leave out no stage that they claim.
/// Method: random jobs of every option, beside the full replay of the same dump.
#[test]
fn clean_jobs_pass_every_probe_and_every_sample_whatever_their_options() {
    let (mut all, mut with_products) = (0, 0);
    for seed in 0..JOBS {
        let job = if seed == 0 { Job::default() } else { Job::random(seed) };
        if job.options.kind == Kind::XentLogits {
            continue;
        }
        let (head, shards) = (job.head(), job.shards());
        let run = |effort| counted(&head, job.ranks, &shards, effort, &NoProgress);
        let Ok(full) = run(Effort::All) else { continue };
        let (probed, sampled) = (run(PROBES).unwrap(), run(tokens(20)).unwrap());
        for (what, outcome) in [("full", &full), ("probed", &probed), ("sampled", &sampled)] {
            let first = outcome.first_divergence().map(|stage| (stage.stage, &stage.reason));
            assert_eq!(first, None, "{what}, seed {seed}: {job:?}");
        }
        with_products += 1;
        for stage in GRADIENTS {
            let count = |outcome: &Outcome| outcome.stage(stage).comparisons.len();
            assert_eq!(count(&probed), count(&full), "{stage}, seed {seed}");
            all += count(&probed);
            let of_tokens = [Stage::Dq, Stage::DqLse, Stage::DqLabel].contains(&stage);
            let wanted = if of_tokens { count(&full) } else { 0 };
            assert_eq!(count(&sampled), wanted, "{stage}, seed {seed}");
        }
    }
    assert!(with_products >= 30 && all > 150, "{with_products} jobs, {all} comparisons");
}

#[test]
fn probes_find_a_scaled_rank_a_nan_and_a_label_shift_where_the_full_replay_finds_them() {
    for fault in [
        Fault::RankScaled(1.05),
        Fault::RankScaled(2.0),
        Fault::NanInDq,
        Fault::LabelShift,
        Fault::LseOff(0.05),
    ] {
        let job = faulty(fault);
        let (full, probed) = (of(&job, Effort::All), of(&job, PROBES));
        let (full, probed) = (failing(&full), failing(&probed));
        assert!(!probed.is_empty(), "{fault:?}: {full:?}");
        assert_eq!(probed.first(), full.first(), "{fault:?}: {full:?} {probed:?}");
    }
}

#[test]
fn a_bf16_label_scatter_is_found_by_probes_as_well() {
    let job = Job { tokens: 400, ..faulty(Fault::LabelScatterBf16) };
    let (full, probed) = (of(&job, Effort::All), of(&job, PROBES));
    assert_eq!(failing(&full).first(), Some(&Stage::DkLabel));
    assert_eq!(failing(&probed).first(), Some(&Stage::DkLabel));
}

#[test]
fn a_sample_judges_dq_and_leaves_dk_without_a_verdict() {
    let clean = of(&Job::default(), tokens(60));
    for stage in [Stage::DkLse, Stage::DkLabel, Stage::Dk] {
        let found = clean.stage(stage);
        if found.reason == "not captured" {
            continue;
        }
        assert_eq!(found.status, Status::Skip, "{stage}: {}", found.reason);
        assert!(found.reason.starts_with("estimated from 20 of 131 tokens"), "{}", found.reason);
    }
    // Sixty tokens of a microbatch of three ranks, in two microbatches.
    let rows: u64 = clean.stage(Stage::Dq).comparisons.iter().map(|one| one.tally.rows).sum();
    assert_eq!((clean.stage(Stage::Dq).status, rows), (Status::Pass, 120));
    let shifted = of(&faulty(Fault::LabelShift), tokens(60));
    assert!(failing(&shifted).contains(&Stage::Dq), "{:?}", failing(&shifted));
    let off = |scale| of(&faulty(Fault::RankScaled(scale)), tokens(60)).stage(Stage::Dk).clone();
    let scaled = off(4.0);
    assert_eq!(scaled.status, Status::Skip);
    assert_ne!(scaled.reason, clean.stage(Stage::Dk).reason);
    let said: Vec<&str> = clean.not_checked.iter().map(|one| one.why.as_str()).collect();
    assert!(said.iter().any(|why| why.contains("--tokens 60, seed 7: ")), "{said:#?}");
    assert!(said.iter().any(|why| why.contains("a label row")), "{said:#?}");
}

/// Goal: a sample of all tokens is all tokens, each of the rank that it belongs to.
#[test]
fn a_sample_of_every_token_judges_dq_as_the_full_replay_does() {
    let job = Job::default();
    let (full, sampled) = (of(&job, Effort::All), of(&job, tokens(100_000)));
    let energies = |outcome: &Outcome| {
        let dq = &outcome.stage(Stage::Dq).comparisons;
        dq.iter().map(|one| (one.rank, one.tally.error_energy)).collect::<Vec<_>>()
    };
    assert_eq!(energies(&full), energies(&sampled));
    assert!(energies(&full).len() > 1);
}

/// What such a sum loses is not noise: no probe can tell it from a bug.
#[test]
fn a_declared_accumulator_of_few_bits_is_recomputed_whatever_was_asked_for() {
    let mut job = faulty(Fault::LabelScatterBf16);
    job.tokens = 400;
    let mut head = job.head();
    head.dtypes.insert("label_scatter".into(), "bf16".into());
    let found = judged(&head, job.ranks, &job.shards(), PROBES);
    assert_eq!(failing(&found), []);
    let said = |one: &NotChecked| one.why.contains("an accumulator is declared below f32");
    assert!(found.not_checked.iter().any(said), "{:#?}", found.not_checked);
}

#[derive(Default)]
struct Counter(AtomicU64);

impl Progress for Counter {
    fn advance(&self, work: u64) {
        self.0.fetch_add(work, Ordering::Relaxed);
    }
}

/// Goal: the saving is there, and the report says how large. Method: what the kernels
/// tell of their work, on a job wide enough for K probes to be narrower than D.
#[test]
fn probes_and_samples_do_less_work_and_the_report_says_how_much() {
    let job = Job { width: 96, ..Job::default() };
    let (head, shards) = (job.head(), job.shards());
    let run = |effort| {
        let counter = Counter::default();
        let start = std::time::Instant::now();
        let outcome = counted(&head, job.ranks, &shards, effort, &counter).unwrap();
        (counter.0.into_inner() as f64, start.elapsed(), outcome)
    };
    let (full, few) = (run(Effort::All), Effort::Probes { count: 4, seed: 1 });
    for (name, effort, most) in [("K = 4", few, 0.4), ("20 tokens", tokens(20), 0.45)] {
        let (work, time, outcome) = run(effort);
        eprintln!("{name}: {work:.3e} of {:.3e}, {time:?} of {:?}", full.0, full.1);
        assert!(work < most * full.0, "{name}: {work:e} of {:e}", full.0);
        let said = outcome.not_checked.iter().find(|one| one.why.contains("in place of"));
        let said = &said.unwrap().why;
        let number = |word: &str| word.parse::<f64>().ok();
        let numbers: Vec<f64> = said.split(' ').filter_map(number).filter(|n| *n > 1e4).collect();
        let [done, all] = numbers[..] else { panic!("{said}") };
        assert!((0.8..1.25).contains(&(done / work)), "{name}: {said}, really {work:e}");
        assert!((0.8..1.25).contains(&(all / full.0)), "{name}: {said}, really {:e}", full.0);
    }
}
