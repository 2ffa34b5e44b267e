//! One shard as the training thread hands it over, checked before it is queued.

use backtape::dtype::Dtype;
use backtape::faults;
use backtape::fingerprint::Fingerprint;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::placement::{Placements, Reduction};
use backtape::role::Role;
use backtape::shard::{MAX_DIMENSIONS, TensorKey, When};

/// Bytes that the recorder may read from its own thread after the call has
/// returned. Immutable by contract: what is hashed must be what is written.
pub trait Payload: Send {
    /// How many there are; known without waiting for them.
    fn length(&self) -> usize;

    /// The bytes, or one sentence why they did not come. May wait for a device, so only the
    /// recorder's own thread asks.
    fn bytes(&self) -> Result<&[u8], String>;

    /// The fingerprint of what a device held at these positions, where one was computed there.
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
    /// The framework computed the fingerprint itself, on the sharded array.
    BySums(Fingerprint),
    /// The same, still on its way: it comes with the payload.
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
            // Of `ByPayload` whose sums did not come.
            Located::ByBox | Located::ByPayload => Fingerprint::of(dtype, place, bytes),
            Located::BySums(sums) => *sums,
            Located::ByIndices(runs) => {
                let list = |runs: &Vec<(u64, u64)>| runs.iter().flat_map(|&(a, b)| a..b).collect();
                Fingerprint::at(dtype, &runs.iter().map(list).collect::<Vec<_>>(), bytes)
            }
        }
    }

    /// The box that a device's sums must be of to be this shard's: of the framework's indices one
    /// where they are contiguous, as a shard of one piece is.
    pub(crate) fn positions(&self, place: &IndexBox) -> Option<IndexBox> {
        match self {
            Located::BySums(_) => None,
            Located::ByBox | Located::ByPayload => Some(place.clone()),
            Located::ByIndices(runs) => {
                let one = |runs: &Vec<(u64, u64)>| match runs[..] {
                    [run] => Some(run),
                    _ => None,
                };
                runs.iter().map(one).collect::<Option<_>>().map(IndexBox)
            }
        }
    }

    /// Refuses indices that are not as many as the box is wide.
    fn check(&self, place: &IndexBox) -> Result<(), String> {
        let Located::ByIndices(indices) = self else { return Ok(()) };
        let length = |runs: &Vec<(u64, u64)>| {
            runs.iter().fold(0u64, |n, &(a, b)| n.saturating_add(b.saturating_sub(a)))
        };
        let found: Vec<u64> = indices.iter().map(length).collect();
        if found == place.extent() {
            return Ok(());
        }
        Err(format!("the framework says it holds {found:?} indices, box {place} has others"))
    }
}

/// One shard to record.
pub struct Capture {
    /// Name of the global tensor.
    pub tensor: String,
    /// The part it plays in the loss head; `None`: its name, if that is a role.
    pub role: Option<String>,
    /// Its microbatch; `None` for weights and reduced gradients.
    pub microbatch: Option<u32>,
    /// When it was captured.
    pub when: Option<When>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of the global tensor.
    pub shape: Vec<u64>,
    /// The part of it that the payload holds, row-major.
    pub place: IndexBox,
    /// How the tensor lies on the mesh, as far as the framework says.
    pub placement: Placements,
    /// Set when the payload is this rank's addend, not the value.
    pub partial: Option<Reduction>,
    /// 0 for the first holder of this box, higher for its replicas.
    pub replica: u32,
    /// Where the fingerprint's positions come from.
    pub located: Located,
    /// True when a graph compiler made the code around the capture.
    pub compiled: bool,
    /// The bytes.
    pub payload: Box<dyn Payload>,
}

/// A capture that was checked and waits to be written.
pub(crate) struct Queued {
    pub(crate) key: TensorKey,
    pub(crate) role: Option<Role>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) place: IndexBox,
    pub(crate) placement: Placements,
    pub(crate) partial: Option<Reduction>,
    pub(crate) replica: u32,
    pub(crate) located: Located,
    pub(crate) compiled: bool,
    pub(crate) length: u64,
    pub(crate) payload: Box<dyn Payload>,
}

impl Capture {
    /// Refuses what no reader could make sense of; the sentence says why.
    pub(crate) fn check(self) -> Result<Queued, String> {
        let tensor = Name::new(self.tensor.as_str()).map_err(|error| error.to_string())?;
        let role = match &self.role {
            // The forward's value plays the part; what is computed anew is compared with it.
            _ if self.when == Some(When::Recompute) => None,
            None => Role::from_name(&self.tensor),
            Some(name) => Some(Role::from_name(name).ok_or_else(|| unknown_role(name))?),
        };
        if self.shape.len() > MAX_DIMENSIONS {
            let found = self.shape.len();
            return Err(format!(
                "it has {found} dimensions, at most {MAX_DIMENSIONS} are accepted"
            ));
        }
        self.place.check(&self.shape).map_err(|error| error.to_string())?;
        self.located.check(&self.place)?;
        // The payload is the caller's code: its panic must not reach the training loop.
        let measured = std::panic::AssertUnwindSafe(|| self.payload.length() as u64);
        let length = match faults::seeded("panic-reaches-job") {
            true => measured.0(),
            false => std::panic::catch_unwind(measured).map_err(|_| "its payload panicked")?,
        };
        let elements = self.place.elements();
        let wanted = elements.and_then(|n| n.checked_mul(self.dtype.width() as u64));
        if wanted != Some(length) {
            let wanted = wanted.map_or("more than 2^64".into(), |n| n.to_string());
            let (place, dtype) = (&self.place, self.dtype);
            return Err(format!(
                "its payload has {length} bytes, box {place} of {dtype} takes {wanted}"
            ));
        }
        Ok(Queued {
            key: TensorKey { tensor, microbatch: self.microbatch.map(Microbatch), when: self.when },
            role,
            dtype: self.dtype,
            shape: self.shape,
            place: self.place,
            placement: self.placement,
            partial: self.partial,
            replica: self.replica,
            located: self.located,
            compiled: self.compiled,
            length,
            payload: self.payload,
        })
    }
}

fn unknown_role(name: &str) -> String {
    let name: String = name.chars().take(80).collect();
    let known: Vec<_> = Role::ALL.iter().map(|role| role.name()).collect();
    format!("{name:?} is not a role; the roles are {}", known.join(" "))
}
