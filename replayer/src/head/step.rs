//! The tensors of one step of a head: which there are, and how to get at them.

use std::collections::BTreeMap;

use backtape::head::{Loss, PolicyDeclaration};
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::held::{Assembled, Which};
use super::options::HeadOptions;
use crate::assemble::{self, AssembleError, Tensor};
use crate::dump::{StepDump, TensorInfo};

pub use super::error::StepError;
pub(crate) use super::error::unfit;
pub(crate) use super::view::{flat_rows, numbers};
pub use super::view::{matrix, vocabulary_slab};
pub use crate::kernels::rows_of;

/// Where the head's tensors lie in the dump.
#[derive(Clone)]
pub struct HeadStep<'a> {
    /// The dump.
    pub dump: &'a StepDump,
    /// The checked declaration.
    pub options: HeadOptions,
    /// Every tensor of the step that can be used.
    pub tensors: BTreeMap<TensorKey, TensorInfo>,
    /// Tensors that are damaged or incomplete, and why: they are judged as
    /// absent, and what depends on them gets no verdict.
    pub unusable: BTreeMap<TensorKey, String>,
    /// The microbatches in which the scores were recorded; `None` for a job without them.
    pub microbatches: Vec<Option<Microbatch>>,
    /// Tensors that were assembled, where they are held.
    assembled: Option<Assembled>,
}

impl<'a> HeadStep<'a> {
    /// Reads the declaration and finds the tensors; `unusable` says why a
    /// tensor must not be believed.
    ///
    /// `policy` stands in for what the job declared of its rounding points.
    pub fn new(
        dump: &'a StepDump,
        policy: Option<&PolicyDeclaration>,
        unusable: impl Fn(&TensorKey) -> Option<String>,
    ) -> Result<HeadStep<'a>, StepError> {
        let declared = dump.manifest.head.clone();
        let mut declared = declared.ok_or(StepError::NoHead { step: dump.step.0 })?;
        if let Some(policy) = policy {
            declared.policy = Some(policy.clone());
            declared.path = policy.base.clone().unwrap_or(declared.path);
        }
        let options = HeadOptions::new(&declared)?;
        let reasons = dump.tensors().keys().filter_map(|key| Some((key.clone(), unusable(key)?)));
        let unusable: BTreeMap<_, _> = reasons.collect();
        let usable = dump.tensors().iter().filter(|(key, _)| !unusable.contains_key(key));
        let tensors: BTreeMap<_, _> =
            usable.map(|(key, info)| (key.clone(), info.clone())).collect();
        let mut step = HeadStep {
            dump,
            options,
            tensors,
            unusable,
            microbatches: Vec::new(),
            assembled: None,
        };
        let scores = step.scores();
        let of_scores = step.tensors.iter().filter(|(_, info)| info.role == Some(scores));
        let mut microbatches: Vec<_> = of_scores.map(|(key, _)| key.microbatch).collect();
        microbatches.sort_unstable();
        microbatches.dedup();
        // Of a role that has microbatches, a tensor without one is something else.
        if microbatches.len() > 1 {
            microbatches.retain(Option::is_some);
        }
        step.microbatches = microbatches;
        if step.microbatches.is_empty() {
            return Err(step.missing(scores, None));
        }
        Ok(step)
    }

    /// The role whose rows are the tokens: what the loss is computed from.
    pub fn scores(&self) -> Role {
        let held = |role| self.tensors.values().any(|info| info.role == Some(role));
        match self.options.loss {
            Loss::SoftmaxXent => Role::Q,
            Loss::XentLogits => Role::Logits,
            Loss::Grpo if held(Role::Q) => Role::Q,
            // Log-probabilities are a stage where the logits can be made use of.
            Loss::Grpo if held(Role::Logits) && (held(Role::Labels) || !held(Role::Logprobs)) => {
                Role::Logits
            }
            Loss::Grpo => Role::Logprobs,
        }
    }

    /// The tensor of a role in a microbatch, preferring what was captured
    /// before the reduction over ranks.
    pub fn find(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&TensorKey> {
        let of = |(key, info): &(&TensorKey, &TensorInfo)| {
            info.role == Some(role) && key.microbatch == microbatch
        };
        let found = self.tensors.iter().filter(of).map(|(key, _)| key);
        found.min_by_key(|key| key.when == Some(When::PostReduce))
    }

    /// The tensor of a role that has no microbatch, at this moment.
    pub fn find_reduced(&self, role: Role, reduced: bool) -> Option<&TensorKey> {
        let of = |(key, info): &(&TensorKey, &TensorInfo)| {
            let post = key.when == Some(When::PostReduce)
                || (key.when.is_none() && info.partial.is_none());
            info.role == Some(role) && key.microbatch.is_none() && post == reduced
        };
        self.tensors.iter().find(of).map(|(key, _)| key)
    }

    /// The same step, of which every tensor is assembled once, as long as it or a clone of
    /// it lives.
    pub fn holding(&self) -> HeadStep<'a> {
        HeadStep { assembled: Some(Assembled::default()), ..self.clone() }
    }

    /// Assembles a tensor that is there.
    pub fn assemble(&self, key: &TensorKey) -> Result<Tensor, StepError> {
        self.made(Which::whole(key, None), || assemble::assemble(self.dump, key))
    }

    /// The addend that some ranks hold together of a partial tensor.
    pub fn addend(&self, key: &TensorKey, ranks: &[Rank]) -> Result<Tensor, StepError> {
        let which = Which::whole(key, Some(ranks));
        self.made(which, || assemble::addend_of(self.dump, key, ranks))
    }

    /// A tensor in the layout of the formulas: k and its gradients as `[V, D]`
    /// whatever the job's layout.
    pub fn oriented(&self, key: &TensorKey, ranks: Option<&[Rank]>) -> Result<Tensor, StepError> {
        let tensor = match ranks {
            Some(ranks) => self.addend(key, ranks)?,
            None => self.assemble(key)?,
        };
        let whole = self.tensors.get(key).is_none_or(|info| info.shape == tensor.shape);
        if !whole {
            // Rows of a box are not those of the vocabulary.
            let wanted = format!("the whole addend; these ranks hold {} of it", tensor.place);
            return Err(unfit(&tensor, &wanted));
        }
        let role = self.tensors.get(key).and_then(|info| info.role);
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
        let of_role = |key: &&TensorKey| self.dump.tensors()[*key].role == Some(role);
        if let Some(key) = self.unusable.keys().find(of_role) {
            let (key, why) = (key.clone(), self.unusable[key].clone());
            return StepError::Unusable { key, why };
        }
        let of = microbatch.map(|mb| format!(" of microbatch {mb}")).unwrap_or_default();
        let names: std::collections::BTreeSet<_> =
            self.tensors.keys().map(|key| key.tensor.as_str()).collect();
        let recorded = names.into_iter().collect::<Vec<_>>().join(", ");
        StepError::Missing { role, of, recorded }
    }
}
