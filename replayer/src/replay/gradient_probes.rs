//! `--freivalds`: dq and dk of one unit checked with random probes, in place of the walk
//! over the vocabulary.
//!
//! A label part, and a sum of two captured parts, cost no GEMM: they are judged element by
//! element. What an accumulator of few bits certainly loses is known by emulation alone: heads that
//! declare one are recomputed, whatever was asked for.

use super::captured_gradients::{Captured, picked};
use super::context::Replay;
use super::dq_state::DqState;
use super::findings::Findings;
use super::judge::Judge;
use super::maps::Drawn;
use super::outcome::Outcome;
use super::probe::{self, CapturedGradient, Model};
use super::problem::Problem;
use super::slab::Slab;
use crate::compare::{Allowed, ONE_ROUNDING, Rows, Tally, once};
use crate::head::{Stage, Unit};

impl Replay<'_> {
    /// Random probes in place of the recomputation.
    pub(super) fn probe(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        unit: &Unit,
        (probes, seed): (usize, u64),
        outcome: &mut Outcome,
    ) -> Findings {
        if captured.stage(Stage::Dbias).is_some() {
            let why = "--freivalds probes dq and dk: leave it out to have dbias recomputed";
            outcome.skip(Stage::Dbias, why);
        }
        let mut findings = Findings::default();
        let of_unit = picked(captured, &unit.rows);
        let forced = [
            self.judge.judge_added(captured, &Stage::OF_K, &|row| row as u64, &mut findings),
            self.judge.judge_added(
                &of_unit,
                &Stage::OF_Q,
                &|row| unit.rows[row] as u64,
                &mut findings,
            ),
        ];
        let label = [Stage::DqLabel, Stage::DkLabel];
        let added = |stage: Stage| {
            [(Stage::Dk, forced[0]), (Stage::Dq, forced[1])].contains(&(stage, true))
        };
        let gradients: Vec<_> = of_unit.of(&Stage::OF_Q).chain(captured.of(&Stage::OF_K)).collect();
        let gradients: Vec<_> = gradients
            .into_iter()
            .filter(|gradient| !added(gradient.stage) && !label.contains(&gradient.stage))
            .collect();
        let storages: Vec<Box<dyn Fn(usize, f64) -> f64 + Sync>> = gradients
            .iter()
            .map(|&gradient| Box::new(|at, x| gradient.storage(at, x)) as Box<_>)
            .collect();
        let probed: Vec<CapturedGradient<'_>> = gradients
            .iter()
            .zip(&storages)
            .map(|(gradient, storage)| CapturedGradient {
                stage: gradient.stage,
                values: gradient.matrix(),
                storage,
            })
            .collect();
        let shared = self.judge.narrowing() + problem.constants;
        let g_rel_var: Vec<f64> = problem.variance.iter().map(|g| g + shared).collect();
        let token_rel_var: Vec<f64> =
            problem.scale.iter().zip(&g_rel_var).map(|(a, b)| a + b).collect();
        let backward = probe::Backward {
            head: problem.head,
            lse: &problem.lse,
            token_rel_var: &token_rel_var,
            g_rel_var: &g_rel_var,
            cotangents: problem.cotangents(),
        };
        let (tiles, progress, comparisons) =
            (self.plan.tiles, self.executor.progress(), self.plan.comparisons);
        let plan = probe::Plan { probes, seed, comparisons, tiles, progress };
        let (stages, slopes) = probe::check(&backward, &probed, &self.judge.model(problem), &plan);
        for probed in stages {
            outcome.reached(probed.stage, probed.reach);
            findings.merge(probed.stage, probed.tally, probed.bound);
        }
        self.judge.judge_labels(problem, captured, unit, &slopes, &mut findings);
        findings
    }
}

impl Judge<'_> {
    /// The label parts: one row of k or q a token.
    fn judge_labels(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        unit: &Unit,
        slopes: &[(f64, f64)],
        findings: &mut Findings,
    ) {
        let (head, g_label) = (&problem.head, problem.cotangents().label);
        if captured.stage(Stage::DkLabel).is_some() {
            let (d, v) = (head.q.cols, head.k.rows);
            for range in self.plan.slabs(d, v) {
                let slab = Slab::of_labels(head, range, g_label, slopes);
                self.judge_dk(problem, &slab, (captured, &[Stage::DkLabel]), findings);
            }
        }
        if captured.stage(Stage::DqLabel).is_some() {
            let state = DqState::of_labels(head, g_label, slopes);
            self.judge_dq(problem, &state, (captured, &[Stage::DqLabel]), unit, findings);
        }
    }

    fn model(&self, problem: &Problem<'_>) -> Model {
        Model {
            noise: self.term_noise(problem.head.q.cols),
            widest: self.plan.roundings.widest,
            tiles: self.plan.roundings.tiles,
            compute: self.plan.roundings.compute(),
            input: self.plan.roundings.input(),
            entry_floor: problem.entry_floor,
            carries_label: self.plan.roundings.carries_label(true),
            label_row: self.label_row_scale(),
            alike: self.shared_scale(problem.alike) + problem.constants,
            label_alike: self.shared_scale(self.plan.roundings.shared_g())
                + problem.constants
                + problem.label_bias.into_iter().fold(problem.whole_bias, f64::max).powi(2)
                    / ONE_ROUNDING,
            addends_alike: self.narrowing() + problem.constants,
            sliced: problem.sliced.clone(),
        }
    }

    /// The sum of both captured parts, where both were captured.
    fn judge_added(
        &self,
        captured: &Captured,
        stages: &[Stage; 3],
        index: &(dyn Fn(usize) -> u64 + Sync),
        findings: &mut Findings,
    ) -> bool {
        let Some(gradient) = captured.stage(stages[2]) else { return false };
        let values = gradient.matrix();
        let Some(parts) = captured.parts(stages, 0..values.rows) else { return false };
        let adding = self.adding();
        let reference = super::elementwise::sum(&parts.lse, &parts.label);
        let allowed = |row: usize, column: usize, x: f64| {
            let element = row * values.cols + column;
            let inner = parts.allowed(&adding, element);
            Allowed { own: inner.own + gradient.storage(element, x), ..inner }
        };
        let bound = self.bound(values.rows, values.cols);
        let rows = Rows { captured: values, reference: &reference, index, repeats: &once };
        let stage = stages[2];
        findings.merge(stage, Tally::of(&rows, allowed, &bound), bound);
        let (first, all, rows) = (0, values.rows, &rows);
        let (allowed, bound) = (&allowed, &bound);
        findings.draw(self.plan.draw, &Drawn { stage, first, all, rows, allowed, bound });
        true
    }
}
