//! Where a dump is read: a directory as it lies, or a bucket, of which the step that is meant is
//! brought to this host first.
//!
//! Of a bucket everything is named here and nothing brought until a step is chosen, so that one
//! step of a run of terabytes costs that step. The copy ends with the last that reads it.

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

/// A place that can be looked at as a directory.
#[derive(Clone)]
pub struct Place {
    path: PathBuf,
    /// What its name was followed by.
    reference: Reference,
    copy: Option<Arc<Copy>>,
}

/// What was brought of a bucket.
struct Copy {
    bucket: Bucket,
    /// As it was given.
    url: PathBuf,
    /// Bytes of every object, by its path below `url`.
    objects: BTreeMap<PathBuf, u64>,
    directory: tempfile::TempDir,
}

impl Place {
    /// The place itself, or the names of what lies in a bucket.
    pub fn of(path: &Path) -> Result<Place, OpenError> {
        let reference = Reference::read(path)?;
        let path = reference.path.as_path();
        if !is_url(path) {
            return Ok(Place { path: path.into(), copy: None, reference });
        }
        let bucket = Bucket::connect(path).map_err(|source| OpenError::Bucket { source })?;
        let read = |source| OpenError::Read { path: path.into(), source };
        let found = bucket.walk(path).map_err(read)?;
        let below = |(object, bytes): (PathBuf, u64)| {
            let name = object.strip_prefix(path).ok().filter(|name| plain(name))?;
            Some((name.to_path_buf(), bytes))
        };
        let objects: BTreeMap<PathBuf, u64> = found.into_iter().filter_map(below).collect();
        if objects.is_empty() {
            let found = "nothing is there".into();
            return Err(OpenError::NotADump { path: path.into(), found });
        }
        let directory = tempfile::Builder::new().prefix("backtape-").tempdir().map_err(read)?;
        // The last component names a run that was given without its store.
        let copy = Copy { bucket, url: path.into(), objects, directory };
        let path = copy.root();
        let place = Place { path, reference: reference.clone(), copy: Some(Arc::new(copy)) };
        place.name_all().map_err(read)?;
        Ok(place)
    }

    /// The selection with what the place's name was followed by, as in `run@1:5`, or the name of
    /// the run in it.
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

    /// A path below [`Place::path`] as the user knows it.
    pub fn given(&self, path: &Path) -> PathBuf {
        match &self.copy {
            Some(copy) => moved(path, &copy.root(), &copy.url),
            None => path.into(),
        }
    }

    /// Makes the directories, the run records, and a file for each manifest that is there: what
    /// a step is chosen by.
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
        let shards = |name: &Path| name.extension().is_some_and(|of| of == "safetensors");
        if let Some(copy) = &self.copy {
            let below = step.path.strip_prefix(copy.root()).unwrap_or(&step.path);
            let of = copy.objects.iter().filter(|(name, _)| name.parent() == Some(below));
            return Ok(of.filter(|(name, _)| shards(name)).map(|(_, bytes)| *bytes).collect());
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

    /// Brings the files of a step that `wanted` accepts by name.
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

    /// Brings the coordinator's journal of an attempt: as the one file that it is in a directory.
    pub fn bring_journal(&self, attempt: &AttemptDir) -> Result<(), OpenError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let below = attempt.path.strip_prefix(copy.root()).unwrap_or(&attempt.path);
        let lines = below.join(JOURNAL_LINES);
        // Numbered with leading zeros, so their order is that of their names.
        let of = copy.objects.iter().filter(|(name, _)| name.parent() == Some(&lines));
        let (names, sizes): (Vec<PathBuf>, Vec<u64>) =
            of.map(|(name, bytes)| (copy.url.join(name), *bytes)).unzip();
        if names.is_empty() || sizes.iter().sum::<u64>() > MAX_EXAMINED_BYTES {
            return Ok(());
        }
        let read = |source| OpenError::Read { path: copy.url.join(&lines), source };
        let text = Backend::Bucket(copy.bucket.clone()).read_all(&names).map_err(read)?.concat();
        std::fs::write(attempt.path.join(JOURNAL), text).map_err(read)
    }

    /// Brings the scalars of an attempt.
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

    /// The same error, with what the user gave in place of this host's copy.
    pub(super) fn told(&self, error: OpenError) -> OpenError {
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

    /// Brings one object, in place of what stood for it.
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

/// A path below `from`, below `to`.
fn moved(path: &Path, from: &Path, to: &Path) -> PathBuf {
    match path.strip_prefix(from) {
        // Joining nothing would leave a slash at the end.
        Ok(inside) if inside == Path::new("") => to.into(),
        Ok(inside) => to.join(inside),
        Err(_) => path.into(),
    }
}

/// An object's name comes from outside: it must not lead out of the copy.
fn plain(name: &Path) -> bool {
    name.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}
