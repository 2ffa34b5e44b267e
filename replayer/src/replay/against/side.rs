//! One of the two runs: its tensors by role, and what its own replay found.

use std::collections::BTreeMap;

use backtape::head::{HeadDeclaration, KLayout, MicrobatchReduction};
use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::view::matrix_of;
use crate::dump::{StepDump, TensorInfo};
use crate::replay::outcome::Outcome;

/// One of two runs.
pub struct Side<'a> {
    /// Its dump.
    pub dump: &'a StepDump,
    /// Tensors on which no verdict may rest, and why.
    pub unusable: BTreeMap<TensorKey, String>,
    /// Its head, where it declares one.
    pub declared: Option<&'a HeadDeclaration>,
    /// What its own replay found, where it was replayed.
    pub outcome: Option<&'a Outcome>,
}

impl<'a> Side<'a> {
    /// A run that was not replayed.
    pub fn new(dump: &'a StepDump, unusable: impl Fn(&TensorKey) -> Option<String>) -> Side<'a> {
        let reasons = dump.tensors().keys().filter_map(|key| Some((key.clone(), unusable(key)?)));
        let (unusable, declared) = (reasons.collect(), dump.manifest.head.as_ref());
        Side { dump, unusable, declared, outcome: None }
    }

    /// Every tensor that can be used.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'a TensorKey, &'a TensorInfo)> {
        self.dump.tensors().iter().filter(|(key, _)| !self.unusable.contains_key(*key))
    }

    /// The tensor of a role in a microbatch, as it was before the reduction
    /// over ranks where both were captured.
    pub(super) fn find(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&'a TensorKey> {
        let of_role = self
            .tensors()
            .filter(|(key, info)| info.role == Some(role) && key.microbatch == microbatch);
        let candidates = of_role.filter(|(key, _)| Some(*key) != self.reduced(role, true));
        candidates.map(|(key, _)| key).min_by_key(|key| key.when == Some(When::PostReduce))
    }

    /// dk without a microbatch: the sum over microbatches, before or after the
    /// reduction over ranks. Other roles have none.
    pub(super) fn reduced(&self, role: Role, reduced: bool) -> Option<&'a TensorKey> {
        let is_reduced_dk = |(key, info): &(&TensorKey, &TensorInfo)| {
            let post = key.when == Some(When::PostReduce)
                || (key.when.is_none() && info.partial.is_none());
            info.role == Some(role) && key.microbatch.is_none() && post == reduced
        };
        let dk_key = || self.tensors().find(is_reduced_dk).map(|(key, _)| key);
        (role == Role::Dk).then(dk_key).flatten()
    }

    /// The microbatches in which anything with a role was recorded; one without
    /// a number for a job that has none.
    pub(super) fn microbatches(&self) -> Vec<Option<Microbatch>> {
        let of_role = self.tensors().filter(|(_, info)| info.role.is_some());
        let mut microbatches: Vec<_> =
            of_role.filter_map(|(key, _)| key.microbatch).map(Some).collect();
        microbatches.sort_unstable();
        microbatches.dedup();
        if microbatches.is_empty() { vec![None] } else { microbatches }
    }

    /// Tensors of a role that together are one value: one for each microbatch,
    /// or one for the step.
    pub(super) fn all(&self, role: Role) -> Vec<&'a TensorKey> {
        let each = self.microbatches().into_iter().map(|mb| self.find(role, mb));
        each.collect::<Option<Vec<_>>>()
            .or_else(|| Some(vec![self.find(role, None)?]))
            .unwrap_or_default()
    }

    /// Tokens of a microbatch, or of the step.
    pub(super) fn tokens(&self, microbatch: Option<Microbatch>) -> Option<u64> {
        let shape = |role| Some(&self.dump.tensors()[self.find(role, microbatch)?].shape);
        let rows = [Role::Q, Role::Dq, Role::Logits];
        let scalars = [Role::Labels, Role::LabelLogits, Role::Lse];
        let of_rows = rows.iter().find_map(|&role| Some(matrix_of(shape(role)?).0));
        of_rows.or_else(|| scalars.iter().find_map(|&role| Some(shape(role)?.iter().product())))
    }

    /// Tokens of all microbatches.
    pub(super) fn all_tokens(&self) -> Option<u64> {
        let each = self.microbatches().into_iter().map(|mb| self.tokens(mb));
        each.sum::<Option<u64>>().or_else(|| self.tokens(None))
    }

    pub(super) fn layout(&self) -> KLayout {
        self.declared.map_or(KLayout::Vd, |head| head.k_layout)
    }

    /// What a sum over so many microbatches is multiplied by.
    pub(super) fn share(&self, microbatches: usize) -> f64 {
        let mean = self
            .declared
            .is_some_and(|head| head.microbatch_reduction == MicrobatchReduction::Mean);
        if mean { 1.0 / microbatches.max(1) as f64 } else { 1.0 }
    }
}
