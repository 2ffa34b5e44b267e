//! The job's mesh and how a tensor lies on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The job's logical device grid: its named axes, outermost first, and their sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mesh(pub Vec<(String, u32)>);

/// Where a rank sits on each axis of the mesh.
pub type MeshCoordinates = BTreeMap<String, u32>;

/// How the values that several ranks hold combine into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// They add up.
    Sum,
    /// They average.
    Mean,
}

/// How a tensor lies along one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Cut along this dimension.
    Shard(u32),
    /// The same on every coordinate.
    Replicate,
    /// Every coordinate holds an addend.
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
