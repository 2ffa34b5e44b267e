//! The search for causes on dumps of small jobs: its trials judge as the replay does,
//! what is planted is named, and what is not in the catalogue stays unknown.

use std::collections::BTreeSet;

use backtape::role::Role;
use backtape_replayer::diagnose::catalogue::CATALOGUE;
use backtape_replayer::diagnose::evidence::{Residual, residuals};
use backtape_replayer::diagnose::{Budget, CauseReport, Causes, Standing, diagnose};
use backtape_replayer::dump::{self, Selection, StepDump};
use backtape_replayer::head::{HeadStep, Stage};
use backtape_replayer::kernels::NoProgress;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Outcome;
use backtape_replayer::replay::trial::{Rows, trial};
use backtape_replayer::replay::world::Declared;
use backtape_replayer::replay::{Effort, Request, replay};

use crate::support::dump::{self as written, Shard};
use crate::support::job::{Fault, Job};

fn opened(job: &Job) -> StepDump {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run-a");
    written::write(&path, job.ranks as u32, &job.head(), &job.shards());
    // Mapped files stay readable when their names are gone.
    dump::open(&path, &Selection::default()).unwrap()
}

fn replayed<'d>(dumped: &'d StepDump) -> (HeadStep<'d>, Outcome) {
    let step = HeadStep::new(dumped, None, |_| None).unwrap();
    let request = Request {
        compare: &[],
        effort: Effort::All,
        progress: &NoProgress,
        total: &|_| {},
        draws: false,
        cluster: None,
        device: None,
    };
    let outcome = replay(&step, &request).unwrap();
    (step, outcome)
}

fn causes(job: &Job) -> Vec<CauseReport> {
    let dumped = opened(job);
    let (step, mut outcome) = replayed(&dumped);
    diagnose(&step, &mut outcome, &[], &Budget::default()).unwrap()
}

fn compared(outcome: &Outcome) -> BTreeSet<Stage> {
    let compared = outcome.stages.iter().filter(|stage| !stage.comparisons.is_empty());
    compared.map(|stage| stage.stage).collect()
}

/// Goal: a hypothesis is accepted by the test that the declaration failed, and no other.
/// Method: a trial in the declared world makes the comparisons of the replay, bit by bit.
#[test]
fn a_trial_of_what_was_declared_is_the_replay() {
    for seed in 0..40 {
        let job = Job::random(seed);
        let dumped = opened(&job);
        let (step, outcome) = replayed(&dumped);
        let tried = trial(&step, &compared(&outcome), &Declared, (None, None)).unwrap();
        let (replayed, tried) = (residuals(&outcome), residuals(&tried));
        for (key, one) in &replayed {
            // A declared low-precision accumulator's loss is emulated, and only by the replay.
            let other = tried.get(key).unwrap_or_else(|| panic!("seed {seed}: no {key:?}"));
            let energies = |of: &Residual| (of.energy, of.reference, of.captured, of.elements);
            assert_eq!(energies(one), energies(other), "seed {seed}: {key:?}\n{job:?}");
        }
        assert_eq!(replayed.len(), tried.len(), "seed {seed}");
    }
}

/// Goal: a sample judges its rows as the whole judges them.
/// Method: samples that part the rows have energies that add up to the whole's.
#[test]
fn the_energies_of_samples_that_part_the_rows_add_up() {
    let job = Job { ranks: 2, ..Job::default() };
    let dumped = opened(&job);
    let (step, outcome) = replayed(&dumped);
    let stages = BTreeSet::from([Stage::Dq, Stage::Dk, Stage::DkLabel, Stage::DqLse]);
    let whole = residuals(&trial(&step, &stages, &Declared, (None, None)).unwrap());
    let part = |odd: usize| {
        let of = |n: usize| (0..n).filter(|i| i % 2 == odd).collect::<Vec<_>>();
        let inputs = |&mb| (mb, of(step.inputs(mb).unwrap().tokens()));
        let tokens = step.microbatches.iter().map(inputs).collect();
        let rows = Rows { tokens, classes: of(job.vocab) };
        residuals(&trial(&step, &stages, &Declared, (Some(&rows), None)).unwrap())
    };
    let parts = [part(0), part(1)];
    assert!(whole.len() > 4, "{:?}", outcome.stages.len());
    for (key, all) in &whole {
        let sum: f64 = parts.iter().map(|part| part[key].energy).sum();
        assert!((sum - all.energy).abs() <= 1e-9 * all.energy, "{key:?}: {sum} for {all:?}");
    }
}

#[test]
fn a_clean_job_has_no_cause() {
    for seed in 0..30 {
        let job = Job::random(1000 + seed);
        assert_eq!(causes(&job), [], "seed {seed}: {job:?}");
    }
}

#[test]
fn a_bf16_label_scatter_is_named_and_reproduced_bit_for_bit() {
    for seed in 1..4 {
        let job = Job { fault: Fault::LabelScatterBf16, tokens: 400, seed, ..Job::default() };
        let found = causes(&job);
        assert_eq!(found.len(), 1, "seed {seed}: {found:?}");
        assert_eq!(found[0].id, "label-scatter-low-precision", "seed {seed}: {found:?}");
        assert_eq!(found[0].standing, Standing::Named, "seed {seed}: {found:?}");
        assert!(found[0].explained > 0.99, "seed {seed}: {found:?}");
    }
}

/// Goal: rows of dq that stand in another order than their own captured parts, over all
/// ranks, are named. Method: the rows of a clean job, the last first.
#[test]
fn rows_of_dq_that_were_moved_after_their_parts_were_added_are_named() {
    let mut job = Job { fused: true, ranks: 3, microbatches: 1, ..Job::default() };
    job.options.extras.dq_parts = true;
    let mut shards = job.shards();
    let of_dq = |shard: &&mut Shard| shard.name == "dq";
    let mut rows: Vec<Vec<u8>> = Vec::new();
    for shard in shards.iter_mut().filter(of_dq) {
        let row = shard.bytes.len() / (shard.place.0[0].1 - shard.place.0[0].0) as usize;
        rows.extend(shard.bytes.chunks(row).map(<[u8]>::to_vec));
    }
    for shard in shards.iter_mut().filter(of_dq) {
        let own = (shard.place.0[0].1 - shard.place.0[0].0) as usize;
        shard.bytes = rows.split_off(rows.len() - own).into_iter().rev().flatten().collect();
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    written::write(&path, job.ranks as u32, &job.head(), &shards);
    let all: &[Role] = &[];
    let report = replay_report(&path, &Selection::default(), all, None).unwrap();
    let [cause] = &report.causes[..] else { panic!("{:?}", report.causes) };
    assert_eq!((cause.id.as_str(), cause.standing), ("token-order", Standing::Named));
    assert_eq!(cause.parameters["of"], "rows of dq after its parts were added");
    assert_eq!(cause.parameters["order"], "reversed in each sequence");
}

#[test]
fn a_factor_that_is_no_count_of_anything_stays_unknown() {
    for factor in [1.01, 0.731, 1.37] {
        let found = causes(&Job { fault: Fault::RankScaled(factor), ..Job::default() });
        assert_eq!(found.len(), 1, "{factor}: {found:?}");
        assert_eq!(found[0].standing, Standing::Unknown, "{factor}: {found:?}");
    }
}

#[test]
fn the_catalogue_in_the_docs_has_a_section_for_every_cause_and_no_other() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/causes.md"));
    let page = page.unwrap();
    let ids: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let known: Vec<&str> = CATALOGUE.iter().map(|cause| cause.id()).collect();
    assert_eq!(ids, known);
}

/// Goal: `--causes none` looks for nothing, and changes nothing that the replay found.
#[test]
fn causes_that_nobody_asks_for_are_not_looked_for() {
    let job = Job { fault: Fault::LabelScatterBf16, tokens: 400, ..Job::default() };
    let dumped = opened(&job);
    let (step, mut outcome) = replayed(&dumped);
    let before = outcome.not_checked.len();
    let budget = Budget { causes: Causes::None, ..Budget::default() };
    assert_eq!(diagnose(&step, &mut outcome, &[], &budget).unwrap(), []);
    assert_eq!(outcome.not_checked.len(), before);
    assert!(outcome.first_divergence().is_some());
    assert_eq!(diagnose(&step, &mut outcome, &[], &Budget::default()).unwrap().len(), 1);
}
