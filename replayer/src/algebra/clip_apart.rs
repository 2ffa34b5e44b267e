//! Gradients that were clipped by another norm than the declared one of all: each by its own, or
//! some of them by that of these alone. What each was multiplied by is known from its clipping; those
//! that were multiplied by one number were clipped by their own norm where they have the norm that is
//! allowed.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::causes;
use super::declaration::Limit;
use super::judge::{Judge, WIDTH};
use super::outcome::{Judged, Outcome, Stage};
use crate::assemble::pieces;
use crate::number::short;

/// How near to each other the coefficients of one clipping are, and a norm to the allowed one.
const NEAR: f64 = 2e-3;

/// A gradient that was not clipped as declared.
struct Clipped {
    /// Where in the list of what was judged.
    at: usize,
    /// What it was multiplied by.
    coefficient: f64,
    limit: Limit,
}

impl Judge<'_> {
    /// Names the norm by which gradients were clipped that were not clipped as declared.
    pub(super) fn clipped_apart(&self, judged: &mut [Judged]) {
        let all = judged.iter().enumerate();
        let apart = all.filter_map(|(at, one)| self.clipped_otherwise(at, one));
        let mut by_limit: BTreeMap<(u64, u64), Vec<Clipped>> = BTreeMap::new();
        for one in apart {
            let key = (one.limit.norm.to_bits(), one.limit.max_norm.to_bits());
            by_limit.entry(key).or_default().push(one);
        }
        for same in by_limit.into_values() {
            self.by_norms_of_their_own(judged, same);
        }
    }

    /// The same of gradients with one limit.
    fn by_norms_of_their_own(&self, judged: &mut [Judged], same: Vec<Clipped>) {
        let limit = same[0].limit;
        let clips = judged.iter().filter(|one| one.stage == Stage::Clip);
        let clipped: BTreeSet<_> = clips.map(|one| (&one.parameter, &one.place)).collect();
        let is_by_own = |own: &Vec<Clipped>| {
            let held = own.iter().map(|one| &judged[one.at]);
            let held: BTreeSet<_> = held.map(|one| (&one.parameter, &one.place)).collect();
            // One number for all of them is that of another norm or limit than the declared one.
            let is_some = held.len() < clipped.len() && own[0].coefficient < 1.0 - NEAR;
            is_some && own[0].coefficient > 0.0 && self.has_allowed_norm(judged, own)
        };
        let (by_own, rest): (Vec<_>, Vec<_>) = clusters(same).into_iter().partition(is_by_own);
        if by_own.is_empty() {
            return;
        }
        let name = |one: &Clipped| judged[one.at].parameter.clone();
        let is_each = by_own.iter().all(|own| own.iter().all(|one| name(one) == name(&own[0])));
        let by = if is_each { "its own norm" } else { "the norm of some of them alone" };
        let words = format!(
            "it is clipped to {} by {by}, and the norm that is declared, {}, is that of all",
            short(limit.max_norm),
            short(limit.norm)
        );
        let look =
            "what each gradient is multiplied by: one coefficient, of the norm of all of them";
        let reading = causes::NORM_LOCAL.reads(words).looking_at(look);
        // What is within the norm that is allowed is not clipped at all then.
        let is_within = |one: &Clipped| {
            let is_kept = (one.coefficient - 1.0).abs() < NEAR;
            let squares = if is_kept { self.squares_clipped(&judged[one.at]) } else { None };
            squares.is_some_and(|squares| squares.sqrt() <= limit.max_norm * (1.0 + NEAR))
        };
        let unclipped: Vec<Clipped> = rest.into_iter().flatten().filter(is_within).collect();
        for one in by_own.into_iter().flatten().chain(unclipped) {
            if let Outcome::Diverged(divergence) = &mut judged[one.at].result {
                divergence.readings = vec![reading.clone()];
            }
        }
    }

    /// Whether gradients that were multiplied by one number have the norm that is allowed.
    fn has_allowed_norm(&self, judged: &[Judged], own: &[Clipped]) -> bool {
        let mut counted = BTreeSet::new();
        let once = own.iter().map(|one| &judged[one.at]);
        let once = once.filter(|one| counted.insert((&one.parameter, &one.place)));
        let squares: Option<f64> = once.map(|one| self.squares_clipped(one)).sum();
        squares.is_some_and(|squares| is_norm_allowed(squares, &own[0]))
    }

    /// The sum of the squares of what was judged of a tensor.
    fn squares_clipped(&self, one: &Judged) -> Option<f64> {
        let key = self.inventory.key(&one.parameter, &Part::Clipped)?;
        self.squares_of(key, *one.ranks.first()?, &one.place)
    }

    /// A gradient whose clipping has a factor of its own, where one norm clips it.
    fn clipped_otherwise(&self, at: usize, one: &Judged) -> Option<Clipped> {
        let inventory = self.inventory;
        let factor = one.result.divergence()?.factor.filter(|_| one.stage == Stage::Clip)?;
        let rank = *one.ranks.first()?;
        let key = inventory.key(&one.parameter, &Part::Clipped)?;
        let is_whole = inventory.samples.of_parameter(&one.parameter).is_none();
        let limits = inventory.declared.get(&rank)?.limits_of(&one.parameter);
        let [limit] = limits[..] else { return None };
        let is_one = is_whole && key.to_string() == one.tensor && limit.coefficient() < 1.0;
        is_one.then(|| Clipped { at, coefficient: factor * limit.coefficient(), limit })
    }

    /// The sum of the squares of what a rank holds of a tensor.
    pub(super) fn squares_of(&self, key: &TensorKey, rank: Rank, place: &IndexBox) -> Option<f64> {
        let of = |part: &IndexBox| {
            let values = self.inventory.read_box(key, rank, part).ok()?;
            Some(values.iter().map(|x| x * x).sum::<f64>())
        };
        pieces(place, WIDTH).iter().map(of).sum()
    }
}

/// Gradients that were multiplied by one number, together.
fn clusters(mut all: Vec<Clipped>) -> Vec<Vec<Clipped>> {
    all.sort_by(|a, b| a.coefficient.total_cmp(&b.coefficient));
    let mut clusters: Vec<Vec<Clipped>> = Vec::new();
    for one in all {
        match clusters.last_mut() {
            Some(last) if one.coefficient <= last[0].coefficient * (1.0 + NEAR) => last.push(one),
            _ => clusters.push(vec![one]),
        }
    }
    clusters
}

/// Whether gradients of this sum of squares, which were multiplied by one number, have the norm that
/// is allowed.
fn is_norm_allowed(squares: f64, one: &Clipped) -> bool {
    let norm = squares.sqrt();
    // The norm before, to which ε is added.
    let before = norm / one.coefficient;
    let allowed = one.limit.max_norm * before / (before + one.limit.epsilon);
    one.coefficient < 1.0 - NEAR && (norm / allowed - 1.0).abs() < NEAR
}
