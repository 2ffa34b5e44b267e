//! grad_norm as text: what the job reported, what it should be, and which tensors, ranks and rows
//! cause the difference.

use crate::replay::norm_gap::NormGap;
use crate::replay::outcome::{GradNorm, Share};

/// The text shows the shares of a gap only if it is this many times what rounding explains; the
/// JSON always has them.
const SHOWN: f64 = 3.0;
/// Most shares of one kind that are shown.
const NAMED: usize = 4;

/// One statement for each line; `other` is the norm that the other run reported.
pub(super) fn lines(norm: &GradNorm, other: Option<f64>) -> Vec<String> {
    let mut lines = facts(norm, other);
    lines.extend(gap(norm));
    lines
}

/// The same without the gap, for the HTML page, which draws it.
pub(super) fn facts(norm: &GradNorm, other: Option<f64>) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(captured) = norm.captured {
        parts.push(format!("{captured:.7} as the job reported it"));
    }
    if let Some(reference) = norm.reference {
        parts.push(format!("{reference:.7} with dk from the f64 reference"));
    }
    if let (Some(ours), Some(exact)) = (norm.dk_captured, norm.dk_reference) {
        let apart = ours / exact - 1.0;
        parts.push(format!("norm of dk {ours:.7}, reference {exact:.7} ({apart:+.2e})"));
    }
    if let Some(other) = other {
        parts.push(format!("{other:.7} in the other run"));
    }
    let mut lines: Vec<String> = Vec::new();
    if !parts.is_empty() {
        lines.push(parts.join("; "));
    }
    if let Some(reported_as) = &norm.reported_as {
        lines.push(format!("the reported norm is {reported_as}"));
    }
    lines
}

/// The gap between the norms of two runs, with its shares.
pub(super) fn pair(gap: &NormGap) -> Vec<String> {
    let mut lines = vec![format!("gap to the other run {:+.3e}", gap.gap)];
    lines.extend(by_kind(&gap.shares));
    lines
}

fn gap(norm: &GradNorm) -> Vec<String> {
    let (Some(gap), Some(floor)) = (norm.gap, norm.floor) else { return Vec::new() };
    if !(gap.abs() > SHOWN * floor.abs()) || norm.shares.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![format!("gap {gap:+.3e}; the declared precision explains {floor:+.1e}")];
    lines.extend(by_kind(&norm.shares));
    lines
}

/// A share in percent with one decimal; `0.0` instead of `-0.0`.
pub(super) fn percent(share: f64) -> String {
    let text = format!("{:.1}", 100.0 * share);
    if text == "-0.0" { "0.0".into() } else { text }
}

fn by_kind(all: &[Share]) -> Vec<String> {
    let mut lines = Vec::new();
    for kind in ["tensor", "rank", "microbatch", "rows", "row", "vocabulary"] {
        let mut shares: Vec<&Share> = all.iter().filter(|s| s.kind == kind).collect();
        if shares.is_empty() {
            continue;
        }
        shares.sort_by(|a, b| b.share.abs().total_cmp(&a.share.abs()));
        let shown = shares.iter().take(NAMED);
        let words: Vec<String> =
            shown.map(|s| format!("{} {} %", s.of, percent(s.share))).collect();
        lines.push(format!("gap by {kind}: {}", words.join(", ")));
    }
    lines
}
