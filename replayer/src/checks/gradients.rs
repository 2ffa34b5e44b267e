//! Statistics of every recorded gradient, layer by layer, and how many steps were clipped.
//!
//! Norms are summed in f64, so they are those of the recorded bits, whatever precision the job
//! summed its own norm in. Replicas of a box count once; the addends of different ranks have
//! statistics of their own.

use backtape::role::Role;
use backtape::shard::{TensorKey, When};
use rayon::prelude::*;
use serde::Serialize;

use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::{Kind, bits, format, kind, value};
use crate::dump::TensorInfo;
use crate::number::short;

/// Statistics of one gradient. Norm and maximum are over its finite elements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradientStatistics {
    /// Which step.
    pub step: u64,
    /// Which tensor, by name.
    pub tensor: String,
    /// Which microbatch.
    pub microbatch: Option<u32>,
    /// When it was captured.
    pub when: Option<When>,
    /// Which rank's addend it is, where it is one.
    pub rank: Option<u32>,
    /// Elements that could be read.
    pub elements: u64,
    /// Euclidean norm.
    pub norm: f64,
    /// Largest magnitude.
    pub max: f64,
    /// Share of exact zeros.
    pub zero_share: f64,
    /// Share of elements that are not finite.
    pub nonfinite_share: f64,
}

#[derive(Default)]
struct Sums {
    elements: u64,
    squares: f64,
    max: f64,
    zeros: u64,
    nonfinite: u64,
}

const CHUNK: usize = 1 << 16;

/// True for a gradient of the head, and for a tensor whose name says that it is a layer's gradient.
fn is_gradient(key: &TensorKey, info: &TensorInfo) -> bool {
    let name = key.tensor.as_str();
    let part = |word: &str| name.split(['/', '.']).any(|part| part == word);
    let named = part("grads") || part("grad") || part("layers") || name.ends_with("_grad");
    let of_head = matches!(
        info.role,
        Some(
            Role::Dlogits
                | Role::Dq
                | Role::Dk
                | Role::Dbias
                | Role::DqLse
                | Role::DqLabel
                | Role::DkLse
                | Role::DkLabel
        )
    );
    format(info.dtype).is_some() && (of_head || (info.role.is_none() && named))
}

/// Statistics of every gradient of these steps, in order.
pub fn statistics(subjects: &[Subject<'_>]) -> Vec<GradientStatistics> {
    let mut all_statistics = Vec::new();
    for subject in subjects {
        let all = subject.dump.tensors().iter().filter(|(key, info)| is_gradient(key, info));
        for (key, info) in all {
            let (recorded, _) = pieces(subject.dump, info);
            let ranks = recorded.iter().flat_map(|piece| piece.ranks.first());
            let mut ranks: Vec<_> = ranks.copied().collect();
            ranks.sort_unstable();
            ranks.dedup();
            if info.partial.is_none() {
                all_statistics.extend(statistics_of(
                    subject,
                    key,
                    None,
                    &recorded.iter().collect::<Vec<_>>(),
                ));
                continue;
            }
            for rank in ranks {
                let of_rank: Vec<&Piece<'_>> =
                    recorded.iter().filter(|piece| piece.ranks.first() == Some(&rank)).collect();
                all_statistics.extend(statistics_of(subject, key, Some(rank.0), &of_rank));
            }
        }
    }
    all_statistics
}

fn statistics_of(
    subject: &Subject<'_>,
    key: &TensorKey,
    rank: Option<u32>,
    recorded: &[&Piece<'_>],
) -> Option<GradientStatistics> {
    let mut places = std::collections::BTreeSet::new();
    let sums = recorded.iter().filter(|piece| places.insert(piece.place()));
    let sums = sums.map(|piece| sums_of(piece)).fold(Sums::default(), add);
    let share = |n: u64| n as f64 / sums.elements as f64;
    (sums.elements > 0).then(|| GradientStatistics {
        step: subject.dump.step.0,
        tensor: key.tensor.to_string(),
        microbatch: key.microbatch.map(|mb| mb.0),
        when: key.when,
        rank,
        elements: sums.elements,
        norm: sums.squares.sqrt(),
        max: sums.max,
        zero_share: share(sums.zeros),
        nonfinite_share: share(sums.nonfinite),
    })
}

fn add(a: Sums, b: Sums) -> Sums {
    Sums {
        elements: a.elements + b.elements,
        squares: a.squares + b.squares,
        max: a.max.max(b.max),
        zeros: a.zeros + b.zeros,
        nonfinite: a.nonfinite + b.nonfinite,
    }
}

fn sums_of(piece: &Piece<'_>) -> Sums {
    let (dtype, width) = (piece.record.dtype, piece.record.dtype.width());
    let chunk = |bytes: &[u8]| {
        let mut sums = Sums::default();
        for i in 0..bytes.len() / width {
            let bits = bits(bytes, width, i);
            sums.elements += 1;
            match kind(dtype, bits) {
                Kind::Zero => sums.zeros += 1,
                Kind::Finite => {
                    let size = value(dtype, bits).abs();
                    sums.squares += size * size;
                    sums.max = sums.max.max(size);
                }
                _ => sums.nonfinite += 1,
            }
        }
        sums
    };
    // The parts are added in order, so that the sum does not depend on the thread count.
    let parts: Vec<Sums> = piece.bytes.par_chunks(CHUNK * width).map(chunk).collect();
    parts.into_iter().fold(Sums::default(), add)
}

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    let (mut steps, mut clipped, mut pairs) = (0u64, Vec::new(), 0u64);
    for subject in subjects {
        let norm_at = |when| {
            let norm = subject.of_role(Role::GradNorm).find(|(key, _)| key.when == Some(when));
            norm.and_then(|(_, info)| number(subject, info))
        };
        let Some((before, after)) = norm_at(When::BeforeOp).zip(norm_at(When::AfterOp)) else {
            continue;
        };
        results.looked();
        (steps, pairs) = (steps + 1, pairs + 1);
        // Both norms are rounded to f32, each by half a spacing at most.
        if after < before * (1.0 - (-23f64).exp2()) {
            clipped.push((subject.dump.step.0, before, after));
        }
    }
    if pairs == 0 {
        let why = "grad_norm was not recorded with when=\"before_op\" and when=\"after_op\"";
        return results.skip("the share of clipped steps", why);
    }
    if let Some((step, before, after)) = clipped.first() {
        let evidence = format!(
            "{} of {steps} dumped steps were clipped, the first step {step}: grad_norm {} before, {} after",
            clipped.len(),
            short(*before),
            short(*after),
        );
        let place =
            Place { step: Some(*step), tensor: Some("grad_norm".into()), ..Place::default() };
        let advice =
            "Compare gradients before clipping: one clipped by its norm is scaled as a whole";
        results.add(Severity::Note, None, place, evidence, advice);
    }
}

/// The value of a tensor that holds a single number.
pub(super) fn number(subject: &Subject<'_>, info: &TensorInfo) -> Option<f64> {
    let (recorded, _) = pieces(subject.dump, info);
    let piece = recorded.first().filter(|piece| piece.bytes.len() == info.dtype.width())?;
    Some(value(info.dtype, bits(piece.bytes, info.dtype.width(), 0)))
}
