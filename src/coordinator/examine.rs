//! Reads a journal for whoever proves a dump: is every line what was written, and does it tell
//! of a step what the step's manifest tells?
//!
//! It changes nothing and needs no coordinator. Lines are chained by their checksums, so a line
//! that was altered, dropped or moved is found; lines cut off the end leave a sound chain, and
//! are found where they held something of a committed step.

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

/// Longest journal that is read: that of a million steps of a hundred ranks. Beyond, a look at
/// one step would take longer than anybody waits.
pub const MAX_EXAMINED_BYTES: u64 = 1 << 30;

/// What a journal was found to hold.
#[derive(Debug)]
pub struct Examined {
    /// Bytes behind the last sound line: cut off by a crash, or altered.
    pub torn_bytes: u64,
    /// The attempt as far as the step is concerned; `None` when it was never opened.
    state: Option<AttemptState>,
}

/// Reads the journal at `path`; of its events those that are about `step` are looked at.
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

/// The same of bytes from anywhere; `path` only names them.
pub fn examine_from(path: &Path, from: impl BufRead, step: Step) -> Result<Examined, JournalError> {
    let mut examined = Examined { torn_bytes: 0, state: None };
    examined.torn_bytes = journal::read(path, from, |json| examined.take(json, step))?.torn_bytes;
    Ok(examined)
}

impl Examined {
    /// Applies what a line says of the step. Others are not parsed: a journal of a long job is
    /// large, and its checksums are right.
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
                        state.apply(event, batch.at_ms);
                    }
                }
            }
        }
        Ok(())
    }

    /// The manifest of a step, where every rank closed it and every file was reported: what
    /// stood, or was about to stand, at its final name.
    pub fn manifest(&self, step: Step) -> Option<Manifest> {
        let bytes = self.state.as_ref()?.manifest(step)?;
        Manifest::from_bytes(&bytes).ok()
    }

    /// Ranks that did not close a step; `None` where nothing is known of its attempt.
    pub fn unclosed(&self, step: Step) -> Option<Vec<Rank>> {
        Some(self.state.as_ref()?.unclosed(step))
    }

    /// The head that the ranks declared which closed a step.
    pub fn head(&self, step: Step) -> Option<HeadDeclaration> {
        self.state.as_ref()?.head(step).cloned()
    }

    /// Where the journal and the manifest of its step tell different stories.
    pub fn contradicts(&self, manifest: &Manifest) -> Option<String> {
        let Some(state) = &self.state else {
            return Some("it does not know of its attempt".into());
        };
        let opened = state.opened();
        if (&opened.run, opened.attempt) != (&manifest.run, manifest.attempt) {
            return Some(format!("it is of run {} attempt {}", opened.run, opened.attempt));
        }
        // A header's hash is of all that the manifest says of the file's shards.
        let listed = manifest.files.iter();
        let listed = listed.map(|file| ((file.rank, file.name.clone()), file.header_hash));
        match state.complete_files(manifest.step) {
            None => Some("by it the step was never complete".into()),
            Some(own) if own != listed.collect() => Some("by it other files were reported".into()),
            Some(_) => None,
        }
    }
}
