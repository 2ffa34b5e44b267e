//! `replay precision` on dumps: the story of the compensated sum that could not
//! cure a gradient, and what must not pass as a number.

use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::head::HeadDeclaration;
use backtape::index_box::IndexBox;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::precision_report;
use backtape_replayer::precision::difference::{AtStep, Best};
use backtape_replayer::precision::{Gradients, Options, Precision};
use backtape_replayer::report::{precision as shown, text};
use half::{bf16, f16};

use crate::support::dump::{self, Shard};
use crate::support::job::Job;
use crate::support::job::options::Kind;
use crate::support::program::replay;

const TOKENS: usize = 64;
const VOCAB: usize = 34;
const WIDTH: usize = 16;

/// A job of 64 tokens and 34 classes whose arithmetic is f32 throughout.
struct Story {
    dtype: Dtype,
    q: Vec<f32>,
    k: Vec<f32>,
    labels: Vec<i32>,
    gradients: bool,
    dq_scale: f32,
}

impl Story {
    fn new(dtype: Dtype) -> Story {
        let mut state = 34u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let x = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.7;
            match dtype {
                Dtype::Bf16 => bf16::from_f32(x).to_f32(),
                Dtype::F16 => f16::from_f32(x).to_f32(),
                _ => x,
            }
        };
        let q = (0..TOKENS * WIDTH).map(|_| number()).collect();
        let k = (0..VOCAB * WIDTH).map(|_| number()).collect();
        let labels = (0..TOKENS as i32).map(|t| t * 5 % VOCAB as i32).collect();
        Story { dtype, q, k, labels, gradients: true, dq_scale: 1.0 }
    }

    /// dq and dk of the mean loss, in f32, one addend after the other.
    fn backward(&self) -> (Vec<f32>, Vec<f32>) {
        let (mut dq, mut dk) = (vec![0.0; self.q.len()], vec![0.0; self.k.len()]);
        for t in 0..TOKENS {
            let q = &self.q[t * WIDTH..(t + 1) * WIDTH];
            let dot = |v: usize| q.iter().zip(&self.k[v * WIDTH..]).map(|(a, b)| a * b).sum();
            let logits: Vec<f32> = (0..VOCAB).map(dot).collect();
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = logits.iter().map(|z| (z - max).exp()).sum();
            for (v, z) in logits.iter().enumerate() {
                let hit = if v as i32 == self.labels[t] { 1.0 } else { 0.0 };
                let g = ((z - max).exp() / sum - hit) / TOKENS as f32;
                for i in 0..WIDTH {
                    dq[t * WIDTH + i] += g * self.k[v * WIDTH + i] * self.dq_scale;
                    dk[v * WIDTH + i] += g * q[i];
                }
            }
        }
        (dq, dk)
    }

    fn write(&self, directory: &Path) -> PathBuf {
        let path = directory.join("story");
        let (tokens, classes) =
            (vec![TOKENS as u64, WIDTH as u64], vec![VOCAB as u64, WIDTH as u64]);
        let floats = |values: &[f32], dtype: Dtype| -> Vec<u8> {
            let one = |x: &f32| match dtype {
                Dtype::Bf16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
                Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            };
            values.iter().flat_map(one).collect()
        };
        let shard = |name, dtype, shape: &Vec<u64>, bytes| Shard {
            rank: 0,
            name,
            microbatch: Some(0),
            when: None,
            partial: false,
            dtype,
            shape: shape.clone(),
            place: IndexBox::whole(shape),
            bytes,
        };
        let labels = self.labels.iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut shards = vec![
            shard("q", self.dtype, &tokens, floats(&self.q, self.dtype)),
            shard("k", self.dtype, &classes, floats(&self.k, self.dtype)),
            shard("labels", Dtype::I32, &vec![TOKENS as u64], labels),
        ];
        if self.gradients {
            let (dq, dk) = self.backward();
            shards.push(shard("dq", Dtype::F32, &tokens, floats(&dq, Dtype::F32)));
            shards.push(shard("dk", Dtype::F32, &classes, floats(&dk, Dtype::F32)));
        }
        let mut head = HeadDeclaration { path: "plain".into(), ..HeadDeclaration::default() };
        head.ignore_label = Some(-100);
        dump::write(&path, 1, &head, &shards);
        path
    }
}

fn found(story: &Story) -> Precision {
    let dir = tempfile::tempdir().unwrap();
    let path = story.write(dir.path());
    precision_report(&path, &Selection::default(), &Options::default()).unwrap()
}

/// Naive sums of 34 exponentials err by less than 33u = 2e-6, the
/// finite difference with eps = 1e-5 by tens of percent.
#[test]
fn compensated_summation_cannot_cure_what_the_finite_difference_does() {
    let found = found(&Story::new(Dtype::F32));
    let shown = shown::render(&found);
    let naive = &found.sums[0];
    assert_eq!((naive.method, found.terms), ("naive f32", VOCAB));
    assert!(naive.max > 0.0 && naive.max <= 33.0 * 5.97e-8, "{shown}");
    assert!((naive.worst / (33.0 * 5.96e-8) - 1.0).abs() < 1e-3, "{shown}");
    let check = found.check.as_ref().unwrap();
    assert!((0.05..5.0).contains(&check.error), "{shown}");
    let predicted = check.predicted.unwrap();
    assert!((0.25..4.0).contains(&(check.error / predicted)), "{shown}");
    assert!(check.best_error.unwrap() < check.error / 50.0, "{shown}");
    for part in [
        "summation is not the cause: naive f32 errs by",
        "a gradient check with eps = 1e-5 on an f32 loss errs by",
        "by itself; use h = ",
        "inputs consistent, within noise",
    ] {
        assert!(found.verdict.contains(part), "{part}\n{shown}");
    }
}

/// The step that noise and curvature predict errs at most three times as much as the best
/// of the decades beside it: the minimum is flat.
#[test]
fn the_predicted_step_is_nearly_as_good_as_the_best_of_the_table() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let found = found(&Story::new(dtype));
        assert_eq!(found.differences.len(), 2);
        for table in &found.differences {
            let least = |of: &dyn Fn(&AtStep) -> f64| {
                table.steps.iter().map(of).fold(f64::INFINITY, f64::min)
            };
            let at = |of: &dyn Fn(&AtStep) -> Best| {
                let said = |row: &&AtStep| matches!(of(row), Best::Predicted | Best::Both);
                table.steps.iter().find(said).unwrap()
            };
            let (c, best_c) =
                (at(&|row| row.central_best).central_f32, least(&|row| row.central_f32));
            let (f, best_f) =
                (at(&|row| row.forward_best).forward_f32, least(&|row| row.forward_f32));
            assert!(c <= 3.0 * best_c && f <= 3.0 * best_f, "{}", shown::render(&found));
            // In f64 the same differences are right to many more digits.
            let best = table.steps.iter().map(|row| row.central_f64).fold(1.0, f64::min);
            assert!(best < 1e-7, "{}", shown::render(&found));
        }
    }
}

#[test]
fn a_gradient_that_is_off_is_not_called_consistent() {
    let found = found(&Story { dq_scale: 1.01, ..Story::new(Dtype::F32) });
    assert_eq!(found.gradients, Gradients::Diverge("dq".into()));
    assert!(!found.verdict.contains("consistent"), "{}", found.verdict);
    assert!(found.verdict.contains("diverge from the f64 reference at dq"), "{}", found.verdict);
}

#[test]
fn without_captured_gradients_nothing_is_said_of_them() {
    let found = found(&Story { gradients: false, ..Story::new(Dtype::F32) });
    assert_eq!(found.gradients, Gradients::NotRecorded);
    assert!(found.verdict.contains("holds neither dq nor dk"), "{}", found.verdict);
}

#[test]
fn a_nan_in_q_is_counted_and_is_no_number_of_the_table() {
    let mut story = Story::new(Dtype::F32);
    story.q[5 * WIDTH + 3] = f32::NAN;
    let found = found(&story);
    assert_eq!(found.nonfinite, 1);
    assert!(found.sums.iter().all(|sum| sum.max.is_finite()));
    assert!(found.check.is_none() && found.differences.is_empty());
    assert!(found.verdict.starts_with("1 of 64 softmax denominators are not finite"));
    assert!(!found.verdict.contains("not the cause"), "{}", found.verdict);
    let dir = tempfile::tempdir().unwrap();
    let path = story.write(dir.path());
    let ended = replay(&["precision", "--dump", path.to_str().unwrap()]);
    assert!(ended.code != 0, "{ended:?}");
}

#[test]
fn the_command_prints_a_screen_and_writes_json() {
    let dir = tempfile::tempdir().unwrap();
    let path = Story::new(Dtype::F32).write(dir.path());
    let json = dir.path().join("out.json");
    let (path, json_path) = (path.to_str().unwrap(), json.to_str().unwrap());
    let ended = replay(&["precision", "--dump", path, "--tokens", "20", "--json", json_path]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let wide = ended.stdout.lines().filter(|line| line.chars().count() > text::WIDTH).count();
    assert_eq!(wide, 0, "{}", ended.stdout);
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(json["schema"], "backtape.precision/1");
    assert_eq!(json["tokens"], serde_json::json!([64, 20, 20]));
    let missing = replay(&["precision", "--dump", path, "--microbatch", "7"]);
    assert_eq!(missing.code, 2);
    assert!(missing.stderr.contains("choose one of microbatch 0"), "{}", missing.stderr);
}

#[test]
fn the_numbers_are_the_same_with_one_thread_and_with_three() {
    let dir = tempfile::tempdir().unwrap();
    let path = Story::new(Dtype::Bf16).write(dir.path());
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let report = || precision_report(&path, &Selection::default(), &Options::default());
        serde_json::to_string(&pool.install(report).unwrap()).unwrap()
    };
    assert_eq!(run(1), run(3));
}

/// Goal: every option of the head enters the loss and its derivative alike, and a head
/// without q and k is refused in one sentence. Method: random clean jobs.
#[test]
fn differences_agree_under_every_option_and_a_head_without_products_says_what_it_needs() {
    let (mut measured, mut refused) = (0, 0);
    for seed in 0..24 {
        let job = Job::random(seed);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run-a");
        dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
        let options = Options { microbatch: None, tokens: Some(12) };
        match precision_report(&path, &Selection::default(), &options) {
            Ok(found) => {
                // Saturated logits have derivatives of nothing: rounding is all there is.
                for table in found.differences.iter().filter(|table| table.derivative > 1e-6) {
                    let best = table.steps.iter().map(|row| row.central_f64).fold(1.0, f64::min);
                    assert!(best < 1e-4, "seed {seed}: {job:?}\n{}", shown::render(&found));
                    measured += 1;
                }
                let diverge = matches!(found.gradients, Gradients::Diverge(_));
                assert!(!diverge, "seed {seed}: {}", found.verdict);
                let shown = shown::render(&found);
                let wide = shown.lines().filter(|line| line.chars().count() > text::WIDTH).count();
                assert_eq!(wide, 0, "{shown}");
            }
            Err(error) => {
                let text = std::error::Error::source(&error).unwrap().to_string();
                let products = text.contains("record both with tape.record");
                let empty = text.contains("there is nothing to differentiate");
                assert!(products || empty, "seed {seed}: {text}");
                assert!(!products || job.options.kind != Kind::Xent, "seed {seed}: {text}");
                refused += usize::from(products);
            }
        }
    }
    assert!(measured >= 12 && refused >= 1, "{measured} measured, {refused} refused");
}
