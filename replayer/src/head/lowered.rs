//! What a job shows of arithmetic in fewer bits than its q was recorded in.
//!
//! Under `torch.autocast` q and k are held in f32, multiplied in bf16 or f16, and the
//! gradients of both are such numbers that were widened again. Nobody who writes such a job
//! declares `input`, so its own facts are looked at: the recorded autocast state, a declared
//! point that only such a job has, and recorded f32 values that are numbers of few bits.

use backtape::dtype::Dtype;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::HeadStep;
use super::roundings::precision_of;
use crate::dump::TensorInfo;
use crate::kernels::round::Precision;

/// A format that values of more bits may show.
pub(crate) struct Shown {
    /// Which.
    pub(crate) precision: Precision,
    /// Last bits of an f32 that are zero in its numbers.
    zeros: u32,
}

impl Shown {
    /// All of them.
    pub(crate) const ALL: [Shown; 2] = [
        Shown { precision: Precision::Bf16, zeros: 16 },
        Shown { precision: Precision::F16, zeros: 13 },
    ];
}

/// Declared points whose results only a product in that format has.
const POINTS: [&str; 3] = ["logits", "dlogits", "output"];

/// Values of a shard that are looked at, evenly over it: of f32 arithmetic one in 65,536 is
/// a bf16 number by chance.
const LOOKS: usize = 4096;

/// Shards of a role that are looked at.
const SHARDS: usize = 64;

/// Fewest values that say something, and the least share of them (one in so many) that uses
/// the format's last bit: zeros, ones and small integers are numbers of every format.
const FEWEST: usize = 32;
const LAST_BIT: usize = 8;

/// The format below the recorded one in which the head may have computed, if the job shows
/// any.
pub(super) fn lowered(step: &HeadStep<'_>) -> Option<Precision> {
    let scores = step.scores();
    let of_scores = |info: &&TensorInfo| info.role == Some(scores);
    let stored = step.tensors.values().find(of_scores).and_then(|info| precision_of(info.dtype))?;
    let lower = |of: &Precision| of.unit_roundoff() > stored.unit_roundoff();
    let declared = &step.options.declared;
    let said = declared.autocast.as_deref().and_then(Precision::from_name).filter(lower);
    let points = POINTS.iter().filter_map(|&point| declared.dtypes.get(point));
    let points = points.filter_map(|name| Precision::from_name(name)).filter(lower);
    let point = points.max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()));
    said.or(point).or_else(|| shown(step).filter(lower))
}

/// The format of recorded f32 values that are all numbers of it: of q, of logits or of their
/// gradient, or of dq and dk together. (dk alone may be summed in few bits, which is a fault.)
fn shown(step: &HeadStep<'_>) -> Option<Precision> {
    let alone = [Role::Q, Role::Logits, Role::Dlogits];
    let one = |of: &Shown| {
        let all = |role| every(step, role, of);
        let gradients = all(Role::Dq) == Some(true) && all(Role::Dk) != Some(false);
        let any = gradients || alone.iter().any(|&role| all(role) == Some(true));
        any.then_some(of.precision)
    };
    Shown::ALL.iter().find_map(one)
}

/// Whether every recorded value of a role is a number of a format, in it or widened to f32;
/// `None` where too little is there to say so. Sums over microbatches, which leave the format,
/// do not count.
pub(crate) fn every(step: &HeadStep<'_>, role: Role, shown: &Shown) -> Option<bool> {
    let zeros = shown.zeros;
    let of = |(key, info): &(&TensorKey, &TensorInfo)| {
        info.role == Some(role) && (key.microbatch.is_some() || step.microbatches == [None])
    };
    let shards = step.tensors.iter().filter(of).flat_map(|(_, info)| &info.shards);
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
