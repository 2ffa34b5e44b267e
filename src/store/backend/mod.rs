//! The two kinds of store, a directory (of this host or shared by many) and a bucket of an object
//! store, behind one interface.
//!
//! A place in a store is a path; in a bucket it begins with the bucket's URL
//! (`s3://dumps/team/run-a`), so that layout, messages and records are the same for both. No
//! function here overwrites a file or object that has its final name.

mod bucket;
#[cfg(test)]
mod contract;
#[cfg(test)]
#[path = "../../../tests/support/s3.rs"]
mod s3;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::durable;
use super::pieces::Moved;
use crate::faults;
pub use bucket::{Bucket, ConnectError};

/// A directory or a bucket.
#[derive(Clone, Debug)]
pub enum Backend {
    /// Files, made durable by [`durable`].
    Directory,
    /// Objects, durable when their put is answered.
    Bucket(Bucket),
}

/// A file or object that is read at given offsets.
pub trait ReadAt: Send {
    /// Its length in bytes.
    fn length(&self) -> io::Result<u64>;

    /// Fills the buffer from `offset` on.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

/// The names of what is directly in a place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Directories; in a bucket, the common prefixes of objects' names up to the next slash.
    pub directories: Vec<String>,
    /// Files or objects.
    pub files: Vec<String>,
}

/// True for the URL of a bucket, false for a path of this host.
pub fn is_url(place: &Path) -> bool {
    bucket::SCHEMES.iter().any(|scheme| {
        place.to_str().is_some_and(|text| {
            text.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://"))
        })
    })
}

impl Backend {
    /// The backend of a place; the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`) configures the
    /// access to buckets.
    pub fn of(place: &Path) -> Result<Backend, ConnectError> {
        match is_url(place) {
            true => Ok(Backend::Bucket(Bucket::connect(place)?)),
            false => Ok(Backend::Directory),
        }
    }

    /// Creates `target` with these bytes, atomically; false if it existed, which leaves it
    /// unchanged. Durable when this returns.
    pub fn create(&self, target: &Path, bytes: &[u8]) -> io::Result<bool> {
        match self {
            Backend::Directory => {
                create_parent(target)?;
                durable::create(target, bytes)
            }
            Backend::Bucket(bucket) => bucket.create(target, bytes),
        }
    }

    /// The bytes of one file or object.
    pub fn read(&self, target: &Path) -> io::Result<Vec<u8>> {
        match self {
            Backend::Directory => std::fs::read(target),
            Backend::Bucket(bucket) => bucket.read(target),
        }
    }

    /// The bytes of several files or objects; a bucket is sent many requests at a time.
    pub fn read_all(&self, targets: &[PathBuf]) -> io::Result<Vec<Vec<u8>>> {
        match self {
            Backend::Directory => targets.iter().map(std::fs::read).collect(),
            Backend::Bucket(bucket) => bucket.read_all(targets),
        }
    }

    /// Opens a plain file or an object to read parts of it. No link is followed.
    pub fn open(&self, target: &Path) -> io::Result<Box<dyn ReadAt>> {
        match self {
            Backend::Directory => Ok(Box::new(open_plain(target)?)),
            Backend::Bucket(bucket) => Ok(Box::new(bucket.open(target)?)),
        }
    }

    /// A temporary path for a file that [`Backend::publish`] then moves to `target`: in the same
    /// directory, or for a bucket in this host's temporary directory.
    pub fn scratch(&self, target: &Path) -> PathBuf {
        match self {
            Backend::Directory => durable::scratch_beside(target),
            Backend::Bucket(_) => {
                let name = target.file_name().unwrap_or_default();
                durable::scratch_beside(&std::env::temp_dir().join(name))
            }
        }
    }

    /// Moves a finished, synced file of this host to `target`, if that is free; true when it was.
    /// Removes `scratch` and is durable when it returns.
    pub fn publish(&self, scratch: &Path, target: &Path) -> io::Result<bool> {
        self.publish_counted(scratch, target, &Moved::default())
    }

    /// The same; adds the bytes uploaded to a bucket to `moved`.
    pub fn publish_counted(
        &self,
        scratch: &Path,
        target: &Path,
        moved: &Moved,
    ) -> io::Result<bool> {
        match self {
            Backend::Directory => durable::publish(scratch, target),
            Backend::Bucket(bucket) => {
                let created = bucket.send(scratch, target, moved)?;
                std::fs::remove_file(scratch)?;
                Ok(created)
            }
        }
    }

    /// Creates a directory durably; does nothing in a bucket.
    pub fn create_directory(&self, path: &Path) -> io::Result<()> {
        match self {
            Backend::Directory => durable::create_directory(path),
            Backend::Bucket(_) => Ok(()),
        }
    }

    /// True when a file or an object has this name.
    pub fn holds(&self, target: &Path) -> io::Result<bool> {
        match self {
            Backend::Directory => Ok(target.is_file()),
            Backend::Bucket(bucket) => bucket.length(target).map(|_| true).or_else(absent(false)),
        }
    }

    /// True when a file or an object has this name durably. The process that created a file may not
    /// have synced its directory: this call does.
    pub fn settled(&self, target: &Path) -> io::Result<bool> {
        let is_there = self.holds(target)?;
        if let (true, Backend::Directory) = (is_there, self) {
            durable::sync_parent(target)?;
        }
        Ok(is_there)
    }

    /// What is directly in a place, sorted; empty if the place does not exist.
    pub fn list(&self, directory: &Path) -> io::Result<Listing> {
        let mut listing = match self {
            Backend::Directory => list(directory).or_else(absent(Listing::default()))?,
            Backend::Bucket(bucket) => bucket.list(directory)?,
        };
        listing.directories.sort_unstable();
        listing.files.sort_unstable();
        Ok(listing)
    }

    /// True when neither this name nor anything below it exists.
    pub fn is_gone(&self, directory: &Path) -> io::Result<bool> {
        match self {
            Backend::Directory => {
                std::fs::symlink_metadata(directory).map(|_| false).or_else(absent(true))
            }
            Backend::Bucket(bucket) => {
                let listing = bucket.list(directory)?;
                Ok(listing.directories.is_empty() && listing.files.is_empty())
            }
        }
    }

    /// Tests that the store can be written, so that a failure is found at the start and not at the
    /// first commit.
    pub fn prove_writable(&self, store: &Path) -> io::Result<()> {
        let probe = durable::scratch_beside(&store.join("probe"));
        match self {
            Backend::Directory => {
                durable::create_directory(store)?;
                durable::create_private(&probe)?;
                faults::point("store.probe")?;
                std::fs::remove_file(&probe)
            }
            Backend::Bucket(bucket) => bucket.prove_writable(&probe),
        }
    }
}

/// Turns a `NotFound` error into the value `instead`.
fn absent<T>(instead: T) -> impl FnOnce(io::Error) -> io::Result<T> {
    move |error| match error.kind() {
        io::ErrorKind::NotFound => Ok(instead),
        _ => Err(error),
    }
}

fn create_parent(target: &Path) -> io::Result<()> {
    match target.parent() {
        Some(parent) => durable::create_directory(parent),
        None => Ok(()),
    }
}

/// Opens a plain file of a directory to which other users may write.
fn open_plain(path: &Path) -> io::Result<File> {
    let refuse = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let directory = path.parent().map(std::fs::symlink_metadata);
    if matches!(directory, Some(Ok(found)) if !found.is_dir()) {
        return Err(refuse("its step directory is a link or a file"));
    }
    // O_NONBLOCK: if somebody put a named pipe there, opening it would block until it has a writer.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
    let file = opened.map_err(|error| {
        match error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            true => refuse("it is a symbolic link"),
            false => error,
        }
    })?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(refuse("it is not a plain file")),
    }
}

fn list(directory: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // Names that are not UTF-8 are not backtape's.
        let Ok(name) = entry.file_name().into_string() else { continue };
        // Follows symbolic links: a run may be on another disk.
        match entry.path().is_dir() {
            true => listing.directories.push(name),
            false => listing.files.push(name),
        }
    }
    Ok(listing)
}
