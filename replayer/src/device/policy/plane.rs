//! A policy's token x vocabulary plane on a device, and its errors there.

use super::head::{Back, Head, Tile};
use super::rows::Operands;
use crate::compare::plane::PlaneStage;
use crate::device::DeviceError;
use crate::device::arguments::{Element, kernel};
use crate::device::machine::{Arguments, Machine};
use crate::device::plan::{Plan, Sizes};
use crate::device::room::Room;
use crate::kernels::policy::{self, Narrow, PlaneTile, Policy, dense};
use crate::kernels::round::Precision;
use crate::kernels::tiles::spans;
use crate::kernels::{Cotangents, HeadInputs, Progress, Tiles};

/// Columns whose errors one thread sums.
const PIECE: usize = 256;

kernel!(
    /// Squared errors of a tile: the struct of `kernels/compare.cu`, field for field.
    PlaneEnergy, "plane_energy",
    {
        columns: i64, pieces: i64, piece: i64, tile: u64, exact: u64, stride: i64, stored: i64,
        sums: u64,
    }
);

/// A stage's entries on the device `[tokens, V]`, by their address, and what the job stored its own
/// as.
pub(in crate::device) type Exact<'a> = ((PlaneStage, u64), (Option<Precision>, &'a dyn Progress));

/// See `KeptPlane::energy`.
pub(in crate::device) fn energy<M: Machine>(
    machine: &M,
    policy: &Policy,
    inputs: &HeadInputs,
    (lse, cotangents): (&[f64], &Cotangents<f64>),
    ((stage, exact), (stored, progress)): Exact<'_>,
) -> Result<Option<f64>, DeviceError> {
    let Some(stored) = number(stored).filter(|_| policy.is_fast() && !policy.keeps_log_p()) else {
        return Ok(None);
    };
    policy::check_backward(inputs, lse, cotangents);
    let back = Back::of(machine, &Narrow::new(lse, cotangents))?;
    let mut head = Head::new(machine, policy, inputs)?;
    let (mut query, mut key, mut tile) =
        (Operands::default(), Operands::default(), Tile::default());
    let sizes = Sizes { tokens: inputs.q.rows, rows: 0, depth: inputs.q.cols, terms: 1 };
    let tiles = Plan::of(machine.free()?, sizes).tiles;
    let mut sums = vec![0.0; inputs.q.rows * tiles.vocab.div_ceil(PIECE)];
    let mut room = Room::default();
    room.put(machine, &sums)?;
    for cols in spans(inputs.valid_vocab, tiles.vocab) {
        key.load(machine, policy, (&inputs.k, cols.clone()), false)?;
        for span in spans(inputs.q.rows, tiles.tokens) {
            query.load(machine, policy, (&inputs.q, span.clone()), false)?;
            head.logits((&query, &key), &mut tile)?;
            if stage == PlaneStage::Dlogits {
                head.dlogits((&query, &key), &back, &mut tile, true)?;
            }
            let pieces = cols.len().div_ceil(PIECE);
            let first = span.start * inputs.k.rows + cols.start;
            let energy = PlaneEnergy {
                threads: (span.len() * pieces) as i64,
                columns: cols.len() as i64,
                pieces: pieces as i64,
                piece: PIECE as i64,
                tile: tile.values.address(machine),
                exact: exact + (first * size_of::<f64>()) as u64,
                stride: inputs.k.rows as i64,
                stored,
                sums: room.at(machine, span.start * tiles.vocab.div_ceil(PIECE)),
            };
            // SAFETY: the tile was just filled, `exact` has a row of V for each token, and there
            // is a sum for each piece of each.
            unsafe { machine.launch(&energy)? };
            progress.advance((span.len() * cols.len() * inputs.q.cols) as u64);
        }
    }
    room.get(machine, &mut sums)?;
    Ok(Some(sums.iter().sum()))
}

/// A rounding as the kernel numbers it, negative for none; `None` for one that it does not have.
fn number(stored: Option<Precision>) -> Option<i64> {
    let element = match stored {
        None => return Some(-1),
        Some(Precision::Bf16) => Element::Bf16,
        Some(Precision::F16) => Element::F16,
        Some(Precision::F32) => Element::F32,
        Some(Precision::F64) => Element::F64,
        Some(_) => return None,
    };
    Some(element as i64)
}

/// See `kernels::policy::plane`.
pub(in crate::device) fn plane<M: Machine>(
    machine: &M,
    policy: &Policy,
    inputs: &HeadInputs,
    (lse, cotangents): (&[f64], &Cotangents<f64>),
    (tiles, progress): (Tiles, &dyn Progress),
    on_tile: &mut dyn FnMut(PlaneTile),
) -> Result<(), DeviceError> {
    if !policy.is_fast() {
        policy::plane(policy, inputs, lse, cotangents, tiles, progress, on_tile);
        return Ok(());
    }
    policy::check_backward(inputs, lse, cotangents);
    let back = Back::of(machine, &Narrow::new(lse, cotangents))?;
    let mut head = Head::new(machine, policy, inputs)?;
    let (mut query, mut key, mut tile) =
        (Operands::default(), Operands::default(), Tile::default());
    let mut fetched = Vec::new();
    dense::plane(
        policy,
        inputs,
        tiles,
        &mut |span, cols, out| {
            query.load(machine, policy, (&inputs.q, span.clone()), false)?;
            key.load(machine, policy, (&inputs.k, cols.clone()), false)?;
            let size = span.len() * cols.len();
            fetched.resize(size, 0.0f32);
            head.logits((&query, &key), &mut tile)?;
            tile.values.get(machine, &mut fetched)?;
            out.set_logits(&fetched);
            head.dlogits((&query, &key), &back, &mut tile, true)?;
            tile.values.get(machine, &mut fetched)?;
            out.set_dlogits(&fetched);
            progress.advance((size * inputs.q.cols) as u64);
            Ok(())
        },
        on_tile,
    )
}
