//! What the passes of a policy have in common: the head's options on the device, and tiles of
//! logits and of dlogits.

use super::arguments::{Dlogits, Logits};
use super::rows::{Operands, Rounding, narrow};
use super::{Products, at, format, halves, stored};
use crate::device::DeviceError;
use crate::device::machine::{Compute, Machine, Product};
use crate::device::room::Room;
use crate::kernels::HeadInputs;
use crate::kernels::policy::{Narrow, Path, Policy};
use crate::kernels::round::Precision;

/// Labels and bias of a head, `[T]` and `[V]`.
pub(super) struct Head<'a, M: Machine> {
    pub(super) machine: &'a M,
    pub(super) policy: &'a Policy,
    pub(super) inputs: &'a HeadInputs<'a>,
    pub(super) products: Products,
    pub(super) labels: Room<M>,
    bias: Room<M>,
    /// Given logits as they were dumped.
    bits: Room<M>,
}

/// A tile `[tokens, columns]`: in f32, and dlogits as an operand of 16 bits where they are one.
pub(super) struct Tile<M: Machine> {
    pub(super) values: Room<M>,
    operand: Room<M>,
}

impl<M: Machine> Default for Tile<M> {
    fn default() -> Self {
        Tile { values: Room::default(), operand: Room::default() }
    }
}

/// What goes back to each token, `[T]`.
pub(super) struct Back<M: Machine> {
    lse: Room<M>,
    g_lse: Room<M>,
    g_label: Room<M>,
    smooth: Room<M>,
    /// `g_label` times the slope at the label, where that was computed.
    pub(super) label_g: Room<M>,
}

impl<M: Machine> Back<M> {
    pub(super) fn of(machine: &M, narrow: &Narrow) -> Result<Self, DeviceError> {
        let upstream = narrow.upstream();
        let put = |values: &[f32]| {
            let mut room = Room::default();
            room.put(machine, values).map(|_| room)
        };
        Ok(Back {
            lse: put(upstream.lse)?,
            g_lse: put(upstream.cotangents.lse)?,
            g_label: put(upstream.cotangents.label)?,
            smooth: put(upstream.cotangents.smooth)?,
            label_g: put(upstream.cotangents.label)?,
        })
    }
}

impl<'a, M: Machine> Head<'a, M> {
    pub(super) fn new(
        machine: &'a M,
        policy: &'a Policy,
        inputs: &'a HeadInputs<'a>,
    ) -> Result<Self, DeviceError> {
        assert!(inputs.reads.is_none(), "a hypothesis is tried on the CPU");
        let (mut labels, mut bias) = (Room::default(), Room::default());
        labels.put(machine, inputs.labels)?;
        if let Some(values) = inputs.bias {
            bias.put(machine, values)?;
        }
        let products = Products::of(policy);
        Ok(Head { machine, policy, inputs, products, labels, bias, bits: Room::default() })
    }

    /// Whether the slope of the transform is not 1 everywhere.
    pub(super) fn is_sloped(&self) -> bool {
        let transform = self.inputs.transform;
        transform.bends() || transform.scale as f32 != 1.0
    }

    /// Fills a tile with logits, rounded as the policy says.
    pub(super) fn logits(
        &mut self,
        (query, key): (&Operands<M>, &Operands<M>),
        tile: &mut Tile<M>,
    ) -> Result<u64, DeviceError> {
        let logits = self.raw((query, key), tile)?;
        let [leaving, between, end] = self.policy.logit_steps().map(format);
        let finish = Logits {
            threads: (query.rows.len() * key.rows.len()) as i64,
            logits,
            columns: key.rows.len() as i64,
            first: key.rows.start as i64,
            bias: self.bias.address(self.machine),
            transform: self.inputs.transform.into(),
            leaving,
            between,
            end,
        };
        // SAFETY: the tile holds its products, the bias a value for each row of k.
        unsafe { self.machine.launch(&finish)? };
        Ok(logits)
    }

    fn raw(
        &mut self,
        (query, key): (&Operands<M>, &Operands<M>),
        tile: &mut Tile<M>,
    ) -> Result<u64, DeviceError> {
        let (machine, rows, cols) = (self.machine, query.rows.len(), key.rows.len());
        if let Some(given) = &self.inputs.given {
            let part = (given, query.rows.clone(), key.rows.clone());
            return narrow(machine, (&mut self.bits, &mut tile.values), part, Rounding::NONE);
        }
        let target = tile.values.of(machine, halves(rows * cols))?;
        let product = Product {
            target,
            rows,
            cols,
            lhs: query.of_logits(machine),
            lhs_transposed: false,
            rhs: key.of_logits(machine),
            rhs_transposed: true,
            depth: self.inputs.q.cols,
            add: false,
            compute: self.products.logits,
        };
        // SAFETY: the operands hold those rows, D wide, stored as the product takes them, and the
        // tile was just made that large.
        unsafe { machine.multiply(&product)? };
        Ok(target)
    }

    /// A tile of logits becomes dlogits; with the label's part where `whole`. Gives the operand of
    /// the gradients' GEMMs.
    pub(super) fn dlogits(
        &self,
        (query, key): (&Operands<M>, &Operands<M>),
        back: &Back<M>,
        tile: &mut Tile<M>,
        whole: bool,
    ) -> Result<u64, DeviceError> {
        let (machine, size) = (self.machine, query.rows.len() * key.rows.len());
        let values = tile.values.address(machine);
        let single = matches!(self.products.gradients, Compute::F32 | Compute::Tf32 | Compute::F64);
        let operand = if single { 0 } else { tile.operand.of(machine, halves(size))? };
        let address = |room: &Room<M>| at(machine, room, query.rows.start);
        let policy = self.policy;
        let dlogits = Dlogits {
            threads: size as i64,
            tile: values,
            operand,
            stored: format(stored(self.products.gradients)),
            columns: key.rows.len() as i64,
            first: key.rows.start as i64,
            lse: address(&back.lse),
            g_lse: address(&back.g_lse),
            g_label: address(&back.g_label),
            smooth: address(&back.smooth),
            labels: address(&self.labels),
            label_g: address(&back.label_g),
            transform: self.inputs.transform.into(),
            whole: whole.into(),
            p: format(policy.p),
            dlogits: format(policy.dlogits),
        };
        // SAFETY: the tile and its operand are that large, the others have a value a token.
        unsafe { machine.launch(&dlogits)? };
        Ok(if single { values } else { operand })
    }

    /// Whether dlogits have the label's part before the GEMMs.
    pub(super) fn is_whole(&self) -> bool {
        self.policy.path != Path::Fused
    }

    /// Where parts and sums are rounded; `None` where nothing is.
    pub(super) fn between(&self) -> [Option<(Precision, Precision)>; 2] {
        let narrow =
            |(part, total): &(Precision, Precision)| !part.keeps_f32() || !total.keeps_f32();
        self.policy.between().map(|rounding| rounding.filter(narrow))
    }
}
