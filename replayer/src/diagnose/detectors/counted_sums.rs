//! Sums of dk over microbatches or ranks, solved for how often each token is in them.
//!
//! What a sum of dk lacks of one rank's or one microbatch's tokens is no gradient of its own where
//! sums alone were recorded: the sum is solved for the weight of every token that it should hold.
//! Where the loss fails, too, its tokens count as often.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::identity::{Microbatch, Rank};

use super::addends::{adds_to, divisor};
use super::counted::in_words;
use super::direct::{distance, energy};
use super::plane::Rows;
use super::solve::whole_weights;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::{CountedLosses, Instead};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Expectation, Read, World};

/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;

/// What of each token is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    /// Its gradient.
    Whole,
    /// The softmax part of it.
    Softmax,
    /// The label's part of it.
    Label,
}

/// Sums of dk, and the loss where it fails, that hold their tokens otherwise than once.
pub struct CountedSums {
    sums: Instead,
    /// How often each token of a microbatch counts in the loss.
    of_loss: CountedLosses,
    /// Each run of tokens that counts otherwise, in words.
    pub said: Vec<String>,
    /// Parts of the sum of which all tokens count alike and otherwise than once, in words with how
    /// often.
    pub parts: Vec<(String, f64)>,
    /// Whether all parts' tokens count alike.
    pub of_parts: bool,
    /// The boxes of the scores whose tokens the sums hold, where ranks have several devices.
    pub devices: Vec<String>,
    /// Whether every device's tokens count alike, once or not at all.
    by_device: bool,
}

impl CountedSums {
    /// What the sums that fail hold. `None`
    /// where something else fails, dk of each microbatch was recorded, or a sum is not made of
    /// whole tokens or of too many.
    pub fn of(evidence: &Evidence<'_>, of: Of) -> Option<CountedSums> {
        let sums: Vec<Key> =
            evidence.failing.iter().filter(|key| key.stage.is_sum()).copied().collect();
        let known = |key: &Key| key.stage.is_sum() || key.stage == Stage::Loss;
        if sums.is_empty() || !evidence.has_sums_alone() || !evidence.failing.iter().all(known) {
            return None;
        }
        let ones = |one: &MicrobatchInputs| (one.microbatch, vec![1.0; one.tokens()]);
        let mut found = CountedSums {
            sums: Instead::default(),
            of_loss: CountedLosses(evidence.inputs.iter().map(ones).collect()),
            said: Vec::new(),
            parts: Vec::new(),
            of_parts: true,
            devices: Vec::new(),
            by_device: true,
        };
        for key in sums {
            Tokens::of(evidence, key, of)?.weighed(evidence, &mut found)?;
        }
        if !evidence.fails(Stage::Loss) {
            found.of_loss = CountedLosses::default();
        }
        Some(found)
    }

    /// Whether the sums hold all tokens of some devices and none of the others.
    pub fn is_of_devices(&self) -> bool {
        !self.of_parts && self.by_device && !self.devices.is_empty()
    }

    /// Notes which of a part's devices its sum holds.
    fn held_by(&mut self, devices: &[(String, Vec<usize>)], part: &Part, own: &[f64]) {
        let of: BTreeMap<usize, f64> = part.rows.iter().copied().zip(own.iter().copied()).collect();
        self.by_device &= !devices.is_empty();
        for (name, rows) in devices {
            let weights: BTreeSet<u64> =
                rows.iter().filter_map(|row| of.get(row)).map(|x| x.to_bits()).collect();
            let is = |x: f64| weights.len() == 1 && weights.contains(&x.to_bits());
            self.by_device &= is(0.0) || is(1.0);
            if is(1.0) && !self.devices.contains(name) {
                self.devices.push(name.clone());
            }
        }
    }
}

impl World for CountedSums {
    fn expected(&self, of: &mut Expectation<'_>) {
        self.sums.expected(of);
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        self.of_loss.nll(inputs, read, nll)
    }
}

/// Some tokens of a sum.
struct Part {
    /// Which of all tokens of the sum.
    of_sum: Range<usize>,
    microbatch: Option<Microbatch>,
    /// Their places in the microbatch.
    rows: Vec<usize>,
    /// Whose tokens they are, where they are one rank's.
    rank: Option<Rank>,
    words: String,
}

/// A sum of dk as the sum of a product a token.
struct Tokens {
    key: Key,
    parts: Vec<Part>,
    /// Entries of dlogits that are weighed, divided as the sum is, and q: `[n, V]`, `[n, D]`.
    entries: Rows,
    q: Rows,
    /// `[V, D]`: as captured, and as it should be.
    captured: Rows,
    reference: Rows,
    /// The energy that rounding gives the error.
    rounding: f64,
}

impl Tokens {
    fn of(evidence: &Evidence<'_>, key: Key, of: Of) -> Option<Tokens> {
        let divisor = divisor(evidence, key);
        let (mut parts, mut from) = (Vec::new(), 0);
        let [mut entries, mut whole, mut q] = [(); 3].map(|()| Vec::new());
        let (mut classes, mut width) = (0, 0);
        let units = evidence.units().iter();
        for unit in units.filter(|unit| adds_to(key, unit.rank)) {
            let plane = evidence.plane_of(unit.microbatch, unit.rank)?;
            let all = plane.entries().values;
            entries.extend(match of {
                Of::Whole => all.clone(),
                Of::Softmax => plane.dense.values.clone(),
                Of::Label => plane.of_labels().values,
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
        let captured = evidence.captured(key).filter(|of| of.columns == width && width > 0)?;
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

    /// Tokens that add nothing count as those before them of their part, or as the first that does.
    fn fill(&self, part: &Part, weights: &mut [f64]) {
        let counts = |at: &usize| energy(self.entries.row(*at)) > 0.0;
        let Some(first) = part.of_sum.clone().find(counts) else {
            weights[part.of_sum.clone()].fill(1.0);
            return;
        };
        let mut last = weights[first];
        for at in part.of_sum.clone() {
            last = if counts(&at) { weights[at] } else { last };
            weights[at] = last;
        }
    }

    /// Adds the sum with the weights that it has.
    fn weighed(&self, evidence: &Evidence<'_>, to: &mut CountedSums) -> Option<()> {
        let pairs = self.captured.values.iter().zip(&self.reference.values);
        let error = Rows { cols: self.captured.cols, values: pairs.map(|(c, r)| c - r).collect() };
        let of = ((&self.entries, &self.q), (&error, self.rounding));
        let mut weights = whole_weights(of.0, of.1, &|work| evidence.spend(work))?;
        self.parts.iter().for_each(|part| self.fill(part, &mut weights));
        let cols = self.entries.cols;
        let rows = weights.iter().zip(self.entries.values.chunks(cols.max(1)));
        let more = rows.flat_map(|(weight, row)| row.iter().map(move |x| (weight - 1.0) * x));
        let more = Rows { cols, values: more.collect() };
        let mut changed = more.transposed_times(&self.q);
        changed.values.iter_mut().zip(&self.reference.values).for_each(|(x, r)| *x += r);
        let off = |of: &Rows| distance(&self.captured.values, &of.values);
        if !(off(&changed) <= LEFT * off(&self.reference)) {
            return None;
        }
        let rows = (0..changed.count()).map(|at| (at, changed.row(at).to_vec()));
        to.sums = std::mem::take(&mut to.sums).rows(self.key, rows);
        for part in &self.parts {
            let own = &weights[part.of_sum.clone()];
            let alike = own.windows(2).all(|pair| pair[0] == pair[1]);
            to.of_parts &= alike;
            let told = to.parts.iter().any(|(words, _)| *words == part.words);
            if let Some(&often) = own.first().filter(|often| alike && **often != 1.0 && !told) {
                to.parts.push((part.words.clone(), often));
            }
            let said = in_words(own, &|at| part.rows[at]).into_iter();
            let said = said.map(|words| format!("{words} in {}", part.words));
            to.said.extend(said.filter(|words| !to.said.contains(words)).collect::<Vec<_>>());
            let inputs = evidence.inputs_of(part.microbatch)?;
            let of_rank = |rank| evidence.step.device_rows(inputs, rank);
            to.held_by(&part.rank.map_or(Vec::new(), of_rank), part, own);
            let loss = to.of_loss.0.get_mut(&part.microbatch)?;
            part.rows.iter().zip(own).for_each(|(&t, weight)| loss[t] = *weight);
        }
        Some(())
    }
}
