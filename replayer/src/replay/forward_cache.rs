//! Forward passes that trials have in common: most hypotheses change nothing before the
//! loss, and the forward pass is a third of a trial.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

use crate::kernels::matrix::{HeadInputs, Values};
use crate::kernels::{Progress, Tiles, reference};

/// Passes by what they were computed from, labels apart.
#[derive(Default)]
pub struct ForwardCache(Mutex<HashMap<u64, reference::Forward>>);

impl ForwardCache {
    /// The forward pass of a head, computed once for all that differ in labels only.
    pub(super) fn forward(
        &self,
        head: &HeadInputs<'_>,
        tiles: Tiles,
        progress: &dyn Progress,
    ) -> reference::Forward {
        let key = digest(head);
        let held =
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&key).cloned();
        if let Some(held) = held {
            return reference::Forward { label_logits: reference::label_logits(head), ..held };
        }
        let found = reference::forward(head, tiles, progress);
        let mut all = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.insert(key, found.clone());
        found
    }
}

/// All that a forward pass depends on, but for the labels. In one process 64 bits of
/// SipHash tell apart what a search tries.
fn digest(head: &HeadInputs<'_>) -> u64 {
    let mut hash = DefaultHasher::new();
    for of in [Some(head.q), Some(head.k), head.given] {
        let Some(of) = of else {
            hash.write_u8(0);
            continue;
        };
        (of.rows, of.cols).hash(&mut hash);
        match of.values {
            Values::Bf16(bits) | Values::F16(bits) => bits.hash(&mut hash),
            Values::F32(all) => all.iter().for_each(|x| hash.write_u32(x.to_bits())),
            Values::F64(all) => all.iter().for_each(|x| hash.write_u64(x.to_bits())),
        }
    }
    let bits = |x: f64| x.to_bits();
    head.bias.map(|bias| bias.iter().copied().map(bits).collect::<Vec<_>>()).hash(&mut hash);
    (bits(head.transform.scale), head.transform.softcap.map(bits)).hash(&mut hash);
    (head.mask.map(bits), head.valid_vocab).hash(&mut hash);
    hash.finish()
}
