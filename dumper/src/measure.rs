//! What is computed of a shard's bytes before they are written: hash and fingerprint.
//!
//! A large shard is looked at by two threads, so that the disk and not a core limits how fast a
//! step becomes durable.

use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::shard::FingerprintSource;

use crate::capture::{Located, Queued};

/// From this length on a second thread is worth its start.
const SHARED_BYTES: usize = 4 << 20;

/// What of a box the thread that hashes does not look at: a hash takes about a third of the time
/// of a fingerprint.
const SHARE: f64 = 0.66;

/// What is said of a shard's bytes.
pub(crate) struct Measured {
    pub(crate) hash: ContentHash,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) source: FingerprintSource,
}

/// Hash and fingerprint of a shard's bytes. Sums that a device computed of its own memory take the
/// place of ours: a copy that went wrong does not agree with them.
pub(crate) fn measure(queued: &Queued, bytes: &[u8]) -> Measured {
    let positions = queued.located.positions(&queued.place);
    let sums = positions.and_then(|place| queued.payload.fingerprint(queued.dtype, &place));
    let source = match (&queued.located, sums) {
        (Located::ByBox, _) | (Located::ByPayload, None) => FingerprintSource::Recorder,
        _ => FingerprintSource::Framework,
    };
    let located = sums.map(Located::BySums);
    let (hash, fingerprint) = compute(queued, located.as_ref().unwrap_or(&queued.located), bytes);
    Measured { hash, fingerprint, source }
}

fn compute(queued: &Queued, located: &Located, bytes: &[u8]) -> (ContentHash, Fingerprint) {
    let (dtype, place) = (queued.dtype, &queued.place);
    let alone = || (ContentHash::of(bytes), located.fingerprint(dtype, place, bytes));
    if bytes.len() < SHARED_BYTES || matches!(located, Located::BySums(_)) {
        return alone();
    }
    let parts = match located {
        Located::ByBox | Located::ByPayload => Fingerprint::parts(dtype, place, SHARE),
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
            None => located.fingerprint(dtype, place, bytes),
        };
        match other.join() {
            Ok((hash, rest)) => (hash, own.plus(rest)),
            // Hashing does not panic; if it did, it does so here too, where that is caught.
            Err(_) => alone(),
        }
    })
}
