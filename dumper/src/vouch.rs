//! Rank 0 shows that it lives, until every rank of its launch has entered: a coordinator that
//! outlives launches lets a rank in only with a rank 0 that was alive after the rank came. What a
//! rank 0 that was killed has opened is thereby never taken for the new launch.
//!
//! On a thread and a connection of its own, as the recorder's thread blocks on its disk.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::client::{Answered, CallError, Client, jittered};
use crate::recorder::Shared;

/// Between two signs of life: ranks of a launch come within seconds, or late.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Signs of life that are given until this is dropped.
pub(crate) struct Vouching {
    _stop: oneshot::Sender<()>,
}

impl Vouching {
    pub(crate) fn start(shared: Arc<Shared>, client: &Client) -> std::io::Result<Vouching> {
        let (stop, stopped) = oneshot::channel();
        let client = client.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("backtape-launch".into());
        thread.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = vouch(&shared, &client) => {}
                }
            });
        })?;
        Ok(Vouching { _stop: stop })
    }
}

async fn vouch(shared: &Shared, client: &Client) {
    let mut client = match client.reopened() {
        Ok(client) => client,
        Err(error) => return shared.fault(format!("other ranks cannot enter: {error}")),
    };
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(jittered(pause)).await;
        match client.join(&shared.plan).await {
            Ok(Answered::Inside(entered)) if !entered.vouch => return,
            Ok(_) | Err(CallError::Unreachable(_)) => pause = (pause * 5 / 4).min(LONGEST_PAUSE),
            Err(error) => return shared.fault(format!("other ranks cannot enter: {error}")),
        }
    }
}
