//! `--report`: what the page of a real replay holds. What a browser makes of it is tested in a
//! browser, by python/tests/test_report.py.

use std::path::{Path, PathBuf};

use backtape::role::Role;
use backtape_replayer::compare::Cell;
use backtape_replayer::diagnose::Causes;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::{Extras, full_report, replay_report};
use backtape_replayer::replay::maps::Map;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::html;
use backtape_replayer::report::schema::{Report, Verdict};

use crate::support::dump;
use crate::support::job::{Fault, Job};
use crate::support::program;

/// Every role that the dump holds.
const ALL: &[Role] = &[];
const DRAWN: Extras<'_> =
    Extras { variants: &[], draws: true, device: None, causes: Causes::Quick, mapping: None };

fn dumped(directory: &Path, name: &str, job: &Job) -> PathBuf {
    let path = directory.join(name);
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    path
}

fn drawn(job: &Job) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", job);
    full_report(&path, &Selection::default(), ALL, None, DRAWN).unwrap()
}

fn maps(report: &Report) -> &[Map] {
    &report.drawings.as_ref().unwrap().maps
}

fn map<'r>(report: &'r Report, stage: &str) -> &'r Map {
    maps(report).iter().find(|map| map.stage.name() == stage).unwrap()
}

fn cells(map: &Map) -> impl Iterator<Item = &Cell> {
    map.strips.iter().flat_map(|strip| strip.chart.cells.iter().flatten())
}

fn label_scatter() -> Job {
    Job { fault: Fault::LabelScatterBf16, tokens: 400, ..Job::default() }
}

/// Goal: a map shows what the report says. Method: of one microbatch and one rank, where each
/// stage is one comparison, the worst block holds the report's worst element, its values and
/// its counts; on paths that form dlogits and that do not.
#[test]
fn the_worst_block_of_every_map_is_the_worst_element_of_its_stage() {
    for fused in [true, false] {
        for dlogits in [false, true] {
            let mut job = Job { ranks: 1, microbatches: 1, fused, ..label_scatter() };
            job.options.extras.dlogits = dlogits;
            let report = drawn(&job);
            let drawn: Vec<&str> = maps(&report).iter().map(|map| map.stage.name()).collect();
            let of_gradients = |name: &str| {
                ["dq", "dk", "accumulate", "reduce"].iter().any(|of| name.starts_with(of))
            };
            let compared = report.stages.iter().filter(|stage| stage.worst.is_some());
            let wanted = compared.map(|stage| stage.name).filter(|name| of_gradients(name));
            assert_eq!(drawn, wanted.collect::<Vec<_>>(), "every gradient has its map");
            assert!(drawn.len() >= 3, "{drawn:?}");
            for map in maps(&report) {
                let stage = report.stages.iter().find(|one| one.name == map.stage.name()).unwrap();
                let found = stage.worst.as_ref().unwrap();
                let [strip] = &map.strips[..] else { panic!("{} has several strips", stage.name) };
                let worst = &strip.chart.worst().unwrap().worst;
                let ours = (Some(worst.index), Some(worst.captured), Some(worst.reference));
                let theirs = (found.worst_index, found.worst_captured, found.worst_reference);
                assert_eq!(ours, theirs, "{}", stage.name);
                let exceeding: u64 = cells(map).map(|cell| cell.exceeding).sum();
                let elements: u64 = cells(map).map(|cell| cell.elements).sum();
                assert_eq!((exceeding, elements), (found.exceeding, found.elements));
            }
        }
    }
}

/// Goal: whose a block is. Method: dk of rank 1 is scaled, so that in the map over all ranks
/// every block beyond its bound is rank 1's; dq has a strip for each microbatch and rank.
#[test]
fn a_block_says_whose_it_is_and_labels_are_counted_beside_it() {
    let job = Job { fault: Fault::RankScaled(1.05), fused: false, ..Job::default() };
    let report = drawn(&job);
    let dk = map(&report, "dk");
    let [strip] = &dk.strips[..] else { panic!("one shape, one map") };
    assert_eq!(strip.sources.len(), job.ranks * job.microbatches);
    let mut beyond = cells(dk).filter(|cell| cell.exceeding > 0).peekable();
    assert!(beyond.peek().is_some());
    for cell in beyond {
        let (_, rank) = strip.sources[cell.source as usize];
        assert_eq!(rank.map(|rank| rank.0), Some(1), "{cell:?}");
    }
    assert_eq!(dk.hits.len(), job.vocab);
    let counted: u32 = dk.hits.iter().sum();
    assert!(counted > 0 && counted as usize <= job.tokens * job.ranks * job.microbatches);
    let dq = map(&report, "dq");
    let of_dq: Vec<_> = dq.strips.iter().flat_map(|strip| strip.sources.clone()).collect();
    assert_eq!(of_dq.len(), job.ranks * job.microbatches, "{of_dq:?}");
}

#[test]
fn a_nan_is_the_worst_of_its_map_and_the_page_says_so() {
    let report = drawn(&Job { fault: Fault::NanInDq, ..Job::default() });
    let dq = map(&report, "dq");
    assert_eq!(cells(dq).map(|cell| cell.nonfinite).sum::<u64>(), 1);
    let strips = dq.strips.iter().filter_map(|strip| strip.chart.worst());
    assert_eq!(strips.filter(|cell| cell.worst.captured.is_nan()).count(), 1);
    let page = html::page(&report);
    assert!(page.contains("bt-crosses") && page.contains("not a finite number"), "{page}");
    assert!(page.contains("data-verdict=\"diverged\""));
}

#[test]
fn the_page_is_the_same_with_any_number_of_threads_and_gathering_changes_no_number() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &label_scatter());
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| full_report(&path, &Selection::default(), ALL, None, DRAWN).unwrap())
    };
    let report = run(1);
    assert!(html::page(&report) == html::page(&run(3)), "pages of one and three threads differ");
    let plain = replay_report(&path, &Selection::default(), ALL, None).unwrap();
    let json = |report: &Report| serde_json::to_string(report).unwrap();
    assert_eq!(json(&report), json(&plain));
    assert!(plain.drawings.is_none());
}

/// Goal: names from outside are text. Method: a run in a hostile directory, and the same words
/// in every field of the report that is a string.
#[test]
fn hostile_names_are_text_on_the_page_wherever_they_stand() {
    let mut report = drawn(&label_scatter());
    let evil = "</script><img src=x onerror=\"document.title='owned'\">'&\u{202e}";
    for text in [
        &mut report.dump.run,
        &mut report.dump.path,
        &mut report.dump.ranks,
        &mut report.dump.state,
        &mut report.dump.head,
        &mut report.grad_norm.shares[0].of,
    ] {
        *text = evil.into();
    }
    let cause = &mut report.causes[0];
    for text in [&mut cause.id, &mut cause.evidence, &mut cause.advice] {
        *text = evil.into();
    }
    report.dump.trigger = Some(evil.into());
    report.dump.selection = Some(evil.into());
    report.findings.push(evil.into());
    report.causes[0].parameters.insert(evil.into(), evil.into());
    report.not_checked[0].what = evil.into();
    report.not_checked[0].why = evil.into();
    let first = report.first_divergence.as_mut().unwrap();
    for text in [&mut first.stage, &mut first.tensor, &mut first.run, &mut first.reason] {
        *text = evil.into();
    }
    for stage in &mut report.stages {
        stage.reason = evil.into();
        if let Some(worst) = &mut stage.worst {
            (worst.source, worst.best_member) = (evil.into(), Some(evil.into()));
        }
    }
    report.drawings.as_mut().unwrap().ranks[0].host = evil.into();
    for page in [html::page(&report), html::fragment(&report, evil)] {
        assert!(!page.contains("<img"), "a tag came through");
        assert!(!page.contains('\u{202e}'));
        assert!(page.contains("&lt;img src=x onerror="), "shown as what it is");
        assert_eq!(page.matches("<script").count(), page.matches("</script>").count());
        // Two of data, one that runs.
        assert_eq!(page.matches("<script").count(), 3);
    }
}

/// Goal: no page is larger than it says. Method: a report of a job of 20,000 ranks with maps
/// as large as they get and lists as long as a dump can make them.
#[test]
fn no_dump_makes_a_page_larger_than_its_limit() {
    let mut report = drawn(&Job { ranks: 1, microbatches: 1, ..label_scatter() });
    let long = "x".repeat(4000);
    let drawings = report.drawings.as_mut().unwrap();
    for map in &mut drawings.maps {
        let strip = map.strips[0].clone();
        map.strips = vec![strip; if map.of_tokens { 96 } else { 8 }];
    }
    let rank = drawings.ranks[0].clone();
    drawings.ranks = (0..20_000)
        .map(|n| {
            let host = format!("host-{n}-{}", &long[..150]);
            backtape_replayer::report::drawings::RankDrawn { rank: n, host, ..rank.clone() }
        })
        .collect();
    let tensor = drawings.tensors[0].clone();
    drawings.tensors = vec![tensor; 20_000];
    let unchecked = report.not_checked[0].clone();
    for n in 0..20_000 {
        report.findings.push(format!("{n} {long}"));
        let mut one = unchecked.clone();
        (one.what, one.why) = (format!("{n} {long}"), format!("{n} {long}"));
        report.not_checked.push(one);
    }
    let cause = report.causes[0].clone();
    report.causes = vec![cause; 500];
    let share = report.grad_norm.shares[0].clone();
    report.grad_norm.shares = vec![share; 20_000];
    for stage in &mut report.stages {
        stage.failing = vec![(Some(1), Some(1)); 160_000];
    }
    let page = html::page(&report);
    assert!(page.len() <= html::MAX_BYTES, "{} bytes", page.len());
    assert!(html::fragment(&report, "a").len() <= html::MAX_BYTES);
    assert!(
        page.contains("more hosts are not shown") && page.contains("more findings are not shown")
    );
}

#[test]
fn agreed_and_incomplete_and_two_runs_have_their_own_words() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = Job { tokens: 400, ..Job::default() };
    let faulty = dumped(dir.path(), "fused", &label_scatter());
    let plain = dumped(dir.path(), "plain", &Job { fused: false, ..sizes.clone() });
    let two = full_report(&faulty, &Selection::default(), ALL, Some(&plain), DRAWN).unwrap();
    let page = html::page(&two);
    for words in
        ["Both runs", "Stages of the other run, plain", "other run to reference", "The other run"]
    {
        assert!(page.contains(words), "{words}");
    }
    assert!(page.contains("the other run&#39;s dq"), "its maps are drawn too");
    let clean = full_report(&plain, &Selection::default(), ALL, None, DRAWN).unwrap();
    let page = html::page(&clean);
    assert_eq!(clean.verdict, Verdict::Agreed);
    assert!(page.contains("No stage diverges") && page.contains("data-verdict=\"agreed\""));
    let file = faulty.join("step-00000000/rank-00001-mb-0000.safetensors");
    std::fs::remove_file(&file).unwrap();
    let partial = full_report(&faulty, &Selection::default(), ALL, None, DRAWN);
    // What has q missing cannot be replayed at all: one sentence, no page.
    if let Ok(report) = partial {
        let page = html::page(&report);
        assert_ne!(report.verdict, Verdict::Agreed);
        assert!(page.contains("NOT proved"), "{page}");
    }
}

/// Goal: a dump with a hole says which rank it is of. Method: one byte of one rank's dq.
#[test]
fn an_altered_shard_is_a_fault_of_its_rank_and_what_depends_on_it_has_no_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let run = dumped(dir.path(), "run-a", &Job { tokens: 200, ..Job::default() });
    let file = run.join("step-00000000/rank-00001-mb-0001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let of_dq = tensors.as_object().unwrap().iter().find(|(name, _)| name.starts_with("dq"));
    let start = of_dq.unwrap().1["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[8 + header + start] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let report = full_report(&run, &Selection::default(), ALL, None, DRAWN).unwrap();
    assert_eq!(report.verdict, Verdict::Incomplete);
    let ranks = &report.drawings.as_ref().unwrap().ranks;
    let faulty: Vec<u32> = ranks.iter().filter(|of| of.faults[0] > 0).map(|of| of.rank).collect();
    assert_eq!(faulty, [1], "{ranks:?}");
    let page = html::page(&report);
    assert!(page.contains("data-verdict=\"incomplete\"") && page.contains("NOT proved"));
    assert!(page.contains("class=\"bt-rank bt-fail\""));
}

#[test]
fn sums_that_a_cause_explains_say_what_is_left_of_them() {
    let report = drawn(&label_scatter());
    let [cause] = &report.causes[..] else { panic!("{:?}", report.causes) };
    let [left] = &cause.residuals[..] else { panic!("{cause:?}") };
    let stage = report.stages.iter().find(|one| one.name == left.stage).unwrap();
    assert_eq!((left.stage, stage.status), ("dk_label", Status::Fail));
    assert_eq!(left.comparisons, stage.failing.len());
    assert!(left.after < left.before && left.before > left.floor, "{left:?}");
    assert_eq!(cause.bit_equal, left.after == 0.0);
    assert!(html::page(&report).contains("Residual before and after"));
}

#[test]
fn the_command_writes_the_page_whole_or_says_in_one_sentence_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let run = dumped(dir.path(), "run-a", &label_scatter());
    let page = dir.path().join("out.html");
    let arguments = |to: &Path| {
        let words = ["--dump", run.to_str().unwrap(), "--report", to.to_str().unwrap()];
        words.map(String::from).to_vec()
    };
    for _ in 0..2 {
        let ended = program::replay(&arguments(&page));
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        assert!(ended.stdout.contains("DIVERGED at dk_label"));
    }
    let text = std::fs::read_to_string(&page).unwrap();
    let top = text.split("</header>").next().unwrap();
    assert!(top.contains("label-scatter-low-precision</strong></a>: to do: gather the label rows"));
    assert!(text.starts_with("<!DOCTYPE html>") && text.ends_with("</html>\n"));
    for to in [dir.path().join("absent/out.html"), dir.path().to_path_buf()] {
        let ended = program::replay(&arguments(&to));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""));
        assert!(ended.stderr.contains("choose another file for --report"), "{}", ended.stderr);
        assert_eq!(ended.stderr.trim_end().lines().count(), 1, "{}", ended.stderr);
    }
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}
