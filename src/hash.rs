//! Content hashes: xxh3-128 of the bytes of a shard, blake3 of manifests and of the headers of
//! shard files.
//!
//! xxh3 is as fast as memory and detects accidental damage; the training process computes it.
//! blake3 is cryptographic and slower; it ties a manifest to its files over the files' small
//! headers.

use serde::{Deserialize, Serialize};

/// xxh3-128 of a shard's bytes, taken in the training process before they move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash(pub u128);

impl ContentHash {
    /// The hash of these bytes.
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(twox_hash::XxHash3_128::oneshot(bytes))
    }
}

/// blake3 of a header or a manifest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TrustHash(pub [u8; 32]);

impl TrustHash {
    /// The hash of these bytes.
    pub fn of(bytes: &[u8]) -> TrustHash {
        TrustHash(*blake3::hash(bytes).as_bytes())
    }
}

/// A hash in JSON was not the lower-case hexadecimal digits it should be.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a hash: {1} lower-case hexadecimal digits were expected")]
pub struct HashError(String, usize);

fn unhex<const N: usize>(text: &str) -> Result<[u8; N], HashError> {
    let error = || HashError(text.chars().take(80).collect(), 2 * N);
    let lower = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if text.len() != 2 * N || !lower {
        return Err(error());
    }
    let half = |digit: u8| if digit <= b'9' { digit - b'0' } else { digit - b'a' + 10 };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
        *byte = half(pair[0]) << 4 | half(pair[1]);
    }
    Ok(bytes)
}

/// Appends the lower-case hexadecimal digits of bytes. A step has thousands of hashes, and each is
/// written several times.
fn hex(bytes: &[u8], text: &mut Vec<u8>) {
    let digit = |half: u8| b"0123456789abcdef"[usize::from(half)];
    for byte in bytes {
        text.extend_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
    }
}

macro_rules! as_hex {
    ($name:ident, $from:expr, $into:expr) => {
        impl TryFrom<String> for $name {
            type Error = HashError;
            fn try_from(text: String) -> Result<Self, HashError> {
                unhex(&text).map($from)
            }
        }
        impl From<$name> for String {
            fn from(hash: $name) -> String {
                let bytes = $into(hash.0);
                let mut text = Vec::with_capacity(2 * bytes.len());
                hex(&bytes, &mut text);
                String::from_utf8(text).expect("digits are ASCII")
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&String::from(*self))
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

as_hex!(ContentHash, |b| ContentHash(u128::from_be_bytes(b)), u128::to_be_bytes);
as_hex!(TrustHash, TrustHash, std::convert::identity::<[u8; 32]>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_survives_json_and_anything_else_is_refused() {
        let hash = ContentHash::of(b"shard");
        let json = serde_json::to_string(&hash).unwrap();
        assert_eq!(serde_json::from_str::<ContentHash>(&json).unwrap(), hash);
        for wrong in ["", "00", "zz", &"0".repeat(33), &"A".repeat(32)] {
            assert!(ContentHash::try_from(wrong.to_string()).is_err(), "{wrong:?}");
        }
    }
}
