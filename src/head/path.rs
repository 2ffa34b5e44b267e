//! How a job declares the precision policy of its own implementation: what it rounds, how it sums
//! and its tile sizes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Tile sizes of a fused implementation, if the job declares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct DeclaredTiles {
    pub tokens: Option<u32>,
    pub vocab: Option<u32>,
}

impl DeclaredTiles {
    /// Whether no declared size is zero.
    pub(super) fn are_some(self) -> bool {
        [self.tokens, self.vocab].iter().all(|size| *size != Some(0))
    }
}

/// The precision policy of the user's implementation: what it rounds and how it sums. A TOML file
/// for `--policy` has the same fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyDeclaration {
    /// `plain`, `fused` or `chunked`: in which order the implementation computes its tiles.
    pub base: Option<String>,
    /// The dtype to which each rounding point rounds: `input`, `product`, `logits`, `p`, `dlogits`,
    /// `label_grad`, `parts`, `output`.
    pub round: BTreeMap<String, String>,
    /// How each sum is computed: `logits`, `lse`, `dq`, `dk`, `label_scatter`, `tiles` (partial
    /// results of tiles), `chunks` (partial results of token chunks).
    pub sums: BTreeMap<String, SumDeclaration>,
    /// Tile sizes.
    pub tiles: DeclaredTiles,
}

/// How one sum is computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumDeclaration {
    /// Dtype of the accumulator.
    pub dtype: String,
    /// `sequential`, `blocked`, `pairwise`, `kahan` or `neumaier`; absent if it is not known.
    #[serde(default)]
    pub order: Option<String>,
    /// Addends per block, for `blocked`.
    #[serde(default)]
    pub block: Option<u32>,
}
