//! A policy's backward pass on a device.
//!
//! q and the sums of dq stay there where they fit; a block of dk comes back for each tile of the
//! vocabulary.

use std::ops::Range;

use super::arguments::{Columns, Joined};
use super::head::{Back, Head, Tile};
use super::rows::Operands;
use super::{at, format, halves, tiles};
use crate::device::DeviceError;
use crate::device::machine::{Machine, Product};
use crate::device::room::Room;
use crate::kernels::policy::dense::{self, BlockSums, DenseTiles};
use crate::kernels::policy::{self, DkParts, DqParts, Narrow, Policy};
use crate::kernels::round::Precision;
use crate::kernels::{Cotangents, HeadInputs, Progress, Tiles};

/// Share of the free memory that q, and that dq, may take whole.
const SHARE: usize = 4;

/// See `kernels::policy::backward`.
pub(in crate::device) fn backward<M: Machine>(
    machine: &M,
    policy: &Policy,
    inputs: &HeadInputs,
    (lse, cotangents): (&[f64], &Cotangents<f64>),
    (own_tiles, progress): (Tiles, &dyn Progress),
    on_dk: &mut dyn FnMut(DkParts),
) -> Result<DqParts, DeviceError> {
    if !policy.is_fast() || policy.keeps_log_p() {
        return Ok(policy::backward(policy, inputs, lse, cotangents, own_tiles, progress, on_dk));
    }
    policy::check_backward(inputs, lse, cotangents);
    let narrow = Narrow::new(lse, cotangents);
    let tiles = tiles(machine, (policy, inputs), own_tiles)?;
    let elements = inputs.q.rows * inputs.q.cols;
    let fits = elements * size_of::<f32>() <= machine.free()? / SHARE;
    let there = There {
        back: Back::of(machine, &narrow)?,
        head: Head::new(machine, policy, inputs)?,
        queries: Queries { chunks: Vec::new(), all: fits },
        key: Operands::default(),
        tile: Tile::default(),
        part: Room::default(),
        dq: DqSums::zeros(machine, elements, fits)?,
        dk: Room::default(),
        dbias: Room::default(),
        tokens: tiles.tokens,
        progress,
    };
    let g_label = narrow.upstream().cotangents.label;
    dense::backward(policy, inputs, g_label, tiles, there, on_dk)
}

/// The dense part of a backward pass on a device.
struct There<'a, M: Machine> {
    head: Head<'a, M>,
    back: Back<M>,
    queries: Queries<M>,
    key: Operands<M>,
    tile: Tile<M>,
    /// A tile's own part of a sum, where that is rounded.
    part: Room<M>,
    dq: DqSums<M>,
    dk: Room<M>,
    dbias: Room<M>,
    /// Of a tile.
    tokens: usize,
    progress: &'a dyn Progress,
}

impl<M: Machine> DenseTiles for There<'_, M> {
    type Error = DeviceError;

    fn block(
        &mut self,
        nth: usize,
        cols: Range<usize>,
        sums: BlockSums<'_>,
    ) -> Result<(), DeviceError> {
        let (machine, policy, inputs) = (self.head.machine, self.head.policy, self.head.inputs);
        let depth = inputs.q.cols;
        self.key.load(machine, policy, (&inputs.k, cols.clone()), true)?;
        self.dk.of(machine, halves(cols.len() * depth))?;
        self.dbias.of(machine, halves(cols.len()))?;
        let chunks = policy.token_spans(inputs.q.rows, self.tokens);
        for (chunk, span) in chunks.iter().enumerate() {
            self.tile(chunk, span.clone(), (nth > 0, chunk > 0))?;
            self.progress.advance(3 * (span.len() * cols.len() * depth) as u64);
        }
        if chunks.is_empty() {
            return Ok(());
        }
        self.dk.get(machine, sums.dk)?;
        self.dbias.get(machine, sums.dbias)?;
        // Where the slope is 1 they are the cotangents that they were.
        if self.head.is_sloped() { self.back.label_g.get(machine, sums.label_g) } else { Ok(()) }
    }

    fn dq(self) -> Result<Vec<f32>, DeviceError> {
        self.dq.fetch(self.head.machine)
    }
}

impl<M: Machine> There<'_, M> {
    /// One tile onto dq, dk and dbias; the first of a sum begins it.
    fn tile(
        &mut self,
        chunk: usize,
        span: Range<usize>,
        (adds_dq, adds_dk): (bool, bool),
    ) -> Result<(), DeviceError> {
        let (machine, depth) = (self.head.machine, self.head.inputs.q.cols);
        let query = self.queries.at(&self.head, chunk, span.clone())?;
        let sides = (query, &self.key);
        self.head.logits(sides, &mut self.tile)?;
        let operand = self.head.dlogits(sides, &self.back, &mut self.tile, self.head.is_whole())?;
        let (height, width) = (span.len(), self.key.rows.len());
        let [of_dq, of_dk] = self.head.between();
        let dq = Product {
            target: self.dq.enter(machine, &span, depth)?,
            rows: height,
            cols: depth,
            lhs: operand,
            lhs_transposed: false,
            rhs: self.key.of_gradients(machine),
            rhs_transposed: false,
            depth: width,
            add: adds_dq,
            compute: self.head.products.gradients,
        };
        let dk = Product {
            target: self.dk.address(machine),
            rows: width,
            lhs_transposed: true,
            rhs: query.of_gradients(machine),
            depth: height,
            add: adds_dk,
            ..dq
        };
        for (product, rounding) in [(dq, of_dq), (dk, of_dk)] {
            let sum = Sum { target: product.target, elements: product.rows * depth, rounding };
            sum.join(machine, &mut self.part, product.add, |target, add| {
                // SAFETY: the targets have a row of D for each token and each row of the block,
                // the operands are stored as the product takes them.
                unsafe { machine.multiply(&Product { target, add, ..product }) }
            })?;
        }
        self.dq.leave(machine, &span, depth)?;
        self.add_columns(height, adds_dk, of_dk)
    }

    fn add_columns(
        &mut self,
        rows: usize,
        adds: bool,
        rounding: Option<(Precision, Precision)>,
    ) -> Result<(), DeviceError> {
        let (machine, width) = (self.head.machine, self.key.rows.len());
        let tile = self.tile.values.address(machine);
        let sum = Sum { target: self.dbias.address(machine), elements: width, rounding };
        sum.join(machine, &mut self.part, adds, |sums, adds| {
            let (threads, rows, adds) = (width as i64, rows as i64, adds.into());
            // SAFETY: the tile has those rows, the sums a value a column.
            unsafe { machine.launch(&Columns { threads, tile, rows, sums, adds }) }
        })
    }
}

/// A sum that tiles add to, and what their parts and the sum are rounded to.
struct Sum {
    target: u64,
    elements: usize,
    rounding: Option<(Precision, Precision)>,
}

impl Sum {
    /// As `joined` of `kernels::policy` has it: where parts are rounded, a part is summed by itself.
    fn join<M: Machine>(
        &self,
        machine: &M,
        room_of_part: &mut Room<M>,
        adds: bool,
        add: impl FnOnce(u64, bool) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some((part, total)) = self.rounding else { return add(self.target, adds) };
        let part_address = room_of_part.of(machine, halves(self.elements))?;
        add(part_address, false)?;
        let joined = Joined {
            threads: self.elements as i64,
            own: part_address,
            target: self.target,
            part: format(part),
            total: format(total),
            adds: adds.into(),
        };
        // SAFETY: both have that many elements.
        unsafe { machine.launch(&joined) }
    }
}

/// Chunks of q, in the order of the walk.
struct Queries<M: Machine> {
    chunks: Vec<Operands<M>>,
    /// Whether all of them are kept.
    all: bool,
}

impl<M: Machine> Queries<M> {
    fn at(
        &mut self,
        head: &Head<'_, M>,
        chunk: usize,
        span: Range<usize>,
    ) -> Result<&Operands<M>, DeviceError> {
        let index = if self.all { chunk } else { 0 };
        if self.chunks.len() <= index {
            self.chunks.push(Operands::default());
        }
        let query = &mut self.chunks[index];
        if query.rows != span {
            query.load(head.machine, head.policy, (&head.inputs.q, span), true)?;
        }
        Ok(query)
    }
}

/// dq `[T, D]` on the device, or here where it does not fit, some tokens there at a time.
struct DqSums<M: Machine> {
    room: Room<M>,
    here: Option<Vec<f32>>,
    elements: usize,
}

impl<M: Machine> DqSums<M> {
    fn zeros(machine: &M, elements: usize, fits: bool) -> Result<Self, DeviceError> {
        let (mut room, here) = (Room::default(), (!fits).then(|| vec![0.0; elements]));
        if fits {
            room.of(machine, halves(elements))?;
        }
        Ok(DqSums { room, here, elements })
    }

    /// Where the sums of some tokens lie.
    fn enter(
        &mut self,
        machine: &M,
        span: &Range<usize>,
        depth: usize,
    ) -> Result<u64, DeviceError> {
        match &self.here {
            Some(all) => self.room.put(machine, &all[span.start * depth..span.end * depth]),
            None => Ok(at(machine, &self.room, span.start * depth)),
        }
    }

    /// After the tile of those tokens.
    fn leave(&mut self, machine: &M, span: &Range<usize>, depth: usize) -> Result<(), DeviceError> {
        match &mut self.here {
            Some(all) => self.room.get(machine, &mut all[span.start * depth..span.end * depth]),
            None => Ok(()),
        }
    }

    fn fetch(self, machine: &M) -> Result<Vec<f32>, DeviceError> {
        if let Some(all) = self.here {
            return Ok(all);
        }
        let mut all = vec![0.0; self.elements];
        self.room.get(machine, &mut all)?;
        Ok(all)
    }
}
