//! What is computed of a shard's bytes before they are written: hash and fingerprint.
//!
//! A large shard is looked at by two threads, so that the disk and not a core limits how fast a
//! step becomes durable.

use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;

use crate::capture::{Located, Queued};

/// From this length on a second thread is worth its start.
const SHARED_BYTES: usize = 4 << 20;

/// What of a box the thread that hashes does not look at: a hash takes about a third of the time
/// of a fingerprint.
const SHARE: f64 = 0.66;

/// Hash and fingerprint of a shard's bytes.
pub(crate) fn measure(queued: &Queued, bytes: &[u8]) -> (ContentHash, Fingerprint) {
    let (dtype, place) = (queued.dtype, &queued.place);
    let alone = || (ContentHash::of(bytes), queued.located.fingerprint(dtype, place, bytes));
    if bytes.len() < SHARED_BYTES || matches!(queued.located, Located::BySums(_)) {
        return alone();
    }
    let parts = match queued.located {
        Located::ByBox => Fingerprint::parts(dtype, place, SHARE),
        _ => None,
    };
    std::thread::scope(|scope| {
        let other = std::thread::Builder::new().name("backtape-hash".into());
        let other = other.spawn_scoped(scope, || {
            let rest =
                parts.as_ref().map(|(_, second, at)| Fingerprint::of(dtype, second, &bytes[*at..]));
            (ContentHash::of(bytes), rest.unwrap_or_default())
        });
        let Ok(other) = other else { return alone() };
        let own = match &parts {
            Some((first, _, at)) => Fingerprint::of(dtype, first, &bytes[..*at]),
            None => queued.located.fingerprint(dtype, place, bytes),
        };
        match other.join() {
            Ok((hash, rest)) => (hash, own.plus(rest)),
            // Hashing does not panic; if it did, it does so here too, where that is caught.
            Err(_) => alone(),
        }
    })
}
