//! The loss head at T=1024, D=1024, V=32768 in f32: how near the plain path comes to
//! the GEMM peak of this machine, what the fused path costs against it, and how much
//! scratch each needs beyond inputs and outputs.
//!
//! Prints ratios of runs interleaved in one process, never times: the machine may be
//! shared, and a ratio of neighbours survives that. `cargo bench --bench loss_head`.

#![allow(clippy::print_stdout)]

use backtape_replayer::kernels::policy::{Policy, StepOutputs, Workspace, fused_step, plain_step};
use backtape_replayer::kernels::{Cotangents, HeadInputs, Matrix, NoProgress, Tiles, Values};
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

const TOKENS: usize = 1024;
const DEPTH: usize = 1024;
const VOCAB: usize = 32_768;
const SQUARE: usize = 4096;
const REPEATS: usize = 9;

/// Counts live bytes and their peak.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system allocator unchanged; `realloc` is left
// to its default, which is made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promise about the layout is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise about pointer and layout is handed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Inputs and outputs, all allocated before anything is measured.
struct Head {
    q: Vec<f32>,
    k: Vec<f32>,
    labels: Vec<u32>,
    g_lse: Vec<f32>,
    g_label: Vec<f32>,
    g_smooth: Vec<f32>,
    per_token: [Vec<f32>; 2],
    dq: Vec<f32>,
    dk: Vec<f32>,
}

impl Head {
    fn new() -> Self {
        let mut state = 1u32;
        let mut numbers = |count: usize, scale: f32| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 9) as f32 / (1 << 22) as f32 - 1.0) * scale
            };
            (0..count).map(|_| next()).collect()
        };
        Head {
            q: numbers(TOKENS * DEPTH, 1.0),
            k: numbers(VOCAB * DEPTH, 0.1),
            labels: (0..TOKENS as u32).map(|token| token * token % VOCAB as u32).collect(),
            g_lse: vec![1.0 / TOKENS as f32; TOKENS],
            g_label: vec![-1.0 / TOKENS as f32; TOKENS],
            g_smooth: vec![0.0; TOKENS],
            per_token: [vec![0.0; TOKENS], vec![0.0; TOKENS]],
            dq: vec![1.0; TOKENS * DEPTH],
            dk: vec![1.0; VOCAB * DEPTH],
        }
    }

    /// One step: plain, or fused with the tiles given.
    fn step(&mut self, policy: &Policy, tiles: Option<Tiles>, workspace: &mut Workspace) {
        let matrix = |rows, values| Matrix { rows, cols: DEPTH, values };
        let (q, k) = (Values::F32(&self.q), Values::F32(&self.k));
        let inputs = HeadInputs::plain(matrix(TOKENS, q), matrix(VOCAB, k), &self.labels, VOCAB);
        let [lse, label_logits] = &mut self.per_token;
        let outputs = StepOutputs { lse, label_logits, dq: &mut self.dq, dk: &mut self.dk };
        let cotangents =
            &Cotangents { lse: &self.g_lse, label: &self.g_label, smooth: &self.g_smooth };
        match tiles {
            None => plain_step(policy, &inputs, cotangents, workspace, &NoProgress, outputs),
            Some(tiles) => {
                fused_step(policy, &inputs, cotangents, tiles, workspace, &NoProgress, outputs);
            }
        }
    }
}

/// One GEMM of the gemm crate with its own threading, for the peak.
struct Shape {
    name: &'static str,
    rows: usize,
    cols: usize,
    depth: usize,
    /// Row and column strides.
    lhs: (usize, usize),
    rhs: (usize, usize),
}

/// The head's three GEMMs, as the plain path lays them out, and a large square.
const SHAPES: [Shape; 4] = [
    Shape {
        name: "q k^T",
        rows: TOKENS,
        cols: VOCAB,
        depth: DEPTH,
        lhs: (DEPTH, 1),
        rhs: (1, DEPTH),
    },
    Shape {
        name: "dlogits k",
        rows: TOKENS,
        cols: DEPTH,
        depth: VOCAB,
        lhs: (VOCAB, 1),
        rhs: (DEPTH, 1),
    },
    Shape {
        name: "dlogits^T q",
        rows: VOCAB,
        cols: DEPTH,
        depth: TOKENS,
        lhs: (1, VOCAB),
        rhs: (DEPTH, 1),
    },
    Shape {
        name: "square",
        rows: SQUARE,
        cols: SQUARE,
        depth: SQUARE,
        lhs: (SQUARE, 1),
        rhs: (SQUARE, 1),
    },
];

impl Shape {
    fn flop(&self) -> f64 {
        2.0 * (self.rows * self.cols * self.depth) as f64
    }
}

fn gemm_once(shape: &Shape, buffers: &mut [Vec<f32>; 3], threads: usize) {
    let Shape { rows, cols, depth, lhs, rhs, .. } = *shape;
    let [target, a, b] = buffers;
    let largest = TOKENS * VOCAB;
    assert!(rows * cols <= target.len() && a.len() == largest && b.len() == largest);
    assert!((rows - 1) * lhs.0 + (depth - 1) * lhs.1 < a.len());
    assert!((depth - 1) * rhs.0 + (cols - 1) * rhs.1 < b.len());
    // SAFETY: the target is borrowed exclusively; the asserts above show that every
    // element addressed lies in its buffer.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            depth,
            target.as_mut_ptr(),
            1,
            cols as isize,
            false,
            a.as_ptr(),
            lhs.1 as isize,
            lhs.0 as isize,
            b.as_ptr(),
            rhs.1 as isize,
            rhs.0 as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(threads),
        );
    }
    black_box(&target[0]);
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Wall and processor seconds of one run.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    cpu: f64,
}

fn cost(run: impl FnOnce()) -> Cost {
    let (start, before) = (Instant::now(), cpu_seconds());
    run();
    Cost { wall: start.elapsed().as_secs_f64(), cpu: cpu_seconds() - before }
}

/// Processor time of all threads so far, in the 10 ms ticks of /proc; 0 elsewhere.
/// Other programs take time from the wall clock and not from this.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|f| f.parse::<f64>().ok());
    // utime and stime, fields 14 and 15 counted from before the name.
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

/// Bytes that a first step with a fresh workspace needs at its peak.
fn scratch_mib(head: &mut Head, policy: &Policy, tiles: Option<Tiles>) -> f64 {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    head.step(policy, tiles, &mut Workspace::default());
    (PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20)
}

/// What is run in turn: three steps, then the GEMMs.
const RUNS: usize = 3 + SHAPES.len();

fn main() {
    let threads = rayon::current_num_threads();
    let tiles = Some(Tiles::default());
    let (plain, fused) = (Policy::plain_f32(), Policy::fused_f32());
    let mut head = Head::new();
    let scratch = [scratch_mib(&mut head, &plain, None), scratch_mib(&mut head, &fused, tiles)];
    let mut workspaces = [const { 64 << 20 }; 3].map(Workspace::new);
    workspaces[2].limit_bytes = 0;
    let mut buffers = [const { TOKENS * VOCAB }; 3].map(|length| vec![0.5f32; length]);
    let mut costs: [Vec<Cost>; RUNS] = [const { Vec::new() }; RUNS];
    for repeat in 0..=REPEATS {
        for (run, costs) in costs.iter_mut().enumerate() {
            let spent = cost(|| match run {
                0 => head.step(&plain, None, &mut workspaces[0]),
                1 | 2 => head.step(&fused, tiles, &mut workspaces[run]),
                _ => gemm_once(&SHAPES[run - 3], &mut buffers, threads),
            });
            // The first round warms pages and caches.
            if repeat > 0 {
                costs.push(spent);
            }
        }
    }
    println!("loss head T={TOKENS} D={DEPTH} V={VOCAB} f32, {threads} threads, {REPEATS} rounds");
    report("wall time", &costs, |cost| cost.wall);
    report("processor time", &costs, |cost| cost.cpu);
    println!("scratch: plain {:.1} MiB, fused {:.1} MiB", scratch[0], scratch[1]);
}

/// Ratios by one clock: medians of the rounds, and minima beside them, which a busy
/// machine disturbs least.
fn report(clock: &str, costs: &[Vec<Cost>; RUNS], seconds: impl Fn(&Cost) -> f64) {
    let of = |run: usize| costs[run].iter().map(&seconds).collect::<Vec<f64>>();
    let least = |run: usize| of(run).into_iter().fold(f64::INFINITY, f64::min);
    let step_flop = 6.0 * (TOKENS * DEPTH * VOCAB) as f64;
    let rate = |shape: usize, seconds: f64| SHAPES[shape].flop() / seconds;
    let gemms = 0..SHAPES.len();
    let peak = gemms.clone().map(|shape| rate(shape, least(3 + shape))).fold(0.0, f64::max);
    let usual = gemms.clone().map(|shape| rate(shape, median(&of(3 + shape)))).fold(0.0, f64::max);
    println!("by {clock}:");
    for shape in gemms {
        let share = rate(shape, median(&of(3 + shape))) / peak;
        println!("  gemm {:<12} {:5.1} % of peak", SHAPES[shape].name, 100.0 * share);
    }
    let percent = |seconds: f64, peak: f64| 100.0 * step_flop / seconds / peak;
    println!(
        "  plain: {:.1} % of peak (median step, best GEMM); medians {:.1} %, minima {:.1} %",
        percent(median(&of(0)), peak),
        percent(median(&of(0)), usual),
        percent(least(0), peak)
    );
    for (name, run) in [("fused", 1), ("fused, logits computed twice", 2)] {
        let pairs: Vec<f64> =
            of(run).iter().zip(of(0)).map(|(fused, plain)| fused / plain).collect();
        println!(
            "  {name}: {:.3} x plain (medians), {:.3} x (median of pairs), {:.3} x (minima)",
            median(&of(run)) / median(&of(0)),
            median(&pairs),
            least(run) / least(0)
        );
    }
}
