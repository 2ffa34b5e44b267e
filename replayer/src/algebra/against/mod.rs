//! The steps of two runs against each other: which run is wrong, at which stage, and where the gap
//! of their norms comes from.
//!
//! Both runs are judged on their own first. Then their parameters are brought together (`align`),
//! each tensor of them is put together from whatever sharding and compared (`pair`), and each
//! difference is told for what it is (`status`): a stage that a run's own judgement finds wrong, a
//! setting that is declared in another way, what was carried from the stage before, or what the
//! step was given and nothing recorded judges: weights, state and gradients as they were computed.
//! Small parameters are read on all threads and large ones one after the other: memory holds a few
//! copies of the largest, in f64.

mod align;
mod apart;
mod conclusion;
mod mapping;
mod norm;
mod outcome;
mod pair;
mod propose;
mod settings;
mod side;
mod status;
mod view;

use std::collections::BTreeMap;

use backtape::shard::TensorKey;
use rayon::prelude::*;

use super::inventory::Inventory;
use super::summary::StepReport;
use crate::dump::StepDump;
use pair::Tensors;
use settings::Found;
use side::Side;
use status::{Judged, Whole};

pub use apart::Worst;
pub(crate) use conclusion::distance;
pub use mapping::{Mapping, MappingError};
pub use norm::{GapOfRuns, GapShare};
pub use outcome::{At, Compared, GroupApart, Row, Status, StepsApart};
pub use settings::Setting;

/// A run whose step was judged.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// Its dump.
    pub dump: &'a StepDump,
    /// Why a tensor cannot be trusted.
    pub unusable: &'a dyn Fn(&TensorKey) -> Option<String>,
    /// What its own judgement found.
    pub report: &'a StepReport,
}

/// Compares the steps of two runs; `None` where one holds none. `mapping` says which parameters
/// are the same where their names do not.
pub fn against(
    this_run: Run<'_>,
    other_run: Run<'_>,
    mapping: &Mapping,
) -> Result<Option<StepsApart>, MappingError> {
    let x = Inventory::of(this_run.dump, this_run.unusable);
    let y = Inventory::of(other_run.dump, other_run.unusable);
    let (Some(x), Some(y)) = (x, y) else { return Ok(None) };
    let (ours, theirs) = (Side::new(&x, this_run.report), Side::new(&y, other_run.report));
    let sides = (&ours, &theirs);
    let aligned = align::align(&ours, &theirs, mapping)?;
    let tensors = read(&aligned.pairs, sides);
    let settings: Vec<(String, Vec<Found>)> = aligned
        .pairs
        .iter()
        .map(|pair| (pair.name(), settings::of_pair(pair, &ours, &theirs)))
        .collect();
    let whole = Whole::of(&tensors, sides);
    let mut compared: Vec<Compared> = Vec::new();
    for ((pair, own), (_, found)) in aligned.pairs.iter().zip(&tensors).zip(&settings) {
        let sides = [&ours, &theirs];
        compared.extend(Judged { pair, sides, own, settings: found, whole: &whole }.all());
    }
    let groups = conclusion::groups(&compared, sides);
    let rows = conclusion::rows(&compared);
    let settings = settings::grouped(&settings);
    let floor = compared.iter().filter(|one| one.at == At::Grad).map(|one| one.floor);
    let floor = floor.fold(0.0, f64::max);
    let mut lacking = aligned.open.clone();
    lacking.extend(aligned.lacking(&ours, &theirs));
    let (conclusion, differs) = conclusion::conclusion(sides, &groups, &settings, &rows);
    Ok(Some(StepsApart {
        conclusion,
        differs,
        pairs: aligned.pairs.len(),
        split: [settings::split(&ours), settings::split(&theirs)],
        norm: norm::gap(sides, &aligned, &tensors, (&groups, floor)),
        not_compared: not_compared(&aligned, &tensors),
        found: aligned.found,
        lacking,
        settings,
        stages: rows,
        groups,
        compared,
    }))
}

/// Elements up to which a parameter is small.
const SMALL: u64 = 1 << 22;

/// Every tensor of every pair, in their order.
fn read(pairs: &[align::Pair], (ours, theirs): (&Side<'_>, &Side<'_>)) -> Vec<Tensors> {
    let of = |at: usize| (at, Tensors::of(&pairs[at], ours, theirs));
    let is_small = |at: &usize| {
        let shape = pairs[*at].ours.shape(&|name| ours.shape(name));
        shape.unwrap_or_default().iter().product::<u64>() <= SMALL
    };
    let (small, large): (Vec<usize>, Vec<usize>) = (0..pairs.len()).partition(is_small);
    let mut read: Vec<(usize, Tensors)> = small.into_par_iter().map(of).collect();
    read.extend(large.into_iter().map(of));
    read.sort_by_key(|(at, _)| *at);
    read.into_iter().map(|(_, tensors)| tensors).collect()
}

/// What was not compared of pairs, by reason: place and parameters, and why.
fn not_compared(aligned: &align::Aligned, tensors: &[Tensors]) -> Vec<(String, String)> {
    let mut reasons: BTreeMap<(At, &str), Vec<String>> = BTreeMap::new();
    for (pair, own) in aligned.pairs.iter().zip(tensors) {
        for (at, why) in &own.lost {
            reasons.entry((*at, why)).or_default().push(pair.name());
        }
    }
    let all: Vec<String> = aligned.pairs.iter().map(align::Pair::name).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let told = |((at, why), names): ((At, &str), Vec<String>)| {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        (format!("{} of {}", at.name(), super::names::pattern(&names, &all)), why.to_string())
    };
    reasons.into_iter().map(told).collect()
}
