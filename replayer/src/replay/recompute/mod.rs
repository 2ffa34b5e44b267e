//! One stage of the head, recomputed for whoever wants to look at it: in f64, or as one of
//! the plausible policies computes it. It judges nothing.
//!
//! ```text
//! recompute(&step, &Asked { stage: Stage::DkLabel, microbatch: Some(0), .. })
//!   -> dk_label of microbatch 0, [V, D], f64
//! ```

mod arithmetic;
mod error;

use std::collections::BTreeSet;
use std::ops::Range;

use backtape::head::LossReduction;
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use super::context::Replay;
use super::forward::ForwardState;
use super::loss::divisors;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plausible_policies::{Member, members};
use super::world::World;
use super::world_replay::in_world;
use crate::head::units::share;
use crate::head::{HeadStep, Kind, MicrobatchInputs, Scores, Stage, Unit};
use crate::kernels::matrix::IGNORED;

pub use super::recompute::error::RecomputeError;

/// Bytes of the largest token x vocabulary plane that is made at once: beyond it one asks
/// for some tokens.
const MOST_PLANE_BYTES: u64 = 4 << 30;

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// The stage.
    pub stage: Stage,
    /// Its microbatch; may be left out where there is one.
    pub microbatch: Option<Microbatch>,
    /// The addend of this rank, of dk, its parts, dbias and accumulate.
    pub rank: Option<Rank>,
    /// True to start from what was captured of the stages before it, as the replay does;
    /// false to start from the head's inputs alone.
    pub from_captured: bool,
    /// A plausible policy to emulate, by its name in the report; the f64 reference where none
    /// is given.
    pub policy: Option<String>,
    /// Some tokens of the microbatch, of the stages that are `[T, V]`.
    pub tokens: Option<Range<usize>>,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Recomputed {
    /// That of the tensor that was captured of the stage, where one was; else the tokens'
    /// leading dimensions, and k's own layout.
    pub shape: Vec<u64>,
    /// Row-major.
    pub values: Vec<f64>,
}

/// The job as it declared it, of which only what comes before a stage is taken from the dump.
struct Before {
    stage: Stage,
    from_captured: bool,
}

impl World for Before {
    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        self.from_captured && stage < self.stage
    }
}

/// Recomputes a stage of a step.
pub fn recompute(step: &HeadStep<'_>, asked: &Asked) -> Result<Recomputed, RecomputeError> {
    let stage = asked.stage;
    if stage.is_input() || (stage == Stage::Logits && step.scores() == Role::Logits) {
        return Err(RecomputeError::Input(stage));
    }
    if stage == Stage::GradNorm {
        return Err(RecomputeError::GradNorm);
    }
    let world = Before { stage, from_captured: asked.from_captured };
    // Captured logits are read where they are compared.
    let compared = BTreeSet::from([Stage::Logits]);
    let mut recomputed = None;
    in_world(step, &compared, (&world, None), &mut |replay, microbatches| {
        recomputed = Some(replay.recomputed(microbatches, asked));
        Ok(())
    })?;
    recomputed.expect("set where no error was returned")
}

impl Replay<'_> {
    fn recomputed(
        &self,
        microbatches: &[HeadMicrobatch],
        asked: &Asked,
    ) -> Result<Recomputed, RecomputeError> {
        let stage = asked.stage;
        if asked.tokens.is_some() && stage.kind() != Kind::Plane {
            let why = "tokens= is for logits, p and dlogits: cut the array instead".into();
            return Err(RecomputeError::Absent { stage, why });
        }
        let member = asked.policy.as_deref().map(|name| self.member(name)).transpose()?;
        if stage.is_sum() {
            return self.summed(microbatches, asked, member.as_ref());
        }
        let microbatch = chosen_microbatch(microbatches, asked)?;
        let mut values = self.values(microbatch, asked, member.as_ref())?;
        if stage.is_of_k() && asked.rank.is_none() {
            let ranks = self.plan.ranks_averaged(microbatches);
            values.iter_mut().for_each(|x| *x /= ranks);
        }
        Ok(self.shaped(microbatch, asked, values))
    }

    fn member(&self, asked: &str) -> Result<Member, RecomputeError> {
        let all = members(&self.plan.roundings);
        let known: Vec<String> = all.iter().map(|member| format!("{:?}", member.name)).collect();
        let member = all.into_iter().find(|member| member.name == asked);
        let known = known.join(", ");
        member.ok_or_else(|| RecomputeError::Policy { asked: asked.into(), known })
    }

    /// dk over the microbatches, of one rank or of all.
    fn summed(
        &self,
        microbatches: &[HeadMicrobatch],
        asked: &Asked,
        member: Option<&Member>,
    ) -> Result<Recomputed, RecomputeError> {
        let stage = asked.stage;
        if let Some(rank) = asked.rank.filter(|_| stage == Stage::Reduce) {
            let why = "it is the sum over ranks; accumulate has each rank's addend".into();
            return Err(RecomputeError::Rank { stage, rank, why });
        }
        let of_dk = Asked { stage: Stage::Dk, tokens: None, ..asked.clone() };
        let divisor =
            self.plan.divisor(microbatches).map_err(|why| RecomputeError::Absent { stage, why })?;
        let divisor = match asked.rank {
            Some(_) => divisor,
            None => divisor * self.plan.ranks_averaged(microbatches),
        };
        let mut total: Vec<f64> = Vec::new();
        for microbatch in microbatches {
            let values = self.values(microbatch, &of_dk, member)?;
            total.resize(values.len(), 0.0);
            total.iter_mut().zip(values).for_each(|(total, x)| *total += x / divisor);
        }
        // A step of a head has a microbatch, or could not be opened as one.
        Ok(self.shaped(&microbatches[0], &of_dk, total))
    }

    /// Values of a stage of one microbatch, k and its gradients as `[V, D]`.
    fn values(
        &self,
        microbatch: &HeadMicrobatch,
        asked: &Asked,
        member: Option<&Member>,
    ) -> Result<Vec<f64>, RecomputeError> {
        let (inputs, stage) = (&microbatch.inputs, asked.stage);
        self.possible(inputs, stage, member)?;
        let unit = self.unit(microbatch, asked)?;
        let mut unused = Outcome::new(&self.plan.wanted, &self.plan.step.lacking);
        let state = self.forward(microbatch, &mut unused)?;
        if let Some(column) = self.of_tokens(microbatch, stage, &state, member)? {
            return Ok(column);
        }
        let upstream = self.judge.upstream(microbatch, &state, &mut unused)?;
        if stage.is_of_q() || stage.is_of_k() {
            let gradient = self.gradient(microbatch, &unit, (&state, &upstream), stage, member);
            return gradient.ok_or_else(|| {
                let why = "the plain path forms dlogits whole and never tells the parts apart: ask for the f64 reference, without policy=".into();
                RecomputeError::Absent { stage, why }
            });
        }
        if stage.kind() == Kind::Plane {
            let tokens = self.tokens(inputs, asked)?;
            return Ok(self.plane_of(microbatch, (&state, &upstream), stage, tokens, member));
        }
        let [g_lse, g_label, _] = self.judge.cotangents_of(inputs, &state, &upstream);
        Ok(match stage {
            Stage::G => upstream.g,
            Stage::GLse => g_lse,
            Stage::GLabel => g_label,
            Stage::Dlogprobs => upstream.g.iter().map(|g| -g).collect(),
            _ => self.loss_of(microbatch, &state)?,
        })
    }

    /// Stages of one number a token that need nothing of the backward; `None` for others.
    fn of_tokens(
        &self,
        microbatch: &HeadMicrobatch,
        stage: Stage,
        state: &ForwardState,
        member: Option<&Member>,
    ) -> Result<Option<Vec<f64>>, RecomputeError> {
        let head = microbatch.inputs.head(self.plan.step);
        let emulated = member
            .zip(head.as_ref())
            .filter(|_| matches!(stage, Stage::Lse | Stage::LabelLogits | Stage::Logprobs));
        if let Some((member, head)) = emulated {
            let (policy, tiles) = (&member.policy, self.plan.roundings.tiles);
            let forward =
                crate::kernels::policy::forward(policy, head, tiles, self.executor.progress());
            return Ok(Some(match stage {
                Stage::Lse => forward.lse,
                Stage::LabelLogits => forward.label_logits,
                _ => forward.label_logits.iter().zip(&forward.lse).map(|(a, b)| a - b).collect(),
            }));
        }
        Ok(match stage {
            Stage::Lse => Some(state.lse.clone()),
            Stage::LabelLogits => Some(state.label.values.clone()),
            Stage::Logprobs => Some(state.logprobs.values.clone()),
            Stage::Nll if self.plan.step.is_policy_loss() => {
                Some(state.logprobs.values.iter().map(|x| -x).collect())
            }
            Stage::Nll => Some(self.judge.nll(&microbatch.inputs, state)),
            _ => None,
        })
    }

    /// The loss of the microbatch, or of each token where it is not reduced.
    fn loss_of(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
    ) -> Result<Vec<f64>, RecomputeError> {
        let inputs = &microbatch.inputs;
        let terms: Vec<f64> = match self.plan.step.is_policy_loss() {
            true => self.judge.policy_gradient(microbatch, state)?.0.terms,
            false => {
                let (nll, divided) = (self.judge.nll(inputs, state), divisors(microbatch));
                let term = |t: usize| match inputs.labels[t] {
                    IGNORED => 0.0,
                    _ => share(inputs.weights[t], divided[t]) * nll[t],
                };
                (0..inputs.tokens()).map(term).collect()
            }
        };
        Ok(match self.plan.step.options.reduction {
            LossReduction::None => terms,
            _ => vec![terms.iter().sum()],
        })
    }

    /// The tokens whose gradients are asked for together.
    fn unit(&self, microbatch: &HeadMicrobatch, asked: &Asked) -> Result<Unit, RecomputeError> {
        let stage = asked.stage;
        let Some(rank) = asked.rank else {
            return Ok(Unit { ranks: Vec::new(), rows: (0..microbatch.inputs.tokens()).collect() });
        };
        let wrong = |why: String| RecomputeError::Rank { stage, rank, why };
        if !stage.is_of_k() {
            return Err(wrong("rank= is for dk, its parts, dbias and accumulate".into()));
        }
        if let Some(why) = &microbatch.blocked {
            return Err(wrong(why.clone()));
        }
        let unit_of_rank = microbatch.units.iter().find(|unit| unit.ranks.contains(&rank));
        unit_of_rank.cloned().ok_or_else(|| {
            let ranks: Vec<Rank> =
                microbatch.units.iter().flat_map(|unit| unit.ranks.clone()).collect();
            wrong(match ranks.is_empty() {
                true => "dk was recorded whole, not as addends: leave rank= out".into(),
                false => format!("addends were recorded by {}", crate::dump::name_ranks(&ranks)),
            })
        })
    }

    fn tokens(
        &self,
        inputs: &MicrobatchInputs,
        asked: &Asked,
    ) -> Result<Range<usize>, RecomputeError> {
        let (stage, tokens) = (asked.stage, inputs.tokens());
        let range = asked.tokens.clone().unwrap_or(0..tokens);
        if range.start > range.end || range.end > tokens {
            let (from, to) = (range.start, range.end);
            return Err(RecomputeError::Tokens { stage, from, to, tokens });
        }
        let classes = self.classes(inputs);
        let bytes = (range.len() as u64).saturating_mul(classes as u64).saturating_mul(8);
        if bytes > MOST_PLANE_BYTES {
            let (tokens, gib) = (range.len(), bytes >> 30);
            return Err(RecomputeError::TooLarge { stage, tokens, classes, gib });
        }
        Ok(range)
    }

    /// V, padding included; 0 where there are no logits.
    fn classes(&self, inputs: &MicrobatchInputs) -> usize {
        inputs.head(self.plan.step).map_or(0, |head| head.k.rows)
    }

    /// Refuses what the head does not have, with what is missing.
    fn possible(
        &self,
        inputs: &MicrobatchInputs,
        stage: Stage,
        member: Option<&Member>,
    ) -> Result<(), RecomputeError> {
        let absent = |why: &str| Err(RecomputeError::Absent { stage, why: why.into() });
        let policy = self.plan.step.is_policy_loss();
        let emulates = [Stage::Lse, Stage::LabelLogits, Stage::Logprobs, Stage::Logits];
        let emulates = emulates.contains(&stage) || stage == Stage::Dlogits;
        let gradient = stage.is_of_q() || stage.is_of_k();
        match &inputs.scores {
            _ if stage == Stage::Dlogprobs && !policy => {
                absent("it belongs to a policy loss (loss=\"grpo\"), which this head is not")
            }
            _ if stage == Stage::Dbias && inputs.bias.is_none() => {
                absent("the dump holds no bias: record it with tape.record(\"bias\", ...)")
            }
            _ if member.is_some() && !emulates && !gradient => absent(
                "a policy is emulated for lse, label_logits, logprobs, logits, dlogits and the gradients: leave policy= out",
            ),
            Scores::Logprobs | Scores::Lost(_)
                if !matches!(stage, Stage::Nll | Stage::Loss | Stage::Dlogprobs | Stage::G) =>
            {
                absent(
                    "the dump holds log-probabilities and nothing before them: record q, k and labels",
                )
            }
            Scores::Logits(_) if gradient => absent(
                "the dump holds logits and neither q nor k: record both to have gradients by them, or ask for dlogits",
            ),
            _ => Ok(()),
        }
    }

    fn shaped(&self, microbatch: &HeadMicrobatch, asked: &Asked, values: Vec<f64>) -> Recomputed {
        let (inputs, stage) = (&microbatch.inputs, asked.stage);
        let rows_shape = &self.plan.step.tensors[&inputs.rows_key].shape;
        let leading = match inputs.scores {
            Scores::Logprobs | Scores::Lost(_) => &rows_shape[..],
            _ => &rows_shape[..rows_shape.len().saturating_sub(1)],
        };
        if let (Some(tokens), true) = (&asked.tokens, (stage.kind() == Kind::Plane)) {
            let shape = vec![tokens.len() as u64, self.classes(inputs) as u64];
            return Recomputed { shape, values };
        }
        let captured = stage.role().and_then(|role| self.plan.step.find(role, inputs.microbatch));
        let captured = captured.map(|key| self.plan.step.tensors[key].shape.clone());
        let count = values.len() as u64;
        let fits = |shape: &Vec<u64>| shape.iter().product::<u64>() == count;
        let of_k = stage.kind() == Kind::ClassRows;
        let (rows, columns) = (self.classes(inputs) as u64, inputs.width() as u64);
        if of_k && self.plan.step.options.transposed() {
            let values = transposed(&values, rows as usize, columns as usize);
            return Recomputed { shape: vec![columns, rows], values };
        }
        let usual = || match stage {
            _ if of_k => vec![rows, columns],
            Stage::Dbias => vec![rows],
            Stage::Loss if count == 1 => Vec::new(),
            _ if stage.kind() == Kind::Plane => [leading, &[rows]].concat(),
            _ if stage.is_of_q() => [leading, &[columns]].concat(),
            _ => leading.to_vec(),
        };
        Recomputed { shape: captured.filter(fits).unwrap_or_else(usual), values }
    }
}

/// The microbatch that is meant.
fn chosen_microbatch<'s>(
    microbatches: &'s [HeadMicrobatch],
    asked: &Asked,
) -> Result<&'s HeadMicrobatch, RecomputeError> {
    let stage = asked.stage;
    let names: Vec<String> = microbatches
        .iter()
        .filter_map(|microbatch| microbatch.inputs.microbatch.map(|mb| mb.to_string()))
        .collect();
    let recorded = if names.is_empty() { "none".into() } else { names.join(", ") };
    let wrong = |asked: String, todo| RecomputeError::Microbatch { stage, asked, recorded, todo };
    match asked.microbatch {
        None => match microbatches {
            [only] => Ok(only),
            _ => Err(wrong("of which microbatch".into(), "choose one with microbatch=")),
        },
        Some(mb) => microbatches
            .iter()
            .find(|microbatch| microbatch.inputs.microbatch == Some(mb))
            .ok_or_else(|| wrong(format!("of microbatch {mb}"), "choose one of them")),
    }
}

fn transposed(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let value = |i: usize| values[(i % rows) * columns + i / rows];
    (0..rows * columns).map(value).collect()
}
