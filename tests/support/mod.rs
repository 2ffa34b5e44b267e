//! What several tests need.

pub(crate) mod dump;
pub(crate) mod job;
pub(crate) mod program;
pub(crate) mod ranks;
pub(crate) mod regroup;
pub(crate) mod relaid;
pub(crate) mod s3;
