//! The errors of the emulated policies over a sample of the rows, where all would take long.
//!
//! A policy emulates one way to compute the head in few bits, and there are up to six of them.
//! Each makes four matrix products in f32; the reference makes eight in f64, once. So policies
//! over all rows would take longer than the reference. Only the size of their errors is wanted,
//! which some rows tell as well as all: rows of dq of some tokens against all classes, and rows
//! of dk of some classes over all tokens, each with the same bits as in the whole. Tokens are
//! drawn by the size of their entries of dlogits, classes by how often they are a label. Rows
//! differ much in size and little in how their error compares with what the declared precision
//! explains, so the energy of all is taken as (a ratio estimate) `Σ x · Σ w e / Σ w x`, `x` what
//! is explained of a row, `e` its error's energy and `w` how many rows a drawn one stands for.

use std::ops::Range;

use super::Slice;
use super::backward::{Problem, sum};
use super::classes::OfClasses;
use super::context::Replay;
use super::dq::member_values;
use super::findings::{Captured, Findings, error_energy};
use super::forward::ForwardState;
use super::lists::{Lists, put_block};
use super::loss::Upstream;
use super::members::Member;
use super::sample::{by_hits, by_size};
use super::slab::Slab;
use crate::compare::RowTally;
use crate::head::step::StepError;
use crate::head::{Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::reference::Backward;

/// Elements of dq that are drawn at least, and tokens.
const OF_DQ: (usize, usize) = (1 << 17, 128);
/// Elements of dk that are drawn of the classes that are labels about equally often, and classes.
const OF_DK: (usize, usize) = (1 << 15, 32);
/// Most of the work over all rows that a sample may take: else all rows are taken.
const WORTH_IT: f64 = 0.5;
/// What is drawn from: the same rows every time.
const SEED: u64 = 0;

/// Some rows, ascending, and how many each stands for.
pub(super) struct Drawn {
    pub(super) rows: Vec<usize>,
    pub(super) weights: Vec<f64>,
}

/// What is gathered of one stage.
#[derive(Default)]
struct Sums {
    /// What is explained of all rows.
    all: f64,
    /// The same of the drawn ones, each for those that it stands for.
    drawn: f64,
    /// Errors of each member in the drawn rows, likewise.
    energies: Vec<f64>,
}

/// The drawn rows of one unit, and what was found of them so far.
pub(super) struct Floors {
    tokens: Drawn,
    classes: Drawn,
    depth: usize,
    /// Rows of the drawn classes as each member has them.
    emulated: Vec<Lists>,
    sums: Vec<(Stage, Sums)>,
}

impl Drawn {
    /// Those in a range: place among the drawn, row from the range's start on, weight.
    fn within(&self, range: &Range<usize>) -> Vec<(usize, usize, f64)> {
        let [from, to] =
            [range.start, range.end].map(|end| self.rows.partition_point(|&r| r < end));
        (from..to)
            .map(|place| (place, self.rows[place] - range.start, self.weights[place]))
            .collect()
    }
}

impl Floors {
    fn of(&mut self, stage: Stage) -> &mut Sums {
        let at = self.sums.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
            self.sums.push((stage, Sums::default()));
            self.sums.len() - 1
        });
        &mut self.sums[at].1
    }

    fn add(&mut self, stage: Stage, member: usize, energy: f64) {
        let energies = &mut self.of(stage).energies;
        energies.resize(energies.len().max(member + 1), 0.0);
        energies[member] += energy;
    }

    /// Takes in what is explained of rows of a stage from `first` on.
    pub(super) fn expect(&mut self, stage: Stage, first: usize, rows: &[RowTally]) {
        let drawn = if stage.is_of_q() { &self.tokens } else { &self.classes };
        let drawn = drawn.within(&(first..first + rows.len()));
        let explained = |row: &RowTally| row.budget().expected();
        let sums = self.of(stage);
        sums.all += rows.iter().map(explained).sum::<f64>();
        sums.drawn += drawn.iter().map(|&(_, row, w)| w * explained(&rows[row])).sum::<f64>();
    }

    /// Compares the drawn classes of a slab, and gives the slab's `emulated` the norm that the
    /// member which rounds most is expected to have.
    pub(super) fn of_slab(&mut self, slab: &mut Slab, captured: &Captured) {
        let forced = captured.parts(&Stage::OF_K, 0..0).is_some();
        slab.emulated = sum(&slab.lse, &slab.label);
        let emulated = std::mem::take(&mut self.emulated);
        for (place, row, weight) in self.classes.within(&slab.range) {
            for (number, lists) in emulated.iter().enumerate() {
                for (stage, values) in lists {
                    let width = if *stage == Stage::Dbias { 1 } else { self.depth };
                    let values = &values[place * width..(place + 1) * width];
                    let reference = slab.reference(*stage, row..row + 1);
                    if *stage == Stage::Dk && number + 1 == emulated.len() {
                        let to = &mut slab.emulated[row * width..(row + 1) * width];
                        stand_for(to, values, weight);
                    }
                    let judged = captured.stage(*stage).filter(|_| *stage != Stage::Dk || !forced);
                    if let Some(gradient) = judged {
                        let energy = error_energy(values, &reference, gradient.stored);
                        self.add(*stage, number, weight * energy);
                    }
                }
            }
        }
        self.emulated = emulated;
    }

    /// The errors of all rows, by stage and member.
    fn estimates(self) -> impl Iterator<Item = (Stage, Vec<f64>)> {
        self.sums.into_iter().filter(|(_, sums)| !sums.energies.is_empty()).map(|(stage, sums)| {
            let ratio = sums.all / sums.drawn;
            // What is explained of a row may be infinite, and nothing.
            let ratio = if ratio.is_finite() { ratio } else { 1.0 };
            (stage, sums.energies.into_iter().map(|energy| ratio * energy).collect())
        })
    }
}

/// Makes the squares of a row those of the emulated values, and of as many others as the row
/// stands for whose squares are off by as much.
fn stand_for(row: &mut [f64], emulated: &[f64], weight: f64) {
    let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
    let (exact, emulated) = (square(row), square(emulated));
    if exact > 0.0 {
        let factor = (1.0 + weight * (emulated / exact - 1.0)).max(0.0).sqrt();
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// What a token's rounded entries of dlogits come to, about: the square of the label's entry, and
/// that of all others as if one class had all that the label leaves. Tokens' weights may differ by
/// thousands, and then few tokens hold nearly all of dq's error.
fn sizes(problem: &Problem<'_>, confidence: &[f64]) -> Vec<f64> {
    let cotangents = problem.cotangents();
    let of = |(token, &p): (usize, &f64)| {
        let own = cotangents.of_token(token);
        own.entry(p, true).powi(2) + own.dense(1.0 - p).powi(2)
    };
    confidence.iter().enumerate().map(of).collect()
}

/// The classes that stand for all, by how often they are labels.
fn of_classes(head: &HeadInputs<'_>) -> Drawn {
    let mut hits = vec![0; head.valid_vocab];
    for &label in head.labels.iter().filter(|&&label| label != IGNORED) {
        hits.get_mut(label as usize).into_iter().for_each(|hits| *hits += 1);
    }
    let (rows, weights) = by_hits(&hits, rows(OF_DK, head), SEED);
    Drawn { rows, weights }
}

/// Rows that hold so many elements, and so many rows, at least.
fn rows((elements, least): (usize, usize), head: &HeadInputs<'_>) -> usize {
    (elements / head.q.cols.max(1)).max(least)
}

/// Share of the work over all rows that so many tokens and classes take.
fn share((tokens, classes): (usize, usize), head: &HeadInputs<'_>) -> f64 {
    let of = |part: usize, all: usize| part.min(all) as f64 / all.max(1) as f64;
    of(tokens, head.q.rows) + of(classes, head.k.rows)
}

impl Replay<'_> {
    /// Share of all rows' work that emulating the policies takes.
    pub(super) fn share_emulated(&self, head: &HeadInputs<'_>) -> f64 {
        let share = share((rows(OF_DQ, head), of_classes(head).rows.len()), head);
        if self.executor.emulates_samples() && share <= WORTH_IT { share } else { 1.0 }
    }
}

impl Replay<'_> {
    /// Draws the rows of a large problem, and emulates those of dk; `None`: all rows are taken.
    pub(super) fn floors(
        &self,
        problem: &Problem<'_>,
        unit: &Unit,
        state: &ForwardState,
        members: &[Member],
    ) -> Result<Option<Floors>, StepError> {
        let head = &problem.head;
        if !self.executor.emulates_samples() || problem.any_open() || head.q.rows == 0 {
            return Ok(None);
        }
        let sizes = sizes(problem, &state.confidence(unit));
        let (drawn, weights) = by_size(&sizes, rows(OF_DQ, head), SEED);
        let tokens = Drawn { rows: drawn, weights };
        let classes = of_classes(head);
        if !(share((tokens.rows.len(), classes.rows.len()), head) <= WORTH_IT) {
            return Ok(None);
        }
        let of_classes = OfClasses::new(head, &classes.rows);
        let over = of_classes.head(head);
        let upstream = (&problem.lse[..], &problem.cotangents());
        let mut emulated = Vec::new();
        for member in members {
            let mut lists = Lists::new();
            let take = &mut |block: crate::kernels::policy::DkParts<'_>| {
                put_block(&mut lists, &block);
            };
            self.executor.policy_backward(&member.policy, &over, upstream, take)?;
            emulated.push(lists);
        }
        let depth = head.q.cols;
        Ok(Some(Floors { tokens, classes, depth, emulated, sums: Vec::new() }))
    }

    /// Emulates the drawn tokens' rows of dq, and ends with the errors of all rows.
    pub(super) fn finish_floors(
        &self,
        (slice, unit): (&Slice, &Unit),
        before: (&ForwardState, &Upstream),
        members: &[Member],
        (exact, captured): (&Backward, &Captured),
        findings: &mut Findings,
    ) -> Result<(), StepError> {
        let Some(mut floors) = findings.floors.take() else { return Ok(()) };
        let forced = captured.parts(&Stage::OF_Q, 0..0).is_some();
        let rows = floors.tokens.rows.iter().map(|&row| unit.rows[row]).collect();
        let drawn = Unit { ranks: unit.ranks.clone(), rows };
        let depth = floors.depth;
        let judged = |stage: &Stage| *stage != Stage::Dq || !forced;
        self.try_problem(slice, &drawn, before, &mut |problem| {
            for (number, member) in members.iter().enumerate() {
                let upstream = (&problem.lse[..], &problem.cotangents());
                let found = self.executor.policy_backward(
                    &member.policy,
                    &problem.head,
                    upstream,
                    &mut |_| {},
                )?;
                for gradient in captured.of(&Stage::OF_Q).filter(|gradient| judged(&gradient.stage))
                {
                    let values = member_values(&found, gradient.stage);
                    let mut energy = 0.0;
                    for (row, (&at, weight)) in values
                        .chunks(depth)
                        .zip(floors.tokens.rows.iter().zip(&floors.tokens.weights))
                    {
                        let at = at * depth..(at + 1) * depth;
                        let reference = match gradient.stage {
                            Stage::DqLse => exact.dq_lse[at].to_vec(),
                            Stage::DqLabel => exact.dq_label[at].to_vec(),
                            _ => sum(&exact.dq_lse[at.clone()], &exact.dq_label[at]),
                        };
                        energy += weight * error_energy(row, &reference, gradient.stored);
                    }
                    // A plain policy never tells the parts apart.
                    if !values.is_empty() {
                        floors.add(gradient.stage, number, energy);
                    }
                }
            }
            Ok(())
        })?;
        for (stage, energies) in floors.estimates() {
            findings.energies.push((stage, energies));
            findings.sampled.push(stage);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::stand_for;

    #[test]
    fn a_row_that_stands_for_two_has_what_both_are_off_by() {
        let square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
        let (mut drawn, other) = ([3.0, -4.0], [3.0, -4.0]);
        stand_for(&mut drawn, &[3.3, -4.4], 2.0);
        assert!((square(&drawn) + square(&other) - 2.0 * 1.21 * 25.0).abs() < 1e-12);
        let mut nothing = [0.0, 0.0];
        stand_for(&mut nothing, &[1.0, 0.0], 9.0);
        assert_eq!(nothing, [0.0, 0.0]);
    }
}
