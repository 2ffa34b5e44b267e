//! Compares values that activation checkpointing computed a second time with those of the forward
//! pass.
//!
//! The loss comes from the first computation, the gradients from the second: where they differ by
//! more than rounding, the gradient is that of another function. The usual case is a random mask
//! that is drawn again (dropout without the state of its generator). Another fusion may round
//! differently, so a difference of at most [`ROUNDINGS`] steps of the dtype is a note.

use backtape::shard::{TensorKey, When};

use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::{bits, format, value};
use crate::dump::TensorInfo;
use crate::number::plural;

/// Steps of the dtype, at the largest value of the shard, by which two compilations of the same
/// expression may differ: a few roundings of intermediates that one of them kept in more bits.
const ROUNDINGS: f64 = 8.0;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let tensors = subject.dump.tensors();
        let again = tensors.iter().filter(|(key, _)| key.when == Some(When::Recompute));
        for (key, info) in again {
            match first(subject, key) {
                Some((forward_key, forward)) => {
                    tensor(subject, (key, info), (forward_key, forward), results)
                }
                None => results.skip(key.to_string(), "the forward's value was not recorded"),
            }
        }
    }
}

/// The tensor of the forward pass that a recomputed one should equal.
fn first<'a>(subject: &Subject<'a>, key: &TensorKey) -> Option<(&'a TensorKey, &'a TensorInfo)> {
    let is_same = |of: &&TensorKey| of.tensor == key.tensor && of.microbatch == key.microbatch;
    let forward = [None, Some(When::AfterOp), Some(When::BeforeOp)];
    let mut all = subject.dump.tensors().iter().filter(|(key, _)| is_same(key));
    all.find(|(key, _)| forward.contains(&key.when))
}

type Named<'a> = (&'a TensorKey, &'a TensorInfo);

fn tensor(subject: &Subject<'_>, again: Named<'_>, forward: Named<'_>, results: &mut CheckResults) {
    if again.1.dtype != forward.1.dtype || again.1.shape != forward.1.shape {
        results.skip(again.0.to_string(), "its dtype or shape is not the forward's");
        return;
    }
    let (forward_pieces, other) =
        (pieces(subject.dump, forward.1).0, pieces(subject.dump, again.1).0);
    for piece in &other {
        let shares = |of: &&Piece<'_>| {
            of.place() == piece.place() && of.ranks.iter().any(|rank| piece.ranks.contains(rank))
        };
        let Some(first) = forward_pieces.iter().find(shares) else { continue };
        results.looked();
        if first.bytes != piece.bytes {
            differ(subject, again.0, first, piece, results);
        }
    }
}

/// How much two contents of one box differ.
struct Distance {
    elements: usize,
    total: usize,
    /// The largest difference, in steps of the dtype at the largest value.
    steps: f64,
}

fn distance(first: &Piece<'_>, other: &Piece<'_>) -> Distance {
    let dtype = first.record.dtype;
    let width = dtype.width();
    let (mut elements, mut largest, mut apart) = (0, 0f64, 0f64);
    let total = first.bytes.len() / width;
    for i in 0..total {
        let (a, b) = (bits(first.bytes, width, i), bits(other.bytes, width, i));
        let (x, y) = (value(dtype, a), value(dtype, b));
        largest = largest.max(x.abs());
        if a != b {
            elements += 1;
            // NaN on either side counts as an infinite difference.
            let gap = (x - y).abs();
            apart = if gap.is_nan() { f64::INFINITY } else { apart.max(gap) };
        }
    }
    // In a format with m bits of fraction, the spacing at `largest` is at most largest / 2^m.
    let step = format(dtype).map_or(0.0, |(_, mantissa)| largest / f64::from(mantissa).exp2());
    Distance { elements, total, steps: if apart == 0.0 { 0.0 } else { apart / step } }
}

fn differ(
    subject: &Subject<'_>,
    key: &TensorKey,
    first: &Piece<'_>,
    again: &Piece<'_>,
    results: &mut CheckResults,
) {
    let Distance { elements, total, steps } = distance(first, again);
    let rounding = steps <= ROUNDINGS;
    let severity = if rounding { Severity::Note } else { Severity::Fail };
    let evidence = format!(
        "{key} {}: {} of {total} are not the forward's; the largest difference is {steps:.3} \
         steps of {} at the largest value",
        again.place(),
        plural(elements as u64, "element"),
        again.record.dtype,
    );
    let advice = match rounding {
        true => "Nothing: another compilation of the same expression rounds differently".into(),
        false => "Make the recomputation deterministic: keep the state of random generators, and \
                  change no buffer between the forward and the backward pass"
            .to_string(),
    };
    let place = Place::of(subject).tensor(key).ranks(&again.ranks);
    results.add(severity, None, place, evidence, advice);
}
