//! `part-missing`: a term of the gradient is left out, has the wrong sign, or is there twice; or
//! one was added that is no part of the loss: a multiple of k, as coupled weight decay does.
//!
//! Real: a detached lse or label logit (`stop_gradient` around one of them), `p + onehot`.
//!
//! Detectors: the captured dq and dk are solved for the factors of their softmax part and their
//! label part, and dk also for a multiple of k. The sums of dk are solved for a multiple of k and,
//! where only sums were recorded, for either part of each rank's and microbatch's tokens.
//! Emulation: the cotangents of lse and of the label's logit times those factors, and the multiple
//! of k added.

use std::collections::BTreeMap;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::addends::Summed;
use crate::diagnose::detectors::dlogits_plane::Rows;
use crate::diagnose::detectors::fitted_numbers::rounded;
use crate::diagnose::detectors::least_squares::multiples;
use crate::diagnose::detectors::single_tokens::{energy, multiple};
use crate::diagnose::detectors::sum_counts::{CountedSums, GradientPart};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::world::{Expectation, UnitTokens, World};

/// The catalogue's entry.
pub struct PartMissing;

/// How far a fitted factor may be from a whole number, or multiples of k from each other,
/// relatively.
const NEAR: f64 = 0.03;
/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 0.02;

impl Cause for PartMissing {
    fn id(&self) -> &str {
        "part-missing"
    }

    fn about(&self) -> &str {
        "a term of the gradient is left out, has the wrong sign or is there twice, or another is added"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "an lse or a label logit under stop_gradient",
            "weight decay that is added to the gradient",
        ]
    }

    fn advice(&self) -> &str {
        "compare the backward with the derivative term by term: g p k - g k[label] for q, g p q - g q at the label's row for k"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let solved = [Stage::Dq, Stage::Dk].map(|stage| solved(evidence, stage));
        let terms_of = |terms: &Option<Terms>| terms.clone();
        let mut all: Vec<Terms> = solved.iter().filter_map(terms_of).collect();
        if let [Some(dq), Some(dk)] = &solved
            && dq.softmax == dk.softmax
            && dq.label == dk.label
        {
            all.push(Terms { parts: vec![Part::Plane, Part::OfQ, Part::OfK], ..dk.clone() });
        }
        let mut hypotheses: Vec<Hypothesis> = all.into_iter().map(Terms::hypothesis).collect();
        hypotheses.extend(of_sums(evidence));
        hypotheses.extend(of_parts_of_sums(evidence));
        hypotheses
    }
}

/// Hypotheses that sums of dk lack one of the two parts for some microbatches or ranks, or contain
/// it twice.
fn of_parts_of_sums(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let hypothesis_of = |(part, name): (GradientPart, &'static str)| {
        let counted = CountedSums::of(evidence, part)?;
        if !counted.of_parts || counted.parts.is_empty() {
            return None;
        }
        let told = |(words, x): &(String, f64)| format!("{} in {words}", often(*x));
        let words = counted.parts.iter().map(told).collect::<Vec<_>>().join(", ");
        let (fitted, where_summed) = (counted.parts.len(), "the sums of dk".to_string());
        Some(Hypothesis::new(counted, vec![("of", where_summed), (name, words)]).fitted(fitted))
    };
    let terms =
        [(GradientPart::Softmax, "the softmax part"), (GradientPart::Label, "the label's part")];
    terms.into_iter().filter_map(hypothesis_of).collect()
}

/// The factor of a term in words.
fn often(x: f64) -> String {
    match x {
        0.0 => "left out".to_string(),
        -1.0 => "with the wrong sign".to_string(),
        2.0 => "twice".to_string(),
        x => format!("{x} times"),
    }
}

/// The hypothesis of a multiple of k in the sums of dk, as coupled weight decay adds it.
fn of_sums(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut times: Option<f64> = None;
    let k = evidence.inputs.first()?.head(evidence.step)?.k;
    let values = k.to_f64();
    let mut keys = Vec::new();
    for (key, _) in evidence.failing_of(&Stage::SUMS) {
        let sum = Summed::of(evidence, key, true)?;
        if values.len() != sum.captured.values.len() {
            return None;
        }
        let pairs = sum.captured.values.iter().zip(sum.total());
        let error: Vec<f64> = pairs.map(|(captured, sum)| captured - sum).collect();
        let multiple_of_k = rounded(multiple(&error, &values).times, 3);
        let left: f64 =
            error.iter().zip(&values).map(|(e, k)| (e - multiple_of_k * k).powi(2)).sum();
        let alike =
            times.is_none_or(|other| (other - multiple_of_k).abs() <= NEAR * multiple_of_k.abs());
        if !alike || multiple_of_k == 0.0 || !(left <= LEFT * energy(&error)) {
            return None;
        }
        times = times.or(Some(multiple_of_k));
        keys.push(key);
    }
    let of_k = times?;
    let rows = values.chunks(k.cols.max(1)).map(<[f64]>::to_vec).collect();
    let parameters =
        vec![("of", "the sum of dk".to_string()), ("added", format!("{of_k} times k"))];
    Some(Hypothesis::new(Added { keys, of_k, rows }, parameters).fitted(1))
}

/// A multiple of k is added to some sums.
struct Added {
    keys: Vec<Key>,
    of_k: f64,
    rows: Vec<Vec<f64>>,
}

impl World for Added {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        let is_same_place =
            |key: &Key| key.stage == expectation.place.stage && key.rank == expectation.place.rank;
        if !self.keys.iter().any(is_same_place) {
            return;
        }
        for (row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            values.iter_mut().zip(&self.rows[*row]).for_each(|(x, k)| *x += self.of_k * k);
        }
    }
}

/// The factors of a gradient's terms.
#[derive(Clone, Debug)]
struct Terms {
    parts: Vec<Part>,
    softmax: f64,
    label: f64,
    /// The multiple of k that is added to dk.
    of_k: f64,
    /// k of the valid classes, where a multiple of it is there.
    k: BTreeMap<usize, Vec<f64>>,
}

/// The factors of a gradient's terms, where they are the same in all its failing comparisons.
fn solved(evidence: &Evidence<'_>, stage: Stage) -> Option<Terms> {
    let mut terms: Option<Terms> = None;
    for (key, _) in evidence.failing_of(&[stage]) {
        let gradient = of_gradient(evidence, key)?;
        let same = |other: &Terms| {
            other.softmax == gradient.softmax
                && other.label == gradient.label
                && (other.of_k - gradient.of_k).abs() <= NEAR * gradient.of_k.abs()
        };
        if !terms.as_ref().is_none_or(same) {
            return None;
        }
        terms = Some(gradient);
    }
    terms
}

fn of_gradient(evidence: &Evidence<'_>, key: Key) -> Option<Terms> {
    let plane = evidence.plane(key)?;
    let values = evidence.captured(key)?;
    let of_dk = key.stage == Stage::Dk;
    let labels = plane.of_labels();
    let product = |entries: &Rows| match of_dk {
        true => entries.transposed_times(&plane.q),
        false => entries.times(&plane.k),
    };
    let captured = if of_dk { plane.dk(&values) } else { plane.dq(&values) };
    let mut terms = vec![product(&plane.dense).values, product(&labels).values];
    if of_dk {
        terms.push(plane.k.values.clone());
    }
    if terms.iter().any(|term| term.len() != captured.values.len()) {
        return None;
    }
    let all: Vec<&[f64]> = terms.iter().map(|term| &term[..]).collect();
    let times = multiples(&all, &captured.values)?;
    let (softmax, label) = (times[0].round(), times[1].round());
    let of_k = times.get(2).map_or(0.0, |&x| rounded(x, 3));
    // A multiple of k that is small beside dk is only noise.
    let share = |x: f64| x * x * energy(&plane.k.values);
    let of_k = if share(of_k) < 1e-4 * energy(&captured.values) { 0.0 } else { of_k };
    let near = (times[0] - softmax).abs() <= NEAR && (times[1] - label).abs() <= NEAR;
    // Equal factors are one factor on the whole gradient, which is another cause.
    let as_declared = softmax == label && (of_k == 0.0 || softmax != 1.0);
    if !near || as_declared || softmax.abs() > 2.0 || label.abs() > 2.0 {
        return None;
    }
    let off = |by: [f64; 3]| -> f64 {
        let squared_error = |index: usize| -> f64 {
            let sum: f64 = terms.iter().zip(by).map(|(term, x)| x * term[index]).sum();
            (captured.values[index] - sum).powi(2)
        };
        (0..captured.values.len()).map(squared_error).sum()
    };
    if !(off([softmax, label, of_k]) <= LEFT * off([1.0, 1.0, 0.0])) {
        return None;
    }
    let rows = (0..plane.k.count()).map(|row| (row, plane.k.row(row).to_vec()));
    let k = if of_k == 0.0 { BTreeMap::new() } else { rows.collect() };
    let parts = vec![Part::of(key.stage)];
    Some(Terms { parts, softmax, label, of_k, k })
}

impl Terms {
    fn hypothesis(self) -> Hypothesis {
        let names = self.parts.iter().filter(|part| **part != Part::Plane).map(|part| part.words());
        let mut parameters = vec![("of", names.collect::<Vec<_>>().join(" and "))];
        for (name, x) in [("the softmax part", self.softmax), ("the label's part", self.label)] {
            if x != 1.0 {
                parameters.push((name, often(x)));
            }
        }
        if self.of_k != 0.0 {
            parameters.push(("added", format!("{} times k", self.of_k)));
        }
        let fitted = usize::from(self.of_k != 0.0);
        Hypothesis::new(self, parameters).fitted(fitted)
    }
}

impl World for Terms {
    fn speaks_of(&self, stage: Stage) -> bool {
        stage.is_gradient() && self.parts.contains(&Part::of(stage))
    }

    fn cotangents(&self, _tokens: &UnitTokens<'_>, [lse, label, smooth]: [&mut [f64]; 3]) {
        lse.iter_mut().chain(smooth).for_each(|x| *x *= self.softmax);
        label.iter_mut().for_each(|x| *x *= self.label);
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        if expectation.place.stage != Stage::Dk {
            return;
        }
        for (row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            if let Some(k) = self.k.get(row) {
                values.iter_mut().zip(k).for_each(|(x, k)| *x += self.of_k * k);
            }
        }
    }
}
