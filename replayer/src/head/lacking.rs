//! What is missing for the replay of a step: inputs that the job recorded and that cannot be read
//! from the dump, and microbatches that the dump does not hold. No stage that depends on them gets
//! a verdict.
//!
//! A damaged output of a stage is not listed here: the replay computes what it should have been, as
//! for a job that never recorded it.

use std::collections::{BTreeMap, BTreeSet};

use backtape::head::{Denominator, LossReduction, Microbatches};
use backtape::identity::{Microbatch, Name};
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::{HeadStep, Stage};

/// Stages that use each token's weight in the mean, and with it the denominator.
const SHARED: [Stage; 3] = [Stage::Loss, Stage::Dlogprobs, Stage::G];

/// What is missing for the replay of a step; nearly always nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lacking {
    inputs: Vec<LostInput>,
    /// Microbatches that the dump does not hold, one clause of a sentence each.
    microbatches: Vec<String>,
    /// Whether the mean is over the tokens of all microbatches.
    all_count: bool,
}

/// An input of one microbatch that cannot be read.
#[derive(Clone, Debug, PartialEq)]
struct LostInput {
    stage: Stage,
    microbatch: Option<Microbatch>,
    key: TensorKey,
    why: String,
}

impl LostInput {
    fn sentence(&self) -> String {
        format!("it depends on {}, which cannot be used: {}", self.key, self.why)
    }
}

impl Lacking {
    /// True when every input of the step can be read.
    pub fn is_nothing(&self) -> bool {
        self.inputs.is_empty() && self.microbatches.is_empty()
    }

    /// The microbatches that the dump does not hold, one clause of a sentence each.
    pub fn microbatches(&self) -> &[String] {
        &self.microbatches
    }

    /// Why a stage gets no verdict in a microbatch, or, without a microbatch, in the whole step.
    /// Sums over microbatches and ranks are judged from their captured addends, and read no input.
    pub fn withholds(&self, stage: Stage, microbatch: Option<Microbatch>) -> Option<String> {
        if matches!(stage, Stage::Accumulate | Stage::Reduce | Stage::GradNorm) {
            return None;
        }
        let counts = self.all_count && SHARED.iter().any(|&shared| stage.depends_on(shared));
        let rests = |lost: &&LostInput| {
            let here = microbatch.is_none() || lost.microbatch == microbatch;
            let counted = matches!(lost.stage, Stage::Labels | Stage::Weights | Stage::Logprobs);
            here && stage.depends_on(lost.stage) || counts && counted
        };
        if let Some(lost) = self.inputs.iter().find(rests) {
            return Some(lost.sentence());
        }
        let missing = self.microbatches.first().filter(|_| counts)?;
        Some(format!("its mean is over the tokens of every microbatch: {missing}"))
    }

    /// Why a stage gets no verdict in at least one microbatch.
    pub fn withholds_some(&self, stage: Stage) -> Option<String> {
        let each = self.inputs.iter().map(|lost| lost.microbatch).collect::<BTreeSet<_>>();
        let of_each = each.into_iter().find_map(|microbatch| self.withholds(stage, microbatch));
        of_each.or_else(|| self.withholds(stage, None))
    }

    /// The lost input of a role in a microbatch.
    pub fn input(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&TensorKey> {
        let wanted =
            |lost: &&LostInput| lost.stage.role() == Some(role) && lost.microbatch == microbatch;
        self.inputs.iter().find(wanted).map(|lost| &lost.key)
    }

    /// Some lost input of a microbatch, and why it cannot be read.
    pub fn any_of(&self, microbatch: Option<Microbatch>) -> Option<(TensorKey, String)> {
        let lost = self.inputs.iter().find(|lost| lost.microbatch == microbatch)?;
        Some((lost.key.clone(), lost.why.clone()))
    }
}

impl HeadStep<'_> {
    /// Finds what is missing, once the microbatches are known. `absent` are the microbatches in
    /// which tensors of the head were recorded, but not the scores that the loss is computed from.
    pub(super) fn find_lacking(&self, absent: &BTreeSet<Microbatch>) -> Lacking {
        let scores = self.scores();
        let mut lacking = Lacking { all_count: self.counts_all(), ..Lacking::default() };
        for microbatch in absent {
            let why = format!("microbatch {microbatch} was recorded without {scores}");
            lacking.microbatches.push(self.unselected(scores, Some(*microbatch), why));
        }
        let (declared, recorded) =
            (self.options.declared.microbatches as usize, &self.microbatches);
        if declared > recorded.len() + absent.len() {
            let why = format!(
                "the head declares microbatches={declared}, the dump holds {} ({}): record every microbatch",
                recorded.len() + absent.len(),
                named(recorded)
            );
            let first = (0..).map(Microbatch).find(|mb| !recorded.contains(&Some(*mb)));
            lacking.microbatches.push(self.unselected(scores, first, why));
        }
        for &microbatch in recorded {
            for role in self.inputs_read() {
                let lost = self.lost(role, microbatch).zip(Stage::of_role(role));
                let input = |((key, why), stage)| LostInput { stage, microbatch, key, why };
                lacking.inputs.extend(lost.map(input));
            }
        }
        lacking
    }

    /// Adds to a reason that no rank was asked to record the scores, if so.
    fn unselected(&self, scores: Role, microbatch: Option<Microbatch>, why: String) -> String {
        let number = microbatch.map(|mb| mb.0);
        let asked = self.dump.manifest.unselected(scores.name(), number);
        asked.map_or(why.clone(), |unselected| format!("{why}; {unselected}"))
    }

    /// Whether the declared denominator counts tokens over all microbatches.
    fn counts_all(&self) -> bool {
        let counted = !matches!(self.options.denominator, Denominator::Number(_));
        let mean = self.options.reduction == LossReduction::Mean;
        mean && counted && self.options.scope.microbatches == Microbatches::All
    }

    /// Roles of the inputs that the replay reads and cannot compute.
    pub(super) fn inputs_read(&self) -> Vec<Role> {
        let scores = self.scores();
        let mut roles = vec![scores, Role::Labels, Role::Weights, Role::Cotangent];
        match scores {
            Role::Q => roles.extend([Role::K, Role::Bias]),
            Role::Logits => roles.push(Role::Bias),
            _ => {}
        }
        if self.is_policy_loss() {
            roles.extend([Role::Advantages, Role::OldLogprobs, Role::RefLogprobs]);
        }
        roles
    }

    /// The tensor that would be read for a role, and why it cannot be read; `None` where it can, or
    /// where the job has no such tensor.
    fn lost(&self, role: Role, microbatch: Option<Microbatch>) -> Option<(TensorKey, String)> {
        let places: &[_] = if microbatch.is_some() { &[microbatch, None] } else { &[None] };
        let known = |microbatch: Option<Microbatch>| {
            let all = self.tensors.keys().chain(self.unusable.keys());
            let of_role =
                all.filter(|key| key.microbatch == microbatch && self.role_of(key) == Some(role));
            of_role.min_by_key(|key| (key.when == Some(When::PostReduce), *key))
        };
        if let Some(key) = places.iter().find_map(|&microbatch| known(microbatch)) {
            return self.unusable.get(key).map(|why| (key.clone(), why.clone()));
        }
        let mut others = self.microbatches.iter().filter(|other| **other != microbatch);
        let other = others.find_map(|&other| other.and_then(|_| known(other)))?;
        let why = format!("{other} was recorded, and it was not");
        Some((TensorKey { microbatch, ..other.clone() }, why))
    }

    /// The role of a tensor, also of one of which the dump holds no shard.
    pub(crate) fn role_of(&self, key: &TensorKey) -> Option<Role> {
        let tensors = self.dump.tensors();
        let same_name = || tensors.iter().find(|(other, _)| other.tensor == key.tensor);
        match tensors.get(key) {
            Some(info) => info.role,
            None => match same_name() {
                Some((_, info)) => info.role,
                None => Role::from_name(key.tensor.as_str()),
            },
        }
    }
}

/// Tensors that the step's records name and of which the dump holds no shard, and why.
pub(super) fn unheld(dump: &crate::dump::StepDump) -> BTreeMap<TensorKey, String> {
    let mut reasons = BTreeMap::new();
    for omission in &dump.manifest.omissions {
        let Ok(tensor) = Name::new(omission.tensor.as_str()) else { continue };
        let key = TensorKey { tensor, microbatch: omission.microbatch, when: None };
        let same_tensor = |recorded: &&TensorKey| {
            (&recorded.tensor, recorded.microbatch) == (&key.tensor, key.microbatch)
        };
        if dump.tensors().keys().any(|key| same_tensor(&key)) {
            continue;
        }
        let (rank, reason) = (omission.rank, &omission.reason);
        let reason: String = reason.chars().filter(|c| !c.is_control()).take(200).collect();
        reasons.entry(key).or_insert_with(|| format!("rank {rank} did not record it: {reason}"));
    }
    let listed =
        dump.manifest.shards().filter(|(_, shard)| !dump.tensors().contains_key(&shard.key));
    for (file, shard) in listed {
        let why = || format!("what {} says of it contradicts itself", file.name);
        reasons.entry(shard.key.clone()).or_insert_with(why);
    }
    reasons
}

/// The first few microbatches by number, and how many more there are.
fn named(microbatches: &[Option<Microbatch>]) -> String {
    const SHOWN: usize = 8;
    let numbers: Vec<String> = microbatches.iter().flatten().map(ToString::to_string).collect();
    match numbers.len() {
        0 => "without a number".into(),
        n if n > SHOWN => format!("{} and {} more", numbers[..SHOWN].join(", "), n - SHOWN),
        _ => numbers.join(", "),
    }
}
