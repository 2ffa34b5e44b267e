//! Reads a journal line by line: that of a job that records every step for weeks does not fit into
//! memory.

use std::io::BufRead;
use std::path::Path;

use super::{CHECKSUM_DIGITS, JournalError};
use crate::hash::ContentHash;

/// Where the valid lines of a journal end.
#[derive(Debug)]
pub(crate) struct End {
    /// Number of valid lines.
    pub lines: usize,
    /// Bytes of an incomplete last line, which is dropped.
    pub torn_bytes: u64,
    pub(super) good_bytes: u64,
    pub(super) chain: ContentHash,
}

/// Calls `each` with the JSON of every line whose checksum is right; if `each` fails, that line
/// counts as damaged. `path` appears only in errors.
pub(crate) fn read(
    path: &Path,
    mut from: impl BufRead,
    mut each: impl FnMut(&[u8]) -> Result<(), String>,
) -> Result<End, JournalError> {
    let failed = |source| JournalError::Read { path: path.into(), source };
    let damaged = |line, detail| JournalError::Damaged { path: path.into(), line, detail };
    let mut end = End { lines: 0, torn_bytes: 0, good_bytes: 0, chain: chain_start() };
    let mut line = Vec::new();
    loop {
        line.clear();
        if from.read_until(b'\n', &mut line).map_err(failed)? == 0 {
            return Ok(end);
        }
        match check(&line, end.chain) {
            Ok((json, chain)) => {
                end.lines += 1;
                (end.chain, end.good_bytes) = (chain, end.good_bytes + line.len() as u64);
                each(json).map_err(|detail| damaged(end.lines, detail))?;
            }
            // A bad last line is an incomplete write; a bad line before another one is damage.
            Err(detail) if !from.fill_buf().map_err(failed)?.is_empty() => {
                return Err(damaged(end.lines + 1, detail));
            }
            Err(_) => end.torn_bytes = line.len() as u64,
        }
    }
}

/// The JSON of a line whose checksum is right, and the checksum.
fn check(line: &[u8], previous: ContentHash) -> Result<(&[u8], ContentHash), String> {
    let text = line.strip_suffix(b"\n").ok_or("it has no end")?;
    let (digits, rest) = text.split_at_checked(CHECKSUM_DIGITS).ok_or("it is too short")?;
    let json = rest.strip_prefix(b" ").ok_or("it has no checksum")?;
    let chain = link(previous, json);
    if digits != chain.to_string().as_bytes() {
        return Err("its checksum does not match its contents".into());
    }
    Ok((json, chain))
}

/// The checksum before the first line.
pub(super) fn chain_start() -> ContentHash {
    ContentHash::of(b"backtape journal 1")
}

/// The checksum of a line, from the previous line's checksum and the line's JSON.
pub(super) fn link(previous: ContentHash, json: &[u8]) -> ContentHash {
    let mut text = previous.to_string().into_bytes();
    text.extend(json);
    ContentHash::of(&text)
}
