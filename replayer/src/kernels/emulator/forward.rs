//! lse, label logits and sums of logits.
//!
//! The fused path sums online, tile by tile. The other paths first find the max of each row in a
//! pass of its own, and sum the exponentials in a second pass.

use super::plane::{Elements, transposed};
use super::sum::{Running, operation};
use crate::kernels::formula::shift;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::policy::{Path, Policy, PolicyForward};
use crate::kernels::tiles::{Progress, Tiles, spans};
use rayon::prelude::*;
use std::ops::Range;

/// Running max and sums of one token.
struct Row {
    max: f64,
    /// Sum of `exp(logit - shift(max))`: on the fused path over the tiles so far, else set by
    /// `finish`.
    sum: f64,
    logit_sum: f64,
    /// Running sum of exponentials, over the whole row, or on the fused path over one tile.
    exponentials: Running,
    logits: Running,
    label_logit: f64,
}

/// Largest of a row and what came before; NaN is passed over.
fn larger(max: f64, row: impl Iterator<Item = f64>) -> f64 {
    row.fold(max, |max, x| if x > max { x } else { max })
}

impl Row {
    fn new(policy: &Policy) -> Self {
        let running = Running::new(policy.sums.lse, policy.product, 1);
        Row {
            max: f64::NEG_INFINITY,
            sum: 0.0,
            logit_sum: 0.0,
            exponentials: running.clone(),
            logits: running,
            label_logit: 0.0,
        }
    }

    /// Adds the exponentials of some logits to their running sum, with the max as it is.
    fn add(&mut self, elements: &Elements, row: impl Iterator<Item = f64>) {
        let shift = shift(self.max);
        for x in row {
            self.exponentials.push(elements.operation(libm::exp(elements.operation(x - shift))));
        }
    }

    /// Adds one tile online: raises the max, rescales the earlier sum to it, then adds the tile's
    /// own sum.
    fn merge(&mut self, elements: &Elements, row: impl Iterator<Item = f64> + Clone) {
        let precision = elements.policy.sums.lse.precision;
        let max = larger(self.max, row.clone());
        let (old, new) = (shift(self.max), shift(max));
        if self.max > f64::NEG_INFINITY && old != new {
            let factor = elements.operation(libm::exp(elements.operation(old - new)));
            self.sum = operation(precision, self.sum * factor);
        }
        self.max = max;
        self.add(elements, row);
        self.sum = operation(precision, self.sum + self.exponentials.value());
        self.exponentials.reset();
    }

    fn see(&mut self, elements: &Elements, row: &[f64], label: Option<usize>) {
        let online = elements.policy.path == Path::Fused;
        if online {
            self.merge(elements, row.iter().copied());
        } else {
            self.add(elements, row.iter().copied());
        }
        row.iter().for_each(|&x| self.logits.push(x));
        if online {
            let sum = self.logit_sum + self.logits.value();
            self.logit_sum = operation(elements.policy.sums.lse.precision, sum);
            self.logits.reset();
        }
        if let Some(col) = label {
            self.label_logit = row[col];
        }
    }

    /// Adds the columns beyond the valid vocabulary.
    fn finish(&mut self, elements: &Elements) {
        let HeadInputs { k, valid_vocab, .. } = *elements.inputs;
        let masked = elements.mask().into_iter();
        let masked = masked.flat_map(|mask| std::iter::repeat_n(mask, k.rows - valid_vocab));
        if elements.policy.path == Path::Fused {
            self.merge(elements, masked);
        } else {
            self.add(elements, masked);
            self.sum = self.exponentials.value();
            self.logit_sum = self.logits.value();
        }
    }

    fn lse(&self, elements: &Elements) -> f64 {
        let kept = |x: f64| elements.policy.log_p.round64(x);
        let log = kept(elements.operation(libm::log(kept(self.sum))));
        elements.operation(shift(self.max) + log)
    }
}

/// See `policy::forward`.
pub(in crate::kernels) fn forward(
    policy: &Policy,
    inputs: &HeadInputs,
    tiles: Tiles,
    progress: &dyn Progress,
) -> PolicyForward {
    let elements = Elements::new(policy, inputs);
    let mut rows: Vec<Row> = (0..inputs.q.rows).map(|_| Row::new(policy)).collect();
    let walk = Walk { elements: &elements, tiles, progress };
    if policy.path != Path::Fused {
        walk.tiles(Pass::First, &mut rows, |row, logits, _| {
            row.max = larger(row.max, logits.iter().copied());
        });
        let masked = inputs.k.rows - inputs.valid_vocab;
        let mask = elements.mask().filter(|_| masked > 0);
        rows.iter_mut().for_each(|row| row.max = larger(row.max, mask.into_iter()));
        walk.tiles(Pass::Second, &mut rows, |row, logits, label| {
            row.see(&elements, logits, label);
        });
    } else {
        walk.tiles(Pass::Only, &mut rows, |row, logits, label| row.see(&elements, logits, label));
    }
    rows.par_iter_mut().for_each(|row| row.finish(&elements));
    PolicyForward {
        lse: rows.iter().map(|row| row.lse(&elements)).collect(),
        label_logits: rows.iter().map(|row| row.label_logit).collect(),
        logit_sum: rows.iter().map(|row| row.logit_sum).collect(),
    }
}

/// Which pass over the plane this is. Where there are two, each reports half of the work.
#[derive(Clone, Copy)]
enum Pass {
    Only,
    First,
    Second,
}

struct Walk<'a> {
    elements: &'a Elements<'a>,
    tiles: Tiles,
    progress: &'a dyn Progress,
}

impl Walk<'_> {
    /// Calls `see` with each token's row of every tile of logits, and with the column of its label
    /// if that lies in the tile.
    fn tiles(
        &self,
        pass: Pass,
        rows: &mut [Row],
        see: impl Fn(&mut Row, &[f64], Option<usize>) + Sync,
    ) {
        let Elements { policy, inputs, .. } = *self.elements;
        let mut tile = Vec::new();
        for cols in policy.vocab_spans(inputs.valid_vocab, self.tiles.vocab) {
            let keys = transposed(&self.elements.panel(&inputs.k, cols.clone()), inputs.k.cols);
            for span in spans(inputs.q.rows, self.tiles.tokens) {
                let q = self.elements.panel(&inputs.q, span.clone());
                tile.resize(span.len() * cols.len(), 0.0);
                self.elements.logits(&q, &keys, (span.clone(), cols.clone()), &mut tile);
                let tile = tile.par_chunks(cols.len());
                (tile, span.clone(), &mut rows[span.clone()]).into_par_iter().for_each(
                    |(logits, token, row)| see(row, logits, column(inputs, token, &cols)),
                );
                let work = (span.len() * cols.len() * inputs.q.cols) as u64;
                self.progress.advance(match pass {
                    Pass::Only => work,
                    Pass::First => work / 2,
                    Pass::Second => work - work / 2,
                });
            }
        }
    }
}

fn column(inputs: &HeadInputs, token: usize, cols: &Range<usize>) -> Option<usize> {
    inputs.label(token).filter(|label| cols.contains(label)).map(|label| label - cols.start)
}
