//! dq, dk and the gradient of the bias, one vocabulary block after another, in bounded memory.

use super::label::{LabelPath, Parted};
use super::plane::{Elements, adds_label, transposed};
use super::sum::{Running, add_rounded};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::policy::internal::{Hits, Upstream};
use crate::kernels::policy::{DkParts, DqParts, Path, Policy, Sum};
use crate::kernels::round::Precision;
use crate::kernels::tiles::{Progress, Tiles, spans};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of sums `[rows, lanes]`. Each is either one running sum over all tiles, or a total to which
/// the sum of every tile is added.
struct Rows {
    running: Vec<Running>,
    lanes: usize,
    base: Precision,
    /// What a tile's sum is rounded to before it is added, what the total is rounded to afterwards,
    /// and the totals.
    totals: Option<((Precision, Precision), Vec<f64>)>,
}

impl Rows {
    fn new(
        policy: &Policy,
        sum: Sum,
        shape: (usize, usize),
        between: Option<(Precision, Precision)>,
    ) -> Self {
        let (rows, lanes) = shape;
        let running = vec![Running::new(sum, policy.product, lanes); rows];
        let base = match sum.precision {
            Precision::F64 => Precision::F64,
            _ => Precision::F32,
        };
        Rows { running, lanes, base, totals: between.map(|to| (to, vec![0.0; rows * lanes])) }
    }

    /// Calls `add` for each of some rows, so that it adds the row's addends of a tile; `add` gets
    /// the index of the row within `rows`.
    fn tile(&mut self, rows: Range<usize>, add: impl Fn(usize, &mut Running, &mut [f64]) + Sync) {
        let Rows { running, lanes, base, totals } = self;
        let scratch = || vec![0.0; *lanes];
        let running = running[rows.clone()].par_iter_mut().enumerate();
        match totals {
            _ if *lanes == 0 => {}
            None => running.for_each_init(scratch, |scratch, (row, sum)| add(row, sum, scratch)),
            Some(((part, rounding), totals)) => {
                let totals = &mut totals[rows.start * *lanes..rows.end * *lanes];
                let totals = totals.par_chunks_mut(*lanes);
                running.zip(totals).for_each_init(scratch, |scratch, ((row, sum), total)| {
                    add(row, sum, scratch);
                    sum.finish(scratch);
                    sum.reset();
                    part.round_slice64(scratch);
                    add_rounded(*rounding, *base, total, scratch);
                });
            }
        }
    }

    /// The sums, `[rows, lanes]`.
    fn finish(self) -> Vec<f64> {
        let Rows { running, lanes, totals, .. } = self;
        totals.map_or_else(
            || {
                let mut out = vec![0.0; running.len() * lanes];
                let rows = out.par_chunks_mut(lanes.max(1)).zip(&running);
                rows.for_each(|(out, running)| running.finish(out));
                out
            },
            |(_, totals)| totals,
        )
    }
}

/// See `policy::backward`.
pub(in crate::kernels) fn backward(
    policy: &Policy,
    inputs: &HeadInputs,
    upstream: Upstream<f64>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkParts),
) -> DqParts {
    let elements = Elements::new(policy, inputs);
    let hits = Hits::new(inputs.labels);
    let mut label_g = vec![0.0; inputs.q.rows];
    let [between, _] = policy.between();
    let mut dq = Rows::new(policy, policy.sums.dq, (inputs.q.rows, inputs.q.cols), between);
    for cols in policy.vocab_spans(inputs.valid_vocab, tiles.vocab) {
        let block = Block { elements: &elements, upstream, cols: cols.clone(), tiles };
        let (dk, dbias) = block.run(&mut dq, &mut label_g, progress);
        finish_block(
            &LabelPath { elements: &elements, label_g: &label_g },
            &hits,
            cols,
            (dk, dbias),
            on_dk,
        );
    }
    let label_path = LabelPath { elements: &elements, label_g: &label_g };
    for rows in spans(inputs.k.rows - inputs.valid_vocab, tiles.vocab) {
        let rows = inputs.valid_vocab + rows.start..inputs.valid_vocab + rows.end;
        let zeros = (vec![0.0; rows.len() * inputs.k.cols], vec![0.0; rows.len()]);
        finish_block(&label_path, &hits, rows, zeros, on_dk);
    }
    finish_dq(&label_path, dq.finish())
}

/// All tokens against one block of the vocabulary.
struct Block<'a> {
    elements: &'a Elements<'a>,
    upstream: Upstream<'a, f64>,
    cols: Range<usize>,
    tiles: Tiles,
}

impl Block<'_> {
    /// Computes dk `[cols, D]` and the gradient of the bias `[cols]`, and adds to dq.
    fn run(
        &self,
        dq: &mut Rows,
        label_g: &mut [f64],
        progress: &dyn Progress,
    ) -> (Vec<f64>, Vec<f64>) {
        let Elements { policy, inputs, .. } = *self.elements;
        let (depth, width) = (inputs.q.cols, self.cols.len());
        let k = self.elements.panel(&inputs.k, self.cols.clone());
        let keys = transposed(&k, depth);
        let k = narrowed(policy.operand, k);
        let [_, between] = policy.between();
        let mut dk = Rows::new(policy, policy.sums.dk, (width, depth), between);
        let mut dbias = Rows::new(policy, policy.sums.dk, (1, width), between);
        let mut tile = Vec::new();
        for span in policy.token_spans(inputs.q.rows, self.tiles.tokens) {
            let q = self.elements.panel(&inputs.q, span.clone());
            tile.resize(span.len() * width, 0.0);
            let (place, label_g) = ((span.clone(), self.cols.clone()), &mut label_g[span.clone()]);
            self.elements.logits(&q, &keys, place.clone(), &mut tile);
            let q = narrowed(policy.operand, q);
            let upstream = self.upstream.of(span.clone());
            self.elements.dlogits(adds_label(policy), &mut tile, place, upstream, label_g);
            dq.tile(span.clone(), |token, sum, scratch| {
                for (v, &g) in tile[token * width..][..width].iter().enumerate() {
                    sum.add_products(g, &k[v * depth..][..depth], scratch);
                }
            });
            dk.tile(0..width, |v, sum, scratch| {
                for token in 0..span.len() {
                    let q = &q[token * depth..][..depth];
                    sum.add_products(tile[token * width + v], q, scratch);
                }
            });
            dbias.tile(0..1, |_, sum, scratch| {
                for row in tile.chunks(width) {
                    scratch.copy_from_slice(row);
                    sum.add(scratch);
                }
            });
            progress.advance(3 * (span.len() * width * depth) as u64);
        }
        (dk.finish(), dbias.finish())
    }
}

/// A panel rounded to the precision of an operand of the gradients' products.
fn narrowed(to: Precision, mut panel: Vec<f64>) -> Vec<f64> {
    to.round_slice64(&mut panel);
    panel
}

fn finish_block(
    label_path: &LabelPath,
    hits: &Hits,
    rows: Range<usize>,
    (mut dk, mut dbias): (Vec<f64>, Vec<f64>),
    on_dk: &mut dyn FnMut(DkParts),
) {
    let policy = label_path.elements.policy;
    let (mut dk_lse, mut dk_label) = (Vec::new(), Vec::new());
    if policy.path == Path::Fused {
        (dk_lse, dk_label) = (vec![0.0; dk.len()], vec![0.0; dk.len()]);
        let parted = Parted { sum: &mut dk, lse: &mut dk_lse, label: &mut dk_label };
        label_path.finish_dk(hits, rows.clone(), parted);
        label_path.finish_dbias(hits, rows.clone(), &mut dbias);
    } else {
        policy.output.round_slice64(&mut dk);
    }
    policy.output.round_slice64(&mut dbias);
    on_dk(DkParts { rows, dk_lse: &dk_lse, dk_label: &dk_label, dk: &dk, dbias: &dbias });
}

fn finish_dq(label_path: &LabelPath, mut dq: Vec<f64>) -> DqParts {
    let policy = label_path.elements.policy;
    let (mut dq_lse, mut dq_label) = (Vec::new(), Vec::new());
    if policy.path == Path::Fused {
        (dq_lse, dq_label) = (vec![0.0; dq.len()], vec![0.0; dq.len()]);
        let parted = Parted { sum: &mut dq, lse: &mut dq_lse, label: &mut dq_label };
        label_path.finish_dq(parted);
    } else {
        policy.output.round_slice64(&mut dq);
    }
    DqParts { dq_lse, dq_label, dq }
}
