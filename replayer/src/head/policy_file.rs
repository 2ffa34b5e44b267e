//! Placeholder.
use crate::kernels::policy::Policy;
use crate::kernels::tiles::Tiles;
use backtape::head::PolicyDeclaration;
/// E.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("x")]
pub struct PolicyError;
/// P.
pub fn policy_of(_: &PolicyDeclaration, defaults: Policy) -> Result<(Policy, Tiles), PolicyError> {
    Ok((defaults, Tiles::default()))
}
