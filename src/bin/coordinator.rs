//! The coordinator.
fn main() {}
