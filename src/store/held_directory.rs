//! A directory that is kept open: files are created in it through its descriptor, whatever happens
//! to its path.
//!
//! A call with a path looks the path up again, and anybody who can write to the store could replace
//! a directory by a symbolic link between two calls. Here each component of the path is opened
//! relative to the one before, and none may be a symbolic link.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Mode, OFlags, linkat, mkdirat, openat, unlinkat};
use rustix::io::Errno;

use super::durable;
use crate::faults;

/// How the directories on the way are opened: only for looking up entries in them.
#[cfg(target_os = "linux")]
const STEP: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
#[cfg(not(target_os = "linux"))]
const STEP: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open directory, reached without following a link.
#[derive(Debug)]
pub struct HeldDirectory(File);

impl HeldDirectory {
    /// Opens the directory at an absolute path that holds no link.
    pub fn open(path: &Path) -> io::Result<HeldDirectory> {
        walk(path, false)
    }

    /// The same; creates directories that do not exist, with their entries durable in their
    /// parents.
    pub fn create(path: &Path) -> io::Result<HeldDirectory> {
        walk(path, true)
    }

    /// Creates a file that only its owner can read; fails if the name exists.
    pub fn create_private(&self, name: &str) -> io::Result<File> {
        faults::point("durable.create")?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(File::from(openat(&self.0, name, flags | OFlags::CLOEXEC, mode)?))
    }

    /// Opens a plain file to read.
    pub fn open_file(&self, name: &str) -> io::Result<File> {
        // O_NONBLOCK: if somebody put a named pipe there, opening it would block until it has a
        // writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(&self.0, name, flags, Mode::empty());
        let file = File::from(opened.map_err(|error| link(error, "it is a symbolic link"))?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no plain file")),
        }
    }

    /// [`super::durable::publish`] within this directory.
    pub fn publish(&self, scratch: &str, name: &str) -> io::Result<bool> {
        faults::point("durable.link")?;
        if faults::seeded("second-overwrites-first") {
            rustix::fs::renameat(&self.0, scratch, &self.0, name)?;
            return self.sync().map(|()| true);
        }
        let created = match linkat(&self.0, scratch, &self.0, name, AtFlags::empty()) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        faults::point("durable.unlink")?;
        self.remove(scratch)?;
        self.sync()?;
        faults::pass("durable.published");
        Ok(created)
    }

    /// Removes a file of this directory.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Makes the entries of this directory durable.
    fn sync(&self) -> io::Result<()> {
        faults::point("durable.sync-directory")?;
        match faults::seeded("no-directory-fsync") {
            true => Ok(()),
            false => self.0.sync_all(),
        }
    }
}

fn walk(path: &Path, create: bool) -> io::Result<HeldDirectory> {
    let refuse = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if !path.is_absolute() {
        return refuse("a held directory is named by an absolute path");
    }
    let mut directory = rustix::fs::open("/", STEP, Mode::empty())?;
    let mut parent = None;
    for component in path.components() {
        let next = match component {
            Component::RootDir => continue,
            Component::Normal(name) => step(&directory, Path::new(name), create)?,
            _ => return refuse("a held directory is named by a plain path"),
        };
        parent = Some(std::mem::replace(&mut directory, next));
    }
    if let Some(parent) = parent.filter(|_| create) {
        // The process that created it may have been killed before syncing its entry.
        let inode = rustix::fs::fstat(&directory)?.st_ino;
        durable::sync_once(path, inode, || whole(&parent)?.sync())?;
    }
    whole(&directory)
}

/// Opens the directory `name` in `directory`.
fn step(directory: &OwnedFd, name: &Path, create: bool) -> io::Result<OwnedFd> {
    let open = || openat(directory, name, STEP | OFlags::NOFOLLOW, Mode::empty());
    match open() {
        Err(Errno::NOENT) if create => {
            faults::point("durable.make-directory")?;
            match mkdirat(directory, name, Mode::RWXU) {
                // EXIST: another process has just created it and may not have synced its entry.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            whole(directory)?.sync()?;
            open()
        }
        opened => opened,
    }
    .map_err(|error| link(error, "its step directory is a link or lies behind one"))
}

/// Opens a directory, of which there is only a descriptor for lookups, for reading and syncing.
fn whole(directory: &OwnedFd) -> io::Result<HeldDirectory> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(HeldDirectory(File::from(openat(directory, ".", flags, Mode::empty())?)))
}

/// Replaces the error of an open that met a symbolic link by one that says so.
fn link(error: Errno, what: &str) -> io::Error {
    match error {
        // With O_DIRECTORY a symbolic link gives ENOTDIR.
        Errno::LOOP | Errno::NOTDIR => io::Error::new(io::ErrorKind::InvalidData, what),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_link_on_the_way_is_followed() {
        let outer = tempfile::tempdir().unwrap();
        let outer = outer.path().canonicalize().unwrap();
        std::fs::create_dir_all(outer.join("elsewhere/step")).unwrap();
        symlink(outer.join("elsewhere"), outer.join("run")).unwrap();
        for path in ["run", "run/step", "run/new/step"] {
            let opened = HeldDirectory::create(&outer.join(path));
            assert_eq!(opened.unwrap_err().kind(), io::ErrorKind::InvalidData, "{path}");
        }
        assert!(!outer.join("elsewhere/new").exists());
        assert!(HeldDirectory::open(Path::new("run")).is_err());
        assert!(HeldDirectory::open(&outer.join("run/../elsewhere")).is_err());
    }

    #[test]
    fn a_directory_that_is_swapped_for_a_link_stays_the_one_that_was_opened() {
        let outer = tempfile::tempdir().unwrap();
        let outer = outer.path().canonicalize().unwrap();
        let (step, moved) = (outer.join("store/step"), outer.join("store/moved"));
        std::fs::create_dir(outer.join("elsewhere")).unwrap();
        let directory = HeldDirectory::create(&step).unwrap();
        std::fs::rename(&step, &moved).unwrap();
        symlink(outer.join("elsewhere"), &step).unwrap();
        drop(directory.create_private("scratch").unwrap());
        assert!(directory.publish("scratch", "file").unwrap());
        assert!(moved.join("file").is_file());
        assert_eq!(std::fs::read_dir(outer.join("elsewhere")).unwrap().count(), 0);
    }

    #[test]
    fn the_second_to_publish_loses_and_leaves_nothing_behind() {
        let outer = tempfile::tempdir().unwrap();
        let directory =
            HeldDirectory::create(&outer.path().canonicalize().unwrap().join("a/b")).unwrap();
        for (scratch, first) in [("one", true), ("two", false)] {
            drop(directory.create_private(scratch).unwrap());
            assert_eq!(directory.publish(scratch, "file").unwrap(), first);
        }
        assert_eq!(std::fs::read_dir(outer.path().join("a/b")).unwrap().count(), 1);
        assert!(directory.open_file("file").is_ok());
        symlink("file", outer.path().join("a/b/link")).unwrap();
        assert!(directory.open_file("link").is_err());
    }
}
