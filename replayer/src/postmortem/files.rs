//! Files that a report is written to: each is whole under its name or not there, and that it
//! cannot be written is said before the work.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::error::RunError;
use crate::report::{Report, html};

/// A file that will be written. Until then only a hidden one lies beside its name, which is gone
/// when anything fails.
pub(crate) enum Target {
    Scratch {
        path: PathBuf,
        scratch: NamedTempFile,
    },
    /// A device or a pipe, as /dev/null: it is written to, and never replaced by a file.
    Open(File),
}

impl Target {
    /// Finds out whether this name can be written. What a link leads to is written, not the link.
    pub(crate) fn beside(path: &Path) -> io::Result<Target> {
        if path.file_name().is_none() || path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
        }
        let path = match path.metadata() {
            Ok(there) if !there.is_file() => {
                return Ok(Target::Open(OpenOptions::new().write(true).open(path)?));
            }
            Ok(_) => path.canonicalize()?,
            Err(_) => path.into(),
        };
        let directory = path.parent().filter(|parent| *parent != Path::new(""));
        if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
            let why = format!("there is no directory {}", directory.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        // For whom the umask says, as any file that a person makes.
        let mode = std::fs::Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".backtape-").permissions(mode);
        let scratch = builder.tempfile_in(directory.unwrap_or(Path::new(".")))?;
        Ok(Target::Scratch { path, scratch })
    }

    /// Writes it and gives it its name. A file that had the name is replaced: it is made from a
    /// dump that is still there.
    pub(crate) fn write(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Target::Open(mut file) => file.write_all(bytes),
            Target::Scratch { path, mut scratch } => {
                scratch.write_all(bytes)?;
                scratch.as_file().sync_all()?;
                scratch.persist(&path).map_err(|error| error.error)?;
                Ok(())
            }
        }
    }
}

/// A file that will be the page.
pub struct PageFile {
    path: PathBuf,
    target: Target,
}

impl PageFile {
    /// Finds out whether a page can be written under this name, before there is one.
    pub fn beside(path: &Path) -> Result<PageFile, RunError> {
        let wrong = |source| RunError::Page { path: path.into(), source };
        Ok(PageFile { path: path.into(), target: Target::beside(path).map_err(wrong)? })
    }

    /// Writes the page and gives it its name.
    pub fn write(self, report: &Report) -> Result<(), RunError> {
        let PageFile { path, target } = self;
        let written = target.write(html::page(report).as_bytes());
        written.map_err(|source| RunError::Page { path, source })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, symlink};

    use super::*;

    #[test]
    fn a_file_is_whole_or_not_there_and_a_link_stays_one() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("a.json"), directory.path().join("link"));
        drop(Target::beside(&file).unwrap());
        assert_eq!(directory.path().read_dir().unwrap().count(), 0, "nothing was left behind");
        Target::beside(&file).unwrap().write(b"one").unwrap();
        symlink(&file, &link).unwrap();
        Target::beside(&link).unwrap().write(b"two").unwrap();
        assert!(link.is_symlink() && std::fs::read(&file).unwrap() == b"two");
        assert!(Target::beside(&directory.path().join("absent/a.json")).is_err());
        assert!(Target::beside(directory.path()).is_err());
    }

    /// Goal: `--json /dev/null`, typed by root, leaves the device. Method: a pipe of our own stands
    /// in for it; it must still be one, and hold what was written.
    #[test]
    fn a_device_or_a_pipe_is_written_to_and_never_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let reader = {
            let pipe = pipe.clone();
            std::thread::spawn(move || std::fs::read(pipe).unwrap())
        };
        Target::beside(&pipe).unwrap().write(b"text").unwrap();
        assert_eq!(reader.join().unwrap(), b"text");
        assert!(std::fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    }
}
