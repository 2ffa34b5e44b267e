//! Backward stages of one unit: dq and dk, each with its two parts, and dbias: what they
//! start from, and what the dump holds of them. `slabs` walks them.

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::When;
use rayon::prelude::*;

use super::Slice;
use super::addends::Sum;
use super::alike::of_label_addends;
use super::context::Replay;
use super::dq::k_sums;
use super::estimate::estimate_work;
use super::executor::pass_cache::Biases;
use super::findings::{Captured, Findings, Gradient, Held};
use super::forward::{ForwardState, few};
use super::gather::Gathered;
use super::judge::Judge;
use super::loss::Upstream;
use super::members::members;
use super::outcome::{Comparison, MemberError, Outcome};
use super::plan::Effort;
use super::plan::Plan;
use super::smoothed::of_smoothed_entries;
use super::world::{At, UnitName, UnitTokens};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, rows_of, unfit};
use crate::head::{MicrobatchInputs, Scores, Stage, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED, Matrix, Reads};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::reference::TermNoise;
use crate::kernels::{TokenCotangents, policy, reference};

/// Elements that one thread adds at a time.
const MANY: usize = 1 << 14;

/// What one unit's backward works on; all `[T]` of its tokens.
pub(super) struct Problem<'a> {
    pub(super) head: HeadInputs<'a>,
    pub(super) microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub(super) rank: Option<Rank>,
    pub(super) lse: Vec<f64>,
    /// Relative variance of the unit's softmax terms.
    pub(super) noise: TermNoise,
    /// Relative variance that lse brings to a token's softmax terms.
    pub(super) scale: Vec<f64>,
    /// Relative variance of the token's g.
    pub(super) variance: Vec<f64>,
    /// The largest of `scale` and of `variance`.
    largest: (f64, f64),
    g_lse: Vec<f64>,
    g_label: Vec<f64>,
    g_smooth: Vec<f64>,
    /// Relative variance of the logits' constants, as it comes out in the gradients.
    pub(super) constants: f64,
    /// Share of the roundings of `g p` that may be alike for all tokens.
    pub(super) alike: f64,
    /// The same of entries that are not nearly g.
    pub(super) few: f64,
    /// For each token, the variance of errors that add up along q, over `q²/|q|⁴`; and
    /// the same for the rows of k, over `k²/|k|⁴`.
    pub(super) sliced: (Vec<f64>, f64),
    /// What rounding takes of an entry of dlogits in a coarse format's smallest numbers.
    pub(super) entry_floor: f64,
    /// Sum of k² over the vocabulary, a column each, where it is needed.
    pub(super) k_squares: Vec<f64>,
    /// Sum of k, likewise.
    pub(super) k_sums: Vec<f64>,
    /// Mean relative error of the label's addends, of dq and of dk.
    pub(super) label_bias: [f64; 2],
    /// The same of entries that hold the label's 1, where a fused head may round those.
    pub(super) whole_bias: f64,
    /// Mean relative error of the dense entries that smoothing moves off their grid.
    pub(super) dense_bias: f64,
    /// How much of the token's g may be there or not; empty where all of it is sure.
    pub(super) unsure: Vec<f64>,
    /// The cotangents of that: of lse, label and every logit, without their signs.
    pub(super) of_unsure: [Vec<f64>; 3],
}

impl Problem<'_> {
    /// Whose it is.
    pub(super) fn unit(&self) -> UnitName {
        (self.microbatch, self.rank)
    }

    /// The same tokens over other classes.
    pub(super) fn over<'h>(&self, head: HeadInputs<'h>) -> Problem<'h> {
        Problem {
            head,
            microbatch: self.microbatch,
            rank: self.rank,
            lse: self.lse.clone(),
            noise: self.noise,
            scale: self.scale.clone(),
            variance: self.variance.clone(),
            largest: self.largest,
            g_lse: self.g_lse.clone(),
            g_label: self.g_label.clone(),
            g_smooth: self.g_smooth.clone(),
            constants: self.constants,
            alike: self.alike,
            few: self.few,
            sliced: self.sliced.clone(),
            entry_floor: self.entry_floor,
            k_squares: self.k_squares.clone(),
            k_sums: self.k_sums.clone(),
            label_bias: self.label_bias,
            whole_bias: self.whole_bias,
            dense_bias: self.dense_bias,
            unsure: self.unsure.clone(),
            of_unsure: self.of_unsure.clone(),
        }
    }

    pub(super) fn cotangents(&self) -> Cotangents<'_, f64> {
        Cotangents { lse: &self.g_lse, label: &self.g_label, smooth: &self.g_smooth }
    }

    pub(super) fn largest_variance(&self) -> f64 {
        self.largest.1
    }

    pub(super) fn largest_scale(&self) -> f64 {
        self.largest.0 + self.largest.1
    }
}

impl Replay<'_> {
    /// Multiply-adds of the whole replay, for the progress bar.
    pub(super) fn work(&self, slices: &[Slice], effort: Effort) -> u64 {
        let members = members(&self.plan.roundings).len() as u64;
        let one = |slice: &Slice| {
            let Some(head) = slice.inputs.head(self.plan.step) else { return 0 };
            let forward = reference::forward_work(&head) + 2 * policy::forward_work(&head);
            let emulated = (members * policy::backward_work(&head)) as f64;
            let emulated = (emulated * self.share_emulated(&head)) as u64;
            let all = reference::backward_work(&head) + emulated;
            let backward = match effort {
                Effort::Probes { count, .. } if !self.plan.roundings.swamps() => {
                    reference::probe_work(&head, count)
                }
                Effort::Tokens { count, .. } => {
                    let (n, tokens) = (count.min(head.q.rows), head.q.rows.max(1) as u64);
                    all / tokens * n as u64 + estimate_work(&head, n)
                }
                _ => all,
            };
            forward + if head.given.is_none() { backward } else { 0 }
        };
        slices.iter().map(one).sum()
    }

    pub(super) fn backward(
        &self,
        slice: &Slice,
        unit: &Unit,
        state: &ForwardState,
        upstream: &Upstream,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Scores::Product { .. } = slice.inputs.scores else {
            if self.plan.step.find(Role::Dbias, slice.inputs.microbatch).is_some() {
                let why = "recorded, and judged only where the head starts from q and k; dlogits says what it is a sum of";
                outcome.skip(Stage::Dbias, why);
            }
            return Ok(());
        };
        let captured = self.judge.captured(slice, unit, outcome)?;
        if captured.gradients.is_empty() && self.plan.sums_alone.is_none() {
            return Ok(());
        }
        if let Effort::Tokens { count, seed } = self.plan.effort {
            let before = (state, upstream);
            return self.sampled((slice, unit), before, captured, (count, seed), outcome);
        }
        let dlogits = self.judge.usable_dlogits(slice, unit)?;
        self.try_problem(slice, unit, (state, upstream), &mut |problem| {
            let mut findings = match self.plan.effort {
                // Probes see sums over all classes, in which open tokens can't be told apart.
                Effort::Probes { count, seed }
                    if !self.plan.recomputes() && !problem.any_open() =>
                {
                    self.probe(problem, &captured, unit, (count, seed), outcome)
                }
                _ => self.walk(problem, &captured, (slice, unit), (state, upstream), outcome)?,
            };
            let mut from_dlogits = Vec::new();
            if let Some(dlogits) = &dlogits {
                let stages = captured.without_parts();
                findings.forget(&stages);
                self.judge_from_dlogits(
                    problem,
                    (dlogits, &stages),
                    &captured,
                    unit,
                    &mut findings,
                );
                from_dlogits = stages;
            }
            let own = captured.all_but(&from_dlogits);
            let of = (slice, unit);
            self.plan.note_open(of, problem, (&captured, &own), &mut findings, outcome);
            self.plan.report(findings, &captured, &slice.inputs, unit, outcome);
            Ok(())
        })
    }

    /// Lends what the backward of some tokens works on.
    pub(super) fn with_problem(
        &self,
        slice: &Slice,
        unit: &Unit,
        state: &ForwardState,
        upstream: &Upstream,
        then: &mut dyn FnMut(&Problem<'_>),
    ) {
        let given = self.try_problem(slice, unit, (state, upstream), &mut |problem| {
            then(problem);
            Ok(())
        });
        debug_assert!(given.is_ok(), "nothing here fails but what is called");
    }

    /// The same to what may fail.
    pub(super) fn try_problem(
        &self,
        slice: &Slice,
        unit: &Unit,
        (state, upstream): (&ForwardState, &Upstream),
        then: &mut dyn FnMut(&Problem<'_>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let inputs = &slice.inputs;
        let head = inputs.head(self.plan.step).expect("products have a head");
        let q = Gathered::new(&head.q, &unit.rows);
        let labels: Vec<u32> = unit.rows.iter().map(|&t| inputs.labels[t]).collect();
        let copies: Vec<f64> = unit.rows.iter().map(|&t| inputs.copies[t]).collect();
        let copies = Some(&copies[..]);
        let gather = |of: &Matrix<'_>| Gathered::new(of, &unit.rows);
        let read = head.reads.map(|reads| {
            (gather(&reads.q), reads.scores.map(|(of, first)| (gather(&of), first)), reads)
        });
        let reads = read.as_ref().map(|(q, scores, reads)| {
            let scores = scores.as_ref().map(|(of, first)| (of.matrix(), *first));
            Reads { q: q.matrix(), scores, ..*reads }
        });
        let reads = reads.or(state.products.read_by(&head, (q.matrix(), &unit.rows)));
        let head = HeadInputs { q: q.matrix(), labels: &labels, copies, reads, ..head };
        then(&self.problem(head, (slice, unit), state, upstream))
    }

    fn problem<'h>(
        &self,
        head: HeadInputs<'h>,
        (slice, unit): (&Slice, &Unit),
        state: &ForwardState,
        upstream: &Upstream,
    ) -> Problem<'h> {
        let pick = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).collect::<Vec<f64>>();
        let (lse, g) = (pick(&state.lse), pick(&upstream.g));
        let most = |of: &[f64]| unit.rows.iter().map(|&t| of[t]).fold(0.0, f64::max);
        let (alike, few) = (most(&state.alike), most(&state.few));
        let (rows, rank, inputs) = (&unit.rows[..], unit.rank(), &slice.inputs);
        let tokens = UnitTokens { inputs, rows, lse: &lse, g: &g, rank };
        let [g_lse, g_label, g_smooth] = self.judge.token_cotangents(&tokens);
        let (unsure, of_unsure) = match upstream.any_open(&unit.rows) {
            true => {
                let unsure = pick(&upstream.certain);
                let of = self.judge.token_cotangents(&UnitTokens { g: &unsure, ..tokens });
                (unsure, of.map(|of| of.into_iter().map(f64::abs).collect()))
            }
            false => Default::default(),
        };
        let largest = g_lse.iter().fold(0.0, |most: f64, g| most.max(g.abs()));
        let entry_floor = self.judge.entry_floor(largest);
        let (k_sums, k_squares) = match entry_floor > 0.0 {
            true => k_sums(&rows_of(&head.k, 0..head.valid_vocab)),
            false => (Vec::new(), Vec::new()),
        };
        let cotangents = Cotangents { lse: &g_lse[..], label: &g_label, smooth: &g_smooth };
        let biases = self.biases(&head, &lse, &cotangents);
        let sliced = self.judge.sliced(&head, &g, &pick(&state.logit_variance));
        let (scale, variance) = (pick(&state.scale), pick(&upstream.variance));
        let spread = pick(&state.spread).into_iter().fold(0.0, f64::max);
        let of_lse = match state.lse_shared.is_empty() {
            true => 0.0,
            false => most(&state.lse_shared),
        };
        let constants = self.judge.transform_scale() * (1.0 + spread * spread) + of_lse;
        // Asked for at every element: looked for once.
        let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        let largest = (most(&scale), most(&variance));
        Problem {
            noise: self.judge.term_noise(head.q.cols),
            head,
            microbatch: inputs.microbatch,
            rank,
            lse,
            constants,
            scale,
            variance,
            largest,
            g_lse,
            g_label,
            g_smooth,
            alike,
            few,
            sliced,
            entry_floor,
            k_squares,
            k_sums,
            label_bias: biases.label,
            whole_bias: biases.whole,
            dense_bias: biases.dense,
            unsure,
            of_unsure,
        }
    }

    /// See [`Biases`].
    fn biases(&self, head: &HeadInputs<'_>, lse: &[f64], g: &Cotangents<'_, f64>) -> Biases {
        let find = || Biases {
            label: self.judge.label_bias(head, g.label),
            whole: self.whole_bias(head, lse, g),
            dense: self.judge.dense_bias(g.lse, g.smooth),
        };
        let options = (&self.plan.roundings.widest, &self.plan.step.options.transform);
        self.executor.biases((head, lse, g), &options, find)
    }
}

impl Judge<'_> {
    /// The mean relative errors of `g k[y]` and of `g q`, where they are rounded.
    fn label_bias(&self, head: &HeadInputs<'_>, g_label: &[f64]) -> [f64; 2] {
        let Policy { path, label_grad, .. } = self.plan.roundings.widest;
        if path != Path::Fused || label_grad.keeps_f32() {
            return [0.0; 2];
        }
        let d = head.q.cols;
        let of = |matrix: &Matrix<'_>, row: usize| -> Vec<f64> {
            (row * d..(row + 1) * d).map(|at| matrix.get_f64(at)).collect()
        };
        let of_k = |t: usize| match head.labels[t] {
            IGNORED => Vec::new(),
            label => of(&head.k, label as usize),
        };
        [
            of_label_addends(label_grad, g_label, of_k),
            of_label_addends(label_grad, g_label, |t| of(&head.q, t)),
        ]
    }
}

impl Replay<'_> {
    /// The mean relative error of the entries in the labels' columns: a head that never holds the
    /// logits may take the label's 1 off before it rounds. Entries of tokens whose p is small are
    /// nearly -g, and round to one side.
    fn whole_bias(&self, head: &HeadInputs<'_>, lse: &[f64], g: &Cotangents<'_, f64>) -> f64 {
        let Policy { path, dlogits, .. } = self.plan.roundings.widest;
        if path != Path::Fused || dlogits.keeps_f32() {
            return 0.0;
        }
        let logits = self.executor.label_logits(head);
        let entry = |t: usize| match head.labels[t] {
            IGNORED => 0.0,
            _ => {
                let p = libm::exp(logits[t] - lse[t]);
                g.of_token(t).entry(p, true) * head.transform.slope_at(logits[t])
            }
        };
        let entries: Vec<f64> = (0..lse.len()).map(entry).collect();
        of_label_addends(dlogits, &entries, |_| vec![1.0])
    }
}

impl Judge<'_> {
    /// The mean relative error of `g (p - s/K)`, where p and the difference are rounded. The
    /// derivative of a transform that bends has other digits for each entry.
    fn dense_bias(&self, g_lse: &[f64], g_smooth: &[f64]) -> f64 {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        let transform = self.plan.step.options.transform;
        if transform.bends() {
            return 0.0;
        }
        let scaled = |of: &[f64]| of.iter().map(|g| g * transform.scale).collect::<Vec<f64>>();
        of_smoothed_entries(p, dlogits, (&scaled(g_lse), &scaled(g_smooth)))
    }

    /// Where all of a row's terms lie on a few steps of their format, the terms of one
    /// step share one error, and the classes of one step are those of one logit: their
    /// k have `z q/|q|²` in common. With `a` the share that is alike and `v` the variance
    /// of one entry's rounding, `Σ (N z)² v` over the steps is `a K² σ² v` for p near
    /// 1/K, of dq; for a row of dk it is the same over tokens. `spread` is σ².
    fn sliced(&self, head: &HeadInputs<'_>, g: &[f64], spread: &[f64]) -> (Vec<f64>, f64) {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        let u = p.unit_roundoff().max(dlogits.unit_roundoff());
        let (tokens, classes) = (g.len() as f64, head.valid_vocab.max(1) as f64);
        // a σ² v of a token, v of an entry near g/K.
        let each = |t: usize| {
            let (entry, floor) = (g[t].abs() / classes, self.entry_floor(g[t]));
            let step = (2.0 * u).max(if entry > 0.0 { 2.0 * floor / entry } else { 0.0 });
            let variance = u * u * entry * entry / 3.0 + floor * floor;
            few(spread[t].sqrt() / step) * spread[t] * variance
        };
        let of_token = |t: usize| {
            let norm = head.q.row_energy(t);
            if norm > 0.0 { classes * classes * each(t) / (norm * norm) } else { 0.0 }
        };
        let rows = tokens * (0..g.len()).map(each).sum::<f64>();
        ((0..g.len()).map(of_token).collect(), rows)
    }

    /// Of lse, label and every logit, as the world has them.
    pub(super) fn token_cotangents(&self, tokens: &UnitTokens<'_>) -> [Vec<f64>; 3] {
        let classes = tokens.inputs.valid_vocab;
        let each = tokens.lse.iter().zip(tokens.g);
        let each: Vec<TokenCotangents> =
            each.map(|(&lse, &g)| self.plan.step.options.cotangents(g, lse, classes)).collect();
        let list = |of: fn(&TokenCotangents) -> f64| each.iter().map(of).collect::<Vec<f64>>();
        let [mut of_lse, mut label, mut smooth] =
            [list(|of| of.lse), list(|of| of.label), list(|of| of.smooth)];
        self.world.cotangents(tokens, [&mut of_lse, &mut label, &mut smooth]);
        [of_lse, label, smooth]
    }

    /// What the dump holds of this unit's gradients.
    pub(super) fn captured(
        &self,
        slice: &Slice,
        unit: &Unit,
        outcome: &mut Outcome,
    ) -> Result<Captured, StepError> {
        let mut found = Captured::default();
        let stages = Stage::OF_Q.into_iter().chain(Stage::OF_K).chain([Stage::Dbias]);
        for stage in stages.filter(|&stage| self.plan.wants(stage)) {
            // What cannot be used of one gradient says nothing of the others.
            let gradient = self.captured_of(stage, (slice, unit), outcome);
            let gradient = outcome.spared(gradient, (&[stage], slice.inputs.microbatch))?;
            found.gradients.extend(gradient.flatten());
        }
        Ok(found)
    }

    /// What the dump holds of one of this unit's gradients, if it holds any that can be
    /// judged by the unit's tokens.
    fn captured_of(
        &self,
        stage: Stage,
        (slice, unit): (&Slice, &Unit),
        outcome: &mut Outcome,
    ) -> Result<Option<Gradient>, StepError> {
        let role = stage.role().expect("gradients have roles");
        let at = At { stage, microbatch: slice.inputs.microbatch, rank: unit.rank() };
        let columns = if stage == Stage::Dbias { 1 } else { slice.inputs.width() };
        if let Some((values, stored)) = self.stand_in(&at, columns) {
            let source = format!("a variant's {stage}");
            let (rounded, apart) = (None, None);
            return Ok(Some(Gradient { stage, values, stored, rounded, apart, source }));
        }
        let Some(key) = self.plan.step.find(role, slice.inputs.microbatch) else {
            return Ok(None);
        };
        if stage == Stage::Dk && self.plan.step.options.declared.tied_embedding {
            let why = "tied_embedding=True: dk holds the input embedding's part too, which the head does not know; record dk_lse and dk_label to have the head's part judged";
            outcome.skip(stage, why);
            return Ok(None);
        }
        let partial = self.plan.step.tensors[key].partial.is_some();
        let of_tokens = stage.is_of_q();
        if let Some(why) = slice.blocked.as_ref().filter(|_| partial && !of_tokens) {
            outcome.leave(stage, slice.inputs.microbatch, why.clone());
            return Ok(None);
        }
        let values = match (partial, of_tokens) {
            (true, true) => {
                let sum = Sum::of_partial(self.plan.step, key)?.oriented(self.plan.step, key);
                Held::Summed(sum.added())
            }
            (true, _) if unit.ranks.is_empty() => {
                if let Err(why) = self.plan.step.all_added(key, &slice.inputs) {
                    outcome.leave(stage, slice.inputs.microbatch, why);
                    return Ok(None);
                }
                let sum = Sum::of_addends(self.plan.step, key)?.oriented(self.plan.step, key);
                Held::Summed(sum.added())
            }
            (true, _) => Held::Whole(self.plan.step.oriented(key, Some(&unit.ranks))?),
            // A gradient over all tokens cannot be judged by some ranks' tokens.
            (_, false) if !unit.ranks.is_empty() => return Ok(None),
            _ => Held::Whole(self.plan.step.oriented(key, None)?),
        };
        let stored = match &values {
            Held::Whole(tensor) => precision_of(tensor.dtype),
            _ => None,
        };
        let source = key.to_string();
        let mut gradient = Gradient { stage, values, stored, rounded: None, apart: None, source };
        self.plan.check_shape(&gradient, slice)?;
        let output = self.plan.roundings.widest.output;
        gradient.rounded = gradient.coarser(output);
        let summed = stage == Stage::Dk
            && !partial
            && key.when != Some(When::PreReduce)
            && self.plan.step.devices_with_tokens(&slice.inputs) > 1;
        let finer = stored.is_some_and(|of| of.unit_roundoff() < output.unit_roundoff());
        gradient.apart = (summed && finer && gradient.rounded.is_none()).then_some(output);
        Ok(Some(gradient))
    }
}

impl Plan<'_> {
    fn check_shape(&self, gradient: &Gradient, slice: &Slice) -> Result<(), StepError> {
        let Scores::Product { q, k } = &slice.inputs.scores else { return Ok(()) };
        let like = match gradient.stage {
            Stage::Dbias => &k.shape[..1],
            stage if stage.is_of_q() => &q.shape[..],
            _ => &k.shape[..],
        };
        match &gradient.values {
            Held::Whole(tensor) if tensor.shape != like || matrix(tensor).is_none() => {
                Err(unfit(tensor, &format!("floats of shape {like:?}")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn report(
        &self,
        findings: Findings,
        captured: &Captured,
        inputs: &MicrobatchInputs,
        unit: &Unit,
        outcome: &mut Outcome,
    ) {
        let names = members(&self.roundings).into_iter().map(|member| member.name);
        let names: Vec<String> = names.collect();
        for (stage, tally, bound) in findings.tallies {
            let of = findings.energies.iter().find(|(of, _)| *of == stage);
            let energies = of.map(|(_, energies)| energies.as_slice()).unwrap_or_default();
            let member =
                |(name, &energy): (&String, &f64)| MemberError { name: name.clone(), energy };
            let members = names.iter().zip(energies).map(member).collect();
            let by_hits = findings.hits.iter().find(|(of, _)| *of == stage);
            let by_hits = by_hits.map(|(_, classes)| classes.clone()).unwrap_or_default();
            let gradient = captured.stage(stage);
            let source = gradient.map(|of| of.source.clone()).unwrap_or_default();
            let stored_apart = gradient.is_some_and(Gradient::is_stored_apart);
            let found = Comparison::new(inputs.microbatch, unit.rank(), source, tally, &bound);
            let sampled = findings.sampled.contains(&stage);
            outcome.add(stage, Comparison { members, sampled, stored_apart, by_hits, ..found });
        }
        self.take_charts(findings.charts, inputs.microbatch, unit, outcome);
    }
}

pub(super) fn sum(one: &[f64], other: &[f64]) -> Vec<f64> {
    match one.len() < MANY {
        true => one.iter().zip(other).map(|(a, b)| a + b).collect(),
        false => one.par_iter().zip(other).with_min_len(MANY).map(|(a, b)| a + b).collect(),
    }
}
