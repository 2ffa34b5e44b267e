//! A file that is written from front to back in large aligned pieces, by a separate thread, so that
//! the next piece is filled while one is written. The writes bypass the page cache (O_DIRECT) if
//! the file system allows it.
//!
//! Writes through the page cache copy every byte once more, and fsync then waits for all of them;
//! direct writes of megabytes reach the disk's full speed. Where the file system refuses direct
//! writes (ramfs, some network file systems) the same pieces go through the page cache. A file
//! shorter than one piece is written in one call, without a thread, and bypasses the page cache too
//! unless it is tiny.

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

/// Size of one write: large enough to keep a disk busy.
pub(crate) const PIECE_BYTES: usize = 8 << 20;

/// Direct writes begin and end at multiples of this, in the file and in memory: the largest logical
/// block size of today's disks.
pub(crate) const ALIGNMENT: usize = 4096;

/// How many full pieces may wait while one is written.
const PIECES_AHEAD: usize = 1;

/// From this length on the data of a short file bypass the page cache: to copy them into it, and to
/// find pages for it, takes most of the processor time that the recorder has for a sampled step.
const DIRECT_BYTES: usize = 128 << 10;

/// First allocation of a piece: small, because many files are.
const FIRST_BYTES: usize = 64 << 10;

/// Most memory of unwritten pieces of all files together. A step has one open file per microbatch;
/// beyond this limit pieces are written before they are full.
const FILLING_BYTES: usize = 64 << 20;

/// Copies of at least this length are split between two threads.
const SHARED_BYTES: usize = 4 << 20;

/// Pieces whose memory is kept for the next file, because memory that was written before causes no
/// page faults.
const SPARE_PIECES: usize = 3;

/// Counts bytes as they are written, so that a waiting thread can see progress.
pub type Moved = Arc<AtomicU64>;

/// A failed write: the bytes before offset `from` are in the file.
#[derive(Debug)]
pub(crate) struct Torn {
    pub(crate) from: u64,
    pub(crate) error: io::Error,
}

/// A file that grows at its end.
pub(crate) struct Pieces {
    file: Arc<File>,
    moved: Moved,
    /// The offset of the next byte; the bytes before it that were not written or queued yet are in
    /// `piece`.
    end: u64,
    piece: Piece,
    way: Way,
}

/// How pieces are written.
enum Way {
    /// Not decided, since no piece was full yet.
    Unknown {
        /// Whether to bypass the page cache.
        direct: bool,
    },
    Thread(Writer),
    /// Each push writes its bytes itself: after a failure.
    Plain,
}

impl Pieces {
    /// Appends to `file` from `offset`, a multiple of [`ALIGNMENT`]. Without `direct` the writes
    /// go through the page cache, which suits a file that is read again soon.
    pub(crate) fn new(file: File, offset: u64, direct: bool) -> Pieces {
        let piece = Piece::default();
        let (file, moved, way) = (Arc::new(file), Moved::default(), Way::Unknown { direct });
        Pieces { file, moved, end: offset, piece, way }
    }

    /// Adds the bytes written from now on to `moved`.
    pub(crate) fn count(&mut self, moved: &Moved) {
        self.moved = moved.clone();
    }

    /// Appends bytes; an error may concern bytes of an earlier push.
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

    /// Moves the file's beginning to `offset` while nothing of it is written, and says whether that
    /// was so: then a header whose length is known late needs no room to be made for it.
    pub(crate) fn begin_at(&mut self, offset: u64) -> bool {
        let unwritten = matches!(self.way, Way::Unknown { .. });
        if unwritten {
            self.end = offset + self.piece.filled as u64;
        }
        unwritten
    }

    /// True after a failure: from then on an error concerns the bytes of the same push.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.way, Way::Plain)
    }

    /// Writes the remaining bytes; does not sync.
    pub(crate) fn finish(&mut self) -> Result<(), Torn> {
        if matches!(self.way, Way::Thread(_)) {
            self.hand_over(false)?;
            self.drain()?;
        }
        let rest = std::mem::take(&mut self.piece);
        let way = std::mem::replace(&mut self.way, Way::Plain);
        let (to, begin) = ((&*self.file, &self.moved), self.end - rest.filled as u64);
        let direct = matches!(way, Way::Unknown { direct: true }) && rest.filled >= DIRECT_BYTES;
        let whole = if direct { rest.filled - rest.filled % ALIGNMENT } else { 0 };
        let (first, last) = rest.bytes().split_at(whole);
        if direct {
            write_directly(to, begin, first)?;
        }
        write_at(to, last, begin + whole as u64)
    }

    /// Continues at `offset` after a failure; from now on each push writes its bytes through the
    /// page cache.
    pub(crate) fn restart(&mut self, offset: u64) {
        // A further failure concerns bytes after `offset`, which will be overwritten.
        let _ = self.drain();
        (self.piece, self.end, self.way) = (Piece::default(), offset, Way::Plain);
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Replaces the file by a copy of it; only after [`Pieces::finish`].
    pub(crate) fn replace(&mut self, file: File) {
        self.file = Arc::new(file);
    }

    /// Waits until the thread has written its pieces and ends it.
    fn drain(&mut self) -> Result<(), Torn> {
        match std::mem::replace(&mut self.way, Way::Plain) {
            Way::Thread(writer) => writer.finish(&self.file),
            _ => Ok(()),
        }
    }

    /// Queues the part of the piece that is a multiple of [`ALIGNMENT`]; the rest begins the next
    /// piece, which gets its full size at once if `more` bytes follow.
    fn hand_over(&mut self, more: bool) -> Result<(), Torn> {
        let begin = self.end - self.piece.filled as u64;
        let mut handed = std::mem::take(&mut self.piece);
        if let Way::Unknown { direct } = self.way {
            match Writer::start(self.file.clone(), self.moved.clone(), direct) {
                Ok(writer) => self.way = Way::Thread(writer),
                Err(_) => self.way = Way::Plain,
            }
        }
        let Way::Thread(writer) = &self.way else {
            return write_at((&self.file, &self.moved), handed.bytes(), begin);
        };
        let whole = handed.filled - handed.filled % ALIGNMENT;
        let torn = |error| Torn { from: begin, error };
        if more && FILLING.load(Ordering::Relaxed) <= FILLING_BYTES {
            self.piece = Piece::spare().map_err(torn)?;
        }
        self.piece.fill(&handed.bytes()[whole..]).map_err(torn)?;
        handed.filled = whole;
        writer.write(begin, handed)
    }
}

/// The thread that writes queued pieces, and where it failed.
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

    /// Queues a piece; blocks while the queue is full.
    fn write(&self, offset: u64, piece: Piece) -> Result<(), Torn> {
        if let Some(torn) = take(&self.torn) {
            return Err(torn);
        }
        let gone = || io::Error::other("the thread that writes has ended");
        self.pieces.send((offset, piece)).map_err(|_| Torn { from: offset, error: gone() })
    }

    fn finish(self, file: &File) -> Result<(), Torn> {
        drop(self.pieces);
        let ended = self.thread.join();
        let torn = take(&self.torn);
        // The rest of the file is not a multiple of the alignment, which direct writes would
        // refuse.
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

/// Writes pieces until the queue is closed. After a failure it drops the remaining pieces, because
/// bytes after a gap are useless.
fn write_all(
    to: Counted<'_>,
    mut direct: bool,
    queue: &Receiver<(u64, Piece)>,
    torn: &Mutex<Option<Torn>>,
) {
    let mut failed = false;
    for (offset, piece) in queue {
        if !failed && let Err(torn_here) = write_piece(to, &mut direct, offset, piece.bytes()) {
            failed = true;
            *torn.lock().unwrap_or_else(PoisonError::into_inner) = Some(torn_here);
        }
        piece.keep();
    }
}

/// Writes one piece. A file system that accepted O_DIRECT may still refuse a direct write, or write
/// less than a block of it: then the rest goes through the page cache.
fn write_piece(to: Counted<'_>, direct: &mut bool, offset: u64, bytes: &[u8]) -> Result<(), Torn> {
    match write_at(to, bytes, offset) {
        Err(torn) if *direct && torn.error.raw_os_error() == Some(INVALID) => {
            *direct = false;
            let plain = set_direct(to.0, false);
            plain.map_err(|error| Torn { from: torn.from, error })?;
            write_at(to, &bytes[(torn.from - offset) as usize..], torn.from)
        }
        written => written,
    }
}

/// Writes pieces' bytes past the page cache where the file system lets it, and has the file written
/// through it from then on.
fn write_directly(to: Counted<'_>, offset: u64, bytes: &[u8]) -> Result<(), Torn> {
    let mut direct = set_direct(to.0, true).is_ok();
    let written = write_piece(to, &mut direct, offset, bytes);
    let plain = set_direct(to.0, false).map_err(|error| Torn { from: offset, error });
    written.and(plain)
}

const INVALID: i32 = rustix::io::Errno::INVAL.raw_os_error();

/// A file and its byte counter.
type Counted<'a> = (&'a File, &'a Moved);

/// Writes all bytes; an error says how far it came.
fn write_at((file, moved): Counted<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Torn> {
    let torn = |from| move |error| Torn { from, error };
    if !bytes.is_empty() {
        faults::point("shard.piece").map_err(torn(offset))?;
    }
    while !bytes.is_empty() {
        match file.write_at(bytes, offset) {
            Ok(0) => return Err(torn(offset)(io::ErrorKind::WriteZero.into())),
            Ok(n) => {
                moved.fetch_add(n as u64, Ordering::Relaxed);
                (bytes, offset) = (&bytes[n..], offset + n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(torn(offset)(error)),
        }
    }
    Ok(())
}

/// Sets or clears O_DIRECT. It is not set at open, because some file systems then create the file
/// and still return an error.
fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let wanted = if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
    match wanted == flags {
        true => Ok(()),
        false => Ok(fcntl_setfl(file, wanted)?),
    }
}

/// Memory of all pieces except the spare ones.
static FILLING: AtomicUsize = AtomicUsize::new(0);

/// Memory of full size for the next pieces.
static SPARE: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

/// A buffer that grows up to [`PIECE_BYTES`]. It is a memory map, so that it begins at a page, with
/// huge pages if available, which make direct writes faster.
#[derive(Default)]
struct Piece {
    memory: Option<MmapMut>,
    filled: usize,
}

impl Piece {
    /// A piece of full size, from the spare memory if there is some.
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
            // Huge pages are optional: without them it is only slower.
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

    /// Appends bytes; the caller keeps the total within [`PIECE_BYTES`].
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

    /// Keeps its memory for the next pieces, unless there is enough.
    fn keep(mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if self.room() == PIECE_BYTES && spare.len() < SPARE_PIECES {
            FILLING.fetch_sub(PIECE_BYTES, Ordering::Relaxed);
            spare.extend(self.memory.take());
        }
    }
}

/// Copies bytes; long copies with two threads, as one does not reach the memory's bandwidth.
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
