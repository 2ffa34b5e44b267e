//! Makes files durable: write, fsync, link to the final name, fsync the directory.
//!
//! A rename before the data is synced leaves an empty file after a power cut;
//! a rename without the directory's fsync can be lost (both seen on ext4). A
//! failed fsync is never tried again on the same descriptor: the kernel may
//! have dropped the dirty pages and would report success (fsyncgate).

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use crate::faults;

/// Creates a file that only its owner can read. Fails if the name exists, also as a symbolic link.
pub fn create_private(path: &Path) -> io::Result<File> {
    faults::point("durable.create")?;
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// A file name in the directory of `target` that no other process or thread uses or has used. The
/// process id alone is not enough: containers on all hosts that share a store have the same few
/// ids, and a file that a killed process left would block the next process with its id.
pub fn scratch_beside(target: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    static PROCESS: LazyLock<u64> =
        LazyLock::new(|| RandomState::new().hash_one((std::process::id(), SystemTime::now())));
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{:016x}-{n}.tmp", *PROCESS))
}

/// Creates a directory and its parents, with each entry durable in its parent. If the directory
/// exists, its entry is synced once: the process that created it may have been killed before the
/// sync, or the sync failed (seen by `soak order`).
pub fn create_directory(path: &Path) -> io::Result<()> {
    if !path.is_dir() {
        return make_directory(path);
    }
    sync_once(path, std::fs::metadata(path)?.ino(), || match sync_parent(path) {
        // No process of the job can have created anything in a parent that cannot be opened.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    })
}

/// Most directories that are remembered as synced: those of the steps that are being written.
const MOST_REMEMBERED: usize = 64;

/// Syncs the entry of an existing directory, unless this process recently did. Directories are
/// remembered by path and inode, because the inode of a removed one is soon reused.
pub(super) fn sync_once(
    path: &Path,
    inode: u64,
    sync: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    static SYNCED: Mutex<VecDeque<(PathBuf, u64)>> = Mutex::new(VecDeque::new());
    let lock = || SYNCED.lock().unwrap_or_else(PoisonError::into_inner);
    if lock().iter().any(|(known, number)| known == path && *number == inode) {
        return Ok(());
    }
    sync()?;
    let mut synced = lock();
    synced.push_back((path.into(), inode));
    if synced.len() > MOST_REMEMBERED {
        synced.pop_front();
    }
    Ok(())
}

fn make_directory(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        // Also syncs the entry of the nearest existing parent: if that entry were lost, so would
        // everything created below it.
        create_directory(parent)?;
    }
    faults::point("durable.make-directory")?;
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    sync_parent(path)
}

/// Makes the directory entry of `path` durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    faults::point("durable.sync-directory")?;
    if faults::seeded("no-directory-fsync") {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Gives a finished, synced scratch file its final name, if that name is free; true when it was. It
/// creates a hard link, because a rename would replace the file of another process that was first.
pub fn publish(scratch: &Path, target: &Path) -> io::Result<bool> {
    faults::point("durable.link")?;
    if faults::seeded("second-overwrites-first") {
        std::fs::rename(scratch, target)?;
        return sync_parent(target).map(|()| true);
    }
    let created = match std::fs::hard_link(scratch, target) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    faults::point("durable.unlink")?;
    std::fs::remove_file(scratch)?;
    sync_parent(target)?;
    faults::pass("durable.published");
    Ok(created)
}

/// Creates `target` with these bytes, atomically; false if it existed, which leaves it unchanged.
pub fn create(target: &Path, bytes: &[u8]) -> io::Result<bool> {
    let scratch = write_scratch(target, bytes)?;
    publish(&scratch, target)
}

/// Replaces `target` with these bytes, atomically.
pub fn replace(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let scratch = write_scratch(target, bytes)?;
    faults::point("durable.rename")?;
    std::fs::rename(&scratch, target)?;
    sync_parent(target)
}

fn write_scratch(target: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let scratch = scratch_beside(target);
    let written = create_private(&scratch).and_then(|mut file| {
        faults::write_all("durable.write", &mut file, bytes)?;
        faults::point("durable.sync")?;
        if faults::seeded("name-before-data") {
            return Ok(());
        }
        file.sync_all()
    });
    match written {
        Ok(()) => Ok(scratch),
        Err(error) => {
            let _ = std::fs::remove_file(&scratch);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_creator_loses_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("manifest.json");
        assert!(create(&target, b"first").unwrap());
        assert!(!create(&target, b"second").unwrap());
        assert_eq!(std::fs::read(&target).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// Goal: files that a killed process left do not block a new process. Method: all scratch names
    /// that contain this process's id exist already, as in a container, where every process has the
    /// same id.
    #[test]
    fn what_a_killed_process_of_the_same_number_left_is_in_nobodys_way() {
        let dir = tempfile::tempdir().unwrap();
        let id = std::process::id();
        for n in 0..5000 {
            std::fs::write(dir.path().join(format!(".probe.{id}-{n}.tmp")), b"").unwrap();
        }
        crate::store::Backend::Directory.prove_writable(dir.path()).unwrap();
    }

    /// Goal: the parent of a new directory is durable too. Method: the parent exists, as if a
    /// process was killed before syncing it, and is remembered as synced afterwards.
    #[test]
    fn the_directory_that_a_new_one_is_made_in_is_synced_too() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(&run).unwrap();
        create_directory(&run.join("attempt-0001/step-00000000")).unwrap();
        let inode = std::fs::metadata(&run).unwrap().ino();
        let mut again = false;
        sync_once(&run, inode, || {
            again = true;
            Ok(())
        })
        .unwrap();
        assert!(!again, "nobody had synced the entry of {}", run.display());
    }

    /// Goal: the entry of an existing directory is synced before it is used, and a directory that
    /// reuses an inode counts as a new one.
    #[test]
    fn a_directory_that_was_found_is_synced_once_and_again_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let (first, other) = (dir.path().join("one"), dir.path().join("other"));
        let failed = sync_once(&first, 7, || Err(io::ErrorKind::Other.into()));
        assert!(failed.is_err());
        let mut synced = Vec::new();
        for (path, inode) in [(&first, 7), (&first, 7), (&first, 8), (&other, 7), (&other, 7)] {
            let sync = || {
                synced.push((path.clone(), inode));
                Ok(())
            };
            sync_once(path, inode, sync).unwrap();
        }
        assert_eq!(synced, [(first.clone(), 7), (first, 8), (other, 7)]);
    }
}
