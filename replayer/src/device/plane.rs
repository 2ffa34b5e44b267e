//! A stage of the token x vocabulary plane on a device, which stays there to be compared.

#[cfg(test)]
mod tests;

use super::arguments::{Plane, kernel};
use super::error::DeviceError;
use super::head::OnDevice;
use super::machine::{Arguments, Machine};
use super::plan::{Plan, Sizes};
use super::policy;
use super::room::{Panel, Room, put_rows};
use crate::compare::plane::{OfToken, PlaneAllowance, PlaneStage};
use crate::compare::row::PIECE;
use crate::compare::ulp::Format;
use crate::compare::{Element, Look, RowTally};
use crate::kernels::matrix::{Cotangents, Matrix};
use crate::kernels::policy::Policy;
use crate::kernels::reference::{self, Upstream};
use crate::kernels::round::Precision;
use crate::kernels::tiles::spans;
use crate::kernels::{HeadInputs, Progress};

/// Of the free memory a plane takes two such shares, and what it is compared with less than one.
const SHARE: usize = 8;
/// What more of it at a time would gain is little, and this process holds the captured rows.
const MOST_BYTES: usize = 512 << 20;

kernel!(
    /// Captured rows against a plane: the struct of `kernels/compare.cu`, field for field.
    ComparePlane, "compare_plane",
    {
        columns: i64, stride: i64, pieces: i64, piece: i64, captured: u64, dtype: i64, values: u64,
        variances: u64, tokens: u64, stage: PlaneAllowance, bound: f64, to: u64,
    }
);

/// What is compared of a plane, and how.
#[derive(Clone, Copy, Debug)]
pub struct PlaneComparison<'a> {
    /// Captured values, `[tokens, V]`.
    pub captured: Matrix<'a>,
    /// The first of them that are compared.
    pub columns: usize,
    /// What is allowed of the stage's entries, and of each token's.
    pub stage: &'a PlaneAllowance,
    /// See `stage`.
    pub tokens: &'a [OfToken],
    /// The exponent of an entry's bound.
    pub bound: f64,
}

/// A plane that lies on a device and can be compared there.
pub trait KeptPlane {
    /// What is known of each token, in their order.
    fn compare(&mut self, comparison: &PlaneComparison) -> Result<Vec<RowTally>, DeviceError>;

    /// Sum of squared errors of a policy's plane over the valid classes, its entries rounded to
    /// what the job stored. `None` where the device does not emulate the policy or the rounding:
    /// then the entries are [`KeptPlane::values`].
    fn energy(
        &mut self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        stored: (Option<Precision>, &dyn Progress),
    ) -> Result<Option<f64>, DeviceError>;

    /// The entries, `[tokens, V]`.
    fn values(&mut self) -> Result<Vec<f64>, DeviceError>;
}

impl PlaneComparison<'_> {
    /// What a device must find where these entries and their variances lie, `[tokens, V]` each,
    /// found by this process: what the tests of devices hold them to.
    pub fn here(&self, values: &[f64], variances: &[f64]) -> Vec<RowTally> {
        let format = Format::of_values(&self.captured.values);
        let element = |row: usize, column: usize| {
            let (element, token) = (row * self.captured.cols + column, &self.tokens[row]);
            let reference = values[element];
            let inner = self.stage.of(token, column, reference, variances[element]);
            let allowed = self.stage.storing(token, reference, false, inner);
            Element { captured: self.captured.get_f64(element), reference, allowed }
        };
        let row = |row: usize| {
            let elements = (0..self.columns).map(|column| element(row, column));
            RowTally::of(elements, format, &Look::whole(self.bound))
        };
        (0..self.captured.rows).map(row).collect()
    }
}

/// Bytes of f64 that a plane may take, for a device with so many free.
pub(super) fn bytes(free: usize) -> usize {
    (free / SHARE).min(MOST_BYTES)
}

/// A stage's plane.
pub(super) struct DevicePlane<'m, M: Machine> {
    machine: &'m M,
    stage: PlaneStage,
    rows: usize,
    vocab: usize,
    values: Room<M>,
    variances: Room<M>,
    captured: Room<M>,
    tokens: Room<M>,
    tallies: Room<M>,
}

/// Computes the whole plane of some tokens, `[tokens, V]`.
pub(super) fn plane<'m, M: Machine>(
    machine: &'m M,
    inputs: &HeadInputs,
    upstream: Upstream,
    (stage, progress): (PlaneStage, &dyn Progress),
) -> Result<DevicePlane<'m, M>, DeviceError> {
    reference::check(inputs);
    let (rows, vocab) = (inputs.q.rows, inputs.k.rows);
    let [mut values, mut variances, captured, tokens, rows_room] =
        [(); 5].map(|()| Room::default());
    values.of(machine, rows * vocab)?;
    variances.of(machine, rows * vocab)?;
    let plane = DevicePlane {
        machine,
        stage,
        rows,
        vocab,
        values,
        variances,
        captured,
        tokens,
        tallies: rows_room,
    };
    plane.fill(inputs, upstream, progress)?;
    Ok(plane)
}

impl<M: Machine> DevicePlane<'_, M> {
    fn fill(
        &self,
        inputs: &HeadInputs,
        upstream: Upstream,
        progress: &dyn Progress,
    ) -> Result<(), DeviceError> {
        let (machine, vocab) = (self.machine, self.vocab);
        let mut buffers = OnDevice::backward(machine, inputs, upstream)?;
        let head = buffers.head(machine, inputs, upstream.noise);
        let (mut key, mut query) = (Panel::default(), Panel::default());
        let mut products = Room::default();
        let sizes = Sizes { tokens: self.rows, rows: 0, depth: inputs.q.cols, terms: 1 };
        let tiles = Plan::of(machine.free()?, sizes).tiles;
        for cols in spans(vocab, tiles.vocab) {
            let valid = cols.start..cols.end.min(inputs.valid_vocab).max(cols.start);
            key.load(machine, (&inputs.k, valid.clone()), false)?;
            for tokens in spans(self.rows, tiles.tokens) {
                if query.rows != tokens {
                    query.load(machine, (&inputs.q, tokens.clone()), false)?;
                }
                let first = tokens.start * vocab + cols.start;
                let plane = Plane {
                    threads: (tokens.len() * cols.len()) as i64,
                    products: buffers.products(machine, inputs, (&query, &key), &mut products)?,
                    values: self.values.at(machine, first),
                    variances: self.variances.at(machine, first),
                    stage: self.stage as i64,
                    stride: vocab as i64,
                    columns: cols.len() as i64,
                    valid: valid.len() as i64,
                    first: cols.start as i64,
                    key_norms: key.norms.address(machine),
                    masked: inputs.mask.unwrap_or(f64::NEG_INFINITY),
                    tokens: buffers.tokens(machine, &query),
                    head,
                };
                // SAFETY: the plane has `vocab` entries for each token, the products are the
                // tile's, the panels have a norm for each of their rows.
                unsafe { machine.launch(&plane)? };
                progress.advance((tokens.len() * valid.len() * inputs.q.cols.max(1)) as u64);
            }
        }
        Ok(())
    }

    fn fetch(&self, room: &Room<M>) -> Result<Vec<f64>, DeviceError> {
        let mut values = vec![0.0; self.rows * self.vocab];
        room.get(self.machine, &mut values).map(|()| values)
    }

    /// The variances, `[tokens, V]`.
    #[cfg(test)]
    pub(super) fn variances(&self) -> Result<Vec<f64>, DeviceError> {
        self.fetch(&self.variances)
    }
}

impl<M: Machine> KeptPlane for DevicePlane<'_, M> {
    fn compare(&mut self, comparison: &PlaneComparison) -> Result<Vec<RowTally>, DeviceError> {
        let (machine, count) = (self.machine, comparison.captured.rows);
        assert_eq!((count, comparison.captured.cols), (self.rows, self.vocab), "the plane's shape");
        assert!(
            comparison.tokens.len() == count && comparison.columns <= self.vocab,
            "one a token"
        );
        let rows = (&comparison.captured, 0..count);
        let (captured, dtype) = put_rows(machine, &mut self.captured, rows)?;
        let pieces = RowTally::pieces(comparison.columns);
        let mut tallies = vec![<RowTally as bytemuck::Zeroable>::zeroed(); count * pieces];
        let compare = ComparePlane {
            threads: tallies.len() as i64,
            columns: comparison.columns as i64,
            stride: self.vocab as i64,
            pieces: pieces as i64,
            piece: PIECE as i64,
            captured,
            dtype: dtype as i64,
            values: self.values.address(machine),
            variances: self.variances.address(machine),
            tokens: self.tokens.put(machine, comparison.tokens)?,
            stage: *comparison.stage,
            bound: comparison.bound,
            to: self.tallies.put(machine, &tallies)?,
        };
        // SAFETY: the plane and the captured rows have the shape that was just looked at, and
        // there is a result for each piece of each of them.
        unsafe { machine.launch(&compare)? };
        self.tallies.get(machine, &mut tallies)?;
        Ok(RowTally::joined(&tallies, pieces))
    }

    fn energy(
        &mut self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        stored: (Option<Precision>, &dyn Progress),
    ) -> Result<Option<f64>, DeviceError> {
        assert_eq!((inputs.q.rows, inputs.k.rows), (self.rows, self.vocab), "the plane's shape");
        let exact = (self.stage, self.values.address(self.machine));
        policy::energy(self.machine, policy, inputs, upstream, (exact, stored))
    }

    fn values(&mut self) -> Result<Vec<f64>, DeviceError> {
        self.fetch(&self.values)
    }
}
