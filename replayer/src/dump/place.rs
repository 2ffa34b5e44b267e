//! Where a dump is read from: a directory, or a bucket, of which the chosen step is first copied to
//! this host.
//!
//! The objects of a bucket are listed, and nothing is copied until a step is chosen, so that only
//! this step of a large run is transferred. The copy is deleted with its last reader.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backtape::coordinator::MAX_EXAMINED_BYTES;
use backtape::identity::Rank;
use backtape::scalars::{self, ScalarObjects};
use backtape::store::backend::{Bucket, is_url};
use backtape::store::layout::{JOURNAL, JOURNAL_LINES, MANIFEST, RUN_RECORD};
use backtape::store::{AttemptDir, Backend, StepDir};
use rayon::prelude::*;

use super::Selection;
use super::error::OpenError;
use super::reference::Reference;

/// A place that can be read as a directory.
#[derive(Clone)]
pub struct Place {
    path: PathBuf,
    /// The attempt and step that were written after its name.
    reference: Reference,
    copy: Option<Arc<Copy>>,
}

/// The local copy of a part of a bucket.
struct Copy {
    bucket: Bucket,
    /// The URL as it was given.
    url: PathBuf,
    /// Bytes of every object, by its path below `url`.
    objects: BTreeMap<PathBuf, u64>,
    directory: tempfile::TempDir,
}

impl Place {
    /// Opens a directory, or lists the objects of a bucket.
    pub fn of(path: &Path) -> Result<Place, OpenError> {
        let reference = Reference::read(path)?;
        let path = reference.path.as_path();
        if !is_url(path) {
            return Ok(Place { path: path.into(), copy: None, reference });
        }
        let bucket = Bucket::connect(path).map_err(|source| OpenError::Bucket { source })?;
        let read = |source| OpenError::Read { path: path.into(), source };
        let listing = bucket.walk(path).map_err(read)?;
        let below = |(object, bytes): (PathBuf, u64)| {
            let name = object.strip_prefix(path).ok().filter(|name| plain(name))?;
            Some((name.to_path_buf(), bytes))
        };
        let objects: BTreeMap<PathBuf, u64> = listing.into_iter().filter_map(below).collect();
        if objects.is_empty() {
            let reason = "nothing is there".into();
            return Err(OpenError::NotADump { path: path.into(), found: reason });
        }
        let directory = tempfile::Builder::new().prefix("backtape-").tempdir().map_err(read)?;
        // The copy keeps the last component of the URL, which may be the name of a run.
        let copy = Copy { bucket, url: path.into(), objects, directory };
        let path = copy.root();
        let place = Place { path, reference: reference.clone(), copy: Some(Arc::new(copy)) };
        place.name_all().map_err(read)?;
        Ok(place)
    }

    /// The selection, narrowed by an ending such as `@1:5` after the place's name or after the name
    /// of the run.
    pub(super) fn narrow(&self, selection: &Selection) -> Result<Selection, OpenError> {
        let narrowed = self.reference.narrow(selection)?;
        let here = |name: &String| self.path.join(name).is_dir();
        match narrowed.run.as_ref().filter(|name| !here(name)).and_then(Reference::of_name) {
            Some((run, ending)) => ending.narrow(&Selection { run: Some(run), ..narrowed }),
            None => Ok(narrowed),
        }
    }

    /// Whether files are brought to this host before they can be read.
    pub fn is_bucket(&self) -> bool {
        self.copy.is_some()
    }

    /// The directory to look in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path below [`Place::path`] as the user would write it.
    pub fn given(&self, path: &Path) -> PathBuf {
        match &self.copy {
            Some(copy) => moved(path, &copy.root(), &copy.url),
            None => path.into(),
        }
    }

    /// Creates what is needed to choose a step: the directories, the run records, and an empty file
    /// for each manifest.
    fn name_all(&self) -> io::Result<()> {
        let Some(copy) = &self.copy else { return Ok(()) };
        for name in copy.objects.keys() {
            let target = copy.root().join(name);
            std::fs::create_dir_all(target.parent().unwrap_or(&copy.root()))?;
            match name.file_name().and_then(|name| name.to_str()) {
                Some(RUN_RECORD) => copy.bring(name)?,
                Some(MANIFEST) => drop(std::fs::File::create(target)?),
                _ => {}
            }
        }
        Ok(())
    }

    /// Bytes of every shard file of a step, without opening one.
    pub(super) fn shard_files(&self, step: &StepDir) -> io::Result<Vec<u64>> {
        let shards = |name: &Path| name.extension().is_some_and(|ending| ending == "safetensors");
        if let Some(copy) = &self.copy {
            let below = step.path.strip_prefix(copy.root()).unwrap_or(&step.path);
            let objects = copy.objects.iter().filter(|(name, _)| name.parent() == Some(below));
            return Ok(objects.filter(|(name, _)| shards(name)).map(|(_, bytes)| *bytes).collect());
        }
        let mut sizes = Vec::new();
        for entry in std::fs::read_dir(&step.path)? {
            let entry = entry?;
            if shards(Path::new(&entry.file_name())) {
                sizes.push(entry.metadata()?.len());
            }
        }
        Ok(sizes)
    }

    /// Copies the files of a step that `wanted` accepts by name from the bucket.
    pub fn bring(
        &self,
        step: &StepDir,
        wanted: impl Fn(&str) -> bool + Sync,
    ) -> Result<(), OpenError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let below = step.path.strip_prefix(copy.root()).unwrap_or(&step.path);
        let accepted = |name: &&PathBuf| {
            let file = name.file_name().and_then(|file| file.to_str());
            name.parent() == Some(below) && file.is_some_and(&wanted)
        };
        let names: Vec<&PathBuf> = copy.objects.keys().filter(accepted).collect();
        names.par_iter().try_for_each(|name| {
            copy.bring(name).map_err(|source| OpenError::Read { path: copy.url.join(name), source })
        })
    }

    /// Copies the coordinator's journal of an attempt from the bucket, as a single file.
    pub fn bring_journal(&self, attempt: &AttemptDir) -> Result<(), OpenError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let below = attempt.path.strip_prefix(copy.root()).unwrap_or(&attempt.path);
        let lines = below.join(JOURNAL_LINES);
        // The objects are numbered with leading zeros, so that their names sort in order.
        let lines_objects = copy.objects.iter().filter(|(name, _)| name.parent() == Some(&lines));
        let (names, sizes): (Vec<PathBuf>, Vec<u64>) =
            lines_objects.map(|(name, bytes)| (copy.url.join(name), *bytes)).unzip();
        if names.is_empty() || sizes.iter().sum::<u64>() > MAX_EXAMINED_BYTES {
            return Ok(());
        }
        let read = |source| OpenError::Read { path: copy.url.join(&lines), source };
        let text = Backend::Bucket(copy.bucket.clone()).read_all(&names).map_err(read)?.concat();
        std::fs::write(attempt.path.join(JOURNAL), text).map_err(read)
    }

    /// Copies the scalars of an attempt from the bucket.
    pub fn bring_scalars(&self, attempt: &AttemptDir) -> Result<(), OpenError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let below = attempt.path.strip_prefix(copy.root()).unwrap_or(&attempt.path);
        let directory = below.join(scalars::DIRECTORY);
        let mut ranks: Vec<u32> = copy
            .objects
            .keys()
            .filter_map(|name| {
                let rank = name.parent().filter(|rank| rank.parent() == Some(&directory))?;
                rank.file_name()?.to_str()?.strip_prefix("rank-")?.parse().ok()
            })
            .collect();
        ranks.dedup();
        let backend = Backend::Bucket(copy.bucket.clone());
        let source = copy.url.join(below);
        for rank in ranks {
            ScalarObjects::gather(&backend, &source, Rank(rank), &attempt.path).map_err(
                |error| OpenError::Read { path: source.join(&directory), source: error },
            )?;
        }
        Ok(())
    }

    /// The same error, with the user's paths in place of those of the local copy.
    pub(super) fn with_user_paths(&self, error: OpenError) -> OpenError {
        match &self.copy {
            Some(copy) => error.with_paths(|path| moved(path, &copy.root(), &copy.url)),
            None => error,
        }
    }
}

impl Copy {
    fn root(&self) -> PathBuf {
        self.directory.path().join(self.url.file_name().unwrap_or_default())
    }

    /// Copies one object from the bucket, replacing its empty file.
    fn bring(&self, name: &Path) -> io::Result<()> {
        let target = self.root().join(name);
        if let Err(error) = std::fs::remove_file(&target)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        self.bucket.fetch(&self.url.join(name), self.objects[name], &target)
    }
}

/// Moves a path from below `from` to below `to`.
fn moved(path: &Path, from: &Path, to: &Path) -> PathBuf {
    match path.strip_prefix(from) {
        // Joining an empty path would leave a slash at the end.
        Ok(inside) if inside == Path::new("") => to.into(),
        Ok(inside) => to.join(inside),
        Err(_) => path.into(),
    }
}

/// An object's name comes from outside: it must not lead out of the copy.
fn plain(name: &Path) -> bool {
    name.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}
