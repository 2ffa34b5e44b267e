//! Why there is no report.

use std::path::PathBuf;

use super::defect::Panicked;
use crate::algebra::against::MappingError;
use crate::dump::OpenError;
use crate::head::step::StepError;
use crate::precision::PrecisionError;
use crate::replay::against::error::AgainstError;
use crate::report::Report;
use crate::spelling::hint;
use crate::trajectory::ReadError;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The dump could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The head could not be replayed.
    #[error("no verdict on {path}")]
    Step {
        /// The dump.
        path: PathBuf,
        /// Why.
        source: Box<StepError>,
    },
    /// A word of `--compare` is no role, and there is nothing to compare names with.
    #[error(
        "--compare {word:?} is not a role{meant}: known are {known}; patterns of tensor names need --against DIR",
        meant = hint(word, known.split(", "))
    )]
    NotRole {
        /// As typed.
        word: String,
        /// Every role.
        known: String,
    },
    /// The two dumps could not be compared.
    #[error(transparent)]
    Against(#[from] AgainstError),
    /// A mapping names what no run has, or what does not fit.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// Precision could not be shown.
    #[error("no numbers on the precision of {path}")]
    Precision {
        /// The dump.
        path: PathBuf,
        /// Why.
        source: Box<PrecisionError>,
    },
    /// The scalars could not be read.
    #[error(transparent)]
    Trajectory(#[from] ReadError),
    /// Scalars lie in several attempts.
    #[error("{path} holds scalars of several attempts: choose one of {attempts} with --attempt")]
    SeveralAttempts {
        /// The run.
        path: PathBuf,
        /// Their numbers.
        attempts: String,
    },
    /// The page could not be written.
    #[error("the page cannot be written to {path}: choose another file for --report")]
    Page {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A defect of ours.
    #[error("{panicked}")]
    Panicked {
        /// What panicked, and where.
        panicked: Panicked,
        /// What was found before it.
        found: Option<Box<Report>>,
    },
}

impl From<Panicked> for RunError {
    fn from(panicked: Panicked) -> RunError {
        RunError::Panicked { panicked, found: None }
    }
}
