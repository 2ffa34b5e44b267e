//! `replay --against`: two runs in any two shardings, splits, layouts and orders,
//! and tensors outside the loss head by name.

use std::path::{Path, PathBuf};

use backtape::head::{HeadDeclaration, KLayout};
use backtape::role::Role;
use backtape_replayer::dump::{self as dumps, Selection};
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::against::{Asked, Differences, Side, against};
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump::{self, Shard};
use crate::support::job::{Fault, Job};
use crate::support::program;
use crate::support::regroup::{
    activation, cut_rows, merge_microbatches, on_one_rank, reorder, transpose_k, with_token_order,
};

fn dumped(dir: &Path, name: &str, head: Option<&HeadDeclaration>, shards: &[Shard]) -> PathBuf {
    let path = dir.join(name);
    let ranks = shards.iter().map(|shard| shard.rank).max().unwrap() + 1;
    dump::write_with(&path, ranks, head, shards);
    path
}

fn compared(one: &Path, other: &Path, words: &[&str]) -> Report {
    let asked = Asked::parse(words).unwrap();
    replay_report(one, &Selection::default(), asked, Some(other)).unwrap()
}

/// Two dumps of whole tensors, without a replay: what aligns is seen bit by bit.
fn aligned(
    heads: (&HeadDeclaration, &HeadDeclaration),
    shards: (&[Shard], &[Shard]),
) -> Differences {
    let dir = tempfile::tempdir().unwrap();
    let one = dumped(dir.path(), "one", Some(heads.0), shards.0);
    let two = dumped(dir.path(), "two", Some(heads.1), shards.1);
    let open = |path: &Path| dumps::open(path, &Selection::default()).unwrap();
    let (one, two) = (open(&one), open(&two));
    let side = |dump| Side::new(dump, |_| None);
    against(&side(&one), &side(&two), &Asked::default()).unwrap()
}

fn status<'a>(found: &'a Differences, stage: &str) -> (Status, &'a str) {
    let found = found.stages.iter().find(|found| found.stage.name() == stage);
    let found = found.unwrap_or_else(|| panic!("{stage} was not compared"));
    (found.status, &found.reason)
}

fn alone() -> Job {
    Job { ranks: 1, ..Job::default() }
}

#[test]
fn one_rank_and_three_ranks_agree_and_a_fault_on_one_rank_is_still_found() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::default();
    let three = dumped(dir.path(), "three", Some(&job.head()), &job.shards());
    let one = dumped(dir.path(), "one", Some(&job.head()), &on_one_rank(&job.shards()));
    for (ours, theirs) in [(&one, &three), (&three, &one)] {
        let report = compared(ours, theirs, &["dq", "dk", "label_logits"]);
        assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
        let stages = &report.against.as_ref().unwrap().differences;
        assert!(stages.iter().all(|found| found.measures.cosine > 0.999_999));
        assert!(stages.iter().filter(|found| found.stage.name() == "dk").count() == 2);
    }
    let faulty = Job { fault: Fault::RankScaled(1.01), ..job };
    let faulty = dumped(dir.path(), "faulty", Some(&faulty.head()), &faulty.shards());
    // 1 % of one rank's addend is within what both runs' rounding may make of the
    // sum: it is the run's own reference that finds it, and names that run.
    let report = compared(&one, &faulty, &["dk"]);
    let first = report.first_divergence.unwrap();
    assert_eq!((first.stage.as_str(), first.run.as_str()), ("dk", "faulty"));
    assert_eq!((report.verdict, first.rank), (Verdict::Diverged, Some(1)));
}

#[test]
fn two_and_four_microbatches_are_joined_along_tokens_and_summed_over_gradients() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job { ranks: 2, microbatches: 4, tokens: 67, ..Job::default() };
    let four = dumped(dir.path(), "four", Some(&job.head()), &job.shards());
    let head = HeadDeclaration { microbatches: 2, ..job.head() };
    let two = dumped(dir.path(), "two", Some(&head), &merge_microbatches(&job.shards(), 2));
    let report = compared(&four, &two, &["dq", "dk", "label_logits", "loss"]);
    assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
    let stages = &report.against.as_ref().unwrap().differences;
    for name in ["q", "labels", "lse", "dq", "dk_label", "dk", "loss"] {
        let of: Vec<_> = stages.iter().filter(|found| found.stage.name() == name).collect();
        assert_eq!(of.len(), 1, "{name}");
        assert!(of[0].aligned.contains("4 and 2 microbatches"), "{name}: {}", of[0].aligned);
        assert!(of[0].status != Status::Fail && of[0].difference < 1e-6, "{name} {:?}", of[0]);
    }
    let faulty = Job { fault: Fault::LseOff(1e-3), ..job };
    let faulty = dumped(dir.path(), "faulty", Some(&faulty.head()), &faulty.shards());
    let report = compared(&two, &faulty, &["dq"]);
    let first = report.first_divergence.unwrap();
    assert_eq!(first.stage, "lse");
}

#[test]
fn an_averaging_job_is_divided_by_the_number_of_its_microbatches() {
    use backtape::head::MicrobatchReduction::{Mean, Sum};
    let job = Job { ranks: 1, microbatches: 4, tokens: 40, ..Job::default() };
    let (shards, merged) = (job.shards(), merge_microbatches(&job.shards(), 2));
    let head = |microbatch_reduction| HeadDeclaration { microbatch_reduction, ..job.head() };
    let ratio = |one, two| {
        let found = aligned((&head(one), &head(two)), (&shards, &merged));
        let dk = found.stages.iter().find(|found| found.stage.name() == "dk").unwrap();
        dk.norm / dk.other_norm
    };
    for (one, two, wanted) in [(Sum, Sum, 1.0), (Mean, Sum, 0.25), (Mean, Mean, 0.5)] {
        assert!((ratio(one, two) / wanted - 1.0f64).abs() < 1e-5, "{one:?} {two:?}");
    }
}

#[test]
fn k_and_its_gradients_are_transposed_where_the_layouts_differ() {
    let job = Job { ranks: 3, ..Job::default() };
    let dv = HeadDeclaration { k_layout: KLayout::Dv, ..job.head() };
    let mut turned = transpose_k(&job.shards());
    for (heads, shards) in [
        ((&job.head(), &dv), (&job.shards(), &turned)),
        ((&dv, &job.head()), (&turned, &job.shards())),
        ((&dv, &dv), (&turned, &turned)),
    ] {
        let found = aligned(heads, (shards.0, shards.1));
        assert!(found.stages.iter().all(|found| found.status == Status::Pass), "{found:#?}");
        assert!(found.stages.iter().all(|found| found.unequal == 0));
    }
    // Row 3, column 5 of [V, D] is row 5, column 3 of [D, V].
    let at = (5 * job.vocab + 3) * 2;
    turned.iter_mut().filter(|s| s.name == "k").for_each(|s| s.bytes[at + 1] ^= 0x40);
    let found = aligned((&job.head(), &dv), (&job.shards(), &turned));
    let k = found.stages.iter().find(|found| found.stage.name() == "k").unwrap();
    assert_eq!((k.status, k.unequal, k.worst.unwrap().0), (Status::Fail, 1, (3, 5)));
}

#[test]
fn tokens_in_another_order_are_matched_by_token_order_and_otherwise_named() {
    let job = alone();
    let (head, plain) = (job.head(), job.shards());
    let shuffle = |i: usize, rows: usize| (i * 50 + 7) % rows;
    let ordered = with_token_order(plain.clone(), 1 << 60);
    let found = aligned((&head, &head), (&ordered, &reorder(&ordered, shuffle)));
    assert!(found.stages.iter().all(|found| found.status == Status::Pass), "{found:#?}");
    assert!(found.stages.iter().any(|found| found.aligned.contains("token_order")));
    assert!(found.findings.is_empty());

    let found = aligned((&head, &head), (&plain, &reorder(&plain, shuffle)));
    let (of_q, why) = status(&found, "q");
    assert_eq!(of_q, Status::Fail);
    assert!(why.contains("the same tokens in another order: record token_order"), "{why}");
}

#[test]
fn an_id_that_repeats_or_that_one_run_alone_holds_is_named_in_one_sentence() {
    let job = alone();
    let ordered = with_token_order(job.shards(), 100);
    let other = |id: i64| {
        let mut shards = ordered.clone();
        let order = shards.iter_mut().find(|shard| shard.name == "token_order").unwrap();
        order.bytes[8 * 2..8 * 3].copy_from_slice(&id.to_le_bytes());
        aligned((&job.head(), &job.head()), (&ordered, &shards))
    };
    for (id, sentence) in [
        (100, "token_order of the other run holds 100 twice, in rows 0 and 2"),
        (99, "1 only in this run (the first is 106) and 1 only in the other run (the first is 99)"),
    ] {
        let found = other(id);
        assert_eq!(status(&found, "token_order").0, Status::Fail);
        assert!(found.findings.iter().any(|finding| finding.contains(sentence)), "{found:#?}");
        assert!(!found.stages.iter().any(|found| found.stage.name() == "dq"), "not aligned");
        assert!(found.not_checked.iter().any(|item| item.what.starts_with("dq ")));
    }
}

/// Activations of a model of a few layers, each made from the one before: an
/// error that enters at a layer is carried on by those behind it. Names are
/// such that their alphabet is not their order.
fn layers(names: &[&'static str], wrong_from: usize, by: f32) -> Vec<Shard> {
    let mut x: Vec<f32> = (0..96 * 40).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    let mut found = Vec::new();
    for (layer, name) in names.iter().enumerate() {
        let next = (0..x.len()).map(|i| 0.6 * x[i] + 0.7 * x[(i * 7 + layer) % x.len()].tanh());
        x = next.collect();
        if layer == wrong_from {
            x.iter_mut().for_each(|x| *x *= 1.0 + by);
        }
        found.push(activation(name, &[96, 40], &x));
    }
    found
}

const LAYERS: &[&str] = &["embed", "layers.9.out", "layers.10.out", "layers.11.out", "x.grad"];

#[test]
fn tensors_without_a_head_are_compared_by_name_in_the_order_of_capture() {
    let dir = tempfile::tempdir().unwrap();
    let clean = dumped(dir.path(), "clean", None, &layers(LAYERS, 9, 0.0));
    let cut: Vec<Shard> = layers(LAYERS, 9, 0.0).iter().flat_map(|s| cut_rows(s, 3)).collect();
    let same = dumped(dir.path(), "same", None, &cut);
    for words in [&[][..], &["layers.*"], &["layers.?.out", "e*", "x.[g-h]rad"]] {
        let report = compared(&clean, &same, words);
        assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
        assert!(text::render(&report).contains("equal bit for bit"));
    }
    let wrong = dumped(dir.path(), "wrong", None, &layers(LAYERS, 2, 0.08));
    let report = compared(&clean, &wrong, &["layers.*", "embed"]);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Differs, "no bound\n{shown}");
    let sentence = "DIFFERS: 2 of 4 tensors outside the head differ, the first layers.10.out";
    let flat: Vec<&str> = shown.split_whitespace().collect();
    assert!(flat.join(" ").contains(sentence) && flat.contains(&"ulp,"), "{shown}");
    let (one, two) = (clean.to_str().unwrap(), wrong.to_str().unwrap());
    assert_eq!(program::replay(&["diff", one, two, "--compare", "layers.*"]).code, 4);
    assert!(report.first_divergence.is_none());
    let against = report.against.unwrap();
    assert_eq!(against.likely.unwrap().tensor, "layers.10.out microbatch 0");
    let names: Vec<&str> = against.tensors.iter().map(|t| t.tensor.as_str()).collect();
    let order = ["embed", "layers.9.out", "layers.10.out", "layers.11.out"];
    assert_eq!(names, order.map(|name| format!("{name} microbatch 0")));
    let status: Vec<Status> = against.tensors.iter().map(|t| t.status).collect();
    assert_eq!(status, [Status::Pass, Status::Pass, Status::Warn, Status::Warn]);
    assert!(shown.lines().all(|line| line.chars().count() <= text::WIDTH), "{shown}");
}

/// x `[40, 96]`, w `[24, 96]` and their product in f32, summed from either end; one row of it
/// times `by`.
fn linear(descending: bool, by: f32) -> Vec<Shard> {
    let draw = |i: usize, of: usize| ((i * of % 211) as f32 - 105.0) * 0.0137;
    let x: Vec<f32> = (0..40 * 96).map(|i| draw(i + 1, 37)).collect();
    let w: Vec<f32> = (0..24 * 96).map(|i| draw(i + 3, 53)).collect();
    let dot = |r: usize, n: usize| {
        let terms = (0..96).map(|k| if descending { 95 - k } else { k });
        terms.fold(0.0f32, |sum, k| sum + x[r * 96 + k] * w[n * 96 + k])
    };
    let scaled = |at: usize| if at / 24 == 7 { by } else { 1.0 };
    let out: Vec<f32> = (0..40 * 24).map(|at| dot(at / 24, at % 24) * scaled(at)).collect();
    // What is made of it, by an operation that nothing here knows.
    let next: Vec<f32> = out.iter().map(|x| x.tanh()).collect();
    let shard = |name, shape: [u64; 2], values: &[f32]| Shard {
        rank: 0,
        name,
        microbatch: Some(0),
        when: None,
        partial: false,
        dtype: backtape::dtype::Dtype::F32,
        shape: shape.to_vec(),
        place: backtape::index_box::IndexBox::whole(&shape),
        bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    vec![
        shard("layers.0.in", [40, 96], &x),
        shard("layers.0.w", [24, 96], &w),
        shard("layers.0.out", [40, 24], &out),
        shard("layers.1.in", [40, 24], &next),
    ]
}

/// Method: equal operands in both runs, and a product that differs by 1.5e-2 in one row, by
/// the order of its sums, or not at all.
#[test]
fn a_product_whose_operands_are_recorded_has_a_bound() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, shards: &[Shard]| dumped(dir.path(), name, None, &shards[..3]);
    let clean = of("clean", &linear(false, 1.0));
    let order = of("order", &linear(true, 1.0));
    let report = compared(&clean, &order, &[]);
    let out = &report.against.as_ref().unwrap().tensors[2];
    assert!(out.measures.mismatches > 100, "the order of the sums must show");
    assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
    assert!(out.reason.contains("layers.0.in · layers.0.wᵀ"), "{}", out.reason);
    let wrong = of("wrong", &linear(true, 1.015));
    for (one, other, whose) in
        [(&clean, &wrong, "the other run element [7, "), (&wrong, &clean, "this run element [7, ")]
    {
        let report = compared(one, other, &[]);
        assert_eq!(report.verdict, Verdict::Diverged, "{}", text::render(&report));
        let first = report.first_divergence.unwrap();
        assert_eq!(first.stage, "layers.0.out microbatch 0");
        assert!(first.reason.contains(whose), "{}", first.reason);
    }
    // What follows by an operation that nothing knows differs, and has no bound.
    let all = dumped(dir.path(), "all", None, &linear(false, 1.0));
    let other = dumped(dir.path(), "other", None, &linear(true, 1.0));
    assert_eq!(compared(&all, &other, &[]).verdict, Verdict::Differs);
}

#[test]
fn nan_in_one_run_diverges_at_the_first_tensor_that_holds_it_and_nan_in_both_does_not_pass() {
    let dir = tempfile::tempdir().unwrap();
    let clean = dumped(dir.path(), "clean", None, &layers(LAYERS, 9, 0.0));
    let mut shards = layers(LAYERS, 9, 0.0);
    shards[2].bytes[20..22].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    let broken = dumped(dir.path(), "broken", None, &shards);
    for other in [&clean, &broken] {
        let report = compared(&broken, other, &[]);
        assert_eq!(report.verdict, Verdict::Diverged);
        let first = report.first_divergence.as_ref().unwrap();
        assert_eq!(first.stage, "layers.10.out microbatch 0", "{}", text::render(&report));
        assert!(first.reason.contains("NaN"), "{}", first.reason);
    }
}

#[test]
fn layers_outside_the_head_are_compared_beside_it_and_do_not_make_its_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let job = alone();
    let with = |by| [job.shards(), layers(LAYERS, 1, by)].concat();
    let one = dumped(dir.path(), "one", Some(&job.head()), &with(0.0));
    let two = dumped(dir.path(), "two", Some(&job.head()), &with(0.001));
    let report = compared(&one, &two, &[]);
    assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
    assert!(text::render(&report).contains("that differ outside the head are not judged"));
    // Asked for by name, they are part of the question.
    let report = compared(&one, &two, &["layers.*", "dq"]);
    assert_eq!(report.verdict, Verdict::Differs);
    let against = report.against.unwrap();
    assert_eq!(against.tensors.len(), 3);
    assert!(against.differences.iter().any(|found| found.stage.name() == "dq"));
}

#[test]
fn what_one_run_alone_holds_is_named_and_nothing_compared_is_never_a_pass() {
    let dir = tempfile::tempdir().unwrap();
    let all = layers(LAYERS, 9, 0.0);
    let one = dumped(dir.path(), "one", None, &all);
    let two = dumped(dir.path(), "two", None, &all[..2]);
    let report = compared(&one, &two, &["layers.*"]);
    assert_eq!(report.verdict, Verdict::Incomplete);
    let missing = report.not_checked.iter().filter(|item| item.why == "only this run holds it");
    assert_eq!(missing.count(), 2);
    let report = compared(&one, &two, &["layers.1*"]);
    assert_eq!(report.verdict, Verdict::Incomplete, "{}", text::render(&report));
    assert!(text::render(&report).contains("nothing that was asked for could be compared"));
}

#[test]
fn a_pattern_that_matches_nothing_is_an_error_that_lists_what_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let one = dumped(dir.path(), "one", None, &layers(LAYERS, 9, 0.0));
    let ask = |words: &[&str], other| {
        let asked = Asked::parse(words).unwrap();
        replay_report(&one, &Selection::default(), asked, other).unwrap_err().to_string()
    };
    let error = ask(&["blocks.*"], Some(one.as_path()));
    assert!(error.contains("\"blocks.*\" matches no tensor"), "{error}");
    assert!(error.contains("embed, layers.10.out, layers.11.out"), "{error}");
    let error = ask(&["dq"], Some(one.as_path()));
    assert!(error.contains("\"dq\" matches no tensor"), "{error}");
    let error = ask(&["layers.*"], None);
    assert!(error.contains("is not a role") && error.contains("--against"), "{error}");
}

#[test]
fn leading_dimensions_are_flattened_and_other_shapes_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..6 * 20 * 8).map(|i| (i % 97) as f32).collect();
    let dump = |name: &str, shape: &[u64]| {
        let shards: Vec<Shard> = cut_rows(&activation("h", shape, &values), 2);
        dumped(dir.path(), name, None, &shards)
    };
    let flat = dump("flat", &[120, 8]);
    assert_eq!(compared(&flat, &dump("deep", &[6, 20, 8]), &[]).verdict, Verdict::Agreed);
    let report = compared(&flat, &dump("wide", &[60, 16]), &[]);
    assert_eq!(report.verdict, Verdict::Diverged);
    assert!(report.first_divergence.unwrap().reason.contains("[120, 8] here, [60, 16]"));
}

#[test]
fn measures_and_scores_of_every_stage_are_in_the_report_and_shown_for_the_first_that_fails() {
    let job = Job { fault: Fault::LabelScatterBf16, tokens: 400, ..Job::default() };
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run", Some(&job.head()), &job.shards());
    let asked: &[Role] = &[Role::Dq, Role::Dk];
    let report = replay_report(&path, &Selection::default(), asked, None).unwrap();
    let stage = |name: &str| {
        report.stages.iter().find(|stage| stage.name == name).unwrap().worst.clone().unwrap()
    };
    let (good, bad) = (stage("dq"), stage("dk_label"));
    for found in [&good, &bad] {
        let ulps: u64 = found.measures.ulps.iter().map(|(_, n)| n).sum();
        assert_eq!(ulps + found.measures.sign_or_overflow, found.elements);
        let scored: u64 = found.scores.iter().map(|class| class.count).sum();
        assert_eq!(scored, found.elements);
        assert_eq!(found.measures.max_abs, found.max_abs);
    }
    // dq is rounded to bf16: most elements are the rounded reference itself.
    assert!(good.measures.ulps[0].1 > good.elements / 2, "{:?}", good.measures.ulps);
    let beyond = (bad.scores[5].count, good.scores[5].count);
    assert!(
        beyond.0 > 0 && beyond.1 == 0,
        "{:?} {:?}\n{}",
        bad.scores,
        good.scores,
        text::render(&report)
    );
    let shown = text::render(&report);
    assert_eq!(shown.matches("cosine").count(), 1, "{shown}");
    assert!(shown.contains("ulp 0:") && shown.contains("|error|/sigma (normal): <1"), "{shown}");
    let wide: Vec<&str> = shown.lines().filter(|line| line.chars().count() > text::WIDTH).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}

#[test]
fn two_runs_compare_alike_with_one_thread_and_with_three() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::default();
    let with = |by| [job.shards(), layers(LAYERS, 1, by)].concat();
    let one = dumped(dir.path(), "one", Some(&job.head()), &with(0.0));
    let two = dumped(dir.path(), "two", Some(&job.head()), &on_one_rank(&with(0.01)));
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        serde_json::to_string(&pool.install(|| compared(&one, &two, &[]))).unwrap()
    };
    assert_eq!(run(1), run(3));
}
