//! `label-shift`: the loss was taken against the labels of other positions.
//!
//! Detectors: the shift is the one that most failing rows of dq, or label logits, fit. The tokens
//! that do not fit are ends of runs: they give the length of the runs and the labels at their ends.
//! Where the recorded labels fit all tokens but ends at regular distances, the shift was made
//! inside runs. Where no rows were captured, the usual shifts are tried. Where the head shifts the
//! labels inside each sequence, two more are tried: a shift over a rank's tokens or the batch, by
//! which the last token of a sequence takes the first label of the next one, and one inside each
//! rank's part of a sequence. Emulation: the recorded labels rolled inside runs, with ends wrapped,
//! ignored, kept, or read off the captured rows (where an end's label is none of the recorded
//! ones).

use std::collections::BTreeMap;

use super::shifted_in_runs;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::data_worlds::{RecordedCounts, Relabelled};
use crate::diagnose::detectors::label_fit::LabelTest;
use crate::diagnose::detectors::shown_labels::{Labels, length_of_runs};
use crate::diagnose::detectors::suspect_tokens::SuspectTokens;
use crate::diagnose::detectors::token_runs::{TokenRuns, known, of_ranks};
use crate::diagnose::evidence::Evidence;
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct LabelShift;

/// The largest shift that is tried, in positions.
const MOST: isize = 8;
/// The shifts that are tried where no row shows the shift.
const USUAL: [isize; 4] = [1, -1, 2, -2];
/// Share of the tokens that must fit a shift for it to be tried: the rest are ends.
const FITS: f64 = 0.6;

impl Cause for LabelShift {
    fn id(&self) -> &str {
        "label-shift"
    }

    fn about(&self) -> &str {
        "the loss was taken against labels of other positions than the recorded ones"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["transformers 37830"]
    }

    fn advice(&self) -> &str {
        "shift labels exactly once, inside each sequence: either in the data or in the loss"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&Stage::GRADIENTS) && !evidence.fails_any(&Stage::FORWARD) {
            return Vec::new();
        }
        let mut hypotheses: Vec<Hypothesis> = unshifted(evidence).into_iter().collect();
        hypotheses.extend(inside_runs(evidence));
        hypotheses.extend(shifted_in_runs::hypotheses(evidence));
        let asked = SuspectTokens::of(evidence);
        let tests: Vec<(LabelTest<'_>, &MicrobatchInputs)> = evidence
            .inputs
            .iter()
            .filter_map(|inputs| Some((LabelTest::new(evidence, inputs)?, inputs)))
            .collect();
        match tests.is_empty() {
            true => hypotheses.extend(usual(&asked)),
            false => hypotheses.extend(seen(&asked, &tests)),
        }
        hypotheses
    }
}

/// The hypothesis that the job used the labels as recorded although the head declares that it
/// shifts them.
fn unshifted(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let shifts = !evidence.step.options.declared.labels_shifted;
    shifts.then(|| {
        let parameters = vec![("shift", "none, where one was declared".to_string())];
        Hypothesis::new(AsRecorded, parameters)
    })
}

/// The hypothesis that labels are right except at the ends of runs, where the last token of a run
/// takes its first id: the job shifted them inside the runs, as a rank does that holds a part of
/// each sequence.
fn inside_runs(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let labels = evidence.labels_of_rows()?;
    let length = length_of_runs(evidence, labels)?;
    let g = Some(evidence.reference().g.clone());
    let parameters = vec![
        ("shift", "the recorded one, made inside runs".to_string()),
        ("over", format!("runs of {length} tokens")),
        ("ends", "the first id of the run, wrapped around".to_string()),
    ];
    let world = Relabelled { labels: labels.clone(), g, ..Relabelled::default() };
    Some(Hypothesis::new(world, parameters).fitted(1))
}

struct AsRecorded;

impl World for AsRecorded {
    fn options(&self, options: &mut HeadOptions) {
        options.declared.labels_shifted = true;
    }
}

/// The hypotheses of the usual shifts, where no row shows which it is.
fn usual(asked: &SuspectTokens<'_>) -> Vec<Hypothesis> {
    let Some(first) = asked.evidence.inputs.first() else { return Vec::new() };
    let mut offered = Vec::new();
    for extent in 0..known(asked.evidence.step, first).len() {
        for by in USUAL {
            let runs_of =
                |inputs: &MicrobatchInputs| known(asked.evidence.step, inputs).get(extent).cloned();
            for ends in [Ends::Ignored, Ends::Wrapped, Ends::Kept] {
                offered.extend(hypotheses(asked, by, &runs_of, &|_, _| ends));
            }
        }
    }
    offered
}

/// Which label the token at the end of a run has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Wrapped,
    Ignored,
    Kept,
    /// A label that is none of those near it; it is read off the captured row.
    Read(u32),
}

impl Ends {
    fn name(self) -> &'static str {
        match self {
            Ends::Wrapped => "wrapped around",
            Ends::Ignored => "ignored",
            Ends::Kept => "kept",
            Ends::Read(_) => "labels of elsewhere, read off the captured rows",
        }
    }
}

/// The hypotheses of the shift that the captured rows show.
fn seen(
    asked: &SuspectTokens<'_>,
    tests: &[(LabelTest<'_>, &MicrobatchInputs)],
) -> Vec<Hypothesis> {
    let share = |by: isize| {
        let share_of = |(test, inputs): &(LabelTest<'_>, &MicrobatchInputs)| {
            let n = inputs.tokens();
            let label = |t: usize| {
                let from = t.checked_add_signed(by).filter(|&from| from < n)?;
                Some(inputs.labels[from]).filter(|&label| label != IGNORED)
            };
            test.share(&looked_at(asked, inputs), &label)
        };
        tests.iter().map(share_of).fold(0.0, f64::max)
    };
    let shifts = (-MOST..=MOST).filter(|&by| by != 0).map(|by| (share(by), by));
    let best = shifts.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.abs().cmp(&a.1.abs())));
    let Some((_, by)) = best.filter(|&(share, _)| share >= FITS) else { return Vec::new() };
    let mut offered = Vec::new();
    let candidates = tests.first().map(|(_, inputs)| extents(asked, tests, by, inputs).len());
    for extent in 0..candidates.unwrap_or(0) {
        let runs_of =
            |inputs: &MicrobatchInputs| extents(asked, tests, by, inputs).get(extent).cloned();
        let test = |microbatch| tests.iter().find(|(_, inputs)| inputs.microbatch == microbatch);
        let end = |inputs: &MicrobatchInputs, ends: &[(usize, usize)]| {
            let (test, _) = test(inputs.microbatch)?;
            end_of(asked, test, inputs, ends)
        };
        for ends in [Ends::Wrapped, Ends::Ignored, Ends::Kept] {
            offered.extend(hypotheses(asked, by, &runs_of, &|_, _| ends));
        }
        offered.extend(with_read_ends(asked, by, &runs_of, &end));
    }
    offered
}

/// The suspect tokens that are compared: at most about 256, evenly spaced.
fn looked_at(asked: &SuspectTokens<'_>, inputs: &MicrobatchInputs) -> Vec<usize> {
    let all = asked.tokens(inputs);
    let step = all.len().div_ceil(256).max(1);
    all.into_iter().step_by(step).collect()
}

/// The divisions into runs inside which labels may have been shifted: the known ones, and the one
/// whose ends are the tokens that do not fit.
fn extents(
    asked: &SuspectTokens<'_>,
    tests: &[(LabelTest<'_>, &MicrobatchInputs)],
    by: isize,
    inputs: &MicrobatchInputs,
) -> Vec<TokenRuns> {
    let mut all = known(asked.evidence.step, inputs);
    let ranks = of_ranks(asked.evidence.step, inputs);
    let Some(length) = run_length(asked, tests, by) else { return all };
    let cut = TokenRuns::cut(format!("rows of {length} tokens"), &ranks, length);
    if all.iter().all(|extent| extent.runs != cut.runs) {
        all.insert(0, cut);
    }
    all
}

/// The largest length of runs for which all tokens that do not fit are at ends of runs.
fn run_length(
    asked: &SuspectTokens<'_>,
    tests: &[(LabelTest<'_>, &MicrobatchInputs)],
    by: isize,
) -> Option<usize> {
    let (test, inputs) = tests.first()?;
    let counted = asked.tokens(inputs);
    let mut ends: Vec<usize> = Vec::new();
    let mut longest = 0;
    for run in of_ranks(asked.evidence.step, inputs) {
        longest = longest.max(run.len());
        for (position, t) in run.iter().enumerate() {
            let next = position.checked_add_signed(by).and_then(|at| run.get(at));
            let Some(&next) = next.filter(|_| counted.binary_search(t).is_ok()) else { continue };
            let label = inputs.labels[next];
            let tells = label != IGNORED && label != inputs.labels[*t];
            if tells && !test.fits(*t, label) {
                ends.push(position);
            }
        }
    }
    let reach = by.unsigned_abs();
    let is_end = |index: usize, length: usize| match by > 0 {
        true => index % length >= length - reach,
        false => index % length < reach,
    };
    let fits = |&length: &usize| ends.iter().all(|&at| is_end(at, length));
    (reach + 1..longest).rev().find(fits).filter(|_| !ends.is_empty())
}

/// The labels that the captured rows at the ends of runs show; `ends`: each end, and the token that
/// it would take its label from if labels wrapped around.
fn end_of(
    asked: &SuspectTokens<'_>,
    test: &LabelTest<'_>,
    inputs: &MicrobatchInputs,
    ends: &[(usize, usize)],
) -> Option<BTreeMap<usize, Ends>> {
    let looked = asked.tokens(inputs);
    let mut shown = BTreeMap::new();
    let mut left = test.readable();
    for &(t, wrapped) in ends.iter().filter(|(t, _)| looked.binary_search(t).is_ok()) {
        let label_at_end = if test.fits(t, inputs.labels[wrapped]) {
            Ends::Wrapped
        } else if test.fits(t, inputs.labels[t]) {
            Ends::Kept
        } else if test.fits(t, IGNORED) {
            Ends::Ignored
        } else {
            left = left.checked_sub(1)?;
            Ends::Read(test.read(t)?)
        };
        shown.insert(t, label_at_end);
    }
    Some(shown)
}

type RunsOf<'a> = dyn Fn(&MicrobatchInputs) -> Option<TokenRuns> + 'a;

/// The labels after a shift; `end` gives the label at the end of a run.
fn shifted(
    asked: &SuspectTokens<'_>,
    inputs: &MicrobatchInputs,
    extent: &TokenRuns,
    by: isize,
    end: &dyn Fn(usize) -> Ends,
) -> Vec<u32> {
    let n = inputs.tokens();
    let (inside, around) = (extent.shifted(n, by), extent.rolled(n, by));
    let may = asked.rows(inputs);
    let of_token = |t: usize| match inside[t] {
        _ if !may[t] => inputs.labels[t],
        Some(from) => inputs.labels[from],
        None => match end(t) {
            Ends::Wrapped => inputs.labels[around[t]],
            Ends::Ignored => IGNORED,
            Ends::Kept => inputs.labels[t],
            Ends::Read(label) => label,
        },
    };
    (0..n).map(of_token).collect()
}

/// The hypotheses of a shift with one way to treat all ends.
fn hypotheses(
    asked: &SuspectTokens<'_>,
    by: isize,
    runs_of: &RunsOf<'_>,
    ends: &dyn Fn(&MicrobatchInputs, usize) -> Ends,
) -> Vec<Hypothesis> {
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let extent = runs_of(inputs)?;
        let labels = shifted(asked, inputs, &extent, by, &|t| ends(inputs, t));
        Some((inputs.microbatch, labels, extent.name))
    };
    let Some(all) = asked.evidence.inputs.iter().map(of_microbatch).collect::<Option<Vec<_>>>()
    else {
        return Vec::new();
    };
    let name = all.first().map(|(_, _, name)| name.clone()).unwrap_or_default();
    let labels: Labels = all.into_iter().map(|(mb, labels, _)| (mb, labels)).collect();
    let word = asked.evidence.inputs.first().map_or("", |inputs| ends(inputs, 0).name());
    let parameters = vec![("shift", by.to_string()), ("over", name), ("ends", word.to_string())];
    with_denominators(asked, labels, parameters, 0)
}

/// The hypotheses of these labels: divided by the count of these labels and, where it differs, of the
/// recorded ones.
fn with_denominators(
    asked: &SuspectTokens<'_>,
    labels: Labels,
    parameters: Vec<(&'static str, String)>,
    fitted: usize,
) -> Vec<Hypothesis> {
    let counted = |labels: &[u32]| labels.iter().filter(|&&label| label != IGNORED).count();
    let same = asked.evidence.inputs.iter().all(|inputs| {
        labels
            .get(&inputs.microbatch)
            .is_none_or(|labels| counted(labels) == counted(&inputs.labels))
    });
    let mut parameters = parameters;
    parameters.extend(asked.place().map(|place| ("only in", place)));
    let mut hypotheses = Vec::new();
    for keeps in [false, true] {
        if keeps && same {
            continue;
        }
        let counts = keeps.then(|| RecordedCounts::new(asked.evidence));
        let mut parameters = parameters.clone();
        if !same {
            let word = if keeps { "of the recorded labels" } else { "of the shifted labels" };
            parameters.push(("count", word.to_string()));
        }
        let world = Relabelled { labels: labels.clone(), counts, ..Relabelled::default() };
        hypotheses.push(Hypothesis::new(world, parameters).fitted(fitted));
    }
    hypotheses
}

/// Gives the labels at the ends of runs; see [`end_of`].
type EndsOf<'a> =
    dyn Fn(&MicrobatchInputs, &[(usize, usize)]) -> Option<BTreeMap<usize, Ends>> + 'a;

/// The hypotheses of a shift with the label that each end of a run shows, where no single way
/// explains them all.
fn with_read_ends(
    asked: &SuspectTokens<'_>,
    by: isize,
    runs_of: &RunsOf<'_>,
    end: &EndsOf<'_>,
) -> Vec<Hypothesis> {
    let mut labels = Labels::new();
    let (mut name, mut kinds) = (String::new(), Vec::new());
    for inputs in asked.evidence.inputs {
        let Some(extent) = runs_of(inputs) else { return Vec::new() };
        let n = inputs.tokens();
        let (inside, around) = (extent.shifted(n, by), extent.rolled(n, by));
        let ends: Vec<(usize, usize)> =
            (0..n).filter(|&t| inside[t].is_none()).map(|t| (t, around[t])).collect();
        let read_ends = end(inputs, &ends).unwrap_or_default();
        kinds.extend(read_ends.values().map(|end| end.name()));
        let of_end = |t: usize| read_ends.get(&t).copied().unwrap_or(Ends::Wrapped);
        labels.insert(inputs.microbatch, shifted(asked, inputs, &extent, by, &of_end));
        name = extent.name;
    }
    kinds.sort_unstable();
    kinds.dedup();
    if kinds.len() < 2 && !kinds.iter().any(|kind| kind.starts_with("labels of")) {
        return Vec::new();
    }
    let parameters = vec![("shift", by.to_string()), ("over", name), ("ends", kinds.join(", "))];
    with_denominators(asked, labels, parameters, 1)
}
