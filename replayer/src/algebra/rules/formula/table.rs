//! The table of a declared formula: its stages, and what each takes.
//!
//! Every tensor of the state that the formula gives is a stage, and later stages take it as it was
//! recorded. The formula is cut there, so that a wrong state makes no update wrong.
//!
//! The walker's names live as long as the process, as those of known rules do. So each formula has
//! one table, however many parameters and replays take it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use super::super::{HyperName, Names, State};
use super::nodes::{Node, Nodes, One, Two};
use crate::ops::{Reduction, Shape, Side, Stage, Tensor};

/// Names of a table that are of no state and no hyper-parameter.
const OWN: [&str; 4] = ["grad", "before", "update", "after"];

/// A declared formula as a table of stages.
pub(crate) struct Table {
    pub(super) formula: Nodes,
    pub(super) names: Names,
    pub(super) inputs: &'static [Tensor],
    pub(super) stages: &'static [Stage],
    /// By stage.
    pub(super) plans: Vec<Plan>,
    /// By node, whether it is one number for all elements.
    pub(super) is_scalar: Vec<bool>,
    /// By node, whether it is made for the state, which says it after the step, and is a number.
    pub(super) is_told: Vec<bool>,
}

/// How a stage is evaluated.
pub(super) struct Plan {
    pub what: What,
    /// The node that it is, or of which it is a part.
    pub root: usize,
    /// By input of the stage, its node; `None` for what is taken beside the formula.
    pub given: Vec<Option<usize>>,
    /// The other nodes that it is made of, each after those that it takes.
    pub order: Vec<usize>,
    /// By node, whether it is made of one tensor and of numbers that all elements share.
    pub is_alike: Vec<bool>,
    /// By node, whether it is made of a tensor of many bits, for one of many bits: then frameworks
    /// give it as many, whatever the gradient has.
    pub is_wide: Vec<bool>,
    /// By node, whether the parameter before the step is an addend of it.
    pub has_parameter: Vec<bool>,
    /// How many roundings all elements may share: in a job that keeps results in the format that
    /// it computes in, and in one of few bits.
    pub shared: [usize; 2],
    /// How many of its inputs are numbers that all elements share.
    pub numbers: usize,
}

/// What a stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The node itself.
    Node,
    /// The node, which is the parameter after the step, less the parameter before it.
    Update,
    /// The parameter after the step.
    After,
    /// The parameter and the recorded change.
    Sum,
}

/// What a table depends on, beside the formula.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Form {
    /// The name of the optimizer.
    pub optimizer: String,
    /// The tensors of the state; all else of it is numbers.
    pub tensors: BTreeSet<String>,
    /// Those of them that are kept in as many bits as a job computes in.
    pub wide: BTreeSet<String>,
    /// Whether the change of the parameter was recorded too.
    pub has_update: bool,
}

/// The tables of all formulas that were read, by their text and form.
static TABLES: Mutex<BTreeMap<(String, Form), &'static Table>> = Mutex::new(BTreeMap::new());

impl Table {
    /// The table of a formula, which is `text` as it was written.
    pub(super) fn of(text: String, formula: &Nodes, form: Form) -> &'static Table {
        let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        let make = |(_, form): &(String, Form)| Box::leak(Box::new(Table::made(formula, form)));
        let key = (text, form);
        let table = tables.get(&key).copied();
        table.unwrap_or_else(|| {
            let made: &'static Table = make(&key);
            tables.insert(key, made);
            made
        })
    }

    fn made(formula: &Nodes, form: &Form) -> Table {
        let is_scalar = scalars(formula, &form.tensors);
        let mut made = Making { formula, form, is_scalar, cuts: BTreeMap::new() };
        let mut outputs = made.outputs();
        // A node that is nothing but an input is one, whoever else has it.
        for (name, node) in &outputs {
            if !formula.nodes[*node].takes().is_empty() {
                made.cuts.entry(*node).or_insert(*name);
            }
        }
        outputs.sort_by_key(|(_, node)| *node);
        let mut stages = Vec::new();
        let mut plans = Vec::new();
        let mut add = |name: &'static str, what, root, words| {
            let (plan, inputs) = made.plan(what, root, name);
            stages.push(Stage {
                name,
                shape: Shape::Plane,
                reduction: Reduction::Each,
                side: Side::Forward,
                inputs: inputs.leak(),
                words,
            });
            plans.push(plan);
        };
        for (name, node) in outputs {
            add(name, What::Node, node, "a tensor of the state");
        }
        add("update", What::Update, formula.param, "what is added to the parameter");
        let after = if form.has_update { What::Sum } else { What::After };
        add("after", after, formula.param, "the parameter after the step");
        let (inputs, names) = (made.inputs(), made.names());
        let told: BTreeSet<usize> = formula.state.values().copied().collect();
        let is_told = |at: usize| {
            told.contains(&at) && made.is_scalar[at] && !formula.nodes[at].takes().is_empty()
        };
        let is_told = (0..formula.nodes.len()).map(is_told).collect();
        Table {
            is_told,
            formula: formula.clone(),
            names,
            inputs: inputs.leak(),
            stages: stages.leak(),
            plans,
            is_scalar: made.is_scalar,
        }
    }
}

/// By node, whether it is one number for all elements.
fn scalars(formula: &Nodes, tensors: &BTreeSet<String>) -> Vec<bool> {
    let mut is_scalar: Vec<bool> = Vec::with_capacity(formula.nodes.len());
    for node in &formula.nodes {
        is_scalar.push(match node {
            Node::Grad | Node::Param => false,
            Node::State(name) => !tensors.contains(name),
            _ => node.takes().iter().all(|at| is_scalar[*at]),
        });
    }
    is_scalar
}

/// A name that lives as long as the process.
fn kept(name: &str) -> &'static str {
    static KEPT: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.get(name) {
        return known;
    }
    let new: &'static str = name.to_string().leak();
    all.insert(new);
    new
}

/// The name of a tensor of the state after the step, or before it.
fn name_of(state: &str, is_before: bool) -> &'static str {
    let part = if is_before { "state_before" } else { "state_after" };
    kept(&format!("{part}.{state}"))
}

/// The name of a hyper-parameter.
fn hyper_name(declared: &str) -> &'static str {
    match declared {
        own if OWN.contains(&own) || own.starts_with("state_") => kept(&format!("hyper.{own}")),
        other => kept(other),
    }
}

/// A table that is made.
struct Making<'a> {
    formula: &'a Nodes,
    form: &'a Form,
    is_scalar: Vec<bool>,
    /// The stages that nodes are.
    cuts: BTreeMap<usize, &'static str>,
}

impl Making<'_> {
    /// The tensors of the state after the step, each with its node. One that is taken and not given
    /// stays as it is.
    fn outputs(&self) -> Vec<(&'static str, usize)> {
        let formula = self.formula;
        let node = |name: &String| {
            let taken = || formula.nodes.iter().position(|own| *own == Node::State(name.clone()));
            Some((name_of(name, false), formula.state.get(name).copied().or_else(taken)?))
        };
        self.form.tensors.iter().filter_map(node).collect()
    }

    fn names(&self) -> Names {
        let leaked = |name: &str| -> &'static [&'static str] { vec![kept(name)].leak() };
        let tensors = self
            .form
            .tensors
            .iter()
            .filter(|name| self.formula.states().any(|state| state == name.as_str()));
        let states = tensors.map(|name| State {
            after: name_of(name, false),
            before: name_of(name, true),
            recorded: leaked(name),
        });
        let rows = self
            .hypers()
            .into_iter()
            .map(|name| -> HyperName { (hyper_name(name), leaked(name), f64::NAN) });
        Names {
            words: kept(&format!("the declared formula of {}", self.form.optimizer)),
            source: "the job",
            counts_steps: false,
            switches: &[],
            wholes: &[],
            states: states.collect::<Vec<_>>().leak(),
            hyper: rows.collect::<Vec<_>>().leak(),
        }
    }

    fn hypers<'s>(&'s self) -> BTreeSet<&'s str> {
        let hyper = |node: &'s Node| match node {
            Node::Hyper(name) => Some(name.as_str()),
            _ => None,
        };
        self.formula.nodes.iter().filter_map(hyper).collect()
    }

    fn inputs(&self) -> Vec<Tensor> {
        let input = |name, shape, words| Tensor { name, shape, words };
        let mut inputs = vec![
            input("grad", Shape::Plane, "the gradient that the optimizer takes"),
            input("before", Shape::Plane, "the parameter before the step"),
        ];
        let states = self.form.tensors.iter();
        let state = |name: &String| name_of(name, true);
        inputs.extend(states.map(|name| input(state(name), Shape::Plane, "a tensor of the state")));
        let hypers = self.hypers().into_iter();
        let hyper = |name| input(hyper_name(name), Shape::Rows, "a hyper-parameter");
        inputs.extend(hypers.map(hyper));
        inputs
    }

    /// The input that a node is, where it is one of a table; `own` is the stage that asks.
    fn input(&self, node: usize, own: &str) -> Option<&'static str> {
        match &self.formula.nodes[node] {
            Node::Grad => Some("grad"),
            Node::Param => Some("before"),
            Node::State(name) if !self.is_scalar[node] => Some(name_of(name, true)),
            Node::Hyper(name) => Some(hyper_name(name)),
            _ => self.cuts.get(&node).copied().filter(|stage| *stage != own),
        }
    }

    fn plan(&self, what: What, root: usize, own: &str) -> (Plan, Vec<&'static str>) {
        // Every stage takes the parameter: of it the walker reads how many elements there are.
        let (mut inputs, mut given) = (vec!["before"], vec![None]);
        let (mut order, mut waiting) = (BTreeSet::new(), vec![root]);
        if what == What::Sum {
            inputs.push("update");
            given.push(None);
            waiting.clear();
        }
        let mut seen = BTreeSet::new();
        while let Some(node) = waiting.pop() {
            if !seen.insert(node) {
                continue;
            }
            match self.input(node, own) {
                Some("before") if given[0].is_none() => given[0] = Some(node),
                Some(name) => {
                    inputs.push(name);
                    given.push(Some(node));
                }
                None => {
                    order.insert(node);
                    waiting.extend(self.formula.nodes[node].takes());
                }
            }
        }
        let order: Vec<usize> = order.into_iter().collect();
        let is_alike = self.alike(&given, &order);
        let is_stage = |name: &&&str| self.cuts.values().any(|stage| stage == *name);
        let stages = inputs.iter().filter(is_stage).count() + usize::from(what == What::Sum);
        let shared = self.shared(&order, &is_alike, stages);
        let is_number = |node: &&usize| self.is_scalar[**node];
        let numbers = given.iter().flatten().filter(is_number).count();
        let has_parameter = self.having_parameter(&order);
        let is_wide = self.wide(own);
        (
            Plan { what, root, given, order, is_alike, is_wide, has_parameter, shared, numbers },
            inputs,
        )
    }

    /// By node, whether a tensor of many bits is in it; of no node where the stage is of few bits.
    fn wide(&self, stage: &str) -> Vec<bool> {
        let wide = &self.form.wide;
        let is_stage_wide = wide.iter().any(|name| name_of(name, false) == stage);
        let mut is_wide: Vec<bool> = Vec::with_capacity(self.formula.nodes.len());
        for node in &self.formula.nodes {
            is_wide.push(match node {
                Node::State(name) => is_stage_wide && wide.contains(name),
                _ => node.takes().iter().any(|at| is_wide[*at]),
            });
        }
        is_wide
    }

    /// By node, whether the parameter is an addend of it, in a stage that is made of these nodes.
    fn having_parameter(&self, order: &[usize]) -> Vec<bool> {
        let nodes = &self.formula.nodes;
        let mut has: Vec<bool> = nodes.iter().map(|node| *node == Node::Param).collect();
        for node in order {
            has[*node] = match nodes[*node] {
                Node::Two(Two::Add, a, b) => has[a] || has[b],
                Node::Two(Two::Sub, a, _) => has[a],
                Node::Two(Two::Mul, a, b) if self.is_scalar[b] => has[a],
                Node::Two(Two::Mul, a, b) if self.is_scalar[a] => has[b],
                _ => false,
            };
        }
        has
    }

    /// By node, whether it is made of one tensor.
    fn alike(&self, given: &[Option<usize>], order: &[usize]) -> Vec<bool> {
        let mut of: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.formula.nodes.len()];
        for node in given.iter().flatten().filter(|node| !self.is_scalar[**node]) {
            of[*node].insert(*node);
        }
        for node in order {
            let taken = self.formula.nodes[*node].takes();
            of[*node] = taken.iter().flat_map(|at| of[*at].clone()).collect();
        }
        of.iter().map(|tensors| tensors.len() <= 1).collect()
    }

    /// How many roundings of a stage all elements may share at most, as `evaluate` marks them.
    fn shared(&self, order: &[usize], is_alike: &[bool], stages: usize) -> [usize; 2] {
        let mut numbers = BTreeSet::new();
        let mut steps = 0;
        for node in order.iter().filter(|node| !self.is_scalar[**node]) {
            let own = &self.formula.nodes[*node];
            let scalars: Vec<usize> =
                own.takes().into_iter().filter(|at| self.is_scalar[*at]).collect();
            steps += match own {
                Node::Two(Two::Larger | Two::Smaller, ..) | Node::Where { .. } => 0,
                Node::One(One::Neg | One::Abs | One::Sign, _) => 0,
                Node::Two(two, ..) => {
                    let is_shared = !scalars.is_empty() || *two == Two::Div || is_alike[*node];
                    usize::from(is_shared)
                }
                _ => 1,
            };
            numbers.extend(scalars);
        }
        // Stages that were not recorded have an error that all elements share; and so have what is
        // left of a parameter that is multiplied, and what decays of it.
        let few = numbers.len() + stages + 2;
        [few, few + steps]
    }
}
