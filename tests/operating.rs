//! What an operator sees of a coordinator: status, numbers, health, versions.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use backtape::coordinator::channel::{BUILD, VERSION, connect};
use backtape::credentials::Access;
use backtape_dumper::Settings;
use backtape_proto as proto;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::support::ranks::{Process, coordinator_command, eventually, run_ranks, settings};

/// Records step 0 on two ranks of three: the third never comes.
fn two_of_three(address: &str, store: &Path) {
    let rank = |rank| Settings {
        run: Some("run".into()),
        coordinator: Some(address.into()),
        // Long enough for slow disks; all of it is waited for the rank that never comes.
        step_deadline: Duration::from_secs(6),
        ..settings(store, rank, 3)
    };
    let told = run_ranks(vec![rank(0), rank(1)]);
    assert!(told.iter().all(|summary| summary.steps_committed.is_empty()), "{told:?}");
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn status_says_who_joined_how_far_each_step_is_and_what_is_missing_and_why() {
    let store = tempfile::tempdir().unwrap();
    let server = Process::start(store.path(), "127.0.0.1:0", 3);
    two_of_three(&server.address, store.path());
    let ask = |run: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coordinator"));
        command.args(["status", "--coordinator", &server.address, "--run", run]);
        command.output().unwrap()
    };
    let told = String::from_utf8(ask("run").stdout).unwrap();
    assert!(told.contains("2 of 3 ranks joined (not yet: 2)"), "{told}");
    assert!(told.contains("0 committed, 1 open"), "{told}");
    assert!(told.contains("step 0 open: 2 of 3 ranks closed, 6 files, 6 shards, 72 B"), "{told}");
    assert!(told.contains("missing: rank 2 never joined"), "{told}");
    let unknown = ask("elsewhere");
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert!(!unknown.status.success() && said.contains("run elsewhere is not known"), "{said}");
}

#[test]
fn numbers_and_health_are_served_to_prometheus_and_to_probes() {
    let store = tempfile::tempdir().unwrap();
    let mut command = coordinator_command(store.path(), "127.0.0.1:0", 3);
    command.args(["--metrics", "127.0.0.1:0"]);
    let server = Process::from(command);
    let mut address = None;
    eventually("metrics are served", || {
        let log = server.log();
        let found = log.split("served on http://").nth(1);
        address = found.and_then(|rest| rest.lines().next()).map(str::to_string);
        address.is_some()
    });
    let address = address.unwrap();
    two_of_three(&server.address, store.path());
    let text = get(&address, "/metrics");
    for line in [
        "backtape_runs 1",
        "backtape_ranks 2",
        "backtape_steps_committed 0",
        "backtape_dumped_bytes 72",
        "backtape_calls_total{method=\"join\",code=\"Ok\"} 2",
        "backtape_calls_total{method=\"report_files\",code=\"Ok\"} 2",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let alive = get(&address, "/healthz");
    assert!(alive.starts_with("HTTP/1.1 200") && alive.contains(backtape::VERSION), "{alive}");
}

#[tokio::test]
async fn the_health_service_answers_and_every_answer_says_its_version() {
    let store = tempfile::tempdir().unwrap();
    let server = Process::start(store.path(), "127.0.0.1:0", 1);
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address));
    let channel = channel.unwrap().connect().await.unwrap();
    let service = "backtape.v1.Coordinator".to_string();
    let answer = HealthClient::new(channel).check(HealthCheckRequest { service }).await.unwrap();
    assert_eq!(answer.into_inner().status(), tonic_health::ServingStatus::Serving.into());
    let mut rpc = connect(&server.address, &Access::default()).unwrap();
    let request = proto::RunStatusRequest { run: "nobody".into() };
    let refused = rpc.run_status(request).await.unwrap_err();
    let version = refused.metadata().get(VERSION).unwrap().to_str().unwrap();
    assert_eq!(version, backtape::VERSION);
    let build = refused.metadata().get(BUILD).unwrap().to_str().unwrap();
    assert_eq!(build, backtape::BUILD);
}

/// A coordinator for one rank in a shell that sets limits first.
fn limited(store: &Path, limits: &str) -> Process {
    let own = coordinator_command(store, "127.0.0.1:0", 1);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits} && exec \"$@\""), "sh"]).arg(own.get_program());
    command.args(own.get_args()).env_remove("RUST_LOG").stderr(Stdio::piped());
    Process::from(command)
}

#[test]
fn a_coordinator_opens_as_many_files_as_it_may_and_says_where_that_is_too_few() {
    let store = tempfile::tempdir().unwrap();
    let server = limited(store.path(), "ulimit -S -n 256");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "{line}");
    let server = limited(store.path(), "ulimit -n 256");
    let said = server.log();
    assert!(said.contains("ulimit -n") && said.contains("256 files"), "{said}");
}

/// Goal: who takes every descriptor keeps nobody away for longer than that. Method: more
/// connections than files, until it is said; then they are gone.
#[test]
fn a_coordinator_without_a_descriptor_left_says_so_and_serves_again_once_there_are_some() {
    let store = tempfile::tempdir().unwrap();
    let server = limited(store.path(), "ulimit -n 64");
    let mut held: Vec<_> = (0..80).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    eventually("it says that files ran out", || server.log().contains("no connection can be"));
    let said = server.log().matches("no connection can be").count();
    assert!(said < 10, "{said} times: it tries without a pause");
    held.clear();
    let alone = Settings {
        run: Some("run".into()),
        coordinator: Some(server.address.clone()),
        ..settings(store.path(), 0, 1)
    };
    assert_eq!(run_ranks(vec![alone])[0].steps_committed, [0]);
}
