//! What a report says of values that are no numbers, and of values so large that their squares
//! are none: never 0, and never that they agree.

use backtape::dtype::Dtype;
use backtape::head::{HeadDeclaration, Loss, LossReduction};
use backtape::index_box::IndexBox;
use backtape::role::Role;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, StageReport, Verdict};
use backtape_replayer::report::text;

use crate::support::dump::{self, Shard};
use crate::support::job::Job;
use crate::support::job::options::Kind;

fn replayed(head: &HeadDeclaration, ranks: u32, shards: &[Shard], asked: &[Role]) -> Report {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write(&path, ranks, head, shards);
    replay_report(&path, &Selection::default(), asked, None).unwrap()
}

fn stage<'a>(report: &'a Report, name: &str) -> &'a StageReport {
    report.stages.iter().find(|stage| stage.name == name).unwrap()
}

/// The line of a report that begins with this word.
fn line<'a>(shown: &'a str, word: &str) -> &'a str {
    shown.lines().find(|line| line.starts_with(word)).unwrap_or_else(|| panic!("{shown}"))
}

/// Goal: a NaN is said as that wherever its error is shown. Method: one loss of a clean job is
/// NaN, for a head on q and k and for one on logits, which has a line of its own.
#[test]
fn a_loss_that_is_nan_has_no_error_no_ratio_and_no_difference_of_zero() {
    for kind in [Kind::Xent, Kind::XentLogits] {
        let mut job = Job { ranks: 2, tokens: 40, ..Job::default() };
        job.options.kind = kind.clone();
        let mut shards = job.shards();
        let losses = |shard: &&mut Shard| shard.name == "loss" && shard.microbatch == Some(1);
        for shard in shards.iter_mut().filter(losses) {
            shard.bytes = f32::NAN.to_le_bytes().to_vec();
        }
        let report = replayed(&job.head(), 2, &shards, &[Role::Loss]);
        let shown = text::render(&report);
        assert_eq!(report.first_divergence.as_ref().unwrap().stage, "loss", "{shown}");
        let found = line(&shown, "loss ");
        let words: Vec<&str> = found.split_whitespace().collect();
        assert_eq!((words[1], words[2], words[4]), ("FAIL", "NaN", "NaN"), "{found}");
        if kind == Kind::XentLogits {
            assert!(line(&shown, "gradcheck").contains("loss abs diff NaN"), "{shown}");
        }
        assert!(shown.contains("max abs NaN"), "{shown}");
        let json = serde_json::to_value(&report).unwrap();
        let of = json["stages"].as_array().unwrap();
        let loss = of.iter().find(|stage| stage["name"] == "loss").unwrap();
        for name in ["error", "ratio", "slope", "max_abs"] {
            assert!(loss[name].is_null(), "{name}: {}", loss[name]);
        }
        assert!(loss["measures"]["max_abs"].is_null());
        assert_eq!(loss["nonfinite"], 1);
    }
}

/// A head on logits in f64 whose gradients are this large, and what it holds of them.
fn large(cotangent: f64, off: f64) -> (HeadDeclaration, Vec<Shard>) {
    const CLASSES: usize = 5;
    let logits: Vec<f64> = (0..3 * CLASSES).map(|i| f64::from((i * 7 % 11) as u8) / 4.0).collect();
    let labels = [1usize, 4, 2];
    let mut dlogits = Vec::new();
    for (row, &label) in logits.chunks(CLASSES).zip(&labels) {
        let total: f64 = row.iter().map(|z| z.exp()).sum();
        for (class, z) in row.iter().enumerate() {
            let p = z.exp() / total - f64::from(u8::from(class == label));
            dlogits.push(off * cotangent * p);
        }
    }
    let shard = |name: &'static str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>| Shard {
        rank: 0,
        name,
        microbatch: None,
        when: None,
        partial: false,
        dtype,
        shape: shape.to_vec(),
        place: IndexBox::whole(shape),
        bytes,
    };
    let bytes = |of: &[f64]| of.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let named: Vec<u8> = labels.iter().flat_map(|&y| (y as i64).to_le_bytes()).collect();
    let shards = vec![
        shard("logits", Dtype::F64, &[3, 5], bytes(&logits)),
        shard("labels", Dtype::I64, &[3], named),
        shard("dlogits", Dtype::F64, &[3, 5], bytes(&dlogits)),
    ];
    let (loss, reduction) = (Loss::XentLogits, LossReduction::Sum);
    (HeadDeclaration { loss, reduction, cotangent, ..HeadDeclaration::default() }, shards)
}

/// Goal: an energy that overflows f64 is within no bound and no error of 0. Method: gradients of
/// 1e200, right and twice what they should be, beside the same of 1e60, whose
/// variances have squares yet.
#[test]
fn values_whose_squares_overflow_have_no_verdict_and_do_not_agree() {
    let judged = |cotangent: f64, off: f64| {
        let (head, shards) = large(cotangent, off);
        replayed(&head, 1, &shards, &[])
    };
    for (cotangent, off, status) in [
        (1e60, 1.0, Status::Pass),
        (1e60, 2.0, Status::Fail),
        (1e200, 1.0, Status::Skip),
        (1e200, 2.0, Status::Skip),
    ] {
        let report = judged(cotangent, off);
        let shown = text::render(&report);
        assert_eq!(stage(&report, "dlogits").status, status, "{cotangent} {off}\n{shown}");
    }
    let report = judged(1e200, 1.0);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{shown}");
    assert!(shown.contains("so large that their squares are no"), "{shown}");
}
