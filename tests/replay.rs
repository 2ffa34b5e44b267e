//! `replay` on dumps of small jobs: clean ones must agree, faulty ones must be
//! placed at the stage where the fault entered.

use std::path::Path;

use backtape::head::Denominator;
use backtape::role::Role;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump;
use crate::support::job::options::{Shown, Weights};
use crate::support::job::{Fault, Float, Job};

const ASKED: &[Role] = &[Role::Dq, Role::Dk, Role::LabelLogits];

fn dumped(directory: &Path, name: &str, job: &Job) -> std::path::PathBuf {
    let path = directory.join(name);
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    path
}

fn replayed(job: &Job) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", job);
    replay_report(&path, &Selection::default(), ASKED, None).unwrap()
}

fn first(report: &Report) -> &str {
    report.first_divergence.as_ref().map_or("none", |first| first.stage.as_str())
}

#[test]
fn a_clean_job_agrees_whatever_its_sizes_and_path() {
    for (seed, fused) in [(1, true), (2, false), (3, true), (4, false), (5, true)] {
        let job = Job {
            seed,
            fused,
            ranks: 1 + seed as usize % 3,
            tokens: 97 + 13 * seed as usize,
            width: 8 * seed as usize,
            ..Job::default()
        };
        let report = replayed(&job);
        assert_eq!(report.verdict, Verdict::Agreed, "{job:?}\n{}", text::render(&report));
    }
}

#[test]
fn a_bf16_label_scatter_is_placed_in_the_label_part_of_dk() {
    let job = Job { fault: Fault::LabelScatterBf16, tokens: 400, ..Job::default() };
    let report = replayed(&job);
    assert_eq!(
        (report.verdict, first(&report)),
        (Verdict::Diverged, "dk_label"),
        "{}",
        text::render(&report)
    );
    let dq = report.stages.iter().find(|stage| stage.name == "dq").unwrap();
    let dk_lse = report.stages.iter().find(|stage| stage.name == "dk_lse").unwrap();
    assert_eq!((dq.status, dk_lse.status), (Status::Pass, Status::Pass));
}

#[test]
fn each_fault_is_placed_at_the_stage_where_it_entered() {
    for (fault, fused, stage) in [
        (Fault::RankScaled(1.01), true, "dk"),
        (Fault::RankScaled(1.01), false, "dk"),
        (Fault::LseOff(1e-3), true, "lse"),
        (Fault::LabelShift, true, "label_logits"),
        (Fault::RankMean, false, "reduce"),
        (Fault::NanInDq, true, "dq"),
    ] {
        let report = replayed(&Job { fault, fused, ..Job::default() });
        assert_eq!(first(&report), stage, "{fault:?}\n{}", text::render(&report));
        assert_eq!(report.verdict, Verdict::Diverged);
    }
}

#[test]
fn against_a_plain_run_names_the_label_part_that_only_the_fused_run_holds() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = Job { tokens: 400, ..Job::default() };
    let faulty =
        dumped(dir.path(), "fused", &Job { fault: Fault::LabelScatterBf16, ..sizes.clone() });
    let plain = dumped(dir.path(), "plain", &Job { fused: false, ..sizes.clone() });
    let fixed = dumped(dir.path(), "fixed", &sizes);
    let report = replay_report(&faulty, &Selection::default(), ASKED, Some(&plain)).unwrap();
    assert_eq!(first(&report), "dk_label", "{}", text::render(&report));
    let clean = replay_report(&fixed, &Selection::default(), ASKED, Some(&plain)).unwrap();
    assert_eq!(clean.verdict, Verdict::Agreed, "{}", text::render(&clean));
}

#[test]
fn two_runs_on_other_data_are_told_apart_by_their_inputs_before_the_backward_is_blamed() {
    let dir = tempfile::tempdir().unwrap();
    let one = dumped(dir.path(), "one", &Job::default());
    let two = dumped(dir.path(), "two", &Job { seed: 9, ..Job::default() });
    let report = replay_report(&one, &Selection::default(), ASKED, Some(&two)).unwrap();
    let found = report.first_divergence.unwrap();
    assert_eq!(found.stage, "q");
    assert!(found.reason.contains("inputs differ"), "{}", found.reason);
}

#[test]
fn the_report_is_the_same_with_one_thread_and_with_three() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &Job::default());
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let report = || replay_report(&path, &Selection::default(), ASKED, None).unwrap();
        serde_json::to_string(&pool.install(report)).unwrap()
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn every_line_of_a_report_fits_a_screen() {
    let report = replayed(&Job { fault: Fault::LabelScatterBf16, tokens: 400, ..Job::default() });
    let shown = text::render(&report);
    let wide: Vec<&str> = shown.lines().filter(|line| line.chars().count() > text::WIDTH).collect();
    assert!(wide.is_empty(), "{wide:#?}");
    // With the cause, which takes ten.
    assert!(shown.lines().count() < 60, "{shown}");
}

#[test]
fn the_gap_of_the_norm_belongs_to_the_rank_whose_gradient_is_scaled() {
    let report = replayed(&Job { fault: Fault::RankScaled(1.05), fused: false, ..Job::default() });
    let norm = &report.grad_norm;
    let gap = norm.gap.unwrap();
    for kind in ["rank", "microbatch", "rows", "row", "vocabulary"] {
        let total: f64 = norm.shares.iter().filter(|s| s.kind == kind).map(|s| s.gap).sum();
        assert!((total - gap).abs() < 1e-12 * norm.captured.unwrap(), "{kind}: {total} of {gap}");
    }
    let rank = norm.shares.iter().find(|s| s.kind == "rank" && s.of == "1").unwrap();
    assert!((rank.share - 1.0).abs() < 0.05, "{:?}", norm.shares);
    assert!(gap.abs() > 10.0 * norm.floor.unwrap().abs(), "{norm:?}");
    assert!(norm.reported_as.as_ref().unwrap().contains("before clipping"), "{norm:?}");
}

/// Goal: dq and dk judged from captured dlogits are judged, not waved through.
#[test]
fn a_scaled_dk_beside_right_dlogits_is_placed_at_dk() {
    let mut job = Job { fault: Fault::RankScaled(1.01), fused: false, ..Job::default() };
    job.options.extras.dlogits = true;
    let report = replayed(&job);
    let dlogits = report.stages.iter().find(|stage| stage.name == "dlogits").unwrap();
    assert_eq!(dlogits.status, Status::Pass, "{}", text::render(&report));
    assert_eq!(first(&report), "dk", "{}", text::render(&report));
    let clean = replayed(&Job { fault: Fault::None, ..job });
    assert_eq!(clean.verdict, Verdict::Agreed, "{}", text::render(&clean));
}

/// Goal: a right dq agrees where dlogits are recorded with other bits than the products take.
/// Method: a head near zero, all of whose labels' entries are nearly one number, so that all of
/// them round alike, for several such numbers.
#[test]
fn dlogits_that_are_recorded_with_other_bits_than_the_products_take_agree() {
    let unrounded = (Shown::Unrounded, Float::Bf16);
    let rounded = (Shown::Rounded(Float::Bf16), Float::F32);
    for ((shown, products), tokens) in [unrounded, rounded].into_iter().cycle().zip(90..102) {
        let mut job = Job { fused: false, tokens, ..Job::default() };
        let options = &mut job.options;
        (options.data.head, options.data.confident) = (1e-3, None);
        (options.weights, options.denominator) = (Weights::Absent, Denominator::Valid);
        (options.extras.dlogits, options.extras.shown) = (true, shown);
        options.rounding.dlogits = products;
        let report = replayed(&job);
        let said = (tokens, text::render(&report));
        assert_eq!(report.verdict, Verdict::Agreed, "{} tokens\n{}", said.0, said.1);
    }
}
