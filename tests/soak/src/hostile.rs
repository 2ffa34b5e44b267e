//! `soak hostile --trials 500`: peers that lie, and an honest rank among them.
//!
//! Each trial is one attack on a real coordinator: a name that would leave its directory, a
//! file that is not what it is said to be, a link where a directory was, HTTP/2 that no client
//! sends, a caller without certificate or token. Afterwards nothing is outside the store,
//! nothing in the store of the guarded coordinator, and its memory has kept below a bound.
//! Then an honest rank reports with and without a flood beside it, and beside one of another
//! process: what the flood itself takes of this machine is no fault of the coordinator's. It runs
//! at the lowest priority.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Instant;

use anyhow::{Context, ensure};
use backtape::coordinator::channel::Rpc;
use backtape::credentials::{Access, Token, issue};
use backtape::identity::Name;
use backtape_proto as proto;
use clap::Args;
use proto::upload_file_request::Part;

use crate::frames::{FLOODS, send};
use crate::memory::peak_mib;
use crate::random::Random;
use crate::served::{Phase, Served, join, member};
use crate::written;

const RUN: &str = "hostile";
const RANKS: u32 = 4;
/// What the coordinator may have held at most.
const MEMORY_MIB: f64 = 512.0;
/// Reports of the honest rank with and without a flood.
const REPORTS: u32 = 300;
/// How often both are measured.
const REPEATS: u64 = 7;
/// Shards of the largest file that is sent: its header has just less than is accepted.
const LARGEST: u32 = 25_000;
/// Files that a rank may send at a time.
const AT_A_TIME: u32 = 2;
/// Frames of one flood.
const FRAMES: u64 = 2000;

/// How long, and from which seed.
#[derive(Args)]
pub(crate) struct Arguments {
    #[arg(long, default_value_t = 500)]
    trials: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave the honest rank's latencies out: on a machine that does other work they say nothing
    #[arg(long)]
    attacks_only: bool,
    /// Of the ways to flood, this one alone
    #[arg(long)]
    only: Option<u8>,
    /// How much longer the honest rank's calls may take beside a flood than beside the control
    #[arg(long, default_value_t = 2.0)]
    wanted: f64,
    /// Flood this address for ever, and nothing else
    #[arg(long, hide = true)]
    flood: Option<String>,
}

/// Attacks, then measures the honest rank.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(address) = &arguments.flood {
        let mut random = Random::of(arguments.seed, 0);
        loop {
            let drawn = random.below(FLOODS.len() as u64) as usize;
            let flood = FLOODS[arguments.only.map_or(drawn, usize::from) % FLOODS.len()];
            send(address, flood, FRAMES as u32, &mut random);
        }
    }
    tokio::runtime::Runtime::new()?.block_on(async {
        attacks(arguments.trials, arguments.seed).await?;
        match arguments.attacks_only {
            true => Ok(()),
            false => beside_a_flood(arguments.only, arguments.wanted).await,
        }
    })
}

async fn attacks(trials: u64, seed: u64) -> anyhow::Result<()> {
    let outer = tempfile::tempdir()?;
    let (store, guarded_store) = (outer.path().join("store"), outer.path().join("guarded"));
    std::fs::write(outer.path().join("canary"), "not a shard")?;
    std::fs::create_dir(outer.path().join("elsewhere"))?;
    std::fs::create_dir(&store)?;
    let issued = issue(&outer.path().join("made"), &["127.0.0.1".into()], &[], 1)?;
    let folder = issued.coordinator.to_str().context("no UTF-8")?;
    let open = Served::start(&store, RANKS, &[])?;
    let guarded = Served::start(&guarded_store, RANKS, &["--credentials", folder])?;
    let mut rpc = open.connections(1, &Access::default())?.remove(0);
    for rank in 0..RANKS {
        rpc.join(join(RUN, rank, RANKS)).await?;
    }
    let access = Access::read(&issued.ranks[0], &Name::new(RUN)?)?;
    let wrong = Access { token: Some(Token::draw()?), ..access.clone() };
    let bare = Access { tls: access.tls, token: None };
    let strangers = [Access::default(), wrong, bare];
    let before = listing(outer.path(), &[&store])?;
    let mut refused = 0;
    for trial in 0..trials {
        let mut random = Random::of(seed, trial);
        let kind = random.below(5);
        let again = || format!("hostile: seed {seed}, trial {trial}");
        let tried = match kind {
            0 => names(&rpc, &mut random).await,
            1 => lies(&rpc, &store, trial, &mut random).await,
            2 => links(&rpc, &store, trial, &mut random).await,
            3 => {
                let at = if random.below(2) == 0 { &open.address } else { &guarded.address };
                let flood = FLOODS[random.below(FLOODS.len() as u64) as usize];
                send(at, flood, random.below(FRAMES) as u32, &mut random);
                Ok(())
            }
            _ => strange(&guarded, &strangers[random.below(3) as usize], &mut random).await,
        };
        tried.with_context(again)?;
        refused += u64::from(kind != 3);
        let status = rpc.run_status(proto::RunStatusRequest { run: RUN.into() }).await;
        ensure!(status.is_ok(), "{}: the coordinator does not answer: {status:?}", again());
        let now = listing(outer.path(), &[&store])?;
        ensure!(now == before, "{}: outside the store: {:?}", again(), now.difference(&before));
    }
    hoard(&open, &store).await?;
    let peak = peak_mib(open.pid())?.max(peak_mib(guarded.pid())?);
    println!(
        "hostile: seed {seed}, {trials} attacks, {refused} refused in words, 0 written outside the \
         store, 0 done for strangers; the coordinators' peak is {peak:.0} MiB"
    );
    ensure!(peak <= MEMORY_MIB, "hostile: more memory than {MEMORY_MIB} MiB");
    ensure!(!open.log().contains("panicked"), "hostile: {}", open.log());
    Ok(())
}

/// Everything below a directory but what is in `without`.
fn listing(directory: &Path, without: &[&Path]) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if without.contains(&path.as_path()) {
            continue;
        }
        if path.symlink_metadata()?.is_dir() {
            found.append(&mut listing(&path, without)?);
        }
        found.insert(path);
    }
    Ok(found)
}

fn refused<T>(answer: Result<T, tonic::Status>) -> anyhow::Result<()> {
    ensure!(answer.is_err(), "an attack was answered with yes");
    Ok(())
}

/// Names that would leave their directory or their line.
async fn names(rpc: &Rpc, random: &mut Random) -> anyhow::Result<()> {
    let all = [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        ".hidden",
        "a\\b",
        "\u{2024}\u{2024}/x",
        "\u{202e}exe",
        "ünïcode",
        "con trol\u{7f}",
        "~root",
        "%2e%2e",
    ];
    let long = "x".repeat(64 << 10);
    let at = random.below(all.len() as u64 + 1) as usize;
    let name = all.get(at).copied().unwrap_or(&long).to_string();
    let mut rpc = rpc.clone();
    let own = Some(member(RUN, 0));
    let file = proto::FileReport { name: name.clone(), length: 9, header_hash: vec![0; 32].into() };
    match random.below(6) {
        0 => refused(rpc.join(join(&name, 0, RANKS)).await),
        1 => {
            let other = proto::JoinRequest { host: name, ..join("another", 0, RANKS) };
            refused(rpc.join(other).await)
        }
        2 => {
            let request = proto::ReportFileRequest { member: own, step: 0, file: Some(file) };
            refused(rpc.report_file(request).await)
        }
        3 => {
            let header = proto::ReportFileRequest { member: own, step: 0, file: Some(file) };
            refused(rpc.upload_file(parts(header, &[])).await)
        }
        4 => {
            let lines = "{\"step\":0}\n".into();
            let request = proto::RecordScalarsRequest { member: own, host: name, first: 0, lines };
            refused(rpc.record_scalars(request).await)
        }
        _ => refused(rpc.close_step(crate::served::close(&name, 0, 0, 0)).await),
    }
}

fn parts(
    header: proto::ReportFileRequest,
    bytes: &[u8],
) -> tokio_stream::Iter<std::vec::IntoIter<proto::UploadFileRequest>> {
    let part = |part| proto::UploadFileRequest { part: Some(part) };
    let chunks = bytes.chunks(1 << 20).map(|chunk| part(Part::Chunk(chunk.to_vec().into())));
    let all: Vec<_> = std::iter::once(part(Part::Header(header))).chain(chunks).collect();
    tokio_stream::iter(all)
}

/// A file that is not what it is said to be: lengths, offsets, dtypes, hashes.
async fn lies(rpc: &Rpc, store: &Path, trial: u64, random: &mut Random) -> anyhow::Result<()> {
    let step = 1 + trial;
    let whole = written::files(&store.join(RUN), (step, 0, RANKS), 1, 2)?.remove(0);
    let path = store.join(RUN).join(format!("step-{step:08}")).join(&whole.name);
    let mut bytes = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    let header = 64 << 10;
    let mut claim = whole;
    let kind = random.below(6);
    match kind {
        0 => claim.length = random.next() >> random.below(64),
        1 => bytes[..8].copy_from_slice(&random.next().to_le_bytes()),
        2 => bytes.truncate(random.below(bytes.len() as u64) as usize),
        3 => {
            let at = header + random.below((bytes.len() - header) as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        4 => {
            replace(&mut bytes, b"\"F32\"", [&b"\"F99\""[..], b"\"F64\""][random.below(2) as usize])
        }
        _ => replace(&mut bytes, b"\"data_offsets\":[0,", b"\"data_offsets\":[9,"),
    }
    if kind != 2 && bytes.len() >= header {
        claim.header_hash = backtape::hash::TrustHash::of(&bytes[..header]).0.to_vec().into();
    }
    let lying = kind != 0 || claim.length != bytes.len() as u64;
    let request =
        proto::ReportFileRequest { member: Some(member(RUN, 0)), step, file: Some(claim) };
    if lying {
        refused(rpc.clone().upload_file(parts(request, &bytes)).await)?;
        ensure!(!path.exists(), "{} was kept", path.display());
    }
    Ok(())
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    if let Some(at) = bytes.windows(from.len()).position(|window| window == from) {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
}

/// A link where the coordinator expects a directory or a file, to a place outside the store.
async fn links(rpc: &Rpc, store: &Path, trial: u64, random: &mut Random) -> anyhow::Result<()> {
    let step = 1_000_000 + trial;
    let directory = store.join(RUN).join(format!("step-{step:08}"));
    let claim = written::files(&store.join(RUN), (step, 1, RANKS), 1, 1)?.remove(0);
    let path = directory.join(&claim.name);
    let bytes = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    let outside = store.with_file_name("elsewhere");
    let whole = random.below(2) == 0;
    if whole {
        std::fs::remove_dir(&directory)?;
        std::os::unix::fs::symlink(&outside, &directory)?;
    } else {
        std::os::unix::fs::symlink(store.with_file_name("canary"), &path)?;
    }
    let request =
        proto::ReportFileRequest { member: Some(member(RUN, 1)), step, file: Some(claim) };
    let mut rpc = rpc.clone();
    refused(rpc.report_file(request.clone()).await)?;
    refused(rpc.upload_file(parts(request, &bytes)).await)?;
    std::fs::remove_file(if whole { &directory } else { &path })?;
    Ok(())
}

/// Every rank sends as many files at a time as it may, each with the largest header: nothing that
/// is let through takes more memory at once.
async fn hoard(served: &Served, store: &Path) -> anyhow::Result<()> {
    let before = peak_mib(served.pid())?;
    let mut calls = tokio::task::JoinSet::new();
    for rank in 0..RANKS {
        let claims = written::files(&store.join(RUN), (0, rank, RANKS), AT_A_TIME, LARGEST)?;
        for claim in claims {
            let path = store.join(RUN).join("step-00000000").join(&claim.name);
            let bytes = std::fs::read(&path)?;
            std::fs::remove_file(&path)?;
            let member = Some(member(RUN, rank));
            let request = proto::ReportFileRequest { member, step: 0, file: Some(claim) };
            let mut rpc = served.connections(1, &Access::default())?.remove(0);
            let sent = parts(request, &bytes);
            calls.spawn(async move { rpc.upload_file(sent).await });
        }
    }
    let mut shards = 0;
    while let Some(answered) = calls.join_next().await {
        shards += answered??.into_inner().shards;
    }
    let wanted = u64::from(RANKS * AT_A_TIME * LARGEST);
    ensure!(shards == wanted, "hostile: {shards} of {wanted} shards were taken");
    let peak = peak_mib(served.pid())?;
    println!(
        "hostile: {} files of {LARGEST} shards at a time: the coordinator's peak went from \
         {before:.0} to {peak:.0} MiB",
        RANKS * AT_A_TIME
    );
    Ok(())
}

/// A caller without certificate or token of the guarded coordinator.
async fn strange(served: &Served, access: &Access, random: &mut Random) -> anyhow::Result<()> {
    let mut rpc = served.connections(1, access)?.remove(0);
    match random.below(4) {
        0 => refused(rpc.join(join(RUN, 0, RANKS)).await),
        1 => refused(rpc.run_status(proto::RunStatusRequest { run: RUN.into() }).await),
        2 => refused(rpc.close_step(crate::served::close(RUN, 0, 0, 0)).await),
        _ => refused(
            rpc.set_plan(proto::SetPlanRequest { run: RUN.into(), ..Default::default() }).await,
        ),
    }
}

/// The honest rank's reports: alone, beside a flood of somebody else, and beside one of its own
/// coordinator, in turn. The second is the control: those who flood burn this machine's
/// processors, whoever they flood; on a host of their own they would not.
async fn beside_a_flood(only: Option<u8>, wanted: f64) -> anyhow::Result<()> {
    let (store, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let served = Served::start(store.path(), RANKS, &[])?;
    let idle = Served::start(other.path(), RANKS, &[])?;
    let mut rpc = served.connections(1, &Access::default())?.remove(0);
    rpc.join(join(RUN, 0, RANKS)).await?;
    let pinned = pin(&served)?;
    let run = store.path().join(RUN);
    reports(&rpc, &run, 0).await?; // warms everything
    let mut all: [Vec<Phase>; 3] = Default::default();
    for repeat in 0..REPEATS {
        for (at, flooded) in [None, Some(&idle), Some(&served)].into_iter().enumerate() {
            let flood =
                flooded.map(|served| flooding(&served.address, only, pinned)).transpose()?;
            all[at].push(reports(&rpc, &run, 1 + repeat * 3 + at as u64).await?);
            drop(flood);
        }
    }
    let peak = peak_mib(served.pid())?;
    let names = ["alone", "beside a flood of another coordinator", "beside a flood of its own"];
    let mut medians = Vec::new();
    for (name, phases) in names.iter().zip(&mut all) {
        phases.sort_by_key(|phase| phase.quantile(0.99));
        let median = &phases[phases.len() / 2];
        medians.push(median.quantile(0.99).as_secs_f64());
        println!("hostile: the honest rank {name}, median of {REPEATS}: {median}");
    }
    let (of_alone, of_control) = (medians[2] / medians[0], medians[2] / medians[1]);
    println!(
        "hostile: p99 beside a flood over alone {of_alone:.2}, over the control {of_control:.2} \
         (wanted {wanted} at most); peak {peak:.0} MiB"
    );
    ensure!(peak <= MEMORY_MIB, "hostile: more memory than {MEMORY_MIB} MiB");
    ensure!(of_alone.min(of_control) <= wanted, "hostile: the honest rank suffers");
    Ok(())
}

async fn reports(rpc: &Rpc, run: &Path, step: u64) -> anyhow::Result<Phase> {
    let files = written::files(run, (step, 0, RANKS), REPORTS, 1)?;
    let (mut rpc, began, mut latencies) = (rpc.clone(), Instant::now(), Vec::new());
    for file in files {
        let request =
            proto::ReportFileRequest { member: Some(member(RUN, 0)), step, file: Some(file) };
        let sent = Instant::now();
        rpc.report_file(request).await?;
        latencies.push(sent.elapsed());
    }
    std::fs::remove_dir_all(run.join(format!("step-{step:08}")))?;
    Ok(Phase::of(began.elapsed(), latencies))
}

/// Gives the coordinator and the honest rank the first processor for themselves, so that those
/// who flood are as good as on another host; false, and said, where that cannot be.
fn pin(served: &Served) -> anyhow::Result<bool> {
    let several = std::thread::available_parallelism()?.get() > 1;
    for pid in [served.pid(), std::process::id()] {
        let pid = pid.to_string();
        let pinned = Command::new("taskset").args(["-acp", "0", &pid]).output();
        if !several || !pinned.is_ok_and(|output| output.status.success()) {
            println!(
                "hostile: THE FLOOD IS NOT KEPT FROM THE HONEST RANK'S PROCESSOR: taskset (util-linux) \
                 and two processors are needed"
            );
            return Ok(false);
        }
    }
    Ok(true)
}

/// Processes that flood an address, killed when they are dropped.
struct Flooding(Vec<Child>);

fn flooding(address: &str, only: Option<u8>, pinned: bool) -> anyhow::Result<Flooding> {
    let one = |seed: u32| {
        let mut command = Command::new("nice");
        command.args(["-n", "19"]);
        if pinned {
            command.args(["taskset", "-c", "1-127"]);
        }
        command.arg(std::env::current_exe()?);
        command.args(["hostile", "--flood", address, "--seed", &seed.to_string()]);
        command.args(only.map(|kind| format!("--only={kind}")));
        Ok(command.spawn()?)
    };
    Ok(Flooding((0..4).map(one).collect::<anyhow::Result<_>>()?))
}

impl Drop for Flooding {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
