//! One shard on its way from the job to its file: the job's description of it and its bytes.

use backtape::dtype::Dtype;
use backtape::faults;
use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;
use backtape::shard::{MAX_DIMENSIONS, Shard, TensorKey, When};

/// The bytes of a shard. The recorder reads them on its own thread after the call has returned, and
/// more than once, so they must not change: what is hashed must be what is written.
pub trait Payload: Send {
    /// How many there are; known without waiting for them.
    fn length(&self) -> usize;

    /// The bytes, or one sentence why they did not come. May wait for a device, so only the
    /// recorder's own thread asks.
    fn bytes(&self) -> Result<&[u8], String>;

    /// The fingerprint that a device computed of its own memory, as the elements at these global
    /// positions; `None` where it computed none, or one of other positions.
    fn fingerprint(&self, _dtype: Dtype, _place: &IndexBox) -> Option<Fingerprint> {
        None
    }
}

/// Bytes in host memory are there at once.
impl<T: AsRef<[u8]> + Send> Payload for T {
    fn length(&self) -> usize {
        self.as_ref().len()
    }

    fn bytes(&self) -> Result<&[u8], String> {
        Ok(self.as_ref())
    }
}

/// Who says where the elements of a shard lie in the global tensor.
#[derive(Clone, Debug, Default)]
pub enum Located {
    /// Only the box: the fingerprint proves transport, not place.
    #[default]
    ByBox,
    /// The framework has computed the fingerprint, on the sharded array.
    BySums(Fingerprint),
    /// The framework computes the fingerprint, which arrives with the payload.
    ByPayload,
    /// The framework's own global indices along each dimension, as ranges `[start, end)` that
    /// together are as long as the box is wide; the recorder computes the fingerprint from
    /// them, not from the box.
    ByIndices(Vec<Vec<(u64, u64)>>),
}

impl Located {
    /// The fingerprint of a shard's bytes.
    pub(crate) fn fingerprint(&self, dtype: Dtype, place: &IndexBox, bytes: &[u8]) -> Fingerprint {
        match self {
            // `ByPayload` comes here only when its sums did not: else `measure` has put them in.
            Located::ByBox | Located::ByPayload => Fingerprint::of(dtype, place, bytes),
            Located::BySums(sums) => *sums,
            Located::ByIndices(runs) => {
                let list = |runs: &Vec<(u64, u64)>| runs.iter().flat_map(|&(a, b)| a..b).collect();
                Fingerprint::at(dtype, &runs.iter().map(list).collect::<Vec<_>>(), bytes)
            }
        }
    }

    /// The positions of which a device must have computed its sums for them to be this shard's.
    /// The framework's indices are such a box where they are contiguous along each dimension, as
    /// they are in a shard of one piece.
    pub(crate) fn positions(&self, place: &IndexBox) -> Option<IndexBox> {
        match self {
            Located::BySums(_) => None,
            Located::ByBox | Located::ByPayload => Some(place.clone()),
            Located::ByIndices(runs) => {
                let single_run = |runs: &Vec<(u64, u64)>| match runs[..] {
                    [run] => Some(run),
                    _ => None,
                };
                runs.iter().map(single_run).collect::<Option<_>>().map(IndexBox)
            }
        }
    }

    /// Refuses indices that are not as many as the box is wide.
    fn check(&self, place: &IndexBox) -> Result<(), String> {
        let Located::ByIndices(indices) = self else { return Ok(()) };
        let length = |runs: &Vec<(u64, u64)>| {
            runs.iter().fold(0u64, |n, &(a, b)| n.saturating_add(b.saturating_sub(a)))
        };
        let lengths: Vec<u64> = indices.iter().map(length).collect();
        if lengths == place.extent() {
            return Ok(());
        }
        Err(format!("the framework says it holds {lengths:?} indices, box {place} has others"))
    }
}

/// One shard to record: what the job says of it, and its bytes.
pub struct Capture {
    /// Which value of which tensor.
    pub key: TensorKey,
    /// Which part of it; the role as [`TensorKey::role`] finds it.
    pub shard: Shard,
    /// Where the fingerprint's positions come from.
    pub located: Located,
    /// The bytes.
    pub payload: Box<dyn Payload>,
}

impl Capture {
    /// A shard of which the framework says no more than its box.
    pub fn new(key: TensorKey, shard: Shard, payload: Box<dyn Payload>) -> Capture {
        Capture { key, shard, located: Located::ByBox, payload }
    }

    /// How many bytes its payload has, once it was checked.
    pub(crate) fn length(&self) -> u64 {
        self.shard.bytes().unwrap_or(u64::MAX)
    }

    /// Refuses what no reader could make sense of; the sentence says why. What is queued, kept in
    /// the ring and written has been through here.
    pub(crate) fn checked(mut self) -> Result<Capture, String> {
        // The forward's value plays the role; what is computed again is compared with it.
        if self.key.when == Some(When::Recompute) {
            self.shard.role = None;
        }
        let Shard { dtype, shape, place, .. } = &self.shard;
        if shape.len() > MAX_DIMENSIONS {
            let dimensions = shape.len();
            return Err(format!(
                "it has {dimensions} dimensions, at most {MAX_DIMENSIONS} are accepted"
            ));
        }
        place.check(shape).map_err(|error| error.to_string())?;
        self.located.check(place)?;
        // The payload is the caller's code: its panic must not reach the training loop.
        let measured = std::panic::AssertUnwindSafe(|| self.payload.length() as u64);
        let length = match faults::seeded("panic-reaches-job") {
            true => measured.0(),
            false => std::panic::catch_unwind(measured).map_err(|_| "its payload panicked")?,
        };
        let wanted = self.shard.bytes();
        if wanted != Some(length) {
            let wanted = wanted.map_or("more than 2^64".into(), |n| n.to_string());
            return Err(format!(
                "its payload has {length} bytes, box {place} of {dtype} takes {wanted}"
            ));
        }
        Ok(self)
    }
}
