//! Cheap looks at a divergence, a file each. What several causes ask for is worked out
//! when the first of them asks.

pub mod captured;
pub mod reference;
