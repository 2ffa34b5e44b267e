//! One shard as the training thread hands it over, checked before it is queued.

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::placement::{Placements, Reduction};
use backtape::role::Role;
use backtape::shard::{MAX_DIMENSIONS, TensorKey, When};

/// Bytes that the recorder may read from its own thread after the call has
/// returned. Immutable by contract: what is hashed must be what is written.
pub trait Payload: AsRef<[u8]> + Send {}

impl<T: AsRef<[u8]> + Send> Payload for T {}

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
    /// The framework's fingerprint of this box; `None`: computed from the box.
    pub fingerprint: Option<Fingerprint>,
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
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) length: u64,
    pub(crate) payload: Box<dyn Payload>,
}

impl Capture {
    /// Refuses what no reader could make sense of; the sentence says why.
    pub(crate) fn check(self) -> Result<Queued, String> {
        let tensor = Name::new(self.tensor.as_str()).map_err(|error| error.to_string())?;
        let role = match &self.role {
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
        // The payload is the caller's code: its panic must not reach the training loop.
        let measured = std::panic::AssertUnwindSafe(|| self.payload.as_ref().as_ref().len() as u64);
        let length = std::panic::catch_unwind(measured).map_err(|_| "its payload panicked")?;
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
            fingerprint: self.fingerprint,
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
