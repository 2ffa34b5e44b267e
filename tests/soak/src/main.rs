//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod contract;
mod fail_open;
mod io_errors;
mod job;
mod kill;
mod ledger;
mod oracle;
mod order;
mod processes;
mod random;
mod rank;
mod ready;
mod seeded;

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
    /// kill -9 of coordinators and ranks, at random moments and at named points
    Kill(kill::KillArguments),
    /// Fails the k-th I/O call, for every k
    IoErrors(io_errors::IoErrorsArguments),
    /// What a coordinator must refuse, and what it must keep
    Contract(contract::ContractArguments),
    /// What a training loop must never notice
    FailOpen(fail_open::FailOpenArguments),
    /// How soon a killed coordinator answers again, with 10,000 shards on record
    Ready(ready::ReadyArguments),
    /// Seeds known faults: each must be caught
    Seeded(seeded::SeededArguments),
    /// What a power cut would leave, told from the system calls
    Order(order::OrderArguments),
    #[command(hide = true)]
    Rank(rank::RankArguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {
        Campaign::Kill(arguments) => kill::run(&arguments),
        Campaign::Contract(arguments) => contract::run(&arguments),
        Campaign::FailOpen(arguments) => fail_open::run(&arguments),
        Campaign::Order(arguments) => order::run(&arguments),
        Campaign::IoErrors(arguments) => io_errors::run(&arguments),
        Campaign::Seeded(arguments) => seeded::run(&arguments),
        Campaign::Ready(arguments) => ready::run(&arguments),
        Campaign::Rank(arguments) => rank::run(&arguments),
    }
}
