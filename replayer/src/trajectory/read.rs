//! Reads the scalars of one attempt: every rank's JSON lines. An incomplete last line is left by a
//! killed process and is ignored; any other line that cannot be read is reported as damage.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use backtape::scalars::{DIRECTORY, Line, LineError, Row};

use super::Series;

/// Most damaged lines that are named one by one.
const NAMED_DAMAGE: usize = 8;

/// What one rank recorded.
#[derive(Clone, Debug, Default)]
pub struct RankScalars {
    /// Which rank.
    pub rank: u32,
    /// Rows that were read.
    pub rows: u64,
    /// How many processes wrote the file: more than one where the rank was restarted.
    pub processes: u64,
    /// The series of each scalar, by name.
    pub series: BTreeMap<String, Series>,
    /// The notes of its recorder.
    pub notes: Vec<String>,
}

impl RankScalars {
    /// Adds a row.
    pub fn push(&mut self, row: &Row) {
        self.rows += 1;
        for (name, value) in &row.values {
            match self.series.get_mut(name) {
                Some(series) => series.push(row.step, *value),
                None => self.series.entry(name.clone()).or_default().push(row.step, *value),
            }
        }
    }

    /// The last step it recorded.
    pub fn last_step(&self) -> Option<u64> {
        self.series.values().filter_map(|series| series.steps().last().copied()).max()
    }
}

/// The scalars of one attempt.
#[derive(Clone, Debug, Default)]
pub struct Trajectory {
    /// Number of ranks in the job, from the headers.
    pub world_size: u32,
    /// Ranks that recorded scalars, ascending.
    pub ranks: Vec<RankScalars>,
    /// Sentences about lines that could not be read.
    pub damage: Vec<String>,
    /// Files with an incomplete last line.
    pub torn: Vec<String>,
    /// Classes of the head, from a dumped step.
    pub vocabulary: Option<u64>,
}

/// Why no scalars were read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No rank recorded scalars.
    #[error(
        "{path} holds no scalars: call recorder.scalars(step, loss=...) in the job, and set \
         BACKTAPE_SCALARS=1 where no tensors are recorded"
    )]
    None {
        /// The attempt's directory.
        path: PathBuf,
    },
    /// The directory or a file cannot be read.
    #[error("the scalars in {path} cannot be read: check its permissions")]
    Read {
        /// Which path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A newer backtape wrote them.
    #[error("{path} cannot be read")]
    Newer {
        /// Which path.
        path: PathBuf,
        /// The error with the version.
        source: LineError,
    },
}

/// Reads the scalars below an attempt's directory.
pub fn read(attempt: &Path) -> Result<Trajectory, ReadError> {
    let directory = attempt.join(DIRECTORY);
    let failed = |source| ReadError::Read { path: directory.clone(), source };
    let entries = match std::fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ReadError::None { path: attempt.into() });
        }
        entries => entries.map_err(failed)?,
    };
    let mut files = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if let Some(rank) = rank_of(&path) {
            files.insert(rank, path);
        }
    }
    if files.is_empty() {
        return Err(ReadError::None { path: attempt.into() });
    }
    let mut trajectory = Trajectory::default();
    for (rank, path) in files {
        let scalars = read_rank(rank, &path, &mut trajectory)?;
        trajectory.ranks.push(scalars);
    }
    Ok(trajectory)
}

/// The rank of `rank-00003.jsonl`.
fn rank_of(path: &Path) -> Option<u32> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".jsonl")?;
    stem.strip_prefix("rank-")?.parse().ok()
}

fn read_rank(rank: u32, path: &Path, all: &mut Trajectory) -> Result<RankScalars, ReadError> {
    let failed = |source| ReadError::Read { path: path.into(), source };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut reader = BufReader::new(File::open(path).map_err(failed)?);
    let mut scalars = RankScalars { rank, ..RankScalars::default() };
    let (mut line, mut number, mut damaged) = (Vec::new(), 0, 0);
    // An incomplete line of a killed process is followed by the header of the next process.
    let mut torn: Option<String> = None;
    while reader.read_until(b'\n', &mut line).map_err(failed)? > 0 {
        number += 1;
        let whole = line.ends_with(b"\n");
        let text = String::from_utf8_lossy(&line);
        let parsed = Line::parse(text.trim_end());
        if let Some(sentence) = torn.take() {
            match parsed {
                Ok(Line::Header(_)) => all.torn.push(name.clone()),
                _ => (damaged, all.damage) = damage(damaged, sentence, &mut all.damage),
            }
        }
        match parsed {
            Ok(Line::Header(header)) => {
                scalars.processes += 1;
                all.world_size = all.world_size.max(header.world_size);
            }
            Ok(Line::Row(row)) => scalars.push(&row),
            Ok(Line::Note(note)) => scalars.notes.push(format!("rank {rank}: {note}")),
            Err(source @ LineError::Newer(_)) => {
                return Err(ReadError::Newer { path: path.into(), source });
            }
            Err(_) if text.trim().is_empty() => {}
            Err(_) if !whole => all.torn.push(name.clone()),
            Err(error) => torn = Some(format!("{name}, line {number}: {error}")),
        }
        line.clear();
    }
    if let Some(sentence) = torn {
        (damaged, all.damage) = damage(damaged, sentence, &mut all.damage);
    }
    if damaged > NAMED_DAMAGE {
        all.damage.push(format!("{name}: {} more lines", damaged - NAMED_DAMAGE));
    }
    Ok(scalars)
}

/// Counts one more damaged line and names the first ones.
fn damage(count: usize, sentence: String, named: &mut Vec<String>) -> (usize, Vec<String>) {
    let mut named = std::mem::take(named);
    if count < NAMED_DAMAGE {
        named.push(sentence);
    }
    (count + 1, named)
}
