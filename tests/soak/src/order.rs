//! `soak order`: what a power cut would leave, told from the system calls. strace records every
//! call of real processes that touches the disk; a simulated disk that forgets all that was not
//! synced is asked, at each acknowledgement, whether what was acknowledged would still be there.
//!
//! Beside a clean job, jobs in which strace fails one sync: what it was to make durable is lost
//! from then on, whatever a later sync of the same file says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;

use crate::job::{Job, file_name, step_directory};
use crate::processes::{Yard, memory};

/// Calls that change what a power cut leaves.
const CALLS: &str = "openat,mkdir,mkdirat,write,pwrite64,ftruncate,fsync,fdatasync,link,linkat,rename,unlink,unlinkat";
/// How long a traced job may take.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct OrderArguments {
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<PathBuf>,
    /// A fault that is seeded into every process, to see whether it is found
    #[arg(long, default_value = "")]
    pub seeded: String,
}

/// Refuses to pass for a check where strace is absent.
pub(crate) fn need_strace() -> anyhow::Result<()> {
    let found = Command::new("strace").arg("-V").output().is_ok_and(|said| said.status.success());
    ensure!(found, "strace is absent, so NOTHING WAS CHECKED: install it (apt-get install strace)");
    Ok(())
}

/// Runs a clean job, and one for each sync that is failed.
pub(crate) fn run(arguments: &OrderArguments) -> anyhow::Result<()> {
    need_strace()?;
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let mut failures = vec![("", "")];
    let syncs = ["fdatasync:error=EIO:when=2", "fdatasync:error=EIO:when=4"];
    failures.extend(syncs.map(|sync| (sync, "")));
    let syncs = ["fsync:error=EIO:when=1", "fsync:error=EIO:when=2", "fsync:error=EIO:when=3"];
    failures.extend(syncs.map(|sync| (sync, "")));
    failures.extend(syncs.map(|sync| ("", sync)));
    let (mut acknowledged, mut calls) = (0, 0);
    for (coordinator, ranks) in &failures {
        let done = trace(&arguments.seeded, coordinator, ranks).with_context(|| {
            format!("order: FAILED: injected {coordinator:?} and {ranks:?} into the ranks")
        })?;
        ensure!(done.0 > 0 || failures[0] != (*coordinator, *ranks), "nothing was acknowledged");
        acknowledged += done.0;
        calls += done.1;
    }
    println!(
        "order: {} jobs, {calls} calls, {acknowledged} acknowledgements, 0 that a power cut takes back",
        failures.len()
    );
    Ok(())
}

/// strace as the tracee's grandchild, so that the process is still this program's own child.
fn tracer(output: &Path, inject: &str) -> Vec<std::ffi::OsString> {
    let mut words: Vec<std::ffi::OsString> =
        ["strace", "-D", "-ff", "-qq", "-y", "-ttt", "-T", "-s", "100000", "-e"]
            .map(Into::into)
            .into();
    words.push(format!("trace={CALLS}").into());
    if !inject.is_empty() {
        words.extend(["-e".into(), format!("inject={inject}").into()]);
    }
    words.extend(["-o".into(), output.into()]);
    words
}

/// Records a small job; how many acknowledgements were held against how many calls.
fn trace(seeded: &str, coordinator: &str, ranks: &str) -> anyhow::Result<(u64, u64)> {
    let job = Job { seed: 5, world: 2, steps: 3, files: 1, shards: 1, bytes: 512 };
    let mut yard = Yard::new(&memory())?;
    let faults = match seeded {
        "" => String::new(),
        name => format!("seeded:{name}"),
    };
    let path = yard.path().to_path_buf();
    yard.tracer = tracer(&path.join("trace-coordinator"), coordinator);
    let mut process = yard.spawn_coordinator(job.world, &faults)?;
    let up = yard.until_it_answers(&mut process);
    if coordinator.is_empty() {
        up?;
    }
    yard.tracer = tracer(&path.join("trace-ranks"), ranks);
    let deadlines = ["--join-ms", "1000", "--step-ms", "1000"];
    let stream = [&["--stream"][..], &deadlines].concat();
    let mut children = vec![
        yard.ranks(&job, (0, 1), 0, &deadlines, &faults)?,
        yard.ranks(&job, (1, 2), 0, &stream, &faults)?,
    ];
    for child in &mut children {
        let status = child.wait(LIMIT)?.context("a rank does not end")?;
        ensure!(status.success(), "the training side was disturbed: {}", child.log()?);
    }
    process.kill()?;
    let mut disk = Disk::default();
    let events = events(&path)?;
    for event in &events {
        disk.apply(event, &job, &yard.store)?;
    }
    Ok((disk.acknowledged, events.len() as u64))
}

/// One finished call.
#[derive(Debug)]
struct Call {
    /// When it ended, in microseconds.
    at_us: u64,
    name: String,
    arguments: String,
    result: i64,
}

/// Every call of every thread, in the order in which they ended. strace writes the end of a
/// file after its tracee is gone: a last line that is cut off belongs to nobody.
fn events(directory: &Path) -> anyhow::Result<Vec<Call>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("trace-") {
            let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
            found.extend(text.lines().filter_map(call));
        }
    }
    found.sort_by_key(|call| call.at_us);
    Ok(found)
}

/// `1795367759.123456 fsync(9</path>) = 0 <0.000012>`
fn call(line: &str) -> Option<Call> {
    let (at, rest) = line.split_once(' ')?;
    let (name, rest) = rest.split_once('(')?;
    let (rest, took) = rest.rsplit_once(" <")?;
    let (arguments, result) = rest.rsplit_once(" = ")?;
    let result = result.split([' ', '<']).next()?.parse().ok()?;
    let microseconds = |text: &str| Some((text.parse::<f64>().ok()? * 1e6) as u64);
    let at_us = microseconds(at)? + microseconds(took.strip_suffix('>')?)?;
    let arguments = arguments.trim_end().strip_suffix(')')?.to_string();
    Some(Call { at_us, name: name.into(), arguments, result })
}

/// The path of a descriptor: `9</path>, ...`.
fn described(arguments: &str) -> Option<PathBuf> {
    let (_, rest) = arguments.split_once('<')?;
    Some(PathBuf::from(rest.split_once('>')?.0))
}

/// The paths of a call, between its quotes; below the directory of a descriptor, where one
/// stands before them: `linkat(9</store/step>, "a", ...`.
fn quoted(arguments: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pieces = arguments.split('"');
    while let (Some(before), Some(path)) = (pieces.next(), pieces.next()) {
        let below = described(before).unwrap_or_default();
        found.push(below.join(path));
    }
    found
}

/// One file's bytes.
#[derive(Default)]
struct Inode {
    /// What was written and not synced since.
    dirty: Vec<String>,
    synced: Vec<String>,
    /// A sync failed: what it was to make durable is gone for good.
    lost: bool,
}

/// The disk as a power cut would leave it.
#[derive(Default)]
struct Disk {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    /// Names that a cut would take away.
    unsynced: BTreeSet<PathBuf>,
    acknowledged: u64,
}

impl Disk {
    fn apply(&mut self, call: &Call, job: &Job, store: &Path) -> anyhow::Result<()> {
        let paths = quoted(&call.arguments);
        match (call.name.as_str(), call.result >= 0) {
            ("openat", true) if call.arguments.contains("O_CREAT") => {
                let path = paths.first().context("no path")?;
                if !self.names.contains_key(path) {
                    self.inodes.push(Inode::default());
                    self.names.insert(path.clone(), self.inodes.len() - 1);
                    self.unsynced.insert(path.clone());
                }
            }
            ("mkdir" | "mkdirat", true) => {
                self.unsynced.insert(paths.first().context("no path")?.clone());
            }
            ("link" | "linkat" | "rename", true) => {
                let [from, to] = paths.as_slice() else { bail!("{call:?}") };
                let Some(&inode) = self.names.get(from) else { return Ok(()) };
                let open = &self.inodes[inode];
                let whole = open.dirty.is_empty() && !open.lost;
                ensure!(whole, "{} got its name before its bytes were synced", to.display());
                self.names.insert(to.clone(), inode);
                self.unsynced.insert(to.clone());
                if call.name == "rename" {
                    self.names.remove(from);
                }
            }
            ("unlink" | "unlinkat", true) => {
                let path = paths.first().context("no path")?;
                self.names.remove(path);
                self.unsynced.remove(path);
            }
            ("write" | "pwrite64" | "ftruncate", true) => self.written(call, job, store)?,
            ("fsync" | "fdatasync", good) => self.synced(call, good),
            _ => {}
        }
        Ok(())
    }

    fn written(&mut self, call: &Call, job: &Job, store: &Path) -> anyhow::Result<()> {
        let Some(path) = described(&call.arguments) else { return Ok(()) };
        if path.extension().is_some_and(|extension| extension == "ledger") {
            return self.told(&call.arguments, job, store);
        }
        if let Some(&inode) = self.names.get(&path) {
            self.inodes[inode].dirty.push(call.arguments.clone());
        }
        Ok(())
    }

    fn synced(&mut self, call: &Call, good: bool) {
        let Some(path) = described(&call.arguments) else { return };
        if let Some(&inode) = self.names.get(&path) {
            let inode = &mut self.inodes[inode];
            inode.lost |= !good && !inode.dirty.is_empty();
            if !inode.lost {
                inode.synced.append(&mut inode.dirty);
            }
        } else if good {
            self.unsynced.retain(|name| name.parent() != Some(&path));
        }
    }

    /// A rank was told something: it must hold from now on.
    fn told(&mut self, arguments: &str, job: &Job, store: &Path) -> anyhow::Result<()> {
        let text = arguments.split('"').nth(1).unwrap_or_default();
        for line in text.split("\\n") {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words.get(index).and_then(|word| word.parse::<u64>().ok());
            match words.first() {
                Some(&"shard") => {
                    let wanted = "a ledger's line";
                    let (attempt, rank) = (number(1).context(wanted)?, number(3).context(wanted)?);
                    let (step, file) = (number(4).context(wanted)?, number(5).context(wanted)?);
                    let (attempt, rank) = (u32::try_from(attempt)?, u32::try_from(rank)?);
                    let name = file_name(rank, u32::try_from(file)?);
                    let directory = step_directory(store, attempt, step);
                    self.durable(&directory.join(&name), store)?;
                    let journal = directory.with_file_name("journal.jsonl");
                    self.durable_name(&journal, store)?;
                    let inode = &self.inodes[self.names[&journal]];
                    let there = inode.synced.iter().any(|line| reports(line, step, &name));
                    ensure!(
                        there,
                        "step {step}, {name} was acknowledged before its record is durable"
                    );
                    self.acknowledged += 1;
                }
                Some(&"committed") => {
                    let step = number(2).context("a ledger's line")?;
                    ensure!(step < job.steps, "step {step} is not of this job");
                    let attempt = u32::try_from(number(1).context("a ledger's line")?)?;
                    let manifest = step_directory(store, attempt, step).join("manifest.json");
                    self.durable(&manifest, store)?;
                    self.acknowledged += 1;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A cut would leave the file, whole, at its name.
    fn durable(&self, path: &Path, store: &Path) -> anyhow::Result<()> {
        self.durable_name(path, store)?;
        let inode = &self.inodes[self.names[path]];
        let whole = inode.dirty.is_empty() && !inode.lost && !inode.synced.is_empty();
        ensure!(whole, "{} was acknowledged before its bytes were synced", path.display());
        Ok(())
    }

    fn durable_name(&self, path: &Path, store: &Path) -> anyhow::Result<()> {
        ensure!(self.names.contains_key(path), "{} does not exist", path.display());
        let mut name = path;
        while name != store {
            let synced = !self.unsynced.contains(name);
            ensure!(synced, "the name of {} was not synced in its directory", name.display());
            name = name.parent().context("outside of the store")?;
        }
        Ok(())
    }
}

/// Whether a line of a journal, as strace writes it, reports this file of a step. The keys of a record
/// come in any order.
fn reports(line: &str, step: u64, name: &str) -> bool {
    let begin = format!(r#"{{\"reported\":{{\"step\":{step},\"file\":{{"#);
    let named = format!(r#"\"name\":\"{name}\""#);
    let event =
        |rest: &str| rest.split(r#"{\"reported\""#).next().is_some_and(|own| own.contains(&named));
    line.split(&begin).skip(1).any(event)
}
