//! The replay of a step's algebra, as bytes a second and beside a copy of the same bytes in the
//! same run. `make bench-algebra` records the step (benches/algebra.py) and names it in DUMP.
//!
//! The proofs are no part of it: every shard is hashed once before anything is measured. The peak
//! of the process's own memory is that of judging; pages of mapped files are not counted in it.
//!
//! Beside it stands the floor: a loop that computes the step in f64 from the same bytes and adds up
//! squared differences, without bounds, without a search for what is wrong, and by one rule alone.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::path::Path;
use std::time::Instant;

use backtape_replayer::algebra::{self, Stage};
use backtape_replayer::dump::{Selection, StepDump, open};
use rayon::prelude::*;

#[path = "algebra/floor.rs"]
mod floor;

/// Bytes that one thread copies at a time.
const PIECE: usize = 1 << 20;

fn main() {
    // `cargo test` runs benches too; there is nothing to test here.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let Ok(path) = std::env::var("DUMP") else {
        println!("DUMP names no dump of a step: `make bench-algebra` records one");
        return;
    };
    let asked = std::env::var("REPEATS").ok().and_then(|text| text.parse().ok());
    let repeats: usize = asked.unwrap_or(5);
    let dump = open(Path::new(&path), &Selection::default()).unwrap();
    let bytes = algebra::bytes(&dump);
    assert!(judge(&dump), "the step that was recorded agrees");
    let before = anonymous_mib();
    let (mut judging, mut copying, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    let mut target = vec![0u8; shards(&dump).map(<[u8]>::len).max().unwrap_or(0)];
    for _ in 0..=repeats {
        copying.push(seconds(|| copy(&dump, &mut target)));
        judging.push(seconds(|| assert!(judge(&dump))));
        bare.push(seconds(|| assert!(floor::squared(&dump) < 1e-9)));
    }
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    // The first round warms pages and caches.
    let [judging, copying, bare] = [judging, copying, bare].map(|of| median(&of[1..]));
    println!(
        "step's algebra, {} threads: {:.2} GB of f32, {repeats} rounds",
        rayon::current_num_threads(),
        bytes as f64 / 1e9
    );
    println!(
        "  {:.2} GB/s judged, {:.2} GB/s copied by memcpy in the same run: ratio {:.3} (wanted 0.5)",
        rate(judging),
        rate(copying),
        copying / judging
    );
    println!("  {:.2} GB/s by the bare loop of this step: ratio {:.3}", rate(bare), copying / bare);
    println!("  {:.0} MiB of its own memory before, {:.0} MiB after", before, anonymous_mib());
}

/// Whether every stage of the step was judged and agrees.
fn judge(dump: &StepDump) -> bool {
    let report = algebra::judge(dump, &|_| None, &|_| {}).unwrap();
    let judged: Vec<Stage> = report.stages.iter().map(|stage| stage.stage).collect();
    let is_whole = [Stage::Accumulate, Stage::State, Stage::Update];
    let agreed = report.stages.iter().all(|stage| stage.diverged == 0 && stage.unchecked == 0);
    agreed && is_whole.iter().all(|stage| judged.contains(stage))
}

fn shards(dump: &StepDump) -> impl Iterator<Item = &[u8]> {
    let shards = dump.tensors().values().flat_map(|info| &info.shards);
    shards.filter_map(|shard| dump.intact_bytes(shard))
}

/// Copies every shard's bytes.
fn copy(dump: &StepDump, target: &mut [u8]) {
    for shard in shards(dump) {
        let pieces = target[..shard.len()].par_chunks_mut(PIECE).zip(shard.par_chunks(PIECE));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
    }
}

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Memory that is not a file's, in MiB.
fn anonymous_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
