//! Sums of dk over microbatches or ranks, solved for the weight of each token in them.
//!
//! Where only sums of dk were recorded, tokens that are missing from one microbatch or rank cannot
//! be seen in a gradient of their own. So the sum is solved for the weight of every token that it
//! should contain. Where the loss fails too, its tokens are taken to have the same weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::identity::{Microbatch, Rank};

use super::addend_counts::in_words;
use super::addends::{adds_to, divisor};
use super::dlogits_plane::Rows;
use super::least_squares::whole_weights;
use super::single_tokens::{distance, energy};
use crate::diagnose::data_worlds::{CountedLosses, ReplacedValues};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Read, World};

/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 0.1;

/// Which part of each token's gradient is weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GradientPart {
    /// All of it.
    Whole,
    /// The softmax part.
    Softmax,
    /// The label's part.
    Label,
}

/// Sums of dk, and the loss where it fails, in which tokens count more or less often than once.
pub struct CountedSums {
    sums: ReplacedValues,
    /// How often each token of a microbatch counts in the loss.
    of_loss: CountedLosses,
    /// Each run of tokens whose weight is not 1, in words.
    pub said: Vec<String>,
    /// Microbatches of ranks whose tokens all have one weight that is not 1: their name and that
    /// weight.
    pub parts: Vec<(String, f64)>,
    /// Whether in every microbatch of every rank all tokens have one weight.
    pub of_parts: bool,
    /// The boxes of the scores whose tokens are in the sums, where ranks have several devices.
    pub devices: Vec<String>,
    /// Whether on every device all tokens count once, or all not at all.
    by_device: bool,
}

impl CountedSums {
    /// Solves the failing sums. `None` where another stage fails, where dk of single microbatches
    /// was recorded, or where a sum has too many tokens or no whole-number weights.
    pub fn of(evidence: &Evidence<'_>, terms: GradientPart) -> Option<CountedSums> {
        let sums: Vec<Key> =
            evidence.failing.iter().filter(|key| key.stage.is_sum()).copied().collect();
        let known = |key: &Key| key.stage.is_sum() || key.stage == Stage::Loss;
        if sums.is_empty() || !evidence.has_sums_alone() || !evidence.failing.iter().all(known) {
            return None;
        }
        let ones = |inputs: &MicrobatchInputs| (inputs.microbatch, vec![1.0; inputs.tokens()]);
        let mut counted = CountedSums {
            sums: ReplacedValues::default(),
            of_loss: CountedLosses(evidence.inputs.iter().map(ones).collect()),
            said: Vec::new(),
            parts: Vec::new(),
            of_parts: true,
            devices: Vec::new(),
            by_device: true,
        };
        for key in sums {
            Tokens::of(evidence, key, terms)?.weighed(evidence, &mut counted)?;
        }
        if !evidence.fails(Stage::Loss) {
            counted.of_loss = CountedLosses::default();
        }
        Some(counted)
    }

    /// Whether the sums contain all tokens of some devices and none of the others.
    pub fn is_of_devices(&self) -> bool {
        !self.of_parts && self.by_device && !self.devices.is_empty()
    }

    /// Records which devices' tokens are in a sum, for one part of it.
    fn note_devices(
        &mut self,
        devices: &[(String, Vec<usize>)],
        part: &Part,
        part_weights: &[f64],
    ) {
        let weight_of_row: BTreeMap<usize, f64> =
            part.rows.iter().copied().zip(part_weights.iter().copied()).collect();
        self.by_device &= !devices.is_empty();
        for (name, rows) in devices {
            let weights: BTreeSet<u64> =
                rows.iter().filter_map(|row| weight_of_row.get(row)).map(|x| x.to_bits()).collect();
            let is = |x: f64| weights.len() == 1 && weights.contains(&x.to_bits());
            self.by_device &= is(0.0) || is(1.0);
            if is(1.0) && !self.devices.contains(name) {
                self.devices.push(name.clone());
            }
        }
    }
}

impl World for CountedSums {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        self.sums.expected(expectation);
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        self.of_loss.nll(inputs, read, nll)
    }
}

/// The tokens of one unit in a sum.
struct Part {
    /// Their indices among all tokens of the sum.
    of_sum: Range<usize>,
    microbatch: Option<Microbatch>,
    /// Their indices in the microbatch.
    rows: Vec<usize>,
    /// The rank that holds them, where there is one.
    rank: Option<Rank>,
    words: String,
}

/// A sum of dk as a sum of one product per token.
struct Tokens {
    key: Key,
    parts: Vec<Part>,
    /// The entries of dlogits that are weighed, over the divisor of the sum, `[n, V]`; and q, `[n,
    /// D]`.
    entries: Rows,
    q: Rows,
    /// The captured sum and its reference, `[V, D]`.
    captured: Rows,
    reference: Rows,
    /// The squared error that rounding is expected to cause.
    rounding: f64,
}

impl Tokens {
    fn of(evidence: &Evidence<'_>, key: Key, terms: GradientPart) -> Option<Tokens> {
        let divisor = divisor(evidence, key);
        let (mut parts, mut from) = (Vec::new(), 0);
        let [mut entries, mut whole, mut q] = [(); 3].map(|()| Vec::new());
        let (mut classes, mut width) = (0, 0);
        let units = evidence.units().iter();
        for unit in units.filter(|unit| adds_to(key, unit.rank)) {
            let plane = evidence.plane_of(unit.microbatch, unit.rank)?;
            let all = plane.entries().values;
            entries.extend(match terms {
                GradientPart::Whole => all.clone(),
                GradientPart::Softmax => plane.dense.values.clone(),
                GradientPart::Label => plane.of_labels().values,
            });
            whole.extend(all);
            q.extend_from_slice(&plane.q.values);
            (classes, width) = (plane.dense.cols, plane.q.cols);
            let of_sum = from..from + plane.rows.len();
            from = of_sum.end;
            let mb = unit.microbatch.map(|mb| format!("microbatch {mb}"));
            let named = unit.rank.filter(|_| evidence.ranks() > 1);
            let named = named.map(|rank| format!("rank {rank}"));
            let place: Vec<String> = [mb, named].into_iter().flatten().collect();
            let (microbatch, rows) = (unit.microbatch, plane.rows.clone());
            let rank = unit.rank.or((evidence.ranks() == 1).then_some(Rank(0)));
            parts.push(Part { of_sum, microbatch, rows, rank, words: place.join(" of ") });
        }
        let captured =
            evidence.captured(key).filter(|values| values.columns == width && width > 0)?;
        let values = captured.values.get(..classes * width)?.to_vec();
        let over = |values: Vec<f64>| {
            let values = values.into_iter().map(|x| x / divisor).collect();
            Rows { cols: classes, values }
        };
        let (entries, q) = (over(entries), Rows { cols: width, values: q });
        if evidence.spend(whole.len() * width) {
            return None;
        }
        let reference = over(whole).transposed_times(&q);
        let captured = Rows { cols: width, values };
        let rounding = evidence.residuals.get(&key)?.floor;
        Some(Tokens { key, parts, entries, q, captured, reference, rounding })
    }

    /// Gives tokens with a gradient of zero the weight of the token before them in their part; the
    /// first ones that of the first token with a gradient.
    fn fill(&self, part: &Part, weights: &mut [f64]) {
        let counts = |at: &usize| energy(self.entries.row(*at)) > 0.0;
        let Some(first) = part.of_sum.clone().find(counts) else {
            weights[part.of_sum.clone()].fill(1.0);
            return;
        };
        let mut last = weights[first];
        for index in part.of_sum.clone() {
            last = if counts(&index) { weights[index] } else { last };
            weights[index] = last;
        }
    }

    /// Solves this sum, and adds its weights to `to`.
    fn weighed(&self, evidence: &Evidence<'_>, to: &mut CountedSums) -> Option<()> {
        let pairs = self.captured.values.iter().zip(&self.reference.values);
        let error = Rows { cols: self.captured.cols, values: pairs.map(|(c, r)| c - r).collect() };
        let system = ((&self.entries, &self.q), (&error, self.rounding));
        let mut weights = whole_weights(system.0, system.1, &|work| evidence.spend(work))?;
        self.parts.iter().for_each(|part| self.fill(part, &mut weights));
        let cols = self.entries.cols;
        let rows = weights.iter().zip(self.entries.values.chunks(cols.max(1)));
        let more = rows.flat_map(|(weight, row)| row.iter().map(move |x| (weight - 1.0) * x));
        let more = Rows { cols, values: more.collect() };
        let mut changed = more.transposed_times(&self.q);
        changed.values.iter_mut().zip(&self.reference.values).for_each(|(x, r)| *x += r);
        let off = |rows: &Rows| distance(&self.captured.values, &rows.values);
        if !(off(&changed) <= LEFT * off(&self.reference)) {
            return None;
        }
        let rows = (0..changed.count()).map(|at| (at, changed.row(at).to_vec()));
        to.sums = std::mem::take(&mut to.sums).rows(self.key, rows);
        for part in &self.parts {
            let part_weights = &weights[part.of_sum.clone()];
            let alike = part_weights.windows(2).all(|pair| pair[0] == pair[1]);
            to.of_parts &= alike;
            let told = to.parts.iter().any(|(words, _)| *words == part.words);
            if let Some(&often) =
                part_weights.first().filter(|often| alike && **often != 1.0 && !told)
            {
                to.parts.push((part.words.clone(), often));
            }
            let said = in_words(part_weights, &|at| part.rows[at]).into_iter();
            let said = said.map(|words| format!("{words} in {}", part.words));
            to.said.extend(said.filter(|words| !to.said.contains(words)).collect::<Vec<_>>());
            let inputs = evidence.inputs_of(part.microbatch)?;
            let of_rank = |rank| evidence.step.device_rows(inputs, rank);
            to.note_devices(&part.rank.map_or(Vec::new(), of_rank), part, part_weights);
            let loss = to.of_loss.0.get_mut(&part.microbatch)?;
            part.rows.iter().zip(part_weights).for_each(|(&t, weight)| loss[t] = *weight);
        }
        Some(())
    }
}
