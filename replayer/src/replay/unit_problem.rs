//! How a unit's problem is made from the stages before the backward.

use super::context::Replay;
use super::correlated_errors::of_label_addends;
use super::executor::pass_cache::Biases;
use super::forward::ForwardState;
use super::gathered_rows::Gathered;
use super::judge::Judge;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::problem::Problem;
use super::rounding_variance::share_of_equal_roundings;
use super::slab::k_sums;
use super::smoothing_bias::of_smoothed_entries;
use super::world::UnitTokens;
use crate::head::Unit;
use crate::head::step::{StepError, rows_of};
use crate::kernels::TokenCotangents;
use crate::kernels::formula::probability;
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED, Matrix, Reads};
use crate::kernels::policy::{Path, Policy};

impl Replay<'_> {
    /// Lends what the backward of some tokens works on.
    pub(super) fn with_problem(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        state: &ForwardState,
        upstream: &Upstream,
        then: &mut dyn FnMut(&Problem<'_>),
    ) {
        let given = self.try_problem(microbatch, unit, (state, upstream), &mut |problem| {
            then(problem);
            Ok(())
        });
        debug_assert!(given.is_ok(), "nothing here fails but what is called");
    }

    /// The same to what may fail.
    pub(super) fn try_problem(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        (state, upstream): (&ForwardState, &Upstream),
        then: &mut dyn FnMut(&Problem<'_>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let inputs = &microbatch.inputs;
        let head = inputs.head(self.plan.step).expect("products have a head");
        let q = Gathered::new(&head.q, &unit.rows);
        let labels: Vec<u32> = unit.rows.iter().map(|&t| inputs.labels[t]).collect();
        let copies: Vec<f64> = unit.rows.iter().map(|&t| inputs.copies[t]).collect();
        let copies = Some(&copies[..]);
        let gather = |matrix: &Matrix<'_>| Gathered::new(matrix, &unit.rows);
        let read = head.reads.map(|reads| {
            (gather(&reads.q), reads.scores.map(|(matrix, first)| (gather(&matrix), first)), reads)
        });
        let reads = read.as_ref().map(|(q, scores, reads)| {
            let scores = scores.as_ref().map(|(gathered, first)| (gathered.matrix(), *first));
            Reads { q: q.matrix(), scores, ..*reads }
        });
        let reads = reads.or(state.products.read_by(&head, (q.matrix(), &unit.rows)));
        let head = HeadInputs { q: q.matrix(), labels: &labels, copies, reads, ..head };
        then(&self.problem(head, (microbatch, unit), state, upstream))
    }

    pub(super) fn problem<'h>(
        &self,
        head: HeadInputs<'h>,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        state: &ForwardState,
        upstream: &Upstream,
    ) -> Problem<'h> {
        let pick = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).collect::<Vec<f64>>();
        let (lse, g) = (pick(&state.lse), pick(&upstream.g));
        let most = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).fold(0.0, f64::max);
        let (alike, few) = (most(&state.alike), most(&state.few));
        let (rows, rank, inputs) = (&unit.rows[..], unit.rank(), &microbatch.inputs);
        let tokens = UnitTokens { inputs, rows, lse: &lse, g: &g, rank };
        let [g_lse, g_label, g_smooth] = self.judge.token_cotangents(&tokens);
        let (unsure, of_unsure) = match upstream.any_uncertain(&unit.rows) {
            true => {
                let unsure = pick(&upstream.certain);
                let cotangents = self.judge.token_cotangents(&UnitTokens { g: &unsure, ..tokens });
                (unsure, cotangents.map(|values| values.into_iter().map(f64::abs).collect()))
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
        let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
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
    pub(super) fn label_bias(&self, head: &HeadInputs<'_>, g_label: &[f64]) -> [f64; 2] {
        let Policy { path, label_grad, .. } = self.plan.roundings.widest;
        if path != Path::Fused || label_grad.keeps_f32() {
            return [0.0; 2];
        }
        let d = head.q.cols;
        let row_of = |matrix: &Matrix<'_>, row: usize| -> Vec<f64> {
            (row * d..(row + 1) * d).map(|at| matrix.get_f64(at)).collect()
        };
        let of_k = |t: usize| match head.labels[t] {
            IGNORED => Vec::new(),
            label => row_of(&head.k, label as usize),
        };
        [
            of_label_addends(label_grad, g_label, of_k),
            of_label_addends(label_grad, g_label, |t| row_of(&head.q, t)),
        ]
    }
}

impl Replay<'_> {
    /// The mean relative error of the entries in the labels' columns: a head that never holds the
    /// logits may take the label's 1 off before it rounds. Entries of tokens whose p is small are
    /// nearly -g, and round to one side.
    pub(super) fn whole_bias(
        &self,
        head: &HeadInputs<'_>,
        lse: &[f64],
        g: &Cotangents<'_, f64>,
    ) -> f64 {
        let Policy { path, dlogits, .. } = self.plan.roundings.widest;
        if path != Path::Fused || dlogits.keeps_f32() {
            return 0.0;
        }
        let logits = self.executor.label_logits(head);
        let entry = |t: usize| match head.labels[t] {
            IGNORED => 0.0,
            _ => {
                let p = probability(logits[t], lse[t]);
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
    pub(super) fn dense_bias(&self, g_lse: &[f64], g_smooth: &[f64]) -> f64 {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        let transform = self.plan.step.options.transform;
        if transform.bends() {
            return 0.0;
        }
        let scaled =
            |values: &[f64]| values.iter().map(|g| g * transform.scale).collect::<Vec<f64>>();
        of_smoothed_entries(p, dlogits, (&scaled(g_lse), &scaled(g_smooth)))
    }

    /// Where all of a row's terms lie on a few steps of their format, the terms of one
    /// step share one error, and the classes of one step are those of one logit: their
    /// k have `z q/|q|²` in common. With `a` the share that is alike and `v` the variance
    /// of one entry's rounding, `Σ (N z)² v` over the steps is `a K² σ² v` for p near
    /// 1/K, of dq; for a row of dk it is the same over tokens. `spread` is σ².
    pub(super) fn sliced(
        &self,
        head: &HeadInputs<'_>,
        g: &[f64],
        spread: &[f64],
    ) -> (Vec<f64>, f64) {
        let u = self.constant();
        let (tokens, classes) = (g.len() as f64, head.valid_vocab.max(1) as f64);
        // a σ² v of a token, v of an entry near g/K.
        let each = |t: usize| {
            let (entry, floor) = (g[t].abs() / classes, self.entry_floor(g[t]));
            let step = (2.0 * u).max(if entry > 0.0 { 2.0 * floor / entry } else { 0.0 });
            let variance = u * u * entry * entry / 3.0 + floor * floor;
            share_of_equal_roundings(spread[t].sqrt() / step) * spread[t] * variance
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
        let [mut of_lse, mut label, mut smooth] = [
            list(|cotangents| cotangents.lse),
            list(|cotangents| cotangents.label),
            list(|cotangents| cotangents.smooth),
        ];
        self.world.cotangents(tokens, [&mut of_lse, &mut label, &mut smooth]);
        [of_lse, label, smooth]
    }
}
