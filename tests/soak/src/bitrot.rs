//! R7: whatever rots in a dump is found and named, and a sound dump never alarms.
//!
//! Method: a dump written by recorders and a coordinator; one byte, or one larger piece, is
//! changed; the replayer verifies; the change is undone. A trial draws the kind of place first
//! and the place then: most bytes of a small dump are padding.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use backtape::dtype::Dtype;
use backtape::head::HeadDeclaration;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::shard::{Shard, TensorKey};
use backtape::store::ShardFile;
use backtape_dumper::{Capture, Recorder, Settings};
use backtape_replayer::dump::{self, Selection};
use backtape_replayer::verify::{FindingKind, verify};
use clap::Args;

use crate::random::Random;

const RUN: &str = "run-a";
const RANKS: u32 = 2;
/// Bytes that a disk loses at once.
const SECTOR: usize = 512;

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Arguments {
    /// Flipped bits; a tenth as many other damages, and as many clean verifies
    #[arg(long, default_value_t = 100_000)]
    pub(crate) trials: u64,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    #[arg(long, default_value_t = 2)]
    pub(crate) threads: u64,
}

pub(crate) fn run(arguments: Arguments) -> Result<()> {
    campaign(arguments).map(|line| println!("{line}"))
}

pub(crate) fn campaign(arguments: Arguments) -> Result<String> {
    let Arguments { trials, seed, threads } = arguments;
    let begun = Instant::now();
    let pristine = memory()?;
    record(&pristine.path().join(RUN))?;
    let share = |of: u64| -> Result<Counts> {
        let copy = memory()?;
        let mut dump = Copy::of(&pristine.path().join(RUN), &copy.path().join(RUN))?;
        let mut counts = Counts::default();
        // One thread each: a small dump is verified before another one has woken up.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
        pool.install(|| {
            for trial in (of..trials).step_by(threads as usize) {
                counts.one(&mut dump, seed, trial)?;
            }
            anyhow::Ok(())
        })?;
        Ok(counts)
    };
    let mut counts = Counts::default();
    let shares: Vec<Result<Counts>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|of| scope.spawn(move || share(of))).collect();
        let joined = running.into_iter().map(|thread| thread.join());
        joined.map(|one| one.unwrap_or_else(|_| bail!("verify panicked"))).collect()
    });
    for share in shares {
        counts.add(share?);
    }
    let named: Vec<String> = counts.kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    let (flips, others, clean) = (counts.flips, counts.others, counts.clean);
    let each = begun.elapsed().as_secs_f64() * 1e3 * threads as f64
        / (flips + others + clean).max(1) as f64;
    Ok(format!(
        "bitrot: seed {seed}, {flips} flips and {others} others, all found and named; {clean} clean verifies, 0 alarms; {each:.2} ms each ({})",
        named.join(", ")
    ))
}

/// A folder in memory where there is such a place.
pub(crate) fn memory() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

/// One committed step of two ranks, through recorders and the coordinator inside rank 0.
pub(crate) fn record(directory: &Path) -> Result<()> {
    let ranks: Vec<Result<()>> = std::thread::scope(|scope| {
        let one = |rank| scope.spawn(move || record_rank(directory, rank));
        let running: Vec<_> = (0..RANKS).map(one).collect();
        let joined = running.into_iter().map(|thread| thread.join());
        joined.map(|one| one.unwrap_or_else(|_| bail!("a recorder panicked"))).collect()
    });
    ranks.into_iter().collect()
}

fn record_rank(directory: &Path, rank: u32) -> Result<()> {
    let mut settings = Settings::new(directory, rank, RANKS);
    settings.host = Some("host-a".into());
    settings.versions = BTreeMap::from([("jax".into(), "0.7.1".into())]);
    let mut recorder = Recorder::start(settings)?;
    let tape = recorder.step(0)?;
    // Numbers with an exponent: `1e-300` and `1E-300` mean the same.
    tape.head(HeadDeclaration { z_loss: 1e-300, ..HeadDeclaration::default() })?;
    for (tensor, microbatch) in [("q", Some(0)), ("dq", Some(0)), ("k", None), ("bias", None)] {
        let rows = u64::from(rank) * 2;
        let mut random = Random::of(u64::from(rank), tensor.len() as u64);
        let bytes: Vec<u8> = (0..12).map(|_| random.next() as u8).collect();
        let place = IndexBox(vec![(rows, rows + 2), (0, 3)]);
        let microbatch = microbatch.map(Microbatch);
        let key = TensorKey { tensor: Name::new(tensor)?, microbatch, when: None };
        let shard = Shard {
            role: key.role(None)?,
            ..Shard::new(Dtype::Bf16, vec![u64::from(RANKS) * 2, 3], place)
        };
        tape.record(Capture::new(key, shard, Box::new(bytes)))?;
    }
    tape.close()?;
    let summary = recorder.close()?;
    ensure!(summary.steps_committed == [0], "the step was not committed: {summary:?}");
    Ok(())
}

/// A file of the dump as it should be.
struct Pristine {
    path: PathBuf,
    name: String,
    bytes: Vec<u8>,
    /// Kinds of places: what they are, where they start and end.
    regions: Vec<(&'static str, usize, usize)>,
    /// Where each shard's bytes lie.
    shards: Vec<(usize, usize)>,
}

/// A copy of the dump that is damaged and mended.
struct Copy {
    run: PathBuf,
    files: Vec<Pristine>,
}

impl Copy {
    fn of(from: &Path, to: &Path) -> Result<Copy> {
        let mut files = Vec::new();
        for below in ["", "step-00000000"] {
            std::fs::create_dir_all(to.join(below))?;
            for entry in std::fs::read_dir(from.join(below))? {
                let entry = entry?;
                if !entry.file_type()?.is_file() {
                    continue;
                }
                let name = entry.file_name().to_string_lossy().into_owned();
                let path = to.join(below).join(&name);
                let bytes = std::fs::read(entry.path())?;
                std::fs::write(&path, &bytes)?;
                files.push(Pristine::new(path, name, bytes)?);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
        ensure!(files.len() == 7, "a dump of four shard files has other files too: {names:?}");
        Ok(Copy { run: to.into(), files })
    }

    fn put(&self, file: usize, bytes: &[u8]) -> Result<()> {
        let path = &self.files[file].path;
        std::fs::write(path, bytes).with_context(|| path.display().to_string())
    }

    /// What speaks against the dump: each finding with the files that it names.
    fn examine(&self) -> Vec<String> {
        let at = Selection { run: None, attempt: None, step: Some(0) };
        let dump = match dump::open(&self.run, &at) {
            Ok(dump) => dump,
            Err(error) => return vec![format!("not opened: {error}")],
        };
        let proof = verify(&dump, &|_| {});
        let kind = |kind| match kind {
            FindingKind::Uncommitted => "manifest.json ",
            _ => "",
        };
        let one = |found: &backtape_replayer::verify::VerifyFinding| {
            let path = found.path.as_deref().map(|path| path.display().to_string());
            format!("{}{}: {}", kind(found.kind), path.unwrap_or_default(), found.sentence)
        };
        proof.findings.iter().map(one).collect()
    }
}

impl Pristine {
    fn new(path: PathBuf, name: String, bytes: Vec<u8>) -> Result<Pristine> {
        let all = bytes.len();
        let (mut regions, mut shards) = (Vec::new(), Vec::new());
        match name.as_str() {
            "run.json" => regions.push(("run.json", 0, all)),
            "manifest.json" => regions.push(("manifest.json", 0, all)),
            "journal.jsonl" => regions.push(("journal.jsonl", 0, all)),
            _ => {
                let about = ShardFile::open(&path)?;
                let mut at = all - about.shards().iter().map(|s| s.length as usize).sum::<usize>();
                let written = bytes[..at].iter().rposition(|&byte| byte != b' ').unwrap_or(0) + 1;
                regions = vec![
                    ("length prefix", 0, 8),
                    ("shard header", 8, written),
                    ("padding", written, at),
                    ("shard bytes", at, all),
                ];
                for shard in about.shards() {
                    shards.push((at, at + shard.length as usize));
                    at += shard.length as usize;
                }
            }
        }
        Ok(Pristine { path, name, bytes, regions, shards })
    }
}

#[derive(Default)]
struct Counts {
    flips: u64,
    others: u64,
    clean: u64,
    kinds: BTreeMap<&'static str, u64>,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.flips += other.flips;
        self.others += other.others;
        self.clean += other.clean;
        for (kind, n) in other.kinds {
            *self.kinds.entry(kind).or_default() += n;
        }
    }

    fn one(&mut self, dump: &mut Copy, seed: u64, trial: u64) -> Result<()> {
        let mut random = Random::of(seed, trial);
        let name = format!("bitrot: seed {seed} trial {trial}");
        let (kind, damaged) = flip(dump, &mut random)?;
        self.judge(dump, kind, &damaged, &name)?;
        self.flips += 1;
        if trial.is_multiple_of(10) {
            let (kind, damaged) = other(dump, &mut random)?;
            self.judge(dump, kind, &damaged, &name)?;
            self.others += 1;
            let found = dump.examine();
            ensure!(found.is_empty(), "{name}: a clean verify alarms: {found:?}");
            self.clean += 1;
        }
        Ok(())
    }

    /// Each damaged file must be named; then all is mended.
    fn judge(
        &mut self,
        dump: &Copy,
        kind: &'static str,
        damaged: &[usize],
        name: &str,
    ) -> Result<()> {
        let found = dump.examine();
        for &file in damaged {
            let file = &dump.files[file];
            let named = found.iter().any(|one| one.contains(&file.name));
            let is = std::fs::read(&file.path).unwrap_or_default();
            let at = is.iter().zip(&file.bytes).position(|(a, b)| a != b);
            ensure!(
                named,
                "{name}: {kind} of {} from byte {at:?} on was not found; found: {found:?}",
                file.name
            );
        }
        *self.kinds.entry(kind).or_default() += 1;
        for &file in damaged {
            dump.put(file, &dump.files[file].bytes)?;
        }
        Ok(())
    }
}

/// Flips one bit of one byte.
fn flip(dump: &Copy, random: &mut Random) -> Result<(&'static str, Vec<usize>)> {
    let all = dump.files.iter().enumerate();
    let places: Vec<_> =
        all.flat_map(|(i, file)| file.regions.iter().map(move |r| (i, *r))).collect();
    let kinds: std::collections::BTreeSet<&str> = places.iter().map(|(_, r)| r.0).collect();
    let kinds: Vec<&str> = kinds.into_iter().collect();
    let kind = kinds[random.below(kinds.len() as u64) as usize];
    let of: Vec<_> = places.iter().filter(|(_, region)| region.0 == kind).collect();
    let &&(file, (kind, start, end)) = &of[random.below(of.len() as u64) as usize];
    let at = start + random.below((end - start) as u64) as usize;
    let byte = dump.files[file].bytes[at] ^ (1 << random.below(8));
    let open = OpenOptions::new().write(true).open(&dump.files[file].path)?;
    open.write_all_at(&[byte], at as u64)?;
    Ok((kind, vec![file]))
}

/// Any other damage; drawn again until it changes something.
fn other(dump: &Copy, random: &mut Random) -> Result<(&'static str, Vec<usize>)> {
    for _ in 0..1000 {
        let file = random.below(dump.files.len() as u64) as usize;
        let pristine = &dump.files[file];
        let (kind, changed) = match random.below(8) {
            0 => ("truncated", truncated(&pristine.bytes, random)),
            1 => ("extended", extended(&pristine.bytes, random)),
            2 => ("two bytes exchanged", exchanged(&pristine.bytes, random)),
            3 => ("a lost sector", sector(&pristine.bytes, random)),
            4 => ("two shards exchanged within", shards_within(pristine, random)),
            5 => match across(dump, file, random)? {
                Some(damaged) => return Ok(("shards or files exchanged", damaged)),
                None => continue,
            },
            // Without its journal or run.json a dump is whole: they are no part of the step.
            6 if pristine.path.parent() != Some(dump.run.as_path()) => {
                std::fs::remove_file(&pristine.path)?;
                return Ok(("a lost file", vec![file]));
            }
            7 => ("a byte written over", written_over(&pristine.bytes, random)),
            _ => continue,
        };
        if changed != pristine.bytes {
            dump.put(file, &changed)?;
            return Ok((kind, vec![file]));
        }
    }
    bail!("no damage was drawn that changes anything")
}

fn position(bytes: &[u8], random: &mut Random) -> usize {
    random.below(bytes.len() as u64) as usize
}

fn truncated(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    // Lines and shards end somewhere: cut there as often as anywhere.
    let ends: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] == b'\n').collect();
    let cut = match (random.below(2), ends.len()) {
        (0, n @ 1..) => ends[random.below(n as u64) as usize] + 1,
        _ => position(bytes, random),
    };
    bytes[..cut].to_vec()
}

fn extended(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut longer = bytes.to_vec();
    let (more, what) = (1 + random.below(100), random.below(3));
    for i in 0..more as usize {
        longer.push(match what {
            0 => b"\n \t\0"[random.below(4) as usize],
            1 => bytes[i % bytes.len()],
            _ => random.next() as u8,
        });
    }
    longer
}

fn exchanged(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    let (a, b) = (position(bytes, random), position(bytes, random));
    changed.swap(a, b);
    changed
}

fn written_over(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    changed[position(bytes, random)] = random.next() as u8;
    changed
}

fn sector(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    let start = position(bytes, random) / SECTOR * SECTOR;
    let end = bytes.len().min(start + SECTOR);
    changed[start..end].fill(0);
    changed
}

fn shards_within(file: &Pristine, random: &mut Random) -> Vec<u8> {
    let mut changed = file.bytes.clone();
    let n = file.shards.len() as u64;
    if n > 1 {
        let (a, b) = (random.below(n) as usize, random.below(n) as usize);
        let ((a, a_end), (b, b_end)) = (file.shards[a], file.shards[b]);
        if a_end - a == b_end - b {
            changed[a..a_end].copy_from_slice(&file.bytes[b..b_end]);
            changed[b..b_end].copy_from_slice(&file.bytes[a..a_end]);
        }
    }
    changed
}

/// Exchanges a shard, or all, of two files.
fn across(dump: &Copy, file: usize, random: &mut Random) -> Result<Option<Vec<usize>>> {
    let other = random.below(dump.files.len() as u64) as usize;
    let (one, two) = (&dump.files[file], &dump.files[other]);
    if one.bytes == two.bytes {
        return Ok(None);
    }
    let (mut a, mut b) = (two.bytes.clone(), one.bytes.clone());
    if let (0, Some(&(i, i_end)), Some(&(j, j_end))) =
        (random.below(2), one.shards.first(), two.shards.first())
    {
        if i_end - i != j_end - j || one.bytes[i..i_end] == two.bytes[j..j_end] {
            return Ok(None);
        }
        (a, b) = (one.bytes.clone(), two.bytes.clone());
        a[i..i_end].copy_from_slice(&two.bytes[j..j_end]);
        b[j..j_end].copy_from_slice(&one.bytes[i..i_end]);
    }
    dump.put(file, &a)?;
    dump.put(other, &b)?;
    Ok(Some(vec![file, other]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_rots_is_found_and_a_clean_dump_never_alarms() {
        println!("{}", campaign(Arguments { trials: 4000, seed: 7, threads: 2 }).unwrap());
    }
}
