//! R10: of all who create one manifest, exactly one wins, and all see the winner's bytes.
//!
//! Method: four threads and four processes create the same name at once, each its own bytes,
//! through `durable::create`; who won is what each was told, and what stands there is read by
//! each right after.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use backtape::hash::TrustHash;
use backtape::store::durable;
use clap::Args;

use crate::small_dump::content;

/// Committers of each kind.
const OF_EACH: u64 = 4;
/// What a committer's lines begin with, so that nothing else on its output is taken for one.
const MARK: &str = "race:";
/// The largest manifest of a race: several pages, so that a torn one would be seen.
const LONGEST: u64 = 20_000;

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Races
    #[arg(long, default_value_t = 10_000)]
    pub(crate) trials: u64,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Where the manifests lie: a disk, whose fsyncs make the committers meet
    #[arg(long)]
    pub(crate) store: Option<std::path::PathBuf>,
}

/// What one committer was told, and saw.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    won: bool,
    seen: TrustHash,
    /// Nanoseconds of one clock, before and after.
    during: (u128, u128),
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("race-committer");
    campaign(arguments, command).map(|line| println!("{line}"))
}

/// The process of a committer: a race on each line of its input.
pub(crate) fn committer() -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let [seed, who, at, target] = words[..] else { bail!("{line:?} is no race") };
        let outcome = commit(Path::new(target), seed.parse()?, who.parse()?, at.parse()?)?;
        let (begun, ended) = outcome.during;
        // A line of its own, whatever a test harness has printed before.
        println!("\n{MARK} {} {} {begun} {ended}", outcome.won, outcome.seen);
    }
    Ok(())
}

/// Creates the manifest at the moment `at`, or as soon after it as this committer runs.
fn commit(target: &Path, seed: u64, who: u64, at: u128) -> Result<Outcome> {
    let bytes = content(seed, who, LONGEST);
    while now() < at {
        std::thread::yield_now();
    }
    let begun = now();
    let won = durable::create(target, &bytes)?;
    let seen = TrustHash::of(&std::fs::read(target)?);
    Ok(Outcome { won, seen, during: (begun, now()) })
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}

/// A committer in another process.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(command: &mut Command) -> Result<Process> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers = child.stdout.take().context("its output is piped")?;
        let (orders, answers) = (child.stdin.take(), BufReader::new(answers).lines());
        Ok(Process { child, orders, answers })
    }

    fn answer(&mut self) -> Result<Outcome> {
        for line in self.answers.by_ref() {
            let line = line?;
            let Some(told) = line.strip_prefix(MARK) else { continue };
            let words: Vec<&str> = told.split_whitespace().collect();
            let [won, seen, begun, ended] = words[..] else { bail!("{line:?} is no answer") };
            let seen = TrustHash::try_from(seen.to_string())?;
            return Ok(Outcome {
                won: won.parse()?,
                seen,
                during: (begun.parse()?, ended.parse()?),
            });
        }
        bail!("a committer ended")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Its input ends, and with it the process; what does not end is ended.
        self.orders = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn campaign(arguments: &Arguments, mut committer: Command) -> Result<String> {
    let begun = Instant::now();
    let folder = match &arguments.store {
        Some(store) => tempfile::tempdir_in(store)?,
        None => tempfile::tempdir()?,
    };
    let starting = (0..OF_EACH).map(|_| Process::start(&mut committer));
    let mut processes: Vec<Process> = starting.collect::<Result<_>>()?;
    let (mut overlapped, mut won_by) = (0, BTreeMap::new());
    for trial in 0..arguments.trials {
        let name = format!("race: seed {} race {trial}", arguments.seed);
        let step = folder.path().join(format!("step-{trial:08}"));
        std::fs::create_dir(&step)?;
        let target = step.join("manifest.json");
        let seed = arguments.seed.wrapping_add(trial << 8);
        let outcomes = race(&target, seed, &mut processes).with_context(|| name.clone())?;
        let winner = judge(&outcomes, seed).with_context(|| name.clone())?;
        let left = std::fs::read_dir(&step)?.count();
        ensure!(left == 1, "{name}: {left} files lie where one manifest should");
        *won_by.entry(winner < OF_EACH as usize).or_insert(0u64) += 1;
        let within = |other: &&Outcome| other.during.0 < outcomes[winner].during.1;
        overlapped += u64::from(outcomes.iter().filter(within).count() > 1);
        std::fs::remove_dir_all(&step)?;
    }
    let (threads, others) = (won_by.get(&true).unwrap_or(&0), won_by.get(&false).unwrap_or(&0));
    let each = begun.elapsed().as_secs_f64() * 1e3 / arguments.trials.max(1) as f64;
    Ok(format!(
        "race: seed {}, {} races of {} committers, one winner each, all saw its bytes; {threads} won by threads, {others} by processes; in {overlapped} another began before the winner was done; {each:.2} ms each",
        arguments.seed,
        arguments.trials,
        2 * OF_EACH
    ))
}

fn race(target: &Path, seed: u64, processes: &mut [Process]) -> Result<Vec<Outcome>> {
    // Soon enough not to wait long, late enough that all have heard.
    let at = now() + 300_000;
    std::thread::scope(|scope| {
        let start = |who| scope.spawn(move || commit(target, seed, who, at));
        let threads: Vec<_> = (0..OF_EACH).map(start).collect();
        let mut ordered = Ok(());
        for (who, process) in (OF_EACH..).zip(processes.iter_mut()) {
            let line = format!("{seed} {who} {at} {}\n", target.display());
            let orders = process.orders.as_mut();
            let told = orders.map_or(Ok(()), |orders| orders.write_all(line.as_bytes()));
            ordered = ordered.and(told);
        }
        let mut outcomes = Vec::new();
        for thread in threads {
            outcomes.push(thread.join().map_err(|_| anyhow::anyhow!("a committer panicked"))??);
        }
        ordered?;
        for process in processes {
            outcomes.push(process.answer()?);
        }
        Ok(outcomes)
    })
}

/// Exactly one winner, whose bytes all have seen.
fn judge(outcomes: &[Outcome], seed: u64) -> Result<usize> {
    let winners: Vec<usize> = (0..outcomes.len()).filter(|&who| outcomes[who].won).collect();
    let [winner] = winners[..] else { bail!("{} winners: {winners:?}", winners.len()) };
    let wanted = TrustHash::of(&content(seed, winner as u64, LONGEST));
    for (who, outcome) in outcomes.iter().enumerate() {
        ensure!(outcome.seen == wanted, "committer {who} saw other bytes than those of {winner}");
    }
    Ok(winner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set in the processes that a test starts of itself: cargo builds no program for it.
    const COMMITTER: &str = "BACKTAPE_SOAK_COMMITTER";

    #[test]
    fn of_eight_committers_exactly_one_wins() {
        if std::env::var_os(COMMITTER).is_some() {
            return committer().unwrap();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "race::tests::of_eight_committers_exactly_one_wins"]);
        command.args(["--nocapture", "--test-threads=1"]).env(COMMITTER, "1");
        let arguments = Arguments { trials: 500, seed: 5, store: None };
        println!("{}", campaign(&arguments, command).unwrap());
    }
}
