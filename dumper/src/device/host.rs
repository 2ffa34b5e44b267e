//! This process as a device, for the tests of machines without a GPU: streams are queues of which
//! a test chooses who goes next, one operation at a time. A wait that is missing is then seen as
//! wrong bytes in the order that is worst for it, and not only when threads happen to race so.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use libloading::Library;

use super::capturer::device_bytes;
use super::machine::{Arguments, DeviceError, Machine, Sizes, Stream};

/// The stream of the captures.
pub(super) const SIDE: Stream = 7;

/// Who goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turns {
    /// The captures' stream, as far as it can.
    SideFirst,
    /// The job's streams, as far as they can.
    JobFirst,
    /// One that is drawn.
    Drawn(u64),
}

enum Operation {
    /// `to` gets what lies at `from`; `wrong` flips a bit on the way.
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
        wrong: bool,
    },
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    Fingerprint(Box<Arguments>),
    Record(u64),
    Wait(u64),
}

#[derive(Default)]
struct State {
    streams: BTreeMap<Stream, VecDeque<Operation>>,
    recorded: BTreeSet<u64>,
    happened: BTreeSet<u64>,
    drawn: u64,
}

/// Bytes that are written by their address.
struct Memory(Box<[UnsafeCell<u64>]>);

// SAFETY: tests read and write it through one lock, or where nothing is under way.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Memory {
        Memory((0..bytes.div_ceil(8)).map(|_| UnsafeCell::new(0)).collect())
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}

/// This process as a device.
pub(super) struct Host {
    state: Mutex<State>,
    turns: Turns,
    pinned: Memory,
    memory: Memory,
    next_event: AtomicU64,
    /// How often somebody waited.
    pub(super) waits: AtomicUsize,
    /// Whether copies to the host go wrong.
    pub(super) wrong: AtomicBool,
    /// Calls until one fails, and all after it.
    pub(super) sound_calls: AtomicUsize,
}

fn kernels() -> &'static Library {
    static KERNELS: OnceLock<Library> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device/kernels/fingerprint.cu");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = folder.path().join("kernels.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-x", "c", "-std=gnu11", "-shared", "-fPIC", "-DHOST", "-O2"]);
        compiler.args(["-Wall", "-Werror"]).arg(source).arg("-o").arg(&library);
        assert!(compiler.status().expect("cc runs").success(), "cc compiles the kernel");
        // SAFETY: a library of plain functions, without initialisers.
        unsafe { Library::new(&library) }.expect("the kernel loads")
    })
}

impl Host {
    pub(super) fn new(sizes: Sizes, turns: Turns) -> Host {
        let drawn = match turns {
            Turns::Drawn(seed) => seed | 1,
            _ => 1,
        };
        Host {
            state: Mutex::new(State { drawn, ..State::default() }),
            turns,
            pinned: Memory::new(sizes.pinned),
            memory: Memory::new(device_bytes(sizes)),
            next_event: AtomicU64::new(0),
            waits: AtomicUsize::new(0),
            wrong: AtomicBool::new(false),
            sound_calls: AtomicUsize::new(usize::MAX),
        }
    }

    /// A kernel of the job's that writes a tensor.
    pub(super) fn write(&self, stream: Stream, to: u64, bytes: Vec<u8>) {
        self.put(stream, Operation::Write { to, bytes });
    }

    /// Lets all streams go on as far as they can; true where all are through.
    pub(super) fn run(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        while self.turn(&mut state) {}
        state.streams.values().all(VecDeque::is_empty)
    }

    /// Lets one stream go on as far as it can.
    pub(super) fn run_stream(&self, stream: Stream) {
        let mut state = self.state.lock().unwrap();
        while step(&mut state, stream) {}
    }

    fn put(&self, stream: Stream, operation: Operation) {
        self.state.lock().unwrap().streams.entry(stream).or_default().push_back(operation);
    }

    fn call(&self) -> Result<(), DeviceError> {
        let left = self.sound_calls.load(Ordering::SeqCst);
        if left == 0 {
            return Err(DeviceError::call("a test", "it is told to fail"));
        }
        if left != usize::MAX {
            self.sound_calls.store(left - 1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// One operation of the stream whose turn it is, or of another where that one waits.
    fn turn(&self, state: &mut State) -> bool {
        let mut streams: Vec<Stream> = state.streams.keys().copied().collect();
        match self.turns {
            Turns::SideFirst => streams.sort_by_key(|&stream| stream != SIDE),
            Turns::JobFirst => streams.sort_by_key(|&stream| stream == SIDE),
            Turns::Drawn(_) => {
                state.drawn ^= state.drawn << 13;
                state.drawn ^= state.drawn >> 7;
                state.drawn ^= state.drawn << 17;
                let first = state.drawn as usize % streams.len().max(1);
                streams.rotate_left(first);
            }
        }
        streams.into_iter().any(|stream| step(state, stream))
    }
}

/// The next operation of a stream; false where there is none or it waits.
fn step(state: &mut State, stream: Stream) -> bool {
    let Some(queue) = state.streams.get_mut(&stream) else { return false };
    match queue.front() {
        None => return false,
        Some(Operation::Wait(event)) if !state.happened.contains(event) => return false,
        Some(_) => {}
    }
    match queue.pop_front() {
        // SAFETY: whoever enqueued it vouches for the addresses, as on a device.
        Some(Operation::Copy { from, to, bytes, wrong }) => unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes);
            if wrong && bytes > 0 {
                *(to as *mut u8).add(bytes / 2) ^= 4;
            }
        },
        // SAFETY: whoever enqueued it vouches for the addresses, as on a device.
        Some(Operation::Write { to, bytes }) => unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len());
        },
        // SAFETY: whoever enqueued it vouches for the addresses, as on a device.
        Some(Operation::Fingerprint(arguments)) => unsafe {
            type Kernel = unsafe extern "C" fn(*const Arguments, i64);
            let kernel = kernels().get::<Kernel>("fingerprint").expect("the kernel is there");
            for thread in 0..arguments.threads {
                kernel(&raw const *arguments, thread);
            }
        },
        Some(Operation::Record(event)) => {
            state.happened.insert(event);
        }
        Some(Operation::Wait(_)) | None => {}
    }
    true
}

impl Machine for Host {
    /// Each is recorded once, as captures do.
    type Event = u64;

    fn side(&self) -> Stream {
        SIDE
    }

    fn pinned(&self) -> *mut u8 {
        self.pinned.address() as *mut u8
    }

    fn memory(&self) -> u64 {
        self.memory.address()
    }

    fn event(&self) -> Result<u64, DeviceError> {
        self.call()?;
        Ok(self.next_event.fetch_add(1, Ordering::SeqCst))
    }

    fn record(&self, event: &u64, stream: Stream) -> Result<(), DeviceError> {
        self.call()?;
        self.state.lock().unwrap().recorded.insert(*event);
        self.put(stream, Operation::Record(*event));
        Ok(())
    }

    /// As in CUDA, nothing is waited for where the event was not recorded yet.
    fn wait(&self, stream: Stream, event: &u64) -> Result<(), DeviceError> {
        self.call()?;
        if self.state.lock().unwrap().recorded.contains(event) {
            self.put(stream, Operation::Wait(*event));
        }
        Ok(())
    }

    fn happened(&self, event: &u64) -> Result<bool, DeviceError> {
        self.call()?;
        Ok(self.state.lock().unwrap().happened.contains(event))
    }

    fn synchronize(&self, event: &u64) -> Result<(), DeviceError> {
        self.call()?;
        self.waits.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.lock().unwrap();
        while !state.happened.contains(event) {
            if !self.turn(&mut state) {
                return Err(DeviceError::call("a wait", "it would never end"));
            }
        }
        Ok(())
    }

    unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        self.call()?;
        self.put(stream, Operation::Copy { from, to, bytes, wrong: false });
        Ok(())
    }

    unsafe fn fetch(
        &self,
        from: u64,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        self.call()?;
        // The sums are few: it is the tensor's bytes that go wrong.
        let wrong = self.wrong.load(Ordering::SeqCst) && bytes > super::capturer::SUMS_BYTES;
        self.put(stream, Operation::Copy { from, to: to as u64, bytes, wrong });
        Ok(())
    }

    unsafe fn fill(
        &self,
        address: u64,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        self.call()?;
        self.put(stream, Operation::Write { to: address, bytes: vec![byte; bytes] });
        Ok(())
    }

    unsafe fn fingerprint(&self, arguments: &Arguments, stream: Stream) -> Result<(), DeviceError> {
        self.call()?;
        self.put(stream, Operation::Fingerprint(Box::new(*arguments)));
        Ok(())
    }
}
