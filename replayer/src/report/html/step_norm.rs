//! The norm of the gradients in the section of a step: as it is, as it would have been or as
//! another run has it, and where the difference of the squares comes from.

use askama::Template;

use super::bars::{Bar, Widths, draw};
use super::{Markup, Page, markup};
use crate::algebra::NormGap;
use crate::algebra::against::GapOfRuns;
use crate::number::short;
use crate::report::norm::percent;
use crate::report::{algebra, step_against};

/// Letters of a label that are shown, and the pixels that one takes.
const LABEL: usize = 56;
const LETTER: i32 = 8;

/// Norms beside each other, and the shares of their difference.
#[derive(Template)]
#[template(path = "step_norm.html")]
pub(super) struct NormShown {
    words: String,
    norms: Markup,
    /// Absent where there is nothing to share out.
    shares: Option<Markup>,
}

impl Page<'_> {
    /// The norm as it is and as it would have been.
    pub(super) fn step_norm(&self, norm: &NormGap) -> Markup {
        let known = |label: &str, value: f64| (label.to_string(), value);
        let norms: Vec<(String, f64)> = [
            norm.reported.map(|value| known("as reported", value)),
            Some(known("of the captured gradients", norm.captured)),
            Some(known("had every sum been right", norm.right)).filter(|_| !norm.of_norm),
        ]
        .into_iter()
        .flatten()
        .collect();
        let of_norms = "grad_norm as it is and as it would have been";
        self.norm_shown(algebra::gap(norm), (of_norms, &norms), &norm.shares)
    }

    /// The norms of two runs.
    pub(super) fn norms_of_runs(&self, norm: &GapOfRuns) -> Markup {
        let norms = [("this run".to_string(), norm.this), ("the other run".into(), norm.other)];
        let share = |own| (step_against::origin(own), own.share);
        let shares: Vec<(String, f64)> = norm.shares.iter().map(share).collect();
        let words = step_against::gap(norm);
        self.norm_shown(words, ("grad_norm of both runs", &norms), &shares)
    }

    fn norm_shown(
        &self,
        words: String,
        (of_norms, norms): (&str, &[(String, f64)]),
        shares: &[(String, f64)],
    ) -> Markup {
        let most = norms.iter().map(|(_, value)| *value).filter(|x| x.is_finite());
        let most = most.fold(f64::MIN_POSITIVE, f64::max);
        let bar = |(label, value): &(String, f64)| Bar {
            label: label.clone(),
            from: 0.0,
            to: if value.is_finite() { value / most } else { 1.0 },
            class: "bt-total",
            mark: None,
            value: short(*value),
        };
        let largest = shares.iter().map(|(_, share)| share.abs()).filter(|x| x.is_finite());
        let largest = largest.fold(f64::MIN_POSITIVE, f64::max);
        // As wide as the longest label, within what a window has room for.
        let label = |what: &str| match what.char_indices().nth(LABEL) {
            Some((at, _)) => format!("{}…", &what[..at]),
            None => what.to_string(),
        };
        let longest = shares.iter().map(|(what, _)| label(what).chars().count()).max();
        let room = 16 + LETTER * longest.unwrap_or(0) as i32;
        let share = |(what, share): &(String, f64)| Bar {
            label: label(what),
            from: 0.0,
            to: if share.is_finite() { share.abs() / largest } else { 1.0 },
            class: if *share < 0.0 { "bt-down" } else { "bt-up" },
            mark: None,
            value: format!("{} %", percent(*share)),
        };
        let of_shares = "shares of the difference of the squared norms".to_string();
        let shared = || {
            let bars = self.shown(shares).iter().map(share).collect();
            draw(of_shares, bars, &Widths(room, 190, 90)).bars
        };
        let bars = norms.iter().map(bar).collect();
        markup(&NormShown {
            words,
            norms: draw(of_norms.to_string(), bars, &Widths(190, 190, 90)).bars,
            shares: (!shares.is_empty()).then(shared),
        })
    }
}
