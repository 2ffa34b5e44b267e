//! What a benchmark asks of a GPU beyond [`Device`]: times by the device's own clock, the most
//! memory that was held, and a large product through the same cuBLAS handle as a walk's.
//!
//! A replay measures nothing. `cargo bench --bench device` is what this is for.

use super::cuda::Cuda;
use super::error::DeviceError;
use super::machine::{Compute, Machine, Product};
use super::room::Room;
use super::{Description, Device};

/// A GPU whose runs are timed.
pub struct Measured {
    cuda: Cuda,
}

/// What a run took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Taken {
    /// Between an event before and one behind it in the device's only stream: where the device
    /// waited for the host in between, that is in it.
    pub milliseconds: f64,
    /// The most bytes of the device that were held at a time; none where its driver has no pool
    /// that counts them.
    pub peak_bytes: Option<u64>,
}

impl Measured {
    /// GPU number `ordinal`, as [`super::open`] opens it.
    pub fn open(ordinal: usize) -> Result<Measured, DeviceError> {
        Ok(Measured { cuda: Cuda::open(ordinal)? })
    }

    /// What it is.
    pub fn description(&self) -> &Description {
        Device::description(&self.cuda)
    }

    /// What computes, as a replay has it.
    pub fn device(&self) -> &dyn Device {
        &self.cuda
    }

    /// Runs something, and says what it took.
    pub fn timed<T>(
        &self,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<(T, Taken), DeviceError> {
        self.cuda.begin_peak()?;
        let (result, milliseconds) = self.cuda.between_events(run)?;
        Ok((result, Taken { milliseconds, peak_bytes: self.cuda.peak()? }))
    }

    /// Two square matrices on the device, and room for their product.
    pub fn square(&self, size: usize, seed: u64) -> Result<Square<'_>, DeviceError> {
        Ok(Square { cuda: &self.cuda, operands: Operands::put(&self.cuda, size, seed)? })
    }
}

/// The product of two square matrices in f64, as often as it is asked for.
pub struct Square<'a> {
    cuda: &'a Cuda,
    operands: Operands<Cuda>,
}

impl Square<'_> {
    /// Multiplies them once.
    pub fn multiply(&self) -> Result<(), DeviceError> {
        self.operands.multiply(self.cuda)
    }
}

/// `[size, size]` each, on a machine.
struct Operands<M: Machine> {
    size: usize,
    lhs: Room<M>,
    rhs: Room<M>,
    target: Room<M>,
}

impl<M: Machine> Operands<M> {
    /// Random values: a device multiplies zeros with less power, so faster, than numbers.
    fn put(machine: &M, size: usize, seed: u64) -> Result<Self, DeviceError> {
        let [mut lhs, mut rhs, mut target] = [(); 3].map(|()| Room::default());
        lhs.put(machine, &values(size * size, seed))?;
        rhs.put(machine, &values(size * size, !seed))?;
        target.of(machine, size * size)?;
        Ok(Operands { size, lhs, rhs, target })
    }

    fn multiply(&self, machine: &M) -> Result<(), DeviceError> {
        let size = self.size;
        let product = Product {
            target: self.target.address(machine),
            rows: size,
            cols: size,
            lhs: self.lhs.address(machine),
            lhs_transposed: false,
            rhs: self.rhs.address(machine),
            rhs_transposed: true,
            depth: size,
            add: false,
            compute: Compute::F64,
        };
        // SAFETY: all three rooms hold that many rows and columns.
        unsafe { machine.multiply(&product) }
    }
}

/// Numbers from -1 to 1.
fn values(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cuda, host, runs};
    use super::*;

    const SIZE: usize = 37;

    fn the_square_is_the_product_of_its_operands<M: Machine>(machine: &M) {
        let operands = Operands::put(machine, SIZE, 5).unwrap();
        operands.multiply(machine).unwrap();
        let mut got = vec![0.0; SIZE * SIZE];
        operands.target.get(machine, &mut got).unwrap();
        let (lhs, rhs) = (values(SIZE * SIZE, 5), values(SIZE * SIZE, !5));
        for (index, got) in got.into_iter().enumerate() {
            let (row, col) = (index / SIZE, index % SIZE);
            let wanted: f64 = (0..SIZE).map(|i| lhs[row * SIZE + i] * rhs[col * SIZE + i]).sum();
            // SIZE products below 1, each sum rounded once, in another order.
            let close = SIZE as f64 * SIZE as f64 * f64::EPSILON;
            assert!((got - wanted).abs() <= close, "{row}, {col}: {got:e}, not {wanted:e}");
        }
    }

    #[test]
    fn the_square_is_the_product_of_its_operands_in_this_process() {
        the_square_is_the_product_of_its_operands(host());
    }

    #[test]
    fn the_square_is_the_product_of_its_operands_on_a_gpu() {
        if let Some(cuda) = cuda() {
            the_square_is_the_product_of_its_operands(cuda);
        }
    }

    /// Longer work takes longer by the device's clock, and what it holds is counted.
    #[test]
    fn a_gpu_says_what_a_run_took() {
        let Some(cuda) = cuda() else { return };
        let measured = Measured::open(0).unwrap();
        let taken = |size: usize| {
            let run = || {
                let square = measured.square(size, 1)?;
                square.multiply()
            };
            measured.timed(run).unwrap().1
        };
        // What a GPU does at once takes the stand-in seconds.
        let size = if runs(cuda) > 2 { 2048 } else { 256 };
        taken(64);
        let (small, large) = (taken(64), taken(size));
        assert!(small.milliseconds > 0.0 && large.milliseconds > small.milliseconds);
        if let Some(peak) = large.peak_bytes {
            assert!(peak >= 3 * (size * size * size_of::<f64>()) as u64, "{peak}");
        }
    }

    #[test]
    fn numbers_differ_with_their_seed_and_lie_between_both_ends() {
        let (some, others) = (values(1000, 1), values(1000, 2));
        assert_ne!(some, others);
        assert!(some.iter().all(|x| (-1.0..=1.0).contains(x)));
        assert!((some.iter().sum::<f64>() / 1000.0).abs() < 0.1);
    }
}
