//! Causes of the arithmetic's family, planted in jobs that share no code with the replayer,
//! and named from their dumps: what was rounded, or summed in less, than was declared.

use backtape_replayer::diagnose::Standing;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::report::schema::{Report, Verdict};

use crate::support::dump;
use crate::support::job::number::Float;
use crate::support::job::{Fault, Job, Narrow};

const SEEDS: [u64; 3] = [21, 22, 23];

/// A job whose author declares what he believes of its precision.
fn job(seed: u64, fused: bool, change: impl Fn(&mut Job)) -> Job {
    let mut job = Job {
        seed,
        ranks: 2,
        microbatches: 2,
        tokens: 150 + 7 * seed as usize,
        vocab: 283,
        valid: 277,
        fused,
        ..Job::default()
    };
    job.options.declared = vec!["logits", "p", "accumulate"];
    job.options.data.confident = Some((3, 9.0));
    change(&mut job);
    job
}

fn report(of: &Job) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run-a");
    dump::write(&path, of.ranks as u32, &of.head(), &of.shards());
    let all: &[backtape::role::Role] = &[];
    replay_report(&path, &Selection::default(), all, None).unwrap()
}

/// The ids of what is named or tied.
fn ids(report: &Report) -> Vec<&str> {
    report.causes.iter().map(|cause| cause.id.as_str()).collect()
}

fn parameter<'r>(report: &'r Report, name: &str) -> &'r str {
    &report.causes[0].parameters[name]
}

/// Goal: the planted cause is named, alone, for every draw; its clean twin agrees.
fn is_named(id: &str, made: impl Fn(u64) -> Job) -> Vec<Report> {
    let one = |seed: u64| {
        let faulty = made(seed);
        let clean = report(&Job { fault: Fault::None, ..faulty.clone() });
        assert_eq!(clean.verdict, Verdict::Agreed, "seed {seed}, without the fault: {clean:?}");
        assert!(clean.causes.is_empty());
        let found = report(&faulty);
        assert_eq!(ids(&found), [id], "seed {seed}: {:#?}", found.causes);
        assert_eq!(found.causes[0].standing, Standing::Named, "{:#?}", found.causes);
        assert!(found.causes[0].explained > 0.9, "seed {seed}: {:#?}", found.causes);
        found
    };
    SEEDS.map(one).into()
}

fn narrow(what: Narrow, to: Float) -> Fault {
    Fault::Narrow(what, to)
}

#[test]
fn a_sum_over_chunks_in_few_bits_is_named_with_a_chunk_that_nobody_declared() {
    let made = |seed| {
        job(seed, false, |job| {
            job.options.chunk = Some(11 + seed as usize);
            job.options.layout.dk = Float::Bf16;
            job.fault = narrow(Narrow::Chunks, Float::Bf16);
        })
    };
    for (found, seed) in is_named("chunk-accumulator-low-precision", made).iter().zip(SEEDS) {
        assert_eq!(parameter(found, "chunk"), format!("{} tokens", 11 + seed));
        assert_eq!(parameter(found, "accumulator"), "bf16");
    }
}

#[test]
fn tiles_added_in_few_bits_are_named_where_dq_shows_them() {
    let made = |seed| {
        job(seed, true, |job| {
            job.options.tile = 16;
            job.options.rounding.parts = Float::F32;
            job.options.layout.dq = Float::F32;
            job.options.declared = vec!["logits", "p", "dlogits", "label_grad", "parts"];
            job.fault = narrow(Narrow::Tiles, Float::Bf16);
        })
    };
    for found in is_named("tile-add-low-precision", made) {
        assert_eq!(parameter(&found, "vocabulary tile"), "16");
    }
}

#[test]
fn a_sum_over_microbatches_in_few_bits_is_named_even_where_it_is_stored_in_them() {
    let made = |seed| {
        job(seed, seed % 2 == 0, |job| {
            job.microbatches = 4;
            // Stored in few bits, each addend is rounded too: its own sum must be there.
            job.options.layout.dk = if seed % 2 == 1 { Float::Bf16 } else { Float::F32 };
            job.options.extras.accumulated = seed % 2 == 1;
            job.fault = narrow(Narrow::Microbatches, Float::Bf16);
        })
    };
    for found in is_named("microbatch-accumulator-low-precision", made) {
        assert_eq!(parameter(&found, "accumulator"), "bf16");
    }
}

#[test]
fn a_label_probability_that_is_rounded_early_is_named() {
    let made = |seed| job(seed, false, |job| job.fault = narrow(Narrow::EarlyP, Float::Bf16));
    is_named("label-prob-rounded-early", made);
}

#[test]
fn an_lse_that_is_kept_in_few_bits_is_named() {
    let made =
        |seed| job(seed, seed % 2 == 0, |job| job.fault = narrow(Narrow::KeptLse, Float::Bf16));
    for found in is_named("lse-logits-mismatch", made) {
        assert_eq!(parameter(&found, "what"), "lse between forward and backward");
    }
}

#[test]
fn logits_that_only_one_pass_rounds_are_named() {
    let backward =
        |seed| job(seed, false, |job| job.fault = narrow(Narrow::BackwardLogits, Float::Bf16));
    for found in is_named("lse-logits-mismatch", backward) {
        assert_eq!(parameter(&found, "what"), "logits of the backward");
    }
    let forward =
        |seed| job(seed, false, |job| job.fault = narrow(Narrow::ForwardLogits, Float::Bf16));
    for found in is_named("lse-logits-mismatch", forward) {
        assert_eq!(parameter(&found, "what"), "logits of the forward");
    }
}

#[test]
fn a_loss_that_cancels_is_named_while_gradients_are_right() {
    let made = |seed| job(seed, seed % 2 == 0, |job| job.fault = narrow(Narrow::Loss, Float::Bf16));
    is_named("lse-cancellation", made);
}

#[test]
fn operands_in_few_bits_are_named_in_all_products_or_in_the_backwards() {
    let made = |what| {
        move |seed| {
            job(seed, false, |job| {
                job.options.layout.input = Float::F32;
                job.options.layout.dq = Float::F32;
                job.options.rounding.dlogits = Float::F32;
                job.options.rounding.label_grad = Float::F32;
                job.fault = narrow(what, Float::Bf16);
            })
        }
    };
    for found in is_named("gemm-low-precision", made(Narrow::Gemm)) {
        assert_eq!(parameter(&found, "products"), "all");
    }
    for found in is_named("gemm-low-precision", made(Narrow::GemmBackward)) {
        assert_eq!(parameter(&found, "products"), "of dlogits");
    }
}

#[test]
fn a_gradient_filter_is_named_with_its_threshold_and_tile() {
    let made = |seed| {
        job(seed, false, |job| {
            job.options.data.spread = 4.0;
            job.options.data.confident = Some((1, 14.0));
            job.fault = Fault::Filter(2f32.powi(-8), [16, 16]);
        })
    };
    for found in is_named("gradient-filter", made) {
        assert_eq!(parameter(&found, "tile"), "16 tokens x 16 classes");
    }
}

#[test]
fn entries_below_the_range_of_f16_are_named() {
    let made = |seed| {
        job(seed, false, |job| {
            job.options.layout.input = Float::F16;
            job.options.rounding.dlogits = Float::F32;
            job.options.layout.dq = Float::F32;
            job.options.declared = vec!["logits", "dlogits"];
            job.options.data.spread = 2.0;
            job.options.data.confident = None;
            job.fault = narrow(Narrow::Dlogits, Float::F16);
        })
    };
    is_named("underflow", made);
}

/// Goal: what looks like a cause and is another does not get its name.
/// Method: each fault's report holds none of the other ids.
#[test]
fn a_sum_over_chunks_in_few_bits_is_no_early_probability_nor_a_mismatch() {
    let chunks = job(31, false, |job| {
        job.options.chunk = Some(16);
        job.options.layout.dk = Float::Bf16;
        job.fault = narrow(Narrow::Chunks, Float::Bf16);
    });
    let early = job(31, false, |job| job.fault = narrow(Narrow::EarlyP, Float::Bf16));
    let found = [report(&chunks), report(&early)];
    assert_ne!(ids(&found[0]), ids(&found[1]));
}

/// Goal: a declared low-precision sum is no cause.
#[test]
fn what_is_declared_is_no_cause() {
    let declared = job(33, false, |job| {
        job.microbatches = 4;
        job.options.rounding.reduce = Float::Bf16;
        job.options.declared = vec!["reduce"];
    });
    let found = report(&declared);
    assert_eq!(found.verdict, Verdict::Agreed, "{found:?}");
}
