//! Runs one loss head on request, so that a benchmark in another language can take
//! turns with its peers: `benches/peers/loss_head.py` starts it and writes one command
//! a line; the answer is one line, wall seconds first.
//!
//! `cargo bench --bench head_server -- TOKENS DEPTH VOCAB`

#![allow(clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use backtape_replayer::kernels::policy::{Policy, StepOutputs, Workspace, fused_step, plain_step};
use backtape_replayer::kernels::{
    Cotangents, HeadInputs, Matrix, NoProgress, Tiles, Values, reference,
};

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
    shape: (usize, usize, usize),
    wide: (Vec<f32>, Vec<f32>),
    narrow: (Vec<u16>, Vec<u16>),
    labels: Vec<u32>,
    cotangents: [Vec<f32>; 3],
    per_token: [Vec<f32>; 2],
    dq: Vec<f32>,
    dk: Vec<f32>,
}

impl Head {
    fn new(tokens: usize, depth: usize, vocab: usize) -> Self {
        let mut state = 1u32;
        let mut numbers = |count: usize, scale: f32| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 9) as f32 / (1 << 22) as f32 - 1.0) * scale
            };
            // bf16 numbers, so that the same head can be run from either dtype.
            (0..count).map(|_| half::bf16::from_f32(next()).to_f32()).collect()
        };
        let wide = (numbers(tokens * depth, 1.0), numbers(vocab * depth, 0.1));
        let bits = |values: &[f32]| values.iter().map(|&x| (x.to_bits() >> 16) as u16).collect();
        let narrow = (bits(&wide.0), bits(&wide.1));
        let g = 1.0 / tokens as f32;
        Head {
            shape: (tokens, depth, vocab),
            wide,
            narrow,
            labels: (0..tokens).map(|t| (t * t % vocab) as u32).collect(),
            cotangents: [vec![g; tokens], vec![-g; tokens], vec![0.0; tokens]],
            per_token: [vec![0.0; tokens], vec![0.0; tokens]],
            dq: vec![1.0; tokens * depth],
            dk: vec![1.0; vocab * depth],
        }
    }

    fn step(&mut self, policy: &Policy, narrow: bool, workspace: &mut Workspace) {
        let (tokens, depth, vocab) = self.shape;
        let (q, k) = match narrow {
            true => (Values::Bf16(&self.narrow.0), Values::Bf16(&self.narrow.1)),
            false => (Values::F32(&self.wide.0), Values::F32(&self.wide.1)),
        };
        let matrix = |rows, values| Matrix { rows, cols: depth, values };
        let inputs = HeadInputs::plain(matrix(tokens, q), matrix(vocab, k), &self.labels, vocab);
        let [lse, label, smooth] = &self.cotangents;
        let cotangents = &Cotangents { lse, label, smooth };
        let [lse, label_logits] = &mut self.per_token;
        let outputs = StepOutputs { lse, label_logits, dq: &mut self.dq, dk: &mut self.dk };
        match policy.path {
            backtape_replayer::kernels::policy::Path::Fused => {
                let tiles = Tiles::default();
                fused_step(policy, &inputs, cotangents, tiles, workspace, &NoProgress, outputs);
            }
            _ => plain_step(policy, &inputs, cotangents, workspace, &NoProgress, outputs),
        }
    }

    fn reference_forward(&self) {
        let (tokens, depth, vocab) = self.shape;
        let matrix = |rows, values| Matrix { rows, cols: depth, values };
        let (q, k) = (Values::F32(&self.wide.0), Values::F32(&self.wide.1));
        let inputs = HeadInputs::plain(matrix(tokens, q), matrix(vocab, k), &self.labels, vocab);
        std::hint::black_box(reference::forward(&inputs, Tiles::default(), &NoProgress));
    }

    /// A number that changes with any bit of the outputs.
    fn digest(&self) -> u64 {
        let all = self.per_token.iter().flatten().chain(&self.dq).chain(&self.dk);
        all.fold(0xcbf2_9ce4_8422_2325, |hash, x| {
            (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

/// `target = a b` in f64, square, the crate's own threading off: rows are shared out as
/// the reference does.
fn gemm64(n: usize, buffers: &mut [Vec<f64>; 3]) {
    use rayon::prelude::*;
    let [target, a, b] = buffers;
    let (a, b) = (&a[..], &b[..]);
    target.par_chunks_mut(128 * n).enumerate().for_each(|(block, target)| {
        let rows = target.len() / n;
        let a = &a[block * 128 * n..];
        assert!(a.len() >= rows * n && b.len() == n * n);
        // SAFETY: the target is this block's own rows; the assert shows that the operands
        // hold every element addressed.
        unsafe {
            gemm::gemm(
                rows,
                n,
                n,
                target.as_mut_ptr(),
                1,
                n as isize,
                false,
                a.as_ptr(),
                1,
                n as isize,
                b.as_ptr(),
                1,
                n as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    });
}

/// `target = a b` in f32 by the gemm crate with its own threading: the peak.
fn gemm32(n: usize, buffers: &mut [Vec<f32>; 3]) {
    let [target, a, b] = buffers;
    assert!(a.len() == n * n && b.len() == n * n && target.len() == n * n);
    // SAFETY: the target is borrowed exclusively and all three are n by n.
    unsafe {
        gemm::gemm(
            n,
            n,
            n,
            target.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            1,
            n as isize,
            b.as_ptr(),
            1,
            n as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(rayon::current_num_threads()),
        );
    }
}

const SQUARE: usize = 4096;

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|text| text.parse().ok()).collect();
    let [tokens, depth, vocab] = numbers[..] else {
        println!("usage: cargo bench --bench head_server -- TOKENS DEPTH VOCAB");
        return;
    };
    let mut head = Head::new(tokens, depth, vocab);
    let mut workspace = Workspace::new(64 << 20);
    let mut f64s = [(); 3].map(|()| Vec::new());
    let mut f32s = [(); 3].map(|()| Vec::new());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let half = 2048;
        match line.as_str() {
            "gemm64" if f64s[0].is_empty() => f64s = [(); 3].map(|()| vec![0.5; half * half]),
            "gemm32" if f32s[0].is_empty() => f32s = [(); 3].map(|()| vec![0.5; SQUARE * SQUARE]),
            _ => {}
        }
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let start = Instant::now();
        match line.as_str() {
            "plain" => head.step(&Policy::plain_f32(), false, &mut workspace),
            "fused" => head.step(&Policy::fused_f32(), false, &mut workspace),
            "plain_bf16" => head.step(&Policy::plain_bf16(), true, &mut workspace),
            "fused_bf16" => head.step(&Policy::fused_bf16(), true, &mut workspace),
            "reference" => head.reference_forward(),
            "gemm64" => gemm64(half, &mut f64s),
            "gemm32" => gemm32(SQUARE, &mut f32s),
            // Scratch is counted for a first step: a kept workspace needs no more.
            "release" => workspace = Workspace::new(64 << 20),
            "digest" => {
                println!("{}", head.digest());
                continue;
            }
            _ => break,
        }
        let seconds = start.elapsed().as_secs_f64();
        println!("{seconds:.6} {}", PEAK.load(Relaxed) - before);
    }
}
