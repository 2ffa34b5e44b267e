//! Gradients of the loss head in f64, split into dense and label parts, with the sums
//! of squares that a rounding floor is made of.
//!
//! It judges nothing: which rounding the squares are weighted with is the caller's.

use super::block::{Block, DkSums, Labels};
use super::gemm::{Operand, multiply};
use super::squares::{Over, Scaled, Squares};
use super::tile::{Panel, Terms, Upstream};
use super::{check, forward_work, work};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::tiles::{Progress, Tiles, spans};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Variances that rounding gives to what an entry of dlogits is made of, and the
/// threshold of the job's gradient filter.
///
/// An entry `e = F (c.lse p + c.smooth)` has the variance
/// `(F c.lse p)² (p_rel_var + var z) + (F c.smooth)² p_rel_var + (e / F)² var F`, with
/// `var z = logit_rel_var m2 + dot_rel_var F² |q_t|² |k_v|²` that of the logit. `m2` is
/// the sum of the squared results of the operations that make the logit (product, bias,
/// the transform's), each times the derivative of what follows it; x² with no option.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TermNoise {
    /// From rounding p (or g p) itself.
    pub p_rel_var: f64,
    /// From rounding the logit, and each result on the way to it: an error of the
    /// logit is a relative error of p.
    pub logit_rel_var: f64,
    /// From accumulating the dot product q k.
    pub dot_rel_var: f64,
    /// Variance, absolute, of a result in the smallest numbers of the logits' format.
    pub logit_floor: f64,
    /// From evaluating tanh: `1 - tanh²` inherits `4 tanh⁴` times it, absolutely.
    pub cap_rel_var: f64,
    /// Relative step of the format that products `g q` of the label path may be rounded
    /// to: those within one step of each other round alike.
    pub label_step: f64,
    /// Probabilities below it may have been dropped by the job; 0 for none.
    pub filter: f64,
    /// True where the label's part is added before an entry is rounded: the entry in the
    /// label's column then errs by `p_rel_var` of `c.lse p + c.smooth + c.label`, and of p
    /// itself only by `exp_rel_var`.
    pub whole: bool,
    /// From evaluating p.
    pub exp_rel_var: f64,
    /// Probabilities from here on are close enough to each other to round alike; 0: none.
    pub confident: f64,
}

/// Gradients with respect to q, `[T, D]` but where said otherwise.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Backward {
    /// Dense part: sum over v of `F (c.lse p + c.smooth) k`.
    pub dq_lse: Vec<f64>,
    /// Label part: `F c.label k[label]`, 0 for an ignored token.
    pub dq_label: Vec<f64>,
    /// Sum over v of the dense entry's variance times `k²`; as the squares, times the copies of
    /// the token, which only sums over tokens want: whoever judges dq divides by them.
    pub dq_lse_var: Vec<f64>,
    /// Sum over v of the squared dense entry times `k²` (and the copies of the token).
    pub dq_lse_sq: Vec<f64>,
    /// `[T]`: variance of F over F² in the label's column, which is that of the label
    /// part relative to its square; 0 where the transform is linear and for ignored tokens. Never
    /// infinite: `f64::MAX` where F is 0, so that a product with a zero gradient is 0.
    pub dq_label_rel_var: Vec<f64>,
    /// The same absolutely, `(c.label k[label])² var F`: where tanh saturates the label
    /// part is 0 and its error is not. Empty where the transform is linear.
    pub dq_label_var: Vec<f64>,
    /// Sum over v of `|e| |k|` over the entries that the gradient filter may have
    /// dropped; empty without a filter.
    pub dq_dropped: Vec<f64>,
    /// Sum over v of `e k` over the dense entries whose p is confident; those of labels
    /// are left out where entries are whole. Empty where no p counts as confident.
    pub dq_confident: Vec<f64>,
    /// `[T]`: the square of the whole entry in the label's column over that of the label
    /// part alone; 1 where entries are not whole.
    pub dq_label_share: Vec<f64>,
}

/// Gradients with respect to a block of rows of k, `[rows, D]`, and of the bias, `[rows]`.
///
/// Those of the bias are zeros where there is none.
#[derive(Debug, Clone)]
pub struct DkBlock {
    /// Rows of k this block is about.
    pub rows: Range<usize>,
    /// Dense part: sum over t of `F (c.lse p + c.smooth) q`.
    pub dk_lse: Vec<f64>,
    /// Label part: sum of `F c.label q` over the tokens whose label the row is.
    pub dk_label: Vec<f64>,
    /// Sum over t of the dense entry's variance times `q²` and the copies of the token:
    /// m equal errors δ are one of mδ, m times the variance of m independent ones.
    pub dk_lse_var: Vec<f64>,
    /// Sum over t of the squared dense entry times `q²` and the copies of the token: an error
    /// that is relative to the token is one error in all of them.
    pub dk_lse_sq: Vec<f64>,
    /// Sum of `(F c.label q)²` over the hits.
    pub dk_label_sq: Vec<f64>,
    /// Sum of `(c.label q)² var F` over the hits; zeros where the transform is linear.
    pub dk_label_var: Vec<f64>,
    /// Sum over the hits of `(F c.label q)²`, those that lie within one `label_step` of each
    /// other added before they are squared: what a rounding that they share adds up to.
    pub dk_label_alike: Vec<f64>,
    /// Sum over t of `|e| |q|` over the entries that the gradient filter may have
    /// dropped; empty without a filter.
    pub dk_dropped: Vec<f64>,
    /// As `dq_confident`, over t.
    pub dk_confident: Vec<f64>,
    /// The label part, or where entries are whole the sum of the whole entries of the hits
    /// times q.
    pub dk_label_whole: Vec<f64>,
    /// `[rows]`: tokens whose label the row is.
    pub hits: Vec<u32>,
    /// `[rows]`: sum over t of the dense entries.
    pub dbias_lse: Vec<f64>,
    /// `[rows]`: sum of the label entries.
    pub dbias_label: Vec<f64>,
    /// `[rows]`: sum over t of the variances of dense and label entries.
    pub dbias_var: Vec<f64>,
    /// `[rows]`: sum over t of squared dense entries and squared label entries, times the
    /// copies of the token.
    pub dbias_sq: Vec<f64>,
}

/// Multiply-adds that `backward` will report: the logits, and two GEMMs for each of
/// the gradient and its sums of squares. Those of a gradient filter are not counted.
pub fn backward_work(inputs: &HeadInputs) -> u64 {
    GEMMS * forward_work(inputs)
}

/// Products of a tile, of the size of its logits' product.
pub const GEMMS: u64 = 7;
/// Those of them that are sums for one of the two gradients.
const OF_ONE: u64 = 3;

/// Which gradients a backward pass sums: what nobody looks at need not be multiplied out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Keep {
    /// All of them.
    Both,
    /// Those of q; sums of k stay 0, but for the label's part.
    Dq,
    /// Those of k and of the bias; sums of q stay 0, but for the label's part.
    Dk,
}

impl Keep {
    fn dq(self) -> bool {
        self != Keep::Dk
    }

    fn dk(self) -> bool {
        self != Keep::Dq
    }

    /// Products of a tile, as `GEMMS` counts them.
    fn gemms(self) -> u64 {
        if self == Keep::Both { GEMMS } else { GEMMS - OF_ONE }
    }
}

/// What a walk takes its tiles from, which gradients it sums, and who is told of the work.
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

/// The same walk over some tokens and a slab of k's rows, onto the sums of what was walked
/// before: `dq` of these tokens over the rows before, `dk` of these rows over the `first`
/// tokens before. Who walks which part changes no bit, as long as tokens and rows are cut at
/// whole tiles and each sum is handed on in order.
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

/// A walk over tokens, with its buffers.
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
    /// Of dq and of dk: squares, variances.
    rooms: [[Scaled; 2]; 2],
}

impl<'a> Walk<'a> {
    fn new(inputs: &'a HeadInputs<'a>, upstream: Upstream<'a>, labels: Labels) -> Self {
        let terms = Terms::default();
        let [key, query, own_key, own_query] = [(); 4].map(|()| Panel::default());
        let sums = OfSquares::default();
        Walk { inputs, upstream, labels, terms, key, query, own_key, own_query, sums }
    }

    /// All tokens against one vocabulary tile.
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
    /// Of tokens that were not walked.
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
    /// Those of more tokens behind these.
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

/// Adds the few entries of a tile whose p is confident.
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

/// The GEMMs of one tile, each a sum onto what earlier tiles left.
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
