//! Worlds that several causes are made of.

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
use crate::replay::world::{At, Expectation, Pass, World};

/// Some stages are a factor of what they should be.
#[derive(Clone)]
pub struct Scaled {
    /// The factor.
    pub factor: f64,
    /// The stages.
    pub stages: BTreeSet<Stage>,
}

impl World for Scaled {
    fn scale(&self, at: At) -> f64 {
        if self.stages.contains(&at.stage) { self.factor } else { 1.0 }
    }
}

/// A factor that entered with the loss: what the backward rounds has it already, which
/// shows where entries lie in a format's smallest numbers.
struct Entering(Scaled);

impl World for Entering {
    fn upstream(&self, _inputs: &MicrobatchInputs, g: &mut [f64]) {
        g.iter_mut().for_each(|g| *g *= self.0.factor);
    }

    fn scale(&self, at: At) -> f64 {
        if at.stage.is_gradient() { 1.0 } else { self.0.scale(at) }
    }
}

/// A factor of some stages: after the backward, and where every gradient that fails is among
/// them also before it.
pub fn scaled(
    evidence: &Evidence<'_>,
    of: Scaled,
    parameters: Vec<(&'static str, String)>,
) -> Vec<Hypothesis> {
    let gradients = |key: &&Key| key.stage.is_gradient();
    let mut gradients = evidence.failing.iter().filter(gradients).peekable();
    let enters = gradients.peek().is_some() && gradients.all(|key| of.stages.contains(&key.stage));
    let before = enters.then(|| {
        let mut parameters = parameters.clone();
        parameters.push(("it enters", "with the loss".into()));
        Hypothesis::new(Entering(of.clone()), parameters)
    });
    before.into_iter().chain([Hypothesis::new(of, parameters)]).collect()
}

/// lse of every microbatch whose own was not captured, as the head declares it.
pub type DeclaredLse = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// What the backward of a wrong head may start from.
pub struct Starts {
    /// lse that was captured, or that the wrong head has: nothing is given.
    pub as_it_is: DeclaredLse,
    /// lse as declared, where it was not captured: the forward was right.
    pub declared: DeclaredLse,
    /// lse of the wrong head, where another was captured: the backward has its own.
    pub own: DeclaredLse,
}

impl Starts {
    /// Of a head whose options or inputs are others.
    pub fn of(evidence: &Evidence<'_>, options: &dyn Fn(&mut HeadOptions), bias: f64) -> Starts {
        let mut other = evidence.step.clone();
        options(&mut other.options);
        let mut found = Starts {
            as_it_is: DeclaredLse::new(),
            declared: DeclaredLse::new(),
            own: DeclaredLse::new(),
        };
        if !evidence.fails_any(&Stage::GRADIENTS) {
            return found;
        }
        for inputs in evidence.inputs {
            let captured = evidence.step.find(Role::Lse, inputs.microbatch).is_some();
            let step = if captured { &other } else { evidence.step };
            let times = if captured { bias } else { 1.0 };
            let list = if captured { &mut found.own } else { &mut found.declared };
            list.extend(
                forward((inputs, evidence), step, times).map(|of| (inputs.microbatch, of.lse)),
            );
        }
        found
    }

    /// Each with its place in words, without those that are empty.
    pub fn each(self) -> Vec<(DeclaredLse, &'static str)> {
        let mut found = vec![(self.as_it_is, "all that fails")];
        for (lse, words) in [
            (self.declared, "the backward, from the lse of a right forward"),
            (self.own, "the backward, with an lse of its own"),
        ] {
            if !lse.is_empty() {
                found.push((lse, words));
            }
        }
        found
    }
}

/// Where a cause is, of which this world is a part.
pub const FORWARD_ONLY: &str = "the forward; the backward has the declared one";

/// A forward of a wrong head was recorded; the backward is that of the declared head.
pub struct ForwardOnly {
    /// lse and label logits of the wrong forward, and the declared lse, `[T]` each.
    columns: BTreeMap<Option<Microbatch>, [Vec<f64>; 3]>,
}

impl ForwardOnly {
    /// Of a head whose options or bias are others; none where gradients are right, or say
    /// nothing of the forward.
    pub fn of(
        evidence: &Evidence<'_>,
        options: &dyn Fn(&mut HeadOptions),
        bias: f64,
    ) -> Option<ForwardOnly> {
        let captured =
            |one: &MicrobatchInputs| evidence.step.find(Role::Lse, one.microbatch).is_some();
        let fails = evidence.fails(Stage::Lse) && evidence.fails_any(&Stage::GRADIENTS);
        if !fails || !evidence.inputs.iter().all(captured) {
            return None;
        }
        let mut other = evidence.step.clone();
        options(&mut other.options);
        let one = |inputs: &MicrobatchInputs| {
            let wrong = forward((inputs, evidence), &other, bias)?;
            let right = forward((inputs, evidence), evidence.step, 1.0)?;
            Some((inputs.microbatch, [wrong.lse, wrong.label_logits, right.lse]))
        };
        Some(ForwardOnly { columns: evidence.inputs.iter().filter_map(one).collect() })
    }
}

impl World for ForwardOnly {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let Some([wrong, _, right]) = self.columns.get(&inputs.microbatch) {
            lse.copy_from_slice(if pass == Pass::Forward { wrong } else { right });
        }
    }

    fn expected(&self, of: &mut Expectation<'_>) {
        if let (Stage::LabelLogits, Some([_, label, _])) =
            (of.at.stage, self.columns.get(&of.at.microbatch))
        {
            of.values.iter_mut().zip(of.rows).for_each(|(to, &row)| *to = label[row]);
        }
    }
}

/// The forward of a microbatch in f64, with so many times its bias.
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

/// Other options of the head, and what follows from them.
#[derive(Clone)]
pub struct Optioned<F> {
    /// Changes the options.
    pub change: F,
    /// lse that the backward starts from all the same; empty where the forward has the
    /// changed options too.
    pub lse: DeclaredLse,
    /// A factor of all gradients besides.
    pub factor: f64,
}

impl<F: Fn(&mut HeadOptions) + Send + Sync> World for Optioned<F> {
    fn options(&self, options: &mut HeadOptions) {
        (self.change)(options);
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let (Pass::Backward, Some(declared)) = (pass, self.lse.get(&inputs.microbatch)) {
            lse.copy_from_slice(declared);
        }
    }

    fn scale(&self, at: At) -> f64 {
        if at.stage.is_gradient() { self.factor } else { 1.0 }
    }
}

/// What tokens are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Tokens that are not ignored.
    Valid,
    /// All tokens.
    All,
    /// The sum of the weights.
    Weights,
    /// Tokens of a weight above 0.
    Weighted,
    /// Tokens that are not ignored, and one more for each sequence: what was not ignored
    /// before labels were shifted by one.
    ValidBeforeShift,
    /// Tokens that are not ignored, but the first of each sequence: they were counted
    /// after one more shift.
    ValidAfterShift,
    /// All tokens but one of each sequence.
    AllAfterShift,
    /// Nothing: the sum is not divided.
    One,
}

impl Count {
    /// All of them.
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

    /// What losses are mostly divided by.
    pub const USUAL: [Count; 3] = [Count::Valid, Count::All, Count::Weights];

    /// What is declared, and the usual ones, once each.
    pub fn declared_and_usual(options: &HeadOptions) -> Vec<Count> {
        let declared = Count::declared(options).filter(|&of| of != Count::One);
        let others = Count::USUAL.into_iter().filter(|&of| Some(of) != declared);
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

    /// What the head declares, where it is one of these.
    pub fn declared(options: &HeadOptions) -> Option<Count> {
        match (options.reduction, options.denominator) {
            (LossReduction::Mean, Denominator::Valid) => Some(Count::Valid),
            (LossReduction::Mean, Denominator::All) => Some(Count::All),
            (LossReduction::Mean, Denominator::Weights) => Some(Count::Weights),
            (LossReduction::Mean, Denominator::Number(_)) => None,
            _ => Some(Count::One),
        }
    }

    /// The count over some rows.
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

/// Which group's count divides the tokens of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Its own.
    Own,
    /// The largest of all, as where counts are reduced by their maximum.
    Largest,
    /// The smallest of all.
    Smallest,
    /// That of the first, as where its count is broadcast.
    First,
}

impl Whose {
    /// In words; none of a group's own.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Whose::Own => None,
            Whose::Largest => Some("the largest of these counts, for all"),
            Whose::Smallest => Some("the smallest of these counts, for all"),
            Whose::First => Some("the first of these counts, for all"),
        }
    }

    /// Gives every group that count.
    fn give(self, counts: &mut [(Unit, f64)]) {
        let each = || counts.iter().map(|(_, n)| *n);
        let found = match self {
            Whose::Own => None,
            Whose::Largest => each().reduce(f64::max),
            Whose::Smallest => each().reduce(f64::min),
            Whose::First => each().next(),
        };
        if let Some(found) = found {
            counts.iter_mut().for_each(|(_, n)| *n = found);
        }
    }
}

/// Losses are divided by another count, over other tokens.
#[derive(Clone, Debug)]
pub struct Counted {
    /// What is counted.
    pub count: Count,
    /// Over which tokens.
    pub span: Span,
    /// Whose count.
    pub whose: Whose,
    /// What the loss is divided by beside the count: the number of means, for instance,
    /// that are averaged.
    pub means: f64,
    /// Factor of the sums over microbatches and over ranks.
    pub sums: BTreeMap<Stage, f64>,
}

impl Counted {
    /// The tokens of a microbatch by what divides them; none where ranks share tokens.
    fn used(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
    ) -> Option<Vec<(Unit, f64)>> {
        let mut other = step.clone();
        other.options.scope = self.span.clone();
        Some(self.of_groups(step.is_policy_loss(), &other.groups(all, own).ok()?))
    }

    /// What divides each of these groups.
    pub fn of_groups(&self, policy: bool, groups: &[CountedTogether<'_>]) -> Vec<(Unit, f64)> {
        let n = |over: &[(&MicrobatchInputs, Unit)]| match self.count {
            Count::One => 1.0,
            count => over.iter().map(|(one, unit)| count.of(one, policy, &unit.rows)).sum(),
        };
        let one = |(unit, over): &CountedTogether<'_>| (unit.clone(), n(over) * self.means);
        let mut found: Vec<(Unit, f64)> = groups.iter().map(one).collect();
        self.whose.give(&mut found);
        found
    }
}

/// What a token's loss is divided by.
pub fn divisor(of: &[(Unit, f64)], row: usize) -> Option<f64> {
    of.iter().find(|(unit, _)| unit.rows.binary_search(&row).is_ok()).map(|(_, n)| *n)
}

impl World for Counted {
    fn denominators(
        &self,
        step: &HeadStep<'_>,
        all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
        of: &mut Vec<(Unit, f64)>,
    ) {
        let (used, declared) = (self.used(step, all, own), step.denominators(all, own).ok());
        let Some((used, declared)) = used.zip(declared) else { return };
        let finer = if used.len() >= of.len() { &used } else { &*of };
        // Over what the background of this world divides by, not over the declared.
        let one = |(unit, n): &(Unit, f64)| {
            let ratio = |&row: &usize| {
                Some(divisor(of, row)? * divisor(&used, row)? / divisor(&declared, row)?)
            };
            let found = unit.rows.first().and_then(ratio).filter(|n| n.is_finite());
            (unit.clone(), found.unwrap_or(*n))
        };
        *of = finer.iter().map(one).collect();
    }

    fn scale(&self, at: At) -> f64 {
        self.sums.get(&at.stage).copied().unwrap_or(1.0)
    }
}
