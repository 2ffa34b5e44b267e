//! Captures on streams whose order is chosen: bytes, proof, memory, and that nothing waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::identity::Name;
use backtape::index_box::IndexBox;
use backtape::shard::{FingerprintSource, Shard, TensorKey};
use proptest::prelude::*;

use super::capturer::Capturer;
use super::host::{Host, SIDE, Turns};
use super::machine::{Arguments, Machine};
use super::transfer::ArrivingBytes;
use super::*;
use crate::capture::{Capture, Located};
use crate::measure::measure;

const JOB: Stream = 1;
const ROOMY: Sizes = Sizes { pinned: 1 << 20, snapshots: 1 << 20 };
const NO_SNAPSHOTS: Sizes = Sizes { pinned: 1 << 20, snapshots: 0 };

fn capturer(sizes: Sizes, turns: Turns) -> Arc<Capturer<Host>> {
    Capturer::new(Host::new(sizes, turns), sizes)
}

/// A tensor on the device; what it lies in is given up, and written over, when its hold is
/// dropped, as a framework's allocator gives it to the next.
struct Tensor {
    bytes: Box<[u64]>,
}

impl Tensor {
    fn new(bytes: usize) -> Tensor {
        Tensor { bytes: vec![0; bytes.div_ceil(8)].into() }
    }

    fn address(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }
}

/// Poisons memory when it is let go of. The memory itself lives on: a test may read it.
struct Hold {
    address: u64,
    bytes: usize,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // SAFETY: tests make tensors before the device, so they are dropped after it.
        unsafe { std::ptr::write_bytes(self.address as *mut u8, 0xdd, self.bytes) };
    }
}

fn place_of(bytes: usize) -> IndexBox {
    IndexBox(vec![(5, 5 + bytes as u64)])
}

fn capture(
    capturer: &Arc<Capturer<Host>>,
    tensor: &Tensor,
    bytes: usize,
    order: Order,
) -> Result<ArrivingBytes<Host>, NotTaken> {
    capture_holding(capturer, tensor, bytes, order, Box::new(()))
}

fn capture_holding(
    capturer: &Arc<Capturer<Host>>,
    tensor: &Tensor,
    bytes: usize,
    order: Order,
    hold: Box<dyn Send>,
) -> Result<ArrivingBytes<Host>, NotTaken> {
    let sums = Sums::Device(Dtype::U8, place_of(bytes));
    // SAFETY: the tensor outlives the test's streams.
    unsafe { capturer.capture(Source { address: tensor.address(), bytes, order, sums, hold }) }
}

fn assert_holds(arriving: &ArrivingBytes<Host>, expected: &[u8]) {
    assert_eq!(arriving.bytes().unwrap(), expected);
    let place = place_of(expected.len());
    let sums = Fingerprint::of(Dtype::U8, &place, expected);
    assert_eq!(arriving.fingerprint(Dtype::U8, &place), Some(sums));
}

fn turns() -> impl Strategy<Value = Turns> {
    prop_oneof![Just(Turns::SideFirst), Just(Turns::JobFirst), any::<u64>().prop_map(Turns::Drawn)]
}

proptest! {
    /// Goal: the kernel's sums are those of src/fingerprint.rs, the definition. Method: random
    /// boxes, anywhere in the index space, of every width; the sums of two parts add up too.
    #[test]
    fn the_kernel_gives_the_fingerprint_of_the_recorder(
        dims in prop::collection::vec((any::<u32>(), 1u64..7), 0..6),
        which in 0usize..4,
        seed in any::<u64>(),
    ) {
        let dtype = [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64][which];
        let place =
            IndexBox(dims.iter().map(|&(lo, n)| (lo.into(), u64::from(lo) + n)).collect());
        let bytes = place.elements().unwrap() as usize * dtype.width();
        let tensor = Tensor {
            bytes: (0..bytes.div_ceil(8) as u64)
                .map(|i| seed.wrapping_add(i).wrapping_mul(0x9e37_79b9_7f4a_7c15))
                .collect(),
        };
        let host = Host::new(ROOMY, Turns::SideFirst);
        let sums = Box::new([0u32; 2]);
        let sums_address = sums.as_ptr() as u64;
        let arguments =
            Arguments::new(dtype, &place, tensor.address(), sums_address).unwrap();
        // SAFETY: both lie there until the stream is through, below.
        unsafe { host.fingerprint(&arguments, SIDE) }.unwrap();
        prop_assert!(host.run());
        // SAFETY: as many bytes as the tensor was made with; the kernel wrote the sums.
        let (on_device, fingerprint) = unsafe {
            let on_device = std::slice::from_raw_parts(tensor.address() as *const u8, bytes);
            let written = sums.as_ptr();
            (on_device, Fingerprint(written.read_volatile(), written.add(1).read_volatile()))
        };
        prop_assert_eq!(fingerprint, Fingerprint::of(dtype, &place, on_device));
    }

    /// Goal: what lands is what the tensor held when it was captured, whoever is ahead, with room
    /// for snapshots, with little and with none; and all memory comes back. Method: a job that
    /// overwrites one tensor after each capture, and frees another as soon as it may.
    #[test]
    fn a_tensor_lands_as_it_was_when_it_was_captured(
        turns in turns(),
        snapshots in prop_oneof![Just(0usize), Just(512), Just(1 << 16)],
        lengths in prop::collection::vec(1usize..700, 1..12),
        early in any::<u16>(),
    ) {
        let weights = Tensor::new(700);
        let activations: Vec<Tensor> = lengths.iter().map(|&n| Tensor::new(n)).collect();
        let gpu = capturer(Sizes { pinned: 1 << 16, snapshots }, turns);
        let host = &gpu.machine;
        let mut arrived = Vec::new();
        for (step, &length) in lengths.iter().enumerate() {
            let (of_weights, of_activation) = (vec![step as u8 + 1; length], vec![!(step as u8); length]);
            host.write(JOB, weights.address(), of_weights.clone());
            arrived.push((capture(&gpu, &weights, length, Order::Changing(JOB)).unwrap(), of_weights));
            let activation = &activations[step];
            host.write(JOB, activation.address(), of_activation.clone());
            let hold = Box::new(Hold { address: activation.address(), bytes: length });
            let arriving = capture_holding(&gpu, activation, length, Order::Made(JOB), hold).unwrap();
            arrived.push((arriving, of_activation));
            if early >> step & 1 == 1 {
                host.run_stream(if early & 1 == 1 { JOB } else { SIDE });
                gpu.reap();
            }
        }
        host.write(JOB, weights.address(), vec![0xee; 700]);
        prop_assert_eq!(host.waits.load(Ordering::SeqCst), 0, "a capture waited");
        for (arriving, expected) in &arrived {
            assert_holds(arriving, expected);
        }
        prop_assert!(host.run(), "the job's stream comes to its end");
        drop(arrived);
        gpu.reap();
        prop_assert!(gpu.is_idle());
    }

    /// Goal: whichever call of the driver fails, a capture is refused or says so when it is read;
    /// it never gives bytes that are not the tensor's, and the device is not used again.
    #[test]
    fn whatever_call_fails_no_wrong_bytes_come(sound in 0usize..16, turns in turns()) {
        let gpu = capturer(ROOMY, turns);
        let tensor = Tensor::new(64);
        gpu.machine.write(JOB, tensor.address(), vec![9; 64]);
        gpu.machine.sound_calls.store(sound, Ordering::SeqCst);
        let taken = capture(&gpu, &tensor, 64, Order::Changing(JOB));
        let read = taken.map(|arriving| arriving.bytes().map(<[u8]>::to_vec));
        match read {
            Ok(Ok(bytes)) => prop_assert_eq!(bytes, vec![9; 64]),
            Ok(Err(why)) => prop_assert!(why.starts_with("the GPU failed at "), "{}", why),
            Err(NotTaken::Failed(_)) => {}
            Err(full) => prop_assert!(false, "{}", full),
        }
        if gpu.broken() {
            gpu.machine.sound_calls.store(usize::MAX, Ordering::SeqCst);
            prop_assert!(capture(&gpu, &tensor, 64, Order::Settled).is_err());
        }
    }
}

/// The training thread is held up by nothing: not by the device, which here does nothing at all.
#[test]
fn captures_are_taken_while_the_device_stands_still_and_the_rest_is_refused_at_once() {
    let gpu = capturer(Sizes { pinned: 4096, snapshots: 4096 }, Turns::JobFirst);
    let tensor = Tensor::new(1000);
    let mut taken = Vec::new();
    let refused = loop {
        match capture(&gpu, &tensor, 1000, Order::Changing(JOB)) {
            Ok(arriving) => taken.push(arriving),
            Err(refused) => break refused,
        }
    };
    assert_eq!(taken.len(), 4);
    assert_eq!(refused.to_string(), "no room for 1000 bytes in the 4096 of pinned memory");
    assert_eq!(gpu.machine.waits.load(Ordering::SeqCst), 0);
}

#[test]
fn a_payload_that_is_dropped_unread_gives_its_memory_back_only_when_the_device_is_done() {
    let gpu = capturer(Sizes { pinned: 2048, snapshots: 0 }, Turns::SideFirst);
    let tensor = Tensor::new(1500);
    drop(capture(&gpu, &tensor, 1500, Order::Changing(JOB)).unwrap());
    let again = capture(&gpu, &tensor, 1500, Order::Changing(JOB));
    assert!(matches!(again, Err(NotTaken::Full { .. })), "the device still writes there");
    assert!(gpu.machine.run());
    let arriving = capture(&gpu, &tensor, 1500, Order::Changing(JOB)).unwrap();
    assert_holds(&arriving, &[0; 1500]);
    drop(arriving);
    assert!(gpu.is_idle());
}

/// What a ring of steps keeps for long is pinned memory alone.
#[test]
fn a_payload_that_is_kept_holds_nothing_on_the_device_once_it_has_landed() {
    let tensor = Tensor::new(64);
    let gpu = capturer(ROOMY, Turns::SideFirst);
    gpu.machine.write(JOB, tensor.address(), vec![3; 64]);
    let hold = Hold { address: tensor.address(), bytes: 64 };
    let arriving =
        capture_holding(&gpu, &tensor, 64, Order::Changing(JOB), Box::new(hold)).unwrap();
    assert!(gpu.machine.run());
    gpu.reap();
    assert_eq!(tensor.bytes[0], 0xdddd_dddd_dddd_dddd, "the tensor is let go of");
    assert_holds(&arriving, &[3; 64]);
}

#[test]
fn without_room_for_a_snapshot_the_jobs_stream_waits_and_its_thread_does_not() {
    let gpu = capturer(NO_SNAPSHOTS, Turns::JobFirst);
    let tensor = Tensor::new(64);
    gpu.machine.write(JOB, tensor.address(), vec![1; 64]);
    let arriving = capture(&gpu, &tensor, 64, Order::Changing(JOB)).unwrap();
    gpu.machine.write(JOB, tensor.address(), vec![2; 64]);
    gpu.machine.run_stream(JOB);
    assert_eq!(tensor.bytes[0], 0x0101_0101_0101_0101, "the job is not ahead of the copy");
    assert_holds(&arriving, &[1; 64]);
    assert!(gpu.machine.run());
    assert_eq!(tensor.bytes[0], 0x0202_0202_0202_0202);
}

/// Sums that the framework computed lie on the device too, and come the same way.
#[test]
fn the_frameworks_own_sums_come_along_whatever_box_is_asked_for() {
    let gpu = capturer(ROOMY, Turns::SideFirst);
    let tensor = Tensor::new(64);
    let theirs = Box::new([17u32, 23]);
    let (address, sums) = (tensor.address(), Sums::Framework(theirs.as_ptr() as u64));
    let (order, hold) = (Order::Settled, Box::new(()));
    // SAFETY: both outlive the streams.
    let arriving =
        unsafe { gpu.capture(Source { address, bytes: 64, order, sums, hold }) }.unwrap();
    assert!(arriving.framework_sums());
    let fingerprint = arriving.fingerprint(Dtype::F32, &IndexBox(vec![(0, 16)]));
    assert_eq!(fingerprint, Some(Fingerprint(17, 23)));
}

/// The capture of a whole box of bytes, checked as the tape checks it.
fn checked(payload: ArrivingBytes<Host>, located: Located) -> Capture {
    let shard = Shard::new(Dtype::U8, vec![100], place_of(64));
    let tensor = Name::new("w").unwrap();
    let key = TensorKey { tensor, microbatch: None, when: None };
    let capture = Capture { key, shard, located, payload: Box::new(payload) };
    capture.checked().expect("a sound capture")
}

#[test]
fn a_copy_that_goes_wrong_does_not_agree_with_what_the_device_held() {
    let gpu = capturer(ROOMY, Turns::SideFirst);
    let tensor = Tensor::new(64);
    let true_sums = Fingerprint::of(Dtype::U8, &place_of(64), &[0; 64]);
    for wrong in [false, true] {
        gpu.machine.wrong.store(wrong, Ordering::SeqCst);
        let before = gpu.machine.waits.load(Ordering::SeqCst);
        let arriving = capture(&gpu, &tensor, 64, Order::Made(JOB)).unwrap();
        let checked = checked(arriving, Located::ByBox);
        assert_eq!(gpu.machine.waits.load(Ordering::SeqCst), before, "the check waits for nothing");
        let bytes = checked.payload.bytes().unwrap();
        let measured = measure(&checked, bytes);
        assert_eq!(measured.fingerprint, true_sums);
        // The device counts in the job's box: that proves the copy, not the place.
        assert_eq!(measured.source, FingerprintSource::Recorder);
        assert_eq!(Fingerprint::of(Dtype::U8, &place_of(64), bytes) != true_sums, wrong);
    }
}

/// torch's own indices prove the place; sums of another box than they say are not taken.
#[test]
fn sums_stand_only_for_the_positions_that_they_were_computed_at() {
    let gpu = capturer(ROOMY, Turns::SideFirst);
    let tensor = Tensor::new(64);
    gpu.machine.write(JOB, tensor.address(), (0..64).collect());
    for (runs, source_box) in [((5, 69), (5, 69)), ((6, 70), (6, 70))] {
        let arriving = capture(&gpu, &tensor, 64, Order::Made(JOB)).unwrap();
        let checked = checked(arriving, Located::ByIndices(vec![vec![runs]]));
        let bytes = checked.payload.bytes().unwrap();
        let measured = measure(&checked, bytes);
        let expected = Fingerprint::of(Dtype::U8, &IndexBox(vec![source_box]), bytes);
        assert_eq!(measured.fingerprint, expected);
        assert_eq!(measured.source, FingerprintSource::Framework);
    }
}

#[test]
fn a_device_that_copies_a_known_pattern_wrong_is_not_used() {
    for turns in [Turns::SideFirst, Turns::JobFirst] {
        for sizes in [ROOMY, NO_SNAPSHOTS] {
            let gpu = capturer(sizes, turns);
            assert_eq!(probe(&gpu), Ok(()));
            gpu.reap();
            assert!(gpu.is_idle());
            gpu.machine.wrong.store(true, Ordering::SeqCst);
            let refused = probe(&gpu).unwrap_err().to_string();
            assert!(refused.ends_with("other bytes came over"), "{refused}");
        }
    }
}

/// Too many dimensions, nothing to read, an address between words: the recorder computes the
/// fingerprint of the copy, as for any other shard.
#[test]
fn what_the_kernel_cannot_read_is_fingerprinted_by_the_recorder() {
    let refused = |dtype, place: IndexBox, from| Arguments::new(dtype, &place, from, 8).is_none();
    assert!(refused(Dtype::F64, IndexBox(vec![(0, 1); 33]), 8));
    assert!(!refused(Dtype::F64, IndexBox(vec![(0, 1); 32]), 8));
    assert!(refused(Dtype::F32, IndexBox(vec![(0, 0)]), 8));
    assert!(refused(Dtype::F32, IndexBox(vec![(0, 4)]), 6));
    assert!(refused(Dtype::U8, IndexBox(vec![(0, u64::MAX), (0, 4)]), 8));
    let gpu = capturer(ROOMY, Turns::SideFirst);
    let tensor = Tensor::new(64);
    let sums = Sums::Device(Dtype::U8, IndexBox(vec![(0, 63)]));
    let (address, order, hold) = (tensor.address(), Order::Settled, Box::new(()));
    // SAFETY: the tensor outlives the streams.
    let arriving =
        unsafe { gpu.capture(Source { address, bytes: 64, order, sums, hold }) }.unwrap();
    assert_eq!(arriving.fingerprint(Dtype::U8, &IndexBox(vec![(0, 63)])), None);
    assert_eq!(arriving.bytes().unwrap(), [0; 64]);
}
