//! Finds memory that was never written, by fill patterns of allocators and debuggers and by NaNs
//! that no arithmetic produces.
//!
//! A pattern counts where it fills consecutive words of four bytes. Among n words, a run of r words
//! that equals one of P patterns occurs by chance with a probability of at most `n P 2^(-r b)`,
//! where b is the number of a word's bits that are random in unrelated values (the fractions of its
//! elements). Only runs for which this is below [`FALSE_ALARM`], divided by the tensors of a step,
//! are reported. The padded classes of logits are left out, since a kernel need not write them. In
//! integers of two bytes the finding is a warning, as the pattern may be the id that pads a row.

use backtape::dtype::Dtype;
use backtape::role::Role;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::algebra;
use crate::bits::{Kind, all_finite, bits, format, kind, random_bits};
use crate::compare::bound::FALSE_ALARM;
use crate::dump::{TensorInfo, name_ranks};
use crate::number::plural;

const CAUSE: &str = "uninitialised-output";

/// Fill patterns, and what writes them.
const PATTERNS: [(u32, &str); 12] = [
    (0xcdcd_cdcd, "0xCD, a debug heap's fresh memory"),
    (0xaaaa_aaaa, "0xAA, a poisoned buffer"),
    (0xcccc_cccc, "0xCC, a stack that was not initialised"),
    (0xdddd_dddd, "0xDD, a debug heap's freed memory"),
    (0xfdfd_fdfd, "0xFD, a debug heap's guard"),
    (0xa5a5_a5a5, "0xA5, an allocator's junk"),
    (0x5a5a_5a5a, "0x5A, an allocator's freed junk"),
    (0xdead_beef, "0xDEADBEEF"),
    (0xbaad_f00d, "0xBAADF00D"),
    (0xfeee_feee, "0xFEEEFEEE"),
    (0xabab_abab, "0xAB, an allocator's guard"),
    (ALL_ONES, "all bits set, a NaN"),
];
/// Bytes that are searched for any pattern at once, before single words are; a whole number of
/// elements of every dtype.
const CHUNK: usize = 4096;
/// In integers this is -1, an ordinary value.
const ALL_ONES: u32 = u32::MAX;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let tensors: Vec<_> = subject.dump.tensors().iter().collect();
        let scanned = tensors.par_iter().map(|(_, info)| scanned(subject, info, tensors.len()));
        let all: Vec<_> = scanned.collect();
        for ((key, _), scanned) in tensors.iter().zip(all) {
            let Some((recorded, hits)) = scanned else { continue };
            results.looked();
            report_runs(subject, key, &recorded, &hits, results);
            report_payloads(subject, key, &recorded, &hits, results);
        }
    }
}

/// What was found in one piece.
#[derive(Default)]
struct Hit {
    /// The runs of a pattern that are long enough.
    filled: Option<Filled>,
    /// Number of NaNs with unusual payloads; below, element and bits of the first.
    payloads: u64,
    first_payload: Option<(usize, u64)>,
}

/// The runs of one pattern in a piece.
struct Filled {
    /// Index in [`PATTERNS`].
    pattern: usize,
    /// Number of words in all runs.
    words: u64,
    /// The first word of the first run.
    first_word: usize,
}

/// The pieces of a tensor and what was found in each; `None` where the tensor has no bytes, or no
/// dtype in which a pattern can be recognised.
fn scanned<'a>(
    subject: &Subject<'a>,
    info: &'a TensorInfo,
    tensors: usize,
) -> Option<(Vec<Piece<'a>>, Vec<Hit>)> {
    if info.dtype.width() == 1 && format(info.dtype).is_none() {
        return None;
    }
    let (recorded, _) = pieces(subject.dump, info);
    let padding = padding(subject, info);
    let hits = recorded.iter().map(|piece| scan(info, piece, tensors, padding)).collect();
    (!recorded.is_empty()).then_some((recorded, hits))
}

/// How many consecutive words a pattern must fill.
fn needed(dtype: Dtype, words: usize, tensors: usize) -> usize {
    let elements = (4 / dtype.width()).max(1) as f64;
    let per_word = elements * f64::from(random_bits(dtype).min(32));
    let tries = words as f64 * PATTERNS.len() as f64 * tensors.max(1) as f64;
    ((tries / FALSE_ALARM).log2() / per_word).ceil().max(2.0) as usize
}

/// The first column of padding, which a kernel need not write; `u64::MAX` where there is none.
fn padding(subject: &Subject<'_>, info: &TensorInfo) -> u64 {
    let of_classes = matches!(info.role, Some(Role::Logits | Role::Dlogits));
    let valid = subject.head().and_then(|head| head.valid_vocab);
    valid.filter(|_| of_classes && info.shape.len() > 1).unwrap_or(u64::MAX)
}

fn scan(info: &TensorInfo, piece: &Piece<'_>, tensors: usize, padding: u64) -> Hit {
    let words = piece.bytes.len() / 4;
    let column = |word: usize| {
        let element = word * 4 / info.dtype.width();
        piece.column_range().0 + (element % piece.columns().max(1)) as u64
    };
    let needed = needed(info.dtype, words, tensors);
    let mut hit = Hit::default();
    let (mut run, mut pattern) = (0, usize::MAX);
    let mut close = |run: usize, pattern: usize, end: usize| {
        if run < needed || (PATTERNS[pattern].0 == ALL_ONES && !info.dtype.is_float()) {
            return;
        }
        match &mut hit.filled {
            Some(filled) if filled.pattern == pattern => filled.words += run as u64,
            Some(_) => {}
            None => {
                hit.filled = Some(Filled { pattern, words: run as u64, first_word: end - run });
            }
        }
    };
    for (nth, some) in piece.bytes.chunks(CHUNK).enumerate() {
        if run == 0 && !holds_patterns(some) {
            continue;
        }
        for (index, word) in some.as_chunks().0.iter().enumerate() {
            let (index, word) = (nth * CHUNK / 4 + index, u32::from_le_bytes(*word));
            if run > 0 && PATTERNS[pattern].0 == word {
                run += 1;
                continue;
            }
            if run > 0 {
                close(run, pattern, index);
            }
            let hit = PATTERNS.iter().position(|(known, _)| *known == word);
            let hit = hit.filter(|_| column(index) < padding);
            (run, pattern) = hit.map_or((0, usize::MAX), |pattern| (1, pattern));
        }
    }
    if run > 0 {
        close(run, pattern, words);
    }
    odd_payloads(info.dtype, piece, &mut hit);
    hit
}

/// Whether any word is one of the patterns. The loop never stops early, so that the compiler can
/// vectorise it.
fn holds_patterns(bytes: &[u8]) -> bool {
    let is_pattern =
        |word: u32| PATTERNS.iter().fold(false, |any, (known, _)| any | (word == *known));
    let words = bytes.as_chunks().0.iter();
    words.fold(false, |any, word| any | is_pattern(u32::from_le_bytes(*word)))
}

/// Counts NaNs whose fraction is neither only the quiet bit nor all ones, the two that the
/// arithmetic of CPUs and GPUs produces.
fn odd_payloads(dtype: Dtype, piece: &Piece<'_>, hit: &mut Hit) {
    let Some((_, fraction)) = format(dtype).filter(|_| dtype.width() > 1) else { return };
    let (all, quiet) = ((1u64 << fraction) - 1, 1u64 << (fraction - 1));
    let width = dtype.width();
    for (nth, some) in piece.bytes.chunks(CHUNK).enumerate() {
        if all_finite(dtype, some) {
            continue;
        }
        for i in 0..some.len() / width {
            let bits = bits(some, width, i);
            if kind(dtype, bits) == Kind::Nan && ![all, quiet].contains(&(bits & all)) {
                hit.payloads += 1;
                hit.first_payload.get_or_insert((nth * CHUNK / width + i, bits));
            }
        }
    }
}

fn report_runs(
    subject: &Subject<'_>,
    key: &TensorKey,
    recorded: &[Piece<'_>],
    hits: &[Hit],
    results: &mut CheckResults,
) {
    for (piece, hit) in recorded.iter().zip(hits) {
        let Some(Filled { pattern, words, first_word }) = hit.filled else { continue };
        let width = piece.record.dtype.width();
        let row = piece.global_row(first_word * 4 / width / piece.columns().max(1));
        let (_, name) = PATTERNS[pattern];
        let all = words as usize * 4 == piece.bytes.len();
        let evidence = format!(
            "{key} {} of {}: {} of {}{} hold {name}, from row {row} on",
            piece.place(),
            name_ranks(&piece.ranks),
            plural(words * 4, "byte"),
            piece.bytes.len(),
            if all { " (all of it)" } else { "" },
        );
        let nan = PATTERNS[pattern].0 == ALL_ONES;
        // A repeated value of two bytes may be the id that pads a row.
        let id = !piece.record.dtype.is_float() && width < 4;
        // Elements that are equal by nature, as those of a state that nothing reached, are one value, and
        // one of two bytes may be any. A stage of the step is judged beside this.
        let one = all && width < 4 && algebra::is_part(key);
        let severity = if nan || id || one { Severity::Warn } else { Severity::Fail };
        let place = Place::of(subject).tensor(key).ranks(&piece.ranks).rows(&[row]);
        let advice = "The op did not write this part of its output: look at its grid, its tails and its early exits";
        results.add(severity, Some(CAUSE), place, evidence, advice);
    }
}

fn report_payloads(
    subject: &Subject<'_>,
    key: &TensorKey,
    recorded: &[Piece<'_>],
    hits: &[Hit],
    results: &mut CheckResults,
) {
    for (piece, hit) in recorded.iter().zip(hits).filter(|(_, hit)| hit.filled.is_none()) {
        let Some((element, bits)) = hit.first_payload else { continue };
        let row = piece.global_row(element / piece.columns().max(1));
        let digits = 2 * piece.record.dtype.width();
        let evidence = format!(
            "{key} {} of {}: {} whose bits no arithmetic makes, the first 0x{bits:0digits$x} in row {row}",
            piece.place(),
            name_ranks(&piece.ranks),
            plural(hit.payloads, "NaN"),
        );
        let place = Place::of(subject).tensor(key).ranks(&piece.ranks).rows(&[row]);
        let advice = "Look for memory that is read before it is written, or read as another dtype";
        results.add(Severity::Warn, Some(CAUSE), place, evidence, advice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_seen_in_whichever_word_it_lies() {
        let mut bytes: Vec<u8> = (0..CHUNK).map(|at| (at % 7) as u8).collect();
        assert!(!holds_patterns(&bytes));
        for (offset, (pattern, _)) in (0..CHUNK).step_by(332).zip(PATTERNS) {
            let word = bytes[offset / 4 * 4..][..4].to_vec();
            bytes[offset / 4 * 4..][..4].copy_from_slice(&pattern.to_le_bytes());
            assert!(holds_patterns(&bytes), "{pattern:x} at {offset}");
            bytes[offset / 4 * 4..][..4].copy_from_slice(&word);
        }
        assert!(!holds_patterns(&bytes));
    }
}
