//! Buffers of a device that grow, and rows of a matrix in them.

use std::ops::Range;

use super::arguments::{Element, Magnitudes, RowSums, Widen};
use super::error::DeviceError;
use super::machine::Machine;
use crate::kernels::{Matrix, Values};

/// Room for some bytes; what was in it is lost when it grows.
pub(super) struct Room<M: Machine> {
    buffer: Option<M::Buffer>,
    bytes: usize,
}

impl<M: Machine> Default for Room<M> {
    fn default() -> Self {
        Room { buffer: None, bytes: 0 }
    }
}

impl<M: Machine> Room<M> {
    /// Room for so many values of 8 bytes; its address.
    pub(super) fn of(&mut self, machine: &M, values: usize) -> Result<u64, DeviceError> {
        self.grow(machine, values * size_of::<f64>())
    }

    /// These values, on the device; their address.
    pub(super) fn put<T: bytemuck::NoUninit>(
        &mut self,
        machine: &M,
        values: &[T],
    ) -> Result<u64, DeviceError> {
        let bytes = bytemuck::cast_slice(values);
        let address = self.grow(machine, bytes.len())?;
        if let Some(buffer) = &mut self.buffer {
            machine.upload(bytes, buffer)?;
        }
        Ok(address)
    }

    /// Fetches the first of its values.
    pub(super) fn get<T: bytemuck::Pod>(
        &self,
        machine: &M,
        values: &mut [T],
    ) -> Result<(), DeviceError> {
        match &self.buffer {
            Some(buffer) => machine.download(buffer, bytemuck::cast_slice_mut(values)),
            None => Ok(()),
        }
    }

    /// Where it lies; 0 before anything was asked of it.
    pub(super) fn address(&self, machine: &M) -> u64 {
        self.buffer.as_ref().map_or(0, |buffer| machine.address(buffer))
    }

    /// What it holds; `None` before anything was asked of it.
    pub(super) fn buffer(&self) -> Option<&M::Buffer> {
        self.buffer.as_ref()
    }

    /// The same, to be written.
    pub(super) fn buffer_mut(&mut self) -> Option<&mut M::Buffer> {
        self.buffer.as_mut()
    }

    /// Address of its value number `index` of 8 bytes; 0 before anything was asked of it.
    pub(super) fn at(&self, machine: &M, index: usize) -> u64 {
        match self.address(machine) {
            0 => 0,
            address => address + (index * size_of::<f64>()) as u64,
        }
    }

    fn grow(&mut self, machine: &M, bytes: usize) -> Result<u64, DeviceError> {
        if self.buffer.is_none() || self.bytes < bytes {
            // Never empty: an address of 0 means that there is nothing.
            let bytes = bytes.max(size_of::<f64>());
            self.buffer = None;
            self.buffer = Some(machine.zeros(bytes)?);
            self.bytes = bytes;
        }
        Ok(self.address(machine))
    }
}

/// Rows of a matrix in f64, with their squares, and the squared norm of each.
pub(super) struct Panel<M: Machine> {
    pub(super) rows: Range<usize>,
    bits: Room<M>,
    pub(super) values: Room<M>,
    pub(super) squared: Room<M>,
    /// Filled when asked for.
    pub(super) magnitudes: Room<M>,
    pub(super) norms: Room<M>,
}

impl<M: Machine> Default for Panel<M> {
    fn default() -> Self {
        let [bits, values, squared, magnitudes, norms] = [(); 5].map(|()| Room::default());
        Panel { rows: 0..0, bits, values, squared, magnitudes, norms }
    }
}

impl<M: Machine> Panel<M> {
    pub(super) fn load(
        &mut self,
        machine: &M,
        (matrix, rows): (&Matrix, Range<usize>),
        magnitudes: bool,
    ) -> Result<(), DeviceError> {
        let (count, columns) = (rows.len(), matrix.cols);
        let squared = self.squared.of(machine, count * columns)?;
        let all = 0..columns;
        widen(machine, (&mut self.bits, &mut self.values), (matrix, rows.clone(), all), squared)?;
        let sums = self.norms.of(machine, count)?;
        let columns = columns as i64;
        let norms = RowSums { threads: count as i64, values: squared, sums, columns };
        // SAFETY: both rooms were just made that large.
        unsafe { machine.launch(&norms)? };
        if magnitudes {
            let threads = count * matrix.cols;
            let to = self.magnitudes.of(machine, threads)?;
            let from = self.values.address(machine);
            // SAFETY: as above.
            unsafe { machine.launch(&Magnitudes { threads: threads as i64, from, to })? };
        }
        self.rows = rows;
        Ok(())
    }
}

/// Whole rows of a matrix as they were dumped; where they lie, and as what.
pub(super) fn put_rows<M: Machine>(
    machine: &M,
    bits: &mut Room<M>,
    (matrix, rows): (&Matrix, Range<usize>),
) -> Result<(u64, Element), DeviceError> {
    let whole = rows.start * matrix.cols..rows.end * matrix.cols;
    Ok(match matrix.values {
        Values::Bf16(all) => (bits.put(machine, &all[whole])?, Element::Bf16),
        Values::F16(all) => (bits.put(machine, &all[whole])?, Element::F16),
        Values::F32(all) => (bits.put(machine, &all[whole])?, Element::F32),
        Values::F64(all) => (bits.put(machine, &all[whole])?, Element::F64),
    })
}

/// A box of a matrix in f64, row-major, exactly; its squares at `squared`, unless that is 0.
pub(super) fn widen<M: Machine>(
    machine: &M,
    (bits, values): (&mut Room<M>, &mut Room<M>),
    (matrix, rows, columns): (&Matrix, Range<usize>, Range<usize>),
    squared: u64,
) -> Result<(), DeviceError> {
    let (from, dtype) = put_rows(machine, bits, (matrix, rows.clone()))?;
    let count = rows.len() * columns.len();
    let widen = Widen {
        threads: count as i64,
        from,
        values: values.of(machine, count)?,
        squared,
        dtype: dtype as i64,
        stride: matrix.cols as i64,
        first: columns.start as i64,
        columns: columns.len() as i64,
    };
    // SAFETY: `from` holds the rows whole, the results have room for the box.
    unsafe { machine.launch(&widen) }
}
