//! Two dumps of 1.2 GB in all, compared tensor by tensor (max abs, max rel, cosine,
//! ULP): `replay --against` beside numpy and mindstudio-probe on the same bytes.
//!
//! Prints ratios of runs interleaved on one machine, never times. Ours is the whole
//! command: start, reading both manifests, hashing and fingerprinting every byte of
//! both dumps (the two proofs, which the peers do not have), comparing, writing the
//! JSON report. A second ratio leaves the proofs out, by subtracting
//! `replay verify` of both dumps, measured in the same rounds. The peers read the
//! same files through numpy's memmap. The page cache is warm: every side runs once
//! before anything is measured.
//!
//! `make bench-compare`; REPEATS (at least 7), NUMPY_PYTHON, MSPROBE_PYTHON.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::Manifest;
use backtape::placement::Mesh;
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::layout::{AttemptDir, file_name};
use backtape::store::{ShardWriter, durable};

/// Dtype, how many tensors, rows; 4096 columns: 0.64 GB a dump.
const TENSORS: [(Dtype, u64, u64); 2] = [(Dtype::Bf16, 10, 4096), (Dtype::F32, 5, 4096)];
const COLUMNS: u64 = 4096;

fn main() {
    // `cargo test` runs benches too; there is nothing to test here.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let asked = std::env::var("REPEATS").ok().and_then(|text| text.parse().ok());
    let repeats: usize = asked.unwrap_or(7);
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("bench-compare");
    let _ = std::fs::remove_dir_all(&dir);
    let (one, two) = (dump(&dir.join("one"), 0), dump(&dir.join("two"), 1));
    let mut peers: Vec<Peer> = Vec::new();
    for (name, variable) in [("numpy", "NUMPY_PYTHON"), ("mindstudio-probe", "MSPROBE_PYTHON")] {
        match Peer::start(name, variable, &one, &two) {
            Ok(peer) => peers.push(peer),
            Err(why) => println!("{name}: left out: {why}"),
        }
    }
    let paths = (dir.join("one"), dir.join("two"));
    let whole = || replay(&["--dump", path(&paths.0), "--against", path(&paths.1), "--quiet"]);
    let proofs = || {
        replay(&["verify", "--dump", path(&paths.0)])
            + replay(&["verify", "--dump", path(&paths.1)])
    };
    whole();
    // The first run warms the page cache; a peer that fails in it is left out.
    peers.retain_mut(|peer| match peer.run() {
        Ok(_) => true,
        Err(why) => {
            println!("{}: left out: {why}", peer.name);
            false
        }
    });
    let mut ours = (Vec::new(), Vec::new());
    let mut theirs: Vec<Vec<f64>> = vec![Vec::new(); peers.len()];
    for _ in 0..repeats {
        ours.0.push(whole());
        ours.1.push(proofs());
        for (peer, times) in peers.iter_mut().zip(&mut theirs) {
            times.push(peer.run().unwrap());
        }
    }
    println!(
        "two dumps of {} MB in all, {repeats} interleaved rounds, medians; page cache warm",
        2 * TENSORS.iter().map(|(d, n, rows)| d.width() as u64 * n * rows * COLUMNS).sum::<u64>()
            / 1_000_000
    );
    println!(
        "threads: ours {}, the peers as they come",
        std::thread::available_parallelism().unwrap()
    );
    let (total, verify) = (median(&mut ours.0), median(&mut ours.1));
    println!("share of the two proofs in ours: {:.0} %", 100.0 * verify / total);
    for (peer, times) in peers.iter().zip(&mut theirs) {
        let theirs = median(times);
        println!(
            "{}: {:.1}x with hashing and fingerprints included, {:.1}x without (target {})",
            peer.name,
            theirs / total,
            theirs / (total - verify).max(1e-3),
            if peer.name == "numpy" { "2x" } else { "20x" },
        );
    }
    let _ = std::fs::remove_dir_all(&dir);
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Seconds of one run of the command. Tensors differ, so it may not say "agreed".
fn replay(arguments: &[&str]) -> f64 {
    let start = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_replay"));
    let status = command.args(arguments).args(["--json", "/dev/null"]).stdout(Stdio::null());
    let status = status.status().unwrap();
    assert!(matches!(status.code(), Some(0 | 3)), "replay {arguments:?}: {status}");
    start.elapsed().as_secs_f64()
}

/// A python process that compares the same bytes when told to.
struct Peer {
    name: &'static str,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start(
        name: &'static str,
        variable: &str,
        one: &[String],
        two: &[String],
    ) -> Result<Peer, String> {
        let python = std::env::var(variable).map_err(|_| format!("{variable} is not set"))?;
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../python/benches/compare_peer.py");
        let mut command = Command::new(&python);
        command.args([script, name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{python}: {error}"))?;
        let mut to = child.stdin.take().unwrap();
        let mut from = BufReader::new(child.stdout.take().unwrap());
        for (a, b) in one.iter().zip(two) {
            writeln!(to, "{a} {b}").map_err(|error| error.to_string())?;
        }
        writeln!(to, "ready").map_err(|error| error.to_string())?;
        let mut line = String::new();
        from.read_line(&mut line).map_err(|error| error.to_string())?;
        match line.trim() {
            "ready" => Ok(Peer { name, child, to, from }),
            why => Err(format!("it does not start: {why}")),
        }
    }

    /// Seconds of one run; an error is what kept the peer from it.
    fn run(&mut self) -> Result<f64, String> {
        writeln!(self.to, "go").map_err(|error| error.to_string())?;
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(|error| error.to_string())?;
        line.trim().parse().map_err(|_| line.trim().to_string())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a dump and says where each tensor lies: file, offset, dtype, elements.
fn dump(directory: &Path, side: u64) -> Vec<String> {
    let name = |text: &str| Name::new(text).unwrap();
    let (attempt, step, rank) = (Attempt(0), Step(0), Rank(0));
    let step_dir = AttemptDir::of(directory, attempt).step(step);
    let about = FileSelf::new(name("bench"), attempt, step, rank, 1);
    let file = file_name(rank, None);
    let mut writer = ShardWriter::create(&step_dir.path, file.clone(), about).unwrap();
    let (mut sizes, mut number) = (Vec::new(), 0);
    for (dtype, count, rows) in TENSORS {
        for _ in 0..count {
            let bytes = values(dtype, rows * COLUMNS, number, side);
            let place = IndexBox::whole(&[rows, COLUMNS]);
            let record = ShardRecord {
                key: TensorKey {
                    tensor: name(&format!("layers.{number}.out")),
                    microbatch: None,
                    when: None,
                },
                rank,
                host: name("bench"),
                attempt,
                mesh: BTreeMap::new(),
                hash: ContentHash::of(&bytes),
                length: bytes.len() as u64,
                fingerprint: Fingerprint::of(dtype, &place, &bytes),
                fingerprint_source: FingerprintSource::Framework,
                shard: Shard::new(dtype, vec![rows, COLUMNS], place),
                entry: String::new(),
            };
            writer.append(record, &bytes).unwrap();
            sizes.push((dtype, bytes.len() as u64));
            number += 1;
        }
    }
    let record = writer.finish().unwrap().publish().unwrap().0;
    let mut offset = record.length - sizes.iter().map(|(_, n)| n).sum::<u64>();
    let manifest = Manifest {
        format_version: backtape::FORMAT_VERSION,
        version: backtape::VERSION.into(),
        run: name("bench"),
        attempt,
        step,
        world_size: 1,
        mesh: Mesh::default(),
        head: None,
        files: vec![record],
        omissions: Vec::new(),
        selections: Vec::new(),
        trigger: None,
    };
    durable::create(&step_dir.manifest(), &manifest.to_bytes()).unwrap();
    let path = step_dir.path.join(file.as_str());
    let mut placed = |(dtype, length): &(Dtype, u64)| {
        let elements = length / dtype.width() as u64;
        let line = format!("{} {offset} {} {elements}", path.display(), dtype.numpy_name());
        offset += length;
        line
    };
    sizes.iter().map(&mut placed).collect()
}

/// The other side differs in about a third of the elements, by a few units.
fn values(dtype: Dtype, count: u64, tensor: u64, side: u64) -> Vec<u8> {
    let mut state = tensor + 1;
    let mut bytes = Vec::with_capacity(count as usize * dtype.width());
    for _ in 0..count {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * 3.0;
        let nudge =
            if side == 1 && state >> 20 & 3 == 0 { (state >> 24 & 3) as u32 + 1 } else { 0 };
        match dtype {
            Dtype::Bf16 => {
                let bits = half::bf16::from_f32(x).to_bits() + nudge as u16;
                bytes.extend(bits.to_le_bytes());
            }
            _ => bytes.extend((x.to_bits() + nudge).to_le_bytes()),
        }
    }
    bytes
}
