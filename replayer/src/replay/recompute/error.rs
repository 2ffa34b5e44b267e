//! Why a stage cannot be recomputed.

use backtape::identity::Rank;

use crate::head::Stage;
use crate::head::step::StepError;

/// Why a stage cannot be recomputed.
#[derive(Debug, thiserror::Error)]
pub enum RecomputeError {
    /// The head's inputs or its declaration do not allow it.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Nothing is computed there.
    #[error(
        "{0} is an input of the head: it is recorded, not recomputed; tensor(\"{0}\") reads it"
    )]
    Input(Stage),
    /// No reference.
    #[error(
        "grad_norm cannot be recomputed: other gradients than the head's have no reference; the report's grad_norm has the norm with dk from the reference"
    )]
    GradNorm,
    /// Several microbatches, or another one.
    #[error("{stage} {asked}: the dump has microbatches {recorded}; {todo}")]
    Microbatch {
        /// The stage.
        stage: Stage,
        /// What was asked for, as words.
        asked: String,
        /// What there is.
        recorded: String,
        /// What to do.
        todo: &'static str,
    },
    /// A rank whose addend is not known.
    #[error("{stage} of rank {rank} is not known: {why}")]
    Rank {
        /// The stage.
        stage: Stage,
        /// The rank.
        rank: Rank,
        /// Why.
        why: String,
    },
    /// The head does not have the stage.
    #[error("{stage} cannot be recomputed: {why}")]
    Absent {
        /// The stage.
        stage: Stage,
        /// Why.
        why: String,
    },
    /// No plausible policy has this name.
    #[error("no plausible policy {asked:?}: this head has {known}")]
    Policy {
        /// As asked.
        asked: String,
        /// Their names.
        known: String,
    },
    /// Too much at once.
    #[error(
        "{stage} of {tokens} tokens and {classes} classes is {gib} GiB in f64: ask for some of the tokens with tokens=(first, end)"
    )]
    TooLarge {
        /// The stage.
        stage: Stage,
        /// T.
        tokens: usize,
        /// V.
        classes: usize,
        /// Its size.
        gib: u64,
    },
    /// Tokens that are not there.
    #[error("{stage}: tokens {from} to {to} do not lie in 0 to {tokens}")]
    Tokens {
        /// The stage.
        stage: Stage,
        /// First.
        from: usize,
        /// After the last.
        to: usize,
        /// T.
        tokens: usize,
    },
}
