//! Each rule against an implementation that shares nothing with it (`naive`): no false alarm where
//! they do the same, and an alarm with the right explanation where a fault is planted.

mod declared;
mod naive;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use self::naive::{JOBS, Job, ROUNDING, State};
use super::*;
use crate::algebra::judge::arithmetic;
use crate::compare::{Bound, Tally};
use crate::draw::Draw;
use crate::kernels::round::Precision;

const ELEMENTS: usize = 257;

/// What one step of a job took and made.
struct Recorded {
    job: Job,
    grad: Vec<f32>,
    before: Vec<f32>,
    state_before: State,
}

/// Runs a job to its last step, in which the fault is.
fn run(mut job: Job, steps: u32, fault: Option<&'static str>, draw: &mut Draw) -> Recorded {
    let scale = 10f64.powf(3.0 * draw.unit() - 2.0);
    let normal = |draw: &mut Draw, precision: Precision| {
        // Some elements have no gradient, as rows of an embedding do.
        let all = (0..ELEMENTS).map(|at| if at % 16 == 0 { 0.0 } else { draw.normal() });
        all.map(|x| precision.round((scale * x) as f32)).collect::<Vec<f32>>()
    };
    job.parameter = (0..ELEMENTS).map(|_| job.parameters.round(draw.normal() as f32)).collect();
    let mut last = None;
    for step in 1..=steps {
        let grad = normal(draw, job.parameters);
        job.step = step;
        job.fault = if step == steps { fault } else { None };
        let (before, state_before) = (job.parameter.clone(), job.state.clone());
        job.run(&grad);
        last = Some((grad, before, state_before));
    }
    let (grad, before, state_before) = last.expect("a job takes a step");
    Recorded { job, grad, before, state_before }
}

fn declared(job: &Job) -> (Optimizer, Hyper) {
    let mut hyper: BTreeMap<String, serde_json::Value> =
        job.hyper.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
    hyper.extend(job.switches.iter().map(|name| (name.to_string(), json!(true))));
    if job.is_optax() && !job.switches.contains("eps_in_sqrt") {
        hyper.insert("eps_in_sqrt".into(), json!(false));
    }
    let (name, module) = (Some(job.class.to_string()), String::new());
    let hyper = Hyper(hyper);
    let groups = vec![hyper.clone()];
    (Optimizer { name, module, groups, ..Optimizer::default() }, hyper)
}

/// What a rule takes of a step.
fn operands(rule: &Rule, hyper: &Hyper, recorded: &Recorded) -> Vec<Operand<'static>> {
    let job = &recorded.job;
    let widened = |values: &[f32]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let zeros = vec![0.0; ELEMENTS];
    let mut operands = vec![
        Operand::row("grad", widened(&recorded.grad), None),
        Operand::row("before", widened(&recorded.before), None),
        Operand::row("after", widened(&job.parameter), Some(job.parameters)),
    ];
    for state in rule.names().states {
        let find = |values: &State| state.recorded.iter().find_map(|own| values.get(own).cloned());
        let before = find(&recorded.state_before).unwrap_or(zeros.clone());
        operands.push(Operand::row(state.before, widened(&before), None));
        if let Some(after) = find(&job.state) {
            operands.push(Operand::row(state.after, widened(&after), Some(job.states)));
        }
    }
    for (name, ..) in rule.names().hyper {
        let value = rule.names().number(hyper, name);
        operands.push(Operand::row(name, vec![value], Some(Precision::F32)));
    }
    operands
}

/// Why a rule does not give what the job made; `None` where it does.
fn excess(rule: &Rule, hyper: &Hyper, recorded: &Recorded) -> Option<String> {
    excess_by(rule, hyper, recorded, &|operands, declared, span| {
        rule.tallies(operands, declared, span)
    })
}

/// Compares the stages of a rule.
type Tallies<'f> = dyn Fn(&[Operand<'_>], &Declared, Span) -> Vec<Compared> + 'f;

/// The same where `tallies` compares.
fn excess_by(
    rule: &Rule,
    hyper: &Hyper,
    recorded: &Recorded,
    tallies: &Tallies<'_>,
) -> Option<String> {
    let (job, operands) = (&recorded.job, operands(rule, hyper, recorded));
    let span = Span { bound: Bound::new(100, 1, ELEMENTS), first_row: 0 };
    let compared = tallies(&operands, &arithmetic(Some(job.parameters), None), span);
    let recorded = compared.into_iter().filter_map(|(name, tally)| match tally {
        Err(why) if why == format!("{name} was not recorded") => None,
        Err(why) => panic!("{}: {name}: {why}", job.class),
        Ok(tally) => {
            tally.excess(&span.bound).map(|why| format!("{name}: {why} {:?}", tally.worst))
        }
    });
    recorded.collect::<Vec<_>>().into_iter().next()
}

fn rule(job: &Job, steps: u32) -> (Rule, Hyper) {
    let (optimizer, hyper) = declared(job);
    let rule = Rule::of(&optimizer, &hyper, steps.into());
    (rule.unwrap_or_else(|| panic!("a rule of {}", job.class)), hyper)
}

/// A number of a list.
fn one_of<T: Copy>(draw: &mut Draw, all: &[T]) -> T {
    all[draw.below(all.len())]
}

/// A job of a class with hyper-parameters and switches by chance.
fn drawn(kind: &'static naive::Kind, rounding: [Precision; 2], draw: &mut Draw) -> Job {
    let mut switches = BTreeSet::new();
    for &switch in kind.switches {
        if draw.bits() & 1 == 1 {
            switches.insert(switch);
        }
    }
    // Without bias, a centered second moment of one gradient is 0, or by rounding below it.
    if switches.contains("centered") {
        switches.remove("bias_correction");
    }
    let betas = [0.0, 0.5, 0.9, 0.95, 0.99, 0.999];
    let mut hyper = BTreeMap::from([
        ("lr", 10f64.powf(-4.0 * draw.unit())),
        ("beta1", one_of(draw, &betas)),
        ("beta2", one_of(draw, &betas)),
        ("eps", one_of(draw, &[1e-8, 1e-5, 1e-2])),
        ("weight_decay", one_of(draw, &[0.0, 1e-4, 0.1])),
        ("momentum", one_of(draw, &[0.0, 0.5, 0.9])),
        ("dampening", one_of(draw, &[0.0, 0.3])),
        ("lr_decay", one_of(draw, &[0.0, 0.1])),
        ("momentum_decay", one_of(draw, &[4e-3, 0.1])),
    ]);
    // With a mean that forgets at once nothing is left of a centered second moment.
    hyper.insert(
        "alpha",
        one_of(draw, if switches.contains("centered") { &betas[2..] } else { &betas }),
    );
    Job::new(kind, rounding, hyper, switches, [(); 2].map(|()| draw.bits() & 1 == 1))
}

/// Goal: no false alarm. Method: a table of jobs, precisions and draws, each of 1 to 20 steps.
#[test]
fn a_rule_gives_what_an_independent_implementation_of_it_does() {
    let mut draw = Draw::new(11);
    let (mut draws, mut alarms) = (0, Vec::new());
    for kind in JOBS {
        for rounding in ROUNDING {
            for _ in 0..12 {
                let job = drawn(kind, rounding, &mut draw);
                // In the first step RMSprop adds ±η/√(1 - α) to each element of its momentum:
                // storing the momentum in few bits rounds all of them alike, and no bound of a
                // stored tensor knows that.
                let is_alike =
                    kind.class.eq_ignore_ascii_case("rmsprop") && job.states != job.parameters;
                let first = if is_alike { 2 } else { 1 };
                let steps = first + draw.below(20) as u32;
                let words = format!("{job:?}");
                let recorded = run(job, steps, None, &mut draw);
                let (rule, hyper) = rule(&recorded.job, steps);
                if let Some(why) = excess(&rule, &hyper, &recorded) {
                    alarms.push(format!("step {steps} of {words}: {why}"));
                }
                draws += 1;
            }
        }
    }
    assert!(alarms.is_empty(), "{} of {draws}:\n{}", alarms.len(), alarms.join("\n"));
    assert!(draws >= 300, "{draws} draws");
}

/// Goal: programs over columns find what numbers that carry their errors find, element by element.
/// Method: sums and bounds of all rules, on jobs that agree and on such that do not.
#[test]
fn a_rule_is_judged_alike_by_columns_and_by_elements() {
    let (mut draw, mut compared) = (Draw::new(29), 0);
    for kind in JOBS {
        for rounding in ROUNDING {
            for at in 0..6 {
                let job = drawn(kind, rounding, &mut draw);
                let steps = 1 + draw.below(8) as u32;
                let (rule, hyper) = rule(&job, steps);
                let variations = rule.variations();
                let rule = match (at % 2, &variations[..]) {
                    (1, [first, ..]) => first.rule.clone(),
                    _ => rule,
                };
                let words = format!("step {steps} of {job:?} by {rule:?}");
                let recorded = run(job, steps, None, &mut draw);
                let operands = operands(&rule, &hyper, &recorded);
                let declared = arithmetic(Some(recorded.job.parameters), None);
                let span = Span { bound: Bound::new(100, 1, ELEMENTS), first_row: 0 };
                let by_columns = rule.tallies(&operands, &declared, span);
                let by_elements = rule.tallies_by_numbers(&operands, &declared, span);
                let pairs = by_columns.into_iter().zip(by_elements).enumerate();
                for (stage, ((name, one), (_, other))) in pairs {
                    let is_later = stage > 0;
                    let (one, other) = match (one, other) {
                        (Ok(one), Ok(other)) => (one, other),
                        (one, other) => {
                            assert_eq!(one.err(), other.err(), "{name}: {words}");
                            continue;
                        }
                    };
                    let bound = &span.bound;
                    assert_eq!(one.nonfinite, other.nonfinite, "{name}: {words}");
                    let counts = |of: &Tally| (of.exceeding, of.exceeding_rows);
                    assert!(is_later || counts(&one) == counts(&other), "{name}: {words}");
                    let why = (one.excess(bound).is_some(), other.excess(bound).is_some());
                    assert_eq!(why.0, why.1, "{name}: {words}");
                    let numbers = |of: &Tally| {
                        let scores = of.worst.as_ref().map_or(0.0, |worst| worst.score);
                        let own = [of.error_energy, of.reference_energy, of.captured_energy];
                        let bounds = [of.expected(), of.budget.energy(bound.stage), scores];
                        let slopes = [of.slope(), of.allowed_slope(bound), of.overshoot(bound)];
                        [own, bounds, slopes].concat()
                    };
                    for (at, (x, y)) in numbers(&one).into_iter().zip(numbers(&other)).enumerate() {
                        // Columns do not keep what a stage's elements share shared in the next
                        // one, whose bounds are others therefore.
                        let is_near = (x - y).abs() <= 1e-3 * y.abs() + 1e-30;
                        let is_near = is_near || x == y || (is_later && at >= 3);
                        assert!(is_near, "{at}, {name}: {x:e}, not {y:e}: {words}");
                    }
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 500, "{compared} stages");
}

/// Goal: each variation is a divergence from its rule, and explains it. Method: it is planted in
/// the independent implementation.
#[test]
fn a_planted_variation_diverges_and_is_explained_by_itself() {
    let mut draw = Draw::new(5);
    let mut planted = 0;
    for kind in JOBS {
        for on in [false, true] {
            let switches =
                if on { kind.switches.iter().copied().collect() } else { BTreeSet::new() };
            let hyper = BTreeMap::from([
                ("lr", 0.1),
                ("beta1", 0.8),
                ("beta2", 0.95),
                ("alpha", 0.9),
                ("eps", 1e-2),
                ("weight_decay", 0.1),
                ("momentum", 0.9),
                ("dampening", 0.3),
                ("lr_decay", 0.1),
                ("momentum_decay", 0.1),
            ]);
            for steps in [4, 8] {
                let rounding = [Precision::F32, Precision::F32];
                let job = || Job::new(kind, rounding, hyper.clone(), switches.clone(), [false; 2]);
                let (rule, hyper) = rule(&job(), steps);
                for (at, variation) in rule.variations().into_iter().enumerate() {
                    let mut job = job();
                    if variation.cause == "step-counter" {
                        let digits = variation.words.split_whitespace().nth(5).unwrap();
                        job.counts_as = digits.trim_end_matches(',').parse().ok();
                    }
                    let moments = [(1, "the first moment"), (2, "the second moment")];
                    let faulty = moments.iter().find(|(_, own)| variation.words.starts_with(own));
                    job.faulty_moment = faulty.map(|(moment, _)| *moment);
                    let recorded = run(job, steps, Some(variation.cause), &mut draw);
                    let words = format!("{}, step {steps}, {at}: {}", kind.class, variation.words);
                    assert!(excess(&rule, &hyper, &recorded).is_some(), "not seen: {words}");
                    let left = excess(&variation.rule, &hyper, &recorded);
                    assert_eq!(left, None, "not explained: {words}");
                    planted += 1;
                }
            }
        }
    }
    assert!(planted > 200, "{planted} planted");
}

/// Goal: a step that was applied twice is told from one, and from one of twice the learning rate.
/// Method: the independent implementation takes its last step once more with the same gradient.
#[test]
fn a_step_that_is_applied_twice_is_the_rule_after_itself() {
    let mut draw = Draw::new(23);
    for kind in JOBS {
        let job = drawn(kind, [Precision::F32; 2], &mut draw);
        let words = format!("{job:?}");
        let steps = 3 + draw.below(6) as u32;
        let mut recorded = run(job, steps, None, &mut draw);
        recorded.job.step += 1;
        recorded.job.run(&recorded.grad.clone());
        let (first, hyper) = rule(&recorded.job, steps);
        let (second, _) = rule(&recorded.job, steps + 1);
        let left = excess_by(&second, &hyper, &recorded, &|operands, declared, span| {
            second.tallies_after(&first, operands, declared, span)
        });
        assert_eq!(left, None, "not explained: {words}");
        assert!(excess(&second, &hyper, &recorded).is_some(), "not seen: {words}");
    }
}

/// Goal: what vanishes in f16 before RAdam divides, where the learning rate comes first, is no finding,
/// and another learning rate is one beside it. Method: a moment that is a few of the smallest numbers
/// of f16 then, and parameters that are small enough to show it.
#[test]
fn radam_in_f16_loses_what_is_small_before_it_divides() {
    let (mut draw, f16) = (Draw::new(53), Precision::F16);
    let kind = JOBS.iter().find(|kind| kind.class == "RAdam").expect("a class of the list");
    let hyper = [("lr", 4e-4), ("beta1", 0.0), ("beta2", 0.9), ("eps", 1e-3)];
    let hyper = BTreeMap::from_iter(hyper.into_iter().chain([("weight_decay", 0.0)]));
    let mut job = Job::new(kind, [f16; 2], hyper, BTreeSet::new(), [false; 2]);
    let mut last = None;
    for step in 1..=7 {
        let drawn = |_| f16.round(1e-3 * draw.normal() as f32);
        let grad: Vec<f32> = (0..ELEMENTS).map(drawn).collect();
        (job.step, job.parameter) = (step, vec![0.0; ELEMENTS]);
        let (before, state_before) = (job.parameter.clone(), job.state.clone());
        job.run(&grad);
        last = Some((grad, before, state_before));
    }
    let (grad, before, state_before) = last.expect("a job takes a step");
    let recorded = Recorded { job, grad, before, state_before };
    let (rule, mut hyper) = rule(&recorded.job, 7);
    assert_eq!(excess(&rule, &hyper, &recorded), None);
    hyper.0.insert("lr".into(), json!(8e-4));
    assert!(excess(&rule, &hyper, &recorded).is_some(), "another learning rate is not seen");
}

/// Takes steps of a job with parameters and gradients as drawn, and keeps the last one.
fn steps_of(mut job: Job, steps: u32, drawn: &mut dyn FnMut() -> [f32; 2]) -> Recorded {
    let mut last = None;
    for step in 1..=steps {
        let (parameters, grad): (Vec<f32>, Vec<f32>) =
            (0..ELEMENTS).map(|_| drawn()).map(|[parameter, grad]| (parameter, grad)).unzip();
        (job.step, job.parameter) = (step, parameters);
        let (before, state_before) = (job.parameter.clone(), job.state.clone());
        job.run(&grad);
        last = Some((grad, before, state_before));
    }
    let (grad, before, state_before) = last.expect("a job takes a step");
    Recorded { job, grad, before, state_before }
}

/// Goal: an ε that is less than half a spacing of f16 is lost by all elements, to one side, and is no
/// finding; a largest gradient that is off by a percent is one.
#[test]
fn adamax_in_f16_loses_an_eps_that_is_small_beside_its_gradients() {
    let (mut draw, f16) = (Draw::new(59), Precision::F16);
    let kind = JOBS.iter().find(|kind| kind.class == "Adamax").expect("a class of the list");
    let hyper = [("lr", 1e-3), ("beta1", 0.5), ("beta2", 0.5), ("eps", 1e-4)];
    let hyper = BTreeMap::from_iter(hyper.into_iter().chain([("weight_decay", 0.3)]));
    let job = Job::new(kind, [f16; 2], hyper, BTreeSet::new(), [false; 2]);
    let recorded = steps_of(job, 3, &mut || {
        [f16.round(0.1 * draw.unit() as f32), f16.round(0.27 + 0.18 * draw.unit() as f32)]
    });
    let (rule, hyper) = rule(&recorded.job, 3);
    assert_eq!(excess(&rule, &hyper, &recorded), None);
    let mut wrong = recorded;
    wrong.job.state.get_mut("exp_inf").unwrap().iter_mut().for_each(|x| *x = f16.round(*x * 1.01));
    assert!(excess(&rule, &hyper, &wrong).is_some(), "one percent is not seen");
}

/// Goal: parameters that are all near 1, as a norm's are, or near 1 and -1, and decay by the same
/// small number lie at the same place between two numbers of f32, so their errors are one error and
/// no finding; another decay is one.
#[test]
fn parameters_of_nearly_equal_size_round_alike_when_they_decay() {
    [false, true].into_iter().for_each(decays_alike);
}

fn decays_alike(has_signs: bool) {
    let mut draw = Draw::new(61);
    let kind = JOBS.iter().find(|kind| kind.class == "AdamW").expect("a class of the list");
    let hyper = [("lr", 1.478e-4), ("beta1", 0.9), ("beta2", 0.9), ("eps", 1.0)];
    let hyper = BTreeMap::from_iter(hyper.into_iter().chain([("weight_decay", 0.01)]));
    let job = Job::new(kind, [Precision::F32; 2], hyper, BTreeSet::new(), [false; 2]);
    let recorded = steps_of(job, 3, &mut || {
        let sign = if has_signs { draw.sign() as f32 } else { 1.0 };
        [sign * (1.0005 + 1e-4 * draw.normal() as f32), 1e-6 * draw.normal() as f32]
    });
    let (rule, mut hyper) = rule(&recorded.job, 3);
    assert_eq!(excess(&rule, &hyper, &recorded), None);
    hyper.0.insert("weight_decay".into(), json!(0.02));
    assert!(excess(&rule, &hyper, &recorded).is_some(), "another decay is not seen");
}

#[test]
fn unknown_modes_of_known_optimizers_are_unknown() {
    let of = |name: &str, hyper: serde_json::Value| {
        let hyper: Hyper = serde_json::from_value(hyper).unwrap();
        let (name, module) = (Some(name.to_string()), String::new());
        let groups = vec![hyper.clone()];
        let optimizer = Optimizer { name, module, groups, ..Optimizer::default() };
        Rule::of(&optimizer, &hyper, 2.0)
    };
    // Other variants of these take other norms: of all gradients, or of a clamped parameter.
    assert_eq!(of("Lamb", json!({"lr": 0.1, "max_grad_norm": 1.0})), None);
    assert_eq!(of("Adafactor", json!({"lr": 0.1, "scale_parameter": true})), None);
    assert_eq!(of("adafactor", json!({"lr": 0.1, "momentum": 0.9})), None);
    assert_eq!(of("Muon", json!({"lr": 0.1})), None, "a class of another module than torch's");
    assert_eq!(of("muon", json!({"lr": 0.1, "adaptive": true})), None);
    assert!(of("optax.lamb", json!({"lr": 0.1})).is_some_and(|rule| rule.takes_wholes()));
    assert_eq!(of("lion", json!({"lr": 0.1, "mode": "smooth"})), None);
    assert_eq!(of("radam", json!({"lr": 0.1, "nesterov": true})), None);
    assert_eq!(of("optax.lion", json!({})), of("lion", json!({"mode": "hard"})));
    assert!(of("optax.adagrad", json!({})).is_some());
}

/// The table of docs/step.md, as it should be.
fn page() -> String {
    let mut page = String::from("| rule | optimizers | published by |\n|---|---|---|\n");
    for (names, classes) in Rule::list() {
        let classes: Vec<String> = classes.iter().map(|class| format!("`{class}`")).collect();
        page += &format!("| {} | {} | {} |\n", names.words, classes.join(", "), names.source);
    }
    page
}

#[test]
fn the_page_of_the_step_lists_the_known_rules() {
    let docs = include_str!("../../../../../docs/step.md");
    assert!(docs.contains(&page()), "docs/step.md should have this table:\n{}", page());
}
