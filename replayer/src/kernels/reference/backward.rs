//! Gradients of the loss head in f64, split into dense and label parts, with the sums of squares
//! and variances from which the allowed rounding error is computed.
//!
//! Nothing is judged here: the caller decides which rounding errors the squares stand for.

use super::block::{Block, DkSums, Labels};
use super::gemm::{Operand, multiply};
use super::squares::{Over, Scaled, Squares};
use super::tile::{Panel, Terms, Upstream};
use super::{check, forward_work, work};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::tiles::{Progress, Tiles, spans};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Variances of the rounding errors of the terms of an entry of dlogits, and the threshold of the
/// job's gradient filter.
///
/// An entry `e = F (c.lse p + c.smooth)` has the variance `(F c.lse p)² (p_rel_var + var z) + (F
/// c.smooth)² p_rel_var + (e / F)² var F`, where F is the derivative of the transform and `var z =
/// logit_rel_var m2 + dot_rel_var F² |q_t|² |k_v|²` the variance of the logit. `m2` is the sum of
/// the squared results of the operations that make the logit (product, bias, the transform's), each
/// times the derivative of what follows it; x² with no option.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TermNoise {
    /// From rounding p (or g p) itself.
    pub p_rel_var: f64,
    /// From rounding the logit and each intermediate result that it is computed from: an error of
    /// the logit is a relative error of p.
    pub logit_rel_var: f64,
    /// From accumulating the dot product q k.
    pub dot_rel_var: f64,
    /// Absolute variance of rounding a result among the subnormal numbers of the logits' format.
    pub logit_floor: f64,
    /// Relative variance of evaluating tanh: `1 - tanh²` gets the absolute variance `4 tanh⁴` times
    /// it.
    pub cap_rel_var: f64,
    /// Relative step of the format that products `g q` of the label path may be rounded to:
    /// products within a quarter of a step of each other are taken to round alike.
    pub label_step: f64,
    /// Threshold of the gradient filter: the job may have dropped the entries of smaller
    /// probabilities; 0 where it drops none.
    pub filter: f64,
    /// True where the label part is added before an entry is rounded: in the label's column the
    /// relative variance `p_rel_var` is then that of the sum `c.lse p + c.smooth + c.label`, and
    /// that of p itself is only `exp_rel_var`.
    pub whole: bool,
    /// Relative variance of evaluating p.
    pub exp_rel_var: f64,
    /// From rounding `log p` where the job keeps it: the variance of p is `(log p)²` times it.
    pub log_p_rel_var: f64,
    /// Confident probabilities: those from this value up to 1 lie so close together that they round
    /// alike; 0 for none.
    pub confident: f64,
}

/// Gradients with respect to q, `[T, D]` but where said otherwise.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Backward {
    /// Dense part: sum over v of `F (c.lse p + c.smooth) k`.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_lse: Vec<f64>,
    /// Label part: `F c.label k[label]`, 0 for an ignored token.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_label: Vec<f64>,
    /// Sum over v of the dense entry's variance times `k²`, and times the token's number of copies,
    /// as the squares below. Only sums over tokens need that factor: whoever judges dq divides by
    /// it.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_lse_var: Vec<f64>,
    /// Sum over v of the squared dense entry times `k²`, and times the token's number of copies.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_lse_sq: Vec<f64>,
    /// `[T]`: `var F / F²` in the label's column, which is the variance of the label part relative
    /// to its square; 0 where the transform is linear and for ignored tokens. Never infinite:
    /// `f64::MAX` where F is 0, so that its product with a zero gradient is 0.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_label_rel_var: Vec<f64>,
    /// The absolute variance `(c.label k[label])² var F`, needed where tanh saturates: there the
    /// label part is 0 and its error is not. Empty where the transform is linear.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_label_var: Vec<f64>,
    /// Sum over v of `|e| |k|` over the entries that the gradient filter may have
    /// dropped; empty without a filter.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_dropped: Vec<f64>,
    /// Sum over v of `e k` over the dense entries whose p is confident (`TermNoise::confident`);
    /// entries of labels are left out where `TermNoise::whole`. Empty where no p counts as
    /// confident.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_confident: Vec<f64>,
    /// `[T]`: the square of the whole entry in the label's column over the square of its label
    /// part; 1 unless `TermNoise::whole`.
    #[serde(with = "crate::parcel::numbers")]
    pub dq_label_share: Vec<f64>,
}

/// Gradients with respect to a block of rows of k, `[rows, D]`, and of the bias, `[rows]`.
///
/// Sums of the bias are zeros where the head has none.
#[derive(Debug, Clone)]
pub struct DkBlock {
    /// Rows of k this block is about.
    pub rows: Range<usize>,
    /// Dense part: sum over t of `F (c.lse p + c.smooth) q`.
    pub dk_lse: Vec<f64>,
    /// Label part: sum of `F c.label q` over the tokens whose label the row is.
    pub dk_label: Vec<f64>,
    /// Sum over t of the dense entry's variance times `q²` and the token's number of copies: m
    /// equal errors δ add up to mδ, which has m times the variance of m independent errors.
    pub dk_lse_var: Vec<f64>,
    /// Sum over t of the squared dense entry times `q²` and the token's number of copies: a
    /// relative error of a token is the same in all its copies.
    pub dk_lse_sq: Vec<f64>,
    /// Sum of `(F c.label q)²` over the hits, the tokens whose label the row is.
    pub dk_label_sq: Vec<f64>,
    /// Sum of `(c.label q)² var F` over the hits; zeros where the transform is linear.
    pub dk_label_var: Vec<f64>,
    /// As `dk_label_sq`, but addends within a quarter `label_step` of each other are added before
    /// they are squared: their rounding errors are equal and add up.
    pub dk_label_alike: Vec<f64>,
    /// Sum over t of `|e| |q|` over the entries that the gradient filter may have
    /// dropped; empty without a filter.
    pub dk_dropped: Vec<f64>,
    /// As `dq_confident`, over t.
    pub dk_confident: Vec<f64>,
    /// The label part; where `TermNoise::whole`, the sum over the hits of the whole entry times q.
    pub dk_label_whole: Vec<f64>,
    /// `[rows]`: tokens whose label the row is.
    pub hits: Vec<u32>,
    /// `[rows]`: sum over t of the dense entries.
    pub dbias_lse: Vec<f64>,
    /// `[rows]`: sum of the label entries.
    pub dbias_label: Vec<f64>,
    /// `[rows]`: sum over t of the variances of dense and label entries, times the token's number
    /// of copies.
    pub dbias_var: Vec<f64>,
    /// `[rows]`: sum over t of squared dense entries and squared label entries, times the token's
    /// number of copies.
    pub dbias_sq: Vec<f64>,
}

/// Multiply-adds that `backward` will report: the logits, and two GEMMs for each of
/// the gradient and its sums of squares. Those of a gradient filter are not counted.
pub fn backward_work(inputs: &HeadInputs) -> u64 {
    GEMMS * forward_work(inputs)
}

/// Matrix products that a tile takes, each of as many multiply-adds as that of its logits.
pub const GEMMS: u64 = 7;
/// How many of them belong to dq alone, and as many to dk alone.
const OF_ONE: u64 = 3;

/// Which gradients a backward pass sums, so that those that the caller does not need cost nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Keep {
    /// All of them.
    Both,
    /// The gradient of q; sums of k stay 0 except for the label part.
    Dq,
    /// The gradients of k and of the bias; sums of q stay 0 except for the label part.
    Dk,
}

impl Keep {
    fn dq(self) -> bool {
        self != Keep::Dk
    }

    fn dk(self) -> bool {
        self != Keep::Dq
    }

    /// Matrix products that a tile takes, counted as in `GEMMS`.
    fn gemms(self) -> u64 {
        if self == Keep::Both { GEMMS } else { GEMMS - OF_ONE }
    }
}

/// The tile sizes of a walk, which gradients it sums, and where it reports its work.
pub type Walking<'a> = (Tiles, Keep, &'a dyn Progress);

/// Gradients of q `[T, D]`, k `[V, D]` and the bias `[V]` at a given lse `[T]` (the
/// reference's, or a captured one) and cotangents `[T]`.
///
/// Vocabulary tiles are the outer loop: `on_dk` gets the rows of k in order, those
/// beyond the valid vocabulary as zeros. dq sums over the vocabulary tile by tile, dk
/// over the tokens tile by tile, label rows in token order.
pub fn backward(
    inputs: &HeadInputs,
    lse: &[f64],
    cotangents: &Cotangents<f64>,
    noise: &TermNoise,
    (tiles, keep, progress): Walking<'_>,
    on_dk: &mut dyn FnMut(DkBlock),
) -> Backward {
    check(inputs);
    let mut dq = Backward::zeros(inputs, noise);
    let labels = Labels::new(inputs, 0);
    let mut walk = Walk::new(inputs, Upstream::new(inputs, lse, *cotangents, noise), labels);
    for rows in spans(inputs.k.rows, tiles.vocab) {
        let mut block = Block::zeros(rows, inputs.q.cols, noise);
        walk.block(&mut block, &mut dq, (tiles, keep, progress));
        block.cluster_labels(&inputs.q, noise.label_step);
        on_dk(block.emit());
    }
    dq
}

/// The same for some tokens and a slab of k's rows, added to earlier sums: `dq` holds the sums of
/// these tokens over the rows before the slab, `dk` the sums of these rows over the `first` tokens
/// before. The work may be split among processes without changing a bit, as long as tokens and rows
/// are cut at whole tiles and the parts of each sum are added in order.
pub fn backward_onto(
    (dq, dk): (&mut Backward, &mut DkSums),
    (inputs, first): (&HeadInputs, usize),
    (lse, cotangents, noise): (&[f64], &Cotangents<f64>, &TermNoise),
    (tiles, keep, progress): Walking<'_>,
) {
    check(inputs);
    let labels = Labels::new(inputs, first);
    let mut walk = Walk::new(inputs, Upstream::new(inputs, lse, *cotangents, noise), labels);
    for block in &mut dk.blocks {
        walk.block(block, dq, (tiles, keep, progress));
    }
}

/// A walk over all tokens for one vocabulary tile after another, with its buffers.
struct Walk<'a> {
    inputs: &'a HeadInputs<'a>,
    upstream: Upstream<'a>,
    labels: Labels,
    terms: Terms,
    key: Panel,
    query: Panel,
    own_key: Panel,
    own_query: Panel,
    sums: OfSquares,
}

/// The squares of a tile's rows of q and k, and buffers for the tile's terms in f32.
#[derive(Default)]
struct OfSquares {
    of_query: Squares,
    of_key: Squares,
    /// Buffers for dq and for dk, each with one for squares and one for variances.
    rooms: [[Scaled; 2]; 2],
}

impl<'a> Walk<'a> {
    fn new(inputs: &'a HeadInputs<'a>, upstream: Upstream<'a>, labels: Labels) -> Self {
        let terms = Terms::default();
        let [key, query, own_key, own_query] = [(); 4].map(|()| Panel::default());
        let sums = OfSquares::default();
        Walk { inputs, upstream, labels, terms, key, query, own_key, own_query, sums }
    }

    /// Adds all tokens' part of one vocabulary tile to `block` and to `dq`.
    fn block(
        &mut self,
        block: &mut Block,
        dq: &mut Backward,
        (tiles, keep, progress): Walking<'_>,
    ) {
        let Walk { inputs, upstream, labels, terms, key, query, own_key, own_query, sums } = self;
        let ((q, k), reads, depth) = (inputs.scored(), inputs.reads, inputs.q.cols);
        let rows = block.rows.clone();
        let valid = rows.start..rows.end.min(inputs.valid_vocab).max(rows.start);
        let tokens = if valid.is_empty() { 0 } else { inputs.q.rows };
        key.load(k, valid.clone());
        let mut of_key = &*key;
        if reads.is_some_and(|reads| !reads.k_product) {
            own_key.load(&inputs.k, valid.clone());
            of_key = own_key;
        }
        if keep.dq() {
            sums.of_key.load(&of_key.values, depth);
        }
        for span in spans(tokens, tiles.tokens) {
            query.load(q, span.clone());
            terms.fill(inputs, query, key, *upstream);
            let mut of_query = &*query;
            if reads.is_some_and(|reads| !reads.q_product) {
                own_query.load(&inputs.q, span.clone());
                of_query = own_query;
            }
            if keep.dk() {
                sums.of_query.load(&of_query.values, depth);
            }
            accumulate((dq, block, keep), terms, (of_query, of_key), (sums, depth));
            add_confident(dq, block, terms, of_query, of_key, depth);
            block.add_biases(inputs, terms, (span.len(), valid.len()));
            labels.keep_slopes(terms, span.start);
            progress.advance(keep.gemms() * work(inputs, span.len(), valid.len()));
        }
        let whole = upstream.noise.whole;
        block.add_labels(inputs, labels, (upstream.cotangents.label, whole), dq);
    }
}

impl Backward {
    /// The sums of `inputs`' tokens before any class was added.
    pub fn zeros(inputs: &HeadInputs, noise: &TermNoise) -> Self {
        let size = inputs.q.rows * inputs.q.cols;
        let zeros = || vec![0.0; size];
        let when = |present: bool| if present { zeros() } else { Vec::new() };
        Backward {
            dq_lse: zeros(),
            dq_label: zeros(),
            dq_lse_var: zeros(),
            dq_lse_sq: zeros(),
            dq_label_rel_var: vec![0.0; inputs.q.rows],
            dq_label_var: when(inputs.transform.bends()),
            dq_dropped: when(noise.filter > 0.0),
            dq_confident: when(noise.confident > 0.0),
            dq_label_share: vec![1.0; inputs.q.rows],
        }
    }
}

impl Backward {
    /// Appends the gradients of the next tokens.
    pub fn extend(&mut self, more: Backward) {
        for (all, part) in [
            (&mut self.dq_lse, more.dq_lse),
            (&mut self.dq_label, more.dq_label),
            (&mut self.dq_lse_var, more.dq_lse_var),
            (&mut self.dq_lse_sq, more.dq_lse_sq),
            (&mut self.dq_label_rel_var, more.dq_label_rel_var),
            (&mut self.dq_label_var, more.dq_label_var),
            (&mut self.dq_dropped, more.dq_dropped),
            (&mut self.dq_confident, more.dq_confident),
            (&mut self.dq_label_share, more.dq_label_share),
        ] {
            all.extend(part);
        }
    }
}

/// Adds the entries of a tile whose p is confident; there are few of them.
fn add_confident(
    dq: &mut Backward,
    block: &mut Block,
    terms: &Terms,
    query: &Panel,
    key: &Panel,
    depth: usize,
) {
    for (row, of_row) in terms.confident.iter().enumerate() {
        for &(column, entry) in of_row {
            let (token, q) = (query.rows.start + row, &query.values[row * depth..][..depth]);
            let k = &key.values[column * depth..][..depth];
            let to_dq = &mut dq.dq_confident[token * depth..][..depth];
            to_dq.iter_mut().zip(k).for_each(|(sum, k)| *sum += entry * k);
            let to_dk = &mut block.confident[column * depth..][..depth];
            to_dk.iter_mut().zip(q).for_each(|(sum, q)| *sum += entry * q);
        }
    }
}

/// The GEMMs of one tile, each added to the sums of earlier tiles.
fn accumulate(
    (dq, block, keep): (&mut Backward, &mut Block, Keep),
    terms: &Terms,
    (query, key): (&Panel, &Panel),
    (sums, depth): (&mut OfSquares, usize),
) {
    let (height, width) = (query.norms.len(), key.norms.len());
    let tile = |values| Operand::rows(values, width);
    let rows = |values| Operand::rows(values, depth);
    let (tokens, valid) = (query.rows.start * depth..query.rows.end * depth, width * depth);
    let (keys, queries) = match terms.dropped.is_empty() {
        true => (Vec::new(), Vec::new()),
        false => (key.magnitudes(), query.magnitudes()),
    };
    let OfSquares { of_query, of_key, rooms: [of_dq, of_dk] } = sums;
    let [squares, variances] = of_dq;
    let mut dq_sums = vec![(&mut dq.dq_lse[tokens.clone()], &terms.dense, &key.values)];
    let dq_sizes = [
        (&mut dq.dq_lse_sq[tokens.clone()], &terms.squared, squares),
        (&mut dq.dq_lse_var[tokens.clone()], &terms.noisy, variances),
    ];
    let [squares, variances] = of_dk;
    let mut dk_sums = vec![(&mut block.lse[..valid], &terms.dense, &query.values)];
    let dk_sizes = [
        (&mut block.lse_sq[..valid], &terms.squared, squares),
        (&mut block.lse_var[..valid], &terms.noisy, variances),
    ];
    if !terms.dropped.is_empty() {
        dq_sums.push((&mut dq.dq_dropped[tokens], &terms.dropped, &keys));
        dk_sums.push((&mut block.dropped[..valid], &terms.dropped, &queries));
    }
    let (of_query, of_key) = (&*of_query, &*of_key);
    rayon::scope(|scope| {
        if keep.dq() {
            for (target, terms, keys) in dq_sums {
                scope.spawn(move |_| multiply(target, depth, true, tile(terms), rows(keys), width));
            }
            for (target, terms, room) in dq_sizes {
                let terms = (&terms[..], width, Over::Columns);
                scope.spawn(move |_| of_key.add_to(target, terms, room));
            }
        }
        if keep.dk() {
            for (target, terms, queries) in dk_sums {
                let transposed = tile(terms).transposed();
                scope.spawn(move |_| {
                    multiply(target, depth, true, transposed, rows(queries), height);
                });
            }
            for (target, terms, room) in dk_sizes {
                let terms = (&terms[..], width, Over::Tokens);
                scope.spawn(move |_| of_query.add_to(target, terms, room));
            }
        }
    });
}
