//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod powercut;
mod random;
mod small_dump;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "soak", version, about = "Long campaigns against the promise that nothing is lost")]
struct Arguments {
    #[command(subcommand)]
    campaign: Campaign,
}

#[derive(Subcommand)]
enum Campaign {
    /// R3: cut the power of a file system under real writers
    Powercut(powercut::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {
        Campaign::Powercut(arguments) => powercut::run(&arguments),
    }
}
