//! The step of benches/algebra.py in f64, as a loop that was written for it: what any judgement of
//! it has to compute at least.

use backtape_replayer::dump::StepDump;
use rayon::prelude::*;

/// Elements that one task takes.
const PIECE: usize = 1 << 16;
/// Hyper-parameters of benches/algebra.py.
const STEP: i32 = 7;
const LR: f64 = 1e-3;
const BETAS: [f64; 2] = [0.9, 0.999];
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.01;

/// What the loop reads: two addends, their sum before and after communication, and parameter and
/// moments before and after the step.
const NAMES: [&str; 8] = [
    "step.accumulated:weight",
    "step.reduced:weight",
    "step.before:weight",
    "step.after:weight",
    "step.state_before.exp_avg:weight",
    "step.state_after.exp_avg:weight",
    "step.state_before.exp_avg_sq:weight",
    "step.state_after.exp_avg_sq:weight",
];

/// The sum of the squared differences between what was captured and what is computed.
pub(super) fn squared(dump: &StepDump) -> f64 {
    let of = |name: &str, microbatch: Option<u32>| -> Vec<&[u8]> {
        let is_it = |key: &backtape::shard::TensorKey| {
            key.tensor.as_str() == name && key.microbatch.map(|of| of.0) == microbatch
        };
        let found = dump.tensors().iter().filter(|(key, _)| is_it(key));
        let mut shards: Vec<_> = found.flat_map(|(_, info)| &info.shards).collect();
        shards.sort_by_key(|shard| dump.record(shard).place.0[0].0);
        shards.into_iter().map(|shard| dump.intact_bytes(shard).unwrap()).collect()
    };
    let grads = [0, 1].map(|microbatch| of("step.grad:weight", Some(microbatch)));
    let all: Vec<Vec<&[u8]>> = grads.into_iter().chain(NAMES.map(|name| of(name, None))).collect();
    (0..all[0].len())
        .flat_map(|at| (0..all[0][at].len()).step_by(4 * PIECE).map(move |from| (at, from)))
        .par_bridge()
        .map(|(at, from)| {
            let of = |which: usize| {
                let bytes = all[which][at];
                let bytes = &bytes[from..(from + 4 * PIECE).min(bytes.len())];
                // SAFETY: any four bytes are a number of f32.
                let (before, values, after) = unsafe { bytes.align_to::<f32>() };
                assert!(before.is_empty() && after.is_empty(), "shards are aligned");
                values
            };
            piece(std::array::from_fn(of))
        })
        .sum()
}

fn piece(of: [&[f32]; 10]) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn wide(of: [&[f32]; 10]) -> f64 {
            body(of)
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the two features it is compiled for were just detected.
            return unsafe { wide(of) };
        }
    }
    body(of)
}

/// Sums in lanes, as a compiler vectorises no other sums of floats.
#[inline(always)]
fn body(of: [&[f32]; 10]) -> f64 {
    const LANES: usize = 8;
    let [first, second, accumulated, reduced, before, after, m, m_after, v, v_after] = of;
    let corrections = BETAS.map(|beta| 1.0 - beta.powi(STEP));
    let mut sums = [0.0; LANES];
    for from in (0..first.len() / LANES * LANES).step_by(LANES) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let x = |of: &[f32]| f64::from(of[from + lane]);
            let g = x(first) + x(second);
            let m_next = BETAS[0] * x(m) + (1.0 - BETAS[0]) * x(reduced);
            let v_next = BETAS[1] * x(v) + (1.0 - BETAS[1]) * x(reduced) * x(reduced);
            let (m_now, v_now) = (x(m_after), x(v_after));
            let root = (v_now / corrections[1]).sqrt() + EPS;
            let next = x(before) * (1.0 - LR * DECAY) - LR * (m_now / corrections[0]) / root;
            let errors = [
                g - x(accumulated),
                x(accumulated) - x(reduced),
                m_next - m_now,
                v_next - v_now,
                next - x(after),
            ];
            *sum += errors.iter().map(|error| error * error).sum::<f64>();
        }
    }
    sums.iter().sum()
}
