//! Holds a store against what ranks were told. Too simple to be wrong: it reads the files as
//! any safetensors reader would, makes the expected bytes from the seed, and asks no code of
//! backtape but for the hash that it compares with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use backtape::hash::ContentHash;
use serde_json::Value;

use crate::job::{Job, Shard, file_name, step_directory, tensor};
use crate::ledger::{self, Told};

/// A step of an attempt.
type Place = (u32, u64);

/// What is known to have been acknowledged, over the kills of a trial.
pub(crate) struct Oracle {
    job: Job,
    store: PathBuf,
    /// True when a rank's omissions may be in a committed step: where writes are made to fail.
    pub(crate) lossy: bool,
    /// Shards that some rank was told are safe.
    acknowledged: BTreeMap<Place, BTreeSet<Shard>>,
    /// Manifests as they were first seen: a committed step never changes.
    manifests: BTreeMap<Place, Vec<u8>>,
    /// Files whose bytes were compared since the last look at all of them.
    compared: BTreeSet<PathBuf>,
}

impl Oracle {
    pub(crate) fn new(job: &Job, store: &Path) -> Oracle {
        Oracle {
            job: job.clone(),
            store: store.into(),
            lossy: false,
            acknowledged: BTreeMap::new(),
            manifests: BTreeMap::new(),
            compared: BTreeSet::new(),
        }
    }

    /// How many shards were acknowledged.
    pub(crate) fn shards(&self) -> u64 {
        self.acknowledged.values().map(|shards| shards.len() as u64).sum()
    }

    /// How many steps are committed.
    pub(crate) fn committed(&self) -> u64 {
        self.manifests.len() as u64
    }

    /// Steps of which something was acknowledged: whether each is committed, and its shards.
    pub(crate) fn steps(&self) -> impl Iterator<Item = (Place, bool, u64)> {
        let known = |place: &Place| self.manifests.contains_key(place);
        self.acknowledged.iter().map(move |(place, own)| (*place, known(place), own.len() as u64))
    }

    /// Looks at the ledgers and at the disk. Files that were compared before are compared again
    /// only by a thorough look.
    pub(crate) fn check(&mut self, ledgers: &[PathBuf], thorough: bool) -> anyhow::Result<()> {
        if thorough {
            self.compared.clear();
        }
        let mut told = Vec::new();
        for path in ledgers {
            told.extend(ledger::read(path)?);
        }
        let mut committed: BTreeSet<Place> = self.manifests.keys().copied().collect();
        for line in &told {
            match line {
                Told::Shard { attempt, shard } => {
                    self.acknowledged.entry((*attempt, shard.step)).or_default().insert(*shard);
                }
                Told::Committed { attempt, step } => {
                    committed.insert((*attempt, *step));
                }
                _ => {}
            }
        }
        check_fencing(&told)?;
        self.check_acknowledged()?;
        for place in self.places()? {
            self.check_manifest(place, &mut committed)?;
        }
        ensure!(committed.is_empty(), "these steps were committed and are no more: {committed:?}");
        Ok(())
    }

    fn check_acknowledged(&mut self) -> anyhow::Result<()> {
        let mut files: BTreeMap<(Place, u32, u32), Vec<Shard>> = BTreeMap::new();
        for (place, shards) in &self.acknowledged {
            for shard in shards {
                files.entry((*place, shard.rank, shard.file)).or_default().push(*shard);
            }
        }
        for (((attempt, step), rank, file), shards) in files {
            let path = step_directory(&self.store, attempt, step).join(file_name(rank, file));
            if self.compared.contains(&path) {
                continue;
            }
            let held = Held::open(&path)
                .with_context(|| format!("acknowledged {:?} is lost", shards[0]))?;
            ensure!(held.attempt == attempt, "{} is of attempt {}", path.display(), held.attempt);
            for shard in shards {
                let found = held.shard(&tensor(shard.index))?;
                let same = found == self.job.content(shard);
                ensure!(same, "acknowledged {shard:?} of {} has other bytes", path.display());
            }
            self.compared.insert(path);
        }
        Ok(())
    }

    /// Every step directory that exists.
    fn places(&self) -> anyhow::Result<Vec<Place>> {
        let mut found = Vec::new();
        let run = self.store.join(crate::job::RUN);
        let mut attempts = vec![(0, run.clone())];
        attempts.extend(numbered(&run, "attempt-")?);
        for (attempt, path) in attempts {
            let attempt = u32::try_from(attempt)?;
            found.extend(numbered(&path, "step-")?.into_iter().map(|(step, _)| (attempt, step)));
        }
        Ok(found)
    }

    /// A manifest that stands is complete, right, of one launch, and what it was before.
    fn check_manifest(
        &mut self,
        place: Place,
        committed: &mut BTreeSet<Place>,
    ) -> anyhow::Result<()> {
        let (attempt, step) = place;
        let directory = step_directory(&self.store, attempt, step);
        let Ok(bytes) = std::fs::read(directory.join("manifest.json")) else {
            return Ok(());
        };
        committed.remove(&place);
        if let Some(first) = self.manifests.get(&place) {
            ensure!(*first == bytes, "the manifest of {place:?} changed after it was committed");
            return Ok(());
        }
        let sealed: Value = serde_json::from_slice(&bytes)
            .with_context(|| format!("the manifest of {place:?} is no JSON"))?;
        let listed = listed(&sealed["manifest"]).with_context(|| format!("manifest {place:?}"))?;
        let of = |rank: u32| self.launch_of(&listed, rank, place);
        for rank in 0..self.job.world {
            let launch = of(rank)?;
            for shard in self.job.shards_of(launch, step, rank) {
                let name = file_name(rank, shard.file);
                match listed.shards.get(&(name.clone(), tensor(shard.index))) {
                    None if listed.omitted.contains(&(rank, shard.file, tensor(shard.index))) => {
                        ensure!(self.lossy, "{place:?} is committed, {shard:?} was omitted");
                    }
                    None => bail!("{place:?} is committed without {shard:?}"),
                    Some(hash) => {
                        let wanted = ContentHash::of(&self.job.content(shard)).to_string();
                        ensure!(*hash == wanted, "{place:?} lists {shard:?} with another hash");
                        let found = Held::open(&directory.join(&name))?;
                        let found = found.shard(&tensor(shard.index))?;
                        let same = found == self.job.content(shard);
                        ensure!(same, "committed {shard:?} of {place:?} has other bytes");
                    }
                }
            }
        }
        for shard in self.acknowledged.get(&place).into_iter().flatten() {
            let key = (file_name(shard.rank, shard.file), tensor(shard.index));
            ensure!(listed.shards.contains_key(&key), "{place:?} lacks acknowledged {shard:?}");
        }
        self.manifests.insert(place, bytes);
        Ok(())
    }

    /// Which launch wrote a rank's part: the one whose bytes have the hash of its first shard.
    fn launch_of(&self, listed: &Listed, rank: u32, (attempt, step): Place) -> anyhow::Result<u32> {
        let first = listed.shards.iter().find(|((name, _), _)| *name == file_name(rank, 0));
        let Some(((_, name), hash)) = first else {
            return Ok(attempt);
        };
        let index = name.trim_start_matches('t').parse()?;
        // Launches are counted from 0 and there are not many in a trial.
        let found = (0..1000).find(|&launch| {
            let shard = Shard { launch, step, rank, file: 0, index };
            ContentHash::of(&self.job.content(shard)).to_string() == *hash
        });
        found.with_context(|| format!("rank {rank} of ({attempt}, {step}) is of no launch"))
    }
}

/// Nothing that a rank began after it was superseded is acknowledged.
fn check_fencing(told: &[Told]) -> anyhow::Result<()> {
    let mut joined: BTreeMap<u32, u64> = BTreeMap::new();
    let mut began: BTreeMap<(u32, u32, u64), u64> = BTreeMap::new();
    for line in told {
        match line {
            Told::Joined { attempt, at_ns, .. } => {
                let first = joined.entry(*attempt).or_insert(*at_ns);
                *first = (*first).min(*at_ns);
            }
            Told::Began { launch, rank, step, at_ns, .. } => {
                began.insert((*launch, *rank, *step), *at_ns);
            }
            _ => {}
        }
    }
    for line in told {
        let Told::Shard { attempt, shard } = line else { continue };
        let Some(began) = began.get(&(shard.launch, shard.rank, shard.step)) else { continue };
        let later = joined.range(attempt + 1..).map(|(_, at)| *at).min();
        if later.is_some_and(|later| later < *began) {
            bail!("{shard:?} of attempt {attempt} was acknowledged after it was superseded");
        }
    }
    Ok(())
}

/// What a manifest lists: the hash of each (file, tensor), and what it says is absent.
struct Listed {
    shards: BTreeMap<(String, String), String>,
    omitted: BTreeSet<(u32, u32, String)>,
}

fn listed(manifest: &Value) -> anyhow::Result<Listed> {
    let text = |value: &Value| value.as_str().map(str::to_string).context("no text");
    let mut found = Listed { shards: BTreeMap::new(), omitted: BTreeSet::new() };
    for file in manifest["files"].as_array().context("no files")? {
        let name = text(&file["name"])?;
        for shard in file["shards"].as_array().context("no shards")? {
            let key = (name.clone(), text(&shard["tensor"])?);
            let again = found.shards.insert(key, text(&shard["hash"])?);
            ensure!(again.is_none(), "{name} has a shard twice");
        }
    }
    for omission in manifest["omissions"].as_array().context("no omissions")? {
        let number = |name: &str| omission[name].as_u64().and_then(|n| u32::try_from(n).ok());
        let (rank, file) = (number("rank").context("no rank")?, number("microbatch"));
        ensure!(!text(&omission["reason"])?.is_empty(), "an omission without a reason");
        found.omitted.insert((rank, file.unwrap_or(u32::MAX), text(&omission["tensor"])?));
    }
    Ok(found)
}

/// A shard file, read as any safetensors reader reads it.
struct Held {
    bytes: Vec<u8>,
    data: usize,
    header: Value,
    attempt: u32,
}

impl Held {
    fn open(path: &Path) -> anyhow::Result<Held> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let prefix = bytes.first_chunk::<8>().context("it has no header")?;
        let data = 8 + usize::try_from(u64::from_le_bytes(*prefix))?;
        let header: Value = serde_json::from_slice(bytes.get(8..data).context("truncated")?)?;
        let about = header["__metadata__"]["backtape"].as_str().context("no metadata")?;
        let about: Value = serde_json::from_str(about)?;
        let attempt = u32::try_from(about["attempt"].as_u64().context("no attempt")?)?;
        Ok(Held { bytes, data, header, attempt })
    }

    fn shard(&self, name: &str) -> anyhow::Result<&[u8]> {
        let offset = |index: usize| {
            let value = self.header[name]["data_offsets"][index].as_u64();
            anyhow::Ok(self.data + usize::try_from(value.context("no such entry")?)?)
        };
        let (start, end) = (offset(0)?, offset(1)?);
        self.bytes.get(start..end).with_context(|| format!("{name} is cut off"))
    }
}

fn numbered(directory: &Path, prefix: &str) -> anyhow::Result<Vec<(u64, PathBuf)>> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = name.strip_prefix(prefix).and_then(|digits| digits.parse().ok());
        found.extend(number.map(|number| (number, path)));
    }
    Ok(found)
}
