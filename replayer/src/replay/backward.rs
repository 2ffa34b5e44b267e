//! Backward stages of one unit: dq and dk, each with its two parts.
//!
//! The vocabulary is walked in slabs: what is held beyond the inputs and the
//! `[T, D]` outputs is a few slabs of `SLAB_BYTES`, whatever V is.

use std::ops::Range;

use super::allowed::{rounded, summed};
use super::forward::{ForwardState, head_inputs};
use super::gather::Gathered;
use super::members::{Member, members};
use super::outcome::{Comparison, HitClass, MemberError, Outcome};
use super::{Replay, Slice};
use crate::assemble::{self, Tensor};
use crate::compare::{Allowed, Bound, Rows, Tally};
use crate::head::roundings::{F32, precision, unit_of};
use crate::head::step::{StepError, matrix, rows_of, vocabulary_slab};
use crate::head::{MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
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

/// The captured tensors of one unit, by stage.
#[derive(Default)]
struct Captured {
    tensors: Vec<(Stage, Tensor, String)>,
}

/// Running comparisons of one unit.
struct Findings {
    bounds: (Bound, Bound),
    tallies: Vec<(Stage, Tally)>,
    energies: Vec<(Stage, Vec<f64>)>,
    hits: Vec<(Stage, Vec<HitClass>)>,
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

const DQ: [Stage; 3] = [Stage::DqLse, Stage::DqLabel, Stage::Dq];
const DK: [Stage; 3] = [Stage::DkLse, Stage::DkLabel, Stage::Dk];

impl Replay<'_> {
    /// Multiply-adds of the whole replay, for the progress bar.
    pub(super) fn work(&self, slices: &[Slice]) -> u64 {
        let members = members(&self.roundings, self.step.options.plain).len() as u64;
        let one = |slice: &Slice| {
            let head = head_inputs(&slice.inputs);
            let forward = reference::forward_work(&head) + 2 * policy::forward_work(&head);
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
        let problem = Problem { head, lse: pick(&forward.lse), scale: pick(&forward.scale), g, alike };
        let findings = self.walk(&problem, &captured, unit, outcome);
        self.report(findings, &captured, inputs, unit, outcome);
        Ok(())
    }

    /// What the dump holds of this unit's gradients.
    fn captured(&self, slice: &Slice, unit: &Unit) -> Result<Captured, StepError> {
        let mut found = Captured::default();
        for stage in DQ.into_iter().chain(DK).filter(|&stage| self.wants(stage)) {
            let role = stage.role().expect("gradients have roles");
            let Some(key) = self.step.find(role, slice.inputs.microbatch) else { continue };
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
            self.emulate_slab(problem, &head, &slab, &members, captured, &mut emulated, &mut findings);
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
            let rows = Rows { captured: values, reference: &reference, index: &index };
            findings.merge(stage, Tally::of(&rows, &allowed, &findings.bounds.1));
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
        let part = |stage| rows.iter().find(|row| row.0 == stage);
        let parts = part(DQ[0]).zip(part(DQ[1])).map(|(a, b)| Parts::new(&a.1.matrix(), &b.1.matrix(), a.2, b.2));
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
            let compared = Rows { captured: values.matrix(), reference: &reference, index: &index };
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

    fn reference_of(&self, stage: Stage, lse: &[f64], label: &[f64], parts: Option<&Parts>) -> Vec<f64> {
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
            let member = |(name, &energy): (&String, &f64)| MemberError { name: name.clone(), energy };
            let members = names.iter().zip(energies).map(member).collect();
            let by_hits = findings.hits.iter().find(|(of, _)| *of == stage);
            let by_hits = by_hits.map(|(_, classes)| classes.clone()).unwrap_or_default();
            let source = captured.source(stage);
            let (microbatch, rank) = (inputs.microbatch, unit.rank);
            outcome.add(stage, Comparison { microbatch, rank, source, tally, excess, members, by_hits });
        }
    }
}

impl Captured {
    fn of<'c>(&'c self, stages: &'c [Stage]) -> impl Iterator<Item = &'c (Stage, Tensor, String)> {
        self.tensors.iter().filter(|(stage, _, _)| stages.contains(stage))
    }

    fn source(&self, stage: Stage) -> String {
        let found = self.tensors.iter().find(|(of, _, _)| *of == stage);
        found.map(|(_, _, source)| source.clone()).unwrap_or_default()
    }

    /// Both captured parts, when both are there.
    fn parts(&self, one: Stage, other: Stage, cut: impl for<'m> Fn(&Matrix<'m>) -> Matrix<'m>) -> Option<Parts> {
        let find = |stage| self.tensors.iter().find(|(of, _, _)| *of == stage);
        let (one, other) = find(one).zip(find(other))?;
        let (a, b) = matrix(&one.1).zip(matrix(&other.1))?;
        Some(Parts::new(&cut(&a), &cut(&b), unit_of(one.1.dtype), unit_of(other.1.dtype)))
    }
}

/// Captured parts of a sum, widened, with the unit roundoffs of their dtypes.
struct Parts {
    lse: Vec<f64>,
    label: Vec<f64>,
    units: (f64, f64),
}

impl Parts {
    fn new(lse: &Matrix<'_>, label: &Matrix<'_>, lse_unit: f64, label_unit: f64) -> Parts {
        let wide = |m: &Matrix<'_>| (0..m.len()).map(|i| m.get_f64(i)).collect();
        Parts { lse: wide(lse), label: wide(label), units: (lse_unit, label_unit) }
    }

    /// The job may have added the parts before it rounded them to what was
    /// captured, or after.
    fn allowed(&self, replay: &Replay<'_>, at: usize) -> Allowed {
        let (x, y) = (self.lse[at], self.label[at]);
        let captured = rounded(self.units.0, x) + rounded(self.units.1, y);
        Allowed { own: captured + replay.added(x, y), ..Allowed::default() }
    }
}

impl Findings {
    fn merge(&mut self, stage: Stage, tally: Tally) {
        match self.tallies.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, total)) => total.merge(tally),
            None => self.tallies.push((stage, tally)),
        }
    }

    fn emulated(&mut self, stage: Stage, member: usize, energy: f64) {
        let at = match self.energies.iter().position(|(of, _)| *of == stage) {
            Some(at) => at,
            None => {
                self.energies.push((stage, Vec::new()));
                self.energies.len() - 1
            }
        };
        let energies = &mut self.energies[at].1;
        energies.resize(energies.len().max(member + 1), 0.0);
        energies[member] += energy;
    }

    /// Error by label hits, in classes that double: 0, 1, 2, 4, 8, ...
    fn count_hits(
        &mut self,
        stage: Stage,
        rows: &Rows<'_>,
        allowed: &dyn Fn(usize, usize, f64) -> Allowed,
        hits: &[u32],
    ) {
        let at = match self.hits.iter().position(|(of, _)| *of == stage) {
            Some(at) => at,
            None => {
                self.hits.push((stage, Vec::new()));
                self.hits.len() - 1
            }
        };
        let classes = &mut self.hits[at].1;
        for (row, &n) in hits.iter().enumerate() {
            let class = (u32::BITS - n.leading_zeros()) as usize;
            while classes.len() <= class {
                let hits_from = if classes.is_empty() { 0 } else { 1 << (classes.len() - 1) };
                classes.push(HitClass { hits_from, ..HitClass::default() });
            }
            classes[class].rows += 1;
            for column in 0..rows.captured.cols {
                let at = row * rows.captured.cols + column;
                let x = rows.reference[at];
                let inner = allowed(row, column, x);
                classes[class].error_energy += (rows.captured.get_f64(at) - x).powi(2);
                classes[class].expected_energy += inner.total();
            }
        }
    }
}

/// Adds the rounding of the captured dtype itself.
fn stored(inner: Allowed, output: f64, x: f64) -> Allowed {
    Allowed { own: inner.own + rounded(output, x), ..inner }
}

/// Squared error of emulated values once they are rounded to the captured dtype.
fn error_energy(values: &[f32], reference: &[f64], output: f64) -> f64 {
    let precision = precision(output.max(F32));
    let one = |(&x, r): (&f32, &f64)| (f64::from(precision.round(x)) - r).powi(2);
    values.iter().zip(reference).map(one).sum()
}

fn sum(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(a, b)| a + b).collect()
}

fn add<T: Copy + std::ops::AddAssign>(total: &mut [T], part: &[T]) {
    total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
}
