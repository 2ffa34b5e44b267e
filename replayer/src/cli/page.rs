//! The page of `--report` on disk: whole under its name, or not there.

use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::error::RunError;
use crate::report::{Report, html};

/// A file that will be the page. Until it is written only a hidden file lies beside its name,
/// which is gone when anything fails.
pub struct PageFile {
    path: PathBuf,
    scratch: NamedTempFile,
}

impl PageFile {
    /// Finds out whether a page can be written under this name, before there is one.
    pub fn beside(path: &Path) -> Result<PageFile, RunError> {
        let wrong = |source| RunError::Page { path: path.into(), source };
        if path.file_name().is_none() || path.is_dir() {
            return Err(wrong(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory")));
        }
        let directory = path.parent().filter(|parent| *parent != Path::new(""));
        // For whom the umask says, as any file that a person makes.
        let mode = std::fs::Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".backtape-").permissions(mode);
        let scratch = builder.tempfile_in(directory.unwrap_or(Path::new("."))).map_err(wrong)?;
        Ok(PageFile { path: path.into(), scratch })
    }

    /// Writes the page and gives it its name. A page that had the name is replaced: it is made
    /// from a dump that is still there.
    pub fn write(mut self, report: &Report) -> Result<(), RunError> {
        let path = self.path;
        let wrong = |source| RunError::Page { path: path.clone(), source };
        self.scratch.write_all(html::page(report).as_bytes()).map_err(wrong)?;
        self.scratch.as_file().sync_all().map_err(wrong)?;
        self.scratch.persist(&path).map_err(|error| wrong(error.error))?;
        Ok(())
    }
}
