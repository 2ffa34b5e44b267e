//! Finds out whether a job computed in fewer bits than its q was recorded in.
//!
//! Under `torch.autocast` q and k are kept in f32 and multiplied in bf16 or f16, and the gradients
//! of both are bf16 or f16 numbers widened to f32. Authors of such jobs do not declare `input`, so
//! three other signs are used: the recorded autocast state, a declared rounding point that only
//! such a job has, and recorded f32 values that are all numbers of the narrower format.

use backtape::dtype::Dtype;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::HeadStep;
use super::roundings::precision_of;
use crate::dump::TensorInfo;
use crate::kernels::round::Precision;

/// A format whose numbers can be recognised among f32 values.
pub(crate) struct Shown {
    /// Which format.
    pub(crate) precision: Precision,
    /// How many of the last bits of an f32 are zero in every number of the format.
    zeros: u32,
}

impl Shown {
    /// The formats that are looked for.
    pub(crate) const ALL: [Shown; 2] = [
        Shown { precision: Precision::Bf16, zeros: 16 },
        Shown { precision: Precision::F16, zeros: 13 },
    ];
}

/// Rounding points whose declared format shows that the products were computed in it.
const POINTS: [&str; 3] = ["logits", "dlogits", "output"];

/// How many values of a shard are tested, spread evenly over it: one in 65,536 results of f32
/// arithmetic is a bf16 number by chance.
const LOOKS: usize = 4096;

/// How many shards of a role are tested.
const SHARDS: usize = 64;

/// Fewest nonzero values that prove anything, and the smallest share of them (one in `LAST_BIT`)
/// that must use the format's last bit: zeros, ones and small integers are numbers of every format.
const FEWEST: usize = 32;
const LAST_BIT: usize = 8;

/// The format, narrower than the recorded one, in which the head may have computed, if there is a
/// sign of it.
pub(super) fn lowered(step: &HeadStep<'_>) -> Option<Precision> {
    let scores = step.scores();
    let of_scores = |info: &&TensorInfo| info.role == Some(scores);
    let stored = step.tensors.values().find(of_scores).and_then(|info| precision_of(info.dtype))?;
    let lower = |precision: &Precision| precision.unit_roundoff() > stored.unit_roundoff();
    let declared = &step.options.declared;
    let said = declared.autocast.as_deref().and_then(Precision::from_name).filter(lower);
    let points = POINTS.iter().filter_map(|&point| declared.dtypes.get(point));
    let points = points.filter_map(|name| Precision::from_name(name)).filter(lower);
    let point = points.max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()));
    said.or(point).or_else(|| shown(step).filter(lower))
}

/// The narrower format of which all recorded f32 values of a tensor are numbers. The tensor is q,
/// the logits or their gradient, or dq and dk together; dk alone may be a sum in few bits, which is
/// a fault.
fn shown(step: &HeadStep<'_>) -> Option<Precision> {
    let alone = [Role::Q, Role::Logits, Role::Dlogits];
    let of_format = |candidate: &Shown| {
        let all = |role| every(step, role, candidate);
        let gradients = all(Role::Dq) == Some(true) && all(Role::Dk) != Some(false);
        let any = gradients || alone.iter().any(|&role| all(role) == Some(true));
        any.then_some(candidate.precision)
    };
    Shown::ALL.iter().find_map(of_format)
}

/// The tensor that shows in which format a point rounds, and a format of fewer bits than the
/// declared one of which all its values are numbers, if there is one.
pub(crate) fn shown_below(step: &HeadStep<'_>, point: &str) -> Option<(Role, Precision)> {
    let role = match point {
        "logits" => Role::Logits,
        "lse" => Role::Lse,
        "dlogits" => Role::Dlogits,
        "output" => Role::Dq,
        _ => return None,
    };
    let declared = Precision::from_name(step.options.declared.dtypes.get(point)?)?;
    let less = |shown: &&Shown| shown.precision.unit_roundoff() > declared.unit_roundoff();
    let format =
        Shown::ALL.iter().filter(less).find(|shown| every(step, role, shown) == Some(true))?;
    Some((role, format.precision))
}

/// Whether every recorded value of a role is a number of a format, stored in it or widened to f32;
/// `None` where there are too few values. Sums over microbatches are not tested, as they need more
/// bits.
pub(crate) fn every(step: &HeadStep<'_>, role: Role, shown: &Shown) -> Option<bool> {
    let zeros = shown.zeros;
    let is_tested = |(key, info): &(&TensorKey, &TensorInfo)| {
        info.role == Some(role) && (key.microbatch.is_some() || step.microbatches == [None])
    };
    let shards = step.tensors.iter().filter(is_tested).flat_map(|(_, info)| &info.shards);
    let (mut seen, mut last) = (0, 0);
    for shard in shards.take(SHARDS) {
        match step.dump.record(shard).dtype {
            Dtype::F32 => {}
            other if precision_of(other) == Some(shown.precision) => return Some(true),
            _ => return Some(false),
        }
        let (values, _) = step.dump.shard_bytes(shard)?.as_chunks::<4>();
        for bytes in values.iter().step_by(values.len().div_ceil(LOOKS).max(1)) {
            let bits = u32::from_le_bytes(*bytes);
            if bits & ((1 << zeros) - 1) != 0 {
                return Some(false);
            }
            seen += usize::from(bits << 1 != 0);
            last += usize::from(bits & (1 << zeros) != 0);
        }
    }
    (seen >= FEWEST && last * LAST_BIT >= seen).then_some(true)
}
