//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod frames;
mod hostile;
mod manifest;
mod memory;
mod random;
mod reports;
mod scale;
mod served;
mod written;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "soak",
    version,
    about = "Long campaigns against the promise that nothing is lost"
)]
struct Arguments {
    #[command(subcommand)]
    campaign: Campaign,
}

#[derive(Subcommand)]
enum Campaign {
    /// Peers that lie, and an honest rank among them
    Hostile(hostile::Arguments),
    /// What the manifest of a large step costs to write and to read
    Manifest(manifest::Arguments),
    /// How many reports a coordinator takes in a second
    Reports(reports::Arguments),
    /// One step of a job of thousands of ranks
    Scale(scale::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {
        Campaign::Hostile(arguments) => hostile::run(&arguments),
        Campaign::Manifest(arguments) => manifest::run(&arguments),
        Campaign::Reports(arguments) => reports::run(&arguments),
        Campaign::Scale(arguments) => scale::run(&arguments),
    }
}
