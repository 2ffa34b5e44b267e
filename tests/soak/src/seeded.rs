//! `soak seeded`: would the harnesses see it? Each known fault is seeded into the product, one
//! at a time, and the harness that is to catch it must fail, for the reason that is named; the
//! same harness must pass without it.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use backtape::faults;
use clap::Args;

/// How long a harness may take to catch its fault.
const LIMIT: Duration = Duration::from_secs(300);

/// A fault, the harness that catches it, and words of what it then says.
struct Fault {
    name: &'static str,
    what: &'static str,
    harness: &'static [&'static str],
    says: &'static str,
}

const fn fault(
    name: &'static str,
    what: &'static str,
    harness: &'static [&'static str],
    says: &'static str,
) -> Fault {
    Fault { name, what, harness, says }
}

const KILL: &[&str] = &["kill", "--trials", "200"];
const TORN: &[&str] = &["kill", "--trials", "200", "--point", "journal.write"];
const CONTRACT: &[&str] = &["contract"];
const FAIL_OPEN: &[&str] = &["fail-open"];
const ORDER: &[&str] = &["order"];

/// Every fault: the promise is broken where it says, and nowhere else.
const FAULTS: &[Fault] = &[
    fault(
        "ack-before-journal",
        "acknowledged, and journalled a round later",
        TORN,
        "acknowledged,",
    ),
    fault("no-journal-fsync", "the journal is written and not synced", ORDER, "before its record"),
    fault("no-directory-fsync", "a name is not synced in its directory", ORDER, "the name of"),
    fault(
        "retried-fsync",
        "a failed fsync is tried again and believed",
        ORDER,
        "before its record",
    ),
    fault("name-before-data", "a file has its name before its bytes are synced", ORDER, "its name"),
    fault(
        "manifest-before-last-ack",
        "committed before the last rank closed",
        KILL,
        "is committed without",
    ),
    fault("no-fencing", "a superseded attempt goes on", CONTRACT, "superseded attempt"),
    fault("dedupe-by-name", "the same name is taken for the same bytes", CONTRACT, "AlreadyExists"),
    fault("ignored-short-write", "half of a shard's bytes are written", KILL, "has other bytes"),
    fault(
        "panic-reaches-job",
        "a panic of the recorder is one of the job",
        FAIL_OPEN,
        "panicked into",
    ),
    fault("unbounded-queue", "captures are queued without end", FAIL_OPEN, "memory grew"),
    fault(
        "hash-not-checked",
        "an upload is believed as it arrives",
        CONTRACT,
        "changed on the way",
    ),
    fault("torn-line-believed", "a torn last line is taken for a whole one", TORN, "is damaged"),
    fault(
        "commit-forgotten",
        "a restart does not commit what was complete",
        KILL,
        "a restart forgot",
    ),
    fault("box-not-checked", "a box may leave its tensor", CONTRACT, "outside its tensor"),
    fault(
        "second-overwrites-first",
        "a second file replaces the first",
        CONTRACT,
        "is not what is kept",
    ),
];

#[derive(Args, Clone, Debug)]
pub(crate) struct SeededArguments {
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Only this fault
    #[arg(long)]
    pub only: Option<String>,
}

/// Seeds every fault in turn; an error when one of them was not caught.
pub(crate) fn run(arguments: &SeededArguments) -> anyhow::Result<()> {
    ensure!(faults::ACTIVE, "there are no faults in this build: build with --features faults");
    let chosen = |fault: &&Fault| arguments.only.as_ref().is_none_or(|only| fault.name == only);
    let chosen: Vec<&Fault> = FAULTS.iter().filter(chosen).collect();
    ensure!(!chosen.is_empty(), "{:?} is no fault", arguments.only);
    let mut harnesses: Vec<&[&str]> = chosen.iter().map(|fault| fault.harness).collect();
    harnesses.sort_unstable();
    harnesses.dedup();
    for harness in harnesses {
        let (passed, said) = run_harness(harness, arguments.seed, None)?;
        ensure!(passed, "soak {} fails without any fault: {said}", harness.join(" "));
    }
    let mut caught = 0;
    for fault in &chosen {
        let begin = Instant::now();
        let (passed, said) = run_harness(fault.harness, arguments.seed, Some(fault.name))?;
        let seen = !passed && said.contains(fault.says);
        caught += usize::from(seen);
        let by = format!("soak {}", fault.harness.join(" "));
        let verdict = if seen { "caught by" } else { "NOT CAUGHT BY" };
        let (name, what) = (fault.name, fault.what);
        println!(
            "seeded: {name:<25} {verdict} {by:<44} {:>5.1} s  ({what})",
            begin.elapsed().as_secs_f64()
        );
        if !seen {
            println!("seeded: it said: {said}");
        }
    }
    println!("seeded: seed {}, {caught} of {} faults caught", arguments.seed, chosen.len());
    ensure!(caught == chosen.len(), "{} faults were not caught", chosen.len() - caught);
    Ok(())
}

/// Runs a harness of this program; whether it passed, and what it said.
fn run_harness(
    harness: &[&str],
    seed: u64,
    seeded: Option<&str>,
) -> anyhow::Result<(bool, String)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(harness).env("RUST_BACKTRACE", "0");
    if harness[0] == "kill" {
        command.args(["--seed", &seed.to_string()]);
    }
    command.args(seeded.into_iter().flat_map(|name| ["--seeded", name]));
    let begin = Instant::now();
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(begin.elapsed() < LIMIT, "{command:?} took {:?}", begin.elapsed());
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}
