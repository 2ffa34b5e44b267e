//! A progress bar on a terminal, with rate and time left, for what takes longer than a second.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::kernels::Progress;
use crate::postmortem::{Watch, Work};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

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

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.state().bar.take().inspect(ProgressBar::finish_and_clear);
    }
}

impl Watch for Bar {
    /// What was shown of the work before is removed.
    fn begin(&self, what: &'static str, work: Work, total: u64) {
        let mut state = self.state();
        state.bar.take().inspect(ProgressBar::finish_and_clear);
        *state = State { started: Instant::now(), what, work, total, done: 0, bar: None };
    }

    fn expect(&self, work: u64) {
        self.state().total += work;
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
