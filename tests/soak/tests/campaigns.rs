//! A share of each campaign of kills, failing I/O and seeded faults, as the test command has
//! time for it. `soak NAME --trials N --seed S` runs the rest.

use std::io::Write;
use std::process::Command;

/// Runs a campaign; it prints its closing line and exits with 0 when nothing failed.
fn soak(arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_soak")).args(arguments).output().expect("soak starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "soak {}: {said}", arguments.join(" "));
    said
}

#[test]
fn what_was_acknowledged_survives_kills() {
    soak(&["kill", "--trials", "200", "--seed", "1"]);
}

#[test]
fn ranks_of_one_launch_meet_in_one_attempt_whatever_is_killed() {
    soak(&["launches", "--trials", "16", "--seed", "1"]);
}

#[test]
fn a_killed_coordinator_answers_again_at_once() {
    soak(&["ready", "--trials", "3", "--shards", "1000"]);
}

#[test]
fn a_coordinator_keeps_its_contract_with_hostile_peers() {
    soak(&["contract"]);
}

#[test]
fn a_training_loop_notices_nothing() {
    soak(&["fail-open"]);
}

/// Past the capture of a test's output: what was not run is never silent.
fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

#[test]
fn failing_calls_are_never_acknowledged_away() {
    soak(&["io-errors", "--trials", "60", "--seed", "1"]);
}

#[test]
fn attacks_are_refused_and_nothing_is_written_outside_the_store() {
    soak(&["hostile", "--trials", "60", "--seed", "7", "--attacks-only"]);
}

#[test]
fn a_step_of_a_thousand_ranks_commits_and_status_answers_meanwhile() {
    soak(&["scale", "--ranks", "1000", "--files", "2", "--shards", "2"]);
}

#[test]
fn both_ways_to_report_commit_a_step() {
    soak(&["reports", "--ranks", "64", "--files", "4", "--rounds", "1"]);
}

/// Where there is no root, or no nft or tc, it tries what a proxy can do, and says so.
#[test]
fn a_job_heals_when_its_network_does() {
    let said = soak(&["network", "--trials", "3", "--seed", "1"]);
    if let Some(untried) = said.lines().find(|line| line.contains("NOT TRIED")) {
        say(untried);
    }
}

/// A handshake of TLS that was swallowed once held a rank up for ever: connections had a time
/// limit, handshakes had none. Where there are no namespaces the seed draws another scenario.
#[test]
fn a_handshake_that_is_swallowed_is_given_up() {
    soak(&["network", "--seed", "21", "--first", "47", "--trials", "1"]);
}

#[test]
fn a_training_loop_does_not_notice_a_bucket_that_fails() {
    soak(&["bucket", "--trials", "2", "--steps", "100", "--seed", "1"]);
}

#[test]
fn a_job_with_faults_loses_nothing() {
    soak(&["marathon", "--minutes", "0.4", "--pace-ms", "100", "--seed", "1"]);
}

/// The simulated disk listens to strace, which not every machine has; CI installs it.
#[test]
fn nothing_is_acknowledged_that_a_power_cut_takes_back() {
    if Command::new("strace").arg("-V").output().is_err() {
        return say("order: NOT RUN: strace is absent (apt-get install strace)");
    }
    soak(&["order"]);
}

#[test]
#[cfg_attr(not(feature = "faults"), ignore = "seeded faults need --features faults")]
fn every_seeded_fault_is_caught() {
    soak(&["seeded"]);
}
