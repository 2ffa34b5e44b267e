//! Why two dumps cannot be compared.

use backtape::shard::TensorKey;

use crate::assemble::AssembleError;

/// Why two dumps cannot be compared as asked.
#[derive(Debug, thiserror::Error)]
pub enum AgainstError {
    /// A pattern names nothing.
    #[error(
        "--compare {pattern:?} matches no tensor and no role: choose among what is held, {recorded}"
    )]
    Nothing {
        /// As typed.
        pattern: String,
        /// What is there.
        recorded: String,
    },
    /// A tensor that is there cannot be put together.
    #[error("{key} cannot be reassembled")]
    Assemble {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        source: AssembleError,
    },
}
