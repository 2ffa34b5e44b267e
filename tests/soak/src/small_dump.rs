//! Small dumps, written by the code that ranks write with.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::Manifest;
use backtape::placement::{Mesh, MeshCoordinates, Placements, Reduction};
use backtape::shard::{FingerprintSource, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::layout::file_name;
use backtape::store::{AttemptDir, FinishedFile, ShardWriter, durable};

use crate::random::Random;

/// One shard as a rank records it.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) tensor: Name,
    pub(crate) microbatch: Option<u32>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) place: IndexBox,
    pub(crate) rank: u32,
    pub(crate) replica: u32,
    pub(crate) partial: Option<Reduction>,
    pub(crate) mesh: MeshCoordinates,
    pub(crate) placement: Placements,
    pub(crate) bytes: Vec<u8>,
}

/// Whose file it is.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) run: Name,
    pub(crate) attempt: u32,
    pub(crate) step: u64,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
}

impl Shard {
    /// A vector of bytes, cut over the ranks.
    pub(crate) fn bytes_of(
        tensor: Name,
        microbatch: Option<u32>,
        owner: &Owner,
        bytes: Vec<u8>,
    ) -> Shard {
        let length = bytes.len() as u64;
        let start = u64::from(owner.rank) * length;
        Shard {
            tensor,
            microbatch,
            dtype: Dtype::U8,
            shape: vec![u64::from(owner.world_size) * length],
            place: IndexBox(vec![(start, start + length)]),
            rank: owner.rank,
            replica: 0,
            partial: None,
            mesh: MeshCoordinates::new(),
            placement: Placements::new(),
            bytes,
        }
    }

    /// The record, hashed and fingerprinted as the recorder does it.
    pub(crate) fn record(&self, attempt: u32, host: &Name) -> ShardRecord {
        ShardRecord {
            key: TensorKey {
                tensor: self.tensor.clone(),
                microbatch: self.microbatch.map(Microbatch),
                when: None,
            },
            shard: backtape::shard::Shard {
                placement: self.placement.clone(),
                partial: self.partial,
                replica: self.replica,
                ..backtape::shard::Shard::new(self.dtype, self.shape.clone(), self.place.clone())
            },
            rank: Rank(self.rank),
            host: host.clone(),
            attempt: Attempt(attempt),
            mesh: self.mesh.clone(),
            hash: ContentHash::of(&self.bytes),
            length: self.bytes.len() as u64,
            fingerprint: Fingerprint::of(self.dtype, &self.place, &self.bytes),
            fingerprint_source: FingerprintSource::Framework,
            entry: String::new(),
        }
    }
}

/// Writes the file of one microbatch; it has no name before it is published.
pub(crate) fn write_file(
    directory: &Path,
    owner: &Owner,
    microbatch: Option<u32>,
    shards: &[&Shard],
) -> io::Result<FinishedFile> {
    let (attempt, step, rank) = (Attempt(owner.attempt), Step(owner.step), Rank(owner.rank));
    let about = FileSelf::new(owner.run.clone(), attempt, step, rank, owner.world_size);
    let name = file_name(rank, microbatch.map(Microbatch));
    let host = Name::new("host-a").map_err(io::Error::other)?;
    let mut writer = ShardWriter::create(directory, name, about)?;
    for shard in shards {
        writer.append(shard.record(owner.attempt, &host), &shard.bytes)?;
    }
    writer.finish()
}

/// Bytes that follow from their coordinates alone: whoever checks them needs no copy.
pub(crate) fn content(seed: u64, coordinates: u64, longest: u64) -> Vec<u8> {
    let mut random = Random::of(seed, coordinates);
    let length = 1 + random.below(longest);
    let words = length.div_ceil(8);
    let mut bytes: Vec<u8> = (0..words).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(length as usize);
    bytes
}

/// Writes step 0 of attempt 0 of `run-a` at `run`, as its ranks and their coordinator would.
pub(crate) fn commit(run: &Path, world_size: u32, mesh: Mesh, shards: &[Shard]) -> io::Result<()> {
    let name = Name::new("run-a").map_err(io::Error::other)?;
    let step = AttemptDir::of(run, Attempt(0)).step(Step(0));
    let mut files: BTreeMap<(u32, Option<u32>), Vec<&Shard>> = BTreeMap::new();
    for shard in shards {
        files.entry((shard.rank, shard.microbatch)).or_default().push(shard);
    }
    std::fs::create_dir_all(&step.path)?;
    let mut manifest = Manifest {
        format_version: backtape::FORMAT_VERSION,
        version: backtape::VERSION.into(),
        run: name.clone(),
        attempt: Attempt(0),
        step: Step(0),
        world_size,
        mesh,
        head: None,
        files: Vec::new(),
        omissions: Vec::new(),
        selections: Vec::new(),
        trigger: None,
    };
    for ((rank, microbatch), shards) in files {
        let owner = Owner { run: name.clone(), attempt: 0, step: 0, rank, world_size };
        let written = write_file(&step.path, &owner, microbatch, &shards)?;
        manifest.files.push(written.publish()?.0);
    }
    durable::create(&step.manifest(), &manifest.to_bytes())?;
    Ok(())
}
