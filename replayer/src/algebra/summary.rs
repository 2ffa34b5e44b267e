//! The report of a step: which stages of how many parameters agree, and what diverges in groups of
//! parameters with the same outcome.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::part::Part;
use serde::Serialize;

use super::alike::{self, SAME, is_one_factor, one_factor, tolerance};
use super::causes::{self, Cause};
use super::inventory::Inventory;
use super::lacks::lacks;
use super::names::pattern;
use super::norm_gap::NormGap;
use super::outcome::{Judged, Outcome, Reading, Stage};
use super::own_scaling::Multiplied;
use super::rule_of::DeclaredRule;
use super::scaled_alone;
use super::sum_causes::terms_of;
use super::table::{Row, table};
use super::unchecked::unchecked;
use crate::dump::sampled::Sample;

/// Everything that was found of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Parameters of which something was recorded.
    pub parameters: usize,
    /// Elements of them.
    pub elements: u64,
    /// What a sample stands for; absent where everything was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled: Option<Sampled>,
    /// By which rules optimizers were judged that declare one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<DeclaredRule>,
    /// Every stage that was judged or could not be, in order.
    pub stages: Vec<StageSummary>,
    /// What diverges, the earliest stage first.
    pub diverged: Vec<Group>,
    /// What the norm of the gradients would have been; absent where nothing says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<NormGap>,
    /// What code of the job's own has multiplied all gradients by; absent where it is no one number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multiplied: Option<Multiplied>,
    /// What was not judged, by reason.
    pub unchecked: Vec<Unchecked>,
    /// What keeps the step from being agreed although nothing of it diverges, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// What is wrong with the declarations, in sentences.
    pub faults: Vec<String>,
    /// Every parameter, and then every norm, with how it fares at each stage: in the order of the
    /// model.
    pub table: Vec<Row>,
    /// Every stage of every parameter on the ranks that hold the same of it.
    pub judged: Vec<Judged>,
}

/// The parameters of which a sample was recorded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sampled {
    /// How many they are.
    pub parameters: usize,
    /// Elements that were recorded of them.
    pub elements: u64,
    /// Elements that they have.
    pub of: u64,
    /// A fault in as many elements of one of them, wherever they lie, meets its sample in 19 of 20
    /// cases.
    pub scattered: u64,
    /// Those whose gradient is zero in the whole sample and not outside of it: nothing of their sums
    /// was seen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<String>,
}

/// How the parameters fare at one stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageSummary {
    /// The stage.
    pub stage: Stage,
    /// Parameters (or norms) that agree on all ranks.
    pub agreed: usize,
    /// Those that diverge.
    pub diverged: usize,
    /// Those of which nothing can be said.
    pub unchecked: usize,
    /// The smallest factor, as its distance from 1, that would have been seen in each that agrees.
    pub seen_from: Option<f64>,
}

/// Parameters that diverge at one stage in the same way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The stage.
    pub stage: Stage,
    /// The parameters in words.
    pub what: String,
    /// Their names.
    pub parameters: Vec<String>,
    /// The ranks.
    pub ranks: Vec<u32>,
    /// What reproduces it.
    pub reading: Option<Reading>,
    /// Captured over reference, the same for all of them, where it is one number.
    pub factor: Option<f64>,
    /// Of the one that is furthest off: which bound it leaves, its relative error and floor.
    pub reason: String,
    /// Its relative error.
    pub error: f64,
    /// The relative error that rounding explains.
    pub floor: f64,
    /// Its worst element: parameter, index, captured, reference.
    pub worst: Option<(String, Vec<u64>, f64, f64)>,
    /// The tensor of the optimizer's state in which that is; absent at other stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Parameters of which a stage was not judged, for one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unchecked {
    /// The stage.
    pub stage: Stage,
    /// The parameters in words.
    pub what: String,
    /// The reason.
    pub why: String,
}

impl StepReport {
    /// Brings together what was judged.
    pub(super) fn of(inventory: &Inventory<'_>, mut judged: Vec<Judged>) -> StepReport {
        settle(&mut judged);
        scaled_alone::tell(inventory, &mut judged);
        alike::say_as_one(&mut judged);
        withdraw_rates(inventory, &mut judged);
        let names: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
        let table = table(inventory, &judged);
        let stages = stages(&judged);
        StepReport {
            parameters: names.len(),
            elements: table.iter().map(|row| row.elements).sum(),
            sampled: Sampled::of(inventory, &judged),
            rules: DeclaredRule::of(inventory),
            lacks: lacks(inventory, &stages, &judged),
            stages,
            norm: NormGap::of(inventory, &judged, &names),
            multiplied: inventory.own_scaling.as_ref().and_then(|own| own.told.clone()),
            diverged: groups(&judged, &names),
            unchecked: unchecked(&judged, &names),
            faults: inventory.faults.clone(),
            table,
            judged,
        }
    }

    /// The first divergence: the earliest stage's.
    pub(crate) fn first(&self) -> Option<&Group> {
        self.diverged.first()
    }

    /// How many comparisons were made.
    pub(crate) fn compared(&self) -> usize {
        let made = |one: &&Judged| !matches!(one.result, Outcome::Unchecked { .. });
        self.judged.iter().filter(made).count()
    }
}

/// How often a fault may be missed by a sample that is called likely to meet it.
const MISSED: f64 = 0.05;

impl Sampled {
    fn of(inventory: &Inventory<'_>, judged: &[Judged]) -> Option<Sampled> {
        let samples: Vec<_> = inventory.samples.all().collect();
        if samples.is_empty() {
            return None;
        }
        // Of elements that lie anywhere a share is recorded, each by itself.
        let scattered = |sample: &Sample| {
            let share = sample.elements() as f64 / sample.of().max(1) as f64;
            (MISSED.ln() / (-share).ln_1p()).ceil() as u64
        };
        let mut energies: BTreeMap<&str, f64> = BTreeMap::new();
        for one in judged.iter().filter(|one| one.tensor.starts_with("step.reduced:")) {
            *energies.entry(&one.parameter).or_default() +=
                one.energies.map_or(f64::NAN, |energies| energies.captured);
        }
        let is_unseen = |name: &&String| {
            let squares = inventory.declared_squares(name, "reduced", Rank(0));
            let whole = squares.and_then(Result::ok).map_or(0.0, |held| held.whole());
            energies.get(name.as_str()) == Some(&0.0) && whole > 0.0
        };
        Some(Sampled {
            parameters: samples.len(),
            elements: samples.iter().map(|(_, sample)| sample.elements()).sum(),
            of: samples.iter().map(|(_, sample)| sample.of()).sum(),
            scattered: samples.iter().map(|(_, sample)| scattered(sample)).max().unwrap_or(0),
            unseen: samples.iter().map(|(name, _)| *name).filter(is_unseen).cloned().collect(),
        })
    }
}

/// Of all that reproduces a divergence takes what reproduces most parameters of the stage: what one
/// small parameter cannot tell apart others can.
fn settle(judged: &mut [Judged]) {
    withdraw(judged);
    let mut counts: BTreeMap<(Stage, &'static str), BTreeSet<String>> = BTreeMap::new();
    for one in judged.iter() {
        let Some(divergence) = one.result.divergence() else { continue };
        for reading in &divergence.readings {
            let explained = counts.entry((one.stage, reading.cause)).or_default();
            explained.insert(one.parameter.clone());
        }
    }
    let misfits = misfits(judged);
    for one in judged.iter_mut() {
        let stage = one.stage;
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let count = |reading: &Reading| counts[&(stage, reading.cause)].len();
        let most = divergence.readings.iter().map(count).max().unwrap_or(0);
        let all = divergence.readings.iter().filter(|reading| count(reading) == most);
        divergence.reading = likeliest(&all.collect::<Vec<_>>(), stage, &misfits);
    }
    adopt(judged);
}

/// Gives parameters that have a factor and no cause the cause of others with that factor at the same
/// stage: a factor of very few elements is not proved by them.
fn adopt(judged: &mut [Judged]) {
    adopt_terms(judged);
    let known = |one: &Judged| {
        let divergence = one.result.divergence()?;
        let reading = divergence.reading.clone().filter(is_known)?;
        Some((one.stage, divergence.factor?, reading))
    };
    let known: Vec<(Stage, f64, Reading)> = judged.iter().filter_map(known).collect();
    for one in judged {
        let stage = one.stage;
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let Some(factor) = divergence.factor else { continue };
        if divergence.reading.as_ref().is_some_and(is_known) {
            continue;
        }
        let same =
            |own: &&(Stage, f64, Reading)| own.0 == stage && is_one_factor(own.1, factor, SAME);
        if let Some((.., reading)) = known.iter().find(same) {
            divergence.reading = Some(reading.clone());
        } else if one.place.elements() == Some(1) {
            // Any error of one element is a factor.
            (divergence.reading, divergence.factor) = (None, None);
        }
    }
}

/// Gives parameters whose sum was solved, and whose coefficients so few elements do not prove, the
/// cause of others that have the same coefficients.
fn adopt_terms(judged: &mut [Judged]) {
    let reading = |one: &Judged| Some((one.stage, one.result.divergence()?.reading.clone()?));
    let all: Vec<(Stage, Reading)> = judged.iter().filter_map(reading).collect();
    for one in judged {
        let stage = one.stage;
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let Some(own) = divergence.reading.as_ref().filter(|own| !is_known(own)) else { continue };
        let Some(terms) = terms_of(&own.words) else { continue };
        let same = |(other, known): &&(Stage, Reading)| {
            *other == stage && is_known(known) && known.words.ends_with(&format!(": {terms}"))
        };
        if let Some((_, known)) = all.iter().find(same) {
            divergence.reading = Some(known.clone());
        }
    }
}

fn is_known(reading: &Reading) -> bool {
    reading.cause != causes::UNKNOWN.name
}

/// By how much a reading must fit better than a simpler one to be preferred: twice the logarithm of
/// how much likelier it makes what was captured, here 20 times.
const CLEARLY: f64 = 6.0;

/// How many parameters a reading reproduces at a stage, and how well in all.
type Misfits = BTreeMap<(Stage, Reading), (usize, f64)>;

fn misfits(judged: &[Judged]) -> Misfits {
    let mut all = Misfits::new();
    for one in judged {
        for reading in one.result.divergence().into_iter().flat_map(|own| &own.readings) {
            let of = all.entry((one.stage, reading.clone())).or_default();
            *of = (of.0 + 1, of.1 + reading.misfit.0.unwrap_or(f64::NAN));
        }
    }
    all
}

/// Causes with a number that was solved for: they fit beside others that have none, and say less.
const FITTED: [Cause; 5] = [
    causes::LR_SCALED,
    causes::DECAY_EXCLUDED,
    causes::DECAY_OTHER,
    causes::SETTING_OTHER,
    causes::SCALED,
];

/// The first of several readings, which is the simplest, or one that reproduces as many parameters
/// and fits them clearly better. Where two causes without a fitted number fit alike, either may be
/// the right one.
fn likeliest(readings: &[&Reading], stage: Stage, misfits: &Misfits) -> Option<Reading> {
    let of = |reading: &Reading| misfits[&(stage, reading.clone())];
    let first = readings.first()?;
    let count = of(first).0;
    let same = readings.iter().filter(|own| of(own).0 == count && !of(own).1.is_nan());
    let lowest = same.clone().min_by(|a, b| of(a).1.total_cmp(&of(b).1));
    let best = lowest.filter(|own| of(first).1 - of(own).1 > CLEARLY).unwrap_or(first);
    let is_fitted = |own: &Reading| FITTED.iter().any(|cause| cause.name == own.cause);
    let is_as_good = |own: &&&Reading| {
        own.cause != best.cause && !is_fitted(own) && of(own).1 - of(best).1 <= CLEARLY
    };
    let other = same.clone().find(is_as_good).filter(|_| !is_fitted(best));
    Some(match other {
        None => (*best).clone(),
        Some(other) => causes::UNKNOWN.reads(format!(
            "{} ({}), or {} ({}): both give what was recorded to rounding",
            best.words, best.cause, other.words, other.cause
        )),
    })
}

/// How many parameters a fitted cause must explain for each that it does not, to stand.
const STANDS: usize = 4;

/// Takes back causes that fit much where the same stage of many other parameters has no cause: a sum
/// in few bits explains whatever errs by as little, and a factor that was fitted whatever is one.
fn withdraw(judged: &mut [Judged]) {
    let mut counts: BTreeMap<Stage, [BTreeSet<&str>; 2]> = BTreeMap::new();
    for one in judged.iter() {
        let Some(divergence) = one.result.divergence() else { continue };
        let is_explained = divergence.readings.iter().any(is_known);
        counts.entry(one.stage).or_default()[usize::from(is_explained)].insert(&one.parameter);
    }
    let is_many = |[unexplained, explained]: &[BTreeSet<&str>; 2]| {
        !unexplained.is_empty() && explained.len() < STANDS * unexplained.len()
    };
    let many = counts.into_iter().filter(|(_, own)| is_many(own)).map(|(stage, _)| stage);
    let many: BTreeSet<Stage> = many.collect();
    for one in judged.iter_mut().filter(|one| many.contains(&one.stage)) {
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        divergence.readings.retain(|own| own.cause != causes::LOW_PRECISION.name);
        for own in &mut divergence.readings {
            if [causes::LR_SCALED.name, causes::SETTING_OTHER.name].contains(&own.cause) {
                *own = causes::UNKNOWN.reads(own.words.clone());
            }
        }
    }
}

/// Learning rates of several sizes for parameters of one group of an optimizer are none: each of these
/// has a factor of its own, as where a rule takes a norm or a size of each parameter.
fn withdraw_rates(inventory: &Inventory<'_>, judged: &mut [Judged]) {
    let is_rate = |one: &Judged| {
        let reading = one.result.divergence()?.reading.as_ref()?;
        (reading.cause == causes::LR_SCALED.name).then_some(())?;
        let declared = inventory.declared_of(*one.ranks.first()?, &one.parameter)?;
        Some(((declared.optimizer, declared.group), one.result.divergence()?.factor?))
    };
    let mut factors: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for (group, factor) in judged.iter().filter_map(is_rate) {
        let own = factors.entry(group).or_default();
        if !own.iter().any(|other| (other / factor - 1.0).abs() < 0.02) {
            own.push(factor);
        }
    }
    for one in judged {
        let Some((group, _)) = is_rate(one).filter(|(group, _)| factors[group].len() > 2) else {
            continue;
        };
        let count = factors[&group].len();
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let words = format!(
            "its change has a factor that is none of the learning rate: parameters of one group have \
             {count} different ones"
        );
        divergence.reading = Some(causes::UNKNOWN.reads(words));
    }
}

/// What was judged, as the parameters' own outcome: the gravest of all ranks and tensors.
fn stages(judged: &[Judged]) -> Vec<StageSummary> {
    let mut gravest: BTreeMap<(Stage, &str), u8> = BTreeMap::new();
    let mut seen: BTreeMap<Stage, f64> = BTreeMap::new();
    for one in judged {
        // Norms are told apart by their tensor, and parameters by their name.
        let name = if one.parameter.is_empty() { &one.tensor } else { &one.parameter };
        let grave = match &one.result {
            Outcome::Agreed { seen_from, .. } => {
                if let Some(factor) = seen_from {
                    let most = seen.entry(one.stage).or_insert(0.0);
                    *most = most.max(*factor);
                }
                0
            }
            Outcome::Unchecked { .. } => 1,
            Outcome::Diverged(_) => 2,
        };
        let gravest = gravest.entry((one.stage, name)).or_insert(0);
        *gravest = grave.max(*gravest);
    }
    let summary = |stage: Stage| {
        let count = |grave: u8| {
            gravest.iter().filter(|((of, _), own)| *of == stage && **own == grave).count()
        };
        let (agreed, unchecked, diverged) = (count(0), count(1), count(2));
        let seen_from = seen.get(&stage).copied();
        StageSummary { stage, agreed, diverged, unchecked, seen_from }
    };
    let all = Stage::ALL.iter().map(|stage| summary(*stage));
    all.filter(|stage| stage.agreed + stage.diverged + stage.unchecked > 0).collect()
}

/// Divergences with the same stage and reading, or without a reading with the same factor.
fn groups(judged: &[Judged], names: &[&str]) -> Vec<Group> {
    let mut groups: BTreeMap<(Stage, Option<Reading>, String), Vec<&Judged>> = BTreeMap::new();
    for one in judged {
        let Some(divergence) = one.result.divergence() else { continue };
        let factor = divergence.factor.map(|factor| format!("{factor:.4}"));
        let apart = match divergence.reading {
            Some(_) => String::new(),
            None => factor.unwrap_or_default(),
        };
        groups.entry((one.stage, divergence.reading.clone(), apart)).or_default().push(one);
    }
    let joined = joined(groups).into_iter();
    let mut groups: Vec<Group> =
        joined.map(|(stage, reading, own)| group(stage, reading, &own, names)).collect();
    // What has a cause says more than what has none, and what is of many more than what is of few.
    groups.sort_by_key(|group| {
        let is_unknown = !group.reading.as_ref().is_some_and(is_known);
        (group.stage, is_unknown, std::cmp::Reverse(group.parameters.len()))
    });
    groups
}

/// A group in the making.
type Alike<'a> = (Stage, Option<Reading>, Vec<&'a Judged>);

/// Groups that differ by the rounding of a factor alone are one.
fn joined<'a>(
    groups: BTreeMap<(Stage, Option<Reading>, String), Vec<&'a Judged>>,
) -> Vec<Alike<'a>> {
    let factor = |own: &[&Judged]| one_factor(own.iter().copied());
    let mut joined: Vec<Alike<'a>> = Vec::new();
    for ((stage, reading, _), own) in groups {
        let is_same = |other: &&mut Alike<'a>| {
            let tolerance = tolerance(other.2.iter().chain(&own).copied());
            let is_same = match (&other.1, &reading) {
                (None, None) => {
                    let factors = (factor(&other.2), factor(&own));
                    matches!(factors, (Some(a), Some(b)) if is_one_factor(a, b, tolerance))
                }
                _ => false,
            };
            other.0 == stage && is_same
        };
        match joined.iter_mut().find(is_same) {
            Some(other) => other.2.extend(own),
            None => joined.push((stage, reading, own)),
        }
    }
    joined
}

fn group(stage: Stage, reading: Option<Reading>, own: &[&Judged], names: &[&str]) -> Group {
    let parameters: BTreeSet<&str> = own.iter().map(|one| one.parameter.as_str()).collect();
    let ranks: BTreeSet<u32> = own.iter().flat_map(|one| one.ranks.iter().map(|r| r.0)).collect();
    let excess = |one: &&&Judged| {
        let divergence = one.result.divergence().expect("it diverges");
        divergence.error / divergence.floor.max(f64::MIN_POSITIVE)
    };
    let worst = own.iter().max_by(|a, b| excess(a).total_cmp(&excess(b))).expect("not empty");
    let divergence = worst.result.divergence().expect("it diverges");
    let parameters: Vec<&str> = parameters.into_iter().filter(|name| !name.is_empty()).collect();
    let at = |(index, captured, reference): &(Vec<u64>, f64, f64)| {
        (worst.parameter.clone(), index.clone(), *captured, *reference)
    };
    let state = match Part::of_tensor(&worst.tensor) {
        Some((Part::StateBefore(name) | Part::StateAfter(name), _)) => Some(name),
        _ => None,
    };
    Group {
        state,
        stage,
        what: match parameters.is_empty() {
            true => own.iter().map(|one| one.tensor.as_str()).collect::<Vec<_>>().join(", "),
            false => pattern(&parameters, names),
        },
        parameters: parameters.into_iter().map(str::to_string).collect(),
        ranks: ranks.into_iter().collect(),
        reading,
        factor: one_factor(own.iter().copied()),
        reason: divergence.reason.clone(),
        error: divergence.error,
        floor: divergence.floor,
        worst: divergence.worst.as_ref().map(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: of causes that give the same the one that fits clearly better is told, none where two fit
    /// alike, and a fitted number stands back behind a cause without one. Method: readings with
    /// misfits, as those of one parameter.
    #[test]
    fn the_likelier_of_two_causes_is_told_and_none_where_both_are_as_likely() {
        let told = |readings: &[(Cause, f64)]| {
            let readings: Vec<Reading> = readings
                .iter()
                .map(|(cause, misfit)| cause.reads(cause.meaning).fitting(*misfit))
                .collect();
            let of = |own: &Reading| ((Stage::Update, own.clone()), (1, own.misfit.0.unwrap()));
            let misfits: Misfits = readings.iter().map(of).collect();
            let readings: Vec<&Reading> = readings.iter().collect();
            likeliest(&readings, Stage::Update, &misfits).map(|own| own.cause)
        };
        let (twice, missing) = (causes::CORRECTED_TWICE, causes::UNCORRECTED);
        assert_eq!(told(&[(twice, 30.0), (missing, 20.0)]), Some(missing.name));
        assert_eq!(told(&[(twice, 20.0), (missing, 30.0)]), Some(twice.name));
        assert_eq!(told(&[(twice, 22.0), (missing, 20.0)]), Some(causes::UNKNOWN.name));
        assert_eq!(told(&[(twice, 22.0), (causes::LR_SCALED, 20.0)]), Some(twice.name));
        assert_eq!(told(&[(twice, 30.0), (causes::LR_SCALED, 20.0)]), Some(causes::LR_SCALED.name));
        assert_eq!(told(&[]), None);
    }
}
