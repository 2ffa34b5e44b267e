//! The plausible members of the declared policy: which emulations make up the floor.

use crate::head::Roundings;
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;

/// One plausible policy and what it is called.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) policy: Policy,
}

/// Every rounding point that the job leaves open adds one member to those before
/// it: what all members share, then the next point rounded as well. A declared
/// policy is its only member. Output rounding is applied to each captured tensor
/// by its own dtype.
pub(super) fn members(roundings: &Roundings) -> Vec<Member> {
    let (wide, mut policy) = (roundings.widest, roundings.narrowest);
    if roundings.declared {
        return vec![Member { name: "the declared policy".into(), policy }];
    }
    let mut found = vec![Member { name: "nothing rounded before the output".into(), policy }];
    let mut rounded: Vec<&str> = Vec::new();
    let fused = policy.path == Path::Fused;
    type Point = fn(&mut Policy) -> &mut Precision;
    // p and g p are one rounding of nearly the same number: a member has one of them.
    let dlogits_open = wide.dlogits != policy.dlogits;
    let points: [(&str, bool, Point); 6] = [
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
            found.push(Member { name: format!("{} rounded", rounded.join(", ")), policy });
        }
    }
    found
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
