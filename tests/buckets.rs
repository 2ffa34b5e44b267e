//! A store in a bucket: ranks put their files into it, the coordinator keeps its journal in it,
//! `replay` reads from it. In memory inside of this process, and behind S3 with real processes.

use std::path::Path;
use std::time::Duration;

use backtape::coordinator::{Config, Coordinator};
use backtape_dumper::{Recorder, Settings, Summary, TransportChoice};
use backtape_replayer::dump::{self, Selection};
use tokio::sync::oneshot;

use crate::support::program;
use crate::support::ranks::{
    Process, bits, capture, coordinator_command, eventually, record_step, run_ranks, settings,
};
use crate::support::s3::S3;

/// A coordinator in this process: buckets in memory are of one process.
struct Served {
    address: String,
    _stop: oneshot::Sender<()>,
}

impl Served {
    fn start(store: &str, world_size: u32) -> Served {
        let (stop, stopped) = oneshot::channel::<()>();
        let (sender, started) = std::sync::mpsc::channel();
        let config = Config::new(store, world_size);
        std::thread::spawn(move || {
            tokio::runtime::Runtime::new().unwrap().block_on(async {
                let coordinator = Coordinator::open(&config).unwrap();
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap().to_string()).unwrap();
                let shutdown = async {
                    let _ = stopped.await;
                };
                coordinator.serve(listener, shutdown).await.unwrap();
            });
        });
        Served { address: started.recv().unwrap(), _stop: stop }
    }
}

fn rank(place: &str, address: &str, rank: u32, transport: TransportChoice) -> Settings {
    let mut settings = settings(Path::new(place), rank, 2);
    settings.coordinator = Some(address.into());
    settings.transport = transport;
    settings
}

/// Every rank's part of the step is there, in its own bits.
fn assert_dumped(place: &str) {
    let selection = Selection { step: Some(0), ..Selection::default() };
    let dump = dump::open(Path::new(place), &selection).unwrap();
    assert!(dump.committed(), "{:?}", dump.state);
    assert_eq!(dump.faults(), []);
    let mut found = 0;
    for info in dump.tensors().values() {
        for shard in &info.shards {
            let record = dump.record(shard);
            assert_eq!(dump.intact_bytes(shard), Some(bits(record.rank.0).as_slice()));
            found += 1;
        }
    }
    assert_eq!(found, 6, "two ranks, q of two microbatches and k");
}

/// The steps that were committed, and nothing went wrong.
fn committed(summary: &Summary) -> Vec<u64> {
    assert_eq!(summary.faults, [""; 0]);
    summary.steps_committed.iter().collect()
}

#[test]
fn ranks_that_reach_the_bucket_put_their_files_into_it_themselves() {
    let place = "memory://direct/team/run-a";
    let coordinator = Served::start("memory://direct/team", 2);
    let ranks = |r| rank(place, &coordinator.address, r, TransportChoice::Auto);
    for summary in run_ranks(vec![ranks(0), ranks(1)]) {
        assert_eq!(committed(&summary), [0]);
        assert!(!summary.streamed, "nothing went through the coordinator");
    }
    assert_dumped(place);
    assert_dumped("memory://direct/team");
}

#[test]
fn ranks_that_do_not_reach_it_send_their_files_to_the_coordinator() {
    let place = "memory://streamed/run-a";
    let coordinator = Served::start("memory://streamed", 2);
    let ranks = |r| rank(place, &coordinator.address, r, TransportChoice::Stream);
    for summary in run_ranks(vec![ranks(0), ranks(1)]) {
        assert_eq!(committed(&summary), [0]);
        assert!(summary.streamed);
    }
    assert_dumped(place);
}

#[test]
fn a_job_of_one_rank_needs_no_coordinator_process() {
    let place = "memory://alone/run-a";
    let mut recorder = Recorder::start(settings(Path::new(place), 0, 1)).unwrap();
    record_step(&recorder, 0, 1);
    for step in 0..20 {
        let values = vec![("loss".into(), 5.0 - step as f64 / 10.0)];
        recorder.scalars(backtape_dumper::Row { step, time: 1.0, values }).unwrap();
    }
    let summary = recorder.close().unwrap();
    assert_eq!(committed(&summary), [0]);
    assert_eq!(summary.scalar_rows, 20);
    let selection = Selection::default();
    let declared = backtape_replayer::trajectory::Declared::default();
    let report =
        backtape_replayer::postmortem::trajectory_report(Path::new(place), &selection, &declared);
    let report = serde_json::to_string(&report.unwrap()).unwrap();
    assert!(report.contains(place) && report.contains("20"), "{report}");
}

/// Goal: what one coordinator acknowledged another knows, with nothing but the bucket. Method:
/// a step is committed by one, then a second loads the same bucket and is asked.
#[test]
fn another_coordinator_goes_on_from_the_journal_in_the_bucket() {
    let place = "memory://handed-over/run-a";
    let first = Served::start("memory://handed-over", 2);
    let ranks = |r| rank(place, &first.address, r, TransportChoice::Auto);
    run_ranks(vec![ranks(0), ranks(1)]);
    let second = Served::start("memory://handed-over", 2);
    let status =
        program::coordinator(&["status", "--coordinator", &second.address, "--run", "run-a"]);
    assert!(status.stdout.contains("1 committed"), "{}{}", status.stdout, status.stderr);
    // Other processes as the same ranks: a new attempt, opened by the second.
    let again = run_ranks(vec![
        rank(place, &second.address, 0, TransportChoice::Auto),
        rank(place, &second.address, 1, TransportChoice::Auto),
    ]);
    assert!(again.iter().all(|summary| summary.attempt == Some(1)), "{again:?}");
}

/// Goal: two coordinators of one bucket never both acknowledge. Method: the second takes the run
/// over by writing to its journal; then a rank of the first records on.
#[test]
fn a_coordinator_that_was_replaced_acknowledges_nothing_more() {
    let place = "memory://fenced/run-a";
    let first = Served::start("memory://fenced", 2);
    let mut settings = rank(place, &first.address, 0, TransportChoice::Auto);
    settings.selection.steps = "0-1".parse().unwrap();
    // Counted by the launcher: rank 0 is never alive at the second, which else would keep rank 1
    // waiting for it.
    settings.attempt = Some(0);
    settings.step_deadline = Duration::from_secs(5);
    let mut early = Recorder::start(settings).unwrap();
    record_step(&early, 0, 2);
    // Its close is the last that it asks: a line of the first's after the second has loaded would
    // fence the second off.
    let ask = ["status", "--coordinator", &first.address, "--run", "run-a"];
    eventually("rank 0 closed", || {
        program::coordinator(&ask).stdout.contains("1 of 2 ranks closed")
    });
    let second = Served::start("memory://fenced", 2);
    let mut late = rank(place, &second.address, 1, TransportChoice::Auto);
    late.attempt = Some(0);
    late.step_deadline = Duration::from_secs(1);
    let late = Recorder::start(late).unwrap();
    eventually("rank 1 entered", || late.summary().attempt.is_some());
    let tape = early.step(1).unwrap();
    tape.record(capture("q", None, 0, 2)).unwrap();
    tape.close().unwrap();
    let summary = early.close().unwrap();
    assert_eq!(summary.shards, 3, "nothing more was acknowledged");
    let faults = summary.faults.join("\n");
    assert!(faults.contains("another coordinator has written"), "{faults}");
}

#[test]
fn a_coordinator_and_replay_share_a_bucket_of_s3() {
    let server = S3::start();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = coordinator_command(Path::new("s3://dumps/team"), "127.0.0.1:0", 2);
    command.envs(server.environment());
    let coordinator = Process::from(command);
    // This process has no credentials: its ranks send what they record.
    let place = elsewhere.path().join("run-a");
    let place = place.to_str().unwrap();
    let ranks = |r| rank(place, &coordinator.address, r, TransportChoice::Auto);
    for summary in run_ranks(vec![ranks(0), ranks(1)]) {
        assert_eq!(committed(&summary), [0]);
        assert!(summary.streamed);
    }
    let dump = "s3://dumps/team/run-a";
    let verified = program::replay_with(&["verify", "--dump", dump], server.environment());
    assert_eq!(verified.code, 0, "{}{}", verified.stdout, verified.stderr);
    assert!(verified.stdout.contains("6 shards"), "{}", verified.stdout);
    let absent =
        program::replay_with(&["verify", "--dump", "s3://dumps/nobody"], server.environment());
    assert_eq!(absent.code, 2);
    assert!(absent.stderr.contains("s3://dumps/nobody is not a dump"), "{}", absent.stderr);
    coordinator.kill();
    let mut restarted = coordinator_command(Path::new("s3://dumps/team"), "127.0.0.1:0", 2);
    restarted.envs(server.environment());
    let restarted = Process::from(restarted);
    let status =
        program::coordinator(&["status", "--coordinator", &restarted.address, "--run", "run-a"]);
    assert!(status.stdout.contains("1 committed"), "{}{}", status.stdout, status.stderr);
}

/// Goal: a bucket that refuses for a while costs no attempt. Method: S3 that answers 403 to
/// every line of the journal while a step is recorded, and then takes them again; the coordinator is the same process.
#[test]
fn an_attempt_goes_on_when_its_bucket_takes_the_journal_again() {
    let server = S3::start();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = coordinator_command(Path::new("s3://dumps/team"), "127.0.0.1:0", 1);
    command.envs(server.environment());
    let coordinator = Process::from(command);
    let mut settings = settings(&elsewhere.path().join("run-a"), 0, 1);
    settings.coordinator = Some(coordinator.address.clone());
    settings.selection.steps = "0-1".parse().unwrap();
    let mut recorder = Recorder::start(settings).unwrap();
    eventually("the rank entered", || recorder.summary().attempt.is_some());
    server.forbid(Some("journal"));
    record_step(&recorder, 0, 1);
    eventually("the journal is refused", || coordinator.log().contains("is not taken"));
    assert_eq!(recorder.summary().shards, 0, "acknowledged without a journal");
    server.forbid(None);
    let tape = recorder.step(1).unwrap();
    tape.record(capture("q", None, 0, 1)).unwrap();
    tape.close().unwrap();
    let summary = recorder.close().unwrap();
    assert_eq!(committed(&summary), [0, 1]);
}
