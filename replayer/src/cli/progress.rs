//! A progress bar on a terminal, with rate and time left, for what takes longer than a second.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::dump::StepDump;
use crate::kernels::Progress;
use crate::verify::{Verification, verify};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Bytes that are read and hashed.
    Bytes,
    /// Multiply-adds of the replay.
    MultiplyAdds,
}

/// Counts work and shows it once it takes long.
pub(super) struct Bar {
    wanted: bool,
    state: Mutex<State>,
}

struct State {
    started: Instant,
    what: &'static str,
    work: Work,
    total: u64,
    done: u64,
    bar: Option<ProgressBar>,
}

impl Bar {
    pub(super) fn new(quiet: bool) -> Bar {
        let wanted = !quiet && std::io::stderr().is_terminal();
        let (what, work) = ("replay", Work::MultiplyAdds);
        let state = State { started: Instant::now(), what, work, total: 0, done: 0, bar: None };
        Bar { wanted, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain numbers: a panic elsewhere leaves them usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins another kind of work; what was shown of the one before is removed.
    pub(super) fn begin(&self, what: &'static str, work: Work, total: u64) {
        let mut state = self.state();
        state.bar.take().inspect(ProgressBar::finish_and_clear);
        *state = State { started: Instant::now(), what, work, total, done: 0, bar: None };
    }

    /// Announces more work.
    pub(super) fn expect(&self, work: u64) {
        self.state().total += work;
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.state().bar.take().inspect(ProgressBar::finish_and_clear);
    }

    /// Begins a search for causes, which may do so much work.
    pub(super) fn search(&self, work: u64) {
        self.begin("search for causes", Work::MultiplyAdds, work);
    }

    /// Verifies a dump and shows how far it is; then what is counted are multiply-adds.
    pub(super) fn verify(&self, dump: &StepDump) -> Verification {
        let shards = dump.tensors().values().flat_map(|info| &info.shards);
        let total = shards.map(|shard| dump.record(shard).length).sum();
        self.begin("verify", Work::Bytes, total);
        let proof = verify(dump, &|bytes| self.advance(bytes));
        self.begin("replay", Work::MultiplyAdds, 0);
        proof
    }
}

impl Progress for Bar {
    fn advance(&self, work: u64) {
        if !self.wanted {
            return;
        }
        let mut state = self.state();
        state.done += work;
        let (done, total) = (state.done, state.total.max(state.done));
        if state.bar.is_none() && state.started.elapsed() > PATIENCE {
            let bar = ProgressBar::new(total).with_elapsed(state.started.elapsed());
            bar.set_style(style(state.work));
            bar.set_message(state.what);
            state.bar = Some(bar);
        }
        if let Some(bar) = &state.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

fn style(work: Work) -> ProgressStyle {
    let rate = match work {
        Work::Bytes => "{binary_bytes_per_sec}",
        Work::MultiplyAdds => "{flops}",
    };
    let template =
        format!("{{msg}} {{bar:30}} {{percent}}%  {rate}  {{elapsed}} so far, {{eta}} left");
    let style = ProgressStyle::with_template(&template).unwrap_or(ProgressStyle::default_bar());
    style.with_key("flops", |state: &ProgressState, out: &mut dyn Write| {
        // A multiply-add is two.
        let _ = write!(out, "{:.1} GFLOP/s", 2e-9 * state.per_sec());
    })
}
