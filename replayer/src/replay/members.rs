//! The plausible members of the declared policy: which emulations make up the floor.

use crate::head::Roundings;
use crate::head::roundings::{F32, precision};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;

/// One plausible policy and what it is called.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) policy: Policy,
}

/// Every rounding point adds one member to those before it: what all members
/// share, then the next point rounded as well. Output rounding is applied to
/// each captured tensor by its own dtype.
pub(super) fn members(roundings: &Roundings, plain: bool) -> Vec<Member> {
    let mut policy = if plain { Policy::plain_f32() } else { Policy::fused_f32() };
    policy.path = if plain { Path::Plain } else { Path::Fused };
    policy.input = precision(roundings.input);
    policy.sums.label_scatter.precision = precision(roundings.label_scatter);
    policy.output = Precision::F32;
    let mut found = vec![Member { name: "nothing rounded before the output".into(), policy }];
    let mut add = |unit: f64, what: &str, set: &dyn Fn(&mut Policy, Precision)| {
        if unit > F32 {
            let before = &found[found.len() - 1];
            let mut policy = before.policy;
            set(&mut policy, precision(unit));
            let name = match found.len() {
                1 => format!("{what} rounded"),
                _ => format!("{}, {what} rounded", before.name.trim_end_matches(" rounded")),
            };
            found.push(Member { name, policy });
        }
    };
    add(roundings.dlogits, if plain { "dlogits" } else { "g p" }, &|p, to| p.dlogits = to);
    if !plain {
        add(roundings.label_grad, "g q", &|p, to| p.label_grad = to);
        add(roundings.parts, "parts", &|p, to| p.parts = to);
    }
    add(roundings.logits, "logits", &|p, to| p.logits = to);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::HeadOptions;
    use backtape::dtype::Dtype;
    use backtape::head::HeadDeclaration;

    #[test]
    fn what_the_job_declares_leaves_fewer_members() {
        let mut head = HeadDeclaration::default();
        let count = |head: &HeadDeclaration| {
            let options = HeadOptions::new(head).unwrap();
            members(&Roundings::plausible(&options, Dtype::Bf16), false).len()
        };
        assert_eq!(count(&head), 5);
        head.dtypes.insert("logits".into(), "f32".into());
        assert_eq!(count(&head), 4);
    }
}
