//! Causes that scale gradients or change the loss, planted in jobs that share no code
//! with the replayer, and named from their dumps.
//!
//! A faulty job is mostly a clean one that declares another head than it has, or whose
//! gradients are those of another job on the same inputs.

use backtape::head::{Denominator, LossReduction, MicrobatchReduction, Scope, SmoothingFormula};
use backtape_replayer::diagnose::{CauseReport, Standing};
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::report::schema::{Report, Verdict};
use backtape_replayer::report::text;

use crate::support::dump::{self, Shard};
use crate::support::job::options::Options;
use crate::support::job::{Fault, Float, Job, What, Window};

const SEEDS: [u64; 2] = [11, 12];

/// Uneven in every way, with few enough tokens to take milliseconds.
fn job(seed: u64, change: impl Fn(&mut Job)) -> Job {
    let mut job = Job {
        seed,
        ranks: 3,
        microbatches: 2,
        tokens: 47 + seed as usize,
        vocab: 131,
        valid: 119,
        width: 13,
        fused: seed % 2 == 1,
        ..Job::default()
    };
    job.options.ignore_label = Some(-100);
    job.options.data.ignored = 0.3;
    job.options.denominator = Denominator::Valid;
    job.options.layout.uneven = 7;
    change(&mut job);
    job
}

fn with(of: &Job, change: impl Fn(&mut Options)) -> Job {
    let mut other = of.clone();
    change(&mut other.options);
    other
}

fn report(declared: &Job, shards: &[Shard]) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run-a");
    dump::write(&path, declared.ranks as u32, &declared.head(), shards);
    let all: &[backtape::role::Role] = &[];
    replay_report(&path, &Selection::default(), all, None).unwrap()
}

/// A job that declares the head of another.
fn declares(declared: &Job, real: &Job) -> Report {
    report(declared, &real.shards())
}

fn is_gradient(name: &str) -> bool {
    name.starts_with('d') || name == "grad_norm"
}

fn is_forward(name: &str) -> bool {
    ["lse", "label_logits", "logits", "logprobs", "loss"].contains(&name)
}

/// The shards of a job, some of them from another on the same inputs.
fn grafted(base: &Job, other: &Job, from: impl Fn(&str) -> bool) -> Vec<Shard> {
    let others = other.shards();
    let same = |a: &Shard, b: &Shard| {
        (a.rank, a.name, a.microbatch, a.when) == (b.rank, b.name, b.microbatch, b.when)
    };
    let one = |shard: Shard| {
        let theirs = others.iter().find(|theirs| same(&shard, theirs));
        if !is_gradient(shard.name) && !is_forward(shard.name) && shard.name != "weights" {
            assert!(theirs.is_none_or(|of| of.bytes == shard.bytes), "{} differs", shard.name);
        }
        theirs.filter(|_| from(shard.name)).cloned().unwrap_or(shard)
    };
    base.shards().into_iter().map(one).collect()
}

/// A right forward, and the gradients of another job.
fn backward_of(right: &Job, other: &Job) -> Report {
    report(right, &grafted(right, other, is_gradient))
}

fn without(report: &[Shard], names: &[&str]) -> Vec<Shard> {
    report.iter().filter(|shard| !names.contains(&shard.name)).cloned().collect()
}

fn ids(report: &Report) -> Vec<&str> {
    report.causes.iter().map(|cause| cause.id.as_str()).collect()
}

#[track_caller]
fn named<'r>(report: &'r Report, id: &str) -> &'r CauseReport {
    // What the job has and does not declare is said of its declaration, beside the cause.
    let wrong = [Verdict::Diverged, Verdict::Misdeclared].contains(&report.verdict);
    assert!(wrong, "{}", text::render(report));
    assert_eq!(ids(report), [id], "{}", text::render(report));
    let cause = &report.causes[0];
    assert_eq!(cause.standing, Standing::Named, "{}", text::render(report));
    assert!(cause.explained > 0.98, "{}", text::render(report));
    cause
}

#[track_caller]
fn unknown(report: &Report) {
    assert_eq!(report.verdict, Verdict::Diverged, "{}", text::render(report));
    assert_eq!(ids(report), ["unknown"], "{}", text::render(report));
}

#[track_caller]
fn tied(report: &Report, wanted: &[&str]) {
    let mut found = ids(report);
    found.sort_unstable();
    assert_eq!(found, wanted, "{}", text::render(report));
    let all = report.causes.iter().all(|cause| cause.standing == Standing::Tied);
    assert!(all, "{}", text::render(report));
}

#[track_caller]
fn agrees(job: &Job) {
    let report = declares(job, job);
    assert_eq!(report.verdict, Verdict::Agreed, "{}", text::render(&report));
    assert!(report.causes.is_empty());
}

#[test]
fn twins_without_a_fault_agree_and_have_no_cause() {
    for seed in SEEDS {
        agrees(&job(seed, |_| {}));
        agrees(&job(seed, |job| job.options.z_loss = 1e-3));
        agrees(&job(seed, |job| job.options.softcap = Some(6.0)));
        agrees(&job(seed, |job| job.options.label_smoothing = 0.1));
        agrees(&job(seed, |job| job.options.bias = true));
        agrees(&job(seed, |job| job.options.extras.accumulated = true));
    }
}

#[test]
fn a_factor_of_the_number_of_microbatches_is_named_wherever_it_enters() {
    for seed in SEEDS {
        for what in [What::Gradients, What::LossToo, What::Dk, What::Dq, What::Reduced] {
            for by in [2.0, 0.5] {
                let job = job(seed, |job| job.fault = Fault::Scaled(what, by));
                let report = declares(&job, &job);
                let cause = named(&report, "microbatch-count-scale");
                let wanted = if by > 1.0 { "M" } else { "1/M" };
                assert_eq!(cause.parameters["factor"], wanted);
            }
        }
        let job = job(seed, |job| {
            (job.microbatches, job.ranks) = (3, 2);
            job.options.extras.accumulated = true;
            job.options.microbatch_reduction = MicrobatchReduction::Mean;
        });
        let summed = with(&job, |o| o.microbatch_reduction = MicrobatchReduction::Sum);
        let cause_stages = declares(&job, &summed);
        assert_eq!(named(&cause_stages, "microbatch-count-scale").stages, ["accumulate"]);
        named(&declares(&summed, &job), "microbatch-count-scale");
    }
}

/// Goal: entries in the smallest numbers of f16 round as the scaled loss has them, not as a
/// factor of what is declared.
#[test]
fn a_factor_of_a_loss_whose_gradients_are_hardly_numbers_is_named() {
    for seed in SEEDS {
        let job = job(seed, |job| {
            let layout = &mut job.options.layout;
            (layout.input, layout.dq, layout.dk) = (Float::F16, Float::F16, Float::F16);
            let rounding = &mut job.options.rounding;
            (rounding.dlogits, rounding.label_grad) = (Float::F16, Float::F16);
            job.options.cotangent = 0.01;
        });
        for by in [2.0, 0.5] {
            let real = with(&job, |o| o.cotangent *= by);
            let clean = declares(&real, &real);
            assert_eq!(clean.verdict, Verdict::Agreed, "{}", text::render(&clean));
            named(&declares(&job, &real), "microbatch-count-scale");
        }
    }
}

#[test]
fn a_factor_of_the_number_of_ranks_is_named_wherever_it_enters() {
    for seed in SEEDS {
        for what in [What::Gradients, What::LossToo, What::Dk, What::Reduced] {
            for by in [3.0, 1.0 / 3.0] {
                let job = job(seed, |job| job.fault = Fault::Scaled(what, by));
                named(&declares(&job, &job), "rank-mean-vs-sum");
            }
        }
    }
}

#[test]
fn as_many_ranks_as_microbatches_cannot_be_told_apart() {
    for what in [What::Gradients, What::Reduced] {
        let job = job(11, |job| {
            job.microbatches = 3;
            job.fault = Fault::Scaled(what, 3.0);
        });
        tied(&declares(&job, &job), &["microbatch-count-scale", "rank-mean-vs-sum"]);
    }
}

#[test]
fn a_factor_that_is_no_count_stays_unknown() {
    for seed in SEEDS {
        for fault in [
            Fault::Scaled(What::Dk, 1.37),
            Fault::Scaled(What::Dk, 0.73),
            Fault::Scaled(What::Dq, 0.73),
            Fault::Scaled(What::Reduced, 0.73),
            Fault::Scaled(What::Reduced, 1.37),
            // A count's factor, but of one rank's one microbatch.
            Fault::OneScaled(2.0),
            Fault::OneScaled(3.0),
        ] {
            let job = job(seed, |job| job.fault = fault);
            unknown(&declares(&job, &job));
        }
    }
}

/// One number in the gradients of q and of k alike came with the cotangent of the loss.
#[test]
fn a_factor_of_every_gradient_that_is_no_count_is_upstream_of_them() {
    for seed in SEEDS {
        for factor in [1.37, 0.613] {
            let job = job(seed, |job| job.fault = Fault::Scaled(What::Gradients, factor));
            let report = declares(&job, &job);
            let shown = &named(&report, "upstream-factor").parameters["factor"];
            let shown: f32 = shown.parse().unwrap();
            assert!((shown / factor - 1.0).abs() < 2e-3, "{shown} for {factor}");
        }
    }
}

#[test]
fn means_of_microbatches_or_ranks_in_place_of_the_mean_of_all_tokens() {
    for seed in SEEDS {
        let global = job(seed, |_| {});
        for scope in [Scope::Microbatch, Scope::Rank] {
            let local = with(&global, |o| o.scope = scope);
            named(&declares(&global, &local), "microbatch-mean-of-means");
            named(&backward_of(&global, &local), "microbatch-mean-of-means");
            // The other way round: the mean of all was taken, and its parts declared.
            named(&declares(&local, &global), "microbatch-mean-of-means");
        }
        let averaged = with(&global, |o| {
            (o.scope, o.microbatch_reduction) = (Scope::Microbatch, MicrobatchReduction::Mean);
            o.extras.accumulated = true;
        });
        let global = with(&global, |o| o.extras.accumulated = true);
        let report = declares(&global, &averaged);
        let cause = named(&report, "microbatch-mean-of-means");
        assert!(cause.stages.contains(&"accumulate"), "{}", text::render(&report));
    }
}

#[test]
fn another_count_of_tokens_in_the_denominator() {
    for seed in SEEDS {
        let valid = job(seed, |_| {});
        let all = with(&valid, |o| o.denominator = Denominator::All);
        let weights = with(&valid, |o| (o.denominator, o.cotangent) = (Denominator::Weights, 1.75));
        for (declared, real) in [(&valid, &all), (&all, &valid), (&valid, &weights)] {
            named(&declares(declared, real), "valid-count");
            named(&backward_of(declared, real), "valid-count");
        }
        let summed = with(&valid, |o| o.reduction = LossReduction::Sum);
        named(&declares(&valid, &summed), "valid-count");
        named(&declares(&summed, &valid), "valid-count");
        let number = with(&valid, |o| o.denominator = Denominator::Number(777.0));
        named(&declares(&number, &valid), "valid-count");
        // A number that nothing counts to.
        let report = declares(&valid, &number);
        let other = report.other_declaration.as_ref().map(|of| (of.option, &of.instead[..]));
        assert_eq!(other, Some(("denominator", "777.0")), "{}", text::render(&report));
        assert_eq!(report.verdict, Verdict::Misdeclared, "{}", text::render(&report));
    }
}

#[test]
fn a_count_taken_before_the_labels_were_shifted() {
    for seed in SEEDS {
        let shifted = job(seed, |job| {
            job.options.layout.sequence = Some(7);
            (job.options.labels_shifted, job.options.ignore_label) = (false, None);
            job.options.data.ignored = 0.0;
        });
        // Every label counts, also the first of a sequence, that no position predicts.
        let all = with(&shifted, |o| o.denominator = Denominator::All);
        let report = declares(&shifted, &all);
        named(&report, "valid-count");
    }
}

#[test]
fn cotangents_and_weights_that_the_backward_leaves_out() {
    for seed in SEEDS {
        let right = job(seed, |_| {});
        let no_cotangent = with(&right, |o| o.cotangent = 1.0);
        let cause = backward_of(&right, &no_cotangent);
        assert_eq!(named(&cause, "cotangent-dropped").parameters["left out"], "the cotangent");
        let no_weights =
            with(&right, |o| o.weights = crate::support::job::options::Weights::Absent);
        let report = backward_of(&right, &no_weights);
        assert_eq!(named(&report, "cotangent-dropped").parameters["left out"], "the weights");
        let neither = with(&no_weights, |o| o.cotangent = 1.0);
        named(&backward_of(&right, &neither), "cotangent-dropped");
        for name in ["dq", "dk"] {
            let shards = grafted(&right, &no_weights, |of| of.starts_with(name) && name == "dq");
            let other = grafted(&right, &no_weights, |of| of.starts_with("dk"));
            let shards = if name == "dq" { shards } else { other };
            let report = report_of(&right, &shards);
            let cause = named(&report, "cotangent-dropped");
            assert!(cause.stages.iter().all(|stage| stage.starts_with(name)));
        }
        let each = with(&right, |o| o.reduction = LossReduction::None);
        let summed = with(&each, |o| (o.reduction, o.cotangent) = (LossReduction::Sum, 1.0));
        let shards = grafted(&each, &summed, is_gradient);
        named(&report_of(&each, &shards), "cotangent-dropped");
    }
}

fn report_of(declared: &Job, shards: &[Shard]) -> Report {
    report(declared, shards)
}

#[test]
fn sums_that_do_not_hold_every_microbatch_once() {
    for seed in SEEDS {
        for window in [Window::Last, Window::NotFirst, Window::Doubled] {
            for accumulated in [false, true] {
                let job = job(seed, |job| {
                    (job.microbatches, job.fault) = (3, Fault::Window(window));
                    job.options.extras.accumulated = accumulated;
                    if seed == 12 {
                        job.options.microbatch_reduction = MicrobatchReduction::Mean;
                    }
                });
                named(&declares(&job, &job), "accumulation-window");
            }
        }
        let job = job(seed, |job| {
            (job.microbatches, job.fault) = (3, Fault::Window(Window::First(1.37)));
        });
        let report = declares(&job, &job);
        let weights =
            &named(&report, "accumulation-window").parameters["weights of the microbatches"];
        assert!(weights.starts_with("1.37, 1"), "{weights}");
    }
}

#[test]
fn a_z_loss_that_is_not_the_declared_one() {
    for seed in SEEDS {
        let none = job(seed, |_| {});
        let some = with(&none, |o| o.z_loss = 1e-3);
        let apart = with(&some, |o| o.z_loss_in_loss = false);
        let more = with(&none, |o| o.z_loss = 3.7e-3);
        named(&declares(&some, &none), "zloss-mismatch");
        let report = declares(&none, &some);
        assert_eq!(named(&report, "zloss-mismatch").parameters["λ of the gradient"], "0.001");
        named(&declares(&some, &more), "zloss-mismatch");
        named(&backward_of(&some, &none), "zloss-mismatch");
        named(&backward_of(&none, &some), "zloss-mismatch");
        // In the loss alone, and in the gradient alone.
        named(&declares(&some, &apart), "zloss-mismatch");
        named(&declares(&apart, &some), "zloss-mismatch");
        named(&declares(&none, &apart), "zloss-mismatch");
    }
}

#[test]
fn a_z_loss_that_only_dk_shows_and_no_lse() {
    for seed in SEEDS {
        let none = job(seed, |_| {});
        let some = with(&none, |o| o.z_loss = 1e-3);
        let shards = without(&some.shards(), &["lse", "label_logits", "dq", "loss"]);
        named(&report(&none, &shards), "zloss-mismatch");
    }
}

#[test]
fn smoothing_that_is_not_the_declared_one() {
    for seed in SEEDS {
        let none = job(seed, |_| {});
        let some = with(&none, |o| o.label_smoothing = 0.1);
        let more = with(&none, |o| o.label_smoothing = 0.23);
        let megatron = with(&some, |o| o.smoothing_formula = SmoothingFormula::Megatron);
        for (declared, real) in [(&none, &some), (&some, &none), (&some, &more), (&none, &more)] {
            named(&declares(declared, real), "smoothing-mismatch");
            named(&backward_of(declared, real), "smoothing-mismatch");
        }
        named(&report(&some, &grafted(&some, &none, is_forward)), "smoothing-mismatch");
        named(&declares(&some, &megatron), "smoothing-mismatch");
        named(&declares(&megatron, &some), "smoothing-mismatch");
    }
}

#[test]
fn a_softcap_that_is_not_the_declared_one() {
    for seed in SEEDS {
        let none = job(seed, |_| {});
        let some = with(&none, |o| o.softcap = Some(6.0));
        let other = with(&none, |o| o.softcap = Some(9.0));
        for (declared, real) in [(&some, &none), (&none, &some), (&some, &other)] {
            named(&declares(declared, real), "softcap-mismatch");
        }
        named(&backward_of(&some, &none), "softcap-mismatch");
        named(&report(&some, &grafted(&some, &none, is_forward)), "softcap-mismatch");
        // Nothing of the forward was recorded but the loss.
        let hidden = |of: Vec<Shard>| without(&of, &["lse", "label_logits"]);
        named(&report(&some, &hidden(none.shards())), "softcap-mismatch");
        named(&report(&some, &hidden(other.shards())), "softcap-mismatch");
        let grafted = grafted(&some, &none, is_gradient);
        named(&report(&some, &hidden(grafted)), "softcap-mismatch");
    }
}

#[test]
fn a_temperature_that_is_not_the_declared_one() {
    for seed in SEEDS {
        let at = |temperature: f64| {
            job(seed, |job| {
                job.options.temperature = temperature;
                // The same q, whatever the temperature.
                job.options.data.spread = 2.0 / temperature;
                job.options.data.confident = Some((7, 23.0 / temperature));
            })
        };
        let (one, four, other) = (at(1.0), at(4.0), at(2.5));
        for (declared, real) in [(&four, &one), (&one, &four), (&four, &other), (&one, &other)] {
            named(&declares(declared, real), "temperature-mismatch");
            named(
                &report(declared, &without(&real.shards(), &["lse", "label_logits"])),
                "temperature-mismatch",
            );
        }
        named(&backward_of(&four, &one), "temperature-mismatch");
        let inverse = at(0.25);
        named(&declares(&four, &inverse), "temperature-mismatch");
        // Only the factor of the backward.
        for by in [4.0, 0.25] {
            let job = job(seed, |job| {
                (job.options.temperature, job.fault) = (4.0, Fault::Scaled(What::Gradients, by));
            });
            named(&declares(&job, &job), "temperature-mismatch");
        }
    }
}

#[test]
fn a_bias_that_is_added_twice_or_not_at_all() {
    for seed in SEEDS {
        let right = job(seed, |job| job.options.bias = true);
        for times in [0.0, 2.0] {
            let other = Job { fault: Fault::Biased(times), ..right.clone() };
            let all = |name: &str| is_forward(name) || is_gradient(name);
            let shards = grafted(&right, &other, all);
            named(&report(&right, &shards), "bias-twice");
            named(&report(&right, &without(&shards, &["lse", "label_logits"])), "bias-twice");
            named(&backward_of(&right, &other), "bias-twice");
        }
        for by in [2.0, 0.0] {
            let job = job(seed, |job| {
                (job.microbatches, job.options.bias) = (1, true);
                job.fault = Fault::Scaled(What::Dbias, by);
            });
            assert_eq!(named(&declares(&job, &job), "bias-twice").stages, ["dbias"]);
        }
        let job = job(seed, |job| {
            (job.fused, job.options.bias, job.fault) = (true, true, Fault::DbiasUnlabelled);
        });
        named(&declares(&job, &job), "bias-twice");
    }
}

#[test]
fn a_rank_without_labels_that_divides_by_their_count() {
    for seed in SEEDS {
        let job = job(seed, |job| {
            job.options.data.silent_rank = Some(1);
            (job.options.scope, job.fault) = (Scope::Rank, Fault::Unguarded);
        });
        named(&declares(&job, &job), "all-ignored");
        // A NaN elsewhere is not of a mean over nothing.
        let job = Job { fault: Fault::NanInDq, ..job };
        let report = declares(&job, &job);
        assert!(!ids(&report).contains(&"all-ignored"), "{}", text::render(&report));
    }
}

#[test]
fn gradients_recorded_after_they_were_clipped() {
    for seed in SEEDS {
        let raw = job(seed, |_| {});
        let step = declares(&raw, &raw);
        let norm = step.grad_norm.captured.unwrap();
        let max = backtape_replayer::diagnose::detectors::fitted_numbers::rounded(norm * 0.4, 1);
        let clipped =
            Job { fault: Fault::Scaled(What::Reduced, (max / norm) as f32), ..raw.clone() };
        // The reported norm is that after the clip, or that before it.
        named(&declares(&raw, &clipped), "clipping");
        let before = grafted(&clipped, &raw, |name| name == "grad_norm");
        let report = report(&raw, &before);
        assert_eq!(named(&report, "clipping").parameters["max_norm"], max.to_string());
    }
}

#[test]
fn two_faults_in_one_step_are_both_named() {
    for seed in SEEDS {
        let right = job(seed, |job| job.options.z_loss = 1e-2);
        let faulty =
            Job { fault: Fault::Scaled(What::Gradients, 2.0), ..with(&right, |o| o.z_loss = 0.0) };
        let report = backward_of(&right, &faulty);
        let mut found = ids(&report);
        found.sort_unstable();
        assert_eq!(
            found,
            ["microbatch-count-scale", "zloss-mismatch"],
            "{}",
            text::render(&report)
        );
    }
}

/// Goal: a fault that nothing in the catalogue describes does not hide one beside it.
#[test]
fn a_known_fault_is_named_beside_a_factor_that_no_count_explains() {
    for seed in SEEDS {
        let right = job(seed, |job| job.options.z_loss = 1e-2);
        let fault = Fault::Scaled(What::Reduced, 0.613);
        let faulty = Job { fault, ..with(&right, |o| o.z_loss = 0.0) };
        let report = backward_of(&right, &faulty);
        assert_eq!(ids(&report), ["zloss-mismatch", "unknown"], "{}", text::render(&report));
        let words = &report.causes[1].evidence;
        assert!(words.contains("one factor, 0.613"), "{words}");
    }
}

/// A kernel that returns the sum of the losses and leaves its cotangent out of dq alone: what the
/// mean divides by is in that cotangent, so it looks like another count, but the loss and dk are
/// divided as declared. (MaxText's vocabulary tiling before d60bb24.)
#[test]
fn a_cotangent_left_out_of_one_gradient_is_not_another_count() {
    for (side, gone) in [("dq", "dq"), ("dk", "dk")] {
        let right = job(11, |job| job.options.cotangent = 1.0);
        let sum = with(&right, |options| options.reduction = LossReduction::Sum);
        let shards = grafted(&right, &sum, |name| name.starts_with(gone) && name != "grad_norm");
        let found = report(&right, &shards);
        let cause = named(&found, "cotangent-dropped");
        assert_eq!(cause.parameters["of"], side);
        assert_eq!(cause.parameters["left out"], "the division of the mean");
    }
}
