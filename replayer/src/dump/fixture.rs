//! Dumps for tests: real shard files and a real manifest in a temporary directory, and functions
//! that damage them.
//!
//! The cutting into boxes here goes element by element and shares no code with what it tests.

use std::collections::BTreeMap;
use std::path::PathBuf;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::Manifest;
use backtape::placement::{Mesh, MeshCoordinates};
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::layout::{AttemptDir, file_name};
use backtape::store::{ShardWriter, StepDir};
use backtape::{FORMAT_VERSION, VERSION};

use super::{Selection, StepDump};

/// One shard with its bytes, before it is written to a file.
#[derive(Clone)]
pub(crate) struct FixtureShard {
    pub(crate) record: ShardRecord,
    pub(crate) bytes: Vec<u8>,
}

/// A step on disk.
pub(crate) struct Dumped {
    /// The temporary directory with the run.
    pub(crate) store: tempfile::TempDir,
    pub(crate) run: PathBuf,
    pub(crate) step: StepDir,
    pub(crate) manifest: Manifest,
}

pub(crate) fn key(tensor: &str) -> TensorKey {
    TensorKey { tensor: Name::new(tensor).unwrap(), microbatch: None, when: None }
}

/// Pseudorandom numbers of a seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// The bytes of a box of a row-major array, one element after the other.
pub(crate) fn naive_cut(shape: &[u64], whole: &[u8], place: &IndexBox, width: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let elements: u64 = shape.iter().product();
    for flat in 0..elements {
        let mut rest = flat;
        let mut inside = true;
        for dim in (0..shape.len()).rev() {
            let index = rest % shape[dim];
            rest /= shape[dim];
            inside &= place.0[dim].0 <= index && index < place.0[dim].1;
        }
        if inside {
            let offset = flat as usize * width;
            out.extend_from_slice(&whole[offset..offset + width]);
        }
    }
    out
}

/// A shard as a recorder would describe it.
pub(crate) fn fixture_shard(
    key: &TensorKey,
    (dtype, shape): (Dtype, &[u64]),
    place: IndexBox,
    rank: u32,
    bytes: Vec<u8>,
) -> FixtureShard {
    let record = ShardRecord {
        key: key.clone(),
        rank: Rank(rank),
        host: Name::new("host").unwrap(),
        attempt: Attempt(0),
        mesh: MeshCoordinates::new(),
        hash: ContentHash::of(&bytes),
        length: bytes.len() as u64,
        fingerprint: match bytes.is_empty() {
            true => Fingerprint::default(),
            false => Fingerprint::of(dtype, &place, &bytes),
        },
        fingerprint_source: FingerprintSource::Framework,
        shard: Shard::new(dtype, shape.to_vec(), place),
        entry: String::new(),
    };
    FixtureShard { record, bytes }
}

/// A tensor in equal slabs along its first dimension, one per rank.
pub(crate) fn slabs(name: &str, shape: &[u64], ranks: u32, whole: &[u8]) -> Vec<FixtureShard> {
    let rows = shape[0] / u64::from(ranks);
    let slab_of = |rank: u32| {
        let mut place = IndexBox::whole(shape);
        place.0[0] = (u64::from(rank) * rows, (u64::from(rank) + 1) * rows);
        let bytes = naive_cut(shape, whole, &place, 4);
        fixture_shard(&key(name), (Dtype::F32, shape), place, rank, bytes)
    };
    (0..ranks).map(slab_of).collect()
}

/// Writes and commits step 0 of attempt 0 of run `run-a`.
pub(crate) fn commit(shards: Vec<FixtureShard>, world_size: u32) -> Dumped {
    // In memory if the machine has such a directory, because tests write thousands of dumps and
    // sync each.
    let store = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let run = store.path().join("run-a");
    let step = AttemptDir::of(&run, Attempt(0)).step(Step(0));
    let mut files: BTreeMap<(Rank, Option<Microbatch>), Vec<FixtureShard>> = BTreeMap::new();
    for shard in shards {
        let file = (shard.record.rank, shard.record.key.microbatch);
        files.entry(file).or_default().push(shard);
    }
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        version: VERSION.into(),
        run: Name::new("run-a").unwrap(),
        attempt: Attempt(0),
        step: Step(0),
        world_size,
        mesh: Mesh::default(),
        head: None,
        files: Vec::new(),
        omissions: Vec::new(),
        selections: Vec::new(),
        trigger: None,
    };
    std::fs::create_dir_all(&step.path).unwrap();
    for ((rank, microbatch), shards) in files {
        let about = FileSelf::new(manifest.run.clone(), Attempt(0), Step(0), rank, world_size);
        let name = file_name(rank, microbatch);
        let mut writer = ShardWriter::create(&step.path, name, about).unwrap();
        for shard in shards {
            writer.append(shard.record, &shard.bytes).unwrap();
        }
        manifest.files.push(writer.finish().unwrap().publish().unwrap().0);
    }
    let dumped = Dumped { store, run, step, manifest };
    dumped.seal();
    dumped
}

impl Dumped {
    /// Writes the manifest again, with a valid seal.
    pub(crate) fn seal(&self) {
        std::fs::write(self.step.manifest(), self.manifest.to_bytes()).unwrap();
    }

    /// Removes the manifest, as after a crash before the commit.
    pub(crate) fn unseal(&self) {
        std::fs::remove_file(self.step.manifest()).unwrap();
    }

    pub(crate) fn open(&self) -> StepDump {
        super::open(&self.run, &Selection::default()).unwrap()
    }

    /// The path of the file at this position of the manifest.
    pub(crate) fn file(&self, index: usize) -> PathBuf {
        self.step.path.join(self.manifest.files[index].name.as_str())
    }

    /// The offset of the first shard's first byte in a file.
    pub(crate) fn data_start(&self, index: usize) -> usize {
        let file = &self.manifest.files[index];
        let data: u64 = file.shards.iter().map(|shard| shard.length).sum();
        (file.length - data) as usize
    }

    /// Changes a file's bytes in place.
    pub(crate) fn damage(&self, index: usize, change: impl FnOnce(&mut Vec<u8>)) {
        let path = self.file(index);
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
    }
}
