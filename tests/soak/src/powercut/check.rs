//! Holds what is on the disk after a cut against what was acknowledged before it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use backtape::coordinator::channel::Rpc;
use backtape::hash::{ContentHash, TrustHash};
use backtape::identity::{Attempt, Step};
use backtape::store::layout::{MANIFEST, RUN_RECORD};
use backtape::store::{AttemptDir, ShardFile};
use backtape_proto as proto;
use backtape_replayer::dump::{self, Selection};
use backtape_replayer::verify::verify;
use tokio::runtime::Handle;

use super::ledger::{File, Ledger, Recorded, StepOf};
use super::work::{LONGEST_FILE, RUN};
use crate::small_dump::content;

/// How much of the ledger is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What was worked on since the last check.
    Touched,
    /// All of it.
    Everything,
}

/// What speaks against the promise, one sentence each.
pub(crate) struct Check<'a> {
    pub(crate) mount: &'a Path,
    pub(crate) seed: u64,
    pub(crate) found: Vec<String>,
}

impl Check<'_> {
    /// Everything that the files themselves show. The coordinator has loaded the store.
    pub(crate) fn disk(&mut self, ledger: &mut Ledger, scope: Scope, number: u64) -> Result<()> {
        let recent = PathBuf::from(format!("files/{:06}", number.saturating_sub(1)));
        let looked = |path: &Path| scope == Scope::Everything || path.starts_with(&recent);
        for file in ledger.files.iter().filter(|file| looked(&file.path)) {
            self.file(file);
        }
        for (path, &coordinates) in ledger.created.iter().filter(|(path, _)| looked(path)) {
            let wanted = content(self.seed, coordinates, LONGEST_FILE);
            match std::fs::read(self.mount.join(path)) {
                Ok(bytes) if bytes == wanted => {}
                Ok(bytes) => {
                    let (is, was) = (bytes.len(), wanted.len());
                    self.say(format!("{} has other bytes ({is}, {was} created)", path.display()));
                }
                Err(error) => self.say(format!("{} was created: {error}", path.display())),
            }
        }
        self.whole_or_not_at_all(&recent, number.saturating_sub(1));
        self.replaced(ledger.replaced);
        for (&attempt, hash) in &ledger.runs {
            let path = AttemptDir::of(Path::new(RUN), Attempt(attempt)).path.join(RUN_RECORD);
            match std::fs::read(self.mount.join(&path)) {
                Ok(bytes) if TrustHash::of(&bytes) == *hash => {}
                Ok(_) => self.say(format!("{} has other bytes", path.display())),
                Err(error) => self.say(format!("{}: {error}", path.display())),
            }
        }
        let touched = std::mem::take(&mut ledger.touched);
        let all: Vec<StepOf> = match scope {
            Scope::Touched => touched.into_iter().collect(),
            Scope::Everything => ledger.steps.keys().copied().chain(touched).collect(),
        };
        for at in all {
            self.step(ledger, at)?;
        }
        self.recorded(ledger, scope, number)
    }

    fn say(&mut self, sentence: String) {
        self.found.push(sentence);
    }

    /// An acknowledged shard file: there, and byte for byte what was written.
    fn file(&mut self, file: &File) {
        let path = file.path.display();
        match ShardFile::open(&self.mount.join(&file.path)) {
            Err(error) => self.say(format!("acknowledged {path} is lost: {error}")),
            Ok(found) if found.header_hash() != file.header_hash => {
                self.say(format!("acknowledged {path} has another header"));
            }
            Ok(found) => {
                for (index, shard) in found.shards().iter().enumerate() {
                    if ContentHash::of(found.bytes(index)) != shard.hash {
                        self.say(format!("acknowledged {path}: {} has other bytes", shard.key));
                    }
                }
            }
        }
    }

    /// What was not acknowledged may be there or not; at its final name it is whole.
    fn whole_or_not_at_all(&mut self, directory: &Path, number: u64) {
        let entries = std::fs::read_dir(self.mount.join(directory));
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let whole = match name.strip_prefix("created-").and_then(|i| i.parse::<u64>().ok()) {
                _ if name.starts_with('.') => true,
                Some(i) => {
                    let wanted = content(self.seed, (number << 16) | i, LONGEST_FILE);
                    std::fs::read(entry.path()).is_ok_and(|bytes| bytes == wanted)
                }
                None => ShardFile::open(&entry.path()).is_ok(),
            };
            if !whole {
                self.say(format!("{name} stands at its final name and is not whole"));
            }
        }
    }

    fn replaced(&mut self, (acknowledged, tried): (u64, u64)) {
        let bytes = std::fs::read(self.mount.join("replaced")).unwrap_or_default();
        let Some((head, rest)) = bytes.split_first_chunk::<8>() else {
            if acknowledged > 0 {
                self.say(format!("a file replaced {acknowledged} times is gone"));
            }
            return;
        };
        let version = u64::from_le_bytes(*head);
        if version < acknowledged || version > tried {
            self.say(format!("version {version} stands where {acknowledged} was acknowledged"));
        } else if rest != content(self.seed, version, LONGEST_FILE) {
            self.say(format!("version {version} of a replaced file is torn"));
        }
    }

    /// A step: its acknowledged files, and its manifest, whole or not at all, once and for ever.
    fn step(&mut self, ledger: &mut Ledger, at: StepOf) -> Result<()> {
        let (attempt, step) = at;
        let name = format!("attempt {attempt} step {step}");
        let known = ledger.steps.get(&at).cloned().unwrap_or_default();
        known.files.values().for_each(|file| self.file(file));
        let directory = AttemptDir::of(Path::new(RUN), Attempt(attempt)).step(Step(step)).path;
        let path = directory.join(MANIFEST);
        let seen = ledger.manifests.get(&path).copied();
        let Ok(bytes) = std::fs::read(self.mount.join(&path)) else {
            if known.committed || seen.is_some() {
                self.say(format!("{name} was committed and has no manifest"));
            }
            return Ok(());
        };
        let hash = TrustHash::of(&bytes);
        if seen.is_some_and(|seen| seen != hash) {
            self.say(format!("the manifest of {name} changed"));
        }
        ledger.manifests.insert(path, hash);
        self.committed(RUN, attempt, step)
    }

    /// A manifest at its final name hashes right and lists what is there.
    fn committed(&mut self, run: &str, attempt: u32, step: u64) -> Result<()> {
        let (attempt, step) = (Some(attempt), Some(step));
        let opened = dump::open(&self.mount.join(run), &Selection { run: None, attempt, step });
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.say(format!("{run} {attempt:?} {step:?} cannot be opened: {error}"));
                return Ok(());
            }
        };
        if !opened.committed() {
            self.say(format!("{run} {attempt:?} {step:?} is half-committed: {:?}", opened.state));
        }
        let proof = verify(&opened, &|_| {});
        if !proof.intact() {
            let first = proof.findings.first().map(|found| found.sentence.clone());
            self.say(format!("{run} {attempt:?} {step:?}: {}", first.unwrap_or_default()));
        }
        Ok(())
    }

    fn recorded(&mut self, ledger: &Ledger, scope: Scope, number: u64) -> Result<()> {
        let recent = format!("recorded-{:06}", number.saturating_sub(1));
        let mut told: BTreeMap<&str, Recorded> = BTreeMap::new();
        for ((run, _), rank) in &ledger.recorded {
            let all = told.entry(run).or_default();
            all.committed.extend(&rank.committed);
            all.shards += rank.shards;
        }
        told.retain(|run, _| scope == Scope::Everything || *run == recent);
        for (run, told) in told {
            let mut intact = 0;
            for step in 0..4 {
                let at = Selection { run: None, attempt: Some(0), step: Some(step) };
                if let Ok(opened) = dump::open(&self.mount.join(run), &at) {
                    intact += verify(&opened, &|_| {}).hashes_ok;
                }
                if told.committed.contains(&step) {
                    self.committed(run, 0, step)?;
                }
            }
            if intact < told.shards {
                let was = told.shards;
                self.say(format!("{run}: {was} shards were acknowledged, {intact} are there"));
            }
        }
        Ok(())
    }

    /// What the coordinator says of a step once it was restarted.
    pub(crate) fn answers(
        &mut self,
        ledger: &Ledger,
        touched: &[StepOf],
        rpc: &mut Rpc,
        on: &Handle,
    ) {
        for &(attempt, step) in touched {
            let Some(told) = ledger.steps.get(&(attempt, step)) else { continue };
            let ask =
                proto::StepStatusRequest { run: RUN.into(), attempt, step, ..Default::default() };
            let said = match on.block_on(rpc.step_status(ask)) {
                Ok(said) => said.into_inner(),
                Err(error) => {
                    self.say(format!("attempt {attempt} step {step}: {error}"));
                    continue;
                }
            };
            let shards: u64 = told.files.values().map(|file| file.shards).sum();
            let forgot = told.closed.iter().find(|rank| !said.closed_ranks.contains(rank));
            if said.shards < shards {
                let knows = said.shards;
                self.say(format!(
                    "attempt {attempt} step {step}: {shards} shards were acknowledged, the coordinator knows {knows}"
                ));
            }
            if let Some(rank) = forgot {
                self.say(format!(
                    "attempt {attempt} step {step}: the close of rank {rank} is forgotten"
                ));
            }
            if told.committed && !said.committed {
                self.say(format!("attempt {attempt} step {step} is no longer committed"));
            }
        }
    }
}
