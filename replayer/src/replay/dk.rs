//! dk and dbias of one unit: reference, allowance and comparison, one slab of the
//! vocabulary at a time.

use std::ops::Range;

use super::captured_gradients::{Captured, Gradient, reference_of};
use super::correlated_classes::shared_by_tokens;
use super::correlated_errors::{nearly_equal, spread};
use super::elementwise::scale;
use super::findings::Findings;
use super::judge::Judge;
use super::maps::Drawn;
use super::problem::Problem;
use super::rounding_variance::rounded;
use super::slab::Slab;
use super::world::{Expectation, StagePlace};
use crate::compare::{Allowed, ONE_ROUNDING, Rows};
use crate::head::Stage;
use crate::head::step::rows_of;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::policy::{Path, Policy};

/// Roundings of an entry that may err to one side at once, over the root of their variances'
/// sum: those of four operations at most.
const SEVERAL: f64 = 2.0;

impl Judge<'_> {
    pub(super) fn judge_dk(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        (captured, stages): (&Captured, &[Stage]),
        findings: &mut Findings,
    ) {
        let d = problem.head.q.cols;
        let parts = captured.parts(&Stage::OF_K, slab.range.clone());
        let adding = self.adding();
        let bound = self.bound(problem.head.k.rows, d);
        for gradient in captured.of(stages) {
            let stage = gradient.stage;
            let forced = stage == Stage::Dk && parts.is_some();
            let alike = classes_alike(&problem.head, &slab.range);
            let exact = reference_of(stage, &slab.lse, &slab.label, parts.as_ref());
            let reference = self.supposed(problem, slab, (gradient, forced), exact);
            let first = slab.range.start * d;
            let (factor, again) = self.factor(problem, stage);
            let allowances = self.of_dk(problem, slab, stage);
            let joined = self.joined_by_ranks(slab, captured, gradient);
            let at_stage = StagePlace { stage, microbatch: problem.microbatch, rank: problem.rank };
            let class = |row: usize| match &slab.classes {
                Some(classes) => classes[row],
                None => slab.range.start + row,
            };
            let allowed = |row: usize, column: usize, x: f64| {
                let element = row * d + column;
                let inner = match &parts {
                    Some(parts) if forced => parts.allowed(&adding, element),
                    _ => allowances.of(row, column, &slab.sums(&problem.head, element)),
                };
                let lost = if forced { 0.0 } else { slab.lost(stage, element) };
                let noise = self.world.noise(at_stage, class(row), column);
                let (own, certain) = (inner.own + noise, inner.certain + lost);
                let inner = Allowed { own, certain, ..inner }.times(factor);
                let joined = joined.get(element).copied().unwrap_or(0.0);
                gradient.storing_joined(first + element, x, (again, joined), inner)
            };
            let index = |row: usize| (slab.range.start + row) as u64;
            let captured = rows_of(&gradient.matrix(), slab.range.clone());
            let repeats = |_| alike;
            let rows = Rows { captured, reference: &reference, index: &index, repeats: &repeats };
            let there = slab.looked.iter().find(|(of, _)| *of == stage);
            let here = there.is_none().then(|| rows.looked_at(allowed, &bound));
            let looked = there.map(|(_, looked)| looked).or(here.as_ref()).expect("one of both");
            findings.expect(stage, slab.range.start, looked);
            let mut tally = rows.tally(looked, &bound);
            if let (Some(stored), None) = (gradient.stored, there) {
                tally.stored_in(stored, &reference);
            }
            findings.merge(stage, tally, bound);
            if let Some(squares) = slab.uncertain_squares(stage).filter(|_| !forced) {
                findings.add_uncertain(stage, squares);
            }
            if stage != Stage::DkLse {
                findings.count_hits(stage, looked, &slab.hits);
            }
            let (first, all) = (slab.range.start, problem.head.k.rows);
            let (rows, allowed, bound) = (&rows, &allowed, &bound);
            findings.draw(self.plan.draw, &Drawn { stage, first, all, rows, allowed, bound });
        }
    }

    /// Of a slab's elements of a dk that is a sum over ranks, the variance of what each rank may
    /// have rounded of the two parts that it joined; empty where none did. A rank's parts may be
    /// larger than its dk, and larger than those of the sum, where they cancel.
    pub(super) fn joined_by_ranks(
        &self,
        slab: &Slab,
        captured: &Captured,
        gradient: &Gradient,
    ) -> Vec<f64> {
        if let Some(to) = gradient.apart {
            return slab.rounded_by_ranks(to);
        }
        let elements = slab.range.start * slab.columns()..slab.range.end * slab.columns();
        let squares =
            |gradient: &Gradient| gradient.squares(elements.clone()).filter(|(n, _)| *n > 1.0);
        let sum =
            (gradient.stage == Stage::Dk && !self.plan.whole_entries).then(|| squares(gradient));
        let Some((n, both)) = sum.flatten() else { return Vec::new() };
        let label = captured.stage(Stage::DkLabel).and_then(squares);
        let joined = self.adding();
        let each = |(index, &both): (usize, &f64)| {
            let hits = f64::from(slab.hits[index / slab.columns()]);
            // By Cauchy and Schwarz, of the sums of some tokens' addends each.
            let label =
                label.as_ref().map_or(hits * slab.label_sq[index], |(_, values)| values[index]);
            // (a + b)² <= 2 (a² + b²), of what is left when the label part is taken off.
            let dense = if label == 0.0 { both } else { 2.0 * (both + label) };
            joined.of_addends(n, [dense, label]).own
        };
        both.iter().enumerate().map(each).collect()
    }

    /// What the world says of a stage's rows: its policy's values where it has one, and
    /// what it changes last.
    fn supposed(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        (gradient, forced): (&Gradient, bool),
        exact: Vec<f64>,
    ) -> Vec<f64> {
        let stage = gradient.stage;
        let emulated = slab.instead.iter().find(|(of, _)| *of == stage && !forced);
        let store = |&x: &f64| gradient.stored.map_or(x, |precision| precision.round64(x));
        let mut values = exact;
        let range: Vec<usize> = slab.range.clone().collect();
        let rows = slab.classes.as_deref().unwrap_or(&range);
        let columns = values.len() / rows.len().max(1);
        let place = StagePlace { stage, microbatch: problem.microbatch, rank: problem.rank };
        if let Some((_, emulated)) = emulated {
            self.put_emulated((place, rows), emulated, &mut values);
            values.iter_mut().for_each(|x| *x = store(x));
        }
        let factor = self.world.scale(place);
        scale(&mut values, factor);
        self.world.expected(&mut Expectation { place, rows, columns, values: &mut values });
        values
    }

    /// The gradient of the bias: dlogits summed over the tokens.
    pub(super) fn judge_dbias(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        captured: &Captured,
        findings: &mut Findings,
    ) {
        let Some(gradient) = captured.stage(Stage::Dbias) else { return };
        let Policy { sums, dlogits, label_grad, path, .. } = self.plan.roundings.widest;
        let t = problem.head.q.rows;
        let square = |x: f64| x * x;
        let entry = square(dlogits.unit_roundoff().max(label_grad.unit_roundoff())) / 3.0;
        let tiles = t.div_ceil(self.plan.roundings.tiles.tokens.max(1));
        let bound = self.bound(problem.head.k.rows, 1);
        let (factor, again) = self.factor(problem, Stage::Dbias);
        let tokens = problem.head.copies.map_or(t as f64, |copies| copies.iter().sum());
        let alike = self.alike_in_classes(problem, slab.range.clone());
        let allowed = |row: usize, _, supposed: f64| {
            let squares = slab.dbias_sq[row];
            // Equal errors of all tokens: Σ √variance, squared, is n Σ variance at most.
            let together = t as f64 * (slab.dbias_var[row] + entry * squares);
            let one_side = alike.get(row).map_or(0.0, |share| share * together);
            // Copies of a token lose alike below a format's smallest step, and so may all.
            let floor = square(problem.entry_floor);
            let x = slab.dbias[row];
            let inner = Allowed {
                own: slab.dbias_var[row]
                    + entry * squares
                    + tokens * floor
                    + sums.dk.variance(t as f64, x, squares)
                    + self.joined(tiles, path == Path::Chunked, x, squares)
                    + rounded(self.plan.roundings.widest.parts, x),
                shared: (problem.largest_scale() + self.label_row_scale() + problem.constants)
                    * squares
                    + square(t as f64) * floor
                    + nearly_equal(sums.dk, t as f64, spread(t as f64, x, squares)) * x * x
                    + self.shared_scale(problem.alike.max(self.plan.roundings.shared_g())) * x * x,
                certain: slab.lost(Stage::Dbias, row),
                ..Allowed::default()
            }
            .with_few(one_side, SEVERAL * (ONE_ROUNDING * together).sqrt());
            let inner = inner.times(factor);
            gradient.storing(slab.range.start + row, supposed, again, inner)
        };
        let index = |row: usize| (slab.range.start + row) as u64;
        let captured = rows_of(&gradient.matrix(), slab.range.clone());
        let reference = self.supposed(problem, slab, (gradient, false), slab.dbias.clone());
        let alike = classes_alike(&problem.head, &slab.range);
        let repeats = |_| alike;
        let rows = Rows { captured, reference: &reference, index: &index, repeats: &repeats };
        let looked = rows.looked_at(allowed, &bound);
        findings.expect(Stage::Dbias, slab.range.start, &looked);
        findings.merge(Stage::Dbias, rows.tally(&looked, &bound), bound);
        if let Some(squares) = slab.uncertain_squares(Stage::Dbias) {
            findings.add_uncertain(Stage::Dbias, squares);
        }
    }

    /// Share of a class's roundings that its tokens share, of each class of the slab.
    fn alike_in_classes(&self, problem: &Problem<'_>, classes: Range<usize>) -> Vec<f64> {
        let Policy { logits, p, dlogits, .. } = self.plan.roundings.widest;
        let of_p = p.unit_roundoff().max(dlogits.unit_roundoff());
        let steps = (2.0 * logits.unit_roundoff(), 2.0 * of_p);
        let g = problem.cotangents().lse;
        shared_by_tokens(&problem.head, (&problem.lse, classes), |t| g[t] != 0.0, steps)
    }
}

/// How many classes have one error: all where k is 0, as at the first step of a job that starts
/// there, because then p is the same for each of them. Looks at k's rows of a slab alone, and
/// only where the logits of all tokens are alike.
fn classes_alike(head: &HeadInputs<'_>, slab: &Range<usize>) -> f64 {
    let all = |copies: &[f64]| copies.first().is_some_and(|&n| n >= copies.len() as f64);
    let alike = head.copies.is_some_and(all) && rows_of(&head.k, slab.clone()).is_zero();
    if alike { head.k.rows.max(1) as f64 } else { 1.0 }
}
