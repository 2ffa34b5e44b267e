//! A policy's token x vocabulary plane on a device.

use super::head::{Back, Head, Tile};
use super::rows::Operands;
use crate::device::DeviceError;
use crate::device::machine::Machine;
use crate::kernels::policy::{self, Narrow, PlaneTile, Policy, dense};
use crate::kernels::{Cotangents, HeadInputs, Progress, Tiles};

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
