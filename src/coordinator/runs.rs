//! All runs of the store with their attempts; finds the one that a request concerns.

mod steering;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::arrivals::{Arrivals, Process};
use super::attempt_log::AttemptLog;
use super::attempts::{self, Choice, Entrant, Latest, Launch};
use super::config::{Config, Rules, StartError};
use super::event::{Event, Joined, Launched, Opened};
use super::limits::{MAX_ATTEMPTS, MAX_RUNS};
use super::metrics::Totals;
use super::refusal::Refusal;
use super::request::{Answered, Entry, Join, Member};
use super::status::{Overview, Unsettled};
use crate::faults;
use crate::identity::{Attempt, Name, Rank};
use crate::store::{AttemptDir, Backend, layout};

/// The runs of a store, and the coordinator's configuration.
pub(crate) struct Runs {
    backend: Backend,
    store: PathBuf,
    world_size: u32,
    only: Option<Name>,
    new_attempt: bool,
    step_deadline: Duration,
    rules: Rules,
    runs: BTreeMap<Name, Run>,
    /// A random number, drawn when the coordinator starts.
    arrivals_begin: u64,
    /// Attempts that have staged events since the last flush.
    touched: BTreeSet<(Name, Attempt)>,
}

#[derive(Default)]
struct Run {
    attempts: BTreeMap<Attempt, AttemptLog>,
    /// Attempts whose journal is damaged, with the reason.
    damaged: BTreeMap<Attempt, String>,
    launch: Launch,
    /// The processes that asked to enter; not durable.
    arrivals: Arrivals,
}

impl Runs {
    /// Tests that the store can be written and loads its runs.
    pub(crate) fn open(config: &Config, backend: &Backend) -> Result<Runs, StartError> {
        let unusable = |source: io::Error| StartError::Store { path: config.store.clone(), source };
        backend.prove_writable(&config.store).map_err(unusable)?;
        let mut runs = Runs {
            backend: backend.clone(),
            // Ranks receive this path and may have other working directories: it must be absolute.
            store: match backend {
                Backend::Directory => std::fs::canonicalize(&config.store).map_err(unusable)?,
                Backend::Bucket(_) => config.store.clone(),
            },
            world_size: config.world_size,
            only: config.run.clone(),
            new_attempt: config.new_attempt,
            step_deadline: config.step_deadline,
            rules: config.rules,
            runs: BTreeMap::new(),
            arrivals_begin: RandomState::new().hash_one(std::process::id()),
            touched: BTreeSet::new(),
        };
        for (name, path) in names(config, backend).map_err(unusable)? {
            let mut run = load_run(backend, &path, config.new_attempt).map_err(unusable)?;
            run.arrivals = Arrivals::begin(runs.arrivals_begin);
            runs.runs.insert(name, run);
        }
        runs.commit_all();
        Ok(runs)
    }

    /// Enters a rank into a run and stages the events for it, or says why it must wait.
    pub(crate) fn join(&mut self, join: Join, now_ms: u64) -> Result<Choice, Refusal> {
        self.check_join(&join)?;
        let directory = self.store.join(join.run.as_str());
        let begin = self.arrivals_begin;
        let run = self.runs.entry(join.run.clone()).or_insert_with(|| Run::begin(begin));
        let choice = run.choose(&join, self.world_size)?;
        let Choice::Enter(attempt) = choice else { return Ok(choice) };
        if !run.attempts.contains_key(&attempt) && run.attempts.len() >= MAX_ATTEMPTS {
            return Err(Refusal::Quota(format!(
                "run {} has {MAX_ATTEMPTS} attempts, the most: give the job another run",
                join.run
            )));
        }
        if let Some(reason) = run.damaged.get(&attempt) {
            return Err(Refusal::Poisoned { run: join.run, attempt, reason: reason.clone() });
        }
        let opener = join.rank == Rank(0) && join.heard.is_some() && join.attempt.is_none();
        let launched = opener.then_some(Launched { opener: join.incarnation, name: join.launch });
        let backend = &self.backend;
        let log = run.attempts.entry(attempt).or_insert_with(|| {
            let opened = Opened {
                format_version: crate::FORMAT_VERSION,
                run: join.run.clone(),
                attempt,
                world_size: self.world_size,
                started_ms: now_ms,
                mesh: join.mesh.clone(),
                versions: join.versions,
                launch: launched,
            };
            AttemptLog::open(backend.clone(), AttemptDir::of(&directory, attempt), opened)
        });
        let joined = Joined {
            rank: join.rank,
            incarnation: join.incarnation,
            host: join.host,
            mesh: join.mesh,
        };
        log.submit(Event::Joined(joined), now_ms)?;
        if self.new_attempt {
            run.launch = Launch::Own;
        }
        self.touched.insert((join.run, attempt));
        Ok(Choice::Enter(attempt))
    }

    fn check_join(&self, join: &Join) -> Result<(), Refusal> {
        let (rank, expected) = (join.rank, self.world_size);
        if let Some(serves) = self.only.as_ref().filter(|only| **only != join.run) {
            return Err(Refusal::OtherRun { run: join.run.clone(), serves: serves.clone() });
        }
        if self.runs.len() >= MAX_RUNS && !self.runs.contains_key(&join.run) {
            return Err(Refusal::Quota(format!(
                "this coordinator serves {MAX_RUNS} runs, the most: give this one another store"
            )));
        }
        if join.format_version != crate::FORMAT_VERSION {
            let version = join.format_version;
            return Err(Refusal::FormatVersion { rank, found: version });
        }
        if rank.0 >= expected {
            return Err(Refusal::RankOutside { rank, world_size: expected });
        }
        if join.world_size != expected {
            return Err(Refusal::WorldSize { rank, claimed: join.world_size, expected });
        }
        Ok(())
    }

    /// The answer to a rank that asked to enter, once its events are durable.
    pub(crate) fn answer(
        &mut self,
        run: &Name,
        (rank, incarnation): Process,
        choice: Choice,
    ) -> Result<Answered, Refusal> {
        let known = self.runs.get(run);
        let arrivals = known.map_or(self.arrivals_begin, |known| known.arrivals.newest());
        let attempt = match choice {
            Choice::Wait(why) => return Ok(Answered { arrivals, entry: Err(why) }),
            Choice::Enter(attempt) => attempt,
        };
        let embedded = self.new_attempt;
        let log = self.log(run, attempt)?;
        let opener = log.state.opened().launch.as_ref().map(|launched| launched.opener);
        let opened = rank == Rank(0) && opener == Some(incarnation);
        let entry = Entry {
            attempt,
            run_record: log.run_record()?,
            directory: log.directory.path.clone(),
            vouch: opened && !embedded && !log.state.all_joined(),
        };
        Ok(Answered { arrivals, entry: Ok(entry) })
    }

    /// An attempt, if it is usable.
    pub(crate) fn log(&mut self, run: &Name, attempt: Attempt) -> Result<&mut AttemptLog, Refusal> {
        let unknown = || Refusal::UnknownRun { run: run.clone() };
        let known = self.runs.get_mut(run).ok_or_else(unknown)?;
        if let Some(reason) = known.damaged.get(&attempt) {
            return Err(Refusal::Poisoned { run: run.clone(), attempt, reason: reason.clone() });
        }
        let log = known.attempts.get_mut(&attempt).ok_or_else(unknown)?;
        log.usable()?;
        Ok(log)
    }

    /// The attempt of a member, if the member may still add events to it.
    pub(crate) fn member(&mut self, member: &Member) -> Result<&mut AttemptLog, Refusal> {
        let latest = self.runs.get(&member.run).and_then(Run::newest);
        let superseded = |latest: &Attempt| member.attempt < *latest;
        if let Some(latest) = latest.filter(superseded).filter(|_| !faults::seeded("no-fencing")) {
            return Err(Refusal::OldAttempt {
                run: member.run.clone(),
                rank: member.rank,
                attempt: member.attempt,
                latest,
            });
        }
        let log = self.log(&member.run, member.attempt)?;
        log.state.check_member(member.rank, member.incarnation)?;
        Ok(log)
    }

    /// Checks and stages an event of a member.
    pub(crate) fn submit(
        &mut self,
        member: &Member,
        event: Event,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        self.member(member)?.submit(event, now_ms)?;
        self.touched.insert((member.run.clone(), member.attempt));
        Ok(())
    }

    /// Makes all staged events durable, with one fsync per attempt, and commits the steps that
    /// became complete.
    pub(crate) fn flush(&mut self, now_ms: u64) {
        for (run, attempt) in std::mem::take(&mut self.touched) {
            let known = self.runs.get_mut(&run);
            if let Some(log) = known.and_then(|run| run.attempts.get_mut(&attempt)) {
                log.flush(now_ms);
                log.commit();
                if log.stalled() {
                    // The next flush, at the latest that of the next tick, tries again.
                    self.touched.insert((run, attempt));
                }
            }
        }
    }

    fn commit_all(&mut self) {
        if faults::seeded("commit-forgotten") {
            return;
        }
        let logs = self.runs.values_mut().flat_map(|run| run.attempts.values_mut());
        logs.for_each(AttemptLog::commit);
    }

    /// Tries failed commits again and logs steps whose deadline has passed.
    pub(crate) fn tick(&mut self, now_ms: u64) {
        self.commit_all();
        let deadline_ms = u64::try_from(self.step_deadline.as_millis()).unwrap_or(u64::MAX);
        let logs = self.runs.values_mut().flat_map(|run| run.attempts.values_mut());
        for log in logs {
            for step in log.state.newly_overdue(now_ms, deadline_ms) {
                let (run, attempt) = (log.run(), log.attempt());
                let missing = log.state.missing(step);
                tracing::warn!(
                    "run {run} attempt {attempt} step {step}: partial after {} s: {missing}",
                    deadline_ms / 1000
                );
            }
        }
    }

    /// What is known of a run's newest attempt.
    pub(crate) fn overview(&self, run: &Name) -> Result<Overview, Refusal> {
        let known = self.runs.get(run).and_then(|run| run.attempts.values().next_back());
        let log = known.ok_or_else(|| Refusal::UnknownRun { run: run.clone() })?;
        Ok(Overview { directory: log.directory.path.clone(), ..log.state.overview() })
    }

    /// The totals over the newest attempt of each run.
    pub(crate) fn totals(&self) -> Totals {
        let newest = self.runs.values().filter_map(|run| run.attempts.values().next_back());
        newest.fold(Totals { runs: self.runs.len() as u64, ..Totals::default() }, |sum, log| {
            log.state.add_to(sum)
        })
    }

    /// Every step of every run's newest attempt that is not committed.
    pub(crate) fn unsettled(&self) -> Vec<Unsettled> {
        let newest = self.runs.values().filter_map(|run| run.attempts.values().next_back());
        let unsettled = |log: &AttemptLog| match log.usable() {
            // A poisoned attempt accepts no events: its steps will not be completed.
            Err(Refusal::Poisoned { reason, .. }) => {
                let given_up = |step| Unsettled { partial: true, missing: reason.clone(), ..step };
                log.state.unsettled().into_iter().map(given_up).collect()
            }
            _ => log.state.unsettled(),
        };
        newest.flat_map(unsettled).collect()
    }
}

impl Run {
    /// A new run.
    fn begin(arrivals_begin: u64) -> Run {
        Run { arrivals: Arrivals::begin(arrivals_begin), ..Run::default() }
    }

    /// Chooses the attempt that a rank enters, or has it wait.
    fn choose(&mut self, join: &Join, world_size: u32) -> Result<Choice, Refusal> {
        if let Some(heard) = join.heard {
            self.arrivals.note((join.rank, join.incarnation), join.launch.as_ref(), heard);
        }
        let entrant = Entrant {
            run: &join.run,
            rank: join.rank,
            incarnation: join.incarnation,
            explicit: join.attempt,
            launch: join.launch.as_ref(),
            waits: join.heard.is_some(),
        };
        let entered = self.entered(join.rank, join.incarnation);
        match (entered.filter(|_| join.attempt.is_none()), self.newest()) {
            // A process enters only one attempt; it repeats its request if it missed the answer.
            (Some(entered), Some(newest)) if entered < newest => {
                Err(entrant.superseded(entered, newest))
            }
            (Some(entered), _) => Ok(Choice::Enter(entered)),
            (None, _) => {
                attempts::choose(entrant, self.launch, self.latest(), &self.arrivals, world_size)
            }
        }
    }

    /// The attempt that a process entered before.
    fn entered(&self, rank: Rank, incarnation: u64) -> Option<Attempt> {
        let member = |log: &AttemptLog| log.state.check_member(rank, incarnation).is_ok();
        let mut newest_first = self.attempts.iter().rev();
        newest_first.find(|(_, log)| member(log)).map(|(attempt, _)| *attempt)
    }

    fn newest(&self) -> Option<Attempt> {
        let live = self.attempts.keys().next_back();
        live.max(self.damaged.keys().next_back()).copied()
    }

    fn latest(&self) -> Option<Latest<'_>> {
        let attempt = self.newest()?;
        let state = match (self.attempts.get(&attempt), self.damaged.get(&attempt)) {
            (Some(log), _) => Ok(&log.state),
            (None, damage) => Err(damage.map_or("", String::as_str)),
        };
        Some(Latest { attempt, state })
    }
}

/// The runs to load, each with its directory.
fn names(config: &Config, backend: &Backend) -> io::Result<Vec<(Name, PathBuf)>> {
    if let Some(name) = &config.run {
        return Ok(vec![(name.clone(), config.store.join(name.as_str()))]);
    }
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        Some((Name::new(name).ok()?, path.clone()))
    };
    Ok(layout::runs(backend, &config.store)?.into_iter().filter_map(named).collect())
}

fn load_run(backend: &Backend, directory: &Path, new_attempt: bool) -> io::Result<Run> {
    let mut run =
        Run { launch: if new_attempt { Launch::Older } else { Launch::Any }, ..Run::default() };
    faults::point("store.list")?;
    for attempt_directory in AttemptDir::list(backend, directory)? {
        let attempt = attempt_directory.attempt;
        match AttemptLog::load(backend.clone(), attempt_directory) {
            Ok(Some(log)) => {
                run.attempts.insert(attempt, log);
            }
            Ok(None) => {}
            Err(error) => {
                let reason = chain(&error);
                tracing::error!("{reason}");
                run.damaged.insert(attempt, reason);
            }
        }
    }
    Ok(run)
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}
