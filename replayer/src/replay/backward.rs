//! Backward stages of one unit: dq and dk, each with its two parts.
//!
//! The vocabulary is walked in slabs: what is held beyond the inputs and the
//! `[T, D]` outputs is a few slabs of `SLAB_BYTES`, whatever V is.

use std::ops::Range;

use super::allowed::{rounded, summed};
use super::findings::{Captured, DK, DQ, Findings, Parts, error_energy};
use super::forward::{ForwardState, head_inputs};
use super::gather::Gathered;
use super::members::{Member, members};
use super::outcome::{Comparison, MemberError, NotChecked, Outcome};
use super::probe;
use super::{Probes, Replay, Slice};
use crate::assemble;
use crate::compare::{Allowed, Rows, Tally, once};
use crate::head::roundings::unit_of;
use crate::head::step::{StepError, matrix, rows_of, vocabulary_slab};
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED};
use crate::kernels::{policy, reference};

/// Bytes of one f64 buffer over a slab of k's rows.
const SLAB_BYTES: usize = 32 << 20;

/// What one unit's backward works on.
struct Problem<'a> {
    head: HeadInputs<'a>,
    lse: Vec<f64>,
    scale: Vec<f64>,
    g: Vec<f64>,
    /// True when some `g p` may round alike for all tokens.
    alike: bool,
}

/// Reference values over one slab of k's rows.
pub(super) struct Slab {
    pub(super) range: Range<usize>,
    pub(super) lse: Vec<f64>,
    pub(super) label: Vec<f64>,
    pub(super) lse_var: Vec<f64>,
    pub(super) lse_sq: Vec<f64>,
    pub(super) label_sq: Vec<f64>,
    pub(super) hits: Vec<u32>,
}

impl Replay<'_> {
    /// Multiply-adds of the whole replay, for the progress bar.
    pub(super) fn work(&self, slices: &[Slice]) -> u64 {
        let members = members(&self.roundings, self.step.options.plain).len() as u64;
        let one = |slice: &Slice| {
            let head = head_inputs(&slice.inputs);
            let forward = reference::forward_work(&head) + 2 * policy::forward_work(&head);
            if let Some(probes) = self.probes {
                return forward + reference::probe_work(&head, probes.count);
            }
            forward + reference::backward_work(&head) + members * policy::backward_work(&head)
        };
        slices.iter().map(one).sum()
    }

    pub(super) fn backward(
        &self,
        slice: &Slice,
        unit: &Unit,
        all: &[&MicrobatchInputs],
        forward: &ForwardState,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let captured = self.captured(slice, unit)?;
        if captured.tensors.is_empty() {
            return Ok(());
        }
        let inputs = &slice.inputs;
        let q = Gathered::new(&head_inputs(inputs).q, &unit.rows);
        let labels: Vec<u32> = unit.rows.iter().map(|&t| inputs.labels[t]).collect();
        let pick = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).collect::<Vec<f64>>();
        let denominator = self.step.denominator(all, inputs, unit);
        let g = |&t: &usize| match inputs.labels[t] {
            IGNORED => 0.0,
            _ => self.step.options.cotangent * inputs.weights[t] / denominator,
        };
        let head = HeadInputs { q: q.matrix(), labels: &labels, ..head_inputs(inputs) };
        let g = unit.rows.iter().map(g).collect();
        let alike = unit.rows.iter().any(|&t| forward.confident[t]);
        let problem =
            Problem { head, lse: pick(&forward.lse), scale: pick(&forward.scale), g, alike };
        let findings = match self.probes {
            Some(probes) => self.probe(&problem, &captured, unit, probes, outcome),
            None => self.walk(&problem, &captured, unit, outcome),
        };
        self.report(findings, &captured, inputs, unit, outcome);
        Ok(())
    }

    /// Random probes in place of the recomputation.
    fn probe(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        unit: &Unit,
        probes: Probes,
        outcome: &mut Outcome,
    ) -> Findings {
        let (t, v) = (problem.head.q.rows, problem.head.k.rows);
        let g_label: Vec<f64> = problem.g.iter().map(|g| -g).collect();
        let smooth = vec![0.0; t];
        let backward = probe::Backward {
            head: problem.head,
            lse: &problem.lse,
            lse_scale: &problem.scale,
            cotangents: Cotangents { lse: &problem.g, label: &g_label, smooth: &smooth },
        };
        let model = probe::Model {
            noise: self.term_noise(problem.head.q.cols),
            roundings: self.roundings.clone(),
            label_row: self.label_row_scale(),
            alike: self.shared_scale(problem.alike),
            label_alike: self.shared_scale(self.roundings.shared_g),
        };
        let (tiles, progress) = (self.tiles, self.progress);
        let comparisons = self.comparisons;
        let plan =
            probe::Plan { probes: probes.count, seed: probes.seed, comparisons, tiles, progress };
        let rows: Vec<(Stage, Gathered, f64)> = captured
            .of(&DQ)
            .map(|(stage, tensor, _)| {
                let values = Gathered::new(&matrix(tensor).expect("checked"), &unit.rows);
                (*stage, values, unit_of(tensor.dtype))
            })
            .collect();
        let mut gradients: Vec<probe::CapturedGradient<'_>> =
            rows.iter().map(|(stage, values, unit)| (*stage, values.matrix(), *unit)).collect();
        gradients.extend(captured.of(&DK).map(|(stage, tensor, _)| {
            (*stage, matrix(tensor).expect("checked"), unit_of(tensor.dtype))
        }));
        let mut findings = Findings {
            bounds: (self.bound(t, probes.count), self.bound(v, probes.count)),
            tallies: Vec::new(),
            energies: Vec::new(),
            hits: Vec::new(),
        };
        for found in probe::check(&backward, &gradients, &model, &plan) {
            let what = format!("elements of {} one by one", found.stage);
            let why = found.reach.sentence(found.stage);
            let why = format!("--freivalds, seed {}: {why}", probes.seed);
            outcome.not_checked.push(NotChecked { what, why });
            findings.merge(found.stage, found.tally);
        }
        findings
    }

    /// What the dump holds of this unit's gradients.
    fn captured(&self, slice: &Slice, unit: &Unit) -> Result<Captured, StepError> {
        let mut found = Captured::default();
        for stage in DQ.into_iter().chain(DK).filter(|&stage| self.wants(stage)) {
            let role = stage.role().expect("gradients have roles");
            let Some(key) = self.step.find(role, slice.inputs.microbatch) else {
                continue;
            };
            let partial = self.step.tensors[key].partial.is_some();
            let tensor = match unit.rank.filter(|_| partial) {
                Some(rank) => assemble::addend(self.step.dump, key, rank)
                    .map_err(|source| StepError::Assemble { key: key.clone(), source })?,
                // A gradient over all tokens cannot be judged by one rank's tokens.
                None if unit.rank.is_some() && DK.contains(&stage) => continue,
                None => self.step.assemble(key)?,
            };
            let like = if DQ.contains(&stage) { &slice.inputs.q } else { &slice.inputs.k };
            if tensor.shape != like.shape || matrix(&tensor).is_none() {
                let wanted = format!("floats of shape {:?}", like.shape);
                return Err(crate::head::step::unfit(&tensor, &wanted));
            }
            found.tensors.push((stage, tensor, key.to_string()));
        }
        Ok(found)
    }

    fn walk(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        unit: &Unit,
        outcome: &mut Outcome,
    ) -> Findings {
        let (t, d, v) = (problem.head.q.rows, problem.head.q.cols, problem.head.k.rows);
        let members = members(&self.roundings, self.step.options.plain);
        let mut findings = Findings {
            bounds: (self.bound(t, d), self.bound(v, d)),
            tallies: Vec::new(),
            energies: Vec::new(),
            hits: Vec::new(),
        };
        let mut dq = reference::Backward {
            dq_lse: vec![0.0; t * d],
            dq_label: vec![0.0; t * d],
            dq_lse_var: vec![0.0; t * d],
            dq_lse_sq: vec![0.0; t * d],
        };
        let mut emulated: Vec<policy::DqParts> = Vec::new();
        let slab_rows = (SLAB_BYTES / (8 * d.max(1))).max(self.tiles.vocab);
        for start in (0..v).step_by(slab_rows) {
            let range = start..(start + slab_rows).min(v);
            let mut labels = Vec::new();
            let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
            let slab = self.reference_slab(problem, &head, range, &mut dq);
            self.judge_dk(problem, &slab, captured, &mut findings);
            self.emulate_slab(
                problem,
                &head,
                &slab,
                &members,
                captured,
                &mut emulated,
                &mut findings,
            );
            self.keep_reference(&slab, v * d, outcome);
        }
        self.judge_dq(problem, &dq, captured, unit, &emulated, &mut findings);
        findings
    }

    fn reference_slab(
        &self,
        problem: &Problem<'_>,
        head: &HeadInputs<'_>,
        range: Range<usize>,
        dq: &mut reference::Backward,
    ) -> Slab {
        let (rows, d) = (range.len(), head.q.cols);
        let zeros = || vec![0.0; rows * d];
        let mut slab = Slab {
            range,
            lse: zeros(),
            label: zeros(),
            lse_var: zeros(),
            lse_sq: zeros(),
            label_sq: zeros(),
            hits: vec![0; rows],
        };
        let g_label: Vec<f64> = problem.g.iter().map(|g| -g).collect();
        let noise = self.term_noise(d);
        let part = reference::backward(
            head,
            &problem.lse,
            &problem.g,
            &g_label,
            &noise,
            self.tiles,
            self.progress,
            &mut |block| {
                let at = block.rows.start * d..block.rows.end * d;
                slab.lse[at.clone()].copy_from_slice(block.dk_lse);
                slab.label[at.clone()].copy_from_slice(block.dk_label);
                slab.lse_var[at.clone()].copy_from_slice(block.dk_lse_var);
                slab.lse_sq[at.clone()].copy_from_slice(block.dk_lse_sq);
                slab.label_sq[at].copy_from_slice(block.dk_label_sq);
                slab.hits[block.rows].copy_from_slice(block.hits);
            },
        );
        add(&mut dq.dq_lse, &part.dq_lse);
        add(&mut dq.dq_label, &part.dq_label);
        add(&mut dq.dq_lse_var, &part.dq_lse_var);
        add(&mut dq.dq_lse_sq, &part.dq_lse_sq);
        slab
    }

    fn judge_dk(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        captured: &Captured,
        findings: &mut Findings,
    ) {
        let (t, d) = (problem.head.q.rows as f64, problem.head.q.cols);
        let r = &self.roundings;
        let scale = problem.scale.iter().copied().fold(0.0, f64::max);
        let alike = self.shared_scale(problem.alike);
        let lse = |at: usize| Allowed {
            own: summed(r.accumulate, t, slab.lse[at], slab.lse_sq[at]),
            row: slab.lse_var[at],
            shared: scale * slab.lse_sq[at] + alike * slab.lse[at].powi(2),
        };
        let label = |at: usize| {
            let (x, squares, hits) = (slab.label[at], slab.label_sq[at], slab.hits[at / d]);
            Allowed {
                own: r.label_grad * r.label_grad * squares / 3.0
                    + summed(r.label_scatter, f64::from(hits), x, squares),
                row: self.label_row_scale() * squares,
                shared: self.shared_scale(r.shared_g) * x * x,
            }
        };
        let parts = captured.parts(DK[0], DK[1], |m| rows_of(m, slab.range.clone()));
        for &(stage, ref tensor, _) in captured.of(&DK) {
            let output = unit_of(tensor.dtype);
            let values = rows_of(&matrix(tensor).expect("checked"), slab.range.clone());
            let reference = self.reference_of(stage, &slab.lse, &slab.label, parts.as_ref());
            let allowed = |row: usize, column: usize, x: f64| {
                let at = row * d + column;
                let inner = match (stage, &parts) {
                    (Stage::DkLse, _) => lse(at),
                    (Stage::DkLabel, _) => label(at),
                    (_, Some(parts)) => parts.allowed(self, at),
                    _ => self.both(lse(at), label(at), slab.lse[at], slab.label[at]),
                };
                stored(inner, output, x)
            };
            let index = |row: usize| (slab.range.start + row) as u64;
            let rows =
                Rows { captured: values, reference: &reference, index: &index, repeats: &once };
            findings.merge(stage, Tally::of(&rows, allowed, &findings.bounds.1));
            if stage != Stage::DkLse {
                findings.count_hits(stage, &rows, &allowed, &slab.hits);
            }
        }
    }

    fn judge_dq(
        &self,
        problem: &Problem<'_>,
        dq: &reference::Backward,
        captured: &Captured,
        unit: &Unit,
        emulated: &[policy::DqParts],
        findings: &mut Findings,
    ) {
        let (d, v) = (problem.head.q.cols, problem.head.valid_vocab as f64);
        let r = &self.roundings;
        let lse = |at: usize| Allowed {
            own: summed(r.accumulate, v, dq.dq_lse[at], dq.dq_lse_sq[at]),
            row: dq.dq_lse_var[at] + problem.scale[at / d] * dq.dq_lse[at].powi(2),
            shared: self.shared_scale(problem.alike) * dq.dq_lse[at].powi(2),
        };
        let label = |at: usize| {
            let squared = dq.dq_label[at].powi(2);
            Allowed {
                own: rounded(r.label_grad, dq.dq_label[at]),
                row: self.label_row_scale() * squared,
                shared: self.shared_scale(r.shared_g) * squared,
            }
        };
        let rows: Vec<(Stage, Gathered, f64)> = captured
            .of(&DQ)
            .map(|(stage, tensor, _)| {
                let values = Gathered::new(&matrix(tensor).expect("checked"), &unit.rows);
                (*stage, values, unit_of(tensor.dtype))
            })
            .collect();
        // Tokens of one label and weight take the same row of k times the same g:
        // their label parts are copies, rounding included.
        let of_label = tokens_of_label(problem.head.labels);
        let part = |stage| rows.iter().find(|row| row.0 == stage);
        let parts = part(DQ[0])
            .zip(part(DQ[1]))
            .map(|(a, b)| Parts::new(&a.1.matrix(), &b.1.matrix(), a.2, b.2));
        for (stage, values, output) in &rows {
            let reference = self.reference_of(*stage, &dq.dq_lse, &dq.dq_label, parts.as_ref());
            let allowed = |row: usize, column: usize, x: f64| {
                let at = row * d + column;
                let inner = match (stage, &parts) {
                    (Stage::DqLse, _) => lse(at),
                    (Stage::DqLabel, _) => label(at),
                    (_, Some(parts)) => parts.allowed(self, at),
                    _ => self.both(lse(at), label(at), dq.dq_lse[at], dq.dq_label[at]),
                };
                stored(inner, *output, x)
            };
            let index = |row: usize| unit.rows[row] as u64;
            let repeats = |row: usize| of_label[row];
            let compared = Rows {
                captured: values.matrix(),
                reference: &reference,
                index: &index,
                repeats: &repeats,
            };
            findings.merge(*stage, Tally::of(&compared, allowed, &findings.bounds.0));
            if parts.is_some() && *stage == Stage::Dq {
                continue; // judged from captured parts: the floor is propagated
            }
            for (member, found) in emulated.iter().enumerate() {
                let values = match stage {
                    Stage::DqLse => &found.dq_lse,
                    Stage::DqLabel => &found.dq_label,
                    _ => &found.dq,
                };
                findings.emulated(*stage, member, error_energy(values, &reference, *output));
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // One slab's whole context; a struct would only rename it.
    fn emulate_slab(
        &self,
        problem: &Problem<'_>,
        head: &HeadInputs<'_>,
        slab: &Slab,
        members: &[Member],
        captured: &Captured,
        emulated: &mut Vec<policy::DqParts>,
        findings: &mut Findings,
    ) {
        let d = head.q.cols;
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (lse, g) = (narrow(&problem.lse), narrow(&problem.g));
        let g_label: Vec<f32> = g.iter().map(|g| -g).collect();
        let forced = captured.parts(DK[0], DK[1], |m| rows_of(m, slab.range.clone())).is_some();
        for (number, member) in members.iter().enumerate() {
            let part = policy::backward(
                &member.policy,
                head,
                &lse,
                &g,
                &g_label,
                self.tiles,
                self.progress,
                &mut |block| {
                    let at = block.rows.start * d..block.rows.end * d;
                    for (stage, tensor, _) in captured.of(&DK) {
                        let (values, reference) = match stage {
                            Stage::DkLse => (block.dk_lse, slab.lse[at.clone()].to_vec()),
                            Stage::DkLabel => (block.dk_label, slab.label[at.clone()].to_vec()),
                            _ if forced => continue,
                            _ => (block.dk, sum(&slab.lse[at.clone()], &slab.label[at.clone()])),
                        };
                        if values.is_empty() {
                            continue; // plain never tells the parts apart
                        }
                        let energy = error_energy(values, &reference, unit_of(tensor.dtype));
                        findings.emulated(*stage, number, energy);
                    }
                },
            );
            match emulated.get_mut(number) {
                Some(total) => {
                    add(&mut total.dq_lse, &part.dq_lse);
                    add(&mut total.dq_label, &part.dq_label);
                    add(&mut total.dq, &part.dq);
                }
                None => emulated.push(part),
            }
        }
    }

    fn reference_of(
        &self,
        stage: Stage,
        lse: &[f64],
        label: &[f64],
        parts: Option<&Parts>,
    ) -> Vec<f64> {
        match (stage, parts) {
            (Stage::DkLse | Stage::DqLse, _) => lse.to_vec(),
            (Stage::DkLabel | Stage::DqLabel, _) => label.to_vec(),
            (_, Some(parts)) => sum(&parts.lse, &parts.label),
            _ => sum(lse, label),
        }
    }

    /// Both parts' allowances and what adding them may round.
    fn both(&self, lse: Allowed, label: Allowed, x: f64, y: f64) -> Allowed {
        lse + label + Allowed { own: self.added(x, y), ..Allowed::default() }
    }

    fn report(
        &self,
        findings: Findings,
        captured: &Captured,
        inputs: &MicrobatchInputs,
        unit: &Unit,
        outcome: &mut Outcome,
    ) {
        let names: Vec<String> = members(&self.roundings, self.step.options.plain)
            .into_iter()
            .map(|member| member.name)
            .collect();
        for (stage, tally) in findings.tallies {
            let bound = if DQ.contains(&stage) { &findings.bounds.0 } else { &findings.bounds.1 };
            let excess = tally.excess(bound);
            let of = findings.energies.iter().find(|(of, _)| *of == stage);
            let energies = of.map(|(_, energies)| energies.as_slice()).unwrap_or_default();
            let member =
                |(name, &energy): (&String, &f64)| MemberError { name: name.clone(), energy };
            let members = names.iter().zip(energies).map(member).collect();
            let by_hits = findings.hits.iter().find(|(of, _)| *of == stage);
            let by_hits = by_hits.map(|(_, classes)| classes.clone()).unwrap_or_default();
            let source = captured.source(stage);
            let (microbatch, rank) = (inputs.microbatch, unit.rank);
            outcome.add(
                stage,
                Comparison { microbatch, rank, source, tally, excess, members, by_hits },
            );
        }
    }
}

/// Adds the rounding of the captured dtype itself.
fn stored(inner: Allowed, output: f64, x: f64) -> Allowed {
    Allowed { own: inner.own + rounded(output, x), ..inner }
}

/// For each token, how many tokens have its label.
fn tokens_of_label(labels: &[u32]) -> Vec<f64> {
    let mut counts = std::collections::HashMap::new();
    labels.iter().for_each(|label| *counts.entry(label).or_insert(0.0) += 1.0);
    labels.iter().map(|label| counts[label]).collect()
}

fn sum(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(a, b)| a + b).collect()
}

fn add<T: Copy + std::ops::AddAssign>(total: &mut [T], part: &[T]) {
    total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
}
