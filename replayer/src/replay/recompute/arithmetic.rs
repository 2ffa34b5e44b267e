//! The arithmetic of a recomputed stage: gradients and the token x vocabulary plane, from the
//! reference or from a policy.

use std::ops::Range;

use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::kernels::formula::probability;
use crate::kernels::matrix::Cotangents;
use crate::kernels::reference::{self, Keep, TermNoise};
use crate::kernels::{policy, span_of};
use crate::replay::context::Replay;
use crate::replay::elementwise::sum;
use crate::replay::forward::ForwardState;
use crate::replay::judge::Judge;
use crate::replay::loss::Upstream;
use crate::replay::microbatch::HeadMicrobatch;
use crate::replay::plausible_policies::Member;
use crate::replay::problem::Problem;
use crate::replay::world::UnitTokens;

impl Replay<'_> {
    /// A gradient of the unit's tokens; `None` where the policy never has it.
    pub(super) fn gradient(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        (state, upstream): (&ForwardState, &Upstream),
        stage: Stage,
        member: Option<&Member>,
    ) -> Option<Vec<f64>> {
        let mut gradient = Vec::new();
        self.with_problem(microbatch, unit, state, upstream, &mut |problem| {
            gradient = match member {
                None => self.exact_gradient(problem, stage),
                Some(member) => self.emulated_gradient(problem, stage, member),
            };
        });
        let empty = microbatch.inputs.tokens() * microbatch.inputs.width() == 0;
        (!gradient.is_empty() || empty).then_some(gradient)
    }

    fn exact_gradient(&self, problem: &Problem<'_>, stage: Stage) -> Vec<f64> {
        let (head, noise) = (&problem.head, TermNoise::default());
        let (lse, cotangents) = (&problem.lse, problem.cotangents());
        let mut of_k = Vec::new();
        let walking = (self.plan.tiles, Keep::Both, self.executor.progress());
        let dq =
            reference::backward(
                head,
                lse,
                &cotangents,
                &noise,
                walking,
                &mut |block| match stage {
                    Stage::DkLse => of_k.extend(block.dk_lse),
                    Stage::DkLabel => of_k.extend(block.dk_label),
                    Stage::Dk => of_k.extend(sum(&block.dk_lse, &block.dk_label)),
                    Stage::Dbias => of_k.extend(sum(&block.dbias_lse, &block.dbias_label)),
                    _ => {}
                },
            );
        match stage {
            Stage::DqLse => dq.dq_lse,
            Stage::DqLabel => dq.dq_label,
            Stage::Dq => sum(&dq.dq_lse, &dq.dq_label),
            _ => of_k,
        }
    }

    fn emulated_gradient(&self, problem: &Problem<'_>, stage: Stage, member: &Member) -> Vec<f64> {
        let (head, tiles) = (&problem.head, self.plan.roundings.tiles);
        let (rows, d) = (head.k.rows, head.q.cols);
        let mut of_k = match stage {
            Stage::Dbias => vec![0.0; rows],
            Stage::DkLse | Stage::DkLabel | Stage::Dk => vec![0.0; rows * d],
            _ => Vec::new(),
        };
        let mut told_apart = true;
        let (lse, cotangents) = (&problem.lse, problem.cotangents());
        // Blocks come in the order of the policy's own walk.
        let take = &mut |block: policy::DkParts<'_>| {
            let (values, width) = match stage {
                Stage::DkLse => (block.dk_lse, d),
                Stage::DkLabel => (block.dk_label, d),
                Stage::Dk => (block.dk, d),
                Stage::Dbias => (block.dbias, 1),
                _ => return,
            };
            let span = block.rows.start * width..block.rows.end * width;
            match values.len() == span.len() {
                true => of_k[span].copy_from_slice(values),
                false => told_apart = false,
            }
        };
        let policy = &member.policy;
        let dq =
            policy::backward(policy, head, lse, &cotangents, tiles, self.executor.progress(), take);
        match stage {
            Stage::DqLse => dq.dq_lse,
            Stage::DqLabel => dq.dq_label,
            Stage::Dq => dq.dq,
            _ if told_apart => of_k,
            _ => Vec::new(),
        }
    }
}

impl Judge<'_> {
    /// Cotangents of lse, label logits and all logits, of all tokens.
    pub(super) fn cotangents_of(
        &self,
        inputs: &MicrobatchInputs,
        state: &ForwardState,
        upstream: &Upstream,
    ) -> [Vec<f64>; 3] {
        let rows: Vec<usize> = (0..inputs.tokens()).collect();
        let (lse, g) = (&state.lse[..], &upstream.g[..]);
        self.token_cotangents(&UnitTokens { inputs, rows: &rows, lse, g, rank: None })
    }
}

impl Replay<'_> {
    /// logits, p or dlogits of some tokens, `[tokens, V]`.
    pub(super) fn plane_of(
        &self,
        microbatch: &HeadMicrobatch,
        (state, upstream): (&ForwardState, &Upstream),
        stage: Stage,
        tokens: Range<usize>,
        member: Option<&Member>,
    ) -> Vec<f64> {
        let inputs = &microbatch.inputs;
        let head = inputs.head(self.plan.step).expect("log-probabilities were refused");
        let [g_lse, g_label, g_smooth] = self.judge.cotangents_of(inputs, state, upstream);
        let select = |values: &[f64]| values[tokens.clone()].to_vec();
        let (lse, a, b, c) =
            (select(&state.lse), select(&g_lse), select(&g_label), select(&g_smooth));
        let cotangents = Cotangents { lse: &a, label: &b, smooth: &c };
        let part = span_of(&head, tokens.clone());
        let width = head.k.rows;
        let mut values = vec![0.0; tokens.len() * width];
        let mut put =
            |rows: &Range<usize>, cols: &Range<usize>, logits: &[f64], dlogits: &[f64]| {
                for (index, row) in rows.clone().enumerate() {
                    let from = index * cols.len()..(index + 1) * cols.len();
                    let to = &mut values[row * width + cols.start..row * width + cols.end];
                    match stage {
                        Stage::Logits => to.copy_from_slice(&logits[from]),
                        Stage::Dlogits => to.copy_from_slice(&dlogits[from]),
                        _ => {
                            let p = |&x: &f64| probability(x, lse[row]);
                            to.iter_mut().zip(&logits[from]).for_each(|(to, x)| *to = p(x));
                        }
                    }
                }
            };
        let progress = self.executor.progress();
        match member {
            None => {
                let take = &mut |tile: reference::PlaneTile<'_>| {
                    put(&tile.tokens, &tile.cols, tile.logits, tile.dlogits);
                };
                let (noise, tiles) = (TermNoise::default(), self.plan.tiles);
                reference::plane(&part, &lse, &cotangents, &noise, tiles, progress, take);
            }
            Some(member) => {
                let take = &mut |tile: policy::PlaneTile<'_>| {
                    put(&tile.tokens, &tile.cols, tile.logits, tile.dlogits);
                };
                let (policy, tiles) = (&member.policy, self.plan.roundings.tiles);
                policy::plane(policy, &part, &lse, &cotangents, tiles, progress, take);
            }
        }
        values
    }
}
