//! Which parameter of this run is which of the other: by the mapping, by the same name, and where
//! names differ by what the data show (`propose`).

use std::collections::BTreeSet;

use super::mapping::{Line, Mapping, MappingError, captured, filled};
use super::propose;
use super::side::Side;
use super::view::View;
use crate::algebra::names::pattern;

/// One tensor that both runs hold.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pair {
    pub(super) ours: View,
    pub(super) theirs: View,
}

impl Pair {
    /// What it is called: as in this run.
    pub(super) fn name(&self) -> String {
        self.ours.to_string()
    }
}

/// The parameters of two runs, brought together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Aligned {
    pub(super) pairs: Vec<Pair>,
    /// What this run alone has.
    pub(super) only_ours: Vec<String>,
    /// What the other run alone has.
    pub(super) only_theirs: Vec<String>,
    /// How parameters of other names were brought together, in sentences.
    pub(super) found: Vec<String>,
    /// What could not be brought together, in sentences.
    pub(super) open: Vec<String>,
}

/// Brings the parameters of two runs together.
pub(super) fn align(
    ours: &Side<'_>,
    theirs: &Side<'_>,
    mapping: &Mapping,
) -> Result<Aligned, MappingError> {
    let mut left = Left {
        ours: ours.names().into_iter().collect(),
        theirs: theirs.names().into_iter().collect(),
    };
    let mut aligned = Aligned::default();
    for line in &mapping.rules {
        let pairs = left.mapped(line)?;
        for pair in &pairs {
            fits(pair, ours, theirs).map_err(|why| line.wrong(why))?;
        }
        aligned.found.push(told(line, &pairs));
        aligned.pairs.extend(pairs);
    }
    let same: Vec<&str> = left.ours.intersection(&left.theirs).copied().collect();
    for name in same {
        let whole = || View::Whole(name.to_string());
        let pair = Pair { ours: whole(), theirs: whole() };
        if ours.shape(name) == theirs.shape(name) {
            left.take(&pair);
            aligned.pairs.push(pair);
        }
    }
    propose::propose(ours, theirs, &mut left, &mut aligned);
    for name in left.ours.intersection(&left.theirs) {
        let shape = |side: &Side<'_>| side.shape(name).unwrap_or_default();
        aligned.open.push(format!(
            "{name} has the shape {:?} in this run and {:?} in the other: say in a mapping \
             (--map, map= in Python) how they fit, as in {name} = {name}.T",
            shape(ours),
            shape(theirs)
        ));
    }
    aligned.only_ours = left.ours.iter().map(|name| name.to_string()).collect();
    aligned.only_theirs = left.theirs.iter().map(|name| name.to_string()).collect();
    aligned.pairs.sort_by(|a, b| a.ours.cmp(&b.ours));
    Ok(aligned)
}

/// Whether both sides of a pair have one shape; else why not.
fn fits(pair: &Pair, ours: &Side<'_>, theirs: &Side<'_>) -> Result<(), String> {
    let a =
        pair.ours.shape(&|name| ours.shape(name)).map_err(|why| format!("{why} in this run"))?;
    let b = pair.theirs.shape(&|name| theirs.shape(name));
    let b = b.map_err(|why| format!("{why} in the other run"))?;
    match a == b {
        true => Ok(()),
        false => Err(format!(
            "{} has the shape {a:?} in this run, and {} has {b:?} in the other",
            pair.ours, pair.theirs
        )),
    }
}

fn told(line: &Line, pairs: &[Pair]) -> String {
    match line.is_pattern() {
        true => format!("{} = {} ({} pairs), by the mapping", line.ours, line.theirs, pairs.len()),
        false => format!("{} = {}, by the mapping", line.ours, line.theirs),
    }
}

/// The parameters that are in no pair yet.
pub(super) struct Left<'a> {
    pub(super) ours: BTreeSet<&'a str>,
    pub(super) theirs: BTreeSet<&'a str>,
}

impl Left<'_> {
    /// Takes the parameters of a pair out.
    pub(super) fn take(&mut self, pair: &Pair) {
        self.ours.retain(|name| !pair.ours.names().contains(name));
        self.theirs.retain(|name| !pair.theirs.names().contains(name));
    }

    /// The pairs that a line of the mapping makes.
    fn mapped(&mut self, line: &Line) -> Result<Vec<Pair>, MappingError> {
        let pairs = match line.is_pattern() {
            true => self.matching(line),
            false => vec![Pair { ours: line.ours.clone(), theirs: line.theirs.clone() }],
        };
        if pairs.is_empty() {
            return Err(line.wrong("it fits no parameters that both runs have".into()));
        }
        for pair in &pairs {
            self.known(pair).map_err(|why| line.wrong(why))?;
            self.take(pair);
        }
        Ok(pairs)
    }

    /// The pairs whose names fit a pattern, on the side that has one name.
    fn matching(&self, line: &Line) -> Vec<Pair> {
        let is_ours = line.ours.names().len() == 1 && line.ours.names()[0].contains('*');
        let one = if is_ours { &line.ours } else { &line.theirs };
        let among = if is_ours { &self.ours } else { &self.theirs };
        let pair = |name: &&str| {
            let stars = captured(one.names()[0], name)?;
            let with = |view: &View| view.renamed(&|pattern| filled(pattern, &stars));
            let pair = Pair { ours: with(&line.ours), theirs: with(&line.theirs) };
            self.known(&pair).is_ok().then_some(pair)
        };
        among.iter().filter_map(pair).collect()
    }

    /// Whether the runs have the parameters of a pair, and no line took them; else what is wrong.
    fn known(&self, pair: &Pair) -> Result<(), String> {
        let sides = [
            (&pair.ours, &self.ours, &self.theirs, "this run", "the other run"),
            (&pair.theirs, &self.theirs, &self.ours, "the other run", "this run"),
        ];
        for (view, own, other, whose, not_whose) in sides {
            let Some(lost) = view.names().into_iter().find(|name| !own.contains(name)) else {
                continue;
            };
            let own: Vec<&str> = own.iter().copied().collect();
            let hint = match other.contains(lost) {
                true => format!("; {not_whose} has it, and the left of a line is of this run"),
                false => String::new(),
            };
            return Err(format!(
                "{whose} has no parameter {lost} that no line before it took: it has {}{hint}",
                listed(&own)
            ));
        }
        Ok(())
    }
}

/// Names, few of them in full.
pub(super) fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 12;
    match names.len() {
        0 => "none".into(),
        1..=SHOWN => names.join(", "),
        more => format!("{} and {} more", names[..SHOWN].join(", "), more - SHOWN),
    }
}

impl Aligned {
    /// What only one run has, a sentence for each run.
    pub(super) fn lacking(&self, ours: &Side<'_>, theirs: &Side<'_>) -> Vec<String> {
        let sides = [
            (&self.only_ours, ours, "this run", "the other run"),
            (&self.only_theirs, theirs, "the other run", "this run"),
        ];
        let sentence = |(only, side, whose, not): (&Vec<String>, &Side<'_>, &str, &str)| {
            let only: Vec<&str> = only.iter().map(String::as_str).collect();
            (!only.is_empty()).then(|| {
                let what = pattern(&only, &side.names());
                format!("{what} of {whose}: nothing in {not} is known to be the same parameter")
            })
        };
        sides.into_iter().filter_map(sentence).collect()
    }
}
