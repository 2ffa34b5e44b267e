//! A progress bar on a terminal, for what takes longer than a second.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::kernels::Progress;

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts work and shows it once it takes long.
pub(super) struct Bar {
    started: Instant,
    wanted: bool,
    state: Mutex<State>,
}

struct State {
    total: u64,
    done: u64,
    bar: Option<ProgressBar>,
}

impl Bar {
    pub(super) fn new(quiet: bool) -> Bar {
        let wanted = !quiet && std::io::stderr().is_terminal();
        let state = Mutex::new(State { total: 0, done: 0, bar: None });
        Bar { started: Instant::now(), wanted, state }
    }

    /// Announces more work, in multiply-adds.
    pub(super) fn expect(&self, work: u64) {
        if let Ok(mut state) = self.state.lock() {
            state.total += work;
        }
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        if let Ok(mut state) = self.state.lock() {
            state.bar.take().inspect(ProgressBar::finish_and_clear);
        }
    }
}

impl Progress for Bar {
    fn advance(&self, work: u64) {
        if !self.wanted {
            return;
        }
        let Ok(mut state) = self.state.lock() else {
            return;
        };
        state.done += work;
        let (done, total) = (state.done, state.total.max(state.done));
        if state.bar.is_none() && self.started.elapsed() > PATIENCE {
            let template = "replay {bar:30} {percent}% {elapsed} elapsed, {eta} left";
            let style =
                ProgressStyle::with_template(template).unwrap_or(ProgressStyle::default_bar());
            state.bar = Some(
                ProgressBar::new(total).with_style(style).with_elapsed(self.started.elapsed()),
            );
        }
        if let Some(bar) = &state.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}
