//! Reads a journal to verify a dump: is every line intact, and do its events of a step agree with
//! the step's manifest?
//!
//! It changes nothing and needs no coordinator. The checksums of the lines form a chain, so that an
//! altered, dropped or moved line is detected. If lines are missing at the end the rest is a valid
//! chain: that is detected only if they contained events of a committed step.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::event::Event;
use super::journal::{self, Batch, JournalError};
use super::state::AttemptState;
use crate::FORMAT_VERSION;
use crate::head::HeadDeclaration;
use crate::identity::{Rank, Step};
use crate::manifest::Manifest;

/// Longest journal that is read: that of a million steps of a hundred ranks. Reading a longer one
/// would take too long for a check of one step.
pub const MAX_EXAMINED_BYTES: u64 = 1 << 30;

/// What a journal contains of one step.
#[derive(Debug)]
pub struct Examined {
    /// Bytes after the last valid line: an incomplete write, or an altered line.
    pub torn_bytes: u64,
    /// The attempt's state from the events of the step; `None` if the journal has no opening event.
    state: Option<AttemptState>,
}

/// Reads the journal at `path` and applies its events of `step`.
pub fn examine(path: &Path, step: Step) -> Result<Examined, JournalError> {
    let read = |source| JournalError::Read { path: path.into(), source };
    let file = File::open(path).map_err(read)?;
    let bytes = file.metadata().map_err(read)?.len();
    if bytes > MAX_EXAMINED_BYTES {
        let (path, most) = (path.display().to_string(), MAX_EXAMINED_BYTES);
        return Err(JournalError::TooLarge { path, bytes, most });
    }
    examine_from(path, BufReader::new(file), step)
}

/// The same from a reader; `path` appears only in errors.
pub fn examine_from(path: &Path, from: impl BufRead, step: Step) -> Result<Examined, JournalError> {
    let mut examined = Examined { torn_bytes: 0, state: None };
    examined.torn_bytes = journal::read(path, from, |json| examined.take(json, step))?.torn_bytes;
    Ok(examined)
}

impl Examined {
    /// Applies the events of a line if it mentions the step. Other lines are not parsed, because
    /// the journal of a long job is large and the checksums already show that they are intact.
    fn take(&mut self, json: &[u8], step: Step) -> Result<(), String> {
        let about = format!("\"step\":{step}");
        let mentioned = json.windows(about.len()).any(|window| window == about.as_bytes());
        if self.state.is_some() && !mentioned {
            return Ok(());
        }
        let batch: Batch = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        for event in batch.events {
            match (&mut self.state, event) {
                (None, Event::Opened(opened)) if opened.format_version > FORMAT_VERSION => {
                    return Err(format!(
                        "it has format version {}, this backtape reads up to {FORMAT_VERSION}",
                        opened.format_version
                    ));
                }
                (None, Event::Opened(opened)) => self.state = Some(AttemptState::new(opened)),
                (None, _) => return Err("it does not begin with the opening of its attempt".into()),
                (Some(state), event) => {
                    let same = match &event {
                        Event::Reported { step: of, .. } | Event::Closed { step: of, .. } => {
                            *of == step
                        }
                        _ => false,
                    };
                    if same {
                        state.check(&event).map_err(|refusal| refusal.to_string())?;
                        state.apply(&event, batch.at_ms);
                    }
                }
            }
        }
        Ok(())
    }

    /// The manifest that the coordinator would write for a step, if every rank closed it and every
    /// file was reported.
    pub fn manifest(&self, step: Step) -> Option<Manifest> {
        let bytes = self.state.as_ref()?.manifest(step)?;
        Manifest::from_bytes(&bytes).ok()
    }

    /// The ranks that did not close a step; `None` if the journal has no attempt.
    pub fn unclosed(&self, step: Step) -> Option<Vec<Rank>> {
        Some(self.state.as_ref()?.unclosed(step))
    }

    /// The loss head that the ranks declared when they closed a step.
    pub fn head(&self, step: Step) -> Option<HeadDeclaration> {
        self.state.as_ref()?.head(step).cloned()
    }

    /// The first difference between the journal and the manifest of its step, in words.
    pub fn contradicts(&self, manifest: &Manifest) -> Option<String> {
        let Some(state) = &self.state else {
            return Some("it does not know of its attempt".into());
        };
        let opened = state.opened();
        if (&opened.run, opened.attempt) != (&manifest.run, manifest.attempt) {
            return Some(format!("it is of run {} attempt {}", opened.run, opened.attempt));
        }
        // Comparing the headers' hashes is enough: a header contains the records of all its shards.
        let listed = manifest.files.iter();
        let listed = listed.map(|file| ((file.rank, file.name.clone()), file.header_hash));
        match state.complete_files(manifest.step) {
            None => Some("by it the step was never complete".into()),
            Some(recorded) if recorded != listed.collect() => {
                Some("by it other files were reported".into())
            }
            Some(_) => None,
        }
    }
}
