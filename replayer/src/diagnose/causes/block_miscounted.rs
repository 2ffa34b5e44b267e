//! `block-miscounted`: a chunk of tokens or a tile of the vocabulary is left out of a sum, or is
//! in it more than once; or a tile of a gradient is not written, or written more than once.
//!
//! Real: the last partial chunk that a floor division drops, one that is moved back over its
//! neighbour and counts the overlap twice, rows of a reused buffer behind the last one.
//!
//! Detectors: dk is the sum of a product a token, dq of one a class: the sum is solved for how
//! often it holds each (`detectors::solve`), rows and columns likewise. Nothing is enumerated.
//! Emulation: tokens that count as often as was found, for dk alone; classes, rows or columns
//! of a gradient as often.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::direct::distance;
use crate::diagnose::detectors::plane::{Plane, Rows};
use crate::diagnose::detectors::solve::{runs, whole_factors, whole_weights};
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::rearranged::Instead;
use crate::head::Stage;

/// The catalogue's entry.
pub struct BlockMiscounted;

/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 0.1;
/// Runs that are told in words; where there are more it is no block.
const TOLD: usize = 6;

impl Cause for BlockMiscounted {
    fn id(&self) -> &str {
        "block-miscounted"
    }

    fn about(&self) -> &str {
        "a chunk or tile is left out of a gradient, or is in it more than once"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "a last partial chunk that a floor division drops, or that is moved back over its neighbour",
        ]
    }

    fn advice(&self) -> &str {
        "look at the bounds of the loop over chunks or tiles: the last partial one must be masked, and counted once"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        [Stage::Dq, Stage::Dk].into_iter().flat_map(|stage| of_gradient(evidence, stage)).collect()
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// Addends of a sum: tokens of dk, classes of dq.
    Addends,
    /// The label's addends of dk alone: of tokens of one label only the last is there.
    LastOfLabel,
    Rows,
    /// Rows of dk are divided by how often they are a label.
    OverHits,
    Columns,
}

fn of_gradient(evidence: &Evidence<'_>, stage: Stage) -> Vec<Hypothesis> {
    let keys: Vec<Key> = evidence.failing_of(&[stage]).map(|(key, _)| key).collect();
    if keys.is_empty() {
        return Vec::new();
    }
    let mut found: Vec<(What, Counted)> =
        [What::Addends, What::LastOfLabel, What::Rows, What::OverHits, What::Columns]
            .map(|what| (what, Counted::default()))
            .into();
    for key in keys {
        let Some(of) = Gradient::of(evidence, key) else { return Vec::new() };
        found.retain_mut(|(what, counted)| of.counts(evidence, *what, counted));
        if found.is_empty() {
            return Vec::new();
        }
    }
    found.into_iter().filter_map(|(what, counted)| counted.hypothesis(what, stage)).collect()
}

/// A gradient that fails beside what it should be.
struct Gradient {
    key: Key,
    plane: Rc<Plane>,
    captured: Rows,
    reference: Rows,
    rounding: f64,
}

impl Gradient {
    fn of(evidence: &Evidence<'_>, key: Key) -> Option<Gradient> {
        let plane = evidence.plane(key)?;
        let values = evidence.captured(key)?;
        let entries = plane.entries();
        let (captured, reference) = match key.stage {
            Stage::Dq => (plane.dq(&values), entries.times(&plane.k)),
            _ => (plane.dk(&values), entries.transposed_times(&plane.q)),
        };
        let rounding = evidence.residuals.get(&key)?.floor;
        let same = captured.values.len() == reference.values.len();
        same.then_some(Gradient { key, plane, captured, reference, rounding })
    }

    fn error(&self) -> Rows {
        let pairs = self.captured.values.iter().zip(&self.reference.values);
        Rows { cols: self.captured.cols, values: pairs.map(|(c, r)| c - r).collect() }
    }

    /// Adds what this gradient holds; false where it is none of whole numbers.
    fn counts(&self, evidence: &Evidence<'_>, what: What, to: &mut Counted) -> bool {
        let of_dk = self.key.stage == Stage::Dk;
        let entries = || match (what, of_dk) {
            (What::LastOfLabel, true) => self.plane.of_labels(),
            (_, true) => self.plane.entries(),
            (_, false) => self.plane.entries().transposed(),
        };
        let other = if of_dk { &self.plane.q } else { &self.plane.k };
        let weights = match what {
            What::LastOfLabel | What::OverHits if !of_dk => None,
            What::LastOfLabel => self.last_of_label(),
            What::OverHits => Some(self.over_hits()),
            What::Addends => {
                let error = (&self.error(), self.rounding);
                whole_weights((&entries(), other), error, &|work| evidence.spend(work))
            }
            What::Rows => whole_factors(&self.captured, &self.reference),
            What::Columns => {
                whole_factors(&self.captured.transposed(), &self.reference.transposed())
            }
        };
        // All alike are a factor of the whole.
        let Some(weights) = weights.filter(|all| all.iter().any(|x| *x != all[0])) else {
            return false;
        };
        let changed = match what {
            What::Rows | What::OverHits => scaled(&self.reference, &weights),
            What::Columns => scaled(&self.reference.transposed(), &weights).transposed(),
            What::Addends | What::LastOfLabel => {
                let mut more =
                    scaled(&entries(), &weights.iter().map(|x| x - 1.0).collect::<Vec<_>>());
                more = more.transposed_times(other);
                more.values.iter_mut().zip(&self.reference.values).for_each(|(x, r)| *x += r);
                more
            }
        };
        let off = |other: &Rows| distance(&self.captured.values, &other.values);
        if !(off(&changed) <= LEFT * off(&self.reference)) {
            return false;
        }
        // Rows of dq that hold nothing were not written, and that has a name.
        let unwritten = weights.iter().all(|&x| x == 1.0 || x == 0.0);
        if what == What::Rows && !of_dk && unwritten {
            return false;
        }
        let runs = runs(&weights);
        let place = |at: usize| match (what, of_dk) {
            (What::Addends | What::LastOfLabel, true) | (What::Rows, false) => self.plane.rows[at],
            _ => at,
        };
        for (run, times) in &runs {
            let (first, last) = (place(run.start), place(run.end - 1));
            let places =
                if first == last { first.to_string() } else { format!("{first} to {last}") };
            let often = match *times {
                0.0 => "left out".to_string(),
                2.0 => "twice".to_string(),
                times => format!("{times} times"),
            };
            let said = format!("{places} {often}");
            if !to.said.contains(&said) {
                to.said.push(said);
            }
        }
        let row = |at: usize| if of_dk { at } else { self.plane.rows[at] };
        let rows = (0..changed.count()).map(|at| (row(at), changed.row(at).to_vec()));
        to.world = std::mem::take(&mut to.world).rows(self.key, rows);
        true
    }
}

impl Gradient {
    /// The last token of each label once, others not at all; none where it leaves as much.
    fn last_of_label(&self) -> Option<Vec<f64>> {
        let mut last = BTreeMap::new();
        for (i, label) in self.plane.labels.iter().enumerate() {
            last.extend(label.map(|(class, _)| (class, i)));
        }
        let counts = |(i, label): (usize, &Option<(usize, f64)>)| {
            let kept = label.is_none_or(|(class, _)| last[&class] == i);
            f64::from(u8::from(kept))
        };
        let weights: Vec<f64> = self.plane.labels.iter().enumerate().map(counts).collect();
        weights.contains(&0.0).then_some(weights)
    }

    fn over_hits(&self) -> Vec<f64> {
        let mut hits = vec![0.0f64; self.reference.count()];
        self.plane.labels.iter().flatten().for_each(|(class, _)| hits[*class] += 1.0);
        hits.iter().map(|n| 1.0 / n.max(1.0)).collect()
    }
}

fn scaled(rows: &Rows, factors: &[f64]) -> Rows {
    let of = |(at, x): (usize, &f64)| x * factors[at / rows.cols.max(1)];
    Rows { cols: rows.cols, values: rows.values.iter().enumerate().map(of).collect() }
}

/// Gradients in which something counts more or less often.
#[derive(Default)]
struct Counted {
    world: Instead,
    /// What is different of all gradients, in words: once where it is the same in several.
    said: Vec<String>,
}

impl Counted {
    fn hypothesis(self, what: What, stage: Stage) -> Option<Hypothesis> {
        let words = match (what, stage) {
            (What::Addends, Stage::Dk) => "tokens",
            (What::Addends, _) => "classes",
            (What::LastOfLabel, _) => "the label's addends",
            (What::Rows | What::OverHits, _) => "rows",
            (What::Columns, _) => "columns",
        };
        let rule = match what {
            What::LastOfLabel => Some("of tokens of one label the last one's alone is there"),
            What::OverHits => Some("each is divided by how often it is a label"),
            _ => None,
        };
        // What is scattered by no rule is no block.
        if rule.is_none() && self.said.len() > TOLD {
            return None;
        }
        let said = rule.map_or_else(|| self.said.join(", "), str::to_string);
        let parameters =
            vec![("of", stage.name().to_string()), ("what", words.to_string()), ("which", said)];
        let fitted = if rule.is_some() { 0 } else { 1 + self.said.len() };
        Some(Hypothesis::new(self.world, parameters).fitted(fitted))
    }
}
