//! R12: a dump of every format there was is read, and what is newer is refused by name, on disk
//! and on the wire.
//!
//! Method: golden dumps are checked in, one for each format, and never written again; a copy of
//! the newest is made to claim the next format, file by file; ranks of other formats join a
//! coordinator.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use backtape::FORMAT_VERSION;
use backtape::coordinator::channel::{Rpc, VERSION, connect};
use backtape::coordinator::{Config, Coordinator};
use backtape::credentials::Access;
use backtape::hash::ContentHash;
use backtape::manifest::{Manifest, RunRecord};
use backtape::store::header::encode;
use backtape::store::{ShardFile, ShardFileError};
use backtape_proto as proto;
use backtape_replayer::assemble::assemble;
use backtape_replayer::dump::{self, OpenError, Selection};
use backtape_replayer::verify::verify;
use clap::Args;
use tokio::net::TcpListener;

use crate::bitrot::{memory, record};

/// Each golden dump, and what its tensors hash to.
const GOLDEN: [(&str, [(&str, &str); 4]); 1] = [(
    "format-1",
    [
        ("bias", "4f46dc52209aecd454dbaea4e6cadfd5"),
        ("dq microbatch 0", "4bf4a34c55e36f3fb3254c7f9c8a7522"),
        ("k", "fcb224c3e1d3b5b6042f523f090c0183"),
        ("q microbatch 0", "fcb224c3e1d3b5b6042f523f090c0183"),
    ],
)];
/// The golden dump's own name for its run.
const RUN: &str = "format-1";
const STEP: &str = "step-00000000";

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Write the golden dump of today's format into this folder instead
    #[arg(long)]
    write: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Some(folder) = &arguments.write {
        return record(&folder.join(format!("format-{FORMAT_VERSION}")));
    }
    campaign().map(|line| println!("{line}"))
}

fn campaign() -> Result<String> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden");
    for (name, tensors) in &GOLDEN {
        read(&golden.join(name), tensors).with_context(|| format!("versions: {name}"))?;
    }
    let newest = golden.join(format!("format-{FORMAT_VERSION}"));
    ensure!(newest.is_dir(), "versions: no golden dump of format {FORMAT_VERSION}");
    newer_on_disk(&newest)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let joins = runtime.block_on(other_formats_on_the_wire())?;
    runtime.block_on(coordinator_goes_on(&newest))?;
    Ok(format!(
        "versions: {} golden dump read byte for byte; a newer manifest, shard file, run.json and journal and {joins} joins of other formats refused by name",
        GOLDEN.len()
    ))
}

fn at() -> Selection {
    Selection { step: Some(0), ..Selection::default() }
}

/// Today's code proves a golden dump and gives the bytes that were recorded.
fn read(run: &Path, tensors: &[(&str, &str)]) -> Result<()> {
    let dump = dump::open(run, &at())?;
    let proof = verify(&dump, &|_| {});
    ensure!(dump.committed() && proof.findings.is_empty(), "{:?}", proof.findings);
    let mut held = Vec::new();
    for key in dump.tensors().keys() {
        held.push((key.to_string(), ContentHash::of(assemble(&dump, key)?.bytes()).to_string()));
    }
    let wanted = tensors.iter().map(|(key, hash)| (key.to_string(), hash.to_string()));
    ensure!(held == wanted.collect::<Vec<_>>(), "it holds {held:?}");
    Ok(())
}

/// A copy of a run in memory, to be changed.
fn copy(run: &Path) -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = memory()?;
    let to = folder.path().join(RUN);
    for below in ["", STEP] {
        std::fs::create_dir_all(to.join(below))?;
        for entry in std::fs::read_dir(run.join(below))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                std::fs::copy(entry.path(), to.join(below).join(entry.file_name()))?;
            }
        }
    }
    Ok((folder, to))
}

/// Each file that says its format, claiming the next one.
fn newer_on_disk(golden: &Path) -> Result<()> {
    let next = FORMAT_VERSION + 1;
    let (_folder, run) = copy(golden)?;
    let path = run.join(STEP).join("manifest.json");
    let bytes = std::fs::read(&path)?;
    let mut manifest = Manifest::from_bytes(&bytes)?;
    manifest.format_version = next;
    std::fs::write(&path, manifest.to_bytes())?;
    match dump::open(&run, &at()) {
        Err(OpenError::Newer { found, .. }) if found == u64::from(next) => {}
        Err(error) => bail!("versions: a newer manifest is refused with other words: {error}"),
        Ok(_) => bail!("versions: a newer manifest is read"),
    }
    std::fs::write(&path, bytes)?;

    let path = run.join(STEP).join("rank-00000.safetensors");
    let mut about = ShardFile::open(&path)?.about().clone();
    about.format_version = next;
    std::fs::write(&path, encode(&about, 0)?)?;
    match ShardFile::open(&path) {
        Err(ShardFileError::Newer { found, .. }) if found == u64::from(next) => {}
        other => bail!("versions: a newer shard file: {:?}", other.err()),
    }

    let path = run.join("run.json");
    let mut own = RunRecord::from_bytes(&std::fs::read(&path)?)?.record;
    own.format_version = next;
    let refused = RunRecord::from_bytes(&own.to_bytes()).err().map(|error| error.to_string());
    ensure!(
        refused.as_deref().is_some_and(|said| said.contains(&format!("format version {next}"))),
        "versions: a newer run.json: {refused:?}"
    );
    Ok(())
}

/// A coordinator on a store, for as long as the future runs.
async fn served<T>(store: &Path, ask: impl AsyncFnOnce(Rpc) -> Result<T>) -> Result<T> {
    let coordinator = Coordinator::open(&Config::new(store, 2))?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let rpc = connect(&listener.local_addr()?.to_string(), &Access::default())?;
    let serving = tokio::spawn(coordinator.serve(listener, std::future::pending()));
    let told = ask(rpc).await;
    serving.abort();
    told
}

fn join(format_version: u32) -> proto::JoinRequest {
    proto::JoinRequest {
        run: RUN.into(),
        rank: 0,
        world_size: 2,
        incarnation: 1,
        host: "host-a".into(),
        format_version,
        ..Default::default()
    }
}

/// Older and newer ranks are refused in one sentence, and learn who refused them.
async fn other_formats_on_the_wire() -> Result<usize> {
    let store = memory()?;
    let others = [0, FORMAT_VERSION + 1, FORMAT_VERSION + 40, u32::MAX];
    served(store.path(), async |mut rpc| {
        for other in others {
            let Err(status) = rpc.join(join(other)).await else {
                bail!("versions: a rank of format {other} may join")
            };
            let said = status.message();
            let clear = said.contains(&format!("format version {other}"))
                && said.contains(&format!("reads {FORMAT_VERSION}"))
                && said.contains("install the same backtape")
                && !said.contains('\n');
            ensure!(clear, "versions: format {other} is told {said:?}");
            let version = status.metadata().get(VERSION).and_then(|value| value.to_str().ok());
            ensure!(version == Some(backtape::VERSION), "versions: answered by {version:?}");
        }
        rpc.join(join(FORMAT_VERSION)).await.context("versions: today's own format")?;
        Ok(others.len())
    })
    .await
}

/// A coordinator loads the golden journal, and refuses to go on with a newer one.
async fn coordinator_goes_on(golden: &Path) -> Result<()> {
    let (folder, run) = copy(golden)?;
    let committed = served(folder.path(), async |mut rpc| {
        let ask = proto::StepStatusRequest { run: RUN.into(), ..Default::default() };
        Ok(rpc.step_status(ask).await?.into_inner().committed)
    });
    ensure!(committed.await?, "versions: the golden journal has forgotten its step");
    let path = run.join("journal.jsonl");
    let text = std::fs::read_to_string(&path)?;
    let (mut chain, mut newer) = (ContentHash::of(b"backtape journal 1"), String::new());
    for line in text.lines() {
        let next = FORMAT_VERSION + 1;
        let (old, new) =
            (format!("\"format_version\":{FORMAT_VERSION}"), format!("\"format_version\":{next}"));
        let json = line.get(33..).context("a line has a checksum")?.replace(&old, &new);
        chain = ContentHash::of(format!("{chain}{json}").as_bytes());
        newer += &format!("{chain} {json}\n");
    }
    std::fs::write(&path, newer)?;
    let said = served(folder.path(), async |mut rpc| {
        Ok(rpc.join(join(FORMAT_VERSION)).await.err().map(|status| status.message().to_string()))
    });
    let said = said.await?.unwrap_or_default();
    let next = format!("format version {}", FORMAT_VERSION + 1);
    ensure!(said.contains(&next), "versions: a newer journal is refused with {said:?}");
    let proof = verify(&dump::open(&run, &at())?, &|_| {});
    let named = proof.findings.iter().any(|found| found.sentence.contains(&next));
    ensure!(named, "versions: verify says of a newer journal {:?}", proof.findings);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn golden_dumps_are_read_and_what_is_newer_is_refused_by_name() {
        println!("{}", super::campaign().unwrap());
    }
}
