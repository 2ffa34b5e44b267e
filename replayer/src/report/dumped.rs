//! The report of `replay verify` as text: what a dump holds, and whether it is what the job held.

use std::fmt::Write;

use super::text::wrap;
use crate::dump::StepDump;
use crate::number::{bytes, count, plural};
use crate::verify::Verification;
use backtape::shard::FingerprintSource;

/// The text of `replay verify`: each check with its result.
pub fn verification(dump: &StepDump, proof: &Verification) -> String {
    let mut out = String::new();
    title(&mut out, dump);
    let size = format!("{}, {}", plural(proof.shards, "shard"), bytes(proof.bytes));
    let _ = writeln!(
        out,
        "bytes     {} of {size}: hash as taken in the training process",
        count(proof.hashes_ok)
    );
    let _ = writeln!(
        out,
        "place     {} of {}: fingerprint recomputed from box and bytes\n",
        count(proof.places_ok),
        plural(proof.shards, "shard"),
    );
    tensors(&mut out, proof);
    for finding in &proof.findings {
        wrap(&mut out, "found     ", &finding.sentence);
    }
    for item in &proof.not_checked {
        wrap(&mut out, "unchecked ", &format!("{}: {}", item.what, item.why));
    }
    let verdict = match (proof.intact(), dump.committed()) {
        (true, true) => "PROVED: the dump is what the job held.",
        (true, false) => {
            "PARTIAL: what is there is what the job held; the step was never committed."
        }
        (false, true) if proof.only_copies_differ() => {
            "PROVED: the dump is what the job held. But ranks that should hold the same bits do not: the\n\
             job is wrong, or they hold parts of a sum and `placement` does not say so."
        }
        _ => "NOT PROVED: see what was found.",
    };
    let _ = writeln!(out, "\n{verdict}");
    out
}

/// Writes one line for each tensor: its fingerprint, who computed it, and whether the tensor is
/// usable; below it why not.
fn tensors(out: &mut String, proof: &Verification) {
    let names = proof.tensors.iter().map(|tensor| tensor.key.to_string().len());
    let room = names.max().unwrap_or(0).clamp(34, 44);
    let _ = writeln!(
        out,
        "{:<room$}{:>6} {:>11}  {:<18}{:<12}usable",
        "tensor", "shards", "bytes", "fingerprint", "placed by"
    );
    for tensor in &proof.tensors {
        let fingerprint = match (tensor.fingerprint, tensor.partial) {
            (Some(fingerprint), _) => fingerprint.to_string(),
            (None, Some(_)) => "one per addend".into(),
            (None, None) => "none".into(),
        };
        let source = match tensor.fingerprint_source {
            FingerprintSource::Framework => "framework",
            FingerprintSource::Recorder => "declaration",
        };
        let _ = writeln!(
            out,
            "{:<room$}{:>6} {:>11}  {:<18}{:<12}{}",
            tensor.key.to_string(),
            tensor.shards,
            bytes(tensor.bytes),
            fingerprint,
            source,
            if tensor.unusable.is_none() { "yes" } else { "NO" },
        );
        if let Some(why) = &tensor.unusable {
            wrap(out, "  NO: ", why);
        }
    }
    out.push('\n');
}

pub(super) fn title(out: &mut String, dump: &StepDump) {
    let ranks = plural(u64::from(dump.manifest.world_size), "rank");
    let _ = writeln!(
        out,
        "run       {}, attempt {}, step {} ({ranks})",
        dump.run, dump.attempt, dump.step
    );
    let _ = writeln!(out, "dump      {}; {}", dump.state, dump.directory.display());
    for sentence in dump.passed_over() {
        wrap(out, "note      ", &sentence);
    }
    out.push('\n');
}
