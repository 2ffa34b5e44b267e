//! Scalars in a bucket: each batch of rows is a separate object, whose name contains the process
//! that sent it and which of that process's rows it holds.

use std::io;
use std::path::{Path, PathBuf};

use super::files::LIMIT_BYTES;
use super::{Header, Line, Row, ScalarFiles, json_lines, line};
use crate::identity::Rank;
use crate::store::Backend;

/// The rows of one process of one rank.
#[derive(Debug)]
pub struct ScalarObjects {
    backend: Backend,
    directory: PathBuf,
    header: Header,
    rows: u64,
}

impl ScalarObjects {
    /// Continues after the rows of the process in `header` that are already in the bucket.
    pub fn open(backend: &Backend, attempt: &Path, header: Header) -> io::Result<ScalarObjects> {
        let directory = directory(attempt, header.rank);
        let names = backend.list(&directory)?.files;
        let parsed = names.iter().filter_map(|name| parse(name));
        let of_process = parsed.filter(|(process, _)| *process == header.incarnation);
        let rows = of_process.map(|(_, to)| to).max().unwrap_or(0);
        Ok(ScalarObjects { backend: backend.clone(), directory, header, rows })
    }

    /// Rows of this process in the bucket.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes rows as one object; after an error they may be appended again.
    pub fn append(&mut self, rows: &[Row]) -> io::Result<()> {
        let mut text = Vec::new();
        Line::Header(self.header.clone()).write(&mut text);
        rows.iter().for_each(|row| line::write_row(row, &mut text));
        let (from, to) = (self.rows, self.rows + rows.len() as u64);
        let name = format!("{:016x}-{from:010}-{to:010}.jsonl", self.header.incarnation);
        // An object that already has this name holds the same rows, because their numbers are part
        // of it.
        self.backend.create(&self.directory.join(name), &text)?;
        self.rows = to;
        Ok(())
    }

    /// Writes a rank's rows from the bucket into the same files, below `target`, that a store in a
    /// directory has.
    pub fn gather(backend: &Backend, attempt: &Path, rank: Rank, target: &Path) -> io::Result<()> {
        let directory = directory(attempt, rank);
        let mut names = backend.list(&directory)?.files;
        names.retain(|name| parse(name).is_some());
        let places: Vec<PathBuf> = names.iter().map(|name| directory.join(name)).collect();
        let mut open: Option<(u64, ScalarFiles)> = None;
        for (bytes, place) in backend.read_all(&places)?.iter().zip(&places) {
            let (header, rows) = read(bytes).map_err(|detail| {
                let detail = format!("{}: {detail}", place.display());
                io::Error::new(io::ErrorKind::InvalidData, detail)
            })?;
            if open.as_ref().is_none_or(|(process, _)| *process != header.incarnation) {
                let process = header.incarnation;
                open = Some((process, ScalarFiles::open(target, header, LIMIT_BYTES)?));
            }
            if let Some((_, files)) = &mut open {
                files.append(&rows)?;
            }
        }
        Ok(())
    }
}

/// The common prefix of a rank's objects: the path of its JSON lines without the extension.
fn directory(attempt: &Path, rank: Rank) -> PathBuf {
    json_lines(attempt, rank).with_extension("")
}

/// From an object's name: the process, and one more than the number of its last row.
fn parse(name: &str) -> Option<(u64, u64)> {
    let (process, rows) = name.strip_suffix(".jsonl")?.split_once('-')?;
    let (_, to) = rows.split_once('-')?;
    Some((u64::from_str_radix(process, 16).ok()?, to.parse().ok()?))
}

fn read(bytes: &[u8]) -> Result<(Header, Vec<Row>), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let mut header = None;
    let mut rows = Vec::new();
    for text in text.lines() {
        match Line::parse(text).map_err(|error| error.to_string())? {
            Line::Header(line_header) => header = Some(line_header),
            Line::Row(row) => rows.push(row),
            Line::Note(_) => {}
        }
    }
    Ok((header.ok_or("it does not say whose rows it holds")?, rows))
}
