//! Shard files as ranks would have written them, made without an fsync: the campaigns that
//! use them measure the coordinator, and a power cut is not among what they try.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use anyhow::Context;
use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::{ContentHash, TrustHash};
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::header::{self, FileSelf};
use backtape::store::{AttemptDir, layout};
use backtape_proto as proto;

/// What the recorder reserves for the header.
const HEADER_ROOM: usize = 64 << 10;

/// Writes the files of one rank of a step, one for each microbatch, and says what to report.
pub(crate) fn files(
    run: &Path,
    (step, rank, world_size): (u64, u32, u32),
    microbatches: u32,
    shards: u32,
) -> anyhow::Result<Vec<proto::FileReport>> {
    let name = run.file_name().and_then(|name| name.to_str()).context("no run")?;
    let name = Name::new(name)?;
    let directory = AttemptDir::of(run, Attempt(0)).step(Step(step)).path;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    let one = |microbatch: u32| {
        let microbatch = Microbatch(microbatch);
        let mut about = FileSelf::new(name.clone(), Attempt(0), Step(step), Rank(rank), world_size);
        let payload = payload(step, rank, microbatch.0);
        about.shards = (0..shards)
            .map(|index| record(rank, world_size, microbatch, index, &payload))
            .collect::<anyhow::Result<_>>()?;
        let mut bytes = header::encode(&about, HEADER_ROOM)?;
        let header_hash = TrustHash::of(&bytes).0.to_vec().into();
        for _ in 0..shards {
            bytes.extend(&payload);
        }
        let file = layout::file_name(Rank(rank), Some(microbatch));
        let path = directory.join(file.as_str());
        std::fs::write(&path, &bytes).with_context(|| path.display().to_string())?;
        let length = bytes.len() as u64;
        Ok(proto::FileReport { name: file.to_string(), length, header_hash })
    };
    (0..microbatches).map(one).collect()
}

fn payload(step: u64, rank: u32, microbatch: u32) -> Vec<u8> {
    let numbers = [step as u32, rank, microbatch, 0];
    numbers.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn record(
    rank: u32,
    world_size: u32,
    microbatch: Microbatch,
    index: u32,
    bytes: &[u8],
) -> anyhow::Result<ShardRecord> {
    let rows = u64::from(rank);
    let place = IndexBox(vec![(rows, rows + 1), (0, 4)]);
    let name = format!("layers.{index}.hidden");
    Ok(ShardRecord {
        key: TensorKey {
            tensor: Name::new(name.as_str())?,
            microbatch: Some(microbatch),
            when: None,
        },
        fingerprint: Fingerprint::of(Dtype::F32, &place, bytes),
        shard: Shard::new(Dtype::F32, vec![u64::from(world_size), 4], place),
        rank: Rank(rank),
        host: Name::new(format!("node-{:04}", rank / 8))?,
        attempt: Attempt(0),
        mesh: [("data".into(), rank)].into(),
        hash: ContentHash::of(bytes),
        length: bytes.len() as u64,
        fingerprint_source: FingerprintSource::Framework,
        entry: name,
    })
}
