//! Keeps assembled tensors that many trials of one search read, so that each is assembled once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use backtape::identity::Rank;
use backtape::shard::TensorKey;

use crate::assemble::Tensor;

/// Most bytes that are kept; tensors beyond that are assembled every time.
const MOST: usize = 1 << 30;

/// Identifies an assembled tensor: the sum of the addends of some ranks, or of all shards.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Which {
    pub(super) key: TensorKey,
    pub(super) ranks: Option<Vec<Rank>>,
    pub(super) transposed: bool,
}

impl Which {
    pub(super) fn whole(key: &TensorKey, ranks: Option<&[Rank]>) -> Which {
        Which { key: key.clone(), ranks: ranks.map(<[Rank]>::to_vec), transposed: false }
    }
}

/// The tensors that were assembled so far.
#[derive(Clone, Default)]
pub(super) struct Assembled(Arc<Mutex<Cache>>);

#[derive(Default)]
struct Cache {
    tensors: HashMap<Which, Tensor>,
    bytes: usize,
}

impl Assembled {
    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The tensor if it was assembled before, else the one that `make` returns.
    pub(super) fn get<E>(
        &self,
        which: Which,
        make: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        if let Some(tensor) = self.lock().tensors.get(&which) {
            return Ok(tensor.clone());
        }
        // Without the lock: assembling takes long, and doing it twice does no harm.
        let made = make()?;
        let mut cache = self.lock();
        if cache.bytes + made.bytes().len() <= MOST {
            cache.bytes += made.bytes().len();
            cache.tensors.insert(which, made.clone());
        }
        Ok(made)
    }
}
