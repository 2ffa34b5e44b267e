//! Reassembles dumped shards, replays the loss backward stage by stage and says
//! where the gradients diverge.

pub mod kernels;
