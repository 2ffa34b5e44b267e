//! A panic of our own, which should not be: caught where a user called, and told in one
//! sentence in place of a traceback.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once};

/// What panicked, and where in the code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a defect of backtape {version} ended this, not your job: {what} at {place}; please report this line, with the dump's manifest.json if you can share it",
    version = backtape::VERSION
)]
pub struct Panicked {
    /// The panic's own words.
    pub what: String,
    /// File and line.
    pub place: String,
}

/// Calls that are listened to now: while there are any, the hook prints nothing.
static LISTENING: AtomicUsize = AtomicUsize::new(0);
/// The first panic since somebody began to listen. Those that follow it, on other threads, are
/// its consequences.
static FIRST: Mutex<Option<Panicked>> = Mutex::new(None);

/// Runs what must not end in a traceback, on whichever thread of ours it panics.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Panicked> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| match LISTENING.load(Ordering::SeqCst) {
            0 => usual(info),
            _ => {
                first().get_or_insert_with(|| panicked(info));
            }
        }));
    });
    if LISTENING.fetch_add(1, Ordering::SeqCst) == 0 {
        *first() = None;
    }
    // What was being computed is dropped, and nothing of it is looked at again.
    let ended = panic::catch_unwind(AssertUnwindSafe(run));
    LISTENING.fetch_sub(1, Ordering::SeqCst);
    ended.map_err(|payload| {
        let unplaced = || Panicked { what: words(&*payload), place: "an unknown place".into() };
        first().take().unwrap_or_else(unplaced)
    })
}

fn first() -> MutexGuard<'static, Option<Panicked>> {
    FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn panicked(info: &PanicHookInfo<'_>) -> Panicked {
    let place = info.location().map(|location| format!("{}:{}", location.file(), location.line()));
    Panicked { what: words(info.payload()), place: place.unwrap_or_default() }
}

/// What a panic says, on one line.
fn words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, as the listeners of a process are counted together.
    #[test]
    fn a_panic_on_any_thread_is_one_sentence_that_names_its_place() {
        let nothing: [f64; 0] = [];
        let here = caught(|| nothing.iter().map(|x| x + 1.0).collect::<Vec<_>>()[3]);
        let text = here.unwrap_err().to_string();
        assert!(text.contains("index out of bounds") && text.contains("defect.rs:"), "{text}");
        assert!(!text.contains('\n') && text.contains(backtape::VERSION), "{text}");
        let there = caught(|| rayon::join(|| 1, || panic!("two\nlines")).0);
        assert_eq!(there.unwrap_err().what, "two lines");
        assert_eq!(caught(|| 7), Ok(7));
    }
}
