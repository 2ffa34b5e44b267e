//! The coordinator as a process and as a peer on the wire: what it accepts,
//! what it refuses, and what it says when it cannot start.

use std::path::{Path, PathBuf};

use backtape::coordinator::{Config, Coordinator};
use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::{FileRecord, Manifest};
use backtape::shard::{FingerprintSource, Shard, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::{ShardWriter, layout};
use backtape_proto as proto;
use proto::coordinator_client::CoordinatorClient;
use tonic::Code;
use tonic::transport::Channel;

use crate::support::ranks::{Process, coordinator_command, eventually};

type Client = CoordinatorClient<Channel>;

/// A coordinator on a runtime of this test's own, and a client of it.
async fn serve(store: &Path, world_size: u32) -> (Client, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let coordinator = Coordinator::open(&Config::new(store, world_size)).unwrap();
    let serving = tokio::spawn(async move {
        coordinator.serve(listener, std::future::pending()).await.unwrap();
    });
    let client = Client::connect(format!("http://{address}")).await.unwrap();
    (client, serving)
}

fn join(rank: u32, incarnation: u64) -> proto::JoinRequest {
    proto::JoinRequest {
        run: "run".into(),
        rank,
        world_size: 2,
        incarnation,
        host: "node-0".into(),
        format_version: backtape::FORMAT_VERSION,
        ..Default::default()
    }
}

fn member(rank: u32, incarnation: u64) -> Option<proto::Member> {
    Some(proto::Member { run: "run".into(), attempt: 0, rank, incarnation })
}

fn report(rank: u32, incarnation: u64, file: &FileRecord) -> proto::ReportFileRequest {
    proto::ReportFileRequest {
        member: member(rank, incarnation),
        step: 0,
        file: Some(proto::FileReport {
            name: file.name.to_string(),
            length: file.length,
            header_hash: file.header_hash.0.to_vec().into(),
        }),
    }
}

fn close(rank: u32, incarnation: u64, files: u32) -> proto::CloseStepRequest {
    proto::CloseStepRequest { member: member(rank, incarnation), files, ..Default::default() }
}

/// Writes rank 0's file of microbatch 0 below `directory` with these values.
fn write_file(directory: &Path, values: &[u8; 4]) -> (FileRecord, PathBuf) {
    let (rank, attempt, step) = (Rank(0), Attempt(0), Step(0));
    let run = Name::new("run").unwrap();
    let name = layout::file_name(rank, Some(Microbatch(0)));
    let about = FileSelf::new(run, attempt, step, rank, 2);
    let mut writer = ShardWriter::create(directory, name.clone(), about).unwrap();
    let place = IndexBox(vec![(0, 1)]);
    let record = ShardRecord {
        key: TensorKey {
            tensor: Name::new("q").unwrap(),
            microbatch: Some(Microbatch(0)),
            when: None,
        },
        fingerprint: Fingerprint::of(Dtype::F32, &place, values),
        shard: Shard::new(Dtype::F32, vec![1], place),
        rank,
        host: Name::new("node-0").unwrap(),
        attempt,
        mesh: Default::default(),
        hash: ContentHash::of(values),
        length: 4,
        fingerprint_source: FingerprintSource::Recorder,
        entry: String::new(),
    };
    writer.append(record, values).unwrap();
    let (record, _) = writer.finish().unwrap().publish().unwrap();
    (record, directory.join(name.as_str()))
}

fn parts(header: proto::ReportFileRequest, bytes: &[u8]) -> Vec<proto::UploadFileRequest> {
    use proto::upload_file_request::Part;
    let chunks = bytes.chunks(1000).map(|chunk| Part::Chunk(chunk.to_vec().into()));
    let parts = std::iter::once(Part::Header(header)).chain(chunks);
    parts.map(|part| proto::UploadFileRequest { part: Some(part) }).collect()
}

#[tokio::test]
async fn the_same_report_again_is_fine_and_another_hash_is_a_conflict() {
    let store = tempfile::tempdir().unwrap();
    let (mut client, _serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    assert_eq!(client.join(join(0, 7)).await.unwrap().into_inner(), joined);
    let step = Path::new(&joined.directory).join("step-00000000");
    let (file, path) = write_file(&step, &[1, 2, 3, 4]);
    for _ in 0..2 {
        let answer = client.report_file(report(0, 7, &file)).await.unwrap();
        assert_eq!(answer.into_inner().shards, 1);
    }
    std::fs::remove_file(&path).unwrap();
    let (other, _) = write_file(&step, &[9, 9, 9, 9]);
    let refused = client.report_file(report(0, 7, &other)).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.message().contains("the first is kept"), "{refused}");
    client.close_step(close(0, 7, 1)).await.unwrap();
    client.close_step(close(0, 7, 1)).await.unwrap();
    let refused = client.close_step(close(0, 7, 2)).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
}

#[tokio::test]
async fn a_process_that_did_not_join_and_a_launch_that_was_superseded_report_nothing() {
    let store = tempfile::tempdir().unwrap();
    let (mut client, _serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    let (file, _) = write_file(&Path::new(&joined.directory).join("step-00000000"), &[0; 4]);
    let refused = client.report_file(report(0, 8, &file)).await.unwrap_err();
    assert!(refused.message().contains("join first"), "{refused}");
    let restarted = client.join(join(0, 8)).await.unwrap().into_inner();
    assert_eq!(restarted.attempt, 1);
    let refused = client.report_file(report(0, 7, &file)).await.unwrap_err();
    assert!(refused.message().contains("superseded by attempt 1"), "{refused}");
}

#[tokio::test]
async fn a_file_that_is_absent_a_link_or_not_what_was_said_is_refused() {
    let (store, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut client, _serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    let step = Path::new(&joined.directory).join("step-00000000");
    let (file, target) = write_file(outside.path(), &[0; 4]);
    let absent = client.report_file(report(0, 7, &file)).await.unwrap_err();
    assert_eq!(absent.code(), Code::NotFound);
    std::fs::create_dir_all(&step).unwrap();
    let path = step.join(file.name.as_str());
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let link = client.report_file(report(0, 7, &file)).await.unwrap_err();
    assert!(link.message().contains("symbolic link"), "{link}");
    std::fs::remove_file(&path).unwrap();
    let bytes = std::fs::read(&target).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let short = client.report_file(report(0, 7, &file)).await.unwrap_err();
    assert!(short.message().contains("truncated"), "{short}");
    let mut climbing = report(0, 7, &file);
    climbing.file.as_mut().unwrap().name = "../journal.jsonl".into();
    let refused = client.report_file(climbing).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_byte_that_changes_on_the_way_is_found_and_nothing_is_kept_of_the_file() {
    let (store, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut client, _serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    let (file, path) = write_file(outside.path(), &[1, 2, 3, 4]);
    let good = std::fs::read(path).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    let step = Path::new(&joined.directory).join("step-00000000");
    let header = || report(0, 7, &file);
    for (bytes, why) in [(&bad[..], "other bytes"), (&good[..100], "truncated")] {
        let sent = tokio_stream::iter(parts(header(), bytes));
        let refused = client.upload_file(sent).await.unwrap_err();
        assert_eq!(refused.code(), Code::DataLoss);
        assert!(refused.message().contains(why), "{refused}");
        let left = std::fs::read_dir(&step).unwrap().count();
        assert_eq!(left, 0, "a refused upload leaves nothing");
    }
    for _ in 0..2 {
        let sent = tokio_stream::iter(parts(header(), &good));
        assert_eq!(client.upload_file(sent).await.unwrap().into_inner().shards, 1);
    }
    assert_eq!(std::fs::read(step.join(file.name.as_str())).unwrap(), good);
}

#[tokio::test]
async fn a_step_is_committed_by_the_last_rank_and_a_restart_writes_the_same_manifest() {
    let store = tempfile::tempdir().unwrap();
    let (mut client, serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    client.join(join(1, 8)).await.unwrap();
    let step = Path::new(&joined.directory).join("step-00000000");
    let (file, _) = write_file(&step, &[1, 2, 3, 4]);
    client.report_file(report(0, 7, &file)).await.unwrap();
    let first = client.close_step(close(0, 7, 1)).await.unwrap().into_inner();
    let second = client.close_step(close(1, 8, 0)).await.unwrap().into_inner();
    assert_eq!((first.committed, second.committed), (false, true));
    let path = step.join("manifest.json");
    let manifest = std::fs::read(&path).unwrap();
    serving.abort();
    std::fs::remove_file(&path).unwrap();
    // As after a crash between the journal's fsync and the manifest.
    let (mut client, _serving) = serve(store.path(), 2).await;
    assert_eq!(std::fs::read(&path).unwrap(), manifest);
    let status =
        proto::StepStatusRequest { run: "run".into(), attempt: 0, step: 0, ..Default::default() };
    let status = client.step_status(status).await.unwrap().into_inner();
    assert_eq!((status.committed, status.shards, status.bytes), (true, 1, 4));
}

/// Goal: what a rank says it left out moves no terminal's cursor and looks like no path. Method:
/// hostile names and reasons over the wire, and the manifest that is committed of them.
#[tokio::test]
async fn what_is_omitted_is_held_to_the_rule_for_names_and_its_reason_is_one_line() {
    let store = tempfile::tempdir().unwrap();
    let (mut client, _serving) = serve(store.path(), 2).await;
    let joined = client.join(join(0, 7)).await.unwrap().into_inner();
    client.join(join(1, 8)).await.unwrap();
    let hostile = ["../x", "a\0b", "\u{1b}[2Jq", "a\nb", "", ".", "layers.0/w", "*", "dk"];
    let omission = |tensor: &&str| proto::Omission {
        tensor: tensor.to_string(),
        microbatch: None,
        reason: "full\u{1b}[31m\nVERDICT: agreed\0".into(),
    };
    let omissions = hostile.iter().map(omission).collect();
    let closing = proto::CloseStepRequest { omissions, ..close(0, 7, 0) };
    client.close_step(closing).await.unwrap();
    client.close_step(close(1, 8, 0)).await.unwrap();
    let path = Path::new(&joined.directory).join("step-00000000/manifest.json");
    let manifest = Manifest::from_bytes(&std::fs::read(&path).unwrap()).unwrap();
    let named: Vec<&str> = manifest.omissions.iter().map(|one| one.tensor.as_str()).collect();
    let escaped = ["=2E.=2Fx", "a=00b", "=1B[2Jq", "a=0Ab", "=", "=2E", "layers.0=2Fw", "*", "dk"];
    assert_eq!(named, escaped);
    for one in &manifest.omissions {
        assert!(one.tensor == "*" || Name::new(one.tensor.as_str()).is_ok(), "{}", one.tensor);
        assert!(!one.reason.contains(char::is_control), "{:?}", one.reason);
    }
}

#[test]
fn an_overdue_step_is_named_in_the_log_and_in_its_status() {
    let store = tempfile::tempdir().unwrap();
    let mut command = coordinator_command(store.path(), "127.0.0.1:0", 2);
    let coordinator = Process::from({
        command.args(["--step-deadline", "0"]);
        command
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let address = format!("http://{}", coordinator.address);
        let mut client = Client::connect(address).await.unwrap();
        client.join(join(0, 7)).await.unwrap();
        client.close_step(close(0, 7, 0)).await.unwrap();
    });
    eventually("the log names the missing rank", || {
        coordinator.log().contains("partial after 0 s: rank 1 never joined")
    });
}

fn fails(mut command: std::process::Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.trim_end().lines().count(), 1, "one clear sentence: {said}");
    said
}

#[test]
fn a_coordinator_that_cannot_start_says_why_in_one_line_and_exits_with_2() {
    let store = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let said = fails(coordinator_command(store.path(), &address, 1));
    assert!(said.contains(&format!("{address} cannot be listened on")), "{said}");
    std::fs::write(store.path().join("file"), b"").unwrap();
    let said = fails(coordinator_command(&store.path().join("file/store"), "127.0.0.1:0", 1));
    assert!(said.contains("file/store cannot be used as the store"), "{said}");
    let said = fails(coordinator_command(store.path(), "0.0.0.0:0", 1));
    assert!(said.contains("unencrypted") && said.contains("--insecure"), "{said}");
    let said = fails(coordinator_command(store.path(), "127.0.0.1:0", 0));
    assert!(said.contains("world size of 0"), "{said}");
}
