//! The emulator against literal loops, closed cases, and the fast path.

mod literal;
mod sums;

use super::*;
use crate::kernels::fixture::{Fixture, SMALL_TILES, with_threads};
use crate::kernels::matrix::Cotangents;
use crate::kernels::policy::internal::Upstream;
use crate::kernels::policy::{self, DqParts, Order, Path, Policy, PolicyForward, Sum, Sums};
use crate::kernels::round::Precision;
use crate::kernels::tiles::{NoProgress, Tiles};

/// The results of a forward and a backward pass: forward, dq, and dk and dbias of all blocks.
type Walked = (PolicyForward, DqParts, Vec<f64>, Vec<f64>);

/// Runs a policy in the emulator, even if it is a fast one.
fn emulated(policy: &Policy, fixture: &Fixture, tiles: Tiles) -> Walked {
    let inputs = fixture.inputs();
    let forward_pass = forward(policy, &inputs, tiles, &NoProgress);
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let smooth = vec![0.0; g_lse.len()];
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
    let upstream = Upstream { lse: &forward_pass.lse, cotangents };
    let mut dk = vec![f64::NAN; fixture.vocab * fixture.depth];
    let mut dbias = vec![f64::NAN; fixture.vocab];
    let dq = backward(policy, &inputs, upstream, tiles, &NoProgress, &mut |block| {
        let rows = block.rows.clone();
        dk[rows.start * fixture.depth..rows.end * fixture.depth].copy_from_slice(block.dk);
        dbias[rows].copy_from_slice(block.dbias);
    });
    (forward_pass, dq, dk, dbias)
}

fn every_sum(path: Path, precision: Precision, order: Order) -> Policy {
    Policy { path, sums: Sums::all(Sum { precision, order }), ..Policy::fused_f32() }
}

#[test]
fn the_thread_count_changes_no_bit() {
    let fixture = Fixture::new(70, 40, 290, 281);
    let tiles = Tiles { tokens: 30, vocab: 140 };
    let paths = [Path::Plain, Path::Fused, Path::Chunked];
    let orders = [Order::Kahan, Order::Pairwise, Order::Blocked(7)];
    for (path, order) in paths.into_iter().zip(orders) {
        let policy = every_sum(path, Precision::Bf16, order);
        let on_one_thread = with_threads(1, || emulated(&policy, &fixture, tiles));
        assert!(
            on_one_thread == with_threads(3, || emulated(&policy, &fixture, tiles)),
            "{policy:?}"
        );
    }
}

/// The plain path sums over whole rows and columns: there tiles only bound the memory.
#[test]
fn tiles_change_no_bit_of_the_plain_path() {
    let fixture = Fixture::usual();
    for order in [Order::Sequential, Order::Blocked(5), Order::Pairwise, Order::Kahan] {
        let policy = every_sum(Path::Plain, Precision::Bf16, order);
        let whole = emulated(&policy, &fixture, Tiles { tokens: 100, vocab: 100 });
        assert!(whole == emulated(&policy, &fixture, SMALL_TILES), "{order:?}");
        let chunked = Policy { path: Path::Chunked, ..policy };
        let wide = Tiles { vocab: 100, ..SMALL_TILES };
        assert!(
            emulated(&chunked, &fixture, wide) == emulated(&chunked, &fixture, SMALL_TILES),
            "chunks take the whole vocabulary"
        );
    }
}

/// Sums run side by side for 512 columns at a time: 1100 are three such blocks.
#[test]
fn a_wide_tile_has_the_bits_of_narrow_ones() {
    let fixture = Fixture::new(5, 3, 1100, 1100);
    let policy = every_sum(Path::Plain, Precision::F32, Order::Sequential);
    let whole = emulated(&policy, &fixture, Tiles { tokens: 5, vocab: 1100 });
    assert!(whole == emulated(&policy, &fixture, Tiles { tokens: 5, vocab: 100 }));
}

/// With q = 1 and g = -1 every chunk of one token adds -1: bf16 stops at -256.
#[test]
fn a_bf16_accumulator_over_chunks_or_tiles_swamps_at_256() {
    let mut fixture = Fixture::new(300, 1, 20, 20);
    (fixture.labels, fixture.q) = (vec![3; 300], vec![1.0; 300]);
    fixture.g_lse.fill(0.0);
    fixture.g_label.fill(-1.0);
    let small = Tiles { tokens: 1, vocab: 20 };
    let chunked = Policy { chunk_add: Precision::Bf16, ..Policy::chunked_f32() };
    let kahan = Sum { precision: Precision::F32, order: Order::Kahan };
    let slow = Policy { sums: Sums { dk: kahan, ..Policy::chunked_f32().sums }, ..chunked };
    for policy in [chunked, slow] {
        let (_, _, dk, dbias) = emulated(&policy, &fixture, small);
        assert_eq!((dk[3], dbias[3]), (-256.0, -256.0));
        let all = Tiles { tokens: 300, ..small };
        assert_eq!(emulated(&policy, &fixture, all).2[3], -300.0, "one chunk adds in f32");
    }
    let inputs = fixture.inputs();
    let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
    let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &g_lse };
    policy::backward(&chunked, &inputs, &g_lse, &cotangents, small, &NoProgress, &mut |block| {
        assert_eq!((block.dk[3], block.dbias[3]), (-256.0, -256.0), "on the fast path");
    });
    // The fused path adds its tiles' softmax parts: g_lse = 1 and a single column, p = 1.
    let mut fixture = Fixture { k: vec![0.0], vocab: 1, valid: 1, ..fixture };
    (fixture.labels, fixture.g_lse) = (vec![0; 300], vec![1.0; 300]);
    fixture.g_label.fill(0.0);
    let fused = Policy { tile_add: Precision::Bf16, ..Policy::fused_f32() };
    assert_eq!(emulated(&fused, &fixture, small).2[0], 256.0);
}

#[test]
fn descending_walks_start_at_the_other_end() {
    use crate::kernels::policy::Walk;
    // Sums of 2^24, 1, 1 in f32: 2^24 forwards, 2^24 + 2 backwards.
    let mut fixture = Fixture { k: vec![0.0], ..Fixture::new(3, 1, 1, 1) };
    fixture.q = vec![16_777_216.0, 1.0, 1.0];
    (fixture.g_lse, fixture.labels) = (vec![1.0; 3], vec![0; 3]);
    fixture.g_label.fill(0.0);
    let small = Tiles { tokens: 1, vocab: 1 };
    for path in [Path::Fused, Path::Chunked] {
        let ascending = Policy { path, ..Policy::fused_f32() };
        let descending = Policy { chunk_order: Walk::Descending, ..ascending };
        assert_eq!(emulated(&ascending, &fixture, small).2, [16_777_216.0]);
        assert_eq!(emulated(&descending, &fixture, small).2, [16_777_218.0]);
    }
    let mut fixture = Fixture { q: vec![0.0], ..Fixture::new(1, 1, 3, 3) };
    fixture.k = vec![16_777_216.0, 1.0, 1.0];
    (fixture.g_lse, fixture.labels) = (vec![3.0], vec![0]);
    fixture.g_label.fill(0.0);
    let ascending = Policy { dlogits: Precision::Bf16, ..Policy::fused_f32() };
    let descending = Policy { tile_order: Walk::Descending, ..ascending };
    assert_eq!(emulated(&ascending, &fixture, small).1.dq, [16_777_216.0]);
    assert_eq!(emulated(&descending, &fixture, small).1.dq, [16_777_218.0]);
}
