//! A declared formula as it is read: operations, each of numbers that were made before it
//! (docs/step-format.md).

use std::collections::BTreeMap;

use serde_json::Value;

use crate::algebra::declaration::number_of;

/// Operations that a formula may have.
pub(crate) const MOST_NODES: usize = 512;

/// A formula as the job declares it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Nodes {
    /// Each takes earlier ones alone.
    pub nodes: Vec<Node>,
    /// The parameter after the step.
    pub param: usize,
    /// What the step changes of the state, by name.
    pub state: BTreeMap<String, usize>,
}

/// A number of a formula.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Node {
    /// The gradient that the optimizer takes.
    Grad,
    /// The parameter before the step.
    Param,
    /// A tensor or a number of the state before the step.
    State(String),
    /// A hyper-parameter.
    Hyper(String),
    Number(f64),
    Two(Two, usize, usize),
    One(One, usize),
    /// The first to the power of the second, which is one number for all elements.
    Power(usize, usize),
    /// The third where the first is above the second, or with `is_from` where it is not below it;
    /// else the fourth.
    Where {
        is_from: bool,
        of: [usize; 4],
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Two {
    Add,
    Sub,
    Mul,
    Div,
    Larger,
    Smaller,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum One {
    Neg,
    Sqrt,
    Abs,
    Sign,
    Exp,
    Log,
    Tanh,
}

/// The names of operations on two numbers.
const TWO: [(&str, Two); 6] = [
    ("add", Two::Add),
    ("sub", Two::Sub),
    ("mul", Two::Mul),
    ("div", Two::Div),
    ("maximum", Two::Larger),
    ("minimum", Two::Smaller),
];

/// The names of operations on one.
const ONE: [(&str, One); 7] = [
    ("neg", One::Neg),
    ("sqrt", One::Sqrt),
    ("abs", One::Abs),
    ("sign", One::Sign),
    ("exp", One::Exp),
    ("log", One::Log),
    ("tanh", One::Tanh),
];

impl Nodes {
    /// Reads a formula; or says what is wrong with it.
    pub(crate) fn read(value: &Value) -> Result<Nodes, String> {
        let listed =
            value.get("nodes").and_then(Value::as_array).ok_or("it has no list \"nodes\"")?;
        if listed.len() > MOST_NODES {
            return Err(format!(
                "it does {} operations, and at most {MOST_NODES} are read",
                listed.len()
            ));
        }
        let node = |(at, node): (usize, &Value)| {
            Node::read(node, at)
                .ok_or_else(|| format!("its node {at} is none that is known: {node}"))
        };
        let nodes = listed.iter().enumerate().map(node).collect::<Result<Vec<Node>, String>>()?;
        let place = |value: Option<&Value>, what: &str| {
            let at = value.and_then(Value::as_u64).map(|at| at as usize);
            at.filter(|at| *at < nodes.len())
                .ok_or_else(|| format!("its {what:?} is the number of none of its nodes"))
        };
        let param = place(value.get("param"), "param")?;
        let empty = serde_json::Map::new();
        let state = value.get("state").and_then(Value::as_object).unwrap_or(&empty);
        let state = state.iter().map(|(name, at)| Ok((name.clone(), place(Some(at), name)?)));
        let state = state.collect::<Result<BTreeMap<_, _>, String>>()?;
        Ok(Nodes { nodes, param, state })
    }

    /// The names of the state that it takes or changes.
    pub(crate) fn states(&self) -> impl Iterator<Item = &str> {
        let taken = self.nodes.iter().filter_map(|node| match node {
            Node::State(name) => Some(name.as_str()),
            _ => None,
        });
        taken.chain(self.state.keys().map(String::as_str))
    }
}

impl Node {
    /// A node of a list, the one at `at`; `None` where it is none.
    fn read(value: &Value, at: usize) -> Option<Node> {
        let (name, rest) = value.as_array()?.split_first()?;
        let name = name.as_str()?;
        let of = |index: usize| {
            let of = rest.get(index)?.as_u64()? as usize;
            (of < at).then_some(of)
        };
        let text = || Some(rest.first()?.as_str()?.to_string());
        let two = TWO.iter().find(|(own, _)| *own == name);
        let one = ONE.iter().find(|(own, _)| *own == name);
        let (node, taken) = match (name, two, one) {
            (_, Some((_, two)), _) => (Node::Two(*two, of(0)?, of(1)?), 2),
            (_, _, Some((_, one))) => (Node::One(*one, of(0)?), 1),
            ("grad", ..) => (Node::Grad, 0),
            ("param", ..) => (Node::Param, 0),
            ("state", ..) => (Node::State(text()?), 1),
            ("hyper", ..) => (Node::Hyper(text()?), 1),
            ("number", ..) => (Node::Number(number_of(rest.first()?)?), 1),
            ("pow", ..) => (Node::Power(of(0)?, of(1)?), 2),
            ("where_above" | "where_from", ..) => {
                let of = [of(0)?, of(1)?, of(2)?, of(3)?];
                (Node::Where { is_from: name == "where_from", of }, 4)
            }
            _ => return None,
        };
        (rest.len() == taken).then_some(node)
    }

    /// The numbers that it is made of.
    pub(super) fn takes(&self) -> Vec<usize> {
        match self {
            Node::Two(_, a, b) | Node::Power(a, b) => vec![*a, *b],
            Node::One(_, a) => vec![*a],
            Node::Where { of, .. } => of.to_vec(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_formula_of_the_docs_is_read() {
        let page = include_str!("../../../../../docs/step-format.md");
        let (_, text) = page.split_once("    {\"function\"").expect("the page shows a rule");
        let text = text.split_once("\n\n").expect("text follows it").0;
        let plain = |line: &str| line.split("//").next().unwrap_or_default().to_string();
        let text: String = text.lines().map(plain).collect();
        let rule: Value = serde_json::from_str(&format!("{{\"function\"{text}")).unwrap();
        let formula = Nodes::read(&rule["formulas"][0]).unwrap();
        assert_eq!(formula.nodes[formula.param], Node::Two(Two::Sub, 0, 11));
        for name in ONE.iter().map(|(name, _)| name).chain(TWO.iter().map(|(name, _)| name)) {
            assert!(page.contains(&format!("`{name}`")), "the page has {name}");
        }
    }

    #[test]
    fn what_is_no_formula_is_refused_by_name() {
        let told = |value: Value| Nodes::read(&value).unwrap_err();
        assert!(told(json!({})).contains("no list"));
        let of = |nodes: Value| json!({"nodes": nodes, "param": 0});
        for node in [
            json!(["add", 0, 1]), // itself, and one after it
            json!(["add", 0]),
            json!(["sqrt", -1]),
            json!(["sqrt", 0, 0]),
            json!(["softmax", 0]),
            json!(["state"]),
            json!(["number", "x"]),
            json!([]),
            json!(7),
        ] {
            let told = told(of(json!([["grad"], node])));
            assert!(told.contains("node 1"), "{told}");
        }
        let many = vec![json!(["grad"]); MOST_NODES + 1];
        assert!(told(of(many.into())).contains("513 operations, and at most 512"));
        assert!(told(json!({"nodes": [["grad"]], "param": 1})).contains("\"param\""));
        let state = json!({"nodes": [["grad"]], "param": 0, "state": {"m": -1}});
        assert!(told(state).contains("\"m\""));
        let read = json!({"nodes": [["grad"], ["number", "inf"]], "param": 0, "state": {"m": 1}});
        let read = Nodes::read(&read).unwrap();
        assert_eq!(read.nodes, [Node::Grad, Node::Number(f64::INFINITY)]);
        assert_eq!(read.states().collect::<Vec<_>>(), ["m"]);
    }
}
