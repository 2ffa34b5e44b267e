//! Reference passes that trials have in common: most hypotheses change nothing before the
//! loss, many only what a gradient is said to be, and the passes are most of a trial.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

use super::dk::Slab;
use crate::kernels::matrix::{Cotangents, HeadInputs, Values};
use crate::kernels::{Progress, Tiles, reference};

/// Bytes of backward passes that are held; beyond it all are forgotten.
const HELD: usize = 256 << 20;

/// Passes by what they were computed from, labels apart in the forward ones.
#[derive(Default)]
pub struct PassCache(Mutex<Held>);

#[derive(Default)]
struct Held {
    forward: HashMap<u64, reference::Forward>,
    backward: HashMap<u64, Arc<BackwardPass>>,
    bytes: usize,
}

/// One backward pass.
pub(super) struct BackwardPass {
    /// Gradients of q; empty where only those of k are kept.
    pub(super) dq: reference::Backward,
    /// Gradients of k and of the bias; empty where only those of q are kept.
    pub(super) slab: Slab,
}

/// What of a backward pass is looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Keep {
    /// All of it.
    Both,
    /// Gradients of q.
    Dq,
    /// Gradients of k and of the bias.
    Dk,
}

impl PassCache {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The forward pass of a head, computed once for all that differ in labels only.
    pub(super) fn forward(
        &self,
        head: &HeadInputs<'_>,
        tiles: Tiles,
        progress: &dyn Progress,
    ) -> reference::Forward {
        let mut hash = DefaultHasher::new();
        put(&mut hash, head);
        let key = hash.finish();
        let held = self.held().forward.get(&key).cloned();
        if let Some(held) = held {
            return reference::Forward { label_logits: reference::label_logits(head), ..held };
        }
        let found = reference::forward(head, tiles, progress);
        self.held().forward.insert(key, found.clone());
        found
    }

    /// A backward pass, computed once for all that have the same inputs.
    pub(super) fn backward(
        &self,
        (head, lse, cotangents): (&HeadInputs<'_>, &[f64], &Cotangents<'_, f64>),
        (keep, options): (Keep, &dyn Debug),
        run: &mut dyn FnMut() -> BackwardPass,
    ) -> Arc<BackwardPass> {
        let mut hash = DefaultHasher::new();
        put(&mut hash, head);
        head.labels.hash(&mut hash);
        let bits = |hash: &mut DefaultHasher, of: &[f64]| {
            hash.write_usize(of.len());
            of.iter().for_each(|x| hash.write_u64(x.to_bits()));
        };
        bits(&mut hash, head.copies.unwrap_or_default());
        for of in [lse, cotangents.lse, cotangents.label, cotangents.smooth] {
            bits(&mut hash, of);
        }
        let products = head.reads.map(|reads| (reads.q_product, reads.k_product));
        format!("{keep:?} {products:?} {options:?}").hash(&mut hash);
        let key = hash.finish();
        let held = self.held().backward.get(&key).cloned();
        if let Some(held) = held {
            return held;
        }
        let mut found = run();
        match keep {
            Keep::Both => {}
            Keep::Dq => found.slab = Slab::default(),
            Keep::Dk => found.dq = reference::Backward::default(),
        }
        let (bytes, found) = (found.bytes(), Arc::new(found));
        let mut all = self.held();
        if all.bytes + bytes > HELD {
            all.backward.clear();
            all.bytes = 0;
        }
        all.bytes += bytes;
        all.backward.insert(key, found.clone());
        found
    }
}

impl BackwardPass {
    /// About as much: the arrays of a gradient's size.
    fn bytes(&self) -> usize {
        const ARRAYS: usize = 8;
        ARRAYS * size_of::<f64>() * (self.dq.dq_lse.len() + self.slab.lse.len())
    }
}

/// All that a forward pass depends on, but for the labels. In one process 64 bits of
/// SipHash tell apart what a search tries.
fn put(hash: &mut DefaultHasher, head: &HeadInputs<'_>) {
    let reads = head.reads;
    let scores = reads.and_then(|reads| reads.scores);
    let read = [reads.map(|reads| reads.q), reads.map(|reads| reads.k), scores.map(|(of, _)| of)];
    scores.map(|(_, first)| first).hash(hash);
    for of in [Some(head.q), Some(head.k), head.given].into_iter().chain(read) {
        let Some(of) = of else {
            hash.write_u8(0);
            continue;
        };
        (of.rows, of.cols).hash(hash);
        std::mem::discriminant(&of.values).hash(hash);
        match of.values {
            Values::Bf16(bits) | Values::F16(bits) => bits.hash(hash),
            Values::F32(all) => all.iter().for_each(|x| hash.write_u32(x.to_bits())),
            Values::F64(all) => all.iter().for_each(|x| hash.write_u64(x.to_bits())),
        }
    }
    let bits = |x: f64| x.to_bits();
    head.bias.map(|bias| bias.iter().copied().map(bits).collect::<Vec<_>>()).hash(hash);
    (bits(head.transform.scale), head.transform.softcap.map(bits)).hash(hash);
    (head.mask.map(bits), head.valid_vocab).hash(hash);
}
