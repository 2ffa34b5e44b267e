//! The three files of one rank (JSON lines, CSV, TensorBoard events), to which rows are appended in
//! batches.
//!
//! The size of the files is capped: beyond half of the cap scalars of layers (a `/` in the name)
//! are left out, beyond the cap all scalars. A note in the JSON lines records each.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::line::{Header, Line};
use super::{Row, csv, events, is_global_name, json_lines, line};
use crate::store::durable;

/// Most bytes of one rank's three files together: enough for a million steps of 20 scalars, or
/// 10,000 steps of 2,000.
pub const LIMIT_BYTES: u64 = 1 << 30;

/// The files of one rank. They are closed between batches, because a coordinator may serve 10,000
/// ranks.
#[derive(Debug)]
pub struct ScalarFiles {
    header: Header,
    json_lines: PathBuf,
    csv: PathBuf,
    /// The events file, one for each process; `None` until `begin` has read what exists.
    events: Option<PathBuf>,
    limit_bytes: u64,
    written: u64,
    rows: u64,
    /// How many of the two notes about the cap are written: 0, 1 or 2.
    said: u8,
    begun: bool,
}

impl ScalarFiles {
    /// The files of a rank below an attempt's directory; the first append creates them.
    pub fn of(attempt: &Path, header: Header, limit_bytes: u64) -> ScalarFiles {
        let json_lines = json_lines(attempt, header.rank);
        ScalarFiles {
            csv: json_lines.with_extension("csv"),
            header,
            json_lines,
            events: None,
            limit_bytes,
            written: 0,
            rows: 0,
            said: 0,
            begun: false,
        }
    }

    /// The same, created at once. It counts the rows that the process in `header` wrote before, so
    /// that rows which it sends again are not written twice.
    pub fn open(attempt: &Path, header: Header, limit_bytes: u64) -> io::Result<ScalarFiles> {
        let mut files = ScalarFiles::of(attempt, header, limit_bytes);
        files.begin()?;
        Ok(files)
    }

    fn begin(&mut self) -> io::Result<PathBuf> {
        if let Some(events) = &self.events {
            return Ok(events.clone());
        }
        let stem = self.json_lines.with_extension("");
        durable::create_directory(&stem)?;
        let mut written = length(&self.json_lines) + length(&self.csv);
        for entry in std::fs::read_dir(&stem)? {
            written += entry?.metadata()?.len();
        }
        (self.rows, self.begun) = rows_of(&self.json_lines, &self.header)?;
        let events = next_events(&stem, &self.header)?;
        (self.written, self.events) = (written, Some(events.clone()));
        Ok(events)
    }

    /// Rows in the files that the process in `header` wrote.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The path of the JSON lines.
    pub fn path(&self) -> &Path {
        &self.json_lines
    }

    /// Appends rows, with those of their scalars for which the cap leaves room. After `Err` the
    /// rows are not written and may be appended again. `Ok` with an error: the JSON lines, from
    /// which backtape reads, are written, but the CSV or the events are not.
    pub fn append(&mut self, rows: &[Row]) -> io::Result<Option<io::Error>> {
        let events_path = self.begin()?;
        let (mut text, mut table, mut records) = (Vec::new(), Vec::new(), Vec::new());
        if !self.begun {
            Line::Header(self.header.clone()).write(&mut text);
        }
        if length(&self.csv) == 0 {
            table.extend_from_slice(csv::HEADER.as_bytes());
        }
        if length(&events_path) == 0 {
            events::write_version(rows.first().map_or(0.0, |row| row.time), &mut records);
        }
        let mut said = self.said;
        for row in rows {
            let before = (text.len() + table.len() + records.len()) as u64;
            let Some(row) = self.fitting(row, self.written + before, &mut said, &mut text) else {
                continue;
            };
            line::write_row(&row, &mut text);
            csv::write_row(self.header.rank, &row, &mut table);
            events::write_row(&row, &mut records);
        }
        append(&self.json_lines, &text, true)?;
        (self.begun, self.said) = (true, said);
        self.rows += rows.len() as u64;
        self.written += (text.len() + table.len() + records.len()) as u64;
        Ok(self.append_copies(&table, &events_path, &records).err())
    }

    fn append_copies(&mut self, table: &[u8], events: &Path, records: &[u8]) -> io::Result<()> {
        append(&self.csv, table, true)?;
        append(events, records, false).or_else(|error| {
            // A reader stops at an incomplete record, so that later records need a new file.
            self.events = Some(next_events(&self.json_lines.with_extension(""), &self.header)?);
            Err(error)
        })
    }

    /// The scalars of a row for which the cap leaves room. When it first leaves some out, a note
    /// goes into the JSON lines.
    fn fitting(&self, row: &Row, written: u64, said: &mut u8, text: &mut Vec<u8>) -> Option<Row> {
        let limit = self.limit_bytes;
        let note = |what: &str| {
            Line::Note(format!("{what} from step {}: the files' cap is {limit} bytes", row.step))
        };
        if written >= limit {
            if *said < 2 {
                *said = 2;
                note("no scalars are written").write(text);
            }
            return None;
        }
        if written < limit / 2 {
            return Some(row.clone());
        }
        if *said < 1 {
            *said = 1;
            note("scalars of layers (a / in the name) are left out").write(text);
        }
        let values = row.values.iter().filter(|(name, _)| is_global_name(name)).cloned();
        Some(Row { values: values.collect(), ..*row })
    }
}

/// The path of an events file that does not exist yet.
fn next_events(directory: &Path, header: &Header) -> io::Result<PathBuf> {
    for n in 0..u32::MAX {
        // TensorBoard reads the files of a directory in the order of this number.
        let name = format!("events.out.tfevents.{n:010}.{}", header.host);
        let path = directory.join(name);
        if !path.try_exists()? {
            return Ok(path);
        }
    }
    Err(io::Error::other("no name is left for a file of events"))
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |metadata| metadata.len())
}

/// The number of rows below the last header, if that header is this process's, and whether it is.
fn rows_of(path: &Path, header: &Header) -> io::Result<(u64, bool)> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, false)),
        file => file?,
    };
    let (mut rows, mut same_header) = (0, false);
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        match std::str::from_utf8(&line).ok().and_then(|text| Line::parse(text.trim_end()).ok()) {
            Some(Line::Header(line_header)) => (rows, same_header) = (0, line_header == *header),
            // An incomplete last row does not count: the process sends it again.
            Some(Line::Row(_)) if same_header && line.ends_with(b"\n") => rows += 1,
            _ => {}
        }
        line.clear();
    }
    Ok((rows, same_header))
}

/// Appends the bytes in one write. If the file's last line is incomplete, text starts on a new
/// line.
fn append(path: &Path, bytes: &[u8], text: bool) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // If somebody put a symbolic link at this path it is not followed, and a pipe does not block.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.create(true).read(true).append(true).mode(0o600).custom_flags(flags.bits() as i32);
    let mut file = options.open(path)?;
    if text && file.seek(SeekFrom::End(0))? > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            return file.write_all(&[b"\n", bytes].concat());
        }
    }
    file.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::{Attempt, Name, Rank};
    use crate::scalars::LineError;

    fn header(incarnation: u64) -> Header {
        Header {
            schema: line::SCHEMA.into(),
            run: Name::new("run-a").unwrap(),
            attempt: Attempt(0),
            rank: Rank(3),
            world_size: 4,
            host: Name::new("host-a").unwrap(),
            incarnation,
        }
    }

    fn rows(steps: std::ops::Range<u64>) -> Vec<Row> {
        let values = || vec![("loss".into(), 2.0), ("grad_norm/layers.0".into(), f64::NAN)];
        steps.map(|step| Row { step, time: 1.0, values: values() }).collect()
    }

    fn read(path: &Path) -> Vec<Result<Line, LineError>> {
        std::fs::read_to_string(path).unwrap().lines().map(Line::parse).collect()
    }

    #[test]
    fn a_torn_line_is_left_alone_and_the_next_process_goes_on_below_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = ScalarFiles::open(dir.path(), header(1), LIMIT_BYTES).unwrap();
        first.append(&rows(0..2)).unwrap();
        let torn = std::fs::read(first.path()).unwrap();
        std::fs::write(first.path(), &torn[..torn.len() - 9]).unwrap();
        let again = ScalarFiles::open(dir.path(), header(1), LIMIT_BYTES).unwrap();
        assert_eq!(again.rows(), 1, "the torn row is not there");
        let mut second = ScalarFiles::open(dir.path(), header(2), LIMIT_BYTES).unwrap();
        assert_eq!(second.rows(), 0, "another process has written nothing yet");
        second.append(&rows(2..3)).unwrap();
        let lines = read(second.path());
        let kinds: Vec<bool> = lines.iter().map(Result::is_ok).collect();
        assert_eq!(kinds, [true, true, false, true, true]);
        assert_eq!(std::fs::read_dir(dir.path().join("scalars/rank-00003")).unwrap().count(), 2);
    }

    #[test]
    fn the_cap_first_takes_the_layers_then_all_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = ScalarFiles::open(dir.path(), header(1), 8000).unwrap();
        for step in 0..200 {
            files.append(&rows(step..step + 1)).unwrap();
        }
        let lines: Vec<Line> = read(files.path()).into_iter().map(Result::unwrap).collect();
        let notes = lines.iter().filter(|line| matches!(line, Line::Note(_))).count();
        assert_eq!(notes, 2);
        let widths: Vec<usize> = lines
            .iter()
            .filter_map(
                |line| if let Line::Row(row) = line { Some(row.values.len()) } else { None },
            )
            .collect();
        assert_eq!((widths.first(), widths.last()), (Some(&2), Some(&1)));
        assert!(widths.len() < 200);
        let all =
            length(&files.json_lines) + length(&files.csv) + length(files.events.as_ref().unwrap());
        assert!(all < 8000 + 500, "{all}");
        assert_eq!(files.rows(), 200, "what the cap left out is not to be sent again");
    }
}
