//! Reference passes that trials have in common: most hypotheses change nothing before the
//! loss, many only what a gradient is said to be, and the passes are most of a trial.

use std::collections::HashMap;
use std::fmt::{self, Debug, Formatter};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

use backtape::hash::ContentHash;

use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix, Reads, Values};
use crate::kernels::reference::{self, Keep};
use crate::replay::addends::Sum;
use crate::replay::captured_gradients::Captured;
use crate::replay::comparison::Comparison;
use crate::replay::slab::Slab;

/// Bytes of backward passes that are held; beyond it all are forgotten. As many of captured
/// gradients, beyond which no more are held.
const HELD: usize = 256 << 20;

/// Passes by what they were computed from, labels apart in the forward ones.
#[derive(Default)]
pub struct PassCache(Mutex<Passes>);

#[derive(Default)]
struct Passes {
    forward: HashMap<u64, reference::Forward>,
    label_logits: HashMap<u64, Arc<Vec<f64>>>,
    biases: HashMap<u64, Biases>,
    backward: HashMap<u64, Arc<BackwardPass>>,
    captured: HashMap<u64, Arc<Captured>>,
    sums: HashMap<u64, Arc<Sum>>,
    judged: HashMap<u64, Judged>,
    of_captured: usize,
    bytes: usize,
}

/// A sum that was compared with what was expected of it.
struct Judged {
    sum: Arc<Sum>,
    expected: Vec<f64>,
    comparison: Comparison,
}

/// One backward pass.
pub(in crate::replay) struct BackwardPass {
    /// Gradients of q; empty where only those of k are kept.
    pub(in crate::replay) dq: reference::Backward,
    /// Gradients of k and of the bias; empty where only those of q are kept.
    pub(in crate::replay) slab: Slab,
}

/// How far the addends of a sum are off on average, relative to their size, where all of them
/// round to one side.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::replay) struct Biases {
    /// Of `g k[y]` and of `g q`.
    pub(in crate::replay) label: [f64; 2],
    /// Of the entries in the labels' columns.
    pub(in crate::replay) whole: f64,
    /// Of the dense entries that smoothing moves off their grid.
    pub(in crate::replay) dense: f64,
}

/// Tells a debugger that it is there: it may hold gigabytes.
impl Debug for PassCache {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str("PassCache")
    }
}

impl PassCache {
    fn lock(&self) -> MutexGuard<'_, Passes> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The forward pass of a head, computed once for all that differ in labels only.
    pub(in crate::replay) fn forward<E>(
        &self,
        head: &HeadInputs<'_>,
        run: impl FnOnce() -> Result<reference::Forward, E>,
    ) -> Result<reference::Forward, E> {
        let mut hash = DefaultHasher::new();
        put(&mut hash, head);
        let key = hash.finish();
        let cached = self.lock().forward.get(&key).cloned();
        if let Some(cached) = cached {
            let label_logits = self.label_logits(head).to_vec();
            return Ok(reference::Forward { label_logits, ..cached });
        }
        let forward = run()?;
        self.lock().forward.insert(key, forward.clone());
        Ok(forward)
    }

    /// The labels' logits of a head, computed once for all that have the same inputs.
    pub(in crate::replay) fn label_logits(&self, head: &HeadInputs<'_>) -> Arc<Vec<f64>> {
        let mut hash = DefaultHasher::new();
        put(&mut hash, head);
        hash.write_u128(ContentHash::of(bytemuck::cast_slice(head.labels)).0);
        let key = hash.finish();
        let cached = self.lock().label_logits.get(&key).cloned();
        cached.unwrap_or_else(|| {
            let logits = Arc::new(reference::label_logits(head));
            self.lock().label_logits.insert(key, logits.clone());
            logits
        })
    }

    /// The biases of a head's addends, found once for all that have the same inputs, cotangents and
    /// options.
    pub(in crate::replay) fn biases(
        &self,
        (head, lse, cotangents): (&HeadInputs<'_>, &[f64], &Cotangents<'_, f64>),
        options: &dyn Debug,
        find: impl FnOnce() -> Biases,
    ) -> Biases {
        let key = key_of((head, lse, cotangents), options);
        let cached = self.lock().biases.get(&key).copied();
        cached.unwrap_or_else(|| {
            let biases = find();
            self.lock().biases.insert(key, biases);
            biases
        })
    }

    /// Captured gradients, read once for all that ask for the same.
    pub(in crate::replay) fn captured<E>(
        &self,
        which: &dyn Debug,
        read: &mut dyn FnMut() -> Result<Captured, E>,
    ) -> Result<Arc<Captured>, E> {
        let key = named(which);
        let cached = self.lock().captured.get(&key).cloned();
        if let Some(cached) = cached {
            return Ok(cached);
        }
        let captured = Arc::new(read()?);
        let (mut all, bytes) = (self.lock(), captured.bytes());
        if all.of_captured + bytes <= HELD {
            all.of_captured += bytes;
            all.captured.insert(key, captured.clone());
        }
        Ok(captured)
    }

    /// A sum of captured addends, taken once for all that weigh them alike; what is held of
    /// them counts as captured.
    pub(in crate::replay) fn sum<E>(
        &self,
        which: &dyn Debug,
        take: &mut dyn FnMut() -> Result<Sum, E>,
    ) -> Result<Arc<Sum>, E> {
        let key = named(which);
        let cached = self.lock().sums.get(&key).cloned();
        if let Some(cached) = cached {
            return Ok(cached);
        }
        let sum = Arc::new(take()?);
        let (mut all, bytes) = (self.lock(), 3 * size_of::<f64>() * sum.total.len());
        if all.of_captured + bytes <= HELD {
            all.of_captured += bytes;
            all.sums.insert(key, sum.clone());
        }
        Ok(sum)
    }

    /// How a sum compares with what is expected of it, judged once for all that expect the same.
    pub(in crate::replay) fn judged(
        &self,
        which: &dyn Debug,
        (sum, expected): (&Arc<Sum>, &[f64]),
        judge: &mut dyn FnMut() -> Comparison,
    ) -> Comparison {
        let key = named(which);
        if let Some(cached) = self.lock().judged.get(&key)
            && Arc::ptr_eq(&cached.sum, sum)
            && cached.expected == expected
        {
            return cached.comparison.clone();
        }
        let comparison = judge();
        // The first is the one that most trials leave as it is.
        let (sum, expected) = (sum.clone(), expected.to_vec());
        self.lock().judged.entry(key).or_insert(Judged {
            sum,
            expected,
            comparison: comparison.clone(),
        });
        comparison
    }

    /// A backward pass, computed once for all that have the same inputs.
    pub(in crate::replay) fn backward(
        &self,
        (head, lse, cotangents): (&HeadInputs<'_>, &[f64], &Cotangents<'_, f64>),
        (keep, options): (Keep, &dyn Debug),
        run: &mut dyn FnMut() -> BackwardPass,
    ) -> Arc<BackwardPass> {
        let key = key_of((head, lse, cotangents), &(keep, options));
        let cached = self.lock().backward.get(&key).cloned();
        if let Some(cached) = cached {
            return cached;
        }
        let mut pass = run();
        match keep {
            Keep::Both => {}
            Keep::Dq => pass.slab = Slab::default(),
            Keep::Dk => pass.dq = reference::Backward::default(),
        }
        let (bytes, pass) = (pass.bytes(), Arc::new(pass));
        if bytes > HELD {
            return pass;
        }
        let mut all = self.lock();
        if all.bytes + bytes > HELD {
            all.backward.clear();
            all.bytes = 0;
        }
        all.bytes += bytes;
        all.backward.insert(key, pass.clone());
        pass
    }
}

/// The key of what depends on a head, its labels, an lse and cotangents, and on options that are
/// told by their words.
fn key_of(
    (head, lse, cotangents): (&HeadInputs<'_>, &[f64], &Cotangents<'_, f64>),
    options: &dyn Debug,
) -> u64 {
    let mut hash = DefaultHasher::new();
    put(&mut hash, head);
    hash.write_u128(ContentHash::of(bytemuck::cast_slice(head.labels)).0);
    let copies = head.copies.unwrap_or_default();
    for values in [copies, lse, cotangents.lse, cotangents.label, cotangents.smooth] {
        hash.write_usize(values.len());
        hash.write_u128(ContentHash::of(bytemuck::cast_slice(values)).0);
    }
    let products = head.reads.map(|reads| (reads.q_product, reads.k_product));
    format!("{products:?} {options:?}").hash(&mut hash);
    hash.finish()
}

/// The key of what is told by its words.
fn named(which: &dyn Debug) -> u64 {
    let mut hash = DefaultHasher::new();
    format!("{which:?}").hash(&mut hash);
    hash.finish()
}

impl BackwardPass {
    /// About as much: the arrays of a gradient's size.
    fn bytes(&self) -> usize {
        const ARRAYS: usize = 8;
        ARRAYS * size_of::<f64>() * (self.dq.dq_lse.len() + self.slab.lse.len())
    }
}

/// All that a forward pass depends on, but for the labels; of the backward's all but those,
/// the copies and what is a product of what. In one process 64 bits of SipHash tell apart
/// what a search tries.
///
/// Every field is named: one that is added and forgotten here would give the passes of
/// another world.
fn put(hash: &mut DefaultHasher, head: &HeadInputs<'_>) {
    let &HeadInputs {
        q,
        k,
        labels: _,
        valid_vocab,
        bias,
        given,
        transform,
        mask,
        copies: _,
        reads,
    } = head;
    [Some(q), Some(k), given].iter().for_each(|matrix| put_matrix(hash, matrix.as_ref()));
    if let Some(Reads { q, k, q_product: _, k_product: _, scores }) = reads {
        scores.map(|(_, first)| first).hash(hash);
        let all = [Some(q), Some(k), scores.map(|(matrix, _)| matrix)];
        all.iter().for_each(|matrix| put_matrix(hash, matrix.as_ref()));
    }
    let bits = |x: f64| x.to_bits();
    bias.map(|bias| bias.iter().copied().map(bits).collect::<Vec<_>>()).hash(hash);
    transform.bits().hash(hash);
    (mask.map(bits), valid_vocab).hash(hash);
}

fn put_matrix(hash: &mut DefaultHasher, matrix: Option<&Matrix<'_>>) {
    let Some(matrix) = matrix else {
        hash.write_u8(0);
        return;
    };
    (matrix.rows, matrix.cols).hash(hash);
    std::mem::discriminant(&matrix.values).hash(hash);
    let bytes = match matrix.values {
        Values::Bf16(bits) | Values::F16(bits) => bytemuck::cast_slice(bits),
        Values::F32(all) => bytemuck::cast_slice(all),
        Values::F64(all) => bytemuck::cast_slice(all),
    };
    // Every trial asks for its passes, and SipHash takes several times as long.
    hash.write_u128(ContentHash::of(bytes).0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::transform::Transform;

    fn key(head: &HeadInputs<'_>) -> u64 {
        let mut hash = DefaultHasher::new();
        put(&mut hash, head);
        hash.finish()
    }

    /// Goal: biases that were found for one policy are not taken for those of another.
    #[test]
    fn biases_are_those_of_their_options_and_cotangents() {
        let bits = [1u16, 2];
        let q = Matrix { rows: 2, cols: 1, values: Values::Bf16(&bits) };
        let head = HeadInputs::plain(q, q, &[0, 1], 2);
        let (ones, two) = ([1.0, 1.0], [2.0, 1.0]);
        let cache = PassCache::default();
        let whole_bias = |values: &[f64], options: &str, whole: f64| {
            let g = Cotangents { lse: values, label: &ones[..], smooth: &ones[..] };
            let find = || Biases { whole, ..Biases::default() };
            cache.biases((&head, &ones, &g), &options, find).whole
        };
        assert_eq!(
            [whole_bias(&ones, "bf16", 1.0), whole_bias(&ones, "bf16", 2.0)],
            [1.0, 1.0],
            "held"
        );
        assert_eq!([whole_bias(&ones, "f16", 3.0), whole_bias(&two, "bf16", 4.0)], [3.0, 4.0]);
    }

    /// Goal: passes of heads that differ in anything are not taken for each other: a transform
    /// whose derivative was left out once got the gradients of the declared one.
    #[test]
    fn heads_that_differ_in_one_thing_have_different_keys() {
        let (numbers, other) = ([1u16, 2], [1u16, 3]);
        let matrix = |bits| Matrix { rows: 2, cols: 1, values: Values::Bf16(bits) };
        let head = HeadInputs {
            q: matrix(&numbers),
            k: matrix(&numbers),
            labels: &[0, 1],
            valid_vocab: 2,
            bias: None,
            given: None,
            transform: Transform::NONE,
            mask: None,
            copies: None,
            reads: None,
        };
        let reads = Reads {
            q: matrix(&numbers),
            k: matrix(&numbers),
            q_product: true,
            k_product: true,
            scores: None,
        };
        let scores = Some((matrix(&numbers), 0));
        let transform = Transform::NONE;
        let all = [
            head,
            HeadInputs { q: matrix(&other), ..head },
            HeadInputs { k: matrix(&other), ..head },
            HeadInputs { q: Matrix { values: Values::F16(&numbers), ..matrix(&numbers) }, ..head },
            HeadInputs { valid_vocab: 1, ..head },
            HeadInputs { bias: Some(&[0.0, 0.0]), ..head },
            HeadInputs { given: Some(matrix(&numbers)), ..head },
            HeadInputs { transform: Transform { scale: 2.0, ..transform }, ..head },
            HeadInputs { transform: Transform::new(1.0, Some(1.0)), ..head },
            HeadInputs { transform: Transform { uncapped: true, ..transform }, ..head },
            HeadInputs { mask: Some(0.0), ..head },
            HeadInputs { reads: Some(reads), ..head },
            HeadInputs { reads: Some(Reads { k: matrix(&other), ..reads }), ..head },
            HeadInputs { reads: Some(Reads { scores, ..reads }), ..head },
        ];
        let keys: std::collections::BTreeSet<u64> = all.iter().map(key).collect();
        assert_eq!(keys.len(), all.len());
    }
}
