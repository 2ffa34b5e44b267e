//! The long campaigns of `make soak`: each prints its seed, how many trials it ran and what
//! failed, and exits with 1 when anything did. A trial is told by its seed alone.

#![allow(clippy::print_stdout)]

mod bitrot;
mod bucket;
mod contract;
mod fail_open;
mod frames;
mod hostile;
mod io_errors;
mod job;
mod kill;
mod launches;
mod ledger;
mod manifest;
mod marathon;
mod memory;
mod network;
mod oracle;
mod order;
mod parsers;
mod powercut;
mod processes;
mod race;
mod random;
mod rank;
mod ready;
mod reassembly;
mod reports;
mod scale;
mod seeded;
mod served;
mod small_dump;
mod stream;
mod trainee;
mod versions;
mod written;

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
    /// kill -9 of coordinators and ranks, at random moments and at named points
    Kill(kill::KillArguments),
    /// kill -9 of all ranks and their coordinator at once: the ranks of a launch meet in one attempt
    Launches(launches::LaunchesArguments),
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
    #[command(hide = true)]
    Trainee(trainee::TraineeArguments),
    /// R6: a training loop that records into a bucket which fails
    Bucket(bucket::Arguments),
    /// R15: a job for as long as it is given, with 1 % faults; memory must not grow
    Marathon(marathon::Arguments),
    /// R5: 8 ranks and a coordinator on hosts whose network fails
    Network(network::Arguments),
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
    /// Peers that lie, and an honest rank among them
    Hostile(hostile::Arguments),
    /// What the manifest of a large step costs to write and to read
    Manifest(manifest::Arguments),
    /// How many reports a coordinator takes in a second
    Reports(reports::Arguments),
    /// How fast a rank sends a file to a coordinator
    Stream(stream::Arguments),
    /// One step of a job of thousands of ranks
    Scale(scale::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().campaign {
        Campaign::Kill(arguments) => kill::run(&arguments),
        Campaign::Launches(arguments) => launches::run(&arguments),
        Campaign::Contract(arguments) => contract::run(&arguments),
        Campaign::FailOpen(arguments) => fail_open::run(&arguments),
        Campaign::Order(arguments) => order::run(&arguments),
        Campaign::IoErrors(arguments) => io_errors::run(&arguments),
        Campaign::Seeded(arguments) => seeded::run(&arguments),
        Campaign::Ready(arguments) => ready::run(&arguments),
        Campaign::Rank(arguments) => rank::run(&arguments),
        Campaign::Trainee(arguments) => trainee::run(&arguments),
        Campaign::Bucket(arguments) => bucket::run(&arguments),
        Campaign::Marathon(arguments) => marathon::run(&arguments),
        Campaign::Network(arguments) => network::run(&arguments),
        Campaign::Bitrot(arguments) => bitrot::run(arguments),
        Campaign::Reassembly(arguments) => reassembly::run(arguments),
        Campaign::Parsers(arguments) => parsers::run(&arguments),
        Campaign::Versions(arguments) => versions::run(&arguments),
        Campaign::Race(arguments) => race::run(&arguments),
        Campaign::RaceCommitter => race::committer(),
        Campaign::Powercut(arguments) => powercut::run(&arguments),
        Campaign::Hostile(arguments) => hostile::run(&arguments),
        Campaign::Manifest(arguments) => manifest::run(&arguments),
        Campaign::Reports(arguments) => reports::run(&arguments),
        Campaign::Stream(arguments) => stream::run(&arguments),
        Campaign::Scale(arguments) => scale::run(&arguments),
    }
}
