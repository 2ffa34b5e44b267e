//! The tape of one step, recorded or kept in the ring.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use backtape::head::HeadDeclaration;
use backtape::role::Role;
use backtape::selection::Selection;
use backtape::shard::TensorKey;

use crate::capture::{Capture, Queued};
use crate::error::RecorderError;
use crate::omissions::Omissions;
use crate::queue::{Command, Ending, Refused};
use crate::recorder::{Shared, lock};

/// The recording of one step.
pub struct Tape {
    shared: Arc<Shared>,
    step: u64,
    selection: Arc<Selection>,
    /// True when the ring keeps what is captured.
    held: bool,
    state: Mutex<TapeState>,
}

#[derive(Default)]
struct TapeState {
    head: Option<Box<HeadDeclaration>>,
    omissions: Omissions,
    /// Which tensors the size limits let in, and their bytes so far.
    sizes: BTreeMap<TensorKey, bool>,
    bytes: u64,
    /// What did not fit first: from there on the step is left out.
    gap: Option<String>,
    closed: bool,
}

impl Tape {
    pub(crate) fn new(
        shared: Arc<Shared>,
        step: u64,
        selection: Arc<Selection>,
        held: bool,
    ) -> Tape {
        Tape { shared, step, selection, held, state: Mutex::default() }
    }

    /// True when this tensor is asked for: what is not need not be computed.
    /// The ring keeps what plays a part in the loss head alone.
    pub fn wants(&self, tensor: &str, role: Option<&str>, microbatch: Option<u32>) -> bool {
        let part = !self.held || role.is_some() || Role::from_name(tensor).is_some();
        part && self.selection.wants(tensor, microbatch)
    }

    /// Which step this is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Declares the loss head of this step. The same declaration again is fine.
    pub fn head(&self, declaration: HeadDeclaration) -> Result<(), RecorderError> {
        if !survives_json(&declaration) {
            return Err(RecorderError::HeadNotFinite { step: self.step, rank: self.shared.rank() });
        }
        let mut state = lock(&self.state);
        match &state.head {
            Some(first) if **first != declaration => {
                Err(RecorderError::HeadDisagrees { step: self.step, rank: self.shared.rank() })
            }
            _ => {
                state.head = Some(Box::new(declaration));
                Ok(())
            }
        }
    }

    /// Hands one shard to the background. An error means that the shard is not
    /// in the dump; the step's close reports it with its reason. What was not
    /// asked for is passed over.
    pub fn record(&self, capture: Capture) -> Result<(), RecorderError> {
        let (tensor, microbatch) = (capture.tensor.clone(), capture.microbatch);
        if !self.wants(&tensor, capture.role.as_deref(), microbatch) {
            return Ok(());
        }
        let handed = match capture.check().map_err(Refused::Unfit) {
            Ok(queued) if !self.fits(&queued) => Ok(()),
            Ok(queued) => self.hand_over(queued),
            Err(refused) => Err(refused),
        };
        match handed {
            Ok(()) => self.shared.strict_check(),
            Err(Refused::Closed) => Err(self.closed()),
            Err(Refused::Full(reason) | Refused::Unfit(reason)) => {
                self.omit(&tensor, microbatch, reason.clone());
                Err(RecorderError::Omitted {
                    tensor,
                    step: self.step,
                    rank: self.shared.rank(),
                    reason,
                })
            }
        }
    }

    fn hand_over(&self, queued: Queued) -> Result<(), Refused> {
        if self.held {
            self.shared.ring.push(self.step, queued);
            return Ok(());
        }
        // One contiguous gap: what follows would be let in or not by how fast the disk
        // happens to be, and a step with scattered holes proves nothing.
        if let Some(first) = &lock(&self.state).gap {
            return Err(Refused::Full(format!(
                "the rest of the step is left out after {first} was refused"
            )));
        }
        let (cap, key) = (self.shared.plan.settings.call_cap, queued.key.to_string());
        let pushed = self.shared.queue.push_capture(self.step, queued, cap);
        if matches!(pushed, Err(Refused::Full(_))) {
            lock(&self.state).gap = Some(key);
        }
        pushed
    }

    /// Holds a tensor against the size limits, the whole of it at its first
    /// shard, so that no tensor is in the dump by half. One that is left out is
    /// named, once.
    fn fits(&self, queued: &Queued) -> bool {
        let (most_tensor, most_step) =
            (self.selection.max_tensor_bytes, self.selection.max_step_bytes);
        if most_tensor.is_none() && most_step.is_none() {
            return true;
        }
        let mut state = lock(&self.state);
        if let Some(known) = state.sizes.get(&queued.key) {
            return *known;
        }
        let elements = queued.shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size));
        let bytes = elements.and_then(|n| n.checked_mul(queued.dtype.width() as u64));
        let (bytes, so_far) = (bytes.unwrap_or(u64::MAX), state.bytes);
        let reason = match (most_tensor, most_step) {
            (Some(most), _) if bytes > most.0 => {
                Some(format!("its {bytes} bytes are more than max_tensor_bytes, {most}"))
            }
            (_, Some(most)) if so_far.saturating_add(bytes) > most.0 => Some(format!(
                "its {bytes} bytes and the {so_far} bytes before it are more than max_step_bytes, {most}"
            )),
            _ => None,
        };
        state.sizes.insert(queued.key.clone(), reason.is_none());
        let Some(reason) = reason else {
            state.bytes = so_far.saturating_add(bytes);
            return true;
        };
        drop(state);
        self.omit(queued.key.tensor.as_str(), queued.key.microbatch.map(|mb| mb.0), reason);
        false
    }

    /// Says that a tensor is not recorded, and why, so that it is not silently absent.
    pub fn omit(&self, tensor: &str, microbatch: Option<u32>, reason: String) {
        lock(&self.state).omissions.add(tensor, microbatch, &reason);
        self.shared.omitted(self.step, tensor, microbatch, &reason);
    }

    /// Ends the step; returns at once, the background reports and closes it.
    pub fn close(self) -> Result<(), RecorderError> {
        let (head, omissions) = {
            let mut state = lock(&self.state);
            state.closed = true;
            (state.head.take(), std::mem::take(&mut state.omissions))
        };
        if self.held {
            if self.shared.ring.close(self.step, head, omissions) {
                self.shared.queue.push_order(Command::Ring(self.step));
            }
            return self.shared.strict_check();
        }
        let selection = self.selection.clone();
        let ending = Ending { head, omissions, selection, late: false };
        match self.shared.queue.push_end(Command::Close(self.step, Box::new(ending))) {
            Ok(()) => self.shared.strict_check(),
            Err(Refused::Closed) => Err(self.closed()),
            Err(Refused::Full(detail) | Refused::Unfit(detail)) => {
                Err(RecorderError::Faulty { rank: self.shared.rank(), detail })
            }
        }
    }

    fn closed(&self) -> RecorderError {
        RecorderError::Closed { rank: self.shared.rank() }
    }
}

/// JSON has no NaN and no infinity: they would come back as absent options.
fn survives_json(declaration: &HeadDeclaration) -> bool {
    let bytes = serde_json::to_vec(declaration).ok();
    let back = bytes.and_then(|bytes| serde_json::from_slice::<HeadDeclaration>(&bytes).ok());
    back.as_ref() == Some(declaration)
}

/// A tape that was dropped (the step raised, say) leaves its step partial:
/// what was captured is kept, but nobody said that it was all.
impl Drop for Tape {
    fn drop(&mut self) {
        if lock(&self.state).closed {
            return;
        }
        if self.held {
            self.shared.ring.abandon(self.step);
        } else {
            let _ = self.shared.queue.push_end(Command::Abandon(self.step));
        }
    }
}
