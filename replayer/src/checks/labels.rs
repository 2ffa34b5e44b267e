//! Finds labels that are not a class, and microbatches in which no token counts.
//!
//! Some kernels read a label outside `0..V` in the backward pass though their forward pass skips
//! it. Where no token counts, a mean is 0/0: the check fails if the loss or a gradient is NaN, and
//! adds a note if the job guards the division.

use backtape::head::{Denominator, LossReduction, Microbatches, Ranks, Scope, Span};
use backtape::identity::Rank;
use backtape::role::Role;

use super::facts::{Facts, classes, customary, facts};
use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::{Kind, bits, kind};
use crate::number::plural;

const OUT_OF_RANGE: &str = "int-target-out-of-range";

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let all = facts(subject);
        if all.is_empty() {
            results.skip(format!("step {}", subject.dump.step), "no labels were recorded");
        }
        let mut known = Vec::new();
        for facts in all {
            match facts {
                Ok(facts) => known.push(facts),
                Err((key, why)) => results.skip(format!("step {}: {key}", subject.dump.step), why),
            }
        }
        match classes(subject) {
            Some(classes) => {
                known.iter().for_each(|facts_known| range(subject, facts_known, classes, results))
            }
            None if known.is_empty() => {}
            None => results.skip(
                format!("step {}: the range of labels", subject.dump.step),
                "neither a head with k nor logits say how many classes there are",
            ),
        }
        ignored(subject, &known, results);
    }
}

fn range(subject: &Subject<'_>, facts: &Facts, classes: u64, results: &mut CheckResults) {
    results.looked();
    let inside = |label: i64| u64::try_from(label).is_ok_and(|label| label < classes);
    let head = subject.head();
    let outside = facts
        .recorded
        .iter()
        .enumerate()
        .filter(|(_, label)| !inside(**label) && !super::facts::ignored(head, **label));
    let outside: Vec<(u64, i64)> = outside.map(|(t, &label)| (t as u64, label)).collect();
    let Some(&(token, label)) = outside.first() else {
        return;
    };
    let rows: Vec<u64> = outside.iter().map(|(t, _)| *t).collect();
    let weightless = rows.iter().all(|&t| facts.weights[t as usize] == 0.0) && facts.weighted;
    let undeclared = outside.iter().all(|(_, label)| customary(*label));
    let severity = match (undeclared, weightless) {
        (true, _) => Severity::Warn,
        (false, true) => Severity::Warn,
        (false, false) => Severity::Fail,
    };
    let evidence = format!(
        "{}: {} of {} are no class of 0..{classes}: token {token} has {label}{}",
        facts.key,
        plural(outside.len() as u64, "label"),
        facts.tokens(),
        if weightless { "; their weights are 0" } else { "" },
    );
    let place = Place::of(subject).tensor(&facts.key).rows(&rows);
    let place = place.ranks(&facts.holders[facts.holder[token as usize]]);
    let advice = match undeclared {
        true => format!("Declare ignore_label={label} if it means nothing"),
        false => "Give every counted token a class, or the ignored label; a kernel may read or write out of bounds here".into(),
    };
    results.add(severity, Some(OUT_OF_RANGE), place, evidence, advice);
}

/// Finds sets of tokens, as the scope of the denominator has them, in which no token counts.
fn ignored(subject: &Subject<'_>, known: &[Facts], results: &mut CheckResults) {
    let silent = |facts: &&Facts| facts.tokens() > 0 && facts.weights.iter().all(|&w| w == 0.0);
    let head = subject.head();
    let scope: Span = head.map_or(Scope::Microbatch.into(), |head| head.scope.clone());
    for facts in known {
        results.looked();
        let groups = (0..facts.holders.len()).filter(|&group| {
            let tokens = &facts.held_tokens[group];
            !tokens.is_empty() && tokens.iter().all(|&t| facts.weights[t] == 0.0)
        });
        let ranks: Vec<_> = groups.flat_map(|group| facts.holders[group].clone()).collect();
        let whole = silent(&facts);
        if !whole && ranks.is_empty() {
            continue;
        }
        let divided = head.is_none_or(|head| {
            head.reduction == LossReduction::Mean
                && matches!(head.denominator, Denominator::Valid | Denominator::Weights)
        });
        let in_scope = match (&scope.ranks, scope.microbatches) {
            (Ranks::All, Microbatches::All) => known.iter().all(|facts| silent(&facts)),
            (Ranks::All, Microbatches::One) => whole,
            // NaN in the loss or the gradients shows whether the mean was over no token.
            (Ranks::One | Ranks::Axes(_), _) => true,
        };
        let broken = divided && in_scope && is_over_nothing(subject, facts, &ranks);
        let severity = if broken { Severity::Fail } else { Severity::Note };
        let who =
            if whole { "of the microbatch".to_string() } else { crate::dump::name_ranks(&ranks) };
        let evidence = format!(
            "{}: no token {}{who} counts: every label is ignored or has weight 0{}",
            facts.key,
            if whole { "" } else { "of " },
            if broken { ", and the loss or dq is not finite: 0/0" } else { "" },
        );
        let place = Place::of(subject).tensor(&facts.key).ranks(&ranks);
        let advice = "Guard the division: a mean over no token is 0/0; or fill the batch so that every scope of the denominator counts a token";
        results.add(severity, Some("all-ignored"), place, evidence, advice);
    }
}

/// Whether the loss of the microbatch, or the whole gradient row of a token that these ranks hold,
/// is NaN: a mean over no token makes every element of a row NaN.
fn is_over_nothing(subject: &Subject<'_>, facts: &Facts, ranks: &[Rank]) -> bool {
    [Role::Loss, Role::Dq, Role::Dlogits].iter().any(|&role| {
        let tensors = subject.of_role(role).filter(|(key, _)| key.microbatch == facts.microbatch);
        tensors.into_iter().any(|(_, info)| {
            let (recorded, _) = pieces(subject.dump, info);
            let theirs = |piece: &&Piece<'_>| {
                let any = role == Role::Loss || ranks.is_empty();
                any || piece.ranks.iter().any(|rank| ranks.contains(rank))
            };
            recorded.iter().filter(theirs).any(|piece| {
                let width = info.dtype.width();
                let columns = match (role, piece.record.place.0.last()) {
                    (Role::Dq | Role::Dlogits, Some((from, to))) => (to - from) as usize,
                    _ => 1,
                };
                let elements = piece.bytes.len() / width;
                let is_nan = |i: usize| kind(info.dtype, bits(piece.bytes, width, i)) == Kind::Nan;
                let rows = (0..elements).step_by(columns.max(1));
                rows.map(|from| from..(from + columns).min(elements))
                    .any(|mut row| !row.is_empty() && row.all(is_nan))
            })
        })
    })
}
