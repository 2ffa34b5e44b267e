//! Cheap looks at a divergence, a file each. What several causes ask for is worked out
//! when the first of them asks.

pub mod addends;
pub mod captured;
pub mod dense;
pub mod direct;
pub mod extents;
pub mod labels;
pub mod maps;
pub mod misread;
pub mod nan;
pub mod orders;
pub mod reference;
pub mod replicas;
pub mod strays;
