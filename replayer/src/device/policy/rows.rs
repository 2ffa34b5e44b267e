//! Rows of q or of k as a policy's GEMMs take them.

use std::ops::Range;

use super::arguments::Narrow;
use super::{Products, format, halves, stored};
use crate::device::DeviceError;
use crate::device::machine::Machine;
use crate::device::room::{Room, put_rows};
use crate::kernels::Matrix;
use crate::kernels::policy::Policy;
use crate::kernels::round::Precision;

/// Some rows, `[rows, D]`.
pub(super) struct Operands<M: Machine> {
    pub(super) rows: Range<usize>,
    bits: Room<M>,
    logits: Room<M>,
    /// Of the gradients' GEMMs; empty where they take the same.
    gradients: Room<M>,
}

impl<M: Machine> Default for Operands<M> {
    fn default() -> Self {
        let [bits, logits, gradients] = [(); 3].map(|()| Room::default());
        Operands { rows: 0..0, bits, logits, gradients }
    }
}

impl<M: Machine> Operands<M> {
    /// Of the logits' GEMM, and where `backward` of the gradients' too.
    pub(super) fn load(
        &mut self,
        machine: &M,
        policy: &Policy,
        (matrix, rows): (&Matrix, Range<usize>),
        backward: bool,
    ) -> Result<(), DeviceError> {
        let Products { logits, gradients } = Products::of(policy);
        let rounding =
            |operand, compute| Rounding { input: policy.input, operand, stored: stored(compute) };
        let whole = (matrix, rows.clone(), 0..matrix.cols);
        let first = rounding(Precision::F32, logits);
        narrow(machine, (&mut self.bits, &mut self.logits), whole.clone(), first)?;
        let second = rounding(policy.operand, gradients);
        if backward && (!policy.operand.keeps_f32() || first.stored != second.stored) {
            narrow(machine, (&mut self.bits, &mut self.gradients), whole, second)?;
        }
        self.rows = rows;
        Ok(())
    }

    /// Operand of the logits' GEMM.
    pub(super) fn of_logits(&self, machine: &M) -> u64 {
        self.logits.address(machine)
    }

    /// Operand of the gradients' GEMMs.
    pub(super) fn of_gradients(&self, machine: &M) -> u64 {
        match self.gradients.address(machine) {
            0 => self.of_logits(machine),
            room => room,
        }
    }
}

/// What elements are rounded to, and stored as.
#[derive(Clone, Copy)]
pub(super) struct Rounding {
    pub(super) input: Precision,
    pub(super) operand: Precision,
    pub(super) stored: Precision,
}

impl Rounding {
    /// f32, as near as it comes.
    pub(super) const NONE: Rounding =
        Rounding { input: Precision::F32, operand: Precision::F32, stored: Precision::F32 };
}

/// A box of a matrix, row-major.
pub(super) fn narrow<M: Machine>(
    machine: &M,
    (bits, values): (&mut Room<M>, &mut Room<M>),
    (matrix, rows, columns): (&Matrix, Range<usize>, Range<usize>),
    rounding: Rounding,
) -> Result<u64, DeviceError> {
    let (from, dtype) = put_rows(machine, bits, (matrix, rows.clone()))?;
    let count = rows.len() * columns.len();
    let to = values.of(machine, halves(count))?;
    let narrow = Narrow {
        threads: count as i64,
        from,
        to,
        dtype: dtype as i64,
        stride: matrix.cols as i64,
        first: columns.start as i64,
        columns: columns.len() as i64,
        input: format(rounding.input),
        operand: format(rounding.operand),
        stored: format(rounding.stored),
    };
    // SAFETY: `from` holds the rows whole, `to` has 4 bytes for each element of the box.
    unsafe { machine.launch(&narrow)? };
    Ok(to)
}
