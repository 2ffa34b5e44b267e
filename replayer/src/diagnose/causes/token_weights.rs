//! `token-weights`: the backward takes tokens with other weights than declared: squared, their
//! mean for each of them, or some tokens not at all or more than once.
//!
//! Detectors: a row of dq is one token's gradient, so its own weight is solved for. Where every
//! row is what it should be times such a number, the numbers are held against what the dump
//! knows of the tokens. Numbers that follow no rule are believed where dk, which they were not
//! solved from, is what they make it. Of a policy loss the other options are tried in the
//! backward alone (no KL term, another estimator, other clip bounds), and other numbers in the
//! place of the ratio: none, its square, the ratio of the token before or after, one that is never
//! clipped, or clipped at other bounds than the sign of the advantage asks for. How often the
//! surrogate and the KL term are in it is solved for, too: a wrong sign is -1 times.
//! Weights of neighbours are tried in the loss and all gradients; of a policy loss also
//! advantages and log-probabilities of neighbours and of other sequences, and log-probabilities
//! of another policy than the one that is meant, as where the ratio is always 1.
//! Emulation: upstream gradients by the rule that was found, in both gradients.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::{moved_policy, moved_weights, policy_terms};
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::direct::multiple;
use crate::diagnose::detectors::fit::{rounded, shown};
use crate::diagnose::detectors::least_squares::runs;
use crate::diagnose::detectors::suspect_tokens::SuspectTokens;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct TokenWeights;

/// How near to a rule each token's number must be.
const NEAR: f64 = 0.05;
/// Share of the error that rows times a number each may leave.
const LEFT: f64 = 0.02;
/// Runs of tokens that are told in words.
const TOLD: usize = 6;

impl Cause for TokenWeights {
    fn id(&self) -> &str {
        "token-weights"
    }

    fn about(&self) -> &str {
        "the backward takes tokens with other weights than declared"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "weights that a loss and its backward both multiply by",
            "a cotangent per token of which the mean is taken",
        ]
    }

    fn advice(&self) -> &str {
        "compare what the backward multiplies each token's gradient by with the token's weight and incoming cotangent"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut found = policy_terms::hypotheses(evidence);
        found.extend(moved_weights::hypotheses(evidence));
        found.extend(moved_policy::hypotheses(evidence));
        found.extend(of_dlogits(evidence));
        if !evidence.fails(Stage::Dq) {
            return found;
        }
        let Some(seen) = seen(evidence) else { return found };
        let both = [Part::Plane, Part::OfQ, Part::OfK];
        let parts = if evidence.fails(Stage::Dk) { &both[..] } else { &both[1..2] };
        let asked = SuspectTokens::of(evidence);
        let of = |Rule { words, factors, fitted }: Rule| {
            let mut parameters = vec![("each token counts", words)];
            parameters.extend(asked.place().map(|place| ("only in", place)));
            let world = Weighted { factors, parts: parts.to_vec() };
            let found = Hypothesis::new(world, parameters);
            match fitted {
                None => found.with_number_per_token(),
                Some(fitted) => found.fitted(fitted),
            }
        };
        let mut all = rules(&asked, &seen);
        if all.is_empty() && evidence.fails(Stage::Dk) {
            let words = "with a number of its own that the dump does not explain".to_string();
            all.push(Rule { words, factors: seen, fitted: None });
        }
        found.extend(all.into_iter().map(of));
        found
    }
}

/// dlogits that take one number in the place of every token's cotangent or weight, where no gradient
/// of q fails beside them.
fn of_dlogits(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    if evidence.fails(Stage::Dq) {
        return None;
    }
    let (key, _) = evidence.failing_of(&[Stage::Dlogits]).next()?;
    let (one, captured) = (evidence.inputs_of(key.microbatch)?, evidence.captured(key)?);
    let rows = evidence.reference().rows_of((Stage::Dlogits, key.microbatch));
    let (mut before, mut left, mut seen) = (0.0, 0.0, Vec::new());
    for (&t, row) in rows.iter().filter(|(t, _)| counts(one, **t)) {
        let of = multiple(&captured.row(t)[..row.len()], row);
        (before, left) = (before + of.before, left + of.left);
        seen.push((t, of.times));
    }
    if !(left <= LEFT * before) {
        return None;
    }
    let named: [(&str, OfToken<'_>); 2] =
        [("cotangent", &|one, t| one.cotangent[t]), ("weight", &|one, t| one.weights[t])];
    let found = named.into_iter().find_map(|(name, of)| {
        let number = alike(seen.iter().map(|(t, times)| times * of(one, *t)))?;
        seen.iter().any(|(_, times)| (times - 1.0).abs() > NEAR).then_some((name, of, number))
    });
    let (name, of, number) = found?;
    let factors = evidence.inputs.iter().map(|one| {
        let factor = |t: usize| if counts(one, t) { number / of(one, t) } else { 1.0 };
        (one.microbatch, (0..one.tokens()).map(factor).collect())
    });
    let words = format!("with {} in the place of its {name}", shown(number));
    let world = Weighted { factors: factors.collect(), parts: vec![Part::Plane] };
    Some(Hypothesis::new(world, vec![("each token counts", words)]).fitted(1))
}

/// The number that all are; one over a whole number where it is that.
fn alike(all: impl Iterator<Item = f64>) -> Option<f64> {
    let all: Vec<f64> = all.collect();
    let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
    let is = all.len() > 1 && all.iter().all(|x| (x - mean).abs() <= NEAR * mean.abs());
    let count = mean.recip().round();
    let whole = count >= 2.0 && (mean * count - 1.0).abs() <= 1e-4 && count < 1e4;
    is.then_some(if whole { count.recip() } else { mean })
}

/// What tokens are multiplied by.
struct Rule {
    words: String,
    factors: Factors,
    /// Numbers that were fitted; none where every token has one.
    fitted: Option<usize>,
}

/// What each token's gradient is multiplied by beside what is declared; 1 for what is ignored.
type Factors = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// How often each row of dq is what it should be; none where rows are more than that.
fn seen(evidence: &Evidence<'_>) -> Option<Factors> {
    let mut found: Factors =
        evidence.inputs.iter().map(|one| (one.microbatch, vec![1.0; one.tokens()])).collect();
    // Rows that the reference has already show what is no multiple.
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let (captured, table) = (evidence.captured(key)?, evidence.reference().stages.get(&key)?);
        for (&t, row) in table {
            let of = multiple(captured.row(t), row);
            (before, left) = (before + of.before, left + of.left);
        }
    }
    if !(left <= LEFT * before) {
        return None;
    }
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let plane = evidence.plane(key)?;
        let captured = plane.dq(&*evidence.captured(key)?);
        let reference = plane.entries().times(&plane.k);
        for (at, &t) in plane.rows.iter().enumerate() {
            let of = multiple(captured.row(at), reference.row(at));
            before += of.before;
            left += of.left;
            found.get_mut(&key.microbatch)?[t] = of.times;
        }
    }
    (left <= LEFT * before).then_some(found)
}

/// Whether a token takes part.
fn counts(one: &MicrobatchInputs, t: usize) -> bool {
    one.labels[t] != IGNORED && one.weights[t] != 0.0 && one.cotangent[t] != 0.0
}

/// Tokens that take part.
fn counted(one: &MicrobatchInputs) -> impl Iterator<Item = usize> {
    (0..one.tokens()).filter(|&t| counts(one, t))
}

/// The rules that the numbers follow, of the tokens of those ranks and microbatches whose rows fail.
fn rules(asked: &SuspectTokens<'_>, seen: &Factors) -> Vec<Rule> {
    let evidence = asked.evidence;
    let mean = |all: &[&MicrobatchInputs], of: &dyn Fn(&MicrobatchInputs) -> &[f64]| {
        let each = all.iter().flat_map(|one| counted(one).map(|t| of(one)[t]));
        let each: Vec<f64> = each.collect();
        each.iter().sum::<f64>() / each.len().max(1) as f64
    };
    let every: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let weight = mean(&every, &|one| &one.weights);
    let cotangent = mean(&every, &|one| &one.cotangent);
    let own = |one: &MicrobatchInputs| mean(&[one], &|one| &one.cotangent);
    let named: [(&str, OfToken<'_>); 5] = [
        ("with the square of its weight", &|one, t| one.weights[t]),
        ("with the square of its cotangent", &|one, t| one.cotangent[t]),
        ("with the mean of all weights", &|one, t| weight / one.weights[t]),
        ("with the mean of all cotangents", &|one, t| cotangent / one.cotangent[t]),
        ("with the mean of its microbatch's cotangents", &|one, t| own(one) / one.cotangent[t]),
    ];
    let known = named.into_iter().filter_map(|(words, of)| {
        let factors = by_rule(asked, seen, of)?;
        Some(Rule { words: words.to_string(), factors, fitted: Some(0) })
    });
    let fitted = [of_label(asked, seen), often(asked, seen), by_unit(asked, seen)];
    known.chain(fitted.into_iter().flatten()).collect()
}

/// What a rule makes of a token of a microbatch.
type OfToken<'a> = &'a dyn Fn(&MicrobatchInputs, usize) -> f64;

/// The numbers of a rule, where what was seen follows it.
fn by_rule(asked: &SuspectTokens<'_>, seen: &Factors, of: OfToken<'_>) -> Option<Factors> {
    let mut found = Factors::new();
    let mut changes = false;
    for one in asked.evidence.inputs {
        let mut own = vec![1.0; one.tokens()];
        let is_asked = asked.rows(one);
        for t in counted(one).filter(|&t| is_asked[t]) {
            let (wanted, seen) = (of(one, t), seen[&one.microbatch][t]);
            if !((seen - wanted).abs() <= NEAR * (1.0 + wanted.abs())) {
                return None;
            }
            own[t] = wanted;
            changes |= (wanted - 1.0).abs() > NEAR;
        }
        found.insert(one.microbatch, own);
    }
    changes.then_some(found)
}

/// Tokens of one label that do not count.
fn of_label(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let left_out = |one: &MicrobatchInputs| {
        counted(one).find(|&t| seen[&one.microbatch][t].abs() < NEAR).map(|t| one.labels[t])
    };
    let label = evidence.inputs.iter().find_map(left_out)?;
    let of = |one: &MicrobatchInputs, t: usize| f64::from(u8::from(one.labels[t] != label));
    let factors = by_rule(asked, seen, &of)?;
    Some(Rule { words: format!("but those of label {label}"), factors, fitted: Some(1) })
}

/// Runs of tokens that count more or less than once, where they are few. What dq alone lacks is
/// not written, and not weighed.
fn often(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let of = |one: &MicrobatchInputs, t: usize| seen[&one.microbatch][t].round();
    let factors = by_rule(asked, seen, &of).filter(|_| evidence.fails(Stage::Dk))?;
    let mut said = Vec::new();
    for (mb, factors) in &factors {
        let of = mb.map_or(String::new(), |mb| format!("microbatch {mb} "));
        for (run, times) in runs(factors) {
            let often = if times == 0.0 { "not at all".into() } else { format!("{times} times") };
            said.push(format!("{of}tokens {} to {} {often}", run.start, run.end - 1));
        }
    }
    let few = !said.is_empty() && said.len() <= TOLD;
    few.then(|| Rule { fitted: Some(1 + said.len()), words: said.join(", "), factors })
}

/// One number for all tokens of a microbatch, or of a rank in it.
fn by_unit(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let mut means: Factors =
        evidence.inputs.iter().map(|one| (one.microbatch, vec![1.0; one.tokens()])).collect();
    let (mut said, mut numbers) = (Vec::new(), Vec::new());
    for unit in evidence.units() {
        let one = evidence.inputs_of(unit.microbatch)?;
        let all: Vec<f64> = (unit.rows.iter().filter(|&&t| counts(one, t)))
            .map(|&t| seen[&unit.microbatch][t])
            .collect();
        let mean = rounded(all.iter().sum::<f64>() / all.len().max(1) as f64, 4);
        let own = means.get_mut(&unit.microbatch)?;
        unit.rows.iter().for_each(|&t| own[t] = mean);
        numbers.push(mean);
        if (mean - 1.0).abs() > NEAR {
            let mb = unit.microbatch.map(|mb| format!("microbatch {mb}"));
            let rank = unit.rank.map(|rank| format!("rank {rank}"));
            let of: Vec<String> = [mb, rank].into_iter().flatten().collect();
            said.push(format!("of {} {mean} times", of.join(" ")));
        }
    }
    let factors = by_rule(asked, seen, &|one, t| means[&one.microbatch][t])?;
    // One number for all of them is a factor of the gradient, and no weight.
    let differ = numbers.iter().any(|x| (x - numbers[0]).abs() > NEAR);
    said.truncate(TOLD);
    differ.then(|| Rule { fitted: Some(said.len()), words: said.join(", "), factors })
}

/// Upstream gradients times a number each.
struct Weighted {
    factors: Factors,
    parts: Vec<Part>,
}

impl World for Weighted {
    fn speaks_of(&self, stage: Stage) -> bool {
        stage.is_gradient() && self.parts.contains(&Part::of(stage))
    }

    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        if let Some(factors) = self.factors.get(&inputs.microbatch) {
            g.iter_mut().zip(factors).for_each(|(g, x)| *g *= x);
        }
    }
}
