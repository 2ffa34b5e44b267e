//! What was declared by hand and what the job has, where they contradict each other.
//!
//! Of a job that was attached to, the head is judged by what was seen and measured; what somebody
//! declared beside it is held against that, here. Of a job that declares its head, a declared dtype
//! is held against the recorded numbers.
//!
//! How a loss is divided is not compared option by option: a sum that the job divides itself is a
//! mean. What each token's loss is divided by in effect, by the declaration, is compared with the
//! gradient that arrived at it.

use backtape::head::{DTYPES, HeadDeclaration, LossReduction, OPTIONS, Source, written};
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use serde::Serialize;

use super::lowered::shown_below;
use super::roundings::unit_of;
use super::step::{HeadStep, StepError};
use super::units::share;
use super::{HeadOptions, MicrobatchInputs};
use crate::kernels::matrix::IGNORED;
use crate::number::{count, short};

/// The options that say how a loss is divided.
const DIVISION: [&str; 4] = ["reduction", "denominator", "scope", "cotangent"];
/// What happens after the backward passes: no gradient that arrives at a loss shows it.
const AFTERWARDS: &str = "microbatch_reduction";
/// How often a cotangent may have been rounded on its way to the loss, by a division or a factor
/// each time.
const ROUNDINGS: f64 = 16.0;

/// Something that was declared by hand, and that the job does not have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Contradiction {
    /// The option of `tape.head`, `dtypes.` with a point, or several options.
    pub item: String,
    /// What was declared, as it is written in Python; of a division the number in effect.
    pub declared: String,
    /// What the job has.
    pub found: String,
    /// Where that is from.
    pub source: Source,
    /// The whole in one sentence, with what to do.
    pub sentence: String,
}

/// The contradictions of a declaration in itself: what was declared by hand, and what was found.
pub fn of_options(head: &HeadDeclaration) -> Vec<Contradiction> {
    let Some(by_hand) = head.as_by_hand() else { return Vec::new() };
    let is_compared = |name: &&str| !DIVISION.contains(name) && *name != AFTERWARDS;
    let mut all = Vec::new();
    for name in head.by_hand.keys().map(String::as_str).filter(is_compared) {
        if name == DTYPES {
            let points =
                by_hand.dtypes.iter().filter(|(point, _)| head.dtypes.contains_key(*point));
            let each = points.map(|(point, dtype)| {
                (format!("{DTYPES}.{point}"), dtype.clone(), head.dtypes[point].clone())
            });
            all.extend(each);
        } else if OPTIONS.iter().any(|option| option.name == name) {
            all.push((name.into(), written(&by_hand, name), written(head, name)));
        }
    }
    let differ = all.into_iter().filter(|(_, declared, found)| declared != found);
    differ.map(|(item, declared, found)| found_otherwise(head, item, declared, found)).collect()
}

fn found_otherwise(
    head: &HeadDeclaration,
    item: String,
    declared: String,
    found: String,
) -> Contradiction {
    let source = head.source(&item).unwrap_or(Source::Measured);
    let how = if source == Source::Seen { "the job has" } else { "the job was measured to have" };
    let sentence = format!(
        "{item}={declared} is declared by hand, and {how} {found}: correct the one that is wrong; \
         the head was judged with {found}"
    );
    Contradiction { item, declared, found, source, sentence }
}

/// The contradictions of what a step declares with what it recorded.
pub fn of_step(step: &HeadStep<'_>) -> Vec<Contradiction> {
    let head = &step.options.declared;
    let is_by_hand = |item: &str| head.source(item) == Some(Source::Declared);
    let mut all = Vec::new();
    for (point, dtype) in &head.dtypes {
        let item = format!("{DTYPES}.{point}");
        let shown = is_by_hand(&item).then(|| shown_below(step, point)).flatten();
        all.extend(shown.map(|(role, format)| {
            let (declared, found) = (dtype.clone(), format.name().to_string());
            let sentence = format!(
                "{item}={declared} is declared by hand, and the recorded {role} are numbers of \
                 {found}: declare {found}, or look where the job rounds them; the head was judged \
                 with {declared}"
            );
            Contradiction { item, declared, found, source: Source::Measured, sentence }
        }));
    }
    let recorded = step.tensors.values().any(|info| info.role == Some(Role::Cotangent));
    let is_twice = recorded && step.options.reduction != LossReduction::None;
    if is_twice && is_by_hand("cotangent") && step.options.cotangent != 1.0 {
        let (item, declared) = (String::from("cotangent"), written(head, "cotangent"));
        let sentence = format!(
            "cotangent={declared} is declared by hand, and the cotangent that was recorded holds \
             every factor of the loss already: leave one of them out; the head was judged with both"
        );
        let (found, source) = ("recorded".into(), Source::Measured);
        all.push(Contradiction { item, declared, found, source, sentence });
    }
    all
}

/// A token whose loss is divided by another number than the declared one.
struct Divided {
    declared: f64,
    measured: f64,
    microbatch: Option<Microbatch>,
    rank: Option<Rank>,
}

/// How the loss is divided, as it was declared by hand beside what was measured: the contradiction,
/// if there is one. `Err` says why they cannot be compared.
pub fn of_division(step: &HeadStep<'_>) -> Result<Option<Contradiction>, String> {
    let head = &step.options.declared;
    let named: Vec<&str> =
        DIVISION.into_iter().filter(|name| head.by_hand.contains_key(*name)).collect();
    let Some(by_hand) = head.as_by_hand().filter(|_| !named.is_empty()) else { return Ok(None) };
    let options = HeadOptions::new(&divided_by_hand(head, &by_hand));
    let by_hand = options.map_err(|error| error.to_string())?;
    let said: Vec<String> =
        named.iter().map(|name| format!("{name}={}", written(&by_hand.declared, name))).collect();
    let worst = largest_difference(step, by_hand).map_err(|error| error.to_string())??;
    let Some(worst) = worst else { return Ok(None) };
    let (declared, measured) = (divisor(worst.declared), divisor(worst.measured));
    let rank = worst.rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
    let place = worst.microbatch.map_or("the step".into(), |mb| format!("microbatch {mb}"));
    let sentence = format!(
        "{} is declared by hand, by which a token's loss is divided by {declared} ({place}{rank}), and \
         the gradient that arrives at it was measured to divide it by {measured}, every factor \
         included (microbatches, ranks, loss scale): correct the declaration, or what the job counts; \
         the head was judged as measured",
        said.join(", "),
    );
    let source = Source::Measured;
    Ok(Some(Contradiction { item: named.join(", "), declared, found: measured, source, sentence }))
}

/// A divisor in words: a whole number where it is one but for rounding.
fn divisor(x: f64) -> String {
    let is_whole = x >= 1.0 && (x.round() / x - 1.0).abs() < 1e-4;
    if is_whole { count(x.round() as u64) } else { short(x) }
}

/// The head with the division that was declared by hand: what was not said of it has its default,
/// and not what the job's call has.
fn divided_by_hand(head: &HeadDeclaration, by_hand: &HeadDeclaration) -> HeadDeclaration {
    let usual = HeadDeclaration::default();
    let given = |name: &str| if head.by_hand.contains_key(name) { by_hand } else { &usual };
    HeadDeclaration {
        reduction: given("reduction").reduction,
        denominator: given("denominator").denominator,
        scope: given("scope").scope.clone(),
        cotangent: given("cotangent").cotangent,
        ..head.clone()
    }
}

/// The token whose declared and measured divisors differ most, if they differ by more than
/// rounding. A token that gets no gradient is taken for one that does not count: masks that a job
/// multiplies losses by are not declared.
fn largest_difference(
    step: &HeadStep<'_>,
    by_hand: HeadOptions,
) -> Result<Result<Option<Divided>, String>, StepError> {
    let mut inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(|&mb| step.inputs(mb)).collect::<Result<_, StepError>>()?;
    let measured = match shares(step, &inputs) {
        Ok(measured) => measured,
        Err(why) => return Ok(Err(why)),
    };
    for (inputs, measured) in inputs.iter_mut().zip(&measured) {
        for ((share, _), label) in measured.iter().zip(&mut inputs.labels) {
            *label = if *share == 0.0 { IGNORED } else { *label };
        }
        inputs.cotangent.fill(1.0);
    }
    let mut as_declared = step.clone();
    as_declared.options = by_hand;
    let declared = match shares(&as_declared, &inputs) {
        Ok(declared) => declared,
        Err(why) => return Ok(Err(why)),
    };
    let mut worst: Option<(f64, Divided)> = None;
    for (at, inputs) in inputs.iter().enumerate() {
        let cotangent = step.recorded(Role::Cotangent, inputs.microbatch);
        let unit = cotangent.map_or(0.0, |key| unit_of(step.tensors[key].dtype));
        for (&(measured, rank), &(declared, _)) in measured[at].iter().zip(&declared[at]) {
            let apart = if measured == 0.0 { 0.0 } else { (declared / measured - 1.0).abs() };
            let is_worst = worst.as_ref().is_none_or(|(most, _)| apart > *most);
            if is_worst && !(apart <= ROUNDINGS * unit) {
                let (declared, measured) = (1.0 / declared, 1.0 / measured);
                let divided = Divided { declared, measured, microbatch: inputs.microbatch, rank };
                worst = Some((apart, divided));
            }
        }
    }
    Ok(Ok(worst.map(|(_, divided)| divided)))
}

/// What the gradient of each token's loss is, by microbatch and token, and whose the token is.
type Shares = Vec<Vec<(f64, Option<Rank>)>>;

fn shares(step: &HeadStep<'_>, inputs: &[MicrobatchInputs]) -> Result<Shares, String> {
    let all: Vec<&MicrobatchInputs> = inputs.iter().collect();
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let mut shares = vec![(0.0, None); inputs.tokens()];
        for (unit, denominator) in step.denominators(&all, inputs)? {
            for &t in unit.rows.iter().filter(|&&t| inputs.labels[t] != IGNORED) {
                let weight = inputs.weights[t] * inputs.cotangent[t];
                shares[t] = (step.options.cotangent * share(weight, denominator), unit.rank());
            }
        }
        Ok(shares)
    };
    inputs.iter().map(of_microbatch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentences(text: &str) -> Vec<String> {
        let head = serde_json::from_str(text).unwrap();
        of_options(&head).into_iter().map(|found| found.sentence).collect()
    }

    #[test]
    fn what_is_declared_by_hand_and_found_otherwise_is_told_with_both() {
        let text = r#"{"ignore_label": -100, "dtypes": {"logits": "bf16"},
            "sources": {"ignore_label": "seen", "dtypes.logits": "measured"},
            "by_hand": {"ignore_label": 0, "dtypes": {"logits": "f32"}}}"#;
        assert_eq!(
            sentences(text),
            [
                "dtypes.logits=f32 is declared by hand, and the job was measured to have bf16: \
                 correct the one that is wrong; the head was judged with bf16",
                "ignore_label=0 is declared by hand, and the job has -100: correct the one that is \
                 wrong; the head was judged with -100",
            ]
        );
    }

    #[test]
    fn what_is_declared_as_it_was_found_contradicts_nothing() {
        let text = r#"{"ignore_label": -100, "temperature": 30.0, "dtypes": {"logits": "bf16"},
            "sources": {"ignore_label": "seen"},
            "by_hand": {"ignore_label": -100, "temperature": 30, "dtypes": {"logits": "bf16"}}}"#;
        assert_eq!(sentences(text), Vec::<String>::new());
        assert_eq!(sentences(r#"{"z_loss": 0.5}"#), Vec::<String>::new());
    }

    #[test]
    fn a_division_is_not_compared_word_by_word() {
        let text = r#"{"reduction": "sum", "scope": "rank", "sources": {"reduction": "seen"},
            "by_hand": {"reduction": "mean", "scope": "global", "microbatch_reduction": "mean"}}"#;
        assert_eq!(sentences(text), Vec::<String>::new());
        let head: HeadDeclaration = serde_json::from_str(text).unwrap();
        let divided = divided_by_hand(&head, &head.as_by_hand().unwrap());
        assert_eq!((divided.reduction, divided.cotangent), (LossReduction::Mean, 1.0));
    }
}
