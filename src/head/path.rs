//! What a job declares of a path of its own: what it rounds, how it sums, its tiles.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Tile sizes of a fused path, where the job declares them.
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

/// A path of the user's own: what it rounds and how it sums. A TOML file of
/// `--policy` has the same fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyDeclaration {
    /// `plain`, `fused` or `chunked`: the order of the walk.
    pub base: Option<String>,
    /// Rounding point to dtype: `input`, `product`, `logits`, `p`, `dlogits`,
    /// `label_grad`, `parts`, `output`.
    pub round: BTreeMap<String, String>,
    /// Sum to how it is taken: `logits`, `lse`, `dq`, `dk`, `label_scatter`,
    /// `tiles` (partial results of tiles), `chunks` (of token chunks).
    pub sums: BTreeMap<String, SumDeclaration>,
    /// Tile sizes.
    pub tiles: DeclaredTiles,
}

/// How one sum is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumDeclaration {
    /// Dtype of the accumulator.
    pub dtype: String,
    /// `sequential`, `blocked`, `pairwise`, `kahan` or `neumaier`; absent: not known.
    #[serde(default)]
    pub order: Option<String>,
    /// Addends of a block, for `blocked`.
    #[serde(default)]
    pub block: Option<u32>,
}
