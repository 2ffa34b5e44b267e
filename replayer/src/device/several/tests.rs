//! Several machines against one: this process several times, and the GPUs that are there.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::device::compare::tests::assert_kept;
use crate::device::host::Host;
use crate::device::machine::{Arguments, Product};
use crate::device::tests::{NOISE, assert_all, cuda, heads, host, on, wanted};
use crate::device::user_kernel::launch::{Code, Launch, Passed};
use crate::kernels::NoProgress;
use crate::kernels::fixture::Fixture;

/// Machines of this process, and copies between them.
struct Copies;

impl Links<Host> for Copies {
    fn bring(
        &self,
        (from, buffer): (usize, &Box<[Cell<u64>]>),
        to: &mut Box<[Cell<u64>]>,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        assert_ne!(from, 0, "the first machine's sums are where they belong");
        for (to, from) in to.iter().zip(buffer.iter()).take(bytes.div_ceil(size_of::<u64>())) {
            to.set(from.get());
        }
        Ok(())
    }
}

fn hosts(count: usize) -> Several<Host, Copies> {
    let names = (0..count).map(|nth| format!("host:{nth}")).collect();
    Several::of((0..count).map(|_| Host::new()).collect(), names, (Copies, "copies"))
}

#[test]
fn what_machines_share_is_what_the_reference_has() {
    let filtered = TermNoise { filter: 0.02, whole: true, ..NOISE };
    for device in [hosts(2), hosts(3)] {
        for (what, fixture) in heads() {
            let copies: Vec<f64> = (0..fixture.tokens).map(|t| (1 + t % 3) as f64).collect();
            for noise in [NOISE, filtered] {
                let got = on(&device, &fixture, &noise, Some(&copies));
                let wanted = wanted(&fixture, &noise, Some(&copies));
                assert_all(what, &got, &wanted, fixture.depth);
            }
            let inputs = fixture.inputs();
            let got = device.forward(&inputs, &NoProgress).unwrap();
            let alone = device.machines[0].forward(&inputs, &NoProgress).unwrap();
            // Bits, as NaN of a head of given logits is one too.
            for (got, alone) in [
                (&got.max, &alone.max),
                (&got.sum, &alone.sum),
                (&got.label_logits, &alone.label_logits),
                (&got.logit_sum, &alone.logit_sum),
                (&got.logit_squares, &alone.logit_squares),
            ] {
                let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(got), bits(alone), "{what}");
            }
        }
    }
}

#[test]
fn what_machines_keep_is_compared_as_what_they_would_have_fetched() {
    for device in [hosts(2), hosts(3)] {
        for (what, fixture) in
            heads().iter().filter(|(_, fixture)| fixture.inputs().given.is_none())
        {
            assert_kept(&device, what, fixture);
        }
    }
}

/// dq of a slab goes on from the one before, on whichever machine has its tokens.
#[test]
fn slab_after_slab_gives_what_one_machine_gives() {
    let fixture = Fixture::usual().with_bias();
    let inputs = fixture.inputs();
    let walked = |device: &dyn Device| {
        let mut dq = Backward::zeros(&inputs, &NOISE);
        let mut walk = device.backward(&inputs, 32, &NOISE).unwrap();
        let lse = vec![3.0; fixture.tokens];
        let [g, label, smooth] = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
        let cotangents = Cotangents { lse: &g, label: &label, smooth: &smooth };
        for rows in [0..32, 32..61] {
            let mut labels = Vec::new();
            let head = crate::head::step::vocabulary_slab(&inputs, rows, &mut labels);
            let upstream = Upstream::new(&head, &lse, cotangents, &NOISE);
            let tiles = Tiles { tokens: 6, vocab: 16 };
            walk.slab(&head, upstream, (tiles, &NoProgress), &mut dq).unwrap();
        }
        walk.finish(&mut dq).unwrap();
        dq
    };
    let (three, single) = (walked(&hosts(3)), walked(&Host::new()));
    // A token's sums are over the vocabulary alone: nobody else has a part in them.
    assert_eq!((three.dq_lse, three.dq_label), (single.dq_lse, single.dq_label));
}

#[test]
fn one_of_a_list_is_that_one_bit_for_bit_and_every_run_has_the_same_bits() {
    let fixture = Fixture::new(300, 20, 400, 390).with_bias();
    let bits = |device: &dyn Device| {
        let all = on(device, &fixture, &NOISE, None);
        let bits = |(name, values): (&'static str, Vec<f64>)| {
            (name, values.into_iter().map(f64::to_bits).collect::<Vec<_>>())
        };
        all.into_iter().map(bits).collect::<Vec<_>>()
    };
    assert!(bits(&hosts(1)) == bits(&Host::new()));
    let three = hosts(3);
    assert!(bits(&three) == bits(&three));
    assert_eq!(three.description().name.matches("host:").count(), 3);
    assert!(three.description().products.ends_with("added in the order of the devices"));
}

#[test]
fn tokens_are_shared_in_order_and_a_machine_too_many_has_none() {
    let device = hosts(3);
    let shares = |tokens| device.shares(tokens).map(|(.., range)| range).collect::<Vec<_>>();
    assert_eq!(shares(10), [0..4, 4..8, 8..10]);
    assert_eq!(shares(2), [0..1, 1..2]);
    assert_eq!(shares(0).len(), 1);
}

/// This process, until it is asked for its memory the given time.
struct Failing {
    host: &'static Host,
    left: AtomicUsize,
}

impl Machine for Failing {
    type Buffer = <Host as Machine>::Buffer;

    fn description(&self) -> &Description {
        Machine::description(self.host)
    }

    fn free(&self) -> Result<usize, DeviceError> {
        self.host.free()
    }

    fn zeros(&self, bytes: usize) -> Result<Self::Buffer, DeviceError> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left == 0 {
            Err(DeviceError::call("allocating", "out of memory"))
        } else {
            self.host.zeros(bytes)
        }
    }

    fn upload(&self, bytes: &[u8], to: &mut Self::Buffer) -> Result<(), DeviceError> {
        self.host.upload(bytes, to)
    }

    fn download(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<(), DeviceError> {
        self.host.download(from, to)
    }

    fn address(&self, buffer: &Self::Buffer) -> u64 {
        self.host.address(buffer)
    }

    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.host.launch(arguments) }
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.host.multiply(product) }
    }
}

impl Launches for Failing {
    type Kernel = <Host as Launches>::Kernel;

    fn load(&self, code: &Code, entry: &str) -> Result<Self::Kernel, DeviceError> {
        self.host.load(code, entry)
    }

    unsafe fn start(
        &self,
        kernel: &Self::Kernel,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError> {
        // SAFETY: as the caller says.
        unsafe { self.host.start(kernel, launch, arguments) }
    }
}

impl Links<Failing> for Copies {
    fn bring(
        &self,
        from: (usize, &Box<[Cell<u64>]>),
        to: &mut Box<[Cell<u64>]>,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        <Copies as Links<Host>>::bring(self, from, to, bytes)
    }
}

/// Whenever it fails: before, in the middle of a slab, or when sums are brought.
#[test]
fn a_device_that_fails_is_named_and_nobody_waits_for_it() {
    let fixture = Fixture::usual();
    let inputs = fixture.inputs();
    let mut failed = 0;
    for left in 0..60 {
        let machines =
            [usize::MAX, left].map(|left| Failing { host: host(), left: AtomicUsize::new(left) });
        let names = ["cuda:0", "cuda:5"].map(String::from).into();
        let device = Several::of(machines.into(), names, (Copies, "copies"));
        let run = || {
            device.forward(&inputs, &NoProgress)?;
            let mut walk = device.backward(&inputs, 61, &NOISE)?;
            let lse = vec![3.0; fixture.tokens];
            let g = fixture.g_lse_f64();
            let cotangents = Cotangents { lse: &g, label: &g, smooth: &g };
            let upstream = Upstream::new(&inputs, &lse, cotangents, &NOISE);
            let mut dq = Backward::zeros(&inputs, &NOISE);
            let tiles = Tiles { tokens: 6, vocab: 16 };
            walk.slab(&inputs, upstream, (tiles, &NoProgress), &mut dq)
        };
        if let Err(error) = run() {
            assert_eq!(
                error.to_string(),
                "the device failed at allocating: out of memory (cuda:5)"
            );
            failed += 1;
        }
    }
    assert!((10..60).contains(&failed), "{failed}: some of them, not all");
}

/// A communicator of one GPU brings what it has to itself; where there are more, they share.
#[test]
fn gpus_joined_by_nccl_give_what_the_reference_has() {
    let Some(first) = cuda() else { return };
    let alone = Nccl::join(&[Cuda::open(0).unwrap()]).expect("NCCL joins one GPU");
    let from: Vec<f64> = (0..1000).map(f64::from).collect();
    let (mut sent, mut received) = (Room::default(), Room::default());
    sent.put(first, &from).unwrap();
    received.of(first, from.len()).unwrap();
    let to = received.buffer_mut().unwrap();
    alone.bring((0, sent.buffer().unwrap()), to, from.len() * size_of::<f64>()).unwrap();
    let mut got = vec![0.0; from.len()];
    received.get(first, &mut got).unwrap();
    assert_eq!(got, from);
    let all: Vec<usize> = (0..Cuda::count().unwrap()).collect();
    let device = open(&all).unwrap();
    for (what, fixture) in heads() {
        let got = on(&device, &fixture, &NOISE, None);
        assert_all(what, &got, &wanted(&fixture, &NOISE, None), fixture.depth);
    }
}
