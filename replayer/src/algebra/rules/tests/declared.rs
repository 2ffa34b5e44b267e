//! Rules that are written as formulas in a declaration, against the same implementations that the
//! tables of known rules are held to, and against optimizers that no rule is known of.

use serde_json::Value;

use super::naive::{JOBS, ROUNDING};
use super::*;
use crate::algebra::rules::formula::{Formula, Parameter};

/// Writes a formula, each operation once.
#[derive(Default)]
struct Writer(Vec<Value>);

impl Writer {
    fn node(&mut self, node: Value) -> usize {
        let known = self.0.iter().position(|own| *own == node);
        known.unwrap_or_else(|| {
            self.0.push(node);
            self.0.len() - 1
        })
    }

    fn one(&mut self, name: &str, a: usize) -> usize {
        self.node(json!([name, a]))
    }

    fn two(&mut self, name: &str, a: usize, b: usize) -> usize {
        self.node(json!([name, a, b]))
    }

    fn state(&mut self, name: &str) -> usize {
        self.node(json!(["state", name]))
    }

    fn hyper(&mut self, name: &str) -> usize {
        self.node(json!(["hyper", name]))
    }

    fn number(&mut self, x: f64) -> usize {
        self.node(json!(["number", x]))
    }

    /// 1 less a number.
    fn rest(&mut self, of: usize) -> usize {
        let unit = self.number(1.0);
        self.two("sub", unit, of)
    }

    /// `β x + (1 - β) y`
    fn moving(&mut self, x: usize, y: usize, beta: &str) -> usize {
        let beta = self.hyper(beta);
        let rest = self.rest(beta);
        let (stays, enters) = (self.two("mul", beta, x), self.two("mul", rest, y));
        self.two("add", stays, enters)
    }

    /// A moment divided by `1 - β^step`.
    fn corrected(&mut self, moment: usize, beta: &str) -> usize {
        let (before, unit, beta) = (self.state("step"), self.number(1.0), self.hyper(beta));
        let step = self.two("add", before, unit);
        let power = self.two("pow", beta, step);
        let rest = self.rest(power);
        self.two("div", moment, rest)
    }

    /// The parameter that decays by itself, less `lr` times a direction.
    fn decayed(&mut self, direction: usize) -> usize {
        let (lr, decay, param) =
            (self.hyper("lr"), self.hyper("weight_decay"), self.node(json!(["param"])));
        let lost = self.two("mul", lr, decay);
        let rest = self.rest(lost);
        let still = self.two("mul", param, rest);
        let moved = self.two("mul", lr, direction);
        self.two("sub", still, moved)
    }

    fn done(self, param: usize, state: Value) -> Value {
        json!({"nodes": self.0, "param": param, "state": state})
    }
}

fn adam_w() -> Value {
    let mut w = Writer::default();
    let grad = w.node(json!(["grad"]));
    let (first, second) = (w.state("exp_avg"), w.state("exp_avg_sq"));
    let first = w.moving(first, grad, "beta1");
    let square = w.two("mul", grad, grad);
    let second = w.moving(second, square, "beta2");
    let (above, below) = (w.corrected(first, "beta1"), w.corrected(second, "beta2"));
    let (root, eps) = (w.one("sqrt", below), w.hyper("eps"));
    let root = w.two("add", root, eps);
    let direction = w.two("div", above, root);
    let param = w.decayed(direction);
    w.done(param, json!({"exp_avg": first, "exp_avg_sq": second}))
}

fn lion() -> Value {
    let mut w = Writer::default();
    let (grad, moment) = (w.node(json!(["grad"])), w.state("exp_avg"));
    let mixed = w.moving(moment, grad, "beta1");
    let sign = w.one("sign", mixed);
    let param = w.decayed(sign);
    let moment = w.moving(moment, grad, "beta2");
    w.done(param, json!({"exp_avg": moment}))
}

/// Adamax, whose largest gradient is chosen as `where` does.
fn adamax() -> Value {
    let mut w = Writer::default();
    let (grad, param, decay) =
        (w.node(json!(["grad"])), w.node(json!(["param"])), w.hyper("weight_decay"));
    let coupled = w.two("mul", decay, param);
    let grad = w.two("add", grad, coupled);
    let (first, most) = (w.state("exp_avg"), w.state("exp_inf"));
    let first = w.moving(first, grad, "beta1");
    let (beta, eps, size) = (w.hyper("beta2"), w.hyper("eps"), w.one("abs", grad));
    let (faded, size) = (w.two("mul", beta, most), w.two("add", size, eps));
    let most = w.node(json!(["where_above", faded, size, faded, size]));
    let above = w.corrected(first, "beta1");
    let (lr, direction) = (w.hyper("lr"), w.two("div", above, most));
    let moved = w.two("mul", lr, direction);
    let param = w.two("sub", param, moved);
    w.done(param, json!({"exp_avg": first, "exp_inf": most}))
}

/// The formulas, by the class that implements them.
fn formulas() -> [(&'static str, Value); 3] {
    [("AdamW", adam_w()), ("Lion", lion()), ("Adamax", adamax())]
}

fn declared_rule(formula: &Value, job: &Job) -> (Rule, Hyper) {
    let (optimizer, hyper) = declared(job);
    let step = f64::from(job.step);
    let parameter = Parameter {
        optimizer: optimizer.name.unwrap_or_default(),
        numbers: BTreeMap::from([("step".to_string(), [Some(step - 1.0), Some(step)])]),
        tensors: job.state.keys().map(|name| name.to_string()).collect(),
        wide: BTreeSet::new(),
        has_update: false,
        is_first: step == 1.0,
        is_narrow: job.parameters == Precision::Bf16,
    };
    let made = Formula::of(formula, &hyper, step, parameter);
    (Rule::Formula(made.unwrap_or_else(|why| panic!("{}: {why}", job.class))), hyper)
}

/// A job of a class without its switches.
fn plain(class: &str, rounding: [Precision; 2], draw: &mut Draw) -> Job {
    let kind = JOBS.iter().find(|kind| kind.class == class).expect("a class of the list");
    let mut job = drawn(kind, rounding, draw);
    job.switches.clear();
    job
}

/// Goal: no false alarm of a formula that is right, in any format, and in the first step as in
/// later ones. Method: draws of hyper-parameters, formats and steps.
#[test]
fn a_declared_formula_gives_what_an_independent_implementation_of_it_does() {
    let (mut draw, mut draws, mut alarms) = (Draw::new(31), 0, Vec::new());
    for (class, formula) in formulas() {
        for rounding in ROUNDING {
            for at in 0..16 {
                let job = plain(class, rounding, &mut draw);
                let steps = if at % 4 == 0 { 1 } else { 1 + draw.below(20) as u32 };
                let words = format!("{job:?}");
                let recorded = run(job, steps, None, &mut draw);
                let (rule, hyper) = declared_rule(&formula, &recorded.job);
                let by_numbers = excess_by(&rule, &hyper, &recorded, &|operands, how, span| {
                    rule.tallies_by_numbers(operands, how, span)
                });
                for why in [excess(&rule, &hyper, &recorded), by_numbers].into_iter().flatten() {
                    alarms.push(format!("step {steps} of {words}: {why}"));
                }
                draws += 1;
            }
        }
    }
    assert!(alarms.is_empty(), "{} of {draws}:\n{}", alarms.len(), alarms.join("\n"));
}

/// Goal: a formula sees what the table of the same rule sees. Method: faults that the independent
/// implementation plants, and the count of another step, which a formula explains by itself.
#[test]
fn a_declared_formula_sees_what_is_not_it() {
    let faults = [
        ("AdamW", "bias-correction-missing"),
        ("AdamW", "eps-inside-sqrt"),
        ("AdamW", "decay-coupled"),
        ("AdamW", "update-ascends"),
        ("AdamW", "step-counter"),
        ("Lion", "betas-exchanged"),
        ("Lion", "sign-missing"),
        ("Lion", "update-from-new-moment"),
        ("Adamax", "eps-elsewhere"),
    ];
    let mut draw = Draw::new(37);
    for (class, fault) in faults {
        let formula = formulas().into_iter().find(|(own, _)| *own == class).expect("a formula").1;
        let mut job = plain(class, [Precision::F32; 2], &mut draw);
        for (name, value) in
            [("lr", 0.1), ("beta1", 0.8), ("beta2", 0.95), ("eps", 1e-2), ("weight_decay", 0.1)]
        {
            job.hyper.insert(name, value);
        }
        job.counts_as = Some(1.0);
        let recorded = run(job, 4, Some(fault), &mut draw);
        let (rule, hyper) = declared_rule(&formula, &recorded.job);
        assert!(excess(&rule, &hyper, &recorded).is_some(), "{class}: {fault} is not seen");
        let explained = rule.variations().into_iter().find(|variation| {
            variation.cause == fault && excess(&variation.rule, &hyper, &recorded).is_none()
        });
        assert_eq!(explained.is_some(), fault == "step-counter", "{class}: {fault}");
    }
}

#[test]
fn a_formula_that_does_not_fit_its_parameter_is_refused_in_a_sentence() {
    let told = |formula: Value, hyper: Value| {
        let hyper: Hyper = serde_json::from_value(hyper).unwrap();
        let parameter = Parameter {
            optimizer: "Own".into(),
            numbers: BTreeMap::from([
                ("step".to_string(), [None, Some(1.0)]),
                ("scale".to_string(), [None, Some(1.0)]),
            ]),
            tensors: BTreeSet::from(["m".to_string()]),
            wide: BTreeSet::new(),
            has_update: false,
            is_first: false,
            is_narrow: true,
        };
        Formula::of(&formula, &hyper, 2.0, parameter).unwrap_err()
    };
    let of = |nodes: Value| json!({"nodes": nodes, "param": 0});
    let state = told(of(json!([["param"], ["state", "v"]])), json!({}));
    assert!(state.contains("takes or gives v") && state.contains("m, scale, step"), "{state}");
    let hyper = told(of(json!([["param"], ["hyper", "lr"]])), json!({"lr": null}));
    assert!(hyper.contains("declares no number lr"), "{hyper}");
    let scale = told(of(json!([["param"], ["state", "scale"]])), json!({}));
    assert!(scale.contains("scale of the state was not recorded before"), "{scale}");
    let power = told(of(json!([["param"], ["grad"], ["pow", 0, 1]])), json!({}));
    assert!(power.contains("to the power of a tensor"), "{power}");
    let mut nodes = vec![json!(["param"]), json!(["grad"])];
    nodes.extend((1..60).map(|at| json!(["sqrt", at])));
    let long = told(json!({"nodes": nodes, "param": 60}), json!({}));
    assert!(long.contains("can be told apart"), "{long}");
}

/// Goal: a number of the state that is not what the formula makes of it is told, and rounding in f32
/// is none such. Method: the product of betas that NAdam keeps.
#[test]
fn a_number_of_the_state_is_held_to_the_formula() {
    let mut w = Writer::default();
    let (product, beta) = (w.state("product"), w.hyper("beta"));
    let product = w.two("mul", product, beta);
    let param = w.node(json!(["param"]));
    let formula = w.done(param, json!({"product": product}));
    let hyper: Hyper = serde_json::from_value(json!({"beta": 0.9})).unwrap();
    let wrong = |after: f64| {
        let parameter = Parameter {
            optimizer: "Own".into(),
            numbers: BTreeMap::from([("product".to_string(), [Some(0.81), Some(after)])]),
            tensors: BTreeSet::new(),
            wide: BTreeSet::new(),
            has_update: false,
            is_first: false,
            is_narrow: false,
        };
        Formula::of(&formula, &hyper, 3.0, parameter).unwrap().wrong_numbers()
    };
    assert_eq!(wrong(f64::from(0.729f32)), []);
    assert_eq!(wrong(0.729), []);
    assert_eq!(wrong(0.81).len(), 1);
    assert_eq!(wrong(0.7291).len(), 1);
    assert_eq!(wrong(f64::NAN).len(), 1);
}

/// Goal: a state of many bits is held to many bits beside a parameter of few, as frameworks compute
/// it, though what is made of the gradient alone may have few. Method: a moment that is a little
/// off, of a gradient that was rounded once more.
#[test]
fn a_state_of_many_bits_is_computed_in_as_many_beside_a_parameter_of_few() {
    let mut w = Writer::default();
    let (m, grad, param) = (w.state("m"), w.node(json!(["grad"])), w.node(json!(["param"])));
    let moment = w.moving(m, grad, "beta");
    let formula = w.done(param, json!({"m": moment}));
    let hyper: Hyper = serde_json::from_value(json!({"beta": 0.9})).unwrap();
    let (bf16, mut draw) = (Precision::Bf16, Draw::new(43));
    let mut drawn = || (0..ELEMENTS).map(|_| bf16.round64(draw.normal())).collect::<Vec<f64>>();
    let (grad, before, m) = (drawn(), drawn(), drawn());
    let diverges = |factor: f64, wide: BTreeSet<String>| {
        let parameter = Parameter {
            optimizer: "Own".into(),
            numbers: BTreeMap::new(),
            tensors: BTreeSet::from(["m".to_string()]),
            wide,
            has_update: false,
            is_first: false,
            is_narrow: true,
        };
        let rule = Rule::Formula(Formula::of(&formula, &hyper, 2.0, parameter).unwrap());
        let entered = |g: f64| bf16.round64(f64::from(0.1f32) * g);
        let of = |(m, g): (&f64, &f64)| f64::from((factor * (0.9 * m + entered(*g))) as f32);
        let after: Vec<f64> = m.iter().zip(&grad).map(of).collect();
        let operands = [
            Operand::row("grad", grad.clone(), None),
            Operand::row("before", before.clone(), None),
            Operand::row("state_before.m", m.clone(), None),
            Operand::row("beta", vec![0.9], Some(Precision::F32)),
            Operand::row("state_after.m", after, Some(Precision::F32)),
        ];
        let span = Span { bound: Bound::new(100, 1, ELEMENTS), first_row: 0 };
        let compared = rule.tallies(&operands, &arithmetic(Some(bf16), None), span);
        let (_, tally) = compared.into_iter().find(|(name, _)| *name == "state_after.m").unwrap();
        tally.unwrap().excess(&span.bound).is_some()
    };
    let wide = || BTreeSet::from(["m".to_string()]);
    assert!(!diverges(1.0, wide()));
    assert!(diverges(1.002, wide()));
    assert!(!diverges(1.002, BTreeSet::new()));
}

/// What a formula of one operation makes of the gradient and the parameter.
fn of_one_operation(name: &str, w: &mut Writer) -> usize {
    let (grad, lr) = (w.node(json!(["grad"])), w.hyper("lr"));
    let (size, unit) = (w.one("abs", grad), w.number(1.0));
    match name {
        "pow" => {
            let exponent = w.number(0.3);
            w.two("pow", size, exponent)
        }
        "reciprocal" => {
            let (more, exponent) = (w.two("add", size, unit), w.number(-1.5));
            w.two("pow", more, exponent)
        }
        "cube" => {
            let exponent = w.number(3.0);
            w.two("pow", grad, exponent)
        }
        "log" => {
            let more = w.two("add", size, unit);
            w.one("log", more)
        }
        "maximum" | "minimum" => w.two(name, grad, lr),
        "where_above" | "where_from" => {
            let scaled = w.two("mul", grad, lr);
            w.node(json!([name, scaled, lr, grad, unit]))
        }
        one => w.one(one, grad),
    }
}

/// Goal: programs over columns have the values and the errors of numbers that carry theirs. Method:
/// each operation of formulas, in formats of many and few bits, on draws with zeros among them.
#[test]
fn each_operation_is_judged_alike_by_columns_and_by_elements() {
    let (mut draw, mut apart) = (Draw::new(41), Vec::new());
    let names = "pow reciprocal cube log exp tanh abs sign maximum minimum where_above where_from";
    let formats = [Precision::F32, Precision::Bf16];
    for (name, stored) in names.split(' ').flat_map(|name| formats.map(|stored| (name, stored))) {
        let mut w = Writer::default();
        let made = of_one_operation(name, &mut w);
        let (lr, param) = (w.hyper("lr"), w.node(json!(["param"])));
        let moved = w.two("mul", lr, made);
        let param = w.two("sub", param, moved);
        let formula = w.done(param, json!({}));
        let hyper: Hyper = serde_json::from_value(json!({"lr": 0.3})).unwrap();
        let parameter = Parameter {
            optimizer: "Own".into(),
            numbers: BTreeMap::new(),
            tensors: BTreeSet::new(),
            wide: BTreeSet::new(),
            has_update: false,
            is_first: false,
            is_narrow: stored == Precision::Bf16,
        };
        let rule = Rule::Formula(Formula::of(&formula, &hyper, 2.0, parameter).unwrap());
        let mut drawn = || (0..ELEMENTS).map(|_| stored.round64(draw.normal())).collect();
        let (mut grad, before): (Vec<f64>, Vec<f64>) = (drawn(), drawn());
        grad.iter_mut().step_by(16).for_each(|x| *x = 0.0);
        let mut operands = vec![
            // As a clipped gradient, which was rounded before.
            Operand::row("grad", grad, Some(stored)),
            Operand::row("before", before, None),
            Operand::row("lr", vec![0.3], Some(Precision::F32)),
        ];
        let declared = arithmetic(Some(stored), None);
        let exact = rule.stage(&operands, &declared, "after").unwrap();
        let after = exact.iter().map(|x| stored.round64(*x)).collect();
        operands.push(Operand::row("after", after, Some(stored)));
        let span = Span { bound: Bound::new(100, 1, ELEMENTS), first_row: 0 };
        let [one, other] = [
            rule.tallies(&operands, &declared, span),
            rule.tallies_by_numbers(&operands, &declared, span),
        ]
        .map(|all| all.into_iter().find(|(stage, _)| *stage == "after").unwrap().1.unwrap());
        let numbers = |of: &Tally| {
            let own = [of.error_energy, of.reference_energy, of.captured_energy, of.expected()];
            [
                own,
                [
                    of.budget.energy(span.bound.stage),
                    of.slope(),
                    of.allowed_slope(&span.bound),
                    0.0,
                ],
            ]
            .concat()
        };
        assert_eq!(one.excess(&span.bound), None, "{name} in {stored:?}");
        for (at, (x, y)) in numbers(&one).into_iter().zip(numbers(&other)).enumerate() {
            // Columns have an upper bound of what a sum of largest roundings may be.
            let above = if at == 4 { 1e-2 } else { 1e-3 };
            if !(x - y <= above * y.abs() + 1e-30 && y - x <= 1e-3 * y.abs() + 1e-30) {
                apart.push(format!("{at}, {name} in {stored:?}: {x:e}, not {y:e}"));
            }
        }
    }
    assert!(apart.is_empty(), "{}", apart.join("\n"));
}
