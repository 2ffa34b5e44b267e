//! The tape of one step, which is recorded or kept in the ring: what the training thread hands
//! shards to.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use backtape::head::HeadDeclaration;
use backtape::role::Role;
use backtape::selection::{ByteLimit, Selection};
use backtape::shard::{Shard, TensorKey};

use crate::capture::Capture;
use crate::error::RecorderError;
use crate::omissions::Omissions;
use crate::queue::{Command, Ending, Refused};
use crate::recording::{Recording, lock};

/// The recording of one step.
pub struct Tape {
    recording: Arc<Recording>,
    step: u64,
    selection: Arc<Selection>,
    /// True when the ring keeps what is captured.
    in_ring: bool,
    state: Mutex<TapeState>,
}

#[derive(Default)]
struct TapeState {
    head: Option<Box<HeadDeclaration>>,
    omissions: Omissions,
    /// Whether the size limits let a tensor in, and the bytes of those that they let in.
    fits: BTreeMap<TensorKey, bool>,
    bytes: u64,
    /// The first shard that found no room in the queue: from there on the step is left out.
    gap: Option<String>,
    closed: bool,
}

impl Tape {
    pub(crate) fn new(
        recording: Arc<Recording>,
        step: u64,
        selection: Arc<Selection>,
        in_ring: bool,
    ) -> Tape {
        Tape { recording, step, selection, in_ring, state: Mutex::default() }
    }

    /// True when this tensor is asked for; one that is not need not be computed. The ring keeps
    /// only tensors that have a role in the loss head.
    pub fn wants(&self, tensor: &str, role: Option<&str>, microbatch: Option<u32>) -> bool {
        let part = !self.in_ring || role.is_some() || Role::from_name(tensor).is_some();
        part && self.selection.wants(tensor, microbatch)
    }

    /// Which step this is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Declares the loss head of this step. Declaring the same again does nothing; another
    /// declaration is refused, as is one with a number that is not finite.
    pub fn head(&self, declaration: HeadDeclaration) -> Result<(), RecorderError> {
        if !survives_json(&declaration) {
            return Err(RecorderError::HeadNotFinite {
                step: self.step,
                rank: self.recording.rank(),
            });
        }
        let mut state = lock(&self.state);
        match &state.head {
            Some(first) if !first.has_same_options(&declaration) => {
                Err(RecorderError::HeadDisagrees { step: self.step, rank: self.recording.rank() })
            }
            _ => {
                state.head = Some(Box::new(declaration));
                Ok(())
            }
        }
    }

    /// Hands one shard to the recorder's thread, as [`Tape::record_all`] does.
    pub fn record(&self, capture: Capture) -> Result<(), RecorderError> {
        self.record_all(vec![capture])
    }

    /// Hands shards of one tensor, which have one key and role, to the recorder's thread. An error
    /// means that one of them is not in the dump, nor those after it; the step's close reports them
    /// with the reason. What was not asked for is passed over.
    pub fn record_all(&self, captures: Vec<Capture>) -> Result<(), RecorderError> {
        let Some(first) = captures.first() else { return Ok(()) };
        let (key, role) = (first.key.clone(), first.shard.role.map(Role::name));
        let (name, microbatch) = named(&key);
        if !self.wants(name, role, microbatch) {
            return Ok(());
        }
        let all = captures.len();
        let mut refused = None;
        let mut checked = VecDeque::with_capacity(all);
        for capture in captures {
            match capture.checked() {
                Ok(capture) => checked.push_back(capture),
                Err(reason) => {
                    refused = Some(Refused::Unfit(reason));
                    break;
                }
            }
        }
        let left = all - checked.len();
        if checked.front().is_some_and(|capture| !self.fits(capture)) {
            return self.recording.strict_check();
        }
        let (left, refused) = match self.hand_over(&key, &mut checked) {
            Err(refused) => (left + checked.len() + 1, Some(refused)),
            Ok(()) => (left, refused),
        };
        match refused {
            None => self.recording.strict_check(),
            Some(Refused::Closed) => Err(self.closed()),
            Some(Refused::Full(reason) | Refused::Unfit(reason)) => {
                let refused = self.omitted(name, microbatch, reason);
                // Each of the others could wait for room as long as this one did.
                if left > 1 {
                    let rest = left - 1;
                    let why = format!("{rest} more shards were not tried after one was refused");
                    self.omit(name, microbatch, why);
                }
                Err(refused)
            }
        }
    }

    /// Instead of [`Tape::record`], for a shard that cannot be recorded under the name or the role
    /// that the job gives it: names it among what is left out, where it was asked for at all.
    pub fn refuse(
        &self,
        tensor: &str,
        role: Option<&str>,
        microbatch: Option<u32>,
        reason: String,
    ) -> Result<(), RecorderError> {
        match self.wants(tensor, role, microbatch) {
            true => Err(self.omitted(tensor, microbatch, reason)),
            false => Ok(()),
        }
    }

    /// Names what is left out, and the error that says so.
    fn omitted(&self, tensor: &str, microbatch: Option<u32>, reason: String) -> RecorderError {
        self.omit(tensor, microbatch, reason.clone());
        let (step, rank) = (self.step, self.recording.rank());
        RecorderError::Omitted { tensor: tensor.into(), step, rank, reason }
    }

    /// Takes shards of one tensor out of the list as the queue, or the ring, takes them; one that
    /// is refused is out of it too.
    fn hand_over(&self, key: &TensorKey, captures: &mut VecDeque<Capture>) -> Result<(), Refused> {
        if self.in_ring {
            captures.drain(..).for_each(|capture| self.recording.ring.push(self.step, capture));
            return Ok(());
        }
        if captures.is_empty() {
            return Ok(());
        }
        // All that follows a refused capture is left out too. Otherwise it would depend on the
        // speed of the disk which captures get in, and a step with scattered gaps proves nothing.
        if let Some(first) = &lock(&self.state).gap {
            captures.pop_front();
            return Err(Refused::Full(format!(
                "the rest of the step is left out after {first} was refused"
            )));
        }
        let cap = self.recording.plan.settings.call_cap;
        let pushed = self.recording.queue.push_captures(self.step, captures, cap);
        if matches!(pushed, Err(Refused::Full(_))) {
            lock(&self.state).gap = Some(key.to_string());
        }
        pushed
    }

    /// True where the size limits let a tensor in. That is decided for the whole tensor at its
    /// first shard, so that no tensor is in the dump in part. One that is left out is named, once.
    fn fits(&self, capture: &Capture) -> bool {
        let limits = (self.selection.max_tensor_bytes, self.selection.max_step_bytes);
        if limits == (None, None) {
            return true;
        }
        let mut state = lock(&self.state);
        if let Some(known) = state.fits.get(&capture.key) {
            return *known;
        }
        let Shard { dtype, shape, .. } = &capture.shard;
        let elements = shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.width() as u64));
        let (bytes, before) = (bytes.unwrap_or(u64::MAX), state.bytes);
        let reason = too_large(limits, bytes, before);
        state.fits.insert(capture.key.clone(), reason.is_none());
        let Some(reason) = reason else {
            state.bytes = before.saturating_add(bytes);
            return true;
        };
        drop(state);
        let (name, microbatch) = named(&capture.key);
        self.omit(name, microbatch, reason);
        false
    }

    /// Says that a tensor is not recorded, and why, so that the dump names it.
    pub fn omit(&self, tensor: &str, microbatch: Option<u32>, reason: String) {
        lock(&self.state).omissions.add(tensor, microbatch, &reason);
        self.recording.omitted(self.step, tensor, microbatch, &reason);
    }

    /// Ends the step. Returns at once: the recorder's thread reports and closes it.
    pub fn close(self) -> Result<(), RecorderError> {
        let (head, omissions) = {
            let mut state = lock(&self.state);
            state.closed = true;
            (state.head.take(), std::mem::take(&mut state.omissions))
        };
        if self.in_ring {
            if self.recording.ring.close(self.step, head, omissions) {
                self.recording.queue.push_order(Command::Ring(self.step));
            }
            return self.recording.strict_check();
        }
        let selection = self.selection.clone();
        let ending = Ending { head, omissions, selection, late: false };
        match self.recording.queue.push_end(Command::Close(self.step, Box::new(ending))) {
            Ok(()) => self.recording.strict_check(),
            Err(Refused::Closed) => Err(self.closed()),
            Err(Refused::Full(detail) | Refused::Unfit(detail)) => {
                Err(RecorderError::Faulty { rank: self.recording.rank(), detail })
            }
        }
    }

    fn closed(&self) -> RecorderError {
        RecorderError::Closed { rank: self.recording.rank() }
    }
}

/// Why a tensor of so many bytes passes the limits of a tensor and of a step, of which the tensors
/// before it have taken `before`; `None` where it does not.
fn too_large(
    (most_tensor, most_step): (Option<ByteLimit>, Option<ByteLimit>),
    bytes: u64,
    before: u64,
) -> Option<String> {
    match (most_tensor, most_step) {
        (Some(most), _) if bytes > most.0 => {
            Some(format!("its {bytes} bytes are more than max_tensor_bytes, {most}"))
        }
        (_, Some(most)) if before.saturating_add(bytes) > most.0 => Some(format!(
            "its {bytes} bytes and the {before} bytes before it are more than max_step_bytes, {most}"
        )),
        _ => None,
    }
}

/// A tensor's name and microbatch, as omissions name them.
fn named(key: &TensorKey) -> (&str, Option<u32>) {
    (key.tensor.as_str(), key.microbatch.map(|microbatch| microbatch.0))
}

/// True where a declaration is the same once it was written as JSON and read again. JSON has no NaN
/// and no infinity: they would come back as options that were not given.
fn survives_json(declaration: &HeadDeclaration) -> bool {
    let bytes = serde_json::to_vec(declaration).ok();
    let back = bytes.and_then(|bytes| serde_json::from_slice::<HeadDeclaration>(&bytes).ok());
    back.as_ref() == Some(declaration)
}

/// A tape that is dropped without being closed leaves its step partial: what was captured is kept,
/// but nobody has said that it was all.
impl Drop for Tape {
    fn drop(&mut self) {
        if lock(&self.state).closed {
            return;
        }
        if self.in_ring {
            self.recording.ring.abandon(self.step);
        } else {
            let _ = self.recording.queue.push_end(Command::Abandon(self.step));
        }
    }
}
