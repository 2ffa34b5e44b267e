//! The step's algebra: every parameter's gradient followed from the ranks to the new weights
//! (docs/step.md).
//!
//! Each stage is judged from the recorded stage before it, by the tables and the walker of `ops`.
//! What diverges is explained by solving for what it is instead: the coefficient of each addend of
//! a sum, the multiplicity of each group in a norm, the rule of an optimizer.

pub mod against;
mod alike;
mod before_step;
mod causes;
mod clip;
mod clip_apart;
mod coefficients;
mod copies;
mod counters;
mod declaration;
mod device_norms;
mod domain;
mod elements;
mod explain;
mod factor;
mod fits;
mod gradient;
mod held;
mod inventory;
mod judge;
mod lacks;
mod local_norms;
mod loss_scale;
mod lost;
mod names;
mod norm;
mod norm_gap;
mod norm_shares;
mod optimizer;
mod optimizer_causes;
mod orthogonal;
mod outcome;
mod own_scaling;
mod reduced_late;
mod rule_of;
mod rules;
mod scaled_alone;
mod settings;
mod squares;
mod sum_causes;
mod summary;
mod sums;
mod supposed;
mod swallowed;
mod swaps;
mod table;
mod token_counts;
mod unchecked;
mod void_norms;
mod wholes;

use backtape::part::Part;
use backtape::shard::TensorKey;
use rayon::prelude::*;

use crate::dump::StepDump;
use inventory::Inventory;
use judge::Judge;

pub(crate) use lacks::NOTHING_OF;
pub(crate) use names::kind;
pub use norm_gap::NormGap;
pub use outcome::{Aside, Divergence, Energies, Judged, Outcome, Reading, Stage};
pub use own_scaling::Multiplied;
pub use rule_of::DeclaredRule;
pub use summary::{Group, Sampled, StageSummary, StepReport, Unchecked};
pub use table::{Fate, Row, Status};

/// The word of `--compare` that asks for the step.
pub const WORD: &str = "step";

/// Whether a tensor's name is that of a part of a step.
pub fn is_part(key: &TensorKey) -> bool {
    let name = key.tensor.as_str();
    Part::of_tensor(name).is_some() || Part::declaring_rank(name).is_some()
}

/// Bytes of the parts of a step that a dump holds.
pub fn bytes(dump: &StepDump) -> u64 {
    let parts = dump.tensors().iter().filter(|(key, _)| is_part(key));
    let shards = parts.flat_map(|(_, info)| &info.shards);
    shards.map(|shard| dump.record(shard).length).sum()
}

/// Judges the step of a dump; `None` where the dump holds none. `unusable` says why a tensor
/// cannot be trusted. `progress` gets the bytes of each parameter when it is judged.
pub fn judge(
    dump: &StepDump,
    unusable: &dyn Fn(&TensorKey) -> Option<String>,
    progress: &(dyn Fn(u64) + Sync),
) -> Option<StepReport> {
    let inventory = Inventory::of(dump, unusable)?;
    let parts = inventory.parameters.values().flat_map(|parameter| parameter.tensors.values());
    // Of a sampled tensor each rank holds several boxes, which are compared one by one.
    let world = dump.manifest.world_size.max(1) as usize;
    let comparisons = parts.map(|key| dump.tensors()[key].shards.len().max(world)).sum();
    let judge = Judge { inventory: &inventory, comparisons, nan_is_meant: false, is_trial: false };
    let of = |name: &String| {
        let mut judged = judge.gradient(name);
        judge.not_cleared_as_not_held(name, &mut judged);
        judged.extend(judge.optimizer(name));
        judged.extend(judge.copies(name));
        let tensors = inventory.parameters[name].tensors.values();
        let shards = tensors.flat_map(|key| &dump.tensors()[key].shards);
        progress(shards.map(|shard| dump.record(shard).length).sum());
        judged
    };
    let names: Vec<&String> = inventory.parameters.keys().collect();
    let each: Vec<Vec<Judged>> = names.into_par_iter().map(of).collect();
    let mut judged = each.concat();
    judged.extend(judge.norms());
    judge.reduced_late(&mut judged);
    judge.weighted_by_norms(&mut judged);
    judge.clipped_apart(&mut judged);
    Some(StepReport::of(&inventory, judged))
}
