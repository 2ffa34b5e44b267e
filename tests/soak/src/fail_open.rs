//! `soak fail-open`: what a training loop must never notice. Ranks of their own processes meet
//! a coordinator that is absent, a payload that panics, and a recorder whose thread dies; each
//! must end by itself, in time, without a panic, and say what was not recorded.

use std::time::Duration;

use anyhow::{Context, ensure};
use backtape::faults;
use clap::Args;

use crate::job::Job;
use crate::ledger::{self, Told};
use crate::processes::{Yard, memory};

/// How long a rank may take in all, deadlines included.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct FailOpenArguments {
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<std::path::PathBuf>,
    /// A fault that is seeded into every process, to see whether it is found
    #[arg(long, default_value = "")]
    pub seeded: String,
}

struct Case {
    sentence: &'static str,
    job: Job,
    coordinator: bool,
    options: &'static [&'static str],
    faults: &'static str,
    /// What the recorder's faults or omissions must say; empty: there are none.
    said: &'static str,
}

fn cases() -> Vec<Case> {
    let job = |steps, shards, bytes| Job { seed: 1, world: 1, steps, files: 2, shards, bytes };
    let absent = &["--join-ms", "1500", "--step-ms", "500", "--heedless", "--queue-mib", "4"];
    let mut all = vec![
        Case {
            sentence: "without a coordinator memory stays within its cap, and nobody waits",
            // About 128 MiB, of which the queue holds 4.
            job: job(16, 8, 1 << 20),
            coordinator: false,
            options: absent,
            faults: "",
            said: "no coordinator was found",
        },
        Case {
            sentence: "a payload that panics is omitted, and the job goes on",
            job: job(3, 2, 2048),
            coordinator: true,
            options: &["--panics"],
            faults: "",
            said: "its payload panicked",
        },
    ];
    if faults::ACTIVE {
        all.push(Case {
            sentence: "a recorder whose thread panics is named, and the job goes on",
            job: job(3, 2, 2048),
            coordinator: true,
            options: &["--join-ms", "2000", "--step-ms", "2000"],
            faults: "recorder.thread=panic@3",
            said: "its thread panicked",
        });
    } else {
        println!("fail-open: A THREAD THAT PANICS IS NOT TRIED: build with --features faults");
    }
    all
}

/// Runs every case.
pub(crate) fn run(arguments: &FailOpenArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let cases = cases();
    for case in &cases {
        meet(case, &arguments.seeded)
            .with_context(|| format!("fail-open: FAILED: {}", case.sentence))?;
    }
    println!("fail-open: {} cases hold", cases.len());
    Ok(())
}

fn meet(case: &Case, seeded: &str) -> anyhow::Result<()> {
    let mut yard = Yard::new(&memory())?;
    let _coordinator = match case.coordinator {
        true => Some(yard.coordinator(1)?),
        false => None,
    };
    let faults = match seeded {
        "" => case.faults.to_string(),
        name => format!("{},seeded:{name}", case.faults),
    };
    let mut rank = yard.ranks(&case.job, (0, 1), 0, case.options, &faults)?;
    let status = rank.wait(LIMIT)?.context("it never ends")?;
    ensure!(status.success(), "the training side was disturbed ({status}): {}", rank.log()?);
    let told: Vec<Told> = yard
        .ledgers()?
        .iter()
        .map(|path| ledger::read(path))
        .collect::<Result<Vec<_>, _>>()?
        .concat();
    let closed = told.iter().find_map(|line| match line {
        Told::Closed { faults, .. } => Some(faults.as_str()),
        _ => None,
    });
    let closed = closed.context("its recorder was not closed")?;
    ensure!(closed.contains(case.said), "its faults do not say {:?}: {closed:?}", case.said);
    ensure!(case.said.is_empty() == closed.is_empty(), "its faults: {closed:?}");
    Ok(())
}
