//! The hash and the fingerprint of a shard's bytes, computed before they are written.
//!
//! Two threads share the work on a large shard, so that the disk and not a core limits how fast a
//! step becomes durable.

use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::shard::{FingerprintSource, Shard};

use crate::capture::{Capture, Located};

/// From this length on a second thread is worth its start.
const SHARED_BYTES: usize = 4 << 20;

/// The share of a box whose fingerprint one thread computes while the other hashes all of the bytes
/// and then computes the fingerprint of the rest: a hash takes about a third of the time of a
/// fingerprint.
const SHARE: f64 = 0.66;

/// What a dump says of a shard's bytes.
pub(crate) struct Measured {
    pub(crate) hash: ContentHash,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) source: FingerprintSource,
}

/// Hash and fingerprint of a shard's bytes. Where a device has computed the fingerprint of its own
/// memory, that one is taken: bytes that were copied wrongly do not agree with it.
pub(crate) fn measure(capture: &Capture, bytes: &[u8]) -> Measured {
    let Capture { shard, located, payload, .. } = capture;
    let positions = located.positions(&shard.place);
    let sums = positions.and_then(|place| payload.fingerprint(shard.dtype, &place));
    let source = match (located, sums) {
        (Located::ByBox, _) | (Located::ByPayload, None) => FingerprintSource::Recorder,
        _ => FingerprintSource::Framework,
    };
    let summed = sums.map(Located::BySums);
    let (hash, fingerprint) = compute(shard, summed.as_ref().unwrap_or(located), bytes);
    Measured { hash, fingerprint, source }
}

fn compute(shard: &Shard, located: &Located, bytes: &[u8]) -> (ContentHash, Fingerprint) {
    let (dtype, place) = (shard.dtype, &shard.place);
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
        let first_part = match &parts {
            Some((first, _, at)) => Fingerprint::of(dtype, first, &bytes[..*at]),
            None => located.fingerprint(dtype, place, bytes),
        };
        match other.join() {
            Ok((hash, rest)) => (hash, first_part.plus(rest)),
            // Hashing does not panic; if it did, it does so here too, where that is caught.
            Err(_) => alone(),
        }
    })
}
