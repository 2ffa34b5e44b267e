//! `replay checks` on dumps of small jobs: each check with a planted fault and its clean
//! twin, and clean jobs drawn at random, of which nothing may be said.

use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::head::{Denominator, HeadDeclaration};
use backtape::index_box::IndexBox;
use backtape::shard::When;
use backtape_replayer::checks::{Finding, Severity};
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::checks_report;
use backtape_replayer::report::checked::{ChecksReport, ChecksVerdict, render};
use backtape_replayer::report::text::WIDTH;

use crate::support::dump::{self, Shard};
use crate::support::job::Job;
use crate::support::program;

/// Clean jobs that every test run takes; `BACKTAPE_SEED` and `BACKTAPE_RUNS` choose others.
const JOBS: u64 = 200;

fn write(
    directory: &Path,
    ranks: u32,
    head: Option<&HeadDeclaration>,
    shards: &[Shard],
) -> PathBuf {
    let path = directory.join("run-a");
    dump::write_with(&path, ranks, head, shards);
    path
}

fn checked(path: &Path) -> ChecksReport {
    let report = checks_report(path, &Selection::default()).unwrap();
    let shown = render(&report);
    let wide: Vec<&str> = shown.lines().filter(|line| line.chars().count() > WIDTH).collect();
    assert!(wide.is_empty(), "{wide:#?}");
    report
}

fn of(ranks: u32, head: Option<&HeadDeclaration>, shards: &[Shard]) -> ChecksReport {
    let directory = tempfile::tempdir().unwrap();
    checked(&write(directory.path(), ranks, head, shards))
}

/// Findings that are more than notes.
fn alarms(report: &ChecksReport) -> Vec<&Finding> {
    report.checked.findings.iter().filter(|found| found.severity != Severity::Note).collect()
}

fn clean(report: &ChecksReport) {
    assert!(alarms(report).is_empty(), "{}", render(report));
    assert_eq!(report.verdict, ChecksVerdict::Passed, "{}", render(report));
}

/// The one alarm of a check, which must be of this cause.
fn only<'a>(report: &'a ChecksReport, check: &str, cause: Option<&str>) -> &'a Finding {
    let found: Vec<&Finding> = alarms(report).into_iter().filter(|f| f.check == check).collect();
    assert_eq!(found.len(), 1, "{}", render(report));
    assert_eq!(found[0].cause, cause, "{}", render(report));
    found[0]
}

/// A default job with something changed in its shards.
fn changed(change: impl Fn(&mut Vec<Shard>)) -> ChecksReport {
    let job = Job::default();
    let mut shards = job.shards();
    change(&mut shards);
    of(job.ranks as u32, Some(&job.head()), &shards)
}

fn shard<'a>(shards: &'a mut [Shard], name: &str, rank: u32, mb: Option<u32>) -> &'a mut Shard {
    let of = |s: &&mut Shard| s.name == name && s.rank == rank && s.microbatch == mb;
    shards.iter_mut().find(of).unwrap()
}

fn set_f32(shard: &mut Shard, element: usize, value: f32) {
    shard.bytes[4 * element..4 * element + 4].copy_from_slice(&value.to_le_bytes());
}

/// Ids from a small generator: what tokenised text is like, for this purpose.
fn ids(seed: u64, count: usize, classes: u64) -> Vec<i32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % classes) as i32
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// `[rows, columns]` of ids, one rank's share of `[ranks * rows, columns]`.
fn of_ids(name: &'static str, rank: u32, ranks: u32, mb: u32, rows: u64, ids: &[i32]) -> Shard {
    let columns = ids.len() as u64 / rows;
    let from = u64::from(rank) * rows;
    Shard {
        rank,
        name,
        microbatch: Some(mb),
        when: None,
        partial: false,
        dtype: Dtype::I32,
        shape: vec![u64::from(ranks) * rows, columns],
        place: IndexBox(vec![(from, from + rows), (0, columns)]),
        bytes: ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    }
}

/// Two ranks, two microbatches, 6 rows of 40 ids each, all drawn apart.
fn batches() -> Vec<Shard> {
    let one = |i: u32| of_ids("labels", i % 2, 2, i / 2, 6, &ids(u64::from(i) + 1, 240, 500));
    (0..4).map(one).collect()
}

#[test]
fn clean_jobs_drawn_at_random_are_not_found_fault_with() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let first = number("BACKTAPE_SEED").unwrap_or(0);
    for seed in first..first + number("BACKTAPE_RUNS").unwrap_or(JOBS) {
        let job = Job::random(seed);
        let report = of(job.ranks as u32, Some(&job.head()), &job.shards());
        let mut alarms = alarms(&report);
        // Copied tokens are real repeats of rows.
        let copies = job.options.data.copies.is_some();
        alarms.retain(|f| !(copies && f.check == "batches" && f.severity == Severity::Warn));
        assert!(alarms.is_empty(), "seed {seed}\n{}\n{job:?}", render(&report));
    }
}

#[test]
fn a_clean_job_passes_and_every_check_says_what_it_looked_at() {
    let report = changed(|_| {});
    clean(&report);
    let idle = |name: &str| {
        let found = report.checked.checks.iter().find(|check| check.check == name).unwrap();
        found.looked_at == 0
    };
    for name in ["batches", "nonfinite", "labels", "poison", "buffers", "zeros", "counts"] {
        assert!(!idle(name), "{name}\n{}", render(&report));
    }
    for name in ["shift", "clipping"] {
        let why = report.checked.not_checked.iter().any(|item| item.check == name);
        assert!(idle(name) && why, "{name}");
    }
}

#[test]
fn a_rank_that_holds_another_ranks_batch_is_named() {
    clean(&of(2, None, &batches()));
    let mut shards = batches();
    shards[3].bytes = shards[2].bytes.clone();
    let report = of(2, None, &shards);
    let found = only(&report, "batches", Some("duplicate-batch"));
    assert_eq!((found.severity, found.place.microbatch), (Severity::Fail, Some(1)));
    assert_eq!(found.place.ranks, [1]);
    assert_eq!(report.verdict, ChecksVerdict::Failed);
}

#[test]
fn a_sequence_that_repeats_is_a_warning_with_both_places_and_the_rate() {
    let mut shards = batches();
    let row = shards[0].bytes[160..320].to_vec();
    shards[3].bytes[480..640].copy_from_slice(&row);
    let report = of(2, None, &shards);
    let found = only(&report, "batches", Some("duplicate-batch"));
    assert_eq!(found.severity, Severity::Warn);
    assert!(found.evidence.contains("row 1 ="), "{}", found.evidence);
    assert!(found.evidence.contains("row 9;"), "{}", found.evidence);
    assert!(found.evidence.contains("1 of 24 sequences"), "{}", found.evidence);
}

/// Goal: what is equal for want of content is not called a repeat. Method: padding,
/// ignored rows, constants, and rows of few classes beside real ones.
#[test]
fn padded_ignored_constant_and_short_rows_are_no_repeats() {
    for (fill, from) in [(-100, 0), (0, 0), (7, 0), (0, 2)] {
        let mut shards = batches();
        for shard in &mut shards {
            for row in [1, 4] {
                let ids = shard.bytes[160 * row..160 * (row + 1)].chunks_exact_mut(4);
                ids.skip(from).for_each(|id| id.copy_from_slice(&i32::to_le_bytes(fill)));
            }
        }
        clean(&of(2, None, &shards));
    }
    let short = |i: u32| of_ids("labels", i % 2, 2, i / 2, 60, &ids(u64::from(i) + 1, 240, 2));
    clean(&of(2, None, &(0..4).map(short).collect::<Vec<_>>()));
}

#[test]
fn replicas_of_a_batch_are_no_repeats() {
    let mut shards = batches();
    for mut copy in batches() {
        copy.rank += 2;
        shards.push(copy);
    }
    clean(&of(4, None, &shards));
}

/// Inputs beside labels that are shifted by `by`, rolled over the ends where `roll`.
fn shifted(by: i64, roll: bool) -> Vec<Shard> {
    let mut shards = Vec::new();
    for mb in 0..2 {
        for rank in 0..2 {
            let tokens = ids(u64::from(2 * mb + rank) + 9, 240, 500);
            let id = |i: i64| {
                let (row, column) = (i / 40, i % 40 + by);
                let inside = (0..40).contains(&column);
                match (inside, roll) {
                    (true, _) => tokens[(row * 40 + column) as usize],
                    (false, true) => tokens[(row * 40 + column.rem_euclid(40)) as usize],
                    (false, false) => -100,
                }
            };
            let labels: Vec<i32> = (0..240).map(id).collect();
            shards.push(of_ids("tokens", rank, 2, mb, 6, &tokens));
            shards.push(of_ids("labels", rank, 2, mb, 6, &labels));
        }
    }
    shards
}

fn shift_head(labels_shifted: bool) -> HeadDeclaration {
    HeadDeclaration { labels_shifted, ignore_label: Some(-100), ..HeadDeclaration::default() }
}

#[test]
fn labels_that_are_not_the_next_ids_are_named_with_their_shift() {
    clean(&of(2, Some(&shift_head(true)), &shifted(1, false)));
    clean(&of(2, Some(&shift_head(false)), &shifted(0, false)));
    for (declared, by) in [(true, 0), (true, 2), (true, -1), (false, 1), (false, -2)] {
        let report = of(2, Some(&shift_head(declared)), &shifted(by, false));
        let found: Vec<_> = alarms(&report).into_iter().filter(|f| f.check == "shift").collect();
        assert_eq!(found.len(), 2, "{declared} {by}\n{}", render(&report));
        assert_eq!(found[0].cause, Some("label-shift"));
        assert!(found[0].evidence.contains(&format!("tokens[t{by:+}]")), "{}", found[0].evidence);
    }
}

#[test]
fn labels_rolled_over_the_end_of_their_row_are_a_warning() {
    let report = of(2, Some(&shift_head(true)), &shifted(1, true));
    let found: Vec<_> = alarms(&report).into_iter().filter(|f| f.check == "shift").collect();
    assert_eq!(found.len(), 2, "{}", render(&report));
    assert!(found[0].evidence.contains("own first id"), "{}", found[0].evidence);
}

#[test]
fn text_that_repeats_itself_decides_no_shift() {
    let mut shards = shifted(0, false);
    for shard in &mut shards {
        shard.bytes.chunks_exact_mut(4).for_each(|id| id.copy_from_slice(&5i32.to_le_bytes()));
    }
    let report = of(2, Some(&shift_head(true)), &shards);
    assert!(!report.checked.findings.iter().any(|f| f.check == "shift"), "{}", render(&report));
}

#[test]
fn numbers_in_blocks_that_lie_at_their_index_times_their_size_squared_tell_of_the_index_map() {
    let report = changed(|shards| {
        // Of 393 tokens on three ranks: blocks of 16 at 0 and at 256, and no more within the axis.
        for (rank, unwritten) in [(0, 16..131), (1, 0..256 - 131), (2, 272 - 262..131)] {
            let lse = shard(shards, "lse", rank, Some(1));
            unwritten.for_each(|token| set_f32(lse, token, f32::NAN));
        }
    });
    let found = only(&report, "nonfinite", Some("block-index-times-block"));
    assert_eq!(found.place.tensor.as_deref(), Some("lse"));
    assert!(
        found.evidence.contains("blocks of 16 that begin at i x 16 x 16"),
        "{}",
        found.evidence
    );
}

#[test]
fn the_first_value_that_is_no_number_is_placed_and_what_follows_is_a_note() {
    let report = changed(|shards| {
        set_f32(shard(shards, "lse", 1, Some(1)), 7, f32::NAN);
        set_f32(shard(shards, "dk", 2, Some(1)), 30, f32::INFINITY);
    });
    let found = only(&report, "nonfinite", Some("nan-origin"));
    assert_eq!(found.place.tensor.as_deref(), Some("lse"));
    assert_eq!((found.place.microbatch, found.place.ranks.as_slice()), (Some(1), &[1][..]));
    assert_eq!(found.place.rows, [131 + 7]);
    let notes = report.checked.findings.iter().filter(|f| f.check == "nonfinite").count();
    assert_eq!(notes, 2, "{}", render(&report));
}

#[test]
fn memory_that_was_never_written_is_told_by_its_pattern() {
    for (pattern, severity) in [
        ([0xcd; 4], Severity::Fail),
        ([0xaa; 4], Severity::Fail),
        ([0xef, 0xbe, 0xad, 0xde], Severity::Fail),
        ([0xff; 4], Severity::Warn),
    ] {
        let report = changed(|shards| {
            let dq = shard(shards, "dq", 1, Some(0));
            dq.bytes[96..240].chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&pattern));
        });
        let found = only(&report, "poison", Some("uninitialised-output"));
        assert_eq!((found.severity, found.place.rows.as_slice()), (severity, &[131 + 2][..]));
    }
}

#[test]
fn a_nan_that_no_arithmetic_makes_is_a_sign_of_stale_memory() {
    let odd = |bits: u32| {
        changed(|shards| {
            let dk = shard(shards, "dk", 0, Some(0));
            dk.bytes[40..44].copy_from_slice(&bits.to_le_bytes());
        })
    };
    only(&odd(0x7fa1_2345), "poison", Some("uninitialised-output"));
    for usual in [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff] {
        assert!(alarms(&odd(usual)).iter().all(|found| found.check == "nonfinite"));
    }
}

#[test]
fn a_gradient_that_is_what_it_was_computed_from_is_named() {
    let report = changed(|shards| {
        let q = shard(shards, "q", 1, Some(1)).bytes.clone();
        shard(shards, "dq", 1, Some(1)).bytes[480..960].copy_from_slice(&q[480..960]);
    });
    let found = only(&report, "buffers", Some("uninitialised-output"));
    assert_eq!(found.place.row_count, 10, "{}", found.evidence);
    assert!(found.evidence.contains("equal q microbatch 1"), "{}", found.evidence);
}

#[test]
fn rows_left_from_the_microbatch_before_are_named() {
    let report = changed(|shards| {
        let before = shard(shards, "dk", 2, Some(0)).bytes.clone();
        shard(shards, "dk", 2, Some(1)).bytes[..960].copy_from_slice(&before[..960]);
    });
    let found = only(&report, "buffers", Some("uninitialised-output"));
    assert_eq!((found.place.row_count, found.place.microbatch), (10, Some(1)));
}

#[test]
fn rows_of_zeros_that_cannot_be_are_named_with_their_tile() {
    let report = changed(|shards| {
        shard(shards, "dq", 0, Some(0)).bytes[48 * 32..48 * 64].fill(0);
    });
    let found = only(&report, "zeros", None);
    assert!(found.evidence.contains("rows 32 to 63 are a whole tile"), "{}", found.evidence);
    let report = changed(|shards| {
        shard(shards, "dk", 1, Some(1)).bytes[..96 * 16].fill(0);
    });
    let found = only(&report, "zeros", None);
    assert_eq!(
        (found.place.tensor.as_deref(), found.place.ranks.as_slice()),
        (Some("dk"), &[1][..])
    );
}

#[test]
fn one_flipped_bit_on_one_rank_is_corruption_and_other_sums_are_divergence() {
    let flipped = changed(|shards| {
        shard(shards, "k", 2, Some(0)).bytes[1001] ^= 0x40;
    });
    let found = only(&flipped, "replicas", Some("silent-corruption"));
    assert_eq!(found.place.ranks, [2]);
    assert!(found.evidence.contains("bit 14"), "{}", found.evidence);
    let diverged = changed(|shards| {
        shard(shards, "k", 2, Some(0)).bytes.chunks_exact_mut(2).for_each(|x| x[0] ^= 1);
    });
    only(&diverged, "replicas", Some("replica-divergence"));
}

#[test]
fn a_rank_that_kept_its_own_addend_is_not_reduced_and_one_that_differs_is_out_of_step() {
    let mut job = Job::default();
    job.options.extras.accumulated = true;
    let run = |change: &dyn Fn(&mut Vec<Shard>)| {
        let mut shards = job.shards();
        change(&mut shards);
        of(3, Some(&job.head()), &shards)
    };
    let at = |shards: &[Shard], rank: u32, when: When| {
        let of = |s: &Shard| {
            s.name == "dk" && s.rank == rank && s.when == Some(when) && s.microbatch.is_none()
        };
        shards.iter().position(of).unwrap()
    };
    clean(&run(&|_| {}));
    let kept = run(&|shards| {
        let own = shards[at(shards, 1, When::PreReduce)].bytes.clone();
        let post = at(shards, 1, When::PostReduce);
        shards[post].bytes = own;
    });
    assert_eq!(only(&kept, "replicas", Some("partial-not-reduced")).place.ranks, [1]);
    let all = run(&|shards| {
        let own = shards[at(shards, 0, When::PreReduce)].bytes.clone();
        (0..3).for_each(|rank| {
            let post = at(shards, rank, When::PostReduce);
            shards[post].bytes = own.clone();
        });
    });
    only(&all, "reduced", Some("partial-not-reduced"));
    let differs = run(&|shards| {
        let post = at(shards, 2, When::PostReduce);
        let values = shards[post].bytes.clone();
        let scaled = values
            .chunks_exact(4)
            .flat_map(|b| (1.25 * f32::from_le_bytes([b[0], b[1], b[2], b[3]])).to_le_bytes());
        shards[post].bytes = scaled.collect();
    });
    assert_eq!(only(&differs, "replicas", Some("sync-wrong-microbatch")).place.ranks, [2]);
}

#[test]
fn a_loss_divided_by_another_count_than_declared_is_named() {
    let mut job = Job::default();
    job.options.denominator = Denominator::All;
    let shards = job.shards();
    clean(&of(3, Some(&job.head()), &shards));
    let declared = HeadDeclaration { denominator: Denominator::Weights, ..job.head() };
    let report = of(3, Some(&declared), &shards);
    let found: Vec<_> = alarms(&report).into_iter().filter(|f| f.check == "counts").collect();
    assert_eq!(found.len(), 2, "{}", render(&report));
    assert!(found[0].evidence.contains("tokens of the step"), "{}", found[0].evidence);
}

#[test]
fn labels_that_name_no_class_are_named() {
    let report = changed(|shards| {
        let labels = shard(shards, "labels", 1, Some(0));
        labels.bytes[20..24].copy_from_slice(&270i32.to_le_bytes());
    });
    let found = only(&report, "labels", Some("int-target-out-of-range"));
    assert_eq!(
        (found.place.rows.as_slice(), found.place.ranks.as_slice()),
        (&[131 + 5][..], &[1][..])
    );
}

#[test]
fn a_microbatch_in_which_nothing_counts_fails_where_the_loss_shows_it() {
    let silent = |loss: f32| {
        let mut shards = Job::default().shards();
        let head = HeadDeclaration {
            scope: backtape::head::Scope::Microbatch.into(),
            ..Job::default().head()
        };
        for shard in shards.iter_mut().filter(|s| s.microbatch == Some(1)) {
            match shard.name {
                "weights" => shard.bytes.fill(0),
                "loss" => shard.bytes = loss.to_le_bytes().to_vec(),
                _ => {}
            }
        }
        of(3, Some(&head), &shards)
    };
    let broken = silent(f32::NAN);
    assert_eq!(only(&broken, "labels", Some("all-ignored")).place.microbatch, Some(1));
    let guarded = silent(0.0);
    assert!(alarms(&guarded).iter().all(|f| f.check != "labels"), "{}", render(&guarded));
}

#[test]
fn a_torn_shard_is_a_finding_and_the_rest_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let job = Job::default();
    let path = write(directory.path(), 3, Some(&job.head()), &job.shards());
    let step = path.join("step-00000000");
    let torn = step.join("rank-00001-mb-0000.safetensors");
    let bytes = std::fs::read(&torn).unwrap();
    std::fs::write(&torn, &bytes[..bytes.len() / 2]).unwrap();
    let report = checked(&path);
    assert_eq!(report.verdict, ChecksVerdict::Incomplete, "{}", render(&report));
    assert!(alarms(&report).iter().all(|found| found.check == "damage"), "{}", render(&report));
    let ended = program::replay(&["checks", "--dump", path.to_str().unwrap()]);
    assert_eq!(ended.code, 3, "{}", ended.stdout);
}

#[test]
fn the_program_exits_by_what_it_found_and_json_says_the_same_twice() {
    let directory = tempfile::tempdir().unwrap();
    let mut shards = batches();
    let path = write(directory.path(), 2, None, &shards);
    let arguments = ["checks", "--dump", path.to_str().unwrap(), "--json", "-"];
    let (one, two) = (program::replay(&arguments), program::replay(&arguments));
    assert_eq!((one.code, &one.stdout), (0, &two.stdout), "{}", one.stderr);
    let json: serde_json::Value = serde_json::from_str(&one.stdout).unwrap();
    assert_eq!(json["schema"], "backtape.checks/1");
    shards[3].bytes = shards[2].bytes.clone();
    let other = tempfile::tempdir().unwrap();
    let path = write(other.path(), 2, None, &shards);
    assert_eq!(program::replay(&["checks", "--dump", path.to_str().unwrap()]).code, 1);
    assert_eq!(program::replay(&["checks", "--dump", "/nowhere/at/all"]).code, 2);
}
