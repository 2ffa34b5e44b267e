//! Writes real dumps, file by file and with a manifest, as ranks would.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::head::HeadDeclaration;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::{Manifest, RunRecord};
use backtape::placement::{Mesh, MeshCoordinates, Placements, Reduction};
use backtape::role::Role;
use backtape::shard::{FingerprintSource, ShardRecord, TensorKey, When};
use backtape::store::header::FileSelf;
use backtape::store::layout::{RUN_RECORD, file_name};
use backtape::store::{AttemptDir, ShardWriter};

/// Where a campaign writes the dump of a seed: below `BACKTAPE_KEEP` if that is set, else where
/// it will be deleted.
pub(crate) fn of_seed(seed: u64, otherwise: &Path) -> PathBuf {
    let kept = std::env::var_os("BACKTAPE_KEEP").map(PathBuf::from);
    kept.as_deref().unwrap_or(otherwise).join(format!("run-{seed}"))
}

/// One shard as a rank would record it.
#[derive(Clone)]
pub(crate) struct Shard {
    pub(crate) rank: u32,
    pub(crate) name: &'static str,
    pub(crate) microbatch: Option<u32>,
    pub(crate) when: Option<When>,
    pub(crate) partial: bool,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) place: IndexBox,
    pub(crate) bytes: Vec<u8>,
}

/// A shard of a job that says how its tensors lie on a mesh.
#[derive(Clone)]
pub(crate) struct Laid {
    pub(crate) shard: Shard,
    pub(crate) replica: u32,
    pub(crate) mesh: MeshCoordinates,
    pub(crate) placement: Placements,
    /// True where its rank knows its own part alone, and so the recorder counted in it.
    pub(crate) local: bool,
}

impl Shard {
    /// A job with one axis, of which nothing more is said.
    fn laid(&self) -> Laid {
        let (mesh, placement) = (MeshCoordinates::new(), Placements::new());
        Laid { shard: self.clone(), replica: 0, mesh, placement, local: false }
    }

    pub(crate) fn key(&self) -> TensorKey {
        TensorKey {
            tensor: Name::new(self.name).unwrap(),
            microbatch: self.microbatch.map(Microbatch),
            when: self.when,
        }
    }

    /// What a job says of it.
    pub(crate) fn described(&self, partial: Option<Reduction>) -> backtape::shard::Shard {
        let (shape, place) = (self.shape.clone(), self.place.clone());
        backtape::shard::Shard {
            role: Role::from_name(self.name),
            partial,
            ..backtape::shard::Shard::new(self.dtype, shape, place)
        }
    }

    fn record(&self, attempt: Attempt, reduction: Reduction) -> ShardRecord {
        ShardRecord {
            key: self.key(),
            shard: self.described(self.partial.then_some(reduction)),
            rank: Rank(self.rank),
            host: Name::new("host-a").unwrap(),
            attempt,
            mesh: BTreeMap::new(),
            hash: ContentHash::of(&self.bytes),
            length: self.bytes.len() as u64,
            fingerprint: match self.bytes.is_empty() {
                true => Fingerprint::default(),
                false => Fingerprint::of(self.dtype, &self.place, &self.bytes),
            },
            fingerprint_source: FingerprintSource::Framework,
            entry: String::new(),
        }
    }
}

/// Writes step 0 of a run at `directory`, committed.
pub(crate) fn write(directory: &Path, world_size: u32, head: &HeadDeclaration, shards: &[Shard]) {
    write_with(directory, world_size, Some(head), shards);
}

/// The same, also for a job that declares no head.
pub(crate) fn write_with(
    directory: &Path,
    world_size: u32,
    head: Option<&HeadDeclaration>,
    shards: &[Shard],
) {
    write_reduced(directory, world_size, head, shards, &|_| Reduction::Sum);
}

/// The same; addends make up what this says of them.
pub(crate) fn write_reduced(
    directory: &Path,
    world_size: u32,
    head: Option<&HeadDeclaration>,
    shards: &[Shard],
    reduction: &dyn Fn(&Shard) -> Reduction,
) {
    let laid: Vec<Laid> = shards.iter().map(Shard::laid).collect();
    let mesh = Mesh(vec![("data".into(), world_size)]);
    write_laid(directory, &mesh, head, &laid, reduction);
}

/// The same of a job on a mesh.
pub(crate) fn write_laid(
    directory: &Path,
    mesh: &Mesh,
    head: Option<&HeadDeclaration>,
    shards: &[Laid],
    reduction: &dyn Fn(&Shard) -> Reduction,
) {
    let world_size = mesh.0.iter().map(|(_, size)| size).product();
    let run = Name::new(directory.file_name().unwrap().to_str().unwrap()).unwrap();
    let (attempt, step) = (Attempt(0), Step(0));
    let dir = AttemptDir::of(directory, attempt);
    let step_dir = dir.step(step);
    let mut groups: BTreeMap<(u32, Option<u32>), Vec<&Laid>> = BTreeMap::new();
    for laid in shards {
        groups.entry((laid.shard.rank, laid.shard.microbatch)).or_default().push(laid);
    }
    let mut files = Vec::new();
    for ((rank, microbatch), group) in groups {
        let about = FileSelf::new(run.clone(), attempt, step, Rank(rank), world_size);
        let name = file_name(Rank(rank), microbatch.map(Microbatch));
        let mut writer = ShardWriter::create(&step_dir.path, name, about).unwrap();
        for Laid { shard, replica, mesh, placement, local } in group.into_iter().cloned() {
            let fingerprint_source = match local {
                true => FingerprintSource::Recorder,
                false => FingerprintSource::Framework,
            };
            let own = shard.record(attempt, reduction(&shard));
            let mut record = ShardRecord { mesh, fingerprint_source, ..own };
            (record.replica, record.placement) = (replica, placement);
            writer.append(record, &shard.bytes).unwrap();
        }
        files.push(writer.finish().unwrap().publish().unwrap().0);
    }
    let manifest = Manifest {
        format_version: backtape::FORMAT_VERSION,
        version: backtape::VERSION.into(),
        run: run.clone(),
        attempt,
        step,
        world_size,
        mesh: mesh.clone(),
        head: head.cloned(),
        files,
        omissions: Vec::new(),
        selections: Vec::new(),
        trigger: None,
    };
    backtape::store::durable::create(&step_dir.manifest(), &manifest.to_bytes()).unwrap();
    let record = RunRecord {
        format_version: backtape::FORMAT_VERSION,
        version: backtape::VERSION.into(),
        run,
        attempt,
        world_size,
        mesh: manifest.mesh,
        started: 0,
        versions: BTreeMap::new(),
    };
    let path = dir.path.join(RUN_RECORD);
    backtape::store::durable::create(&path, &record.to_bytes()).unwrap();
}
