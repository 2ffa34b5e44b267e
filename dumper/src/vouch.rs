//! Rank 0 shows the coordinator that it lives, until every rank of its launch has entered the run.
//!
//! A coordinator may outlive launches. So it lets a rank enter an attempt only when the rank 0 that
//! opened the attempt was alive after the rank had come: an attempt of a rank 0 that was killed is
//! never taken for the new launch's.
//!
//! This has a thread and a connection of its own, as the recorder's thread blocks on its disk.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::client::{Answered, CallError, Client, jittered};
use crate::recording::Recording;

/// The pauses between two signs of life. They grow, as most ranks of a launch come within seconds.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Shows that rank 0 lives until this is dropped.
pub(crate) struct Vouching {
    _stop: oneshot::Sender<()>,
}

impl Vouching {
    pub(crate) fn start(recording: Arc<Recording>, client: &Client) -> std::io::Result<Vouching> {
        let (stop, stopped) = oneshot::channel();
        let client = client.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("backtape-launch".into());
        thread.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = vouch(&recording, &client) => {}
                }
            });
        })?;
        Ok(Vouching { _stop: stop })
    }
}

async fn vouch(recording: &Recording, client: &Client) {
    let mut client = match client.reopened() {
        Ok(client) => client,
        Err(error) => return recording.fault(format!("other ranks cannot enter: {error}")),
    };
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(jittered(pause)).await;
        match client.join(&recording.plan).await {
            Ok(Answered::Inside(entered)) if !entered.vouch => return,
            Ok(_) | Err(CallError::Unreachable(_)) => pause = (pause * 5 / 4).min(LONGEST_PAUSE),
            Err(error) => return recording.fault(format!("other ranks cannot enter: {error}")),
        }
    }
}
