//! One list of tests for every machine: each kernel and each walk against the reference on the
//! CPU. Without a GPU the kernels are compiled by a C compiler, which leaves out the order of
//! cuBLAS' products and CUDA's exp and tanh; `make test-gpu` runs the same list on a GPU too.

use std::sync::OnceLock;

use super::cuda::Cuda;
use super::host::Host;
use super::machine::{Arguments, Machine, Product};
use super::plane::plane;
use super::user_kernel::launch::{Code, Launch, Passed};
use super::*;
use crate::kernels::fixture::{Counter, Fixture};
use crate::kernels::reference::{self, DkBlock, PlaneTile, backward_work, forward_work};
use crate::kernels::{Cotangents, Matrix, NoProgress, Transform, Values};

const TILES: Tiles = Tiles { tokens: 6, vocab: 16 };

pub(super) const NOISE: TermNoise = TermNoise {
    p_rel_var: 0.25,
    logit_rel_var: 0.5,
    dot_rel_var: 2.0,
    logit_floor: 0.03125,
    cap_rel_var: 0.125,
    label_step: 0.01,
    filter: 0.0,
    whole: false,
    exp_rel_var: 0.0625,
    confident: 0.05,
    log_p_rel_var: 0.01,
};

/// Both sides sum at most this many terms of one sign or add a few of both, each in f64; exp and
/// tanh of two libraries differ by an ulp, and the argument of exp carries the dot product's error
/// of D ulps of logits below 60.
const CLOSE: f64 = 4096.0 * f64::EPSILON;
/// The same of sums of squares, which the reference multiplies in f32 where q and k are wide, and a
/// device in f64.
const CLOSE_SQUARES: f64 = 4096.0 * f32::EPSILON as f64;

/// Stamps each of these out for every machine.
macro_rules! on_every_machine {
    ($($(#[$about:meta])* $test:ident),* $(,)?) => {
        mod on_host {
            $($(#[$about])* #[test] fn $test() { super::$test(super::host()); })*
        }

        mod on_cuda {
            $($(#[$about])* #[test] fn $test() {
                if let Some(cuda) = super::cuda() { super::$test(cuda); }
            })*
        }
    };
}

pub(super) use on_every_machine;

on_every_machine! {
    the_forward_sums_are_those_of_the_reference,
    tile_after_tile_gives_the_forward_sums_of_the_whole_vocabulary,
    the_backward_sums_are_those_of_the_reference,
    a_device_with_little_memory_gives_the_same_sums_band_by_band,
    slab_after_slab_gives_the_gradient_of_the_whole_vocabulary,
    the_plane_is_that_of_the_reference,
    nan_and_infinity_come_through_as_in_the_reference,
    elements_are_widened_exactly,
    every_run_gives_the_same_bits,
}

pub(super) fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(Host::new)
}

/// The GPU, where `make test-gpu` says that there is one; it must open then.
pub(super) fn cuda() -> Option<&'static Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    let asked = std::env::var_os("BACKTAPE_TEST_GPU").is_some();
    CUDA.get_or_init(|| asked.then(|| Cuda::open(0).expect("the GPU opens"))).as_ref()
}

/// How often a test of bits runs: order wavers on a GPU alone, of others two runs say as much.
pub(super) fn runs<M: Machine>(machine: &M) -> usize {
    let Description { name, products, .. } = Machine::description(machine);
    if products.starts_with("cuBLAS") && !name.starts_with("stand-in") { 100 } else { 2 }
}

/// A machine with room for tiles of 64 tokens and 256 classes, and no more.
pub(super) struct Little<'a, M>(pub(super) &'a M);

impl<M: Machine> Machine for Little<'_, M> {
    type Buffer = M::Buffer;

    fn description(&self) -> &Description {
        Machine::description(self.0)
    }

    fn free(&self) -> Result<usize, DeviceError> {
        Ok(2_000)
    }

    fn zeros(&self, bytes: usize) -> Result<M::Buffer, DeviceError> {
        self.0.zeros(bytes)
    }

    fn upload(&self, bytes: &[u8], to: &mut M::Buffer) -> Result<(), DeviceError> {
        self.0.upload(bytes, to)
    }

    fn download(&self, from: &M::Buffer, to: &mut [u8]) -> Result<(), DeviceError> {
        self.0.download(from, to)
    }

    fn address(&self, buffer: &M::Buffer) -> u64 {
        self.0.address(buffer)
    }

    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.0.launch(arguments) }
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.0.multiply(product) }
    }
}

impl<M: Launches> Launches for Little<'_, M> {
    type Kernel = M::Kernel;

    fn load(&self, code: &Code, entry: &str) -> Result<M::Kernel, DeviceError> {
        self.0.load(code, entry)
    }

    unsafe fn start(
        &self,
        kernel: &M::Kernel,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.0.start(kernel, launch, arguments) }
    }
}

/// Heads with every option, in every combination that has a path of its own.
pub(super) fn heads() -> Vec<(&'static str, Fixture)> {
    let capped = |fixture: Fixture, uncapped| {
        let transform = Transform { scale: 0.75, softcap: Some(5.0), uncapped };
        Fixture { transform, ..fixture }
    };
    let usual = Fixture::usual;
    let scaled = |fixture: Fixture| Fixture {
        transform: Transform { scale: 1.5, ..Transform::NONE },
        ..fixture
    };
    let masked = Fixture { mask: Some(-3.0), ..usual() };
    vec![
        ("plain", usual()),
        ("bias", usual().with_bias()),
        ("scaled", scaled(usual().with_bias())),
        ("capped", capped(usual().with_bias().with_smoothing(), false)),
        ("uncapped", capped(usual(), true)),
        ("smoothed", usual().with_smoothing()),
        ("masked", masked),
        ("given", usual().with_given()),
        ("given, capped", capped(usual().with_given().with_bias(), false)),
        ("one token", Fixture::new(1, 3, 40, 40)),
        ("wide", Fixture::new(11, reference::WIDE, 40, 37)),
        ("one class", Fixture::new(5, 3, 1, 1)),
    ]
}

/// `NaN` with `NaN`, infinities with themselves, numbers relatively to the largest of the row.
fn assert_close(what: &str, got: &[f64], wanted: &[f64], width: usize) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let squares = what.ends_with("_lse_sq") || what.ends_with("_lse_var");
    let squares = squares && width >= reference::WIDE;
    let bound = if squares { CLOSE_SQUARES } else { CLOSE };
    for (row, (got, wanted)) in
        got.chunks(width.max(1)).zip(wanted.chunks(width.max(1))).enumerate()
    {
        let largest = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        for (column, (&x, &y)) in got.iter().zip(wanted).enumerate() {
            let same = x == y || (x.is_nan() && y.is_nan());
            let close = (x - y).abs() <= bound * largest.max(1e-300);
            assert!(same || close, "{what}, row {row}, column {column}: {x:e}, not {y:e}");
        }
    }
}

pub(super) struct Owned {
    lse: Vec<f64>,
    cotangents: [Vec<f64>; 3],
}

impl Owned {
    pub(super) fn of(fixture: &Fixture) -> Owned {
        let lse = reference::forward(&fixture.inputs(), TILES, &NoProgress).lse;
        let cotangents = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
        Owned { lse, cotangents }
    }

    pub(super) fn upstream<'a>(
        &'a self,
        inputs: &HeadInputs,
        noise: &'a TermNoise,
    ) -> Upstream<'a> {
        let [lse, label, smooth] = &self.cotangents;
        Upstream::new(inputs, &self.lse, Cotangents { lse, label, smooth }, noise)
    }
}

#[test]
fn every_kernel_in_the_source_is_loaded_and_no_other() {
    let source = include_str!("kernels/reference.cu");
    let named: Vec<_> = source.lines().filter_map(|line| line.strip_prefix("KERNEL(")).collect();
    assert_eq!(named.len(), KERNELS.len(), "{named:?}");
    for (kernel, line) in KERNELS.iter().zip(named) {
        assert!(line.starts_with(&format!("{kernel},")), "{kernel}: {line}");
    }
}

fn assert_forward(device: &dyn Device, what: &str, fixture: &Fixture) {
    let inputs = fixture.inputs();
    let masked = inputs.k.rows - inputs.valid_vocab;
    let counter = Counter::default();
    let sums = device.forward(&inputs, &counter).unwrap();
    assert_eq!(counter.total(), forward_work(&inputs), "{what}");
    let got = sums.finish(inputs.mask, masked);
    let wanted = reference::forward(&inputs, TILES, &NoProgress);
    for (name, got, wanted) in [
        ("lse", &got.lse, &wanted.lse),
        ("label logits", &got.label_logits, &wanted.label_logits),
        ("row max", &got.row_max, &wanted.row_max),
        ("squares", &got.logit_squares, &wanted.logit_squares),
        ("sum", &got.logit_sum, &wanted.logit_sum),
    ] {
        // The sum of the logits cancels: relative to the largest of the tokens.
        let width = if name == "sum" { got.len() } else { 1 };
        assert_close(&format!("{what}: {name}"), got, wanted, width);
    }
}

fn the_forward_sums_are_those_of_the_reference<M: Launches>(machine: &M) {
    for (what, fixture) in heads() {
        assert_forward(machine, what, &fixture);
    }
}

/// The last head: two tiles and a lane of -inf alone, then logits whose distance from 0 overflows exp.
fn tile_after_tile_gives_the_forward_sums_of_the_whole_vocabulary<M: Launches>(machine: &M) {
    let small = Little(machine);
    let many = Fixture::new(150, 5, 700, 690);
    let mut masked = Fixture::new(1, 1, 900, 900);
    masked.q[0] = 1.0;
    masked.k.fill(-800.0);
    masked.k[..530].fill(f32::NEG_INFINITY);
    // All that one lane of the last tile sums.
    for class in [770, 834, 898] {
        masked.k[class] = f32::NEG_INFINITY;
    }
    for (what, fixture) in [("bias", many.clone().with_bias()), ("plain", many), ("-inf", masked)] {
        assert_forward(&small, what, &fixture);
    }
}

/// dq and the rows of dk, each by its name.
pub(super) fn flat(dq: &Backward, sums: DkSums, inputs: &HeadInputs, noise: &TermNoise) -> Named {
    let mut all: Named = [
        ("dq_lse", &dq.dq_lse),
        ("dq_label", &dq.dq_label),
        ("dq_lse_var", &dq.dq_lse_var),
        ("dq_lse_sq", &dq.dq_lse_sq),
        ("dq_label_rel_var", &dq.dq_label_rel_var),
        ("dq_label_var", &dq.dq_label_var),
        ("dq_dropped", &dq.dq_dropped),
        ("dq_confident", &dq.dq_confident),
        ("dq_label_share", &dq.dq_label_share),
    ]
    .map(|(name, values)| (name, values.clone()))
    .into();
    let first = all.len();
    let mut take = |block: DkBlock| {
        let hits: Vec<f64> = block.hits.iter().map(|&hits| hits.into()).collect();
        for (index, (name, values)) in [
            ("dk_lse", block.dk_lse),
            ("dk_label", block.dk_label),
            ("dk_lse_var", block.dk_lse_var),
            ("dk_lse_sq", block.dk_lse_sq),
            ("dk_label_sq", block.dk_label_sq),
            ("dk_label_var", block.dk_label_var),
            ("dk_label_alike", block.dk_label_alike),
            ("dk_dropped", block.dk_dropped),
            ("dk_confident", block.dk_confident),
            ("dk_label_whole", block.dk_label_whole),
            ("dbias_lse", block.dbias_lse),
            ("dbias_label", block.dbias_label),
            ("dbias_var", block.dbias_var),
            ("dbias_sq", block.dbias_sq),
            ("hits", hits),
        ]
        .into_iter()
        .enumerate()
        {
            match all.get_mut(first + index) {
                Some((_, before)) => before.extend(values),
                None => all.push((name, values)),
            }
        }
    };
    sums.finish(&inputs.q, noise, &mut take);
    all
}

pub(super) type Named = Vec<(&'static str, Vec<f64>)>;

pub(super) fn on(
    device: &dyn Device,
    fixture: &Fixture,
    noise: &TermNoise,
    copies: Option<&[f64]>,
) -> Named {
    let inputs = HeadInputs { copies, ..fixture.inputs() };
    let owned = Owned::of(fixture);
    let upstream = owned.upstream(&inputs, noise);
    let mut dq = Backward::zeros(&inputs, noise);
    let counter = Counter::default();
    let mut walk = device.backward(&inputs, inputs.k.rows, noise).unwrap();
    let sums = walk.slab(&inputs, upstream, (TILES, &counter), &mut dq).unwrap();
    walk.finish(&mut dq).unwrap();
    assert_eq!(counter.total(), backward_work(&inputs));
    flat(&dq, sums, &inputs, noise)
}

pub(super) fn wanted(fixture: &Fixture, noise: &TermNoise, copies: Option<&[f64]>) -> Named {
    let inputs = HeadInputs { copies, ..fixture.inputs() };
    let owned = Owned::of(fixture);
    let Upstream { lse, cotangents, noise } = owned.upstream(&inputs, noise);
    let (mut dq, mut sums) =
        (Backward::zeros(&inputs, noise), DkSums::zeros(&inputs, noise, TILES));
    let given = (lse, &cotangents, noise);
    reference::backward_onto(
        (&mut dq, &mut sums),
        (&inputs, 0),
        given,
        (TILES, reference::Keep::Both, &NoProgress),
    );
    flat(&dq, sums, &inputs, noise)
}

pub(super) fn assert_all(what: &str, got: &Named, wanted: &Named, depth: usize) {
    for ((name, got), (_, wanted)) in got.iter().zip(wanted) {
        let width = if name.starts_with("dbias") { wanted.len() } else { depth };
        assert_close(&format!("{what}: {name}"), got, wanted, width);
    }
}

fn the_backward_sums_are_those_of_the_reference<M: Launches>(machine: &M) {
    let filtered = TermNoise { filter: 0.02, ..NOISE };
    for noise in [NOISE, filtered, TermNoise { whole: true, ..filtered }] {
        for (what, fixture) in heads() {
            let copies: Vec<f64> = (0..fixture.tokens).map(|t| (1 + t % 3) as f64).collect();
            for copies in [None, Some(&copies[..])] {
                let got = on(machine, &fixture, &noise, copies);
                assert_all(what, &got, &wanted(&fixture, &noise, copies), fixture.depth);
            }
        }
    }
}

/// Five bands: all but the first one are fetched and put again.
fn a_device_with_little_memory_gives_the_same_sums_band_by_band<M: Launches>(machine: &M) {
    let fixture = Fixture::new(300, 5, 200, 190).with_bias();
    let filtered = TermNoise { filter: 0.02, ..NOISE };
    let got = on(&Little(machine), &fixture, &filtered, None);
    assert_all("in bands", &got, &wanted(&fixture, &filtered, None), fixture.depth);
}

fn slab_after_slab_gives_the_gradient_of_the_whole_vocabulary<M: Launches>(machine: &M) {
    let fixture = Fixture::usual().with_bias();
    let inputs = fixture.inputs();
    let owned = Owned::of(&fixture);
    let mut dq = Backward::zeros(&inputs, &NOISE);
    let mut walk = Device::backward(machine, &inputs, 32, &NOISE).unwrap();
    for rows in [0..32, 32..61] {
        let mut labels = Vec::new();
        let head = crate::head::step::vocabulary_slab(&inputs, rows, &mut labels);
        let upstream = owned.upstream(&head, &NOISE);
        walk.slab(&head, upstream, (TILES, &NoProgress), &mut dq).unwrap();
    }
    walk.finish(&mut dq).unwrap();
    let whole = wanted(&fixture, &NOISE, None);
    for (name, got) in [("dq_lse", &dq.dq_lse), ("dq_label", &dq.dq_label)] {
        let (_, wanted) = whole.iter().find(|(of, _)| *of == name).unwrap();
        assert_close(name, got, wanted, fixture.depth);
    }
}

/// The reference's plane, whole: logits, log-probabilities, dlogits, and their variances.
fn planes(inputs: &HeadInputs, upstream: Upstream) -> [[Vec<f64>; 2]; 3] {
    let vocab = inputs.k.rows;
    let whole = || vec![0.0; inputs.q.rows * vocab];
    let mut planes = [(); 4].map(|()| whole());
    let on_tile = &mut |tile: PlaneTile| {
        let parts = [tile.logits, tile.logits_var, tile.dlogits, tile.dlogits_var];
        for (to, from) in planes.iter_mut().zip(parts) {
            for (row, values) in tile.tokens.clone().zip(from.chunks(tile.cols.len())) {
                let first = row * vocab + tile.cols.start;
                to[first..first + values.len()].copy_from_slice(values);
            }
        }
    };
    let Upstream { lse, cotangents, noise } = upstream;
    reference::plane(inputs, lse, &cotangents, noise, TILES, &NoProgress, on_tile);
    let [logits, logits_var, dlogits, dlogits_var] = planes;
    let of_token = |at: usize| lse[at / vocab];
    let logprobs = logits.iter().enumerate().map(|(at, x)| x - of_token(at)).collect();
    let logprobs_var = logits_var.clone();
    [[logits, logits_var], [logprobs, logprobs_var], [dlogits, dlogits_var]]
}

const STAGES: [PlaneStage; 3] = [PlaneStage::Logits, PlaneStage::Logprobs, PlaneStage::Dlogits];

fn the_plane_is_that_of_the_reference<M: Launches>(machine: &M) {
    let mut all: Vec<_> = heads().into_iter().collect();
    // Several tiles of a device with little memory.
    all.push(("large", Fixture::new(150, 5, 600, 570)));
    for noise in [NOISE, TermNoise { whole: true, ..NOISE }] {
        for (what, fixture) in &all {
            let inputs = fixture.inputs();
            let owned = Owned::of(fixture);
            let upstream = owned.upstream(&inputs, &noise);
            for (stage, wanted) in STAGES.into_iter().zip(planes(&inputs, upstream)) {
                let little = Little(machine);
                let stage_and_progress = (stage, &NoProgress as &dyn Progress);
                let mut kept = plane(&little, &inputs, upstream, stage_and_progress).unwrap();
                let got = [kept.values().unwrap(), kept.variances().unwrap()];
                for (got, wanted) in got.iter().zip(&wanted) {
                    assert_close(what, got, wanted, wanted.len());
                }
            }
        }
    }
}

fn nan_and_infinity_come_through_as_in_the_reference<M: Launches>(machine: &M) {
    let mut fixture = Fixture::usual();
    fixture.q[0] = f32::NAN;
    fixture.q[fixture.depth] = f32::INFINITY;
    fixture.k[16 * fixture.depth..17 * fixture.depth].fill(f32::NEG_INFINITY);
    let inputs = fixture.inputs();
    let got = Device::forward(machine, &inputs, &NoProgress).unwrap();
    let got = got.finish(None, inputs.k.rows - inputs.valid_vocab);
    let wanted = reference::forward(&inputs, TILES, &NoProgress);
    assert_close("lse", &got.lse, &wanted.lse, 1);
    let mut finite = Fixture::usual();
    finite.q[0] = f32::NAN;
    let noise = TermNoise { confident: 0.0, ..NOISE };
    let got = on(machine, &finite, &noise, None);
    assert_all("NaN", &got, &self::wanted(&finite, &noise, None), finite.depth);
}

/// Every bit pattern of the 16-bit formats, and f32 with its subnormals.
fn elements_are_widened_exactly<M: Launches>(machine: &M) {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let singles: Vec<f32> =
        (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | 1)).collect();
    let widened = |values| {
        let matrix = Matrix { rows: 256, cols: 256, values };
        let mut room = (room::Room::default(), room::Room::default());
        let whole = (&matrix, 0..256, 0..256);
        room::widen(machine, (&mut room.0, &mut room.1), whole, 0).unwrap();
        let mut got = vec![0.0f64; 1 << 16];
        room.1.get(machine, &mut got).unwrap();
        let wanted: Vec<f64> = (0..1 << 16).map(|i| matrix.get_f64(i)).collect();
        (got, wanted)
    };
    for values in [Values::Bf16(&bits), Values::F16(&bits), Values::F32(&singles)] {
        let (got, wanted) = widened(values);
        for (index, (x, y)) in got.iter().zip(&wanted).enumerate() {
            let same = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
            assert!(same, "element {index}: {x:e}, not {y:e}");
        }
    }
}

fn every_run_gives_the_same_bits<M: Launches>(machine: &M) {
    let fixture = Fixture::new(600, 40, 900, 890).with_bias();
    let noise = TermNoise { filter: 0.02, ..NOISE };
    let bits = || {
        let mut all = on(machine, &fixture, &noise, None);
        let forward = Device::forward(machine, &fixture.inputs(), &NoProgress).unwrap();
        all.extend([("sum", forward.sum), ("logit sum", forward.logit_sum)]);
        let bits = |(name, values): (&'static str, Vec<f64>)| {
            (name, values.into_iter().map(f64::to_bits).collect::<Vec<_>>())
        };
        all.into_iter().map(bits).collect::<Vec<_>>()
    };
    let first = bits();
    for run in 1..runs(machine) {
        assert!(bits() == first, "run {run}");
    }
}
