//! A user's own kernel over the units of a step: its values as a variant.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Microbatch;

use super::microbatch::{HeadMicrobatch, words};
use super::outcome::Outcome;
use super::variant::{Variant, of_tokens};
use super::world::{Declared, StagePlace, Supplied};
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
    in_world(step, &BTreeSet::new(), (&Declared, None), &mut |replay, microbatches| {
        for microbatch in microbatches {
            if !matches!(microbatch.inputs.scores, Scores::Product { .. }) {
                return Err(wrong("it takes q and k, and this head starts from logits".into()));
            }
            let mut unused = Outcome::new(&replay.plan.wanted, &replay.plan.step.lacking);
            let state = replay.forward(microbatch, &mut unused)?;
            let upstream = replay.judge.upstream(microbatch, &state, &mut unused)?;
            for unit in &microbatch.units {
                let g: Vec<f64> = unit.rows.iter().map(|&t| upstream.g[t]).collect();
                replay.try_problem(microbatch, unit, (&state, &upstream), &mut |problem| {
                    let (head, lse) = (problem.head, &problem.lse[..]);
                    let unit_operands = Unit { head, lse, g: &g, stage: kernel.stage };
                    let given = device
                        .user_kernel(kernel, &unit_operands)
                        .map_err(|why| wrong(why.to_string()))?;
                    let rank = unit.rank().map_or(String::new(), |rank| format!(", rank {rank}"));
                    let place = format!("{}{rank}", words(microbatch.inputs.microbatch));
                    let told = given.findings.iter().map(|finding| format!("{place}: {finding}"));
                    ran.findings.extend(told);
                    let place = StagePlace {
                        stage: kernel.stage,
                        microbatch: microbatch.inputs.microbatch,
                        rank: unit.rank(),
                    };
                    match of_tokens(kernel.stage) {
                        true => place_rows(&mut whole, microbatch, (place, &unit.rows), given),
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

fn supplied(place: StagePlace, given: Given) -> Supplied {
    Supplied { place, values: given.values, precision: given.precision }
}

/// Puts a unit's rows into the tensor of its microbatch: of tokens there is one for all units.
fn place_rows(
    whole: &mut BTreeMap<Option<Microbatch>, Supplied>,
    microbatch: &HeadMicrobatch,
    (place, rows): (StagePlace, &[usize]),
    given: Given,
) {
    let columns = given.values.len() / rows.len().max(1);
    let all = whole.entry(place.microbatch).or_insert_with(|| {
        let values = vec![0.0; microbatch.inputs.tokens() * columns];
        supplied(StagePlace { rank: None, ..place }, Given { values, ..given.clone() })
    });
    for (&row, values) in rows.iter().zip(given.values.chunks(columns.max(1))) {
        all.values[row * columns..][..columns].copy_from_slice(values);
    }
}
