//! What a command writes beside its text, and the text itself.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::CommandError;
use super::paint::paint;
use crate::postmortem::Target;

/// Writes text to standard output now, as far as somebody reads it: a closed pipe (`| head`) is
/// the reader's choice, not a failure.
pub(super) fn write_out(text: &str) {
    let mut out = anstream::stdout();
    let _ = out.write_all(paint(text).as_bytes()).and_then(|()| out.flush());
}

/// Where `--json` goes.
pub(super) enum Json {
    /// It was not asked for.
    Nowhere,
    /// `-`: to standard output, in place of the text.
    Output,
    /// To a file, beside the text.
    File(PathBuf, Target),
}

impl Json {
    /// What was typed; a replay may take long, so what cannot be written is said before it.
    pub(super) fn asked(path: Option<&Path>) -> Result<Json, CommandError> {
        match path {
            None => Ok(Json::Nowhere),
            Some(path) if path == Path::new("-") => Ok(Json::Output),
            Some(path) => {
                let wrong = |source| CommandError::Write { path: path.into(), source };
                Ok(Json::File(path.into(), Target::beside(path).map_err(wrong)?))
            }
        }
    }

    /// Whether it takes the place of the text.
    pub(super) fn is_output(&self) -> bool {
        matches!(self, Json::Output)
    }

    /// Writes the file; what goes to standard output.
    pub(super) fn output(
        self,
        json: impl Fn() -> String,
        text: impl Fn() -> String,
    ) -> Result<String, CommandError> {
        match self {
            Json::Nowhere => Ok(text()),
            Json::Output => Ok(json() + "\n"),
            Json::File(path, target) => {
                let written = target.write((json() + "\n").as_bytes());
                written.map_err(|source| CommandError::Write { path, source })?;
                Ok(text())
            }
        }
    }
}
