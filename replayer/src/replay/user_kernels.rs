//! A user's own kernel over the units of a step: its values as a variant.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Microbatch;

use super::microbatch::{Slice, words};
use super::outcome::Outcome;
use super::variant::{Variant, of_tokens};
use super::world::{At, Declared, Supplied};
use super::world_replay::in_world;
use crate::device::{Device, Given, Kernel, Unit};
use crate::head::HeadStep;
use crate::head::inputs::Scores;
use crate::head::step::StepError;

/// What a kernel gave for a whole step.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    /// Its values.
    pub variant: Variant,
    /// What it does that it must not, in sentences, with the microbatch and rank.
    pub findings: Vec<String>,
}

/// Runs a kernel on every unit of a step.
pub fn run(step: &HeadStep<'_>, device: &dyn Device, kernel: &Kernel) -> Result<Ran, StepError> {
    let wrong = |why: String| StepError::Kernel { name: kernel.name.clone(), why };
    let mut ran = Ran {
        variant: Variant { name: kernel.name.clone(), supplied: Vec::new() },
        findings: Vec::new(),
    };
    let mut whole: BTreeMap<Option<Microbatch>, Supplied> = BTreeMap::new();
    in_world(step, &BTreeSet::new(), (&Declared, None), &mut |replay, slices| {
        for slice in slices {
            if !matches!(slice.inputs.scores, Scores::Product { .. }) {
                return Err(wrong("it takes q and k, and this head starts from logits".into()));
            }
            let mut unused = Outcome::new(&replay.plan.wanted, &replay.plan.step.lacking);
            let state = replay.forward(slice, &mut unused)?;
            let upstream = replay.judge.upstream(slice, &state, &mut unused)?;
            for unit in &slice.units {
                let g: Vec<f64> = unit.rows.iter().map(|&t| upstream.g[t]).collect();
                replay.try_problem(slice, unit, (&state, &upstream), &mut |problem| {
                    let (head, lse) = (problem.head, &problem.lse[..]);
                    let unit_operands = Unit { head, lse, g: &g, stage: kernel.stage };
                    let given =
                        device.own(kernel, &unit_operands).map_err(|why| wrong(why.to_string()))?;
                    let rank = unit.rank().map_or(String::new(), |rank| format!(", rank {rank}"));
                    let place = format!("{}{rank}", words(slice.inputs.microbatch));
                    let told = given.findings.iter().map(|found| format!("{place}: {found}"));
                    ran.findings.extend(told);
                    let place = At {
                        stage: kernel.stage,
                        microbatch: slice.inputs.microbatch,
                        rank: unit.rank(),
                    };
                    match of_tokens(kernel.stage) {
                        true => place_rows(&mut whole, slice, (place, &unit.rows), given),
                        false => ran.variant.supplied.push(supplied(place, given)),
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    })?;
    ran.variant.supplied.extend(whole.into_values());
    Ok(ran)
}

fn supplied(at: At, given: Given) -> Supplied {
    Supplied { at, values: given.values, precision: given.precision }
}

/// Puts a unit's rows into the tensor of its microbatch: of tokens there is one for all units.
fn place_rows(
    whole: &mut BTreeMap<Option<Microbatch>, Supplied>,
    slice: &Slice,
    (place, rows): (At, &[usize]),
    given: Given,
) {
    let columns = given.values.len() / rows.len().max(1);
    let all = whole.entry(place.microbatch).or_insert_with(|| {
        let values = vec![0.0; slice.inputs.tokens() * columns];
        supplied(At { rank: None, ..place }, Given { values, ..given.clone() })
    });
    for (&row, values) in rows.iter().zip(given.values.chunks(columns.max(1))) {
        all.values[row * columns..][..columns].copy_from_slice(values);
    }
}
