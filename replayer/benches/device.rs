//! The f64 reference on a GPU: forward, and the backward walk over slabs of the vocabulary, at
//! the shape of the CCE paper and at smaller ones, beside the rate of a large dgemm through the
//! same cuBLAS handle; and the emulated fused policy in bf16.
//!
//! `cargo bench --bench device -- [--rounds N] [--seed N] [--gpu N] [--gemm N] [--shape T,V,D]...`
//!
//! Prints one JSON object a line, which `make bench-gpu` reads: the card, how the device agrees
//! with the CPU at a small shape (nothing is timed before it does), then what each pass took by
//! the device's own clock, in rounds that take turns with the dgemm. Without a GPU it says so.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use backtape_replayer::device::{Device, DeviceError, Measured, Taken};
use backtape_replayer::head::step::vocabulary_slab;
use backtape_replayer::kernels::policy::Policy;
use backtape_replayer::kernels::reference::{self, Backward, TermNoise, Upstream};
use backtape_replayer::kernels::{Cotangents, HeadInputs, Matrix, NoProgress, Tiles, Values};
use clap::Parser;
use serde_json::json;

/// The head of the CCE paper (Gemma 2, 2B), one of a smaller model, and that of `loss_head`.
const SHAPES: [Shape; 3] = [
    Shape { tokens: 8192, vocab: 256_000, depth: 2304 },
    Shape { tokens: 8192, vocab: 32_768, depth: 2048 },
    Shape { tokens: 1024, vocab: 32_768, depth: 1024 },
];

/// Several tiles and slabs, neither a whole number of them; the CPU does it in a moment.
const SMALL: Shape = Shape { tokens: 300, vocab: 5000, depth: 96 };
const SMALL_SLAB: usize = 1900;

/// Bytes of one f64 buffer over a slab of k's rows, as a replay cuts them.
const SLAB_BYTES: usize = 32 << 20;

/// Both sides sum the same terms in f64 in another order, with another library's exp: the bound
/// of the device's own tests, relative to the largest of a row.
const CLOSE: f64 = 4096.0 * f64::EPSILON;

/// Every rounding of a bf16 job, so that the walk has all its sums but those of a filter.
const NOISE: TermNoise = TermNoise {
    p_rel_var: 1e-5,
    logit_rel_var: 1e-5,
    dot_rel_var: 1e-14,
    logit_floor: 0.0,
    cap_rel_var: 0.0,
    label_step: 0.0,
    filter: 0.0,
    whole: false,
    exp_rel_var: 0.0,
    confident: 0.0,
    log_p_rel_var: 0.0,
};

#[derive(Parser)]
struct Options {
    /// Rounds that are counted; one before them warms up.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Of the random numbers.
    #[arg(long, default_value_t = 20_261_123)]
    seed: u64,
    /// Which GPU.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Rows and columns of the square product.
    #[arg(long, default_value_t = 8192)]
    gemm: usize,
    /// Tokens, vocabulary and depth; several times for several.
    #[arg(long, value_name = "T,V,D")]
    shape: Vec<Shape>,
    /// What cargo passes to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    vocab: usize,
    depth: usize,
}

impl std::str::FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Shape, String> {
        let sizes: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
        match sizes.as_deref() {
            Ok(&[tokens, vocab, depth]) if tokens > 0 && vocab > 0 && depth > 0 => {
                Ok(Shape { tokens, vocab, depth })
            }
            _ => Err("a shape is three sizes above 0, as 8192,256000,2304".into()),
        }
    }
}

impl Shape {
    /// Operations of one product over the token x vocabulary plane.
    fn flop(&self) -> f64 {
        2.0 * self.tokens as f64 * self.vocab as f64 * self.depth as f64
    }

    /// Rows of k that a replay walks at a time.
    fn slab(&self) -> usize {
        (SLAB_BYTES / (8 * self.depth)).max(Tiles::default().vocab)
    }
}

/// A head that owns its numbers: q and k as bits of bf16, one label a token.
struct Head {
    shape: Shape,
    q: Vec<u16>,
    k: Vec<u16>,
    labels: Vec<u32>,
    cotangents: [Vec<f64>; 3],
}

impl Head {
    /// Logits of a standard deviation near 1.5, whatever the depth.
    fn random(shape: Shape, seed: u64) -> Head {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state >> 32
        };
        let Shape { tokens, vocab, depth } = shape;
        let mut bits = |count: usize, scale: f32| -> Vec<u16> {
            let mut number = || (next() as f32 / (1u64 << 31) as f32 - 1.0) * scale;
            (0..count).map(|_| half::bf16::from_f32(number()).to_bits()).collect()
        };
        let (q, k) = (bits(tokens * depth, 1.0), bits(vocab * depth, 4.5 / (depth as f32).sqrt()));
        let labels = (0..tokens).map(|_| (next() % vocab as u64) as u32).collect();
        let g = 1.0 / tokens as f64;
        let cotangents = [vec![g; tokens], vec![-g; tokens], vec![0.0; tokens]];
        Head { shape, q, k, labels, cotangents }
    }

    fn inputs(&self) -> HeadInputs<'_> {
        let Shape { tokens, vocab, depth } = self.shape;
        let matrix = |rows, bits| Matrix { rows, cols: depth, values: Values::Bf16(bits) };
        HeadInputs::plain(matrix(tokens, &self.q), matrix(vocab, &self.k), &self.labels, vocab)
    }

    fn cotangents(&self) -> Cotangents<'_, f64> {
        let [lse, label, smooth] = &self.cotangents;
        Cotangents { lse, label, smooth }
    }

    /// lse and logits of labels, by the device.
    fn forward(&self, device: &dyn Device) -> Result<reference::Forward, DeviceError> {
        Ok(device.forward(&self.inputs(), &NoProgress)?.finish(None, 0))
    }

    /// Every slab of so many rows of k, as a replay walks them; `on_dk` gets the two parts of dk of
    /// each.
    fn backward(
        &self,
        device: &dyn Device,
        (lse, rows): (&[f64], usize),
        on_dk: &mut dyn FnMut(&[f64], &[f64]),
    ) -> Result<Backward, DeviceError> {
        let whole = self.inputs();
        let mut dq = Backward::zeros(&whole, &NOISE);
        let mut walk = device.backward(&whole, rows, &NOISE)?;
        for start in (0..self.shape.vocab).step_by(rows) {
            let mut labels = Vec::new();
            let range = start..(start + rows).min(self.shape.vocab);
            let slab = vocabulary_slab(&whole, range, &mut labels);
            let upstream = Upstream::new(&slab, lse, self.cotangents(), &NOISE);
            let sums = walk.slab(&slab, upstream, (Tiles::default(), &NoProgress), &mut dq)?;
            sums.finish(&slab.q, &NOISE, &mut |block| on_dk(&block.dk_lse, &block.dk_label));
        }
        walk.finish(&mut dq)?;
        Ok(dq)
    }

    /// Forward and backward of a policy, as a replay has them emulated.
    fn policy_forward(&self, device: &dyn Device, policy: &Policy) -> Result<(), DeviceError> {
        let tiles = (Tiles::default(), &NoProgress as _);
        device.policy_forward(policy, &self.inputs(), tiles).map(|_| ())
    }

    fn policy_backward(
        &self,
        device: &dyn Device,
        policy: &Policy,
        lse: &[f64],
    ) -> Result<(), DeviceError> {
        let (given, tiles) = ((lse, &self.cotangents()), (Tiles::default(), &NoProgress as _));
        device.policy_backward(policy, &self.inputs(), given, tiles, &mut |_| ()).map(|_| ())
    }
}

/// What of the device is compared, flattened, and the length of its rows.
fn parts(forward: reference::Forward, dq: Backward, dk: [Vec<f64>; 2]) -> [Vec<f64>; 6] {
    let [dk_lse, dk_label] = dk;
    [forward.lse, forward.label_logits, dq.dq_lse, dq.dq_label, dk_lse, dk_label]
}

const PARTS: [&str; 6] = ["lse", "label_logits", "dq_lse", "dq_label", "dk_lse", "dk_label"];

/// The device against the CPU at a small shape: the name of a part that differs, if one does.
fn disagreement(device: &dyn Device, seed: u64) -> Result<Option<&'static str>, DeviceError> {
    let head = Head::random(SMALL, seed);
    let by_gpu = head.forward(device)?;
    let mut dk = [Vec::new(), Vec::new()];
    let dq = head.backward(device, (&by_gpu.lse, SMALL_SLAB), &mut |lse, label| {
        dk[0].extend_from_slice(lse);
        dk[1].extend_from_slice(label);
    })?;
    let by_gpu = parts(by_gpu, dq, dk);

    let (inputs, tiles) = (head.inputs(), Tiles::default());
    let by_cpu = reference::forward(&inputs, tiles, &NoProgress);
    let mut dk = [Vec::new(), Vec::new()];
    let (lse, cotangents) = (&by_cpu.lse, head.cotangents());
    let dq = reference::backward(
        &inputs,
        lse,
        &cotangents,
        &NOISE,
        (tiles, reference::Keep::Both, &NoProgress),
        &mut |block| {
            dk[0].extend(block.dk_lse);
            dk[1].extend(block.dk_label);
        },
    );
    let by_cpu = parts(by_cpu, dq, dk);

    let mut differs = None;
    for ((name, got), wanted) in PARTS.into_iter().zip(&by_gpu).zip(&by_cpu) {
        let width = if wanted.len() == SMALL.tokens { 1 } else { SMALL.depth };
        let error = worst(got, wanted, width);
        println!(
            "{}",
            json!({"line": "agreement", "part": name, "worst": error, "allowed": CLOSE})
        );
        // NaN agrees with nothing.
        if !(error <= CLOSE) {
            differs = differs.or(Some(name));
        }
    }
    Ok(differs)
}

/// The largest error relative to the largest number of its row; NaN where one is not finite or
/// the lengths differ.
fn worst(got: &[f64], wanted: &[f64], width: usize) -> f64 {
    if got.len() != wanted.len() {
        return f64::NAN;
    }
    let mut most = 0.0f64;
    for (got, wanted) in got.chunks(width).zip(wanted.chunks(width)) {
        let largest = wanted.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
        for (x, y) in got.iter().zip(wanted) {
            let error = (x - y).abs() / largest;
            if !error.is_finite() {
                return f64::NAN;
            }
            most = most.max(error);
        }
    }
    most
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// One thing that takes turns with the others.
struct Turn {
    pass: &'static str,
    flop: f64,
    taken: Vec<Taken>,
}

impl Turn {
    fn of(pass: &'static str, flop: f64) -> Turn {
        Turn { pass, flop, taken: Vec::new() }
    }

    fn milliseconds(&self) -> Vec<f64> {
        self.taken.iter().map(|taken| taken.milliseconds).collect()
    }

    fn teraflops(&self) -> f64 {
        self.flop / median(&self.milliseconds()) / 1e9
    }

    fn print(&self, shape: Shape, of: &Turn) {
        let Shape { tokens, vocab, depth } = shape;
        let peak = self.taken.iter().filter_map(|taken| taken.peak_bytes).max();
        println!(
            "{}",
            json!({
                "line": "pass", "pass": self.pass, "tokens": tokens, "vocab": vocab,
                "depth": depth, "milliseconds": self.milliseconds(), "flop": self.flop,
                "teraflops": self.teraflops(), "of_gemm": self.teraflops() / of.teraflops(),
                "peak_bytes": peak,
            })
        );
    }
}

/// Rounds of the square product, the forward pass, the walk and the two passes of a policy, in turn.
fn rounds(gpu: &Measured, shape: Shape, options: &Options) -> Result<(), DeviceError> {
    let head = Head::random(shape, options.seed);
    let backward_flop = reference::GEMMS as f64 * shape.flop();
    let policy = Policy::fused_bf16();
    let mut turns = [
        Turn::of("dgemm", 2.0 * (options.gemm as f64).powi(3)),
        Turn::of("forward", shape.flop()),
        Turn::of("backward", backward_flop),
        Turn::of("fused bf16, forward", shape.flop()),
        // The logits again, then dq and dk.
        Turn::of("fused bf16, backward", 3.0 * shape.flop()),
    ];
    for round in 0..=options.rounds {
        let square = gpu.square(options.gemm, options.seed)?;
        let ((), product) = gpu.timed(|| square.multiply())?;
        // Its memory is the walk's to plan with.
        drop(square);
        let (forward, first) = gpu.timed(|| head.forward(gpu.device()))?;
        let given = (&forward.lse[..], shape.slab());
        let (_, second) = gpu.timed(|| head.backward(gpu.device(), given, &mut |_, _| ()))?;
        let ((), third) = gpu.timed(|| head.policy_forward(gpu.device(), &policy))?;
        let lse = &forward.lse;
        let ((), fourth) = gpu.timed(|| head.policy_backward(gpu.device(), &policy, lse))?;
        for (turn, taken) in turns.iter_mut().zip([product, first, second, third, fourth]) {
            eprintln!("round {round}, {}: {:.1} ms", turn.pass, taken.milliseconds);
            // The first round loads what cuBLAS needs.
            if round > 0 {
                turn.taken.push(taken);
            }
        }
    }
    for turn in &turns {
        turn.print(shape, &turns[0]);
    }
    Ok(())
}

fn measure(gpu: &Measured, options: &Options) -> Result<ExitCode, DeviceError> {
    let about = gpu.description();
    println!(
        "{}",
        json!({"line": "card", "name": about.name, "compiler": about.compiler,
               "products": about.products, "seed": options.seed, "rounds": options.rounds})
    );
    if let Some(part) = disagreement(gpu.device(), options.seed)? {
        eprintln!("device: {part} is not the CPU's at a small shape, so nothing is timed");
        return Ok(ExitCode::FAILURE);
    }
    let shapes = if options.shape.is_empty() { &SHAPES[..] } else { &options.shape };
    for &shape in shapes {
        if let Err(error) = rounds(gpu, shape, options) {
            let Shape { tokens, vocab, depth } = shape;
            println!(
                "{}",
                json!({"line": "failed", "tokens": tokens, "vocab": vocab, "depth": depth,
                       "why": error.to_string()})
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.rounds == 0 {
        eprintln!("device: --rounds must be at least 1");
        return ExitCode::from(2);
    }
    let gpu = match Measured::open(options.gpu) {
        Ok(gpu) => gpu,
        Err(error @ DeviceError::Absent(_)) => {
            println!("{}", json!({"line": "absent", "why": error.to_string()}));
            eprintln!("no GPU: nothing measured: {error}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("device: {error}");
            return ExitCode::FAILURE;
        }
    };
    measure(&gpu, &options).unwrap_or_else(|error| {
        eprintln!("device: {error}");
        ExitCode::FAILURE
    })
}
