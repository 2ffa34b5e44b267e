//! The page of `--report` on disk.

use std::path::{Path, PathBuf};

use super::error::RunError;
use super::written::Target;
use crate::report::{Report, html};

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
