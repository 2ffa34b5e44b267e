//! Worlds that several causes share: a factor on some stages, other options of the head, a forward
//! and a backward that differ, other numbers to divide the loss by.

use std::collections::{BTreeMap, BTreeSet};

use backtape::head::{Denominator, LossReduction, Span};
use backtape::identity::Microbatch;
use backtape::role::Role;

use super::cause::Hypothesis;
use super::evidence::{Evidence, Key};
use crate::head::units::CountedTogether;
use crate::head::{HeadOptions, HeadStep, MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::{Tiles, reference};
use crate::replay::world::{Expectation, Pass, StagePlace, World};

/// Some stages are multiplied by one factor.
#[derive(Clone)]
pub struct Scaled {
    /// The factor.
    pub factor: f64,
    /// The stages.
    pub stages: BTreeSet<Stage>,
}

impl World for Scaled {
    fn scale(&self, place: StagePlace) -> f64 {
        if self.stages.contains(&place.stage) { self.factor } else { 1.0 }
    }
}

/// A factor that multiplied the loss, so that the backward rounds values that have it already. This
/// differs from a later factor where entries are subnormal in the job's format.
struct Entering(Scaled);

impl World for Entering {
    fn upstream(&self, _inputs: &MicrobatchInputs, g: &mut [f64]) {
        g.iter_mut().for_each(|g| *g *= self.0.factor);
    }

    fn scale(&self, place: StagePlace) -> f64 {
        if place.stage.is_gradient() { 1.0 } else { self.0.scale(place) }
    }
}

/// Hypotheses of one factor on some stages: applied after the backward, and, if every failing
/// gradient is among those stages, also applied to the loss before it.
pub fn scaled(
    evidence: &Evidence<'_>,
    scaled: Scaled,
    parameters: Vec<(&'static str, String)>,
) -> Vec<Hypothesis> {
    let gradients = |key: &&Key| key.stage.is_gradient();
    let mut gradients = evidence.failing.iter().filter(gradients).peekable();
    let enters =
        gradients.peek().is_some() && gradients.all(|key| scaled.stages.contains(&key.stage));
    let before = enters.then(|| {
        let mut parameters = parameters.clone();
        parameters.push(("it enters", "with the loss".into()));
        Hypothesis::new(Entering(scaled.clone()), parameters)
    });
    before.into_iter().chain([Hypothesis::new(scaled, parameters)]).collect()
}

/// lse `[T]` for the backward to start from, by microbatch.
pub type DeclaredLse = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// The lse values that the backward of a head with other options may start from.
pub struct BackwardStarts {
    /// No lse is given: the captured one is read, or that of the wrong head's forward.
    pub as_it_is: DeclaredLse,
    /// lse as declared, for microbatches where none was captured: the forward was right.
    pub declared: DeclaredLse,
    /// lse of the wrong head, for microbatches where another was captured: the backward computes
    /// its own.
    pub of_wrong_head: DeclaredLse,
}

impl BackwardStarts {
    /// The lse values for a head whose options are changed by `options` and whose bias is
    /// multiplied by `bias`.
    pub fn of(
        evidence: &Evidence<'_>,
        options: &dyn Fn(&mut HeadOptions),
        bias: f64,
    ) -> BackwardStarts {
        let mut other = evidence.step.clone();
        options(&mut other.options);
        let mut starts = BackwardStarts {
            as_it_is: DeclaredLse::new(),
            declared: DeclaredLse::new(),
            of_wrong_head: DeclaredLse::new(),
        };
        if !evidence.fails_any(&Stage::GRADIENTS) {
            return starts;
        }
        for inputs in evidence.inputs {
            let captured = evidence.step.find(Role::Lse, inputs.microbatch).is_some();
            let step = if captured { &other } else { evidence.step };
            let times = if captured { bias } else { 1.0 };
            let list = if captured { &mut starts.of_wrong_head } else { &mut starts.declared };
            list.extend(
                forward((inputs, evidence), step, times)
                    .map(|forward| (inputs.microbatch, forward.lse)),
            );
        }
        starts
    }

    /// Each of them, with words for where the fault then is, without those that are empty.
    pub fn each(self) -> Vec<(DeclaredLse, &'static str)> {
        let mut starts = vec![(self.as_it_is, "all that fails")];
        for (lse, words) in [
            (self.declared, "the backward, from the lse of a right forward"),
            (self.of_wrong_head, "the backward, with an lse of its own"),
        ] {
            if !lse.is_empty() {
                starts.push((lse, words));
            }
        }
        starts
    }
}

/// Words for where the fault is in a [`ForwardOnly`] world.
pub const FORWARD_ONLY: &str = "the forward; the backward has the declared one";

/// The recorded forward has the fault; the backward is that of the declared head.
pub struct ForwardOnly {
    /// lse and label logits of the wrong forward, and the declared lse, `[T]` each.
    columns: BTreeMap<Option<Microbatch>, [Vec<f64>; 3]>,
}

impl ForwardOnly {
    /// For a head whose options are changed by `options` and whose bias is multiplied by `bias`.
    /// None unless lse was captured in every microbatch, and lse and a gradient fail.
    pub fn of(
        evidence: &Evidence<'_>,
        options: &dyn Fn(&mut HeadOptions),
        bias: f64,
    ) -> Option<ForwardOnly> {
        let captured =
            |inputs: &MicrobatchInputs| evidence.step.find(Role::Lse, inputs.microbatch).is_some();
        let fails = evidence.fails(Stage::Lse) && evidence.fails_any(&Stage::GRADIENTS);
        if !fails || !evidence.inputs.iter().all(captured) {
            return None;
        }
        let mut other = evidence.step.clone();
        options(&mut other.options);
        let of_microbatch = |inputs: &MicrobatchInputs| {
            let wrong = forward((inputs, evidence), &other, bias)?;
            let right = forward((inputs, evidence), evidence.step, 1.0)?;
            Some((inputs.microbatch, [wrong.lse, wrong.label_logits, right.lse]))
        };
        Some(ForwardOnly { columns: evidence.inputs.iter().filter_map(of_microbatch).collect() })
    }
}

impl World for ForwardOnly {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let Some([wrong, _, right]) = self.columns.get(&inputs.microbatch) {
            lse.copy_from_slice(if pass == Pass::Forward { wrong } else { right });
        }
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        if let (Stage::LabelLogits, Some([_, label, _])) =
            (expectation.place.stage, self.columns.get(&expectation.place.microbatch))
        {
            expectation
                .values
                .iter_mut()
                .zip(expectation.rows)
                .for_each(|(to, &row)| *to = label[row]);
        }
    }
}

/// The forward of a microbatch in f64, its bias multiplied by `times`.
fn forward(
    (inputs, evidence): (&MicrobatchInputs, &Evidence<'_>),
    step: &HeadStep<'_>,
    times: f64,
) -> Option<reference::Forward> {
    let biases: Option<Vec<f64>> =
        inputs.bias.as_ref().map(|all| all.iter().map(|b| b * times).collect());
    let head = HeadInputs { bias: biases.as_deref(), ..inputs.head(step)? };
    Some(reference::forward(&head, Tiles::default(), evidence.progress()))
}

/// Other options of the head.
#[derive(Clone)]
pub struct ChangedOptions<F> {
    /// Changes the options.
    pub change: F,
    /// lse that the backward starts from in spite of the changed options; empty where the forward
    /// has them too.
    pub lse: DeclaredLse,
    /// A further factor on all gradients.
    pub factor: f64,
}

impl<F: Fn(&mut HeadOptions) + Send + Sync> World for ChangedOptions<F> {
    fn options(&self, options: &mut HeadOptions) {
        (self.change)(options);
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let (Pass::Backward, Some(declared)) = (pass, self.lse.get(&inputs.microbatch)) {
            lse.copy_from_slice(declared);
        }
    }

    fn scale(&self, place: StagePlace) -> f64 {
        if place.stage.is_gradient() { self.factor } else { 1.0 }
    }
}

/// What is counted to get the number that the loss is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Tokens that are not ignored.
    Valid,
    /// All tokens, ignored ones too.
    All,
    /// The sum of the weights.
    Weights,
    /// Tokens that are not ignored and have a weight above 0.
    Weighted,
    /// Tokens that are not ignored plus one for each sequence: the count before the labels were
    /// shifted by one.
    ValidBeforeShift,
    /// Tokens that are not ignored, without the first of each sequence: the count after one shift
    /// too many.
    ValidAfterShift,
    /// All tokens but one of each sequence.
    AllAfterShift,
    /// Nothing: the sum is not divided.
    One,
}

impl Count {
    /// Everything that may be counted.
    pub const ALL: [Count; 8] = [
        Count::Valid,
        Count::All,
        Count::Weights,
        Count::Weighted,
        Count::ValidBeforeShift,
        Count::ValidAfterShift,
        Count::AllAfterShift,
        Count::One,
    ];

    /// What most jobs divide the loss by.
    pub const USUAL: [Count; 3] = [Count::Valid, Count::All, Count::Weights];

    /// The declared count and the usual ones, each once.
    pub fn declared_and_usual(options: &HeadOptions) -> Vec<Count> {
        let declared = Count::declared(options).filter(|&count| count != Count::One);
        let others = Count::USUAL.into_iter().filter(|&count| Some(count) != declared);
        declared.into_iter().chain(others).collect()
    }

    /// What is counted, for the report.
    pub fn words(self) -> &'static str {
        match self {
            Count::Valid => "tokens that are not ignored",
            Count::All => "all tokens",
            Count::Weights => "the sum of the weights",
            Count::Weighted => "tokens of a weight above 0",
            Count::ValidBeforeShift => "tokens not ignored before the labels were shifted",
            Count::ValidAfterShift => "tokens not ignored after one shift too many",
            Count::AllAfterShift => "all tokens but one of each sequence",
            Count::One => "nothing: the sum over tokens",
        }
    }

    /// The count that the head declares, where it is one of these.
    pub fn declared(options: &HeadOptions) -> Option<Count> {
        match (options.reduction, options.denominator) {
            (LossReduction::Mean, Denominator::Valid) => Some(Count::Valid),
            (LossReduction::Mean, Denominator::All) => Some(Count::All),
            (LossReduction::Mean, Denominator::Weights) => Some(Count::Weights),
            (LossReduction::Mean, Denominator::Number(_)) => None,
            _ => Some(Count::One),
        }
    }

    /// The count over some rows of a microbatch.
    fn of(self, inputs: &MicrobatchInputs, policy: bool, rows: &[usize]) -> f64 {
        let length = inputs.sequence.max(1);
        let kept =
            |t: &&usize| inputs.labels[**t] != IGNORED && !(policy && inputs.weights[**t] == 0.0);
        let first = |t: &&usize| (**t).is_multiple_of(length);
        let number = |n: usize| n as f64;
        let sequences = number(rows.iter().filter(first).count());
        let valid = || number(rows.iter().filter(kept).count());
        match self {
            Count::Valid => valid(),
            Count::All => number(rows.len()),
            Count::Weighted => {
                number(rows.iter().filter(kept).filter(|&&t| inputs.weights[t] > 0.0).count())
            }
            Count::Weights => rows.iter().filter(kept).map(|&t| inputs.weights[t]).sum(),
            Count::ValidBeforeShift => valid() + sequences,
            Count::ValidAfterShift => {
                number(rows.iter().filter(kept).filter(|t| !first(t)).count())
            }
            Count::AllAfterShift => number(rows.len()) - sequences,
            Count::One => 1.0,
        }
    }
}

/// Tokens are counted in groups (of sequences, ranks or microbatches); this says which group's
/// count divides the loss of a group's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The count of the group itself.
    Own,
    /// The largest of all, as where counts are reduced by their maximum.
    Largest,
    /// The smallest of all groups.
    Smallest,
    /// That of the first, as where its count is broadcast.
    First,
}

impl Whose {
    /// In words; none for a group's own count.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Whose::Own => None,
            Whose::Largest => Some("the largest of these counts, for all"),
            Whose::Smallest => Some("the smallest of these counts, for all"),
            Whose::First => Some("the first of these counts, for all"),
        }
    }

    /// Replaces the count of every group by that one.
    fn give(self, counts: &mut [(Unit, f64)]) {
        let each = || counts.iter().map(|(_, n)| *n);
        let chosen = match self {
            Whose::Own => None,
            Whose::Largest => each().reduce(f64::max),
            Whose::Smallest => each().reduce(f64::min),
            Whose::First => each().next(),
        };
        if let Some(chosen) = chosen {
            counts.iter_mut().for_each(|(_, n)| *n = chosen);
        }
    }
}

/// Losses are divided by another count, over other tokens.
#[derive(Clone, Debug)]
pub struct Counted {
    /// What is counted.
    pub count: Count,
    /// Which tokens are counted together.
    pub span: Span,
    /// Which group's count is used.
    pub whose: Whose,
    /// A further divisor, for example the number of means that are averaged.
    pub means: f64,
    /// Factor of the sums over microbatches and over ranks.
    pub sums: BTreeMap<Stage, f64>,
}

impl Counted {
    /// The tokens of a microbatch in groups, each with its divisor; none where ranks share tokens.
    fn used(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        inputs: &MicrobatchInputs,
    ) -> Option<Vec<(Unit, f64)>> {
        let mut other = step.clone();
        other.options.scope = self.span.clone();
        Some(self.of_groups(step.is_policy_loss(), &other.groups(all, inputs).ok()?))
    }

    /// The divisor of each of these groups.
    pub fn of_groups(&self, policy: bool, groups: &[CountedTogether<'_>]) -> Vec<(Unit, f64)> {
        let n = |over: &[(&MicrobatchInputs, Unit)]| match self.count {
            Count::One => 1.0,
            count => over.iter().map(|(inputs, unit)| count.of(inputs, policy, &unit.rows)).sum(),
        };
        let divisor_of = |(unit, over): &CountedTogether<'_>| (unit.clone(), n(over) * self.means);
        let mut divisors: Vec<(Unit, f64)> = groups.iter().map(divisor_of).collect();
        self.whose.give(&mut divisors);
        divisors
    }
}

/// The divisor of a token's loss.
pub fn divisor(divisors: &[(Unit, f64)], row: usize) -> Option<f64> {
    divisors.iter().find(|(unit, _)| unit.rows.binary_search(&row).is_ok()).map(|(_, n)| *n)
}

impl World for Counted {
    fn denominators(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        inputs: &MicrobatchInputs,
        divisors: &mut Vec<(Unit, f64)>,
    ) {
        let (used, declared) = (self.used(step, all, inputs), step.denominators(all, inputs).ok());
        let Some((used, declared)) = used.zip(declared) else { return };
        let finer = if used.len() >= divisors.len() { &used } else { &*divisors };
        // The change is a ratio to the declared divisor and applies to the one of the background,
        // which another world may have changed.
        let changed_divisor = |(unit, n): &(Unit, f64)| {
            let ratio = |&row: &usize| {
                Some(divisor(divisors, row)? * divisor(&used, row)? / divisor(&declared, row)?)
            };
            let changed = unit.rows.first().and_then(ratio).filter(|n| n.is_finite());
            (unit.clone(), changed.unwrap_or(*n))
        };
        *divisors = finer.iter().map(changed_divisor).collect();
    }

    fn scale(&self, place: StagePlace) -> f64 {
        self.sums.get(&place.stage).copied().unwrap_or(1.0)
    }
}
