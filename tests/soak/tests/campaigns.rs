//! A share of each campaign of kills, failing I/O and seeded faults, as the test command has
//! time for it. `soak NAME --trials N --seed S` runs the rest.

use std::process::Command;

/// Runs a campaign; it prints its closing line and exits with 0 when nothing failed.
fn soak(arguments: &[&str]) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_soak")).args(arguments).output().expect("soak starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "soak {}: {said}", arguments.join(" "));
}

#[test]
fn what_was_acknowledged_survives_kills() {
    soak(&["kill", "--trials", "200", "--seed", "1"]);
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

#[test]
fn failing_calls_are_never_acknowledged_away() {
    soak(&["io-errors", "--trials", "60", "--seed", "1"]);
}

/// Fails where strace is absent: it says so, and how to install it.
#[test]
fn nothing_is_acknowledged_that_a_power_cut_takes_back() {
    soak(&["order"]);
}

#[test]
#[cfg_attr(not(feature = "faults"), ignore = "seeded faults need --features faults")]
fn every_seeded_fault_is_caught() {
    soak(&["seeded"]);
}
