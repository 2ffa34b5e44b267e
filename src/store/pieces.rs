//! A file written from front to back in large aligned pieces, past the page cache where the file
//! system allows it, by a thread of its own: the next piece is filled while one is written.
//!
//! Through the page cache every byte is copied once more, and fsync then waits for all of them;
//! direct writes of megabytes reach what the disk can do. Where direct writes are refused (ramfs,
//! some network file systems) the same pieces go through the page cache. A file of less than one
//! piece is written at once, without a thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use memmap2::{Advice, MmapMut};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::faults;

/// What is written at a time: enough that a disk is not kept waiting between two.
pub(crate) const PIECE_BYTES: usize = 8 << 20;

/// Direct writes begin and end at multiples of this, in the file and in memory: the largest
/// logical block of the disks there are.
pub(crate) const ALIGNMENT: usize = 4096;

/// Full pieces that wait while one is written.
const PIECES_AHEAD: usize = 1;

/// Least memory of a piece that is being filled: many files are small.
const FIRST_BYTES: usize = 64 << 10;

/// Memory of pieces that are being filled, of all files together. A step has a file for each
/// microbatch, open at the same time: beyond this they are written before they are full.
const FILLING_BYTES: usize = 64 << 20;

/// From this length on a second thread is worth its start.
const SHARED_BYTES: usize = 4 << 20;

/// Pieces kept for the next file: memory that was written to before takes no page faults.
const SPARE_PIECES: usize = 3;

/// Bytes that went where they belong, counted as they go: who waits for them sees them move.
pub type Moved = Arc<AtomicU64>;

/// A write that failed: what comes before `from` is in the file.
#[derive(Debug)]
pub(crate) struct Torn {
    pub(crate) from: u64,
    pub(crate) error: io::Error,
}

/// A file that grows at its end.
pub(crate) struct Pieces {
    file: Arc<File>,
    moved: Moved,
    /// Where the next byte belongs; what of it is not yet handed over is in `piece`.
    end: u64,
    piece: Piece,
    way: Way,
}

/// How full pieces get into the file.
enum Way {
    /// None was full yet.
    Unknown {
        /// Whether the page cache is to be passed by.
        direct: bool,
    },
    Thread(Writer),
    /// At once, each push by itself: what is left after a failure.
    Plain,
}

impl Pieces {
    /// Appends to `file` from `at` on, a multiple of [`ALIGNMENT`]. Without `direct` through the
    /// page cache, for a file that is read again at once.
    pub(crate) fn new(file: File, at: u64, direct: bool) -> Pieces {
        let piece = Piece::default();
        let (file, moved, way) = (Arc::new(file), Moved::default(), Way::Unknown { direct });
        Pieces { file, moved, end: at, piece, way }
    }

    /// What is written from now on is counted there.
    pub(crate) fn count(&mut self, moved: &Moved) {
        self.moved = moved.clone();
    }

    /// Appends; what failed may be of an earlier push.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<(), Torn> {
        while !bytes.is_empty() {
            if self.piece.filled == PIECE_BYTES {
                self.hand_over(true)?;
            }
            if self.is_plain() {
                write_at((&self.file, &self.moved), bytes, self.end)?;
                self.end += bytes.len() as u64;
                return Ok(());
            }
            let n = bytes.len().min(PIECE_BYTES - self.piece.filled);
            let begin = self.end - self.piece.filled as u64;
            self.piece.fill(&bytes[..n]).map_err(|error| Torn { from: begin, error })?;
            self.end += n as u64;
            bytes = &bytes[n..];
        }
        if FILLING.load(Ordering::Relaxed) > FILLING_BYTES && self.piece.filled >= ALIGNMENT {
            self.hand_over(false)?;
        }
        Ok(())
    }

    /// True after a failure: what fails now is of this push.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.way, Way::Plain)
    }

    /// Writes what is left. Nothing is synced here.
    pub(crate) fn finish(&mut self) -> Result<(), Torn> {
        if matches!(self.way, Way::Thread(_)) {
            self.hand_over(false)?;
            self.drain()?;
        }
        let rest = std::mem::take(&mut self.piece);
        self.way = Way::Plain;
        write_at((&self.file, &self.moved), rest.bytes(), self.end - rest.filled as u64)
    }

    /// Goes on from `at` after a failure, through the page cache and without waiting to be full.
    pub(crate) fn restart(&mut self, at: u64) {
        // What it failed at, if anything more, lies behind `at`.
        let _ = self.drain();
        (self.piece, self.end, self.way) = (Piece::default(), at, Way::Plain);
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Another file with the same contents takes its place; only once everything is written.
    pub(crate) fn replace(&mut self, file: File) {
        self.file = Arc::new(file);
    }

    /// Ends the thread, once it has written what it was given.
    fn drain(&mut self) -> Result<(), Torn> {
        match std::mem::replace(&mut self.way, Way::Plain) {
            Way::Thread(writer) => writer.finish(&self.file),
            _ => Ok(()),
        }
    }

    /// Gives the thread what can be written directly; the rest begins the next piece, which has
    /// its full size at once where `more` comes.
    fn hand_over(&mut self, more: bool) -> Result<(), Torn> {
        let begin = self.end - self.piece.filled as u64;
        let mut full = std::mem::take(&mut self.piece);
        if let Way::Unknown { direct } = self.way {
            match Writer::start(self.file.clone(), self.moved.clone(), direct) {
                Ok(writer) => self.way = Way::Thread(writer),
                Err(_) => self.way = Way::Plain,
            }
        }
        let Way::Thread(writer) = &self.way else {
            return write_at((&self.file, &self.moved), full.bytes(), begin);
        };
        let whole = full.filled - full.filled % ALIGNMENT;
        let torn = |error| Torn { from: begin, error };
        if more && FILLING.load(Ordering::Relaxed) <= FILLING_BYTES {
            self.piece = Piece::spare().map_err(torn)?;
        }
        self.piece.fill(&full.bytes()[whole..]).map_err(torn)?;
        full.filled = whole;
        writer.write(begin, full)
    }
}

/// The thread that writes full pieces, and where it failed.
struct Writer {
    pieces: SyncSender<(u64, Piece)>,
    thread: JoinHandle<()>,
    torn: Arc<Mutex<Option<Torn>>>,
}

impl Writer {
    fn start(file: Arc<File>, moved: Moved, direct: bool) -> io::Result<Writer> {
        let (pieces, queue) = sync_channel(PIECES_AHEAD);
        let torn = Arc::new(Mutex::new(None));
        let failed = torn.clone();
        let thread = std::thread::Builder::new().name("backtape-writer".into());
        let thread = thread.spawn(move || {
            let direct = direct && set_direct(&file, true).is_ok();
            write_all((&file, &moved), direct, &queue, &failed);
        })?;
        Ok(Writer { pieces, thread, torn })
    }

    /// Waits while the disk is behind.
    fn write(&self, at: u64, piece: Piece) -> Result<(), Torn> {
        if let Some(torn) = take(&self.torn) {
            return Err(torn);
        }
        let gone = || io::Error::other("the thread that writes has ended");
        self.pieces.send((at, piece)).map_err(|_| Torn { from: at, error: gone() })
    }

    fn finish(self, file: &File) -> Result<(), Torn> {
        drop(self.pieces);
        let ended = self.thread.join();
        let torn = take(&self.torn);
        // What follows is no multiple of anything.
        let plain = set_direct(file, false);
        match (torn, ended, plain) {
            (Some(torn), _, _) => Err(torn),
            (None, Err(_), _) => {
                Err(Torn { from: 0, error: io::Error::other("the thread that writes panicked") })
            }
            (None, Ok(()), Err(error)) => Err(Torn { from: 0, error }),
            (None, Ok(()), Ok(())) => Ok(()),
        }
    }
}

fn take(torn: &Mutex<Option<Torn>>) -> Option<Torn> {
    torn.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Writes pieces until no more will come. After a failure the rest is let go: pieces follow each
/// other, and what stands behind a hole is no part of the file.
fn write_all(
    to: Counted<'_>,
    mut direct: bool,
    queue: &Receiver<(u64, Piece)>,
    torn: &Mutex<Option<Torn>>,
) {
    let mut failed = false;
    for (at, piece) in queue {
        if !failed && let Err(found) = write_piece(to, &mut direct, at, piece.bytes()) {
            failed = true;
            *torn.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
        }
        piece.keep();
    }
}

/// Writes one piece; a file system may also refuse a direct write when it comes to it, or take
/// less than a block of it.
fn write_piece(to: Counted<'_>, direct: &mut bool, at: u64, bytes: &[u8]) -> Result<(), Torn> {
    match write_at(to, bytes, at) {
        Err(torn) if *direct && torn.error.raw_os_error() == Some(INVALID) => {
            *direct = false;
            let plain = set_direct(to.0, false);
            plain.map_err(|error| Torn { from: torn.from, error })?;
            write_at(to, &bytes[(torn.from - at) as usize..], torn.from)
        }
        written => written,
    }
}

const INVALID: i32 = rustix::io::Errno::INVAL.raw_os_error();

/// A file, and where its bytes are counted.
type Counted<'a> = (&'a File, &'a Moved);

/// All of the bytes, or how far it came.
fn write_at((file, moved): Counted<'_>, mut bytes: &[u8], mut at: u64) -> Result<(), Torn> {
    let torn = |from| move |error| Torn { from, error };
    if !bytes.is_empty() {
        faults::point("shard.piece").map_err(torn(at))?;
    }
    while !bytes.is_empty() {
        match file.write_at(bytes, at) {
            Ok(0) => return Err(torn(at)(io::ErrorKind::WriteZero.into())),
            Ok(n) => {
                moved.fetch_add(n as u64, Ordering::Relaxed);
                (bytes, at) = (&bytes[n..], at + n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(torn(at)(error)),
        }
    }
    Ok(())
}

/// Whether writes pass the page cache by. Not at open: some file systems refuse it there when
/// they have made the file already.
fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let wanted = if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
    match wanted == flags {
        true => Ok(()),
        false => Ok(fcntl_setfl(file, wanted)?),
    }
}

/// Memory of all pieces that are not spare.
static FILLING: AtomicUsize = AtomicUsize::new(0);

/// Pieces of full size that nobody uses.
static SPARE: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

/// Memory that is filled from its beginning and grows up to [`PIECE_BYTES`]: a mapping, so that it
/// begins at a page, and in large pages where there are some, which take less time to hand to a
/// disk.
#[derive(Default)]
struct Piece {
    memory: Option<MmapMut>,
    filled: usize,
}

impl Piece {
    /// One of full size.
    fn spare() -> io::Result<Piece> {
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match spare {
            Some(memory) => Ok(Piece::on(memory)),
            None => Piece::of(PIECE_BYTES),
        }
    }

    fn of(bytes: usize) -> io::Result<Piece> {
        let memory = MmapMut::map_anon(bytes)?;
        if bytes >= PIECE_BYTES {
            // A wish.
            let _ = memory.advise(Advice::HugePage);
        }
        Ok(Piece::on(memory))
    }

    fn on(memory: MmapMut) -> Piece {
        FILLING.fetch_add(memory.len(), Ordering::Relaxed);
        Piece { memory: Some(memory), filled: 0 }
    }

    fn room(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.filled])
    }

    /// Appends; never more than [`PIECE_BYTES`] in all.
    fn fill(&mut self, bytes: &[u8]) -> io::Result<()> {
        let filled = self.filled + bytes.len();
        if self.room() < filled {
            self.grow(filled)?;
        }
        if let Some(memory) = &mut self.memory {
            copy(&mut memory[self.filled..filled], bytes);
        }
        self.filled = filled;
        Ok(())
    }

    fn grow(&mut self, least: usize) -> io::Result<()> {
        let room = least.next_power_of_two().max(FIRST_BYTES);
        let mut larger = if room >= PIECE_BYTES { Piece::spare() } else { Piece::of(room) }?;
        larger.fill(self.bytes())?;
        *self = larger;
        Ok(())
    }

    /// Its memory for the next file.
    fn keep(mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if self.room() == PIECE_BYTES && spare.len() < SPARE_PIECES {
            FILLING.fetch_sub(PIECE_BYTES, Ordering::Relaxed);
            spare.extend(self.memory.take());
        }
    }
}

/// Copies; much of it by two threads, as one does not use the memory's bandwidth.
fn copy(into: &mut [u8], bytes: &[u8]) {
    if bytes.len() < SHARED_BYTES {
        return into.copy_from_slice(bytes);
    }
    let middle = bytes.len() / 2;
    let shared = std::thread::scope(|scope| {
        let (first, second) = into.split_at_mut(middle);
        let other = std::thread::Builder::new().name("backtape-copy".into());
        let other = other.spawn_scoped(scope, || first.copy_from_slice(&bytes[..middle]));
        second.copy_from_slice(&bytes[middle..]);
        other.is_ok()
    });
    if !shared {
        into[..middle].copy_from_slice(&bytes[..middle]);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        FILLING.fetch_sub(self.room(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
