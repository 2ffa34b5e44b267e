//! `token-weights`: the backward, or the loss with it, gives tokens other weights than declared:
//! squared, those of their neighbours, their mean for each of them, another number on one rank, or
//! some tokens not at all or more than once.
//!
//! Detectors: a row of dq is one token's gradient, so its own weight is solved for. Where every row
//! is its reference times such a number, the numbers are compared with what the dump knows of the
//! tokens. Numbers that follow no rule are believed if they also explain dk, which had no part in
//! the fit. Of a policy loss the other options are tried in the backward alone (no KL term, another
//! estimator, other clip bounds), and other numbers in the place of the ratio: none, its square,
//! the ratio of the token before or after, one that is never clipped, or clipped at other bounds
//! than the sign of the advantage asks for. The factors of the surrogate and of the KL term are
//! solved for, too: a wrong sign is the factor -1. Weights of neighbours are tried in the loss and
//! all gradients; of a policy loss also advantages and log-probabilities of neighbours and of other
//! sequences, and log-probabilities of another policy than the one that is meant, as where the
//! ratio is always 1. Emulation: upstream gradients by the rule that was found, in dq and dk.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::{moved_policy, moved_weights, policy_terms};
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::fitted_numbers::{rounded, shown};
use crate::diagnose::detectors::least_squares::runs;
use crate::diagnose::detectors::single_tokens::multiple;
use crate::diagnose::detectors::suspect_tokens::SuspectTokens;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct TokenWeights;

/// How near, relatively, each token's number must be to that of a rule.
const NEAR: f64 = 0.05;
/// Share of the squared error that rows times a number each may leave.
const LEFT: f64 = 0.02;
/// The report lists at most this many runs of tokens.
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
        let mut all_hypotheses = policy_terms::hypotheses(evidence);
        all_hypotheses.extend(moved_weights::hypotheses(evidence));
        all_hypotheses.extend(moved_policy::hypotheses(evidence));
        all_hypotheses.extend(of_dlogits(evidence));
        if !evidence.fails(Stage::Dq) {
            return all_hypotheses;
        }
        let Some(seen) = seen(evidence) else { return all_hypotheses };
        let both = [Part::Plane, Part::OfQ, Part::OfK];
        let parts = if evidence.fails(Stage::Dk) { &both[..] } else { &both[1..2] };
        let asked = SuspectTokens::of(evidence);
        let of_rule = |Rule { words, factors, fitted }: Rule| {
            let mut parameters = vec![("each token counts", words)];
            parameters.extend(asked.place().map(|place| ("only in", place)));
            let world = Weighted { factors, parts: parts.to_vec() };
            let hypothesis = Hypothesis::new(world, parameters);
            match fitted {
                None => hypothesis.with_number_per_token(),
                Some(fitted) => hypothesis.fitted(fitted),
            }
        };
        let mut all = rules(&asked, &seen);
        if all.is_empty() && evidence.fails(Stage::Dk) {
            let words = "with a number of its own that the dump does not explain".to_string();
            all.push(Rule { words, factors: seen, fitted: None });
        }
        all_hypotheses.extend(all.into_iter().map(of_rule));
        all_hypotheses
    }
}

/// The hypothesis that dlogits have one number in the place of every token's cotangent or weight,
/// where dq does not fail.
fn of_dlogits(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    if evidence.fails(Stage::Dq) {
        return None;
    }
    let (key, _) = evidence.failing_of(&[Stage::Dlogits]).next()?;
    let (inputs, captured) = (evidence.inputs_of(key.microbatch)?, evidence.captured(key)?);
    let rows = evidence.reference().rows_of((Stage::Dlogits, key.microbatch));
    let (mut before, mut left, mut seen) = (0.0, 0.0, Vec::new());
    for (&t, row) in rows.iter().filter(|(t, _)| counts(inputs, **t)) {
        let multiple_of_row = multiple(&captured.row(t)[..row.len()], row);
        (before, left) = (before + multiple_of_row.before, left + multiple_of_row.left);
        seen.push((t, multiple_of_row.times));
    }
    if !(left <= LEFT * before) {
        return None;
    }
    let named: [(&str, OfToken<'_>); 2] = [
        ("cotangent", &|inputs, t| inputs.cotangent[t]),
        ("weight", &|inputs, t| inputs.weights[t]),
    ];
    let rule = named.into_iter().find_map(|(name, of)| {
        let number = alike(seen.iter().map(|(t, times)| times * of(inputs, *t)))?;
        seen.iter().any(|(_, times)| (times - 1.0).abs() > NEAR).then_some((name, of, number))
    });
    let (name, rule_factor, number) = rule?;
    let factors = evidence.inputs.iter().map(|inputs| {
        let factor =
            |t: usize| if counts(inputs, t) { number / rule_factor(inputs, t) } else { 1.0 };
        (inputs.microbatch, (0..inputs.tokens()).map(factor).collect())
    });
    let words = format!("with {} in the place of its {name}", shown(number));
    let world = Weighted { factors: factors.collect(), parts: vec![Part::Plane] };
    Some(Hypothesis::new(world, vec![("each token counts", words)]).fitted(1))
}

/// The one number that all are, as 1 over a whole number where it is near one; none where they
/// differ.
fn alike(all: impl Iterator<Item = f64>) -> Option<f64> {
    let all: Vec<f64> = all.collect();
    let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
    let is = all.len() > 1 && all.iter().all(|x| (x - mean).abs() <= NEAR * mean.abs());
    let count = mean.recip().round();
    let whole = count >= 2.0 && (mean * count - 1.0).abs() <= 1e-4 && count < 1e4;
    is.then_some(if whole { count.recip() } else { mean })
}

/// A rule for the numbers that tokens' gradients are multiplied by.
struct Rule {
    words: String,
    factors: Factors,
    /// How many numbers were fitted; none where every token has one.
    fitted: Option<usize>,
}

/// The number that each token's gradient is multiplied by besides what is declared; 1 for ignored
/// tokens.
type Factors = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// The factor of each row of dq relative to its reference; none where rows are no such multiples.
fn seen(evidence: &Evidence<'_>) -> Option<Factors> {
    let mut factors: Factors = evidence
        .inputs
        .iter()
        .map(|inputs| (inputs.microbatch, vec![1.0; inputs.tokens()]))
        .collect();
    // The rows of the sample are checked first, as they cost nothing more.
    let (mut before, mut left) = (0.0, 0.0);
    for (key, _) in evidence.failing_of(&[Stage::Dq]) {
        let (captured, table) = (evidence.captured(key)?, evidence.reference().stages.get(&key)?);
        for (&t, row) in table {
            let multiple_of_row = multiple(captured.row(t), row);
            (before, left) = (before + multiple_of_row.before, left + multiple_of_row.left);
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
        for (index, &t) in plane.rows.iter().enumerate() {
            let multiple_of_row = multiple(captured.row(index), reference.row(index));
            before += multiple_of_row.before;
            left += multiple_of_row.left;
            factors.get_mut(&key.microbatch)?[t] = multiple_of_row.times;
        }
    }
    (left <= LEFT * before).then_some(factors)
}

/// Whether a token takes part.
fn counts(inputs: &MicrobatchInputs, t: usize) -> bool {
    inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0 && inputs.cotangent[t] != 0.0
}

/// The tokens that take part.
fn counted(inputs: &MicrobatchInputs) -> impl Iterator<Item = usize> {
    (0..inputs.tokens()).filter(|&t| counts(inputs, t))
}

/// The rules that the numbers follow, for the tokens of those ranks and microbatches whose rows
/// fail.
fn rules(asked: &SuspectTokens<'_>, factors: &Factors) -> Vec<Rule> {
    let evidence = asked.evidence;
    let mean = |all: &[&MicrobatchInputs], of: &dyn Fn(&MicrobatchInputs) -> &[f64]| {
        let each = all.iter().flat_map(|inputs| counted(inputs).map(|t| of(inputs)[t]));
        let each: Vec<f64> = each.collect();
        each.iter().sum::<f64>() / each.len().max(1) as f64
    };
    let every: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let weight = mean(&every, &|inputs| &inputs.weights);
    let cotangent = mean(&every, &|inputs| &inputs.cotangent);
    let mean_cotangent = |inputs: &MicrobatchInputs| mean(&[inputs], &|inputs| &inputs.cotangent);
    let named: [(&str, OfToken<'_>); 5] = [
        ("with the square of its weight", &|inputs, t| inputs.weights[t]),
        ("with the square of its cotangent", &|inputs, t| inputs.cotangent[t]),
        ("with the mean of all weights", &|inputs, t| weight / inputs.weights[t]),
        ("with the mean of all cotangents", &|inputs, t| cotangent / inputs.cotangent[t]),
        ("with the mean of its microbatch's cotangents", &|inputs, t| {
            mean_cotangent(inputs) / inputs.cotangent[t]
        }),
    ];
    let known = named.into_iter().filter_map(|(words, of)| {
        let factors = by_rule(asked, factors, of)?;
        Some(Rule { words: words.to_string(), factors, fitted: Some(0) })
    });
    let fitted = [of_label(asked, factors), often(asked, factors), by_unit(asked, factors)];
    known.chain(fitted.into_iter().flatten()).collect()
}

/// The number that a rule gives for a token of a microbatch.
type OfToken<'a> = &'a dyn Fn(&MicrobatchInputs, usize) -> f64;

/// The numbers of a rule, if the solved numbers follow it.
fn by_rule(
    asked: &SuspectTokens<'_>,
    solved_factors: &Factors,
    rule: OfToken<'_>,
) -> Option<Factors> {
    let mut factors = Factors::new();
    let mut changes = false;
    for inputs in asked.evidence.inputs {
        let mut factors_here = vec![1.0; inputs.tokens()];
        let is_asked = asked.rows(inputs);
        for t in counted(inputs).filter(|&t| is_asked[t]) {
            let (wanted, solved_factors) = (rule(inputs, t), solved_factors[&inputs.microbatch][t]);
            if !((solved_factors - wanted).abs() <= NEAR * (1.0 + wanted.abs())) {
                return None;
            }
            factors_here[t] = wanted;
            changes |= (wanted - 1.0).abs() > NEAR;
        }
        factors.insert(inputs.microbatch, factors_here);
    }
    changes.then_some(factors)
}

/// The rule that tokens of one label do not count.
fn of_label(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let left_out = |inputs: &MicrobatchInputs| {
        counted(inputs)
            .find(|&t| seen[&inputs.microbatch][t].abs() < NEAR)
            .map(|t| inputs.labels[t])
    };
    let label = evidence.inputs.iter().find_map(left_out)?;
    let counts_once =
        |inputs: &MicrobatchInputs, t: usize| f64::from(u8::from(inputs.labels[t] != label));
    let factors = by_rule(asked, seen, &counts_once)?;
    Some(Rule { words: format!("but those of label {label}"), factors, fitted: Some(1) })
}

/// The rule that a few runs of tokens count more or less often than once. Only where dk fails too:
/// rows that are missing in dq alone were not written.
fn often(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let whole_number = |inputs: &MicrobatchInputs, t: usize| seen[&inputs.microbatch][t].round();
    let factors = by_rule(asked, seen, &whole_number).filter(|_| evidence.fails(Stage::Dk))?;
    let mut said = Vec::new();
    for (mb, factors) in &factors {
        let place = mb.map_or(String::new(), |mb| format!("microbatch {mb} "));
        for (run, times) in runs(factors) {
            let often = if times == 0.0 { "not at all".into() } else { format!("{times} times") };
            said.push(format!("{place}tokens {} to {} {often}", run.start, run.end - 1));
        }
    }
    let few = !said.is_empty() && said.len() <= TOLD;
    few.then(|| Rule { fitted: Some(1 + said.len()), words: said.join(", "), factors })
}

/// The rule that all tokens of a microbatch, or of a rank in it, have one number.
fn by_unit(asked: &SuspectTokens<'_>, seen: &Factors) -> Option<Rule> {
    let evidence = asked.evidence;
    let mut means: Factors = evidence
        .inputs
        .iter()
        .map(|inputs| (inputs.microbatch, vec![1.0; inputs.tokens()]))
        .collect();
    let (mut said, mut numbers) = (Vec::new(), Vec::new());
    for unit in evidence.units() {
        let inputs = evidence.inputs_of(unit.microbatch)?;
        let all: Vec<f64> = (unit.rows.iter().filter(|&&t| counts(inputs, t)))
            .map(|&t| seen[&unit.microbatch][t])
            .collect();
        let mean = rounded(all.iter().sum::<f64>() / all.len().max(1) as f64, 4);
        let means_here = means.get_mut(&unit.microbatch)?;
        unit.rows.iter().for_each(|&t| means_here[t] = mean);
        numbers.push(mean);
        if (mean - 1.0).abs() > NEAR {
            let mb = unit.microbatch.map(|mb| format!("microbatch {mb}"));
            let rank = unit.rank.map(|rank| format!("rank {rank}"));
            let place: Vec<String> = [mb, rank].into_iter().flatten().collect();
            said.push(format!("of {} {mean} times", place.join(" ")));
        }
    }
    let factors = by_rule(asked, seen, &|inputs, t| means[&inputs.microbatch][t])?;
    // If all units have one number, it is a factor on the whole gradient.
    let differ = numbers.iter().any(|x| (x - numbers[0]).abs() > NEAR);
    said.truncate(TOLD);
    differ.then(|| Rule { fitted: Some(said.len()), words: said.join(", "), factors })
}

/// Each token's upstream gradient is multiplied by a number.
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
