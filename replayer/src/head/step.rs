//! The tensors of one step of a head: which ones the dump holds, and how to assemble them.

use std::collections::{BTreeMap, BTreeSet};

use backtape::head::{Loss, LossReduction, PolicyDeclaration};
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::assembled::{Assembled, Which};
use super::lacking::{Lacking, unheld};
use super::options::HeadOptions;
use super::stage::Stage;
use crate::assemble::{self, AssembleError, Tensor};
use crate::dump::{StepDump, StepState, TensorInfo};

pub use super::error::StepError;
pub(crate) use super::error::unfit;
pub(crate) use super::view::{addends_of_elements, flat_rows, numbers};
pub use super::view::{matrix, vocabulary_slab};
pub use crate::kernels::rows_of;

/// The tensor name under which the recorder lists a refused head declaration among its omissions.
const DECLARATION: &str = "head";

/// The head of one step and its tensors in the dump.
#[derive(Clone)]
pub struct HeadStep<'a> {
    /// The dump.
    pub dump: &'a StepDump,
    /// The checked declaration.
    pub options: HeadOptions,
    /// Every tensor of the step that can be used.
    pub tensors: BTreeMap<TensorKey, TensorInfo>,
    /// Tensors that are damaged, incomplete or were not recorded in the end, and why: stages that
    /// depend on them get no verdict.
    pub unusable: BTreeMap<TensorKey, String>,
    /// The microbatches in which the scores were recorded, usable or not; `None` for a job
    /// without them.
    pub microbatches: Vec<Option<Microbatch>>,
    /// What a replay needs and the dump does not hold.
    pub lacking: Lacking,
    /// The ranks whose tokens are judged, where other ranks hold other versions of the inputs;
    /// `None` for all ranks.
    pub only: Option<Vec<Rank>>,
    /// Tensors of which ranks hold different versions, where the step covers all ranks.
    pub disputed: Vec<TensorKey>,
    /// Tensors that were assembled before, where they are kept.
    assembled: Option<Assembled>,
}

impl<'a> HeadStep<'a> {
    /// Reads the declaration and finds the tensors; `unusable` says why a tensor cannot be trusted.
    ///
    /// `policy` replaces the rounding points that the job declared.
    pub fn new(
        dump: &'a StepDump,
        policy: Option<&PolicyDeclaration>,
        unusable: impl Fn(&TensorKey) -> Option<String>,
    ) -> Result<HeadStep<'a>, StepError> {
        if let StepState::Partial { why, .. } = &dump.state {
            return Err(StepError::Partial { step: dump.step.0, why: why.clone() });
        }
        let declared = dump.manifest.head.clone();
        let mut declared = declared.ok_or_else(|| {
            let refused =
                dump.manifest.omissions.iter().find(|omission| omission.tensor == DECLARATION);
            StepError::NoHead {
                step: dump.step.0,
                refused: refused.map(|omission| omission.reason.clone()),
            }
        })?;
        if let Some(policy) = policy {
            declared.policy = Some(policy.clone());
            declared.path = policy.base.clone().unwrap_or(declared.path);
        }
        let options = HeadOptions::new(&declared)?;
        let reasons = dump.tensors().keys().filter_map(|key| Some((key.clone(), unusable(key)?)));
        let mut unusable: BTreeMap<_, _> = reasons.collect();
        unusable.extend(unheld(dump));
        let usable = dump.tensors().iter().filter(|(key, _)| !unusable.contains_key(key));
        let tensors: BTreeMap<_, _> =
            usable.map(|(key, info)| (key.clone(), info.clone())).collect();
        let mut step = HeadStep {
            dump,
            options,
            tensors,
            unusable,
            microbatches: Vec::new(),
            lacking: Lacking::default(),
            only: None,
            disputed: Vec::new(),
            assembled: None,
        };
        let scores = step.scores();
        let mut microbatches = step.microbatches_of(&|role| role == scores);
        // If the scores were recorded by microbatch, a tensor without a microbatch is not scores of
        // one.
        if microbatches.len() > 1 {
            microbatches.remove(&None);
        }
        // A job with one microbatch may name it in some records and leave it out in others.
        let named = step.microbatches_of(&|role| Stage::of_role(role).is_some());
        let named: BTreeSet<_> = named.into_iter().filter(Option::is_some).collect();
        if microbatches.iter().all(Option::is_none) && named.len() == 1 {
            microbatches = named;
        }
        if !microbatches.iter().any(|&mb| step.scores_of(mb).is_some()) {
            return Err(step.missing(scores, None));
        }
        let mut absent = BTreeSet::new();
        if microbatches.iter().all(Option::is_some) {
            let all = step.microbatches_of(&|role| Stage::of_role(role).is_some());
            absent.extend(all.into_iter().filter(|&mb| step.scores_of(mb).is_none()).flatten());
        }
        microbatches.retain(|&mb| step.scores_of(mb).is_some());
        step.microbatches = microbatches.into_iter().collect();
        step.options.lowered = super::lowered::lowered(&step);
        // An output of a stage of which nothing is held counts as not captured.
        let read = step.inputs_read();
        let of_input = |key: &TensorKey| step.role_of(key).is_some_and(|role| read.contains(&role));
        let kept: BTreeSet<TensorKey> =
            step.unusable.keys().filter(|key| of_input(key)).cloned().collect();
        step.unusable.retain(|key, _| dump.tensors().contains_key(key) || kept.contains(key));
        step.lacking = step.find_lacking(&absent);
        Ok(step)
    }

    /// Microbatches of the tensors of some roles, including tensors that cannot be used.
    fn microbatches_of(&self, wanted: &dyn Fn(Role) -> bool) -> BTreeSet<Option<Microbatch>> {
        let all = self.tensors.keys().chain(self.unusable.keys());
        let keys = all.filter(|key| self.role_of(key).is_some_and(wanted));
        keys.map(|key| key.microbatch).collect()
    }

    /// The tensor of the scores of a microbatch, usable or not. Scores that were recorded without a
    /// microbatch are those of the only one.
    pub(crate) fn scores_of(
        &self,
        microbatch: Option<Microbatch>,
    ) -> Option<(&TensorKey, &TensorInfo)> {
        let scores = self.scores();
        let of_role = |(_, info): &(&TensorKey, &TensorInfo)| info.role == Some(scores);
        let mut all = self.dump.tensors().iter().filter(of_role);
        let named = all.clone().any(|(key, _)| key.microbatch.is_some());
        all.find(|(key, _)| !named || key.microbatch == microbatch)
    }

    /// True when everything that the job recorded and declared in the step can be read.
    pub fn is_whole(&self) -> bool {
        self.unusable.is_empty() && self.lacking.is_nothing()
    }

    /// The role of the scores, the tensor whose rows are the tokens and that the loss is computed
    /// from.
    pub fn scores(&self) -> Role {
        // Damaged tensors count too: a replay that started from another tensor would judge
        // something else.
        let has_role = |role| self.dump.tensors().values().any(|info| info.role == Some(role));
        match self.options.loss {
            Loss::SoftmaxXent => Role::Q,
            Loss::XentLogits => Role::Logits,
            Loss::Grpo if has_role(Role::Q) => Role::Q,
            // With usable logits, log-probabilities are compared as a stage, not taken as input.
            Loss::Grpo
                if has_role(Role::Logits)
                    && (has_role(Role::Labels) || !has_role(Role::Logprobs)) =>
            {
                Role::Logits
            }
            Loss::Grpo => Role::Logprobs,
        }
    }

    /// The tensor of a role in a microbatch; the one captured before the reduction over ranks is
    /// preferred.
    pub fn find(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&TensorKey> {
        let key_at = |microbatch: Option<Microbatch>| {
            let is_wanted = |(key, info): &(&TensorKey, &TensorInfo)| {
                info.role == Some(role) && key.microbatch == microbatch
            };
            let candidates = self.tensors.iter().filter(is_wanted).map(|(key, _)| key);
            candidates.min_by_key(|key| key.when == Some(When::PostReduce))
        };
        // A gradient of k without a microbatch is the sum over microbatches, and a loss without one
        // is that of the step, even where the step has a single microbatch.
        let of_step = role == Role::Loss && self.options.reduction != LossReduction::None;
        let sums = of_step || matches!(role, Role::Dk | Role::DkLse | Role::DkLabel);
        let only = microbatch.is_some() && self.microbatches == [microbatch] && !sums;
        key_at(microbatch).or_else(|| key_at(None).filter(|_| only))
    }

    /// The tensor of a role without a microbatch, captured after (`reduced`) or before the
    /// reduction over ranks.
    pub fn find_reduced(&self, role: Role, reduced: bool) -> Option<&TensorKey> {
        let is_wanted = |(key, info): &(&TensorKey, &TensorInfo)| {
            let post = key.when == Some(When::PostReduce)
                || (key.when.is_none() && info.partial.is_none());
            info.role == Some(role) && key.microbatch.is_none() && post == reduced
        };
        self.tensors.iter().find(is_wanted).map(|(key, _)| key)
    }

    /// The same step, which keeps every tensor that it assembled until it and its clones are
    /// dropped.
    pub fn holding(&self) -> HeadStep<'a> {
        HeadStep { assembled: Some(Assembled::default()), ..self.clone() }
    }

    /// The same step as if tensors of some roles had not been recorded.
    pub fn without(&self, left_out: &dyn Fn(Role) -> bool) -> HeadStep<'a> {
        let mut step = self.clone();
        step.tensors.retain(|_, info| !info.role.is_some_and(left_out));
        step
    }

    /// Assembles a tensor from all its shards.
    pub fn assemble(&self, key: &TensorKey) -> Result<Tensor, StepError> {
        self.made(Which::whole(key, None), || assemble::assemble(self.dump, key))
    }

    /// The addend of a partial tensor that some ranks hold together.
    pub fn addend(&self, key: &TensorKey, ranks: &[Rank]) -> Result<Tensor, StepError> {
        let which = Which::whole(key, Some(ranks));
        self.made(which, || assemble::addend_of(self.dump, key, ranks))
    }

    /// A tensor, with k and its gradients transposed to `[V, D]` if the job stores them as `[D,
    /// V]`.
    pub fn oriented(&self, key: &TensorKey, ranks: Option<&[Rank]>) -> Result<Tensor, StepError> {
        let tensor = match ranks {
            Some(ranks) => self.addend(key, ranks)?,
            None => self.assemble(key)?,
        };
        let whole = self.tensors.get(key).is_none_or(|info| info.shape == tensor.shape);
        if !whole {
            // The rows of a part are not numbered as those of the vocabulary.
            let wanted = format!("the whole addend; these ranks hold {} of it", tensor.place);
            return Err(unfit(&tensor, &wanted));
        }
        let role = self.role_of(key);
        let of_k = matches!(role, Some(Role::K | Role::Dk | Role::DkLse | Role::DkLabel));
        if !(self.options.transposed() && of_k && tensor.shape.len() == 2) {
            return Ok(tensor);
        }
        let which = Which { transposed: true, ..Which::whole(key, ranks) };
        self.made(which, || tensor.transposed())
    }

    fn made(
        &self,
        which: Which,
        make: impl FnOnce() -> Result<Tensor, AssembleError>,
    ) -> Result<Tensor, StepError> {
        let key = which.key.clone();
        let made = match &self.assembled {
            Some(assembled) => assembled.get(which, make),
            None => make(),
        };
        made.map_err(|source| StepError::Assemble { key, source })
    }

    pub(crate) fn missing(&self, role: Role, microbatch: Option<Microbatch>) -> StepError {
        let of_role = |key: &&TensorKey| self.role_of(key) == Some(role);
        if let Some(key) = self.unusable.keys().find(of_role) {
            let (key, why) = (key.clone(), self.unusable[key].clone());
            return StepError::Unusable { key, why };
        }
        let of_microbatch = microbatch.map(|mb| format!(" of microbatch {mb}")).unwrap_or_default();
        let names: std::collections::BTreeSet<_> =
            self.tensors.keys().map(|key| key.tensor.as_str()).collect();
        let recorded = names.into_iter().collect::<Vec<_>>().join(", ");
        StepError::Missing { role, of_microbatch, recorded }
    }
}
