//! `soak contract`: what a coordinator must refuse, said to a real one over gRPC by a peer
//! that an honest recorder would never be. One sentence of the promise for each case.

use anyhow::{Context, bail, ensure};
use backtape::coordinator::channel::Rpc;
use backtape::hash::{ContentHash, TrustHash};
use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::shard::ShardRecord;
use backtape::store::header::{self, FileSelf};
use backtape_proto as proto;
use clap::Args;
use proto::upload_file_request::Part;
use serde_json::json;
use tonic::{Code, Status};

use crate::job::{RUN, file_name, step_directory};
use crate::processes::{Process, Yard, memory};

/// Ranks of the run.
const WORLD: u32 = 2;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ContractArguments {
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<std::path::PathBuf>,
    /// A fault that is seeded into the coordinator, to see whether it is found
    #[arg(long, default_value = "")]
    pub seeded: String,
}

type Case = fn(&Yard, &mut Rpc) -> anyhow::Result<()>;

const CASES: &[(&str, Case)] = &[
    ("the same shard with other bytes is a conflict, the first is kept", conflict),
    ("a superseded attempt takes nothing more", fenced),
    ("bytes that changed on the way are refused, and nothing is kept", changed),
    ("a box outside its tensor is refused", outside),
    ("of two that send one file the first is kept, whoever ends last", raced),
    ("a file that lies there is not replaced by one that is sent", lying),
];

/// Runs every case, each against a coordinator of its own.
pub(crate) fn run(arguments: &ContractArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    for (sentence, case) in CASES {
        let mut yard = Yard::new(&memory())?;
        let _coordinator = start(&mut yard, &arguments.seeded)?;
        let mut rpc = yard.rpc()?;
        case(&yard, &mut rpc).with_context(|| format!("contract: FAILED: {sentence}"))?;
    }
    println!("contract: {} cases hold", CASES.len());
    Ok(())
}

fn start(yard: &mut Yard, seeded: &str) -> anyhow::Result<Process> {
    let faults = match seeded {
        "" => String::new(),
        name => format!("seeded:{name}"),
    };
    let mut process = yard.spawn_coordinator(WORLD, &faults)?;
    yard.until_it_answers(&mut process)?;
    Ok(process)
}

/// A file of rank 0 and microbatch 0 whose one shard has this box and these bytes.
struct Sent {
    report: proto::ReportFileRequest,
    bytes: Vec<u8>,
}

fn sent(attempt: u32, incarnation: u64, place: (u64, u64), values: &[u8]) -> anyhow::Result<Sent> {
    let run = Name::new(RUN)?;
    let mut about = FileSelf::new(run, Attempt(attempt), Step(0), Rank(0), WORLD);
    let record: ShardRecord = serde_json::from_value(json!({
        "tensor": "t0", "microbatch": 0, "when": null, "role": null, "dtype": "u8",
        "shape": [8], "box": [[place.0, place.1]], "rank": 0, "host": "h", "attempt": attempt,
        "mesh": {}, "placement": {}, "partial": null, "replica": 0,
        "hash": ContentHash::of(values).to_string(), "length": values.len(),
        "fingerprint": [0, 0], "fingerprint_source": "recorder", "entry": "t0",
    }))?;
    about.shards.push(record);
    let header = header::encode(&about, 0)?;
    let file = proto::FileReport {
        name: file_name(0, 0),
        length: (header.len() + values.len()) as u64,
        header_hash: TrustHash::of(&header).0.to_vec().into(),
    };
    let member = proto::Member { run: RUN.into(), attempt, rank: 0, incarnation };
    let report = proto::ReportFileRequest { member: Some(member), step: 0, file: Some(file) };
    Ok(Sent { report, bytes: [header, values.to_vec()].concat() })
}

fn join(yard: &Yard, rpc: &mut Rpc, incarnation: u64) -> anyhow::Result<u32> {
    let request = proto::JoinRequest {
        run: RUN.into(),
        rank: 0,
        world_size: WORLD,
        incarnation,
        host: "h".into(),
        format_version: backtape::FORMAT_VERSION,
        ..Default::default()
    };
    Ok(yard.block_on(rpc.join(request))?.into_inner().attempt)
}

fn upload(yard: &Yard, rpc: &mut Rpc, file: &Sent) -> Result<u64, Status> {
    let parts = [Part::Header(file.report.clone()), Part::Chunk(file.bytes.clone().into())];
    let parts = parts.map(|part| proto::UploadFileRequest { part: Some(part) });
    let call = rpc.upload_file(tokio_stream::iter(parts));
    yard.block_on(call).map(|answer| answer.into_inner().shards)
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code) -> anyhow::Result<()> {
    match answer {
        Err(status) if status.code() == code => Ok(()),
        other => bail!("it should have been refused as {code:?}: {other:?}"),
    }
}

/// The last bytes of rank 0's file in the store.
fn kept(yard: &Yard, count: usize) -> anyhow::Result<Vec<u8>> {
    let bytes = std::fs::read(step_directory(&yard.store, 0, 0).join(file_name(0, 0)))?;
    Ok(bytes[bytes.len() - count..].to_vec())
}

fn conflict(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let attempt = join(yard, rpc, 7)?;
    let first = sent(attempt, 7, (0, 4), b"1234")?;
    for _ in 0..2 {
        ensure!(upload(yard, rpc, &first)? == 1, "sent again it is as acknowledged as before");
    }
    let second = sent(attempt, 7, (0, 4), b"9999")?;
    refused(upload(yard, rpc, &second), Code::AlreadyExists)?;
    ensure!(kept(yard, 4)? == b"1234", "the first is not what is kept");
    Ok(())
}

fn fenced(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let (old, new) = (join(yard, rpc, 7)?, join(yard, rpc, 8)?);
    ensure!((old, new) == (0, 1), "a restarted rank is of the next attempt, not of {new}");
    refused(upload(yard, rpc, &sent(old, 7, (0, 4), b"1234")?), Code::FailedPrecondition)?;
    ensure!(upload(yard, rpc, &sent(new, 8, (0, 4), b"1234")?)? == 1, "the new one is taken");
    Ok(())
}

fn changed(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let attempt = join(yard, rpc, 7)?;
    let mut file = sent(attempt, 7, (0, 4), b"1234")?;
    let last = file.bytes.len() - 1;
    file.bytes[last] ^= 1;
    refused(upload(yard, rpc, &file), Code::DataLoss)?;
    let left = std::fs::read_dir(step_directory(&yard.store, 0, 0))?.count();
    ensure!(left == 0, "{left} files are left of it");
    Ok(())
}

fn outside(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let attempt = join(yard, rpc, 7)?;
    // Of the right length, and with the right hash: only the place is a lie.
    refused(upload(yard, rpc, &sent(attempt, 7, (6, 10), b"1234")?), Code::DataLoss)
}

/// The rank wrote the file itself, and then sends another by that name.
fn lying(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let attempt = join(yard, rpc, 7)?;
    let (first, second) = (sent(attempt, 7, (0, 4), b"1234")?, sent(attempt, 7, (0, 4), b"9999")?);
    let directory = step_directory(&yard.store, 0, 0);
    std::fs::create_dir_all(&directory)?;
    std::fs::write(directory.join(file_name(0, 0)), &first.bytes)?;
    let told = upload(yard, rpc, &second);
    ensure!(kept(yard, 4)? == b"1234", "what was there first is not what is kept");
    ensure!(told.is_err(), "what was sent was acknowledged and is not what is kept");
    Ok(())
}

fn raced(yard: &Yard, rpc: &mut Rpc) -> anyhow::Result<()> {
    let attempt = join(yard, rpc, 7)?;
    let (first, second) = (sent(attempt, 7, (0, 4), b"1234")?, sent(attempt, 7, (0, 4), b"9999")?);
    let mut late = rpc.clone();
    yard.block_on(async {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let late = tokio::spawn(async move { late.upload_file(stream).await });
        let send = |part| sender.send(proto::UploadFileRequest { part: Some(part) });
        send(Part::Header(second.report.clone())).await?;
        send(Part::Chunk(second.bytes[..1].to_vec().into())).await?;
        // It was admitted, before the first is known, once its scratch file is there.
        let directory = step_directory(&yard.store, 0, 0);
        let begun = || std::fs::read_dir(&directory).is_ok_and(|mut left| left.next().is_some());
        for _ in 0..10_000 {
            if begun() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        ensure!(begun(), "the second was never admitted");
        let parts = [Part::Header(first.report), Part::Chunk(first.bytes.into())];
        let parts = parts.map(|part| proto::UploadFileRequest { part: Some(part) });
        rpc.upload_file(tokio_stream::iter(parts)).await?;
        // Its call has ended where what is sent again takes the place of the first try.
        let _ = send(Part::Chunk(second.bytes[1..].to_vec().into())).await;
        drop(sender);
        match late.await? {
            Err(_) => Ok(()),
            Ok(answer) => bail!("both were acknowledged: {answer:?}"),
        }
    })?;
    ensure!(kept(yard, 4)? == b"1234", "the first was acknowledged and is not what is kept");
    Ok(())
}
