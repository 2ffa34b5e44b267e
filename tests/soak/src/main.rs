//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod bitrot;
mod parsers;
mod powercut;
mod race;
mod random;
mod reassembly;
mod small_dump;
mod versions;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: parsers::allocated::Counting = parsers::allocated::Counting;

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
    /// R7: damage a dump in every way; verify must find and name it
    Bitrot(bitrot::Arguments),
    /// R9: write tensors in random layouts and put them together again
    Reassembly(reassembly::Arguments),
    /// R8: throw damaged inputs at everything that reads bytes from outside
    Parsers(parsers::Arguments),
    /// R12: read golden dumps, refuse what is newer
    Versions(versions::Arguments),
    /// R10: committers race for one manifest
    Race(race::Arguments),
    /// A process of `race`
    #[command(hide = true)]
    RaceCommitter,
    /// R3: cut the power of a file system under real writers
    Powercut(powercut::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {
        Campaign::Bitrot(arguments) => bitrot::run(arguments),
        Campaign::Reassembly(arguments) => reassembly::run(arguments),
        Campaign::Parsers(arguments) => parsers::run(&arguments),
        Campaign::Versions(arguments) => versions::run(&arguments),
        Campaign::Race(arguments) => race::run(&arguments),
        Campaign::RaceCommitter => race::committer(),
        Campaign::Powercut(arguments) => powercut::run(&arguments),
    }
}
