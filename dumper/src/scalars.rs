//! Scalars on their way to the store: the training thread puts rows into a bounded buffer, for
//! which it never waits, and the recorder's thread empties it.

use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use backtape::identity::{Attempt, Rank};
use backtape::scalars::files::LIMIT_BYTES;
use backtape::scalars::{CLIPPED_BEYOND, Header, MAX_NAME_BYTES, Row, ScalarFiles, line};
use tokio::sync::Notify;

use crate::client::{CallError, Client, Entered};
use crate::delivery::sends_rows;
use crate::patience::Deadline;
use crate::recording::{Recording, lock};

/// Most values that wait: some 30 MB with their names.
const MAX_WAITING_VALUES: usize = 1 << 18;

/// How long rows are gathered before they are written, and before they are sent where the
/// coordinator writes them: a process that is killed loses at most the rows of this time.
const WRITE_INTERVAL: Duration = Duration::from_millis(200);
const SEND_INTERVAL: Duration = Duration::from_secs(5);

/// How long it may take to send rows while the job runs; when it ends it may take longer.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// Bytes of rows in one call, far below the coordinator's limit for a message.
const SEND_BYTES: usize = 1 << 20;

/// Rows between the training thread and the recorder's own.
#[derive(Default)]
pub(crate) struct Buffer {
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Default)]
struct State {
    rows: VecDeque<Row>,
    values: usize,
    dropped: u64,
    /// Steps with a norm before and after clipping, and those of them that were clipped.
    norms: u64,
    clipped: u64,
    closed: bool,
}

impl Buffer {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes a row, or drops it where too much waits already.
    pub(crate) fn push(&self, mut row: Row) {
        let mut state = self.lock();
        if state.closed || state.values + row.values.len() > MAX_WAITING_VALUES {
            state.dropped += 1;
            return;
        }
        state.count_clipping(&mut row);
        state.values += row.values.len();
        state.rows.push_back(row);
        drop(state);
        self.ready.notify_one();
    }

    /// No more rows come.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_one();
    }

    /// Waits until the buffer's state is `enough`.
    async fn wait_for(&self, enough: impl Fn(&State) -> bool) {
        while !enough(&self.lock()) {
            self.ready.notified().await;
        }
    }

    /// Takes the rows that wait, and says whether no more will come.
    fn take(&self) -> (VecDeque<Row>, bool) {
        let mut state = self.lock();
        state.values = 0;
        (std::mem::take(&mut state.rows), state.closed)
    }
}

impl State {
    /// Adds the share of clipped steps so far to a row that has both norms.
    fn count_clipping(&mut self, row: &mut Row) {
        let value_of =
            |name: &str| row.values.iter().find(|(n, _)| n == name).map(|(_, value)| *value);
        let norms = value_of("grad_norm").zip(value_of("grad_norm_clipped"));
        let Some((before, after)) = norms.filter(|(b, a)| b.is_finite() && a.is_finite()) else {
            return;
        };
        self.norms += 1;
        self.clipped += u64::from(before > after * CLIPPED_BEYOND);
        if value_of("clip_rate").is_none() {
            let rate = self.clipped as f64 / self.norms as f64;
            row.values.push(("clip_rate".into(), rate));
        }
    }
}

/// The sentence about scalars that were left out, as their names cannot be stored.
pub(crate) fn nameless(rank: u32) -> String {
    format!(
        "some scalars of rank {rank} are left out: a name has 1 to {MAX_NAME_BYTES} bytes, and a \
         step at most {} scalars",
        backtape::scalars::MAX_VALUES
    )
}

/// Who writes the rows: this rank into its files, or the coordinator, to whom they are sent.
enum Destination {
    Files(Box<ScalarFiles>),
    Coordinator { client: Box<Client>, host: String, sent: u64 },
}

/// Empties the buffer until it is closed. Rows that cannot be written stay and are tried again;
/// those that still cannot be written at the end are kept in a file of this machine, which the
/// summary names.
pub(crate) async fn work(recording: &Recording, client: Client, entered: &Entered) {
    let mut to = destination(recording, client, entered);
    let interval = match to {
        Destination::Files(_) => WRITE_INTERVAL,
        Destination::Coordinator { .. } => SEND_INTERVAL,
    };
    let mut pending = VecDeque::new();
    loop {
        recording.scalars.wait_for(|state| !state.rows.is_empty() || state.closed).await;
        // While earlier rows cannot be written, new ones stay in the buffer, which is bounded.
        let mut closed = recording.scalars.lock().closed;
        if pending.is_empty() || closed {
            let (rows, all) = recording.scalars.take();
            pending.extend(rows);
            closed = all;
        }
        let longest = if closed { recording.plan.settings.join_deadline } else { SEND_DEADLINE };
        let deadline = recording.patience.deadline(longest);
        if let Err(why) = to.write(recording, &mut pending, &deadline).await {
            recording.fault(format!("scalars of rank {} are not written: {why}", recording.rank()));
        }
        if closed {
            break;
        }
        let closing = recording.scalars.wait_for(|state| state.closed);
        let _ = tokio::time::timeout(interval, closing).await;
    }
    keep(recording, pending);
}

/// Recording is given up: rows that come from now on are dropped, and those that wait are kept in a
/// file of this machine.
pub(crate) fn abandon(recording: &Recording) {
    recording.scalars.close();
    let (rows, _) = recording.scalars.take();
    keep(recording, rows);
}

fn destination(recording: &Recording, client: Client, entered: &Entered) -> Destination {
    let plan = &recording.plan;
    if sends_rows(recording, entered) {
        return Destination::Coordinator {
            client: Box::new(client),
            host: plan.host.to_string(),
            sent: 0,
        };
    }
    let header = Header {
        schema: line::SCHEMA.into(),
        run: plan.run.clone(),
        attempt: Attempt(entered.attempt),
        rank: Rank(plan.settings.rank),
        world_size: plan.settings.world_size,
        host: plan.host.clone(),
        incarnation: client.incarnation(),
    };
    // No file is created before there is a row: most recorders have none.
    Destination::Files(Box::new(ScalarFiles::of(&entered.directory, header, LIMIT_BYTES)))
}

impl Destination {
    /// Writes rows, the first ones first; those that are written are taken out.
    async fn write(
        &mut self,
        recording: &Recording,
        rows: &mut VecDeque<Row>,
        deadline: &Deadline,
    ) -> Result<(), String> {
        while !rows.is_empty() {
            let written = match self {
                Destination::Files(files) => {
                    let path = files.path().display().to_string();
                    let batch = rows.make_contiguous();
                    let appended = files.append(batch);
                    let copies = appended.map_err(|error| format!("{path}: {error}"))?;
                    if let Some(error) = copies {
                        let rank = recording.rank();
                        recording.fault(format!(
                            "the CSV or TensorBoard copy of the scalars of rank {rank} is not \
                             whole ({path} is): {error}"
                        ));
                    }
                    batch.len()
                }
                Destination::Coordinator { client, host, sent } => {
                    send(client, host, sent, rows, deadline).await.map_err(|e| e.to_string())?
                }
            };
            rows.drain(..written);
            recording.patience.progressed();
            recording.summary().scalar_rows += written as u64;
        }
        Ok(())
    }
}

/// Sends some rows, the first ones first. Returns how many of them the coordinator has written.
async fn send(
    client: &Client,
    host: &str,
    sent: &mut u64,
    rows: &VecDeque<Row>,
    deadline: &Deadline,
) -> Result<usize, CallError> {
    let mut lines = Vec::new();
    for row in rows {
        line::write_row(row, &mut lines);
        if lines.len() >= SEND_BYTES {
            break;
        }
    }
    let known = client.record_scalars(host, *sent, lines, deadline).await?;
    let new = known.checked_sub(*sent).and_then(|n| usize::try_from(n).ok());
    match new.filter(|n| (1..=rows.len()).contains(n)) {
        Some(new) => {
            *sent = known;
            Ok(new)
        }
        None => Err(CallError::Refused(format!(
            "the coordinator has {known} rows of this process, {sent} were sent: were its files \
             of scalars moved?"
        ))),
    }
}

/// Keeps rows that do not reach the store in a file of this machine, which the summary names.
fn keep(recording: &Recording, rows: VecDeque<Row>) {
    let rank = recording.rank();
    let dropped = recording.scalars.lock().dropped;
    if dropped > 0 {
        recording.fault(format!(
            "{dropped} rows of scalars of rank {rank} were dropped: more than \
             {MAX_WAITING_VALUES} values waited to be written"
        ));
    }
    if rows.is_empty() {
        return;
    }
    let count = rows.len();
    match keep_file(rank, &rows) {
        Ok(path) => recording.fault(format!(
            "{count} rows of scalars of rank {rank} did not reach the store: they lie in {} on {}",
            path.display(),
            recording.plan.host
        )),
        Err(error) => recording
            .fault(format!("{count} rows of scalars of rank {rank} are lost: no place: {error}")),
    }
}

fn keep_file(rank: u32, rows: &VecDeque<Row>) -> std::io::Result<PathBuf> {
    let mut lines = Vec::new();
    rows.iter().for_each(|row| line::write_row(row, &mut lines));
    let prefix = format!("backtape-scalars-rank-{rank:05}-");
    let mut file = tempfile::Builder::new().prefix(&prefix).suffix(".jsonl").tempfile()?;
    file.write_all(&lines)?;
    Ok(file.keep().map_err(|kept| kept.error)?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(before: f64, after: f64) -> Row {
        let values = vec![("grad_norm".into(), before), ("grad_norm_clipped".into(), after)];
        Row { step: 0, time: 0.0, values }
    }

    #[test]
    fn the_share_of_clipped_steps_is_added_and_rounding_is_no_clipping() {
        let buffer = Buffer::default();
        for (before, after) in [(2.0, 1.0), (0.5, 0.5), (1.001, 1.0), (f64::NAN, 1.0)] {
            buffer.push(row(before, after));
        }
        let rates: Vec<Option<f64>> =
            buffer.take().0.iter().map(|row| row.values.get(2).map(|(_, rate)| *rate)).collect();
        assert_eq!(rates, [Some(1.0), Some(0.5), Some(1.0 / 3.0), None]);
    }

    #[test]
    fn a_buffer_that_nobody_empties_stops_growing_and_counts_what_it_drops() {
        let buffer = Buffer::default();
        for _ in 0..MAX_WAITING_VALUES {
            buffer.push(row(1.0, 1.0));
        }
        let state = buffer.lock();
        assert!(state.values <= MAX_WAITING_VALUES);
        assert_eq!(state.rows.len() as u64 + state.dropped, MAX_WAITING_VALUES as u64);
    }
}
