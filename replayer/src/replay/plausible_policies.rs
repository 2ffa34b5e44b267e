//! The plausible members of the declared policy: which emulations make up the floor.

use crate::head::Roundings;
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;

/// One plausible policy and what it is called.
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) policy: Policy,
}

/// Every rounding point that the job leaves open adds one member to those before
/// it: what all members share, then the next point rounded as well. A declared
/// policy is its only member. Output rounding is applied to each captured tensor
/// by its own dtype.
pub(crate) fn members(roundings: &Roundings) -> Vec<Member> {
    let (wide, mut policy) = (roundings.widest, roundings.narrowest);
    if roundings.declared {
        return vec![Member { name: "the declared policy".into(), policy }];
    }
    let mut members = vec![Member { name: "nothing rounded before the output".into(), policy }];
    let mut rounded: Vec<&str> = Vec::new();
    let fused = policy.path == Path::Fused;
    type Point = fn(&mut Policy) -> &mut Precision;
    // p and g p are one rounding of nearly the same number: a member has one of them.
    let dlogits_open = wide.dlogits != policy.dlogits;
    let points: [(&str, bool, Point); 7] = [
        ("operands", true, |policy| &mut policy.input),
        (if fused { "g p" } else { "dlogits" }, true, |policy| &mut policy.dlogits),
        ("g q", fused, |policy| &mut policy.label_grad),
        ("parts", fused, |policy| &mut policy.parts),
        ("p", !dlogits_open, |policy| &mut policy.p),
        ("output", true, |policy| &mut policy.output),
        ("logits", true, |policy| &mut policy.logits),
    ];
    for (name, there, point) in points {
        let mut widest = wide;
        let (from, to) = (*point(&mut policy), *point(&mut widest));
        if there && to.unit_roundoff() > from.unit_roundoff() {
            *point(&mut policy) = to;
            rounded.push(name);
            members.push(Member { name: format!("{} rounded", rounded.join(", ")), policy });
        }
    }
    members
}

/// A point at which a job may round.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    name: &'static str,
    precision_of: fn(&mut Policy) -> &mut Precision,
}

/// All of them, in the order of the computation.
const POINTS: [Point; 7] = [
    Point { name: "input", precision_of: |policy| &mut policy.input },
    Point { name: "logits", precision_of: |policy| &mut policy.logits },
    Point { name: "p", precision_of: |policy| &mut policy.p },
    Point { name: "dlogits", precision_of: |policy| &mut policy.dlogits },
    Point { name: "label_grad", precision_of: |policy| &mut policy.label_grad },
    Point { name: "parts", precision_of: |policy| &mut policy.parts },
    Point { name: "output", precision_of: |policy| &mut policy.output },
];

impl Point {
    fn in_policy(self, mut policy: Policy) -> Precision {
        *(self.precision_of)(&mut policy)
    }

    /// The policy with the other rounding at this point.
    pub(crate) fn switched(self, mut policy: Policy, roundings: &Roundings) -> Policy {
        let [wide, narrow] =
            [roundings.widest, roundings.narrowest].map(|policy| self.in_policy(policy));
        let point = (self.precision_of)(&mut policy);
        *point = if *point == wide { narrow } else { wide };
        policy
    }
}

/// The points that the job leaves open.
pub(crate) fn points(roundings: &Roundings) -> Vec<Point> {
    let open =
        |point: &Point| point.in_policy(roundings.widest) != point.in_policy(roundings.narrowest);
    POINTS.into_iter().filter(|point| !roundings.declared && open(point)).collect()
}

/// Their names in a declaration.
pub(crate) fn open(roundings: &Roundings) -> Vec<&'static str> {
    points(roundings).into_iter().map(|point| point.name).collect()
}

/// A policy with the open points of another, where it has the narrowest.
pub(crate) fn joined(policy: Policy, with: Policy, roundings: &Roundings) -> Policy {
    points(roundings).into_iter().fold(policy, |mut joined, point| {
        if point.in_policy(joined) == point.in_policy(roundings.narrowest) {
            *(point.precision_of)(&mut joined) = point.in_policy(with);
        }
        joined
    })
}

/// Whether a policy rounds something to fewer bits than the job leaves open.
pub(crate) fn contradicts(policy: &Policy, roundings: &Roundings) -> bool {
    let bits = |point: &Point, policy| point.in_policy(policy).unit_roundoff();
    POINTS.iter().any(|point| bits(point, *policy) > bits(point, roundings.widest))
}

/// Every plausible policy: each point that the job leaves open, rounded or not.
pub(crate) fn all(roundings: &Roundings) -> Vec<Policy> {
    points(roundings).into_iter().fold(vec![roundings.narrowest], |mut policies, point| {
        let other: Vec<Policy> =
            policies.iter().map(|&policy| point.switched(policy, roundings)).collect();
        policies.extend(other);
        policies
    })
}

/// The open points that a policy rounds, with the format; empty for none.
pub(crate) fn rounded(policy: &Policy, roundings: &Roundings) -> String {
    let rounds = |point: &Point| point.in_policy(*policy) != point.in_policy(roundings.narrowest);
    let words = |point: Point| format!("{} to {}", point.name, point.in_policy(*policy).name());
    let all = points(roundings).into_iter().filter(rounds).map(words);
    all.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::HeadOptions;
    use backtape::dtype::Dtype;
    use backtape::head::HeadDeclaration;

    fn names(head: &HeadDeclaration) -> Vec<String> {
        let options = HeadOptions::new(head).unwrap();
        let roundings = Roundings::plausible(&options, Dtype::Bf16).unwrap();
        members(&roundings).into_iter().map(|member| member.name).collect()
    }

    #[test]
    fn what_the_job_declares_leaves_fewer_members() {
        let mut head = HeadDeclaration::default();
        assert_eq!(names(&head).len(), 6);
        head.dtypes.insert("logits".into(), "f32".into());
        assert_eq!(names(&head).len(), 5);
        head.dtypes.insert("dlogits".into(), "f32".into());
        assert!(names(&head)[3].contains("p rounded") || names(&head).len() == 5);
    }

    #[test]
    fn a_declared_policy_is_its_only_member() {
        let policy = Some(backtape::head::PolicyDeclaration::default());
        let head = HeadDeclaration { policy, ..HeadDeclaration::default() };
        assert_eq!(names(&head), ["the declared policy"]);
    }
}
