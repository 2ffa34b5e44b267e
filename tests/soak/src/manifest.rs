//! `soak manifest --shards 1000000`: what the manifest of a large step costs.
//!
//! ```text
//! manifest: 1000000 shards of 10000 ranks, 617.3 MiB, 647 B a shard
//!   sealed in 2.1 s, created durably in 0.9 s; the writer's peak is 2.2 GiB
//!   read in 2.4 s, looked up in 31 ms; the reader's peak is 1.5 GiB, 2.4 times the file
//! ```
//!
//! Writing and reading are two processes, so that each has a peak of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::{ContentHash, TrustHash};
use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::{FileRecord, Manifest};
use backtape::placement::{Mesh, Placement};
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::{durable, layout};
use clap::Args;

use crate::memory::peak_mib;

/// Shards of one rank: a few for each layer of a model.
const SHARDS_PER_RANK: u64 = 100;

/// What is measured.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Shards of the step, 100 for each rank
    #[arg(long, default_value_t = 1_000_000)]
    shards: u64,
    /// Directory for the manifest; by default a temporary one
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Read the manifest that lies there, and nothing else
    #[arg(long, hide = true)]
    read: Option<PathBuf>,
}

/// Writes a manifest here, reads it in a process of its own.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(path) = &arguments.read {
        println!("{}", read(path)?);
        return Ok(());
    }
    let scratch = match &arguments.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let path = scratch.path().join(layout::MANIFEST);
    println!("{}", write(arguments.shards, &path)?);
    let mut reader = Command::new(std::env::current_exe()?);
    reader.args(["manifest", "--read"]).arg(&path);
    ensure!(reader.status()?.success(), "manifest: {} could not be read back", path.display());
    Ok(())
}

fn write(shards: u64, path: &Path) -> anyhow::Result<String> {
    let manifest = example(shards);
    let began = Instant::now();
    let bytes = manifest.to_bytes();
    let sealed = began.elapsed();
    let began = Instant::now();
    durable::create(path, &bytes)?;
    let created = began.elapsed();
    let (length, ranks) = (bytes.len() as f64, manifest.world_size);
    Ok(format!(
        "manifest: {shards} shards of {ranks} ranks, {:.1} MiB, {:.0} B a shard\n  \
         sealed in {}, created durably in {}; the writer's peak is {:.0} MiB",
        length / (1 << 20) as f64,
        length / shards.max(1) as f64,
        seconds(sealed),
        seconds(created),
        peak_mib(std::process::id())?
    ))
}

fn read(path: &Path) -> anyhow::Result<String> {
    let began = Instant::now();
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let manifest = Manifest::from_bytes(&bytes)?;
    let whole = began.elapsed();
    let wanted = manifest.world_size.saturating_sub(1);
    let began = Instant::now();
    let name = tensor_name(SHARDS_PER_RANK - 1);
    let found = manifest
        .shards()
        .find(|(file, shard)| file.rank == Rank(wanted) && shard.key.tensor.as_str() == name);
    let looked = began.elapsed();
    ensure!(found.is_some(), "manifest: {name} of rank {wanted} is not in it");
    let peak = peak_mib(std::process::id())?;
    Ok(format!(
        "  read in {}, looked up in {}; the reader's peak is {peak:.0} MiB, {:.1} times the file",
        seconds(whole),
        seconds(looked),
        peak * (1 << 20) as f64 / bytes.len() as f64
    ))
}

fn seconds(time: Duration) -> String {
    format!("{:.4} s", time.as_secs_f64())
}

fn tensor_name(index: u64) -> String {
    format!("layers.{}.attention.proj_{}", index / 4, index % 4)
}

/// A step of a model that is sharded over its ranks, one file for each.
pub(crate) fn example(shards: u64) -> Manifest {
    let ranks = u32::try_from(shards.div_ceil(SHARDS_PER_RANK)).unwrap_or(u32::MAX).max(1);
    let file = |rank: u32| {
        let before = u64::from(rank) * SHARDS_PER_RANK;
        let own = shards.saturating_sub(before).min(SHARDS_PER_RANK);
        FileRecord {
            name: layout::file_name(Rank(rank), None),
            rank: Rank(rank),
            length: 1 << 30,
            header_hash: TrustHash::of(&rank.to_le_bytes()),
            shards: (0..own).map(|index| shard(rank, ranks, index)).collect(),
        }
    };
    Manifest {
        format_version: backtape::FORMAT_VERSION,
        version: backtape::VERSION.into(),
        run: Name::new("large").expect("letters"),
        attempt: Attempt(0),
        step: Step(0),
        world_size: ranks,
        mesh: Mesh(vec![("data".into(), 8), ("fsdp".into(), ranks.div_ceil(8))]),
        head: None,
        files: (0..ranks).map(file).collect(),
        omissions: Vec::new(),
        selections: Vec::new(),
        trigger: None,
    }
}

fn shard(rank: u32, ranks: u32, index: u64) -> ShardRecord {
    let rows = u64::from(rank) * 4;
    let name = tensor_name(index);
    let place = IndexBox(vec![(rows, rows + 4), (0, 8192)]);
    ShardRecord {
        key: TensorKey {
            tensor: Name::new(name.as_str()).expect("letters and dots"),
            microbatch: None,
            when: None,
        },
        shard: Shard {
            placement: [
                ("data".into(), Placement::Replicate),
                ("fsdp".into(), Placement::Shard(0)),
            ]
            .into(),
            ..Shard::new(Dtype::Bf16, vec![u64::from(ranks) * 4, 8192], place)
        },
        rank: Rank(rank),
        host: Name::new(format!("node-{:04}", rank / 8)).expect("letters and digits"),
        attempt: Attempt(0),
        mesh: [("data".into(), rank % 8), ("fsdp".into(), rank / 8)].into(),
        hash: ContentHash::of(&[rank.to_le_bytes(), (index as u32).to_le_bytes()].concat()),
        length: 4 * 8192 * 2,
        fingerprint: Fingerprint(rank, index as u32),
        fingerprint_source: FingerprintSource::Framework,
        entry: name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_of_20_000_shards_is_written_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(layout::MANIFEST);
        println!("{}", write(20_000, &path).unwrap());
        println!("{}", read(&path).unwrap());
    }
}
