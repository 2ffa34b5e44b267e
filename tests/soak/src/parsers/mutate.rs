//! Damaged inputs: a few changes to a sound one, drawn at random, among them those that parsers
//! fall for.

use crate::random::Random;

/// Longest input: an online header is far shorter, and a fuzzer learns more from many.
const LONGEST: usize = 1 << 16;

/// What stands in JSON, in selections and in length fields, and what does not.
const WORDS: [&[u8]; 40] = [
    b"18446744073709551615",
    b"18446744073709551616",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"4294967295",
    b"4294967296",
    b"-1",
    b"0",
    b"1e999",
    b"1e-400",
    b"0.1",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b"\"\"",
    b"\"",
    b"\\u0000",
    b"\\ud800",
    b"\\\"",
    b",",
    b":",
    b"]",
    b"}",
    b"NaN",
    b"Infinity",
    b"every:0",
    b"every:18446744073709551615",
    b"0-18446744073709551615",
    b"**/*",
    b"[!a-",
    b"!",
    b"..",
    b"/",
    b"\0",
    b"\n",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\xf0\x9f\xa6\x80",
    b"\xc3\x28",
];

/// A damaged copy of one of the seeds.
pub(crate) fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = pick(seeds, random).clone();
    for _ in 0..1 + random.below(4) {
        change(&mut bytes, seeds, random);
    }
    bytes.truncate(LONGEST);
    bytes
}

fn pick<'a, T>(from: &'a [T], random: &mut Random) -> &'a T {
    &from[random.below(from.len() as u64) as usize]
}

fn range(bytes: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let start = random.below(bytes.len() as u64 + 1) as usize;
    let most = (bytes.len() - start).min(64) as u64;
    start..start + random.below(most + 1) as usize
}

fn change(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(bytes.len() as u64 + 1) as usize;
    match random.below(9) {
        0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        2 if at < bytes.len() => bytes[at] = random.next() as u8,
        3 => drop(bytes.drain(range(bytes, random))),
        4 => {
            let copied = bytes[range(bytes, random)].to_vec();
            bytes.splice(at..at, copied);
        }
        5 => {
            let replaced = range(bytes, random);
            bytes.splice(replaced, pick(&WORDS, random).iter().copied());
        }
        6 => number(bytes, at, random),
        7 => {
            let other = pick(seeds, random);
            let piece = other[range(other, random)].to_vec();
            bytes.splice(at..at, piece);
        }
        8 if random.below(8) == 0 => {
            let nest = pick(&["[", "{\"a\":", "[[[[", "\\\"", "["], random);
            let deep = nest.repeat(1 << random.below(12)).into_bytes();
            bytes.splice(at..at, deep);
        }
        _ => bytes.truncate(at),
    }
}

/// Puts another number in the place of the next one.
fn number(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = (at..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let text = match random.below(3) {
        0 => (random.next() >> random.below(64)).to_string().into_bytes(),
        1 => pick(&WORDS[..9], random).to_vec(),
        _ => random.below(4).to_string().into_bytes(),
    };
    bytes.splice(start..start + digits, text);
}
