//! Who may speak to a coordinator: certificates, tokens, and what an outsider can do.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use backtape::coordinator::channel::{Rpc, VERSION, connect};
use backtape::credentials::{Access, Issued, Token, issue};
use backtape::identity::Name;
use backtape_dumper::{Recorder, Settings, TransportChoice};
use backtape_proto as proto;
use tonic::Code;

use crate::support::ranks::{
    Process, coordinator_command, eventually, record_step, run_ranks, settings,
};

/// Credentials for a coordinator on this host, of two runs.
fn credentials(out: &Path) -> Issued {
    let runs = ["run", "other"].map(|name| Name::new(name).unwrap());
    issue(out, &["127.0.0.1".to_string()], &runs, 1).unwrap()
}

fn guarded(store: &Path, world_size: u32, folder: &Path) -> Process {
    let mut command = coordinator_command(store, "127.0.0.1:0", world_size);
    command.arg("--credentials").arg(folder);
    Process::from(command)
}

/// A rank of `run` that sends its files to a coordinator.
fn remote(address: &str, rank: u32, credentials: Option<PathBuf>, scratch: &Path) -> Settings {
    Settings {
        run: Some("run".into()),
        coordinator: Some(address.into()),
        transport: TransportChoice::Stream,
        credentials,
        ..settings(scratch, rank, 2)
    }
}

/// What two ranks with these credentials are told; nothing may have come of it.
fn refused(server: &Process, store: &Path, credentials: Option<PathBuf>) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let rank = |rank| Settings {
        join_deadline: Duration::from_secs(3),
        ..remote(&server.address, rank, credentials.clone(), scratch.path())
    };
    let told = run_ranks(vec![rank(0), rank(1)]);
    assert!(told.iter().all(|summary| summary.steps_committed.is_empty()), "{told:?}");
    assert_eq!(std::fs::read_dir(store).unwrap().count(), 0, "an outsider has written");
    told[0].faults.join("\n")
}

#[test]
fn ranks_that_show_certificate_and_token_commit_a_step_over_an_encrypted_stream() {
    let (store, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let issued = credentials(made.path());
    let server = guarded(store.path(), 2, &issued.coordinator);
    let rank = |rank| remote(&server.address, rank, Some(issued.ranks[0].clone()), store.path());
    let told = run_ranks(vec![rank(0), rank(1)]);
    for summary in &told {
        assert_eq!(summary.steps_committed, [0], "{summary:?}");
        assert!(summary.faults.is_empty() && summary.streamed, "{summary:?}");
    }
    assert!(store.path().join("run").is_dir());
}

#[test]
fn whoever_shows_no_certificate_or_that_of_another_authority_is_refused() {
    let (store, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (issued, foreign) =
        (credentials(&made.path().join("a")), credentials(&made.path().join("b")));
    let server = guarded(store.path(), 2, &issued.coordinator);
    let without = refused(&server, store.path(), None);
    assert!(without.contains("BACKTAPE_CREDENTIALS"), "{without}");
    let other = refused(&server, store.path(), Some(foreign.ranks[0].clone()));
    assert!(other.contains("certificate"), "{other}");
}

/// Goal: a certificate alone is not enough. Method: the right one, beside another token.
#[test]
fn whoever_shows_another_runs_token_is_refused_and_told_what_to_give() {
    let (store, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let issued = credentials(made.path());
    let server = guarded(store.path(), 2, &issued.coordinator);
    let drawn = Token::draw().unwrap();
    std::fs::write(issued.ranks[0].join("token"), drawn.as_str()).unwrap();
    let said = refused(&server, store.path(), Some(issued.ranks[0].clone()));
    assert!(
        said.contains("token of this coordinator") && said.contains("BACKTAPE_CREDENTIALS"),
        "{said}"
    );
}

/// Goal: a rank that was taken over cannot collect the others' dumps.
#[test]
fn a_ranks_certificate_does_not_make_a_coordinator() {
    let (store, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let issued = credentials(made.path());
    let impostor = guarded(store.path(), 2, &issued.ranks[0]);
    let said = refused(&impostor, store.path(), Some(issued.ranks[0].clone()));
    assert!(said.contains("certificate"), "{said}");
}

#[test]
fn beyond_this_host_a_coordinator_listens_with_credentials_or_with_a_flag_that_says_so() {
    let (store, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let issued = credentials(made.path());
    let mut command = coordinator_command(store.path(), "0.0.0.0:0", 2);
    command.arg("--credentials").arg(&issued.coordinator);
    assert!(Process::from(command).address.starts_with("0.0.0.0:"));
    let ended = coordinator_command(store.path(), "0.0.0.0:0", 2).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("--credentials"), "{said}");
}

fn join() -> proto::JoinRequest {
    proto::JoinRequest {
        run: "run".into(),
        rank: 1,
        world_size: 2,
        incarnation: 7,
        host: "node-0".into(),
        format_version: backtape::FORMAT_VERSION,
        ..Default::default()
    }
}

/// Goal: another user of the host, who reaches the loopback address too, cannot speak for a
/// rank of a job whose rank 0 carries the coordinator. Method: the launch's own address, with
/// and without the token that only this user can read.
#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_coordinator_serves_those_alone_who_can_read_its_token() {
    use std::os::unix::fs::PermissionsExt;
    let store = tempfile::tempdir().unwrap();
    let directory = store.path().join("run");
    let mut recorder = Recorder::start(settings(&directory, 0, 2)).unwrap();
    let place = directory.join(backtape::store::layout::RENDEZVOUS);
    eventually("rank 0 says where it listens", || place.exists());
    let mode = std::fs::metadata(&place).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "others can read the token");
    let found = backtape::coordinator::asking::embedded(&directory).unwrap();
    let rpc = |access: &Access| -> Rpc { connect(&found.address, access).unwrap() };
    let outsider = rpc(&Access::default()).join(join()).await.unwrap_err();
    assert_eq!(outsider.code(), Code::Unauthenticated, "{outsider}");
    let version = outsider.metadata().get(VERSION).expect("who refuses says its version");
    assert_eq!(version, backtape::VERSION);
    let guess = Access { tls: None, token: Some(Token::draw().unwrap()) };
    assert_eq!(rpc(&guess).join(join()).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(rpc(&found.access).join(join()).await.unwrap().into_inner().attempt, 0);
    record_step(&recorder, 0, 2);
    tokio::task::spawn_blocking(move || recorder.close()).await.unwrap().unwrap();
}

/// Whether who connects and says nothing is answered at all, as servers of HTTP/2 do.
fn answered(address: &str) -> bool {
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    matches!(stranger.read(&mut [0; 9]), Ok(read) if read > 0)
}

/// Whether the coordinator hung up without a word.
fn closed(mut stranger: TcpStream) -> bool {
    match stranger.read(&mut [0; 9]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Goal: who floods a coordinator with connections takes it from other strangers of its host, not
/// from ranks. Method: connections that say nothing, the last hundred held, until one is closed; a
/// rank that joined before is answered all the time, and strangers after a while again.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_take_turns_and_ranks_do_not_wait_for_them() {
    let store = tempfile::tempdir().unwrap();
    let server = Process::start(store.path(), "127.0.0.1:0", 2);
    let mut rank = connect(&server.address, &Access::default()).unwrap();
    rank.join(join()).await.unwrap();
    assert!(answered(&server.address));
    let asked = proto::RunStatusRequest { run: "run".into() };
    let mut held = VecDeque::new();
    let turned_away = (0..100_000).find(|_| {
        let stranger = TcpStream::connect(&server.address).unwrap();
        stranger.set_nonblocking(true).unwrap();
        held.push_back(stranger);
        held.len() > 100 && closed(held.pop_front().unwrap())
    });
    assert!(turned_away.is_some_and(|after| after >= 1000), "{turned_away:?}");
    for _ in 0..100 {
        rank.run_status(asked.clone()).await.unwrap();
    }
    eventually("strangers are served again", || answered(&server.address));
    // Whose calls are let in give their turns back: strangers would need 100 s for so many.
    let began = Instant::now();
    for _ in 0..2000 {
        let mut rank = connect(&server.address, &Access::default()).unwrap();
        rank.run_status(asked.clone()).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}
