//! What the tiles of a walk have in common: the head's options and upstream on the device, and the
//! products of q and k.

use super::arguments::{Head, Tokens};
use super::error::DeviceError;
use super::machine::{Compute, Machine, Product};
use super::room::{Panel, Room, widen};
use crate::kernels::HeadInputs;
use crate::kernels::reference::{TermNoise, Upstream};

/// Labels, bias and upstream of a head, `[T]` and `[V]`.
pub(super) struct OnDevice<M: Machine> {
    labels: Room<M>,
    lse: Room<M>,
    c_lse: Room<M>,
    c_label: Room<M>,
    c_smooth: Room<M>,
    copies: Room<M>,
    bias: Room<M>,
    /// Given logits as they were dumped.
    bits: Room<M>,
}

impl<M: Machine> OnDevice<M> {
    /// Of a forward pass, which has no upstream.
    pub(super) fn forward(machine: &M, inputs: &HeadInputs) -> Result<Self, DeviceError> {
        assert!(inputs.reads.is_none(), "a hypothesis is tried on the CPU");
        let [mut labels, lse, c_lse, c_label, c_smooth, copies, mut bias, bits] =
            [(); 8].map(|()| Room::default());
        labels.put(machine, inputs.labels)?;
        if let Some(values) = inputs.bias {
            bias.put(machine, values)?;
        }
        Ok(OnDevice { labels, lse, c_lse, c_label, c_smooth, copies, bias, bits })
    }

    /// Of what goes back to each token.
    pub(super) fn backward(
        machine: &M,
        inputs: &HeadInputs,
        upstream: Upstream,
    ) -> Result<Self, DeviceError> {
        let mut buffers = OnDevice::forward(machine, inputs)?;
        let cotangents = upstream.cotangents;
        for (room, values) in [
            (&mut buffers.lse, upstream.lse),
            (&mut buffers.c_lse, cotangents.lse),
            (&mut buffers.c_label, cotangents.label),
            (&mut buffers.c_smooth, cotangents.smooth),
        ] {
            assert_eq!(values.len(), inputs.q.rows, "one a token");
            room.put(machine, values)?;
        }
        if let Some(copies) = inputs.copies {
            buffers.copies.put(machine, copies)?;
        }
        Ok(buffers)
    }

    /// The options, as kernels take them.
    pub(super) fn head(&self, machine: &M, inputs: &HeadInputs, noise: &TermNoise) -> Head {
        let transform = inputs.transform;
        Head {
            bias: self.bias.address(machine),
            transform: transform.into(),
            uncapped: transform.uncapped.into(),
            given: inputs.given.is_some().into(),
            p_rel_var: noise.p_rel_var,
            logit_rel_var: noise.logit_rel_var,
            dot_rel_var: noise.dot_rel_var,
            logit_floor: noise.logit_floor,
            cap_rel_var: noise.cap_rel_var,
            filter: noise.filter,
            whole: noise.whole.into(),
            exp_rel_var: noise.exp_rel_var,
            confident: noise.confident,
            log_p_rel_var: noise.log_p_rel_var,
        }
    }

    /// Upstream of the tokens of a panel of q.
    pub(super) fn tokens(&self, machine: &M, query: &Panel<M>) -> Tokens {
        let address = |room: &Room<M>| room.at(machine, query.rows.start);
        Tokens {
            lse: address(&self.lse),
            c_lse: address(&self.c_lse),
            c_label: address(&self.c_label),
            c_smooth: address(&self.c_smooth),
            copies: address(&self.copies),
            norms: query.norms.address(machine),
            labels: self.labels_from(machine, query.rows.start),
        }
    }

    /// Where the labels from some token on lie.
    pub(super) fn labels_from(&self, machine: &M, token: usize) -> u64 {
        self.labels.address(machine) + (token * size_of::<u32>()) as u64
    }

    /// Fills `tile` `[tokens, columns]` with the products of rows of q and k, or with the logits
    /// given in their place; its address.
    pub(super) fn products(
        &mut self,
        machine: &M,
        inputs: &HeadInputs,
        (query, key): (&Panel<M>, &Panel<M>),
        tile: &mut Room<M>,
    ) -> Result<u64, DeviceError> {
        if let Some(given) = &inputs.given {
            let part = (given, query.rows.clone(), key.rows.clone());
            widen(machine, (&mut self.bits, tile), part, 0)?;
            return Ok(tile.address(machine));
        }
        let (rows, cols) = (query.rows.len(), key.rows.len());
        let target = tile.of(machine, rows * cols)?;
        let product = Product {
            target,
            rows,
            cols,
            lhs: query.values.address(machine),
            lhs_transposed: false,
            rhs: key.values.address(machine),
            rhs_transposed: true,
            depth: inputs.q.cols,
            add: false,
            compute: Compute::F64,
        };
        // SAFETY: the panels hold those rows, D wide, and the tile was just made that large.
        unsafe { machine.multiply(&product)? };
        Ok(target)
    }
}
