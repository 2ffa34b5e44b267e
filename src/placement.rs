//! The job's device mesh and how a tensor is distributed over it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The job's logical device grid: its named axes, outermost first, and their sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mesh(pub Vec<(String, u32)>);

/// A rank's coordinate on each axis of the mesh.
pub type MeshCoordinates = BTreeMap<String, u32>;

/// How the values that several ranks hold combine into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
}

/// How a tensor is distributed along one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Each coordinate holds a slice along this dimension of the tensor.
    Shard(u32),
    /// Every coordinate holds the same values.
    Replicate,
    /// Every coordinate holds an addend of the tensor; the reduction combines them.
    Partial(Reduction),
}

/// Placement per mesh axis, by the axis's name.
pub type Placements = BTreeMap<String, Placement>;

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axes: Vec<_> = self.0.iter().map(|(name, size)| format!("{name}={size}")).collect();
        f.write_str(&axes.join(" x "))
    }
}
