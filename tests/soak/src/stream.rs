//! `soak stream --mib 1024`: one file of a rank that has no part in the store, sent to a coordinator.
//!
//! ```text
//! plain         the messages alone: a coordinator's transport that counts the bytes, and the sending of a rank
//! mtls          the same, encrypted, with certificates on both sides
//! durable       a real coordinator: each shard hashed as it arrives, file and journal synced before the answer
//! mtls-durable  both
//! ```
//!
//! The file lies in the page cache, where a rank's spool is. With `--pipe` a round runs for each
//! line that comes in and answers `SECONDS`, so that peers can be measured in turns with it
//! (benches/peers/stream.py).

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use backtape::coordinator::channel::{Rpc, connect};
use backtape::coordinator::limits::MAX_MESSAGE_BYTES;
use backtape::coordinator::{sending, transport};
use backtape::credentials::{Access, Guard, issue};
use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::{FinishedFile, Moved, ShardWriter, layout};
use backtape_proto as proto;
use clap::Args;
use proto::coordinator_server::{Coordinator, CoordinatorServer};
use proto::upload_file_request::Part;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::served::{Served, join, member};

const RUN: &str = "stream";
/// Bytes of a shard.
const SHARD_BYTES: u64 = 16 << 20;

/// What is sent, and how often.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Size of the file
    #[arg(long, default_value_t = 1024)]
    mib: u64,
    /// Rounds of each way
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Run a round for each line of the input
    #[arg(long)]
    pipe: bool,
    /// Directory for store and spool; by default a temporary one
    #[arg(long)]
    dir: Option<PathBuf>,
}

const WAYS: [&str; 4] = ["plain", "mtls", "durable", "mtls-durable"];

/// Runs the rounds.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let yard = match &arguments.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    // As the thread of a recorder has it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut sides = runtime.block_on(Sides::start(yard.path(), arguments.mib))?;
    if arguments.pipe {
        for line in std::io::stdin().lock().lines() {
            println!("{}", runtime.block_on(sides.round(line?.trim()))?);
            std::io::stdout().flush()?;
        }
        return Ok(());
    }
    let mut found = vec![Vec::new(); WAYS.len()];
    for round in 0..=arguments.rounds.max(1) {
        for (way, seconds) in WAYS.iter().zip(&mut found) {
            let took = runtime.block_on(sides.round(way))?;
            // The first opens connections and warms everything.
            if round > 0 {
                seconds.push(took);
            }
        }
    }
    for (way, mut seconds) in WAYS.iter().zip(found) {
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let rate = (arguments.mib << 20) as f64 / 1e9 / median;
        println!(
            "stream: {way:<13} {} rounds of {} MiB, median {rate:.2} GB/s",
            seconds.len(),
            arguments.mib
        );
    }
    Ok(())
}

/// Where a file is sent to.
struct Side {
    rpc: Rpc,
    /// Ends with it.
    _coordinator: Option<Served>,
}

/// Every way, and the rank that sends.
struct Sides {
    sides: Vec<Side>,
    store: PathBuf,
    spool: PathBuf,
    shards: Vec<(ShardRecord, Vec<u8>)>,
    step: u64,
}

impl Sides {
    async fn start(yard: &Path, mib: u64) -> anyhow::Result<Sides> {
        let issued = issue(&yard.join("made"), &["127.0.0.1".into()], &[], 1)?;
        let access = Access::read(&issued.ranks[0], &Name::new(RUN)?)?;
        let folder = issued.coordinator.to_str().context("no UTF-8")?;
        let store = yard.join("store");
        let mut sides = Vec::new();
        for (guard, access) in [
            (Guard::default(), Access::default()),
            (Guard::read(&issued.coordinator)?, access.clone()),
        ] {
            let address = sink(&guard)?.to_string();
            sides.push(Side { rpc: connect(&address, &access)?, _coordinator: None });
        }
        for (at, options) in [&[][..], &["--credentials", folder]].into_iter().enumerate() {
            let served = Served::start(&store.join(WAYS[at + 2]), 1, options)?;
            let access = if at == 0 { Access::default() } else { access.clone() };
            let mut rpc = served.connections(1, &access)?.remove(0);
            rpc.join(join(RUN, 0, 1)).await?;
            sides.push(Side { rpc, _coordinator: Some(served) });
        }
        let shards = (0..mib << 20).step_by(SHARD_BYTES as usize).map(shard);
        let shards = shards.collect::<anyhow::Result<_>>()?;
        Ok(Sides { sides, store, spool: yard.join("spool"), shards, step: 0 })
    }

    /// Seconds of one upload, from the call to its answer.
    async fn round(&mut self, way: &str) -> anyhow::Result<f64> {
        let Some(at) = WAYS.iter().position(|&known| known == way) else {
            bail!("{way:?} is none of {WAYS:?}");
        };
        let file = self.write()?;
        let claim = proto::FileReport {
            name: file.record.name.to_string(),
            length: file.record.length,
            header_hash: file.record.header_hash.0.to_vec().into(),
        };
        let (member, step) = (Some(member(RUN, 0)), self.step);
        let claim = proto::ReportFileRequest { member, step, file: Some(claim) };
        let began = Instant::now();
        let (parts, reading) = sending::parts(claim, file.scratch(), &Moved::default());
        let (answer, read) = tokio::join!(self.sides[at].rpc.upload_file(parts), reading);
        let took = began.elapsed().as_secs_f64();
        read?;
        let shards = answer?.into_inner().shards;
        let wanted = if at < 2 { file.record.length } else { self.shards.len() as u64 };
        ensure!(shards == wanted, "{way}: {shards} came of {wanted}");
        if at >= 2 {
            let step = self.store.join(way).join(RUN).join(format!("step-{:08}", self.step));
            std::fs::remove_dir_all(step)?;
        }
        self.step += 1;
        Ok(took)
    }

    /// The file of a step, where a rank spools it.
    fn write(&self) -> anyhow::Result<FinishedFile> {
        let about = FileSelf::new(Name::new(RUN)?, Attempt(0), Step(self.step), Rank(0), 1);
        let name = layout::file_name(Rank(0), None);
        let mut writer = ShardWriter::spool(&self.spool, name, about)?;
        for (record, bytes) in &self.shards {
            writer.append(record.clone(), bytes)?;
        }
        Ok(writer.finish()?)
    }
}

fn shard(at: u64) -> anyhow::Result<(ShardRecord, Vec<u8>)> {
    let words = (0..SHARD_BYTES / 8).map(|i| (i + at).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let place = IndexBox::whole(&[SHARD_BYTES / 2]);
    let name = Name::new(format!("x{}", at / SHARD_BYTES))?;
    let record = ShardRecord {
        key: TensorKey { tensor: name, microbatch: None, when: None },
        fingerprint: Fingerprint::of(Dtype::Bf16, &place, &bytes),
        shard: Shard::new(Dtype::Bf16, place.extent(), place),
        rank: Rank(0),
        host: Name::new("node-0000")?,
        attempt: Attempt(0),
        mesh: Default::default(),
        hash: ContentHash::of(&bytes),
        length: SHARD_BYTES,
        fingerprint_source: FingerprintSource::Recorder,
        entry: String::new(),
    };
    Ok((record, bytes))
}

/// Serves a coordinator's transport from threads of its own; uploads are counted and dropped.
fn sink(guard: &Guard) -> anyhow::Result<SocketAddr> {
    let mut server = transport(guard.tls.as_ref())?;
    let (told, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> anyhow::Result<()> {
        tokio::runtime::Runtime::new()?.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            told.send(listener.local_addr()?)?;
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let service = CoordinatorServer::new(Sink).max_decoding_message_size(MAX_MESSAGE_BYTES);
            server.add_service(service).serve_with_incoming(incoming).await?;
            Ok(())
        })
    });
    Ok(address.recv()?)
}

struct Sink;

/// The service of which only uploads are answered.
macro_rules! uploads_only {
    ($($name:ident: $request:ident -> $answer:ident,)*) => {
        #[tonic::async_trait]
        impl Coordinator for Sink {
            async fn upload_file(
                &self,
                request: Request<Streaming<proto::UploadFileRequest>>,
            ) -> Result<Response<proto::ReportFileResponse>, Status> {
                let (mut parts, mut shards) = (request.into_inner(), 0);
                while let Some(part) = parts.message().await? {
                    if let Some(Part::Chunk(chunk)) = part.part {
                        shards += chunk.len() as u64;
                    }
                }
                Ok(Response::new(proto::ReportFileResponse { shards }))
            }
            $(async fn $name(
                &self,
                _: Request<proto::$request>,
            ) -> Result<Response<proto::$answer>, Status> {
                Err(Status::unimplemented("only uploads are taken here"))
            })*
        }
    };
}

uploads_only! {
    join: JoinRequest -> JoinResponse,
    report_file: ReportFileRequest -> ReportFileResponse,
    report_files: ReportFilesRequest -> ReportFilesResponse,
    close_step: CloseStepRequest -> CloseStepResponse,
    step_status: StepStatusRequest -> StepStatusResponse,
    run_status: RunStatusRequest -> RunStatusResponse,
    record_scalars: RecordScalarsRequest -> RecordScalarsResponse,
    heartbeat: HeartbeatRequest -> HeartbeatResponse,
    set_plan: SetPlanRequest -> SetPlanResponse,
    trigger: TriggerRequest -> TriggerResponse,
}
