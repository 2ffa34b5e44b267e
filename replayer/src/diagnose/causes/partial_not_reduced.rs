//! `partial-not-reduced`: one rank's part is taken for the whole: the part of one vocabulary shard
//! for dq or lse, one rank's addend for dk; or lse is summed over the shards once too often.
//!
//! Detectors: a token's row of dq is compared with the sums of its terms over every shard of the
//! vocabulary, for all tokens alike or row by row; lse is off by one constant log n; dk is solved
//! for the weights of its addends. A segment of the reduced dk with other weights of the addends
//! than the rest is solved separately. Copies of the reduced dk that differ from rank to rank are
//! each solved, in the segment in which they differ, for the ranks (or devices of a rank) whose
//! gradients they contain. Emulation: rows of k outside the shard add nothing; lse + log n; addends
//! of weight 0.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::identity::{Microbatch, Rank};
use rayon::prelude::*;

use super::sync_wrong_microbatch::holds_ranks;
use super::tail_tile_unmasked::captured_lse;
use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis, Observed};
use crate::diagnose::data_worlds::OtherLse;
use crate::diagnose::detectors::addends::{Addend, Solved, Weighted, solved};
use crate::diagnose::detectors::implied_lse::{implied_lse, median};
use crate::diagnose::detectors::replicas::{Versions, versions};
use crate::diagnose::detectors::segments::{Segments, segments};
use crate::diagnose::detectors::single_tokens::{Direct, alike, distance, energy, tokens};
use crate::diagnose::detectors::sum_counts::{CountedSums, GradientPart};
use crate::diagnose::detectors::vocab_shards::{MOST, Shard, rows_of_shards, shards};
use crate::diagnose::evidence::{Evidence, Key};
use crate::dump::name_ranks;
use crate::head::inputs::Scores;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::world::{Pass, World};

/// The catalogue's entry.
pub struct PartialNotReduced;

impl Cause for PartialNotReduced {
    fn id(&self) -> &str {
        "partial-not-reduced"
    }

    fn about(&self) -> &str {
        "one rank's part is taken for the whole: the sum over ranks is missing, or taken once more"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy 42", "ms-swift 9947"]
    }

    fn advice(&self) -> &str {
        "all-reduce what every shard holds a part of exactly once: dq and the sum of exponentials over the tensor-parallel ranks, dk over the data-parallel ones (in DDP and FSDP, run the last microbatch's backward outside no_sync)"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut hypotheses = of_dq(evidence);
        hypotheses.extend(of_rows_of_dq(evidence));
        hypotheses.extend(of_lse(evidence));
        hypotheses.extend(of_sums(evidence));
        hypotheses.extend(of_segments(evidence));
        hypotheses.extend(of_devices(evidence));
        hypotheses
    }

    /// Shows where every tensor-parallel rank holds its own part of dq, or groups of ranks hold
    /// their own sums for the reduced dk.
    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        let all = versions(evidence);
        if let Some(observed) = all.iter().find_map(|versions| sums_of_groups(evidence, versions)) {
            return Some(observed);
        }
        let versions_of_dq = all.iter().find(|versions| versions.is_parts_of_dq(evidence))?;
        let words = format!(
            "{} has {} versions, one a rank, and their sum is what each of them should be",
            versions_of_dq.key,
            versions_of_dq.versions.len()
        );
        let parameters =
            vec![("of", "dq".to_string()), ("shards", versions_of_dq.versions.len().to_string())];
        Some(Observed { evidence: words, stages: vec![Stage::Dq], parameters })
    }
}

/// The observation that the versions of a reduced dk are each the sum of only some ranks'
/// gradients.
fn sums_of_groups(evidence: &Evidence<'_>, versions: &Versions) -> Option<Observed> {
    let sums = versions.as_sums(evidence)?;
    if !sums.versions.iter().all(|(_, addends)| holds_ranks(addends)) {
        return None;
    }
    let word = |(ranks, addends): &(Vec<Rank>, Vec<Addend>)| {
        let counted = || addends.iter().filter(|addend| addend.weight != 0.0);
        let of_ranks: BTreeSet<Rank> = counted().filter_map(|addend| addend.rank).collect();
        let of_ranks: Vec<Rank> = of_ranks.into_iter().collect();
        let devices: Vec<&str> = counted().filter_map(|addend| addend.device.as_deref()).collect();
        let holders_of_sum =
            if devices.is_empty() { name_ranks(&of_ranks) } else { devices.join(" and ") };
        format!("{}: those of {holders_of_sum}", name_ranks(ranks))
    };
    let of_devices =
        sums.versions.iter().flat_map(|(_, all)| all).any(|addend| addend.device.is_some());
    let holders = if of_devices { "devices" } else { "ranks" };
    let rows = sums.place();
    let place = if rows.is_empty() { String::new() } else { format!(" in {rows}") };
    let words = format!(
        "{} differs between {holders}{place}, and each version is the sum of some {holders}' gradients alone there",
        versions.key
    );
    let held_words = sums.versions.iter().map(word).collect::<Vec<_>>().join("; ");
    let mut parameters = vec![("of", format!("dk over {holders}")), ("holds only", held_words)];
    parameters.extend((!rows.is_empty()).then_some(("where", rows)));
    Some(Observed { evidence: words, stages: vec![Stage::Reduce], parameters })
}

/// The hypothesis that some rows of dq hold one shard's part.
fn of_rows_of_dq(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let rows = rows_of_shards(evidence)?;
    let told = |tokens: &[usize]| match (tokens.iter().min(), tokens.iter().max()) {
        (Some(first), Some(last)) => format!("{} tokens between {first} and {last}", tokens.len()),
        _ => String::new(),
    };
    let tokens: Vec<String> = rows.tokens.values().map(|tokens| told(tokens)).collect();
    let shards: Vec<String> = rows.tokens.keys().map(ToString::to_string).collect();
    let parameters = vec![
        ("of", "some rows of dq".to_string()),
        ("shards", rows.shards.to_string()),
        ("shard", shards.join(", ")),
        ("which", tokens.join(", ")),
    ];
    Some(Hypothesis::new(rows.world, parameters).fitted(1))
}

/// Hypotheses that dq of a microbatch is one shard's part.
fn of_dq(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses: Vec<Hypothesis> = Vec::new();
    let mut seen: Vec<Range<usize>> = Vec::new();
    let failing = |inputs: &&MicrobatchInputs| {
        let is_dq = |key: &&Key| key.stage == Stage::Dq && key.microbatch == inputs.microbatch;
        evidence.failing.iter().any(|key| is_dq(&key))
    };
    for inputs in evidence.inputs.iter().filter(failing) {
        let Some(shard) = shard_of_dq(evidence, inputs) else { continue };
        if seen.contains(&shard.range) {
            continue;
        }
        seen.push(shard.range.clone());
        let parameters = vec![
            ("of", "dq".to_string()),
            ("shards", shard.count.to_string()),
            ("shard", shard.number.to_string()),
            ("vocabulary", format!("{}..{}", shard.range.start, shard.range.end)),
        ];
        // Only the microbatches whose dq fails have one shard's part.
        let mut lse = evidence.reference().lse.clone();
        lse.retain(|mb, _| {
            evidence.inputs.iter().any(|inputs| inputs.microbatch == *mb && failing(&inputs))
        });
        hypotheses.push(Hypothesis::new(OneShard { range: shard.range, lse }, parameters));
    }
    hypotheses
}

/// The shard whose part of the sum over classes explains the rows of a few tokens.
fn shard_of_dq(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Option<Shard> {
    let direct = Direct::new(evidence, inputs)?;
    let reference = evidence.reference();
    let key = Key { stage: Stage::Dq, microbatch: inputs.microbatch, rank: None };
    let key = *evidence
        .failing
        .range(key..)
        .find(|k| k.stage == Stage::Dq && k.microbatch == inputs.microbatch)?;
    let captured = evidence.captured(key)?;
    let lse = reference.lse.get(&inputs.microbatch)?;
    let all = tokens(evidence, inputs);
    let some: Vec<usize> = all.iter().step_by(all.len().div_ceil(5).max(1)).copied().collect();
    let mut left: Option<Vec<Shard>> = None;
    for t in some {
        let cotangents = *reference.cotangents.get(&inputs.microbatch)?.get(&t)?;
        let q = direct.q(Row::From(t));
        let width = q.len();
        // Prefix sums over classes v of the entry of dlogits times row v of k.
        let mut sums = vec![vec![0.0; width]];
        for v in 0..direct.head.valid_vocab {
            let k = direct.k(Row::From(v));
            let is_label = inputs.labels[t] as usize == v;
            let entry = direct.entry((&q, v), (lse[t], cotangents), is_label);
            let last = &sums[v];
            sums.push((0..width).map(|i| last[i] + entry * k[i]).collect());
        }
        let end = sums.len() - 1;
        let row = captured.row(t);
        let fits = |shard: &Shard| {
            let (from, to) = (&sums[shard.range.start.min(end)], &sums[shard.range.end.min(end)]);
            let part: Vec<f64> = to.iter().zip(from).map(|(to, from)| to - from).collect();
            let small = 1e-6 * energy(&sums[end]);
            alike(row, &part) || (energy(&part) < small && distance(row, &part) < small)
        };
        let mut now = left.unwrap_or_else(|| shards(direct.head.k.rows));
        now.retain(fits);
        left = Some(now).filter(|now| !now.is_empty());
        left.as_ref()?;
    }
    left?.into_iter().next()
}

struct OneShard {
    range: Range<usize>,
    /// lse over the whole vocabulary, for the microbatches whose dq is one shard's part.
    lse: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for OneShard {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if self.lse.contains_key(&inputs.microbatch)
            && let Scores::Product { k, .. } = &mut inputs.scores
            && let Some(part) = k.with_rows(&|row| match self.range.contains(&row) {
                true => Row::From(row),
                false => Row::Zeros,
            })
        {
            *k = part;
        }
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        // The softmax is over the whole vocabulary; only the product with k is one shard's.
        if let Some(lse_of_shard) =
            self.lse.get(&inputs.microbatch).filter(|_| pass == Pass::Backward)
        {
            lse.copy_from_slice(lse_of_shard);
        }
    }
}

/// Hypotheses that lse is too large by log n, or that of one shard.
fn of_lse(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    if !evidence.fails(Stage::Lse) && !evidence.fails_any(&Stage::GRADIENTS) {
        return Vec::new();
    }
    let all: Vec<_> =
        evidence.inputs.iter().flat_map(|inputs| implied_lse(evidence, inputs)).collect();
    let off = median(all.iter().map(|implied| implied.implied - implied.lse).collect());
    let steady =
        all.iter().filter(|implied| (implied.implied - implied.lse - off).abs() < 0.02).count();
    let n = off.exp().round();
    let captured = captured_lse(evidence);
    if n >= 2.0 && n <= MOST as f64 && (off - n.ln()).abs() < 0.01 && 4 * steady >= 3 * all.len() {
        let more = |lse: &f64| lse + n.ln();
        let larger =
            |(&mb, lse): (&Option<Microbatch>, &Vec<f64>)| (mb, lse.iter().map(more).collect());
        let lse = evidence.reference().forward_lse.iter().map(larger).collect();
        let parameters = vec![
            ("of", "the sum of exponentials, counted n times".to_string()),
            ("n", n.to_string()),
        ];
        let mesh = &evidence.step.dump.manifest.mesh;
        let axis = mesh.0.iter().any(|(_, size)| f64::from(*size) == n);
        let fitted = usize::from(!(axis || evidence.ranks() as f64 == n));
        return vec![Hypothesis::new(OtherLse { lse, captured }, parameters).fitted(fitted)];
    }
    if off < -1e-3 { one_shards_lse(evidence) } else { Vec::new() }
}

/// The hypothesis that lse is taken over one shard's classes.
fn one_shards_lse(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let Some(first) =
        evidence.inputs.iter().find(|inputs| !implied_lse(evidence, inputs).is_empty())
    else {
        return Vec::new();
    };
    let Some(direct) = Direct::new(evidence, first) else { return Vec::new() };
    let valid = direct.head.valid_vocab;
    let seen = implied_lse(evidence, first);
    let some: Vec<_> = seen.iter().step_by(seen.len().div_ceil(5).max(1)).collect();
    let rows: Vec<Vec<f64>> = some
        .iter()
        .map(|implied| direct.against(&direct.q(Row::From(implied.token)), &Row::From).logits)
        .collect();
    let fits = |shard: &Shard| {
        let end = shard.range.end.min(valid);
        shard.range.start < end
            && some.iter().zip(&rows).all(|(implied, logits)| {
                let lse = direct.lse(&logits[shard.range.start..end]);
                (lse - implied.implied).abs() < 0.01
            })
    };
    let Some(shard) = shards(direct.head.k.rows).into_iter().find(fits) else { return Vec::new() };
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let direct = Direct::new(evidence, inputs)?;
        let end = shard.range.end.min(valid);
        let lse_of = |t: usize| {
            let row = direct.against(&direct.q(Row::From(t)), &Row::From);
            direct.lse(&row.logits[shard.range.start..end])
        };
        let lse: Vec<f64> = (0..inputs.tokens()).into_par_iter().map(lse_of).collect();
        Some((inputs.microbatch, lse))
    };
    let lse = evidence.inputs.iter().filter_map(of_microbatch).collect();
    let parameters = vec![
        ("of", "lse".to_string()),
        ("shards", shard.count.to_string()),
        ("shard", shard.number.to_string()),
    ];
    let captured = captured_lse(evidence);
    vec![Hypothesis::new(OtherLse { lse, captured }, parameters)]
}

/// Hypotheses that a reduced dk, of the step or of its microbatches, lacks whole ranks' addends.
fn of_sums(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut all: Vec<(BTreeSet<Option<Rank>>, Vec<Solved>)> = Vec::new();
    for solved_sum in solved(evidence) {
        let Some(out) = solved_sum.ranks_left_out() else { continue };
        match all
            .iter_mut()
            .find(|(ranks, same)| *ranks == out && same[0].scale == solved_sum.scale)
        {
            Some((_, same)) => same.push(solved_sum),
            None => all.push((out, vec![solved_sum])),
        }
    }
    let hypothesis_of = |(out, solved_sums): (BTreeSet<Option<Rank>>, Vec<Solved>)| {
        let holds = |addend: &&Addend| !out.contains(&addend.rank);
        let held_ranks: BTreeSet<Rank> =
            solved_sums[0].addends.iter().filter(holds).filter_map(|addend| addend.rank).collect();
        let rank_names: Vec<String> = held_ranks.iter().map(ToString::to_string).collect();
        let (scale, fitted) =
            (solved_sums[0].scale_name(), usize::from(solved_sums[0].scale != 1.0));
        let parameters = vec![
            ("of", "dk over ranks".to_string()),
            ("holds only ranks", rank_names.join(", ")),
            ("scale", scale),
        ];
        Hypothesis::new(Weighted { sums: solved_sums }, parameters).fitted(fitted)
    };
    all.into_iter().map(hypothesis_of).collect()
}

/// The hypothesis that sums of dk lack the gradients of some of a rank's devices.
fn of_devices(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let sums =
        CountedSums::of(evidence, GradientPart::Whole).filter(|sums| sums.is_of_devices())?;
    let what = "dk over devices".to_string();
    let parameters = vec![("of", what), ("holds only", sums.devices.join(" and "))];
    Some(Hypothesis::new(sums, parameters).fitted(1))
}

/// Hypotheses of segments of the reduced dk with other weights than the rest; segments that are a
/// mean are `rank-mean-vs-sum`.
fn of_segments(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let all = segments(evidence).into_iter();
    let other = all.filter(|segments| !segments.factor().is_some_and(|factor| factor < 1.0));
    let of_sum = |segments: Segments| {
        let parameters = vec![
            ("of", "a part of dk over ranks".to_string()),
            ("where", segments.places()),
            ("holds", segments.holds()),
        ];
        let pieces = segments.segments.len();
        Hypothesis::new(segments.world(), parameters).fitted(pieces)
    };
    other.map(of_sum).collect()
}
