//! Goal: healthy runs raise no flag, whatever their shape, and each fault raises its flag. Method:
//! randomly simulated runs, and the same runs with one change.

use super::simulation::Run;
use super::{Declared, Finding, Judged, Severity, Trajectory, judge};

/// Healthy runs of every test run; `BACKTAPE_SEED` and `BACKTAPE_RUNS` choose others.
const RUNS: u64 = 400;

fn judged(trajectory: &Trajectory) -> Judged {
    judge(trajectory, &Declared::default())
}

fn flags(judged: &Judged) -> Vec<&Finding> {
    judged.findings.iter().filter(|finding| finding.severity == Severity::Flag).collect()
}

/// The one flag that is raised.
fn only<'a>(judged: &'a Judged, flag: &str) -> &'a Finding {
    let raised = flags(judged);
    assert!(raised.len() == 1 && raised[0].flag == flag, "{flag}: {raised:#?}");
    raised[0]
}

/// A run with the data that every flag needs.
fn plain() -> Run {
    Run {
        seed: 7,
        steps: 600,
        stride: 1,
        ranks: 4,
        vocabulary: 50_257.0,
        tokens: 5e5,
        start: 10.9,
        end: 1.8,
        noise: 0.01,
        wander: 0.0,
        local_loss: true,
        clip: 1.0,
        warmup: 50,
        spikes: 0,
        bf16: false,
        scaler: false,
        records_tokens: true,
    }
}

fn set(values: &mut [(String, f64)], name: &str, change: impl Fn(f64) -> f64) {
    for (_, value) in values.iter_mut().filter(|(n, _)| n == name) {
        *value = change(*value);
    }
}

#[test]
fn no_flag_is_raised_for_healthy_runs_drawn_at_random() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let first = number("BACKTAPE_SEED").unwrap_or(0);
    for seed in first..first + number("BACKTAPE_RUNS").unwrap_or(RUNS) {
        let run = Run::random(seed);
        let judged = judged(&run.healthy());
        assert!(flags(&judged).is_empty(), "{:#?}\n{run:?}", flags(&judged));
    }
}

#[test]
fn a_healthy_run_is_looked_at_by_every_flag() {
    let judged = judged(&plain().healthy());
    let idle: Vec<_> = judged.flags.iter().filter(|flag| flag.looked_at == 0).collect();
    assert!(idle.is_empty() && flags(&judged).is_empty(), "{judged:#?}");
}

#[test]
fn a_loss_that_is_no_number_is_named_with_its_rank_and_first_step() {
    for value in [f64::NAN, f64::INFINITY] {
        let run = plain();
        let judged = judged(&run.trajectory(|i, rank, values| {
            if i >= 300 && rank == 2 {
                set(values, "loss", |_| value);
            }
        }));
        let finding = only(&judged, "nonfinite");
        assert_eq!((finding.step, finding.ranks.as_slice()), (Some(300), &[2][..]));
        assert!(finding.evidence.contains("300 of 600"), "{}", finding.evidence);
    }
}

#[test]
fn a_gradient_that_stays_nan_is_flagged_and_one_that_a_scaler_skips_is_a_note() {
    let nan_from = |last: u64| {
        judged(&plain().trajectory(|i, _, values| {
            if (300..last).contains(&i) {
                set(values, "grad_norm", |_| f64::NAN);
            }
        }))
    };
    only(&nan_from(600), "nonfinite");
    only(&nan_from(400), "nonfinite");
    let skipped = nan_from(303);
    assert!(flags(&skipped).is_empty());
    assert!(skipped.findings.iter().any(|found| found.flag == "nonfinite"), "{skipped:#?}");
}

#[test]
fn ranks_whose_norm_or_rate_differs_are_named_with_the_first_step() {
    for name in ["grad_norm", "learning_rate"] {
        let judged = judged(&plain().trajectory(|i, rank, values| {
            if i >= 200 && rank == 3 {
                set(values, name, |value| value * 1.00002);
            }
        }));
        let finding = only(&judged, "ranks");
        assert_eq!((finding.step, finding.ranks.as_slice()), (Some(200), &[3][..]));
        assert!(finding.evidence.contains("400 of 600"), "{}", finding.evidence);
    }
}

#[test]
fn a_loss_that_was_shared_at_first_is_flagged_once_a_rank_leaves() {
    let run = Run { local_loss: false, ..plain() };
    let judged = judged(&run.trajectory(|i, rank, values| {
        if i >= 500 && rank == 0 {
            set(values, "loss", |value| value * 1.01);
        }
    }));
    assert_eq!(only(&judged, "ranks").step, Some(500));
}

#[test]
fn ranks_may_differ_in_rounding_and_in_what_is_declared_local() {
    let differing = |by: f64| {
        plain().trajectory(|_, rank, values| {
            set(values, "grad_norm", |value| value * (1.0 + by * f64::from(rank)))
        })
    };
    assert!(flags(&judged(&differing(2f64.powi(-24)))).is_empty());
    let apart = differing(0.1);
    only(&judged(&apart), "ranks");
    let declared = Declared { local: vec!["grad_norm".into()], ..Declared::default() };
    assert!(flags(&judge(&apart, &declared)).is_empty());
}

#[test]
fn a_copy_task_falls_too_fast_with_and_without_recorded_tokens() {
    for records_tokens in [true, false] {
        let run = Run { records_tokens, noise: 0.02, ..plain() };
        let judged = judged(&run.trajectory(|i, _, values| {
            set(values, "loss", |value| value * (-(i as f64) / 25.0).exp());
        }));
        let finding = only(&judged, "falling");
        assert!(finding.step.unwrap() < 150, "{finding:?}");
        assert!(finding.evidence.contains("copies"), "{}", finding.evidence);
    }
}

#[test]
fn batches_that_come_again_in_the_same_order_are_a_period() {
    for period in [8, 50, 113] {
        let mut draw = crate::draw::Draw::new(3);
        let difficulty: Vec<f64> = (0..period).map(|_| 0.05 * draw.normal()).collect();
        let judged = judged(&plain().trajectory(|i, _, values| {
            let own_difficulty = difficulty[i as usize % period];
            set(values, "loss", |value| value * (1.0 + own_difficulty));
        }));
        let finding = only(&judged, "repeated");
        assert!(
            finding.evidence.contains(&format!("every {period} steps")),
            "{}",
            finding.evidence
        );
    }
}

#[test]
fn a_drop_at_every_epoch_is_a_sawtooth_unless_the_learning_rate_moves_with_it() {
    let drops = |steered: bool| {
        let run = Run { noise: 0.002, local_loss: false, ..plain() };
        judged(&run.trajectory(|i, _, values| {
            set(values, "loss", |value| value * 0.8f64.powi((i / 100) as i32));
            if steered {
                set(values, "learning_rate", |value| value * 0.5f64.powi((i / 100) as i32));
            }
        }))
    };
    assert!(only(&drops(false), "repeated").evidence.contains("every 100 steps"));
    assert!(flags(&drops(true)).is_empty());
}

#[test]
fn a_jump_that_stays_is_flagged_and_one_that_comes_back_is_a_note() {
    let jump = |last: u64| {
        judged(&plain().trajectory(|i, _, values| {
            if (400..last).contains(&i) {
                set(values, "loss", |value| value * 1.5);
            }
        }))
    };
    assert_eq!(only(&jump(600), "jump").step, Some(400));
    let back = jump(430);
    assert!(flags(&back).is_empty(), "{:#?}", flags(&back));
    assert!(back.findings.iter().any(|found| found.flag == "jump"));
}

#[test]
fn a_loss_that_swings_in_place_is_flagged_whatever_its_period() {
    for period in [2.0, 12.0, 30.0] {
        let judged = judged(&plain().trajectory(|i, _, values| {
            let swing = (std::f64::consts::TAU * i as f64 / period + 0.3).sin();
            set(values, "loss", |_| 6.0 * (1.0 + 0.1 * swing));
        }));
        let flagged = flags(&judged);
        assert!(flagged.iter().any(|f| f.flag == "oscillation"), "{period}: {judged:#?}");
    }
}

#[test]
fn a_job_that_clips_every_step_is_flagged_and_one_that_clips_some_is_not() {
    let clip = |share: u64| {
        judged(&plain().trajectory(|i, _, values| {
            let large = i % 100 < share;
            set(values, "grad_norm", |value| if large { 3.0 + value } else { value.min(1.0) });
            let norm = values.iter().find(|(n, _)| n == "grad_norm").unwrap().1;
            set(values, "grad_norm_clipped", |_| norm.min(1.0));
            set(values, "exp_avg_sq_max", |value| value * 0.01);
        }))
    };
    assert!(only(&clip(100), "clipping").evidence.contains("300 of 300"));
    assert!(flags(&clip(80)).is_empty(), "{:#?}", flags(&clip(80)));
}

#[test]
fn norms_before_and_after_clipping_that_were_swapped_are_flagged() {
    let judged = judged(&plain().trajectory(|_, _, values| {
        set(values, "grad_norm_clipped", |value| value * 4.0);
    }));
    assert!(only(&judged, "clipping").evidence.contains("swapped"));
}

#[test]
fn a_gradient_norm_that_stands_still_while_the_loss_moves_is_flagged() {
    for jitter in [0.0, 2f64.powi(-22)] {
        let judged = judged(&plain().trajectory(|i, _, values| {
            if i >= 300 {
                let norm = 0.731 * (1.0 + jitter * (i % 3) as f64);
                set(values, "grad_norm", |_| norm);
                set(values, "grad_norm_clipped", |_| norm);
                set(values, "exp_avg_sq_max", |value| value.min(0.1));
            }
        }));
        let finding = only(&judged, "frozen");
        assert_eq!(finding.step, Some(300));
        assert_eq!(finding.evidence.contains("bit for bit"), jitter == 0.0, "{}", finding.evidence);
    }
}

#[test]
fn a_norm_that_is_reported_again_for_each_microbatch_is_no_stillness() {
    let mut held_norm = 0.0;
    let judged = judged(&plain().trajectory(|i, rank, values| {
        let norm = values.iter().find(|(name, _)| name == "grad_norm").unwrap().1;
        if i % 8 == 0 && rank == 0 {
            held_norm = norm;
        }
        set(values, "grad_norm", |_| held_norm);
        set(values, "grad_norm_clipped", |_| held_norm.min(1.0));
        set(values, "exp_avg_sq_max", |value| value * 0.01);
    }));
    assert!(flags(&judged).is_empty(), "{:#?}", flags(&judged));
}

#[test]
fn a_second_moment_beyond_its_gradients_or_that_explodes_is_flagged() {
    let beyond = judged(&plain().trajectory(|i, _, values| {
        if i >= 300 {
            set(values, "exp_avg_sq_max", |_| 1e4);
        }
    }));
    let finding = only(&beyond, "moments");
    assert_eq!((finding.step, finding.ranks.as_slice()), (Some(300), &[0][..]));
    let exploding = judged(&plain().trajectory(|i, _, values| {
        let growth = ((i as f64 - 300.0).max(0.0) / 30.0).exp();
        set(values, "exp_avg_sq_max", |value| value * growth);
        set(values, "grad_norm", |value| value * growth.sqrt());
        set(values, "grad_norm_clipped", |value| value * growth.sqrt());
    }));
    assert!(only(&exploding, "moments").evidence.contains("explodes"), "{exploding:#?}");
}
