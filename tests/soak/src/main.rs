//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod random;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "soak", version, about = "Long campaigns against the promise that nothing is lost")]
struct Arguments {
    #[command(subcommand)]
    campaign: Campaign,
}

#[derive(Subcommand)]
enum Campaign {}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {}
}
