//! The token x vocabulary plane on a device: logits and dlogits with their variances.

use super::arguments::Plane;
use super::error::DeviceError;
use super::head::OnDevice;
use super::machine::Machine;
use super::room::{Panel, Room};
use crate::kernels::reference::{self, PlaneTile, Upstream};
use crate::kernels::tiles::spans;
use crate::kernels::{HeadInputs, Progress, Tiles};

/// Tile by tile, as `kernels::reference::plane` has them.
pub(super) fn plane<M: Machine>(
    machine: &M,
    inputs: &HeadInputs,
    upstream: Upstream,
    (tiles, progress): (Tiles, &dyn Progress),
    on_tile: &mut dyn FnMut(PlaneTile),
) -> Result<(), DeviceError> {
    reference::check(inputs);
    let mut held = OnDevice::backward(machine, inputs, upstream)?;
    let head = held.head(machine, inputs, upstream.noise);
    let masked = inputs.mask.unwrap_or(f64::NEG_INFINITY);
    let (mut key, mut query, mut products) = (Panel::default(), Panel::default(), Room::default());
    let mut rooms = [(); 4].map(|()| Room::<M>::default());
    let mut fetched = [(); 4].map(|()| Vec::new());
    for cols in spans(inputs.k.rows, tiles.vocab) {
        let valid = cols.start..cols.end.min(inputs.valid_vocab).max(cols.start);
        key.load(machine, (&inputs.k, valid.clone()), false)?;
        for tokens in spans(inputs.q.rows, tiles.tokens) {
            query.load(machine, (&inputs.q, tokens.clone()), false)?;
            let products = held.products(machine, inputs, (&query, &key), &mut products)?;
            let size = tokens.len() * cols.len();
            let [logits, logits_var, dlogits, dlogits_var] = &mut rooms;
            let plane = Plane {
                threads: size as i64,
                products,
                logits: logits.of(machine, size)?,
                logits_var: logits_var.of(machine, size)?,
                dlogits: dlogits.of(machine, size)?,
                dlogits_var: dlogits_var.of(machine, size)?,
                columns: cols.len() as i64,
                valid: valid.len() as i64,
                first: cols.start as i64,
                key_norms: key.norms.address(machine),
                masked,
                tokens: held.tokens(machine, &query),
                head,
            };
            // SAFETY: the rooms were just made that large, the products are the tile's.
            unsafe { machine.launch(&plane)? };
            for (room, values) in rooms.iter().zip(&mut fetched) {
                values.resize(size, 0.0);
                room.get(machine, values)?;
            }
            let [logits, logits_var, dlogits, dlogits_var] = &fetched;
            let (tokens, cols) = (tokens.clone(), cols.clone());
            on_tile(PlaneTile { tokens, cols, logits, logits_var, dlogits, dlogits_var });
            progress.advance((query.rows.len() * valid.len() * inputs.q.cols.max(1)) as u64);
        }
    }
    Ok(())
}
